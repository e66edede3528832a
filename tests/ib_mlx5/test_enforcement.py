# SPDX-License-Identifier: BSD-3-Clause
"""What the device enforces, by attacks with raw verbs below our own library.

The attacker is another process with a queue pair of its own; it posts any key, address and opcode
that it is told, so no check of our library can stand in for one of the device.
"""

import ctypes
import hashlib
import mmap
import re
import struct
import threading
import time

import pytest

import ucx_memh as um
from _rawqp import RawPeer
from _sides import (
    CHUNK,
    Attacker,
    Wc,
    keys,
    link,
    opened,
    relink,
    wait_for,
)
from ucx_memh import Enforcement, MemFlag, MemhState, PackFlag

GET, PUT, ATOMIC = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT, MemFlag.REMOTE_ATOMIC
REMOTE = MemFlag.ACCESS_REMOTE
RMA, AMO = PackFlag.INVALIDATE_RMA, PackFlag.INVALIDATE_AMO
SIZE = 64 << 10
MIB = 1 << 20


def text(size=SIZE):
    return bytearray(hashlib.shake_256(b"enforcement").digest(size))


class Attack:
    """Raw accesses over one connection, which is made anew after each refusal."""

    NEEDS = {"read": GET, "write": PUT, "fetch_add": ATOMIC, "compare_swap": ATOMIC}

    def __init__(self, ep, attacker, memory, base):
        self.ep, self.attacker, self.memory, self.base = ep, attacker, memory, base

    def __call__(self, operation, rkey, address, length=8):
        """Whether the device let it happen; a refused access has changed nothing."""
        before = bytes(self.memory)
        offset = address - self.base
        old = int.from_bytes(before[offset : offset + 8], "little") if offset >= 0 else 0
        if operation == "read":
            status, data = self.attacker.read(rkey, address, length)
            done = data == before[offset : offset + length]
        elif operation == "write":
            status = self.attacker.write(rkey, address, b"\xee" * length)
            done = self.memory[offset : offset + length] == b"\xee" * length
        elif operation == "fetch_add":
            status, result = self.attacker.fetch_add(rkey, address, 1)
            done = result == old and self.word(offset) == (old + 1) % 2**64
        else:
            status, result = self.attacker.compare_swap(rkey, address, old, 77)
            done = result == old and self.word(offset) == 77
        if status is Wc.SUCCESS:
            assert done, operation
        else:
            assert status is Wc.REM_ACCESS_ERR, (operation, status)
            assert self.memory[:] == before, operation
            wait_for(lambda: self.ep.state is um.EpState.ERROR)  # of a borrowed context: soon
            relink(self.ep, self.attacker)
        if self.memory[:] != before:
            self.memory[:] = before
        return status is Wc.SUCCESS

    def word(self, offset):
        return struct.unpack_from("<Q", self.memory, offset)[0]


@pytest.fixture
def memory():
    return text()


@pytest.fixture
def base(owner, memory):
    return owner.mem_reg(memory, MemFlag.DERIVED_ONLY)


@pytest.fixture
def attack(owner, attacker, memory, base):
    return Attack(link(owner, attacker), attacker, memory, base.address)


# ---- rights ----


def test_rights(attack, base):
    """Every combination of rights against every operation."""
    combinations = [GET, PUT, ATOMIC, GET | PUT, GET | ATOMIC, PUT | ATOMIC, REMOTE]
    for rights in combinations:
        win = base.derive(flags=rights)
        rma, amo = keys(win.mkey_pack())
        for operation, need in Attack.NEEDS.items():
            rkey = amo if need is ATOMIC else rma
            assert attack(operation, rkey, base.address) == bool(rights & need), (rights, operation)
        win.invalidate()


