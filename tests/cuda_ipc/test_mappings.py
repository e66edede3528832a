# SPDX-License-Identifier: BSD-3-Clause
"""What an importer has mapped: once each, counted, given back; user reports 73 to 76."""

import gc
import threading

import pytest

import ucx_memh as um
from _gpu import in_thread
from _sides import descriptors
from cuda_ipc._payload import changed, fields
from softcuda.driver import ALREADY_MAPPED, BLOCK, FABRIC, INVALID_CONTEXT, MIB, POSIX_FD

KINDS = [pytest.param("device", 0, id="legacy"), pytest.param("vmm", POSIX_FD, id="fd")]
ALL_KINDS = [*KINDS, pytest.param("vmm", FABRIC, id="fabric")]  # few machines have that


def read(md, rkey, length=6, offset=0):
    with md.endpoint() as ep:
        into = bytearray(length)
        ep.get(rkey, rkey.address + offset, into)
        return bytes(into)


def opens_of(md):
    """Mappings made and given back."""
    stats = md.stats()
    return stats["device.opens"], stats["device.closes"]


def opens(gpu, md):
    """The same; of the software driver as it has counted them itself."""
    found = opens_of(md)
    if gpu.software:
        count = gpu.driver.count
        made = count("cuIpcOpenMemHandle_v2") + count("cuMemMap")
        assert found == (made, count("cuIpcCloseMemHandle") + count("cuMemUnmap"))
    return found


# ---- row 73: a handle can be opened once ----


@pytest.mark.parametrize(("kind", "types"), KINDS)
def test_row73_keys_of_an_allocation_share_its_mapping(gpu, md, far, kind, types):
    """The same key again, and keys to two parts of it."""
    before = opens(gpu, md)
    whole = far.region(b"0123456789", 4096, kind, types)
    parts = [far.part(whole, 0, 4), far.part(whole, 4, 4)]
    rkeys = [md.rkey_unpack(key) for key in (whole, whole, *parts)]
    assert opens(gpu, md) == (before[0] + 1, before[1])
    assert md.stats()["device.mappings"] == 1
    assert rkeys[2].ptr() == rkeys[0].ptr()
    assert rkeys[3].ptr() == rkeys[0].ptr() + 4
    assert [read(md, rkey, 4) for rkey in rkeys] == [b"0123", b"0123", b"0123", b"4567"]
    for rkey in rkeys[:-1]:
        rkey.close()
    assert read(md, rkeys[-1], 4) == b"4567"
    rkeys[-1].close()
    assert opens(gpu, md) == (before[0] + 1, before[1] + 1)
    assert md.stats()["device.mappings"] == 0


def test_row73_two_allocations_of_one_block(gpu, md, far):
    """Small ones share what the driver shares: each has a handle and a mapping of its own."""
    keys = [far.region(b"first!"), far.region(b"second")]
    rkeys = [md.rkey_unpack(key) for key in keys]
    assert [read(md, rkey) for rkey in rkeys] == [b"first!", b"second"]
    rkeys.pop(0).close()
    assert read(md, rkeys[0]) == b"second"
    rkeys[0].close()
    assert md.stats()["device.mappings"] == 0


@pytest.mark.parametrize(("kind", "types"), KINDS)
def test_row73_domains_of_a_device_share_a_mapping(gpu, md, far, kind, types):
    """A handle may be opened by one context of a device only, and once."""
    key = far.region(b"theirs", 4096, kind, types)
    before = opens(gpu, md)
    rkey = md.rkey_unpack(key)
    with gpu.open() as other:
        twin = other.rkey_unpack(key)
        assert twin.ptr() == rkey.ptr()
        rkey.close()
        assert read(other, twin) == b"theirs"
        assert opens(gpu, md) == (before[0] + 1, before[1])
        twin.close()
    assert opens(gpu, md) == (before[0] + 1, before[1] + 1)


