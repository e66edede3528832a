# SPDX-License-Identifier: BSD-3-Clause
"""put and get: host and device memory, in order after local work, completed by progress."""

import gc

import pytest

import ucx_memh as um
from _cma import pattern
from _gpu import address_of
from softcuda.driver import BLOCK, POSIX_FD
from ucx_memh import MemFlag, Status

KINDS = [pytest.param("device", 0, id="legacy"), pytest.param("vmm", POSIX_FD, id="fd")]
SIZES = [1, 7, 4096, 65537, BLOCK]


@pytest.mark.parametrize(("kind", "types"), KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_host_memory_here_device_memory_there(gpu, md, ep, far, kind, types, size):
    data = pattern(size)
    key = far.region(data, max(size, 4096), kind, types)
    with md.rkey_unpack(key) as rkey:
        into = bytearray(size)
        ep.get(rkey, rkey.address, into)
        assert into == data
        ep.put(rkey, rkey.address, data[::-1])
    assert far.seen(key, 0, size) == data[::-1]


@pytest.mark.parametrize(("kind", "types"), KINDS)
def test_device_memory_here_and_there(gpu, md, ep, far, kind, types):
    data = pattern(BLOCK)
    key = far.region(data, BLOCK, kind, types)
    ours = gpu.memory(BLOCK)
    with md.rkey_unpack(key) as rkey:
        for local in (ours.array(), ours.tensor(), ours.tensor(versioned=False)):
            gpu.write(ours, bytes(BLOCK))
            ep.get(rkey, rkey.address, local)
            assert gpu.read(ours, BLOCK) == data
        gpu.write(ours, data[::-1])
        ep.put(rkey, rkey.address, ours.array(readonly=True))
        with pytest.raises(um.AccessError):
            ep.get(rkey, rkey.address, ours.array(readonly=True))
    assert far.seen(key, 0, BLOCK) == data[::-1]


def test_a_handle_as_the_local_side(gpu, md, ep, far):
    key = far.region(b"theirs", 4096)
    ours = gpu.memory(4096)
    with md.rkey_unpack(key) as rkey:
        with md.mem_reg(ours.array(), MemFlag.LOCAL_WRITE | MemFlag.LOCAL_READ) as local:
            ep.get(rkey, rkey.address, local)
            assert gpu.read(ours, 6) == b"theirs"
            gpu.write(ours, b"ours!!")
            ep.put(rkey, rkey.address, local)
        assert far.seen(key, 0, 6) == b"ours!!"
        with md.mem_reg(ours.array(), MemFlag.LOCAL_READ) as local:
            with pytest.raises(um.AccessError):
                ep.get(rkey, rkey.address, local)


def test_a_peer_reads_and_writes_our_memory(gpu, md, far):
    memory = gpu.memory(4096, b"ours")
    with md.mem_reg(memory.array()) as base:
        key = base.mkey_pack()
        assert far.get(key, 0, 4) == b"ours"
        assert far.pull(key, 1, 3) == b"urs"
        far.put(key, 4096 - 4, b"last")
        assert gpu.read(memory, 4, 4092) == b"last"
        far.forget(key)


def test_range_and_rights_are_looked_at_here(soft, md, ep, far):
    key = far.region(b"theirs", 4096)
    part = far.part(key, 64, 64)
    before = soft.driver.count("cuMemcpyAsync")
    with md.rkey_unpack(part) as rkey:
        for address, length in [(-1, 1), (0, 65), (64, 1), (2**40, 1)]:
            with pytest.raises(um.RangeError):
                ep.get(rkey, rkey.address + address, bytearray(length))
        with pytest.raises(um.RangeError):
            rkey.ptr(rkey.address + 65)
        with pytest.raises(um.UnsupportedError):
            ep.fetch_add(rkey, rkey.address, 1)
        ep.get(rkey, rkey.address, bytearray(0))
    ours = soft.memory()
    with md.mem_reg(ours.array(), MemFlag.REMOTE_GET) as base:
        with md.rkey_unpack(base.mkey_pack()) as rkey:
            with pytest.raises(um.AccessError):
                ep.put(rkey, rkey.address, b"x")
    assert soft.driver.count("cuMemcpyAsync") == before


def test_ptr_is_a_device_pointer(gpu, md, far):
    """The driver's own calls take it."""
    key = far.region(pattern(4096))
    with md.rkey_unpack(key) as rkey:
        into = bytearray(100)
        gpu.driver.cuMemcpyDtoH_v2(address_of(into), rkey.ptr(rkey.address + 9), 100)
        assert into == pattern(4096)[9:109]
        assert rkey.ptr(rkey.address + 4096) == rkey.ptr() + 4096
        pointer = rkey.ptr()
    if gpu.software:  # a real driver's answer is not defined
        assert gpu.driver.result("cuMemcpyDtoH_v2", address_of(into), pointer, 1) != 0


# ---- completion ----


def test_a_copy_is_done_when_progress_says_so(soft, md, ep, far):
    key = far.region(b"theirs")
    with md.rkey_unpack(key) as rkey:
        soft.driver.hold()
        into = bytearray(6)
        operation = ep.get_nb(rkey, rkey.address, into)
        for _ in range(5):
            assert md.progress() == 0
        assert (operation.done, operation.status, into) == (False, Status.INPROGRESS, bytes(6))
        with pytest.raises(um.TimedOutError):
            operation.wait(0)
        with pytest.raises(BufferError):
            into.append(0)
        soft.driver.release()
        assert md.progress() == 1
        assert (operation.done, operation.status, into) == (True, Status.OK, b"theirs")
        assert operation.bytes_done == 6
        assert md.progress() == 0


def test_copies_of_two_endpoints_do_not_wait_for_each_other(soft, md, far):
    """Each has a stream of its own; of one they are done in order."""
    key = far.region(pattern(4096))
    one, two = md.endpoint(), md.endpoint()
    with md.rkey_unpack(key) as rkey:
        buffers = [bytearray(16) for _ in range(6)]
        operations = [
            ep.get_nb(rkey, rkey.address + i, buffer)
            for i, (ep, buffer) in enumerate(zip([one, two] * 3, buffers, strict=True))
        ]
        while not all(operation.done for operation in operations):
            md.progress()
            for each in (operations[0::2], operations[1::2]):
                done = [operation.done for operation in each]
                assert done == sorted(done, reverse=True)
    assert [bytes(b) for b in buffers] == [pattern(4096)[i : i + 16] for i in range(6)]
    one.close()
    two.close()


def test_the_queue_has_a_depth(soft, far):
    key = far.region(pattern(4096))
    with soft.open(queue_depth=3) as md, md.endpoint() as ep, md.rkey_unpack(key) as rkey:
        operations = [ep.get_nb(rkey, rkey.address, bytearray(8)) for _ in range(20)]
        for operation in operations:
            operation.wait()
        assert soft.driver.live("events") == 3
        assert md.stats()["device.copies"] == 20
        assert md.stats()["device.bytes"] == 160


def test_a_dropped_operation_keeps_its_buffer_until_it_is_done(soft, md, ep, far):
    key = far.region(b"theirs")
    with md.rkey_unpack(key) as rkey:
        soft.driver.hold()
        into = bytearray(6)
        ep.get_nb(rkey, rkey.address, into)
        gc.collect()
        with pytest.raises(BufferError):
            into.append(0)
        soft.driver.release()
        md.progress()
        into.append(0)
        assert into == b"theirs\0"


@pytest.mark.parametrize("end", ["close", "reset"])
def test_what_is_under_way_when_an_endpoint_ends_is_done_first(soft, md, far, end):
    """A copy cannot be stopped: its memory is given back when it is over, and it says OK."""
    key = far.region(pattern(4096))
    ep = md.endpoint()
    with md.rkey_unpack(key) as rkey:
        buffers = [bytearray(64) for _ in range(5)]
        operations = [ep.get_nb(rkey, rkey.address, buffer) for buffer in buffers]
        getattr(ep, end)()
        assert [operation.status for operation in operations] == [Status.OK] * 5
        assert buffers == [pattern(64)] * 5
    ep.close()
    assert soft.opened() == {}


def test_addresses_change_with_a_reset(soft, md, ep, far):
    before = ep.address
    ep.connect(far.address)
    ep.reset()
    assert ep.address != before
    with pytest.raises(um.InvalidParamError):
        ep.connect(before[:-1])
    assert ep.state is um.EpState.CONNECTED
    theirs = far.address
    far.peer.kill()
    with pytest.raises(um.PeerGoneError):
        ep.connect(theirs)


# ---- work on the local memory ----


@pytest.mark.parametrize(
    ("protocol", "stream"), [("array", "own"), ("array", "legacy"), ("tensor", "legacy")]
)
def test_work_under_way_on_the_local_memory_comes_first(soft, md, ep, far, stream, protocol):
    """A fill that is queued is what a put sends, and does not come over what a get has brought."""
    key = far.region(b"theirs", 4096)
    ours = soft.memory(4096)
    handle = soft.driver.get("cuStreamCreate", 1) if stream == "own" else 1
    # A tensor's producer orders its work before the legacy stream.
    local = ours.array(stream=handle) if protocol == "array" else ours.tensor()
    with md.rkey_unpack(key) as rkey:
        soft.driver.cuMemsetD8Async(ours.address, 0x2A, 4096, handle)
        ep.put(rkey, rkey.address, local)
        assert far.seen(key, 0, 4096) == b"*" * 4096
        soft.driver.cuMemsetD8Async(ours.address, 0x2B, 4096, handle)
        ep.get(rkey, rkey.address, local)
        assert soft.read(ours, 4096) == b"*" * 4096
    if protocol == "tensor":
        assert local.streams == [1, 1]
    if stream == "own":
        soft.driver.cuStreamDestroy_v2(handle)


def test_a_stream_that_is_none(soft, md, ep, far):
    key = far.region(b"theirs", 4096)
    ours = soft.memory(4096)
    with md.rkey_unpack(key) as rkey:
        with pytest.raises(um.DeviceError, match="cuEventRecord: CUDA_ERROR_INVALID_HANDLE"):
            ep.get(rkey, rkey.address, ours.array(stream=12345))
        ep.get(rkey, rkey.address, ours.array())
    assert soft.read(ours, 6) == b"theirs"


def test_managed_memory_as_the_local_side(soft, md, ep, far):
    key = far.region(b"theirs", 4096)
    ours = soft.memory(2 * 4096, kind="managed")
    with md.rkey_unpack(key) as rkey:
        ep.get(rkey, rkey.address, ours.tensor(shape=(4096,)))
        assert soft.read(ours, 6) == b"theirs"
        for page in (0, 1):  # on the host, on the device
            at = (ours.address + page * 4096, False)
            ep.get(rkey, rkey.address, ours.array(shape=(6,), data=at, stream=1))
            assert soft.read(ours, 6, page * 4096) == b"theirs"


def test_a_local_address_that_is_none(soft, md, ep, far):
    key = far.region(b"theirs", 4096)
    ours = soft.memory(4096)
    with md.rkey_unpack(key) as rkey:
        with pytest.raises(um.InvalidParamError, match="no device memory"):
            ep.get(rkey, rkey.address, ours.array(data=(4096, False), stream=1))
        into = bytearray(6)
        ep.get(rkey, rkey.address, into)
        assert into == b"theirs"
