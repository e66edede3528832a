# SPDX-License-Identifier: BSD-3-Clause
"""Sixty cycles of ten thousand: each takes what the one before took, and leaves nothing."""

import gc
import sys
from itertools import pairwise

import numpy as np
import pytest

import ucx_memh as um
from ucx_memh.testing import PoisonAllocator, open_fake

CYCLES = 60
COUNT = 10_000
SIZE = 64
HOST = um.MemType.HOST  # said: nobody looks


class Ledger:
    """What a cycle has taken and left, in all books that there are."""

    def __init__(self, memory, md, things, device_counts):
        self.memory, self.md, self.things, self.device_counts = memory, md, things, device_counts
        self.rows = []
        self.last = self.look()

    def look(self):
        counts = {name: n for name, n in self.md.stats().items() if not name.startswith("live_")}
        counts |= self.device_counts()
        return counts | {"allocs": self.memory.allocs, "frees": self.memory.frees}

    def state(self):
        live = {name: n for name, n in self.md.stats().items() if name.startswith("live_")}
        references = [sys.getrefcount(thing) for thing in self.things]
        return live, self.memory.live, self.memory.live_bytes, references

    def end(self):
        now = self.look()
        spent = {name: now[name] - self.last[name] for name in now}
        self.rows.append((spent, self.state(), sys.getallocatedblocks()))
        self.last = self.look()

    def flat(self, warm=3):
        """The first may fill caches of Python's."""
        first = self.rows[warm][:2]
        for row in self.rows[warm:]:
            assert row[:2] == first
        blocks = [row[2] for row in self.rows[warm:]]
        # The rows themselves stay, and nothing grows but them.
        steps = {after - before for before, after in pairwise(blocks)}
        assert max(steps) - min(steps) <= 2 and max(steps) < 200
        return first[0]


def cycles(memory, md, things, once, device_counts=dict, count=CYCLES):
    gc.collect()
    gc.disable()
    try:
        ledger = Ledger(memory, md, things, device_counts)
        before = ledger.state()
        for _ in range(count):
            once()
            ledger.end()
            assert ledger.rows[-1][1] == before
        return ledger.flat()
    finally:
        gc.enable()


def derive_in_cycles(memory, searched):
    offsets = np.arange(COUNT, dtype=np.uint64) * SIZE
    md, device = open_fake()
    base = md.mem_reg(address=1 << 20, length=COUNT * SIZE)
    if searched:
        md.find(0)

    def once():
        array = base.derive_many(offsets, SIZE)
        if searched:
            assert md.find(array.addresses[77], SIZE, derived=True) == [array[77]]
        array.invalidate()
        array.dereg()

    spent = cycles(memory, md, (md, base, offsets), once, lambda: device.counts)
    assert (spent["allocs"], spent["frees"]) == (1, 1)
    assert (spent["derive"], spent["revoke"], spent["mem_derive"]) == (COUNT,) * 3
    assert spent["key_create"] == spent["key_destroy"] == 0
    md.close(force=True)


@pytest.mark.parametrize("searched", [False, True], ids=["", "searched"])
def test_derived_ones(frozen_heap, searched):
    with PoisonAllocator() as memory:
        derive_in_cycles(memory, searched)
        gc.collect()
        memory.check()
        assert memory.live == 0


@pytest.mark.parametrize("what", ["buffers", "addresses"])
@pytest.mark.parametrize("end", ["dereg", "let go"])
def test_bases(frozen_heap, what, end):
    region = bytearray(COUNT * SIZE)
    view = memoryview(region)
    buffers = [view[i * SIZE : (i + 1) * SIZE] for i in range(COUNT)]
    owner = object()
    addresses = np.arange(COUNT, dtype=np.int64) * SIZE + 4096
    with PoisonAllocator() as memory, um.open_md("cma") as md:
        things = md, owner, region, view, buffers[0], addresses

        def once():
            if what == "buffers":
                array = md.mem_reg_many(buffers, owner=owner)
            else:
                array = md.mem_reg_many(
                    addresses=addresses, lengths=SIZE, owner=owner, mem_type=HOST
                )
            if end == "dereg":
                array.dereg()
                assert sys.getrefcount(owner) < COUNT

        spent = cycles(memory, md, things, once, count=CYCLES if end == "dereg" else 20)
        assert (spent["allocs"], spent["frees"]) == (1, 1)
        assert (spent["mem_reg"], spent["mem_dereg"]) == (COUNT, COUNT)


def test_packed_ones(frozen_heap):
    """Into one buffer, which stays."""
    buffer = np.zeros((COUNT, 96), np.uint8)
    addresses = np.arange(COUNT, dtype=np.uint64) * SIZE + 4096
    with PoisonAllocator() as memory, um.open_md("cma") as md:

        def once():
            with md.mem_reg_many(addresses=addresses, lengths=SIZE, mem_type=HOST) as array:
                keys = array.mkey_pack(buffer)
                assert len(keys) == COUNT and keys.lengths[COUNT - 1] == 80

        spent = cycles(memory, md, (md, buffer, addresses), once)
        assert spent["allocs"] == spent["frees"] <= COUNT + 1


def test_failed_ones(frozen_heap):
    """The last item fails, and all others with it."""
    addresses = np.arange(COUNT, dtype=np.uint64) * SIZE + 4096
    lengths = np.full(COUNT, SIZE, np.uint64)
    lengths[-1] = 2**64 - 1
    with PoisonAllocator() as memory, um.open_md("cma") as md:
        whole = md.mem_reg(address=4096, length=COUNT * SIZE, mem_type=HOST)

        def once():
            with pytest.raises(um.InvalidParamError):
                md.mem_reg_many(addresses=addresses, lengths=lengths, owner=lengths, mem_type=HOST)
            with pytest.raises(um.UnsupportedError):
                whole.derive_many(addresses, lengths)

        spent = cycles(memory, md, (md, lengths, addresses, whole), once, count=10)
        assert (spent["allocs"], spent["frees"], spent["mem_reg"]) == (2, 2, 0)
        whole.dereg()


@pytest.mark.parametrize("umr", ["auto", "off"])
def test_work_for_the_device(frozen_heap, umr):
    """A thousand with keys: the same commands, work requests and doorbells in each cycle."""
    count = 1000
    region = bytearray(count * SIZE)
    offsets = np.arange(count, dtype=np.uint64) * SIZE
    with PoisonAllocator() as memory:
        with um.open_md("ib_mlx5", device="software", umr=umr) as md:
            base = md.mem_reg(region, um.MemFlag.DERIVED_ONLY)
            size = md.attr.key_size_max
            buffer = bytearray(count * size)

            def once():
                with base.derive_many(offsets, SIZE) as array:
                    array.mkey_pack(buffer)
                    array.invalidate()

            once()  # what the backend keeps: a queue pair, and a pool of keys
            spent = cycles(memory, md, (md, base, offsets, region), once, count=12)
            assert spent["derive"] == spent["revoke"] == count
            if umr == "off":
                made = spent["device.create_mkey"], spent["device.destroy_mkey"]
                assert made == (spent["key_create"], spent["key_destroy"]) == (count, count)
            base.dereg()
