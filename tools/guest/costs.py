#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Count what it costs to cut off one peer, in instructions, on the kernel's RDMA stack.

    costs.py            measures in a guest, into docs/costs.json, and renders
    costs.py --render   renders: the tables of docs/costs.md, and docs/costs.svg
    costs.py --here     measures where it is, and prints the JSON; in the guest

The guest's clock counts instructions (`run.py --clock icount`), so a busy machine changes nothing.
"""

import argparse
import itertools
import json
import math
import mmap
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs/costs.json"
PAGE = ROOT / "docs/costs.md"
PICTURE = ROOT / "docs/costs.svg"

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB]
SMALL, HUGE = "4 KiB", "2 MiB"
HUGE_PAGE = 2 * MIB

# What is counted; the last two are the ways to cut off one peer.
STEPS = {
    "mem_reg": "register",
    "dereg": "deregister",
    "derive": "derive",
    "pack_first": "first pack",
    "pack_again": "pack again",
    "invalidate": "invalidate",
    "derived": "invalidate + derive + pack",
    "registered": "deregister + register + pack",
}


# ---- in the guest ----


def memory_of(length: int, pages: str) -> memoryview:
    """So much memory, touched, on pages of that size: the kernel is asked whether it really is."""
    whole = max(length, HUGE_PAGE)
    mapping = mmap.mmap(-1, whole + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if pages == HUGE else mmap.MADV_NOHUGEPAGE)
    start = -address_of(mapping) % HUGE_PAGE
    mapping[start : start + whole : 4096] = bytes(whole // 4096)
    at = address_of(mapping) + start
    found = huge_bytes(at, at + whole)
    if found != (whole if pages == HUGE else 0):
        raise RuntimeError(f"{found} bytes of {whole} are on huge pages, but {pages} are wanted")
    return memoryview(mapping)[start : start + length]


def address_of(mapping: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def huge_bytes(begin: int, end: int) -> int:
    """How much of the mappings there is on huge pages."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) < end and begin < int(match[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * KIB
    return found


def nothing() -> None:
    pass


