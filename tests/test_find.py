# SPDX-License-Identifier: BSD-3-Clause
"""Md.find: what brute force finds, in its order, in logarithmic time, as the user's own objects."""

import ctypes
import gc
import math
import sys
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ucx_memh as um
from _fakes import Books, Own
from _rawqp import RawPeer
from ucx_memh import Status
from ucx_memh.core import memh_layout
from ucx_memh.testing import PoisonAllocator, memh_pointer, open_fake
from ucx_memh.testing.plugin import Fakes

LIVE, REVOKING, REVOKED, CLOSED = um.MemhState
TOP = 2**64 - 1


def covers(memh, address, length):
    """Half-open, but for what is empty: that lies within what it touches."""
    return (
        memh.state is LIVE
        and memh.address <= address
        and address + length <= memh.address + memh.length
    )


def order(memh):
    return memh.base is not None, memh.address, memh.key_id


def brute(memhs, address, length=1, derived=None):
    """The same, by looking at each."""
    return sorted(
        (
            memh
            for memh in memhs
            if covers(memh, address, length) and derived in (None, memh.base is not None)
        ),
        key=order,
    )


def same(found, wanted):
    """The same objects, in the same order."""
    return [id(memh) for memh in found] == [id(memh) for memh in wanted]


# ---- against brute force ----

# Few values, so that ranges meet in all ways.
starts = st.one_of(st.integers(0, 40), st.sampled_from([TOP - 40, TOP - 8, TOP - 1, TOP, 2**63]))
sizes = st.one_of(st.integers(0, 40), st.sampled_from([2**63 - 1, 2**63, TOP - 40, TOP]))


class Finding(RuleBasedStateMachine):
    """Handles of all kinds come and go, before and after the first search."""

    memhs = Bundle("memhs")
    seen = [0, 0]  # searches, and what they found

    def __init__(self):
        super().__init__()
        self.memory = PoisonAllocator()
        self.memory.__enter__()
        self.fakes = Fakes(self.memory)
        self.md, self.device = self.fakes(destroy="progress", placeholders=True)
        self.all = []
        self.searches = 0

    def teardown(self):
        try:
            self.all.clear()
            self.fakes.end()
        finally:
            self.memory.__exit__()

    def add(self, *memhs):
        self.all.extend(memhs)
        return multiple(*memhs)

    @initialize(target=memhs, early=st.booleans())
    def begin(self, early):
        if early:
            assert self.md.find(0) == []
        return self.add(self.md.mem_reg(address=0, length=TOP))

    @rule(target=memhs, address=starts, length=sizes)
    def register(self, address, length):
        return self.add(self.md.mem_reg(address=address, length=min(length, TOP - address)))

    @rule(target=memhs, ranges=st.lists(st.tuples(starts, sizes), max_size=5))
    def register_many(self, ranges):
        lengths = [min(length, TOP - address) for address, length in ranges]
        return self.add(*self.md.mem_reg_many(addresses=[at for at, _ in ranges], lengths=lengths))

    @rule(target=memhs, parent=memhs, ranges=st.lists(st.tuples(sizes, sizes), max_size=5),
          many=st.booleans())  # fmt: skip
    def derive(self, parent, ranges, many):
        if parent.state is not LIVE:
            return multiple()
        offsets = [min(offset, parent.length) for offset, _ in ranges]
        lengths = [
            min(length, parent.length - at) for at, (_, length) in zip(offsets, ranges, strict=True)
        ]
        if many:
            return self.add(*parent.derive_many(offsets, lengths))
        return self.add(*map(parent.derive, offsets, lengths))

    @rule(memh=memhs)
    def pack(self, memh):
        if memh.state is LIVE:
            memh.mkey_pack()

    @rule(memh=consumes(memhs), closing=st.booleans())
    def end(self, memh, closing):
        """Also what is below it; a base stays open for what cannot be invalidated."""
        if closing or memh.base is None:
            memh.dereg(cascade=True)
        elif memh.state is LIVE:
            memh.invalidate(cascade=True)

    @rule(memhs=st.lists(consumes(memhs), max_size=4))
    def end_many(self, memhs):
        self.md.dereg_many(memhs, partial=True)

    @rule(memh=consumes(memhs))
    def forget(self, memh):
        """One that nobody has any more, nor anything below it, goes."""
        self.all = [one for one in self.all if one is not memh]

    def check(self, address, length, derived=None):
        self.searches += 1
        found = self.md.find(address, length, derived)
        self.seen[0] += 1
        self.seen[1] += len(found)
        known = {id(memh) for memh in self.all}
        # What was forgotten lives on while something below it does.
        others = [memh for memh in found if id(memh) not in known]
        assert same(found, brute([*self.all, *others], address, length, derived))

    @rule(address=starts, length=sizes, derived=st.sampled_from([None, False, True]))
    def search(self, address, length, derived):
        self.check(address, length, derived)

    @rule(length=st.integers(0, 3))
    def search_everywhere(self, length):
        for address in range(0, 60, 4):
            self.check(address, length)

    @rule(memh=memhs, inner=st.tuples(starts, sizes))
    def search_in(self, memh, inner):
        offset = min(inner[0], memh.length)
        self.check(memh.address + offset, min(inner[1], memh.length - offset))

    @precondition(lambda self: self.searches)
    @invariant()
    def the_tree_is_one(self):
        for memh in self.all[::7]:
            assert (memh in self.md.find(memh.address, memh.length)) == (memh.state is LIVE)


