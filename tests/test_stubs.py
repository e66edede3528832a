# SPDX-License-Identifier: BSD-3-Clause
"""The stubs say what the compiled modules have, and programs that use them are typed strictly."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "typing").glob("*.py"))


@pytest.fixture
def checked(python, root, tmp_path):
    """`checked(module, *args)`: a checker of types, run in the tree; it must find nothing."""
    backends = sorted(root.glob("backends/*"))

    def run(module, *args):
        env = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, backends))}
        done = python("-m", module, *args, cwd=root, env=env, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    run.packages = ["ucx_memh", *(f"ucx_memh_{backend.name}" for backend in backends)]
    return run


def test_stubs_agree_with_the_modules(checked):
    """A line of the list that nothing needs is an error, too."""
    allowed = ["--allowlist", "tests/typing/stubtest.allow"]
    config = ["--mypy-config-file", "pyproject.toml"]
    checked("mypy.stubtest", "--concise", *config, *allowed, *checked.packages)


def test_programs_are_typed_strictly(checked, root):
    checked("mypy", "--strict", *(str(path.relative_to(root)) for path in PROGRAMS))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs_run(program, python):
    assert python(program).stdout
