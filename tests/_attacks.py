# SPDX-License-Identifier: BSD-3-Clause
"""What a device enforces, by attacks with raw verbs below our own library.

The attacker is another process with a queue pair of its own; it posts any key, address and opcode
that it is told, so no check of our library can stand in for one of the device.
"""

import hashlib
import re
import struct

import pytest

import ucx_memh as um
from _sides import Attacker, Wc, keys, link, relink, wait_for
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


def test_rights_of_a_base(owner, device, attacker):
    """Its direct key, and revocable ones, have what it was registered with, and no more."""
    for rights in (GET, PUT, ATOMIC, GET | PUT):
        memory = text()
        base = owner.mem_reg(memory, rights)
        attack = Attack(link_or_relink(owner, attacker), attacker, memory, base.address)
        packs = [base.mkey_pack()]
        packs += [base.mkey_pack(RMA)] if device.base_keys and rights & (GET | PUT) else []
        packs += [base.mkey_pack(AMO)] if device.base_keys and rights & ATOMIC else []
        for key in packs:
            rma, amo = keys(key)
            for operation, need in Attack.NEEDS.items():
                rkey = amo if need is ATOMIC else rma
                allowed = attack(operation, rkey, base.address)
                assert allowed == bool(rights & need), (rights, operation)
        # A revocable key for put and get does not do atomics, and the other way round.
        if device.base_keys and rights & ATOMIC:
            assert not attack("read", keys(packs[-1])[1], base.address)


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
def test_range(attack, device, base, span):
    """To the byte, in either direction, and nothing of a straddling access happens.

    A device that keeps to no range keeps to the registration's all the same.
    """
    win = base.derive(*span, GET | PUT)
    rkey, _ = keys(win.mkey_pack())
    for address, length, inside in edges(win.address, win.length):
        if inside and address + length > win.address + win.length:
            continue  # of a range of one byte
        for operation in ("read", "write"):
            allowed = attack(operation, rkey, address, length)
            within = base.address <= address < address + length <= base.address + SIZE
            assert allowed == (within and (inside or not device.keeps_range)), (
                operation, address, length,
            )  # fmt: skip


def test_range_of_atomics(attack, device, base):
    win = base.derive(1024, 64, ATOMIC)
    _, amo = keys(win.mkey_pack())
    for offset, inside in [(0, True), (56, True), (-8, False), (64, False), (1 << 20, False)]:
        for operation in ("fetch_add", "compare_swap"):
            allowed = attack(operation, amo, win.address + offset)
            within = offset < SIZE
            assert allowed == (within and (inside or not device.keeps_range)), (operation, offset)
    half = base.derive(1024, 60, ATOMIC)
    _, amo = keys(half.mkey_pack())
    assert attack("fetch_add", amo, half.address + 48)
    assert attack("fetch_add", amo, half.address + 56) == (not device.keeps_range)


# ---- whose key it is ----


def direct_key(base):
    """The region's own key, which no pack gives away: an attacker would guess its 32 bits."""
    return int(re.search(r"direct key 0x([0-9a-f]+)", base.explain())[1], 16)


@pytest.mark.parametrize("rights", [GET | PUT, REMOTE], ids=repr)
def test_the_key_of_a_derived_only_region_is_of_no_use(owner, device, attacker, memory, rights):
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY | rights)
    with pytest.raises(um.UnsupportedError):
        base.mkey_pack()
    attack = Attack(link(owner, attacker), attacker, memory, base.address)
    rkey = direct_key(base)
    assert not attack("read", rkey, base.address)
    assert not attack("write", rkey, base.address)
    # What a device cannot do this way is said, and only where it is so.
    open_to_atomics = "may do atomics" in base.explain()
    assert open_to_atomics == bool(rights & ATOMIC and device.direct_atomics)
    for operation in ("fetch_add", "compare_swap"):
        assert attack(operation, rkey, base.address) == open_to_atomics
    # The key that is handed out does what it grants.
    win = base.derive(flags=rights)
    rma, amo = keys(win.mkey_pack())
    assert attack("read", rma, base.address)
    assert attack("write", rma, base.address)
    assert attack("fetch_add", amo, base.address) == bool(rights & ATOMIC)


def test_a_key_bound_to_an_endpoint_serves_that_one_only(owner, side, memory, base):
    friend, foe = side(Attacker), side(Attacker)
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


def test_a_key_serves_its_protection_domain_only(tidy, device, host, attacker, memory):
    """Two domains on one device, so that both know the key."""
    context, (first, second) = host
    with (
        device.opened(context=context, pd=first) as md,
        device.opened(context=context, pd=second) as other,
    ):
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


# ---- the claim ----


def found(attack, base, win, rights=REMOTE):
    """The enforcement table by attack: ENFORCED where the device refused.

    Else a range is COOPERATIVE: a peer's library has it in its key's bytes.
    """
    table = {"rights": {}, "range": {}, "revoke": {}}
    kinds = {"get": ("read", GET), "put": ("write", PUT), "atomic": ("fetch_add", ATOMIC)}

    def cell(allowed, otherwise=Enforcement.NONE):
        return otherwise if allowed else Enforcement.ENFORCED

    for kind, (operation, right) in kinds.items():
        memh = win(right ^ REMOTE)
        rkey = keys(memh.mkey_pack())[right is ATOMIC]
        table["rights"][kind] = cell(attack(operation, rkey, memh.address))
        memh = win(right)
        rkey = keys(memh.mkey_pack())[right is ATOMIC]
        assert attack(operation, rkey, memh.address)
        outside = attack(operation, rkey, memh.address + memh.length)
        table["range"][kind] = cell(outside, Enforcement.COOPERATIVE)
        try:
            memh.invalidate()
        except um.InvalidParamError:
            assert memh.base is None
        table["revoke"][kind] = cell(attack(operation, rkey, memh.address))
    return um.EnforcementTable(**{row: um.EnforcementRow(**table[row]) for row in table})


def test_the_claim_is_what_the_attacks_show(owner, device, attack, memory, base):
    """Cell by cell, for derived handles and for bases."""
    of_derived = found(attack, base, lambda rights: base.derive(4096, 4096, rights))
    for memh in (base.derive(), base.derive(0, 64, GET), base.derive(endpoint=attack.ep)):
        assert memh.enforcement == of_derived
    assert owner.attr.enforcement == of_derived
    kept = Enforcement.ENFORCED if device.keeps_range else Enforcement.COOPERATIVE
    assert of_derived.range == um.EnforcementRow(kept, kept, kept)

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
