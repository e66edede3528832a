# SPDX-License-Identifier: BSD-3-Clause
"""In flight: the software device's responder is stopped in the middle of a copy."""

import struct
import threading
import time

import pytest

import ucx_memh as um
from _attacks import MIB, SIZE
from _processes import GONE
from _sides import CHUNK, Attacker, Library, Owner, Wc, keys, link, wait_for
from ucx_memh import EpState, MemFlag, MemhState

BULK = 64 * MIB
HELD = 5  # chunks that go through before one is held


@pytest.fixture
def bulk(owner, device, attacker, request):
    """64 MiB, a derived key to it, and an attacker; the data path as the parameter says."""
    device.soft.set("path", request.param)
    memory = bytearray(b"\x11") * BULK
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, attacker)
    return memory, base, CHUNK if request.param == "auto" else CHUNK // 2


class Held:
    """A responder of this process, stopped in the middle of what it copies."""

    def __init__(self, device, owner, chunks=HELD):
        self.device, self.owner, self.soft = device, owner, device.soft
        self.before = self.soft.stat("chunks")
        self.ending = device.endings(owner)
        self.soft.set("gate", chunks)

    @property
    def chunks(self):
        return self.soft.stat("chunks") - self.before

    def wait(self):
        wait_for(lambda: self.soft.stat("gate.waiting"), "a chunk that is held")

    def invalidate(self, win):
        """Begin it in a thread; returns when the device is at it."""
        thread = threading.Thread(target=win.invalidate)
        thread.start()
        wait_for(lambda: self.device.endings(self.owner) > self.ending, "an end of the key")
        return thread

    def open(self):
        self.soft.set("gate", "open")


@pytest.mark.parametrize("bulk", ["auto", "socket"], indirect=True)
@pytest.mark.parametrize("operation", ["take", "fill"])
def test_in_flight(owner, device, attacker, bulk, operation):
    """Invalidate waits for the chunk that is being copied, and no other is begun."""
    memory, base, chunk = bulk
    win = base.derive()
    rkey, _ = keys(win.mkey_pack())
    held = Held(device, owner)
    attacker.start(operation, rkey, base.address, BULK, *([0xEE] if operation == "fill" else []))
    held.wait()
    assert held.chunks == HELD + 1
    revoking = held.invalidate(win)
    time.sleep(0.02)  # time enough to be wrong in
    assert revoking.is_alive()
    assert win.state is MemhState.REVOKING
    held.open()
    revoking.join(30)
    assert win.state is MemhState.REVOKED
    frozen = bytes(memory)
    answer = attacker.answer()
    assert held.chunks == HELD + 1
    assert memory == frozen
    moved = (HELD + 1) * chunk
    if operation == "fill":
        assert answer is Wc.REM_ACCESS_ERR
        assert memory == b"\xee" * moved + b"\x11" * (BULK - moved)
    else:
        status, came = answer
        assert status is Wc.REM_ACCESS_ERR
        assert came <= moved
        assert came == moved or chunk < CHUNK  # through bounce buffers the last may get lost
        assert memory == b"\x11" * BULK


@pytest.mark.parametrize("bulk", ["auto"], indirect=True)
def test_in_flight_others_do_not_notice(owner, device, attacker, peer, bulk):
    """A sibling's and the base's transfers, begun before and ending after."""
    memory, base, chunk = bulk
    full = owner.mem_reg(bytearray(b"\x22") * MIB)
    others = [Attacker(peer, device.where) for _ in range(2)]
    for other in others:
        link(owner, other)
    win, sibling = base.derive(), base.derive(BULK - MIB)
    rkey, _ = keys(win.mkey_pack())
    held = Held(device, owner)
    attacker.start("fill", rkey, base.address, BULK - MIB, 0xEE)
    held.wait()
    others[0].start("fill", keys(sibling.mkey_pack())[0], sibling.address, MIB, 0x33)
    others[1].start("take", keys(full.mkey_pack())[0], full.address, MIB)
    revoking = held.invalidate(win)
    held.open()
    revoking.join(30)
    assert attacker.answer() is Wc.REM_ACCESS_ERR
    assert others[0].answer() is Wc.SUCCESS
    assert others[1].answer() == (Wc.SUCCESS, MIB)
    assert held.chunks == HELD + 1 + 2 * (MIB // chunk)
    moved = (HELD + 1) * chunk
    assert memory == b"\xee" * moved + b"\x11" * (BULK - MIB - moved) + b"\x33" * MIB


def test_in_flight_atomics_and_small_writes(owner, device, attacker):
    """What had been taken up before is done wholly, and before invalidate returns."""
    memory = bytearray(SIZE)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, attacker)
    for operation, arguments in [("fetch_add", (7,)), ("write", (b"written!",))]:
        win = base.derive()
        rma, amo = keys(win.mkey_pack())
        held = Held(device, owner, 0)
        attacker.start(operation, amo if "_" in operation else rma, base.address, *arguments)
        held.wait()
        revoking = held.invalidate(win)
        assert memory[:8] in (bytes(8), struct.pack("<Q", 7))
        held.open()
        revoking.join(30)
        after = bytes(memory[:8])
        answer = attacker.answer()
        assert (answer[0] if operation == "fetch_add" else answer) is Wc.SUCCESS
        expected = struct.pack("<Q", 7) if operation == "fetch_add" else b"written!"
        assert after == memory[:8] == expected


# ---- killed ----


def test_a_peer_is_killed_while_it_writes(owner, device, peer):
    """Its last chunk is under way: nothing more comes, its key goes, all others are as before."""
    memory = bytearray(64 * MIB)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    victim, other = Attacker(peer, device.where), Library(peer, device.where)
    wait_for(lambda: device.flows(owner) == 0)
    ep = link(owner, victim)
    link(owner, other)
    win, sibling = base.derive(), base.derive(0, 64)
    soft = device.soft
    soft.set("gate", 5)
    victim.start("fill", keys(win.mkey_pack())[0], base.address, len(memory), 0xEE)
    wait_for(lambda: soft.stat("gate.waiting"))
    victim.peer.kill()
    soft.set("gate", "open")
    win.invalidate()
    frozen = bytes(memory)
    assert win.state is MemhState.REVOKED
    assert frozen[6 * CHUNK :] == bytes(len(memory) - 6 * CHUNK)
    assert other.get(sibling.mkey_pack(), 0, 64) == frozen[:64]
    wait_for(lambda: device.flows(owner) == 2, "the end of the victim's connection")
    assert memory == frozen
    ep.close()
    base.dereg(cascade=True)
    memory.append(0)


def test_an_owner_is_killed_in_the_middle_of_a_transfer(owner, device, peer):
    """The peer gets an error, not a hang; its own memory can go at once."""
    far = Owner(peer, device.where)
    size = 16 * MIB
    address = far.region(size, 0x5A)
    key = far.grant()
    ep = link(owner, far)
    into = bytearray(size)
    with owner.rkey_unpack(key) as rkey:
        ep.get(rkey, address, into)
        assert into == b"\x5a" * size
        into[:] = bytes(size)
        far.gate(3)
        operation = ep.get_nb(rkey, address, into)
        far.held()
        assert not operation.done
        far.peer.kill()
        with pytest.raises(GONE):
            operation.wait(60)
        after = bytes(into)
        assert after[4 * CHUNK :] == bytes(size - 4 * CHUNK)
        with pytest.raises(um.FlushedError):
            ep.put(rkey, address, b"x")
        assert ep.state is EpState.ERROR
    assert into == after
    ep.close()
    into.append(0)
