# SPDX-License-Identifier: BSD-3-Clause
"""The error classes: which status gives which, what they say, and that they travel."""

import copy
import errno
import pickle

import pytest

import ucx_memh as um
from ucx_memh import errors

PARENTS = {
    "InvalidParamError": ValueError,
    "UnsupportedError": NotImplementedError,
    "BusyError": RuntimeError,
    "NoMemoryError": MemoryError,
    "NoDeviceError": OSError,
    "UnreachableError": ConnectionError,
    "AccessError": PermissionError,
    "RangeError": ValueError,
    "MalformedKeyError": ValueError,
    "KeyVersionError": ValueError,
    "StaleKeyError": RuntimeError,
    "RevokedError": RuntimeError,
    "PeerGoneError": ConnectionError,
    "RemoteAccessError": PermissionError,
    "FlushedError": ConnectionError,
    "ClosedError": RuntimeError,
    "ForkedError": RuntimeError,
    "DeviceError": OSError,
    "TimedOutError": TimeoutError,
}
NEAREST = {  # statuses without a class of their own
    um.Status.NO_RESOURCE: um.BusyError,
    um.Status.INVALID_ADDR: um.DeviceError,
    um.Status.IO_ERROR: um.DeviceError,
    um.Status.EXCEEDS_LIMIT: um.InvalidParamError,
    um.Status.BUFFER_TOO_SMALL: um.InvalidParamError,
    um.Status.CANCELED: um.FlushedError,
}
FAILURES = [status for status in um.Status if status < 0]
FULL = {
    "address": 0x7F0000001000,
    "length": 4096,
    "pid": 12,
    "errno": errno.EPERM,
    "syndrome": 0xABCD,
}


@pytest.mark.parametrize("name", PARENTS)
def test_standard_parent(name):
    cls = getattr(um, name)
    assert cls is getattr(errors, name)
    assert issubclass(cls, PARENTS[name])
    assert issubclass(cls, um.MemhError)
    assert cls("why").detail == "why"


def test_no_class_is_forgotten():
    ours = [cls for cls in um.MemhError.__subclasses__() if cls.__module__ == "ucx_memh.errors"]
    assert {cls.__name__ for cls in ours} == set(PARENTS)


@pytest.mark.parametrize("status", FAILURES, ids=lambda status: status.name)
def test_every_status_has_a_class(status):
    error = um.error_from_status(status, "mem_reg", "cma")
    own = status.name.title().replace("_", "") + "Error"
    assert type(error) is NEAREST.get(status) or type(error).__name__ == own
    assert error.status == status
    assert isinstance(error.status, um.Status)


@pytest.mark.parametrize("status", [-1, -100, -112, -9999, 5])
def test_unknown_status(status):
    error = um.error_from_status(status, "mem_reg")
    assert type(error) is um.MemhError
    assert error.status == status
    assert f"STATUS_{status}" in str(error)


def test_message_says_all():
    error = um.error_from_status(-3, "get", "cma", "no way", bytes_done=7, **FULL)
    assert str(error) == (
        "cma: get: IO_ERROR: no way (bytes_done=7, address=0x7f0000001000, length=4096, pid=12, "
        "errno=1 EPERM, syndrome=0xabcd)"
    )
    assert (error.op, error.component, error.detail) == ("get", "cma", "no way")
    assert error.context["pid"] == 12


def test_message_leaves_out_what_is_not_known():
    assert str(um.NoDeviceError("none here", pid=None)) == "NO_DEVICE: none here"


def test_length_0_is_known():
    assert "length=0" in str(um.RangeError(length=0))


@pytest.mark.parametrize("status", FAILURES, ids=lambda status: status.name)
def test_errno(status):
    error = um.error_from_status(status)
    if isinstance(error, OSError):
        assert error.errno in errno.errorcode
    else:
        assert error.errno is None
    assert um.error_from_status(status, errno=errno.ENOMEM).errno == errno.ENOMEM


def test_invalid_address_is_efault():
    assert um.error_from_status(um.Status.INVALID_ADDR).errno == errno.EFAULT


@pytest.mark.parametrize("travel", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize("status", [*FAILURES, -9999])
def test_travels(status, travel):
    error = um.error_from_status(status, "get", "cma", "why", **FULL)
    error.add_note("a note")
    other = travel(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)
    assert (other.errno, other.__notes__) == (error.errno, ["a note"])
