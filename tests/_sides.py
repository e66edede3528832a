# SPDX-License-Identifier: BSD-3-Clause
"""The other side of a connection: a process that uses our library, or raw verbs below it.

far = Library(peer)              # conftest's fixture `peer` starts the process
ep = link(md, far)
assert far.get(win.mkey_pack(), 0, 8) == ...

raw = Attacker(peer)             # posts any key, whoever it was given to
ep = link(md, raw)
assert raw.read(rkey, win.address, 8)[0] is Wc.REM_ACCESS_ERR
relink(ep, raw)                  # a refused access ends the connection
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ucx_memh as um
from _rawqp import SYSTEM, RawPeer, Wc, keys, payload, software_library

__all__ = [
    "CHUNK",
    "SYSTEM",
    "Attacker",
    "Library",
    "Owner",
    "Remote",
    "Wc",
    "Where",
    "descriptors",
    "join",
    "keys",
    "link",
    "opened",
    "payload",
    "relink",
    "serve",
    "wait_for",
]

CHUNK = 256 << 10  # what a responder copies at a time, with ptrace rights over its peer
BLANK = 0xA5  # what RawPeer.read puts into its buffer first


def wait_for(condition: Callable[[], Any], what: str = "", seconds: float = 30) -> Any:
    """Sleep until it holds; AssertionError after a time that only a hang takes."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what or condition} does not happen"
        time.sleep(0.001)
    return value


def progressed(md: um.Md, condition: Callable[[], Any], what: str = "") -> Any:
    """Progress the domain until it holds: some devices only begin in a call what that asks for."""

    def look() -> Any:
        md.progress()
        return condition()

    return wait_for(look, what)


class Where(NamedTuple):
    """Which device both sides use, and how: the software device by its vendor's interface,
    unless a test says otherwise."""

    component: str = "ib_mlx5"
    config: dict[str, Any] = {"device": "software"}
    library: str | None = None  # of raw verbs; the software device
    gid_index: int = 0

    def open(self, **config: Any) -> um.Md:
        return um.open_md(self.component, **{**self.config, **config})


@contextmanager
def opened(where: Where = Where(), **config: Any) -> Iterator[um.Md]:  # noqa: B008
    """An Md, closed with all that is left of it."""
    md = where.open(**config)
    try:
        yield md
    finally:
        md.close(force=True)


# ---- here ----


class Remote:
    """An object in another process: its methods, called there."""

    serve: Callable[..., None]

    def __init__(self, peer: Callable[..., Any], where: Where = Where()) -> None:  # noqa: B008
        self.peer = peer(type(self).serve, tuple(where))
        self.ends: list[um.Endpoint] = []  # of ours that are connected to it
        self.waiting = 0  # calls that are not answered

    def start(self, name: str, *args: Any) -> None:
        """Call, and do not wait; `answer` does."""
        self.waiting += 1
        self.peer.send((name, args))

    def answer(self, timeout: float = 60) -> Any:
        """What the last call returned or raised."""
        good, value = self.peer.recv(timeout)
        self.waiting -= 1
        if not good:
            raise value
        return value

    def call(self, name: str, *args: Any) -> Any:
        self.start(name, *args)
        return self.answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.call(name, *args)

    @property
    def address(self) -> bytes:
        return self.call("address")


def link(md: um.Md, far: Any) -> um.Endpoint:
    """A new endpoint, connected to the other side; lives as long as that."""
    ep = md.endpoint()
    join(ep, far)
    far.ends.append(ep)
    return ep


def join(ep: um.Endpoint, far: Any) -> None:
    ep.connect(far.address)
    far.connect(ep.address)


def relink(ep: um.Endpoint, far: Any) -> None:
    """Both ends begin anew."""
    ep.reset()
    far.reset()
    join(ep, far)


def descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


# ---- there ----


def serve(conn: Any, thing: Any) -> None:
    """Do what Remote asks, until the pipe closes or it asks for None."""
    while (request := conn.recv()) is not None:
        name, args = request
        try:
            value = getattr(thing, name)
            conn.send((True, value(*args) if callable(value) else value))
        except Exception as error:
            conn.send((False, error))


