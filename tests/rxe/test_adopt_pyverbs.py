# SPDX-License-Identifier: BSD-3-Clause
"""Revocable keys to what pyverbs has registered; with the example of docs/adopting.md."""

import errno
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import ucx_memh as um
from _pages import blocks
from _rawqp import SYSTEM, RawPeer, Wc, keys
from ucx_memh import MemFlag

ROOT = Path(__file__).parents[2]
GET, PUT = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT
# What setup.sh has unpacked, or an installed package: in any case for Debian's own Python.
FOLDERS = [
    folder
    for root in (ROOT / "build/guest/pyverbs", Path("/"))
    if (folder := root / "usr/lib/python3/dist-packages/pyverbs").is_dir()
]

pytestmark = pytest.mark.source


@pytest.fixture(scope="module")
def pyverbs() -> Iterator[None]:
    """Its modules can be imported."""
    assert FOLDERS, "no pyverbs: tools/guest/setup.sh unpacks it"
    made_for = {path.name.split(".")[1] for path in FOLDERS[0].glob("base.*.so")}
    ours = sysconfig.get_config_var("SOABI")
    if ours not in made_for:
        pytest.skip(
            f"Debian's pyverbs is for {', '.join(made_for)} and this Python is {ours}; "
            "tests/ib/test_adopt.py adopts from ctypes"
        )
    sys.path.append(str(FOLDERS[0].parent))
    yield
    sys.path.remove(str(FOLDERS[0].parent))


@pytest.fixture
def example(pyverbs: None) -> Iterator[SimpleNamespace]:
    """The names that it leaves behind."""
    (block,) = blocks(ROOT / "docs/adopting.md", "python")
    names: dict[str, object] = {}
    exec(compile(block.code, "docs/adopting.md", "exec"), names)
    example = SimpleNamespace(**names)
    yield example
    example.md.close(force=True)
    example.mr.close()
    example.pd.close()


@pytest.fixture
def attacker() -> Iterator[RawPeer]:
    """Raw verbs on a context of its own."""
    with RawPeer(SYSTEM, gid_index=1, size=4096) as attacker:
        yield attacker


def join(ep: um.Endpoint, attacker: RawPeer) -> None:
    ep.reset()
    attacker.renew()
    ep.connect(attacker.address)
    attacker.connect(ep.address)


def test_the_example(example, attacker):
    from pyverbs.pyverbs_error import PyverbsRDMAError

    md, mr, base, win = (getattr(example, name) for name in "md mr base win".split())
    ep = md.endpoint()
    before = md.stats()
    assert (base.address, base.length) == (mr.buf, mr.length)
    mr.write("pyverbs wrote this", 18)
    number, _ = keys(example.key)
    join(ep, attacker)
    assert attacker.read(number, base.address, 18) == (Wc.SUCCESS, b"pyverbs wrote this")
    assert attacker.write(number, base.address, b"x") is Wc.REM_ACCESS_ERR
    join(ep, attacker)
    assert attacker.read(mr.rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR  # its own key

    other = base.derive(0, 64, PUT)
    write, _ = keys(other.mkey_pack())
    win.invalidate()
    join(ep, attacker)
    assert attacker.read(number, base.address, 8)[0] is Wc.REM_ACCESS_ERR
    join(ep, attacker)
    assert attacker.write(write, base.address, b"a peer") is Wc.SUCCESS
    assert mr.read(18, 0) == b"a peers wrote this"

    with pytest.raises(PyverbsRDMAError) as caught:  # a window is bound to it
        mr.close()
    assert caught.value.error_code == errno.EINVAL
    assert attacker.write(write, base.address, b"still ") is Wc.SUCCESS
    after = md.stats()
    for verb in ("device.reg_mr", "device.dereg_mr"):
        assert after[verb] == before[verb]
    md.close(force=True)
    assert mr.read(6, 0) == b"still "  # theirs, and as it was
    mr.close()


def test_what_pyverbs_did_not_allow(example):
    from pyverbs import enums as e
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    md, bases = example.md, example.md.stats()["live_bases"]

    def adopt(access: int, pd: PD = example.pd, flags: MemFlag | None = None) -> um.Memh:
        mr = MR(pd, 4096, access)
        return md.mem_adopt(example.native(mr)[0], owner=mr, flags=flags)

    with pytest.raises(um.UnsupportedError, match="IBV_ACCESS_MW_BIND"):
        adopt(e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ).derive()
    with pytest.raises(um.AccessError, match="IBV_ACCESS_LOCAL_WRITE"):
        adopt(e.IBV_ACCESS_MW_BIND)
    with pytest.raises(um.InvalidParamError, match="another protection domain"):
        adopt(e.IBV_ACCESS_MW_BIND, PD(example.context))
    reader = adopt(e.IBV_ACCESS_MW_BIND, flags=GET)
    assert reader.derive().mkey_pack()
    reader.dereg()
    assert md.stats()["live_bases"] == bases