def test_rights_of_a_base(owner, attacker):
    """Its direct key and its revocable keys have what it was registered with, and no more."""
    for rights in (GET, PUT, ATOMIC, GET | PUT):
        memory = text()
        base = owner.mem_reg(memory, rights)
        attack = Attack(link_or_relink(owner, attacker), attacker, memory, base.address)
        packs = [base.mkey_pack()]
        packs += [base.mkey_pack(RMA)] if rights & (GET | PUT) else []
        packs += [base.mkey_pack(AMO)] if rights & ATOMIC else []
        for key in packs:
            rma, amo = keys(key)
            for operation, need in Attack.NEEDS.items():
                rkey = amo if need is ATOMIC else rma
                allowed = attack(operation, rkey, base.address)
                assert allowed == bool(rights & need), (rights, operation)
        # A revocable key for put and get does not do atomics, and the other way round.
        if rights & ATOMIC:
            assert not attack("read", keys(packs[-1])[1], base.address)


@pytest.mark.parametrize("flags", [None, MemFlag.DERIVED_ONLY], ids=["", "derived only"])
def test_read_only_memory(owner, attacker, flags):
    """Pages that this process may not write either."""
    memory = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    base = owner.mem_reg(memory, flags)
    assert base.grant == GET | MemFlag.LOCAL_READ
    with pytest.raises(um.InvalidParamError):
        base.derive(flags=PUT)
    attack = Attack(link(owner, attacker), attacker, memory, base.address)
    win = base.derive()
    rkey, _ = keys(win.mkey_pack())
    for operation in Attack.NEEDS:
        assert attack(operation, rkey, base.address) == (operation == "read")
    owner.close(force=True)
    memory.close()


def link_or_relink(owner, attacker):
    if not attacker.ends:
        return link(owner, attacker)
    relink(attacker.ends[0], attacker)
    return attacker.ends[0]


# ---- range ----


def edges(start, length):
    """(address, length, inside) around a range."""
    end = start + length
    yield from ((start, length, True), (start, 1, True), (end - 1, 1, True), (start + 5, 99, True))
    yield from ((start - 1, 1, False), (end, 1, False))  # one byte before, one after
    yield from ((start - 1, 2, False), (end - 1, 2, False))  # straddling
    yield from ((start, length + 1, False), (start - 1, length + 1, False))
    yield from ((start - 1, length + 2, False), (start - 64, length, False))
    yield from ((2**64 - 4, 8, False), (2**64 - 1, 1, False), (0, 8, False))  # wrapping, far off


@pytest.mark.parametrize("span", [(1000, 4096), (4096, 8192), (17, 1)], ids=str)
def test_range(attack, base, span):
    """To the byte, in either direction, and nothing of a straddling access happens."""
    win = base.derive(*span, GET | PUT)
    rkey, _ = keys(win.mkey_pack())
    for address, length, inside in edges(win.address, win.length):
        if inside and address + length > win.address + win.length:
            continue  # of a range of one byte
        for operation in ("read", "write"):
            assert attack(operation, rkey, address, length) == inside, (operation, address, length)


def test_range_of_atomics(attack, base):
    win = base.derive(1024, 64, ATOMIC)
    _, amo = keys(win.mkey_pack())
    for offset, inside in [(0, True), (56, True), (-8, False), (64, False), (1 << 20, False)]:
        for operation in ("fetch_add", "compare_swap"):
            assert attack(operation, amo, win.address + offset) == inside, (operation, offset)
    half = base.derive(1024, 60, ATOMIC)
    _, amo = keys(half.mkey_pack())
    assert attack("fetch_add", amo, half.address + 48)
    assert not attack("fetch_add", amo, half.address + 56)


