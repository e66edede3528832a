# SPDX-License-Identifier: BSD-3-Clause
"""Rules 6, 7 and 12: when things are done, who is told, in which thread, and what then holds."""

import gc
import os
import select
import signal
import sys
import threading
import weakref

import pytest

import ucx_memh as um
from _fakes import AMO, GET, RMA, native

OK, IO_ERROR = um.Status.OK, um.Status.IO_ERROR
LIVE, REVOKING, REVOKED, CLOSED = um.MemhState
REMOTE_ACCESS = um.Status.REMOTE_ACCESS


def packed(md, **options):
    base = md.mem_reg(bytearray(64))
    win = base.derive(**options)
    win.mkey_pack()
    return base, win


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupt():
    """`interrupt(handler, when)`: like a Ctrl-C in the main thread as soon as `when()` is true."""
    before = signal.getsignal(signal.SIGUSR1)
    main = threading.main_thread().ident
    threads = []
    ended = threading.Event()

    def send(when):
        while not when():
            if ended.wait(0.001):
                return
        signal.pthread_kill(main, signal.SIGUSR1)

    def start(handler, when):
        signal.signal(signal.SIGUSR1, lambda *_: handler())
        threads.append(threading.Thread(target=send, args=(when,)))
        threads[-1].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGUSR1, before)


def give_up():
    raise Interrupted


# ---- 6: completion ----


def test_rule6_in_this_call(fakes):
    """D1: once, after the key is gone."""
    md, device = fakes()
    _base, win = packed(md)
    seen = []
    win.invalidate(lambda status: seen.append((status, win.state, len(device.live_keys))))
    assert seen == [(OK, REVOKED, 1)]
    assert isinstance(seen[0][0], um.Status)
    md.progress()
    assert len(seen) == 1


def test_rule6_for_a_handle_without_keys(fakes):
    md, device = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    seen = []
    base.derive().invalidate(seen.append)
    base.derive(0, 0).invalidate(seen.append)
    assert seen == [OK, OK]
    assert device.count("key_destroy") == 0


def test_rule6_later(fakes):
    md, device = fakes(destroy="progress")
    _base, win = packed(md)
    seen = []
    win.invalidate(lambda status: seen.append((status, win.state, device.destroying)))
    assert (seen, win.state) == ([], REVOKING)
    assert md.progress() == 1
    assert seen == [(OK, REVOKED, 0)]
    md.progress()
    assert len(seen) == 1


def test_rule6_one_callback_for_many_handles_runs_once_for_each(fakes):
    md, device = fakes(destroy="manual")
    base = md.mem_reg(bytearray(64))
    wins = [base.derive() for _ in range(5)]
    seen = []
    for win in wins:
        win.mkey_pack()
        win.invalidate(seen.append)
    for n in range(1, 6):
        device.complete(1)
        assert seen == [OK] * n
        assert [win.state for win in wins].count(REVOKED) == n


@pytest.mark.parametrize("status", [IO_ERROR, um.Status.NO_MEMORY, um.Status.BUSY])
def test_rule6_never_if_the_call_raises(fakes, status):
    md, device = fakes()
    base, win = packed(md)
    child = win.derive()
    seen = []
    with pytest.raises(um.BusyError):  # a live child
        win.invalidate(seen.append)
    child.invalidate()
    with pytest.raises(um.InvalidParamError):  # a base
        base.invalidate(seen.append)
    device.fail("key_destroy", status)
    with pytest.raises(um.MemhError) as raised:
        win.invalidate(seen.append)
    assert raised.value.status == status
    del raised
    md.progress()
    assert seen == []
    win.invalidate(seen.append)
    assert seen == [OK]
    with pytest.raises(um.RevokedError):
        win.invalidate(seen.append)
    win.dereg()
    with pytest.raises(um.ClosedError):
        win.invalidate(seen.append)
    assert seen == [OK]


