# SPDX-License-Identifier: BSD-3-Clause
"""What can be registered, and what is refused by name; no thread's current context matters."""

import gc
import os

import pytest

import ucx_memh as um
from _gpu import in_thread
from softcuda.driver import BLOCK, FABRIC, MEMORY_TYPE, POSIX_FD
from ucx_memh import MemFlag, MemType

REMOTE = MemFlag.REMOTE_GET | MemFlag.REMOTE_PUT


def reg(md, memory, **more):
    return md.mem_reg(
        address=memory.address, length=memory.size, mem_type=MemType.CUDA, owner=memory, **more
    )


# ---- how it is given ----


def test_an_array_a_tensor_an_address(gpu, md, ep):
    memory = gpu.memory(4096, b"device")
    for base in (md.mem_reg(memory.array()), md.mem_reg(memory.tensor()), reg(md, memory)):
        assert (base.address, base.length) == (memory.address, 4096)
        assert base.flags == MemFlag.ACCESS_RMA
        into = bytearray(6)
        with md.rkey_unpack(base.mkey_pack()) as rkey:
            ep.get(rkey, memory.address, into)
        assert into == b"device"
        base.dereg()
    with md.mem_reg(memory.array(readonly=True)) as base:
        assert base.flags == MemFlag.LOCAL_READ | MemFlag.REMOTE_GET
    array = md.mem_reg_many([memory.array(), memory.tensor(versioned=False)])
    assert [base.address for base in array] == [memory.address] * 2
    md.dereg_many(array)


def test_an_empty_range(gpu, md):
    with md.mem_reg(gpu.memory().array(shape=(0,))) as base:
        with md.rkey_unpack(base.mkey_pack()) as rkey:
            assert rkey.length == 0
    assert md.stats()["device.exports"] == 0


def test_the_memory_is_held_until_dereg(gpu, md):
    array = gpu.memory().array()
    base = md.mem_reg(array)
    held = len(gc.get_referrers(array))
    base.dereg()
    assert len(gc.get_referrers(array)) < held


# ---- what is refused ----


def test_host_memory_is_refused_before_any_driver_call(soft, md):
    before = soft.calls()
    for call in (
        lambda: md.mem_reg(bytearray(64)),
        lambda: md.mem_reg(address=4096, length=64),
        lambda: md.mem_reg_many([bytearray(64)]),
    ):
        with pytest.raises(um.UnsupportedError, match="host memory"):
            call()
    for wrong in ({"mem_type": 7}, {"mem_type": MemType.CUDA, "dmabuf_fd": 0}):
        with pytest.raises(um.UnsupportedError):
            md.mem_reg(address=4096, length=64, **wrong)
    for flags in (MemFlag.DERIVED_ONLY, MemFlag.ACCESS_ALL):
        with pytest.raises(um.UnsupportedError):
            md.mem_reg(address=4096, length=64, mem_type=MemType.CUDA, flags=flags)
    assert soft.calls() == before


def test_row79_device_memory_is_refused_by_cma(gpu):
    """As an object by its kind, as an address because no process_vm call reads it; believed only
    where somebody says that it is host memory."""
    memory = gpu.memory()
    with um.open_md("cma") as cma:
        for thing in (memory.array(), memory.tensor()):
            with pytest.raises(um.UnsupportedError, match="device memory"):
                cma.mem_reg(thing)
        assert cma.stats()["device.process_vm_calls"] == 0
        with pytest.raises(um.DeviceError, match="a device's") as raised:
            cma.mem_reg(address=memory.address, length=memory.size)
        assert raised.value.status is um.Status.INVALID_ADDR
        assert cma.stats()["device.process_vm_calls"] == 1
        with cma.mem_reg(address=memory.address, length=64, mem_type=MemType.HOST) as base:
            assert base.length == 64


def test_an_address_that_is_no_device_memory(gpu, md):
    host = gpu.memory(kind="host")
    for address in (4096, host.address, 2**63):
        with pytest.raises(um.InvalidParamError, match="no device memory"):
            md.mem_reg(address=address, length=64, mem_type=MemType.CUDA)


def test_a_range_over_more_than_one_allocation(gpu, md):
    one, two = gpu.memory(), gpu.memory()
    first = min(one, two, key=lambda memory: memory.address)
    for length in (4097, abs(one.address - two.address) + 4096, 2**40):
        with pytest.raises(um.InvalidParamError, match="beyond one allocation"):
            md.mem_reg(address=first.address, length=length, mem_type=MemType.CUDA)
    with md.mem_reg(address=first.address + 1, length=4095, mem_type=MemType.CUDA) as base:
        assert base.length == 4095


