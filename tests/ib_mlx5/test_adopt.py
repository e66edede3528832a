# SPDX-License-Identifier: BSD-3-Clause
"""A base on an ibv_mr that a runtime registered: revocable keys on top of it, never freed by us."""

from collections.abc import Iterator

import pytest

import ucx_memh as um
from _rawqp import RawPeer


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
