# SPDX-License-Identifier: BSD-3-Clause
"""The same from C: adopt.c has a context, a protection domain and a region of its own."""

import ctypes
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

import ucx_memh as um
from _rawqp import software_library

SOURCE = Path(__file__).with_name("adopt.c")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory) -> str:
    """adopt.c as a shared library."""
    library = tmp_path_factory.mktemp("ado_c") / "adopt.so"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    options = ["-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    include = [f"-I{path}" for path in (um.get_include(), sysconfig.get_path("include"))]
    command = [*compiler, *options, *include, SOURCE, "-o", library, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(library)


@pytest.mark.parametrize(
    ("component", "name", "value"),
    [("ib_mlx5", "device", "software"), ("ib", "library", software_library())],
    ids=["ib_mlx5", "ib"],
)
def test_a_runtime_in_c(tidy, runtime, component, name, value):
    assert ctypes.PyDLL(runtime).adopt_import() == 0
    words = (software_library(), component, name, value)
    assert ctypes.CDLL(runtime).adopt_run(*map(str.encode, words)) == 0
