# SPDX-License-Identifier: BSD-3-Clause
"""Rule 11: connections, what fails with them and what does not; and the local side of transfers."""

import os
import struct
import sys
import threading

import pytest

import ucx_memh as um
from _fakes import (
    ALL,
    ATOMIC,
    GET,
    LOCAL_READ,
    LOCAL_WRITE,
    PUT,
    RAW,
    RMA,
    flipped,
    native,
    sealed,
)

LIVE, REVOKING, REVOKED, CLOSED = um.MemhState
IDLE, CONNECTED, ERROR = um.EpState


def link(one, two):
    one.connect(two.address)
    two.connect(one.address)


def forged(md, memh):
    """An Rkey that claims more than the key behind it gives: the device has to refuse."""
    return md.rkey_from_raw(memh.mkey_pack(RAW), memh.address, 1 << 20)


# ---- a refused access ----


@pytest.mark.parametrize("op", ["get", "put", "fetch_add", "compare_swap"])
def test_rule11_a_refused_access_moves_both_ends_to_error(fakes, op):
    md, device, one, two = fakes.connected()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    win = base.derive(0, 8)
    beyond = win.address - win.address % 8 + 16
    arguments = {
        "get": (bytearray(8),),
        "put": (b"12345678",),
        "fetch_add": (1,),
        "compare_swap": (0, 1),
    }[op]
    with pytest.raises(um.RemoteAccessError) as raised:
        getattr(one, op)(forged(md, win), beyond, *arguments)
    error = raised.value
    assert (error.op, error.context["address"], error.context["length"]) == (op, beyond, 8)
    assert error.context["bytes_done"] == 0
    assert one.state == two.state == ERROR
    assert memory == bytes(64)
    assert device.count("transfer") == 1


def test_rule11_the_other_operations_are_flushed(fakes):
    md, device, one, two = fakes.connected(deferred=True)
    memory = bytearray(64)
    base = md.mem_reg(memory)
    win = base.derive(0, 8)
    good = md.rkey_unpack(base.mkey_pack())
    before = one.put_nb(good, base.address, b"before")
    refused = one.put_nb(forged(md, win), win.address + 8, b"no")
    after = [one.put_nb(good, base.address + 32, b"after") for _ in range(3)]
    with pytest.raises(um.RemoteAccessError):
        refused.wait()
    before.wait()
    for operation in after:
        with pytest.raises(um.FlushedError):
            operation.wait()
    assert memory == b"before" + bytes(58)
    # And what comes later is not even posted.
    posts = device.count("post")
    for end in (one, two):
        with pytest.raises(um.FlushedError):
            end.put(good, base.address, b"later")
        with pytest.raises(um.FlushedError):
            end.fetch_add_nb(good, base.address - base.address % 8 + 8, 1)
    assert device.count("post") == posts


def test_rule11_other_keys_work_again_after_both_ends_reset(fakes):
    md, _, one, two = fakes.connected()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    stays, goes = base.derive(), base.derive()
    rkey = md.rkey_unpack(stays.mkey_pack())
    dead = md.rkey_unpack(goes.mkey_pack())
    goes.invalidate()
    with pytest.raises(um.RemoteAccessError):
        one.put(dead, goes.address, b"dead")
    old = one.address, two.address
    one.reset()
    assert one.state == IDLE
    with pytest.raises((um.InvalidParamError, um.StaleKeyError)):
        two.connect(old[0])
    two.reset()
    for end, address in [(one, old[1]), (two, old[0])]:
        with pytest.raises((um.InvalidParamError, um.StaleKeyError)):  # of a stale epoch
            end.connect(address)
        assert end.state == IDLE
    link(one, two)
    assert one.state == two.state == CONNECTED
    one.put(rkey, stays.address, b"alive")
    assert memory[:5] == b"alive"
    with pytest.raises(um.RemoteAccessError):
        one.put(dead, goes.address, b"dead")


