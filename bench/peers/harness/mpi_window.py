# SPDX-License-Identifier: BSD-3-Clause
"""A window over the ranks of an mpiexec: ours, or mpi4py's; "ours" or "win" is the argument.

Rank 0 is asked and works on rank 1.  The others sleep between looks at MPI, or on few cores they
would take the processor from what is measured; what is collective all ranks do, as often.
"""

import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from bench.peers.harness import serving

COMM = MPI.COMM_WORLD
ME = COMM.Get_rank()
MOVED = 1 << 20
NAP = 2e-4  # seconds
TOGETHER = ("fence", "cut")  # what takes all ranks

local = mmap.mmap(-1, MOVED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Ours:
    words = {
        "put": ("`win.put` and `flush`", "win.put(1, part); win.flush(1)"),
        "get": ("`win.get` and `flush`", "win.get(1, part); win.flush(1)"),
        "fetch_add": ("`win.fetch_add`", "win.fetch_add(1, 1)"),
        "compare_swap": ("`win.compare_swap`", "win.compare_swap(1, 0, 0)"),
        "fence": ("`win.fence`", "win.fence()"),
    }

    def __init__(self) -> None:
        import ucx_memh as um

        self.um = um
        self.window = um.mpi.Window(COMM, MOVED)
        self.window.put(ME, bytes(MOVED))  # so that the pages are there
        self.window.fence()

    def names(self, length: int) -> dict[str, Any]:
        return {"win": self.window, "part": self.window.md.mem_reg(memoryview(local)[:length])}

    def cut(self, length: int, count: int) -> float:
        """Revoke the key of rank 1, and, untimed, give it a new one."""
        with self.um.mpi.Window(COMM, length) as window:
            spent = 0.0
            for _ in range(count):
                if ME == 0:
                    start = time.perf_counter()
                    window.revoke(1)
                    spent += time.perf_counter() - start
                    window.regrant(1)
                if ME == 1:
                    window.refresh(0)
            return spent * 1e9 / count

    def close(self) -> None:
        self.window.close()


class Win:
    words = {
        "put": ("`Win.Put` and `Flush`", "win.Put(part, 1); win.Flush(1)"),
        "get": ("`Win.Get` and `Flush`", "win.Get(part, 1); win.Flush(1)"),
        "fetch_add": (
            "`Win.Fetch_and_op` and `Flush`",
            "win.Fetch_and_op(one, old, 1, 0, add); win.Flush(1)",
        ),
        "compare_swap": (
            "`Win.Compare_and_swap` and `Flush`",
            "win.Compare_and_swap(zero, zero, old, 1); win.Flush(1)",
        ),
        "fence": ("`Win.Flush_all` and `Barrier`", "win.Flush_all(); barrier()"),
    }

    def __init__(self) -> None:
        self.window = MPI.Win.Allocate(MOVED, comm=COMM)
        self.window.Lock_all()
        self.window.Put(memoryview(bytes(MOVED)), ME)
        self.window.Flush(ME)
        COMM.Barrier()

    def names(self, length: int) -> dict[str, Any]:
        def number(value: int) -> list[Any]:
            return [bytearray(value.to_bytes(8, sys.byteorder)), 1, MPI.UINT64_T]

        names = {"win": self.window, "part": memoryview(local)[:length], "add": MPI.SUM}
        names |= {"barrier": COMM.Barrier}
        return names | {"one": number(1), "zero": number(0), "old": number(0)}

    def cut(self, length: int, count: int) -> float:
        """Free the window and make it again without rank 1; untimed, again with all."""
        memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        rest = COMM.Split(MPI.UNDEFINED if ME == 1 else 0)
        window = MPI.Win.Create(memory, comm=COMM)
        spent = 0.0
        for _ in range(count):
            COMM.Barrier()
            start = time.perf_counter()
            window.Free()
            if ME != 1:
                window = MPI.Win.Create(memory, comm=rest)
            spent += time.perf_counter() - start
            if ME != 1:
                window.Free()
            window = MPI.Win.Create(memory, comm=COMM)
        window.Free()
        if ME != 1:
            rest.Free()
        return spent * 1e9 / count

    def close(self) -> None:
        self.window.Unlock_all()
        self.window.Free()


def prepare(side: Any, operation: str) -> Callable[[int], serving.Loop]:
    def ready(length: int) -> serving.Loop:
        if operation == "cut":
            return lambda count: side.cut(length, count)
        return serving.timed(side.words[operation][1], **side.names(length))

    return ready


def tell(operation: str, ready: Callable[[int], serving.Loop]) -> Callable[[int], serving.Loop]:
    """For rank 0: the others are told before each loop, if it takes them."""

    def told(length: int) -> serving.Loop:
        loop = ready(length)

        def run(count: int) -> float:
            if operation in TOGETHER:
                for rank in range(1, COMM.Get_size()):
                    COMM.send((operation, length, count), rank)
            return loop(count)

        return run

    return told


def follow(ready: dict[str, Callable[[int], serving.Loop]]) -> None:
    while True:
        while not COMM.Iprobe(0):
            time.sleep(NAP)
        order = COMM.recv(source=0)
        if order is None:
            return
        operation, length, count = order
        ready[operation](length)(count)


def main() -> None:
    side: Any = Ours() if sys.argv[1] == "ours" else Win()
    ready = {name: prepare(side, name) for name in [*side.words, "cut"]}
    if ME:
        follow(ready)
    else:
        words = {name: words for name, (words, _) in side.words.items()}
        words["cut"] = "`win.revoke`" if sys.argv[1] == "ours" else "`Win.Free` and `Create`"
        about = serving.versions("mpi4py")
        about["library"] = " ".join(MPI.Get_library_version().split(",")[0].split())
        serving.serve({n: (words[n], tell(n, ready[n])) for n in ready}, about)
        for rank in range(1, COMM.Get_size()):
            COMM.send(None, rank)
    side.close()


if __name__ == "__main__":
    main()
