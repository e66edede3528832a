# SPDX-License-Identifier: BSD-3-Clause
"""Devices and contexts."""

import ctypes as C
import threading

import pytest

from softcuda.driver import (
    CONTEXT_IS_DESTROYED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    SUCCESS,
    Driver,
)


def uuid(driver, device, function="cuDeviceGetUuid_v2"):
    out = C.create_string_buffer(16)
    getattr(driver, function)(out, device)
    return out.raw


def uuids(conn, path):
    driver = Driver(path)
    driver.cuInit(0)
    return [uuid(driver, i) for i in range(driver.get("cuDeviceGetCount"))]


def test_devices_are_known_by_their_uuid(softcuda, peer, two_gpus):
    """Which number a device has is a process's own affair."""
    here = [uuid(two_gpus, i) for i in (0, 1)]
    assert here[0] != here[1]
    assert uuid(two_gpus, 1, "cuDeviceGetUuid") == here[1]
    for visible, there in ("1,0", here[::-1]), ("1", here[1:]), ("0,7,1", here[:1]):
        env = {"SOFTCUDA_DEVICES": "2", "CUDA_VISIBLE_DEVICES": visible}
        assert peer(uuids, softcuda(), env=env).result() == there


def test_there_is_no_third_device(two_gpus):
    out = C.create_string_buffer(64)
    for name in ("cuDeviceGet", "cuDeviceGetUuid", "cuDevicePrimaryCtxRetain"):
        assert two_gpus.result(name, out, 2) == INVALID_DEVICE
    two_gpus.cuDeviceGetName(out, 64, 1)
    assert out.value == b"softcuda 1"


def test_attributes_follow_the_environment(driver, monkeypatch):
    driver.cuInit(0)
    dmabuf, fabric = 124, 128
    assert [driver.get("cuDeviceGetAttribute", a, 0) for a in (dmabuf, fabric, 75)] == [1, 1, 9]
    monkeypatch.setenv("SOFTCUDA_DMABUF", "0")
    monkeypatch.setenv("SOFTCUDA_FABRIC", "0")
    assert [driver.get("cuDeviceGetAttribute", a, 0) for a in (dmabuf, fabric)] == [0, 0]


def test_a_stack_of_contexts(gpu):
    primary = gpu.current()
    own = gpu.get("cuCtxCreate_v2", 0, 0)
    assert gpu.current() == own != primary
    gpu.cuCtxPushCurrent_v2(primary)
    assert gpu.get("cuCtxPopCurrent_v2") == primary
    assert gpu.get("cuCtxPopCurrent_v2") == own
    assert gpu.current() == primary
    gpu.cuCtxSetCurrent(own)
    assert gpu.get("cuCtxPopCurrent_v2") == own
    assert gpu.current() == 0
    assert gpu.result("cuCtxPopCurrent_v2", None) == INVALID_CONTEXT
    assert gpu.result("cuCtxPushCurrent_v2", 0x1234) == INVALID_CONTEXT


def test_each_thread_has_its_own(gpu):
    primary, seen = gpu.current(), []

    def other():
        seen.extend([gpu.current(), gpu.result("cuCtxSynchronize")])
        seen.append(gpu.get("cuCtxCreate_v2", 0, 0))
        seen.append(gpu.current())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    own = seen[-1]
    assert seen == [0, INVALID_CONTEXT, own, own]
    assert own != primary
    assert gpu.get("cuCtxPopCurrent_v2") == primary
    assert gpu.current() == 0


def state(driver, device=0):
    flags, active = C.c_uint(), C.c_int()
    driver.cuDevicePrimaryCtxGetState(device, C.byref(flags), C.byref(active))
    return active.value


def number_of(driver):
    out = C.c_uint64()
    driver.cuCtxGetId(0, C.byref(out))
    return out.value


def test_the_primary_context_is_counted(two_gpus):
    driver = two_gpus
    assert (state(driver), state(driver, 1)) == (1, 0)
    first = number_of(driver)
    assert driver.get("cuDevicePrimaryCtxRetain", 0) == driver.current()
    assert driver.live("contexts") == 2
    memory = driver.alloc(100)
    driver.cuDevicePrimaryCtxRelease_v2(0)
    memory.write(b"still there")
    driver.cuDevicePrimaryCtxRelease_v2(0)
    assert (state(driver), driver.live("contexts"), driver.live("allocations")) == (0, 0, 0)
    assert driver.result("cuDevicePrimaryCtxRelease_v2", 0) == INVALID_CONTEXT
    assert driver.result("cuCtxSynchronize") == CONTEXT_IS_DESTROYED
    driver.use()
    assert number_of(driver) != first


def test_a_reset_ends_it_whoever_has_it(gpu):
    gpu.get("cuDevicePrimaryCtxRetain", 0)
    gpu.cuDevicePrimaryCtxReset_v2(0)
    assert state(gpu) == 0
    assert gpu.result("cuMemAlloc_v2", C.byref(C.c_uint64()), 8) == CONTEXT_IS_DESTROYED


def test_a_context_takes_what_is_in_it_along(gpu):
    own = gpu.get("cuCtxCreate_v2", 0, 0)
    memory = gpu.alloc(100)
    gpu.get("cuStreamCreate", 0)
    gpu.get("cuEventCreate", 0)
    assert [gpu.live(w) for w in ("allocations", "streams", "events", "contexts")] == [1, 1, 1, 2]
    gpu.cuCtxDestroy_v2(own)
    assert [gpu.live(w) for w in ("allocations", "streams", "events", "contexts")] == [0, 0, 0, 1]
    assert gpu.result("cuPointerGetAttribute", C.byref(C.c_uint64()), 7, memory.address) == (
        INVALID_VALUE
    )
    assert gpu.result("cuCtxDestroy_v2", own) == INVALID_CONTEXT
    assert gpu.result("cuCtxDestroy_v2", gpu.current()) == INVALID_CONTEXT  # the primary one


def test_one_that_is_current_elsewhere_can_end(gpu):
    own = gpu.get("cuCtxCreate_v2", 0, 0)
    thread = threading.Thread(target=gpu.cuCtxDestroy_v2, args=(own,))
    thread.start()
    thread.join()
    assert gpu.current() == own
    assert gpu.result("cuCtxSynchronize") == CONTEXT_IS_DESTROYED


def test_peers(two_gpus, monkeypatch):
    other = two_gpus.get("cuDevicePrimaryCtxRetain", 1)
    assert two_gpus.get("cuDeviceCanAccessPeer", 0, 1) == 1
    codes = [two_gpus.result("cuCtxEnablePeerAccess", other, 0) for _ in range(2)]
    assert codes == [SUCCESS, 704]
    codes = [two_gpus.result("cuCtxDisablePeerAccess", other) for _ in range(2)]
    assert codes == [SUCCESS, 705]
    monkeypatch.setenv("SOFTCUDA_PEERS", "0")
    assert two_gpus.get("cuDeviceCanAccessPeer", 0, 1) == 0
    assert two_gpus.result("cuCtxEnablePeerAccess", other, 0) == 217


@pytest.mark.parametrize("device", [0, 1])
def test_the_device_is_the_contexts(two_gpus, device):
    two_gpus.use(device)
    assert two_gpus.get("cuCtxGetDevice") == device
