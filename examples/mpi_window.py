# SPDX-License-Identifier: BSD-3-Clause
"""Ranks write into rank 0 all the time; it cuts one of them off, and lets it in again.

    mpiexec -n 4 python examples/mpi_window.py [--writes N] [--picture window.svg]

The other ranks take no part in either and write on.  Status 1 if a write came that was refused, or
if anything else is not as it has to be.  All ranks are on one host: they share its clock.
"""

import argparse
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
from mpi4py import MPI
from timeline import Bar, Mark, draw, picture_path

import ucx_memh as um

VICTIM = 2
WORDS = 512  # of a write, each the number of that write
FIRST, CUT_OFF, AGAIN = range(3)  # what a bar says
RED, BLACK = "#d62728", "black"


class Writer:
    """A rank that writes into rank 0, and what it lived through."""

    def __init__(self, win: um.mpi.Window, comm: MPI.Intracomm) -> None:
        self.win, self.comm, self.rank = win, comm, comm.Get_rank()
        self.local = np.zeros(WORDS, np.uint64)
        self.bars: list[tuple[float, float, int]] = []
        self.marks: list[tuple[float, str]] = []
        self.done = 0

    def write(self, more: Callable[[], bool], phase: int) -> None:
        """As long as more() is true, or until one is refused."""
        begin = time.perf_counter()
        try:
            while more():
                self.local[:] = self.done + 1
                self.win.put(0, self.local, offset=self.rank * self.local.nbytes)
                self.win.flush(0)
                self.done += 1
        finally:
            self.bars.append((begin, time.perf_counter(), phase))

    def refused(self) -> bool:
        """Write until the device says no; after that our own library does, and asks nobody."""
        try:
            self.write(lambda: True, FIRST)
        except um.RemoteAccessError:
            self.marks.append((time.perf_counter(), "refused by the device"))
        try:
            self.win.put(0, self.local, offset=self.rank * self.local.nbytes)
        except um.RevokedError:
            return True
        return False

    def run(self, writes: int) -> bool:
        told = True
        if self.rank == VICTIM:
            told = self.refused()
            begin = time.perf_counter()
            self.win.refresh(0)  # waits for regrant(our rank)
            self.bars.append((begin, time.perf_counter(), CUT_OFF))
            left = count(writes, -1)
            self.write(lambda: next(left) > 0, AGAIN)
        over = self.comm.Ibarrier()  # when all have come so far
        self.write(lambda: not over.Test(), FIRST if self.rank != VICTIM else AGAIN)
        return told


class Owner:
    """Rank 0: it looks at its memory, where all the others write."""

    def __init__(self, win: um.mpi.Window, comm: MPI.Intracomm) -> None:
        self.win, self.comm = win, comm
        self.numbers = np.frombuffer(win.local, np.uint64).reshape(-1, WORDS)
        self.bars: list[tuple[float, float, int]] = []
        self.marks: list[tuple[float, str]] = []
        self.done, self.late, self.took = 0, 0, 0.0

    def wait_for(self, rank: int, writes: int) -> None:
        """Until that rank has written so often more."""
        until = int(self.numbers[rank, -1]) + writes
        while self.numbers[rank, -1] < until:
            time.sleep(0.0002)

    def run(self, writes: int) -> bool:
        self.wait_for(VICTIM, writes)
        begin = time.perf_counter()
        self.win.revoke(VICTIM)
        end = time.perf_counter()
        self.took = end - begin
        self.marks.append((end, f"rank {VICTIM} revoked"))
        before = self.numbers[VICTIM].copy()
        self.wait_for(1, writes)  # the others are not held up
        self.late = int(np.count_nonzero(self.numbers[VICTIM] != before))
        self.win.regrant(VICTIM)
        self.marks.append((time.perf_counter(), f"rank {VICTIM} let in again"))
        self.comm.Ibarrier().Wait()
        return self.late == 0


def picture(path: Path, ranks: int, bars: tuple, marks: tuple) -> None:
    draw(
        path,
        f"Rank 0 revokes (r) the key of rank {VICTIM} and grants a new one (g); \u00d7: its write, "
        "refused by the device",
        [f"rank {rank}" for rank in range(ranks)],
        ["writes into rank 0", "is cut off", "writes again"],
        [
            Bar(rank, begin, end, phase, f"{(end - begin) * 1e3:.2f} ms")
            for rank, each in enumerate(bars)
            for begin, end, phase in each
        ],
        [
            Mark(rank, at, *look(words), words)
            for rank, each in enumerate(marks)
            for at, words in each
        ],
    )
    print(f"wrote {path}")


def look(words: str) -> tuple[str, str]:
    if "refused" in words:
        return "\u00d7", RED
    return ("r", RED) if "revoked" in words else ("g", BLACK)


def main(args: argparse.Namespace) -> int:
    comm = MPI.COMM_WORLD
    rank, ranks = comm.Get_rank(), comm.Get_size()
    with um.mpi.Window(comm, WORDS * 8 * ranks if rank == 0 else 0) as win:
        actor = Writer(win, comm) if rank else Owner(win, comm)
        good = actor.run(args.writes)
        win.fence()
        told = comm.gather((good, actor.done, actor.bars, actor.marks))
        if told is None or not isinstance(actor, Owner):
            return int(not good)
        fine, done, bars, marks = zip(*told, strict=True)
        print(win)
        if args.picture:
            picture(args.picture, ranks, bars, marks)
        whole = all((actor.numbers[each] == done[each]).all() for each in range(1, ranks))
        print(f"{sum(done)} writes; revoke took {actor.took * 1e6:.0f} us")
        print(f"words of rank {VICTIM} that came while it was cut off: {actor.late}")
        print(f"the last write of each rank is there, whole: {'yes' if whole else 'NO'}")
        return int(not (whole and all(fine)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    option = parser.add_argument
    option("--writes", type=int, default=100, metavar="N", help="between two steps (%(default)s)")
    option("--picture", type=picture_path, metavar="SVG", help="draw what each rank did when")
    args = parser.parse_args()
    if args.writes < 1:
        parser.error("--writes wants at least 1")
    if MPI.COMM_WORLD.Get_size() <= VICTIM:
        parser.error(f"want at least {VICTIM + 1} ranks: mpiexec -n 4 python {parser.prog}")
    return args


if __name__ == "__main__":
    sys.exit(main(arguments()))
