# SPDX-License-Identifier: BSD-3-Clause
"""Rule 12: a signal's exception comes out of a long call, and leaves the operation running.

The library owns it then, with its buffers held.
"""

import os
import signal
import threading
import time

import pytest

import ucx_memh as um

LIVE, REVOKING, REVOKED, CLOSED = um.MemhState


class Alarm(Exception):
    pass


def by_timer():
    """SIGALRM in a moment, whose handler raises."""

    def ring(number, frame):
        raise Alarm

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return Alarm


def by_kill():
    """Ctrl-C in a moment."""
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    return KeyboardInterrupt


@pytest.fixture(params=[by_timer, by_kill], ids=["setitimer", "SIGINT"])
def interrupted(request):
    """`interrupted(call)`: the call is interrupted, soon."""
    before = signal.getsignal(signal.SIGALRM)

    def check(call):
        start = time.monotonic()
        with pytest.raises(request.param()):
            call()
        assert time.monotonic() - start < 2

    yield check
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Family:
    def __init__(self, fakes, **options):
        self.md, self.device, self.one, self.two = fakes.connected(**options)
        self.memory = bytearray(b"abcdefgh" + bytes(56))
        self.base = self.md.mem_reg(self.memory)
        self.win = self.base.derive()
        self.rkey = self.md.rkey_unpack(self.win.mkey_pack())


def test_rule12_get(fakes, interrupted):
    f = Family(fakes)
    f.device.hold()
    into = bytearray(8)
    interrupted(lambda: f.one.get(f.rkey, f.base.address, into))
    assert (f.device.in_flight, into) == (1, bytes(8))
    with pytest.raises(BufferError):
        into.append(0)
    f.device.release()
    assert into == b"abcdefgh"
    into.append(0)


def test_rule12_put(fakes, interrupted):
    f = Family(fakes)
    f.device.hold()
    data = bytearray(b"written!")
    interrupted(lambda: f.one.put(f.rkey, f.base.address, data))
    assert (f.device.in_flight, f.memory[:8]) == (1, b"abcdefgh")
    with pytest.raises(BufferError):
        data.append(0)
    f.device.release()
    assert f.memory[:8] == b"written!"
    data.append(0)
    f.one.put(f.rkey, f.base.address, b"and more")  # the connection goes on
    assert f.memory[:8] == b"and more"


def test_rule12_put_from_registered_memory(fakes, interrupted):
    f = Family(fakes)
    f.device.hold()
    local = bytearray(b"registed")
    base = f.md.mem_reg(local)
    interrupted(lambda: f.one.put(f.rkey, f.base.address, base))
    with pytest.raises(um.BusyError):  # it is read still
        base.dereg()
    f.device.release()
    assert f.memory[:8] == b"registed"
    base.dereg()
    local.append(0)


def test_rule12_put_that_registers_for_itself(fakes, interrupted):
    f = Family(fakes, need_memh=True)
    f.device.hold()
    data = bytearray(b"borrowed")
    interrupted(lambda: f.one.put(f.rkey, f.base.address, data))
    assert f.md.stats()["live_bases"] == 2
    f.device.release()
    assert f.md.stats()["live_bases"] == 1
    assert f.memory[:8] == b"borrowed"
    data.append(0)


@pytest.mark.parametrize("op", ["fetch_add", "compare_swap"])
def test_rule12_atomics(fakes, interrupted, op):
    f = Family(fakes)
    f.device.hold()
    word = int.from_bytes(b"abcdefgh", "little")
    values = {"fetch_add": (1,), "compare_swap": (word, word + 1)}[op]
    interrupted(lambda: getattr(f.one, op)(f.rkey, f.base.address, *values))
    assert f.memory[:8] == b"abcdefgh"
    f.device.release()
    assert f.memory[:8] == b"bbcdefgh"


def test_rule12_wait(fakes, interrupted):
    f = Family(fakes)
    f.device.hold()
    into = bytearray(8)
    operation = f.one.get_nb(f.rkey, f.base.address, into)
    interrupted(operation.wait)
    interrupted(lambda: operation.wait(timeout=60))
    assert not operation.done
    f.device.release()
    operation.wait()
    assert into == b"abcdefgh"