def test_range_over_several_translation_entries(owner, attacker):
    """An entry covers at most 2 GiB, so a larger key has several; the seam is no edge."""
    entry = 1 << 31
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, entry + (64 << 10), flags)
    memory.madvise(mmap.MADV_HUGEPAGE)  # reading all of it costs no memory, and less time so
    seam = 4096 + entry
    memory[seam - 8 : seam + 8] = b"left<-->right..."
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY | MemFlag.LOCAL_READ | GET)
    ep = link(owner, attacker)
    win = base.derive(4096, entry + 8192, GET)
    assert "2 entries" in win.explain()
    rkey, _ = keys(win.mkey_pack())
    at = base.address + seam
    assert attacker.read(rkey, at - 8, 16) == (Wc.SUCCESS, b"left<-->right...")
    for address, length, inside in [
        (win.address, 1, True),
        (win.address - 1, 1, False),
        (win.address + win.length - 1, 1, True),
        (win.address + win.length, 1, False),
        (win.address + win.length - 8, 16, False),
        (win.address - 8, 16, False),
    ]:
        allowed = attacker.read(rkey, address, length)[0]
        assert allowed is (Wc.SUCCESS if inside else Wc.REM_ACCESS_ERR), (address, length)
        if not inside:
            relink(ep, attacker)
    owner.close(force=True)
    memory.close()


# ---- whose key it is ----


def direct_key(base):
    """The region's own key, which no pack gives away: an attacker would guess its 32 bits."""
    return int(re.search(r"direct key 0x([0-9a-f]+)", base.explain())[1], 16)


@pytest.mark.parametrize("rights", [GET | PUT, REMOTE], ids=repr)
def test_the_key_of_a_derived_only_region_is_of_no_use(owner, attacker, memory, rights):
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY | rights)
    with pytest.raises(um.UnsupportedError):
        base.mkey_pack()
    attack = Attack(link(owner, attacker), attacker, memory, base.address)
    rkey = direct_key(base)
    assert not attack("read", rkey, base.address)
    assert not attack("write", rkey, base.address)
    # What mlx5 cannot do this way is said, and only where it is so.
    open_to_atomics = "may do atomics" in base.explain()
    assert open_to_atomics == bool(rights & ATOMIC)
    for operation in ("fetch_add", "compare_swap"):
        assert attack(operation, rkey, base.address) == open_to_atomics
    # The key that is handed out does what it grants.
    win = base.derive(flags=rights)
    rma, amo = keys(win.mkey_pack())
    assert attack("read", rma, base.address)
    assert attack("write", rma, base.address)
    assert attack("fetch_add", amo, base.address) == bool(rights & ATOMIC)


def test_a_key_bound_to_an_endpoint_serves_that_one_only(owner, peer, memory, base):
    friend, foe = Attacker(peer), Attacker(peer)
    ep, other = link(owner, friend), link(owner, foe)
    win = base.derive(endpoint=ep)
    rma, amo = keys(win.mkey_pack())
    good = Attack(ep, friend, memory, base.address)
    bad = Attack(other, foe, memory, base.address)
    unbound = base.derive()
    free, _ = keys(unbound.mkey_pack())
    for operation in Attack.NEEDS:
        rkey = amo if "_" in operation else rma
        assert good(operation, rkey, base.address), operation
        assert not bad(operation, rkey, base.address), operation
    assert bad("read", free, base.address)
    # A narrower key of it is bound as well.
    narrow = win.derive(64, 64, GET)
    small, _ = keys(narrow.mkey_pack())
    assert good("read", small, base.address + 64)
    assert not bad("read", small, base.address + 64)
    ep.close()  # which revokes both first
    assert narrow.state is MemhState.REVOKED
    assert win.state is MemhState.REVOKED
    friend.reset()
    good = Attack(link(owner, friend), friend, memory, base.address)
    assert not good("read", rma, base.address)