def test_against_brute_force(frozen_heap):
    run_state_machine_as_test(
        Finding,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Finding.seen[0] > 1000 and Finding.seen[1] > 1000


# ---- what it says ----


def test_by_address_and_bases_first(fakes):
    md, _ = fakes()
    memory = bytearray(100)
    whole = md.mem_reg(memory)
    start = whole.address
    half = md.mem_reg(address=start + 50, length=50)
    again = md.mem_reg(memory)
    wide, narrow, left = whole.derive(), whole.derive(60, 10), whole.derive(0, 60)
    leaf = wide.derive(59, 3)
    assert same(md.find(start + 60), [whole, again, half, wide, leaf, narrow])
    assert same(md.find(start + 59), [whole, again, half, wide, left, leaf])
    assert same(md.find(start + 60, 10), [whole, again, half, wide, narrow])
    assert same(md.find(start + 60, 11), [whole, again, half, wide])
    assert same(md.find(start + 60, derived=False), [whole, again, half])
    assert same(md.find(start + 60, derived=True), [wide, leaf, narrow])
    assert same(md.find(start, 100), [whole, again, wide])
    assert md.find(start, 101) == md.find(start + 100) == md.find(start - 1) == []
    assert same(md.find(start + 100, 0), [whole, again, half, wide])


def test_nothing_has_a_place_too(fakes):
    md, _ = fakes()
    empty = md.mem_reg(address=1000, length=0)
    around = md.mem_reg(address=990, length=20)
    inside = around.derive(10, 0)
    assert same(md.find(1000, 0), [around, empty, inside])
    assert same(md.find(1000), [around])
    assert md.find(999, 0) == [around]


def test_at_the_end_of_the_address_space(fakes):
    md, _ = fakes()
    all_ = md.mem_reg(address=0, length=TOP)
    last = md.mem_reg(address=TOP - 1, length=1)
    end = md.mem_reg(address=TOP, length=0)
    assert same(md.find(0, TOP), [all_])
    assert same(md.find(TOP - 1), [all_, last])
    assert same(md.find(TOP, 0), [all_, last, end])
    for address, length in [(TOP, 1), (1, TOP), (TOP, TOP)]:
        assert md.find(address, length) == []  # no range wraps around
    for wrong in (-1, 2**64, 1.0, "0", None, True):
        with pytest.raises(um.InvalidParamError, match="address"):
            md.find(wrong)
        with pytest.raises(um.InvalidParamError, match="length"):
            md.find(0, wrong)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_what_is_gone_is_not_found(fakes, early):
    """Revoked, being revoked, one that the device would not revoke, closed, let go of."""
    md, device = fakes(destroy="progress")
    if early:
        md.find(0)
    base = md.mem_reg(bytearray(64))
    wins = [base.derive() for _ in range(6)]
    for win in wins:
        win.mkey_pack()
    wins[0].invalidate()
    wins[3].dereg()
    wins[1].invalidate(lambda status: None)
    device.fail("key_destroy", Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        wins[2].invalidate()
    del wins[4]
    assert [win.state for win in wins[:4]] == [REVOKED, REVOKING, REVOKING, CLOSED]
    assert same(md.find(base.address), [base, wins[4]])
    while md.progress():
        pass
    wins[2].invalidate()
    wins[4].dereg()
    for win in wins:
        win.dereg()
    base.dereg()
    assert md.find(base.address) == []


def test_what_the_device_refused_was_never_there(fakes):
    md, device = fakes()
    assert md.find(0) == []
    device.fail("mem_reg", Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        md.mem_reg(address=64, length=64)
    base = md.mem_reg(address=64, length=64)
    device.fail("mem_derive", Status.IO_ERROR, after=2)
    with pytest.raises(um.DeviceError):
        base.derive_many([0] * 5, 8)
    assert same(md.find(64), [base])
    device.fail("mem_derive", Status.IO_ERROR, after=2)
    array = base.derive_many([0] * 5, 8, partial=True)
    assert same(md.find(64), [base, array[0], array[1], array[3], array[4]])


@pytest.mark.parametrize("op", ["mem_reg", "mem_derive"])
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_what_is_being_made_is_not_found(fakes, early, op):
    md, device = fakes()
    base = md.mem_reg(address=64, length=64)
    if early:
        md.find(64)
    begun = device.count(op)
    device.slow(op, 0.05)
    made = []

    def make():
        if op == "mem_derive":
            made.extend(base.derive_many([0], 64))
        else:
            made.append(md.mem_reg(address=64, length=64))

    thread = threading.Thread(target=make)
    thread.start()
    while device.count(op) == begun:
        pass
    during = md.find(64)
    still = thread.is_alive()
    thread.join()
    assert still and same(during, [base])
    assert same(md.find(64), [base, *made])


# ---- whose they are ----


def test_the_users_own_objects(fakes):
    md, _ = fakes()
    base = md.mem_reg(address=64, length=64)
    single = base.derive()
    array = base.derive_many([0, 0], 64)
    many = md.mem_reg_many(addresses=[64, 64], lengths=64)
    first, second = array
    found = md.find(64)
    assert same(found, [base, many[0], many[1], single, first, second])
    assert found[4] is first and found[1] is many[0] and found[2] is many[1]
    before = sys.getrefcount(base), sys.getrefcount(single), sys.getrefcount(first)
    del found
    after = sys.getrefcount(base), sys.getrefcount(single), sys.getrefcount(first)
    assert after == tuple(count - 1 for count in before)


def test_what_is_found_lives(fakes):
    """Also when it was only an item of an array that goes."""
    md, _ = fakes()
    array = md.mem_reg_many(addresses=[64, 128], lengths=64)
    (found,) = md.find(130)
    ids = list(array.key_ids)
    del array
    assert found.key_id == ids[1] and found.state is LIVE
    assert [memh.key_id for memh in md.find(64)] == ids[:1]  # all of it
    del found
    assert md.find(64) == md.find(130) == [] and md.stats()["live_bases"] == 0


@pytest.mark.parametrize("count", [15, 16, 17, 500])
def test_more_than_fit_at_once(fakes, count):
    md, _ = fakes()
    array = md.mem_reg_many(addresses=[64] * count, lengths=64)
    singles = [md.mem_reg(address=64, length=64) for _ in range(3)]
    assert same(md.find(64), [*array, *singles])
    live = fakes.memory.live
    md.find(64)
    assert fakes.memory.live == live


def test_no_room_for_what_is_found(fakes):
    """The core's allocator is not asked: a search takes nothing from it."""
    md, _ = fakes()
    array = md.mem_reg_many(addresses=[64] * 100, lengths=64)
    allocs = fakes.memory.allocs
    assert len(md.find(64)) == len(array) == 100
    assert fakes.memory.allocs == allocs


def test_from_within_a_callback(fakes):
    """That runs in the midst of a revocation."""
    md, _ = fakes(destroy="progress")
    base = md.mem_reg(address=64, length=64)
    win = base.derive()
    win.mkey_pack()
    seen = []
    win.invalidate(lambda status: seen.append((status, md.find(64))))
    while not seen:
        md.progress()
    assert seen == [(Status.OK, [base])]


def test_adopted_ones():
    """Their range is known when the device has been asked."""
    with RawPeer(size=4096) as runtime:
        native = {"context": runtime.context.value, "pd": runtime.pd.value}
        with um.open_md("ib_mlx5", device="software", **native) as md:
            assert md.find(0) == []
            with md.mem_adopt(runtime.mr.value, owner=runtime) as adopted:
                at = adopted.address
                assert (at, adopted.length) != (0, 0)
                assert same(md.find(at, 4096), [adopted])
                assert same(md.find(at + 4095), [adopted])
                with adopted.derive(8, 8) as win:
                    assert same(md.find(at + 8), [adopted, win])
                assert md.find(0) == md.find(at + 4096) == []
            assert md.find(at) == []


# ---- how deep it is ----


def field(at, struct, name):
    return getattr(ctypes.cast(at, ctypes.POINTER(struct)).contents, name)


def books(memh):
    return memh - memh_layout()[0]


def depth_of(root):
    """Of the tree, and how many nodes there are; each in its place and with its reach."""
    own_at = memh_layout()[3] - memh_layout()[0]
    deepest = nodes = 0
    todo = [(root, 1, -1, 2**65)]
    reach = {}
    order_ = []
    while todo:
        memh, depth, low, high = todo.pop()
        own = ctypes.cast(memh + own_at, ctypes.POINTER(Own)).contents
        assert low <= own.address <= high
        deepest, nodes = max(deepest, depth), nodes + 1
        left, right = (field(books(memh), Books, name) for name in ("left", "right"))
        order_.append((memh, left, right, own.address + own.length))
        if left:
            todo.append((left, depth + 1, low, own.address))
        if right:
            todo.append((right, depth + 1, own.address, high))
    for memh, left, right, end in reversed(order_):
        reach[memh] = max([end, *(reach[below] for below in (left, right) if below)])
        assert field(books(memh), Books, "reach") == reach[memh]
    return deepest, nodes


def root_of(memhs):
    """The only one that is below no other."""
    pointers = {memh_pointer(memh) for memh in memhs}
    below = {field(books(memh), Books, side) for memh in pointers for side in ("left", "right")}
    (root,) = pointers - below
    return root


COUNT = 10_000
ORDERS = {
    "ascending": range(COUNT),
    "descending": range(COUNT - 1, -1, -1),
    "all the same": [0] * COUNT,
    "from both ends": [i // 2 if i % 2 else COUNT - i // 2 for i in range(COUNT)],
}


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("numbers", ORDERS.values(), ids=ORDERS)
def test_it_is_not_deep(numbers, early):
    """Twice the logarithm is usual for such a tree; four times as much never comes."""
    md, _ = open_fake()
    base = md.mem_reg(address=0, length=1 << 20)
    if early:
        md.find(0)
    array = base.derive_many([number * 8 for number in numbers], 16)
    md.find(0)
    items = list(array)
    depth, nodes = depth_of(root_of(items))
    assert nodes == COUNT
    assert depth <= 4 * math.log2(COUNT)
    array[0].dereg()
    md.dereg_many(items[1::2])
    depth, nodes = depth_of(root_of(items[2::2]))
    assert nodes == COUNT // 2 - 1
    assert depth <= 4 * math.log2(COUNT)
    md.close(force=True)


# ---- threads ----


def test_while_others_make_and_end_them(fakes):
    """What was there all the time is found each time; nothing that is gone is."""
    md, _ = fakes(destroy="flush")
    base = md.mem_reg(address=64, length=640)
    kept = [base, *(base.derive(i, 640 - i) for i in range(20))]
    stop = threading.Event()
    failures = []

    def run(function):
        try:
            for _ in range(10000):
                if stop.is_set():
                    break
                function()
        except BaseException as error:
            failures.append(error)

    def derive():
        array = base.derive_many(range(30), 64)
        array.mkey_pack()
        array[3].derive()
        md.invalidate_many(array[::2], partial=True)

    def single():
        win = base.derive()
        with win.derive(8, 8) as leaf:
            leaf.mkey_pack()
        win.dereg()

    def register():
        array = md.mem_reg_many(addresses=range(64, 94), lengths=64)
        array.dereg()
        md.mem_reg(address=64, length=640)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=run, args=(function,)) for function in
               (derive, single, register)]  # fmt: skip
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            found = md.find(90)
            assert [memh for memh in found if memh in kept] == kept
            assert [order(memh) for memh in found] == sorted(order(memh) for memh in found)
            assert all(memh.address <= 90 < memh.address + memh.length for memh in found)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert failures == []
    del found
    while md.progress():
        pass
    gc.collect()
    assert same(md.find(90), kept)