def timed(call: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    begin = time.perf_counter_ns()
    result = call(*args)
    return time.perf_counter_ns() - begin, result


def measure(md: Any, memory: memoryview, rounds: int) -> dict[str, list[int]]:
    """All counts of each step, without those of a first round."""
    from ucx_memh import MemFlag

    counts: dict[str, list[int]] = {step: [] for step in STEPS}

    def count(step: str, call: Callable[..., Any], *args: Any) -> Any:
        taken, result = timed(call, *args)
        counts[step].append(taken)
        return result

    def by_derived() -> Any:
        windows[0].invalidate()
        window = base.derive()
        window.mkey_pack()
        return window

    def by_registered() -> Any:
        plain.dereg()
        again = md.mem_reg(memory)
        again.mkey_pack()
        return again

    for _ in range(rounds + 1):
        base = count("mem_reg", md.mem_reg, memory, MemFlag.DERIVED_ONLY)
        windows = [base.derive(), base.derive()]  # the one to cut off, and one that stays
        for window in windows:
            window.mkey_pack()
        windows[0] = count("derived", by_derived)
        window = count("derive", base.derive)
        count("pack_first", window.mkey_pack)
        count("pack_again", window.mkey_pack)
        count("invalidate", window.invalidate)
        for window in windows:
            window.invalidate()
        count("dereg", base.dereg)
        plain = md.mem_reg(memory)
        plain.mkey_pack()
        plain = count("registered", by_registered)
        plain.dereg()
    return {step: found[1:] for step, found in counts.items()}


def spread(counts: list[int]) -> list[int]:
    return [min(counts), round(statistics.median(counts)), max(counts)]


def measure_here(sizes: list[int]) -> dict[str, Any]:
    import ucx_memh as um

    regions = []
    with um.open_md("ib") as md:
        floor = spread([timed(nothing)[0] for _ in range(101)][1:])
        measure(md, memory_of(4 * KIB, SMALL), 5)  # the first of all finds cold paths
        for length in sizes:
            rounds = 21 if length <= MIB else 11 if length <= 64 * MIB else 5
            for pages in (SMALL, HUGE):
                print(f"{size(length)}, {pages} pages", file=sys.stderr, flush=True)
                found = measure(md, memory_of(length, pages), rounds)
                region = {"length": length, "pages": pages, "rounds": rounds}
                regions.append(region | {step: spread(found[step]) for step in STEPS})
        device = md.attr.md_name
    return {
        "unit": "instructions: minimum, median, maximum",
        "kernel": os.uname().release,
        "python": ".".join(map(str, sys.version_info[:3])),
        "ucx_memh": um.__version__,
        "device": device,
        "floor": floor,
        "regions": regions,
    }


# ---- outside ----


def measure_in_guest(sizes: list[int]) -> dict[str, Any]:
    here = Path(__file__).resolve()
    command = [
        *(sys.executable, str(here.with_name("run.py")), "--clock", "icount", "--memory", "2048"),
        *("--env", "PYTHONDONTWRITEBYTECODE=1", "--cwd", str(ROOT), "--"),
        *(sys.executable, str(here), "--here", "--sizes", ",".join(map(str, sizes))),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    asked = subprocess.run(
        ["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True
    )
    (version,) = re.findall(r"version (\S+)", asked.stdout)
    return {"date": time.strftime("%Y-%m-%d"), "qemu": version} | json.loads(done.stdout)


def written(data: dict[str, Any]) -> str:
    """As JSON, a line for each region."""
    head = [f"{json.dumps(key)}: {json.dumps(data[key])}," for key in data if key != "regions"]
    regions = ",\n".join("  " + json.dumps(region) for region in data["regions"])
    lines = "\n".join(" " + line for line in head)
    return f'{{\n{lines}\n "regions": [\n{regions}\n ]\n}}\n'


def size(length: int) -> str:
    return f"{length // MIB} MiB" if length >= MIB else f"{length // KIB} KiB"


def thousands(count: float) -> str:
    """With three digits, but no fraction of a thousand that has four."""
    return f"{count / 1000:,.{0 if count >= 99_950 else 1 if count >= 9_995 else 2}f}"


def times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:,.0f}"


def medians(data: dict[str, Any], pages: str) -> list[tuple[int, dict[str, int]]]:
    return [
        (region["length"], {step: region[step][1] for step in STEPS})
        for region in data["regions"]
        if region["pages"] == pages
    ]


def break_even(data: dict[str, Any], pages: str, flat: str, steep: str) -> str:
    """The size at which the second step comes to cost more than the first."""
    points = [(at, steps[steep] / steps[flat]) for at, steps in medians(data, pages)]
    if points[0][1] > 1:
        return f"below {size(points[0][0])}"
    for (at, ratio), (to, then) in itertools.pairwise(points):
        if then > 1:
            between = math.log(ratio) / (math.log(ratio) - math.log(then))
            found = at * (to / at) ** between
            return f"{found / KIB:.0f} KiB" if found < MIB else f"{found / MIB:.1f} MiB"
    return f"above {size(points[-1][0])}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables(data: dict[str, Any]) -> str:
    """What docs/costs.md says in numbers."""
    out = [
        f"Measured on {data['date']}: Linux {data['kernel']}, device {data['device']}"
        f" (`rdma_rxe`), QEMU {data['qemu']},\nPython {data['python']},"
        f" ucx_memh {data['ucx_memh']}. Medians, in **thousands of instructions**.\n"
        f"Two clock readings around an empty Python function: {thousands(data['floor'][1])}"
        " (in each number below, once).\n"
    ]
    for pages in (SMALL, HUGE):
        rows = [
            [size(at), *(thousands(steps[step]) for step in list(STEPS)[:6])]
            for at, steps in medians(data, pages)
        ]
        out.append(f"\nEach call, pages of {pages}:\n\n")
        out.append(table(["region", *list(STEPS.values())[:6]], rows))
    head = ["region", STEPS["derived"], STEPS["registered"], "ratio", "pays for"]
    for pages in (SMALL, HUGE):
        rows = []
        for at, steps in medians(data, pages):
            derived, registered = steps["derived"], steps["registered"]
            grant = steps["derive"] + steps["pack_first"] - 2 * data["floor"][1]
            rows.append(
                [
                    size(at),
                    thousands(derived),
                    thousands(registered),
                    times(registered / derived),
                    f"{max(0, registered - derived) // grant:,}",
                ]
            )
        out.append(f"\nCutting off one peer, pages of {pages}:\n\n")
        out.append(table(head, rows))
    out.append("\nBreak-even, the size of region above which the derived key is cheaper:\n\n")
    rows = [
        [
            f"{pages} pages",
            break_even(data, pages, "derived", "registered"),
            break_even(data, pages, "invalidate", "dereg"),
        ]
        for pages in (SMALL, HUGE)
    ]
    out.append(table(["", "both ways as above", "only invalidate, only deregister"], rows))
    return "".join(out)


BEGIN, END = "<!-- costs.py writes from here -->\n", "<!-- to here -->\n"


def page(text: str, data: dict[str, Any]) -> str:
    """docs/costs.md with those tables."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no place for the tables")
    return f"{before}{begin}\n{tables(data)}\n{end}{after}"


# ---- the picture ----

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 560, 50, 400
# Colours that the colour-blind tell apart; in print the marks and dashes do.
LINES = [
    # step, pages, label, colour, dashes, mark
    ("registered", SMALL, ["deregister + register", "+ pack, 4 KiB pages"], "#D55E00", "", "o"),
    ("registered", HUGE, ["the same,", "2 MiB pages"], "#D55E00", "7 4", "O"),
    ("derived", SMALL, ["invalidate + derive + pack,", "4 KiB pages"], "#0072B2", "", "s"),
    ("derived", HUGE, ["the same, 2 MiB pages"], "#0072B2", "7 4", "S"),
    ("invalidate", SMALL, ["invalidate alone"], "#000000", "2 3", "t"),
]


def mark(kind: str, x: float, y: float, colour: str) -> str:
    fill = colour if kind.islower() else "white"
    style = f'fill="{fill}" stroke="{colour}" stroke-width="1.5"'
    if kind in "oO":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}/>'
    if kind in "sS":
        r = 3.5 if kind == "s" else 6  # one is seen around the other
        return f'<path d="M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h-{2 * r}z" {style}/>'.replace(
            'fill="white"', 'fill="none"'
        )
    return f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z" {style}/>'


def picture(data: dict[str, Any]) -> str:
    """As SVG: both axes are logarithmic."""
    sizes = [at for at, _ in medians(data, SMALL)]
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    values = [steps[line[0]] for line in LINES for _, steps in medians(data, line[1])]
    floor, ceiling = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(length: float) -> float:
        return LEFT + (math.log2(length) - low) / (high - low) * (RIGHT - LEFT)

    def y(count: float) -> float:
        return BOTTOM - (math.log10(count) - floor) / (ceiling - floor) * (BOTTOM - TOP)

    def text(x: float, y: float, what: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{what}</text>'

    title = "What it costs to cut off one peer, by the size of the region"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' width="{WIDTH}" height="{HEIGHT}" role="img"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#000">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, title, "start", ' font-size="15" font-weight="bold"'),
        text(LEFT, 40, "thousands of instructions, software RoCE in QEMU", "start"),
        text((LEFT + RIGHT) / 2, BOTTOM + 42, "size of the registered region"),
    ]
    for power in range(floor, ceiling + 1):
        at = y(10**power)
        out.append(f'<path d="M{LEFT} {at:.1f}H{RIGHT}" stroke="#ccc"/>')
        out.append(text(LEFT - 8, at + 4, f"{10 ** (power - 3):,}", "end"))
    free = float(WIDTH)  # where no label is yet
    for length in reversed(sizes):
        out.append(f'<path d="M{x(length):.1f} {BOTTOM}v5" stroke="#000"/>')
        if x(length) < free:
            out.append(text(x(length), BOTTOM + 20, size(length)))
            free = x(length) - 50
    out.append(f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="#000"/>')
    labels = []
    for step, pages, label, colour, dashes, kind in LINES:
        points = [(x(at), y(steps[step])) for at, steps in medians(data, pages)]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
        out += [mark(kind, a, b, colour) for a, b in points]
        labels.append((points[-1][1], label, colour))
    below = 0.0
    for at, label, colour in sorted(labels):
        line = max(at + 4 - 7 * (len(label) - 1), below)
        for words in label:
            out.append(text(RIGHT + 14, line, words, "start", f' fill="{colour}"'))
            line += 14
        below = line + 4
    return "\n".join([*out, "</svg>\n"])


def render() -> None:
    data = json.loads(DATA.read_text())
    PAGE.write_text(page(PAGE.read_text(), data))
    PICTURE.write_text(picture(data))


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--render", action="store_true")
    way.add_argument("--here", action="store_true")
    parser.add_argument("--sizes", metavar="BYTES,...", default=",".join(map(str, SIZES)))
    options = parser.parse_args()
    sizes = [int(word) for word in options.sizes.split(",")]
    if options.here:
        print(json.dumps(measure_here(sizes)))
        return
    if not options.render:
        DATA.write_text(written(measure_in_guest(sizes)))
    render()


if __name__ == "__main__":
    main()
