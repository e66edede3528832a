# SPDX-License-Identifier: BSD-3-Clause
"""What is queued is done when it is asked for, and faults when the memory has gone."""

import ctypes as C
import threading

import pytest

from softcuda.driver import (
    BLOCK,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    SUCCESS,
)

NON_BLOCKING = 1
NEW, OLD = b"new", bytes(3)


@pytest.fixture
def pair(gpu):
    """Where `NEW` is, and where it shall go."""
    source, target = gpu.alloc(3), gpu.alloc(3)
    source.write(NEW)
    return source, target


@pytest.fixture
def stream(gpu):
    return gpu.get("cuStreamCreate", NON_BLOCKING)


def copy(driver, pair, stream=0):
    driver.cuMemcpyAsync(pair[1].address, pair[0].address, 3, stream)


def recorded(driver, stream=0):
    event = driver.get("cuEventCreate", 2)
    driver.cuEventRecord(event, stream)
    return event


def test_who_does_not_wait_sees_old_bytes(gpu, pair, stream):
    copy(gpu, pair, stream)
    event = recorded(gpu, stream)
    assert pair[1].read() == OLD
    # One operation for each time that somebody asks, and "ready" is no operation's own answer.
    assert [gpu.result("cuEventQuery", event) for _ in range(3)] == [NOT_READY, NOT_READY, SUCCESS]
    assert pair[1].read() == NEW


def test_a_stream_is_asked_in_the_same_way(gpu, pair, stream):
    assert gpu.result("cuStreamQuery", stream) == SUCCESS
    copy(gpu, pair, stream)
    assert [gpu.result("cuStreamQuery", stream) for _ in range(2)] == [NOT_READY, SUCCESS]
    assert pair[1].read() == NEW


@pytest.mark.parametrize("how", ["cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"])
def test_a_synchronisation_does_it_all(gpu, pair, stream, how):
    copy(gpu, pair, stream)
    event = recorded(gpu, stream)
    args = {"cuStreamSynchronize": (stream,), "cuEventSynchronize": (event,)}.get(how, ())
    assert gpu.result(how, *args) == SUCCESS
    assert pair[1].read() == NEW
    assert gpu.result("cuEventQuery", event) == SUCCESS


def test_in_the_order_in_which_it_was_queued(gpu, pair, stream):
    target = pair[1]
    gpu.cuMemsetD8Async(target.address, 0x31, 3, stream)
    between = recorded(gpu, stream)
    copy(gpu, pair, stream)
    gpu.cuEventSynchronize(between)
    assert target.read() == b"111"
    gpu.cuStreamSynchronize(stream)
    assert target.read() == NEW


def test_an_event_that_was_not_recorded_is_ready(gpu, pair, stream):
    event = gpu.get("cuEventCreate", 0)
    assert gpu.result("cuEventQuery", event) == SUCCESS
    gpu.cuEventRecord(event, stream)
    gpu.cuEventSynchronize(event)
    copy(gpu, pair, stream)
    gpu.cuEventRecord(event, stream)  # the last time is what counts
    assert gpu.result("cuEventQuery", event) == NOT_READY


def test_a_new_event_is_not_reached_by_an_old_ones_record(gpu, stream):
    """They may have the same address."""
    old = {recorded(gpu, stream) for _ in range(20)}
    for event in old:
        gpu.cuEventDestroy_v2(event)
    event = next(e for e in (gpu.get("cuEventCreate", 0) for _ in range(100)) if e in old)
    gpu.cuEventRecord(event, stream)
    assert [gpu.result("cuEventQuery", event) for _ in range(22)] == [NOT_READY] * 21 + [SUCCESS]


def test_held_until_released(gpu, pair, stream):
    gpu.hold()
    copy(gpu, pair, stream)
    event = recorded(gpu, stream)
    for _ in range(5):
        assert gpu.result("cuEventQuery", event) == NOT_READY
        assert gpu.result("cuStreamQuery", stream) == NOT_READY
    assert pair[1].read() == OLD
    gpu.release()
    assert pair[1].read() == NEW
    assert gpu.result("cuEventQuery", event) == gpu.result("cuStreamQuery", stream) == SUCCESS


