# SPDX-License-Identifier: BSD-3-Clause
"""From what was measured to the words and tables of docs/bench.md.

Nothing here measures.  `benches`, `guest` and `headline` choose what is kept; `render` sees only
what was kept, so the page can be made again from docs/bench.json.
"""

import json
from typing import Any

from bench.sizes import MIB, text

Data = dict[str, Any]

# What the data path of cma should reach, beside the system call itself.
SMALL, SMALL_RATIO = 8, 1.2
LARGE, LARGE_SHARE = 64 * MIB, 0.97


# ---- what is kept ----


def benches(found: Data) -> list[Data]:
    """Of pytest-benchmark's JSON: name, what the bench noted, times in ns."""
    rows = []
    for bench in found["benchmarks"]:
        stats = bench["stats"]
        row = {"group": bench["group"], "name": bench["name"], **bench["extra_info"]}
        times = {key: round(stats[key] * 1e9, 1) for key in ("min", "median", "iqr")}
        rows.append(row | {"ns": times, "rounds": stats["rounds"] * stats["iterations"]})
    return rows


def guest(costs: Data) -> Data:
    """Of docs/costs.json: the medians, for pages of 4 KiB."""
    kept = {key: costs[key] for key in ("date", "kernel", "qemu", "device")}
    kept["regions"] = {
        region["length"]: {
            step: region[step][1] for step in ("invalidate", "derived", "registered")
        }
        for region in costs["regions"]
        if region["pages"] == "4 KiB"
    }
    return kept


def one(rows: list[Data], **wanted: Any) -> Data | None:
    """The only row that has these values; a name may be the beginning of one."""
    found = [
        row
        for row in rows
        if all(
            row.get(key) == value
            or (key == "name" and str(row.get(key)).partition("[")[0] == value)
            for key, value in wanted.items()
        )
    ]
    if len(found) > 1:
        raise ValueError(f"{len(found)} rows for {wanted}")
    return found[0] if found else None


def headline(rows: list[Data], ratios: list[Data], counted: Data, page: int) -> list[Data]:
    """For each size of region what it costs to cut off one peer, in both ways."""
    table = []
    for row in rows:
        if row["name"].partition("[")[0] != "bench_revoke_derived":
            continue
        length = row["bytes"]
        cut = one(rows, name="bench_invalidate", bytes=length)
        again = one(rows, name="bench_revoke_by_dereg", bytes=length)
        timed = one(ratios, what="revoke", bytes=length)
        if cut is None or again is None or timed is None:
            raise ValueError(f"not all was measured for {text(length)}")
        if not (row["software"] and again["software"]):
            raise ValueError("the headline is about the software device")
        instructions = counted["regions"].get(length)
        pages = -(-length // page)
        table.append(
            {
                "bytes": length,
                "commands": {
                    "invalidate": cut["commands"],
                    "derived": row["commands"],
                    "registered": again["commands"],
                },
                "pages_pinned": {
                    "derived": pages * row["commands"].get("reg_mr", 0),
                    "registered": pages * again["commands"].get("reg_mr", 0),
                },
                "software_ns": {
                    "derived": round(timed["ns"][1]),
                    "registered": round(timed["ns"][0]),
                    "ratio": timed["ratio"],
                    "quartiles": timed["quartiles"],
                },
                "instructions": instructions
                and instructions | {"ratio": instructions["registered"] / instructions["derived"]},
            }
        )
    return sorted(table, key=lambda entry: entry["bytes"])


def written(data: Data) -> str:
    """As JSON, one line for each row of a table, so that a diff can be read."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            rows = ",\n".join("  " + json.dumps(row) for row in value)
            parts.append(f' "{key}": [\n{rows}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---- numbers in words ----


def digits(value: float) -> str:
    """Three of them, and no exponent."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def duration(ns: float) -> str:
    for unit, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if ns >= 0.9995 * unit:
            return f"{digits(ns / unit)} {name}"
    return f"{ns:.0f} ns"


def times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:,.0f}"


def close(ratio: float) -> str:
    """A ratio of which the hundredths matter."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


def count(commands: dict[str, int]) -> str:
    return str(sum(commands.values()))


def named(commands: dict[str, int] | None) -> str:
    """reg_mr + 2 post_send"""
    if commands is None:
        return ""
    parts = [name if n == 1 else f"{n} {name}" for name, n in commands.items()]
    return " + ".join(parts) or "none"


def table(head: list[str], rows: list[list[str]], left: int = 0) -> str:
    """Markdown; the first `left` columns hold words, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, rule, *rows])


# ---- the page ----