def test_row73_somebody_else_has_it_open(soft, md, far):
    """An old driver says so: UNREACHABLE, and what the other one has stays his."""
    key = far.region(b"theirs")
    theirs = soft.driver.open(key[144:208])
    soft.driver.fail("cuIpcOpenMemHandle_v2", ALREADY_MAPPED)
    with pytest.raises(um.UnreachableError, match="ALREADY_MAPPED"):
        md.rkey_unpack(key)
    assert soft.driver.peek(theirs, 6) == b"theirs"
    # A newer one counts.
    with md.rkey_unpack(key) as rkey:
        assert read(md, rkey) == b"theirs"
    assert soft.driver.peek(theirs, 6) == b"theirs"
    soft.driver.cuIpcCloseMemHandle(theirs)


class TestTwoDevices:
    """A peer's memory on another device than ours."""

    @pytest.fixture
    def settings(self):
        return {"SOFTCUDA_DEVICES": "2"}

    @pytest.mark.parametrize(("kind", "types"), ALL_KINDS)
    def test_each_context_has_a_mapping_of_its_own(self, soft, far, kind, types):
        key = far.region(b"theirs", 4096, kind, types)
        with soft.open(0) as zero, soft.open(1) as one:
            rkeys = zero.rkey_unpack(key), one.rkey_unpack(key)
            assert rkeys[0].ptr() != rkeys[1].ptr()
            for md, rkey in zip((zero, one), rkeys, strict=True):
                assert read(md, rkey) == b"theirs"
                assert opens_of(md) == (1, 0)
                rkey.close()
                assert opens_of(md) == (1, 1)
        assert soft.opened() == {}

    @pytest.mark.parametrize(
        ("kind", "types", "call"),
        [("device", 0, "cuIpcOpenMemHandle"), ("vmm", POSIX_FD, "cuMemSetAccess")],
    )
    def test_a_device_that_does_not_reach_it(self, soft, far, monkeypatch, kind, types, call):
        key = far.region(b"theirs", 4096, kind, types)
        with soft.open(1) as md:
            monkeypatch.setenv("SOFTCUDA_PEERS", "0")
            with pytest.raises(um.UnreachableError, match=f"{call}: CUDA_ERROR_PEER_ACCESS"):
                md.rkey_unpack(key)
            assert soft.opened() == {}
            monkeypatch.setenv("SOFTCUDA_PEERS", "1")  # nothing is remembered of that
            with md.rkey_unpack(key) as rkey:
                assert read(md, rkey) == b"theirs"


# ---- row 74: opens == closes ----


@pytest.mark.parametrize(("kind", "types"), KINDS)
def test_row74_unpacked_and_released_many_times(gpu, md, far, kind, types):
    key = far.region(b"theirs", 4096, kind, types)
    for _ in range(50):
        with md.rkey_unpack(key) as rkey:
            assert rkey.length == (4096 if kind == "device" else BLOCK)
        assert md.stats()["device.mappings"] == 0
    assert opens(gpu, md) == (50, 50)


@pytest.mark.parametrize(
    ("kind", "types", "call"),
    [
        ("device", 0, "cuIpcCloseMemHandle"),
        ("vmm", POSIX_FD, "cuMemUnmap"),
        ("vmm", POSIX_FD, "cuMemAddressFree"),
        ("device", 0, "cuCtxPushCurrent_v2"),
    ],
)
def test_row74_a_close_that_fails_is_tried_again(soft, md, far, kind, types, call):
    key = far.region(b"theirs", 4096, kind, types)
    rkey = md.rkey_unpack(key)
    soft.driver.fail(call, 999)
    rkey.close()
    assert (md.stats()["device.close_failures"], md.stats()["device.closes"]) == (1, 0)
    # By whoever comes next: it closes, and opens anew.
    with md.rkey_unpack(key) as rkey:
        assert read(md, rkey) == b"theirs"
        assert (md.stats()["device.opens"], md.stats()["device.closes"]) == (2, 1)
    assert soft.opened() == {}


def test_row74_a_close_that_fails_for_good(soft, far):
    """The mapping stays usable for the next key; in the end it goes with the context."""
    key = far.region(b"theirs")
    md = soft.open()
    rkey = md.rkey_unpack(key)
    soft.driver.fail("cuIpcCloseMemHandle", 999, 0)
    rkey.close()
    with md.rkey_unpack(key) as rkey:
        assert read(md, rkey) == b"theirs"
    assert md.stats()["device.opens"] == 1
    md.close()
    assert soft.driver.live("opens") == 1
    soft.renew()


