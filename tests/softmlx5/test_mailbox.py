# SPDX-License-Identifier: BSD-3-Clause
"""CREATE_MKEY and friends, byte for byte: what is refused, with which status, and how."""

import ctypes as C
import errno

import pytest

from softmlx5 import sm5
from softmlx5.sm5 import MODE_KLM, MODE_KSM, MODE_MTT, Buf, Refused

BAD_OP, BAD_PARAM, BAD_RES, LIM, BAD_INDEX, IN_LEN, OUT_LEN = 2, 3, 5, 8, 10, 0x50, 0x51
ENTRY = [(4096, 0x1234, 0x10000)]


def refusal(dev, **kw):
    args = {"mode": MODE_KLM, "entries": ENTRY, "start": 0, "length": 4096, **kw}
    with pytest.raises(Refused) as e:
        dev.mkey(
            args.pop("mode"), args.pop("entries"), args.pop("start"), args.pop("length"), **args
        )
    assert e.value.err == errno.EREMOTEIO
    assert e.value.syndrome
    return e.value


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (BAD_OP, {"raw": [(0x30, 16, 1)]}),
        (BAD_PARAM, {"raw": [(0x20, 16, 1)]}),  # reserved word of the header
        (BAD_PARAM, {"raw": [(0x40, 8, 1)]}),
        (BAD_PARAM, {"raw": [(0x80, 1, 1)]}),  # reserved bit of the context
        (BAD_PARAM, {"raw": [(0x280, 32, 7)]}),
        (BAD_PARAM, {"raw": [(0x380, 32, 7)]}),
        (BAD_PARAM, {"raw": [(0xE0, 1, 1)]}),  # length64
        (BAD_PARAM, {"raw": [(0x86, 1, 1)]}),  # cross-vhca
        (BAD_INDEX, {"raw": [(0x48, 24, 77)]}),
        (BAD_PARAM, {"mode": 0}),  # physical addresses
        (BAD_PARAM, {"mode": 5}),
        (BAD_RES, {"pdn": 0}),
        (BAD_RES, {"pdn": 0xABCDEF}),
        (BAD_PARAM, {"entries": [], "length": 0}),
        (BAD_PARAM, {"actual": 0}),
        (BAD_PARAM, {"octwords": 5}),  # KLM lists are padded to 4
        (BAD_PARAM, {"octwords": 8}),  # and no further
        (BAD_PARAM, {"octwords": 0}),
        (IN_LEN, {"actual": 8, "octwords": 8}),  # more entries than bytes
        (BAD_PARAM, {"entries": [((1 << 31) + 1, 1, 0)]}),
        (BAD_PARAM, {"length": 4097}),  # longer than its entries
        (BAD_PARAM, {"start": 2**64 - 100}),
        (LIM, {"octwords": 1 << 17, "actual": 1 << 17}),
        (BAD_PARAM, {"mode": MODE_KSM, "log_entity": 12, "length": 8192}),
        (BAD_PARAM, {"mode": MODE_KSM, "log_entity": 0}),
        (BAD_RES, {"mode": MODE_MTT}),  # no umem
    ],
)
def test_refused(dev, status, change):
    live = sm5.stat("mkeys.live")
    assert refusal(dev, **change).status == status
    assert sm5.stat("mkeys.live") == live
    assert sm5.stat("last.status") == status


def test_syndromes_tell_the_reasons_apart(dev):
    a = refusal(dev, raw=[(0x20, 16, 1)]).syndrome
    b = refusal(dev, pdn=0).syndrome
    c = refusal(dev, length=4097).syndrome
    assert len({a, b, c}) == 3


def test_lengths_of_the_mailboxes(dev):
    box = sm5.mkey_mailbox(dev.pdn, MODE_KLM, ENTRY, 0, 4096)
    for n, status in ((16, IN_LEN), (271, IN_LEN), (272, IN_LEN), (len(box) - 1, IN_LEN)):
        with pytest.raises(Refused) as e:
            sm5.Mkey(dev.ctx, box[:n])
        assert (e.value.err, e.value.status) == (errno.EREMOTEIO, status), n
    with pytest.raises(Refused) as e:
        sm5.Mkey(dev.ctx, box, outlen=8)
    assert (e.value.err, e.value.status) == (errno.EREMOTEIO, OUT_LEN)
    with pytest.raises(Refused) as e:  # the kernel: not even a header
        sm5.Mkey(dev.ctx, box[:8])
    assert e.value.err == errno.EINVAL
    with pytest.raises(Refused) as e:  # nor an object to create
        sm5.Mkey(dev.ctx, (0x800).to_bytes(2, "big") + box[2:])
    assert e.value.err == errno.EINVAL


