# SPDX-License-Identifier: BSD-3-Clause
"""A backend in pure Python: keys in dictionaries, bytes moved inside this process.

It has all the methods that ucx_memh.python_backend knows and serves as a pattern for backends,
for mocks and for tracing.  Devices of one process reach each other.
"""

import ctypes
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Literal

from ucx_memh.core import Md
from ucx_memh.errors import (
    BusyError,
    FlushedError,
    InvalidParamError,
    MalformedKeyError,
    MemhError,
    PeerGoneError,
    RemoteAccessError,
    StaleKeyError,
)
from ucx_memh.flags import Enforcement, EpState, MdFlag, MemFlag, MemType, Status
from ucx_memh.python_backend import (
    Completion,
    Ep,
    Handle,
    Key,
    KeyKind,
    OpKind,
    Registration,
    RemoteKey,
    Transfer,
    bind,
)
from ucx_memh.resources import EnforcementRow, EnforcementTable

__all__ = ["PythonDevice", "open_python_device"]

FLAGS = (
    MdFlag.REG
    | MdFlag.NEED_RKEY
    | MdFlag.RKEY_PTR
    | MdFlag.INVALIDATE
    | MdFlag.INVALIDATE_RMA
    | MdFlag.INVALIDATE_AMO
    | MdFlag.REG_DERIVED
    | MdFlag.DERIVE_ENDPOINT
    | MdFlag.ENDPOINT
    | MdFlag.ATOMIC
    | MdFlag.EVENT_FD
)
PAYLOAD = struct.Struct("<QII")  # device, key for put and get, key for atomics
ADDRESS = struct.Struct("<QQQ")  # device, endpoint, epoch
WORD = struct.Struct("=Q")
NEEDS = {
    OpKind.GET: MemFlag.REMOTE_GET,
    OpKind.PUT: MemFlag.REMOTE_PUT,
    OpKind.FETCH_ADD: MemFlag.REMOTE_ATOMIC,
    OpKind.COMPARE_SWAP: MemFlag.REMOTE_ATOMIC,
}
ENFORCED = EnforcementRow(*[Enforcement.ENFORCED] * 3)


