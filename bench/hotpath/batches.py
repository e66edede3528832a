# SPDX-License-Identifier: BSD-3-Clause
"""Thousands of handles: one call for all, beside the loop in Python that one would write."""

import gc
import statistics
import time
from typing import Any

import numpy as np

import ucx_memh as um
from bench.hotpath.devices import open_device
from bench.hotpath.rounds import Row, summary
from ucx_memh import MemhArray

HOST = um.MemType.HOST  # said: so nobody looks at the memory first
ITEMS = (100, 1000, 10_000)
LENGTH = 64  # bytes of an item; softmlx5 looks at the page of each registration
CHAINS = [
    ("cma", "bases", ("register", "pack", "pack again", "dereg")),
    ("ib_mlx5", "bases", ("register", "pack", "pack again", "dereg")),
    ("ib_mlx5", "derived", ("derive", "pack", "pack again", "invalidate")),
    # No keys: the fake looks for one among all that it has.
    ("fake", "derived", ("derive", "dereg")),
]


class Batch:
    """So many ranges of one memory, and both ways to take and end handles of all of them."""

    def __init__(self, md: um.Md, items: int) -> None:
        self.md, self.items = md, items
        self.memory = np.ones(items * LENGTH, np.uint8)  # its pages are there
        start = self.memory.__array_interface__["data"][0]
        self.offsets = np.arange(items, dtype=np.uint64) * LENGTH
        self.addresses = self.offsets + np.uint64(start)
        self.lengths = np.full(items, LENGTH, np.uint64)
        self.base = md.mem_reg(self.memory)

    # The loop: what arrays give are NumPy's numbers, and handles want Python's.

    def register(self) -> list[um.Memh]:
        md, memory = self.md, self.memory
        return [
            md.mem_reg(address=int(address), length=int(length), owner=memory, mem_type=HOST)
            for address, length in zip(self.addresses, self.lengths, strict=True)
        ]

    def derive(self) -> list[um.Memh]:
        base = self.base
        return [
            base.derive(int(offset), int(length))
            for offset, length in zip(self.offsets, self.lengths, strict=True)
        ]

    def pack(self, memhs: list[um.Memh]) -> list[bytes]:
        return [memh.mkey_pack() for memh in memhs]

    def invalidate(self, memhs: list[um.Memh]) -> None:
        for memh in memhs:
            memh.invalidate()

    def dereg(self, memhs: list[um.Memh]) -> None:
        for memh in memhs:
            memh.dereg()

    # One call.

    def register_many(self) -> MemhArray:
        return self.md.mem_reg_many(
            addresses=self.addresses, lengths=self.lengths, owner=self.memory, mem_type=HOST
        )

    def derive_many(self) -> MemhArray:
        return self.base.derive_many(self.offsets, self.lengths)

    def pack_many(self, memhs: MemhArray) -> Any:
        return self.md.mkey_pack_many(memhs)

    def invalidate_many(self, memhs: MemhArray) -> None:
        self.md.invalidate_many(memhs)

    def dereg_many(self, memhs: MemhArray) -> None:
        self.md.dereg_many(memhs)


def chain(batch: Batch, stages: tuple[str, ...], many: bool) -> dict[str, float]:
    """Nanoseconds per item: of each stage, of letting go of the objects, and of all together."""
    made: Any = None
    spent = {}
    for name in stages:
        call = getattr(batch, name.split()[0] + ("_many" if many else ""))
        if made is None:  # the first stage makes the handles, the others use them
            begin = time.perf_counter_ns()
            result = made = call()
        else:
            begin = time.perf_counter_ns()
            result = call(made)
        spent[name] = (time.perf_counter_ns() - begin) / batch.items
        del result
    begin = time.perf_counter_ns()
    del made
    spent["let go"] = (time.perf_counter_ns() - begin) / batch.items
    return spent | {"all": sum(spent.values())}


def chains(batch: Batch, stages: tuple[str, ...], many: bool, least: int) -> dict[str, float]:
    """As often as it takes for that many items: the mean."""
    found = [chain(batch, stages, many) for _ in range(-(-least // batch.items))]
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


def in_turns(batches: list[Batch], handles: str, stages: tuple[str, ...], rounds: int) -> list[Row]:
    """Both ways of all sizes in each round, the next round the other way about."""
    times: dict[tuple[str, int], dict[bool, list[float]]] = {}
    least = min(1000, max(batch.items for batch in batches))
    turns = [(batch, many) for batch in batches for many in (False, True)]
    for _ in range(rounds):
        for batch, many in turns:
            for name, ns in chains(batch, stages, many, least).items():
                both = times.setdefault((name, batch.items), {False: [], True: []})
                both[many].append(ns)
        turns.reverse()
    component = batches[0].md.attr.component
    return [
        {"what": name, "handles": handles, "component": component, "items": items}
        | compared(both[False], both[True])
        for (name, items), both in sorted(times.items(), key=lambda one: -one[0][1])
    ]


def compared(loop: list[float], many: list[float]) -> Row:
    """How many times cheaper the one call is."""
    row = summary(loop, None, many)
    kept = {key: row[key] for key in ("ratio", "quartiles", "rounds")}
    return {"loop_ns": row["ns"], "many_ns": row["limit_ns"], **kept}


def key(row: Row) -> tuple[str, str, str]:
    """Of one line of the table."""
    return row["what"], row["handles"], row["component"]


def grown(rows: list[Row]) -> None:
    """How much more an item costs among the most than among the next fewer: 1 is flat."""
    sizes = sorted({row["items"] for row in rows})
    if len(sizes) < 2:
        return
    by_key = {(*key(row), row["items"]): row for row in rows}
    for row in rows:
        if row["items"] == sizes[-1]:
            fewer = by_key[(*key(row), sizes[-2])]
            row["growth"] = round(row["many_ns"] / fewer["many_ns"], 3)


def table(items: tuple[int, ...], rounds: int) -> list[Row]:
    rows: list[Row] = []
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for name, handles, stages in CHAINS:
            md = open_device(name)
            try:
                rows += in_turns([Batch(md, count) for count in items], handles, stages, rounds)
            finally:
                md.close(force=True)
    finally:
        if collects:
            gc.enable()
    grown(rows)
    return rows
