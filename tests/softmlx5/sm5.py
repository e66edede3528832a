# SPDX-License-Identifier: BSD-3-Clause
"""The verbs ABI of libsoftmlx5.so through ctypes, as thin as it goes: no ucx_memh in between."""

import ctypes as C
import errno
import mmap
import os
import time

u8, u16, u32, u64, vp = C.c_uint8, C.c_uint16, C.c_uint32, C.c_uint64, C.c_void_p

# access flags, opcodes, statuses: verbs.h
LW, RW, RR, RA, MWB = 1, 2, 4, 8, 16
ALL = LW | RW | RR | RA
WRITE, WRITE_IMM, SEND, SEND_IMM, READ, CAS, FAA, LOCAL_INV, BIND_MW, SEND_INV = range(10)
SIGNALED, FENCE, SOLICITED, INLINE = 2, 1, 4, 8
(
    OK,
    LOC_LEN,
    LOC_QP_OP,
    _,
    LOC_PROT,
    FLUSH,
    MW_BIND,
    _,
    _,
    REM_INV_REQ,
    REM_ACCESS,
    REM_OP,
    RETRY_EXC,
    RNR_EXC,
) = range(14)
RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)
(
    M_STATE,
    M_CUR,
    M_SQDN,
    M_ACCESS,
    M_PKEY,
    M_PORT,
    M_QKEY,
    M_AV,
    M_MTU,
    M_TIMEOUT,
    M_RETRY,
    M_RNR,
    M_RQPSN,
    M_MAXRD,
    M_ALT,
    M_MINRNR,
    M_SQPSN,
    M_MAXDRD,
    M_MIG,
    M_CAP,
    M_DQPN,
) = (1 << i for i in range(21))


class Gid(C.Union):
    _fields_ = [("raw", u8 * 16), ("words", u64 * 2)]


class Grh(C.Structure):
    _fields_ = [
        ("dgid", Gid),
        ("flow_label", u32),
        ("sgid_index", u8),
        ("hop_limit", u8),
        ("tclass", u8),
    ]


class Ah(C.Structure):
    _fields_ = [
        ("grh", Grh),
        ("dlid", u16),
        ("sl", u8),
        ("src_path_bits", u8),
        ("static_rate", u8),
        ("is_global", u8),
        ("port_num", u8),
    ]


class Cap(C.Structure):
    _fields_ = [
        (n, u32)
        for n in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline")
    ]


class QpInit(C.Structure):
    _fields_ = [
        ("qp_context", vp),
        ("send_cq", vp),
        ("recv_cq", vp),
        ("srq", vp),
        ("cap", Cap),
        ("qp_type", C.c_int),
        ("sq_sig_all", C.c_int),
    ]


class QpAttr(C.Structure):
    _fields_ = [
        ("qp_state", C.c_int),
        ("cur_qp_state", C.c_int),
        ("path_mtu", C.c_int),
        ("mig", C.c_int),
        ("qkey", u32),
        ("rq_psn", u32),
        ("sq_psn", u32),
        ("dest_qp_num", u32),
        ("access", C.c_uint),
        ("cap", Cap),
        ("ah", Ah),
        ("alt_ah", Ah),
        ("pkey_index", u16),
        ("alt_pkey_index", u16),
        ("en_sqd", u8),
        ("sq_draining", u8),
        ("max_rd_atomic", u8),
        ("max_dest_rd_atomic", u8),
        ("min_rnr_timer", u8),
        ("port_num", u8),
        ("timeout", u8),
        ("retry_cnt", u8),
        ("rnr_retry", u8),
        ("alt_port_num", u8),
        ("alt_timeout", u8),
        ("rate_limit", u32),
    ]


class Sge(C.Structure):
    _fields_ = [("addr", u64), ("length", u32), ("lkey", u32)]


class MwBindInfo(C.Structure):
    _fields_ = [("mr", vp), ("addr", u64), ("length", u64), ("access", C.c_uint)]


class _Bind(C.Structure):
    _fields_ = [("mw", vp), ("rkey", u32), ("info", MwBindInfo)]


class _Rdma(C.Structure):
    _fields_ = [("remote_addr", u64), ("rkey", u32)]