def test_rule12_a_full_queue(fakes, interrupted):
    """Nothing was posted: nothing is held."""
    f = Family(fakes)
    data = bytearray(8)
    f.device.fail("post", um.Status.NO_RESOURCE, count=1 << 60)
    interrupted(lambda: f.one.put(f.rkey, f.base.address, data))
    assert f.device.in_flight == 0
    data.append(0)
    f.device.clear_faults()
    f.one.put(f.rkey, f.base.address, b"x")


def test_rule12_invalidate(fakes, interrupted):
    f = Family(fakes, destroy="manual")
    interrupted(f.win.invalidate)
    assert (f.win.state, f.device.destroying) == (REVOKING, 1)
    with pytest.raises(um.BusyError, match="under way"):
        f.win.invalidate()
    assert f.device.count("key_destroy") == 1
    f.device.complete()
    assert f.win.state is REVOKED
    f.base.mkey_pack()


def test_rule12_invalidate_of_a_dropped_handle(fakes, interrupted):
    """The library goes on with it when nobody else has it."""
    f = Family(fakes, destroy="manual")
    f.rkey.close()
    interrupted(f.win.invalidate)
    del f.win
    f.device.complete()
    assert (f.md.stats()["live_derived"], f.device.destroying) == (0, 0)
    f.base.dereg()
    f.memory.append(0)


def test_rule12_dereg(fakes, interrupted):
    f = Family(fakes, destroy="manual")
    f.base.mkey_pack(um.PackFlag.INVALIDATE_RMA)
    interrupted(lambda: f.base.dereg(cascade=True))
    assert (f.win.state, f.base.state) == (REVOKING, LIVE)
    f.device.complete()
    assert f.win.state is REVOKED
    interrupted(f.base.dereg)
    assert f.base.state is REVOKING
    with pytest.raises(BufferError):  # the device may use it still
        f.memory.append(0)
    f.device.complete()
    assert f.base.state is CLOSED
    f.memory.append(0)


def test_rule12_close(fakes, interrupted):
    f = Family(fakes, destroy="manual")
    interrupted(lambda: f.md.close(force=True))
    assert not f.md.closed
    assert f.win.state is REVOKING


def test_rule12_an_endpoints_close(fakes, interrupted):
    f = Family(fakes, destroy="manual")
    bound = f.base.derive(endpoint=f.two)
    bound.mkey_pack()
    interrupted(f.two.close)
    assert (bound.state, f.two.state) == (REVOKING, um.EpState.CONNECTED)
    f.device.complete()
    f.two.close()
    assert bound.state is REVOKED


def test_rule12_a_bundle(fakes, interrupted):
    """The part under way goes on; calling again does the rest."""
    one, device = fakes(component="one", destroy="manual")
    two, other = fakes(component="two")
    win = um.Bundle([one, two]).mem_reg(bytearray(8)).derive()
    win.mkey_pack()
    interrupted(win.invalidate)
    assert [memh.state for memh in win.memhs.values()] == [REVOKING, LIVE]
    device.complete()
    win.invalidate()
    assert [memh.state for memh in win.memhs.values()] == [REVOKED, REVOKED]
    assert other.count("key_destroy") == 1


def test_rule12_a_handler_that_only_looks(fakes):
    """Handlers run while a call waits, and may use the library."""
    f = Family(fakes)
    f.device.hold()
    seen = []

    def look(number, frame):
        seen.append(f.device.in_flight)
        f.base.derive().mkey_pack()
        f.device.release()

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        into = bytearray(8)
        f.one.get(f.rkey, f.base.address, into)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (seen, into) == ([1], b"abcdefgh")


def test_rule12_in_another_thread(fakes):
    """Only the main thread looks at signals; the others are not disturbed."""
    f = Family(fakes)
    f.device.hold()
    into = bytearray(8)
    thread = threading.Thread(target=f.one.get, args=(f.rkey, f.base.address, into))
    thread.start()
    while f.device.in_flight == 0:
        time.sleep(0.001)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert thread.is_alive()
    f.device.release()
    thread.join()
    assert into == b"abcdefgh"
