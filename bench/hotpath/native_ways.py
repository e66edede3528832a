# SPDX-License-Identifier: BSD-3-Clause
"""The ways of the C table: loops of loops.c, each with what it is called with."""

import ctypes as c
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import ucx_memh as um
from bench.hotpath.devices import Device, device
from bench.hotpath.native import Loops, pointer
from bench.hotpath.rounds import Row, Way, measure, summary
from bench.owner import Link, Owner, region

RAW = int(um.PackFlag.RAW)
SMALL = 8
PHASE = "malloc + free of 64 B"
DEVICES = ("fake", "ib_mlx5", "cma")


@dataclass
class Entry:
    """A row to be."""

    what: str
    component: str | None
    way: Way
    limit: str | None = None  # the name of another entry

    @property
    def name(self) -> str:
        return self.what if self.component is None else f"{self.what} ({self.component})"


def limits(loops: Loops, sizes: list[int]) -> Iterator[Entry]:
    def bare(what: str, loop: str, size: int) -> Entry:
        return Entry(
            f"{what} of {size} B",
            None,
            lambda count: loops.bare(loop, c.c_size_t(size), count=count),
        )

    for size in sorted({64, *sizes}):
        yield bare("malloc + free", "malloc_free", size)
    for size in sizes:
        yield bare("malloc + memcpy + free", "malloc_memcpy_free", size)


def of_device(loops: Loops, it: Device) -> Iterator[Entry]:
    md, base, packs = pointer(it.md), pointer(it.base), pointer(it.packs)
    memory = c.c_void_p(it.address), c.c_size_t(len(it.memory)), c.c_uint64(0)
    yield Entry("mem_reg + dereg + release", it.name, lambda n: loops("reg", md, *memory, count=n))
    if it.win is not None:
        yield Entry(
            "derive + dereg + release",
            it.name,
            lambda n: loops("derive", base, count=n),
            f"malloc + memcpy + free of {it.handle_size} B",
        )
    yield Entry("mkey_pack, again", it.name, lambda n: loops("pack", packs, c.c_uint32(0), count=n))
    if it.win is not None:  # a key of cma's has no native part
        yield Entry(
            "mkey_pack RAW, again",
            it.name,
            lambda n: loops("pack", packs, c.c_uint32(RAW), count=n),
        )
    key = it.key, c.c_size_t(len(it.key))
    yield Entry(
        "rkey_unpack of a known key + release",
        it.name,
        lambda n: loops("unpack", md, *key, count=n),
    )
    if it.win is not None:
        yield Entry(
            "derive + mkey_pack + invalidate", it.name, lambda n: loops("revoke", base, count=n)
        )


def of_link(loops: Loops, link: Link, memory: mmap) -> Iterator[Entry]:
    """get beside the system call, from another process; the caller keeps both alive."""
    local = c.addressof(c.c_char.from_buffer(memory))
    get = pointer(link.ep), pointer(link.rkey), c.c_uint64(link.address)
    end = c.c_void_p(local), c.c_size_t(SMALL)
    readv = c.c_int(link.pid), c.c_void_p(link.address), *end
    limit = Entry(
        f"process_vm_readv of {SMALL} B", None, lambda n: loops.bare("readv", *readv, count=n)
    )
    yield limit
    yield Entry(f"get of {SMALL} B", "cma", lambda n: loops("get", *get, *end, count=n), limit.name)


@contextmanager
def entries(folder: Path, counting: bool = False) -> Iterator[list[Entry]]:
    """All of them, and what they need; the limits first."""
    loops = Loops(folder)
    with ExitStack() as stack:
        devices = [stack.enter_context(device(name, counting)) for name in DEVICES]
        found = list(limits(loops, sorted({it.handle_size for it in devices})))
        for it in devices:
            found += of_device(loops, it)
        if not counting:  # the rest is the kernel's, which callgrind does not see
            owner = stack.enter_context(Owner(4096))
            md = um.open_md("cma")
            stack.callback(md.close, force=True)
            link, memory = owner.link(md), region(4096)  # C holds their pointers alone
            found += of_link(loops, link, memory)
        yield found


def table(folder: Path, rounds: int, slice_ms: float) -> list[Row]:
    with entries(folder) as found:
        times = measure({entry.name: entry.way for entry in found}, rounds, slice_ms)
    rows = []
    for entry in found:
        row: Row = {"what": entry.what, "component": entry.component, "limit": entry.limit}
        limit = times[entry.limit] if entry.limit else None
        rows.append(row | summary(times[entry.name], times[PHASE], limit))
    return rows
