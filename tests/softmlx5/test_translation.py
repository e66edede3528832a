# SPDX-License-Identifier: BSD-3-Clause
"""The translation rule, row by row: who may reach what through which key."""

import errno
import mmap
import os

import pytest

from softmlx5 import sm5
from softmlx5.sm5 import (
    ALL,
    CAS,
    FAA,
    LOC_PROT,
    LW,
    MODE_KSM,
    MW_BIND,
    MWB,
    OK,
    RA,
    READ,
    REM_ACCESS,
    REM_INV_REQ,
    RR,
    RW,
    WRITE,
    Buf,
)


def fresh(dev, **kw):
    """An error costs the connection, so each attack gets its own."""
    return sm5.pair(dev, **kw)


@pytest.fixture
def arena(dev):
    """(local, local lkey, remote) with the remote buffer not yet registered."""
    local, far = Buf(1 << 16, 0xAA), Buf(1 << 16)
    far.write(bytes(range(256)) * 256)
    return local, dev.reg(local).contents.lkey, far


def attack(dev, arena, op, addr, key, n=8, **kw):
    local, lkey, _ = arena
    qa, qb = fresh(dev)
    status = qa.run(op, [(local.addr, n, lkey)], addr, key, **kw)
    if status != OK:
        assert qa.state == sm5.ERR
        assert qb.state == (sm5.ERR if status in (REM_ACCESS, REM_INV_REQ) else sm5.RTS)
    qa.destroy()
    qb.destroy()
    return status


@pytest.mark.parametrize(
    ("access", "read", "write", "atomic"),
    [
        (0, REM_ACCESS, REM_ACCESS, REM_ACCESS),
        (LW, REM_ACCESS, REM_ACCESS, REM_ACCESS),
        (RR, OK, REM_ACCESS, REM_ACCESS),
        (LW | RW, REM_ACCESS, OK, REM_ACCESS),
        (LW | RA, REM_ACCESS, REM_ACCESS, OK),
        (ALL, OK, OK, OK),
    ],
)
def test_direct_key_rights(dev, arena, access, read, write, atomic):
    far = arena[2]
    mr = dev.reg(far, access)
    for op, want in ((READ, read), (WRITE, write), (FAA, atomic), (CAS, atomic)):
        assert attack(dev, arena, op, far.addr, mr.contents.rkey) == want, op


@pytest.mark.parametrize(
    ("rights", "read", "write", "atomic"),
    [
        ({"rr": 0, "rw": 0}, REM_ACCESS, REM_ACCESS, REM_ACCESS),
        ({"rr": 1, "rw": 0}, OK, REM_ACCESS, REM_ACCESS),
        ({"rr": 0, "rw": 1}, REM_ACCESS, OK, REM_ACCESS),
        ({"rr": 0, "rw": 0, "a": 1}, REM_ACCESS, REM_ACCESS, OK),
        (
            {"rr": 1, "rw": 1, "lr": 0, "lw": 0},
            OK,
            OK,
            REM_ACCESS,
        ),  # local rights are for local use
    ],
)
def test_indirect_key_rights(dev, arena, rights, read, write, atomic):
    far = arena[2]
    mr = dev.reg(far)
    k = dev.klm([(4096, mr.contents.lkey, far.addr)], 0x1000, **rights)
    for op, want in ((READ, read), (WRITE, write), (FAA, atomic)):
        assert attack(dev, arena, op, 0x1000, k.key) == want, op
    k.destroy()


@pytest.mark.parametrize(
    ("access", "read", "write", "atomic"),
    [
        (0, OK, REM_ACCESS, REM_ACCESS),  # local read is all that a remote read needs below
        (LW, OK, OK, REM_ACCESS),  # remote rights of the MR do not matter: DERIVED_ONLY
        (RR, OK, REM_ACCESS, REM_ACCESS),
        (LW | RA, OK, OK, OK),  # an atomic does need the MR's right
    ],
)
def test_rights_below_an_indirect_key(dev, arena, access, read, write, atomic):
    far = arena[2]
    mr = dev.reg(far, access)
    k = dev.klm([(4096, mr.contents.lkey, far.addr)], 0x1000, a=1)
    for op, want in ((READ, read), (WRITE, write), (FAA, atomic)):
        assert attack(dev, arena, op, 0x1000, k.key) == want, op
    k.destroy()


