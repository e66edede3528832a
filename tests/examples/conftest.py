# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of examples share."""

import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