def test_rule6_with_the_error_that_the_device_finds_later(fakes):
    md, device = fakes(destroy="manual")
    _base, win = packed(md)
    value, _ = native(next(iter([win.derive()])).mkey_pack())
    first, second = [], []
    win.derive().invalidate()
    gc.collect()
    device.complete()
    assert value not in device.live_keys
    win.invalidate(first.append)
    device.complete(status=IO_ERROR)
    assert (first, win.state) == ([IO_ERROR], REVOKING)
    win.invalidate(second.append)
    assert second == []
    device.complete()
    assert (first, second, win.state) == ([IO_ERROR], [OK], REVOKED)


@pytest.mark.parametrize("destroy", ["now", "progress"])
def test_rule6_what_the_callback_raises_goes_to_the_unraisablehook(fakes, monkeypatch, destroy):
    md, _ = fakes(destroy=destroy)
    _base, win = packed(md)
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_value))
    error = KeyError("mine")

    def callback(status):
        raise error

    win.invalidate(callback)
    md.progress()
    assert seen == [error]
    assert win.state == REVOKED
    seen.clear()
    error.__traceback__ = None


@pytest.mark.parametrize("drop", ["handle", "callback", "both"])
def test_rule6_dropped_references(fakes, drop):
    md, device = fakes(destroy="manual")
    base, win = packed(md)
    seen = []

    def callback(status):
        seen.append(status)

    alive = weakref.ref(callback)
    win.invalidate(callback)
    if drop in ("handle", "both"):
        del win
    if drop in ("callback", "both"):
        del callback
    gc.collect()
    assert alive() is not None
    device.complete()
    assert seen == [OK]
    callback = None
    assert alive() is None
    base.dereg()


@pytest.mark.parametrize("destroy", ["now", "progress", "flush", "manual"])
@pytest.mark.parametrize("depth", [1, 2, 300])
def test_rule5_what_was_let_go_of_goes_by_itself(fakes, destroy, depth):
    """Each after what was derived from it, as the device gets on with it; nobody closes the Md."""
    md, device = fakes(destroy=destroy)
    win = md.mem_reg(bytearray(64))
    for _ in range(depth):
        win = win.derive()
        win.mkey_pack()
    del win
    gc.collect()
    for _ in range(depth):
        device.complete() if destroy == "manual" else md.progress()
    stats = md.stats()
    assert (stats["live_bases"], stats["live_derived"], device.live_keys) == (0, 0, {})


def test_rule5_close_waits_for_what_was_let_go_of(fakes):
    """Nobody has anything of the domain any more, so it is not in use."""
    md, device = fakes(destroy="progress")
    win = md.mem_reg(bytearray(64))
    for _ in range(4):
        win = win.derive()
        win.mkey_pack()
    other = md.mem_reg(bytearray(64))
    one = other.derive()
    one.mkey_pack()
    del win, one
    gc.collect()
    with pytest.raises(um.BusyError):
        md.close()
    assert (md.stats()["live_bases"], md.stats()["live_derived"]) == (1, 0)
    other.dereg()
    md.close()
    assert device.closed


@pytest.mark.parametrize("cascade", [False, True])
def test_rule5_dereg_waits_for_what_was_let_go_of(fakes, cascade):
    """That is no live derived handle of anybody's; one with a user still is."""
    md, _ = fakes(destroy="progress")
    base, win = packed(md)
    small = win.derive()
    small.mkey_pack()
    kept = base.derive()
    del win, small
    gc.collect()
    assert md.stats()["live_derived"] == 3
    if not cascade:
        with pytest.raises(um.BusyError, match="live derived"):
            base.dereg()
        assert md.stats()["live_derived"] == 1
        kept.dereg()
    base.dereg(cascade=cascade)
    assert (base.state, kept.state) == (CLOSED, REVOKED if cascade else CLOSED)


