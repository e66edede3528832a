# SPDX-License-Identifier: BSD-3-Clause
"""Calls: what they need, what is counted, what fails or lacks on request."""

import ctypes as C
import os
import re
from pathlib import Path

import pytest

from softcuda.driver import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    NO_DEVICE,
    NOT_FOUND,
    NOT_INITIALIZED,
    SUCCESS,
    CudaError,
    Driver,
    Ipc,
)

# The calls that a backend for GPU memory can want, as dlsym has to find them.
NAMES = """
cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetUuid
cuDeviceGetUuid_v2 cuDeviceGetAttribute cuDeviceCanAccessPeer cuDevicePrimaryCtxRetain
cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxGetState
cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxGetDevice
cuCtxCreate_v2 cuCtxDestroy_v2 cuCtxGetId cuCtxSynchronize cuCtxEnablePeerAccess
cuCtxDisablePeerAccess cuMemAlloc_v2 cuMemFree_v2 cuMemAllocAsync cuMemFreeAsync
cuMemAllocFromPoolAsync cuMemAllocManaged cuMemHostAlloc cuMemAllocHost_v2 cuMemFreeHost
cuPointerGetAttribute cuPointerGetAttributes cuPointerSetAttribute cuMemGetAddressRange_v2
cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle cuMemCreate
cuMemRelease cuMemAddressReserve cuMemAddressFree cuMemMap cuMemUnmap cuMemSetAccess
cuMemGetAccess cuMemGetAllocationGranularity cuMemExportToShareableHandle
cuMemImportFromShareableHandle cuMemRetainAllocationHandle
cuMemGetAllocationPropertiesFromHandle cuDeviceGetDefaultMemPool cuMemPoolCreate
cuMemPoolDestroy cuMemPoolExportToShareableHandle cuMemPoolExportPointer
cuMemGetHandleForAddressRange cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize cuStreamQuery
cuStreamWaitEvent cuStreamGetCtx cuEventCreate cuEventRecord cuEventQuery cuEventSynchronize
cuEventDestroy_v2 cuMemcpy cuMemcpyAsync cuMemcpyDtoD_v2 cuMemcpyDtoH_v2 cuMemcpyHtoD_v2
cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemsetD8_v2 cuMemsetD8Async
cuGetErrorName cuGetErrorString cuGetProcAddress_v2
""".split()
ALWAYS = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}
ALWAYS |= {"cuGetProcAddress_v2"}
# These say the same where the context that they are given, or shall give, is none.
NO_CONTEXT_GIVEN = {"cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuCtxDestroy_v2"}
NO_CONTEXT_GIVEN |= {"cuDevicePrimaryCtxRelease_v2"}
# Of the others, those that work in a thread without a context.
WITHOUT_CONTEXT = re.compile(
    r"cuDevice|cuCtx(Push|Pop|GetCurrent|SetCurrent|Create|Destroy|GetId)|cuPointer|cuMemFreeHost"
    r"|cuMem(Create|Release|Address|Map|Unmap|SetAccess|GetAccess|GetAlloc|Export|Import|Retain)"
    r"|cuMemPool|cuMemGetHandle|cuEvent(Query|Synchronize|Destroy)"
)


def result(driver, name):
    """With arguments that nothing good can come of."""
    handle = [Ipc()] if name.startswith("cuIpcOpen") else []
    return driver.result(name, None, *handle, None, None, None, None, None)


def test_the_names_are_all_there_and_no_others(softcuda):
    sources = Path(__file__).parent.glob("*.c")
    found = {
        name
        for path in sources
        for name in re.findall(r"^API CUresult (\w+)\(", path.read_text(), re.M)
    }
    assert found == set(NAMES)
    lib = C.CDLL(softcuda())
    assert [name for name in NAMES if not hasattr(lib, name)] == []


@pytest.mark.parametrize("name", sorted(set(NAMES) - ALWAYS))
def test_nothing_works_before_the_beginning(driver, name):
    assert result(driver, name) == NOT_INITIALIZED


@pytest.mark.parametrize("name", sorted(set(NAMES) - ALWAYS - NO_CONTEXT_GIVEN))
def test_what_needs_a_context_says_so(driver, name):
    driver.cuInit(0)
    assert (result(driver, name) == INVALID_CONTEXT) == (not WITHOUT_CONTEXT.match(name))


def test_flags_of_the_beginning_are_for_later(driver):
    assert driver.result("cuInit", 1) == INVALID_VALUE
    assert driver.result("cuInit", 0) == driver.result("cuInit", 0) == SUCCESS


def test_no_device(driver, monkeypatch):
    monkeypatch.setenv("SOFTCUDA_DEVICES", "0")
    assert driver.result("cuInit", 0) == NO_DEVICE
    assert driver.result("cuDeviceGetCount", C.byref(C.c_int())) == NOT_INITIALIZED


def test_the_version_is_what_one_wants(driver, monkeypatch):
    assert driver.get("cuDriverGetVersion") == 12090
    monkeypatch.setenv("SOFTCUDA_DRIVER_VERSION", "11000")
    assert driver.get("cuDriverGetVersion") == 11000


