# SPDX-License-Identifier: BSD-3-Clause
"""The software CUDA driver from Python: how it is built, its calls, its memory, its control.

Nothing of ucx_memh is used here.  `Driver(path)` is the library that a backend in this process has
opened by the same path, so that a test sees and steers what the backend does.
"""

import ctypes as C
import functools
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
MIB = 1 << 20
BLOCK = 2 * MIB  # what the driver takes from a device at a time

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
NO_DEVICE, INVALID_DEVICE, INVALID_CONTEXT = 100, 101, 201
ALREADY_MAPPED, PEER_ACCESS_UNSUPPORTED, INVALID_HANDLE = 208, 217, 400
NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED = 500, 600, 700, 709
NOT_PERMITTED, NOT_SUPPORTED = 800, 801

POSIX_FD, FABRIC = 1, 8  # CUmemAllocationHandleType
# CUpointer_attribute
CONTEXT, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, SYNC_MEMOPS, BUFFER_ID = 1, 2, 3, 4, 6, 7
IS_MANAGED, DEVICE_ORDINAL, LEGACY_CAPABLE, RANGE_START, RANGE_SIZE, MAPPED = range(8, 14)
HANDLE_TYPES, MEMPOOL = 14, 17


class CudaError(Exception):
    """A call that gave an error; `code` is the CUresult."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} gave {code}")
        self.code = code


class Ipc(C.Structure):
    """CUipcMemHandle, which goes by value."""

    _fields_ = [("reserved", C.c_ubyte * 64)]


class Location(C.Structure):
    _fields_ = [("type", C.c_int), ("id", C.c_int)]


class Prop(C.Structure):
    _fields_ = [
        ("type", C.c_int),
        ("types", C.c_int),
        ("location", Location),
        ("win32", C.c_void_p),
        ("flags", C.c_ubyte * 8),
    ]


class PoolProps(C.Structure):
    _fields_ = [
        ("type", C.c_int),
        ("types", C.c_int),
        ("location", Location),
        ("win32", C.c_void_p),
        ("size", C.c_size_t),
        ("rest", C.c_ubyte * 56),
    ]


class Access(C.Structure):
    _fields_ = [("location", Location), ("flags", C.c_int)]


class Builder:
    """Compiles it once; `builder(*without)` is the path of one that lacks these symbols."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[frozenset[str], str] = {}

    @functools.cached_property
    def objects(self) -> list[Path]:
        sources = sorted(HERE.glob("*.c"))
        self._cc("-c", *sources)
        return [self.folder / f"{source.stem}.o" for source in sources]

    def __call__(self, *without: str) -> str:
        names = frozenset(without)
        if names not in self.made:
            self.made[names] = self._link(names)
        return self.made[names]

    def _link(self, without: Iterable[str]) -> str:
        folder = self.folder / f"lib{len(self.made)}"
        folder.mkdir()
        hidden = " ".join(f"{name};" for name in sorted(without))
        (folder / "map").write_text(f"{{ global: cu*; softcuda_*; local: {hidden} *; }};")
        library = folder / "libcuda.so.1"
        self._cc(
            "-shared",
            "-o",
            library,
            *self.objects,
            f"-Wl,--version-script={folder / 'map'}",
            # Not the driver's: the loader would take it for that, whoever asks for that later.
            "-Wl,-soname,libsoftcuda.so.1",
            "-Wl,-Bsymbolic",
            "-Wl,-z,defs",
            "-ldl",
        )
        for name in without:
            assert not hasattr(C.CDLL(str(library)), name), f"{name} is still there"
        return str(library)

    def _cc(self, *arguments: object) -> None:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
        flags = "-std=gnu11 -O2 -g -Wall -Wextra -Werror -fPIC -fvisibility=hidden -pthread".split()
        done = subprocess.run(
            [*compiler, *flags, *map(str, arguments)],
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


class Driver:
    """The library.

    `driver.cuFoo(...)` calls a function of it: an int goes as 64 bits, an error raises CudaError.
    `driver.result("cuFoo", ...)` gives the CUresult.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.lib = C.CDLL(path)
        self.lib.softcuda_count.restype = self.lib.softcuda_live.restype = C.c_long

    def result(self, name: str, *args: object) -> int:
        return self.lib[name](*(C.c_uint64(a) if isinstance(a, int) else a for a in args))

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: object) -> None:
            if code := self.result(name, *args):
                raise CudaError(name, code)

        return call

    def get(self, name: str, *args: object) -> int:
        """What a function writes to its first argument, an integer of up to 64 bits."""
        value = C.c_uint64()
        getattr(self, name)(C.byref(value), *args)
        return value.value

    # ---- control ----

    def count(self, name: str) -> int:
        """How often it was called in this process since the start or the last reset()."""
        count = self.lib.softcuda_count(name.encode())
        assert count >= 0, f"there is no {name}"
        return count

    def live(self, what: str) -> int:
        """allocations, opens, maps, handles, contexts, streams, events or spans."""
        count = self.lib.softcuda_live(what.encode())
        assert count >= 0, f"nothing counts {what}"
        return count

    def fail(self, name: str, error: int, nth: int = 1) -> None:
        """The nth call from now gives that error; with 0, each one until mend()."""
        assert self.lib.softcuda_fail(name.encode(), error, C.c_long(nth)) == 0, name

    def mend(self) -> None:
        """Forget what fail() asked for."""
        self.lib.softcuda_mend()

    def hold(self) -> None:
        """Until release(), nothing that is queued is done, and who synchronises waits."""
        self.lib.softcuda_hold()

    def release(self) -> None:
        """Do all that is queued."""
        self.lib.softcuda_release()

    def reset(self) -> None:
        """As in a new process: nothing is allocated, cuInit is due, the environment is read."""
        self.lib.softcuda_reset()

    def peek(self, address: int, size: int) -> bytes:
        """Device memory as it is now; waits for nothing and needs no context."""
        into = C.create_string_buffer(size)
        assert self.lib.softcuda_peek(C.c_uint64(address), into, C.c_size_t(size)) == 0
        return into.raw

    def poke(self, address: int, data: bytes) -> None:
        data = bytes(data)
        assert self.lib.softcuda_poke(C.c_uint64(address), data, C.c_size_t(len(data))) == 0

    # ---- contexts and memory ----

    def use(self, device: int = 0) -> int:
        """Begin, and make the device's primary context current; returns it."""
        self.cuInit(0)
        context = self.get("cuDevicePrimaryCtxRetain", device)
        self.cuCtxSetCurrent(context)
        return context

    def current(self) -> int:
        return self.get("cuCtxGetCurrent")

    def alloc(self, size: int, kind: str = "device", types: int = 0, device: int = 0) -> "Memory":
        """Memory of one of the kinds that there are; see Memory."""
        return Memory(self, size, kind, types, device)

    def attribute(self, address: int, which: int) -> int:
        return self.get("cuPointerGetAttribute", which, address)

    def handle(self, address: int) -> bytes:
        """The legacy IPC handle."""
        out = Ipc()
        self.cuIpcGetMemHandle(C.byref(out), address)
        return bytes(out)

    def open(self, handle: bytes, function: str = "cuIpcOpenMemHandle_v2") -> int:
        return self.get(function, Ipc.from_buffer_copy(handle), 1)

    def map(self, handle: int, size: int, device: int = 0) -> int:
        """Reserve addresses, map an allocation handle there, and let the device use it."""
        address = self.get("cuMemAddressReserve", size, 0, 0, 0)
        self.cuMemMap(address, size, 0, handle, 0)
        self.cuMemSetAccess(address, size, C.byref(Access(Location(1, device), 3)), 1)
        return address

    def unmap(self, address: int, size: int) -> None:
        self.cuMemUnmap(address, size)
        self.cuMemAddressFree(address, size)


class Memory:
    """An allocation.

    kind is "device" (cuMemAlloc), "managed", "host" (cuMemAllocHost), "async" (the default pool),
    "pool" (one of its own, exportable as `types` says) or "vmm" (created and mapped; exportable
    as `types` says; the size must be a multiple of BLOCK).  For the first three the current context
    says which device it is of; for the others `device` does.
    """

    def __init__(self, driver: Driver, size: int, kind: str, types: int, device: int) -> None:
        self.driver, self.size, self.kind, self.device = driver, size, kind, device
        self.pool = self.allocation = 0
        if kind == "device":
            self.address = driver.get("cuMemAlloc_v2", size)
        elif kind == "managed":
            self.address = driver.get("cuMemAllocManaged", size, 1)
        elif kind == "host":
            self.address = driver.get("cuMemAllocHost_v2", size)
        elif kind == "async":
            self.address = driver.get("cuMemAllocAsync", size, 0)
        elif kind == "pool":
            props = PoolProps(1, types, Location(1, device))
            self.pool = driver.get("cuMemPoolCreate", C.byref(props))
            self.address = driver.get("cuMemAllocFromPoolAsync", size, self.pool, 0)
        elif kind == "vmm":
            prop = Prop(1, types, Location(1, device))
            self.allocation = driver.get("cuMemCreate", size, C.byref(prop), 0)
            self.address = driver.map(self.allocation, size, device)
        else:
            raise ValueError(kind)

    def free(self) -> None:
        if self.kind == "host":
            self.driver.cuMemFreeHost(self.address)
        elif self.kind == "vmm":
            self.driver.unmap(self.address, self.size)
            self.driver.cuMemRelease(self.allocation)
        else:
            self.driver.cuMemFree_v2(self.address)
        if self.pool:
            self.driver.cuMemPoolDestroy(self.pool)

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """What is there now, waiting for nothing."""
        return self.driver.peek(self.address + offset, self.size - offset if size is None else size)

    def write(self, data: bytes, offset: int = 0) -> None:
        self.driver.poke(self.address + offset, data)

    def array(self, **kwargs: object) -> "CudaArray":
        """It as an object with `__cuda_array_interface__`."""
        return CudaArray(self.address, self.size, **kwargs)

    def tensor(self, **kwargs: object) -> "Tensor":
        """It as an object with `__dlpack__`."""
        kinds = {"host": CUDA_HOST, "managed": CUDA_MANAGED}
        kwargs = {"device": (kinds.get(self.kind, CUDA), self.device), **kwargs}
        return Tensor(self.driver, self.address, self.size, **kwargs)


# ---- how libraries hand memory over ----


class CudaArray:
    """What CuPy, Numba and torch have in common: `__cuda_array_interface__`, version 3."""

    def __init__(self, address: int, size: int, **changes: object) -> None:
        """Bytes, unless `changes` (shape, typestr, strides, readonly, stream, version) say else."""
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, changes.pop("readonly", False)),
            "version": 3,
            **changes,
        }


CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType


class DLTensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("device_type", C.c_int),
        ("device_id", C.c_int),
        ("ndim", C.c_int),
        ("code", C.c_uint8),
        ("bits", C.c_uint8),
        ("lanes", C.c_uint16),
        ("shape", C.POINTER(C.c_int64)),
        ("strides", C.POINTER(C.c_int64)),
        ("byte_offset", C.c_uint64),
    ]


class DLManagedTensor(C.Structure):
    _fields_ = [("tensor", DLTensor), ("context", C.c_void_p), ("deleter", C.c_void_p)]


class DLManagedTensorVersioned(C.Structure):
    _fields_ = [
        ("major", C.c_uint32),
        ("minor", C.c_uint32),
        ("context", C.c_void_p),
        ("deleter", C.c_void_p),
        ("flags", C.c_uint64),
        ("tensor", DLTensor),
    ]


_lent: list[tuple[C.c_int64, object]] = []  # a flag that the deleter clears, and what is to be kept
_new = C.PYFUNCTYPE(C.py_object, C.c_void_p, C.c_char_p, C.c_void_p)(("PyCapsule_New", C.pythonapi))


def lent() -> int:
    """How many tensors have neither been given back nor dropped with their capsule."""
    _lent[:] = [each for each in _lent if each[0].value]
    return len(_lent)