def test_values_that_are_no_key(dev, arena):
    far = arena[2]
    mr = dev.reg(far)
    k = dev.klm([(4096, mr.contents.lkey, far.addr)], 0, tag=0x11)
    for key in (
        0,
        0xFFFFFFFF,
        k.key ^ 1,
        k.key ^ 0x80,
        k.key + 256,
        (k.key + (1 << 31)) & 0xFFFFFFFF,
        mr.contents.rkey + 1,
    ):
        assert attack(dev, arena, READ, 0, key) == REM_ACCESS, hex(key)
    assert attack(dev, arena, READ, 0, k.key) == OK
    k.destroy()
    assert attack(dev, arena, READ, 0, k.key) == REM_ACCESS


def test_free_key_is_no_key(dev, arena):
    far = arena[2]
    mr = dev.reg(far)
    k = dev.klm([(4096, mr.contents.lkey, far.addr)], 0, free=1, umr_en=1)
    assert attack(dev, arena, READ, 0, k.key) == REM_ACCESS
    k.destroy()


@pytest.mark.parametrize("op", [READ, WRITE])
@pytest.mark.parametrize(
    ("off", "n", "want"),
    [
        (0, 1000, OK),
        (0, 1001, REM_ACCESS),
        (-1, 1, REM_ACCESS),
        (999, 1, OK),
        (999, 2, REM_ACCESS),
        (1000, 1, REM_ACCESS),
        (500, 500, OK),
        (500, 501, REM_ACCESS),
        (299, 2, OK),
        (0, 300, OK),
    ],
)
def test_klm_exact_range(dev, arena, op, off, n, want):
    """Three entries, out of order in memory. Nothing beside them is touched, nothing at all on a
    refusal."""
    local, _lkey, far = arena
    mr = dev.reg(far)
    parts = [(300, 5000), (77, 100), (623, 20001)]
    k = dev.klm([(ln, mr.contents.lkey, far.addr + at) for ln, at in parts], 0x70001)
    before = far.read()
    where = [at + i for ln, at in parts for i in range(ln)]
    assert attack(dev, arena, op, 0x70001 + off, k.key, n) == want
    if op == READ:
        assert far.read() == before
        expect = bytes(before[w] for w in where[off : off + n]) if want == OK else b"\xaa" * n
        assert local.read(0, n) == expect
    else:
        expect = bytearray(before)
        for i in range(n if want == OK else 0):
            expect[where[off + i]] = 0xAA
        assert far.read() == expect
    k.destroy()


def test_direct_range_and_wrap(dev, arena):
    far = arena[2]
    mr = dev.reg(far, off=4096, n=8192)
    lo, hi = far.addr + 4096, far.addr + 4096 + 8192
    for addr, n, want in (
        (lo, 8192, OK),
        (lo - 1, 2, REM_ACCESS),
        (hi - 1, 2, REM_ACCESS),
        (hi, 1, REM_ACCESS),
        (2**64 - 4, 8, REM_ACCESS),
        (0, 8, REM_ACCESS),
    ):
        assert attack(dev, arena, READ, addr, mr.contents.rkey, n) == want, (addr - lo, n)


def test_zero_length_needs_no_key(dev):
    qa, _ = fresh(dev)
    assert qa.run(READ, [], 0, 0) == OK
    assert qa.run(WRITE, [], 12345, 0xFFFFFFFF) == OK


def test_iova(dev, arena):
    far = arena[2]
    mr = dev.reg(far, iova=0xABC000)
    assert attack(dev, arena, READ, 0xABC000 + 256, mr.contents.rkey) == OK
    assert arena[0].read(0, 8) == bytes(range(8))
    assert attack(dev, arena, READ, far.addr, mr.contents.rkey) == REM_ACCESS
    with pytest.raises(OSError):
        dev.reg(far, iova=0xABC001)


