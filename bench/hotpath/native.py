# SPDX-License-Identifier: BSD-3-Clause
"""loops.c, compiled into build/bench and called with the pointers of Python objects."""

import ctypes as c
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import ucx_memh as um
from ucx_memh import capi, core

HERE = Path(__file__).parent
assert capi  # whose import pyapi.h makes


def compile_library(source: Path, folder: Path) -> Path:
    """A shared library, made anew when its source or the header has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"lib{source.stem}.so"
    header = Path(um.get_include(), "ucx_memh", "memh.h")
    newest = max(path.stat().st_mtime for path in (source, header))
    if not library.exists() or library.stat().st_mtime < newest:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
        options = ["-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        new = library.with_suffix(f".{os.getpid()}")
        command = [*compiler, *options, f"-I{um.get_include()}", str(source), "-o", str(new)]
        subprocess.run(command, check=True)
        new.replace(library)  # somebody else may be loading it
    return library


def capsule(name: str) -> int:
    get = c.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = [c.py_object, c.c_char_p], c.c_void_p
    return get(getattr(core, name), f"ucx_memh.core.{name}".encode())


def pointer(thing: um.Md | um.Memh | um.Rkey | um.Endpoint) -> c.c_void_p:
    """The C object behind a Python one."""
    kinds = {um.Md: 1, um.Memh: 2, um.Rkey: 3, um.Endpoint: 4}
    place = c.c_void_p.from_address(capsule("_C_PYTHON") + 8 * kinds[type(thing)]).value
    return c.c_void_p(c.PYFUNCTYPE(c.c_void_p, c.py_object)(place)(thing))


class Loops:
    """The loops by name; each returns nanoseconds per round."""

    def __init__(self, folder: Path) -> None:
        self.library = c.CDLL(str(compile_library(HERE / "loops.c", folder)))
        self.api = c.c_void_p(capsule("_C_API"))

    def bare(self, name: str, *args: object, count: int) -> float:
        """One that does not know the library."""
        function = getattr(self.library, f"loop_{name}")
        function.restype = c.c_double
        taken = function(*args, c.c_size_t(count))
        if taken < 0:
            raise um.MemhError(f"loop_{name}: {um.Status(int(taken)).name}")
        return taken / count

    def __call__(self, name: str, *args: object, count: int) -> float:
        return self.bare(name, self.api, *args, count=count)