class _Atomic(C.Structure):
    _fields_ = [("remote_addr", u64), ("compare_add", u64), ("swap", u64), ("rkey", u32)]


class _WrU(C.Union):
    _fields_ = [("rdma", _Rdma), ("atomic", _Atomic)]


class SendWr(C.Structure):
    pass


SendWr._fields_ = [
    ("wr_id", u64),
    ("next", C.POINTER(SendWr)),
    ("sg_list", C.POINTER(Sge)),
    ("num_sge", C.c_int),
    ("opcode", C.c_int),
    ("flags", C.c_uint),
    ("imm", u32),
    ("wr", _WrU),
    ("xrc", u32),
    ("bind", _Bind),
]


class RecvWr(C.Structure):
    _fields_ = [("wr_id", u64), ("next", vp), ("sg_list", C.POINTER(Sge)), ("num_sge", C.c_int)]


class Wc(C.Structure):
    _fields_ = [
        ("wr_id", u64),
        ("status", C.c_int),
        ("opcode", C.c_int),
        ("vendor_err", u32),
        ("byte_len", u32),
        ("imm", u32),
        ("qp_num", u32),
        ("src_qp", u32),
        ("flags", C.c_uint),
        ("pkey_index", u16),
        ("slid", u16),
        ("sl", u8),
        ("path_bits", u8),
    ]


class Mr(C.Structure):
    _fields_ = [
        ("context", vp),
        ("pd", vp),
        ("addr", vp),
        ("length", C.c_size_t),
        ("handle", u32),
        ("lkey", u32),
        ("rkey", u32),
    ]


class Mw(C.Structure):
    _fields_ = [("context", vp), ("pd", vp), ("rkey", u32), ("handle", u32), ("type", C.c_int)]


class MwBind(C.Structure):
    _fields_ = [("wr_id", u64), ("flags", C.c_uint), ("info", MwBindInfo)]


class QpHead(C.Structure):
    _fields_ = [
        ("context", vp),
        ("qp_context", vp),
        ("pd", vp),
        ("send_cq", vp),
        ("recv_cq", vp),
        ("srq", vp),
        ("handle", u32),
        ("qp_num", u32),
        ("state", C.c_int),
        ("qp_type", C.c_int),
    ]


class PortAttr(C.Structure):
    _fields_ = [
        ("state", C.c_int),
        ("max_mtu", C.c_int),
        ("active_mtu", C.c_int),
        ("gid_tbl_len", C.c_int),
        ("caps", u32),
        ("max_msg_sz", u32),
        ("bad_pkey", u32),
        ("qkey_viol", u32),
        ("pkey_len", u16),
        ("lid", u16),
        ("rest", u8 * 16),
        ("active_speed_ex", u32),  # which older headers do not have
    ]


class DvPd(C.Structure):
    _fields_ = [("pdn", u32), ("comp_mask", u64)]


class DvObj(C.Structure):
    _fields_ = [("p", vp * 12), ("pd_in", vp), ("pd_out", C.POINTER(DvPd))]


class DvMkey(C.Structure):
    _fields_ = [("lkey", u32), ("rkey", u32)]


class DvMkeyInit(C.Structure):
    _fields_ = [("pd", vp), ("flags", u32), ("max_entries", u16)]


class CtxAttr(C.Structure):
    _fields_ = [("flags", u32), ("comp_mask", u64)]


def library_path():
    p = os.environ.get("SOFTMLX5_LIB")
    if p:
        return p
    from importlib.resources import files

    return str(files("ucx_memh_ib_mlx5._soft") / "libsoftmlx5.so")


lib = C.CDLL(library_path(), use_errno=True)


def _f(name, res, *args):
    f = getattr(lib, name)
    f.restype, f.argtypes = res, args
    return f