def test_errors_have_names(driver):
    name, text = C.c_char_p(), C.c_char_p()
    driver.cuGetErrorName(INVALID_CONTEXT, C.byref(name))
    driver.cuGetErrorString(INVALID_CONTEXT, C.byref(text))
    assert (name.value, text.value) == (b"CUDA_ERROR_INVALID_CONTEXT", b"invalid device context")
    assert driver.result("cuGetErrorName", 12345, C.byref(name)) == INVALID_VALUE
    assert name.value is None


def test_calls_are_counted_failed_ones_too(gpu):
    before = gpu.count("cuMemAlloc_v2")
    memory = gpu.alloc(100)
    with pytest.raises(CudaError):
        gpu.alloc(0)
    assert gpu.count("cuMemAlloc_v2") == before + 2
    assert gpu.count("cuMemFree_v2") == 0
    memory.free()
    assert gpu.count("cuMemFree_v2") == 1
    gpu.reset()
    assert gpu.count("cuMemAlloc_v2") == 0
    with pytest.raises(AssertionError, match="cuMemAlloc_v9"):
        gpu.count("cuMemAlloc_v9")


def test_calls_fail_when_asked_to(gpu):
    gpu.fail("cuMemAlloc_v2", 2, nth=2)
    gpu.alloc(100)
    with pytest.raises(CudaError, match="cuMemAlloc_v2 gave 2"):
        gpu.alloc(100)
    gpu.alloc(100)
    assert gpu.live("allocations") == 2
    gpu.fail("cuMemAlloc_v2", 46, nth=0)
    for _ in range(3):
        with pytest.raises(CudaError, match="gave 46"):
            gpu.alloc(100)
    gpu.mend()
    gpu.alloc(100)
    with pytest.raises(AssertionError, match="cuMemAllocate"):
        gpu.fail("cuMemAllocate", 2)


def begin(conn, path):
    driver = Driver(path)
    return [driver.result("cuInit", 0) for _ in range(3)]


def test_calls_of_a_child_fail_when_asked_to(softcuda, peer):
    asked = peer(begin, softcuda(), env={"SOFTCUDA_FAIL": "cuInit:100:2,cuMemcpy:700"})
    assert asked.result() == [SUCCESS, NO_DEVICE, SUCCESS]
    with pytest.raises(AssertionError, match="status -6"):  # and a slip of the pen is no silence
        peer(begin, softcuda(), env={"SOFTCUDA_FAIL": "cuInitialise:100"}).result()


def test_symbols_are_not_there_when_asked_to(softcuda):
    lost = "cuMemGetHandleForAddressRange", "cuCtxGetId"
    driver = Driver(softcuda(*lost))
    assert {name for name in NAMES if not hasattr(driver.lib, name)} == set(lost)
    assert hasattr(Driver(softcuda()).lib, lost[0])
    out = C.c_void_p()
    code = driver.result("cuGetProcAddress_v2", lost[0].encode(), C.byref(out), 12090, 0, None)
    assert (code, out.value) == (NOT_FOUND, None)


def test_two_variants_are_two_libraries(softcuda):
    """What happens in the one is not seen in the other."""
    whole, lacking = Driver(softcuda()), Driver(softcuda("cuCtxGetId"))
    before = whole.count("cuInit")
    lacking.cuInit(0)
    assert (whole.count("cuInit"), lacking.count("cuInit")) == (before, 1)
    lacking.reset()


@pytest.mark.parametrize(
    ("name", "version", "found", "status"),
    [
        ("cuMemAlloc", 12000, "cuMemAlloc_v2", 0),
        ("cuInit", 2000, "cuInit", 0),
        ("cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2", 0),
        ("cuIpcOpenMemHandle", 10020, "cuIpcOpenMemHandle", 0),
        ("cuMemGetHandleForAddressRange", 11070, "cuMemGetHandleForAddressRange", 0),
        ("cuMemGetHandleForAddressRange", 11060, None, 2),
        ("cuNoSuch", 12000, None, 1),
        ("softcuda_count", 12000, None, 1),
    ],
)
def test_names_by_version(driver, name, version, found, status):
    out, told = C.c_void_p(), C.c_int(-1)
    driver.cuGetProcAddress_v2(name.encode(), C.byref(out), version, 0, C.byref(told))
    expected = found and C.cast(getattr(driver.lib, found), C.c_void_p).value
    assert (out.value, told.value) == (expected, status)


# ---- forks ----


def fork_and_call(conn, path, first):
    """What cuInit and cuDeviceGetCount give in a child that was forked after `first`."""
    driver = Driver(path)
    if first:
        driver.cuInit(0)
    if not (pid := os.fork()):
        codes = driver.result("cuInit", 0), driver.result("cuDeviceGetCount", C.byref(C.c_int()))
        os._exit(codes[0] << 4 | codes[1])
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), driver.result("cuInit", 0)


@pytest.mark.parametrize(("first", "code"), [(True, 0x33), (False, 0)])
def test_a_fork_after_the_beginning_has_no_driver(softcuda, peer, first, code):
    assert peer(fork_and_call, softcuda(), first).result() == (code, SUCCESS)
