# SPDX-License-Identifier: BSD-3-Clause
"""The ways of the Python table: statements, each beside its floor or the bare system call."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ucx_memh as um
from bench import bare
from bench.hotpath import floor
from bench.hotpath.devices import Device, device
from bench.hotpath.floor import statement
from bench.hotpath.native import Loops
from bench.hotpath.native_ways import DEVICES, PHASE, SMALL, limits
from bench.hotpath.rounds import Row, Way, measure, summary
from bench.owner import Owner, region
from bench.sizes import MIB, text

LARGE = 64 * MIB


@dataclass
class Entry:
    """A row to be."""

    what: str
    component: str | None
    way: Way
    parts: list[str] = field(default_factory=list)  # what it cannot avoid, of floor.PARTS
    limit: str | None = None  # or the name of another entry

    @property
    def name(self) -> str:
        return self.what if self.component is None else f"{self.what} ({self.component})"


def of_device(it: Device) -> Iterator[Entry]:
    names = {"md": it.md, "memory": it.memory, "base": it.base, "packs": it.packs, "key": it.key}
    names["get"] = um.MemFlag.REMOTE_GET

    def entry(what: str, words: str, *parts: str) -> Entry:
        return Entry(what, it.name, statement(words, **names), list(parts))

    one, call = "call with 1 argument", "call"
    yield entry("mem_reg + dereg", "md.mem_reg(memory).dereg()", one, "buffer", "object", call)
    yield entry("mkey_pack, again", "packs.mkey_pack()", call, "96 bytes")
    yield entry(
        "rkey_unpack of a known key + close",
        "md.rkey_unpack(key).close()",
        *(one, "buffer", "object", call),
    )
    if it.win is not None:
        yield entry("derive + dereg", "base.derive().dereg()", call, "object", call)
        yield entry(
            "derive of a part + dereg",
            "base.derive(64, 1024, get).dereg()",
            *("call with 3 arguments", "object", call),
        )
        yield entry("with derive", "with base.derive(): pass", call, "object", "with")


def of_owner(owner: Owner, length: int, stack: ExitStack) -> Iterator[Entry]:
    """get and put of cma, beside the system call from Python with nothing around it."""
    md = um.open_md("cma")
    stack.callback(md.close, force=True)
    link, part = owner.link(md), memoryview(region(length))
    names = {"ep": link.ep, "rkey": link.rkey, "address": link.address, "pid": link.pid}
    names |= {"part": part, "local": md.mem_reg(part), "bare": bare.load()}
    # An attribute of an object on both sides: it is found at the same cost.
    for way, call in (("get", "readv"), ("put", "writev")):
        limit = f"process_vm_{call} of {text(length)}"
        words = f"bare.{call}(pid, address, part)"
        yield Entry(limit, None, statement(words, **names))
        words = f"ep.{way}(rkey, address, local)"
        yield Entry(f"{way} of {text(length)}", "cma", statement(words, **names), [], limit)


@contextmanager
def entries(counting: bool = False) -> Iterator[list[Entry]]:
    """Those that are short."""
    with ExitStack() as stack:
        found: list[Entry] = []
        for name in DEVICES:
            found += of_device(stack.enter_context(device(name, counting)))
        if not counting:  # the rest is the kernel's, which callgrind does not see
            found += of_owner(stack.enter_context(Owner(SMALL)), SMALL, stack)
        yield found


def short(folder: Path, rounds: int, slice_ms: float) -> tuple[list[Row], list[Row]]:
    """The rows, and those of the floor's parts."""
    loops = Loops(folder)
    with entries() as found:
        ways = {entry.name: entry.way for entry in limits(loops, []) if entry.name == PHASE}
        ways |= floor.ways() | {entry.name: entry.way for entry in found}
        times = measure(ways, rounds, slice_ms)
    alone = floor.parts(times)
    rows = []
    for entry in found:
        row: Row = {"what": entry.what, "component": entry.component}
        row["limit"] = entry.limit or (" + ".join(entry.parts) or None)
        limit = times[entry.limit] if entry.limit else None
        if entry.parts:
            limit = floor.floor(alone, entry.parts)
        rows.append(row | summary(times[entry.name], times[PHASE], limit))
    parts = [{"part": part} | summary(alone[part], times[PHASE]) for part in alone]
    return rows, parts


def large(length: int, rounds: int) -> list[Row]:
    """A round is one call of each."""
    with ExitStack() as stack:
        owner = stack.enter_context(Owner(length))
        found = list(of_owner(owner, length, stack))
        times = measure({entry.name: entry.way for entry in found}, rounds, 0)
    return [
        {"what": entry.what, "component": entry.component, "limit": entry.limit}
        | summary(times[entry.name], None, times[entry.limit] if entry.limit else None)
        for entry in found
    ]