def render(data: Data) -> str:
    """docs/bench.md."""
    parts = [
        opening(data),
        revoke_section(data),
        steps_section(data),
        data_section(data),
        *data["sections"],
        closing(),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def opening(data: Data) -> str:
    here = data["machine"]
    return f"""\
<!-- `make bench-report` writes this file, from docs/bench.json: change bench/report/page.py -->

# Benchmarks

Measured on {data["date"]}: {here["cpus"]} x {here["cpu"]}, {here["memory"] / (1 << 30):.0f} GiB,
Linux {here["kernel"]}, Python {here["python"]}, ucx_memh {here["ucx_memh"]}; load before
it began {here["load"]:.1f}. Everything is called from Python.

**How to read this.** The machine is a virtual one that shares its host: the same work may take
twice as long, in phases of seconds to minutes. So do not trust a time, nor compare two of different
tables. Counts (commands, pages, instructions) are exact. A ratio is of two ways that were measured
in turns of a millisecond, and is the median of all turns; in brackets are its quartiles. Times are
medians, with the least in brackets.

**softmlx5 is a software device**, and `ib_mlx5` ran on nothing else: its times are of a CPU that
imitates an adapter, and not a NIC's. They say what this library adds, and what grows with what.
`cma` makes real system calls.
"""


def revoke_section(data: Data) -> str:
    rows, guest_rows = [], []
    for row in data["headline"]:
        commands, pages, soft = row["commands"], row["pages_pinned"], row["software_ns"]
        low, high = soft["quartiles"]
        rows.append(
            [
                text(row["bytes"]),
                count(commands["invalidate"]),
                count(commands["derived"]),
                count(commands["registered"]),
                f"{pages['derived']:,}",
                f"{pages['registered']:,}",
                duration(soft["derived"]),
                duration(soft["registered"]),
                f"**{times(soft['ratio'])}** ({times(low)} .. {times(high)})",
            ]
        )
        counted = row["instructions"]
        if counted:
            guest_rows.append(
                [
                    text(row["bytes"]),
                    *(f"{counted[key]:,}" for key in ("invalidate", "derived", "registered")),
                    f"**{times(counted['ratio'])}**",
                ]
            )
    first, guest = data["headline"][0]["commands"], data["guest"]
    head = ["region", "commands: cut off", "cut off, grant anew", "register again"]
    head += ["pages to pin: derived", "register again", "softmlx5: derived", "register again"]
    head += ["ratio"]
    return f"""\
## Revoke one peer

Several peers have keys to one region, and one of them is cut off. Either it had a *derived* key:
`invalidate`. Or all had the registration's: `dereg`, `mem_reg` again, and everybody who stays needs
the new key (not counted here). The times and instructions are of somewhat more: in the place of the
one who was cut off a new one gets a key, so the derived way is invalidate + derive + pack, and the
other is dereg + mem_reg + pack.

![What it costs to cut off one peer, by the size of the region: with derived keys always the same,
by registering again more and more. Above instructions in the guest, below time on softmlx5, a
software device](bench-revoke.png)

Commands are what `md.stats()` counts as sent to the device; of those here `bind_mw` and `local_inv`
are work requests, which the firmware does not see. To cut off:
{named(first["invalidate"])}; and to grant anew: {named(first["derived"])}.
To register again: {named(first["registered"])}, of which the registration grows, by the pages
that it has to pin.

{table(head, rows)}
Instructions, kernel and user, that component `ib` needs for the same on the kernel's soft-RoCE
({guest["device"]}) in a QEMU guest whose clock counts them; pages of 4 KiB. Measured on
{guest["date"]} under Linux {guest["kernel"]}, QEMU {guest["qemu"]}; [costs.md](costs.md) says how,
and has huge pages and each single step.

{table(["region", "invalidate", "derived", "register again", "ratio"], guest_rows)}"""


def seconds(row: Data | None) -> str:
    if row is None:
        return ""
    return f"{duration(row['ns']['median'])} ({duration(row['ns']['min'])})"


STEPS = {
    "bench_derive": "`derive` of all, `dereg`",
    "bench_derive_a_part": "`derive` of a part with one right, `dereg`",
    "bench_pack_base": "`mkey_pack` of a base, again",
    "bench_pack_first": "first `mkey_pack` of a derived handle",
    "bench_pack_again": "`mkey_pack` of a derived handle, again",
    "bench_pack_into": "`mkey_pack_into`, again",
    "bench_unpack_known": "`rkey_unpack` of known bytes, `close`",
    "bench_unpack_new": "`rkey_unpack` of new bytes, owner known, `close`",
    "bench_unpack_of_a_stranger": "`rkey_unpack`, owner not known, `close`",
    "bench_invalidate": "`invalidate`",
    "bench_invalidate_among_many": "`invalidate` among a thousand others",
    "bench_invalidate_unpacked": "`invalidate`, never packed",
}


def steps_section(data: Data) -> str:
    found = data["benches"]
    sizes = sorted({row["bytes"] for row in found if row["group"] == "register"})
    registered = []
    for length in sizes:
        line = [text(length)]
        for name, component in (
            ("bench_register", "cma"),
            ("bench_register", "ib_mlx5"),
            ("bench_register_derived_only", "ib_mlx5"),
        ):
            line.append(seconds(one(found, name=name, component=component, bytes=length)))
        registered.append(line)
    steps = []
    for name, words in STEPS.items():
        same = [row for row in found if row["name"].partition("[")[0] == name]
        # Of many sizes the first and the last show that it makes no difference.
        for row in same if len(same) < 3 else [same[0], same[-1]]:
            length = text(row["bytes"]) if "bytes" in row else ""
            commands = named(row["commands"])
            steps.append([words, component_of(row), length, seconds(row), commands])
    head = ["region", "cma", "ib_mlx5 on softmlx5", "the same, `DERIVED_ONLY`"]
    return f"""\
## Register, derive, pack, unpack, invalidate

`mem_reg` and `dereg` together. cma registers nothing with anybody; softmlx5 looks at every page, as
a kernel has to.

{table(head, registered)}
Single steps. What takes less than a microsecond is mostly Python's call; where the size of the
region could matter, it is given.

{table(["step", "component", "region", "time", "commands"], steps, left=2)}"""


def component_of(row: Data) -> str:
    return f"{row['component']} on softmlx5" if row["software"] else str(row["component"])


def transfers(data: Data, way: str, component: str | None) -> list[Data]:
    """The rows of bench.ratios, by size."""
    return [row for row in data["ratios"] if (row["what"], row["component"]) == (way, component)]


def target(data: Data) -> str:
    """What should be reached, and whether it was."""
    lines = []
    for way in ("get", "put"):
        for row in transfers(data, way, "cma"):
            ratio, floor = row["ratio"], row["floor"]
            if row["bytes"] == SMALL:
                verdict = "reached" if ratio <= SMALL_RATIO else "**not reached**"
                lines.append(
                    f"- {way} of {text(SMALL)}: {close(ratio)} times {floor}; at most"
                    f" {SMALL_RATIO} is wanted, {verdict}."
                )
            if row["bytes"] == LARGE:
                verdict = "reached" if 1 / ratio >= LARGE_SHARE else "**not reached**"
                lines.append(
                    f"- {way} of {text(LARGE)}: {close(1 / ratio)} of {floor}'s bandwidth; at least"
                    f" {LARGE_SHARE} is wanted, {verdict}."
                )
    return "\n".join(lines)


def data_section(data: Data) -> str:
    tables = []
    for way in ("get", "put"):
        rows = []
        soft = {row["bytes"]: row for row in transfers(data, way, "ib_mlx5")}
        for row in transfers(data, way, "cma"):
            length, (low, high) = row["bytes"], row["quartiles"]
            other = soft[length]
            line = [text(length), duration(row["ns"][0]), duration(row["ns"][1])]
            line += [f"**{close(row['ratio'])}** ({close(low)} .. {close(high)})"]
            line += [duration(other["ns"][0]), close(other["ratio"])]
            copied = one(data["ratios"], what="memcpy", bytes=length)
            line += [duration(copied["ns"][0]) if copied else ""]
            rows.append(line)
        floor = "process_vm_" + ("readv" if way == "get" else "writev")
        head = [way, "cma", f"bare {floor}", "cma : bare", "softmlx5", "softmlx5 : bare", "memcpy"]
        tables.append(table(head, rows))
    return f"""\
## Data path

Between two processes: the owner has registered its memory, this one gets from it and puts to it.
Both sides' memory has been touched, its pages are of 4 KiB, and the same bytes go again and again:
smaller ones stay in the processor's cache. *Bare* is the system call from a C function of Python's
with nothing around it, which keeps the GIL. So the ratio has in it whatever this library does: the
checks of rights, range, revocation and of who the owner is, and that other threads may run.
memcpy is within one process.

{target(data)}

![Bytes per second of get and put by size: cma lies on the bare system call from 1 MiB on, memcpy
is above, softmlx5, a software device, below](bench-data.png)

{tables[0]}
{tables[1]}"""


def closing() -> str:
    return """\
## Again

`make bench-report` measures all of this, in some minutes, and writes [bench.json](bench.json), this
page and the pictures; `make bench` prints the table of every bench; `python -m bench.ratios` the
ratios alone. `make costs` counts the instructions.
"""
