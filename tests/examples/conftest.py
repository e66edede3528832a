# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of examples share."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture
def example(python: Callable, root: Path) -> Callable[..., tuple[int, str]]:
    """`example(name, *args)`: its status and its standard output; nothing may be on the other one,
    or what the pattern `stderr` says."""

    def run(name: str, *args: str, stderr: str = "") -> tuple[int, str]:
        done = python("-W", "error", root / "examples" / f"{name}.py", *args, check=False)
        assert re.fullmatch(stderr, done.stderr, re.S), done.stderr
        return done.returncode, done.stdout

    return run


@pytest.fixture
def port() -> int:
    """One of this host that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def two_hosts(example: Callable, port: int) -> Callable[..., tuple[tuple[int, str], ...]]:
    """`two_hosts(name, *args)`: what `example` gives of the one with these arguments that listens,
    and of the one that connects."""

    def run(name: str, *args: str) -> tuple[tuple[int, str], ...]:
        where = f"127.0.0.1:{port}"
        with ThreadPoolExecutor() as pool:
            there = pool.submit(example, name, "--connect", where)
            here = pool.submit(example, name, *args, "--listen", where)
            return here.result(), there.result()

    return run


@pytest.fixture
def interrupted(root: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`interrupted(act, name, *args)` starts an example of four processes, calls act(process, the
    pids of the four) in the middle of it; its status, what it printed and its errors.  None of the
    four may outlive it."""

    def run(act: Callable, name: str, *args: str) -> tuple[int, str, str]:
        command = [sys.executable, root / "examples" / f"{name}.py", *args]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            try:
                children = _children(process, 4)
                act(process, children)
                said, errors = process.communicate(timeout=60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        # Whoever still had its standard output would have kept communicate() waiting.
        return process.returncode, said, errors

    return run


def _children(process: subprocess.Popen, count: int) -> list[int]:
    """The first processes that it has started, when there are so many that run our program."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        found = [pid for pid, line in lines.items() if b"spawn_main" in line]
        if len(found) == count:
            time.sleep(1)  # most are at work by then; what comes out is the same if not
            return sorted(found)
        time.sleep(0.01)
    raise AssertionError(f"no {count} processes: {process.communicate()}")
