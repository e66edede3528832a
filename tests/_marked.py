# SPDX-License-Identifier: BSD-3-Clause
"""Programs that carry a mark in their environment: what a test has started, and all of theirs."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "STARTED_BY_TEST"


def marked(mark: object) -> list[int]:
    """The pids of those at work."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