def test_rule5_cascade_waits_for_a_revocation_that_somebody_began(fakes):
    md, _ = fakes(destroy="progress")
    base, win = packed(md)
    seen = []
    win.invalidate(seen.append)
    with pytest.raises(um.BusyError, match="live derived"):
        base.dereg()
    base.dereg(cascade=True)
    assert (seen, win.state, base.state) == ([OK], REVOKED, CLOSED)


def test_rule5_and_says_so_if_the_device_refuses(fakes):
    md, device = fakes(destroy="manual")
    base, win = packed(md)
    del win
    gc.collect()
    device.complete(status=IO_ERROR)
    for cascade in (False, True):
        device.fail("key_destroy", IO_ERROR)
        with pytest.raises(um.DeviceError if cascade else um.BusyError):
            base.dereg(cascade=cascade)
    assert base.state == LIVE


@pytest.mark.parametrize("step", ["mem_reg", "pack"])
def test_rule12_who_only_makes_and_lets_go_makes_progress(fakes, step):
    """No call of his waits, and still nothing piles up."""
    md, _ = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    for _ in range(50):
        if step == "mem_reg":
            base = md.mem_reg(bytearray(64))
        base.derive().mkey_pack()
        gc.collect()
        stats = md.stats()
        assert (stats["live_bases"] <= 2, stats["live_derived"] <= 2) == (True, True)


@pytest.mark.parametrize("outcome", ["done", "raised"])
def test_rule6_the_callback_is_let_go_of(fakes, outcome):
    md, device = fakes()
    _base, win = packed(md)

    def callback(status):
        pass

    alive = weakref.ref(callback)
    if outcome == "raised":
        device.fail("key_destroy", IO_ERROR)
        with pytest.raises(um.DeviceError):
            win.invalidate(callback)
    else:
        win.invalidate(callback)
    del callback
    assert alive() is None


@pytest.mark.parametrize("destroy", ["now", "progress"])
def test_rule6_no_lock_is_held(fakes, destroy):
    """The callback may do all that anybody may."""
    md, _ = fakes(destroy=destroy)
    base, win = packed(md)
    _, sibling = packed(md)
    log = []

    def callback(status):
        other = base.derive()
        other.mkey_pack()
        md.rkey_unpack(other.mkey_pack()).close()
        sibling.invalidate(log.append)
        md.mem_reg(bytearray(8)).dereg()
        md.endpoint().close()
        with pytest.raises(um.RevokedError):
            win.mkey_pack()
        with pytest.raises(um.BusyError):
            md.close()
        md.progress()
        log.append(md.stats()["live_derived"])

    win.invalidate(callback)
    while len(log) < 2:
        md.progress()
    assert sorted(log) == [OK, 1] or sorted(log) == [OK, 2]


def test_rule6_an_access_that_the_callback_starts_is_refused(fakes):
    md, device = fakes(destroy="progress")
    _base, win = packed(md)
    value, _ = native(win.derive().base.mkey_pack())
    gc.collect()
    seen = []
    win.invalidate(lambda _: seen.append(device.raw_access(value, "get", win.address, length=1)))
    md.progress()
    assert seen == [(REMOTE_ACCESS, None)]


def test_rule6_a_chain_of_callbacks(fakes):
    md, _ = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    wins = [base.derive() for _ in range(100)]
    for win in wins:
        win.mkey_pack()
    left = list(wins)

    def next_one(status=OK):
        if left:
            left.pop().invalidate(next_one)

    next_one()
    while md.stats()["live_derived"]:
        md.progress()
    assert {win.state for win in wins} == {REVOKED}


@pytest.mark.parametrize("callback", [1, "text", b"", object()], ids=repr)
def test_rule6_a_callback_that_cannot_be_called_is_refused(fakes, callback):
    md, _ = fakes()
    _base, win = packed(md)
    child = win.derive()
    with pytest.raises(um.InvalidParamError):
        win.invalidate(callback, cascade=True)
    assert (win.state, child.state) == (LIVE, LIVE)