def test_rule11_other_keys_work_over_a_new_endpoint(fakes):
    md, _, one, two = fakes.connected()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    win = base.derive(0, 8)
    rkey = md.rkey_unpack(base.mkey_pack())
    with pytest.raises(um.RemoteAccessError):
        one.put(forged(md, win), base.address + 8, b"no")
    three, four = md.endpoint(), md.endpoint()
    link(three, four)
    three.put(rkey, base.address, b"yes")
    assert memory[:3] == b"yes"
    assert one.state == two.state == ERROR


def test_rule11_reset_flushes_what_is_under_way(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    device.hold()
    operation = one.put_nb(rkey, base.address, b"x")
    one.reset()
    assert operation.done
    with pytest.raises(um.FlushedError):
        operation.wait()


def test_rule11_between_two_devices(fakes):
    here, _ = fakes()
    there, device = fakes()
    one, two = here.endpoint(), there.endpoint()
    link(one, two)
    memory = bytearray(64)
    base = there.mem_reg(memory)
    win = base.derive(0, 16)
    rkey = here.rkey_unpack(win.mkey_pack())
    one.put(rkey, win.address, b"across")
    assert memory[:6] == b"across"
    win.invalidate()
    with pytest.raises(um.RemoteAccessError):
        one.put(rkey, win.address, b"late")
    assert one.state == two.state == ERROR
    one.reset()
    two.reset()
    link(one, two)
    other = here.rkey_unpack(base.mkey_pack())
    there.close(force=True)
    with pytest.raises((um.PeerGoneError, um.FlushedError)):
        one.get(other, base.address, bytearray(8))
    assert device.closed


def test_rule11_an_error_says_how_many_bytes_were_done(fakes):
    md, device, one, _two = fakes.connected()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    rkey = md.rkey_unpack(base.mkey_pack())
    device.fail(
        "transfer", um.Status.PEER_GONE, bytes_done=5, text="the cable", errno=19, syndrome=7
    )
    with pytest.raises(um.PeerGoneError, match="the cable") as raised:
        one.put(rkey, base.address, b"1234567890")
    context = raised.value.context
    assert (context["bytes_done"], context["syndrome"], raised.value.errno) == (5, 7, 19)
    assert memory == b"12345" + bytes(59)


# ---- the library checks first ----


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 1), (-1, 2), (15, 2), (16, 1), (17, 0), (0, 17), (-16, 16), (2**63, 1), (1000, 8)],
)
@pytest.mark.parametrize("op", ["get", "put"])
def test_rule11_range_is_checked_before_the_device(fakes, op, offset, length):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    win = base.derive(16, 16)
    rkey = md.rkey_unpack(win.mkey_pack())
    with pytest.raises(um.RangeError) as raised:
        getattr(one, op)(rkey, (win.address + offset) % 2**64, bytearray(length))
    assert raised.value.context["length"] == length
    assert device.count("post") == 0
    assert one.state == CONNECTED


@pytest.mark.parametrize("address", [0, 2**64 - 1, 2**64 - 8])
def test_rule11_addresses_that_wrap_around(fakes, address):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    with pytest.raises(um.RangeError):
        one.get(rkey, address, bytearray(16))
    assert device.count("post") == 0


@pytest.mark.parametrize("right", [GET, PUT, ATOMIC], ids=str)
def test_rule11_rights_are_checked_before_the_device(fakes, right):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    win = base.derive(flags=right)
    rkey = md.rkey_unpack(win.mkey_pack())
    address = base.address - base.address % 8 + 8
    calls = {
        GET: lambda: one.get(rkey, address, bytearray(8)),
        PUT: lambda: one.put(rkey, address, bytes(8)),
        ATOMIC: lambda: one.fetch_add(rkey, address, 1),
    }
    for needed, call in calls.items():
        if needed == right:
            call()
        else:
            with pytest.raises(um.AccessError):
                call()
    assert device.count("post") == 1
    assert one.state == CONNECTED


def test_rule11_a_key_packed_for_rma_gives_no_atomics(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack(RMA))
    with pytest.raises(um.AccessError):
        one.fetch_add(rkey, base.address - base.address % 8 + 8, 1)
    assert device.count("post") == 0