def test_ksm_as_ucx_builds_it(dev, arena):
    """2 GiB entities around one MR: bounds are the MR's, not the key's."""
    far = arena[2]
    mr = dev.reg(far)
    page = 1 << 31
    base = far.addr // page * page
    shift = far.addr - base
    n = (shift + far.size + page - 1) // page + 1
    k = dev.mkey(
        MODE_KSM,
        [(page, mr.contents.lkey, base + i * page) for i in range(n)],
        0x10000000000,
        shift + far.size,
        log_entity=31,
        tag=3,
        a=1,
    )
    iova = 0x10000000000 + shift
    assert attack(dev, arena, READ, iova, k.key, 256) == OK
    assert arena[0].read(0, 256) == bytes(range(256))
    assert attack(dev, arena, FAA, iova, k.key) == OK
    assert attack(dev, arena, READ, iova - 1, k.key) == REM_ACCESS
    assert attack(dev, arena, READ, iova + far.size - 4, k.key) == REM_ACCESS
    k.destroy()


def test_ksm_splits_at_entities(dev, arena):
    local, _, far = arena
    mr = dev.reg(far)
    k = dev.mkey(
        MODE_KSM,
        [(0, mr.contents.lkey, far.addr + 8192), (0, mr.contents.lkey, far.addr)],
        0x4000,
        8192,
        log_entity=12,
    )
    far.fill(1, 8192, 4096)
    far.fill(2, 0, 4096)
    assert attack(dev, arena, READ, 0x4000 + 4000, k.key, 192) == OK
    assert local.read(0, 192) == b"\1" * 96 + b"\2" * 96
    k.destroy()


def test_depth_is_bounded(dev, arena):
    far = arena[2]
    mr = dev.reg(far)
    keys, below, addr = [], mr.contents.lkey, far.addr
    for _ in range(5):
        keys.append(dev.klm([(4096, below, addr)], 0))
        below, addr = keys[-1].key, 0
    assert [attack(dev, arena, READ, 0, k.key) for k in keys] == [OK] * 4 + [REM_ACCESS]
    sm5.setting("max_indirection", 2)
    try:
        assert attack(dev, arena, READ, 0, keys[2].key) == REM_ACCESS
    finally:
        sm5.setting("max_indirection", "default")
    for k in reversed(keys):
        assert k.destroy() == 0


def test_entry_that_names_no_key(dev, arena):
    k = dev.klm([(4096, 0x123400, 0)], 0)
    assert attack(dev, arena, READ, 0, k.key) == REM_ACCESS
    k.destroy()


def test_other_domain(dev, arena):
    """A key of another protection domain, outer or inner, is no key."""
    far = arena[2]
    other = sm5.alloc_pd(dev.ctx)
    mr = dev.reg(far, pd=other)
    assert attack(dev, arena, READ, far.addr, mr.contents.rkey) == REM_ACCESS
    k = dev.klm([(4096, mr.contents.lkey, far.addr)], 0)
    assert attack(dev, arena, READ, 0, k.key) == REM_ACCESS
    k.destroy()
    mine = dev.reg(far)
    k = dev.klm([(4096, mine.contents.lkey, far.addr)], 0, pdn=dev.pd_number(other))
    assert attack(dev, arena, READ, 0, k.key) == REM_ACCESS
    assert sm5.dealloc_pd(other) == errno.EBUSY
    k.destroy()
    assert dev.dereg(mr) == 0
    assert sm5.dealloc_pd(other) == 0


def test_bound_to_a_queue_pair(dev, arena):
    local, lkey, far = arena
    mr = dev.reg(far)
    qa, qb = fresh(dev)
    qc, _qd = fresh(dev)
    k = dev.klm([(4096, mr.contents.lkey, far.addr)], 0, qpn=qb.num)
    assert qc.run(READ, [(local.addr, 8, lkey)], 0, k.key) == REM_ACCESS
    assert qa.run(READ, [(local.addr, 8, lkey)], 0, k.key) == OK
    k.destroy()


