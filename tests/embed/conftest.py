# SPDX-License-Identifier: BSD-3-Clause
"""What compiles the consumers."""

import os
import shlex
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import ucx_memh as um


@pytest.fixture(scope="session")
def build(tmp_path_factory) -> Callable[..., Path]:
    """`build(source, output, *options)`: against the installed headers."""
    folder = tmp_path_factory.mktemp("embed")

    def run(source: Path, output: str, *options: str) -> Path:
        made = folder / output
        language = "CXX" if source.suffix == ".cpp" else "CC"
        compiler = shlex.split(os.environ.get(language) or sysconfig.get_config_var(language))
        include = [f"-I{um.get_include()}", f"-I{sysconfig.get_path('include')}"]
        command = [*compiler, "-O1", "-pthread", *include, str(source), "-o", str(made), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return made

    return run
