# SPDX-License-Identifier: BSD-3-Clause
"""Programs of others in C, C++ and Cython; built and run against what is installed."""

import ctypes
import importlib.util
import shlex
import subprocess
import sys
import sysconfig
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

import ucx_memh as um
from ucx_memh.testing import open_fake

HERE = Path(__file__).parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

pytestmark = pytest.mark.skipif(not find_spec("ucx_memh_ib_mlx5"), reason="ib_mlx5 was left out")


def config(name: str) -> str:
    return sysconfig.get_config_var(name) or ""


def link_flags() -> list[str]:
    """What `python3-config --ldflags --embed` says."""
    folders = [f"-L{config('LIBDIR')}", f"-L{config('LIBPL')}", f"-Wl,-rpath,{config('LIBDIR')}"]
    return [
        *folders,
        f"-lpython{config('LDVERSION')}",
        *shlex.split(config("LIBS")),
        *shlex.split(config("SYSLIBS")),
        *shlex.split(config("LINKFORSHARED")),
    ]


STRICT = ["-Wall", "-Wextra", "-Werror"]
SHARED = ["-shared", "-fPIC"]


def test_program_with_its_own_main(build, tmp_path):
    """It embeds Python, gives up the GIL and works from four threads, past the end of Python."""
    program = build(HERE / "program.c", "program", "-std=gnu11", *STRICT, *link_flags())
    arguments = [sys.executable, "ib_mlx5", "device", "software"]
    done = subprocess.run(
        [program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "4 threads, 264 keys\n"


@pytest.fixture(scope="session")
def library(build) -> Path:
    return build(HERE / "library.c", "library.so", "-std=gnu11", *STRICT, *SHARED)


def test_shared_library_loaded_by_ctypes(library):
    """Its calls run without the GIL, on a domain and handles that Python has, too."""
    held, free = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
    held.lib_md.argtypes = [ctypes.py_object]
    held.lib_md.restype = ctypes.c_void_p
    held.lib_wrap.argtypes = [ctypes.py_object, ctypes.c_void_p]
    held.lib_wrap.restype = ctypes.py_object
    assert held.lib_init() == 0
    with pytest.raises(TypeError):
        held.lib_md(object())
    memory = ctypes.create_string_buffer(b"from C", 4096)
    base, window = ctypes.c_void_p(), ctypes.c_void_p()
    key, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    with um.open_md("ib_mlx5", device="software") as md:
        pointer = ctypes.c_void_p(held.lib_md(md))
        assert free.lib_register(pointer, memory, ctypes.c_size_t(4096), ctypes.byref(base)) == 0
        args = [base, ctypes.c_uint64(0), ctypes.c_uint64(64), key]
        assert free.lib_grant(*args, ctypes.byref(size), ctypes.byref(window)) == 0
        one, two = md.endpoint(), md.endpoint()
        one.connect(two.address)
        two.connect(one.address)
        rkey = md.rkey_unpack(key.raw[: size.value])
        into = bytearray(6)
        one.get(rkey, rkey.address, into)
        assert into == b"from C"
        assert free.lib_revoke(window) == 0
        with pytest.raises(um.RemoteAccessError):
            one.get(rkey, rkey.address, into)
        rkey.close()
        one.close()
        two.close()
        wrapped = held.lib_wrap(md, base)  # Python has it now, and gives it back
        assert wrapped.address == ctypes.addressof(memory)
        assert wrapped.base is None
        assert md.stats()["live_bases"] == 1
        wrapped.dereg()


def test_a_wrapped_handle_must_be_of_that_domain(library):
    held = ctypes.PyDLL(str(library))
    held.lib_wrap.argtypes = [ctypes.py_object, ctypes.c_void_p]
    held.lib_wrap.restype = ctypes.py_object
    held.lib_md.argtypes = [ctypes.py_object]
    held.lib_md.restype = ctypes.c_void_p
    assert held.lib_init() == 0
    (one, _), (other, _) = open_fake(), open_fake()
    memory, base = ctypes.create_string_buffer(64), ctypes.c_void_p()
    pointer = ctypes.c_void_p(held.lib_md(one))
    size = ctypes.c_size_t(64)
    assert ctypes.CDLL(str(library)).lib_register(pointer, memory, size, ctypes.byref(base)) == 0
    with pytest.raises(um.InvalidParamError):
        held.lib_wrap(other, base)
    held.lib_wrap(one, base).dereg()
    one.close()
    other.close()


def test_cpp(build):
    """Owners in the language's own way; the exception from the last line unwinds them all."""
    library = ctypes.PyDLL(
        str(build(HERE / "raii.cpp", "raii.so", "-std=c++17", "-Wpedantic", *STRICT, *SHARED))
    )
    library.cpp_run.argtypes = [ctypes.py_object]
    library.cpp_run.restype = ctypes.c_char_p
    md, device = open_fake()
    said = library.cpp_run(md).decode()
    assert said == "INVALID_PARAM: derive only narrows: outside the parent's range"
    assert device.live_keys == {}
    assert device.violations == {}
    stats = md.stats()
    assert [stats[name] for name in ("live_bases", "live_derived", "live_rkeys")] == [0, 0, 0]
    md.close()


@pytest.fixture(scope="session")
def cython_module(build, tmp_path_factory):
    """consumer.pyx, cythonized against the installed .pxd files."""
    folder = tmp_path_factory.mktemp("cython")
    c_file = folder / "consumer.c"
    command = [sys.executable, "-m", "cython", "-I", um.get_cython_path(), "-o", c_file]
    done = subprocess.run([*command, HERE / "consumer.pyx"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = build(c_file, f"consumer{SUFFIX}", *SHARED)
    spec = importlib.util.spec_from_file_location("consumer", made)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cython_module(cython_module):
    with um.open_md("ib_mlx5", device="software") as md:
        base = md.mem_reg(bytearray(4096))
        assert cython_module.leases(md, base, 200) == (200, "")
        assert md.stats()["revoke"] == 200
        threads = [
            threading.Thread(target=cython_module.leases, args=(md, base, 100)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert md.stats()["revoke"] == 600
        assert base.derived_count == 0
        base.dereg()


def test_cython_module_is_told_why(cython_module):
    with um.open_md("cma") as md:
        base = md.mem_reg(bytearray(4096))
        done, why = cython_module.leases(md, base, 1)
        assert done == 0
        assert "does not support derived" in why
        base.dereg()
