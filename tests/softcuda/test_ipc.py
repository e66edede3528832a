# SPDX-License-Identifier: BSD-3-Clause
"""Memory of another process, by legacy handles."""

import ctypes as C

import pytest

from softcuda.driver import (
    ALREADY_MAPPED,
    BLOCK,
    BUFFER_ID,
    CONTEXT,
    DEVICE_ORDINAL,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    LEGACY_CAPABLE,
    MIB,
    NOT_FOUND,
    PEER_ACCESS_UNSUPPORTED,
    CudaError,
    Driver,
    Ipc,
)

TEXT = b"exported"


def export(conn, path, sizes, device=0):
    """Allocates, tells (address, handle) of each, and does what it is told."""
    driver = Driver(path)
    driver.use(device)
    memories = [driver.alloc(size) for size in sizes]
    for number, memory in enumerate(memories):
        memory.write(TEXT + bytes([number]))
    conn.send([(each.address, driver.handle(each.address)) for each in memories])
    while order := conn.recv():
        verb, number = order
        memory = memories[number]
        if verb == "read":
            conn.send(memory.read())
        if verb == "handle inside":
            conn.send(driver.handle(memory.address + 50))
        if verb == "free":
            memory.free()
            conn.send(None)
        if verb == "anew":
            memory.free()
            memory = memories[number] = driver.alloc(memory.size)
            memory.write(b"a second")
            conn.send((memory.address, driver.handle(memory.address)))


@pytest.fixture
def exporter(peer, softcuda, driver):
    """`exporter(*sizes)`: a process that exports so many, and what it tells of them."""

    def start(*sizes, device=0, **env):
        process = peer(export, softcuda(), sizes, device, env=env)
        return process, process.recv()

    return start


def ask(process, *order):
    process.send(order)
    return process.recv()


def refused(driver, handle, code, **kwargs):
    before = driver.live("opens"), driver.live("spans")
    with pytest.raises(CudaError) as caught:
        driver.open(handle, **kwargs)
    assert caught.value.code == code
    assert (driver.live("opens"), driver.live("spans")) == before
    return True


def test_bytes_go_both_ways(exporter, gpu):
    process, [(_, handle)] = exporter(3 * MIB)
    address = gpu.open(handle)
    assert gpu.peek(address, 8) == TEXT
    local = gpu.alloc(8)
    local.write(b"imported")
    gpu.cuMemcpy(address + 3 * MIB - 8, local.address, 8)
    assert ask(process, "read", 0)[-8:] == b"imported"
    gpu.cuIpcCloseMemHandle(address)
    assert gpu.live("opens") == 0


def test_the_same_address_in_both_processes(exporter, gpu):
    """As it often is with the real driver: nobody may take it for the same memory."""
    mine = gpu.alloc(3 * MIB)
    _, [(theirs, handle)] = exporter(3 * MIB)
    assert mine.address == theirs
    assert gpu.open(handle) != theirs
    assert mine.read(0, 8) == bytes(8)


def test_what_is_known_of_it(exporter, gpu):
    _, [_, (_, handle)] = exporter(100, 200)
    address = gpu.open(handle)
    assert gpu.attribute(address, CONTEXT) == gpu.current()
    assert gpu.attribute(address, DEVICE_ORDINAL) == 0
    assert gpu.attribute(address, LEGACY_CAPABLE) == 0
    assert gpu.attribute(address, BUFFER_ID) > 0
    base, size = C.c_uint64(), C.c_uint64()
    gpu.cuMemGetAddressRange_v2(C.byref(base), C.byref(size), address + 7)
    assert (base.value, size.value) == (address, 200)
    with pytest.raises(CudaError, match=f"gave {INVALID_VALUE}"):
        gpu.handle(address)  # it is not ours to hand on
    assert gpu.result("cuMemFree_v2", address) == INVALID_VALUE


def test_a_handle_is_of_the_whole_allocation(exporter, gpu):
    process, [_, (_, handle)] = exporter(100, 200)
    assert ask(process, "handle inside", 1) == handle
    assert gpu.peek(gpu.open(handle), 9) == TEXT + b"\1"


def test_two_of_one_block(exporter, gpu):
    """Both have a handle of their own, and the block is mapped once."""
    _, told = exporter(100, 200)
    (first, second), handles = zip(*told, strict=True)
    assert handles[0] != handles[1]
    opened = [gpu.open(handle) for handle in handles]
    assert opened[1] - opened[0] == second - first == 512
    assert (gpu.live("opens"), gpu.live("spans")) == (2, 1)
    gpu.cuIpcCloseMemHandle(opened[0])
    assert gpu.peek(opened[1], 9) == TEXT + b"\1"
    assert gpu.result("cuMemGetAddressRange_v2", None, None, opened[0]) == NOT_FOUND
    gpu.cuIpcCloseMemHandle(opened[1])
    assert (gpu.live("opens"), gpu.live("spans")) == (0, 0)


def test_opens_of_one_handle_are_counted(exporter, gpu):
    _, [(_, handle)] = exporter(100)
    address = gpu.open(handle)
    assert gpu.open(handle) == address
    assert gpu.live("opens") == gpu.count("cuIpcOpenMemHandle_v2") == 2
    gpu.cuIpcCloseMemHandle(address)
    assert gpu.peek(address, 8) == TEXT
    gpu.cuIpcCloseMemHandle(address)
    assert gpu.result("cuIpcCloseMemHandle", address) == INVALID_VALUE


def test_the_older_call_opens_once(exporter, gpu):
    """That without _v2, which drivers before CUDA 11 have alone; nor two of one block."""
    _, [(_, first), (_, second)] = exporter(100, 200)
    address = gpu.open(first, "cuIpcOpenMemHandle")
    assert refused(gpu, first, ALREADY_MAPPED, function="cuIpcOpenMemHandle")
    assert refused(gpu, second, ALREADY_MAPPED, function="cuIpcOpenMemHandle")
    gpu.cuIpcCloseMemHandle(address)
    assert gpu.open(second, "cuIpcOpenMemHandle")


