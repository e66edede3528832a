# SPDX-License-Identifier: BSD-3-Clause
"""The rows, on keys that are mlx5 mkeys: those of tests/_rows.py, and what mlx5 alone has."""

import itertools
from contextlib import contextmanager

import pytest

import ucx_memh as um
from _rows import *  # noqa: F403
from _rows import (
    AMO,
    ATOMIC,
    GET,
    PLAIN,
    PUT,
    REMOTE,
    RMA,
    SIZE,
    Unchanged,
    moves,
    text,
    word,
)  # fmt: skip
from _sides import Library, Wc, keys, link, opened, relink
from ucx_memh import MdFlag, MemFlag


@pytest.fixture(params=["auto", "off"], ids=lambda umr: f"umr {umr}")
def umr(request):
    return request.param


@contextmanager
def no_cap(soft, name, value=0):
    """A device with less than others, for an Md that is opened inside."""
    soft.set(name, value)
    try:
        yield
    finally:
        soft.set(name, "default")


def test_D6_no_atomic_key_is_said_and_not_packed_as_none(tidy, soft, library):
    """A device whose indirect keys cannot carry the atomic right."""
    with no_cap(soft, "umr_modify_atomic_disabled", 1), opened() as md:
        memory = text()
        base = md.mem_reg(memory)
        link(md, library)
        win = base.derive(flags=GET | PUT)
        with Unchanged(md, base, win):
            for call in (
                base.derive,
                lambda: base.derive(flags=ATOMIC),
                lambda: base.mkey_pack(AMO),
                lambda: base.mkey_pack(RMA | AMO),
            ):
                with pytest.raises(um.UnsupportedError):
                    call()
        assert moves(library, memory, base)  # the direct key can
        assert moves(library, memory, win)
        assert not library.unpack(win.mkey_pack())[2] & ATOMIC


def test_D13_a_device_without_derived_keys_refuses(tidy, soft, library):
    """One central check; nothing is made, and the handle serves on."""
    with no_cap(soft, "max_indirection"), opened() as md:
        assert not md.attr.flags & MdFlag.REG_DERIVED
        memory = text()
        base = md.mem_reg(memory)
        link(md, library)
        with Unchanged(md, base):
            for arguments in ((), (0, 64), (0, 64, GET), (SIZE + 1,), (0, SIZE + 1)):
                with pytest.raises(um.UnsupportedError, match="does not support derived"):
                    base.derive(*arguments)
            with pytest.raises(um.UnsupportedError):
                md.mem_reg(memory, MemFlag.DERIVED_ONLY)
            for flags in (RMA, AMO, RMA | AMO):
                with pytest.raises(um.UnsupportedError):
                    base.mkey_pack(flags)
        assert moves(library, memory, base)
        base.dereg()
        assert soft.stat("mkeys.live") == soft.stat("mrs.live")


# access, pack flags -> CREATE_MKEYs that a fresh base sends for it, or the refusal
S3_BASE = [
    (MemFlag.ACCESS_ALL, PLAIN, 0),
    (MemFlag.ACCESS_ALL, RMA, 1),
    (MemFlag.ACCESS_ALL, AMO, 1),
    (MemFlag.ACCESS_ALL, RMA | AMO, 2),
    (MemFlag.ACCESS_RMA, PLAIN, 0),
    (MemFlag.ACCESS_RMA, RMA, 1),
    (MemFlag.ACCESS_RMA, AMO, um.InvalidParamError),
    (GET, RMA, 1),
    (GET, AMO, um.InvalidParamError),
    (ATOMIC, AMO, 1),
    (ATOMIC, RMA, um.InvalidParamError),
    (MemFlag.LOCAL_READ, PLAIN, um.AccessError),
    (MemFlag.DERIVED_ONLY, PLAIN, um.UnsupportedError),
    (MemFlag.DERIVED_ONLY, RMA | AMO, um.UnsupportedError),
]


