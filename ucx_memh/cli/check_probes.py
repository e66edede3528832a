# SPDX-License-Identifier: BSD-3-Clause
"""The attacks: one function for each promise, which makes a row of what it saw."""

import time
from collections.abc import Iterator, Sequence

import ucx_memh as um
from ucx_memh.cli.check_rig import OPS, PAD, RIGHTS, SIZE, Outcome, Rig
from ucx_memh.cli.check_row import Probe, Row, untried
from ucx_memh.flags import Enforcement, MdFlag, PackFlag, Status

__all__ = ["Probes", "probes"]

AT, LENGTH = 16 << 10, 16 << 10  # of a range inside of a region
DEPTH = 32  # of what is in flight: how many operations
OWNERS_BYTE = b"\xfe"  # written by the owner when the key has gone; no put has it
BEGIN = 0.5  # seconds for the first byte to move


class ControlError(um.MemhError):
    """Something that must work does not, so that a refusal would say nothing."""


def probes(rig: Rig, cycles: int) -> Iterator[Probe]:
    """All that applies to this domain; what does not has a row that says why."""
    tries = Probes(rig)
    if um.MdFlag.ENDPOINT not in rig.flags:
        yield untried("works", "", "this domain moves no data itself")
        return
    accesses = rig.accesses
    for access in accesses:
        yield Probe("works", access, tries.works)
    if "atomic" not in accesses:
        yield untried("works", "atomic", "this domain has no atomics")
    for access in accesses:
        yield Probe("rights", access, tries.rights)
    for access in accesses:
        yield Probe("range", access, tries.range)
    if not rig.derives:
        yield untried("revoke", "", f"derived keys: none ({rig.no_derived})")
        return
    for access in accesses:
        yield Probe("revoke", access, tries.revoke)
    for access in ("get", "put"):
        yield Probe("in flight", access, tries.in_flight)
    yield Probe("base key", "", tries.base_key)
    if um.MdFlag.DERIVE_ENDPOINT in rig.flags:
        yield Probe("endpoint", "", tries.endpoint)
    else:
        yield untried("endpoint", "", "this domain binds no keys to endpoints")
    yield Probe("guess", "", tries.guess)
    yield Probe("survives", "", lambda row: tries.survives(row, cycles))


