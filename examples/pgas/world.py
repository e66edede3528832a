# SPDX-License-Identifier: BSD-3-Clause
"""A small PGAS runtime: ranks, a symmetric heap, distributed arrays on it.

Each rank registers its heap once and derives a key for each other rank, bound to the connection to
it.  A rank that is lost is cut off by `World.revoke`: one key of each survivor goes, nothing else.

The launcher, the parent of the ranks, passes addresses and keys around, is the barrier, and says
who is lost: what PMIx or Slurm do for a runtime.  Half of the ranks may be on another host, under
a parent of their own that does what the launcher says.
"""

import argparse
import mmap
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

import ucx_memh as um

# What all examples have is one folder up.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from device import announce
from link import PATIENCE, Link, accept, add_hosts, listen, pair, reach, spawn
from link import run as run

RIGHTS = um.MemFlag.REMOTE_GET | um.MemFlag.REMOTE_PUT | um.MemFlag.REMOTE_ATOMIC
# What an access to a rank that is no more may give; the next barrier says who it is.
GONE = (um.PeerGoneError, um.UnreachableError, um.FlushedError)
UNDER_WAY = 32  # atomics of a rank at a time
OUR_OWN = {"backend", "listen", "connect", "picture"}  # arguments of one host alone
LINE = 64  # what begins in the heap is aligned to this


