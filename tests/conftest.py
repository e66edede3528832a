# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures that all tests may use."""

import gc
import inspect
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("_rows", "_attacks", "_gated", "_processes", "_sides", "_devices")

pytest_plugins = ["ucx_memh.testing.plugin"]

TESTS = Path(__file__).parent
ROOT = TESTS.parent


class PeerError(AssertionError):
    """A peer's function raised, or its process ended without an answer; has its traceback."""


class Peer:
    """A function at work in a process of its own, and the pipe to it."""

    def __init__(self, function: Callable[..., Any], args: tuple, env: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Popen and not fork: the child has none of our state, threads or file descriptors.
            self.process = subprocess.Popen(
                [sys.executable, TESTS / "_peer.py", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
            )
        self.conn = Connection(ours.detach())
        self.conn.send((inspect.getfile(function), function.__qualname__, pickle.dumps(args)))

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: object) -> None:
        """What the function gets from its conn.recv()."""
        self.conn.send(message)

    def recv(self, timeout: float = 30) -> Any:
        """What the function gave to its conn.send()."""
        return self._next("message", timeout)

    def result(self, timeout: float = 30) -> Any:
        """What the function returned; the process has ended then."""
        value = self._next("result", timeout)
        self.process.wait(timeout)
        return value

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, e.g. SIGSTOP and SIGCONT."""
        self.process.send_signal(number)

    def close(self) -> None:
        self.kill()
        self.conn.close()

    def _next(self, wanted: str, timeout: float) -> Any:
        if not self.conn.poll(timeout):
            raise PeerError(f"nothing from peer {self.pid} within {timeout} s")
        try:
            kind, value = self.conn.recv()
        except (EOFError, ConnectionResetError):
            raise PeerError(f"peer {self.pid} ended with status {self.process.wait()}") from None
        if kind == "error":
            raise PeerError(f"in peer {self.pid}:\n{value}")
        if kind != wanted:
            raise PeerError(f"peer {self.pid} gave a {kind}, not a {wanted}: {value!r}")
        return value


def start_peers() -> Iterator[Callable[..., Peer]]:
    """What starts them, and in the end kills them all."""
    peers: list[Peer] = []

    def start(function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> Peer:
        peers.append(Peer(function, args, env or {}))
        return peers[-1]

    yield start
    for started in peers:
        started.close()


def pytest_configure() -> None:
    """A shell ignores SIGINT for what it starts in the background, and what that starts too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Marks of tests that run when `-m` asks for them, and not otherwise.
ON_REQUEST = ("gpu", "guest")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unasked = [mark for mark in ON_REQUEST if mark not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """`peer(function, *args, env={})` runs function(conn, *args) in another process.

    `function` is any module-level function of a file, the test's own too; `conn` has send() and
    recv(), and recv() raises EOFError when the test has ended.  What the function returns or
    raises comes out of Peer.result().  All peers are killed when the test ends.
    """
    yield from start_peers()


@pytest.fixture(scope="session")
def lasting_peer() -> Iterator[Callable[..., Peer]]:
    """The same, but they are killed when all tests have ended: for where a process is dear."""
    yield from start_peers()


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python(*args)` runs this Python with them, in a folder without sources, and waits.

    It must end with status 0, unless `check=False`; other options are subprocess.run's.
    """

    def run(*args: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60, **options}
        done = subprocess.run([sys.executable, *args], **options)
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture
def words() -> Callable[[str], list[str]]:
    """`words(text)`: its lines but for the numbers, and for where a picture is."""

    def lines(text: str) -> list[str]:
        return [re.sub(r"[\d.]+", "N", line) for line in text.splitlines() if "wrote" not in line]

    return lines


@pytest.fixture(scope="session")
def softcuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`softcuda(*without)` is the path of a software libcuda.so.1 that lacks these symbols."""
    from softcuda.driver import Builder

    return Builder(tmp_path_factory.mktemp("softcuda"))


@pytest.fixture
def driver(softcuda: Callable[..., str]) -> Iterator[Any]:
    """The software CUDA driver as in a new process: not even begun."""
    from softcuda.driver import Driver

    driver = Driver(softcuda())
    driver.reset()
    yield driver
    driver.reset()


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree; only for tests marked `source`."""
    return ROOT


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `bench` importable, as it is in the root of the tree."""
    monkeypatch.syspath_prepend(root)


@pytest.fixture(scope="session")
def frozen_heap() -> None:
    """Makes gc.collect() cheap: what pytest holds is not looked at any more."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fakes(frozen_heap: None, fakes: Any) -> Any:
    """The plugin's."""
    return fakes
