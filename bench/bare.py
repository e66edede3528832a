# SPDX-License-Identifier: BSD-3-Clause
"""Compiles C extensions for benches: `_bare.c`, system calls and memcpy from Python."""

import importlib.util
import os
import shlex
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "bench/_bare.c"
BUILD = ROOT / "build/bench"


@cache
def extension(source: Path) -> ModuleType:
    """The module `name` of `_name.c`, compiled anew when that has changed.

    A call costs what a C function of Python costs, not ctypes' 300 ns.
    """
    name = source.stem.removeprefix("_")
    made = BUILD / (name + sysconfig.get_config_var("EXT_SUFFIX"))
    if not made.exists() or made.stat().st_mtime_ns < source.stat().st_mtime_ns:
        BUILD.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
        new = made.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *(*compiler, "-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"),
                *(str(source), "-o", str(new)),
            ],
            check=True,
        )
        new.replace(made)  # somebody else may be loading it
    spec = importlib.util.spec_from_file_location(name, made)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load() -> ModuleType:
    """Of _bare.c."""
    return extension(SOURCE)
