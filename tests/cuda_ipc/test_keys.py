# SPDX-License-Identifier: BSD-3-Clause
"""Packed keys: what is in them, and what becomes of forged, stale and foreign ones."""

import errno
import os
import random
import resource
from contextlib import contextmanager, suppress

import pytest

import ucx_memh as um
from _cma import forged
from _fakes import sealed
from _sides import descriptors
from cuda_ipc._payload import FABRIC_KIND, FD, HEADER, LEGACY, changed, fields, resized
from softcuda.driver import BLOCK, FABRIC, POSIX_FD, Driver
from ucx_memh import MemType

KINDS = [
    pytest.param("device", 0, id="legacy"),
    pytest.param("vmm", POSIX_FD, id="fd"),
    pytest.param("vmm", FABRIC, id="fabric"),
    pytest.param("vmm", POSIX_FD | FABRIC, id="fd and fabric"),
]


@pytest.fixture
def key(far):
    """Another process's key."""
    return far.region(b"theirs")


@pytest.fixture
def own_key(soft, md):
    """One of ours: whose a key is matters only after what it says."""
    with md.mem_reg(soft.memory().array()) as base:
        yield base.mkey_pack()


def untouched(soft, md, call):
    """Run it; afterwards nothing is open that was not before."""
    before = soft.opened(), descriptors(), md.stats()["live_rkeys"]
    result = call()
    assert (soft.opened(), descriptors(), md.stats()["live_rkeys"]) == before
    return result


def refuses(soft, md, error, key, match=None):
    def call():
        with pytest.raises(error, match=match):
            md.rkey_unpack(key)

    untouched(soft, md, call)


# ---- what is in one ----


def test_a_key_names_the_allocation_and_the_range(soft, md):
    memory = soft.memory(8192)
    base = md.mem_reg(address=memory.address + 64, length=128, mem_type=MemType.CUDA)
    key = base.mkey_pack()
    found = fields(key)
    assert len(key) == 208
    assert (found["version"], found["kinds"], found["zero"], found["fd"]) == (1, LEGACY, 0, -1)
    assert (found["base"], found["size"]) == (memory.address, 8192)
    assert found["buffer_id"] == soft.driver.attribute(memory.address, 7)
    assert found["uuid"][:8] == b"softcuda"
    assert key[HEADER + 64 :] == soft.driver.handle(memory.address)
    assert base.mkey_pack() == key
    other = md.mem_reg(memory.array())
    assert other.mkey_pack()[HEADER:] == key[HEADER:]
    with md.rkey_unpack(key) as rkey:
        assert (rkey.address, rkey.length) == (memory.address + 64, 128)


@pytest.mark.parametrize(
    ("types", "kinds", "length"),
    [(POSIX_FD, FD, 144), (FABRIC, FABRIC_KIND, 208), (POSIX_FD | FABRIC, FD | FABRIC_KIND, 208)],
)
def test_keys_of_created_allocations(soft, md, types, kinds, length):
    with md.mem_reg(soft.memory(kind="vmm", types=types).array()) as base:
        key = base.mkey_pack()
        assert (len(key), fields(key)["kinds"], fields(key)["size"]) == (length, kinds, BLOCK)
        fd = fields(key)["fd"]
        assert (fd >= 0) == bool(kinds & FD)
        if fd >= 0:
            assert not os.get_inheritable(fd)


# ---- hostile ones ----


@pytest.mark.parametrize(("kind", "types"), KINDS)
def test_every_cut_of_a_key_is_refused(soft, md, far, kind, types):
    whole = far.region(b"theirs", 4096, kind, types)
    for length in {*range(len(whole) - HEADER), 65, 127, 129, 176} - {len(whole) - HEADER}:
        refuses(soft, md, um.MalformedKeyError, resized(whole, length))
    for length in range(len(whole)):
        refuses(soft, md, um.MalformedKeyError, whole[:length])
    md.rkey_unpack(whole).close()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"version": 2},
        {"kinds": 0},
        {"kinds": LEGACY | FD},
        {"kinds": LEGACY | FABRIC_KIND},
        {"kinds": 8},
        {"kinds": 255},
        {"kinds": FD},  # too long for it
        {"zero": 1},
        {"fd": 0},  # a legacy key has none
        {"size": 0},
        {"size": 2**64 - 1},
        {"nonce": 0},
        {"base": 2**64 - 1},
        {"size": 1},  # the range is outside
        {"base": 0, "size": 1},
    ],
    ids=str,
)
def test_a_payload_that_makes_no_sense(soft, md, own_key, changes):
    before = soft.calls()
    refuses(soft, md, um.MalformedKeyError, changed(own_key, **changes))
    assert soft.calls() == before


