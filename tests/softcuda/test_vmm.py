# SPDX-License-Identifier: BSD-3-Clause
"""Allocations that are created, shared and mapped: by descriptor and by fabric handle."""

import ctypes as C
import os
import tempfile

import pytest

from softcuda.driver import (
    BLOCK,
    DEVICE_ORDINAL,
    FABRIC,
    HANDLE_TYPES,
    INVALID_VALUE,
    MAPPED,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    POSIX_FD,
    RANGE_SIZE,
    RANGE_START,
    Access,
    CudaError,
    Driver,
    Location,
    Prop,
)

libc = C.CDLL(None, use_errno=True)
PIDFD_GETFD = 438


def export_fd(driver, handle):
    out = C.c_int(-1)
    driver.cuMemExportToShareableHandle(C.byref(out), handle, POSIX_FD, 0)
    return out.value


def export_fabric(driver, handle):
    out = C.create_string_buffer(64)
    driver.cuMemExportToShareableHandle(out, handle, FABRIC, 0)
    return out.raw


def owner(conn, path):
    driver = Driver(path)
    driver.use()
    memory = driver.alloc(BLOCK, "vmm", POSIX_FD | FABRIC)
    memory.write(b"exported")
    fd = export_fd(driver, memory.allocation)
    conn.send((fd, export_fabric(driver, memory.allocation)))
    conn.recv()
    conn.send(memory.read(8, 8))
    memory.free()
    os.close(fd)
    conn.send((driver.live("handles"), driver.live("spans")))
    conn.recv()


@pytest.fixture
def exported(peer, softcuda, gpu):
    """A process with an exported allocation: (the process, our descriptor of it, fabric handle)."""
    process = peer(owner, softcuda())
    fd, fabric = process.recv()
    pidfd = os.pidfd_open(process.pid)
    ours = libc.syscall(PIDFD_GETFD, pidfd, fd, 0)
    os.close(pidfd)
    assert ours >= 0, os.strerror(C.get_errno())
    yield process, ours, fabric
    os.close(ours)


def take(driver, exported, kind):
    _, fd, fabric = exported
    return driver.get("cuMemImportFromShareableHandle", fd if kind == POSIX_FD else fabric, kind)


@pytest.mark.parametrize("kind", [POSIX_FD, FABRIC])
def test_bytes_go_both_ways(gpu, exported, kind):
    process = exported[0]
    handle = take(gpu, exported, kind)
    address = gpu.map(handle, BLOCK)
    assert gpu.attribute(address, HANDLE_TYPES) == POSIX_FD | FABRIC
    local = gpu.alloc(8)
    gpu.cuMemcpy(local.address, address, 8)
    assert local.read() == b"exported"
    local.write(b"imported")
    gpu.cuMemcpy(address + 8, local.address, 8)
    process.send(None)
    assert process.recv() == b"imported"
    # The owner has let go of it, and has nothing left; who maps it still has it.
    assert process.recv() == (0, 0)
    assert gpu.peek(address, 16) == b"exportedimported"
    gpu.cuMemRelease(handle)
    assert gpu.peek(address, 16) == b"exportedimported"
    gpu.unmap(address, BLOCK)
    assert (gpu.live("handles"), gpu.live("maps")) == (0, 0)
    assert gpu.result("cuMemRelease", handle) == INVALID_VALUE


def test_a_fabric_handle_ends_with_its_owner(gpu, exported):
    exported[0].kill()
    with pytest.raises(CudaError, match=f"gave {INVALID_VALUE}"):
        take(gpu, exported, FABRIC)
    assert take(gpu, exported, POSIX_FD)  # but a descriptor is as good as the memory


def test_a_descriptor_stays_the_callers(gpu, exported):
    first, second = (take(gpu, exported, POSIX_FD) for _ in range(2))
    assert first != second
    assert os.fstat(exported[1]).st_size == BLOCK
    prop = Prop()
    gpu.cuMemGetAllocationPropertiesFromHandle(C.byref(prop), first)
    assert (prop.types, prop.location.id) == (POSIX_FD | FABRIC, 0)


