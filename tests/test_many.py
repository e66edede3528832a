# SPDX-License-Identifier: BSD-3-Clause
"""Batches: what they take, what they give, and that one item that fails takes all with it."""

import array as arrays
import copy
import ctypes
import dataclasses
import gc
import pickle
import weakref

import numpy as np
import pytest

import ucx_memh as um
from _fakes import ALL, DERIVED_ONLY, GET, LOCAL_READ, PUT, RAW, RMA
from ucx_memh import Status
from ucx_memh.core import key_query
from ucx_memh.testing import open_fake, open_python_device

LIVE, REVOKING, REVOKED, CLOSED = um.MemhState
SIZE = 4096
OFFSETS = [0, 64, 4032, 0, 100]
LENGTHS = [64, 8, 64, 4096, 1]


def opened(component):
    if component == "fake":
        return open_fake()[0]
    if component == "python":
        return open_python_device()[0]
    return um.open_md(component, **({"device": "software"} if component == "ib_mlx5" else {}))


@pytest.fixture(params=["fake", "python", "ib_mlx5", "cma"])
def md(request):
    with opened(request.param) as md:
        yield md
        gc.collect()


@pytest.fixture(params=["fake", "python", "ib_mlx5"])
def deriving(request):
    with opened(request.param) as md:
        yield md
        gc.collect()


def facts(memh):
    return memh.address, memh.length, memh.flags, memh.grant, memh.base, memh.md, memh.state


def said(key):
    """What a packed key says, but for whose it is."""
    return dataclasses.replace(key_query(key), key_id=0)


# ---- the same as one by one ----


def test_bases_are_those_of_mem_reg(md):
    memory = [bytearray(b"x" * (n + 1)) for n in range(5)]
    array = md.mem_reg_many(memory)
    single = [md.mem_reg(region) for region in memory]
    assert [facts(memh) for memh in array] == [facts(memh) for memh in single]
    assert (len(array), array.md, array.base) == (5, md, None)
    assert list(array.addresses) == [memh.address for memh in single]
    assert list(array.lengths) == [1, 2, 3, 4, 5]
    assert list(array.key_ids) == [memh.key_id for memh in array]
    assert list(array.status) == [Status.OK] * 5
    ids = [*array.key_ids, *(memh.key_id for memh in single)]
    assert len(set(ids)) == 10 and sorted(ids) == ids  # never used again
    keys = array.mkey_pack()
    assert [bytes(key) for key in keys] == [memh.mkey_pack() for memh in array]
    for packed, memh in zip(keys, single, strict=True):
        assert said(packed) == said(memh.mkey_pack())
    array.dereg()
    for memh in single:
        memh.dereg()
    assert md.stats()["live_bases"] == 0


