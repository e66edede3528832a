# SPDX-License-Identifier: BSD-3-Clause
"""The payload of cuda_ipc's keys, read and changed without the library."""

import struct
from typing import Any

from _fakes import sealed

PAYLOAD = struct.Struct("<BBHiQQQQQ16s")
HEADER = 80
LEGACY, FD, FABRIC_KIND = 1, 2, 4
NAMES = "version kinds zero fd base size buffer_id record nonce uuid".split()


def fields(key: bytes) -> dict[str, Any]:
    """What is in a key's payload."""
    return dict(zip(NAMES, PAYLOAD.unpack_from(key, HEADER), strict=True))


def changed(key: bytes, **changes: Any) -> bytes:
    """The key with other fields in its payload, and a checksum that fits."""
    new = PAYLOAD.pack(*(fields(key) | changes).values())
    return sealed(key[:HEADER] + new + key[HEADER + PAYLOAD.size :])


def resized(key: bytes, length: int) -> bytes:
    """With a payload of that many bytes."""
    body = (key[HEADER:] + bytes(200))[:length]
    return sealed(key[:HEADER] + body, total=HEADER + length, payload_length=length)