@pytest.mark.parametrize("by", [-(2**12), -1, 1, 2**12, 2**40])
def test_a_range_outside_of_the_allocation(soft, md, own_key, by):
    header = {"address": (fields(own_key)["base"] + by) % 2**64}
    refuses(soft, md, um.MalformedKeyError, sealed(own_key, **header))
    refuses(soft, md, um.MalformedKeyError, sealed(own_key, length=4097))


def test_a_handle_that_the_driver_does_not_know(soft, md, key):
    forged_key = sealed(key[: HEADER + 64] + bytes(64))
    refuses(soft, md, um.UnreachableError, forged_key, "cuIpcOpenMemHandle")
    assert md.stats()["device.opens"] == 0


def test_an_allocation_that_is_shorter_than_the_key_says(soft, md, key):
    """A copy beyond it would be the end of the context."""
    refuses(soft, md, um.MalformedKeyError, changed(key, size=8192), "longer than what is there")
    assert soft.driver.count("cuIpcOpenMemHandle_v2") == soft.driver.count("cuIpcCloseMemHandle")


@pytest.mark.parametrize("types", [POSIX_FD, FABRIC])
def test_an_imported_allocation_that_is_shorter(soft, md, far, types):
    key = far.region(b"theirs", 4096, "vmm", types)
    refuses(soft, md, um.UnreachableError, changed(key, size=2 * BLOCK), "cuMemMap")
    refuses(soft, md, um.UnreachableError, changed(key, size=BLOCK + 512), "cuMemAddressReserve")
    refuses(soft, md, um.MemhError, changed(key, size=2**62), "cuMemAddressReserve")


def test_random_payloads(soft, md, key):
    random.seed(1)
    for _ in range(300):
        body = bytearray(key[HEADER:])
        for _ in range(random.randint(1, 4)):
            body[random.randrange(len(body))] = random.randrange(256)
        blob = sealed(key[:HEADER] + bytes(body))
        with suppress(um.MemhError):
            md.rkey_unpack(blob).close()
    assert soft.opened() == {}


@contextmanager
def no_more_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptor_is_free_for_another(soft, md, far):
    """That is no fault of the key's, and says nothing of the peer."""
    key = far.region(b"theirs", 4096, "vmm", POSIX_FD)
    with md.rkey_unpack(far.region(b"other")):  # the peer's own descriptor is there already
        with no_more_files():
            with pytest.raises(um.MemhError, match="pidfd_getfd: out of files") as caught:
                md.rkey_unpack(key)
        assert caught.value.status == um.Status.NO_RESOURCE
        assert caught.value.context["errno"] == errno.EMFILE
    assert soft.opened() == {}
    md.rkey_unpack(key).close()


def test_a_descriptor_that_is_none(soft, md, far):
    key = far.region(b"theirs", 4096, "vmm", POSIX_FD)
    refuses(soft, md, um.UnreachableError, changed(key, fd=2**20), "pidfd_getfd")


# ---- whose it is ----


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"host": 1}, um.UnreachableError, "on another host"),
        ({"pid_ns": 1}, um.UnreachableError, "another pid namespace"),
        ({"pid": 0}, um.UnreachableError, "does not say whose"),
        ({"pid": 2**31}, um.UnreachableError, "does not say whose"),
        ({"start_time": 0}, um.UnreachableError, "does not say whose"),
        ({"pid": 2**22 + 1}, um.PeerGoneError, "no such process"),
        ({"start_time": 1}, um.StaleKeyError, "another process has this pid now"),
        ({"pid": 1}, um.StaleKeyError, "another process has this pid now"),
    ],
)
def test_forged_owners(soft, md, own_key, changes, error, text):
    before = soft.calls()
    refuses(soft, md, error, forged(own_key, **changes), text)
    assert soft.calls() == before


