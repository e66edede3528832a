# SPDX-License-Identifier: BSD-3-Clause
"""Many ways in turns, and what is made of their times.

The machine changes its speed for seconds at a time.  So each round measures every way once, for
some milliseconds; each round begins with another one; and what is compared is of one round.
"""

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]
Way = Callable[[int], float]  # so many calls; nanoseconds for each
Times = dict[str, list[float]]

PHASE_NS = 8.5
"""malloc and free of 64 B take so long in the phase of the machine that the targets are for."""


def calls_for(way: Way, slice_ns: float) -> int:
    """As many as take about a slice; of three tries the shortest, for one may be interrupted."""
    count = 1
    while True:
        spent = min(way(count) for _ in range(3)) * count
        if spent >= slice_ns / 8 or count >= 1 << 24:
            return max(1, int(count * slice_ns / max(spent, 1)))
        count *= 4


def measure(ways: Mapping[str, Way], rounds: int, slice_ms: float) -> Times:
    """The times of each way, one for each round."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would fall on whoever makes the next object
    try:
        counts = {name: calls_for(way, slice_ms * 1e6) for name, way in ways.items()}
        times: Times = {name: [] for name in ways}
        names = list(ways)
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(ways[name](counts[name]))
    finally:
        if collects:
            gc.enable()
    return times


def ratios(times: list[float], limit: list[float]) -> list[float]:
    """Of each round's two."""
    return [ours / least for ours, least in zip(times, limit, strict=True)]


def at_phase(times: list[float], phase: list[float]) -> float:
    """The median, had malloc and free taken PHASE_NS in every round."""
    return statistics.median(PHASE_NS * ratio for ratio in ratios(times, phase))


def summary(
    times: list[float], phase: list[float] | None = None, limit: list[float] | None = None
) -> Row:
    """Median and least; what it is in the targets' phase; how often the limit it takes."""
    row: Row = {"ns": round(statistics.median(times), 2), "least_ns": round(min(times), 2)}
    row["rounds"] = len(times)
    if phase is not None:
        row["at_phase_ns"] = round(at_phase(times, phase), 2)
    if limit is not None:
        each = ratios(times, limit)
        low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
        row["limit_ns"] = round(statistics.median(limit), 2)
        row["ratio"] = round(middle, 4)
        row["quartiles"] = [round(low, 4), round(high, 4)]
    return row
