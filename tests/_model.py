# SPDX-License-Identifier: BSD-3-Clause
"""A plain Python model of handles and keys, and a machine that compares a domain with it."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

import ucx_memh as um

GET, PUT, ATOMIC = um.MemFlag.REMOTE_GET, um.MemFlag.REMOTE_PUT, um.MemFlag.REMOTE_ATOMIC
REMOTE = GET | PUT | ATOMIC
LOCAL = um.MemFlag.LOCAL_READ | um.MemFlag.LOCAL_WRITE
LENGTH = 4096
LIVE, REVOKED, CLOSED = um.MemhState.LIVE, um.MemhState.REVOKED, um.MemhState.CLOSED

OFFSETS = st.integers(0, 64) | st.integers(0, LENGTH + 1)

PROFILE = settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True)


@dataclass(eq=False)
class Handle:
    """What the model knows of a handle."""

    memh: um.Memh
    parent: "Handle | None"
    memory: bytearray
    shadow: bytearray  # what the memory ought to hold
    start: int  # in the memory
    length: int
    rights: um.MemFlag  # of its own keys, the remote ones
    grant: um.MemFlag
    state: um.MemhState = LIVE
    children: list["Handle"] = field(default_factory=list)
    key: bytes | None = None

    @property
    def base(self) -> "Handle":
        return self if self.parent is None else self.parent.base

    @property
    def live_children(self) -> list["Handle"]:
        return [child for child in self.children if child.state is LIVE]

    def dead_error(self) -> type[um.MemhError]:
        return um.ClosedError if self.state is CLOSED else um.RevokedError


class HandleMachine(RuleBasedStateMachine):
    """Random calls over several handles; each answer is what the model says."""

    handles = Bundle("handles")
    rkeys = Bundle("rkeys")

    def open_md(self) -> Any:
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.md = self.open_md()
        self.all: list[Handle] = []
        self.unpacked: list[um.Rkey] = []
        self.ours, self.theirs = self.md.endpoint(), self.md.endpoint()
        self.connect()

    def connect(self) -> None:
        self.ours.connect(self.theirs.address)
        self.theirs.connect(self.ours.address)

    def reconnect(self) -> None:
        self.ours.reset()
        self.theirs.reset()
        self.connect()

    # ---- owner ----

    @rule(target=handles, grant=st.sampled_from([REMOTE, GET, GET | PUT]), only=st.booleans())
    def mem_reg(self, grant: um.MemFlag, only: bool) -> Handle:
        memory = bytearray(range(256)) * (LENGTH // 256)
        flags = grant | LOCAL | (um.MemFlag.DERIVED_ONLY if only else 0)
        memh = self.md.mem_reg(memory, flags)
        rights = um.MemFlag(0) if only else grant
        made = Handle(memh, None, memory, bytearray(memory), 0, LENGTH, rights, grant | LOCAL)
        self.all.append(made)
        return made

    @rule(
        target=handles,
        parent=handles,
        offset=st.sampled_from([0, 0, 0, 8, 100, LENGTH, LENGTH + 1]),
        length=st.sampled_from([64, 256, 1000, 0, LENGTH]),
        drop=st.sampled_from([um.MemFlag(0), um.MemFlag(0), GET, PUT, ATOMIC, LOCAL]),
    )
    def derive(self, parent: Handle, offset: int, length: int, drop: um.MemFlag):
        grant = parent.grant & ~drop
        wide = offset > parent.length or length > parent.length - offset
        if parent.state is not LIVE:
            with pytest.raises(parent.dead_error()):
                parent.memh.derive(offset, length, grant)
            return multiple()
        if wide:
            with pytest.raises(um.InvalidParamError):
                parent.memh.derive(offset, length, grant)
            return multiple()
        memh = parent.memh.derive(offset, length, grant)
        base = parent.base
        made = Handle(
            memh, parent, base.memory, base.shadow, parent.start + offset, length,
            grant & REMOTE, grant,
        )  # fmt: skip
        parent.children.append(made)
        self.all.append(made)
        return made

    @rule(parent=handles, extra=st.sampled_from([GET, PUT, ATOMIC]))
    def derive_wider(self, parent: Handle, extra: um.MemFlag) -> None:
        if extra & parent.grant or parent.state is not LIVE:
            return
        with pytest.raises(um.InvalidParamError):
            parent.memh.derive(flags=parent.grant | extra)

    @rule(target=rkeys, handle=handles)
    def pack_and_unpack(self, handle: Handle):
        if handle.state is not LIVE:
            with pytest.raises(handle.dead_error()):
                handle.memh.mkey_pack()
            return multiple()
        if not handle.rights:
            error = um.UnsupportedError if handle.parent is None else um.AccessError
            with pytest.raises(error):
                handle.memh.mkey_pack()
            return multiple()
        key = handle.memh.mkey_pack()
        assert handle.key in (None, key)
        handle.key = key
        rkey = self.md.rkey_unpack(key)
        assert (rkey.length, rkey.flags) == (handle.length, handle.rights)
        self.unpacked.append(rkey)
        return handle, rkey

    @rule(handle=handles)
    def invalidate(self, handle: Handle) -> None:
        if handle.state is CLOSED:
            with pytest.raises(um.ClosedError):
                handle.memh.invalidate()
        elif handle.parent is None:
            with pytest.raises(um.InvalidParamError):
                handle.memh.invalidate()
        elif handle.state is REVOKED:
            with pytest.raises(um.RevokedError):
                handle.memh.invalidate()
        elif handle.live_children:
            with pytest.raises(um.BusyError):
                handle.memh.invalidate()
        else:
            handle.memh.invalidate()
            handle.state = REVOKED

    @rule(handle=handles, cascade=st.booleans())
    def dereg(self, handle: Handle, cascade: bool) -> None:
        if handle.state is not CLOSED and handle.live_children and not cascade:
            with pytest.raises(um.BusyError):
                handle.memh.dereg()
            return
        handle.memh.dereg(cascade=cascade)
        for below in self.descendants(handle):
            if below.state is LIVE:
                below.state = REVOKED
        handle.state = CLOSED

    def descendants(self, handle: Handle) -> list[Handle]:
        return [each for child in handle.children for each in (child, *self.descendants(child))]

    # ---- peer ----

    def expected(self, handle: Handle, offset: int, length: int, right: um.MemFlag):
        """What the access raises, and whether the device is what refuses it."""
        if offset > handle.length or length > handle.length - offset:
            return um.RangeError
        if not handle.rights & right:
            return um.AccessError
        if handle.state is not LIVE and length:
            return um.RemoteAccessError
        return None

    @rule(pair=rkeys, offset=OFFSETS, length=st.integers(0, 64))
    def get(self, pair: tuple[Handle, um.Rkey], offset: int, length: int) -> None:
        handle, rkey = pair
        into = bytearray(length)
        error = self.expected(handle, offset, length, GET)
        if error is None:
            self.ours.get(rkey, rkey.address + offset, into)
            at = handle.start + offset
            assert into == handle.shadow[at : at + length]
            return
        with pytest.raises(error):
            self.ours.get(rkey, rkey.address + offset, into)
        assert into == bytes(length)
        if error is um.RemoteAccessError:
            self.reconnect()

    @rule(pair=rkeys, offset=OFFSETS, data=st.binary(max_size=64))
    def put(self, pair: tuple[Handle, um.Rkey], offset: int, data: bytes) -> None:
        handle, rkey = pair
        error = self.expected(handle, offset, len(data), PUT)
        if error is None:
            self.ours.put(rkey, rkey.address + offset, data)
            at = handle.start + offset
            handle.shadow[at : at + len(data)] = data
            return
        with pytest.raises(error):
            self.ours.put(rkey, rkey.address + offset, data)
        if error is um.RemoteAccessError:
            self.reconnect()

    @rule(pair=rkeys, word=st.integers(0, 8), value=st.integers(0, 2**64 - 1))
    def fetch_add(self, pair: tuple[Handle, um.Rkey], word: int, value: int) -> None:
        handle, rkey = pair
        # Aligned in memory, wherever the handle's range starts.
        offset = -rkey.address % 8 + 8 * word
        error = self.expected(handle, offset, 8, ATOMIC)
        if error is None:
            at = handle.start + offset
            old = int.from_bytes(handle.shadow[at : at + 8], "little")
            assert self.ours.fetch_add(rkey, rkey.address + offset, value) == old
            handle.shadow[at : at + 8] = ((old + value) % 2**64).to_bytes(8, "little")
            return
        with pytest.raises(error):
            self.ours.fetch_add(rkey, rkey.address + offset, value)
        if error is um.RemoteAccessError:
            self.reconnect()

    @rule(pair=rkeys)
    def revoke_and_use(self, pair: tuple[Handle, um.Rkey]) -> None:
        """The order that matters most, and that chance finds seldom."""
        handle = pair[0]
        if handle.parent is None or handle.live_children:
            return
        if handle.state is LIVE:
            self.invalidate(handle)
        self.get(pair, 0, 1)
        self.put(pair, 0, b"late")
        self.fetch_add(pair, 0, 1)

    @rule(pair=consumes(rkeys))
    def close_rkey(self, pair: tuple[Handle, um.Rkey]) -> None:
        pair[1].close()

    # ---- always ----

    @invariant()
    def as_the_model_says(self) -> None:
        if not hasattr(self, "md"):
            return
        for handle in self.all:
            assert handle.memh.state is handle.state
            assert handle.memh.derived_count == len(handle.live_children)
            assert handle.memory == handle.shadow
        stats = self.md.stats()
        live = [handle for handle in self.all if handle.state is LIVE]
        assert stats["live_bases"] == sum(handle.parent is None for handle in live)
        assert stats["live_derived"] == sum(handle.parent is not None for handle in live)

    def teardown(self) -> None:
        if not hasattr(self, "md"):
            return
        for handle in self.all:
            handle.memh.dereg(cascade=True)
        for rkey in self.unpacked:
            rkey.close()
        self.ours.close()
        self.theirs.close()
        stats = self.md.stats()
        assert {name: n for name, n in stats.items() if name.startswith("live_") and n} == {}
        assert stats["key_create"] == stats["key_destroy"]
        assert stats["mem_reg"] == stats["mem_dereg"]
        self.nothing_left()
        self.md.close()

    def nothing_left(self) -> None:
        """What else must be gone at the end; for subclasses."""