def test_rule6_dereg_waits_for_the_device(fakes):
    md, device = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    base.mkey_pack(RMA | AMO)
    win = base.derive()
    win.mkey_pack()
    win.invalidate()
    base.dereg()
    assert (win.state, base.state) == (REVOKED, CLOSED)
    assert device.count("key_destroy_done") == 3
    assert device.live_keys == {}


# ---- 7: what invalidate promises ----


@pytest.mark.parametrize("op", ["get", "put"])
def test_rule7_what_is_in_flight_moves_no_byte_afterwards(fakes, op):
    md, device, one, two = fakes.connected(deferred=True)
    memory, local = bytearray(b"r" * 64), bytearray(b"l" * 64)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    operation = getattr(one, f"{op}_nb")(rkey, win.address, local)
    assert device.in_flight == 1
    win.invalidate()
    with pytest.raises(um.RemoteAccessError):
        operation.wait()
    assert (memory, local) == (b"r" * 64, b"l" * 64)
    assert (operation.status, operation.bytes_done) == (REMOTE_ACCESS, 0)
    assert one.state == two.state == um.EpState.ERROR


@pytest.mark.parametrize("chunks", range(0, 4))
@pytest.mark.parametrize("op", ["get", "put"])
def test_rule7_an_interrupted_transfer_has_done_a_prefix(fakes, op, chunks):
    md, device, one, _two = fakes.connected(deferred=True)
    memory, local = bytearray(b"r" * 64), bytearray(b"l" * 64)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    operation = getattr(one, f"{op}_nb")(rkey, win.address, local)
    assert device.step(chunks, chunk=16) == 0
    win.invalidate()
    with pytest.raises(um.RemoteAccessError):
        operation.wait()
    assert operation.bytes_done == 16 * chunks
    done, left = 16 * chunks, 64 - 16 * chunks
    if op == "put":
        assert memory == b"l" * done + b"r" * left
    else:
        assert local == b"r" * done + b"l" * left


def test_rule7_what_was_executed_before_stays_done(fakes):
    md, device, one, _two = fakes.connected(deferred=True)
    memory, into = bytearray(b"before.."), bytearray(8)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    operation = one.get_nb(rkey, win.address, into)
    added = one.fetch_add_nb(rkey, win.address - win.address % 8, 0)
    assert device.step(2) == 2
    win.invalidate()
    memory[:] = b"after..."
    operation.wait()
    added.wait()
    assert into == b"before.."


def test_rule7_while_the_destruction_is_under_way_the_key_may_still_work(fakes):
    """And when it has completed, it does not: neither for the device nor for the library."""
    md, device, one, _two = fakes.connected(destroy="manual")
    memory = bytearray(8)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    value, _ = native(win.derive().base.mkey_pack())
    gc.collect()
    device.complete()
    win.invalidate(lambda status: None)
    one.put(rkey, win.address, b"early")
    assert device.raw_access(value, "get", win.address, length=5) == (OK, b"early")
    device.complete()
    assert device.raw_access(value, "get", win.address, length=5) == (REMOTE_ACCESS, None)
    with pytest.raises(um.RemoteAccessError):
        one.put(rkey, win.address, b"later")
    assert memory == b"early\0\0\0"


def test_rule7_transfers_through_other_keys_go_on(fakes):
    md, device, one, _two = fakes.connected(deferred=True)
    memory = bytearray(64)
    base = md.mem_reg(memory)
    stays, goes = base.derive(0, 32), base.derive(32, 32)
    goes.mkey_pack()
    rkey = md.rkey_unpack(stays.mkey_pack())
    operation = one.put_nb(rkey, stays.address, b"x" * 32)
    device.step(1, chunk=8)
    goes.invalidate()
    operation.wait()
    assert memory == b"x" * 32 + bytes(32)


