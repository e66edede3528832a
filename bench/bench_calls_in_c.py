# SPDX-License-Identifier: BSD-3-Clause
"""Calls so short that a C loop makes them: a thousand each time, so that a microsecond in the table
is a nanosecond for each.  `make hotpath` has the same loops, beside their limits in turns."""

from collections.abc import Iterator
from typing import Any

import pytest

from bench.bare import BUILD
from bench.hotpath import native_ways
from bench.hotpath.rounds import Way

CALLS = 1000

DERIVING = ("fake", "ib_mlx5")
OPERATIONS = {
    "mem_reg + dereg + release": ("register", native_ways.DEVICES),
    "derive + dereg + release": ("derive", DERIVING),
    "mkey_pack, again": ("pack", native_ways.DEVICES),
    "mkey_pack RAW, again": ("pack", DERIVING),
    "rkey_unpack of a known key + release": ("unpack", native_ways.DEVICES),
    "derive + mkey_pack + invalidate": ("invalidate", DERIVING),
    "malloc + free of 64 B": ("floor", (None,)),
}


@pytest.fixture(scope="module")
def ways() -> Iterator[dict[tuple[str, str | None], Way]]:
    with native_ways.entries(BUILD) as found:
        yield {(entry.what, entry.component): entry.way for entry in found}


@pytest.mark.parametrize(
    "what, component", [(what, name) for what in OPERATIONS for name in OPERATIONS[what][1]]
)
def bench_calls_in_c(benchmark: Any, ways: Any, what: str, component: str | None) -> None:
    """CALLS of them, by one call from Python."""
    benchmark.group = f"{OPERATIONS[what][0]}, in C ({CALLS} calls: 1 us is 1 ns for each)"
    benchmark.extra_info.update(component=component, calls=CALLS)
    benchmark(ways[what, component], CALLS)
    if benchmark.stats is not None:  # it is not timed: --benchmark-disable
        benchmark.extra_info["ns_per_call"] = benchmark.stats.stats.median / CALLS * 1e9
