# SPDX-License-Identifier: BSD-3-Clause
"""The rows, on keys that are memory windows: those of tests/_rows.py, and what windows alone have.

D13 and S8 need a device without windows: test_caps.py.
"""

import itertools

import pytest

import ucx_memh as um
from _rows import *  # noqa: F403
from _rows import AMO, ATOMIC, GET, PLAIN, PUT, REMOTE, RMA, SIZE, moves, text, word
from _sides import Wc, keys, link, relink
from ucx_memh import MemFlag

# access, pack flags -> what packing a fresh base gives: no window is made in any case
S3_BASE = [
    (MemFlag.ACCESS_ALL, PLAIN, None),
    (MemFlag.ACCESS_ALL, RMA, um.UnsupportedError),
    (MemFlag.ACCESS_ALL, AMO, um.UnsupportedError),
    (MemFlag.ACCESS_ALL, RMA | AMO, um.UnsupportedError),
    (MemFlag.ACCESS_RMA, PLAIN, None),
    (MemFlag.ACCESS_RMA, RMA, um.UnsupportedError),
    (GET, PLAIN, None),
    (ATOMIC, PLAIN, None),
    (MemFlag.LOCAL_READ, PLAIN, um.AccessError),
    (MemFlag.DERIVED_ONLY, PLAIN, um.UnsupportedError),
    (MemFlag.DERIVED_ONLY, RMA | AMO, um.UnsupportedError),
]


def test_S3_which_windows_are_made_when(owner, library):
    """None for a base; one for a derived handle, by its first pack of whatever kind."""
    memory = text()
    link(owner, library)
    for access, flags, refusal in S3_BASE:
        base = owner.mem_reg(memory, access)
        before = owner.stats()["device.alloc_mw"]
        if refusal is None:
            assert moves(library, memory, base, base.mkey_pack(flags))
        else:
            with pytest.raises(refusal):
                base.mkey_pack(flags)
        assert owner.stats()["device.alloc_mw"] == before, (access, flags)
        base.dereg()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    for rights, flags in itertools.product([GET, ATOMIC, REMOTE], [PLAIN, RMA, AMO, RMA | AMO]):
        win = base.derive(flags=rights)
        before = owner.stats()
        assert moves(library, memory, win, win.mkey_pack(flags))
        win.mkey_pack(flags ^ RMA)
        after = owner.stats()
        for verb in ("device.alloc_mw", "device.bind_mw"):
            assert after[verb] - before[verb] == 1, (rights, flags)


def test_S5_a_base_has_one_key_and_it_dies_with_it(owner, attacker):
    memory = text()
    base = owner.mem_reg(memory)
    ep = link(owner, attacker)
    rkey, amo = keys(base.mkey_pack())
    assert rkey == amo
    assert attacker.read(rkey, base.address, SIZE) == (Wc.SUCCESS, memory)
    assert attacker.write(rkey, base.address, b"written!") is Wc.SUCCESS
    before = word(memory, 8)
    assert attacker.fetch_add(rkey, base.address + 8, 5) == (Wc.SUCCESS, before)
    assert word(memory, 8) == before + 5
    address = base.address
    base.dereg()
    before = bytes(memory)
    for attack in (
        lambda: attacker.read(rkey, address, 8)[0],
        lambda: attacker.write(rkey, address, b"x"),
        lambda: attacker.fetch_add(rkey, address, 1)[0],
    ):
        assert attack() is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
    assert memory == before


def test_S7_every_narrower_set_of_rights_is_to_be_had(owner, library):
    """And none that is wider than what it is derived from."""
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    combinations = [GET, PUT, ATOMIC, GET | PUT, GET | ATOMIC, PUT | ATOMIC, REMOTE]
    for rights, narrower in itertools.product(combinations, repeat=2):
        win = base.derive(flags=rights)
        if narrower & ~rights:
            with pytest.raises(um.InvalidParamError):
                win.derive(flags=narrower)
        else:
            assert moves(library, memory, win.derive(flags=narrower)), (rights, narrower)
