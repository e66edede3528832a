# SPDX-License-Identifier: BSD-3-Clause
"""Raw verbs, below and without ucx_memh: what a hostile or careless peer can do.

A RawPeer has a queue pair of its own in a device context of its own and posts any key, address
and opcode that it is told.  What the victim's device answers comes back as the completion's
status, so no check of our library can hide that the device made none.  ctypes, and nothing of
the code under test but the path of the software device.

    raw = RawPeer()                      # the software device; or RawPeer(SYSTEM, gid_index=1)
    raw.connect(bytes(endpoint.address)); endpoint.connect(raw.address)
    status, data = raw.read(rkey, address, 8)
    status = raw.write(rkey, address, b"evil")
    status, old = raw.fetch_add(rkey, address, 1)
    status, old = raw.compare_swap(rkey, address, expect, value)
    raw.reset()                          # then exchange addresses again

`keys(blob)` takes a packed key apart.  `peer(serve)` with conftest's `peer` fixture runs one in
another process; `RemoteRawPeer(other)` has the same methods then.
"""

import ctypes as c
import enum
import struct
import time
from importlib.resources import files

SYSTEM = "libibverbs.so.1"  # of the machine, for an adapter of its kernel
HEADER = struct.Struct("<HBBHHII32s")  # magic version header_len total_len 0 component 0 owner
ADDRESS = struct.Struct("<BBBBHBBQII16sQQ")  # version size mtu rd_atomic lid link port epoch ...
EVERY_KEY = 0xFFFFFFFF


class Wc(enum.IntEnum):
    """enum ibv_wc_status"""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21


class Qp(enum.IntEnum):
    """enum ibv_qp_state"""

    RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)


WRITE, READ, CMP_AND_SWP, FETCH_AND_ADD = 0, 4, 5, 6  # enum ibv_wr_opcode
SIGNALED = 2
ALL_ACCESS = 1 | 2 | 4 | 8


class Gid(c.Union):
    _fields_ = [("raw", c.c_uint8 * 16), ("words", c.c_uint64 * 2)]


class DeviceAttr(c.Structure):
    _fields_ = [("fw", c.c_char * 64), ("node_guid", c.c_uint64), ("rest", c.c_uint8 * 512)]


class PortAttr(c.Structure):
    _fields_ = [
        *[(name, c.c_uint32) for name in "state max_mtu active_mtu gids caps max_msg".split()],
        *[(name, c.c_uint32) for name in "bad_pkey qkey_viol".split()],
        *[(name, c.c_uint16) for name in "pkeys lid sm_lid".split()],
        *[(name, c.c_uint8) for name in "lmc max_vl sm_sl timeout reply width speed".split()],
        *[(name, c.c_uint8) for name in "phys link_layer flags".split()],
        ("caps2", c.c_uint16),
        ("spare", c.c_uint8 * 64),
    ]


class QpCap(c.Structure):
    _fields_ = [(name, c.c_uint32) for name in "send_wr recv_wr send_sge recv_sge inline_".split()]


class QpInitAttr(c.Structure):
    _fields_ = [
        *[(name, c.c_void_p) for name in "context send_cq recv_cq srq".split()],
        ("cap", QpCap),
        ("type", c.c_int),
        ("sig_all", c.c_int),
    ]


class AhAttr(c.Structure):
    _fields_ = [
        ("dgid", Gid),
        ("flow", c.c_uint32),
        *[(name, c.c_uint8) for name in "sgid_index hop_limit traffic_class".split()],
        ("dlid", c.c_uint16),
        *[(name, c.c_uint8) for name in "sl path_bits rate is_global port_num".split()],
    ]


class QpAttr(c.Structure):
    _fields_ = [
        *[(name, c.c_uint32) for name in "qp_state cur_state path_mtu mig qkey".split()],
        *[(name, c.c_uint32) for name in "rq_psn sq_psn dest_qp_num access".split()],
        ("cap", QpCap),
        ("ah", AhAttr),
        ("alt_ah", AhAttr),
        ("pkey_index", c.c_uint16),
        ("alt_pkey_index", c.c_uint16),
        *[(name, c.c_uint8) for name in "sqd draining rd_atomic dest_rd_atomic".split()],
        *[(name, c.c_uint8) for name in "rnr_timer port_num timeout retry_cnt".split()],
        *[(name, c.c_uint8) for name in "rnr_retry alt_port alt_timeout".split()],
        ("rate", c.c_uint32),
    ]


