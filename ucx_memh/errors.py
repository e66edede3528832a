# SPDX-License-Identifier: BSD-3-Clause
"""One exception class for each kind of failure, each also a class of the standard library.

========================  ===================  =================================================
class                     also a               statuses
========================  ===================  =================================================
InvalidParamError         ValueError           INVALID_PARAM, EXCEEDS_LIMIT, BUFFER_TOO_SMALL
UnsupportedError          NotImplementedError  UNSUPPORTED
BusyError                 RuntimeError         BUSY, NO_RESOURCE (make progress and try again)
NoMemoryError             MemoryError          NO_MEMORY
NoDeviceError             OSError              NO_DEVICE
DeviceError               OSError              IO_ERROR, INVALID_ADDR (errno EFAULT)
TimedOutError             TimeoutError         TIMED_OUT
UnreachableError          ConnectionError      UNREACHABLE
PeerGoneError             ConnectionError      PEER_GONE
FlushedError              ConnectionError      FLUSHED, CANCELED
AccessError               PermissionError      ACCESS: a right that the handle does not have
RemoteAccessError         PermissionError      REMOTE_ACCESS: the remote device refused
RangeError                ValueError           RANGE
MalformedKeyError         ValueError           MALFORMED_KEY
KeyVersionError           ValueError           KEY_VERSION
StaleKeyError             RuntimeError         STALE_KEY
RevokedError              RuntimeError         REVOKED
ClosedError               RuntimeError         CLOSED
ForkedError               RuntimeError         FORKED
MemhError                 Exception            the base of all; any other status
========================  ===================  =================================================

An error keeps the status that it was made from, so INVALID_ADDR and IO_ERROR can be told apart.
"""

import errno as _errno
import os
from array import array
from typing import Any

from ucx_memh.flags import Status

__all__ = [
    "AccessError",
    "BusyError",
    "ClosedError",
    "DeviceError",
    "FlushedError",
    "ForkedError",
    "InvalidParamError",
    "KeyVersionError",
    "MalformedKeyError",
    "MemhError",
    "NoDeviceError",
    "NoMemoryError",
    "PeerGoneError",
    "RangeError",
    "RemoteAccessError",
    "RevokedError",
    "StaleKeyError",
    "TimedOutError",
    "UnreachableError",
    "UnsupportedError",
    "error_from_status",
    "status_name",
]


def status_name(status: int) -> str:
    """The status's word, as in memh.h without its prefix; "STATUS_n" for an unknown number."""
    try:
        return Status(status).name
    except ValueError:
        return f"STATUS_{status}"


class MemhError(Exception):
    """A failure of ucx_memh, and the base class of all of them.

    `status` is the number (`Status`, or int if it is unknown), `op` what was asked, `component`
    of whom, `detail` the cause in words, `context` what else is known: address, length, pid,
    errno, syndrome ...; an item that is None is left out.  `errno` is None where the failure has
    none.  Of a batch `context["item"]` is the first item that failed, and `statuses` an array of
    int, how each item went; else it is None.  Instances can be pickled.
    """

    default_status: int | None = None
    default_errno: int | None = None
    statuses: "array[int] | None" = None
    status: Status | int
    errno: int | None
    strerror: str | None

    def __init__(
        self,
        detail: str = "",
        *,
        status: int | None = None,
        op: str = "",
        component: str = "",
        **context: object,
    ) -> None:
        if status is None:
            status = Status.IO_ERROR if self.default_status is None else self.default_status
        self.status = Status(status) if status in _KNOWN else status
        self.op = op
        self.component = component
        self.detail = detail
        self.context = {name: value for name, value in context.items() if value is not None}
        super().__init__(self._message())
        # After OSError's own __init__, which would set it from the arguments.
        number = self.context.get("errno", _ERRNO.get(self.status, self.default_errno))
        self.errno = number if isinstance(number, int) else None
        if isinstance(self, OSError) and self.errno is not None:
            self.strerror = os.strerror(self.errno)

    def _message(self) -> str:
        parts = [self.component, self.op, status_name(self.status), self.detail]
        text = ": ".join(part for part in parts if part)
        facts = ", ".join(_fact(name, value) for name, value in self.context.items())
        return f"{text} ({facts})" if facts else text

    def __str__(self) -> str:  # OSError's would say errno and strerror only
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.detail, self._fields()), self.__dict__

    def _fields(self) -> dict[str, Any]:
        named = {"status": self.status, "op": self.op, "component": self.component}
        return {**self.context, **named}


