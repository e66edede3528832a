# SPDX-License-Identifier: BSD-3-Clause
"""The operations, as methods (ucx_memh.python_backend has the list of them).

A domain is a folder with the file `memory` and an empty file for each key.  A transfer holds a
shared lock on its key's file.  A key ends when its file is gone and nobody holds such a lock.
"""

import ctypes
import fcntl
import itertools
import mmap
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import finalize

from ucx_memh import (
    BusyError,
    DeviceError,
    Enforcement,
    EnforcementRow,
    EnforcementTable,
    EpState,
    InvalidParamError,
    MalformedKeyError,
    Md,
    MdFlag,
    MemFlag,
    NoDeviceError,
    PeerGoneError,
    RevokedError,
    Status,
)
from ucx_memh.python_backend import OpKind, bind

PREFIX = "ucx_memh_file."
PAYLOAD = struct.Struct("<QI")  # where its owner has the memory, the key; then the folder
PAYLOAD_MAX = 176  # the most that a key has room for
CHUNK = 16 << 20  # bytes moved by one system call: Linux moves less than 2 GiB
ADDRESS = struct.Struct("<QQ")  # of an endpoint: which it is, how often it was reset
HELD = EnforcementRow(get=Enforcement.COOPERATIVE, put=Enforcement.COOPERATIVE)


class _File:
    """A descriptor that is closed when the last who uses it has let go of it: an rkey may be closed
    while a transfer with it is under way."""

    def __init__(self, path: str, flags: int) -> None:
        self.fd = os.open(path, flags | os.O_CLOEXEC)
        finalize(self, os.close, self.fd)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # and not in a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


class Device:
    """The memory of one domain, and the other side of the keys of others."""

    def __init__(self, parent: str, size: int) -> None:
        self.folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent or None)
        self.close = finalize(self, _remove, self.folder, os.getpid())
        try:
            if PAYLOAD.size + len(os.fsencode(self.folder)) > PAYLOAD_MAX:
                raise NoDeviceError(f"the name of {self.folder} is too long for a key")
            with open(os.path.join(self.folder, "memory"), "x+b") as file:
                file.truncate(size)
                self.memory = mmap.mmap(file.fileno(), size)
        except BaseException:
            self.close()
            raise
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._numbers = itertools.count(1)
        self._ends = itertools.count(1)
        self._ending: list = []  # key files that are gone, and what is called when they are unused
        self._lock = threading.Lock()

    def _key(self, number: int) -> str:
        return os.path.join(self.folder, str(number))

    def _add_key(self) -> int:
        number = next(self._numbers) & 0xFFFFFFFF
        os.close(os.open(self._key(number), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return number

    # ---- the owner's side

    def mem_reg(self, reg):
        start = reg.address - self.base
        if not 0 <= start <= start + reg.length <= len(self.memory):
            raise DeviceError("not in the memory of this domain", status=Status.INVALID_ADDR)
        number = self._add_key()
        return number, number

    def mem_dereg(self, reg):
        with open(self._key(reg.rkey)) as file:
            if not _unused(file.fileno()):
                raise BusyError("a peer is using its key")
            os.unlink(file.name)  # who waits for the lock sees it gone

    def mem_derive(self, base, memh):
        """Any range and rights: those who hold the key keep to them."""

    def key_create(self, memh, key):
        return self._add_key()

    def key_destroy(self, memh, key, done):
        path = self._key(key.value)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.unlink(path)  # from here on no transfer begins
        if _unused(fd):
            os.close(fd)
            return None
        with self._lock:
            self._ending.append((fd, done))
        return Status.INPROGRESS

    def progress(self):
        """End the keys that were under way and are not any more."""
        with self._lock:
            ended = [(fd, done) for fd, done in self._ending if _unused(fd)]
            self._ending = [item for item in self._ending if item not in ended]
        for fd, done in ended:
            os.close(fd)
            done()
        return len(ended)

    def mkey_pack(self, memh, rma, atomic):
        return PAYLOAD.pack(self.base, rma.value) + os.fsencode(self.folder)

    # ---- the peer's side

    def rkey_unpack(self, rkey, payload, raw):
        folder = os.fsdecode(payload[PAYLOAD.size :])
        if not os.path.basename(folder).startswith(PREFIX) or "\0" in folder:
            raise MalformedKeyError("its payload names no folder of this component")
        base, number = PAYLOAD.unpack_from(payload)
        key = os.path.join(folder, str(number))
        mode = os.O_RDWR if rkey.rights & MemFlag.REMOTE_PUT else os.O_RDONLY
        with _in_use(key):
            memory = _File(os.path.join(folder, "memory"), mode)
        start = rkey.address - base
        if not 0 <= start <= start + rkey.length <= os.fstat(memory.fd).st_size:
            raise MalformedKeyError("its range is not in its file")
        rkey.data = memory, base, key

    # ---- transfers; there is no connection, so it is always there

    def ep_create(self, ep):
        ep.data = [next(self._ends), 0]

    def ep_destroy(self, ep):
        pass

    def ep_address(self, ep):
        return ADDRESS.pack(*ep.data)

    def ep_connect(self, ep, address):
        if len(address) != ADDRESS.size:
            raise InvalidParamError("not the address of an endpoint of this component")

    def ep_reset(self, ep):
        ep.data[1] += 1

    def ep_state(self, ep):
        return EpState.CONNECTED

    def ep_post(self, ep, op):
        """Move the bytes now.  An error before the first one is raised: nothing has happened."""
        memory, base, key = op.rkey.data
        move = os.preadv if op.kind is OpKind.GET else os.pwritev
        with _in_use(key):
            while op.bytes_done < op.length:
                rest = op.local[op.bytes_done : op.bytes_done + CHUNK]
                moved = move(memory.fd, [rest], op.remote_address - base + op.bytes_done)
                if moved == 0:
                    raise PeerGoneError("its owner's file is shorter now")
                op.bytes_done += moved

    # ---- words

    def stats(self):
        return {"ending": len(self._ending)}

    def explain(self, memh):
        about = f"{self.folder}: a file of {len(self.memory)} bytes, and one for each key\n"
        return about + "rights, range and revocation are kept by those who have the keys\n"


def _unused(fd: int) -> bool:
    """Has nobody the key's file in use?  Nobody begins then, until it is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _in_use(path: str) -> Iterator[None]:
    """The key's file is in use meanwhile.  RevokedError, PeerGoneError: there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if os.path.isdir(os.path.dirname(path)):
            raise RevokedError("its owner has taken it back") from error
        raise PeerGoneError("its owner has ended, or is elsewhere") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink == 0:
            raise RevokedError("its owner has taken it back")
        yield
    finally:
        os.close(fd)


def open_md(device: Device) -> Md:
    """The domain of a device, which owns it from then on."""
    return bind(
        device,
        component="file",
        md_name="memory",
        flags=MdFlag.REG | MdFlag.NEED_RKEY | MdFlag.REG_DERIVED | MdFlag.ENDPOINT,
        rkey_packed_size=PAYLOAD_MAX,
        bounce_size=2**64 - 1,  # a transfer of any size needs no local key
        quarantine=0,  # a number never comes back
        enforcement=EnforcementTable(HELD, HELD, HELD),
    )