class Sge(c.Structure):
    _fields_ = [("addr", c.c_uint64), ("length", c.c_uint32), ("lkey", c.c_uint32)]


class SendWr(c.Structure):
    _fields_ = [
        ("wr_id", c.c_uint64),
        ("next", c.c_void_p),
        ("sg_list", c.POINTER(Sge)),
        ("num_sge", c.c_int),
        ("opcode", c.c_int),
        ("flags", c.c_uint),
        ("imm", c.c_uint32),
        ("remote_addr", c.c_uint64),
        ("second", c.c_uint64),  # rdma: rkey in the low half; atomic: compare_add
        ("swap", c.c_uint64),
        ("atomic_rkey", c.c_uint32),
        ("xrc", c.c_uint64),
        ("rest", c.c_uint64 * 6),
    ]


class WorkCompletion(c.Structure):
    _fields_ = [
        ("wr_id", c.c_uint64),
        *[(name, c.c_uint32) for name in "status opcode vendor_err byte_len imm".split()],
        *[(name, c.c_uint32) for name in "qp_num src_qp flags".split()],
        ("pkey", c.c_uint16),
        ("slid", c.c_uint16),
        ("sl", c.c_uint8),
        ("bits", c.c_uint8),
    ]


assert c.sizeof(SendWr) == 128 and c.sizeof(WorkCompletion) == 48 and c.sizeof(AhAttr) == 32

# Where things are in the C structures that verbs hand out.
CONTEXT_POLL_CQ, CONTEXT_POST_SEND = 96, 208
QP_NUM, MR_LKEY, MR_RKEY = 52, 36, 40


def software_library() -> str:
    return str(files("ucx_memh_ib_mlx5._soft") / "libsoftmlx5.so")


def payload(blob: bytes) -> bytes:
    """The backend's part of a packed key."""
    return bytes(blob[blob[3] :])


def keys(blob: bytes) -> tuple[int, int]:
    """(key for put and get, key for atomics) of a packed or RAW key."""
    native = bytes(blob) if len(blob) == 8 else payload(blob)
    rma, amo = struct.unpack_from("<II", native)
    return rma, rma if amo == EVERY_KEY else amo


class RawError(OSError):
    pass


def _good(value, what):
    if not value:
        raise RawError(c.get_errno(), f"{what} failed")
    return value


def _zero(errno, what):
    if errno:
        raise RawError(errno, f"{what} failed")