@pytest.mark.parametrize("addr_off", [1, 4, 7])
def test_atomics_are_aligned(dev, arena, addr_off):
    far = arena[2]
    mr = dev.reg(far)
    before = far.read()
    assert attack(dev, arena, FAA, far.addr + addr_off, mr.contents.rkey, add=1) == REM_INV_REQ
    assert far.read() == before


def test_queue_pair_rights(dev, arena):
    local, lkey, far = arena
    mr = dev.reg(far)
    for access, want in (
        (RR, (OK, REM_INV_REQ, REM_INV_REQ)),
        (RW, (REM_INV_REQ, OK, REM_INV_REQ)),
        (RA, (REM_INV_REQ, REM_INV_REQ, OK)),
    ):
        for op, w in zip((READ, WRITE, FAA), want, strict=True):
            qa, qb = dev.qp(), dev.qp(access=access)
            qa.connect(qb.address)
            qb.connect(qa.address)
            assert qa.run(op, [(local.addr, 8, lkey)], far.addr, mr.contents.rkey) == w
            qa.destroy()
            qb.destroy()


# ---- the requester's own keys ----


@pytest.mark.parametrize(
    ("op", "access", "want"),
    [(READ, 0, LOC_PROT), (READ, LW, OK), (WRITE, 0, OK), (FAA, RR, LOC_PROT), (FAA, LW, OK)],
)
def test_local_rights(dev, arena, op, access, want):
    local, _, far = arena
    mr = dev.reg(far)
    own = dev.reg(local, access)
    qa, qb = fresh(dev)
    assert qa.run(op, [(local.addr, 8, own.contents.lkey)], far.addr, mr.contents.rkey) == want
    assert qb.state == sm5.RTS


def test_bad_local_key_completes_at_execution(dev, arena):
    local, lkey, far = arena
    mr = dev.reg(far)
    for sge in (
        (local.addr, 8, 0),
        (local.addr, 8, lkey ^ 1),
        (local.addr - 1, 8, lkey),
        (local.addr + local.size - 4, 8, lkey),
    ):
        qa, qb = fresh(dev)
        qa.post(READ, [(local.addr, 8, lkey)], far.addr, mr.contents.rkey, wr_id=1)
        qa.post(READ, [sge], far.addr, mr.contents.rkey, wr_id=2)
        qa.post(READ, [(local.addr, 8, lkey)], far.addr, mr.contents.rkey, wr_id=3)
        assert [(w.wr_id, w.status) for w in dev.poll(3)] == [
            (1, OK),
            (2, LOC_PROT),
            (3, sm5.FLUSH),
        ]
        qa.destroy()
        qb.destroy()


def test_indirect_key_as_local_key(dev, arena):
    local, lkey, far = arena
    mr = dev.reg(far)
    k = dev.klm([(100, lkey, local.addr + 1000), (100, lkey, local.addr)], 0)
    qa, _ = fresh(dev)
    assert qa.run(READ, [(0, 200, k.key)], far.addr, mr.contents.rkey) == OK
    assert local.read(1000, 100) + local.read(0, 100) == far.read(0, 200)
    k.destroy()


# ---- memory windows ----


def test_type_1_window(dev, arena):
    far = arena[2]
    mr = dev.reg(far, LW | MWB)
    qa, _ = fresh(dev)
    mw = dev._alloc_mw(dev.pd, 1)
    bind = sm5.MwBind(
        5, sm5.SIGNALED, sm5.MwBindInfo(sm5.C.addressof(mr.contents), far.addr + 256, 256, RR)
    )
    assert dev._bind_mw(qa.qp, mw, sm5.C.byref(bind)) == 0
    wc = dev.poll(1)[0]
    assert (wc.wr_id, wc.status, wc.opcode) == (5, OK, 5)
    key = mw.contents.rkey
    assert attack(dev, arena, READ, far.addr + 256, key, 256) == OK
    assert attack(dev, arena, READ, far.addr + 255, key, 256) == REM_ACCESS
    assert attack(dev, arena, WRITE, far.addr + 256, key) == REM_ACCESS
    assert dev.dereg(mr) == errno.EBUSY
    assert dev._bind_mw(qa.qp, mw, sm5.C.byref(bind)) == 0  # again: a new key, the old one is dead
    assert dev.poll(1)[0].status == OK
    assert attack(dev, arena, READ, far.addr + 256, key) == REM_ACCESS
    assert attack(dev, arena, READ, far.addr + 256, mw.contents.rkey) == OK
    assert dev._dealloc_mw(mw) == 0
    assert dev.dereg(mr) == 0


