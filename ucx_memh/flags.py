# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of memh.h and backend.h with Python's names; tests compare them with the headers.

Where UCX has the flag or status, the number is UCX's.
"""

from enum import IntEnum, IntFlag

__all__ = [
    "UCT_MD_FLAG_REG_DERIVED",
    "Enforcement",
    "EpState",
    "MdFlag",
    "MemFlag",
    "MemType",
    "MemhState",
    "PackFlag",
    "Status",
]


class Status(IntEnum):
    """What an operation answered: UCS_OK, UCS_INPROGRESS and UCS_ERR_*; ours are below -100."""

    OK = 0
    INPROGRESS = 1
    NO_RESOURCE = -2
    IO_ERROR = -3
    NO_MEMORY = -4
    INVALID_PARAM = -5
    UNREACHABLE = -6
    INVALID_ADDR = -7
    BUFFER_TOO_SMALL = -10
    NO_DEVICE = -14
    BUSY = -15
    CANCELED = -16
    TIMED_OUT = -20
    EXCEEDS_LIMIT = -21
    UNSUPPORTED = -22
    REVOKED = -101
    CLOSED = -102
    FORKED = -103
    ACCESS = -104
    RANGE = -105
    MALFORMED_KEY = -106
    KEY_VERSION = -107
    STALE_KEY = -108
    PEER_GONE = -109
    REMOTE_ACCESS = -110
    FLUSHED = -111


class MdFlag(IntFlag):
    """What an Md can do (UCT_MD_FLAG_*); a flag declared is an operation provided."""

    REG = 1 << 1
    NEED_MEMH = 1 << 2
    NEED_RKEY = 1 << 3
    RKEY_PTR = 1 << 6
    INVALIDATE = 1 << 8
    REG_DMABUF = 1 << 10
    INVALIDATE_RMA = 1 << 11
    INVALIDATE_AMO = 1 << 12
    REG_DERIVED = 1 << 32
    DERIVE_ENDPOINT = 1 << 33
    ENDPOINT = 1 << 34
    ATOMIC = 1 << 35
    EVENT_FD = 1 << 36


# UCX has no such flag, so this bit is ours: never hand it to UCX.
UCT_MD_FLAG_REG_DERIVED = MdFlag.REG_DERIVED


class MemFlag(IntFlag):
    """Rights of a handle (UCT_MD_MEM_ACCESS_*) and flags of a registration."""

    ACCESS_REMOTE_PUT = 1 << 5
    ACCESS_REMOTE_GET = 1 << 6
    ACCESS_REMOTE_ATOMIC = 1 << 7
    ACCESS_LOCAL_READ = 1 << 8
    ACCESS_LOCAL_WRITE = 1 << 9
    SYMMETRIC_RKEY = 1 << 10
    GVA = 1 << 11
    DERIVED_ONLY = 1 << 32

    REMOTE_PUT = ACCESS_REMOTE_PUT
    REMOTE_GET = ACCESS_REMOTE_GET
    REMOTE_ATOMIC = ACCESS_REMOTE_ATOMIC
    LOCAL_READ = ACCESS_LOCAL_READ
    LOCAL_WRITE = ACCESS_LOCAL_WRITE

    ACCESS_REMOTE = REMOTE_PUT | REMOTE_GET | REMOTE_ATOMIC
    ACCESS_RMA = REMOTE_PUT | REMOTE_GET | LOCAL_READ | LOCAL_WRITE
    ACCESS_ALL = ACCESS_RMA | REMOTE_ATOMIC


class PackFlag(IntFlag):
    """How a key is packed (UCT_MD_MKEY_PACK_FLAG_*)."""

    NONE = 0
    INVALIDATE_RMA = 1 << 0
    INVALIDATE_AMO = 1 << 1
    EXPORT = 1 << 2
    RAW = 1 << 16


class MemType(IntEnum):
    """Where memory lies (ucs_memory_type_t)."""

    HOST = 0
    CUDA = 1


class MemhState(IntEnum):
    """The life of a handle.  A base goes from LIVE to CLOSED."""

    LIVE = 0
    REVOKING = 1
    REVOKED = 2
    CLOSED = 3


class EpState(IntEnum):
    """The life of an endpoint.  In ERROR operations give FLUSHED until reset()."""

    IDLE = 0
    CONNECTED = 1
    ERROR = 2


class Enforcement(IntEnum):
    """Who keeps a promise: nobody, the peer's own library, or the device."""

    NONE = 0
    COOPERATIVE = 1
    ENFORCED = 2
