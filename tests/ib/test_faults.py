# SPDX-License-Identifier: BSD-3-Clause
"""A window's verbs fail: what the caller hears, what has changed, how it goes on.

The verbs are those of the device below, refused or spoiled on their way to it by _hooks.py.
"""

import errno
import gc

import pytest

import ucx_memh as um
from _sides import Wc, keys, link, relink
from ucx_memh import MemFlag, MemhState, Status

GET = MemFlag.REMOTE_GET
SIZE = 64 << 10

REFUSED = [
    (errno.ENOMEM, um.NoMemoryError, Status.NO_MEMORY),
    (errno.EAGAIN, um.BusyError, Status.NO_RESOURCE),
    (errno.EIO, um.DeviceError, Status.IO_ERROR),
    (errno.EINVAL, um.MemhError, None),
    (errno.EPERM, um.AccessError, Status.ACCESS),
]


@pytest.fixture
def memory():
    return bytearray(range(256)) * (SIZE // 256)


@pytest.fixture
def md(hooks):
    with hooks.opened() as md:
        md.endpoint().close()  # registers the bounce buffers of the domain
        hooks.counts.clear()
        yield md


@pytest.fixture
def base(md, memory):
    return md.mem_reg(memory, MemFlag.DERIVED_ONLY)


def said(caught, status, number):
    if status is not None:
        assert caught.value.status is status
    assert caught.value.errno == number
    assert caught.value.component == "ib"
    assert errno.errorcode[number] in str(caught.value)


def balance(hooks, md):
    """(windows that there are by the hooks, by the backend's count)"""
    stats = md.stats()
    ours = hooks.counts["alloc_mw"] - hooks.counts["dealloc_mw"]
    return ours, stats["device.alloc_mw"] - stats["device.dealloc_mw"]


@pytest.mark.parametrize("verb", ["alloc_mw", "bind_mw"])
@pytest.mark.parametrize(("number", "error", "status"), REFUSED)
def test_making_a_window(hooks, md, base, library, memory, verb, number, error, status):
    """The pack raises and has changed nothing; the next makes one that works."""
    link(md, library)
    win = base.derive(64, 64, GET)
    before = md.stats()
    hooks.refuse(verb, number, times=2)  # a bind is tried twice
    with pytest.raises(error) as caught:
        win.mkey_pack()
    said(caught, status, number)
    assert f"ibv_{verb}" in str(caught.value)
    assert win.state is MemhState.LIVE
    hooks.refusals.clear()
    freed = md.stats()["device.dealloc_mw"] - before["device.dealloc_mw"]
    assert freed == (1 if verb == "bind_mw" else 0)
    assert library.get(win.mkey_pack(), 0, 64) == memory[64:128]
    win.invalidate()
    base.dereg()
    assert hooks.counts["alloc_mw"] - hooks.counts["dealloc_mw"] == (verb == "alloc_mw")


def test_a_bind_that_is_refused_once_is_not_seen(hooks, md, base, library, memory):
    """The control queue pair is made anew, and the window bound over that."""
    link(md, library)
    for refuse in (
        lambda: hooks.refuse("bind_mw", errno.EIO),
        lambda: hooks.spoil_next(lambda info: setattr(info, "length", SIZE + 1)),
    ):
        win = base.derive(64, 64, GET)
        before = md.stats()
        refuse()
        assert library.get(win.mkey_pack(), 0, 64) == memory[64:128]
        after = md.stats()
        assert after["device.control_qp"] - before["device.control_qp"] == 1
        assert after["device.bind_mw"] - before["device.bind_mw"] == 2
        assert after["device.alloc_mw"] - before["device.alloc_mw"] == 1


def test_a_bind_that_the_device_refuses_again(hooks, md, base, library, memory):
    """It says what the device said; keys of before work on, and so does the next pack."""
    link(md, library)
    old, win = base.derive(), base.derive()
    key = old.mkey_pack()
    hooks.spoil_next(lambda info: setattr(info, "length", SIZE + 1), times=2)
    with pytest.raises(um.DeviceError, match="did not bind") as caught:
        win.mkey_pack()
    assert caught.value.status is Status.IO_ERROR
    assert hooks.spoiled == 0
    assert win.state is MemhState.LIVE
    assert library.get(key, 0, SIZE) == memory
    assert library.get(win.mkey_pack(), 0, SIZE) == memory
    win.invalidate(), old.invalidate()
    assert balance(hooks, md) == (0, 0)


UNDONE = [
    (errno.EBUSY, um.BusyError, Status.BUSY),
    (errno.EAGAIN, um.BusyError, Status.NO_RESOURCE),
    (errno.ENOMEM, um.NoMemoryError, Status.NO_MEMORY),
    (errno.EIO, um.DeviceError, Status.IO_ERROR),
    (errno.EINVAL, um.DeviceError, Status.IO_ERROR),
]
REVOKE = {"invalidate": MemhState.REVOKED, "dereg": MemhState.CLOSED}


@pytest.mark.parametrize("call", REVOKE)
@pytest.mark.parametrize(("number", "error", "status"), UNDONE)
def test_ending_a_window(hooks, md, base, attacker, memory, call, number, error, status):
    """Unbound once, as some devices want, and freed again; then REVOKING until it is repeated."""
    ep = link(md, attacker)
    win, sibling = base.derive(), base.derive(64, 64)
    rkey, _ = keys(win.mkey_pack())
    good, _ = keys(sibling.mkey_pack())
    seen = []
    hooks.counts.clear()
    hooks.refuse("dealloc_mw", number, times=4)
    for _ in range(3):
        with pytest.raises(error) as caught:
            win.invalidate(seen.append) if call == "invalidate" else win.dereg()
        said(caught, status, number)
        assert win.state is MemhState.REVOKING
        for refused in (win.mkey_pack, win.derive):
            with pytest.raises(um.RevokedError):
                refused()
        with pytest.raises(um.BusyError):
            base.dereg()
    assert hooks.counts == {"dealloc_mw": 4, "bind_mw": 1}
    # Unbound it already is, so that nobody gets at it whatever becomes of the window.
    assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)
    assert attacker.read(good, base.address + 64, 8) == (Wc.SUCCESS, memory[64:72])
    win.invalidate(seen.append) if call == "invalidate" else win.dereg()
    assert win.state is REVOKE[call]
    assert seen == [Status.OK] * (call == "invalidate")
    assert hooks.counts == {"dealloc_mw": 5, "bind_mw": 1}
    base.dereg(cascade=True)