i32, sz = C.c_int, C.c_size_t
get_device_list = _f("ibv_get_device_list", C.POINTER(vp), C.POINTER(i32))
free_device_list = _f("ibv_free_device_list", None, vp)
get_device_name = _f("ibv_get_device_name", C.c_char_p, vp)
dv_open = _f("mlx5dv_open_device", vp, vp, C.POINTER(CtxAttr))
close_device = _f("ibv_close_device", i32, vp)
alloc_pd = _f("ibv_alloc_pd", vp, vp)
dealloc_pd = _f("ibv_dealloc_pd", i32, vp)
reg_mr = _f("ibv_reg_mr_iova2", C.POINTER(Mr), vp, vp, sz, u64, C.c_uint)
reg_dmabuf_mr = _f("ibv_reg_dmabuf_mr", C.POINTER(Mr), vp, u64, sz, u64, i32, i32)
dereg_mr = _f("ibv_dereg_mr", i32, C.POINTER(Mr))
create_cq = _f("ibv_create_cq", vp, vp, i32, vp, vp, i32)
resize_cq = _f("ibv_resize_cq", i32, vp, i32)
destroy_cq = _f("ibv_destroy_cq", i32, vp)
create_channel = _f("ibv_create_comp_channel", vp, vp)
destroy_channel = _f("ibv_destroy_comp_channel", i32, vp)
get_cq_event = _f("ibv_get_cq_event", i32, vp, C.POINTER(vp), C.POINTER(vp))
ack_cq_events = _f("ibv_ack_cq_events", None, vp, C.c_uint)
create_qp = _f("ibv_create_qp", vp, vp, C.POINTER(QpInit))
modify_qp = _f("ibv_modify_qp", i32, vp, C.POINTER(QpAttr), i32)
query_qp = _f("ibv_query_qp", i32, vp, C.POINTER(QpAttr), i32, C.POINTER(QpInit))
destroy_qp = _f("ibv_destroy_qp", i32, vp)
query_gid = _f("ibv_query_gid", i32, vp, u8, i32, C.POINTER(Gid))
query_port = _f("ibv_query_port", i32, vp, u8, C.POINTER(PortAttr))
init_obj = _f("mlx5dv_init_obj", i32, C.POINTER(DvObj), u64)
obj_create = _f("mlx5dv_devx_obj_create", vp, vp, C.c_char_p, sz, vp, sz)
obj_query = _f("mlx5dv_devx_obj_query", i32, vp, C.c_char_p, sz, vp, sz)
obj_destroy = _f("mlx5dv_devx_obj_destroy", i32, vp)
general_cmd = _f("mlx5dv_devx_general_cmd", i32, vp, C.c_char_p, sz, vp, sz)
umem_reg = _f("mlx5dv_devx_umem_reg", C.POINTER(u32), vp, vp, sz, u32)
umem_dereg = _f("mlx5dv_devx_umem_dereg", i32, C.POINTER(u32))
dv_create_mkey = _f("mlx5dv_create_mkey", C.POINTER(DvMkey), C.POINTER(DvMkeyInit))
dv_destroy_mkey = _f("mlx5dv_destroy_mkey", i32, C.POINTER(DvMkey))
_stat = _f("softmlx5_stat", u64, C.c_char_p)
_fault = _f("softmlx5_fault", i32, C.c_char_p)
_set = _f("softmlx5_set", i32, C.c_char_p, C.c_char_p)
_stat_names = _f("softmlx5_stat_names", i32, C.c_char_p, sz)


def stat(name):
    v = _stat(name.encode())
    assert v != 2**64 - 1, name
    return v


def fault(spec):
    return _fault(spec.encode())


def setting(name, value):
    return _set(name.encode(), str(value).encode())


def stat_names():
    n = _stat_names(None, 0)
    buf = C.create_string_buffer(n)
    assert _stat_names(buf, n) == n
    return buf.value.decode().split()


class VerbsError(OSError):
    pass


def fail(what):
    e = C.get_errno()
    raise VerbsError(e, f"{what}: {errno.errorcode.get(e, e)}")


def bits_set(buf, off, width, value):
    """Big-endian bit field, counted from the most significant bit of byte 0."""
    total = len(buf) * 8
    n = int.from_bytes(buf, "big")
    shift = total - off - width
    n = n & ~(((1 << width) - 1) << shift) | (value << shift)
    buf[:] = n.to_bytes(len(buf), "big")


def bits_get(buf, off, width):
    return int.from_bytes(bytes(buf), "big") >> (len(buf) * 8 - off - width) & ((1 << width) - 1)


