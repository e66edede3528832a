# SPDX-License-Identifier: BSD-3-Clause
"""get and put of another process's memory over cma: ours from Python and in C, and bare.

The owner is on the first CPU, this one on the last.  ucx_perftest's server turns in a loop all the
while; so that both have the same neighbour, something does so on the owner's CPU here as well.
"""

import ctypes as c
import os
import subprocess
import sys
from collections.abc import Callable

import ucx_memh as um
from bench.bare import BUILD
from bench.hotpath.native import Loops, pointer
from bench.owner import Owner, region
from bench.peers.harness import serving

TURNS = """
import os, select
while os.read(0, 1):  # a byte begins, the next one ends
    while not select.select([0], [], [], 0)[0]:
        pass
    os.read(0, 1)
"""

cpus = sorted(os.sched_getaffinity(0))


class Data:
    def __init__(self, owner: Owner, turning: subprocess.Popen, largest: int) -> None:
        self.loops = Loops(BUILD)
        self.md = um.open_md("cma")
        self.link = owner.link(self.md)
        self.memory = region(largest)
        self.where = c.c_void_p(serving.address(self.memory))
        self.turning = turning
        self.kept: list[um.Memh] = []

    def beside(self, loop: serving.Loop) -> serving.Loop:
        """While the other CPU turns, and warmed up as ucx_perftest does it."""
        pipe = self.turning.stdin
        assert pipe is not None

        def both(count: int) -> float:
            pipe.write(b"x")
            try:
                loop(min(count, serving.WARMUP))
                return loop(count)
            finally:
                pipe.write(b"x")

        return both

    def python(self, way: str) -> Callable[[int], serving.Loop]:
        def prepare(length: int) -> serving.Loop:
            self.kept.append(self.md.mem_reg(memoryview(self.memory)[:length]))
            names = {"rkey": self.link.rkey, "remote": self.link.address, "local": self.kept[-1]}
            move = getattr(self.link.ep, way)
            return self.beside(serving.timed("move(rkey, remote, local)", move=move, **names))

        return prepare

    def native(self, way: str) -> Callable[[int], serving.Loop]:
        ends = pointer(self.link.ep), pointer(self.link.rkey), c.c_uint64(self.link.address)

        def prepare(length: int) -> serving.Loop:
            args = *ends, self.where, c.c_size_t(length)
            return self.beside(lambda count: self.loops(way, *args, count=count))

        return prepare

    def bare(self, way: str) -> Callable[[int], serving.Loop]:
        call = "writev" if way == "put" else "readv"
        ends = self.link.pid, c.c_void_p(self.link.address), self.where

        def prepare(length: int) -> serving.Loop:
            args = *ends, c.c_size_t(length)
            return self.beside(lambda count: self.loops.bare(call, *args, count=count))

        return prepare


def main(largest: int) -> None:
    os.sched_setaffinity(0, cpus[:1])
    with (
        Owner(largest) as owner,
        subprocess.Popen(
            [sys.executable, "-c", TURNS], stdin=subprocess.PIPE, bufsize=0
        ) as turning,
    ):
        os.sched_setaffinity(0, cpus[-1:])
        data = Data(owner, turning, largest)
        operations = {}
        for way, call in (("get", "process_vm_readv"), ("put", "process_vm_writev")):
            operations[f"{way}:bare"] = f"`{call}`, in C", data.bare(way)
            operations[f"{way}:c"] = f"`ep_transfer`, a {way} in C", data.native(way)
            operations[f"{way}:python"] = f"`ep.{way}` from Python", data.python(way)
        serving.serve(operations, {"ucx_memh": um.__version__})
        data.link.rkey.close()
        data.link.ep.close()
        turning.stdin.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