def test_a_key_of_our_own_needs_no_handle(gpu, md, ep):
    """CUDA refuses to open a handle in the process that made it."""
    for kind, types in [("device", 0), ("vmm", POSIX_FD)]:
        memory = gpu.memory(4096, b"own", kind, types)
        base = md.mem_reg(memory.array())
        with md.rkey_unpack(base.mkey_pack()) as rkey:
            assert rkey.ptr(memory.address + 7) == memory.address + 7
            ep.put(rkey, memory.address + 1, b"WN")
            assert gpu.read(memory, 3) == b"oWN"
        key = base.mkey_pack()
        base.dereg()
        with pytest.raises(um.StaleKeyError, match="we do not export"):
            md.rkey_unpack(key)
    assert md.stats()["device.opens"] == 0


def test_two_drivers_in_one_process_are_two(soft, md, softcuda):
    """A key of our own under another driver is a key of our own all the same."""
    path = softcuda("cuMemFreeAsync")
    with um.open_md("cuda_ipc", driver=path) as other:
        driver = Driver(path)
        context = driver.use(0)
        memory = driver.alloc(4096)
        with other.mem_reg(memory.array()) as base:
            with md.rkey_unpack(base.mkey_pack()) as rkey:
                assert rkey.ptr() == memory.address
            with pytest.raises(um.InvalidParamError):
                md.mem_reg(memory.array())
        memory.free()
        assert driver.current() == context
        driver.reset()


# ---- stale ones ----


@pytest.mark.parametrize(("kind", "types"), KINDS)
def test_a_key_after_the_owners_dereg(soft, md, far, kind, types):
    key = far.region(b"theirs", 4096, kind, types)
    md.rkey_unpack(key).close()
    far.dereg(key)
    refuses(soft, md, um.StaleKeyError, key, "does not export this memory any more")
    with pytest.raises(um.StaleKeyError):
        md.peer_probe(key)


def test_a_descriptor_that_is_something_elses_by_now(soft, md, far):
    """Its number is the lowest free one: the next export gets it, of a block of the same size."""
    second = far.region(b"second", BLOCK, "vmm", POSIX_FD)
    far.dereg(second)
    old = far.region(b"first", BLOCK, "vmm", POSIX_FD)
    far.dereg(old)
    new = far.part(second, 0, BLOCK)
    assert fields(new)["fd"] == fields(old)["fd"]
    refuses(soft, md, um.StaleKeyError, old)
    # Also if the word that says so has come to be the same: then the memory is the new one's.
    mixed = changed(new, nonce=fields(old)["nonce"])
    refuses(soft, md, um.StaleKeyError, mixed)
    with md.rkey_unpack(new) as rkey, md.endpoint() as ep:
        into = bytearray(6)
        ep.get(rkey, rkey.address, into)
        assert into == b"second"


def test_a_word_that_cannot_be_read_at_all(soft, md, key):
    """An address of nothing: the export has ended, whatever the handle says."""
    refuses(soft, md, um.StaleKeyError, changed(key, record=8))
    refuses(soft, md, um.StaleKeyError, changed(key, record=2**64 - 8))


def test_a_peer_that_may_not_be_looked_into(soft, md, far):
    """Of a legacy handle the driver is asked; a descriptor cannot be had, nor is it trusted."""
    keys = [far.region(b"theirs", 4096, *kind) for kind in (("device",), ("vmm", POSIX_FD))]
    far.undumpable()
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may look all the same
    try:
        before = soft.driver.count("cuIpcOpenMemHandle_v2")
        # The software driver needs to look, too.
        refuses(soft, md, um.UnreachableError, keys[0], "cuIpcOpenMemHandle")
        assert soft.driver.count("cuIpcOpenMemHandle_v2") == before + 1
        refuses(soft, md, um.UnreachableError, keys[1], "pidfd_getfd")
    finally:
        os.seteuid(user)
