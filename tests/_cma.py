# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of cma share: raw mappings, forged keys, and a peer that does as it is told."""

import ctypes
import ctypes.util
import mmap
import os
import struct
import sys
from typing import Any

import ucx_memh as um

PAGE = mmap.PAGESIZE
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
PR_SET_DUMPABLE = 4
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
FAILED = 2**64 - 1


def libc(name: str, *args: Any) -> int:
    result = getattr(LIBC, name)(*args)
    if result in (-1, FAILED):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


class Pages:
    """An anonymous mapping with an address; parts of it can be taken away."""

    def __init__(self, pages: int, flags: int = 0) -> None:
        self.length = pages * PAGE
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = libc("mmap", None, self.length, 3, flags, -1, 0)
        self.view = (ctypes.c_char * self.length).from_address(self.address)

    def unmap(self, page: int, count: int = 1) -> None:
        libc("munmap", self.address + page * PAGE, count * PAGE)

    def protect(self, page: int, prot: int, count: int = 1) -> None:
        libc("mprotect", self.address + page * PAGE, count * PAGE, prot)

    def part(self, offset: int, length: int) -> Any:
        """A writable buffer on a part of it; nothing is looked at."""
        return (ctypes.c_char * length).from_address(self.address + offset)

    def close(self) -> None:
        libc("munmap", self.address, self.length)


def pattern(length: int, seed: int = 0) -> bytes:
    period = bytes((i * 7 + seed) % 251 for i in range(251))
    return (period * (length // 251 + 1))[:length]


def peer_error_fields(error: um.MemhError, *needed: object) -> bool:
    """Does the message name them all?"""
    text = str(error)
    missing = [item for item in needed if str(item) not in text]
    assert not missing, f"{missing} not in {text!r}"
    return True


# ---- keys ----

CRC_AT, OWNER_AT = 12, 48
OWNER = struct.Struct("<QQIIII")  # host, start time, pid, pid namespace, user namespace, 0


def owner_of(key: bytes) -> tuple[int, ...]:
    return OWNER.unpack_from(key, OWNER_AT)


def crc32c(data: bytes) -> int:
    """RFC 3720, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def forged(key: bytes, **changes: int) -> bytes:
    """The key with another owner, and a checksum that fits."""
    names = ("host", "start_time", "pid", "pid_ns", "user_ns", "reserved")
    fields = dict(zip(names, owner_of(key), strict=True)) | changes
    key = key[:OWNER_AT] + OWNER.pack(*fields.values()) + key[OWNER_AT + OWNER.size :]
    crc = crc32c(key[:CRC_AT] + bytes(4) + key[CRC_AT + 4 :])
    return key[:CRC_AT] + struct.pack("<I", crc) + key[CRC_AT + 4 :]


# ---- the other process ----


def become(uid: int) -> None:
    """Another user, whose processes may be reached by each other (as after a login)."""
    um.open_md("cma").close()  # imports all that is needed: that user may not read our files
    os.setgid(uid)
    os.setuid(uid)
    libc("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


class Peer:
    """What a told process has; its methods are what can be asked of it."""

    def __init__(self, uid: int, config: dict[str, Any]) -> None:
        if uid:
            become(uid)
        self.md = um.open_md("cma", **config)
        self.ep = self.md.endpoint()
        self.pages: list[Pages] = []
        self.memhs: list[um.Memh] = []
        self.rkeys: dict[bytes, um.Rkey] = {}

    def register(self, pages: int, data: bytes = b"") -> bytes:
        mapping = Pages(pages)
        mapping.view[: len(data)] = data
        self.pages.append(mapping)
        memh = self.md.mem_reg(address=mapping.address, length=mapping.length, owner=mapping)
        self.memhs.append(memh)
        return memh.mkey_pack()

    def unmap(self, page: int, count: int = 1) -> None:
        self.pages[-1].unmap(page, count)

    def protect(self, page: int, prot: int) -> None:
        self.pages[-1].protect(page, prot)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.pages[-1].part(offset, length))

    def get(self, key: bytes, offset: int, length: int) -> bytes:
        rkey = self.rkeys.get(key) or self.rkeys.setdefault(key, self.md.rkey_unpack(key))
        into = bytearray(length)
        self.ep.get(rkey, rkey.address + offset, into)
        return bytes(into)

    def stats(self) -> dict[str, int]:
        return self.md.stats()

    def dumpable(self, value: int) -> None:
        libc("prctl", PR_SET_DUMPABLE, value, 0, 0, 0)


def told(conn: Any, uid: int = 0, config: dict[str, Any] | None = None) -> None:
    """Does what it is told: (method, args) -> ("ok", result) or ("error", class, text)."""
    peer = Peer(uid, config or {})
    conn.send("ready")
    while True:
        method, args = conn.recv()
        if method == "exec":
            os.execv(sys.executable, [sys.executable, *args])
        try:
            conn.send(("ok", getattr(peer, method)(*args)))
        except um.MemhError as error:
            conn.send(("error", type(error).__name__, str(error)))


class Told:
    """The test's side of `told`."""

    def __init__(self, peer: Any, uid: int = 0, config: dict[str, Any] | None = None) -> None:
        self.peer = peer(told, uid, config)
        assert self.peer.recv() == "ready"

    @property
    def pid(self) -> int:
        return self.peer.pid

    def ask(self, method: str, *args: Any) -> Any:
        """What it answered; AssertionError if it failed."""
        answer = self.answer(method, *args)
        assert answer[0] == "ok", answer
        return answer[1]

    def answer(self, method: str, *args: Any) -> tuple[Any, ...]:
        self.peer.send((method, args))
        return self.peer.recv()
