# SPDX-License-Identifier: BSD-3-Clause
"""Allocations, and what is known of a pointer."""

import ctypes as C
import errno
import mmap
import os
from pathlib import Path

import pytest

from softcuda.driver import (
    BLOCK,
    BUFFER_ID,
    CONTEXT,
    DEVICE_ORDINAL,
    DEVICE_POINTER,
    FABRIC,
    HANDLE_TYPES,
    HOST_POINTER,
    INVALID_CONTEXT,
    INVALID_VALUE,
    IS_MANAGED,
    LEGACY_CAPABLE,
    MAPPED,
    MEMORY_TYPE,
    MEMPOOL,
    NOT_FOUND,
    NOT_SUPPORTED,
    POSIX_FD,
    RANGE_SIZE,
    RANGE_START,
    SYNC_MEMOPS,
    CudaError,
)

KINDS = [
    ("device", 0),
    ("managed", 0),
    ("host", 0),
    ("async", 0),
    ("pool", POSIX_FD),
    ("vmm", 0),
    ("vmm", POSIX_FD | FABRIC),
]
kinds = pytest.mark.parametrize(("kind", "types"), KINDS)
ON_HOST = ("managed", "host")


@kinds
def test_only_the_driver_reads_device_memory(gpu, kind, types):
    memory = gpu.alloc(BLOCK, kind, types)
    memory.write(b"contents")
    seen = (C.c_char * 8).from_address(memory.address)
    reading, writing = os.pipe()
    if kind in ON_HOST:
        seen[0] = b"C"
        os.write(writing, seen)
        assert os.read(reading, 8) == memory.read(0, 8) == b"Contents"
    else:
        with pytest.raises(OSError) as caught:
            os.write(writing, seen)  # the kernel reads it for us: an error and no fault
        assert caught.value.errno == errno.EFAULT
    os.close(reading)
    os.close(writing)


PEEK = """
import ctypes, sys
from softcuda.driver import Driver
driver = Driver(sys.argv[1])
driver.use()
address = driver.alloc(8).address
print(address, flush=True)
ctypes.string_at(address, 8)
print("read")
"""


def test_a_program_that_reads_device_memory_is_killed(softcuda, python):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = python("-c", PEEK, softcuda(), check=False, env=env)
    assert (done.returncode, done.stdout.count("\n"), "read" in done.stdout) == (-11, 1, False)


@kinds
def test_copies_reach_it(gpu, kind, types):
    memory = gpu.alloc(BLOCK, kind, types)
    data = os.urandom(1000)
    gpu.cuMemcpy(memory.address + 8, C.cast(data, C.c_void_p), 1000)
    into = C.create_string_buffer(1000)
    gpu.cuMemcpy(into, memory.address + 8, 1000)
    assert into.raw == data == memory.read(8, 1000)
    memory.free()
    assert gpu.live("allocations") == gpu.live("maps") == gpu.live("handles") == 0
    assert gpu.live("spans") == 0


@pytest.mark.parametrize(
    ("kind", "types", "known"),
    [
        ("device", 0, {MEMORY_TYPE: 2, IS_MANAGED: 0, LEGACY_CAPABLE: 1, HANDLE_TYPES: 0}),
        ("managed", 0, {IS_MANAGED: 1, LEGACY_CAPABLE: 0, HANDLE_TYPES: 0}),
        ("host", 0, {MEMORY_TYPE: 1, IS_MANAGED: 0, LEGACY_CAPABLE: 0, HANDLE_TYPES: 0}),
        ("async", 0, {MEMORY_TYPE: 2, IS_MANAGED: 0, LEGACY_CAPABLE: 0, HANDLE_TYPES: 0}),
        ("pool", 1, {MEMORY_TYPE: 2, LEGACY_CAPABLE: 0, HANDLE_TYPES: 1}),
        ("vmm", 0, {MEMORY_TYPE: 2, LEGACY_CAPABLE: 0, HANDLE_TYPES: 0}),
        ("vmm", 9, {MEMORY_TYPE: 2, LEGACY_CAPABLE: 0, HANDLE_TYPES: 9}),
    ],
)
def test_what_is_known_of_a_pointer(gpu, kind, types, known):
    memory = gpu.alloc(BLOCK, kind, types)
    inside = memory.address + 12345
    assert {which: gpu.attribute(inside, which) for which in known} == known
    assert gpu.attribute(inside, DEVICE_ORDINAL) == 0
    assert gpu.attribute(inside, MAPPED) == 1
    assert gpu.attribute(inside, DEVICE_POINTER) == inside
    # Pools and mappings are the device's, and no context's.
    of_context = kind in ("device", *ON_HOST)
    assert gpu.attribute(inside, CONTEXT) == (gpu.current() if of_context else 0)
    assert (gpu.attribute(inside, MEMPOOL) != 0) == (kind in ("async", "pool"))
    assert (gpu.attribute(inside, RANGE_START), gpu.attribute(inside, RANGE_SIZE)) == (
        memory.address,
        BLOCK,
    )
    host = gpu.result("cuPointerGetAttribute", C.byref(C.c_uint64()), HOST_POINTER, inside)
    assert host == (0 if kind in ON_HOST else INVALID_VALUE)
    base, size = C.c_uint64(), C.c_uint64()
    gpu.cuMemGetAddressRange_v2(C.byref(base), C.byref(size), inside)
    assert (base.value, size.value) == (memory.address, BLOCK)


