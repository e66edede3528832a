# SPDX-License-Identifier: BSD-3-Clause
"""What the device enforces for keys that are memory windows: tests/_attacks.py, and more."""

import ctypes
import mmap

import pytest

import ucx_memh as um
from _attacks import *  # noqa: F403
from _attacks import GET, PUT, REMOTE, SIZE, Attack, direct_key
from _rawqp import RawPeer
from _sides import Wc, keys, link, relink
from ucx_memh import MemFlag


@pytest.fixture
def host(device):
    """What a runtime has opened: a device context with two protection domains."""
    with RawPeer(device.where.library, device.where.gid_index) as raw:
        raw.lib.ibv_alloc_pd.restype = ctypes.c_void_p
        second = ctypes.c_void_p(raw.lib.ibv_alloc_pd(raw.context))
        assert second.value
        yield raw.context.value, [raw.pd.value, second.value]
        assert raw.lib.ibv_dealloc_pd(second) == 0


def test_read_only_memory(owner, attacker):
    """It is registered, readable by its direct key, and has no windows, which is said."""
    memory = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    base = owner.mem_reg(memory)
    assert base.grant == GET | MemFlag.LOCAL_READ
    with pytest.raises(um.UnsupportedError, match="read-only"):
        base.derive()
    with pytest.raises(um.InvalidParamError):
        base.derive(flags=PUT)
    assert base.derived_count == 0
    assert "nothing can be derived" in base.explain()
    attack = Attack(link(owner, attacker), attacker, memory, base.address)
    rkey, _ = keys(base.mkey_pack())
    for operation in Attack.NEEDS:
        assert attack(operation, rkey, base.address) == (operation == "read")
    with pytest.raises(um.MemhError) as caught:
        owner.mem_reg(memory, MemFlag.DERIVED_ONLY)  # which would be of no use at all
    assert caught.value.status is um.Status.INVALID_ADDR
    base.dereg()
    memory.close()


def test_one_of_2000_windows_is_revoked(owner, attacker):
    """Its neighbours, in memory and in key value, are as good as before; so is the base."""
    count, width = 2000, 64
    memory = bytearray(i % 251 for i in range(count * width))
    base = owner.mem_reg(memory)
    ep = link(owner, attacker)
    before = owner.stats()
    wins = [base.derive(i * width, width, GET | PUT) for i in range(count)]
    values = [keys(win.mkey_pack())[0] for win in wins]
    assert len(set(values)) == count
    by_value = sorted(range(count), key=values.__getitem__)
    victim = count // 2
    rank = by_value.index(victim)
    near = {victim - 1, victim + 1, by_value[rank - 1], by_value[rank + 1], 0, count - 1}
    wins[victim].invalidate()
    after = owner.stats()
    assert after["device.alloc_mw"] - before["device.alloc_mw"] == count
    assert after["device.dealloc_mw"] - before["device.dealloc_mw"] == 1
    for i in sorted(near):
        address = base.address + i * width
        expected = bytes(memory[i * width : (i + 1) * width])
        assert attacker.read(values[i], address, width) == (Wc.SUCCESS, expected)
        assert attacker.write(values[i], address, expected[::-1]) is Wc.SUCCESS
        assert memory[i * width : (i + 1) * width] == expected[::-1]
    frozen = bytes(memory)
    at = base.address + victim * width
    assert attacker.read(values[victim], at, width)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)
    assert attacker.write(values[victim], at, b"x") is Wc.REM_ACCESS_ERR
    relink(ep, attacker)
    assert memory == frozen
    assert attacker.read(keys(base.mkey_pack())[0], at, width) == (
        Wc.SUCCESS,
        frozen[victim * width : (victim + 1) * width],
    )
    base.dereg(cascade=True)
    after = owner.stats()
    assert after["device.alloc_mw"] == after["device.dealloc_mw"]


def test_access_bits_of_a_registration(owner, device):
    """What its direct key must allow, what windows need below them, and nothing else."""
    local, bind = 1, 1 << 4
    write, read, atomic = 1 << 1, 1 << 2, 1 << 3
    below = atomic if device.direct_atomics else 0
    for flags, expected in [
        (MemFlag.ACCESS_ALL, local | write | read | atomic | bind),
        (MemFlag.ACCESS_RMA, local | write | read | bind),
        (GET, read | bind),
        (MemFlag.LOCAL_READ, bind),
        (MemFlag.DERIVED_ONLY | REMOTE, local | bind | below),
        (MemFlag.DERIVED_ONLY | GET | PUT, local | bind),
        (MemFlag.DERIVED_ONLY | GET, bind),
    ]:
        with owner.mem_reg(bytearray(64), flags) as base:
            assert f"access bits {expected:#x}," in base.explain(), (flags, base.explain())
            assert direct_key(base)
