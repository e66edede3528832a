# SPDX-License-Identifier: BSD-3-Clause
"""Devices with fewer windows than softmlx5, or none; what the domain declares then, and says.

Which windows there are a driver tells in ibv_query_device: it is replaced here by a library in
front of softmlx5's that tells of less.
"""

import errno
import shutil
import subprocess

import pytest

import ucx_memh as um
from _rawqp import software_library
from _rows import Unchanged, moves, text
from _sides import Wc, Where, keys, link
from ucx_memh import Enforcement, MdFlag, MemFlag, MemhState, PackFlag

GET, PUT, ATOMIC = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT, MemFlag.REMOTE_ATOMIC
SIZE = 64 << 10
WINDOWS, TYPE_2B = 1 << 17, 1 << 24
CC = shutil.which("cc") or shutil.which("gcc")
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    int (*next)(struct ibv_context *, struct ibv_device_attr *) =
        dlvsym(dlopen(BELOW, RTLD_NOW), "ibv_query_device", "IBVERBS_1.1");
    int failed = next(context, attr);
    attr->device_cap_flags &= ~(unsigned)WITHOUT;
    return failed;
}
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """`without(bits)`: a library whose device does not have these IBV_DEVICE_*."""
    folder = tmp_path_factory.mktemp("without")
    below = software_library()
    (folder / "lib.c").write_text(SOURCE)
    (folder / "lib.map").write_text("IBVERBS_1.1 { global: ibv_query_device; local: *; };")

    def build(bits):
        library = folder / f"lib{bits:x}.so"
        if not library.exists():
            made = [CC, "-shared", "-fPIC", "-o", library, folder / "lib.c"]
            made += ["-Wl,--no-as-needed", below, "-ldl"]
            made += [f'-DBELOW="{below}"', f"-DWITHOUT={bits}"]
            made += [f"-Wl,--version-script={folder / 'lib.map'}"]
            subprocess.run(made, check=True)
        return Where("ib", {"library": str(library)})

    return build


@pytest.mark.skipif(CC is None, reason="no C compiler to make a library with")
class TestFewerWindows:
    def test_D13_none_at_all(self, without, library):
        """One central refusal; nothing is made, and the handle serves on."""
        with without(WINDOWS | TYPE_2B).open() as md:
            keys_of = MdFlag.REG_DERIVED | MdFlag.DERIVE_ENDPOINT | MdFlag.INVALIDATE
            assert not md.attr.flags & keys_of
            assert md.attr.enforcement.revoke == um.EnforcementRow(*[Enforcement.NONE] * 3)
            assert "the device has no memory windows" in md.explain()
            memory = text()
            base = md.mem_reg(memory)
            link(md, library)
            with Unchanged(md, base):
                for arguments in ((), (0, 64), (0, 64, GET), (SIZE + 1,), (0, SIZE + 1)):
                    with pytest.raises(um.UnsupportedError, match="does not support derived"):
                        base.derive(*arguments)
                with pytest.raises(um.UnsupportedError):
                    md.mem_reg(memory, MemFlag.DERIVED_ONLY)
                with pytest.raises(um.UnsupportedError):
                    base.mkey_pack(PackFlag.INVALIDATE_RMA)
            assert "access bits 0xf," in base.explain()  # without the right to bind windows
            assert moves(library, memory, base)
            library.ends.clear()
            assert md.stats()["device.alloc_mw"] == md.stats()["device.control_qp"] == 0
            md.close(force=True)

    def test_S8_the_refusal_is_that_of_all_backends(self, without):
        refusals = set()
        with without(WINDOWS | TYPE_2B).open() as md, um.open_md("cma") as cma:
            for domain in (md, cma):
                with domain.mem_reg(text()) as base, pytest.raises(um.UnsupportedError) as caught:
                    base.derive()
                refusals.add((caught.value.status, caught.value.op, caught.value.detail))
        assert len(refusals) == 1

    def test_none_of_type_2(self, without, library):
        """Keys for all connections, and none for one alone, which is said."""
        with without(TYPE_2B).open() as md:
            assert md.attr.flags & MdFlag.REG_DERIVED
            assert not md.attr.flags & MdFlag.DERIVE_ENDPOINT
            assert "no windows of type 2B" in md.explain()
            memory = text()
            base = md.mem_reg(memory, MemFlag.DERIVED_ONLY)
            ep = link(md, library)
            with Unchanged(md, base), pytest.raises(um.UnsupportedError):
                base.derive(endpoint=ep)
            assert moves(library, memory, base.derive())
            md.close(force=True)


