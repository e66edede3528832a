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
def ranks(mpi: tuple[list, dict], tmp_path: Path) -> Callable[..., str]:
    """`ranks(name)` runs that function of programs.py on all ranks, and returns what they say."""
    command, env = mpi

    def run(name: str) -> str:
        # A rank that hangs says where and ends itself; the job is killed only if that fails.
        line = [*command, sys.executable, PROGRAMS, name, str(PATIENCE - 15)]
        process = subprocess.Popen(
            [*map(str, line)],
            cwd=tmp_path,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            pytest.fail(f"{name} hung:\n{said}")
        assert process.returncode == 0, said
        assert said.count(f"{name} done\n") == 1, said
        return said

    return run
