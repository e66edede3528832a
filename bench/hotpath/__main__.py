# SPDX-License-Identifier: BSD-3-Clause
"""make hotpath

python -m bench.hotpath           measures into docs/hotpath.json, and prints it
python -m bench.hotpath --quick   a round or two, for a test of this file; writes nothing
"""

import argparse
import json
import sys
import time

from bench.bare import BUILD
from bench.hotpath import batches, counts, native_ways, python_ways, render
from bench.hotpath.rounds import PHASE_NS, Row
from bench.machine import machine


def measure(quick: bool) -> Row:
    rounds, slice_ms = (3, 0.2) if quick else (300, 2.0)
    data: Row = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "phase_ns": PHASE_NS}
    data["c"] = native_ways.table(BUILD, rounds, slice_ms)
    rows, data["floor"] = python_ways.short(BUILD, rounds, slice_ms)
    length, turns = (1 << 20, 3) if quick else (python_ways.LARGE, 60)
    data["python"] = rows + python_ways.large(length, turns)
    data["batches"] = batches.table((100, 1000) if quick else batches.ITEMS, 2 if quick else 20)
    data |= counted(100 if quick else 3000)
    return data


def counted(calls: int) -> Row:
    """The counts, or why there are none: also said aloud."""
    try:
        return {"counts": counts.count(calls), "valgrind": counts.version()}
    except counts.CannotCountError as error:
        print(f"no instructions were counted: {error}", file=sys.stderr)
        return {"counts": [], "valgrind": None, "not_counted": str(error)}


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="no patience, nothing written")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    before = render.committed()
    data = measure(options.quick)
    if options.json:
        json.dump(data, sys.stdout, indent=1)
    else:
        print(render.text(data, before["counts"] if before else []))
    if not options.quick:
        render.DATA.write_text(render.written(data))


if __name__ == "__main__":
    main()