def test_type_2_window(dev, arena):
    """Bound to its queue pair; invalidated by LOCAL_INV; bound again only when free."""
    local, lkey, far = arena
    mr = dev.reg(far, LW | MWB)
    qa, qb = fresh(dev)
    mw = dev._alloc_mw(dev.pd, 2)
    key = mw.contents.rkey + 1
    assert qb.bind(mw, key, mr, far.addr, 4096, RR | RW) == 0
    assert dev.poll(1)[0].status == OK
    mw.contents.rkey = key
    assert qa.run(READ, [(local.addr, 8, lkey)], far.addr, key) == OK
    assert attack(dev, arena, READ, far.addr, key) == REM_ACCESS  # another queue pair
    qb.post_wr(qb.wr(sm5.LOCAL_INV, imm=key))
    assert dev.poll(1)[0].status == OK
    assert qa.run(READ, [(local.addr, 8, lkey)], far.addr, key) == REM_ACCESS
    assert dev._dealloc_mw(mw) == 0


def test_remote_invalidate(dev, arena):
    """SEND_WITH_INV takes the receiver's window away before the receive completes."""
    _local, _lkey, far = arena
    mr = dev.reg(far, LW | MWB)
    qa, qb = fresh(dev)
    mw = dev._alloc_mw(dev.pd, 2)
    key = mw.contents.rkey + 1
    assert qb.bind(mw, key, mr, far.addr, 4096, RR) == 0
    assert dev.poll(1)[0].status == OK
    qb.post_recv(wr_id=1)
    qb.post_recv(wr_id=2)
    qa.post(sm5.SEND_INV, [], imm=key, wr_id=3)
    got = {w.wr_id: w for w in dev.poll(2)}
    assert (got[1].status, got[1].flags & 8, got[1].imm) == (OK, 8, key)
    assert attack(dev, arena, READ, far.addr, key) == REM_ACCESS
    qa.post(sm5.SEND_INV, [], imm=mr.contents.rkey, wr_id=4)  # not a window
    got = {w.wr_id: w.status for w in dev.poll(2)}
    assert got == {4: REM_ACCESS, 2: sm5.FLUSH}
    assert dev._dealloc_mw(mw) == 0


@pytest.mark.parametrize(
    ("access", "rights", "off", "n"),
    [(LW, RR, 0, 4096), (MWB, RW, 0, 4096), (LW | MWB, RR, 0, 65537), (LW | MWB, RR, -1, 8)],
    ids=["no bind right", "remote write needs local write", "too long", "before"],
)
def test_bind_refused(dev, arena, access, rights, off, n):
    far = arena[2]
    mr = dev.reg(far, access)
    qa, _ = fresh(dev)
    mw = dev._alloc_mw(dev.pd, 2)
    assert qa.bind(mw, mw.contents.rkey + 1, mr, far.addr + off, n, rights) == 0
    assert dev.poll(1)[0].status == MW_BIND
    assert qa.state == sm5.ERR
    assert dev._dealloc_mw(mw) == 0


def dv_mkey(dev, entries=1):
    init = sm5.DvMkeyInit(dev.pd, 1, entries)
    k = sm5.dv_create_mkey(sm5.C.byref(init))
    assert k
    return k