class RawPeer:
    """One device context, one queue pair."""

    def __init__(
        self, library: str | None = None, gid_index: int = 0, size: int = 1 << 20
    ) -> None:
        self.gid_index = gid_index
        self.lib = lib = c.CDLL(library or software_library(), use_errno=True)
        pointers = "get_device_list open_device alloc_pd reg_mr create_cq create_qp"
        for name in pointers.split():
            getattr(lib, f"ibv_{name}").restype = c.c_void_p
        count = c.c_int()
        devices = c.c_void_p(_good(lib.ibv_get_device_list(c.byref(count)), "device list"))
        first = c.cast(devices, c.POINTER(c.c_void_p))[0]
        self.context = c.c_void_p(_good(lib.ibv_open_device(c.c_void_p(first)), "open_device"))
        lib.ibv_free_device_list(devices)
        self.pd = c.c_void_p(_good(lib.ibv_alloc_pd(self.context), "alloc_pd"))
        self.cq = c.c_void_p(_good(lib.ibv_create_cq(self.context, 256, None, None, 0), "cq"))
        self.mr = None
        self._buffer(size)
        self._post = self._operation(CONTEXT_POST_SEND, c.c_void_p, c.c_void_p)
        self._poll = self._operation(CONTEXT_POLL_CQ, c.c_int, c.c_void_p)
        self.port, self.gid = PortAttr(), Gid()
        _zero(lib.ibv_query_port(self.context, 1, c.byref(self.port)), "query_port")
        _zero(lib.ibv_query_gid(self.context, 1, gid_index, c.byref(self.gid)), "query_gid")
        attr = DeviceAttr()
        _zero(lib.ibv_query_device(self.context, c.byref(attr)), "query_device")
        self.guid = int.from_bytes(struct.pack("=Q", attr.node_guid), "big")
        self.epoch = 0
        self._create()

    def _create(self) -> None:
        attr = QpInitAttr(None, self.cq, self.cq, None, QpCap(64, 1, 1, 1, 0), 2, 0)
        self.qp = c.c_void_p(_good(self.lib.ibv_create_qp(self.pd, c.byref(attr)), "create_qp"))
        self.qpn = self._u32(self.qp, QP_NUM)
        self._init()
        self.born = self.epoch

    @staticmethod
    def _u32(base: c.c_void_p, offset: int) -> int:
        return c.c_uint32.from_address(base.value + offset).value

    def _operation(self, offset: int, *args):
        function = c.c_void_p.from_address(self.context.value + offset).value
        return c.CFUNCTYPE(c.c_int, c.c_void_p, *args)(function)

    def _buffer(self, size: int) -> None:
        if self.mr is not None:
            _zero(self.lib.ibv_dereg_mr(self.mr), "dereg_mr")
        self.buffer = c.create_string_buffer(size)
        mr = self.lib.ibv_reg_mr(self.pd, self.buffer, c.c_size_t(size), ALL_ACCESS)
        self.mr = c.c_void_p(_good(mr, "reg_mr"))
        self.lkey, self.rkey = self._u32(self.mr, MR_LKEY), self._u32(self.mr, MR_RKEY)

    def _modify(self, attr: QpAttr, mask: int) -> None:
        _zero(self.lib.ibv_modify_qp(self.qp, c.byref(attr), mask), f"modify_qp {attr.qp_state}")

    def _init(self) -> None:
        self.epoch = max(self.epoch + 1, time.time_ns())
        self.psn = self.epoch & 0xFFFFFF
        attr = QpAttr(qp_state=Qp.INIT, port_num=1, access=ALL_ACCESS)
        self._modify(attr, 1 | 1 << 3 | 1 << 4 | 1 << 5)

    # ---- connecting ----

    @property
    def address(self) -> bytes:
        """Ours, in the form that an endpoint's connect() takes."""
        own = ADDRESS.pack(
            1, ADDRESS.size, self.port.active_mtu, 16, self.port.lid, self.port.link_layer, 1,
            self.epoch, self.qpn, self.psn, bytes(self.gid.raw), self.guid, self.born,
        )  # fmt: skip
        total = HEADER.size + ADDRESS.size
        # Component and owner are not told.
        return HEADER.pack(0x4145, 1, HEADER.size, total, 0, 0, 0, bytes(32)) + own

    def connect(self, address: bytes) -> None:
        """Ready to send to, and to answer, the queue pair of that endpoint address."""
        fields = ADDRESS.unpack(address[HEADER.size :])
        mtu, lid, link, qpn, psn, gid = (fields[i] for i in (2, 4, 5, 8, 9, 10))
        attr = QpAttr(qp_state=Qp.RTR, path_mtu=min(mtu, self.port.active_mtu), dest_qp_num=qpn)
        attr.rq_psn, attr.dest_rd_atomic, attr.rnr_timer = psn, 16, 12
        attr.ah.port_num, attr.ah.dlid = 1, lid
        if link == 2 or lid == 0:
            attr.ah.is_global, attr.ah.hop_limit = 1, 64
            attr.ah.sgid_index = self.gid_index
            attr.ah.dgid.raw[:] = gid
        self._modify(attr, 1 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15)
        attr = QpAttr(qp_state=Qp.RTS, sq_psn=self.psn, timeout=14, retry_cnt=6, rnr_retry=7)
        attr.rd_atomic = 16
        self._modify(attr, 1 | 1 << 16 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13)

    def reset(self) -> None:
        """A new life of the queue pair, with a new address."""
        self.drain()
        self._modify(QpAttr(qp_state=Qp.RESET), 1)
        self._init()

    def renew(self) -> None:
        """Another queue pair, for what a reset does not heal."""
        _zero(self.lib.ibv_destroy_qp(self.qp), "destroy_qp")
        self.drain()
        self._create()

    @property
    def state(self) -> Qp:
        attr, init = QpAttr(), QpInitAttr()
        _zero(self.lib.ibv_query_qp(self.qp, c.byref(attr), 1, c.byref(init)), "query_qp")
        return Qp(attr.qp_state)

    # ---- one operation at a time ----

    def post(self, opcode: int, rkey: int, address: int, length: int, *operands: int) -> None:
        """Post, and do not wait: `poll` tells how it ended."""
        sge = Sge(c.addressof(self.buffer), length, self.lkey)
        wr = SendWr(1, None, c.pointer(sge), 1, opcode, SIGNALED, 0, address)
        if opcode in (READ, WRITE):
            wr.second = rkey
        else:
            wr.atomic_rkey = rkey
            wr.second, wr.swap = (*operands, 0)[:2]
        bad = c.c_void_p()
        _zero(self._post(self.qp, c.addressof(wr), c.addressof(bad)), "post_send")

    def poll(self, timeout: float = 30) -> Wc:
        """The status of the next completion."""
        end = time.monotonic() + timeout
        wc = WorkCompletion()
        while not (count := self._poll(self.cq, 1, c.addressof(wc))):
            if time.monotonic() > end:
                raise TimeoutError("no completion")
        if count < 0:
            raise RawError("poll_cq failed")
        return Wc(wc.status)

    def drain(self) -> None:
        """Throw away completions that are there."""
        wc = WorkCompletion()
        while self._poll(self.cq, 1, c.addressof(wc)) > 0:
            pass

    def _room(self, size: int) -> None:
        if size > len(self.buffer):
            self._buffer(size)

    def read(self, rkey: int, address: int, length: int) -> tuple[Wc, bytes]:
        """RDMA READ.  The bytes are what is in the local buffer then, even on a failure."""
        self._room(length)
        c.memset(self.buffer, 0xA5, length)
        self.post(READ, rkey, address, length)
        status = self.poll()
        return status, c.string_at(self.buffer, length)

    def write(self, rkey: int, address: int, data: bytes) -> Wc:
        """RDMA WRITE."""
        self._room(len(data))
        c.memmove(self.buffer, bytes(data), len(data))
        self.post(WRITE, rkey, address, len(data))
        return self.poll()

    def _atomic(self, opcode: int, rkey: int, address: int, *operands: int) -> tuple[Wc, int]:
        self.post(opcode, rkey, address, 8, *operands)
        status = self.poll()
        return status, c.c_uint64.from_buffer(self.buffer).value

    def fetch_add(self, rkey: int, address: int, value: int) -> tuple[Wc, int]:
        return self._atomic(FETCH_AND_ADD, rkey, address, value)

    def compare_swap(self, rkey: int, address: int, expect: int, value: int) -> tuple[Wc, int]:
        return self._atomic(CMP_AND_SWP, rkey, address, expect, value)

    def close(self) -> None:
        for name in ("qp", "cq", "mr", "pd", "context"):
            what = getattr(self, name)
            if what is not None and what.value:
                verb = {"mr": "dereg_mr", "pd": "dealloc_pd", "context": "close_device"}
                getattr(self.lib, "ibv_" + verb.get(name, f"destroy_{name}"))(what)
                setattr(self, name, None)

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