def test_a_window_that_is_freed_at_the_second_go(hooks, md, base):
    """The caller hears nothing of it."""
    win = base.derive()
    win.mkey_pack()
    hooks.counts.clear()
    hooks.refuse("dealloc_mw", errno.EBUSY)
    win.invalidate()
    assert win.state is MemhState.REVOKED
    assert hooks.counts == {"dealloc_mw": 2, "bind_mw": 1}


def test_a_bound_window_is_invalidated_once_and_never_twice(hooks, md, base, attacker):
    """A second LOCAL_INV of one key crashes rxe's kernel."""
    ep = link(md, attacker)
    win = base.derive(endpoint=ep)
    rkey, _ = keys(win.mkey_pack())
    hooks.counts.clear()
    hooks.refuse("dealloc_mw", errno.EBUSY, times=4)
    for _ in range(3):
        with pytest.raises(um.BusyError):
            win.invalidate()
    assert hooks.counts == {"dealloc_mw": 4, "local_inv": 1}
    assert md.stats()["device.local_inv"] == 1
    assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR
    win.invalidate()
    assert hooks.counts == {"dealloc_mw": 5, "local_inv": 1}
    ep.close()


def test_a_bound_window_cannot_be_bound(hooks, md, base, attacker, memory):
    """Posting the bind fails: nothing is left of it, and the connection is as it was."""
    ep = link(md, attacker)
    win = base.derive(endpoint=ep)
    hooks.counts.clear()
    hooks.refuse("bind_mw", errno.EIO)
    with pytest.raises(um.MemhError):
        win.mkey_pack()
    assert hooks.counts["alloc_mw"] == hooks.counts["dealloc_mw"] == 1
    rkey, _ = keys(win.mkey_pack())
    assert ep.state is um.EpState.CONNECTED
    assert attacker.read(rkey, base.address, 8) == (Wc.SUCCESS, memory[:8])


@pytest.mark.parametrize("later", ["pack", "close"])
def test_a_window_that_nobody_got_and_that_is_not_freed(hooks, md, base, later):
    """Its bind failed and freeing it, too: it is freed at the next occasion."""
    win = base.derive()
    hooks.refuse("bind_mw", errno.ENOMEM, times=2)
    hooks.refuse("dealloc_mw", errno.EBUSY)
    with pytest.raises(um.NoMemoryError):
        win.mkey_pack()
    assert hooks.counts == {"alloc_mw": 1, "bind_mw": 2, "dealloc_mw": 1}
    if later == "pack":
        win.mkey_pack()
        assert hooks.counts["dealloc_mw"] == 2
        win.invalidate()
    md.close(force=True)
    assert hooks.counts["dealloc_mw"] == hooks.counts["alloc_mw"] + 1


def test_a_dropped_handle_whose_window_resists(hooks, md, memory):
    """The Md sees to it when it is closed."""
    base = md.mem_reg(memory)
    win = base.derive()
    win.mkey_pack()
    hooks.refuse("dealloc_mw", errno.EIO, times=2)
    del win
    gc.collect()
    with pytest.raises(um.BusyError):
        base.dereg()
    md.close(force=True)
    assert hooks.counts["dealloc_mw"] == 3
    memory.append(0)


def test_a_region_with_a_window_bound_to_it_is_in_use(hooks, md, memory, base):
    """What the device says then is BUSY, and it can be deregistered when the window is gone."""
    win = base.derive()
    win.mkey_pack()
    with hooks.pretend_freed():
        win.invalidate()  # the device has it still
    with pytest.raises(um.BusyError):
        base.dereg()
    assert base.state is MemhState.REVOKING
    hooks.free_pretended()
    base.dereg()
    memory.append(0)
