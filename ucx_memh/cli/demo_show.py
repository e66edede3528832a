# SPDX-License-Identifier: BSD-3-Clause
"""What a person sees of the demo: the table, the progress bar, and who kept which promise."""

import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ucx_memh as um

__all__ = ["MIB", "Show", "seconds_text"]

MIB = 1 << 20
SMALL = 4 * mmap.PAGESIZE  # the second size at which the costs are taken
REPEAT = 20
KEEPERS = {
    um.Enforcement.ENFORCED: "kept by the device",
    um.Enforcement.COOPERATIVE: "kept by the peers' own library, not by the device",
    um.Enforcement.NONE: "kept by nobody",
}


@dataclass
class Show:
    """The table, the progress bar, and the book of what was promised."""

    failures: list[str] = field(default_factory=list)
    checks: int = 0
    width: int = 46

    def say(self, text: str) -> None:
        print(text, flush=True)

    def intro(self, md: um.Md) -> None:
        attr = md.attr
        self.say(f"ucx_memh {um.__version__}: {attr.component}/{attr.md_name}")
        if attr.software:
            self.say(
                "This device is made of SOFTWARE: it speaks the vendor's commands and refuses "
                "as the\nvendor's tables say, but its times are not a NIC's."
            )
            self.say("")
        table = attr.enforcement
        promises = {"rights": table.rights, "range": table.range, "revocation": table.revoke}
        for promise, row in promises.items():
            self.say(f"{promise:<11} {KEEPERS[row.put]}")
        self.say("")

    def row(self, step: str, cost: str = "", sent: str = "", outcome: str = "") -> None:
        self.say(f"{step:<{self.width}} {cost:>12}  {sent:<26} {outcome}".rstrip())

    def step(self, title: str, md: um.Md, action: Callable, grows: bool = False):
        """Do it; show what it cost and which commands were sent for it."""
        before = md.stats()
        start = time.perf_counter()
        result = action()
        seconds = time.perf_counter() - start
        sent = _sent(before, md.stats())
        self.row(
            title, seconds_text(seconds), sent or "no command", "grows with size" if grows else ""
        )
        return result

    def moved(self, title: str, result: dict) -> None:
        rate = result["bytes"] / max(result["seconds"], 1e-9) / 1e9
        self.row(
            title,
            seconds_text(result["seconds"]),
            f"{result['bytes'] / MIB:.1f} MiB",
            f"{rate:.2f} GB/s",
        )

    def refusal(self, title: str, result: dict, status: str) -> None:
        refused = result["status"] != "OK"
        self.row(
            title, "", "", f"refused by {result['by']}: {result['status']}" if refused else "done"
        )
        self.expect(f"{title}: {status}", result["status"] == status)

    def around(self, title: str, result: dict, claim: um.Enforcement) -> None:
        """An access past the library that the key does not allow: as the domain claims it to be."""
        if claim == um.Enforcement.ENFORCED:
            self.refusal(title, result, "REMOTE_ACCESS")
            return
        done = result["status"] == "OK"
        self.row(
            title,
            "",
            "",
            "let through by the device" if done else f"refused by the device: {result['status']}",
        )
        # Refusing is more than was promised, and so no broken promise.
        kept = result["status"] in ("OK", "REMOTE_ACCESS")
        self.expect(f"{title}: `enforcement` promises nothing there", kept)

    def expect(self, what: str, holds: bool) -> None:
        self.checks += 1
        if holds:
            self.row(f"  checked: {what}")
        else:
            self.failures.append(what)
            self.row(f"  FAILED: {what}")

    def costs(self, md: um.Md, memory: mmap.mmap, size: int) -> None:
        """The same steps at two sizes: what grows, and what does not."""
        sizes = (SMALL, size)
        self.say("")
        self.row(
            f"cost by size of the region (best of {REPEAT})",
            f"{sizes[0] >> 10} KiB",
            f"{sizes[1] >> 10} KiB",
            "commands at either size",
        )
        small, large = (_costs(md, memory, size) for size in sizes)
        for title in small:
            (one, sent), (two, sent_two) = small[title], large[title]
            self.row(f"  {title}", seconds_text(one), seconds_text(two), sent)
            if not title.startswith("register"):
                self.expect(f"{title} sends the same commands at any size", sent == sent_two)

    def verdict(self) -> list[str]:
        """The last lines."""
        good = self.checks - len(self.failures)
        return [
            *(f"FAILED: {failure}" for failure in self.failures),
            f"{good} of {self.checks} expectations hold",
        ]

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """A progress bar on a terminal; nothing elsewhere."""
        shown = sys.stderr.isatty()
        state = {"done": 0, "total": total}

        def advance(count: int, total: int | None = None) -> None:
            state["done"] += count
            state["total"] = total or state["total"]
            if shown:
                part = state["done"] / max(state["total"], 1)
                print(
                    f"\r  {title:<44} [{'#' * int(30 * part):<30}] {part:4.0%}",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )

        try:
            yield advance
        finally:
            if shown:
                print(f"\r{'':<90}\r", end="", file=sys.stderr, flush=True)


def _costs(md: um.Md, memory: mmap.mmap, size: int) -> dict[str, tuple[float, str]]:
    best: dict[str, tuple[float, str]] = {}

    def timed(title: str, action: Callable):
        before, start = md.stats(), time.perf_counter()
        result = action()
        seconds = time.perf_counter() - start
        sent = _sent(before, md.stats()) or "none"
        best[title] = min(best.get(title, (seconds, sent)), (seconds, sent))
        return result

    view = memoryview(memory)[:size]
    for _ in range(REPEAT):
        start, before = time.perf_counter(), md.stats()
        base = md.mem_reg(view, um.MemFlag.DERIVED_ONLY)
        middle = time.perf_counter(), md.stats()
        win = timed("derive", base.derive)
        timed("pack", win.mkey_pack)
        timed("revoke one key", win.invalidate)
        resume = time.perf_counter()
        base.dereg()
        seconds = middle[0] - start + time.perf_counter() - resume
        sent = _sent(before, middle[1]) + " and back"
        title = "register and deregister"
        best[title] = min(best.get(title, (seconds, sent)), (seconds, sent))
    view.release()
    return best


def _sent(before: dict[str, int], after: dict[str, int]) -> str:
    """Device commands between two stats()."""
    commands = (
        *("reg_mr", "dereg_mr", "create_mkey", "destroy_mkey"),
        *("alloc_mw", "bind_mw", "local_inv", "dealloc_mw"),
    )
    counts = {
        name.upper(): after.get(f"device.{name}", 0) - before.get(f"device.{name}", 0)
        for name in commands
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def seconds_text(seconds: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.1f} {unit}"
    raise AssertionError("unreachable")