def test_rule7_revoking_needs_no_healthy_connection(fakes):
    md, device, one, two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    win, bound = base.derive(0, 8), base.derive(8, 8, endpoint=two)
    keys = [md.rkey_unpack(memh.mkey_pack()) for memh in (win, bound)]
    raw = md.rkey_from_raw(win.mkey_pack(um.PackFlag.RAW), base.address, 64)
    with pytest.raises(um.RemoteAccessError):
        one.get(raw, base.address, bytearray(64))
    assert one.state == two.state == um.EpState.ERROR
    win.invalidate()
    bound.invalidate()
    assert len(device.live_keys) == 1
    assert keys


def test_rule7_a_failed_destruction_is_never_success(fakes):
    md, device = fakes()
    _base, win = packed(md)
    value, _ = native(win.mkey_pack())
    device.fail("key_destroy", um.Status.FLUSHED)
    with pytest.raises(um.FlushedError):
        win.invalidate()
    assert win.state == REVOKING
    assert device.raw_access(value, "get", win.address, length=1)[0] == OK
    win.invalidate()
    assert device.raw_access(value, "get", win.address, length=1)[0] == REMOTE_ACCESS


# ---- 12: progress ----


def test_rule12_nothing_moves_without_progress(fakes):
    md, device, one, _two = fakes.connected(deferred=True, destroy="progress")
    memory = bytearray(8)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey = md.rkey_unpack(base.mkey_pack())
    win.mkey_pack()
    seen = []
    operation = one.put_nb(rkey, base.address, b"12345678")
    win.invalidate(seen.append)
    assert (operation.done, operation.status) == (False, um.Status.INPROGRESS)
    assert (memory, seen) == (bytes(8), [])
    assert md.progress() == 2
    assert (operation.done, operation.status, operation.bytes_done) == (True, OK, 8)
    assert (memory, seen) == (b"12345678", [OK])
    assert md.progress() == 0
    assert device.in_flight == 0


def test_rule12_event_fd_and_arm(fakes):
    md, device, one, _two = fakes.connected(deferred=True)
    base = md.mem_reg(bytearray(8))
    rkey = md.rkey_unpack(base.mkey_pack())
    fd = md.event_fd
    assert fd == md.event_fd

    def readable():
        return bool(select.select([fd], [], [], 0)[0])

    assert md.arm() is True
    assert not readable()
    operation = one.put_nb(rkey, base.address, b"x")
    assert readable()
    assert md.arm() is False  # there is something to progress
    md.progress()
    assert operation.done
    assert md.arm() is True
    assert not readable()
    device.fail("event_arm", IO_ERROR)
    with pytest.raises(um.DeviceError):
        md.arm()


def test_rule12_an_event_loop(fakes):
    """arm, sleep, progress: completions are never missed."""
    md, _, one, _two = fakes.connected(deferred=True)
    memory = bytearray(64)
    base = md.mem_reg(memory)
    rkey = md.rkey_unpack(base.mkey_pack())
    operations = []

    def post():
        for i in range(64):
            operations.append(one.put_nb(rkey, base.address + i, bytes([i])))

    thread = threading.Thread(target=post)
    thread.start()
    done = 0
    while done < 64:
        if md.arm():
            assert select.select([md.event_fd], [], [], 30)[0], "an event was missed"
        done += md.progress()
    thread.join()
    assert all(operation.done for operation in operations)
    assert memory == bytes(range(64))


def tasks():
    return set(os.listdir("/proc/self/task"))


def test_rule12_no_hidden_thread_and_callbacks_in_the_thread_that_progresses(fakes):
    before = tasks()
    md, _, one, _two = fakes.connected(destroy="progress")
    base, win = packed(md)
    rkey = md.rkey_unpack(base.mkey_pack())
    one.put(rkey, base.address, b"x")
    seen = []
    win.invalidate(lambda status: seen.append(threading.get_ident()))
    assert tasks() <= before
    thread = threading.Thread(target=md.progress)
    thread.start()
    ident = thread.ident
    thread.join()
    assert seen == [ident]