MODE_MTT, MODE_KLM, MODE_KSM = 1, 2, 3


def mkey_mailbox(
    pdn,
    mode,
    entries,
    start,
    length,
    *,
    a=0,
    rw=1,
    rr=1,
    lw=1,
    lr=1,
    qpn=0xFFFFFF,
    tag=0,
    log_entity=0,
    octwords=None,
    actual=None,
    free=0,
    umr_en=0,
    pad=True,
    **extra,
):
    n = len(entries)
    padded = (n + 3) & ~3 if mode == MODE_KLM and pad else n
    head = bytearray(272)
    fields = [
        (0, 16, 0x200),
        (0x81, 1, free),
        (0x83, 3, mode >> 2),
        (0x90, 1, umr_en),
        (0x91, 1, a),
        (0x92, 1, rw),
        (0x93, 1, rr),
        (0x94, 1, lw),
        (0x95, 1, lr),
        (0x96, 2, mode & 3),
        (0xA0, 24, qpn),
        (0xB8, 8, tag),
        (0xE8, 24, pdn),
        (0x100, 64, start),
        (0x140, 64, length),
        (0x220, 32, padded if octwords is None else octwords),
        (0x25B, 5, log_entity),
        (0x300, 32, padded if actual is None else actual),
    ]
    for off, width, value in fields + list(extra.get("raw", [])):
        bits_set(head, off, width, value)
    body = b"".join(
        ln.to_bytes(4, "big") + key.to_bytes(4, "big") + addr.to_bytes(8, "big")
        for ln, key, addr in entries
    )
    return bytes(head) + body + bytes(16 * (padded - n))


class Refused(Exception):
    def __init__(self, err, status, syndrome):
        super().__init__(
            f"errno {errno.errorcode.get(err, err)} status {status:#x} syndrome {syndrome:#x}"
        )
        self.err, self.status, self.syndrome = err, status, syndrome


class Mkey:
    def __init__(self, ctx, mailbox, tag=0, outlen=16):
        out = C.create_string_buffer(max(outlen, 16))
        self.obj = obj_create(ctx, mailbox, len(mailbox), out, outlen)
        if not self.obj:
            raise Refused(C.get_errno(), out.raw[0], int.from_bytes(out.raw[4:8], "big"))
        assert out.raw[0] == 0
        self.index = int.from_bytes(out.raw[9:12], "big")
        self.key = self.index << 8 | tag

    def destroy(self):
        rc = obj_destroy(self.obj)
        if not rc:
            self.obj = None
        return rc


class Buf:
    """Page-aligned memory of its own, so that what lies beside it is known."""

    def __init__(self, size, fill=0):
        self.size = size
        self.m = mmap.mmap(-1, max(size, 1))
        self.addr = C.addressof(C.c_char.from_buffer(self.m))
        if fill:
            self.fill(fill)

    def fill(self, byte, off=0, n=None):
        C.memset(self.addr + off, byte, self.size - off if n is None else n)

    def read(self, off=0, n=None):
        return C.string_at(self.addr + off, self.size - off if n is None else n)

    def write(self, data, off=0):
        C.memmove(self.addr + off, data, len(data))

    def u64(self, off=0):
        return u64.from_address(self.addr + off)


