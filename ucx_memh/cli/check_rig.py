# SPDX-License-Identifier: BSD-3-Clause
"""Two domains on one device, connected, and accesses that go around the library's own checks.

An rkey made from a key's RAW bytes, said to begin at 0 and to have no end, is one that our library
lets pass anywhere and for anything, so the device alone is left to refuse.

What is known to crash a driver is never asked for:

- A dead key is not ended again (soft-RoCE's kernel panics over it): a handle is invalidated once,
  and the library remembers that it was.
- No queue pair is destroyed below a key that is bound to it (soft-RoCE hangs for a minute): such a
  handle is invalidated before its endpoint is closed, by us or by close() itself.
- Nothing is deregistered below live keys: `dereg(cascade=True)` and `close(force=True)` end them
  first.
- No access wraps around 2^64: it spoils a queue pair of soft-RoCE for what comes after it.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ucx_memh as um
from ucx_memh.flags import Enforcement, MemFlag, PackFlag

__all__ = ["OPS", "PAD", "RIGHTS", "SIZE", "HostMemory", "Link", "Outcome", "Rig"]

RIGHTS = {
    "get": MemFlag.REMOTE_GET,
    "put": MemFlag.REMOTE_PUT,
    "atomic": MemFlag.REMOTE_ATOMIC,
}
OPS = {"get": ("get",), "put": ("put",), "atomic": ("fetch_add", "compare_swap")}

SIZE = 64 << 10  # of a region
STREAM = 4 << 20  # of each operation of those that are revoked in flight
PAD = 4 << 10  # of ours on both sides of it: what gets out of the region does no harm
NOTHING = range(0)
PUT_BYTE = b"\xff"  # not among those of a region at rest, nor is 0


@dataclass(frozen=True)
class Outcome:
    """What came of one access: who refused it, in words, and whether all of it happened."""

    by: Enforcement
    seen: str
    worked: bool = False


class HostMemory:
    """Memory to register a part of: how to look at it, change it, and register it.

    One of another kind (a device's memory, a file's) has the same methods.
    """

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)

    def load(self, offset: int = 0, length: int | None = None) -> bytes:
        """Its bytes from `offset` on; None: to the end."""
        end = len(self.bytes) if length is None else offset + length
        return bytes(memoryview(self.bytes)[offset:end])

    def store(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = data

    def at(self, pointer: int, length: int) -> bytes:
        """What a pointer of Rkey.ptr() shows to this process."""
        return ctypes.string_at(pointer, length)

    def mem_reg(
        self, md: um.Md, flags: MemFlag | None = None, offset: int = 0, length: int | None = None
    ) -> um.Memh:
        """A base on a part of it, which keeps it alive."""
        end = len(self.bytes) if length is None else offset + length
        return md.mem_reg(memoryview(self.bytes)[offset:end], flags)


@dataclass
class Link:
    """A connection: the owner's endpoint and the peer's."""

    near: um.Endpoint
    far: um.Endpoint

    def join(self) -> None:
        self.near.connect(self.far.address)
        self.far.connect(self.near.address)

    def renew(self) -> None:
        """After a refusal: both ends start anew."""
        self.near.reset()
        self.far.reset()
        self.join()

    def close(self) -> None:
        self.far.close()
        self.near.close()


class Rig:
    """The owner's domain and the peer's, on one device, as if they were two processes."""

    def __init__(
        self,
        open_md: Callable[[], um.Md],
        wait: float,
        allocate: Callable[[int], HostMemory] = HostMemory,
    ) -> None:
        self._open = open_md
        self.allocate = allocate
        self.wait = wait  # seconds for an operation
        self.stream = STREAM
        self.owner: um.Md
        self.peer: um.Md
        self.link: Link
        self._mds: list[um.Md] = []
        self.no_derived = ""  # why there are no derived keys
        self._raw: bool | None = None

    def __enter__(self) -> "Rig":
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def open(self) -> None:
        for _ in range(2):
            self._mds.append(self._open())
        self.owner, self.peer = self._mds
        self.flags = self.owner.attr.flags
        self.derives = um.MdFlag.REG_DERIVED in self.flags
        self.accesses = tuple(RIGHTS) if um.MdFlag.ATOMIC in self.flags else ("get", "put")
        self.all = MemFlag(sum(RIGHTS[access] for access in self.accesses))
        if not self.derives:
            self.no_derived = self._why_not()
        if um.MdFlag.ENDPOINT in self.flags:
            self.link = self.connected()

    def close(self) -> None:
        """All that is left, the peer's first; one that fails does not keep the other from it."""
        while self._mds:
            with suppress(um.MemhError):  # what is at fault has its row by now
                self._mds.pop().close(force=True)

    def reopen(self) -> None:
        """After a failure of the device: nobody knows what state its objects are in."""
        self.close()
        self.open()

    def connected(self) -> Link:
        link = Link(self.owner.endpoint(), self.peer.endpoint())
        link.join()
        return link

    def works_again(self, op: str, memh: um.Memh) -> bool:
        """Whether a connection that broke works after a reset; if not there is a new one now.

        Soft-RoCE's does not when a read was cut off: its queue pair goes on with that read.
        """
        try:
            self.link.renew()
            if not self.works(op, memh, memh.address):
                return True
        except um.MemhError:
            pass
        self.link.close()
        self.link = self.connected()
        return False

    def _why_not(self) -> str:
        with self.allocate(8).mem_reg(self.owner) as base:
            try:
                base.derive()
            except um.UnsupportedError as error:
                return f"UNSUPPORTED: {error.detail}"
        return "but derive() works"

    @property
    def raw(self) -> bool:
        """Is there a native key for the device to check?  Asked at first use, in a check."""
        if self._raw is None:
            flags = MemFlag.DERIVED_ONLY if self.derives else None
            base = self.allocate(64).mem_reg(self.owner, flags)
            memh = base.derive() if self.derives else base
            try:
                self.forged_key(memh.mkey_pack(PackFlag.RAW))
                raw = True
            except um.UnsupportedError:
                raw = False
            base.dereg(cascade=True)
            self._raw = raw
        return self._raw

    # ---- the owner's memory and its keys ----

    @contextmanager
    def region(self, size: int = SIZE) -> Iterator[um.Memh]:
        """Memory of the owner, registered; with derived keys only, where there are any."""
        self.rest = (bytes(range(1, 252)) * (size // 251 + 40))[: PAD + size + PAD]
        self.memory = self.allocate(len(self.rest))
        self.memory.store(0, self.rest)
        flags = MemFlag.DERIVED_ONLY if self.derives else None
        self.base = self.memory.mem_reg(self.owner, flags, PAD, size)
        self.grants: list[um.Memh] = []
        yield self.base  # whatever is raised there: close() or reopen() tidies up
        for memh in self.grants if not self.derives else ():
            memh.dereg()
        self.base.dereg(cascade=True)

    def grant(
        self,
        rights: MemFlag,
        offset: int = 0,
        length: int | None = None,
        endpoint: um.Endpoint | None = None,
    ) -> um.Memh:
        """A handle on a part of the region: derived, or else a registration of its own."""
        if self.derives:
            memh = self.base.derive(offset, length, rights, endpoint)
        else:
            length = self.base.length - offset if length is None else length
            memh = self.memory.mem_reg(self.owner, rights, PAD + offset, length)
        self.grants.append(memh)
        return memh

    def raw_key(self, memh: um.Memh) -> um.Rkey:
        """Its key as the device alone knows it."""
        return self.forged_key(memh.mkey_pack(PackFlag.RAW))

    def forged_key(self, raw: bytes) -> um.Rkey:
        return self.peer.rkey_from_raw(raw, 0, 2**64 - 1)

    def key(self, memh: um.Memh) -> um.Rkey:
        """Its key as a peer's library knows it."""
        return self.peer.rkey_unpack(memh.mkey_pack())

    # ---- one access ----

    def access(
        self,
        op: str,
        rkey: um.Rkey,
        address: int,
        length: int = 8,
        may: range = NOTHING,
        link: Link | None = None,
    ) -> Outcome:
        """Try it.  `may`: addresses that the key covers; a refused put may have done a part there.

        A failure that is no refusal is raised.
        """
        link = link or self.link
        if self.memory.load() != self.rest:
            self.memory.store(0, self.rest)
        into = bytearray(length)
        try:
            value = self._start(link.far, op, rkey, address, into).wait(self.wait)
        except um.RemoteAccessError:
            by, seen = Enforcement.ENFORCED, "refused by the device"
            link.renew()
        except (um.AccessError, um.RangeError, um.RevokedError):
            by, seen = Enforcement.COOPERATIVE, "refused by the library"
        else:
            worked = self._worked(op, address, into, value)
            seen = "let through" if worked else "answered OK, but not done"
            return Outcome(Enforcement.NONE, seen, worked)
        if any(at not in may for at in self._touched(address, into)):
            return Outcome(Enforcement.NONE, f"{seen}, yet bytes moved")
        return Outcome(by, seen)

    def either(self, op: str, memh: um.Memh, address: int, length: int = 8) -> Outcome:
        """By its key alone; and if the device lets it through, as a peer's library would do it."""
        may = range(memh.address, memh.address + memh.length)
        if self.raw:
            outcome = self.access(op, self.raw_key(memh), address, length, may)
            if outcome.by is Enforcement.ENFORCED:
                return outcome
        by_library = self.access(op, self.key(memh), address, length, may)
        return Outcome(by_library.by, outcome.seen) if self.raw else by_library

    def works(self, op: str, memh: um.Memh, address: int, length: int = 8) -> str:
        """What was seen of an access that must work, if it did not."""
        rkey = self.raw_key(memh) if self.raw else self.key(memh)
        outcome = self.access(op, rkey, address, length)
        return "" if outcome.worked else outcome.seen

    def settle(self, operations: list[um.Operation]) -> bool:
        """Wait until all are done, at most `wait` seconds; False: some never were."""
        end = time.monotonic() + self.wait
        while not all(operation.done for operation in operations):
            if time.monotonic() > end:
                return False
            self.peer.progress()
            self.owner.progress()
            time.sleep(0.0002)
        return True

    def _start(
        self, ep: um.Endpoint, op: str, rkey: um.Rkey, address: int, into: bytearray
    ) -> um.Operation:
        if op == "get":
            return ep.get_nb(rkey, address, into)
        if op == "put":
            return ep.put_nb(rkey, address, PUT_BYTE * len(into))
        if op == "fetch_add":
            return ep.fetch_add_nb(rkey, address, 1)
        return ep.compare_swap_nb(rkey, address, self._word(self.rest, address), 77)

    def _word(self, memory: bytes, address: int) -> int:
        at = PAD + address - self.base.address
        return int.from_bytes(memory[at : at + 8], sys.byteorder)

    def _worked(self, op: str, address: int, into: bytearray, value: int | None) -> bool:
        at = PAD + address - self.base.address
        if op == "get":
            return into == self.rest[at : at + len(into)]
        if op == "put":
            return self.memory.load(at, len(into)) == PUT_BYTE * len(into)
        old = self._word(self.rest, address)
        new = 77 if op == "compare_swap" else old + 1
        return value == old and self._word(self.memory.load(), address) == new

    def _touched(self, address: int, into: bytearray) -> Iterator[int]:
        """Addresses that were read, or written."""
        yield from (address + i for i, byte in enumerate(into) if byte)
        memory = self.memory.load()
        if memory != self.rest:
            start = self.base.address - PAD
            pairs = enumerate(zip(memory, self.rest, strict=True))
            yield from (start + i for i, (now, then) in pairs if now != then)
