# SPDX-License-Identifier: BSD-3-Clause
"""What the device enforces for keys that are mlx5 mkeys: tests/_attacks.py, and what mlx5 has."""

import ctypes
import mmap

import pytest

import ucx_memh as um
from _attacks import *  # noqa: F403
from _attacks import GET, PUT, SIZE, Attack
from _gated import *  # noqa: F403
from _rawqp import RawPeer
from _sides import Wc, keys, link, relink
from ucx_memh import MemFlag


@pytest.fixture(params=["auto", "off"], ids=lambda umr: f"umr {umr}")
def umr(request):
    return request.param


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
