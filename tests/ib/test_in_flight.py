# SPDX-License-Identifier: BSD-3-Clause
"""A window is revoked while a long transfer through it is under way; nothing is stopped for it.

A transfer may have ended before: it is tried again then, with another window.
"""

import pytest

import ucx_memh as um
from _processes import GONE
from _sides import Library, Owner, Wc, keys, link, relink, wait_for
from ucx_memh import EpState, MemFlag, MemhState

MIB = 1 << 20
TRIES = 20


@pytest.fixture
def size(device):
    return 16 * MIB if device.slow else 64 * MIB


def test_a_write_stops_for_good(owner, attacker, size):
    """No byte changes once invalidate has returned; the writer is told that it was refused."""
    memory = bytearray(size)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, attacker)
    sibling = base.derive(0, 64)
    for _ in range(TRIES):
        win = base.derive()
        rkey, _ = keys(win.mkey_pack())
        attacker.start("fill", rkey, base.address, size, 0xEE)
        wait_for(lambda: memory[0], "a write")
        win.invalidate()
        frozen = bytes(memory)
        status = attacker.answer()
        assert memory == frozen
        if status is Wc.REM_ACCESS_ERR:
            break
        memory[:] = bytes(size)
    assert status is Wc.REM_ACCESS_ERR
    written = frozen.count(0xEE)
    assert 0 < written < size
    assert frozen == b"\xee" * written + bytes(size - written)
    relink(ep, attacker)
    assert attacker.read(keys(sibling.mkey_pack())[0], base.address, 64) == (
        Wc.SUCCESS,
        b"\xee" * 64,
    )
    assert attacker.fill(rkey, base.address, 64, 0x77) is Wc.REM_ACCESS_ERR
    assert memory == frozen


def test_a_read_stops_for_good(owner, device, attacker, size):
    """The reader is told, and of what comes after it gets nothing."""
    memory = bytearray(b"\x11") * size
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, attacker)
    for _ in range(TRIES):
        win = base.derive()
        rkey, _ = keys(win.mkey_pack())
        before = device.moved()
        attacker.start("take", rkey, base.address, size)
        wait_for(lambda: device.moved() >= before + 3, "a transfer that moves")  # noqa: B023
        win.invalidate()
        status, came = attacker.answer()
        if status is Wc.REM_ACCESS_ERR:
            break
        assert (status, came) == (Wc.SUCCESS, size)
    assert status is Wc.REM_ACCESS_ERR
    assert came < size
    relink(ep, attacker)
    assert attacker.take(rkey, base.address, 64)[0] is Wc.REM_ACCESS_ERR
    assert memory == b"\x11" * size


def test_a_reset_heals_a_connection_whose_read_was_cut_off(owner):
    """Contract 11; rxe's queue pair goes on refusing after that, through RESET."""
    memory = bytearray(b"\x11") * (8 * MIB)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    with owner.endpoint() as far, owner.endpoint() as near:
        other = base.derive(0, 64)
        sibling = owner.rkey_unpack(other.mkey_pack())
        refused = False
        for _ in range(TRIES):
            near.connect(far.address)
            far.connect(near.address)
            win = base.derive()
            rkey = owner.rkey_unpack(win.mkey_pack())
            into = bytearray(8 * MIB)
            operations = [near.get_nb(rkey, base.address, into) for _ in range(8)]
            wait_for(lambda: operations[0].done or owner.progress() or into[0])  # noqa: B023
            win.invalidate()
            for operation in operations:
                try:
                    operation.wait(60)
                except (um.RemoteAccessError, um.FlushedError):
                    refused = True
            rkey.close()
            far.reset()
            near.reset()
            if refused:
                break
        assert refused
        near.connect(far.address)
        far.connect(near.address)
        few = bytearray(64)
        near.get(sibling, base.address, few)
        assert few == memory[:64]
        near.put(sibling, base.address, b"after it all")
        assert memory[:12] == b"after it all"
        sibling.close()
    base.dereg(cascade=True)


def test_revoking_needs_no_connection_in_good_health(owner, attacker, memory):
    """The connection is broken, then the keys go, of either kind; a new one does not get at it."""
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, attacker)
    free, bound, doomed = base.derive(), base.derive(endpoint=ep), base.derive()
    values = [keys(win.mkey_pack())[0] for win in (free, bound, doomed)]
    for rkey in values:
        assert attacker.read(rkey, base.address, 8) == (Wc.SUCCESS, memory[:8])
    doomed.invalidate()
    assert attacker.read(values[2], base.address, 8)[0] is Wc.REM_ACCESS_ERR
    wait_for(lambda: ep.state is EpState.ERROR)
    for win in (free, bound):
        win.invalidate()
        assert win.state is MemhState.REVOKED
    for rkey in values:
        relink(ep, attacker)
        assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR


@pytest.fixture
def memory():
    return bytearray(range(256)) * 16


# ---- killed, by SIGKILL ----


def test_a_peer_is_killed_while_it_streams(owner, device, peer, library, size):
    """Its window goes like any other, nothing comes after it, and the others do not notice."""
    part = size // 64
    memory = bytearray(2 * part)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    victim = Library(peer, device.where)
    ep = link(owner, victim)
    link(owner, library)
    win, other = base.derive(0, part), base.derive(part, part)
    library.start("churn", other.mkey_pack(), part, device.times(50))
    victim.start("stream", win.mkey_pack(), part)
    wait_for(lambda: memory[0] >= 3, "a stream of writes")
    victim.peer.kill()
    win.invalidate()
    frozen = memory[:part]
    assert win.state is MemhState.REVOKED
    assert library.answer() == device.times(50)
    assert memory[:part] == frozen
    assert memory[part:] == bytes([device.times(50)]) * part
    again = base.derive(0, part)
    assert library.churn(again.mkey_pack(), part, 2) == 2
    ep.close()
    base.dereg(cascade=True)
    memory.append(0)


def test_an_owner_is_killed_in_the_middle_of_a_transfer(owner, device, peer, size):
    """What its peer has under way fails, in bounded time, and what comes later at once."""
    far = Owner(peer, device.where)
    address = far.region(size, 0x5A)
    key = far.grant()
    ep = link(owner, far)
    into = bytearray(size)
    with owner.rkey_unpack(key) as rkey:
        ep.get(rkey, address, memoryview(into)[:64])
        assert into[:64] == b"\x5a" * 64
        operation = ep.get_nb(rkey, address, into)
        wait_for(lambda: operation.done or into[65], "a transfer that moves")
        far.peer.kill()
        if not operation.done:
            # The kernel may take a dying owner's windows before its queue pairs.
            with pytest.raises((*GONE, um.RemoteAccessError)):
                operation.wait(60)
            with pytest.raises(um.FlushedError):
                ep.put(rkey, address, b"x")
        with pytest.raises(GONE):
            ep.put(rkey, address, b"x")
        assert ep.state is EpState.ERROR
    ep.close()
    into.append(0)