class Tensor:
    """`__dlpack__`, of contiguous memory unless `strides` (in elements) are given."""

    def __init__(
        self,
        driver: Driver,
        address: int,
        size: int,
        device: tuple[int, int] = (CUDA, 0),
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        bits: int = 8,
        byte_offset: int = 0,
        readonly: bool = False,
        versioned: bool = True,
    ) -> None:
        """versioned: whether it knows DLPack 1.0, for consumers that ask for it."""
        self.lib, self.address, self.device = driver.lib, address, device
        self.shape = (size * 8 // bits,) if shape is None else shape
        self.strides, self.bits, self.byte_offset = strides, bits, byte_offset
        self.readonly, self.versioned = readonly, versioned
        self.streams: list[object] = []  # what the consumers gave as theirs

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: object = None, **asked: object) -> object:
        if asked and not self.versioned:
            raise TypeError("this producer is older than DLPack 1.0")
        self.streams.append(stream)
        shape = (C.c_int64 * len(self.shape))(*self.shape)
        strides = None if self.strides is None else (C.c_int64 * len(self.shape))(*self.strides)
        # 1: unsigned integers
        tensor = DLTensor(self.address, *self.device, len(shape), 1, self.bits, 1, shape, strides)
        tensor.byte_offset = self.byte_offset
        flag = C.c_int64(1)
        managed: C.Structure
        if (asked.get("max_version") or (0, 0)) >= (1, 0):
            name, deleter = b"dltensor_versioned", self.lib.softcuda_give_back_versioned
            managed = DLManagedTensorVersioned(1, 0, flags=int(self.readonly), tensor=tensor)
        else:
            name, deleter = b"dltensor", self.lib.softcuda_give_back
            managed = DLManagedTensor(tensor)
        managed.context, managed.deleter = C.addressof(flag), C.cast(deleter, C.c_void_p)
        lent()
        _lent.append((flag, (managed, shape, strides)))
        drop = C.cast(self.lib.softcuda_drop_capsule, C.c_void_p)
        return _new(C.addressof(managed), name, drop)