def test_good_ones(dev):
    for k in (
        dev.mkey(MODE_KLM, ENTRY, 0x5000, 4096, tag=0x5A),
        dev.mkey(MODE_KLM, ENTRY, 0x5000, 4096, actual=1),  # padded list, real count
        dev.mkey(MODE_KSM, [(1 << 31, 7, 0)], 0x5000, 1 << 20, log_entity=31),  # as UCX: not padded
        dev.mkey(MODE_KLM, [], 0, 0, free=1, umr_en=1, octwords=4, actual=0),
    ):
        assert k.destroy() == 0


def test_query_mkey_gives_the_context_back(dev):
    k = dev.mkey(MODE_KLM, ENTRY, 0x123456789000, 4096, tag=0x5A, a=1, rw=0, qpn=0x77)
    q = bytearray(16)
    sm5.bits_set(q, 0, 16, 0x201)
    sm5.bits_set(q, 0x48, 24, k.index)
    out = C.create_string_buffer(80)
    assert sm5.obj_query(k.obj, bytes(q), 16, out, 80) == 0
    mkc = out.raw[16:]
    got = {
        n: sm5.bits_get(mkc, *at)
        for n, at in {
            "a": (0x11, 1),
            "rw": (0x12, 1),
            "rr": (0x13, 1),
            "mode": (0x16, 2),
            "qpn": (0x20, 24),
            "tag": (0x38, 8),
            "pd": (0x68, 24),
            "start": (0x80, 64),
            "len": (0xC0, 64),
        }.items()
    }
    assert got == {
        "a": 1,
        "rw": 0,
        "rr": 1,
        "mode": 2,
        "qpn": 0x77,
        "tag": 0x5A,
        "pd": dev.pdn,
        "start": 0x123456789000,
        "len": 4096,
    }
    assert k.destroy() == 0


def test_key_that_is_pointed_at_cannot_go(dev):
    buf = Buf(4096)
    mr = dev.reg(buf)
    inner = dev.klm([(4096, mr.contents.lkey, buf.addr)], 0)
    outer = dev.klm([(4096, inner.key, 0)], 0)
    assert dev.dereg(mr) == errno.EBUSY
    assert inner.destroy() == errno.EBUSY
    assert sm5.stat("last.status") == 6
    assert outer.destroy() == 0
    assert inner.destroy() == 0
    assert dev.dereg(mr) == 0


def test_index_policies(dev):
    def make():
        return dev.mkey(MODE_KLM, ENTRY, 0, 4096)

    a, b = make(), make()
    old = a.index
    a.destroy()
    a = make()
    assert a.index == old  # the nastiest is the default
    sm5.setting("index_policy", "fifo")
    a.destroy()
    a = make()
    assert a.index not in (old, b.index)
    sm5.setting("index_policy", f"fixed:{old + 50}")
    c = make()
    assert c.index == old + 50
    for k in (a, b, c):
        k.destroy()
    assert sm5.setting("index_policy", "random") == errno.EINVAL


def general(dev, opcode, op_mod, outlen=4112):
    box = bytearray(16)
    sm5.bits_set(box, 0, 16, opcode)
    sm5.bits_set(box, 0x30, 16, op_mod)
    out = C.create_string_buffer(outlen)
    rc = sm5.general_cmd(dev.ctx, bytes(box), 16, out, outlen)
    return rc, out.raw


def test_query_hca_cap(dev):
    for cur in (0, 1):
        rc, out = general(dev, 0x100, 0 << 1 | cur)
        assert rc == 0
        cap = out[16:]
        assert sm5.bits_get(cap, 0x108, 1) == 1  # fixed_buffer_size
        assert sm5.bits_get(cap, 0x1C3, 5) == 30  # log_max_msg
        assert sm5.bits_get(cap, 0x208, 1) == 0  # umr_modify_atomic_disabled
        assert sm5.bits_get(cap, 0x21E, 1) == 1  # atomic
        assert sm5.bits_get(cap, 0x100, 8) >= 2  # max_indirection
    rc, out = general(dev, 0x100, 3 << 1 | 1)
    assert rc == 0 and sm5.bits_get(out[16:], 0xB0, 16) & 8
    assert sm5.bits_get(out[16:], 0x90, 16) & 3 == 3
    for t in (2, 0x20):
        assert general(dev, 0x100, t << 1)[0] == 0
    rc, out = general(dev, 0x100, 0x13 << 1)
    assert (rc, out[0]) == (errno.EREMOTEIO, BAD_PARAM)
    rc, out = general(dev, 0x100, 1, outlen=256)
    assert (rc, out[0]) == (errno.EREMOTEIO, OUT_LEN)
    assert general(dev, 0x842, 0)[0] == errno.EREMOTEIO  # no LAG
    assert general(dev, 0x200, 0)[0] == errno.EINVAL  # not on the kernel's list


