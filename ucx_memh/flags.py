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

    OK = 0  #: done
    INPROGRESS = 1  #: taken; a completion tells
    NO_RESOURCE = -2  #: a queue is full: progress and try again
    IO_ERROR = -3  #: the device or a system call failed
    NO_MEMORY = -4  #: no memory, or a limit on locked memory
    INVALID_PARAM = -5  #: an argument is wrong
    UNREACHABLE = -6  #: this domain cannot reach the peer
    INVALID_ADDR = -7  #: an address is not mapped
    BUFFER_TOO_SMALL = -10  #: nothing was written but the length
    NO_DEVICE = -14  #: what was named is not there
    BUSY = -15  #: in use, or under way
    CANCELED = -16  #: given up before it was done
    TIMED_OUT = -20  #: not done in the time given; it goes on
    EXCEEDS_LIMIT = -21  #: more than is taken at once
    UNSUPPORTED = -22  #: this domain cannot do that
    REVOKED = -101  #: the handle or key was invalidated
    CLOSED = -102  #: the object was closed
    FORKED = -103  #: the object belongs to the parent process
    ACCESS = -104  #: a right that the handle or key does not have
    RANGE = -105  #: outside the handle's or key's range
    MALFORMED_KEY = -106  #: no packed key, or a damaged one
    KEY_VERSION = -107  #: a key of a version that is not known here
    STALE_KEY = -108  #: the key's owner is not that process now
    PEER_GONE = -109  #: the peer's process has ended
    REMOTE_ACCESS = -110  #: the remote device refused the access
    FLUSHED = -111  #: the connection failed, or was closed, before this ran


class MdFlag(IntFlag):
    """What an Md can do (UCT_MD_FLAG_*); a flag declared is an operation provided."""

    REG = 1 << 1  #: registers memory
    NEED_MEMH = 1 << 2  #: transfers want the local memory registered
    NEED_RKEY = 1 << 3  #: access wants a packed key
    RKEY_PTR = 1 << 6  #: Rkey.ptr gives a local pointer
    INVALIDATE = 1 << 8  #: dereg of a base can promise that no key works
    REG_DMABUF = 1 << 10  #: registers memory by a dmabuf
    INVALIDATE_RMA = 1 << 11  #: revocable keys of a base, for put and get
    INVALIDATE_AMO = 1 << 12  #: revocable keys of a base, for atomics
    REG_DERIVED = 1 << 32  #: handles can be derived
    DERIVE_ENDPOINT = 1 << 33  #: a key can be bound to one endpoint
    ENDPOINT = 1 << 34  #: has a data path
    ATOMIC = 1 << 35  #: 64-bit fetch-add and compare-swap
    EVENT_FD = 1 << 36  #: progress can be waited for


# UCX has no such flag, so this bit is ours: never hand it to UCX.
UCT_MD_FLAG_REG_DERIVED = MdFlag.REG_DERIVED


class MemFlag(IntFlag):
    """Rights of a handle (UCT_MD_MEM_ACCESS_*) and flags of a registration."""

    ACCESS_REMOTE_PUT = 1 << 5  #: peers may write
    ACCESS_REMOTE_GET = 1 << 6  #: peers may read
    ACCESS_REMOTE_ATOMIC = 1 << 7  #: peers may use atomics
    ACCESS_LOCAL_READ = 1 << 8  #: the local side of a put may be here
    ACCESS_LOCAL_WRITE = 1 << 9  #: the local side of a get may be here
    SYMMETRIC_RKEY = 1 << 10  #: known, and refused: UNSUPPORTED
    GVA = 1 << 11  #: known, and refused: UNSUPPORTED
    DERIVED_ONLY = 1 << 32  #: no remote right for the region's own key

    REMOTE_PUT = ACCESS_REMOTE_PUT  #: short for ACCESS_REMOTE_PUT
    REMOTE_GET = ACCESS_REMOTE_GET  #: short for ACCESS_REMOTE_GET
    REMOTE_ATOMIC = ACCESS_REMOTE_ATOMIC  #: short for ACCESS_REMOTE_ATOMIC
    LOCAL_READ = ACCESS_LOCAL_READ  #: short for ACCESS_LOCAL_READ
    LOCAL_WRITE = ACCESS_LOCAL_WRITE  #: short for ACCESS_LOCAL_WRITE

    ACCESS_REMOTE = REMOTE_PUT | REMOTE_GET | REMOTE_ATOMIC  #: all that a peer can be given
    ACCESS_RMA = REMOTE_PUT | REMOTE_GET | LOCAL_READ | LOCAL_WRITE  #: all but atomics
    ACCESS_ALL = ACCESS_RMA | REMOTE_ATOMIC  #: everything


class PackFlag(IntFlag):
    """How a key is packed (UCT_MD_MKEY_PACK_FLAG_*)."""

    NONE = 0  #: a base: its direct key; a derived handle: its own
    INVALIDATE_RMA = 1 << 0  #: of a base: a revocable key for put and get
    INVALIDATE_AMO = 1 << 1  #: of a base: a revocable key for atomics
    EXPORT = 1 << 2  #: known, and refused: UNSUPPORTED
    RAW = 1 << 16  #: the backend's native payload, no envelope


class MemType(IntEnum):
    """Where memory lies (ucs_memory_type_t)."""

    HOST = 0  #: the processor's
    CUDA = 1  #: a GPU's


class MemhState(IntEnum):
    """The life of a handle.  A base goes from LIVE to CLOSED."""

    LIVE = 0  #: its keys work
    REVOKING = 1  #: its keys are going; only a retry is legal
    REVOKED = 2  #: its keys are gone for good
    CLOSED = 3  #: nothing is left but this object


class EpState(IntEnum):
    """The life of an endpoint.  In ERROR operations give FLUSHED until reset()."""

    IDLE = 0  #: not connected
    CONNECTED = 1  #: moves data
    ERROR = 2  #: operations give FLUSHED until reset()


class Enforcement(IntEnum):
    """Who keeps a promise: nobody, the peer's own library, or the device."""

    NONE = 0  #: nobody
    COOPERATIVE = 1  #: the peer's own library
    ENFORCED = 2  #: the device
