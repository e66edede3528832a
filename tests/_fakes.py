# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the core share: short names, and an independent reading of packed keys."""

import ctypes
import struct
from typing import Any, NamedTuple

import ucx_memh as um

ALL = um.MemFlag.ACCESS_ALL
GET = um.MemFlag.REMOTE_GET
PUT = um.MemFlag.REMOTE_PUT
ATOMIC = um.MemFlag.REMOTE_ATOMIC
REMOTE = um.MemFlag.ACCESS_REMOTE
LOCAL_READ = um.MemFlag.LOCAL_READ
LOCAL_WRITE = um.MemFlag.LOCAL_WRITE
DERIVED_ONLY = um.MemFlag.DERIVED_ONLY

PLAIN = um.PackFlag.NONE
RMA = um.PackFlag.INVALIDATE_RMA
AMO = um.PackFlag.INVALIDATE_AMO
RAW = um.PackFlag.RAW
EXPORT = um.PackFlag.EXPORT


# ---- the packed key, read without the library ----

HEADER = struct.Struct("<HBBHHIIQQQIHH")  # the identity follows
IDENTITY = struct.Struct("<QQIIII")
FLAG_EMPTY, FLAG_REVOCABLE, FLAG_ENDPOINT, FLAG_REVOKED = 1, 2, 4, 8


class Envelope(NamedTuple):
    magic: int
    version: int
    header: int
    total: int
    flags: int
    component: int
    crc: int
    key_id: int
    address: int
    length: int
    rights: int
    payload_length: int
    reserved: int

    @classmethod
    def of(cls, key: bytes) -> "Envelope":
        return cls(*HEADER.unpack_from(key))


def crc32c(data: bytes) -> int:
    """RFC 3720, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def key_crc(key: bytes) -> int:
    return crc32c(key[:12] + bytes(4) + key[16:])


def sealed(key: bytes, **changes: Any) -> bytes:
    """The key with other header fields, and a checksum that fits."""
    fields = Envelope.of(key)._replace(**changes)
    key = HEADER.pack(*fields) + key[HEADER.size :]
    return HEADER.pack(*fields._replace(crc=key_crc(key))) + key[HEADER.size :]


def flipped(data: bytes, at: int) -> bytes:
    """With another byte there, whatever it was."""
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def payload(key: bytes) -> bytes:
    fields = Envelope.of(key)
    return key[fields.header : fields.header + fields.payload_length]


def native(key: bytes) -> tuple[int, int]:
    """The native values that a key of a fake device names: for put and get, for atomics."""
    rma, atomic = struct.unpack_from("<II", payload(key), 8)
    return rma, atomic or rma


# ---- a handle in memory: the core's books, then the structs of backend.h ----


class Books(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("device_done", "children", "next", "prev", "plan")),
        *((name, ctypes.c_uint32) for name in ("epoch", "component_id", "refs", "live_children")),
        ("packed", ctypes.c_void_p * 8),
        ("user_done", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("pending", "closing")),
        ("failed", ctypes.c_int32),
        ("touched", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("object", "left", "right")),
        ("reach", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("slab", "aligned")),
    ]


class Identity(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("md", "parent")),
        ("key_id", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("state", "inherited_tail_offset")),
        *((name, ctypes.c_uint32) for name in ("own_offset", "own_tail_offset")),
    ]


class Inherited(ctypes.Structure):
    _fields_ = [
        ("reg", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("lkey", ctypes.c_uint32),
        ("mem_type", ctypes.c_uint32),
    ]


class Slot(ctypes.Structure):
    _fields_ = [
        ("object", ctypes.c_void_p),
        ("value", ctypes.c_uint32),
        ("live", ctypes.c_uint8),
        ("kind", ctypes.c_uint8),
        ("reserved", ctypes.c_uint16),
    ]


class Own(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("address", "length", "rights", "grant")),
        ("ep", ctypes.c_void_p),
        ("slot", Slot * 3),
    ]
