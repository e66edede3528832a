# SPDX-License-Identifier: BSD-3-Clause
"""Two ways, in turns: how much longer does one take?

    python -m bench.ratios [--quick] [--json]

The machines that this runs on change their speed for seconds at a time, so a time says little.
Here each round measures one way and then the other, the next round the other way about, and what
counts is the median of the rounds' ratios.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import ucx_memh as um
from bench import bare
from bench.owner import Owner, region
from bench.revoke import ByDerived, ByRegistration
from bench.sizes import LARGEST, MIB, REGIONS, TRANSFERS, fitting, text

Row = dict[str, Any]
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def timed(call: Call, count: int) -> float:
    """Nanoseconds for each of so many calls; the loop's own 20 ns or so are in it."""
    function, args = call
    turns = range(count)
    begin = time.perf_counter_ns()
    for _ in turns:
        function(*args)
    return (time.perf_counter_ns() - begin) / count


def calls_for(call: Call) -> int:
    """As many as take a millisecond: shorter than the machine's phases."""
    timed(call, 1)
    return max(1, int(1e6 / timed(call, 3)))


def in_turns(one: Call, two: Call, seconds: float, least: int = 5) -> Row:
    """Both for so long together: their medians, and the median and quartiles of the ratio."""
    counts = [calls_for(one), calls_for(two)]
    spent = sum(timed(way, n) * n for way, n in zip((one, two), counts, strict=True))
    rounds = max(least, int(seconds * 1e9 / spent))
    first, second = [], []
    for turn in range(rounds):
        if turn % 2:
            first.append(timed(one, counts[0]))
            second.append(timed(two, counts[1]))
        else:
            second.append(timed(two, counts[1]))
            first.append(timed(one, counts[0]))
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ns": [round(statistics.median(times), 1) for times in (first, second)],
        "least_ns": [round(min(times), 1) for times in (first, second)],
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "rounds": rounds,
        "calls": counts,
    }


def data_path(sizes: list[int], seconds: float) -> Iterator[Row]:
    """get and put beside the system call: of cma, of the software device, and memcpy."""
    floor = bare.load()
    memory = memoryview(region(max(sizes)))
    with Owner(max(sizes)) as owner:
        for component in ("cma", "ib_mlx5"):
            with um.open_md(component) as md:
                link = owner.link(md)
                for length in sizes:
                    part = memory[:length]
                    with md.mem_reg(part) as local:
                        for way, function in (("get", floor.readv), ("put", floor.writev)):
                            ours = getattr(link.ep, way), (link.rkey, link.address, local)
                            theirs = function, (link.pid, link.address, part)
                            yield {
                                "what": way,
                                "component": component,
                                "software": md.attr.software,
                                "floor": f"process_vm_{function.__name__}",
                                "bytes": length,
                            } | in_turns(ours, theirs, seconds)
                pid, address = link.pid, link.address
                link.rkey.close()
                link.ep.close()
        source = memoryview(region(max(sizes)))
        for length in sizes:
            copy = floor.copy, (memory[:length], source[:length])
            yield {
                "what": "memcpy",
                "component": None,
                "software": None,
                "floor": "process_vm_readv",
                "bytes": length,
            } | in_turns(copy, (floor.readv, (pid, address, memory[:length])), seconds)


def revocation(sizes: list[int], seconds: float) -> Iterator[Row]:
    """Cutting off one peer: by the registration, beside by a derived key."""
    memory = memoryview(region(max(sizes)))
    with um.open_md("ib_mlx5") as md:
        for length in sizes:
            part = memory[:length]
            with ByDerived(md, part) as derived, ByRegistration(md, part) as registered:
                yield {
                    "what": "revoke",
                    "component": md.attr.component,
                    "software": md.attr.software,
                    "bytes": length,
                } | in_turns((registered.revoke, ()), (derived.revoke, ()), seconds)


def measure(quick: bool = False) -> list[Row]:
    """All of it; `quick` is for a test of this file."""
    if quick:
        return [*data_path([8, MIB], 0.01), *revocation([4096, MIB], 0.01)]
    rows = list(data_path(fitting(TRANSFERS), 1.5))
    return rows + list(revocation(fitting(REGIONS), 1.0))


def line(row: Row) -> str:
    ours, floor = row["ns"]
    against = row.get("floor", "derived key")
    return (
        f"{row['component'] or '':8}{row['what']:7}{text(row['bytes']):>8}"
        f"{ours:15,.0f} ns{floor:15,.0f} ns  {row['ratio']:8.3f} x {against}"
        f"  ({row['quartiles'][0]:.3f} .. {row['quartiles'][1]:.3f}, {row['rounds']} rounds)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few sizes, no patience")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if max(TRANSFERS) > LARGEST:
        print(f"not enough memory for more than {text(LARGEST)}", file=sys.stderr)
    rows = measure(options.quick)
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
    else:
        print(*map(line, rows), sep="\n")


if __name__ == "__main__":
    main()