def test_managed_memory_is_where_its_page_is(gpu):
    memory = gpu.alloc(BLOCK, "managed")
    types = [gpu.attribute(memory.address + page * 4096, MEMORY_TYPE) for page in range(4)]
    assert types == [1, 2, 1, 2]


def attributes(driver, address, *which):
    values = [C.c_uint64(77) for _ in which]
    pointers = (C.c_void_p * len(which))(*map(C.addressof, values))
    driver.cuPointerGetAttributes(len(which), (C.c_int * len(which))(*which), pointers, address)
    return [value.value for value in values]


def test_several_at_once_and_no_error_for_what_is_unknown(gpu):
    memory = gpu.alloc(100)
    asked = CONTEXT, BUFFER_ID
    assert attributes(gpu, memory.address, *asked) == [
        gpu.current(),
        gpu.attribute(memory.address, BUFFER_ID),
    ]
    host = C.addressof(C.create_string_buffer(8))
    for address in (host, memory.address + 100, 0):
        assert attributes(gpu, address, *asked) == [0, 0]
        with pytest.raises(CudaError, match=r"gave 1$"):
            gpu.attribute(address, BUFFER_ID)
        assert gpu.result("cuMemGetAddressRange_v2", None, None, address) == NOT_FOUND
    assert gpu.result("cuPointerGetAttribute", C.byref(C.c_uint64()), 99, memory.address) == (
        INVALID_VALUE
    )


def test_no_context_is_needed_to_ask(gpu):
    memory = gpu.alloc(100)
    gpu.cuCtxSetCurrent(0)
    assert gpu.attribute(memory.address, BUFFER_ID) > 0
    with pytest.raises(CudaError) as caught:
        gpu.attribute(memory.address, DEVICE_POINTER)
    assert caught.value.code == INVALID_CONTEXT


def test_sync_memops_can_be_set(gpu):
    memory = gpu.alloc(100)
    assert gpu.attribute(memory.address, SYNC_MEMOPS) == 0
    gpu.cuPointerSetAttribute(C.byref(C.c_uint(1)), SYNC_MEMOPS, memory.address)
    assert gpu.attribute(memory.address, SYNC_MEMOPS) == 1


def test_small_ones_share_a_block(gpu):
    small = [gpu.alloc(size) for size in (100, 513, 1)]
    assert [each.address - small[0].address for each in small] == [0, 512, 1536]
    large = gpu.alloc(BLOCK // 2 + 1)
    assert small[0].address // BLOCK != large.address // BLOCK
    assert gpu.live("spans") == 2
    own = gpu.get("cuCtxCreate_v2", 0, 0)
    assert gpu.alloc(1).address // BLOCK != small[0].address // BLOCK
    gpu.cuCtxDestroy_v2(own)
    # What lies between two of them, and what the block has beyond, is nobody's.
    for address in (small[0].address + 100, small[2].address + 1):
        assert gpu.result("cuMemGetAddressRange_v2", None, None, address) == NOT_FOUND
    for each in small:
        each.free()
    assert gpu.live("spans") == 1


def test_an_address_comes_again_a_buffer_id_does_not(gpu):
    memory = gpu.alloc(100)
    address, number, handle = (
        memory.address,
        gpu.attribute(memory.address, BUFFER_ID),
        gpu.handle(memory.address),
    )
    memory.free()
    again = gpu.alloc(100)
    assert again.address == address
    assert gpu.attribute(address, BUFFER_ID) != number
    assert gpu.handle(address) != handle
    assert again.read() == bytes(100)


def test_wrong_frees(gpu):
    device, host, mapped = gpu.alloc(100), gpu.alloc(100, "host"), gpu.alloc(BLOCK, "vmm")
    for address in (device.address + 8, host.address, mapped.address, 0x1000):
        assert gpu.result("cuMemFree_v2", address) == INVALID_VALUE
    assert gpu.result("cuMemFreeHost", device.address) == INVALID_VALUE
    assert gpu.result("cuMemFree_v2", 0) == 0
    device.free()
    assert gpu.result("cuMemFree_v2", device.address) == INVALID_VALUE


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 101), (100, 1), (511, 2), (512, 101), (0, 700), (1 << 30, 1)]
)
def test_copies_stay_within_an_allocation(gpu, offset, size):
    first, second = gpu.alloc(100), gpu.alloc(100)
    assert second.address == first.address + 512
    into = C.create_string_buffer(1000)
    for async_ in ((), (0,)):
        name = "cuMemcpyAsync" if async_ else "cuMemcpy"
        assert gpu.result(name, into, first.address + offset, size, *async_) == INVALID_VALUE
        assert gpu.result(name, first.address + offset, into, size, *async_) == INVALID_VALUE
    assert gpu.result("cuMemsetD8_v2", first.address + offset, 1, size) == INVALID_VALUE
    assert gpu.result("cuCtxSynchronize") == 0