# ---- row 75: an exporter that dies ----


@pytest.mark.parametrize(("kind", "types"), KINDS)
def test_row75_a_dead_peer_is_evicted(gpu, md, ep, far, kind, types):
    keys = [far.region(b"theirs", 4096, kind, types) for _ in range(3)]
    rkeys = [md.rkey_unpack(key) for key in keys]
    far.peer.kill()
    into = bytearray(6)
    for rkey in rkeys:
        for call in (lambda rkey=rkey: ep.get(rkey, rkey.address, into), rkey.ptr):
            with pytest.raises(um.PeerGoneError, match="has ended"):
                call()
    with pytest.raises(um.PeerGoneError):
        md.peer_probe(keys[0])
    assert md.stats()["device.mappings"] == 3
    md.peer_evict(rkeys[0].owner)
    assert md.stats()["device.mappings"] == 0
    assert md.stats()["device.opens"] == md.stats()["device.closes"] == 3
    for rkey in rkeys:
        for call in (lambda rkey=rkey: ep.get(rkey, rkey.address, into), rkey.ptr):
            with pytest.raises(um.StaleKeyError, match="evicted"):
                call()
    md.peer_evict(rkeys[0].owner)  # again: nothing
    assert into == bytes(6)


def test_row75_a_living_peer_that_was_evicted_can_be_had_again(gpu, md, far, more):
    other = more()
    key, another, bystander = far.region(b"theirs"), far.region(b"theirs"), other.region(b"others")
    rkey, second, third = map(md.rkey_unpack, (key, another, bystander))
    md.peer_evict(rkey.owner)
    assert md.stats()["device.mappings"] == 1
    assert read(md, third) == b"others"
    for stale in (rkey, second):
        with pytest.raises(um.StaleKeyError):
            stale.ptr()
    rkey.close()  # equal keys share one object, as long as it is used
    with md.rkey_unpack(key) as fresh:
        assert read(md, fresh) == b"theirs"


def test_row75_eviction_in_one_domain_leaves_the_others(soft, md, far):
    key = far.region(b"theirs")
    rkey = md.rkey_unpack(key)
    with soft.open() as other:
        twin = other.rkey_unpack(key)
        md.peer_evict(rkey.owner)
        assert md.stats()["device.mappings"] == 1
        assert read(other, twin) == b"theirs"
        twin.close()
        assert md.stats()["device.mappings"] == 0


def test_row75_eviction_waits_for_what_is_under_way(soft, md, ep, far):
    """It does not pull the memory away from a copy; the copy's end closes it."""
    key = far.region(b"theirs")
    rkey = md.rkey_unpack(key)
    into = bytearray(6)
    soft.driver.hold()
    operation = ep.get_nb(rkey, rkey.address, into)
    md.peer_evict(rkey.owner)
    assert md.stats()["device.mappings"] == 1
    with pytest.raises(um.StaleKeyError):
        ep.get(rkey, rkey.address, bytearray(6))
    soft.driver.release()
    operation.wait()
    assert into == b"theirs"
    assert md.stats()["device.mappings"] == 0
    assert (md.stats()["device.opens"], md.stats()["device.closes"]) == (1, 1)


# ---- row 76: no current context ----


def test_row76_unpack_in_a_thread_without_a_context(gpu, md, far):
    key = far.region(b"theirs")

    def use():
        assert gpu.driver.current() == 0
        with md.rkey_unpack(key) as rkey:
            data = read(md, rkey)
        assert gpu.driver.current() == 0
        return data

    assert in_thread(use) == b"theirs"


@pytest.mark.parametrize("kind", ["device", "vmm"])
def test_row76_a_context_that_is_none(soft, md, far, kind):
    key = far.region(b"theirs", 4096, kind, POSIX_FD)
    soft.driver.fail("cuCtxPushCurrent_v2", INVALID_CONTEXT)
    with pytest.raises(um.UnreachableError, match="CUDA_ERROR_INVALID_CONTEXT"):
        md.rkey_unpack(key)
    assert soft.opened() == {}
    with md.rkey_unpack(key) as rkey:
        assert read(md, rkey) == b"theirs"


# ---- what the driver refuses is not remembered ----