def test_bases_of_plain_addresses(md):
    memory = bytearray(SIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    by_number = md.mem_reg_many(
        addresses=np.arange(3, dtype=np.uint64) * 64 + start, lengths=64, flags=GET, owner=memory
    )
    assert list(by_number.addresses) == [start, start + 64, start + 128]
    assert list(by_number.lengths) == [64] * 3
    each = md.mem_reg_many(addresses=[start, start + 1], lengths=[7, 0], owner=memory)
    assert [facts(memh)[:2] for memh in each] == [(start, 7), (start + 1, 0)]
    one = md.mem_reg(address=start, length=64, flags=GET, owner=memory)
    assert facts(by_number[0]) == facts(one)
    for thing in (by_number, each, one):
        thing.dereg()


@pytest.mark.parametrize("flags", [None, GET, GET | PUT | LOCAL_READ], ids=str)
def test_derived_ones_are_those_of_derive(deriving, flags):
    base = deriving.mem_reg(bytearray(SIZE), DERIVED_ONLY)
    parent = base.derive(0, SIZE)
    for below in (base, parent):
        array = below.derive_many(OFFSETS, LENGTHS, flags)
        single = [below.derive(*item, flags) for item in zip(OFFSETS, LENGTHS, strict=True)]
        assert [facts(memh) for memh in array] == [facts(memh) for memh in single]
        assert array.base is below and below.derived_count == 10 + (below is base)
        keys = array.mkey_pack()
        assert keys.stride == deriving.attr.key_size_max
        assert len(keys.data) == 5 * keys.stride
        for i, memh in enumerate(array):
            key = memh.mkey_pack()
            assert keys[i] == key == keys[i - 5]
            assert bytes(keys.data[i * keys.stride :][: keys.lengths[i]]) == key
            assert key_query(key).key_id == memh.key_id == array.key_ids[i]
            assert said(key) == said(single[i].mkey_pack())
        with pytest.raises(IndexError):
            keys[5]
        assert list(array.invalidate()) == [Status.OK] * 5
        assert {memh.state for memh in array} == {REVOKED}
        for memh in single:
            memh.dereg()
        array.dereg()
        assert {memh.state for memh in array} == {CLOSED}
    parent.dereg()
    base.dereg()


def test_a_domain_that_does_not_derive_says_so():
    with um.open_md("cma") as md, md.mem_reg(bytearray(64)) as base:
        with pytest.raises(um.UnsupportedError) as caught:
            base.derive_many([0, 8], 8)
        assert list(caught.value.statuses) == [Status.UNSUPPORTED] * 2
        with pytest.raises(um.UnsupportedError):
            base.derive(0, 8)


def test_to_the_end(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(100))
    assert list(base.derive_many([0, 40, 100]).lengths) == [100, 60, 0]
    assert list(base.derive_many(0, [1, 2]).addresses) == [base.address] * 2
    with pytest.raises(um.InvalidParamError) as caught:
        base.derive_many([0, 101, 2**64 - 1])
    assert list(caught.value.statuses) == [0, Status.INVALID_PARAM, Status.INVALID_PARAM]
    assert caught.value.context["item"] == 1


def test_an_endpoint_for_all(fakes):
    md, _, one, _ = fakes.connected()
    base = md.mem_reg(bytearray(64))
    array = base.derive_many([0, 8], 8, endpoint=one)
    assert [memh.endpoint for memh in array] == [one, one]
    assert [memh.endpoint for memh in array[0].derive_many([0], 8)] == [one]
    other, _ = fakes()
    with pytest.raises(um.InvalidParamError, match="another domain") as caught:
        base.derive_many([0, 8], 8, endpoint=other.endpoint())
    assert caught.value.context["item"] == 0


# ---- numbers ----

ROW = np.array([0, 8, 16], np.uint64)
GOOD = {
    "uint64": ROW,
    "int64": ROW.astype(np.int64),
    "ulonglong": ROW.astype(np.ulonglong),
    "longlong": ROW.astype(np.longlong),
    "a reversed reversed view": ROW[::-1].copy()[::-1].copy(),
    "a part": np.concatenate([ROW, ROW])[:3],
    "read-only": np.frombuffer(ROW.tobytes(), np.uint64),
    "array.array": arrays.array("Q", [0, 8, 16]),
    "array.array q": arrays.array("q", [0, 8, 16]),
    "array.array L": arrays.array("L", [0, 8, 16]),
    "memoryview": memoryview(ROW.tobytes()).cast("Q"),
    "memoryview n": memoryview(ROW.tobytes()).cast("n"),
    "ctypes": (ctypes.c_uint64 * 3)(0, 8, 16),
    "list": [0, 8, 16],
    "tuple of NumPy's": tuple(ROW),
    "list of int8": [np.int8(0), np.int8(8), np.int8(16)],
    "range": range(0, 24, 8),
}


@pytest.mark.parametrize("given", GOOD.values(), ids=GOOD)
def test_numbers_that_are_taken(fakes, given):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    array = base.derive_many(given, 8)
    assert [address - base.address for address in array.addresses] == [0, 8, 16]
    assert list(base.derive_many(0, given).lengths) == [0, 8, 16]
    there = md.mem_reg_many(addresses=given, lengths=1)
    assert list(there.addresses) == [0, 8, 16]
    assert list(md.mem_reg_many(addresses=[1, 2, 3], lengths=given).lengths) == [0, 8, 16]


ONE = [8, np.uint64(8), np.int8(8), np.array(8), np.array(8, np.uint16), ctypes.c_uint64(8).value]


@pytest.mark.parametrize("one", ONE, ids=[type(one).__name__ + str(i) for i, one in enumerate(ONE)])
def test_one_number_for_all(fakes, one):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    assert list(base.derive_many([0, 1], one).lengths) == [8, 8]
    assert list(base.derive_many(one, [1, 2]).addresses) == [base.address + 8] * 2
    assert list(md.mem_reg_many(addresses=[64, 65], lengths=one).lengths) == [8, 8]


@pytest.mark.parametrize(
    "empty",
    [[], (), np.array([], np.uint64), arrays.array("q"), range(0)],
    ids=lambda empty: type(empty).__name__,
)
def test_none_at_all(fakes, empty):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    with base.derive_many(empty, 8) as array:
        assert (len(array), list(array), list(array.status)) == (0, [], [])
        keys = array.mkey_pack()
        assert (len(keys), keys.data, list(keys)) == (0, b"", [])
        assert list(array.invalidate()) == []
    assert len(md.mem_reg_many(addresses=empty, lengths=empty)) == len(md.mem_reg_many([])) == 0
    assert list(md.dereg_many([])) == list(md.invalidate_many(iter(()))) == []
    assert device.counts["mem_reg"] == 1
    assert md.stats()["derive"] == 0


BAD = {
    "big-endian": (ROW.astype(">u8"), "format '>Q'"),
    "uint32": (ROW.astype(np.uint32), "format 'I'"),
    "int8": (ROW.astype(np.int8), "format 'b'"),
    "float": (ROW.astype(float), "format 'd'"),
    "bool": (ROW.astype(bool), r"format '\?'"),
    "datetime": (ROW.astype("M8[s]"), None),
    "two rows": (np.array([[0, 8], [8, 16]], np.uint64), "not 2 dimensions"),
    "not contiguous": (np.arange(6, dtype=np.uint64)[::2], "no C-contiguous"),
    "backwards": (ROW[::-1], "no C-contiguous"),
    "objects": (np.array([0, 8], object), "Python objects"),
    "bytes": (b"\0" * 8, "format 'B'"),
    "negative": (np.array([0, -1]), r"\[1\] is negative"),
    "minimum": (np.array([-(2**63), 1]), r"\[0\] is negative"),
    "negative in a list": ([0, -8], "negative"),
    "too big in a list": ([2**64], "too big"),
    "float in a list": ([0.0], "float"),
    "str": ("abc", "str"),
    "str in a list": (["a"], "str"),
    "None in a list": ([None], "NoneType"),
    "negative alone": (-1, "in 0 .. 2"),
    "too big alone": (2**64, "in 0 .. 2"),
    "float alone": (1.0, "float"),
    "float64 alone": (np.float64(1), "float64"),
    "0-d float": (np.array(5.0), "float64"),
    "bool alone": (True, "bool"),
    "bool of NumPy alone": (np.True_, "bool"),
    "object": (object(), "object"),
    "iterator": (iter([0]), "iterator"),
}


@pytest.mark.parametrize(("given", "why"), BAD.values(), ids=BAD)
def test_numbers_that_are_refused(fakes, given, why):
    """The error says which argument it is, and why; nothing is made."""
    md, _device = fakes()
    base = md.mem_reg(bytearray(64))
    before = md.stats(), fakes.memory.live
    for name, call in {
        "offsets": lambda: base.derive_many(given, [8, 8]),
        "lengths": lambda: base.derive_many([0, 8], given),
        "addresses": lambda: md.mem_reg_many(addresses=given, lengths=[8, 8]),
        "lengths ": lambda: md.mem_reg_many(addresses=[8, 16], lengths=given),
    }.items():
        with pytest.raises(um.InvalidParamError, match=why) as caught:
            call()
        assert name.strip() in str(caught.value)
    assert (md.stats(), fakes.memory.live) == before


def test_shapes_that_do_not_fit(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    for call in (
        lambda: base.derive_many([0, 8], [8]),
        lambda: base.derive_many(ROW, ROW[:2]),
        lambda: base.derive_many([], [8]),
        lambda: base.derive_many(0, 8),
        lambda: base.derive_many(0),
        lambda: md.mem_reg_many(addresses=8, lengths=8),
        lambda: md.mem_reg_many(addresses=8, lengths=[8, 8]),
        lambda: md.mem_reg_many(addresses=[8], lengths=[8, 8]),
        lambda: md.mem_reg_many(addresses=[8]),
        lambda: md.mem_reg_many(lengths=[8]),
        lambda: md.mem_reg_many([b"x"], lengths=[8]),
        lambda: md.mem_reg_many(),
        lambda: md.mem_reg_many([b"x"], addresses=[8], lengths=[8]),
        lambda: md.mem_reg_many([b"x"], flags=1 << 40),
        lambda: base.derive_many([0], 8, 1 << 40),
        lambda: md.mkey_pack_many([base], flags=1 << 32),
        lambda: md.mkey_pack_many([base], stride=-1),
    ):
        with pytest.raises(um.InvalidParamError):
            call()
    assert md.stats()["live_derived"] == 0 and md.stats()["live_bases"] == 1


def test_what_is_no_handle_of_it(fakes):
    md, device = fakes()
    other, _ = fakes()
    mine, theirs = md.mem_reg(bytearray(8)), other.mem_reg(bytearray(8))
    their_array = other.mem_reg_many([bytearray(8)])
    for call in (md.mkey_pack_many, md.invalidate_many, md.dereg_many):
        for wrong in ([mine, theirs], [mine, None], [mine, "x"], [mine, [mine]], [mine, md]):
            with pytest.raises(um.InvalidParamError, match="item 1 is not a Memh of this Md"):
                call(wrong)
        with pytest.raises(um.InvalidParamError, match="another Md"):
            call(their_array)
        with pytest.raises(TypeError):
            call(mine)
    assert (mine.state, theirs.state, their_array[0].state) == (LIVE, LIVE, LIVE)
    assert device.count("mkey_pack") == 0


def test_the_numbers_are_let_go(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    numbers = arrays.array("Q", [0, 8])
    made = base.derive_many(numbers, 8)
    numbers.append(16)  # not exported any more
    with pytest.raises(um.InvalidParamError):
        base.derive_many(numbers, [1])
    numbers.append(64)
    with pytest.raises(um.InvalidParamError):
        base.derive_many(numbers, 8)
    numbers.append(0)
    assert list(made.lengths) == [8, 8]


# ---- all or nothing ----

COUNT = 6


def world(md, device, memory):
    """All that a batch which failed must leave as it was."""
    counters = {name: n for name, n in md.stats().items() if name.startswith("live_")}
    return counters, len(device.live_keys), memory.live, memory.live_bytes


@pytest.mark.parametrize("at", range(COUNT))
def test_a_device_that_refuses_a_base(fakes, at):
    md, device = fakes()
    memory = [bytearray(8) for _ in range(COUNT)]
    before = world(md, device, fakes.memory)
    device.fail("mem_reg", Status.IO_ERROR, after=at, text="no more", errno=5, syndrome=7)
    with pytest.raises(um.DeviceError, match="no more") as caught:
        md.mem_reg_many(memory)
    assert caught.value.context == {"item": at, "errno": 5, "syndrome": 7}
    wrong = [Status.IO_ERROR if i == at else Status.OK for i in range(COUNT)]
    assert list(caught.value.statuses) == wrong
    assert world(md, device, fakes.memory) == before
    for region in memory:
        region.append(0)
    device.fail("mem_reg", Status.IO_ERROR, after=at)
    array = md.mem_reg_many(memory, partial=True)
    assert list(array.status) == wrong
    assert md.stats()["live_bases"] == COUNT - 1
    for i, region in enumerate(memory):
        if i == at:
            region.append(0)
            with pytest.raises(um.DeviceError) as caught:
                array[i]
            assert caught.value.context == {"item": at}
            assert (array.addresses[i], array.lengths[i], array.key_ids[i]) == (0, 0, 0)
        else:
            with pytest.raises(BufferError):
                region.append(0)
            assert array[i].length == array.lengths[i] == len(region)
    keys = array.mkey_pack(partial=True)
    assert list(keys.status) == [Status.INVALID_PARAM if i == at else 0 for i in range(COUNT)]
    assert (keys[at], keys.lengths[at]) == (b"", 0)
    with pytest.raises(um.InvalidParamError):
        array.mkey_pack()
    array.dereg()
    del array
    assert world(md, device, fakes.memory) == before


@pytest.mark.parametrize("at", range(COUNT))
def test_a_device_that_refuses_to_derive(fakes, at):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    before = world(md, device, fakes.memory)
    device.fail("mem_derive", Status.NO_RESOURCE, after=at, text="full")
    with pytest.raises(um.BusyError, match="full") as caught:
        base.derive_many(range(COUNT), 8)
    wrong = [Status.NO_RESOURCE if i == at else 0 for i in range(COUNT)]
    assert (caught.value.context, list(caught.value.statuses)) == ({"item": at}, wrong)
    assert world(md, device, fakes.memory) == before
    assert base.derived_count == 0
    device.fail("mem_derive", Status.NO_RESOURCE, after=at)
    array = base.derive_many(range(COUNT), 8, partial=True)
    assert list(array.status) == wrong
    assert base.derived_count == COUNT - 1
    good = [i for i in range(COUNT) if i != at]
    assert [array[i].address - base.address for i in good] == good
    array.dereg()
    del array
    assert world(md, device, fakes.memory) == before


@pytest.mark.parametrize("call", ["buffers", "addresses", "derive"])
def test_no_memory(fakes, call):
    """One allocation for all of them, which are there as long as the last one is."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    regions = [bytearray(8) for _ in range(COUNT)]

    def make(**more):
        if call == "buffers":
            return md.mem_reg_many(regions, **more)
        if call == "addresses":
            return md.mem_reg_many(addresses=range(8, 8 + COUNT), lengths=1, **more)
        return base.derive_many(range(COUNT), 8, **more)

    before = world(md, device, fakes.memory)
    allocs = fakes.memory.allocs
    last = make()[-1]
    assert fakes.memory.allocs == allocs + 1
    assert fakes.memory.live == before[2] + 1
    last.dereg()
    del last
    assert world(md, device, fakes.memory) == before
    for partial in (False, True):
        fakes.memory.fail(1)
        with pytest.raises(um.NoMemoryError) as caught:
            make(partial=partial)
        assert (caught.value.op[-5:], caught.value.statuses) == ("_many", None)
        assert world(md, device, fakes.memory) == before
    for region in regions:
        region.append(0)


def test_what_cannot_be_registered_is_never_tried(fakes):
    """It is found before the device is asked for the first one."""
    md, device = fakes(max_reg=64)
    before = world(md, device, fakes.memory)
    regions = [bytearray(8), bytearray(65), bytearray(8)]
    with pytest.raises(um.InvalidParamError, match="max_reg") as caught:
        md.mem_reg_many(regions)
    assert caught.value.status is Status.EXCEEDS_LIMIT
    assert caught.value.context == {"item": 1}
    assert list(caught.value.statuses) == [0, Status.EXCEEDS_LIMIT, Status.CANCELED]
    assert device.counts["mem_reg"] == 0
    assert world(md, device, fakes.memory) == before
    array = md.mem_reg_many(regions, partial=True)
    assert list(array.status) == [0, Status.EXCEEDS_LIMIT, 0]
    array.dereg()


@pytest.mark.parametrize(("wrong", "error", "why"), [
    (5, um.InvalidParamError, "int does not export"),
    (np.zeros((4, 4))[:, 1], um.InvalidParamError, "C-contiguous"),
    (np.array([None]), um.InvalidParamError, "Python objects"),
    (b"read-only", um.AccessError, "read-only"),
])  # fmt: skip
def test_a_buffer_that_is_none(fakes, wrong, error, why):
    md, device = fakes()
    before = world(md, device, fakes.memory)
    regions = [bytearray(8), bytearray(8), wrong, bytearray(8), 6]
    with pytest.raises(error, match=why) as caught:
        md.mem_reg_many(regions, GET | PUT)
    assert caught.value.context["item"] == 2
    assert list(caught.value.statuses)[:4] == [0, 0, caught.value.status, Status.CANCELED]
    assert world(md, device, fakes.memory) == before
    regions[0].append(0)
    array = md.mem_reg_many(regions, GET | PUT, partial=True)
    assert list(array.status) == [0, 0, caught.value.status, 0, Status.INVALID_PARAM]
    with pytest.raises(error):
        array[2]
    array.dereg()
    regions[3].append(0)


def test_ranges_and_rights_that_are_too_much(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64), GET)
    before = world(md, device, fakes.memory)
    with pytest.raises(um.InvalidParamError, match="outside") as caught:
        base.derive_many([0, 60, 64, 65], [64, 4, 0, 0])
    assert caught.value.context == {"item": 3}
    with pytest.raises(um.InvalidParamError, match="rights") as caught:
        base.derive_many([0, 8], 8, PUT)
    assert caught.value.context == {"item": 0}
    with pytest.raises(um.InvalidParamError, match="wraps") as caught:
        md.mem_reg_many(addresses=[8, 2**64 - 8, 8], lengths=[8, 9, 8])
    assert caught.value.context == {"item": 1}
    assert world(md, device, fakes.memory) == before
    base.dereg()
    with pytest.raises(um.ClosedError) as caught:
        base.derive_many([0, 8], 8)
    assert list(caught.value.statuses) == [Status.CLOSED] * 2
    with pytest.raises(um.ClosedError):
        base.derive_many([0, 8], 8, partial=True)[1]


def test_an_error_can_be_pickled(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    with pytest.raises(um.InvalidParamError) as caught:
        base.derive_many([0, 65], 0)
    for same in (pickle.loads(pickle.dumps(caught.value)), copy.deepcopy(caught.value)):
        assert str(same) == str(caught.value)
        assert list(same.statuses) == [0, Status.INVALID_PARAM]
    assert um.InvalidParamError("x").statuses is None


def test_what_is_iterated_may_raise(fakes):
    md, device = fakes()
    before = world(md, device, fakes.memory)

    def regions():
        yield bytearray(8)
        raise LookupError

    for call in (md.mem_reg_many, md.dereg_many, md.invalidate_many, md.mkey_pack_many):
        with pytest.raises((LookupError, um.InvalidParamError)):
            call(regions())
    assert world(md, device, fakes.memory) == before


# ---- a MemhArray ----


def test_items_are_the_same_objects_while_anybody_has_them(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    array = base.derive_many(range(8), 8)
    assert array[0] is array[0] and array[-1] is array[7] and array[True] is array[1]
    first = array[0]
    assert next(iter(array)) is first is array[:1].pop()
    assert [memh.address - base.address for memh in array[1:6:2]] == [1, 3, 5]
    assert array[::-1] == [array[i] for i in range(7, -1, -1)]
    assert array[np.int64(3)] is array[3]
    assert first in array and base not in array
    for wrong in (8, -9, 2**70, -(2**70)):
        with pytest.raises(IndexError):
            array[wrong]
    for wrong in (1.0, "0", None):
        with pytest.raises(TypeError):
            array[wrong]
    assert repr(array) == "<MemhArray of 8 derived handles>"
    assert repr(md.mem_reg_many([b""])) == "<MemhArray of 1 bases>"


def test_who_lives_how_long(fakes):
    md, _device = fakes()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    array = base.derive_many([0, 8], 8)
    item, array_gone, base_gone = array[0], weakref.ref(array), weakref.ref(base)
    key_id = array.key_ids[1]
    del array, base  # the item keeps both
    assert array_gone() is not None and base_gone() is item.base
    assert md.stats()["live_derived"] == 2
    assert [memh.key_id for memh in array_gone()] == [item.key_id, key_id]
    del item
    assert array_gone() is None and base_gone() is None
    assert (md.stats()["live_derived"], md.stats()["live_bases"]) == (0, 0)
    memory.append(0)

    array = md.mem_reg_many([memory, memory])
    item = weakref.ref(array[1])
    assert item() is None  # the array does not keep it
    assert array[1].state is LIVE and md.stats()["live_bases"] == 2
    leaf = array[1].derive()
    del array
    assert leaf.base.state is LIVE and md.stats()["live_bases"] == 2
    with pytest.raises(BufferError):
        memory.append(0)
    del leaf
    assert md.stats()["live_bases"] == 0
    memory.append(0)


def test_no_object_is_kept_or_lost(fakes):
    """References of all that a batch touches are what they were when it is gone."""
    import sys

    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    owner, region = object(), bytearray(8)
    things = md, base, owner, region

    def counts():
        return [sys.getrefcount(thing) for thing in things]

    before = counts()
    one = base.derive_many([0, 8], 8)
    two = md.mem_reg_many(addresses=[8, 16], lengths=8, owner=owner)
    three = md.mem_reg_many([region, region], owner=owner)
    assert counts() == [before[0] + 3, before[1] + 1, before[2] + 4, before[3] + 2]
    items = [*one, *two, *three]
    assert counts()[1:3] == [before[1] + 3, before[2] + 4]
    for array in (one, two, three):
        array.dereg()
    del array
    assert counts()[2:] == before[2:]
    del items, one, two, three
    assert counts() == before


def test_weak_references_of_items(fakes):
    """While an item goes its callbacks may ask for it again, and get a new object."""
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    made = [base.derive_many([0, 8], 8)]
    seen = []

    def gone(reference):
        seen.append((reference(), made[0][0], md.find(base.address, 8, derived=True)))

    watched = weakref.ref(made[0][0], gone)
    assert watched() is None
    ((dead, again, found),) = seen
    assert dead is None
    assert found == [again] and again is made[0][0] and again.state is LIVE
    seen.clear()

    def array_gone(reference):
        seen.append((reference(), md.find(base.address, 8, derived=True)))

    watched = weakref.ref(made[0], array_gone)
    del again, found
    made.clear()
    assert seen == [(None, [])]
    assert md.stats()["live_derived"] == 0


def test_it_cannot_be_made_copied_or_pickled(fakes):
    md, _ = fakes()
    array = md.mem_reg_many([bytearray(8)])
    for call in (
        um.MemhArray,
        lambda: pickle.dumps(array),
        lambda: copy.copy(array),
        lambda: copy.deepcopy(array),
    ):
        with pytest.raises(TypeError):
            call()
    assert array[0].state is LIVE


def test_with(fakes):
    md, device = fakes()
    memory = [bytearray(8), bytearray(8)]
    with md.mem_reg_many(memory) as array:
        with array[0].derive_many([0, 1], 4) as below:
            below.mkey_pack()
            assert device.count("key_create") == 2
        assert {memh.state for memh in below} == {CLOSED}
        leaf = array[0].derive()
        with pytest.raises(um.BusyError) as caught:
            array.dereg()
        assert list(caught.value.statuses) == [Status.BUSY, 0]
        memory[1].append(0)
        leaf.dereg()
    assert {memh.state for memh in array} == {CLOSED}
    assert list(array.dereg()) == [0, 0]
    memory[0].append(0)


def test_a_closed_domain(fakes):
    md, _device = fakes()
    base = md.mem_reg(bytearray(64))
    array = base.derive_many([0, 8], 8)
    array.mkey_pack()
    item = array[0]
    with pytest.raises(um.BusyError):
        md.close()
    md.close(force=True)
    for call in (
        array.mkey_pack,
        array.invalidate,
        lambda: md.dereg_many(array),
        lambda: md.mem_reg_many([b""]),
        lambda: md.find(0),
        lambda: base.derive_many([0], 8),
    ):
        with pytest.raises(um.ClosedError):
            call()
    assert list(array.dereg()) == [0, 0]
    assert (item.state, array[1].state) == (CLOSED, CLOSED)
    assert list(array.lengths) == [8, 8]


def test_bools_for_all(fakes):
    """Handles of each kind: what only reads an array changes nothing."""
    md, device = fakes()
    array = md.mem_reg_many([bytearray(64)] * 3, ALL | DERIVED_ONLY)
    counts = device.counts
    for name in ("key_ids", "addresses", "lengths", "status"):
        view = getattr(array, name)
        assert view.readonly and view.ndim == 1 and view.shape == (3,)
        assert view.format == ("i" if name == "status" else "Q")
        assert np.asarray(view).tolist() == list(view)
    assert device.counts == counts


# ---- packing ----


def three_of(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    return md, device, base.derive_many([0, 8, 16], 8)


@pytest.mark.parametrize("extra", [0, 1, 100])
@pytest.mark.parametrize("make", [bytearray, lambda n: np.full(n, 0x55, np.uint8)], ids=["b", "n"])
def test_a_given_buffer(fakes, make, extra):
    """Nothing but the keys is written, and the buffer is let go."""
    md, _, array = three_of(fakes)
    stride = md.attr.key_size_max + extra
    buffer = make(3 * stride + 7)
    buffer[:] = b"\x55" * len(buffer) if type(buffer) is bytearray else 0x55
    keys = array.mkey_pack(buffer, stride=stride)
    assert keys.data is buffer and keys.stride == stride
    expected = b"".join(memh.mkey_pack().ljust(stride, b"\x55") for memh in array) + b"\x55" * 7
    assert bytes(buffer) == expected
    assert list(keys) == [memh.mkey_pack() for memh in array]
    if type(buffer) is bytearray:
        buffer.append(0)
        del buffer[stride:]
        assert keys[0] == array[0].mkey_pack()
        with pytest.raises(IndexError):
            keys[2]


@pytest.mark.parametrize("kind", [">u4", "c16", [("key", "u1", 96)], "u8"], ids=str)
def test_a_buffer_of_any_items(fakes, kind):
    md, _, array = three_of(fakes)
    buffer = np.zeros(3 * md.attr.key_size_max // np.dtype(kind).itemsize, kind)
    assert list(array.mkey_pack(buffer)) == [memh.mkey_pack() for memh in array]


def test_buffers_that_are_refused(fakes):
    md, device, array = three_of(fakes)
    size = md.attr.key_size_max
    for buffer, stride, status in [
        (bytes(3 * size), None, Status.ACCESS),
        (np.zeros((3, size, 2), np.uint8)[:, :, 0], None, Status.INVALID_PARAM),
        ("x", None, Status.INVALID_PARAM),
        (bytearray(3 * size - 1), None, Status.BUFFER_TOO_SMALL),
        (bytearray(3 * size), 0, Status.BUFFER_TOO_SMALL),
        (None, 0, Status.BUFFER_TOO_SMALL),
        (bytearray(3 * size), size + 1, Status.BUFFER_TOO_SMALL),
        (bytearray(), None, Status.BUFFER_TOO_SMALL),
        (bytearray(64), 2**63, Status.BUFFER_TOO_SMALL),
        (bytearray(64), 2**64 - 1, Status.BUFFER_TOO_SMALL),
    ]:
        with pytest.raises(um.MemhError) as caught:
            array.mkey_pack(buffer, stride=stride)
        assert caught.value.status is status
        if type(buffer) is bytearray:
            buffer.append(0)
    assert device.count("key_create") == 0  # before anything was packed


def test_a_stride_that_is_too_short(fakes):
    """Each item fails, and not a byte is written."""
    md, _, array = three_of(fakes)
    size = md.attr.key_size_max
    buffer = bytearray(3 * size)
    with pytest.raises(um.InvalidParamError) as caught:
        array.mkey_pack(buffer, stride=size - 1)
    assert caught.value.status is Status.BUFFER_TOO_SMALL
    assert list(caught.value.statuses) == [Status.BUFFER_TOO_SMALL] * 3
    assert buffer == bytes(3 * size)
    keys = array.mkey_pack(buffer, RAW, stride=size - 1)
    assert keys.lengths[0] < size - 1
    assert list(keys) == [memh.mkey_pack(RAW) for memh in array]


def test_flags(fakes):
    md, _, array = three_of(fakes)
    for flags in (0, RMA, RAW, RAW | RMA):
        keys = md.mkey_pack_many([*array, array.base], flags=flags)
        expected = [memh.mkey_pack(flags) for memh in [*array, array.base]]
        assert list(keys) == expected
        assert list(keys.lengths) == [len(key) for key in expected]
    assert md.mkey_pack_many(array, flags=RAW).stride == len(array[0].mkey_pack(RAW))
    with pytest.raises(um.UnsupportedError) as caught:
        array.mkey_pack(flags=um.PackFlag.EXPORT)
    assert list(caught.value.statuses) == [Status.UNSUPPORTED] * 3


def test_one_that_cannot_be_packed(fakes):
    """The others are, whether it raises or not."""
    md, _device, array = three_of(fakes)
    size = md.attr.key_size_max
    array[1].invalidate()
    buffer = bytearray(b"\x55" * 3 * size)
    with pytest.raises(um.RevokedError) as caught:
        array.mkey_pack(buffer)
    assert caught.value.context["item"] == 1
    assert list(caught.value.statuses) == [0, Status.REVOKED, 0]
    wanted = array[0].mkey_pack() + b"\x55" * size + array[2].mkey_pack()
    assert buffer == wanted
    keys = array.mkey_pack(partial=True)
    assert list(keys) == [array[0].mkey_pack(), b"", array[2].mkey_pack()]
    assert list(keys.status) == [0, Status.REVOKED, 0]
    array[2].dereg()
    assert list(array.mkey_pack(partial=True).status) == [0, Status.REVOKED, Status.CLOSED]


@pytest.mark.parametrize("what", ["key_create", "mkey_pack", "memory"])
def test_a_device_that_refuses_a_key(fakes, what):
    _md, device, array = three_of(fakes)
    if what == "memory":
        array[0].mkey_pack()
        allocs = fakes.memory.allocs
        array[1].mkey_pack()
        fakes.memory.fail(fakes.memory.allocs - allocs)  # as many for the last one
        failed, at = Status.NO_MEMORY, 2
    else:
        device.fail(what, Status.IO_ERROR, after=1, text="no key", count=1)
        failed, at = Status.IO_ERROR, 1
    with pytest.raises(um.MemhError) as caught:
        array.mkey_pack()
    assert caught.value.context["item"] == at
    statuses = [0, 0, 0]
    statuses[at] = failed
    assert list(caught.value.statuses) == statuses
    if what != "memory":
        assert "no key" in str(caught.value)
    assert list(array.mkey_pack()) == [memh.mkey_pack() for memh in array]
    assert len(device.live_keys) == 4


def test_a_key_is_made_once(fakes):
    md, device, array = three_of(fakes)
    first = list(array.mkey_pack())
    assert list(md.mkey_pack_many([array[2], array[0], array[2]])) == [first[2], first[0], first[2]]
    assert device.count("key_create") == device.count("mkey_pack") == 3