class LibrarySide:
    """One endpoint; the keys that it was given."""

    def __init__(self, where: Where) -> None:
        self.md = where.open()
        self.ep = self.md.endpoint()
        self.rkeys: dict[bytes, um.Rkey] = {}

    def renew(self) -> None:
        """As if it had just begun."""
        self.ep.close()
        for rkey in self.rkeys.values():
            rkey.close()
        self.rkeys.clear()
        self.ep = self.md.endpoint()

    def rkey(self, key: bytes) -> um.Rkey:
        if key not in self.rkeys:
            self.rkeys[key] = self.md.rkey_unpack(key)
        return self.rkeys[key]

    def at(self, key: bytes, offset: int) -> tuple[um.Rkey, int]:
        rkey = self.rkey(key)
        return rkey, rkey.address + offset

    def address(self) -> bytes:
        return self.ep.address

    def connect(self, address: bytes) -> None:
        self.ep.connect(address)

    def reset(self) -> None:
        self.ep.reset()

    def state(self) -> um.EpState:
        self.md.progress()
        return self.ep.state

    def unpack(self, key: bytes) -> tuple[int, int, um.MemFlag, int]:
        rkey = self.rkey(key)
        return rkey.address, rkey.length, rkey.flags, rkey.key_id

    def get(self, key: bytes, offset: int, length: int) -> bytes:
        into = bytearray(length)
        self.ep.get(*self.at(key, offset), into)
        return bytes(into)

    def put(self, key: bytes, offset: int, data: bytes) -> None:
        self.ep.put(*self.at(key, offset), data)

    def fetch_add(self, key: bytes, offset: int, value: int) -> int:
        return self.ep.fetch_add(*self.at(key, offset), value)

    def compare_swap(self, key: bytes, offset: int, expect: int, value: int) -> int:
        return self.ep.compare_swap(*self.at(key, offset), expect, value)

    def add_many(self, key: bytes, offset: int, times: int) -> int:
        """Add one, `times` times; returns the last word from before."""
        return [self.fetch_add(key, offset, 1) for _ in range(times)][-1]

    def stream(self, key: bytes, size: int) -> tuple[int, um.Status]:
        """Write over and over, each time another byte, until that fails: (writes, why)."""
        rkey = self.rkey(key)
        writes = 0
        while True:
            data = bytes([writes % 255 + 1]) * size
            try:
                self.ep.put(rkey, rkey.address, data)
            except um.MemhError as error:
                return writes, error.status
            writes += 1

    def buffer(self, size: int) -> tuple[int, bytes]:
        """Memory of this side, all sevens: its address and a key for reading it."""
        self.memory = bytearray([7]) * size
        self.base = self.md.mem_reg(self.memory)
        return self.base.address, self.base.mkey_pack()

    def churn(self, key: bytes, size: int, times: int) -> int:
        """Write and read back, `times` times; returns how often that was right."""
        rkey = self.rkey(key)
        into = bytearray(size)
        good = 0
        for turn in range(times):
            data = bytes([turn % 255 + 1]) * size
            self.ep.put(rkey, rkey.address, data)
            self.ep.get(rkey, rkey.address, into)
            good += into == data
        return good

    def notice(self, notice: bytes) -> int:
        return self.md.rkey_revoke(notice)

    def descriptors(self) -> int:
        return descriptors()

    def close(self) -> None:
        self.md.close(force=True)


class OwnerSide(LibrarySide):
    """An owner in another process: one region, keys to it."""

    def region(self, size: int, byte: int, at: int = 0) -> int:
        """Memory full of that byte, at the address `at` if given; registered DERIVED_ONLY."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x100000 if at else 0)  # FIXED_NOREPLACE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        found = libc.mmap(ctypes.c_void_p(at), ctypes.c_size_t(size), protection, flags, -1, 0)
        assert found == at or not at, ctypes.get_errno()
        ctypes.memset(found, byte, size)
        self.base = self.md.mem_reg(address=found, length=size, flags=um.MemFlag.DERIVED_ONLY)
        return found

    def grant(self, flags: um.MemFlag | None = None) -> bytes:
        self.granted = self.base.derive(flags=flags)
        return self.granted.mkey_pack()

    def revoke(self) -> None:
        self.granted.invalidate()

    def gate(self, chunks: int) -> None:
        """Stop the responder in the chunk after that many."""
        library = ctypes.CDLL(software_library())
        assert library.softmlx5_set(b"gate", str(chunks).encode()) == 0

    def held(self) -> None:
        """Wait until it is stopped."""
        library = ctypes.CDLL(software_library())
        library.softmlx5_stat.restype = ctypes.c_uint64
        wait_for(lambda: library.softmlx5_stat(b"gate.waiting"))


class AttackerSide(RawPeer):
    """Raw verbs, and bulk operations whose bytes stay in that process."""

    def poll(self, timeout: float = 60) -> Wc:
        """As RawPeer's, but asleep most of the time."""
        end = time.monotonic() + timeout
        while True:
            try:
                return super().poll(0.0002)
            except TimeoutError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.0005)

    def take(self, rkey: int, address: int, length: int) -> tuple[Wc, int]:
        """RDMA READ: the status, and how many bytes came (if none of them is BLANK)."""
        self._room(length)
        ctypes.memset(self.buffer, BLANK, length)
        self.post(4, rkey, address, length)
        status = self.poll()
        return status, len(ctypes.string_at(self.buffer, length).rstrip(bytes([BLANK])))

    def fill(self, rkey: int, address: int, length: int, byte: int) -> Wc:
        """RDMA WRITE of that byte all over."""
        self._room(length)
        ctypes.memset(self.buffer, byte, length)
        self.post(0, rkey, address, length)
        return self.poll()

    def descriptors(self) -> int:
        return descriptors()


def owner_process(conn: Any, where: tuple) -> None:
    serve(conn, OwnerSide(Where(*where)))


def library_process(conn: Any, where: tuple) -> None:
    serve(conn, LibrarySide(Where(*where)))


def attacker_process(conn: Any, where: tuple) -> None:
    _, _, library, gid_index = where
    with AttackerSide(library, gid_index) as side:
        serve(conn, side)


class Library(Remote):
    """A LibrarySide in another process."""

    serve = library_process


class Owner(Remote):
    """An OwnerSide in another process."""

    serve = owner_process


class Attacker(Remote):
    """An AttackerSide in another process."""

    serve = attacker_process