class RanksLost(Exception):
    """Raised by the same barrier in all ranks that are left."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"lost: {ranks}")
        self.ranks = ranks


class World:
    """What a rank has: its number, its heap, connections and keys to the heaps of all others."""

    def __init__(self, rank: int, launcher: Link, args: argparse.Namespace) -> None:
        self.rank, self.size = rank, args.ranks
        self.alive = list(range(args.ranks))
        self._launcher = launcher
        self.notes: list[tuple[str, float, float]] = []  # for a picture
        self.md = um.open_md(args.backend)
        self.heap = mmap.mmap(-1, args.heap)
        self._used = 0
        self.base = self.md.mem_reg(self.heap, um.MemFlag.DERIVED_ONLY)
        self.ends = {peer: self.md.endpoint() for peer in self.alive}
        # To ourselves too: an adapter's atomics are atomic among themselves only.
        loop = self.md.endpoint()
        addresses = self.gather([end.address for end in self.ends.values()])
        for peer, end in self.ends.items():
            end.connect(loop.address if peer == rank else addresses[peer][rank])
        loop.connect(self.ends[rank].address)
        users = {**self.ends, rank: loop}
        self.wins = {
            peer: self.base.derive(flags=RIGHTS, endpoint=end) for peer, end in users.items()
        }
        keys = self.gather([win.mkey_pack() for win in self.wins.values()])
        self.rkeys = {peer: self.md.rkey_unpack(keys[peer][rank]) for peer in self.alive}

    def gather(self, value: Any) -> dict[int, Any]:
        """What each rank gave.  RanksLost: some will never come; the others got none of it."""
        self._launcher.send(("gather", value))
        alive, values = self._launcher.receive(None)
        if lost := [rank for rank in self.alive if rank not in alive]:
            self.alive = alive
            raise RanksLost(lost)
        return dict(values)

    def barrier(self) -> None:
        self.gather(None)

    def tell(self, event: Any) -> None:
        """Something for the launcher's `on_event`."""
        self._launcher.send(("event", event))

    def array(self, shape: int | tuple[int, ...], dtype: Any) -> "Array":
        """Symmetric: all ranks must make the same arrays in the same order."""
        array = Array(self, self._used, shape, np.dtype(dtype))
        self._used += -(-array.local.nbytes // LINE) * LINE
        return array

    def revoke(self, rank: int) -> float:
        """Cut a rank off: when this returns, no write of its lands here any more.  Seconds."""
        start = time.monotonic()
        self.wins[rank].invalidate()
        end = time.monotonic()
        self.notes.append((f"revoked {rank}", end, end))
        return end - start

    def close(self) -> None:
        self.md.close(force=True)


class Array:
    """A part of every rank's heap, at the same place: `local` is ours."""

    def __init__(
        self, world: World, offset: int, shape: int | tuple[int, ...], dtype: np.dtype
    ) -> None:
        count = prod(shape) if isinstance(shape, tuple) else shape
        if offset + count * dtype.itemsize > len(world.heap):
            raise MemoryError(f"the heap has {len(world.heap)} bytes, and they are used up")
        self.world = world
        self.offset = offset
        self.local = np.frombuffer(world.heap, dtype, count, offset).reshape(shape)

    def _remote(self, rank: int, at: int) -> tuple[um.Rkey, int]:
        rkey = self.world.rkeys[rank]
        return rkey, rkey.address + self.offset + at * self.local.itemsize

    def put(self, rank: int, at: int, data: np.ndarray) -> None:
        """Into a rank's part, from its element `at` on (counted as if it were flat)."""
        self.world.ends[rank].put(*self._remote(rank, at), np.ascontiguousarray(data))

    def get(self, rank: int, at: int, count: int) -> np.ndarray:
        into = np.empty(count, self.local.dtype)
        self.world.ends[rank].get(*self._remote(rank, at), into)
        return into

    def add_nb(self, rank: int, at: int, value: int) -> um.Operation:
        """Atomically, to 64-bit integers."""
        return self.world.ends[rank].fetch_add_nb(*self._remote(rank, at), value)


class Distributed:
    """An array whose elements are spread over all ranks, in blocks: a global index says which."""

    def __init__(self, world: World, length: int, dtype: Any) -> None:
        self.length = length
        self.block = -(-length // world.size)
        self.part = world.array(self.block, dtype)
        first = min(world.rank * self.block, length)
        self.local = self.part.local[: min(self.block, length - first)]

    def __getitem__(self, index: int) -> Any:
        return self.part.get(*divmod(index, self.block), 1)[0]

    def __setitem__(self, index: int, value: Any) -> None:
        self.part.put(*divmod(index, self.block), np.array([value], self.part.local.dtype))

    def add(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Add to elements anywhere, whoever else does; many at a time are under way."""
        ranks, places = np.divmod(indices, self.block)
        under_way: deque[um.Operation] = deque()
        for rank, at, value in zip(ranks.tolist(), places.tolist(), values.tolist(), strict=True):
            if len(under_way) == UNDER_WAY:
                under_way.popleft().wait()
            under_way.append(self.part.add_nb(rank, at, value))
        for operation in under_way:
            operation.wait()

    def all(self) -> np.ndarray:
        """Everything, here: a get from each rank."""
        ranks = range(self.part.world.size)
        return np.concatenate([self.part.get(r, 0, self.block) for r in ranks])[: self.length]


# ---- the launcher ----


class Host:
    """Ranks on this host, each a process with its end of a link to the launcher."""

    def __init__(self, program: Callable, args: argparse.Namespace, links: dict[int, Link]) -> None:
        self._processes = {}
        for rank, link in links.items():
            self._processes[rank] = spawn(_run, program, rank, link, args)
            link.close()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self._processes[rank].pid, number)

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()


class Launcher:
    """Starts the ranks and hears them; `on_event(launcher, rank, event)` is the program's."""

    def __init__(
        self, program: Callable, args: argparse.Namespace, on_event: Callable | None = None
    ) -> None:
        self.on_event = on_event
        self.results: dict[int, Any] = {}
        self.alive = set(range(args.ranks))
        self._gathered: dict[int, Any] = {}
        self._held = False
        self._links: dict[Link, int] = {}
        self._there: Link | None = None  # the other host, and the first of its ranks
        self._half = args.ranks // 2 if args.listen else args.ranks
        if args.listen:
            self._invite(args)
        ends = {rank: pair() for rank in range(self._half)}
        self._links.update((ours, rank) for rank, (ours, _) in ends.items())
        self._here = Host(program, args, {rank: theirs for rank, (_, theirs) in ends.items()})

    def _invite(self, args: argparse.Namespace) -> None:
        """Wait for the other host, which comes again for each of its ranks."""
        with listen(args.listen) as server:
            print("waiting for the other host", flush=True)
            self._there = accept(server, None)
            theirs = range(self._half, args.ranks)
            told = {name: value for name, value in vars(args).items() if name not in OUR_OWN}
            self._there.send((list(theirs), told))
            self._links.update((accept(server), rank) for rank in theirs)

    def run(self) -> dict[int, Any]:
        """What program(world, args) returned in each rank; those that were lost are not in it."""
        try:
            while self._links:
                ready = wait(list(self._links), PATIENCE)
                if not ready:
                    raise TimeoutError(f"no rank said anything for {PATIENCE} s")
                for link in ready:
                    self._hear(link)
        finally:
            self._here.kill()
        return self.results

    def _hear(self, link: Link) -> None:
        rank = self._links[link]
        try:
            what, value = link.receive()
        except (EOFError, ConnectionError):
            del self._links[link]
            self.lose(rank)
            return
        if what == "event":
            assert self.on_event is not None
            self.on_event(self, rank, value)
        elif what == "result":
            self.results[rank] = value
        elif rank in self.alive:  # or it has not heard yet that it is lost
            self._gathered[rank] = value
            self._answer()

    def _answer(self) -> None:
        if self._gathered and not self._held and self.alive <= set(self._gathered):
            values, self._gathered = list(self._gathered.items()), {}
            for link, rank in self._links.items():
                if rank in self.alive:
                    with suppress(ConnectionError):  # its end is heard next, and then it is lost
                        link.send((sorted(self.alive), values))

    def lose(self, rank: int) -> None:
        """It does not take part any more, whether it knows or not."""
        self.alive.discard(rank)
        self._gathered.pop(rank, None)
        self._answer()

    def hold(self, held: bool) -> None:
        """While it is held, no barrier ends."""
        self._held = held
        self._answer()

    def signal(self, rank: int, number: signal.Signals) -> None:
        if rank < self._half:
            self._here.signal(rank, number)
        else:
            assert self._there is not None
            self._there.send(("signal", rank, number))

    def report(self, checks: dict[str, bool]) -> int:
        """Print what does not hold, also on the other host; the exit status."""
        failed = [what for what, good in checks.items() if not good]
        lines = [f"FAILED: {what}" for what in failed]
        lines.append(f"{len(checks) - len(failed)} of {len(checks)} checks hold")
        print(*lines, sep="\n")
        status = 1 if failed else 0
        if self._there is not None:
            with suppress(ConnectionError):  # a host may be lost, too
                self._there.send(("verdict", status, lines))
        return status


def _run(program: Callable, rank: int, link: Link, args: argparse.Namespace) -> None:
    """A rank's process."""
    try:
        world = World(rank, link, args)
        result = program(world, args)
        world.barrier()  # somebody may still read our heap
    except (RanksLost, *GONE) as error:  # and this program does not go on without them
        raise SystemExit(f"rank {rank} gives up: {error}") from None
    link.send(("result", result))
    world.close()


def serve(program: Callable, args: argparse.Namespace) -> int:
    """The ranks that a launcher wants on this host, and their signals; its verdict is ours."""
    with reach(args.connect) as launcher:
        ranks, told = launcher.receive(None)
        vars(args).update(told)
        host = Host(program, args, {rank: reach(args.connect) for rank in ranks})
        print(f"ranks {', '.join(map(str, ranks))} of {args.ranks}", flush=True)
        try:
            while True:
                match launcher.receive(None):
                    case ("signal", rank, number):
                        host.signal(rank, number)
                    case ("verdict", status, lines):
                        print("The launcher says:", *lines, sep="\n")
                        return status
        except (EOFError, ConnectionError):
            raise SystemExit("the launcher is gone") from None
        finally:
            host.kill()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that all programs have."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    option = parser.add_argument
    option("--backend", default="ib_mlx5", metavar="NAME", help="component, or component/device")
    option("--ranks", type=int, default=4, metavar="N", help="processes (%(default)s)")
    option("--heap", type=int, default=64 << 20, metavar="BYTES", help="of each rank (%(default)s)")
    add_hosts(parser, "half of the ranks")
    return parser


def parse(
    parser: argparse.ArgumentParser, positive: Iterable[str], program: Callable
) -> argparse.Namespace:
    """Check what all have in common; status 2 with a reason if it cannot work.

    With --connect it does what there is to do, and exits.
    """
    args = parser.parse_args()
    for name in ("ranks", "heap", *positive):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.listen and args.ranks < 2:
        parser.error("--listen needs at least 2 ranks: half of them are on the other host")
    announce(parser, args.backend, "no rank can be cut off")
    sys.stdout.flush()
    if args.connect:
        sys.exit(serve(program, args))
    return args