class Device:
    """A context with a domain and a completion queue."""

    def __init__(self, index=0, cqe=1024, channel=False):
        n = i32()
        lst = get_device_list(C.byref(n))
        assert n.value > index
        self.ctx = dv_open(lst[index], C.byref(CtxAttr(1, 0)))
        free_device_list(lst)
        if not self.ctx:
            fail("open")
        ops = (vp * 28).from_address(self.ctx + 8)
        proto = C.CFUNCTYPE
        self._poll = proto(i32, vp, i32, C.POINTER(Wc))(ops[11])
        self._notify = proto(i32, vp, i32)(ops[12])
        self._send = proto(i32, vp, C.POINTER(SendWr), C.POINTER(C.POINTER(SendWr)))(ops[25])
        self._recv = proto(i32, vp, C.POINTER(RecvWr), C.POINTER(C.POINTER(RecvWr)))(ops[26])
        self._alloc_mw = proto(C.POINTER(Mw), vp, i32, use_errno=True)(ops[7])
        self._bind_mw = proto(i32, vp, C.POINTER(Mw), C.POINTER(MwBind))(ops[8])
        self._dealloc_mw = proto(i32, C.POINTER(Mw))(ops[9])
        self.pd = alloc_pd(self.ctx) or fail("pd")
        self.pdn = self.pd_number(self.pd)
        self.channel = create_channel(self.ctx) if channel else None
        self.cq = create_cq(self.ctx, cqe, None, self.channel, 0) or fail("cq")
        gid, port = Gid(), PortAttr()
        assert query_gid(self.ctx, 1, 0, C.byref(gid)) == 0
        assert query_port(self.ctx, 1, C.byref(port)) == 0
        self.gid, self.lid = bytes(gid.raw), port.lid
        self.qps, self.mrs = [], []

    @staticmethod
    def pd_number(pd):
        out = DvPd()
        obj = DvObj(pd_in=pd, pd_out=C.pointer(out))
        assert init_obj(C.byref(obj), 1 << 6) == 0
        return out.pdn

    def reg(self, buf, access=ALL, off=0, n=None, iova=None, pd=None):
        addr = buf.addr + off
        n = buf.size - off if n is None else n
        mr = reg_mr(pd or self.pd, addr, n, addr if iova is None else iova, access)
        if not mr:
            fail("reg_mr")
        self.mrs.append(mr)
        return mr

    def dereg(self, mr):
        rc = dereg_mr(mr)
        if not rc:
            self.mrs.remove(mr)
        return rc

    def mkey(self, mode, entries, start, length, *, outlen=16, pdn=None, tag=0, **kw):
        box = mkey_mailbox(
            self.pdn if pdn is None else pdn, mode, entries, start, length, tag=tag, **kw
        )
        return Mkey(self.ctx, box, tag, outlen)

    def klm(self, entries, start, **kw):
        return self.mkey(
            MODE_KLM, entries, start, kw.pop("length", sum(e[0] for e in entries)), **kw
        )

    def qp(self, **kw):
        q = Qp(self, **kw)
        self.qps.append(q)
        return q

    def poll(self, n=1, timeout=5.0, cq=None):
        """Exactly n completions, or an error saying how many came."""
        got, wc = [], (Wc * 16)()
        end = time.monotonic() + timeout
        while len(got) < n:
            k = self._poll(cq or self.cq, min(16, n - len(got)), wc)
            assert k >= 0, k
            got += [Wc.from_buffer_copy(wc[i]) for i in range(k)]
            if not k and time.monotonic() > end:
                raise TimeoutError(
                    f"{len(got)} of {n} completions: {[(w.wr_id, w.status) for w in got]}"
                )
        return got

    def poll_none(self, seconds=0.05):
        wc = (Wc * 1)()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self._poll(self.cq, 1, wc) == 0, (wc[0].wr_id, wc[0].status)
            time.sleep(0.002)

    def close(self):
        for q in self.qps[:]:
            q.destroy()
        for mr in self.mrs[:]:
            assert self.dereg(mr) == 0
        assert destroy_cq(self.cq) == 0
        if self.channel:
            assert destroy_channel(self.channel) == 0
        assert dealloc_pd(self.pd) == 0
        assert close_device(self.ctx) == 0


