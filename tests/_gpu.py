# SPDX-License-Identifier: BSD-3-Clause
"""CUDA memory for the tests of cuda_ipc: of the software driver or of a real one."""

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import ucx_memh as um
from _cma import PR_SET_DUMPABLE, libc
from _sides import LibrarySide, Remote, Where, serve
from softcuda.driver import BLOCK, Driver, Memory
from ucx_memh_cuda_ipc._md import symbols

REAL = "libcuda.so.1"
NAMES = list(symbols("no-such-library.so"))  # the functions that the backend knows
# What the software driver counts that must all be gone when a test has ended.
OPENED = ("opens", "maps", "handles", "streams", "events")


class RealDriver(Driver):
    """Without the control surface."""

    def __init__(self, path: str) -> None:
        self.path, self.lib = path, ctypes.CDLL(path)
        assert not hasattr(self.lib, "softcuda_count"), "that is the software driver"


class Gpu:
    """A driver, and the memory that a test takes from it."""

    def __init__(self, path: str) -> None:
        self.where = Where("cuda_ipc", {"driver": path})
        self.software = path != REAL
        self.driver = Driver(path) if self.software else RealDriver(path)
        self.context = self.driver.use(0)
        self.taken: list[Memory] = []

    def open(self, device: int = 0, **config: Any) -> um.Md:
        return um.open_md(f"cuda_ipc/{device}", **{**self.where.config, **config})

    def memory(
        self,
        size: int = 4096,
        data: bytes = b"",
        kind: str = "device",
        types: int = 0,
        device: int = 0,
    ) -> Memory:
        """Memory that begins with `data`; a block for those that come in blocks only."""
        memory = self.driver.alloc(BLOCK if kind == "vmm" else size, kind, types, device)
        self.taken.append(memory)
        if data:
            self.write(memory, data)
        return memory

    def write(self, memory: Memory, data: bytes, offset: int = 0) -> None:
        self.driver.cuMemcpy(memory.address + offset, address_of(data), len(data))

    def read(self, memory: Memory, size: int, offset: int = 0) -> bytes:
        into = bytearray(size)
        self.driver.cuMemcpy(address_of(into), memory.address + offset, size)
        return bytes(into)

    def free(self, memory: Memory) -> None:
        self.taken.remove(memory)
        memory.free()

    def opened(self) -> dict[str, int]:
        """What is open in this process, as the software driver counts."""
        return {what: self.driver.live(what) for what in OPENED if self.driver.live(what)}

    def calls(self) -> int:
        """How many calls of the software driver there were, of those that cuda_ipc knows."""
        return sum(self.driver.count(name) for name in NAMES)

    def end(self) -> None:
        try:
            self.check()
        finally:
            if self.software:
                self.driver.reset()
            else:
                self.driver.cuDevicePrimaryCtxRelease_v2(0)

    def renew(self) -> None:
        """As a process that ends and is started again: after errors that a context keeps."""
        self.driver.reset()
        self.taken.clear()
        self.context = self.driver.use(0)

    def check(self) -> None:
        """Nothing is open but what the test itself has taken, which is freed."""
        gc.collect()
        kept = sum(bool(memory.allocation) for memory in self.taken)
        if self.software:
            self.driver.mend()
            # Of cuMemCreate each has a handle and a mapping of the test's own.
            own = {"handles": kept, "maps": kept} if kept else {}
            assert self.opened() == own
            assert self.driver.live("contexts") == 1, "a context was not given back"
        assert self.driver.current() == self.context
        while self.taken:
            self.taken.pop().free()


def address_of(data: bytes | bytearray) -> int:
    import numpy as np

    return np.frombuffer(data, np.uint8).ctypes.data


class GpuSide(LibrarySide):
    """A process with memory on a device."""

    def __init__(self, where: Where) -> None:
        self.gpu = Gpu(where.config["driver"])
        super().__init__(where)
        self.bases: dict[bytes, tuple[um.Memh, Memory]] = {}

    def region(self, data: bytes, *args: Any) -> bytes:
        """Memory with that in it; the key to it.  `args` are Gpu.memory's from `size` on."""
        size, *more = args or (max(4096, len(data)),)
        memory = self.gpu.memory(size, data, *more)
        base = self.md.mem_reg(memory.array())
        key = base.mkey_pack()
        self.bases[key] = base, memory
        return key

    def part(self, key: bytes, offset: int, length: int) -> bytes:
        """A key to a part of a region's memory, registered for itself."""
        _, memory = self.bases[key]
        base = self.md.mem_reg(
            address=memory.address + offset, length=length, mem_type=um.MemType.CUDA
        )
        mine = base.mkey_pack()
        self.bases[mine] = base, memory
        return mine

    def dereg(self, key: bytes) -> None:
        self.bases[key][0].dereg()

    def free(self, key: bytes) -> None:
        """Deregister and free; what is allocated next may be where it was."""
        self.dereg(key)
        self.gpu.free(self.bases.pop(key)[1])

    def seen(self, key: bytes, offset: int, size: int) -> bytes:
        """What is there, as the owner reads it."""
        return self.gpu.read(self.bases[key][1], size, offset)

    def forget(self, key: bytes) -> None:
        self.rkeys.pop(key).close()

    def pull(self, key: bytes, offset: int, length: int) -> bytes:
        """get, into memory of this side's device."""
        memory = self.gpu.memory(max(4096, length))
        view = memory.array(shape=(length,))
        self.ep.get(*self.at(key, offset), view)
        data = self.gpu.read(memory, length)
        self.gpu.free(memory)
        return data

    def evict(self, key: bytes) -> None:
        self.md.peer_evict(self.rkeys[key].owner)

    def undumpable(self) -> None:
        """From now on only root may look into this process."""
        libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)

    def opened(self) -> dict[str, int]:
        return self.gpu.opened()

    def stats(self) -> dict[str, int]:
        return self.md.stats()


def gpu_process(conn: Any, where: tuple) -> None:
    serve(conn, GpuSide(Where(*where)))


class Far(Remote):
    """A GpuSide in another process."""

    serve = gpu_process


def in_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns in a thread of its own, which has no context."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((True, call()))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((good, value),) = found
    if not good:
        raise value
    return value