@pytest.mark.parametrize("how", ["stream", "event"])
def test_who_synchronises_while_it_is_held_waits(gpu, pair, stream, how):
    gpu.hold()
    copy(gpu, pair, stream)
    event = recorded(gpu, stream)
    began, seen = threading.Event(), []

    def wait():
        began.set()
        if how == "stream":
            gpu.use()
            gpu.cuStreamSynchronize(stream)
        else:
            gpu.cuEventSynchronize(event)
        seen.append(pair[1].read())

    thread = threading.Thread(target=wait)
    thread.start()
    began.wait()
    assert (seen, pair[1].read()) == ([], OLD)
    gpu.release()
    thread.join(30)
    assert seen == [NEW]


def test_the_default_stream_waits_for_those_that_block(gpu, pair):
    blocking = gpu.get("cuStreamCreate", 0)
    copy(gpu, pair, blocking)
    into = C.create_string_buffer(3)
    gpu.cuMemcpy(into, pair[1].address, 3)
    assert into.raw == NEW


def test_and_not_for_others(gpu, pair, stream):
    copy(gpu, pair, stream)
    into = C.create_string_buffer(3)
    gpu.cuMemcpy(into, pair[1].address, 3)
    assert into.raw == OLD


@pytest.mark.parametrize("default", [0, 1, 2])
def test_default_streams_are_the_contexts(gpu, pair, default):
    copy(gpu, pair, default)
    own = gpu.get("cuCtxCreate_v2", 0, 0)
    assert gpu.result("cuStreamQuery", default) == SUCCESS
    gpu.cuCtxDestroy_v2(own)
    assert gpu.result("cuStreamQuery", default) == NOT_READY
    context = C.c_uint64()
    gpu.cuStreamGetCtx(default, C.byref(context))
    assert context.value == gpu.current()
    assert gpu.live("streams") == 0


def test_one_stream_waits_for_another(gpu, pair, stream):
    source, target = pair
    other = gpu.get("cuStreamCreate", NON_BLOCKING)
    between = gpu.alloc(3)
    gpu.cuMemcpyAsync(between.address, source.address, 3, other)
    gpu.cuStreamWaitEvent(stream, recorded(gpu, other), 0)
    gpu.cuMemcpyAsync(target.address, between.address, 3, stream)
    gpu.cuStreamSynchronize(stream)
    assert target.read() == NEW