def test_umr_key_is_aimed_freed_and_aimed_again(dev, arena):
    """What UCX does: a type-1 bind on an indirect mkey through a loopback queue pair."""
    local, lkey, far = arena
    mr = dev.reg(far, LW)
    qa, qb = fresh(dev)
    k = dv_mkey(dev)
    key = k.contents.rkey
    assert attack(dev, arena, READ, far.addr, key) == REM_ACCESS  # free until aimed
    for tag in (1, 2, 3):
        mw = sm5.C.pointer(sm5.Mw(dev.ctx, dev.pd, key, 0, 1))
        new = key & ~0xFF | tag
        assert qb.bind(mw, new, mr, far.addr + 256 * tag, 512, LW | RR | RW) == 0
        assert dev.poll(1)[0].status == OK
        assert qa.run(READ, [(local.addr, 512, lkey)], far.addr + 256 * tag, new) == OK
        assert qb.post_wr(qb.wr(sm5.LOCAL_INV, imm=new)) == 0
        assert dev.poll(1)[0].status == OK
        assert attack(dev, arena, READ, far.addr + 256 * tag, new) == REM_ACCESS
        key = new
    assert dev.dereg(mr) == 0  # nothing points at it any more
    assert sm5.dv_destroy_mkey(k) == 0


def test_bind_atomic_right_can_be_switched_off(dev, arena):
    far = arena[2]
    mr = dev.reg(far, LW | RA)
    for off, want in ((0, OK), (1, MW_BIND)):
        sm5.setting("umr_modify_atomic_disabled", off)
        qa, qb = fresh(dev)
        k = dv_mkey(dev)
        mw = sm5.C.pointer(sm5.Mw(dev.ctx, dev.pd, k.contents.rkey, 0, 1))
        qa.bind(mw, k.contents.rkey + 1, mr, far.addr, 64, RA)
        assert dev.poll(1)[0].status == want
        if want == OK:
            assert attack(dev, arena, FAA, far.addr, k.contents.rkey + 1) == OK
        assert sm5.dv_destroy_mkey(k) == 0
        qa.destroy()
        qb.destroy()
    sm5.setting("umr_modify_atomic_disabled", "default")


def test_local_inv_of_a_plain_mr_is_an_error(dev, arena):
    mr = dev.reg(arena[2])
    qa, _ = fresh(dev)
    qa.post_wr(qa.wr(sm5.LOCAL_INV, imm=mr.contents.rkey))
    assert dev.poll(1)[0].status == MW_BIND
    assert attack(dev, arena, READ, arena[2].addr, mr.contents.rkey) == OK


# ---- what may be registered ----


def reg_errno(dev, addr, n, access):
    mr = sm5.reg_mr(dev.pd, addr, n, addr, access)
    if not mr:
        return sm5.C.get_errno()
    assert sm5.dereg_mr(mr) == 0
    return 0


def test_registration_refusals(dev, tmp_path):
    ro = mmap.mmap(-1, 8192, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    addr = address_of(ro)
    live = sm5.stat("mrs.live")
    assert reg_errno(dev, addr, 8192, RR) == 0
    assert reg_errno(dev, addr, 8192, 0) == 0
    assert reg_errno(dev, addr, 8192, LW) == errno.EFAULT
    assert reg_errno(dev, addr, 8192, MWB) == errno.EFAULT
    b = Buf(8192)
    assert reg_errno(dev, b.addr, 8192, RW) == errno.EINVAL
    assert reg_errno(dev, b.addr, 8192, RA) == errno.EINVAL
    assert reg_errno(dev, b.addr, 0, ALL) == errno.EINVAL
    assert reg_errno(dev, b.addr, 8192, 1 << 15) == errno.EINVAL
    assert reg_errno(dev, b.addr, 8192, ALL | 1 << 20) == 0  # relaxed ordering is a hint
    assert reg_errno(dev, 4096, 8192, RR) == errno.EFAULT
    assert reg_errno(dev, 2**64 - 4096, 8192, RR) == errno.EINVAL
    assert sm5.stat("mrs.live") == live


def address_of(m):
    """Address of a mapping whose buffer is read-only, without numpy."""

    class PyBuffer(sm5.C.Structure):
        _fields_ = [("buf", sm5.C.c_void_p), ("obj", sm5.C.py_object), ("rest", sm5.C.c_byte * 64)]

    view = PyBuffer()
    get = sm5.C.pythonapi.PyObject_GetBuffer
    get.argtypes = [sm5.C.py_object, sm5.C.c_void_p, sm5.C.c_int]
    assert get(m, sm5.C.byref(view), 0) == 0
    addr = view.buf
    sm5.C.pythonapi.PyBuffer_Release.argtypes = [sm5.C.c_void_p]
    sm5.C.pythonapi.PyBuffer_Release(sm5.C.byref(view))
    return addr


def on_disk(path):
    """Is this directory on a file system that keeps files on a disk?"""
    import subprocess

    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", path], capture_output=True, text=True
    ).stdout.strip()
    return kind not in ("tmpfs", "ramfs", "hugetlbfs")