STEPS = [
    ("device", 0, "cuIpcOpenMemHandle_v2"),
    ("device", 0, "cuMemGetAddressRange_v2"),
    ("vmm", POSIX_FD, "cuMemImportFromShareableHandle"),
    ("vmm", POSIX_FD, "cuMemAddressReserve"),
    ("vmm", POSIX_FD, "cuMemMap"),
    ("vmm", POSIX_FD, "cuMemSetAccess"),
    ("vmm", FABRIC, "cuMemImportFromShareableHandle"),
]


@pytest.mark.parametrize("code", [2, 205, 999])
@pytest.mark.parametrize(("kind", "types", "call"), STEPS)
def test_an_open_that_fails_leaves_nothing_and_is_tried_anew(
    soft, md, far, kind, types, call, code
):
    key = far.region(b"theirs", 4096, kind, types)
    before = descriptors()
    error = um.NoMemoryError if code == 2 else um.UnreachableError
    for _ in range(3):
        soft.driver.fail(call, code)
        with pytest.raises(error, match=call.removesuffix("_v2")) as caught:
            md.rkey_unpack(key)
        assert caught.value.context["syndrome"] == code
        assert (soft.opened(), descriptors()) == ({}, before)
        assert md.stats()["device.mappings"] == 0
    with md.rkey_unpack(key) as rkey:
        assert read(md, rkey) == b"theirs"


def test_a_fabric_handle_is_the_second_choice(soft, md, far):
    key = far.region(b"theirs", 4096, "vmm", POSIX_FD | FABRIC)
    soft.driver.fail("cuMemImportFromShareableHandle", 801)
    with md.rkey_unpack(key) as rkey:
        assert read(md, rkey) == b"theirs"
    assert soft.driver.count("cuMemImportFromShareableHandle") == 2


# ---- memory that was freed and allocated anew ----


@pytest.mark.parametrize(("kind", "types"), KINDS)
def test_memory_that_was_freed_is_noticed(gpu, md, ep, far, kind, types):
    """The owner's next allocation is where the last one was."""
    old = far.region(b"first!", 4 * MIB, kind, types)
    stale = md.rkey_unpack(old)
    assert read(md, stale) == b"first!"
    far.free(old)
    new = far.region(b"second", 4 * MIB, kind, types)
    rkey = md.rkey_unpack(new)
    assert read(md, rkey) == b"second"
    if rkey.address != stale.address:
        assert not gpu.software, "the software driver takes the lowest addresses"
        return
    for call in (lambda: ep.get(stale, stale.address, bytearray(6)), stale.ptr):
        with pytest.raises(um.StaleKeyError, match="freed this memory"):
            call()
    # What it had mapped is closed at once: else the owner's device would not get it back.
    assert md.stats()["device.mappings"] == 1
    with pytest.raises(um.StaleKeyError):
        md.peer_probe(old)
    stale.close()
    assert read(md, rkey) == b"second"


def test_memory_mapped_anew_at_the_same_addresses(soft, md, ep, far):
    """Segments that grow are: also where a driver numbers buffers by the addresses."""
    old = far.region(b"first!", BLOCK, "vmm", POSIX_FD)
    stale = md.rkey_unpack(old)
    far.free(old)
    new = far.region(b"second", BLOCK, "vmm", POSIX_FD)
    new = changed(new, buffer_id=fields(old)["buffer_id"])
    for name in ("base", "size", "fd", "buffer_id"):
        assert fields(new)[name] == fields(old)[name]
    with md.rkey_unpack(new) as rkey:
        assert read(md, rkey) == b"second"
        with pytest.raises(um.StaleKeyError, match="freed this memory or exports it anew"):
            ep.get(stale, stale.address, bytearray(6))
        assert md.stats()["device.mappings"] == 1
    stale.close()
    assert opens(soft, md) == (2, 2)


def test_an_export_that_ended_and_began_anew(soft, md, far):
    """The same memory: a key of the old export is over as soon as one of the new comes."""
    old = far.region(b"theirs", BLOCK, "vmm", POSIX_FD)
    first = md.rkey_unpack(old)
    far.dereg(old)
    assert read(md, first) == b"theirs"  # what is mapped stays usable
    with md.rkey_unpack(far.part(old, 0, 6)) as again:
        assert read(md, again) == b"theirs"
        with pytest.raises(um.StaleKeyError):
            first.ptr()
    assert soft.opened() == {}


