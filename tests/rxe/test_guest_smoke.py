# SPDX-License-Identifier: BSD-3-Clause
"""The guest's adapter is there and is what the other tests take it for."""

import ctypes
import os
import subprocess
import time
from ctypes import byref, c_char_p, c_int, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path

import pytest

MEM_WINDOW = 1 << 17
MEM_MGT_EXTENSIONS = 1 << 21
MEM_WINDOW_TYPE_2A = 1 << 23
MEM_WINDOW_TYPE_2B = 1 << 24
ATOMIC_HCA = 1
ACTIVE = 4
MTU_1024 = 3
IPV4_GID = 1  # the first is IPv6's


class DeviceAttr(ctypes.Structure):
    """The beginning of struct ibv_device_attr."""

    _fields_ = [
        ("fw_ver", ctypes.c_char * 64),
        *((name, c_uint64) for name in ("node_guid", "sys_image_guid")),
        *((name, c_uint64) for name in ("max_mr_size", "page_size_cap")),
        *((name, c_uint32) for name in ("vendor_id", "vendor_part_id", "hw_ver")),
        *((name, c_int) for name in ("max_qp", "max_qp_wr")),
        ("device_cap_flags", c_uint32),
        *((name, c_int) for name in ("max_sge", "max_sge_rd", "max_cq", "max_cqe", "max_mr")),
        *((name, c_int) for name in ("max_pd", "max_qp_rd_atom", "max_ee_rd_atom")),
        *((name, c_int) for name in ("max_res_rd_atom", "max_qp_init_rd_atom")),
        *((name, c_int) for name in ("max_ee_init_rd_atom", "atomic_cap")),
        *((name, c_int) for name in ("max_ee", "max_rdd", "max_mw")),
        ("rest", c_uint8 * 256),
    ]


class PortAttr(ctypes.Structure):
    """The beginning of struct ibv_port_attr."""

    _fields_ = [
        *((name, c_int) for name in ("state", "max_mtu", "active_mtu", "gid_tbl_len")),
        *((name, c_uint32) for name in ("port_cap_flags", "max_msg_sz")),
        *((name, c_uint32) for name in ("bad_pkey_cntr", "qkey_viol_cntr")),
        ("pkey_tbl_len", c_uint16),
        ("rest", c_uint8 * 256),
    ]


@pytest.fixture(scope="module")
def verbs():
    library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    library.ibv_get_device_list.restype = ctypes.POINTER(c_void_p)
    library.ibv_get_device_name.argtypes = [c_void_p]
    library.ibv_get_device_name.restype = c_char_p
    library.ibv_open_device.argtypes = [c_void_p]
    library.ibv_open_device.restype = c_void_p
    library.ibv_close_device.argtypes = [c_void_p]
    library.ibv_query_device.argtypes = [c_void_p, c_void_p]
    library.ibv_query_port.argtypes = [c_void_p, c_uint8, c_void_p]
    library.ibv_query_gid.argtypes = [c_void_p, c_uint8, c_int, c_void_p]
    return library


@pytest.fixture(scope="module")
def device(verbs):
    """The one device, open."""
    devices = verbs.ibv_get_device_list(None)
    assert devices
    assert devices[0], "no device"
    assert verbs.ibv_get_device_name(devices[0]) == b"rxe0"
    assert not devices[1], "another device than rxe0"
    context = verbs.ibv_open_device(devices[0])
    assert context
    verbs.ibv_free_device_list(devices)
    yield context
    assert verbs.ibv_close_device(context) == 0


def test_kernel_completes_reads_that_lose_their_key():
    release = os.uname().release
    assert tuple(map(int, release.split(".")[:2])) >= (6, 12), release


def test_device(verbs, device):
    attr = DeviceAttr()
    assert verbs.ibv_query_device(device, byref(attr)) == 0
    assert attr.device_cap_flags & MEM_WINDOW
    assert attr.device_cap_flags & MEM_MGT_EXTENSIONS
    assert attr.device_cap_flags & MEM_WINDOW_TYPE_2B
    assert not attr.device_cap_flags & MEM_WINDOW_TYPE_2A
    assert attr.atomic_cap == ATOMIC_HCA
    assert attr.max_mr > 100_000
    assert attr.max_mw > 100_000
    assert attr.max_qp_rd_atom == 128
    assert attr.max_sge == 32


def test_port(verbs, device):
    attr = PortAttr()
    assert verbs.ibv_query_port(device, 1, byref(attr)) == 0
    assert attr.state == ACTIVE
    assert attr.active_mtu == MTU_1024
    assert attr.max_msg_sz >= 8 << 20
    assert attr.pkey_tbl_len == 1
    gid = (c_uint8 * 16)()
    assert verbs.ibv_query_gid(device, 1, IPV4_GID, gid) == 0
    own = bytes([10, 77, 0, int(os.environ["UCX_MEMH_GUEST"])])
    assert bytes(gid) == bytes(10) + b"\xff\xff" + own


def test_memory_may_be_locked():
    limits = Path("/proc/self/limits").read_text().splitlines()
    (line,) = (line for line in limits if line.startswith("Max locked memory"))
    assert line.split()[3:5] == ["unlimited", "unlimited"]


def test_loopback():
    """Two processes and a reliable connection between them."""
    command = ["ibv_rc_pingpong", "--gid-idx", str(IPV4_GID), "--iters", "100", "--chk"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **both) as server:
        try:
            until = time.monotonic() + 30
            while True:  # until it listens
                client = subprocess.run([*command, "localhost"], **both, timeout=60)
                if client.returncode == 0 or time.monotonic() > until:
                    break
                time.sleep(0.1)
            assert client.returncode == 0, client.stdout
            output, _ = server.communicate(timeout=30)
            assert server.returncode == 0, output
        finally:
            server.kill()
    assert "100 iters" in client.stdout
    assert "100 iters" in output
    assert "invalid data" not in client.stdout + output