def _restore(cls: type[MemhError], detail: str, fields: dict[str, Any]) -> MemhError:
    return cls(detail, **fields)


def _fact(name: str, value: object) -> str:
    if name in ("address", "syndrome", "rights") and isinstance(value, int):
        return f"{name}={int(value):#x}"
    if name == "errno" and isinstance(value, int):
        return f"errno={value} {_errno.errorcode.get(value, '')}".rstrip()
    return f"{name}={value}"


class InvalidParamError(MemhError, ValueError):
    """An argument is wrong; nothing was changed."""

    default_status = Status.INVALID_PARAM


class UnsupportedError(MemhError, NotImplementedError):
    """This Md cannot do that; nothing was changed."""

    default_status = Status.UNSUPPORTED


class BusyError(MemhError, RuntimeError):
    """Not now: live descendants, a full queue; nothing was changed."""

    default_status = Status.BUSY


class NoMemoryError(MemhError, MemoryError):
    """No memory, or a limit on locked memory."""

    default_status = Status.NO_MEMORY


class NoDeviceError(MemhError, OSError):
    """What was named is not there; `detail` is the reason."""

    default_status = Status.NO_DEVICE
    default_errno = _errno.ENODEV


class DeviceError(MemhError, OSError):
    """The device or a system call failed."""

    default_status = Status.IO_ERROR
    default_errno = _errno.EIO


class TimedOutError(MemhError, TimeoutError):
    """Not finished in the time given; the operation goes on."""

    default_status = Status.TIMED_OUT
    default_errno = _errno.ETIMEDOUT


class UnreachableError(MemhError, ConnectionError):
    """The peer cannot be reached by this Md."""

    default_status = Status.UNREACHABLE
    default_errno = _errno.EHOSTUNREACH


class PeerGoneError(MemhError, ConnectionError):
    """The peer's process has ended."""

    default_status = Status.PEER_GONE
    default_errno = _errno.ECONNRESET


class FlushedError(MemhError, ConnectionError):
    """The connection failed, or was closed, before this ran."""

    default_status = Status.FLUSHED
    default_errno = _errno.ECONNABORTED


class AccessError(MemhError, PermissionError):
    """A right that the handle, the key or the buffer does not have."""

    default_status = Status.ACCESS
    default_errno = _errno.EACCES


class RemoteAccessError(MemhError, PermissionError):
    """The remote device refused the access."""

    default_status = Status.REMOTE_ACCESS
    default_errno = _errno.EACCES


class RangeError(MemhError, ValueError):
    """Outside the range of the handle or key."""

    default_status = Status.RANGE


class MalformedKeyError(MemhError, ValueError):
    """These bytes are no packed key, or a damaged one."""

    default_status = Status.MALFORMED_KEY


class KeyVersionError(MemhError, ValueError):
    """A packed key of a version that this library does not read."""

    default_status = Status.KEY_VERSION


class StaleKeyError(MemhError, RuntimeError):
    """The key's owner is not the process that packed it any more."""

    default_status = Status.STALE_KEY


class RevokedError(MemhError, RuntimeError):
    """The handle or key was invalidated, for good."""

    default_status = Status.REVOKED


class ClosedError(MemhError, RuntimeError):
    """The object was closed."""

    default_status = Status.CLOSED


class ForkedError(MemhError, RuntimeError):
    """The object belongs to the parent process; open an Md of your own."""

    default_status = Status.FORKED


_KNOWN = frozenset(Status)
_ERRNO: dict[int, int] = {Status.INVALID_ADDR: _errno.EFAULT, Status.CANCELED: _errno.ECANCELED}
_CLASSES: dict[int, type[MemhError]] = {
    **{
        cls.default_status: cls
        for cls in MemhError.__subclasses__()
        if cls.default_status is not None
    },
    Status.NO_RESOURCE: BusyError,
    Status.INVALID_ADDR: DeviceError,
    Status.EXCEEDS_LIMIT: InvalidParamError,
    Status.BUFFER_TOO_SMALL: InvalidParamError,
    Status.CANCELED: FlushedError,
}


def error_from_status(
    status: int, op: str = "", component: str = "", detail: str = "", **context: object
) -> MemhError:
    """The instance for `status`, to be raised by the caller; the table above says of what class.

    Never fails: an unknown number gives a plain MemhError.  Any thread may call it.
    """
    cls = _CLASSES.get(status, MemhError)
    return cls(detail, status=status, op=op, component=component, **context)
