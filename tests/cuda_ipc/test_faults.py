# SPDX-License-Identifier: BSD-3-Clause
"""Every call of the driver fails once, wherever it is made: nothing is lost or half done."""

import gc
from contextlib import suppress

import pytest

import ucx_memh as um
from _gpu import NAMES, Far
from _sides import Where, descriptors
from softcuda.driver import FABRIC, POSIX_FD
from ucx_memh import Status

# What is left when a call that gives something back fails for good: the driver has it still.
LEFT = {
    "cuStreamDestroy_v2": "streams",
    "cuEventDestroy_v2": "events",
    "cuMemRelease": "handles",
}
NOT_CALLED = {"softcuda_count", "cuDeviceGetUuid", "cuGetErrorName"}


@pytest.fixture(scope="module")
def remote(softcuda, lasting_peer):
    """Another process, for all of these tests, and a key of each kind."""
    far = Far(lasting_peer, Where("cuda_ipc", {"driver": softcuda()}))
    keys = [far.region(b"theirs", 4096, *kind) for kind in KINDS]
    return far, keys


KINDS = [("device", 0), ("vmm", POSIX_FD), ("vmm", FABRIC)]


def scenario(soft, keys):
    """All that the backend does, each part by itself; what failed."""
    failed = []

    def attempt(call):
        try:
            return call()
        except um.MemhError as error:
            failed.append(error)
            return None

    md = attempt(soft.open)
    if md is None:
        return failed
    ep = attempt(md.endpoint)
    for memory in soft.own:
        if base := attempt(lambda memory=memory: md.mem_reg(memory.array())):
            base.mkey_pack()
            base.dereg()
    rkeys = [rkey for key in keys if (rkey := attempt(lambda key=key: md.rkey_unpack(key)))]
    for rkey in rkeys:
        attempt(rkey.ptr)
        if ep is None:
            continue
        for local in (bytearray(6), soft.own[0].array(shape=(6,)), soft.own[0].array(stream=1)):
            attempt(lambda rkey=rkey, local=local: ep.get(rkey, rkey.address, local))
        attempt(lambda rkey=rkey: ep.put(rkey, rkey.address, b"theirs"))
        operation = attempt(lambda rkey=rkey: ep.get_nb(rkey, rkey.address, bytearray(6)))
        attempt(ep.reset)
        assert operation is None or operation.done
    if rkeys:
        rkeys.pop().close()
    if rkeys:
        md.peer_evict(rkeys[0].owner)
    del rkeys
    gc.collect(0)
    md.close(force=True)
    return failed


@pytest.fixture
def ready(soft, remote):
    soft.own = [soft.memory(4096, b"ours", *kind) for kind in KINDS]
    soft.kept = soft.opened()
    assert scenario(soft, remote[1]) == []
    yield soft
    del soft.own


def test_the_scenario_makes_every_call(ready, remote):
    before = {name: ready.driver.count(name) for name in NAMES if name not in NOT_CALLED}
    assert scenario(ready, remote[1]) == []
    assert [name for name in before if ready.driver.count(name) == before[name]] == []
    assert ready.opened() == ready.kept


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_CALLED])
def test_every_call_fails_once(ready, remote, name):
    """With an error that says nothing, each time that it is made; then all works as before."""
    soft, keys = ready, remote[1]
    before = soft.driver.count(name)
    assert scenario(soft, keys) == []
    calls = soft.driver.count(name) - before
    fds = descriptors()
    left = 0
    for nth in range(1, calls + 1):
        soft.driver.fail(name, 999, nth)
        failed = scenario(soft, keys)
        soft.driver.mend()
        for error in failed:
            assert error.status in (Status.IO_ERROR, Status.UNREACHABLE, Status.NO_DEVICE), error
        now = soft.opened()
        if name in LEFT:
            kind = LEFT[name]
            left += now.get(kind, 0) - soft.kept.get(kind, 0) - left
            assert left <= nth
            now[kind] = soft.kept.get(kind, 0)
            now = {what: count for what, count in now.items() if count}
        if name == "cuDevicePrimaryCtxRelease_v2":
            assert soft.driver.live("contexts") == 2
            soft.driver.cuDevicePrimaryCtxRelease_v2(0)
        if name == "cuCtxPopCurrent_v2":  # it left ours there; there is nothing else to do
            while soft.driver.get("cuCtxGetCurrent") and soft.driver.live("contexts"):
                soft.driver.cuCtxPopCurrent_v2(None)
            soft.driver.cuCtxSetCurrent(soft.context)
        assert now == soft.kept, (name, nth)
        assert soft.driver.live("contexts") == 1, (name, nth)
        assert name in LEFT or descriptors() == fds, (name, nth)
        assert soft.driver.current() == soft.context, (name, nth)
    assert scenario(soft, keys) == []
    if name in LEFT:
        soft.renew()


# ---- copies that fail later ----


def test_a_copy_whose_event_cannot_be_recorded_is_waited_for(soft, remote):
    _, keys = remote
    with soft.open() as md, md.endpoint() as ep, md.rkey_unpack(keys[0]) as rkey:
        soft.driver.fail("cuEventRecord", 999)
        into = bytearray(6)
        operation = ep.get_nb(rkey, rkey.address, into)
        assert (operation.done, operation.status, into) == (True, Status.OK, b"theirs")
        soft.driver.fail("cuEventRecord", 999)
        soft.driver.fail("cuStreamSynchronize", 719)
        with pytest.raises(um.DeviceError, match=r"the copy: .*719"):
            ep.get(rkey, rkey.address, into)


def test_a_copy_that_fails_under_way(soft, remote):
    """The driver says so when it is asked, and from then on always: the context is of no use."""
    far, _ = remote
    key = far.region(b"theirs", 4096)
    md = soft.open()
    ep = md.endpoint()
    rkey = md.rkey_unpack(key)
    ours = soft.memory(kind="vmm")  # to unmap it waits for nothing
    soft.driver.hold()
    operations = [ep.get_nb(rkey, rkey.address, ours.array(shape=(6,))) for _ in range(3)]
    soft.free(ours)
    soft.driver.release()
    for operation in operations:
        with pytest.raises(um.DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
            operation.wait()
        assert caught.value.context["syndrome"] == 700
        assert operation.bytes_done == 0
    with pytest.raises(um.DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        ep.get(rkey, rkey.address, bytearray(6))
    rkey.close()
    with suppress(um.MemhError):
        md.rkey_unpack(key).close()
    md.close(force=True)
    far.free(key)
    soft.renew()


def test_a_context_that_was_reset(soft, remote):
    """By somebody who ended the device's primary context: errors, no crash, and it closes."""
    _, keys = remote
    md = soft.open()
    ep = md.endpoint()
    rkeys = [md.rkey_unpack(key) for key in keys]
    memory = soft.memory()
    base = md.mem_reg(memory.array())
    soft.driver.lib.cuDevicePrimaryCtxReset_v2(0)
    for call in (
        lambda: ep.get(rkeys[0], rkeys[0].address, bytearray(6)),
        lambda: md.mem_reg(memory.array()),
        lambda: ep.get(rkeys[1], rkeys[1].address, bytearray(6)),
        md.endpoint,
    ):
        with pytest.raises(um.MemhError):
            call()
    for rkey in rkeys:
        rkey.close()
    base.dereg()
    md.close(force=True)
    soft.renew()
