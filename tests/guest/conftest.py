# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the guest itself; they take minutes, and run when `-m guest` asks for them."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from _marked import MARK, marked, wait_for


@pytest.fixture(scope="session")
def setup(root):
    """`setup()` starts setup.sh."""

    def run() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", root / "tools/guest/setup.sh"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


@pytest.fixture(scope="session")
def kernel(setup):
    """There is something to boot."""
    with setup() as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


@pytest.fixture(scope="session")
def running(kernel, root) -> Callable[[Path], AbstractContextManager]:
    """`running(tmp_path)` gives what starts run.py; afterwards none of its processes and files is
    left."""

    @contextmanager
    def running(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        environment = {**os.environ, "TMPDIR": str(temporary), MARK: str(tmp_path)}

        def run(*args: object, **env: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, root / "tools/guest/run.py", *map(str, args)],
                cwd=tmp_path,
                env={**environment, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        yield run
        wait_for(lambda: not marked(tmp_path))
        assert list(temporary.iterdir()) == []

    return running


class Part(NamedTuple):
    """What one guest did of a program of two: its exit status and lines of output."""

    status: int
    lines: list[str]


# A remote shell, for there is no other in the guests: HOST COMMAND..., perhaps after options.
REMOTE = """#!/bin/sh
while case $1 in -*) true ;; *) false ;; esac do shift; done
host=$1
shift
echo "$*" | busybox nc "$host" 7100
"""
EXAMPLES = {
    "leases": "kv_leases.py --leases 400 --blocks 32 --block-size 1024 --late 4",
    "stencil": "pgas/stencil.py --rows 31 --columns 20 --steps 12 --every 4 --fail hang",
}


@pytest.fixture(scope="session")
def two(running, root, tmp_path_factory):
    """Programs from one guest to another, in `.parts[guest][name]`; then one guest panics.

    All in one run: in a guest each Python takes ten seconds to start.
    """
    folder = tmp_path_factory.mktemp("two")
    there = "10.77.0.1:7000"
    demo = [sys.executable, "-m", "ucx_memh", "demo"]
    programs = {
        "demo": (
            [*demo, "--backend", "ib", "--size", "1", "--listen", there],
            [*demo, "--connect", there],
        )
    }
    for name, words in EXAMPLES.items():
        program, *options = words.split()
        command = [sys.executable, root / "examples" / program, "--backend", "ib"]
        programs[name] = ([*command, *options, "--listen", there], [*command, "--connect", there])
    # The second guest hears from the first when MPI's launcher has ended.
    programs["mpi"] = (mpi(root, folder), ["busybox", "nc", "-l", "-p", 7101])
    one, other = (
        "\n".join(map(part, programs, each)) for each in zip(*programs.values(), strict=True)
    )
    one += "\nuntil busybox nc 10.77.0.2 7101; do sleep 1; done; sleep 2; exit 3"
    # A panic takes what is not on its way out yet.
    other = f"busybox nc -ll -p 7100 -e sh &\n{other}\nsleep 1; echo c >/proc/sysrq-trigger"
    with running(folder) as start:
        options = ["--timeout", 400, "--env", "PYTHONDONTWRITEBYTECODE=1"]
        with start(*options, "--", "sh", "-c", one, "---", "sh", "-c", other) as process:
            out, err = process.communicate(timeout=500)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    done.parts = {number: parts(number, out) for number in (1, 2)}
    return done


def part(name: str, command: list[object]) -> str:
    line = shlex.join(map(str, command))
    return f"echo @ {name}; timeout 120 {line} 2>&1; echo = $?"


def parts(number: int, out: str) -> dict[str, Part]:
    """What a guest printed, by part."""
    text = "".join(line[3:] for line in out.splitlines(True) if line.startswith(f"{number}| "))
    found = re.findall(r"^@ (\w+)\n(.*?)^= (\d+)$", text, re.S | re.M)
    return {name: Part(int(status), lines.splitlines()) for name, lines, status in found}


def mpi(root: Path, folder: Path) -> list[object]:
    """MPICH's launcher, which starts two ranks in each guest: the program of docs/mpi.md, and some
    of tests/mpi."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        from bench.peers.install import mpiexec

        command, env = mpiexec("mpich", 4)
    remote = folder / "remote"
    remote.write_text(REMOTE)
    remote.chmod(0o755)
    (program,) = re.findall(r"```python\n(.*?)```", (root / "docs/mpi.md").read_text(), re.S)
    tutorial = folder / "window.py"
    tutorial.write_text(program)
    programs = [root / "tests/mpi/programs.py", "data,atomics,revoke,regrant", 100]
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    run = f"{run}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    env |= {"UCX_TLS": "tcp,sm,self", "UCX_WARN_UNUSED_ENV_VARS": "n"}  # MPI itself by TCP
    hosts = ["-hosts", "10.77.0.1:2,10.77.0.2:2", "-launcher", "ssh", "-launcher-exec", remote]
    return [
        *("env", *(f"{name}={value}" for name, value in env.items())),
        *(*command, *hosts, sys.executable, "-c", run, tutorial, *programs),
    ]