def test_memory_that_was_freed_under_a_copy(soft, md, ep, far):
    """The copy is let to its end; then the old mapping goes."""
    old = far.region(b"first!", 4 * MIB)
    stale = md.rkey_unpack(old)
    into = bytearray(6)
    soft.driver.hold()
    operation = ep.get_nb(stale, stale.address, into)
    far.free(old)
    new = far.region(b"second", 4 * MIB)
    rkey = md.rkey_unpack(new)
    assert md.stats()["device.mappings"] == 2
    soft.driver.release()
    operation.wait()
    assert into == b"first!"
    assert md.stats()["device.mappings"] == 1
    assert read(md, rkey) == b"second"


def test_a_handle_of_other_memory_waits_for_the_copies_of_the_old(soft, md, ep, far):
    """Were a driver to give the same handle again, it could not be opened beside itself."""
    key = far.region(b"theirs")
    stale = md.rkey_unpack(key)
    again = changed(key, buffer_id=fields(key)["buffer_id"] + 1)
    soft.driver.hold()
    operation = ep.get_nb(stale, stale.address, bytearray(6))
    with pytest.raises(um.MemhError, match="progress and try again") as caught:
        md.rkey_unpack(again)
    assert caught.value.status == um.Status.NO_RESOURCE
    soft.driver.release()
    operation.wait()
    assert md.stats()["device.mappings"] == 0
    with md.rkey_unpack(again) as rkey:
        assert read(md, rkey) == b"theirs"
    with pytest.raises(um.StaleKeyError):
        stale.ptr()


@pytest.mark.parametrize(("kind", "types"), ALL_KINDS)
def test_a_mapping_of_each_kind(soft, md, far, kind, types):
    key = far.region(b"theirs", 4096, kind, types)
    with md.rkey_unpack(key) as rkey, md.rkey_unpack(far.part(key, 1, 3)) as part:
        assert (read(md, rkey), read(md, part, 3)) == (b"theirs", b"hei")
        assert opens(soft, md) == (1, 0)
    assert opens(soft, md) == (1, 1)


# ---- threads ----


def test_many_threads_unpack_and_release(soft, md, far):
    keys = [
        far.region(b"theirs", 4096, kind, types)
        for kind, types in (("device", 0), ("vmm", POSIX_FD), ("vmm", FABRIC), ("device", 0))
    ]
    wrong = []

    def run(turn):
        try:
            with md.endpoint() as ep:
                for i in range(40):
                    with md.rkey_unpack(keys[(turn + i) % len(keys)]) as rkey:
                        into = bytearray(6)
                        ep.get(rkey, rkey.address, into)
                        assert into == b"theirs"
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert md.stats()["device.opens"] == md.stats()["device.closes"] > 0
    assert soft.opened() == {}


def test_threads_evict_while_others_unpack_and_copy(soft, md, far):
    """Whoever loses gets STALE_KEY; in the end nothing is mapped."""
    keys = [far.region(b"theirs"), far.region(b"theirs", 4096, "vmm", POSIX_FD)]
    owner = md.rkey_unpack(keys[0]).owner
    stop = threading.Event()
    wrong, good = [], []

    def run(turn):
        try:
            with md.endpoint() as ep:
                for i in range(100):
                    try:
                        with md.rkey_unpack(keys[(turn + i) % 2]) as rkey:
                            into = bytearray(6)
                            ep.get(rkey, rkey.address, into)
                            assert into == b"theirs"
                            good.append(1)
                    except um.StaleKeyError:
                        pass
        except BaseException as error:
            wrong.append(error)

    def evict():
        while not stop.is_set():
            md.peer_evict(owner)

    threads = [threading.Thread(target=run, args=(turn,)) for turn in range(4)]
    evictor = threading.Thread(target=evict)
    for thread in (*threads, evictor):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    evictor.join()
    assert not wrong
    assert good
    gc.collect()
    assert md.stats()["device.opens"] == md.stats()["device.closes"]
    assert soft.opened() == {}