# ---- in another process ----


def serve(conn, *where) -> None:
    """Does what RemoteRawPeer asks, until the pipe closes or it is told None."""
    with RawPeer(*where) as raw:
        while (request := conn.recv()) is not None:
            name, *args = request
            try:
                value = getattr(raw, name)
                conn.send((True, _plain(value(*args) if callable(value) else value)))
            except Exception as error:
                conn.send((False, f"{type(error).__name__}: {error}"))


def _plain(value):
    """Without our enums: the other side knows this module by another name."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, enum.IntEnum) else value


class RemoteRawPeer:
    """`RemoteRawPeer(peer(serve))`: a RawPeer in that process, same methods."""

    def __init__(self, other) -> None:
        self.other = other

    def _ask(self, name: str, *args):
        self.other.send((name, *args))
        good, value = self.other.recv()
        if not good:
            raise RawError(value)
        return value

    def _pair(self, name: str, *args):
        status, value = self._ask(name, *args)
        return Wc(status), value

    address = property(lambda self: self._ask("address"))
    state = property(lambda self: Qp(self._ask("state")))
    rkey = property(lambda self: self._ask("rkey"))

    def connect(self, address: bytes) -> None:
        self._ask("connect", bytes(address))

    def reset(self) -> None:
        self._ask("reset")

    def post(self, *args) -> None:
        self._ask("post", *args)

    def poll(self, timeout: float = 20) -> Wc:
        return Wc(self._ask("poll", timeout))

    def read(self, rkey: int, address: int, length: int) -> tuple[Wc, bytes]:
        return self._pair("read", rkey, address, length)

    def write(self, rkey: int, address: int, data: bytes) -> Wc:
        return Wc(self._ask("write", rkey, address, bytes(data)))

    def fetch_add(self, rkey: int, address: int, value: int) -> tuple[Wc, int]:
        return self._pair("fetch_add", rkey, address, value)

    def compare_swap(self, rkey: int, address: int, expect: int, value: int) -> tuple[Wc, int]:
        return self._pair("compare_swap", rkey, address, expect, value)

    def close(self) -> None:
        self.other.send(None)