@pytest.fixture
def host(soft):
    """What a runtime has opened: a device context with two protection domains."""
    with RawPeer() as raw:
        lib = raw.lib
        lib.mlx5dv_open_device.restype = lib.ibv_alloc_pd.restype = ctypes.c_void_p
        lib.ibv_get_device_list.restype = ctypes.c_void_p
        found = lib.ibv_get_device_list(None)
        device = ctypes.c_void_p.from_address(found).value
        attr = (ctypes.c_uint32 * 8)(1)  # MLX5DV_CONTEXT_FLAGS_DEVX
        context = ctypes.c_void_p(lib.mlx5dv_open_device(ctypes.c_void_p(device), attr))
        lib.ibv_free_device_list(ctypes.c_void_p(found))
        assert context.value
        domains = [ctypes.c_void_p(lib.ibv_alloc_pd(context)) for _ in range(2)]
        yield context.value, [domain.value for domain in domains]
        for domain in domains:
            assert lib.ibv_dealloc_pd(domain) == 0
        assert lib.ibv_close_device(context) == 0


def test_a_key_serves_its_protection_domain_only(tidy, host, attacker, memory):
    """Two domains on one device, so that both know the key."""
    context, (first, second) = host
    with opened(context=context, pd=first) as md, opened(context=context, pd=second) as other:
        base = md.mem_reg(memory, MemFlag.DERIVED_ONLY)
        win = base.derive()
        rma, amo = keys(win.mkey_pack())
        attack = Attack(link(md, attacker), attacker, memory, base.address)
        for operation in Attack.NEEDS:
            assert attack(operation, amo if "_" in operation else rma, base.address)
        attacker.reset()
        attack = Attack(link(other, attacker), attacker, memory, base.address)
        for operation in Attack.NEEDS:
            assert not attack(operation, amo if "_" in operation else rma, base.address)


# ---- revocation ----


def test_after_invalidate_nothing_is_let_through(attack, base):
    """For every combination of rights, through a connection from before and through a new one."""
    sibling = base.derive()
    for rights in (GET, PUT, ATOMIC, REMOTE):
        win = base.derive(flags=rights)
        rma, amo = keys(win.mkey_pack())
        allowed = [name for name, need in Attack.NEEDS.items() if rights & need]
        for operation in allowed:
            assert attack(operation, amo if "_" in operation else rma, base.address)
        win.invalidate()
        for operation in Attack.NEEDS:
            assert not attack(operation, amo if "_" in operation else rma, base.address)
        rma_of_sibling, amo_of_sibling = keys(sibling.mkey_pack())
        for operation in Attack.NEEDS:
            rkey = amo_of_sibling if "_" in operation else rma_of_sibling
            assert attack(operation, rkey, base.address)


def test_neighbouring_values_are_no_keys(attack, base):
    """The tag in the low byte counts: nobody reaches the next owner of an index."""
    win = base.derive()
    rkey, _ = keys(win.mkey_pack())
    for guess in (rkey ^ 1, rkey + 1 & 0xFFFFFFFF, rkey ^ 0x80, rkey + 0x100, 0, 0xFFFFFFFF):
        if guess != direct_key(base):
            assert not attack("read", guess, base.address)


# ---- in flight ----

BULK = 64 * MIB
HELD = 5  # chunks that go through before one is held


@pytest.fixture
def bulk(owner, soft, attacker, request):
    """64 MiB, a derived key to it, and an attacker; the data path as the parameter says."""
    soft.set("path", request.param)
    memory = bytearray(b"\x11") * BULK
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, attacker)
    return memory, base, CHUNK if request.param == "auto" else CHUNK // 2


class Held:
    """A responder of this process, stopped in the middle of what it copies."""

    def __init__(self, soft, chunks=HELD):
        self.soft = soft
        self.before = soft.stat("chunks")
        self.destroyed = soft.stat("cmd.destroy_mkey")
        soft.set("gate", chunks)

    @property
    def chunks(self):
        return self.soft.stat("chunks") - self.before

    def wait(self):
        wait_for(lambda: self.soft.stat("gate.waiting"), "a chunk that is held")

    def invalidate(self, win):
        """Begin it in a thread; returns when the device is at it."""
        thread = threading.Thread(target=win.invalidate)
        thread.start()
        wait_for(lambda: self.soft.stat("cmd.destroy_mkey") > self.destroyed, "DESTROY_MKEY")
        return thread

    def open(self):
        self.soft.set("gate", "open")