def test_host_memory_that_is_not_there_is_an_error(gpu):
    memory = gpu.alloc(100)
    assert gpu.result("cuMemcpy", memory.address, 0x1000, 8) == INVALID_VALUE
    assert gpu.result("cuMemcpyHtoD_v2", memory.address, 0, 8) == INVALID_VALUE


def test_copies_in_one_direction_know_it(gpu):
    memory, host = gpu.alloc(8), C.create_string_buffer(b"abcdefg", 8)
    gpu.cuMemcpyHtoD_v2(memory.address, host, 8)
    for name in ("cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2"):
        assert gpu.result(name, memory.address, host, 8) == INVALID_VALUE
    into = C.create_string_buffer(8)
    gpu.cuMemcpyDtoH_v2(into, memory.address, 8)
    assert into.raw == host.raw


def test_memory_is_of_the_current_contexts_device(two_gpus):
    first = two_gpus.alloc(100)
    two_gpus.use(1)
    second = two_gpus.alloc(100)
    ordinals = [two_gpus.attribute(m.address, DEVICE_ORDINAL) for m in (first, second)]
    assert ordinals == [0, 1]
    pool, mapped = two_gpus.alloc(BLOCK, "pool", device=0), two_gpus.alloc(BLOCK, "vmm", device=0)
    ordinals = [two_gpus.attribute(m.address, DEVICE_ORDINAL) for m in (pool, mapped)]
    assert ordinals == [0, 0]
    first.write(b"across")
    two_gpus.cuMemcpy(second.address, first.address, 6)
    assert second.read(0, 6) == b"across"


# ---- dmabuf ----


def dmabuf(driver, address, size, flags=0):
    out = C.c_int(-1)
    driver.cuMemGetHandleForAddressRange(C.byref(out), address, size, 1, flags)
    return out.value


@pytest.mark.parametrize("kind", ["device", "vmm"])
def test_a_descriptor_of_the_same_bytes(gpu, kind):
    memory = gpu.alloc(BLOCK, kind)
    memory.write(b"before")
    fd = dmabuf(gpu, memory.address, BLOCK)
    assert os.get_inheritable(fd) is False
    with mmap.mmap(fd, BLOCK) as seen:
        assert seen[:6] == b"before"
        seen[:5] = b"after"
        assert memory.read(0, 6) == b"aftere"
    assert os.fstat(fd).st_size == BLOCK
    os.close(fd)


def test_no_descriptor_of_what_is_not_device_memory(gpu, monkeypatch):
    memory = gpu.alloc(2 * BLOCK)
    for address, size in (
        (memory.address + 8, 4096),
        (memory.address, 100),
        (memory.address, 3 * BLOCK),
        (gpu.alloc(BLOCK, "managed").address, 4096),
        (gpu.alloc(BLOCK, "async").address, 4096),
        (C.addressof(C.create_string_buffer(8192)) & ~4095, 4096),
    ):
        with pytest.raises(CudaError, match=r"gave 1$"):
            dmabuf(gpu, address, size)
    with pytest.raises(CudaError, match=f"gave {NOT_SUPPORTED}"):
        dmabuf(gpu, memory.address + BLOCK, BLOCK)
    monkeypatch.setenv("SOFTCUDA_DMABUF", "0")
    with pytest.raises(CudaError, match=f"gave {NOT_SUPPORTED}"):
        dmabuf(gpu, memory.address, BLOCK)


# ---- pools ----


def test_what_pools_refuse(gpu):
    shared, plain = gpu.alloc(100, "pool", POSIX_FD), gpu.alloc(100, "async")
    out = C.create_string_buffer(64)
    default = gpu.get("cuDeviceGetDefaultMemPool", 0)
    assert gpu.attribute(plain.address, MEMPOOL) == default
    assert gpu.attribute(shared.address, MEMPOOL) == shared.pool != default
    for pool, kind in ((default, POSIX_FD), (shared.pool, FABRIC), (0x1234, POSIX_FD)):
        code = gpu.result("cuMemPoolExportToShareableHandle", out, pool, kind, 0)
        assert code == INVALID_VALUE
    assert gpu.result("cuMemPoolExportPointer", out, plain.address) == INVALID_VALUE
    # Sharing one is not in the fake.
    code = gpu.result("cuMemPoolExportToShareableHandle", out, shared.pool, POSIX_FD, 0)
    assert code == gpu.result("cuMemPoolExportPointer", out, shared.address) == NOT_SUPPORTED
    assert gpu.result("cuMemRetainAllocationHandle", out, shared.address) == INVALID_VALUE
    assert gpu.result("cuMemPoolDestroy", default) == INVALID_VALUE
    gpu.cuMemPoolDestroy(shared.pool)
    shared.write(b"still there")
    gpu.cuMemFreeAsync(shared.address, 0)
    plain.free()
    assert gpu.live("allocations") == 0
