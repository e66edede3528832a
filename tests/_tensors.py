# SPDX-License-Identifier: BSD-3-Clause
"""Objects that say where their memory is, as the arrays of frameworks do, with nothing behind."""

import ctypes
from typing import Any

from softcuda.driver import (
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    CudaArray,
    DLManagedTensorVersioned,
    DLTensor,
)

__all__ = ["CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "Interface", "Tensor"]

FLOAT = 2  # DLPack's code of it

_NEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Interface(CudaArray):
    """Has a __cuda_array_interface__; `changes` replaces parts of it, ... takes them away."""

    def __init__(self, address: int, length: int, **changes: Any) -> None:
        super().__init__(address, length, **({"strides": None, "stream": None} | changes))
        told = self.__cuda_array_interface__
        self.__cuda_array_interface__ = {k: v for k, v in told.items() if v is not Ellipsis}


class Tensor:
    """Has __dlpack__ as producers of version 0 or 1 have, and counts its capsules."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        *,
        kind: int = CUDA,
        device: int = 0,
        bits: int = 8,
        lanes: int = 1,
        byte_offset: int = 0,
        version: int = 1,
        flags: int = 0,
        claims: tuple[int, int] | None = None,
    ) -> None:
        self.live = 0
        self.streams: list[int | None] = []
        self._claims = claims or (kind, device)
        self._version = version
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self._tensor = DLTensor(
            address, kind, device, len(shape), FLOAT, bits, lanes, self._shape, None, byte_offset
        )
        if self._strides is not None:
            self._tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        self._versioned = DLManagedTensorVersioned(version, 0, None, None, flags, self._tensor)
        self._name = b"dltensor" if version == 0 else b"dltensor_versioned"
        self._destructor = _DESTRUCTOR(self._destroyed)

    def _destroyed(self, capsule: int) -> None:
        # Whoever consumes a capsule renames it, and calls the deleter himself.
        assert _POINTER(capsule, self._name)
        self.live -= 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._claims

    def __dlpack__(self, stream: int | None = None, **more: Any) -> object:
        if self._version == 0 and more:
            raise TypeError(f"unexpected keyword {next(iter(more))}")
        self.streams.append(stream)
        self.live += 1
        found = self._tensor if self._version == 0 else self._versioned
        return _NEW(
            ctypes.addressof(found), self._name, ctypes.cast(self._destructor, ctypes.c_void_p)
        )