class _End:
    """What the device knows of an endpoint."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = 1
        self.state = EpState.IDLE
        self.peer: _End | None = None
        self.peer_epoch = 0


class PythonDevice:
    """The device and the backend in one.

    `destroy`: "now", "progress" (key_destroy ends in the next progress()) or "manual" (in
    complete()); `deferred`: operations move their bytes in progress() only.  `calls` counts the
    methods that were called, `faults` {method: exceptions} has what they raise, one at a time, and
    `delays` {method: seconds} how long they take, in which other threads run.
    """

    devices: ClassVar[dict[int, "PythonDevice"]] = {}
    _wire = threading.RLock()  # all devices, their keys and endpoints
    _last: ClassVar[int] = 0

    def __init__(
        self, destroy: Literal["now", "progress", "manual"] = "now", deferred: bool = False
    ) -> None:
        self.destroy = destroy
        self.deferred = deferred
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, list[BaseException]] = {}
        self.delays: dict[str, float] = {}
        self.keys: dict[int, tuple[int, int, MemFlag, _End | None]] = {}
        self.ends: dict[int, _End] = {}
        self.dying: deque[tuple[int, Completion]] = deque()
        self.posted: deque[tuple[_End, Transfer]] = deque()
        self.event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with self._wire:
            PythonDevice._last += 1
            self.guid = PythonDevice._last
            self.next_value = self.guid << 20 & 0xFFFFFFFF | 1
            self.devices[self.guid] = self

    def _enter(self, method: str) -> None:
        self.calls[method] += 1
        if seconds := self.delays.get(method):
            time.sleep(seconds)
        if faults := self.faults.get(method):
            raise faults.pop(0)

    # ---- memory and keys

    def _add_key(self, address: int, length: int, rights: MemFlag, end: _End | None) -> int:
        with self._wire:
            value = self.next_value
            self.next_value = value + 1 & 0xFFFFFFFF
            self.keys[value] = (address, length, rights, end)
            return value

    def mem_reg(self, reg: Registration) -> tuple[int, int]:
        self._enter("mem_reg")
        value = self._add_key(reg.address, reg.length, reg.direct_rights, None)
        return value, value

    def mem_dereg(self, reg: Registration) -> None:
        self._enter("mem_dereg")
        del self.keys[reg.rkey]

    def mem_derive(self, base: Handle, memh: Handle) -> None:
        self._enter("mem_derive")

    def key_create(self, memh: Handle, key: Key) -> int:
        self._enter("key_create")
        rights = memh.rights
        if key.kind is KeyKind.INDIRECT:
            rights &= ~MemFlag.REMOTE_ATOMIC
        elif key.kind is KeyKind.ATOMIC:
            rights &= MemFlag.REMOTE_ATOMIC
        end = memh.endpoint.data if memh.endpoint else None
        return self._add_key(memh.address, memh.length, rights, end)

    def key_destroy(self, memh: Handle | None, key: Key, done: Completion) -> Status | None:
        self._enter("key_destroy")
        if self.destroy == "now":
            del self.keys[key.value]
            return None
        self.dying.append((key.value, done))
        self._wake()
        return Status.INPROGRESS

    def mkey_pack(self, memh: Handle, rma: Key, atomic: Key | None) -> bytes:
        self._enter("mkey_pack")
        return PAYLOAD.pack(self.guid, rma.value, atomic.value if atomic else rma.value)

    def complete(self, count: int | None = None, status: Status = Status.OK) -> int:
        """Finish destructions, the oldest first; with an error the keys stay."""
        done = 0
        with self._wire:
            while self.dying and done != count:
                value, completion = self.dying.popleft()
                if status == Status.OK:
                    del self.keys[value]
                completion(status)
                done += 1
        return done

    # ---- the peer's side

    def rkey_unpack(self, rkey: RemoteKey, payload: bytes, raw: bool) -> None:
        self._enter("rkey_unpack")
        if len(payload) != PAYLOAD.size:
            raise MalformedKeyError("a payload of another size")
        guid, *values = PAYLOAD.unpack(payload)
        if guid not in self.devices:
            raise PeerGoneError("no such device")
        rkey.data = guid, values

    def rkey_release(self, rkey: RemoteKey) -> None:
        self._enter("rkey_release")

    def rkey_ptr(self, rkey: RemoteKey, address: int) -> int:
        self._enter("rkey_ptr")
        return address  # the same process

    # ---- connections

    def ep_create(self, ep: Ep) -> None:
        self._enter("ep_create")
        with self._wire:
            ep.data = _End(1 + max(self.ends, default=0))
            self.ends[ep.data.number] = ep.data

    def ep_destroy(self, ep: Ep) -> None:
        self._enter("ep_destroy")
        self._flush(ep.data)
        del self.ends[ep.data.number]

    def ep_address(self, ep: Ep) -> bytes:
        self._enter("ep_address")
        return ADDRESS.pack(self.guid, ep.data.number, ep.data.epoch)

    def ep_connect(self, ep: Ep, address: bytes) -> None:
        self._enter("ep_connect")
        if len(address) != ADDRESS.size:
            raise InvalidParamError("not an endpoint's address")
        guid, number, epoch = ADDRESS.unpack(address)
        with self._wire:
            device = self.devices.get(guid)
            peer = device.ends.get(number) if device else None
            if peer is None:
                raise PeerGoneError("no such endpoint")
            if peer.epoch != epoch:
                raise StaleKeyError("an address from before the peer's reset")
            if ep.data.state is not EpState.IDLE:
                raise InvalidParamError("connected already")
            ep.data.peer, ep.data.peer_epoch = peer, epoch
            ep.data.state = EpState.CONNECTED

    def ep_reset(self, ep: Ep) -> None:
        self._enter("ep_reset")
        self._flush(ep.data)
        with self._wire:
            ep.data.epoch += 1
            ep.data.state, ep.data.peer = EpState.IDLE, None

    def ep_state(self, ep: Ep) -> EpState:
        self._enter("ep_state")
        state: EpState = ep.data.state
        return state

    def ep_post(self, ep: Ep, op: Transfer) -> Status | None:
        self._enter("ep_post")
        if not self.deferred:
            self._carry_out(ep.data, op)
            return None
        with self._wire:
            if len(self.posted) >= 1024:
                raise BusyError(status=Status.NO_RESOURCE)
            self.posted.append((ep.data, op))
        self._wake()
        return Status.INPROGRESS

    def _flush(self, end: _End) -> None:
        """Drop what is queued; the library completes it.  None is being carried out then."""
        with self._wire:
            self.posted = deque(item for item in self.posted if item[0] is not end)

    def _carry_out(self, end: _End, op: Transfer) -> None:
        """Look at the key and move the bytes; the device's work."""
        try:
            with self._wire:
                if end.state is not EpState.CONNECTED or end.peer is None:
                    raise FlushedError
                guid, values = op.rkey.data
                device = self.devices.get(guid)
                if device is None or end.peer_epoch != end.peer.epoch:
                    raise FlushedError("the peer is gone, or was reset")
                value = values[op.kind >= OpKind.FETCH_ADD]
                address, length, rights, only = device.keys.get(value, (0, 0, MemFlag(0), None))
                start = op.remote_address - address
                if (
                    not rights & NEEDS[op.kind]
                    or not 0 <= start <= start + op.length <= length
                    or only not in (None, end.peer)
                ):
                    end.state = end.peer.state = EpState.ERROR
                    raise RemoteAccessError("the device refused the key")
                self._move(op)
            op.complete()
        except MemhError as error:
            op.complete(error.status, error.detail)

    @staticmethod
    def _look(address: int, length: int) -> memoryview:
        """The memory there, of this process."""
        return memoryview((ctypes.c_char * length).from_address(address)).cast("B")

    def _move(self, op: Transfer) -> None:
        remote = self._look(op.remote_address, op.length)
        if op.kind is OpKind.GET:
            op.local[:] = remote
        elif op.kind is OpKind.PUT:
            remote[:] = op.local
        else:
            (op.result,) = WORD.unpack(remote)
            word = op.result + op.operand & 2**64 - 1
            if op.kind is OpKind.COMPARE_SWAP:
                word = op.operand if op.result == op.compare else op.result
            WORD.pack_into(remote, 0, word)

    # ---- progress

    def progress(self) -> int:
        self._enter("progress")
        done = self.complete() if self.destroy == "progress" else 0
        while self.posted:
            with self._wire:
                if self.posted:
                    self._carry_out(*self.posted.popleft())
                    done += 1
        return done

    def _wake(self) -> None:
        os.eventfd_write(self.event, 1)

    def event_fd(self) -> int:
        self._enter("event_fd")
        return self.event

    def event_arm(self) -> bool:
        self._enter("event_arm")
        with suppress(BlockingIOError):
            os.eventfd_read(self.event)
        return not self.posted and (self.destroy == "manual" or not self.dying)

    # ---- the rest

    def mem_enforcement(self, memh: Handle) -> EnforcementTable:
        self._enter("mem_enforcement")
        return EnforcementTable(ENFORCED, ENFORCED, ENFORCED)

    def stats(self) -> dict[str, int]:
        return {"python_keys": len(self.keys), **{f"python_{n}": c for n, c in self.calls.items()}}

    def explain(self, memh: Handle | None) -> str:
        self._enter("explain")
        return f"PythonDevice {self.guid}: keys are entries of a dictionary"

    def peer_evict(self, identity: bytes) -> None:
        self._enter("peer_evict")

    def mem_query(self, address: int, length: int) -> MemType:
        self._enter("mem_query")
        return MemType.HOST

    def close(self) -> None:
        self._enter("close")
        with self._wire:
            del self.devices[self.guid]
        os.close(self.event)


def open_python_device(
    component: str = "python",
    md_name: str = "python0",
    device: Callable[..., Any] = PythonDevice,
    **options: Any,
) -> tuple[Md, Any]:
    """Open a device that is written in Python: (Md, PythonDevice).

    `device` makes it (a subclass, say) from `options`, which are PythonDevice's.
    """
    backend = device(**options)
    md = bind(
        backend,
        component=component,
        md_name=md_name,
        flags=FLAGS,
        rkey_packed_size=PAYLOAD.size,
        rkey_raw_size=PAYLOAD.size,
        quarantine=64,
        software=True,
        enforcement=EnforcementTable(ENFORCED, ENFORCED, ENFORCED),
    )
    return md, backend