def test_rule12_the_gil_is_free_while_the_device_works(fakes):
    md, device, one, _two = fakes.connected(deferred=True)
    memory = bytearray(64)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    one.put(rkey, base.address, b"x")
    rkey.ptr()
    win.invalidate()
    base.dereg()
    for op in ("mem_reg", "mem_dereg", "key_create", "key_destroy", "mkey_pack", "rkey_unpack"):
        assert device.count(op) == 1
        assert device.gil_held(op) == 0, op
    assert (
        device.gil_held("post") == device.gil_held("progress") == device.gil_held("rkey_ptr") == 0
    )


def test_rule12_a_fast_domain_keeps_the_gil_for_registering(fakes):
    md, device = fakes(fast_reg=True)
    memory = bytearray(64)
    md.mem_reg(memory).dereg()
    del memory[:]
    assert device.gil_held("mem_reg") == device.gil_held("mem_dereg") == 1


def test_rule12_a_domain_written_in_python_takes_the_gil(fakes):
    md, device, one, _two = fakes.connected(python=True, deferred=True, destroy="progress")
    memory = bytearray(64)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    one.put(rkey, base.address, b"x")
    win.invalidate()
    base.dereg()
    rkey.close()
    assert memory[:1] == b"x"
    assert device.count("mem_dereg") == 1


def test_rule12_an_interrupted_transfer_goes_on_and_holds_its_buffer(fakes, interrupt):
    md, device, one, _two = fakes.connected()
    memory, local = bytearray(8), bytearray(b"12345678")
    base = md.mem_reg(memory)
    rkey = md.rkey_unpack(base.mkey_pack())
    device.hold()
    interrupt(give_up, lambda: device.in_flight)
    with pytest.raises(Interrupted):
        one.put(rkey, base.address, local)
    gc.collect()
    assert device.in_flight == 1
    with pytest.raises(BufferError):
        local.append(0)
    rkey.close()
    assert memory == bytes(8)
    assert device.release() == 1
    assert memory == b"12345678"
    local.append(0)


def test_rule12_an_interrupted_transfer_holds_its_memory_handle(fakes, interrupt):
    md, device, one, _two = fakes.connected(need_memh=True)
    memory, local = bytearray(8), bytearray(b"12345678")
    base, source = md.mem_reg(memory), md.mem_reg(local)
    rkey = md.rkey_unpack(base.mkey_pack())
    device.hold()
    interrupt(give_up, lambda: device.in_flight)
    with pytest.raises(Interrupted):
        one.put(rkey, base.address, source)
    with pytest.raises(um.BusyError):
        source.dereg()
    assert source.state == LIVE
    device.release()
    source.dereg()
    assert memory == b"12345678"


def test_rule12_an_interrupted_invalidate_goes_on(fakes, interrupt):
    md, device = fakes(destroy="manual")
    base, win = packed(md)
    interrupt(give_up, lambda: device.destroying)
    with pytest.raises(Interrupted):
        win.invalidate()
    assert (win.state, device.destroying) == (REVOKING, 1)
    with pytest.raises(um.BusyError):
        base.dereg()
    device.complete()
    assert win.state == REVOKED
    base.dereg()


def test_rule12_an_interrupted_dereg_goes_on(fakes, interrupt):
    md, device = fakes(destroy="manual")
    memory = bytearray(64)
    base = md.mem_reg(memory)
    base.mkey_pack(RMA | AMO)
    interrupt(give_up, lambda: device.destroying)
    with pytest.raises(Interrupted):
        base.dereg()
    with pytest.raises(BufferError):
        memory.append(0)
    device.complete()
    assert base.state == CLOSED
    memory.append(0)


def test_rule12_interrupted_while_the_queue_is_full(fakes, interrupt):
    """Not taken yet, so nothing is left of it."""
    md, device, one, _two = fakes.connected()
    memory, local = bytearray(8), bytearray(8)
    base = md.mem_reg(memory)
    rkey = md.rkey_unpack(base.mkey_pack())
    device.fail("post", um.Status.NO_RESOURCE, count=2**60)
    interrupt(give_up, lambda: device.count("post"))
    with pytest.raises(Interrupted):
        one.put(rkey, base.address, local)
    local.append(0)
    assert (device.in_flight, one.state) == (0, um.EpState.CONNECTED)
    device.clear_faults()
    one.put(rkey, base.address, b"x")


