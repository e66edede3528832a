# SPDX-License-Identifier: BSD-3-Clause
"""A histogram: each rank counts its own numbers, and adds to bins that are spread over all.

    python examples/pgas/histogram.py [--ranks N] [--bins N] [--numbers N]
"""

import argparse
import time

import numpy as np
from world import Distributed, Launcher, World, parse, parser, run

RANGE = (-4.0, 4.0)


def numbers(rank: int, args: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(args.numbers)


def program(world: World, args: argparse.Namespace) -> tuple[float, np.ndarray]:
    bins = Distributed(world, args.bins, np.int64)
    mine = numbers(world.rank, args)
    world.barrier()
    start = time.perf_counter()
    counts, _edges = np.histogram(mine, args.bins, RANGE)
    (hit,) = np.nonzero(counts)  # one atomic for a bin and not for a number
    bins.add(hit, counts[hit])
    world.barrier()
    seconds = time.perf_counter() - start
    return seconds, bins.all()  # each rank reads it all, and all must see the same


def main(args: argparse.Namespace) -> int:
    launcher = Launcher(program, args)
    results = launcher.run()
    everything = np.concatenate([numbers(rank, args) for rank in range(args.ranks)])
    wanted, _edges = np.histogram(everything, args.bins, RANGE)
    if results:
        seconds = max(seconds for seconds, _bins in results.values())
        print(f"{everything.size} numbers in {args.bins} bins, {args.ranks} ranks")
        print(f"{everything.size / seconds / 1e6:.1f} million numbers/s")
        wrong = sum(np.count_nonzero(bins != wanted) for _seconds, bins in results.values())
        print(f"bins that differ from NumPy's, in what all ranks see: {wrong}")
    return launcher.report(
        {
            "a rank failed": len(results) == args.ranks,
            "the histogram is not NumPy's": bool(results)
            and all(np.array_equal(bins, wanted) for _seconds, bins in results.values()),
        }
    )


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--bins", type=int, default=1000, metavar="N")
    options.add_argument("--numbers", type=int, default=500_000, metavar="N", help="of each rank")
    run(lambda: main(parse(options, ["bins", "numbers"], program)))