class Probes:
    """One method for each promise."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def works(self, row: Row) -> None:
        """The control: without it a refusal proves nothing."""
        row.tried, row.expected = "a key for everything", "works"
        with self.rig.region():
            memh = self.rig.grant(self.rig.all)
            seen = [self.rig.works(op, memh, memh.address) for op in OPS[row.access]]
        row.seen = "; ".join(filter(None, seen)) or "works"
        row.holds = not any(seen)

    def rights(self, row: Row) -> None:
        row.tried, row.expected = "by keys for something else", "refused"
        mine = RIGHTS[row.access]
        others = [RIGHTS[access] for access in self.rig.accesses if access != row.access]
        wrong = [*others, *([self.rig.all & ~mine] if len(others) > 1 else [])]
        outcomes = {}
        with self.rig.region():
            self._claim(row, "rights", self.rig.grant(mine))
            for rights in wrong:
                memh = self.rig.grant(rights)
                names = [name for name, right in RIGHTS.items() if right & rights]
                for name in names:  # it does what it is for
                    self._control(OPS[name][0], memh, memh.address)
                for op in OPS[row.access]:
                    outcomes[f"{op} by a key for {'+'.join(names)}"] = self.rig.either(
                        op, memh, memh.address
                    )
        self._judge(row, outcomes)

    def range(self, row: Row) -> None:
        row.tried, row.expected = "just outside of a key's range", "refused"
        op = OPS[row.access][0]
        outcomes = {}
        with self.rig.region() as base:
            memh = self.rig.grant(self.rig.all, AT, LENGTH)
            odd = self.rig.grant(self.rig.all, AT, LENGTH - 4)  # ends within a word
            self._claim(row, "range", memh)
            start, end, last = memh.address, memh.address + LENGTH, base.address + SIZE
            if row.access == "atomic":
                self._control(op, memh, end - 8)
                places = {
                    "the word before": (memh, start - 8, 8),
                    "the word after": (memh, end, 8),
                    "across the end": (odd, end - 8, 8),
                }
            else:
                self._control(op, memh, start, LENGTH)
                self._control(op, memh, end - 1, 1)
                places = {
                    "one byte before": (memh, start - 1, 1),
                    "one byte after": (memh, end, 1),
                    "across the start": (memh, start - 8, 16),
                    "across the end": (memh, end - 8, 16),
                    "one byte more than all": (memh, start, LENGTH + 1),
                }
            if self.rig.derives:  # else the key's range is the registration's
                places["before the registration"] = (memh, base.address - 8, 8)
                places["after the registration"] = (memh, last, 8)
            for where, (key, address, length) in places.items():
                outcomes[where] = self.rig.either(op, key, address, length)
        self._judge(row, outcomes)

    def revoke(self, row: Row) -> None:
        row.tried = "after invalidate, and after reconnecting"
        row.expected = "refused, and other keys work"
        ops = OPS[row.access]
        with self.rig.region():
            memh, sibling = self.rig.grant(self.rig.all), self.rig.grant(self.rig.all)
            self._claim(row, "revoke", memh)
            address = memh.address
            for op in ops:
                self._control(op, memh, address)
                self._control(op, sibling, address)
            known = self.rig.key(memh)  # a revoked handle packs no key
            rkey = self.rig.raw_key(memh) if self.rig.raw else known
            memh.invalidate()
            outcomes = {f"{op} at once": self.rig.access(op, rkey, address) for op in ops}
            outcomes |= {f"{op} reconnected": self.rig.access(op, rkey, address) for op in ops}
            if any(outcome.by is not Enforcement.ENFORCED for outcome in outcomes.values()):
                self.rig.peer.rkey_revoke(memh.revoke_notice())
                for name, outcome in outcomes.items():
                    by = self.rig.access(name.split()[0], known, address).by
                    outcomes[name] = Outcome(max(by, outcome.by), outcome.seen)
            new = self.rig.grant(self.rig.all)
            for what, other in (("a sibling key", sibling), ("a new key", new)):
                if seen := self.rig.works(ops[0], other, address):
                    row.holds, row.seen = False, f"{what} works no more: {seen}"
        if row.holds is None:
            self._judge(row, outcomes)

    def in_flight(self, row: Row) -> None:
        """Revoke in the middle of a stream.  Then the owner writes a byte of its own all over the
        range: one that is not there in the end was overwritten by a late put; one that a get has
        brought was read too late."""
        rig = self.rig
        size = min(rig.stream, rig.owner.attr.max_reg)
        each = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        row.tried = f"invalidate in a stream of {DEPTH} times {each}"
        row.expected = "no byte moves any more, and the peer is told"
        for attempt in range(3):
            with rig.region(size) as base:
                memh, sibling = rig.grant(RIGHTS[row.access]), rig.grant(rig.all)
                self._claim(row, "revoke", memh)
                rkey = rig.raw_key(memh) if rig.raw else rig.key(memh)
                buffers = [bytearray(size) for _ in range(DEPTH if row.access == "get" else 1)]
                if row.access == "put":
                    buffers[0][:] = b"\xff" * size
                needs = MdFlag.NEED_MEMH in rig.peer.attr.flags
                locals_ = [rig.peer.mem_reg(buffer) for buffer in buffers if needs]
                stream = self._stream(row.access, rkey, base.address, locals_ or buffers)
                self._wait_first(row.access, buffers, attempt)
                memh.invalidate()
                # From here on nothing may come or go.
                rig.memory.store(PAD, OWNERS_BYTE * size)
                start = time.perf_counter()
                ended = rig.settle(stream)
                seconds = time.perf_counter() - start
                statuses = [operation.status for operation in stream]
                if row.access == "put":
                    late = size - rig.memory.load(PAD, size).count(OWNERS_BYTE)
                else:
                    late = sum(buffer.count(OWNERS_BYTE) for buffer in buffers)
                again = rig.works_again(row.access, sibling)
                rig.settle(stream)  # the reset has ended what never was
                for local in locals_:
                    local.dereg()
            if late or any(status is not Status.OK for status in statuses):
                break
        done = statuses.count(Status.OK)
        row.seen = f"{late} bytes late; {done} done before, {len(statuses) - done} not"
        if not ended:
            never = statuses.count(Status.INPROGRESS)
            row.seen += f"; the peer was NEVER TOLD of {never} in {rig.wait:g} s"
        else:
            row.seen += f"; the peer knew after {seconds * 1e3:.1f} ms"
        if not again:
            row.seen += "; that connection does not work again after a reset, a new one does"
        if late:
            row.found = Enforcement.NONE
        elif done == len(statuses):
            row.reason = "all was done before the key had gone"
        else:
            row.found = Enforcement.ENFORCED

    def _stream(
        self, access: str, rkey: um.Rkey, address: int, locals_: Sequence[um.Memh | bytearray]
    ) -> list[um.Operation]:
        ep = self.rig.link.far
        post = ep.get_nb if access == "get" else ep.put_nb
        stream = []
        for i in range(DEPTH):
            try:
                stream.append(post(rkey, address, locals_[i % len(locals_)]))
            except um.BusyError:  # its queue is shorter
                break
        return stream

    def _wait_first(self, access: str, buffers: list[bytearray], attempt: int) -> None:
        """Until the first byte has moved, without progress: the device is at work then.  Where it
        is too fast to be met so, the next attempts do not wait."""
        end = time.perf_counter() + BEGIN
        rest = self.rig.rest[PAD]
        while attempt == 0 and time.perf_counter() < end:
            if (buffers[0][0] if access == "get" else self.rig.memory.load(PAD, 1)[0] - rest):
                break

    def base_key(self, row: Row) -> None:
        row.tried, row.expected = "the own key of a DERIVED_ONLY region", "refused"
        with self.rig.region() as base:
            try:
                rkey = self.rig.forged_key(base.mkey_pack(PackFlag.RAW))
            except um.UnsupportedError:
                row.reason = "the library gives it to nobody"
                return
            outcomes = {op: self.rig.access(op, rkey, base.address) for op in ("get", "put")}
        row.claimed = Enforcement.ENFORCED
        self._judge(row, outcomes)

    def endpoint(self, row: Row) -> None:
        row.tried, row.expected = "over a connection that it is not bound to", "refused"
        row.claimed = Enforcement.ENFORCED  # a flag declared is an operation provided
        rig = self.rig
        other = rig.connected()
        outcomes = {}
        with rig.region():
            memh = rig.grant(rig.all, endpoint=rig.link.near)
            if not rig.raw:
                row.reason = "there is no native key"
            for op in ("get", "put") if rig.raw else ():
                self._control(op, memh, memh.address)
                outcomes[op] = rig.access(op, rig.raw_key(memh), memh.address, link=other)
            # Before any reset or close of the endpoint that it is bound to.
            memh.invalidate()
        other.close()
        if outcomes:
            self._judge(row, outcomes)

    def guess(self, row: Row) -> None:
        """Where the native value lies among a key's bytes is seen by comparing siblings'."""
        rig = self.rig
        row.tried, row.expected = "native values next to a key's", "refused"
        if not rig.raw:
            row.reason = "there is no native key"
            return
        outcomes = {}
        with rig.region() as base:
            live = [rig.grant(rig.all).mkey_pack(PackFlag.RAW) for _ in range(4)]
            self._claim(row, "rights", rig.grants[0], "get")
            raw = live[0]
            varying = [i for i in range(len(raw)) if len({key[i] for key in live}) > 1]
            for i, change in [(i, c) for i in varying[:1] for c in (1, 2, 4, 0x80)] + [
                (i + 1, 1) for i in varying[:1] if i + 1 < len(raw)
            ]:
                guess = bytearray(raw)
                guess[i] ^= change
                # A key may have two values: a sibling's in the place of one is no guess.
                near = slice(varying[0], varying[0] + 2)
                if guess[near] not in [key[near] for key in live]:
                    rkey = rig.forged_key(bytes(guess))
                    outcomes[guess.hex()] = rig.access("get", rkey, base.address)
        if outcomes:
            self._judge(row, outcomes)
        else:
            row.reason = "the bytes of keys do not tell where their value is"

    def survives(self, row: Row, cycles: int) -> None:
        """The region's own key before and after, and whether each cycle leaves something."""
        rig = self.rig
        row.tried, row.expected = f"{cycles} times derive, pack, invalidate", "the region lives on"
        memory = rig.allocate(SIZE)
        memory.store(0, rig.rest[:SIZE])
        with rig.region(), memory.mem_reg(rig.owner) as base:
            key = rig.peer.rkey_unpack(base.mkey_pack())

            def right() -> bool:
                into = bytearray(8)
                rig.link.far.get_nb(key, base.address, into).wait(rig.wait)
                return into == memory.load(0, 8)

            before_works = right()
            packed = base.mkey_pack()
            for turn in range(cycles + 1):
                if turn == 1:
                    before = rig.owner.stats()  # the first may have made what is used again
                memh = base.derive(0, 4096, rig.all)
                memh.mkey_pack()
                memh.invalidate()
                memh.dereg()
            left = _left(before, rig.owner.stats())
            same = base.mkey_pack() == packed
            leaks = {name: count for name, count in left.items() if count > cycles // 10}
            row.holds = before_works and right() and same and not leaks
            row.seen = (
                "its own key works, in the same bytes; nothing is left"
                if row.holds
                else (f"works: {before_works} then {right()}, same bytes: {same}, left: {leaks}")
            )

    # ---- what they share ----

    def _control(self, op: str, memh: um.Memh, address: int, length: int = 8) -> None:
        if seen := self.rig.works(op, memh, address, length):
            raise ControlError(f"{op} with a good key: {seen}", op="check-device")

    def _claim(self, row: Row, promise: str, memh: um.Memh, access: str = "") -> None:
        """The larger of what the domain and the handle say."""
        tables = (self.rig.owner.attr.enforcement, memh.enforcement)
        rows = (getattr(table, promise) for table in tables)
        row.claimed = max(getattr(found, access or row.access) for found in rows)

    def _judge(self, row: Row, outcomes: dict[str, Outcome]) -> None:
        """The least that any of the attacks met."""
        row.found = min(outcome.by for outcome in outcomes.values())
        kinds: dict[str, list[str]] = {}
        for name, outcome in outcomes.items():
            kinds.setdefault(outcome.seen, []).append(name)
        if len(kinds) == 1:
            row.seen = f"{next(iter(kinds))}, {len(outcomes)} of {len(outcomes)}"
        else:
            row.seen = "; ".join(f"{seen}: {', '.join(names)}" for seen, names in kinds.items())


def _left(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What the counters say is there now and was not before."""
    more = {name: after[name] - before.get(name, 0) for name in after}
    left = {name: count for name, count in more.items() if name.startswith("live_")}
    pairs = (("create_", "destroy_"), ("alloc_", "dealloc_"), ("reg_", "dereg_"))
    for name, count in more.items():
        for made, ended in pairs:
            head, found, tail = name.rpartition("." + made)
            if found and (other := f"{head}.{ended}{tail}") in more:
                left[name] = count - more[other]
    return left