def test_rule12_a_full_queue_is_waited_for(fakes):
    md, device, one, _two = fakes.connected()
    memory = bytearray(8)
    base = md.mem_reg(memory)
    rkey = md.rkey_unpack(base.mkey_pack())
    device.fail("post", um.Status.NO_RESOURCE, count=50)
    one.put(rkey, base.address, b"patience")
    assert memory == b"patience"
    assert device.count("post") == 51


def test_rule12_an_interrupted_forced_close_can_be_repeated(fakes, interrupt):
    md, device = fakes(destroy="manual")
    base, win = packed(md)
    interrupt(give_up, lambda: device.destroying)
    with pytest.raises(Interrupted):
        md.close(force=True)
    assert not md.closed
    device.complete()
    md.close(force=True)
    assert (win.state, base.state) == (CLOSED, CLOSED)


@pytest.mark.parametrize("what", ["transfer", "invalidate"])
def test_rule12_a_handler_that_does_not_raise_does_not_disturb(fakes, interrupt, what):
    md, device, one, _two = fakes.connected(destroy="manual")
    base, win = packed(md)
    rkey = md.rkey_unpack(base.mkey_pack())
    if what == "transfer":
        device.hold()
        interrupt(device.release, lambda: device.in_flight)
        one.put(rkey, base.address, b"x")
    else:
        interrupt(device.complete, lambda: device.destroying)
        win.invalidate()
    interrupt(device.complete, lambda: device.destroying)
    win.dereg()


@pytest.mark.parametrize("timeout", [0, 0.0, -1, 0.001])
def test_rule12_wait_with_a_timeout(fakes, timeout):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(8))
    rkey = md.rkey_unpack(base.mkey_pack())
    device.hold()
    operation = one.get_nb(rkey, base.address, bytearray(8))
    rkey.close()
    with pytest.raises(um.TimedOutError) as raised:
        operation.wait(timeout=timeout)
    assert raised.value.context["bytes_done"] == 0
    del raised
    assert (operation.done, device.in_flight) == (False, 1)
    device.release()
    assert operation.wait(timeout=timeout) is None
    assert operation.done


@pytest.mark.parametrize("timeout", [float("inf"), 1e30, None])
def test_rule12_wait_for_ever(fakes, interrupt, timeout):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(8))
    rkey = md.rkey_unpack(base.mkey_pack())
    device.hold()
    operation = one.fetch_add_nb(rkey, base.address - base.address % 8, 0)
    interrupt(device.release, lambda: device.in_flight)
    assert operation.wait(timeout=timeout) == 0
    assert operation.wait(timeout=timeout) == 0  # again


def test_rule12_the_buffer_is_free_when_the_operation_is_done(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(8))
    rkey = md.rkey_unpack(base.mkey_pack())
    local = bytearray(8)
    device.hold()
    operation = one.get_nb(rkey, base.address, local)
    with pytest.raises(BufferError):
        local.append(0)
    device.release()
    operation.wait()
    local.append(0)
    device.hold()
    one.get_nb(rkey, base.address, local[:1])  # dropped at once
    device.release()
    local.append(0)


def test_rule12_get_reads_and_put_writes(fakes):
    md, _, one, _two = fakes.connected()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    win = base.derive(8, 16, um.MemFlag.ACCESS_RMA)
    rkey = md.rkey_unpack(win.mkey_pack())
    assert one.put(rkey, win.address + 1, b"abc") is None
    into = bytearray(4)
    assert one.get(rkey, win.address, memoryview(into)) is None
    assert into == b"\0abc"
    assert memory == bytes(9) + b"abc" + bytes(52)
    assert one.get(rkey, win.address, bytearray()) is None
    assert win.flags & GET