def test_row78_each_kind_works_or_is_refused_by_name(soft, md):
    for kind, types, name in [
        ("device", 0, None),
        ("vmm", POSIX_FD, None),
        ("vmm", FABRIC, None),
        ("vmm", POSIX_FD | FABRIC, None),
        ("vmm", 0, "cuMemCreate without"),
        ("managed", 0, "cuMemAllocManaged"),
        ("async", 0, "pool without export .cuMemAllocAsync"),
        ("pool", 0, "pool without export .cuMemAllocAsync"),
        ("pool", POSIX_FD, "exportable pool"),
    ]:
        memory = soft.memory(kind=kind, types=types)
        if name is None:
            reg(md, memory).dereg()
        else:
            with pytest.raises(um.UnsupportedError, match=name):
                reg(md, memory)
            # It may still be the local side of a transfer.
            reg(md, memory, flags=MemFlag.LOCAL_READ).dereg()
    assert md.stats()["device.exports"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", ["real"], indirect=True)
def test_row78_on_a_gpu(gpu, md):
    """Allocations that a real driver makes exportable by descriptor, as torch's segments are."""
    memory = gpu.memory(kind="vmm", types=POSIX_FD)
    reg(md, memory).dereg()
    with pytest.raises(um.UnsupportedError, match="cuMemAllocManaged"):
        reg(md, gpu.memory(kind="managed"))
    with pytest.raises(um.UnsupportedError, match="cuMemAllocAsync"):
        reg(md, gpu.memory(kind="async"))


def test_row78_another_processs_memory_is_not_ours_to_share(soft, md, far):
    """As the driver opened it; nor does the owner's key come to be ours."""
    with md.rkey_unpack(far.region(b"theirs", 4096)) as rkey:
        given = {"address": rkey.ptr(), "length": 4096, "mem_type": MemType.CUDA}
        with pytest.raises(um.UnsupportedError, match="or memory of another process"):
            md.mem_reg(**given)
        md.mem_reg(**given, flags=MemFlag.LOCAL_READ).dereg()


@pytest.mark.parametrize("page", [0, 1])
def test_managed_memory_is_named_wherever_it_is(soft, md, page):
    """The driver says of each page what memory it is in now, the host's or the device's."""
    memory = soft.memory(4 * 4096, kind="managed")
    at = memory.address + page * 4096
    assert soft.driver.attribute(at, MEMORY_TYPE) == page + 1
    given = {"address": at, "length": 4096, "mem_type": MemType.CUDA}
    with pytest.raises(um.UnsupportedError, match="cuMemAllocManaged"):
        md.mem_reg(**given)
    md.mem_reg(**given, flags=MemFlag.LOCAL_READ).dereg()
    with pytest.raises(um.InvalidParamError, match="beyond one allocation"):
        md.mem_reg(**given | {"length": 4 * 4096 + 1}, flags=MemFlag.LOCAL_READ)


def test_a_descriptor_is_not_inherited(soft, md):
    """The driver may well hand out one that is: a program started later would keep the memory."""
    with reg(md, soft.memory(kind="vmm", types=POSIX_FD)) as base:
        assert not os.get_inheritable(int.from_bytes(base.mkey_pack()[84:88], "little"))


def test_a_handle_of_one_of_two_types_is_enough(soft, md):
    """As where the fabric's service does not run."""
    memory = soft.memory(kind="vmm", types=POSIX_FD | FABRIC)
    soft.driver.fail("cuMemExportToShareableHandle", 800, 2)
    base = reg(md, memory)
    assert base.mkey_pack()[81] == 2
    base.dereg()
    soft.driver.fail("cuMemExportToShareableHandle", 800, 1)
    base = reg(md, memory)
    assert base.mkey_pack()[81] == 4
    base.dereg()
    soft.driver.fail("cuMemExportToShareableHandle", 800, 0)
    with pytest.raises(um.DeviceError, match="CUDA_ERROR_NOT_PERMITTED"):
        reg(md, memory)


def test_registrations_of_an_allocation_share_its_export(soft, md):
    memory = soft.memory(kind="vmm", types=POSIX_FD)
    bases = [
        md.mem_reg(address=memory.address + i * 64, length=64, mem_type=MemType.CUDA)
        for i in range(4)
    ]
    assert soft.driver.count("cuMemExportToShareableHandle") == 1
    payloads = {base.mkey_pack()[80:] for base in bases}
    assert len(payloads) == 1
    (fd,) = {int.from_bytes(payload[4:8], "little") for payload in payloads}
    for base in bases:
        os.fstat(fd)  # open for as long as one of them lives
        base.dereg()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert md.stats()["device.exports"] == 0


def test_local_rights_export_nothing(soft, md):
    before = soft.driver.count("cuIpcGetMemHandle")
    with reg(md, soft.memory(), flags=MemFlag.LOCAL_READ | MemFlag.LOCAL_WRITE) as base:
        with pytest.raises(um.AccessError):
            base.mkey_pack()
        assert "not exported" in base.explain()
    assert soft.driver.count("cuIpcGetMemHandle") == before


def test_explain_names_the_way(soft, md):
    for types, text in [
        (0, "legacy IPC handle"),
        (POSIX_FD, "by a descriptor, which stays open until the last dereg\n"),
        (FABRIC, "by a fabric handle"),
        (POSIX_FD | FABRIC, "and a fabric handle"),
    ]:
        with reg(md, soft.memory(kind="vmm" if types else "device", types=types)) as base:
            assert text in base.explain()


def test_nothing_is_derived_revoked_or_adopted(gpu, md):
    base = reg(md, gpu.memory())
    key = base.mkey_pack()
    with pytest.raises(um.UnsupportedError, match="does not support derived memory handles"):
        base.derive()
    for flags in (um.PackFlag.INVALIDATE_RMA, um.PackFlag.INVALIDATE_AMO, um.PackFlag.RAW):
        with pytest.raises(um.UnsupportedError):
            base.mkey_pack(flags)
    with pytest.raises(um.UnsupportedError):
        md.rkey_from_raw(bytes(64), base.address, 64)
    with pytest.raises(um.UnsupportedError):
        md.mem_adopt(mr=4096)
    with pytest.raises(um.InvalidParamError):
        base.invalidate()
    assert base.mkey_pack() == key


# ---- the current context ----


class TestTwoDevices:
    """User report 77."""

    @pytest.fixture
    def settings(self):
        return {"SOFTCUDA_DEVICES": "2"}

    @pytest.fixture
    def second(self, soft):
        """Memory of device 1, while device 0 is the current one."""
        driver = soft.driver
        context = driver.get("cuDevicePrimaryCtxRetain", 1)
        driver.cuCtxPushCurrent_v2(context)
        memory = soft.memory(4096, b"on one")
        driver.cuCtxPopCurrent_v2(None)
        yield memory
        soft.free(memory)
        driver.cuDevicePrimaryCtxRelease_v2(1)

    def test_row77_the_pointers_device_counts_and_not_the_current_one(self, soft, second):
        assert soft.driver.get("cuCtxGetDevice") & 0xFFFFFFFF == 0
        with soft.open(1) as one, soft.open(0) as zero:
            with one.mem_reg(second.array()) as base:
                assert base.length == 4096
            with pytest.raises(um.InvalidParamError, match="device 1, this domain is device 0"):
                zero.mem_reg(second.array())
            with pytest.raises(um.InvalidParamError, match="device 0, this domain is device 1"):
                one.mem_reg(soft.memory().array())
        assert soft.driver.current() == soft.context

    def test_row77_a_thread_without_a_context(self, soft, second):
        def use():
            assert soft.driver.current() == 0
            with soft.open(1) as md, md.endpoint() as ep:
                with md.mem_reg(second.array()) as base:
                    with md.rkey_unpack(base.mkey_pack()) as rkey:
                        into = bytearray(6)
                        ep.get(rkey, second.address, into)
                        ep.put(rkey, second.address, b"written")
            assert soft.driver.current() == 0
            return bytes(into)

        assert in_thread(use) == b"on one"
        assert second.read(0, 7) == b"written"

    def test_local_memory_with_a_stream_must_be_of_the_same_device(self, soft, second):
        with soft.open(0) as md, md.endpoint() as ep:
            base = md.mem_reg(soft.memory().array())
            with md.rkey_unpack(base.mkey_pack()) as rkey:
                with pytest.raises(um.InvalidParamError, match="another device"):
                    ep.get(rkey, base.address, second.array(stream=1))
                # Without one the driver finds the device by itself.
                ep.put(rkey, base.address, second.array())
            base.dereg()


def test_every_call_leaves_the_current_context_as_it_was(soft, md, ep, far):
    """Also none at all, and one that is not a primary one."""

    def use():
        memory = soft.memory()
        base = md.mem_reg(memory.array())
        own, theirs = base.mkey_pack(), far.region(b"theirs")
        for key in (own, theirs):
            with md.rkey_unpack(key) as rkey:
                into = bytearray(6)
                ep.get(rkey, rkey.address, into)
                rkey.ptr()
        base.dereg()
        with md.endpoint() as other:
            other.reset()
        return soft.driver.current()

    assert use() == soft.context
    context = soft.driver.get("cuCtxCreate_v2", 0, 0)
    assert use() == context
    soft.free(soft.taken[-1])
    soft.driver.cuCtxDestroy_v2(context)
    assert soft.driver.current() == soft.context


def test_a_block_is_as_large_as_the_driver_says(gpu, md):
    memory = gpu.memory(BLOCK * 2 + 512)
    with reg(md, memory) as base:
        assert int.from_bytes(base.mkey_pack()[96:104], "little") >= BLOCK * 2 + 512
