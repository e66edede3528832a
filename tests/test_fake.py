# SPDX-License-Identifier: BSD-3-Clause
"""The fake device itself: what it counts, refuses, holds and notices."""

import ctypes
import threading
import time

import pytest

import ucx_memh as um
from _fakes import native
from ucx_memh.core import memh_layout
from ucx_memh.testing import OPERATIONS, memh_pointer, open_fake

GET, PUT, ATOMIC = um.MemFlag.REMOTE_GET, um.MemFlag.REMOTE_PUT, um.MemFlag.REMOTE_ATOMIC
OK, REFUSED = um.Status.OK, um.Status.REMOTE_ACCESS


def test_counts_each_operation(fakes):
    md, fake = fakes(connectionless=True)
    assert tuple(fake.counts) == OPERATIONS
    memh = md.mem_reg(bytearray(64))
    win = memh.derive(8, 8)
    rkey = md.rkey_unpack(win.mkey_pack())
    with md.endpoint() as ep:
        ep.put(rkey, rkey.address, b"12345678")
    counts = {op: n for op, n in fake.counts.items() if n}
    assert counts == {
        "tail_init": 2,
        "mem_reg": 1,
        "mem_derive": 1,
        "key_create": 1,
        "mkey_pack": 1,
        "rkey_unpack": 1,
        "ep_create": 1,
        "ep_destroy": 1,
        "post": 1,
        "transfer": 1,
    }
    assert md.stats()["device.fake_mem_reg"] == fake.count("mem_reg") == 1
    fake.reset_counts()
    assert not any(fake.counts.values())
    with pytest.raises(ValueError, match="no operation"):
        fake.count("register")


def test_fails_on_request(fakes):
    md, fake = fakes()
    fake.fail("mem_reg", um.Status.NO_MEMORY, after=1, count=2, text="table full", errno=12)
    md.mem_reg(bytearray(8))
    for _ in range(2):
        with pytest.raises(um.NoMemoryError, match="table full") as caught:
            md.mem_reg(bytearray(8))
        assert caught.value.errno == 12
    md.mem_reg(bytearray(8))
    fake.fail("mem_reg", um.Status.NO_MEMORY, count=1000)
    fake.clear_faults()
    md.mem_reg(bytearray(8))
    assert fake.count("mem_reg") == 5


def test_the_device_looks_at_every_key(fakes):
    md, fake = fakes()
    data = bytearray(range(64))
    memh = md.mem_reg(data)
    win = memh.derive(16, 16, GET | ATOMIC)
    value, _ = native(win.mkey_pack())
    address = win.address
    assert fake.live_keys[value] == ("derived", address, 16, GET | ATOMIC)
    assert fake.raw_access(value, "get", address, length=16) == (OK, bytes(range(16, 32)))
    assert fake.raw_access(value, "put", address, data=b"x") == (REFUSED, None)
    assert fake.raw_access(value, "get", address - 1, length=1) == (REFUSED, None)
    assert fake.raw_access(value, "get", address + 1, length=16) == (REFUSED, None)
    assert fake.raw_access(value, "get", address, length=1 << 20) == (REFUSED, None)
    assert fake.raw_access(value + 1, "get", address, length=1) == (REFUSED, None)
    at = address + -address % 8
    old = int.from_bytes(data[at - memh.address :][:8], "little")
    assert fake.raw_access(value, "fetch_add", at, operand=5) == (OK, old)
    assert fake.raw_access(value, "compare_swap", at, compare=old + 5, operand=1) == (OK, old + 5)
    assert fake.raw_access(value, "fetch_add", at, operand=0) == (OK, 1)
    assert fake.raw_access(value, "fetch_add", at + 1, operand=0) == (REFUSED, None)
    win.invalidate()
    assert fake.raw_access(value, "get", address, length=1) == (REFUSED, None)
    assert value not in fake.live_keys


def streams(fakes):
    """Two connected devices: the memory of one and a handle and key to it; the other's endpoint,
    Md and fake; and the first one's endpoint, to be kept."""
    md, _ = fakes()
    other, ours = fakes(md_name="fake1", deferred=True)
    one, two = md.endpoint(), other.endpoint()
    one.connect(two.address)
    two.connect(one.address)
    data = bytearray(64)
    win = md.mem_reg(data).derive()
    rkey = other.rkey_unpack(win.mkey_pack())
    return data, win, rkey, two, other, ours, one


def test_deferred_operations_move_in_progress(fakes):
    data, _, rkey, ep, other, ours, _peer = streams(fakes)
    operation = ep.put_nb(rkey, rkey.address, b"later")
    assert not operation.done
    assert data == bytes(64)
    assert ours.in_flight == 1
    assert other.progress() == 1
    assert operation.done
    assert data[:5] == b"later"


