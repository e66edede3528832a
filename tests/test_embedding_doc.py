# SPDX-License-Identifier: BSD-3-Clause
"""docs/embedding.md: its program runs, its tests exist, its calls are in the header."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import ucx_memh as um
from embed.test_consumers import link_flags

pytestmark = pytest.mark.source

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def text(root):
    return (root / "docs" / "embedding.md").read_text()


def test_the_program_runs(text, tmp_path):
    (program,) = re.findall(r"```c\n(.*?)```", text, re.S)
    source = tmp_path / "program.c"
    source.write_text(program)
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    include = [f"-I{um.get_include()}", f"-I{sysconfig.get_path('include')}"]
    made = tmp_path / "program"
    command = [*compiler, "-Wall", "-Wextra", "-Werror", *include, source, "-o", made]
    done = subprocess.run([*command, *link_flags()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Py_Initialize() takes the Python that is first on PATH.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([made], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "a key of 96 bytes for one peer\nand it is dead: REVOKED\n"


def test_the_tests_that_it_names_exist(text):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for file, test in named:
        assert f"\ndef {test}(" in (HERE / file).read_text(), f"{file}::{test}"


def test_the_calls_that_it_names_exist(text, root):
    header = (root / "ucx_memh" / "include" / "ucx_memh" / "memh.h").read_text()
    calls = set(re.findall(r"\(\*(\w+)\)\(", header))
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", text.split("## Which call for which")[1], re.M)
    named = {word for row in rows[2:] for word in re.findall(r"`([a-z]+_[a-z_]+)`", row)}
    assert named - calls == {"buffer_release"}
    assert len(named) > 15