def test_S3_which_keys_are_made_when(owner, library):
    memory = text()
    link(owner, library)
    for access, flags, expected in S3_BASE:
        base = owner.mem_reg(memory, access)
        made = owner.stats()["device.create_mkey"]
        if isinstance(expected, int):
            key = base.mkey_pack(flags)
            assert owner.stats()["device.create_mkey"] - made == expected, (access, flags)
            assert moves(library, memory, base, key)
            base.mkey_pack(flags)
            made += expected
        else:
            with pytest.raises(expected):
                base.mkey_pack(flags)
        assert owner.stats()["device.create_mkey"] == made
        base.dereg()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    wins = []  # kept: the next one would get the key of one that has gone
    for rights, flags in itertools.product([GET, ATOMIC, REMOTE], [PLAIN, RMA, AMO, RMA | AMO]):
        win = base.derive(flags=rights)
        wins.append(win)
        made = owner.stats()["device.create_mkey"]
        assert moves(library, memory, win, win.mkey_pack(flags))
        win.mkey_pack(flags ^ RMA)
        assert owner.stats()["device.create_mkey"] - made == 1, (rights, flags)


def test_S3_what_the_capabilities_leave(tidy, soft, peer):
    """Revocable keys of a base need KSM, derived ones KLM lists, atomics through both a third."""
    cases = [
        ("fixed_buffer_size", 0, {PLAIN}, REMOTE),
        ("umr_modify_atomic_disabled", 1, {PLAIN, RMA}, GET | PUT),
        ("log_max_klm_list_size", 1, {PLAIN, RMA, AMO, RMA | AMO}, None),
    ]
    for name, value, ways, rights in cases:
        with no_cap(soft, name, value), opened() as md:
            memory = text()
            base = md.mem_reg(memory)
            library = Library(peer)
            link(md, library)
            for way in (PLAIN, RMA, AMO, RMA | AMO):
                if way in ways:
                    assert moves(library, memory, base, base.mkey_pack(way)), (name, way)
                else:
                    with pytest.raises(um.UnsupportedError):
                        base.mkey_pack(way)
            if rights is None:
                with pytest.raises(um.UnsupportedError):
                    base.derive()
            else:
                assert moves(library, memory, base.derive(flags=rights)), name


def test_S5_a_bases_three_keys_differ_and_die_with_it(owner, attacker):
    memory = text()
    base = owner.mem_reg(memory)
    ep = link(owner, attacker)
    packs = [base.mkey_pack(flags) for flags in (PLAIN, RMA, AMO)]
    assert len(set(packs)) == 3
    direct, indirect, atomic = keys(packs[0])[0], keys(packs[1])[0], keys(packs[2])[1]
    assert len({direct, indirect, atomic}) == 3
    assert keys(packs[2])[0] == direct
    for rkey in (direct, indirect):
        assert attacker.read(rkey, base.address, SIZE) == (Wc.SUCCESS, memory)
        assert attacker.write(rkey, base.address, b"written!") is Wc.SUCCESS
    for rkey in (direct, atomic):
        before = word(memory, 8)
        assert attacker.fetch_add(rkey, base.address + 8, 5) == (Wc.SUCCESS, before)
        assert word(memory, 8) == before + 5
    address = base.address
    base.dereg()
    before = bytes(memory)
    for attack in (
        lambda: attacker.read(direct, address, 8)[0],
        lambda: attacker.write(indirect, address, b"x"),
        lambda: attacker.read(indirect, address, 8)[0],
        lambda: attacker.fetch_add(atomic, address, 1)[0],
        lambda: attacker.fetch_add(direct, address, 1)[0],
    ):
        assert attack() is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
    assert memory == before


def test_S8_all_domains_that_cannot_derive_say_so_alike(tidy, soft):
    refusals = set()
    with no_cap(soft, "max_indirection"), opened() as md, um.open_md("cma") as cma:
        for domain in (md, cma):
            assert not domain.attr.flags & MdFlag.REG_DERIVED
            with domain.mem_reg(text()) as base, Unchanged(domain, base):
                with pytest.raises(um.UnsupportedError) as caught:
                    base.derive()
                refusals.add((caught.value.status, caught.value.op, caught.value.detail))
    assert len(refusals) == 1