@pytest.mark.parametrize("bulk", ["auto", "socket"], indirect=True)
@pytest.mark.parametrize("operation", ["take", "fill"])
def test_in_flight(owner, soft, attacker, bulk, operation):
    """Invalidate waits for the chunk that is being copied, and no other is begun."""
    memory, base, chunk = bulk
    win = base.derive()
    rkey, _ = keys(win.mkey_pack())
    held = Held(soft)
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
def test_in_flight_others_do_not_notice(owner, soft, attacker, peer, bulk):
    """A sibling's and the base's transfers, begun before and ending after."""
    memory, base, chunk = bulk
    full = owner.mem_reg(bytearray(b"\x22") * MIB)
    others = [Attacker(peer), Attacker(peer)]
    for other in others:
        link(owner, other)
    win, sibling = base.derive(), base.derive(BULK - MIB)
    rkey, _ = keys(win.mkey_pack())
    held = Held(soft)
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


def test_in_flight_atomics_and_small_writes(owner, soft, attacker):
    """What had been taken up before is done wholly, and before invalidate returns."""
    memory = bytearray(SIZE)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, attacker)
    for operation, arguments in [("fetch_add", (7,)), ("write", (b"written!",))]:
        win = base.derive()
        rma, amo = keys(win.mkey_pack())
        held = Held(soft, 0)
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


# ---- the claim ----


def found(attack, base, win, rights=REMOTE):
    """The enforcement table by attack: ENFORCED where the device refused, else NONE."""
    table = {"rights": {}, "range": {}, "revoke": {}}
    kinds = {"get": ("read", GET), "put": ("write", PUT), "atomic": ("fetch_add", ATOMIC)}

    def cell(allowed):
        return Enforcement.NONE if allowed else Enforcement.ENFORCED

    for kind, (operation, right) in kinds.items():
        memh = win(right ^ REMOTE)
        rkey = keys(memh.mkey_pack())[right is ATOMIC]
        table["rights"][kind] = cell(attack(operation, rkey, memh.address))
        memh = win(right)
        rkey = keys(memh.mkey_pack())[right is ATOMIC]
        assert attack(operation, rkey, memh.address)
        outside = attack(operation, rkey, memh.address + memh.length)
        table["range"][kind] = cell(outside)
        try:
            memh.invalidate()
        except um.InvalidParamError:
            assert memh.base is None
        table["revoke"][kind] = cell(attack(operation, rkey, memh.address))
    return um.EnforcementTable(**{row: um.EnforcementRow(**table[row]) for row in table})


def test_the_claim_is_what_the_attacks_show(owner, attack, memory, base):
    """Cell by cell, for derived handles and for bases."""
    of_derived = found(attack, base, lambda rights: base.derive(4096, 4096, rights))
    for memh in (base.derive(), base.derive(0, 64, GET), base.derive(endpoint=attack.ep)):
        assert memh.enforcement == of_derived
    assert owner.attr.enforcement == of_derived

    part = memoryview(memory)[:4096]
    of_base = found(attack, base, lambda rights: owner.mem_reg(part, rights))
    assert owner.mem_reg(part).enforcement == of_base
    assert of_base != of_derived


def test_our_library_refuses_before_the_device_does(owner, library):
    """A peer that uses it does not lose its connection over what the key says it may not."""
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, library)
    win = base.derive(64, 64, GET)
    key = win.mkey_pack()
    for error, call in [
        (um.AccessError, lambda: library.put(key, 0, b"x")),
        (um.AccessError, lambda: library.fetch_add(key, 0, 1)),
        (um.RangeError, lambda: library.get(key, 64, 1)),
        (um.RangeError, lambda: library.get(key, 0, 65)),
    ]:
        with pytest.raises(error):
            call()
    assert library.get(key, 0, 64) == memory[64:128]
    assert ep.state is um.EpState.CONNECTED
