# SPDX-License-Identifier: BSD-3-Clause
"""A base on an ibv_mr that a runtime registered: revocable keys on top of it, never freed by us."""

import ctypes
import errno
from collections.abc import Callable, Iterator

import pytest

import ucx_memh as um
from _rawqp import MR_RKEY, RawPeer
from _sides import Wc, keys, link, relink
from ucx_memh import Enforcement, MemFlag

LOCAL_WRITE, READ, ATOMICS = 1, 4, 8  # IBV_ACCESS_*


@pytest.fixture
def runtime() -> Iterator[RawPeer]:
    """Somebody else's context, protection domain and memory region."""
    with RawPeer(size=4096) as runtime:
        yield runtime


@pytest.fixture
def md(runtime: RawPeer) -> Iterator[um.Md]:
    with um.open_md(
        "ib_mlx5", device="software", context=runtime.context.value, pd=runtime.pd.value
    ) as md:
        yield md


@pytest.fixture
def region(runtime: RawPeer) -> Iterator[Callable[[int], ctypes.c_void_p]]:
    """`region(access)`: another ibv_mr of the runtime's, of 4096 zeros."""
    made = []

    def register(access: int) -> ctypes.c_void_p:
        memory = ctypes.create_string_buffer(4096)
        mr = runtime.lib.ibv_reg_mr(runtime.pd, memory, ctypes.c_size_t(4096), access)
        made.append((ctypes.c_void_p(mr), memory))
        return made[-1][0]

    yield register
    for mr, _ in made:
        assert mr.value is None or runtime.lib.ibv_dereg_mr(mr) == 0


def test_keys_on_somebody_elses_region(runtime, md):
    before = md.stats()
    base = md.mem_adopt(runtime.mr.value, owner=runtime)
    assert base.length == 4096
    win = base.derive(64, 64, um.MemFlag.REMOTE_GET)
    rkey = md.rkey_unpack(win.mkey_pack())
    one, two = md.endpoint(), md.endpoint()
    one.connect(two.address)
    two.connect(one.address)
    runtime.buffer[64:69] = b"owned"
    into = bytearray(5)
    one.get(rkey, base.address + 64, into)
    assert into == b"owned"
    win.invalidate()
    with pytest.raises(um.RemoteAccessError):
        one.get(rkey, base.address + 64, into)
    rkey.close()
    one.close()
    two.close()
    base.dereg()
    after = md.stats()
    # The bounce buffers of the endpoints, and nothing of the runtime's.
    assert after["device.reg_mr"] - before["device.reg_mr"] == 1
    assert after["device.dereg_mr"] == before["device.dereg_mr"]
    assert runtime.lib.ibv_dereg_mr(runtime.mr) == 0  # still there, and theirs to free
    runtime.mr = None


def test_another_domains_region_is_refused(runtime):
    with um.open_md("ib_mlx5", device="software") as other:
        with pytest.raises(um.InvalidParamError, match="protection domain"):
            other.mem_adopt(runtime.mr.value)
        assert other.stats()["live_bases"] == 0


def test_what_adopts_nothing_says_so(runtime):
    with um.open_md("cma") as cma:
        with pytest.raises(um.UnsupportedError):
            cma.mem_adopt(runtime.mr.value)
        with pytest.raises(um.InvalidParamError):
            cma.mem_adopt(0)


@pytest.mark.parametrize("access", [READ, LOCAL_WRITE], ids=["no LOCAL_WRITE", "no REMOTE_ATOMIC"])
def test_what_it_was_not_registered_for_the_device_refuses(md, region, attacker, access):
    """Firmware makes the key all the same, so nobody knows before it is used; that is said."""
    base = md.mem_adopt(region(access).value, flags=MemFlag.ACCESS_ALL)
    assert "access bits are not known here" in base.explain()
    assert "put needs IBV_ACCESS_LOCAL_WRITE" in base.explain()
    win = base.derive()
    rma, amo = keys(win.mkey_pack())
    ep = link(md, attacker)
    assert attacker.read(rma, base.address, 8) == (Wc.SUCCESS, bytes(8))
    good = access == LOCAL_WRITE
    assert attacker.write(rma, base.address, b"x") is (Wc.SUCCESS if good else Wc.REM_ACCESS_ERR)
    relink(ep, attacker)
    assert attacker.fetch_add(amo, base.address, 1)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)
    assert attacker.read(rma, base.address, 1) == (Wc.SUCCESS, b"x" if good else b"\0")
    md.close(force=True)


def test_the_runtime_deregisters_first(runtime, md, region, attacker):
    """Not while a key stands on it; and a key that is made too late is of no use."""
    mr = region(LOCAL_WRITE)
    base = md.mem_adopt(mr.value)
    win, unpacked = base.derive(), base.derive()
    rma, _ = keys(win.mkey_pack())
    ep = link(md, attacker)
    assert runtime.lib.ibv_dereg_mr(mr) == errno.EBUSY
    assert attacker.read(rma, base.address, 8)[0] is Wc.SUCCESS
    win.invalidate()
    assert runtime.lib.ibv_dereg_mr(mr) == 0
    mr.value = None
    late, _ = keys(unpacked.mkey_pack())
    for number in (rma, late):
        assert attacker.read(number, base.address, 8)[0] is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
    base.dereg(cascade=True)
    md.close(force=True)


def test_its_own_key_may_do_more_than_was_said(runtime, md, attacker):
    """So the device is not said to enforce the rights of such a key; and it can be kept back."""
    base = md.mem_adopt(runtime.mr.value, flags=MemFlag.REMOTE_GET)
    assert base.enforcement.rights.put is Enforcement.COOPERATIVE
    win = base.derive()
    assert win.enforcement.rights.put is Enforcement.ENFORCED
    link(md, attacker)
    number, _ = keys(base.mkey_pack())
    assert number == ctypes.c_uint32.from_address(runtime.mr.value + MR_RKEY).value
    assert attacker.write(number, base.address, b"more") is Wc.SUCCESS
    assert runtime.buffer[:4] == b"more"
    kept = md.mem_adopt(runtime.mr.value, flags=MemFlag.DERIVED_ONLY)
    assert kept.grant == MemFlag.ACCESS_RMA
    assert "no pack gives its direct key away" in kept.explain()
    with pytest.raises(um.UnsupportedError):
        kept.mkey_pack()
    md.close(force=True)


def test_a_domain_of_another_context(runtime):
    with RawPeer(size=64) as other, pytest.raises(um.InvalidParamError, match="this ibv_context"):
        um.open_md("ib_mlx5", device="software", context=runtime.context.value, pd=other.pd.value)
