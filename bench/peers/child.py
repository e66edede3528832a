# SPDX-License-Identifier: BSD-3-Clause
"""A harness in a process of its own, and the pipe to it; its side is harness/serving.py.

Whatever goes wrong with it ends as a PeerLost with a reason: it does not start, it ends, it says
nonsense, it says nothing for too long.  The process is killed then, by the id that we have.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from bench.peers.reasons import PeerLost, last_words, without_paths

# What the page shows of all the libraries that a process has loaded.
SHOWN = re.compile(r"lib(ucp|uct|uct_cma|mpi|nixl|bare|loops)(-\w+)?\.so[\d.]*$|connex_rs\S*\.so$")
OURS = re.compile(r"ucx_memh\S*/(core|_md)\.\S*so$")


class Child:
    """A context manager.  `timeout` in seconds is for each answer."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        folder: Path,
        env: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> None:
        self.log, self.folder, self.timeout = log, folder, timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            try:
                self.process = subprocess.Popen(
                    [*map(str, command)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=folder,
                    env={**os.environ, **(env or {})},
                    bufsize=0,
                )
            except OSError as error:
                raise PeerLost(without_paths(str(error))) from None
        self.rest = b""
        self.lost: str | None = None
        self._loaded: list[str] = []
        about = self._answer()
        try:
            self.pid: int = about["pid"]  # not always that of the process that we started
            self.operations: dict[str, str] = about["operations"]
            self.versions: dict[str, str] = about["versions"]
            self.key_bytes: int | None = about["key_bytes"]
        except KeyError as error:
            self._lose(f"its first line has no {error}")
        self.loaded()

    def ask(self, operation: str, length: int, count: int) -> float:
        """Nanoseconds for one of `count` calls on so many bytes."""
        if self.lost is not None:
            raise PeerLost(self.lost)
        line = f"{operation} {length} {count}\n".encode()
        with contextlib.suppress(BrokenPipeError):  # then there is no answer, and a reason
            assert self.process.stdin is not None
            self.process.stdin.write(line)
        answer = self._answer()
        if "ns" not in answer:
            raise PeerLost(without_paths(str(answer.get("error", answer)))[:200])
        return answer["ns"]

    def loaded(self) -> list[str]:
        """The libraries that matter, of those that it has, or had when this was last asked."""
        if self.lost is None:
            self._loaded = libraries(self.pid, self.folder)
        return self._loaded

    def _lose(self, reason: str) -> NoReturn:
        """Kills it; the reason is for all later questions too."""
        self.lost = reason
        self.process.kill()
        self._end()
        raise PeerLost(reason)

    def close(self) -> None:
        """Tells it by the end of the pipe; how it ends is its own affair, some crash."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._end()

    def _end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._line()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._lose(f"it said {without_paths(line.decode(errors='replace'))[:100]!r}")
        return answer

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        until = time.monotonic() + self.timeout
        while b"\n" not in self.rest:
            left = max(0.0, until - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                self._lose(f"killed: it said nothing for {self.timeout:g} s")
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                self._lose(self._how_it_ended())
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        """Without a word on its stdout."""
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return "killed: it had closed its output, and went on"
        said = last_words(self.log.read_text(errors="replace"))
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"ended with {how}: {said}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.lost is None:
            self.close()


def libraries(pid: int, root: Path) -> list[str]:
    """Of a process, from the kernel: not what it was linked with, but what it has."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines}
    shown = [path for path in paths if SHOWN.search(path.name) or OURS.search(str(path))]
    return sorted(whose(path, root) for path in shown)


def whose(path: Path, root: Path) -> str:
    """libucp.so.0.0.0 of libucx: the venv in build/peers, this tree, or the system."""
    try:
        inside = path.relative_to(root).parts
    except ValueError:
        return f"{path.name} of the system"
    if inside[:2] == ("build", "peers"):
        return f"{path.name} of {inside[2]}"
    if "-packages" in str(path.parent):
        return f"{path.name} of site-packages"
    package = path.parent.name
    return f"{package}/{path.name}" if package.startswith("ucx_memh") else path.name