def test_importing_garbage(gpu):
    with tempfile.TemporaryFile() as file:
        file.truncate(BLOCK)
        for fd in (file.fileno(), -1, 1 << 20):
            with pytest.raises(CudaError, match=f"gave {INVALID_VALUE}"):
                gpu.get("cuMemImportFromShareableHandle", fd & (1 << 64) - 1, POSIX_FD)
    with pytest.raises(CudaError, match=f"gave {INVALID_VALUE}"):
        gpu.get("cuMemImportFromShareableHandle", bytes(64), FABRIC)


@pytest.mark.parametrize("types", [0, POSIX_FD, FABRIC])
def test_only_as_was_asked_for_when_it_was_made(gpu, types):
    memory = gpu.alloc(BLOCK, "vmm", types)
    for kind, export in (POSIX_FD, export_fd), (FABRIC, export_fabric):
        if types & kind:
            made = export(gpu, memory.allocation)
            if kind == POSIX_FD:
                assert os.get_inheritable(made)
                os.close(made)
        else:
            with pytest.raises(CudaError, match=f"gave {INVALID_VALUE}"):
                export(gpu, memory.allocation)


def test_a_legacy_handle_is_no_fabric_handle(gpu):
    handle = gpu.handle(gpu.alloc(100).address)
    with pytest.raises(CudaError, match=f"gave {INVALID_VALUE}"):
        gpu.get("cuMemImportFromShareableHandle", handle, FABRIC)


@pytest.mark.parametrize(("setting", "code"), [("0", NOT_SUPPORTED), ("2", NOT_PERMITTED)])
def test_no_fabric(gpu, exported, monkeypatch, setting, code):
    """There is none, or its service is not running; then importing is not allowed either."""
    monkeypatch.setenv("SOFTCUDA_FABRIC", setting)
    with pytest.raises(CudaError, match=f"gave {code}"):
        gpu.alloc(BLOCK, "vmm", FABRIC)
    with pytest.raises(CudaError, match=f"gave {NOT_PERMITTED}"):
        take(gpu, exported, FABRIC)
    assert gpu.alloc(BLOCK, "vmm", POSIX_FD)


# ---- addresses and mappings ----


def create(driver, size=BLOCK, device=0):
    return driver.get("cuMemCreate", size, C.byref(Prop(1, 0, Location(1, device))), 0)


def allow(driver, address, size, device=0, flags=3):
    access = Access(Location(1, device), flags)
    return driver.result("cuMemSetAccess", address, size, C.byref(access), 1)


def test_memory_is_there_once_it_is_mapped_and_allowed(gpu):
    into = C.create_string_buffer(8)
    address = gpu.get("cuMemAddressReserve", 2 * BLOCK, 0, 0, 0)
    known = [gpu.attribute(address + 1, which) for which in (MAPPED, RANGE_START, RANGE_SIZE)]
    assert known == [0, address, 2 * BLOCK]
    assert gpu.result("cuMemcpy", into, address, 8) == INVALID_VALUE
    handle = create(gpu)
    gpu.cuMemMap(address, BLOCK, 0, handle, 0)
    assert gpu.attribute(address + 1, MAPPED) == 1
    assert gpu.result("cuMemcpy", into, address, 8) == INVALID_VALUE
    assert allow(gpu, address, BLOCK, flags=1) == 0
    assert gpu.result("cuMemcpy", into, address, 8) == 0
    assert gpu.result("cuMemcpy", address, into, 8) == INVALID_VALUE
    assert allow(gpu, address, BLOCK) == 0
    assert gpu.result("cuMemcpy", address, into, 8) == 0
    location = Location(1, 0)
    assert gpu.get("cuMemGetAccess", C.byref(location), address) == 3
    gpu.cuMemUnmap(address, BLOCK)
    assert gpu.result("cuMemcpy", into, address, 8) == INVALID_VALUE
    gpu.cuMemAddressFree(address, 2 * BLOCK)
    gpu.cuMemRelease(handle)
    assert (gpu.live("handles"), gpu.live("spans")) == (0, 0)