class Qp:
    def __init__(self, dev, access=ALL, depth=256, sge=16, inline=256, sig_all=0, pd=None, cq=None):
        self.dev = dev
        self.cq = cq or dev.cq
        init = QpInit(None, self.cq, self.cq, None, Cap(depth, depth, sge, sge, inline), 2, sig_all)
        self.qp = create_qp(pd or dev.pd, C.byref(init))
        if not self.qp:
            fail("create_qp")
        self.num = QpHead.from_address(self.qp).qp_num
        self.access = access
        self.keep = []

    @property
    def state(self):
        a, i = QpAttr(), QpInit()
        assert query_qp(self.qp, C.byref(a), 0, C.byref(i)) == 0
        return a.qp_state

    @property
    def address(self):
        return (self.dev.gid, self.dev.lid, self.num)

    def modify(self, mask=M_STATE, **kw):
        return modify_qp(self.qp, C.byref(QpAttr(**kw)), mask)

    def init(self):
        rc = self.modify(
            M_STATE | M_PKEY | M_PORT | M_ACCESS, qp_state=INIT, port_num=1, access=self.access
        )
        assert rc == 0, rc

    def rtr(self, address, by_lid=False, psn=0, min_rnr=1):
        gid, lid, num = address
        ah = Ah(
            port_num=1,
            is_global=0 if by_lid else 1,
            dlid=lid,
            grh=Grh(dgid=Gid(raw=(u8 * 16)(*gid))),
        )
        rc = self.modify(
            M_STATE | M_AV | M_MTU | M_DQPN | M_RQPSN | M_MAXDRD | M_MINRNR,
            qp_state=RTR,
            path_mtu=5,
            dest_qp_num=num,
            rq_psn=psn,
            max_dest_rd_atomic=16,
            min_rnr_timer=min_rnr,
            ah=ah,
        )
        assert rc == 0, rc

    def rts(self, timeout=10, retry=7, rnr=7, psn=0):
        rc = self.modify(
            M_STATE | M_TIMEOUT | M_RETRY | M_RNR | M_SQPSN | M_MAXRD,
            qp_state=RTS,
            timeout=timeout,
            retry_cnt=retry,
            rnr_retry=rnr,
            sq_psn=psn,
            max_rd_atomic=16,
        )
        assert rc == 0, rc

    def connect(self, address, **kw):
        self.init()
        self.rtr(address, **{k: kw.pop(k) for k in ("by_lid", "min_rnr") if k in kw})
        self.rts(**kw)
        return self

    def reset(self):
        assert self.modify(qp_state=RESET) == 0

    def error(self):
        assert self.modify(qp_state=ERR) == 0

    def wr(self, op, sges=(), raddr=0, rkey=0, wr_id=0, flags=SIGNALED, imm=0, add=0, swap=0):
        arr = (Sge * max(len(sges), 1))(*[Sge(*s) for s in sges])
        w = SendWr(wr_id=wr_id, sg_list=arr, num_sge=len(sges), opcode=op, flags=flags, imm=imm)
        if op in (CAS, FAA):
            w.wr.atomic = _Atomic(raddr, add, swap, rkey)
        else:
            w.wr.rdma = _Rdma(raddr, rkey)
        w._arr = arr
        return w

    def post_wr(self, w):
        bad = C.POINTER(SendWr)()
        return self.dev._send(self.qp, C.byref(w), C.byref(bad))

    def post(self, op, *a, **kw):
        rc = self.post_wr(self.wr(op, *a, **kw))
        assert rc == 0, errno.errorcode.get(rc, rc)

    def post_recv(self, sges=(), wr_id=0):
        arr = (Sge * max(len(sges), 1))(*[Sge(*s) for s in sges])
        w = RecvWr(wr_id=wr_id, sg_list=arr, num_sge=len(sges))
        bad = C.POINTER(RecvWr)()
        return self.dev._recv(self.qp, C.byref(w), C.byref(bad))

    def run(self, op, *a, **kw):
        """Post, wait, return the status."""
        self.post(op, *a, **kw)
        return self.dev.poll(1, cq=self.cq)[0].status

    def bind(self, mw, new_rkey, mr, addr, length, access, flags=SIGNALED, wr_id=0):
        w = SendWr(wr_id=wr_id, opcode=BIND_MW, flags=flags)
        w.bind = _Bind(
            C.addressof(mw.contents),
            new_rkey,
            MwBindInfo(C.addressof(mr.contents) if mr else None, addr, length, access),
        )
        return self.post_wr(w)

    def destroy(self):
        assert destroy_qp(self.qp) == 0
        self.dev.qps.remove(self)


def pair(a, b=None, **kw):
    """Two connected queue pairs; on one device, or on two."""
    b = b or a
    qa, qb = a.qp(), b.qp()
    qa.connect(qb.address, **kw)
    qb.connect(qa.address, **kw)
    return qa, qb


def wait_for(cond, timeout=5.0):
    end = time.monotonic() + timeout
    while not cond():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.001)
