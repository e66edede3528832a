# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit: what every backend must do, as a class of tests to inherit.

::

    import pytest
    import ucx_memh as um
    from ucx_memh.testing import MdSuite

    class TestMine(MdSuite):
        @pytest.fixture
        def md(self):
            md = um.open_md("mine")
            yield md
            md.close(force=True)

That is all, where one process can reach its own memory through the backend.  The other fixtures
have defaults that may be overridden: `peer_md`, `allocate`, `link`, `rig`, `refuse`.

A test is skipped only for a flag that `md.attr.flags` does or does not have: what is declared is
tried in full; of what is not, that it answers UNSUPPORTED and changes nothing.  Claims of
enforcement are attacked below the library, as `python -m ucx_memh check-device` does it.
"""

import gc
import itertools
import os
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import ucx_memh as um
from ucx_memh.cli.check_probes import Probes
from ucx_memh.cli.check_rig import HostMemory, Link, Rig
from ucx_memh.cli.check_row import Probe, Row
from ucx_memh.core import key_checksums
from ucx_memh.flags import EpState, MdFlag, MemFlag, MemhState, MemType, PackFlag, Status

__all__ = ["HostMemory", "MdSuite"]

GET, PUT, ATOMIC = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT, MemFlag.REMOTE_ATOMIC
RMA, AMO = PackFlag.INVALIDATE_RMA, PackFlag.INVALIDATE_AMO
SIZE = 16 << 10
ENVELOPE = 80  # bytes of a packed key before its payload


def text(length: int, seed: int = 1) -> bytes:
    """Bytes in which no stretch of eight comes twice nearby."""
    words = range(seed * 1000003, seed * 1000003 + length // 8 + 1)
    return b"".join(struct.pack("<Q", word * 0x9E3779B97F4A7C15 % 2**64) for word in words)[:length]


def with_payload(key: bytes, payload: bytes) -> bytes:
    """The key with another payload, and a length and a checksum that fit."""
    head = bytearray(key[: key[3]])
    struct.pack_into("<H", head, 4, len(head) + len(payload))
    struct.pack_into("<H", head, 44, len(payload))
    struct.pack_into("<I", head, 12, 0)
    crc, _ = key_checksums(bytes(head) + payload)
    struct.pack_into("<I", head, 12, crc)
    return bytes(head) + payload


def state(memh: um.Memh) -> MemhState:
    """Now: to a type checker a property stays what it was."""
    return memh.state


def made_and_not_ended(stats: dict[str, int]) -> dict[str, int]:
    """By the counters of calls that are named in pairs, for what does not fail meanwhile."""
    found = {}
    for made, ended in (("create_", "destroy_"), ("alloc_", "dealloc_"), ("reg_", "dereg_")):
        for name, count in stats.items():
            head, is_made, tail = name.rpartition("." + made)
            if is_made and (other := f"{head}.{ended}{tail}") in stats:
                found[name] = count - stats[other]
    return found


def outcome(call: Callable[[], Any]) -> Any:
    """What it returned, or the error of ours that it raised."""
    try:
        return call()
    except um.MemhError as error:
        return error


class MdSuite:
    """The tests of a backend; see the module."""

    wait = 10.0
    """Seconds that one operation may take; then it counts as never ending.  In a call that waits by
    itself (`dereg`, `close`) only pytest-timeout ends it."""
    cycles = 50
    """How often what may leave something behind is repeated."""
    quarantine = 32
    """After so many destructions at least a native key value may come again."""
    stream = 4 << 20
    """Bytes of each of the 32 operations that are under way when their key is revoked."""
    gauges: tuple[str, ...] = ()
    """Names in `md.stats()` that must return to what they were: counts of what is there now."""
    other_payloads: tuple[int, ...] = ()
    """Sizes of payloads that it also unpacks, say those of an older format."""

    # ---- to override ----

    @pytest.fixture
    def md(self) -> Iterator[um.Md]:
        """An open domain, as fresh as it can be; closed afterwards."""
        raise NotImplementedError("a subclass of MdSuite overrides the fixture `md`")

    @pytest.fixture
    def peer_md(self, md: um.Md) -> um.Md:
        """A domain of this process that reaches what `md` registers: the same, or another."""
        return md

    @pytest.fixture
    def allocate(self) -> Callable[[int], HostMemory]:
        """`allocate(size)`: memory that `md` can register, with the methods of HostMemory."""
        return HostMemory

    @pytest.fixture
    def link(self, md: um.Md, peer_md: um.Md) -> Iterator[Link]:
        """Two endpoints that are connected: `near` of md, and `far` of peer_md, which accesses."""
        self.need(md, MdFlag.REG, MdFlag.NEED_RKEY, MdFlag.ENDPOINT)
        link = Link(md.endpoint(), peer_md.endpoint())
        link.join()
        yield link
        for ep in (link.far, link.near):
            ep.close()

    @pytest.fixture
    def rig(
        self, md: um.Md, peer_md: um.Md, allocate: Callable[[int], HostMemory]
    ) -> Iterator[Rig]:
        """What attacks the device below our library: a Rig, or a subclass with other accesses.

        It uses rkey_from_raw(), which believes what it is told.  Where a backend packs nothing raw
        there is no native key to attack, and it must not claim that a device enforces something.
        """
        self.need(md, MdFlag.REG, MdFlag.NEED_RKEY, MdFlag.ENDPOINT)
        rig = Rig(iter((md, peer_md)).__next__, self.wait, allocate)
        rig.stream = self.stream
        rig.open()
        yield rig
        rig.link.close()

    @pytest.fixture
    def refuse(self) -> Callable[[str], None] | None:
        """`refuse(op)` has the device refuse the next "mem_dereg" or "key_destroy"; None: there is
        nothing that it could refuse."""
        return None

    # ---- what the tests share ----

    @pytest.fixture(autouse=True)
    def no_garbage(self) -> None:
        """What earlier tests have left to the collector does not end in the middle of this one."""
        gc.collect()

    @staticmethod
    def need(md: um.Md, *flags: MdFlag) -> None:
        for flag in flags:
            if flag not in md.attr.flags:
                pytest.skip(f"{md.attr.component} does not declare {flag.name}")

    @staticmethod
    def lacks(md: um.Md, flag: MdFlag) -> None:
        if flag in md.attr.flags:
            pytest.skip(f"{md.attr.component} declares {flag.name}")

    @pytest.fixture
    def base(self, md: um.Md, allocate: Callable[[int], HostMemory]) -> Iterator[um.Memh]:
        """SIZE bytes with all rights there are, registered; `base` keeps the memory."""
        self.need(md, MdFlag.REG)
        self.memory = allocate(SIZE)
        self.memory.store(0, text(SIZE))
        yield self.memory.mem_reg(md)
        del self.memory  # pytest keeps `self`

    def left(self, md: um.Md) -> dict[str, int]:
        """What this process and the domain hold now; what a test made and ended is not in it."""
        stats = md.stats()
        found = {name: n for name, n in stats.items() if name.startswith("live_")}
        found |= {name: stats[name] for name in self.gauges}
        found["file descriptors"] = len(os.listdir("/proc/self/fd"))
        return found

    @contextmanager
    def unchanged(self, md: um.Md, *handles: um.Memh) -> Iterator[None]:
        """Within it nothing is made, sent or counted, and the handles are as before."""

        def look() -> object:
            states = [(memh.state, memh.derived_count, memh.flags, memh.grant) for memh in handles]
            return md.stats(), states

        before = look()
        yield
        assert look() == before, "something was refused, but it has left a trace"

    def refused(self, md: um.Md, call: Callable[[], object], *handles: um.Memh) -> None:
        """It is UNSUPPORTED, and nothing has happened."""
        with self.unchanged(md, *handles):
            with pytest.raises(um.UnsupportedError) as caught:
                call()
            assert caught.value.status is Status.UNSUPPORTED

    def progressed(self, md: um.Md, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + self.wait
        while not condition():
            md.progress()
            assert time.monotonic() < end, f"{what} does not happen"
            time.sleep(0.0002)

    def all_ended(self, md: um.Md, before: dict[str, int], what: str = "something") -> None:
        """What a device ends by and by has its time; then as much is held as before.

        Of what the system holds a little more may be there: what a device makes when it first
        needs it, but not one for every second cycle.
        """

        def left() -> dict[str, int]:
            exact = {name for name in before if name.startswith("live_")} | {*self.gauges}
            now = self.left(md) | made_and_not_ended(md.stats())
            more = {name: now[name] - n for name, n in before.items() if now[name] != n}
            return {k: n for k, n in more.items() if k in exact or n > self.cycles // 2}

        end = time.monotonic() + self.wait
        while left() and time.monotonic() < end:
            md.progress()
            time.sleep(0.0002)
        assert left() == {}, f"{what} is left"

    @staticmethod
    def at_least_as_declared(md: um.Md, win: um.Memh) -> None:
        """Enforcement of a derived handle, for the rights that it gives."""
        for promise in ("rights", "range", "revoke"):
            for access, right in (("get", GET), ("put", PUT), ("atomic", ATOMIC)):
                least = getattr(getattr(md.attr.enforcement, promise), access)
                found = getattr(getattr(win.enforcement, promise), access)
                assert found >= least or not win.grant & right, (
                    f"{promise} of {access} is {found.name}, and {least.name} is declared"
                )

    def got(self, link: Link, rkey: um.Rkey, address: int, length: int) -> bytes:
        into = bytearray(length)
        link.far.get_nb(rkey, address, into).wait(self.wait)
        return bytes(into)

    def put(self, link: Link, rkey: um.Rkey, address: int, data: bytes) -> None:
        link.far.put_nb(rkey, address, data).wait(self.wait)

    def zeroed(self, link: Link, rkey: um.Rkey, address: int, length: int) -> None:
        self.put(link, rkey, address, bytes(length))

    # ---- what it says of itself ----

    def test_attributes(self, md: um.Md) -> None:
        attr = md.attr
        assert attr.component
        assert attr.md_name
        assert "/" not in attr.component, "open_md() takes component/md_name"
        assert attr.mem_types, "memory of no type could be registered"
        assert attr.max_reg > 0
        assert attr.reg_alignment >= 1
        assert attr.key_size_max == ENVELOPE + attr.rkey_packed_size <= 256

    def test_explains(self, md: um.Md, base: um.Memh) -> None:
        """A person who asks what was chosen, and why, gets an answer."""
        for words in (md.explain(), md.explain(base), base.explain()):
            assert words.strip(), "explain() says nothing"

    def test_is_silent(
        self, md: um.Md, base: um.Memh, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Nothing is printed, neither of success nor of failure."""
        capfd.readouterr()
        for call in (
            lambda: md.rkey_unpack(base.mkey_pack()).close(),
            lambda: md.rkey_unpack(b"no key"),
            lambda: base.derive(0, 64).dereg(),
            lambda: base.derive(SIZE, 64),
            lambda: md.mem_reg(bytearray(64)).dereg(),
            lambda: md.endpoint().close(),
            lambda: md.mem_adopt(0),
            md.explain,
        ):
            outcome(call)
        assert capfd.readouterr() == ("", ""), "it wrote to stdout or stderr"

    def test_progress_and_its_descriptor(self, md: um.Md) -> None:
        assert md.progress() >= 0
        if MdFlag.EVENT_FD in md.attr.flags:
            os.fstat(md.event_fd)
            self.progressed(md, md.arm, "arm() with nothing to do")
        else:
            self.refused(md, lambda: md.event_fd)
            self.refused(md, md.arm)

    # ---- registrations ----

    @pytest.mark.parametrize("length", [1, 7, 8, 4095, 4096, 4097, SIZE])
    def test_registers(
        self, md: um.Md, allocate: Callable[[int], HostMemory], length: int
    ) -> None:
        self.need(md, MdFlag.REG)
        memory = allocate(SIZE)
        before = self.left(md)
        for offset in sorted({0, SIZE - length}):
            if (offset | length) % md.attr.reg_alignment:
                continue
            memh = memory.mem_reg(md, None, offset, length)
            assert (memh.length, memh.state, memh.base) == (length, MemhState.LIVE, None)
            assert memh.flags & (GET | PUT) == GET | PUT
            memh.dereg()
            assert memh.state is MemhState.CLOSED
            memh.dereg()  # again: nothing
        self.all_ended(md, before)

    def test_registrations_may_overlap(
        self, md: um.Md, peer_md: um.Md, link: Link, allocate: Callable[[int], HostMemory]
    ) -> None:
        """Identical, contained, adjacent, across: each has its key and its end."""
        memory = allocate(SIZE)
        memory.store(0, text(SIZE))
        spans = [(0, SIZE), (0, SIZE), (4096, 4096), (0, 8192), (8192, 4096)]
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
            live = {i: memory.mem_reg(md, None, *spans[i]) for i in range(len(spans))}
            for i in order:
                for j, memh in live.items():
                    offset, _ = spans[j]
                    with peer_md.rkey_unpack(memh.mkey_pack()) as rkey:
                        found = self.got(link, rkey, memh.address, 64)
                    assert found == text(SIZE)[offset : offset + 64]
                live.pop(i).dereg()

    def test_an_empty_registration(
        self, md: um.Md, peer_md: um.Md, allocate: Callable[[int], HostMemory]
    ) -> None:
        """Length 0 is legal: its key lets nobody at a byte, and the device has no part in it."""
        self.need(md, MdFlag.REG)
        before = self.left(md)
        memh = allocate(8).mem_reg(md, None, 0, 0)
        assert memh.length == 0
        if MdFlag.NEED_RKEY in md.attr.flags:
            with peer_md.rkey_unpack(memh.mkey_pack()) as rkey:
                assert (rkey.address, rkey.length) == (memh.address, 0)
        memh.dereg()
        self.all_ended(md, before)

    def test_an_empty_key(
        self, md: um.Md, peer_md: um.Md, link: Link, allocate: Callable[[int], HostMemory]
    ) -> None:
        memh = allocate(8).mem_reg(md, None, 0, 0)
        with peer_md.rkey_unpack(memh.mkey_pack()) as rkey:
            assert self.got(link, rkey, rkey.address, 0) == b""
            with pytest.raises(um.RangeError):
                self.got(link, rkey, rkey.address, 1)

    def test_memory_of_which_only_the_address_is_said(
        self, md: um.Md, allocate: Callable[[int], HostMemory]
    ) -> None:
        """Where its type is not said it is found out (mem_query), and it is as good as the same."""
        self.need(md, MdFlag.REG)
        memory = allocate(SIZE)
        known = memory.mem_reg(md)
        before = self.left(md)
        for _ in range(self.cycles):
            found = outcome(
                lambda: md.mem_reg(address=known.address, length=known.length, owner=memory)
            )
            if MemType.HOST not in md.attr.mem_types and isinstance(found, um.UnsupportedError):
                continue  # it has no mem_query, and then what nobody says is HOST
            assert isinstance(found, um.Memh), f"its own memory is refused: {found}"
            assert (found.length, found.grant) == (known.length, known.grant)
            found.dereg()
        self.all_ended(md, before)
        known.dereg()

    def test_what_cannot_be_registered(self, md: um.Md) -> None:
        """Refused with an error of ours, or taken; in both cases nothing is left of it."""
        self.need(md, MdFlag.REG)
        before = self.left(md)
        limit = md.attr.max_reg
        for address, length in [
            (2**64 - 4096, 8192),  # wraps around
            (4096, 2**64 - 1),
            (0, 4096),  # mapped by nobody
            (2**47 - 8192, 4096),  # the end of what a process may map
            *([(4096, limit + 1)] if limit < 2**64 - 1 else []),
        ]:
            found = outcome(lambda: md.mem_reg(address=address, length=length, owner=self))  # noqa: B023
            if isinstance(found, um.Memh):
                assert address + length <= 2**64, "a range that wraps around was taken"
                assert length <= limit, "max_reg was not kept"
                found.dereg()
            self.all_ended(md, before, f"what {length} bytes at {address:#x} were given ({found})")

    def test_leaves_nothing(
        self, md: um.Md, peer_md: um.Md, allocate: Callable[[int], HostMemory]
    ) -> None:
        """Many registrations with all that belongs to them, and their ends."""
        self.need(md, MdFlag.REG)
        memory = allocate(SIZE)

        def cycle() -> None:
            base = memory.mem_reg(md)
            handles = [base]
            if MdFlag.REG_DERIVED in md.attr.flags:
                handles += [base.derive(i * 64, 64) for i in range(4)]
            if MdFlag.NEED_RKEY in md.attr.flags:
                for memh in handles:
                    peer_md.rkey_unpack(memh.mkey_pack()).close()
            base.dereg(cascade=True)

        cycle()  # which may make what is used again
        before = self.left(md) | made_and_not_ended(md.stats())
        for _ in range(self.cycles):
            cycle()
        self.all_ended(md, before)

    def test_a_registrations_key_ends_with_it(self, rig: Rig, base: um.Memh) -> None:
        """Also for someone who keeps its native value."""
        if not rig.raw:
            pytest.skip(f"{rig.owner.attr.component} packs no native key")
        key, address = rig.forged_key(base.mkey_pack(PackFlag.RAW)), base.address
        into = bytearray(64)
        rig.link.far.get_nb(key, address, into).wait(self.wait)
        assert into == text(64)
        base.dereg()
        with pytest.raises(um.MemhError):
            rig.link.far.get_nb(key, address, into).wait(self.wait)
        rig.link.renew()

    def test_memory_that_is_not_declared(self, md: um.Md) -> None:
        self.need(md, MdFlag.REG)
        for kind in set(MemType) - md.attr.mem_types:
            self.refused(
                md, lambda: md.mem_reg(address=4096, length=4096, mem_type=kind, owner=self)  # noqa: B023
            )
        if MdFlag.REG_DMABUF not in md.attr.flags:
            self.refused(
                md, lambda: md.mem_reg(address=4096, length=4096, dmabuf_fd=0, owner=self)
            )
        for flag in (MemFlag.SYMMETRIC_RKEY, MemFlag.GVA):
            self.refused(
                md,
                lambda: md.mem_reg(address=4096, length=4096, flags=flag | GET, owner=self),  # noqa: B023
            )

    def test_no_registration_without_its_flag(self, md: um.Md) -> None:
        self.lacks(md, MdFlag.REG)
        self.refused(md, lambda: md.mem_reg(bytearray(64)))

    def test_a_refused_end_is_repeated(
        self, md: um.Md, base: um.Memh, refuse: Callable[[str], None] | None
    ) -> None:
        """The handle stays, and the next try ends it."""
        if refuse is None:
            pytest.skip("nothing is refused: the fixture `refuse` is not overridden")
        if MdFlag.REG_DERIVED in md.attr.flags:
            win = base.derive()
            win.mkey_pack()
            refuse("key_destroy")
            with pytest.raises(um.MemhError):
                win.invalidate()
            assert state(win) is MemhState.REVOKING
            win.invalidate()
            assert state(win) is MemhState.REVOKED
        refuse("mem_dereg")
        with pytest.raises(um.MemhError):
            base.dereg(cascade=True)
        assert state(base) in (MemhState.LIVE, MemhState.REVOKING)
        base.dereg(cascade=True)
        assert state(base) is MemhState.CLOSED

    # ---- packed keys ----

    def test_packs(self, md: um.Md, base: um.Memh) -> None:
        """The same bytes each time, of the declared size, and all that the envelope says."""
        self.need(md, MdFlag.NEED_RKEY)
        key = base.mkey_pack()
        assert len(key) <= md.attr.key_size_max
        assert base.mkey_pack() == key
        info = um.key_query(key)
        assert (info.address, info.length, info.size) == (base.address, SIZE, len(key))
        assert info.flags == base.grant & MemFlag.ACCESS_REMOTE
        into = bytearray(b"\xee") * (len(key) + 8)
        assert base.mkey_pack_into(into) == len(key)
        assert into == key + b"\xee" * 8
        small = bytearray(b"\xee") * (len(key) - 1)
        with pytest.raises(um.InvalidParamError):
            base.mkey_pack_into(small)
        assert small == b"\xee" * (len(key) - 1), "a buffer that is too small was written to"

    def test_packs_only_what_is_declared(self, md: um.Md, base: um.Memh) -> None:
        flags = md.attr.flags
        if MdFlag.NEED_RKEY not in flags:
            self.refused(md, base.mkey_pack, base)
            return
        base.mkey_pack()
        for flag, way in ((MdFlag.INVALIDATE_RMA, RMA), (MdFlag.INVALIDATE_AMO, AMO)):
            if flag not in flags:
                self.refused(md, lambda: base.mkey_pack(way), base)  # noqa: B023
            elif way is RMA or base.grant & ATOMIC:
                assert base.mkey_pack(way) != base.mkey_pack(), "no revocable key of its own"
                assert base.mkey_pack(way) == base.mkey_pack(way)
        self.refused(md, lambda: base.mkey_pack(PackFlag.EXPORT), base)
        if MdFlag.INVALIDATE not in flags:
            self.refused(md, lambda: base.dereg(invalidate=True), base)

    def test_unpacks(self, md: um.Md, peer_md: um.Md, base: um.Memh) -> None:
        self.need(md, MdFlag.NEED_RKEY)
        key = base.mkey_pack()
        with peer_md.rkey_unpack(key) as rkey, peer_md.rkey_unpack(bytearray(key)) as again:
            assert (rkey.address, rkey.length) == (base.address, SIZE)
            assert rkey.flags == base.grant & MemFlag.ACCESS_REMOTE
            assert rkey.compare(again) == 0
        peer_md.peer_probe(key)

    def test_damaged_keys_are_refused(self, md: um.Md, peer_md: um.Md, base: um.Memh) -> None:
        """Cut off anywhere, one byte changed anywhere: an error of ours, and nothing is left."""
        self.need(md, MdFlag.NEED_RKEY)
        key = base.mkey_pack()
        peer_md.rkey_unpack(key).close()
        before = self.left(peer_md)
        cut = [key[:length] for length in range(len(key))]
        changed = [key[:i] + bytes([key[i] ^ 0x55]) + key[i + 1 :] for i in range(len(key))]
        for damaged in cut + changed:
            with pytest.raises(um.MemhError):
                peer_md.rkey_unpack(damaged)
        self.all_ended(peer_md, before)

    def test_a_payload_of_another_size_is_refused(
        self, md: um.Md, peer_md: um.Md, base: um.Memh
    ) -> None:
        """By the backend: the envelope and its checksum are right."""
        self.need(md, MdFlag.NEED_RKEY)
        key = base.mkey_pack()
        payload = key[ENVELOPE:]
        assert with_payload(key, payload) == key
        before = self.left(peer_md)
        wrong = [payload[:length] for length in range(len(payload))]
        wrong += [payload + b"\0", payload + payload + bytes(8)]
        for other in (other for other in wrong if len(other) not in self.other_payloads):
            with pytest.raises(um.MemhError):
                peer_md.rkey_unpack(with_payload(key, other))
            self.all_ended(peer_md, before)

    def test_raw_keys(self, md: um.Md, peer_md: um.Md, base: um.Memh) -> None:
        """The native payload alone, where the backend has one that can stand alone."""
        self.need(md, MdFlag.NEED_RKEY)
        base.mkey_pack()
        raw = outcome(lambda: base.mkey_pack(PackFlag.RAW))
        if isinstance(raw, um.MemhError):
            self.refused(md, lambda: base.mkey_pack(PackFlag.RAW), base)
            self.refused(peer_md, lambda: peer_md.rkey_from_raw(b"", base.address, SIZE), base)
            return
        with peer_md.rkey_from_raw(raw, base.address, SIZE) as rkey:
            assert (rkey.address, rkey.length) == (base.address, SIZE)
        before = self.left(peer_md)
        for wrong in (raw[:-1], raw + b"\0", b""):
            with pytest.raises(um.MemhError):
                peer_md.rkey_from_raw(wrong, base.address, SIZE)
        self.all_ended(peer_md, before)

    def test_any_payload_of_the_right_size_is_survived(
        self, md: um.Md, peer_md: um.Md, base: um.Memh
    ) -> None:
        """It may be refused or believed; a key is a capability, and a number may be any."""
        self.need(md, MdFlag.NEED_RKEY)
        key = base.mkey_pack()
        size = len(key) - ENVELOPE
        before = self.left(peer_md)
        for payload in (bytes(size), b"\xff" * size, text(size, 3), text(size, 4)):
            found = outcome(lambda: peer_md.rkey_unpack(with_payload(key, payload)))  # noqa: B023
            if isinstance(found, um.Rkey):
                found.close()
        self.all_ended(peer_md, before)

    def test_no_keys_without_their_flag(self, md: um.Md) -> None:
        self.lacks(md, MdFlag.NEED_RKEY)
        with self.unchanged(md), pytest.raises((um.UnsupportedError, um.MalformedKeyError)):
            md.rkey_unpack(bytes(ENVELOPE))

    # ---- data ----

    def test_round_trip(self, peer_md: um.Md, link: Link, base: um.Memh) -> None:
        """pack, unpack, get and put: whole, in parts, at both edges, and no byte besides."""
        spans = [(0, SIZE), (0, 1), (SIZE - 1, 1), (0, 0), (SIZE, 0), (SIZE - 8, 8), (1, 4097)]
        spans += [(13, 7), (4095, 2), (SIZE - 4097, 4097)]
        with peer_md.rkey_unpack(base.mkey_pack()) as rkey:
            for turn, (offset, length) in enumerate(spans):
                expected = text(SIZE)
                self.memory.store(0, expected)
                where = f"{length} bytes at {offset}"
                found = self.got(link, rkey, base.address + offset, length)
                assert found == expected[offset : offset + length], f"get of {where}"
                data = text(length, turn + 2)
                self.put(link, rkey, base.address + offset, data)
                expected = expected[:offset] + data + expected[offset + length :]
                assert self.memory.load() == expected, f"put of {where}"

    def test_a_key_of_another_memory_leads_there(
        self, md: um.Md, peer_md: um.Md, link: Link, allocate: Callable[[int], HostMemory]
    ) -> None:
        """Each key gets its own bytes, whatever the order in which they were made and unpacked."""
        memories = [allocate(4096) for _ in range(8)]
        for i, memory in enumerate(memories):
            memory.store(0, text(4096, i + 1))
        bases = [memory.mem_reg(md) for memory in memories]
        rkeys = [peer_md.rkey_unpack(base.mkey_pack()) for base in reversed(bases)][::-1]
        for i in (3, 0, 7, 1, 6, 2, 5, 4):
            assert self.got(link, rkeys[i], bases[i].address, 4096) == text(4096, i + 1), i
        for rkey, base in zip(rkeys, bases, strict=True):
            rkey.close()
            base.dereg()

    def test_the_peers_library_refuses(
        self, md: um.Md, peer_md: um.Md, link: Link, allocate: Callable[[int], HostMemory]
    ) -> None:
        """What a key does not give is refused before it costs a connection."""
        memory = allocate(SIZE)
        memory.store(0, text(SIZE))
        for flags in (GET, PUT):
            base = memory.mem_reg(md, flags)
            with peer_md.rkey_unpack(base.mkey_pack()) as rkey:
                end = base.address + SIZE
                good, bad = (self.got, self.zeroed)[:: 1 if flags is GET else -1]
                with pytest.raises(um.AccessError):
                    bad(link, rkey, base.address, 8)
                for address, length in [(base.address - 1, 1), (end, 1), (end - 1, 2)]:
                    with pytest.raises(um.RangeError):
                        good(link, rkey, address, length)
            base.dereg()
        assert memory.load() == text(SIZE)
        assert EpState.ERROR not in (link.far.state, link.near.state)

    def test_atomics(self, md: um.Md, peer_md: um.Md, link: Link, base: um.Memh) -> None:
        self.need(md, MdFlag.ATOMIC)
        self.memory.store(0, bytes(SIZE))
        at, far = base.address + -base.address % 8, link.far
        with peer_md.rkey_unpack(base.mkey_pack()) as rkey:

            def add(value: int) -> int | None:
                return far.fetch_add_nb(rkey, at, value).wait(self.wait)

            def swap(expect: int, value: int) -> int | None:
                return far.compare_swap_nb(rkey, at, expect, value).wait(self.wait)

            assert [add(5), add(2**64 - 1), add(0)] == [0, 5, 4], "fetch_add gives the old value"
            assert swap(4, 9) == 4, "compare_swap gives the old value"
            assert swap(4, 11) == 9, "compare_swap gives the old value also where it differs"
            assert add(0) == 9, "compare_swap changes only what is as expected"
            with pytest.raises(um.InvalidParamError):
                far.fetch_add_nb(rkey, at + 4, 1)

    def test_no_atomics_without_their_flag(
        self, md: um.Md, peer_md: um.Md, link: Link, base: um.Memh
    ) -> None:
        self.lacks(md, MdFlag.ATOMIC)
        assert not base.grant & ATOMIC
        with peer_md.rkey_unpack(base.mkey_pack()) as rkey:
            at = base.address + -base.address % 8
            self.refused(peer_md, lambda: link.far.fetch_add_nb(rkey, at, 1), base)
            self.refused(peer_md, lambda: link.far.compare_swap_nb(rkey, at, 0, 1), base)
        assert self.memory.load() == text(SIZE), "they are never emulated"

    def test_pointers(self, md: um.Md, peer_md: um.Md, base: um.Memh) -> None:
        self.need(md, MdFlag.NEED_RKEY)
        with peer_md.rkey_unpack(base.mkey_pack()) as rkey:
            if MdFlag.RKEY_PTR not in peer_md.attr.flags:
                self.refused(peer_md, rkey.ptr, base)
                return
            for offset, length in [(0, 64), (4097, 64), (SIZE - 64, 64)]:
                found = self.memory.at(rkey.ptr(base.address + offset), length)
                assert found == text(SIZE)[offset : offset + length], f"ptr() of {offset}"
            with pytest.raises(um.RangeError):
                rkey.ptr(base.address + SIZE + 1)

    def test_a_connection_begins_anew(self, peer_md: um.Md, link: Link, base: um.Memh) -> None:
        with peer_md.rkey_unpack(base.mkey_pack()) as rkey:
            for _ in range(3):
                assert self.got(link, rkey, base.address, 64) == text(SIZE)[:64]
                old = link.near.address, link.far.address
                link.renew()
                for was, ep in zip(old, (link.near, link.far), strict=True):
                    assert ep.address != was, "an address from before a reset would still be good"
            for bad in (b"", link.near.address[:-1]):
                with pytest.raises(um.MemhError):
                    link.far.connect(bad)
            assert self.got(link, rkey, base.address, 64) == text(SIZE)[:64]

    def test_no_endpoints_without_their_flag(self, md: um.Md) -> None:
        self.lacks(md, MdFlag.ENDPOINT)
        self.refused(md, md.endpoint)

    # ---- derived handles ----

    def test_nothing_derived_without_the_flag(self, md: um.Md, base: um.Memh) -> None:
        self.lacks(md, MdFlag.REG_DERIVED)
        base.explain()
        for call in (
            base.derive,
            lambda: base.derive(0, 8, GET),
            lambda: base.derive(SIZE + 1),
            lambda: md.mem_reg(bytearray(8), MemFlag.DERIVED_ONLY),
        ):
            self.refused(md, call, base)

    def test_derives_what_is_asked_for(
        self, md: um.Md, peer_md: um.Md, link: Link, base: um.Memh
    ) -> None:
        self.need(md, MdFlag.REG_DERIVED)
        spans = [(0, None), (0, 1), (4096, 4096), (13, 1001), (SIZE - 1, 1), (SIZE - 8, None)]
        for (offset, length), flags in itertools.product(spans, [GET, GET | PUT, None]):
            win = base.derive(offset, length, flags)
            length_ = SIZE - offset if length is None else length
            expected = text(SIZE)[offset : offset + length_]
            assert (win.address, win.length, win.base) == (base.address + offset, length_, base)
            with peer_md.rkey_unpack(win.mkey_pack()) as rkey:
                assert (rkey.address, rkey.length) == (win.address, length_)
                assert rkey.flags == (base.grant if flags is None else flags) & (
                    MemFlag.ACCESS_REMOTE
                )
                assert self.got(link, rkey, win.address, length_) == expected
            self.at_least_as_declared(md, win)
            win.dereg()

    def test_what_derive_cannot_do(self, md: um.Md, base: um.Memh) -> None:
        """Wider in range or rights: refused, and nothing has changed."""
        self.need(md, MdFlag.REG_DERIVED)
        win = base.derive(64, 64, GET)
        win.explain()
        for memh, span in ((base, SIZE), (win, 64)):
            for offset, length in [(0, span + 1), (span, 1), (span + 1, 0), (2**64 - 1, 2)]:
                with self.unchanged(md, base, win), pytest.raises(um.InvalidParamError):
                    memh.derive(offset, length)
        with self.unchanged(md, base, win), pytest.raises(um.InvalidParamError):
            win.derive(flags=GET | PUT)
        for flag in (MemFlag.GVA, MemFlag.SYMMETRIC_RKEY):
            self.refused(md, lambda: base.derive(flags=flag | GET), base, win)  # noqa: B023

    def test_a_base_is_busy_and_never_changed(self, md: um.Md, base: um.Memh) -> None:
        """Its bytes are the same before, while and after others come and go."""
        self.need(md, MdFlag.REG_DERIVED)
        key = base.mkey_pack()
        for _ in range(3):
            win = base.derive(64, 64)
            small = win.derive(8, 8, GET)
            keys = {memh.mkey_pack() for memh in (base, win, small)}
            assert len(keys) == 3, "two handles have one key"
            for busy in (base.dereg, win.dereg, win.invalidate):
                with self.unchanged(md, base, win, small), pytest.raises(um.BusyError):
                    busy()
            small.invalidate()
            win.invalidate()
            win.dereg()
            assert base.mkey_pack() == key, "derive has changed the base"

    def test_a_derived_only_region_gives_no_key_of_its_own(
        self, md: um.Md, allocate: Callable[[int], HostMemory]
    ) -> None:
        self.need(md, MdFlag.REG_DERIVED)
        base = allocate(SIZE).mem_reg(md, MemFlag.DERIVED_ONLY)
        for flags in (PackFlag.NONE, RMA, PackFlag.RAW):
            self.refused(md, lambda: base.mkey_pack(flags), base)  # noqa: B023
        base.derive().mkey_pack()
        base.dereg(cascade=True)

    def test_no_binding_to_endpoints_without_the_flag(
        self, md: um.Md, link: Link, base: um.Memh
    ) -> None:
        self.lacks(md, MdFlag.DERIVE_ENDPOINT)
        self.refused(md, lambda: base.derive(endpoint=link.near), base)

    # ---- revocation ----

    def test_invalidates(self, md: um.Md, base: um.Memh) -> None:
        """It is final, it is told once, and others go on."""
        self.need(md, MdFlag.REG_DERIVED)
        one, two, never_packed = (base.derive(0, 64) for _ in range(3))
        keys = [memh.mkey_pack() for memh in (one, two)]
        seen: list[Status] = []
        one.invalidate(seen.append)
        self.progressed(md, lambda: seen, "the end of an invalidate")
        never_packed.invalidate()
        for memh in (one, never_packed):
            assert memh.state is MemhState.REVOKED
            calls: list[Callable[[], object]] = [memh.mkey_pack, memh.derive, memh.invalidate]
            for call in calls:
                with pytest.raises(um.RevokedError):
                    call()
        for _ in range(10):
            md.progress()
        assert seen == [Status.OK], "the callback runs once"
        assert (two.state, two.mkey_pack()) == (MemhState.LIVE, keys[1])
        for cascade in (False, True):
            with pytest.raises(um.InvalidParamError):
                base.invalidate(cascade=cascade)
        two.dereg()

    def test_invalidates_many(self, md: um.Md, base: um.Memh) -> None:
        self.need(md, MdFlag.REG_DERIVED)
        wins = base.derive_many([i * 64 for i in range(self.cycles)], 64)
        packed = md.mkey_pack_many(wins)
        assert len({packed[i] for i in range(self.cycles)}) == self.cycles
        assert list(md.invalidate_many(wins)) == [Status.OK] * self.cycles
        assert {win.state for win in wins} == {MemhState.REVOKED}
        assert list(md.dereg_many(wins)) == [Status.OK] * self.cycles
        assert base.derived_count == 0

    def test_a_key_value_does_not_return_soon(self, md: um.Md, base: um.Memh) -> None:
        """Who kept a revoked key must not find another one behind its number."""
        self.need(md, MdFlag.REG_DERIVED)
        first = outcome(lambda: base.derive().mkey_pack(PackFlag.RAW))
        if isinstance(first, um.UnsupportedError):
            pytest.skip(f"{md.attr.component} packs no native key")
        seen = {first: 0}
        for turn in range(1, self.quarantine):
            win = base.derive()
            raw = win.mkey_pack(PackFlag.RAW)
            win.dereg(invalidate=True)
            assert raw not in seen, f"a value of {turn - seen[raw]} destructions ago is back"
            seen[raw] = turn

    # ---- who keeps the promises: attacked below the library ----

    def _as_claimed(self, rig: Rig, promise: str, accesses: tuple[str, ...], name: str) -> None:
        """No access of `rig` finds less than what is claimed."""
        action = getattr(Probes(rig), name)
        for access in accesses:
            row: Row = Probe(promise, access, action)()
            assert not row.failed, (
                f"{promise} of {access or 'all'}: claimed "
                f"{row.claimed.name if row.claimed else 'to hold'}, tried {row.tried}: {row.seen}"
            )

    def test_a_good_key_works(self, rig: Rig) -> None:
        """The control: without it a refusal proves nothing."""
        self._as_claimed(rig, "works", rig.accesses, "works")

    def test_rights_are_kept_as_claimed(self, rig: Rig) -> None:
        self._as_claimed(rig, "rights", rig.accesses, "rights")

    def test_ranges_are_kept_as_claimed(self, rig: Rig) -> None:
        self._as_claimed(rig, "range", rig.accesses, "range")

    def test_revocation_is_as_claimed(self, rig: Rig) -> None:
        """A revoked key is refused at once and after reconnecting; siblings and new ones work."""
        self.need(rig.owner, MdFlag.REG_DERIVED)
        self._as_claimed(rig, "revoke", rig.accesses, "revoke")

    def test_revocation_stops_what_is_in_flight(self, rig: Rig) -> None:
        self.need(rig.owner, MdFlag.REG_DERIVED)
        self._as_claimed(rig, "in flight", ("get", "put"), "in_flight")

    def test_a_bound_key_serves_its_endpoint_only(self, rig: Rig) -> None:
        self.need(rig.owner, MdFlag.DERIVE_ENDPOINT)
        self._as_claimed(rig, "endpoint", ("",), "endpoint")

    def test_numbers_next_to_a_key_are_no_keys(self, rig: Rig) -> None:
        self.need(rig.owner, MdFlag.REG_DERIVED)
        self._as_claimed(rig, "guess", ("",), "guess")

    # ---- threads, forks, the end ----

    def test_threads(
        self, md: um.Md, peer_md: um.Md, link: Link, allocate: Callable[[int], HostMemory]
    ) -> None:
        """Any call from any thread: each gets its own bytes, and nothing is left."""
        derives = MdFlag.REG_DERIVED in md.attr.flags
        failures: list[BaseException] = []
        barrier = threading.Barrier(4)

        def cycle(memory: HostMemory, expected: bytes) -> None:
            base = memory.mem_reg(md)
            memh = base.derive(64, 512, GET) if derives else base
            with peer_md.rkey_unpack(memh.mkey_pack()) as rkey:
                found = self.got(link, rkey, base.address + 64, 512)
            assert found == expected, "another thread's bytes"
            base.dereg(cascade=True)

        memories = [allocate(4096) for _ in range(4)]
        for seed, memory in enumerate(memories):
            memory.store(0, text(4096, seed))

        def work(seed: int, times: int) -> None:
            for _ in range(times):
                cycle(memories[seed], text(4096, seed)[64:576])

        def guarded(seed: int) -> None:
            barrier.wait()
            try:
                work(seed, self.cycles)
            except BaseException as error:
                failures.append(error)

        work(1, 1)  # which may make what is used again
        before = self.left(md)
        threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        self.all_ended(md, before)

    def test_a_forked_child_has_no_handles(self, md: um.Md, base: um.Memh) -> None:
        """It gets FORKED, frees nothing of its parent's, and the parent goes on."""
        key = outcome(base.mkey_pack)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child is careful
            child = os.fork()
        if child == 0:
            status = 1
            try:
                refused = [outcome(c) for c in (base.mkey_pack, base.dereg, md.endpoint, md.close)]
                status = 0 if all(isinstance(r, um.ForkedError) for r in refused) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert base.state is MemhState.LIVE
        assert outcome(base.mkey_pack) == key or isinstance(key, um.MemhError)
        base.dereg()

    def test_closes(self, md: um.Md, base: um.Memh) -> None:
        """Busy while something lives; by force everything ends."""
        with pytest.raises(um.BusyError):
            md.close()
        assert base.state is MemhState.LIVE
        md.close(force=True)
        assert (md.closed, base.state) == (True, MemhState.CLOSED)
        for call in (base.mkey_pack, lambda: md.mem_reg(bytearray(8)), md.progress):
            with pytest.raises(um.ClosedError):
                call()
        md.close()  # again: nothing