@pytest.mark.parametrize("shared", [True, False])
def test_file_mappings(dev, tmp_path, shared):
    """Long-term write pins of a shared file mapping are refused; a private one is memory."""
    if not on_disk(tmp_path):
        pytest.skip("the temporary directory is in memory")
    f = tmp_path / "data"
    f.write_bytes(bytes(8192))
    with open(f, "r+b") as fh:
        m = mmap.mmap(fh.fileno(), 8192, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    addr = address_of(m)
    assert reg_errno(dev, addr, 8192, ALL) == (errno.EFAULT if shared else 0)
    assert reg_errno(dev, addr, 8192, RR) == 0
    m.close()
    if shared:  # deleted while mapped: still a file
        with open(f, "r+b") as fh:
            m = mmap.mmap(fh.fileno(), 8192)
        f.unlink()
        assert reg_errno(dev, address_of(m), 8192, ALL) == errno.EFAULT
        m.close()


def test_shared_memory_is_memory(dev, tmp_path):
    fd = os.memfd_create("x")
    os.truncate(fd, 8192)
    m = mmap.mmap(fd, 8192)
    assert reg_errno(dev, address_of(m), 8192, ALL) == 0
    anon = mmap.mmap(-1, 8192)  # shared anonymous
    assert reg_errno(dev, address_of(anon), 8192, ALL) == 0
    with open("/dev/shm/softmlx5-test", "w+b") as fh:
        os.unlink(fh.name)
        fh.truncate(8192)
        shm = mmap.mmap(fh.fileno(), 8192)
    assert reg_errno(dev, address_of(shm), 8192, ALL) == 0
    os.close(fd)


def test_dmabuf(dev, arena):
    fd = os.memfd_create("buf")
    os.truncate(fd, 1 << 16)
    os.pwrite(fd, b"hello dmabuf", 5000)
    mr = sm5.reg_dmabuf_mr(dev.pd, 5000, 1000, 0x80000000 + 5000 % 4096, fd, ALL)
    assert mr
    dev.mrs.append(mr)
    assert attack(dev, arena, READ, 0x80000000 + 5000 % 4096, mr.contents.rkey, 12) == OK
    assert arena[0].read(0, 12) == b"hello dmabuf"
    assert not sm5.reg_dmabuf_mr(dev.pd, 0, 4096, 0, -1, ALL)
    assert sm5.C.get_errno() == errno.EBADF
    # Its manual page: it takes no such flag.
    assert not sm5.reg_dmabuf_mr(dev.pd, 0, 4096, 0, fd, ALL | MWB)
    assert sm5.C.get_errno() == errno.EINVAL
    assert not sm5.reg_dmabuf_mr(dev.pd, 1 << 16, 4096, 0, fd, ALL)
    assert sm5.C.get_errno() == errno.EINVAL
    os.close(fd)


def test_memlock_is_counted(dev):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    b = Buf(1 << 20)
    sm5.setting("memlock", "enforce")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, hard))
    try:
        mr = dev.reg(b, n=1 << 19)
        assert reg_errno(dev, b.addr, (1 << 19) + 4096, ALL) == errno.ENOMEM
        assert reg_errno(dev, b.addr, 1 << 18, ALL) == 0
        dev.dereg(mr)
        assert reg_errno(dev, b.addr, 1 << 19, ALL) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
