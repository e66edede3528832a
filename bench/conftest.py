# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the benches, and what they note beside the time.

Times of a software device are not a NIC's: compare within one run, and read the command counts.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import ucx_memh as um
from bench import bare as bare_module
from bench.owner import Link, Owner, region
from bench.sizes import LARGEST, MIB

COMPONENTS = ["cma", "ib_mlx5"]


class Measure:
    """Runs pytest-benchmark's fixture, and makes its JSON say what was measured."""

    def __init__(self, benchmark: Any) -> None:
        self.benchmark = benchmark

    def note(self, md: um.Md | None, length: int | None, **more: Any) -> None:
        """Into extra_info; no `md`: it is a floor, with nothing of ours in it."""
        info = self.benchmark.extra_info
        if length is not None:
            info["bytes"] = length
        info["component"] = md.attr.component if md else None
        info["device"] = md.attr.md_name if md else None
        info["software"] = md.attr.software if md else None
        info.update(more)

    def __call__(
        self, md: um.Md | None, call: Callable[..., Any], *args: Any, length: int | None = None
    ) -> None:
        """Time call(*args), as often as it takes."""
        self.note(md, length)
        if md:
            # The first call may find something to set up; of 1 GiB there is no second for free.
            for _ in range(2 if (length or 0) < 256 * MIB else 1):
                before = md.stats()
                call(*args)
                self.benchmark.extra_info["commands"] = commands(before, md.stats())
        self.benchmark(call, *args)

    def prepared(
        self,
        md: um.Md,
        setup: Callable[[], Any],
        call: Callable[[Any], Any],
        after: Callable[[Any], Any] = lambda made: None,
        length: int | None = None,
        rounds: int = 300,
    ) -> None:
        """Time call(setup()), once for each setup; `after` clears away, untimed."""
        self.note(md, length)
        made = setup()
        before = md.stats()
        call(made)
        self.benchmark.extra_info["commands"] = commands(before, md.stats())
        after(made)
        last: list[Any] = []

        def again() -> tuple[tuple[Any, ...], dict[str, Any]]:
            if last:
                after(last.pop())
            last.append(setup())
            return (last[0],), {}

        self.benchmark.pedantic(call, setup=again, rounds=rounds)
        after(last.pop())


# How full the pool is, and how often several work requests were told of at once: no commands.
NO_COMMANDS = ("device.pool_", "device.doorbells", "device.control_qp")


def commands(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """What a device was told in between, by the domain's own count."""
    names = [name for name in now if name.startswith("device.") and now[name] != before[name]]
    return {
        name.removeprefix("device."): now[name] - before[name]
        for name in names
        if not name.startswith(NO_COMMANDS)
    }


@pytest.fixture
def measure(benchmark: Any) -> Measure:
    return Measure(benchmark)


@pytest.fixture(scope="session")
def bare() -> ModuleType:
    """The system calls and memcpy, with nothing around them."""
    return bare_module.load()


@pytest.fixture(scope="session")
def memory() -> memoryview:
    """So much of it that every bench may take what it needs."""
    return memoryview(region(LARGEST))


@pytest.fixture(scope="session")
def source() -> memoryview:
    """The same again, for memcpy."""
    return memoryview(region(LARGEST))


@pytest.fixture(scope="session")
def owner() -> Iterator[Owner]:
    """Another process, whose memory is moved."""
    with Owner(LARGEST) as process:
        yield process


@pytest.fixture(params=COMPONENTS)
def md(request: pytest.FixtureRequest) -> Iterator[um.Md]:
    with um.open_md(request.param) as opened:
        yield opened


@pytest.fixture
def mlx5() -> Iterator[um.Md]:
    with um.open_md("ib_mlx5") as opened:
        yield opened


@pytest.fixture
def link(md: um.Md, owner: Owner) -> Iterator[Link]:
    """Connected to the owner, with a key to all of its memory."""
    made = owner.link(md)
    yield made
    made.rkey.close()
    made.ep.close()
