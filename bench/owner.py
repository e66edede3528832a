# SPDX-License-Identifier: BSD-3-Clause
"""A second process that owns memory, for benches that move data between two.

It does as it is told over a pipe, a pickled (method, args) at a time, and ends with its starter.
"""

import mmap
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import ucx_memh as um

PAGE = mmap.PAGESIZE
MADV_POPULATE_WRITE = 23  # the standard library has no name for it


def region(length: int) -> mmap.mmap:
    """Memory of our own that is really there, so that no bench pays for its first touch."""
    memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(MADV_POPULATE_WRITE)
    except OSError:  # before Linux 5.14
        memory[::PAGE] = bytes(len(range(0, length, PAGE)))
    return memory


@dataclass
class Link:
    """One connection to the owner: what a bench puts and gets with."""

    md: um.Md
    ep: um.Endpoint
    rkey: um.Rkey
    pid: int
    address: int


class Owner:
    """The starter's side; a context manager."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__), str(length)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, method: str, *args: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump((method, args), self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def link(self, md: um.Md) -> Link:
        """Connected, with a key to all of the memory."""
        key, peer = self.ask("grant", md.attr.component)
        ep = md.endpoint()
        self.ask("connect", md.attr.component, ep.address)
        ep.connect(peer)
        rkey = md.rkey_unpack(key)
        return Link(md, ep, rkey, self.process.pid, rkey.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Told:
    """The owner's side."""

    def __init__(self, length: int) -> None:
        self.memory = region(length)
        self.opened: dict[str, tuple[um.Md, um.Memh]] = {}
        self.endpoints: dict[str, um.Endpoint] = {}

    def grant(self, component: str) -> tuple[bytes, bytes]:
        """A key, and the address of a new endpoint."""
        if component not in self.opened:
            md = um.open_md(component)
            self.opened[component] = md, md.mem_reg(self.memory)
        md, base = self.opened[component]
        if component in self.endpoints:
            self.endpoints.pop(component).close()
        self.endpoints[component] = md.endpoint()
        return base.mkey_pack(), self.endpoints[component].address

    def connect(self, component: str, address: bytes) -> None:
        self.endpoints[component].connect(address)


def serve(orders: IO[bytes], answers: IO[bytes], length: int) -> None:
    told = Told(length)
    while True:
        try:
            method, args = pickle.load(orders)
        except EOFError:
            return
        pickle.dump(getattr(told, method)(*args), answers)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
