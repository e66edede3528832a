# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of examples share."""

import re
from collections.abc import Callable
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
def words() -> Callable[[str], list[str]]:
    """`words(text)`: its lines but for the numbers, and for where a picture is."""

    def lines(text: str) -> list[str]:
        return [re.sub(r"[\d.]+", "N", line) for line in text.splitlines() if "wrote" not in line]

    return lines
