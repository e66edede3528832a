# SPDX-License-Identifier: BSD-3-Clause
"""Memory that is no Python buffer: what objects say of it by two protocols, and nothing copied.

`__cuda_array_interface__` (versions 2 and 3, as its page in Numba's manual has it) and DLPack
(dlpack.h, versions 0 and 1).  No driver is asked: whether an address is what its object says, the
domain finds out that gets it.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ucx_memh.errors import InvalidParamError, UnsupportedError
from ucx_memh.flags import MemType

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["AnyMemory", "Memory", "memory_of"]

LONGEST = 2**63 - 1
LEGACY_STREAM = 1  # a device's default stream, by both protocols


class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class _DLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


AnyMemory: TypeAlias = "Buffer | _CudaArray | _DLPack"


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A range of memory; keeps alive what owns it."""

    address: int
    length: int
    """Bytes."""
    mem_type: MemType
    readonly: bool
    stream: int
    """Work on the memory may be under way on this stream of its device; 0: none is."""
    owner: object


def memory_of(thing: object, used: bool, op: str) -> Memory | None:
    """The memory that `thing` stands for; None: it has neither protocol.

    `used`: its bytes are about to be read or written, so that work under way on them matters.
    InvalidParamError: it contradicts itself, is not C-contiguous, or a producer raised.
    UnsupportedError: memory of a kind that nobody here knows.
    """
    interface = _attribute(thing, "__cuda_array_interface__", op)
    if interface is not None:
        return _array_interface(thing, interface, op)
    if _attribute(thing, "__dlpack__", op) is not None:
        return _dlpack(thing, used, op)
    return None


def _attribute(thing: object, name: str, op: str) -> Any:
    try:
        return getattr(thing, name, None)
    except Exception as error:  # of a property; torch's refuses tensors that want a gradient
        raise InvalidParamError(f"{name}: {error}", op=op) from error


def _length(items: int, bits: int, what: str, op: str) -> int:
    length = (items * bits + 7) // 8
    if length > LONGEST:
        raise InvalidParamError(f"{what}: {length} bytes are more than there can be", op=op)
    return length


def _contiguous(shape: list[int], strides: list[int], step: int) -> bool:
    """Whether these strides are C order without gaps, `step` being that from item to item."""
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


# ---- __cuda_array_interface__ ----

_ITEM_SIZES = {"U": 4}  # a character has so many bytes; of all else the number is in bytes
_KINDS = "biufcmMSVU"


def _array_interface(thing: object, interface: Any, op: str) -> Memory:
    try:
        version = interface["version"]
        shape = [int(size) for size in interface["shape"]]
        kind, size = interface["typestr"][1], int(interface["typestr"][2:])
        address, readonly = interface["data"]
        strides = interface.get("strides")
        masked = interface.get("mask") is not None
        stream = interface.get("stream")
        address, readonly = int(address or 0), bool(readonly)
        stream = None if stream is None else int(stream)
        strides = None if strides is None else [int(stride) for stride in strides]
    except Exception as error:  # whatever a foreign object's parts may raise
        raise _bad(f"{type(error).__name__}: {error}", op) from error
    if version not in (2, 3):
        raise _bad(f"version {version!r} is not 2 or 3", op)
    if kind not in _KINDS or size < 0:
        raise _bad(f"items of type {interface['typestr']!r} are no plain bytes", op)
    if masked:
        raise _bad("it has a mask", op)
    if any(part < 0 for part in shape) or not 0 <= address < 1 << 64:
        raise _bad(f"shape {shape} at {address:#x} makes no sense", op)
    if stream is not None and not 0 < stream < 1 << 64:
        raise _bad(f"stream {stream} names none", op)
    size *= _ITEM_SIZES.get(kind, 1)
    length = _length(math.prod(shape), 8 * size, "__cuda_array_interface__", op)
    if strides is not None and length:
        if len(strides) != len(shape):
            raise _bad(f"{len(strides)} strides for {len(shape)} dimensions", op)
        if not _contiguous(shape, strides, size):
            raise _bad("not C-contiguous", op)
    return Memory(address, length, MemType.CUDA, readonly, stream or 0, thing)


def _bad(why: str, op: str) -> InvalidParamError:
    return InvalidParamError(f"__cuda_array_interface__: {why}", op=op)


# ---- DLPack ----

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_MEM_TYPES = {
    CPU: MemType.HOST,
    CUDA_HOST: MemType.HOST,
    CUDA: MemType.CUDA,
    CUDA_MANAGED: MemType.CUDA,
}
READ_ONLY, IS_COPIED = 1, 2
NO_SYNC = -1


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = [
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


def _dlpack(thing: Any, used: bool, op: str) -> Memory:
    """The capsule stays unconsumed and is the owner: when it goes, it deletes its tensor."""
    try:
        kind, device = map(int, thing.__dlpack_device__())
    except Exception as error:
        raise InvalidParamError(f"__dlpack_device__: {error}", op=op) from error
    if kind not in _MEM_TYPES:
        raise UnsupportedError(f"DLPack memory on a device of type {kind}", op=op)
    ordered = _MEM_TYPES[kind] is MemType.CUDA  # by streams
    # The producer makes the stream that it is told wait for its work.
    wanted = {"stream": LEGACY_STREAM if used else NO_SYNC} if ordered else {}
    try:
        try:
            capsule = thing.__dlpack__(max_version=(1, 0), **wanted)
        except TypeError:  # older than that argument
            capsule = thing.__dlpack__(**wanted)
    except Exception as error:
        raise InvalidParamError(f"__dlpack__: {error}", op=op) from error
    tensor, flags = _tensor_of(capsule, op)
    if (tensor.device_type, tensor.device_id) != (kind, device):
        raise InvalidParamError("__dlpack__ is of another device than __dlpack_device__", op=op)
    if flags & IS_COPIED:
        raise InvalidParamError("__dlpack__ made a copy, which nobody asked for", op=op)
    address, length = _extent(tensor, op)
    stream = LEGACY_STREAM if used and ordered else 0
    return Memory(address, length, _MEM_TYPES[kind], bool(flags & READ_ONLY), stream, capsule)


def _tensor_of(capsule: object, op: str) -> tuple[_Tensor, int]:
    if _is_capsule(capsule, b"dltensor"):
        return _Tensor.from_address(_pointer_of(capsule, b"dltensor")), 0
    if _is_capsule(capsule, b"dltensor_versioned"):
        found = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        if found.major != 1:
            raise InvalidParamError(f"DLPack version {found.major} is not 0 or 1", op=op)
        return found.tensor, found.flags
    raise InvalidParamError(f"__dlpack__ gave {type(capsule).__name__}, no tensor's capsule", op=op)


def _extent(tensor: _Tensor, op: str) -> tuple[int, int]:
    """Address and length in bytes."""
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    if any(size < 0 for size in shape):
        raise InvalidParamError(f"DLPack: shape {shape} makes no sense", op=op)
    length = _length(math.prod(shape), tensor.bits * tensor.lanes, "DLPack", op)
    if length and tensor.strides:
        strides = [tensor.strides[i] for i in range(tensor.ndim)]
        if not _contiguous(shape, strides, 1):
            raise InvalidParamError("DLPack: not C-contiguous", op=op)
    return ((tensor.data or 0) + tensor.byte_offset) % (1 << 64), length