@pytest.mark.parametrize("name", ["fixed_buffer_size", "caps.fixed_buffer_size"])
def test_capability_switch_is_reported_and_enforced(dev, name):
    assert sm5.setting(name, 0) == 0
    try:
        assert sm5.bits_get(general(dev, 0x100, 1)[1][16:], 0x108, 1) == 0
        r = refusal(dev, mode=MODE_KSM, log_entity=12)
        assert r.status == BAD_PARAM
    finally:
        assert sm5.setting(name, "default") == 0
    assert dev.mkey(MODE_KSM, ENTRY, 0, 4096, log_entity=12).destroy() == 0
    assert sm5.setting("no_such_capability", 1) == errno.ENOENT
    assert sm5.setting("fixed_buffer_size", 2) == errno.EINVAL


def test_faults(dev):
    assert sm5.fault("create_mkey:status=0x0f,syndrome=0x1234,after=1,count=2") == 0
    k = dev.mkey(MODE_KLM, ENTRY, 0, 4096)
    for _ in range(2):
        r = refusal(dev)
        assert (r.status, r.syndrome) == (0x0F, 0x1234)
    k2 = dev.mkey(MODE_KLM, ENTRY, 0, 4096)
    sm5.fault("destroy_mkey:status=0x0b,syndrome=0x77")
    assert k.destroy() == errno.EIO  # no mailbox: the kernel maps the status
    assert (sm5.stat("last.status"), sm5.stat("last.syndrome")) == (0x0B, 0x77)
    assert k.destroy() == 0
    sm5.fault("dereg_mr:errno=16;reg_mr:errno=12,after=1")
    b = Buf(4096)
    mr = dev.reg(b)
    with pytest.raises(OSError) as e:
        dev.reg(b)
    assert e.value.errno == errno.ENOMEM
    assert dev.dereg(mr) == errno.EBUSY
    assert dev.dereg(mr) == 0
    for bad in (
        "nonsense",
        "create_mkey",
        "create_mkey:status=x",
        "create_mkey:after=1",
        "foo:errno=1",
    ):
        assert sm5.fault(bad) == errno.EINVAL
    k2.destroy()


def test_commands_are_counted(dev):
    before = {n: sm5.stat(n) for n in ("cmd.total", "cmd.create_mkey", "cmd.destroy_mkey")}
    dev.mkey(MODE_KLM, ENTRY, 0, 4096).destroy()
    refusal(dev, pdn=0)
    assert sm5.stat("cmd.create_mkey") == before["cmd.create_mkey"] + 2
    assert sm5.stat("cmd.destroy_mkey") == before["cmd.destroy_mkey"] + 1
    assert sm5.stat("cmd.total") == before["cmd.total"] + 3


def test_mtt_key_over_a_umem(dev, loop):
    qa, _, local, _, ml, _ = loop
    mem = Buf(8192, 0x33)
    um = sm5.umem_reg(dev.ctx, mem.addr, 8192, sm5.LW)
    assert um
    raw = [(0x61, 1, 1), (0x320, 32, um[0]), (0x340, 64, 4096)]
    k = dev.mkey(MODE_MTT, [], 0x1000, 4096, octwords=1, actual=1, log_entity=12, raw=raw)
    assert qa.run(sm5.READ, [(local.addr, 4096, ml.contents.lkey)], 0x1000, k.key) == sm5.OK
    assert local.read(0, 4096) == b"\x33" * 4096
    assert sm5.umem_dereg(um) == errno.EBUSY
    assert k.destroy() == 0
    raw[2] = (0x340, 64, 4097)
    with pytest.raises(Refused) as e:
        dev.mkey(MODE_MTT, [], 0, 4096, octwords=1, actual=1, raw=raw)
    assert e.value.status == BAD_PARAM
    assert sm5.umem_dereg(um) == 0