def test_rule11_what_is_not_connected_is_refused(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    one = md.endpoint()
    assert one.state == IDLE
    with pytest.raises(um.InvalidParamError, match="not connected"):
        one.put(rkey, base.address, b"x")
    assert device.count("post") == 0


def test_rule11_connect_refuses(fakes):
    md, _, one, two = fakes.connected()
    three = md.endpoint()
    for address in (b"", b"x", one.address[:-1], one.address + b"x", bytes(16)):
        with pytest.raises(um.InvalidParamError):
            three.connect(address)
    for address in (None, 1, "text", object()):
        with pytest.raises(um.InvalidParamError):
            three.connect(address)
    whole = two.address
    for at, match in [
        (0, "not an endpoint"),
        (2, "version"),
        (3, "damaged"),
        (4, "damaged"),
        (8, "another component"),
    ]:
        changed = bytearray(whole)
        changed[at] ^= 0x10
        with pytest.raises(um.InvalidParamError, match=match):
            three.connect(changed)
    gone = two.address
    two.close()
    with pytest.raises(um.UnreachableError):
        three.connect(gone)
    assert three.state == IDLE
    with pytest.raises(um.InvalidParamError):
        one.connect(three.address)  # in error: its peer was closed
    one.reset()
    link(one, three)
    with pytest.raises(um.InvalidParamError):
        one.connect(three.address)  # connected already


def test_rule11_an_rkey_of_another_md_is_refused(fakes):
    md, device, one, _two = fakes.connected()
    other, _ = fakes()
    base = md.mem_reg(bytearray(64))
    rkey = other.rkey_unpack(base.mkey_pack())
    with pytest.raises(um.InvalidParamError):
        one.put(rkey, base.address, b"x")
    closed = md.rkey_unpack(base.mkey_pack())
    closed.close()
    with pytest.raises(um.ClosedError):
        one.put(closed, base.address, b"x")
    with pytest.raises((um.InvalidParamError, TypeError)):
        one.put(None, base.address, b"x")
    for wrong in (b"key", 7, base):
        with pytest.raises(TypeError):
            one.put(wrong, base.address, b"x")
    assert device.count("post") == 0


# ---- revoke notices ----


def test_rule11_a_notice_saves_the_connection(fakes):
    here, device = fakes()
    there, _ = fakes()
    one, two = here.endpoint(), there.endpoint()
    link(one, two)
    base = there.mem_reg(bytearray(64))
    goes, stays = base.derive(), base.derive()
    dead, alive = here.rkey_unpack(goes.mkey_pack()), here.rkey_unpack(stays.mkey_pack())
    goes.invalidate()
    assert here.rkey_revoke(goes.revoke_notice()) == 1
    assert here.rkey_revoke(goes.revoke_notice()) == 0
    for call in (
        lambda: one.put(dead, goes.address, b"x"),
        lambda: one.get(dead, goes.address, bytearray(1)),
        lambda: one.get(dead, goes.address, bytearray()),
        lambda: one.fetch_add(dead, goes.address, 1),
        dead.ptr,
    ):
        with pytest.raises(um.RevokedError):
            call()
    assert device.count("post") == 0
    one.put(alive, stays.address, b"x")
    assert one.state == CONNECTED
    again = here.rkey_unpack(goes.mkey_pack()) if goes.state == LIVE else dead
    assert again.key_id == goes.key_id


@pytest.mark.parametrize("close", ["invalidate", "dereg"])
def test_rule11_who_can_be_told_of(fakes, close):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    with pytest.raises(um.InvalidParamError):
        win.revoke_notice()
    device.fail("key_destroy", um.Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        getattr(win, close)()
    assert win.revoke_notice() == win.revoke_notice()
    getattr(win, close)()
    assert md.rkey_revoke(bytearray(win.revoke_notice())) == 1
    with pytest.raises(um.RevokedError):
        md.rkey_unpack(win.revoke_notice())
    assert rkey.key_id == win.key_id


def test_rule11_a_notice_names_one_key_of_one_owner(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    key = win.mkey_pack()
    rkey = md.rkey_unpack(key)
    win.invalidate()
    notice = win.revoke_notice()
    other_owner = flipped(notice, 64)  # in the pid
    for wrong in (sealed(notice, key_id=win.key_id + 1), sealed(other_owner)):
        assert md.rkey_revoke(wrong) == 0
    assert rkey.ptr()
    assert md.rkey_revoke(notice + b"trailing") == 1


def test_rule11_what_is_no_notice_is_refused(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    key = win.mkey_pack()
    win.invalidate()
    notice = win.revoke_notice()
    for wrong in (b"", key, notice[:-1], flipped(notice, 70)):
        with pytest.raises(um.MalformedKeyError):
            md.rkey_revoke(wrong)
    with pytest.raises(um.KeyVersionError):
        md.rkey_revoke(sealed(notice, version=2))
    for wrong in (None, 3, "notice"):
        with pytest.raises(um.InvalidParamError):
            md.rkey_revoke(wrong)
    assert md.rkey_revoke(notice) == 0  # nothing was unpacked


# ---- closing an endpoint ----


@pytest.mark.parametrize("destroy", ["now", "progress"])
def test_rule11_closing_an_endpoint_revokes_its_handles(fakes, destroy):
    md, device, one, two = fakes.connected(destroy=destroy)
    base = md.mem_reg(bytearray(64))
    loose = base.derive()
    bound = base.derive(endpoint=two)
    leaf = bound.derive(0, 8)
    unpacked = base.derive(endpoint=two)
    elsewhere = base.derive(endpoint=one)
    for memh in (loose, bound, leaf, elsewhere):
        memh.mkey_pack()
    two.close()
    assert [m.state for m in (bound, leaf, unpacked)] == [REVOKED] * 3
    assert [m.state for m in (base, loose, elsewhere)] == [LIVE] * 3
    assert len(device.live_keys) == 3
    with pytest.raises(um.ClosedError):
        base.derive(endpoint=two)


def test_rule11_an_endpoint_whose_handles_resist_stays_open(fakes):
    md, device, one, two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    bound = base.derive(endpoint=two)
    rkey = md.rkey_unpack(bound.mkey_pack())
    device.fail("key_destroy", um.Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        two.close()
    assert (bound.state, two.state) == (REVOKING, CONNECTED)
    one.put(rkey, bound.address, b"still")
    two.close()
    assert bound.state == REVOKED
    assert repr(two) == "<Endpoint closed>"


def test_rule11_closing_flushes_what_is_under_way(fakes):
    md, device, one, two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    device.hold()
    operations = [one.put_nb(rkey, base.address, b"x") for _ in range(3)]
    other = two.put_nb(rkey, base.address, b"y")
    one.close()
    for operation in operations:
        assert operation.done
        with pytest.raises(um.FlushedError):
            operation.wait()
    assert two.state == ERROR
    device.release()
    with pytest.raises(um.FlushedError):
        other.wait()


def test_rule11_a_closed_endpoint_refuses_all_but_a_second_close(fakes):
    md, _, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    with one:
        pass
    one.close()
    for call in (
        lambda: one.address,
        lambda: one.state,
        lambda: one.connect(b"x"),
        one.reset,
        lambda: one.get(rkey, base.address, bytearray(8)),
        lambda: one.put(rkey, base.address, b""),
        lambda: one.fetch_add(rkey, base.address, 1),
        lambda: one.compare_swap_nb(rkey, base.address, 1, 2),
    ):
        with pytest.raises(um.ClosedError):
            call()
    assert repr(one) == "<Endpoint closed>"


# ---- on_error ----


def broken(fakes, **options):
    md, device, one, two = fakes.connected(**options)
    base = md.mem_reg(bytearray(64))
    win = base.derive(0, 8)
    rkey = forged(md, win)
    return md, one, two, rkey, win.address + 16, (base, win, device)


def test_rule11_on_error_by_the_call_that_finds_out(fakes):
    _md, one, _two, rkey, address, _keep = broken(fakes)
    seen = []
    one.on_error = seen.append
    with pytest.raises(um.RemoteAccessError):
        one.put(rkey, address, b"x")
    assert seen == [one]
    with pytest.raises(um.FlushedError):
        one.put(rkey, address, b"x")
    assert seen == [one]
    seen.clear()


def test_rule11_on_error_by_progress_on_the_other_side(fakes):
    md, one, two, rkey, address, _keep = broken(fakes)
    seen = []
    two.on_error = lambda end: seen.append((end is two, threading.get_ident()))
    with pytest.raises(um.RemoteAccessError):
        one.put(rkey, address, b"x")
    assert seen == []
    md.progress()
    md.progress()
    assert seen == [(True, threading.get_ident())]
    two.on_error = None


def test_rule11_on_error_again_after_a_reset(fakes):
    md, one, two, rkey, address, _keep = broken(fakes)
    seen = []
    one.on_error = seen.append
    for n in range(1, 4):
        with pytest.raises(um.RemoteAccessError):
            one.put(rkey, address, b"x")
        md.progress()
        assert len(seen) == n
        one.reset()
        two.reset()
        link(one, two)
    one.on_error = None
    assert one.on_error is None
    with pytest.raises(um.RemoteAccessError):
        one.put(rkey, address, b"x")
    md.progress()
    assert len(seen) == 3


def test_rule11_what_on_error_raises_goes_to_the_unraisablehook(fakes, monkeypatch):
    _md, one, _two, rkey, address, _keep = broken(fakes)
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(repr(args.exc_value)))

    def bad(end):
        raise SystemExit("bad")

    one.on_error = bad
    with pytest.raises(um.RemoteAccessError):
        one.put(rkey, address, b"x")
    assert seen == ["SystemExit('bad')"]


def test_rule11_on_error_must_be_callable(fakes):
    md, _, one, _two = fakes.connected()
    for wrong in (1, "text", b""):
        with pytest.raises(um.InvalidParamError):
            one.on_error = wrong
    assert one.on_error is None
    md.progress()


def test_rule11_on_error_may_reset_and_close(fakes):
    md, one, two, rkey, address, _keep = broken(fakes)
    two.on_error = lambda end: end.close()
    one.on_error = lambda end: end.reset()
    with pytest.raises(um.RemoteAccessError):
        one.put(rkey, address, b"x")
    assert one.state == IDLE
    md.progress()
    assert repr(two) == "<Endpoint closed>"
    one.on_error = None


# ---- the local side ----


def test_local_side_of_a_memory_handle(fakes):
    md, device, one, _two = fakes.connected(need_memh=True)
    memory, local = bytearray(64), bytearray(range(64))
    base, source = md.mem_reg(memory), md.mem_reg(local)
    rkey = md.rkey_unpack(base.mkey_pack())
    one.put(rkey, base.address, source)
    assert memory == local
    window = source.derive(8, 8)
    one.put(rkey, base.address, window)
    assert memory[:8] == local[8:16]
    one.get(rkey, base.address + 32, window)
    assert local[8:16] == bytes(range(32, 40))
    assert device.count("mem_reg") == 2


def test_local_side_must_allow_it(fakes):
    md, device, one, _two = fakes.connected()
    other, _ = fakes()
    base = md.mem_reg(bytearray(8))
    rkey = md.rkey_unpack(base.mkey_pack())
    reads, writes = md.mem_reg(bytearray(8), LOCAL_READ), md.mem_reg(bytearray(8), LOCAL_WRITE)
    one.put(rkey, base.address, reads)
    one.get(rkey, base.address, writes)
    with pytest.raises(um.AccessError):
        one.get(rkey, base.address, reads)
    with pytest.raises(um.AccessError):
        one.put(rkey, base.address, writes)
    with pytest.raises(um.AccessError):
        one.get(rkey, base.address, b"read-only")
    with pytest.raises(um.InvalidParamError):
        one.put(rkey, base.address, other.mem_reg(bytearray(8)))
    window = base.derive()
    window.invalidate()
    with pytest.raises(um.RevokedError):
        one.put(rkey, base.address, window)
    reads.dereg()
    with pytest.raises(um.ClosedError):
        one.put(rkey, base.address, reads)
    for wrong in (None, 3, "text", [1], memoryview(bytes(8))[::2]):
        with pytest.raises(um.InvalidParamError):
            one.put(rkey, base.address, wrong)
    assert device.count("post") == 2


@pytest.mark.parametrize("op", ["get", "put"])
def test_a_plain_buffer_is_registered_for_the_transfer_alone(fakes, op):
    md, device, one, _two = fakes.connected(need_memh=True, bounce_size=16, deferred=True)
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    for length, registrations in [(0, 0), (1, 0), (16, 0), (17, 1), (64, 1)]:
        device.reset_counts()
        operation = getattr(one, f"{op}_nb")(rkey, base.address, bytearray(length))
        assert device.count("mem_reg") == registrations
        operation.wait()
        assert device.count("mem_dereg") == registrations
    assert md.stats()["live_bases"] == 1
    one.put(rkey, base.address, bytes(32))  # read-only memory is enough for a put


def test_a_borrowed_registration_that_fails(fakes):
    md, device, one, _two = fakes.connected(need_memh=True)
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    local = bytearray(64)
    device.fail("mem_reg", um.Status.NO_MEMORY, text="locked")
    with pytest.raises(um.NoMemoryError, match="locked"):
        one.put(rkey, base.address, local)
    device.fail("post", um.Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        one.put(rkey, base.address, local)
    local.append(0)
    assert md.stats()["live_bases"] == 1
    assert device.count("post") == 1


def test_a_borrowed_registration_keeps_to_the_domains_limits(fakes):
    md, device, one, _two = fakes.connected(need_memh=True, max_reg=64)
    memory = bytearray(256)
    bases = [md.mem_reg(memoryview(memory)[i : i + 64]) for i in range(0, 256, 64)]
    rkey = md.rkey_from_raw(bases[0].mkey_pack(RAW), bases[0].address, 256)
    with pytest.raises(um.InvalidParamError) as raised:
        one.put(rkey, bases[0].address, bytes(128))
    assert raised.value.status == um.Status.EXCEEDS_LIMIT
    assert device.count("post") == 0


def test_a_borrowed_registration_is_retried_with_the_queue(fakes):
    md, device, one, _two = fakes.connected(need_memh=True)
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    device.fail("post", um.Status.NO_RESOURCE, count=5)
    one.put(rkey, base.address, bytes(64))
    assert device.count("mem_reg") == device.count("mem_dereg") + 1 == 2


def test_an_access_of_no_bytes_needs_no_device(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    win = base.derive(0, 8, GET)
    rkey = md.rkey_unpack(win.mkey_pack())
    one.get(rkey, win.address, bytearray())
    one.get(rkey, win.address + 8, bytearray())
    with pytest.raises(um.AccessError):
        one.put(rkey, win.address, b"")
    with pytest.raises(um.RangeError):
        one.get(rkey, win.address + 9, bytearray())
    assert device.count("post") == 0


def test_an_operation_speaks_for_itself(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    device.hold()
    operation = one.put_nb(rkey, base.address, b"abc")
    assert repr(operation) == "<Operation put INPROGRESS>"
    device.release()
    assert repr(operation) == "<Operation put OK>"
    assert operation.bytes_done == 3
    assert md.stats()["transfers"] == 1
    assert base.grant == ALL
    assert native(base.mkey_pack())[0] in device.live_keys


def owned_by(address, pid):
    """That endpoint's address, as another process of that pid would tell it."""
    changed = bytearray(address)
    struct.pack_into("<I", changed, 16 + 16, pid)  # the owner begins at 16
    return bytes(changed)


def test_rule11_a_key_of_another_process_than_the_peer_is_refused(fakes):
    """Of one that died, say: its successor's device may have given the same native value again."""
    md, device = fakes()
    one, two = md.endpoint(), md.endpoint()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    raw = md.rkey_from_raw(base.mkey_pack(RAW), base.address, 64)
    one.connect(owned_by(two.address, os.getpid() + 1))
    two.connect(one.address)
    with pytest.raises(um.StaleKeyError, match="not the process"):
        one.put(rkey, base.address, b"x")
    assert device.count("post") == 0
    one.put(raw, base.address, b"x")  # whose owner nobody was told
    one.reset()
    two.reset()
    one.connect(owned_by(two.address, 0))  # not told either
    two.connect(one.address)
    one.put(rkey, base.address, b"x")
    one.reset()
    two.reset()
    link(one, two)
    one.put(rkey, base.address, b"x")
    assert one.state == CONNECTED