def test_mappings_side_by_side(gpu):
    """As torch's expandable segments are: one range, two allocations behind it."""
    address = gpu.get("cuMemAddressReserve", 3 * BLOCK, 0, 0, 0)
    handles = [create(gpu) for _ in range(2)]
    for number, handle in enumerate(handles):
        gpu.cuMemMap(address + number * BLOCK, BLOCK, 0, handle, 0)
    assert allow(gpu, address, 2 * BLOCK) == 0
    data = C.create_string_buffer(b"over both", 9)
    gpu.cuMemcpy(address + BLOCK - 4, data, 9)
    assert gpu.peek(address + BLOCK - 4, 9) == b"over both"
    assert gpu.result("cuMemcpy", address + 2 * BLOCK - 4, data, 9) == INVALID_VALUE
    base, size = C.c_uint64(), C.c_uint64()
    gpu.cuMemGetAddressRange_v2(C.byref(base), C.byref(size), address + BLOCK + 1)
    assert (base.value, size.value) == (address + BLOCK, BLOCK)
    assert gpu.get("cuMemRetainAllocationHandle", address + BLOCK + 1) == handles[1]
    assert gpu.live("handles") == 3
    assert gpu.result("cuMemUnmap", address, 3 * BLOCK) == INVALID_VALUE
    assert gpu.result("cuMemUnmap", address, BLOCK // 2) == INVALID_VALUE
    assert gpu.result("cuMemAddressFree", address, 3 * BLOCK) == INVALID_VALUE
    assert gpu.live("maps") == 2
    gpu.cuMemUnmap(address, 2 * BLOCK)
    gpu.cuMemAddressFree(address, 3 * BLOCK)


def test_wrong_mappings(gpu):
    handle = create(gpu)
    address = gpu.get("cuMemAddressReserve", 2 * BLOCK, 0, 0, 0)
    for wrong in (
        (address, BLOCK, 0, 0x1234, 0),
        (address, 2 * BLOCK, 0, handle, 0),  # more than it has
        (address + 512, BLOCK, 0, handle, 0),
        (address + 2 * BLOCK, BLOCK, 0, handle, 0),  # more than is reserved
        (gpu.alloc(BLOCK).address, BLOCK, 0, handle, 0),
    ):
        assert gpu.result("cuMemMap", *wrong) == INVALID_VALUE
    gpu.cuMemMap(address, BLOCK, 0, handle, 0)
    assert gpu.result("cuMemMap", address, BLOCK, 0, handle, 0) == INVALID_VALUE
    gpu.cuMemMap(address + BLOCK, BLOCK, 0, handle, 0)  # a second time, beside it
    assert gpu.result("cuMemAddressFree", address, 2 * BLOCK) == INVALID_VALUE
    prop = Prop(1, 0, Location(1, 0))
    assert gpu.get("cuMemGetAllocationGranularity", C.byref(prop), 0) == BLOCK
    assert gpu.result("cuMemCreate", C.byref(C.c_uint64()), 100, C.byref(prop), 0) == INVALID_VALUE


def test_a_handle_that_was_released_is_mapped_still(gpu):
    memory = gpu.alloc(BLOCK, "vmm")
    gpu.cuMemRelease(memory.allocation)
    memory.write(b"there")
    assert gpu.live("handles") == 0
    assert gpu.result("cuMemMap", memory.address, BLOCK, 0, memory.allocation, 0) == INVALID_VALUE
    again = gpu.get("cuMemRetainAllocationHandle", memory.address)
    assert again == memory.allocation
    memory.free()
    assert (gpu.live("handles"), gpu.live("spans")) == (0, 0)


def test_access_is_a_devices_own(two_gpus, monkeypatch):
    address = two_gpus.alloc(BLOCK, "vmm", device=0).address
    into = C.create_string_buffer(8)
    assert two_gpus.result("cuMemcpy", into, address, 8) == 0
    two_gpus.use(1)
    assert two_gpus.result("cuMemcpy", into, address, 8) == INVALID_VALUE
    assert allow(two_gpus, address, BLOCK, device=1) == 0
    assert two_gpus.result("cuMemcpy", into, address, 8) == 0
    assert two_gpus.attribute(address, DEVICE_ORDINAL) == 0
    assert allow(two_gpus, address, BLOCK, device=2) == INVALID_VALUE
    monkeypatch.setenv("SOFTCUDA_PEERS", "0")
    assert allow(two_gpus, address, BLOCK, device=1) == 217
