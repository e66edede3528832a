# SPDX-License-Identifier: BSD-3-Clause
"""Heat spreads over a grid whose rows are spread over the ranks; one of them may be lost.

    python examples/pgas/stencil.py [--ranks N] [--fail kill|hang] [--picture stencil.svg]
    python examples/pgas/stencil.py --listen HOST:PORT [...]   # here, and half of the ranks there:
    python examples/pgas/stencil.py --connect HOST:PORT

Each step, a rank puts its edge rows into its neighbours' memory.  Now and then it puts all of its
rows into the next rank's: a checkpoint.  With --fail a rank goes mad in the middle: it writes
rubbish to all others until it is killed, or is stopped and taken for dead (hang).  The others
revoke its keys, share its rows out of the checkpoint, and finish.  The one that hung wakes up and
writes on with its old keys: nothing of that arrives.  The result must be NumPy's, to the last bit.
"""

import argparse
import signal
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
from world import GONE, Launcher, RanksLost, World, parse, parser, run

import ucx_memh as um

HOT = 100.0  # the row above the grid; all around it else is 0


def relax(grid: np.ndarray) -> np.ndarray:
    """The next values of all but the outermost cells."""
    return 0.25 * (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:])


class Stencil:
    """A rank's part: rows `low` to `high` of the grid, with a row of each neighbour around."""

    def __init__(self, world: World, args: argparse.Namespace) -> None:
        self.world, self.args = world, args
        # As many as it may have to take over.
        most = -(-args.rows // max(world.size - bool(args.fail), 1))
        self.grid = world.array((most + 2, args.columns), float)
        # The last checkpoint and the one before, which counts until the last is complete.
        self.mine = world.array((2, most, args.columns), float)
        self.copy = world.array((2, most, args.columns), float)  # of the rank before us
        self.mail = world.array(world.size, np.int64)  # where a mad one counts
        self.frozen: np.ndarray | None = None
        self.step, self.saved, self.slot = 0, 0, 0
        self.share()

    def share(self) -> None:
        """Divide the rows among those who are left."""
        ranks = self.world.alive
        bounds = [self.args.rows * n // len(ranks) for n in range(len(ranks) + 1)]
        self.parts = dict(zip(ranks, pairwise(bounds), strict=True))
        self.low, self.high = self.parts[self.world.rank]
        self.rows = self.grid.local[: self.high - self.low + 2]
        self.rows[:] = 0  # whatever rubbish had come
        if self.low == 0:
            self.rows[0] = HOT

    def beside(self, way: int) -> int | None:
        """The rank above (-1) or below (1)."""
        ranks = self.world.alive
        at = ranks.index(self.world.rank) + way
        return ranks[at] if 0 <= at < len(ranks) else None

    def keeper(self, ranks: list[int], rank: int) -> int:
        """Who has the copy of a rank's rows."""
        return ranks[(ranks.index(rank) + 1) % len(ranks)]

    def exchange(self) -> None:
        above, below = self.beside(-1), self.beside(1)
        if above is not None:
            low, high = self.parts[above]
            self.put(above, (high - low + 1) * self.args.columns, self.rows[1])
        if below is not None:
            self.put(below, 0, self.rows[-2])
        self.world.barrier()

    def put(self, rank: int, at: int, data: np.ndarray) -> None:
        with suppress(GONE):  # the next barrier tells all of us, at the same place
            self.grid.put(rank, at, data)

    def save(self) -> None:
        """A checkpoint; the one before is good until all have made it."""
        slot, world = 1 - self.slot, self.world
        self.mine.local[slot, : self.high - self.low] = self.rows[1:-1]
        keeper = self.keeper(world.alive, world.rank)
        if keeper != world.rank:
            with suppress(GONE):
                self.copy.put(keeper, slot * self.copy.local[0].size, self.rows[1:-1])
        world.barrier()
        self.slot, self.saved = slot, self.step
        self.saved_parts = self.parts

    def restore(self) -> None:
        """Go back to the checkpoint, and take a share of what the lost rank had."""
        world, columns = self.world, self.args.columns
        self.share()
        for rank, (low, high) in self.saved_parts.items():
            first, last = max(low, self.low), min(high, self.high)
            if first >= last:
                continue
            where = self.mine
            if rank not in world.alive:
                rank, where = self.keeper(list(self.saved_parts), rank), self.copy
            at = self.slot * where.local[0].size + (first - low) * columns
            part = where.get(rank, at, (last - first) * columns)
            self.rows[1 + first - self.low : 1 + last - self.low] = part.reshape(-1, columns)
        self.step = self.saved

    def run(self) -> None:
        world, args = self.world, self.args
        while self.step < args.steps:
            start = time.monotonic()
            if self.step % args.every == 0:
                self.save()
                world.notes.append(("save", start, start := time.monotonic()))
            self.exchange()
            if args.fail and world.rank == args.victim and self.step == args.at:
                world.notes.append(("step", start, time.monotonic()))
                go_mad(self)
            new = relax(self.rows)
            world.barrier()  # all have used their neighbours' rows
            self.rows[1:-1, 1:-1] = new
            world.notes.append(("step", start, time.monotonic()))
            self.step += 1

    def cut_off(self, lost: list[int]) -> float:
        """Revoke what the lost ranks may do here; from then on nothing of theirs arrives."""
        seconds = sum(self.world.revoke(rank) for rank in lost)
        self.frozen = self.mail.local.copy()
        self.world.tell("revoked")
        return seconds


def go_mad(stencil: Stencil) -> None:
    """Write rubbish to all others without end, as long as any of them lets us."""
    world = stencil.world
    rubbish = np.full(stencil.args.columns, np.nan)
    refused: dict[int, str] = {}
    count = 0
    while len(refused) < world.size - 1:
        count += 1
        for rank in range(world.size):
            if rank == world.rank or rank in refused:
                continue
            try:
                stencil.grid.put(rank, 0, rubbish)
                stencil.mail.put(rank, world.rank, np.array([count]))
            except um.MemhError as error:
                refused[rank] = um.errors.status_name(error.status)
        if count == 20:
            world.tell(("mad", world.notes))
    world.tell(("refused", refused, time.monotonic()))
    time.sleep(60)  # the launcher ends us


def program(world: World, args: argparse.Namespace) -> dict[str, Any]:
    stencil = Stencil(world, args)
    seconds, lost, began, again = 0.0, [], 0, 0
    world.barrier()  # all are ready for their neighbours' rows
    while True:
        try:
            if lost:
                began = stencil.step
                seconds = stencil.cut_off(lost)
                world.barrier()  # all have cut it off
                stencil.restore()
                again = stencil.step
                world.barrier()  # all have read what they need of the checkpoint
                lost = []
            stencil.run()
            break
        except RanksLost as error:
            if len(world.alive) < world.size - bool(args.fail):
                raise  # there is no room for their rows, or no copy of them
            lost = error.ranks
    if args.fail == "hang":
        world.tell("done")
        world.barrier()  # until the late writes have been tried
    late = 0
    if stencil.frozen is not None:
        late = int(np.count_nonzero(stencil.mail.local != stencil.frozen))
    return {
        "low": stencil.low,
        "rows": stencil.rows[1:-1].copy(),
        "seconds": seconds,
        "lost at": began,
        "again from": again,
        "before": int(stencil.mail.local.max()),
        "late": late,
        "notes": world.notes,
    }


class Fate:
    """What becomes of the rank that goes mad: its parent kills it, or stops it for a while."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.notes: list[tuple[str, float, float]] = []  # what it did until then
        self.refused: dict[int, str] = {}
        self.revoked = 0

    def event(self, launcher: Launcher, rank: int, event: Any) -> None:
        hang = self.args.fail == "hang"
        match event:
            case ("mad", notes):
                launcher.signal(rank, signal.SIGSTOP if hang else signal.SIGKILL)
                self.note("stopped" if hang else "killed", time.monotonic(), notes)
                launcher.lose(rank)
            case "revoked":
                self.revoked += 1
                if hang and self.revoked == len(launcher.alive):
                    launcher.signal(self.args.victim, signal.SIGCONT)
                    self.note("woken", time.monotonic())
            case ("refused", refused, at):
                self.refused = refused
                self.note("refused", at)
                launcher.signal(rank, signal.SIGKILL)
                launcher.hold(False)
            case "done":
                # The others keep their memory until the late writes have been tried.
                launcher.hold(not self.refused)

    def note(self, what: str, at: float, before: list | None = None) -> None:
        self.notes += [*(before or []), (what, at, at)]


def main(args: argparse.Namespace) -> int:
    fate = Fate(args)
    launcher = Launcher(program, args, fate.event)
    results = launcher.run()
    wanted = np.zeros((args.rows + 2, args.columns))
    wanted[0] = HOT
    for _ in range(args.steps):
        wanted[1:-1, 1:-1] = relax(wanted)
    left = args.ranks - bool(args.fail)
    parts = sorted(results.values(), key=lambda part: part["low"])
    got = np.concatenate([part["rows"] for part in parts]) if parts else np.empty(0)
    same = np.array_equal(got, wanted[1:-1])
    print(f"{args.steps} steps of {args.rows} x {args.columns}, {args.ranks} ranks")
    checks = {"a rank failed": len(results) == left, "the grid is not NumPy's": same}
    if args.fail and parts:
        worst = max(part["seconds"] for part in parts)
        what = "killed" if args.fail == "kill" else "stopped and taken for dead"
        began, again = parts[0]["lost at"], parts[0]["again from"]
        late = sum(part["late"] for part in parts)
        before = min(part["before"] for part in parts)
        print(f"rank {args.victim} goes mad in step {began}, and is {what}")
        print(f"revoked by {fate.revoked} others, each in {worst * 1e6:.0f} us at most")
        print(f"its writes: {before} to each had come before that, {late} came after it")
        if args.fail == "hang":
            print(f"it wakes up and writes on: {', '.join(fate.refused.values())}")
        print(f"{left} left: back to step {again}, its rows shared among them, and to the end")
        checks["a survivor did not revoke its key"] = fate.revoked == left
        checks["it was not in the middle of its writes"] = before > 0
        checks["a late write arrived"] = late == 0
        if args.fail == "hang":
            refusals = set(fate.refused.values())
            checks["a late write was not refused"] = refusals == {"REMOTE_ACCESS"}
    print(f"the grid is NumPy's, to the last bit: {same}")
    if args.picture and parts:
        picture(args, {rank: part["notes"] for rank, part in results.items()}, fate.notes)
    return launcher.report(checks)


def picture(args: argparse.Namespace, notes: dict[int, list], fate: list) -> None:
    """What each rank did when; of the time around the loss, if there was one."""
    from timeline import Bar, Mark, draw

    signs = {"killed": "\u2020", "stopped": "\u25a0", "woken": "\u25b6", "refused": "\u00d7"}
    notes = {**notes, args.victim: fate} if args.fail else notes
    around = [end for what, _start, end in fate if what in signs]
    low, high = (min(around) - 0.02, max(around) + 0.02) if around else (0, float("inf"))
    bars, marks = [], []
    for rank, what, start, end in (
        (rank, *note) for rank, each in notes.items() for note in each if low <= note[1] <= high
    ):
        if what in ("step", "save"):
            bars.append(Bar(rank, start, end, what == "save", what))
        else:
            sign = signs.get(what, "R")
            marks.append(Mark(rank, start, sign, "#d62728", f"rank {rank}: {what}"))
    draw(
        args.picture,
        "R: this rank revoked the lost one's key; \u2020 killed, \u25a0 stopped, \u25b6 woken, "
        "\u00d7 its late writes refused",
        [f"rank {rank}" for rank in range(args.ranks)],
        ["a step", "a checkpoint"],
        bars,
        marks,
    )
    print(f"wrote {args.picture}")


def arguments() -> argparse.Namespace:
    from timeline import picture_path

    options = parser(__doc__)
    option = options.add_argument
    option("--rows", type=int, default=240, metavar="N", help="(%(default)s)")
    option("--columns", type=int, default=256, metavar="N", help="(%(default)s)")
    option("--steps", type=int, default=60, metavar="N", help="(%(default)s)")
    option("--every", type=int, default=8, metavar="N", help="steps to a checkpoint (%(default)s)")
    option("--fail", choices=["kill", "hang"], help="lose a rank in the middle, in this way")
    option("--victim", type=int, metavar="RANK", help="which one (default: the last)")
    option("--picture", type=picture_path, metavar="SVG", help="draw what each rank did when")
    args = parse(options, ["rows", "columns", "steps", "every"], program)
    args.victim = args.ranks - 1 if args.victim is None else args.victim
    args.at = args.steps // 2
    if args.fail and args.ranks < 2:
        options.error("--fail needs at least 2 ranks: one is lost, the others finish")
    if not 0 <= args.victim < args.ranks:
        options.error(f"--victim: there is no rank {args.victim}")
    if args.listen and args.picture:
        options.error("--picture needs one clock, which two hosts do not have")
    if args.rows < args.ranks or args.columns < 3:
        options.error("the grid needs a row for each rank, and 3 columns")
    return args


if __name__ == "__main__":
    run(lambda: main(arguments()))
