# SPDX-License-Identifier: BSD-3-Clause
"""Random access updates: all ranks add to a table that is spread over all of them.

    python examples/pgas/gups.py [--ranks N] [--table N] [--updates N]

Each update is one remote atomic.  HPCC's benchmark takes XOR, and may lose one update in a hundred;
adapters add, and none is lost here: NumPy does the same updates, and every word must be the same.
"""

import argparse
import time

import numpy as np
from world import Distributed, Launcher, World, parse, parser, run


def updates(rank: int, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(rank)
    return generator.integers(0, args.table, args.updates), generator.integers(
        0, 1 << 32, args.updates
    )


def program(world: World, args: argparse.Namespace) -> tuple[float, np.ndarray]:
    table = Distributed(world, args.table, np.int64)
    first = world.rank * table.block
    table.local[:] = np.arange(first, first + len(table.local))
    mine = updates(world.rank, args)
    world.barrier()
    start = time.perf_counter()
    table.add(*mine)
    world.barrier()
    return time.perf_counter() - start, table.local.copy()


def main(args: argparse.Namespace) -> int:
    launcher = Launcher(program, args)
    results = launcher.run()
    same = False
    if complete := len(results) == args.ranks:
        count = args.ranks * args.updates
        wanted = np.arange(args.table)
        for rank in range(args.ranks):
            np.add.at(wanted, *updates(rank, args))
        seconds = max(seconds for seconds, _part in results.values())
        table = np.concatenate([results[rank][1] for rank in range(args.ranks)])
        print(f"{count} updates of {args.table} words, {args.ranks} ranks")
        print(f"{count / seconds:.0f} updates/s ({count / seconds / 1e9:.6f} GUPS)")
        print(f"words that differ from NumPy's: {np.count_nonzero(table != wanted)}")
        same = np.array_equal(table, wanted)
    return launcher.report({"a rank failed": complete, "the table is not NumPy's": same})


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--table", type=int, default=1 << 16, metavar="N", help="words")
    options.add_argument("--updates", type=int, default=20000, metavar="N", help="of each rank")
    run(lambda: main(parse(options, ["table", "updates"], program)))
