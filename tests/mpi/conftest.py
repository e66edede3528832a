# SPDX-License-Identifier: BSD-3-Clause
"""Programs under a real mpiexec, of MPICH and of Open MPI."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RANKS = 4
PROGRAMS = Path(__file__).parent / "programs.py"
PATIENCE = 90  # seconds for one run, which takes two where nothing else runs


@pytest.fixture(scope="session", params=["mpich", "openmpi"])
def mpi(request: pytest.FixtureRequest) -> Iterator[tuple[list, dict]]:
    """What starts a program and in which environment; installed at the first use, in build/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.getfixturevalue("root"))
        from bench.peers.install import mpiexec

        yield mpiexec(request.param, RANKS)


@pytest.fixture
def mpirun(mpi: tuple[list, dict], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`mpirun(*args)` runs this Python with them on all ranks; status, standard output, errors."""
    command, env = mpi

    def run(*args: object) -> tuple[int, str, str]:
        process = subprocess.Popen(
            [*map(str, [*command, sys.executable, *args])],
            cwd=tmp_path,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said, errors = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, errors = process.communicate()
            pytest.fail(f"{args} hung:\n{said}{errors}")
        return process.returncode, said, errors

    return run


@pytest.fixture
def ranks(mpirun: Callable[..., tuple[int, str, str]]) -> Callable[[str], None]:
    """`ranks(name)` runs that function of programs.py on all ranks."""

    def run(name: str) -> None:
        # A rank that hangs says where and ends itself; the job is killed only if that fails.
        status, said, errors = mpirun(PROGRAMS, name, PATIENCE - 15)
        assert status == 0, said + errors
        assert said.count(f"{name} done\n") == 1, said + errors

    return run
