# SPDX-License-Identifier: BSD-3-Clause
"""Ten thousand handles by one call, beside the loop in Python that does the same.

The same items again and again: what takes or ends handles is prepared anew for each round.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ucx_memh as um
from bench.hotpath.batches import Batch

pytestmark = pytest.mark.benchmark(group="batches")

ITEMS = 10_000
ROUNDS = 10


@pytest.fixture(params=["many", "loop"])
def suffix(request: pytest.FixtureRequest) -> str:
    return "_many" if request.param == "many" else ""


@pytest.fixture
def derived(mlx5: um.Md) -> Iterator[Batch]:
    yield Batch(mlx5, ITEMS)
    mlx5.close(force=True)


@pytest.fixture
def bases() -> Iterator[Batch]:
    md = um.open_md("cma")
    yield Batch(md, ITEMS)
    md.close(force=True)


def taking(measure, batch: Batch, call: Callable[[], Any]) -> None:
    """Time how handles are taken; they are ended between the rounds."""
    measure.prepared(
        batch.md, lambda: [], lambda kept: kept.append(call()), after=ended, rounds=ROUNDS
    )
    measure.benchmark.extra_info["items"] = ITEMS


def ended(kept: list[Any]) -> None:
    for memhs in kept:
        memhs[0].md.dereg_many(memhs)


def using(measure, batch: Batch, made: Callable[[], Any], call: Callable[[Any], Any]) -> None:
    """Time what is done with handles, other ones in each round."""
    measure.prepared(
        batch.md, made, call, after=lambda memhs: batch.md.dereg_many(memhs), rounds=ROUNDS
    )
    measure.benchmark.extra_info["items"] = ITEMS


def bench_batch_derive(measure, derived: Batch, suffix: str) -> None:
    """derive of each range."""
    taking(measure, derived, getattr(derived, "derive" + suffix))


def bench_batch_register(measure, bases: Batch, suffix: str) -> None:
    """mem_reg of each range, by address."""
    taking(measure, bases, getattr(bases, "register" + suffix))


def bench_batch_pack(measure, derived: Batch, suffix: str) -> None:
    """First mkey_pack of each: the device makes its key."""
    made, call = (getattr(derived, name + suffix) for name in ("derive", "pack"))
    using(measure, derived, made, call)


def bench_batch_invalidate(measure, derived: Batch, suffix: str) -> None:
    """invalidate of each that was packed."""
    make, call = (getattr(derived, name + suffix) for name in ("derive", "invalidate"))

    def packed() -> Any:
        memhs = make()
        derived.md.mkey_pack_many(memhs)
        return memhs

    using(measure, derived, packed, call)
