# SPDX-License-Identifier: BSD-3-Clause
"""The figures of docs/hotpath.json in words and tables.  Nothing here measures."""

import json
from pathlib import Path
from typing import Any

from bench.hotpath import targets
from bench.hotpath.targets import Target
from bench.report.page import digits, table

Data = dict[str, Any]

CALLER = {"c": "C", "python": "Python"}

DATA = Path(__file__).resolve().parents[2] / "docs/hotpath.json"


def committed() -> Data | None:
    return json.loads(DATA.read_text()) if DATA.exists() else None


def written(data: Data) -> str:
    """As JSON, a line for each row of a table and its keys in order, so that diffs are short."""
    parts = []
    for key in sorted(data):
        value = data[key]
        if isinstance(value, list) and value:
            rows = ",\n".join("  " + json.dumps(row, sort_keys=True) for row in value)
            parts.append(f' "{key}": [\n{rows}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value, sort_keys=True)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---- numbers in words ----


def ns(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1e6:
        return f"{value / 1e6:.2f} ms"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def wanted(goal: Target) -> str:
    if goal.words:
        return goal.words
    words = "at least" if goal.least else "at most"
    if goal.key == "at_phase_ns":
        return f"{words} {goal.bound:g} ns in that phase"
    return f"{words} {goal.bound:g} times"


def verdict(goal: Target | None, row: Data) -> str:
    if goal is None or goal.key not in row:
        return ""
    return f"{wanted(goal)}: " + ("reached" if goal.reached(row) else "**not reached**")


def of(row: Data) -> str:
    return row["component"] or "none"


# ---- the tables ----


def calls(data: Data, which: str) -> str:
    rows = []
    for row in data[which]:
        ratio = ""
        if "ratio" in row:
            low, high = row["quartiles"]
            ratio = f"{digits(row['ratio'])} ({digits(low)} .. {digits(high)})"
        line = [row["what"], of(row), row["limit"] or "", verdict(targets.target(which, row), row)]
        line += [ns(row["ns"]), ns(row["least_ns"]), ns(row.get("at_phase_ns"))]
        rows.append([*line, ns(row.get("limit_ns")), ratio])
    head = ["call", "component", "limit", "wanted", "median ns", "least", "in that phase"]
    return table([*head, "limit", "times the limit"], rows, left=4)


def floor(data: Data) -> str:
    rows = [[row["part"], ns(row["ns"]), ns(row["at_phase_ns"])] for row in data["floor"]]
    return table(["part", "median ns", "in that phase"], rows, left=1)


def batches(data: Data) -> str:
    sizes = sorted({row["items"] for row in data["batches"]})
    lines: dict[tuple[str, str, str], dict[int, Data]] = {}
    for row in data["batches"]:
        key = row["handles"], row["what"], row["component"]
        lines.setdefault(key, {})[row["items"]] = row
    rows = []
    for (handles, what, component), found in lines.items():
        most = found[sizes[-1]]
        # Letting go of the objects is what is left, and `all` has a device's time in it.
        goals = [] if what in ("let go", "all") else [targets.CHEAPER, targets.FLAT]
        if (what, component) in targets.DEVICE_TIME:
            goals.remove(targets.CHEAPER)
        line = [
            what,
            handles,
            component,
            "; ".join(filter(None, (verdict(g, most) for g in goals))),
        ]
        line += [f"{ns(found[size]['loop_ns'])} : {ns(found[size]['many_ns'])}" for size in sizes]
        low, high = most["quartiles"]
        line += [f"{digits(most['ratio'])} ({digits(low)} .. {digits(high)})"]
        rows.append([*line, digits(most["growth"]) if "growth" in most else ""])
    head = ["step", "handles", "component", "wanted: cheaper; growth"]
    head += [f"{size:,}: loop : one call" for size in sizes]
    return table([*head, f"cheaper at {sizes[-1]:,}", "growth"], rows, left=4)


def counts(data: Data, before: list[Data] | None = None) -> str:
    """With `before`, of an earlier run, also what each was."""
    was = {
        (row["table"], row["what"], row["component"]): row["instructions"] for row in before or []
    }
    rows = []
    for row in data["counts"]:
        line = [row["what"], CALLER[row["table"]], of(row)]
        line.append(f"{row['instructions']:,}")
        if before is not None:
            old = was.pop((row["table"], row["what"], row["component"]), None)
            now = row["instructions"]
            line.append("new" if old is None else "the same" if old == now else f"was {old:,}")
        rows.append(line)
    if before is not None and data["counts"]:  # what is no more shows too
        rows += [
            [what, CALLER[where], component or "none", "gone", f"was {old:,}"]
            for (where, what, component), old in was.items()
        ]
    head = ["call", "from", "component", "instructions"] + ["before"] * (before is not None)
    return table(head, rows, left=3) if rows else data.get("not_counted", "") + "\n"


# ---- all of it ----


def text(data: Data, before: list[Data] | None = None) -> str:
    phase = next(row["ns"] for row in data["c"] if row["what"] == "malloc + free of 64 B")
    here = data["machine"]
    valgrind = data["valgrind"]
    counted = f"Counted by callgrind of {valgrind}" if valgrind else "**Not counted here**"
    return f"""\
## The hot path

Measured on {data["date"]}: {here["cpus"]} x {here["cpu"]}, Linux {here["kernel"]}, Python
{here["python"]}, load {here["load"]:.1f}; `make hotpath` measures it again. All rows of a table
are measured in turns of some milliseconds, and a ratio is the median of the rounds' ratios, with
its quartiles. Targets in nanoseconds are for the phase of the machine in which malloc and free of
64 B take {data["phase_ns"]} ns. Here they took {ns(phase)} (median): *in that phase* is a time of
each round, made longer or shorter by what malloc and free took in that round. The fake device
counts and checks, under a mutex; `ib_mlx5` is on softmlx5, a software device.

### From C

{calls(data, "c")}
### From Python

In a loop as timeit has it, whose own time is in each. The limit is what a call cannot avoid, added
up of the parts below; or the bare system call, made by a C function of Python's.

{calls(data, "python")}
{floor(data)}
### Many handles at once

Nanoseconds per item. The loop goes over NumPy arrays, and calls once for each handle. *growth*: how
many times as much an item of the one call costs among {max_items(data):,} as among the next fewer.

{batches(data)}
### Instructions

{counted}: user space alone, of one call. They repeat, to the
instruction or one beside; so a change here is a change of the code, or of the compiler.

{counts(data, before)}"""


def max_items(data: Data) -> int:
    return max(row["items"] for row in data["batches"])


def render() -> str | None:
    """For docs/bench.md."""
    data = committed()
    return None if data is None else text(data)