def test_it_waits_for_the_record_that_there_was(gpu, pair, stream):
    """Also where the event is recorded anew, elsewhere, before anybody asks."""
    source, target = pair
    first, second = (gpu.get("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    between = gpu.alloc(3)
    gpu.cuMemcpyAsync(between.address, source.address, 3, first)
    event = recorded(gpu, first)
    gpu.cuStreamWaitEvent(stream, event, 0)
    gpu.cuEventRecord(event, second)
    gpu.cuMemcpyAsync(target.address, between.address, 3, stream)
    gpu.cuStreamSynchronize(stream)
    assert target.read() == NEW


def test_nothing_is_queued_for_no_bytes(gpu, pair, stream):
    gpu.cuMemcpyAsync(pair[1].address, pair[0].address, 0, stream)
    assert gpu.result("cuStreamQuery", stream) == SUCCESS


def test_directions(gpu, pair, stream):
    source, target = pair
    host = C.create_string_buffer(b"abc", 3)
    gpu.cuMemcpyHtoDAsync_v2(target.address, host, 3, stream)
    gpu.cuStreamSynchronize(stream)
    assert target.read() == b"abc"
    gpu.cuMemcpyDtoDAsync_v2(target.address, source.address, 3, stream)
    gpu.cuMemcpyDtoHAsync_v2(host, target.address, 3, stream)
    assert host.raw == b"abc"
    gpu.cuStreamSynchronize(stream)
    assert host.raw == NEW
    for name in ("cuMemcpyDtoDAsync_v2", "cuMemcpyDtoHAsync_v2"):
        assert gpu.result(name, target.address, host, 3, stream) == INVALID_VALUE


def test_streams_and_events_end(gpu, pair, stream):
    event = recorded(gpu, stream)
    copy(gpu, pair, stream)
    assert (gpu.live("streams"), gpu.live("events")) == (1, 1)
    gpu.cuStreamDestroy_v2(stream)
    assert pair[1].read() == NEW
    assert gpu.result("cuEventQuery", event) == SUCCESS
    gpu.cuEventDestroy_v2(event)
    assert (gpu.live("streams"), gpu.live("events")) == (0, 0)
    for name in ("cuStreamDestroy_v2", "cuStreamQuery", "cuStreamSynchronize"):
        assert gpu.result(name, stream) == INVALID_HANDLE
    for name in ("cuEventDestroy_v2", "cuEventQuery", "cuEventSynchronize"):
        assert gpu.result(name, event) == INVALID_HANDLE
    assert gpu.result("cuMemcpyAsync", pair[1].address, pair[0].address, 3, stream) == (
        INVALID_HANDLE
    )
    assert gpu.result("cuStreamDestroy_v2", 0) == INVALID_HANDLE


def test_streams_of_another_context(gpu, pair, stream):
    """Copies go there; an event has to be of the same context."""
    event = gpu.get("cuEventCreate", 0)
    gpu.get("cuCtxCreate_v2", 0, 0)
    copy(gpu, pair, stream)
    foreign = gpu.get("cuEventCreate", 0)
    assert gpu.result("cuEventRecord", foreign, stream) == INVALID_HANDLE
    assert gpu.result("cuEventRecord", event, stream) == SUCCESS
    gpu.cuEventSynchronize(event)
    assert pair[1].read() == NEW


def test_no_copy_without_a_context(gpu, pair, stream):
    gpu.cuCtxSetCurrent(0)
    code = gpu.result("cuMemcpyAsync", pair[1].address, pair[0].address, 3, stream)
    assert code == INVALID_CONTEXT


def test_free_waits_for_what_is_queued(gpu, pair, stream):
    copy(gpu, pair, stream)
    pair[0].free()
    assert pair[1].read() == NEW


def test_memory_that_goes_while_it_is_used_is_a_fault(gpu, stream):
    """Unmapping does not wait; then the context is of no use any more, and others are."""
    mapped, target = gpu.alloc(BLOCK, "vmm"), gpu.alloc(3)
    gpu.cuMemcpyAsync(target.address, mapped.address, 3, stream)
    event = recorded(gpu, stream)
    gpu.cuMemUnmap(mapped.address, BLOCK)
    assert gpu.result("cuEventQuery", event) == ILLEGAL_ADDRESS
    for name, *args in (
        ("cuStreamSynchronize", stream),
        ("cuMemcpy", target.address, target.address, 1),
        ("cuMemAlloc_v2", C.byref(C.c_uint64()), 1),
        ("cuCtxSynchronize",),
    ):
        assert gpu.result(name, *args) == ILLEGAL_ADDRESS
    assert target.read() == OLD
    gpu.get("cuCtxCreate_v2", 0, 0)
    gpu.alloc(3)


def test_a_reset_gives_up_what_is_queued(gpu, pair, stream):
    gpu.hold()
    copy(gpu, pair, stream)
    gpu.reset()
    gpu.use()
    assert (gpu.live("streams"), gpu.live("allocations")) == (0, 0)
    assert gpu.result("cuCtxSynchronize") == SUCCESS
    stream = gpu.get("cuStreamCreate", 0)
    assert gpu.result("cuEventQuery", recorded(gpu, stream)) == NOT_READY
    gpu.cuStreamSynchronize(stream)  # it is not held any more, or this would not come back