def test_one_context_of_a_device(exporter, gpu):
    _, [(_, first), (_, second)] = exporter(100, 3 * MIB)
    address = gpu.open(first)
    own = gpu.get("cuCtxCreate_v2", 0, 0)
    assert refused(gpu, first, INVALID_HANDLE)
    assert refused(gpu, second, INVALID_HANDLE)
    assert gpu.result("cuIpcCloseMemHandle", address) == INVALID_VALUE
    gpu.cuCtxDestroy_v2(own)
    gpu.cuIpcCloseMemHandle(address)
    gpu.get("cuCtxCreate_v2", 0, 0)
    assert gpu.open(second)


def test_a_context_that_ends_closes_what_it_opened(exporter, gpu):
    _, [(_, handle)] = exporter(100)
    own = gpu.get("cuCtxCreate_v2", 0, 0)
    gpu.open(handle)
    gpu.cuCtxDestroy_v2(own)
    assert (gpu.live("opens"), gpu.live("spans")) == (0, 0)
    assert gpu.open(handle)


def test_not_in_the_process_that_made_it(gpu):
    assert refused(gpu, gpu.handle(gpu.alloc(100).address), INVALID_CONTEXT)


def test_not_without_a_context(exporter, gpu):
    _, [(_, handle)] = exporter(100)
    address = gpu.open(handle)
    context = gpu.get("cuCtxPopCurrent_v2")
    assert refused(gpu, handle, INVALID_CONTEXT)
    assert gpu.result("cuIpcCloseMemHandle", address) == INVALID_CONTEXT
    gpu.cuCtxPushCurrent_v2(context)
    gpu.cuIpcCloseMemHandle(address)


def test_wrong_closes(exporter, gpu):
    _, [(_, handle)] = exporter(100)
    address = gpu.open(handle)
    for wrong in (address + 8, gpu.alloc(100).address, 0):
        assert gpu.result("cuIpcCloseMemHandle", wrong) == INVALID_VALUE


def test_garbage(exporter, gpu):
    _, [(_, handle)] = exporter(100)
    for wrong in (bytes(64), b"\xff" * 64, handle[:8] + bytes(56), b"x"):
        assert refused(gpu, wrong + handle[len(wrong) :], INVALID_VALUE)
    # Another process has the pid and the descriptors meanwhile: what tells is an inode.
    assert refused(gpu, handle[:24] + b"another!" + handle[32:], INVALID_VALUE)
    good = C.byref(C.c_uint64()), Ipc.from_buffer_copy(handle)
    assert gpu.result("cuIpcOpenMemHandle_v2", *good, 0) == INVALID_VALUE  # the flag is a must
    assert gpu.result("cuIpcOpenMemHandle_v2", *good, 1) == 0


def test_freed_memory_has_no_handle_any_more(exporter, gpu):
    """Also where another allocation keeps its block."""
    process, [(_, handle), (_, other)] = exporter(100, 100)
    ask(process, "free", 0)
    assert refused(gpu, handle, INVALID_VALUE)
    assert gpu.peek(gpu.open(other), 9) == TEXT + b"\1"


def test_new_memory_at_an_old_address(exporter, gpu):
    process, [(address, old)] = exporter(3 * MIB)
    mapped = gpu.open(old)
    again, new = ask(process, "anew", 0)
    assert again == address
    assert refused(gpu, old, INVALID_VALUE)
    assert gpu.peek(gpu.open(new), 8) == b"a second"
    assert gpu.peek(mapped, 8) == TEXT  # and what was mapped is still the old memory


def test_memory_outlives_its_owner_where_it_is_mapped(exporter, gpu):
    process, [(_, handle), (_, other)] = exporter(100, 3 * MIB)
    address = gpu.open(handle)
    process.kill()
    assert gpu.peek(address, 8) == TEXT
    assert refused(gpu, handle, INVALID_VALUE)
    assert refused(gpu, other, INVALID_VALUE)
    assert gpu.live("opens") == 1
    gpu.cuIpcCloseMemHandle(address)
    assert (gpu.live("opens"), gpu.live("spans")) == (0, 0)


def test_memory_of_another_device(exporter, two_gpus, monkeypatch):
    """Also of one that this process does not see; not where devices cannot reach each other."""
    _, [(_, handle)] = exporter(100, device=1, SOFTCUDA_DEVICES="2")
    address = two_gpus.open(handle)
    assert two_gpus.attribute(address, DEVICE_ORDINAL) == 0  # that of the context
    two_gpus.cuIpcCloseMemHandle(address)
    monkeypatch.setenv("SOFTCUDA_PEERS", "0")
    assert refused(two_gpus, handle, PEER_ACCESS_UNSUPPORTED)
    two_gpus.use(1)
    assert two_gpus.open(handle)
    two_gpus.reset()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("SOFTCUDA_PEERS")
    two_gpus.use(0)
    assert two_gpus.peek(two_gpus.open(handle), 8) == TEXT


@pytest.mark.parametrize("kind", ["managed", "host", "async", "pool", "vmm"])
def test_other_memory_has_no_legacy_handle(gpu, kind):
    memory = gpu.alloc(BLOCK, kind, 1 if kind in ("pool", "vmm") else 0)
    with pytest.raises(CudaError, match=f"gave {INVALID_VALUE}"):
        gpu.handle(memory.address)
    with pytest.raises(CudaError, match=f"gave {INVALID_VALUE}"):
        gpu.handle(C.addressof(C.create_string_buffer(8)))