def test_a_key_revoked_in_mid_flight(fakes):
    data, win, rkey, ep, _, ours, _peer = streams(fakes)
    ours.hold()
    operation = ep.put_nb(rkey, rkey.address, b"x" * 64)
    assert ours.step(2, 10) == 0
    assert data == b"x" * 20 + bytes(44)
    win.invalidate()
    assert ours.release() == 1
    assert operation.status == REFUSED
    assert operation.bytes_done == 20
    assert data == b"x" * 20 + bytes(44)
    assert ep.state == um.EpState.ERROR


def test_failing_transfers_stop_where_they_should(fakes):
    data, _, rkey, ep, other, ours, _peer = streams(fakes)
    ours.fail("transfer", um.Status.IO_ERROR, bytes_done=7, text="cable cut")
    operation = ep.put_nb(rkey, rkey.address, b"y" * 20)
    other.progress()
    assert operation.bytes_done == 7
    assert data == b"y" * 7 + bytes(57)
    with pytest.raises(um.DeviceError, match="cable cut"):
        operation.wait()
    ours.fail("post", um.Status.NO_MEMORY)
    with pytest.raises(um.NoMemoryError):
        ep.put_nb(rkey, rkey.address, b"z")
    assert ours.in_flight == 0


@pytest.mark.parametrize("destroy", ["now", "progress", "manual"])
def test_destroys_when_it_is_told_to(fakes, destroy):
    md, fake = fakes(destroy=destroy)
    win = md.mem_reg(bytearray(8)).derive()
    value, _ = native(win.mkey_pack())
    seen = []
    win.invalidate(callback=seen.append)
    assert fake.destroying == (destroy != "now")
    assert (value in fake.live_keys) == (destroy != "now")
    if destroy == "manual":
        md.progress()
        assert fake.destroying == 1
        fake.complete(status=um.Status.IO_ERROR)
        assert seen == [um.Status.IO_ERROR]
        assert value in fake.live_keys
        win.invalidate(callback=seen.append)
        assert fake.complete() == 1
        assert seen.pop(0) == um.Status.IO_ERROR
    md.progress()
    assert seen == [OK]
    assert value not in fake.live_keys


def test_gives_the_values_it_is_told_to(fakes):
    md, fake = fakes()
    memh = md.mem_reg(bytearray(8))
    fake.next_values([7, 0xFFFFFFFF])
    values = [native(memh.derive().mkey_pack())[0] for _ in range(3)]
    assert values[:2] == [7, 0xFFFFFFFF]
    assert values[2] not in values[:2]


def test_slow_calls_leave_the_gil_alone(fakes):
    md, fake = fakes()
    fake.slow("mem_reg", 0.2)
    counted = 0
    thread = threading.Thread(target=md.mem_reg, args=(bytearray(8),))
    thread.start()
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        counted += 1
    assert thread.is_alive()
    thread.join()
    assert counted > 1000
    assert fake.gil_held("mem_reg") == 0
    assert fakes(python=True)[0].mem_reg(bytearray(8))


@pytest.mark.parametrize(
    "lie",
    [
        {"without_ops": ["mem_derive"]},
        {"stub_ops": ["mem_derive"]},
        {"flags": um.MdFlag.REG | um.MdFlag.NEED_RKEY},
        {"without_ops": ["ep_post"]},
        {"abi": 0x7FFFFFFF},
        {"rkey_packed_size": 4096},
        {"ops_size": -4096},
    ],
)
def test_liars_are_refused_and_leave_nothing(lie):
    with pytest.raises(um.InvalidParamError):
        open_fake(**lie)


def test_a_newer_table_is_taken_as_far_as_it_is_known(fakes):
    md, _ = fakes(ops_size=64, ep_ops_size=64, attr_size=64)
    md.mem_reg(bytearray(8)).derive().mkey_pack()
    md.endpoint().close()


def test_an_older_table_lacks_its_last_operations(fakes):
    md, fake = fakes(ops_size=-24)
    md.peer_evict(bytes(32))
    assert fake.count("peer_evict") == 0


def test_notices_who_breaks_the_contract():
    md, fake = open_fake(tail_inherit_size=16, tail_own_size=16)
    memh = md.mem_reg(bytearray(8))
    win = memh.derive()
    assert fake.violations == {}
    at, _, _, own_offset, _ = memh_layout(16, 16)  # the inherited tail ends there
    tail = (ctypes.c_uint8 * 16).from_address(memh_pointer(win) - at + own_offset - 16)
    for i in range(16):
        tail[i] ^= 1
    win.mkey_pack()
    assert fake.violations == {"the inherited tail is not what tail_init wrote": 2}
    md.close(force=True)
    assert fake.closed


def test_works_after_the_domain_was_closed(fakes):
    md, fake = fakes()
    md.mem_reg(bytearray(8))
    md.close(force=True)
    assert fake.count("close") == 1
    assert fake.live_keys == {}
    assert fake.raw_access(1, "get", 0, length=1) == (um.Status.PEER_GONE, None)
    assert "closed" in repr(fake)