def test_windows_without_atomics(tidy, soft, device, library):
    """A device whose windows cannot carry the right: found at open, said, never packed as none."""
    soft.set("umr_modify_atomic_disabled", 1)
    try:
        with device.opened() as md:
            memory = text()
            base = md.mem_reg(memory)
            link(md, library)
            assert md.attr.flags & MdFlag.REG_DERIVED
            assert "atomics: by the direct key only" in md.explain()
            with Unchanged(md, base):
                for flags in (None, ATOMIC, GET | ATOMIC):
                    with pytest.raises(um.UnsupportedError, match="atomics through windows"):
                        base.derive(flags=flags)
            win = base.derive(flags=GET | PUT)
            assert moves(library, memory, base)
            assert moves(library, memory, win)
            assert not library.unpack(win.mkey_pack())[2] & ATOMIC
            assert md.attr.enforcement.range.get is Enforcement.ENFORCED
    finally:
        soft.set("umr_modify_atomic_disabled", "default")


def test_no_atomics_at_all(tidy, soft, device, library):
    soft.set("atomic", 0)
    try:
        with device.opened() as md:
            assert not md.attr.flags & MdFlag.ATOMIC
            memory = text()
            base = md.mem_reg(memory, MemFlag.ACCESS_RMA)
            link(md, library)
            assert moves(library, memory, base.derive())
    finally:
        soft.set("atomic", "default")


def test_without_the_self_check_no_range_is_promised(tidy, device, attacker):
    """Nothing is tried, so the library is all that is trusted with a range; the rest holds."""
    memory = text()
    with device.opened(self_check=False) as md:
        assert md.stats()["device.alloc_mw"] == md.stats()["device.control_qp"] == 0
        for row, kind in (("range", Enforcement.COOPERATIVE), ("rights", Enforcement.ENFORCED)):
            assert getattr(md.attr.enforcement, row) == um.EnforcementRow(kind, kind, kind)
        assert "not tried (self_check=False)" in md.explain()
        base = md.mem_reg(memory, MemFlag.DERIVED_ONLY)
        assert "some devices want" in base.explain()
        win = base.derive(64, 64)
        assert win.enforcement == md.attr.enforcement
        link(md, attacker)
        rkey, amo = keys(win.mkey_pack())
        assert attacker.read(rkey, win.address, 64) == (Wc.SUCCESS, memory[64:128])
        assert attacker.fetch_add(amo, win.address, 1)[0] is Wc.SUCCESS
        win.invalidate()
        assert attacker.read(rkey, win.address, 64)[0] is Wc.REM_ACCESS_ERR


@pytest.mark.parametrize("verb", ["reg_mr", "create_qp", "modify_qp"])
def test_a_self_check_that_cannot_be_made(tidy, soft, device, verb):
    """It opens all the same, promises nothing, says why, and leaves nothing behind."""
    soft.fault(f"{verb}:errno=12,count=0")
    with device.opened() as md:
        soft.fault("")
        assert not md.attr.flags & MdFlag.REG_DERIVED
        assert md.attr.enforcement.range.get is Enforcement.NONE
        assert "binding a window failed: ibv_" in md.explain()
        assert "errno 12" in md.explain()
        with md.mem_reg(bytearray(64)) as base, pytest.raises(um.UnsupportedError):
            base.derive()
        stats = md.stats()
        assert stats["device.alloc_mw"] == stats["device.dealloc_mw"]


@pytest.mark.parametrize("verb", ["reg_mr", "create_qp", "modify_qp"])
def test_a_self_check_gets_over_one_refusal(tidy, soft, device, verb):
    soft.fault(f"{verb}:errno=12")
    with device.opened() as md:
        assert md.attr.enforcement.range.get is Enforcement.ENFORCED


def test_the_control_queue_pair_does_not_come_back(soft, hooks, library):
    """Neither by a reset nor as a new one: refused, and the next pack brings it up."""
    memory = text()
    with hooks.opened() as md:
        base = md.mem_reg(memory, MemFlag.DERIVED_ONLY)
        link(md, library)
        win = base.derive()
        hooks.refuse("bind_mw", errno.EIO)
        soft.fault("modify_qp:errno=5,count=2")
        with pytest.raises(um.DeviceError) as caught:
            win.mkey_pack()
        assert caught.value.errno == errno.EIO
        assert win.state is MemhState.LIVE
        soft.fault("")
        assert library.get(win.mkey_pack(), 0, SIZE) == memory
