# SPDX-License-Identifier: BSD-3-Clause
"""Several ways in turns, round by round, and what each took beside one of them.

Machines change their speed for seconds, so a round is short, has every way in it, and begins with
another one each time.  What counts is the median of the rounds' ratios.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bench.peers.reasons import PeerLost

Row = dict[str, Any]
Way = Callable[[int], float]  # from a count of calls to nanoseconds for one of them


def calls_for(way: Way, seconds: float) -> int:
    """As many as take so long; finding out takes less, if a call does."""
    aim = seconds * 1e9
    count = 1
    while True:
        taken = max(way(count) * count, 1.0)
        if taken >= aim / 8:
            # The first calls are slow, and so is whoever had to wait for a CPU just then.
            taken = min(taken, *(max(way(count) * count, 1.0) for _ in range(2)))
            return max(1, round(count * aim / taken))
        count = min(count * 100, 1 + int(count * aim / 4 / taken))


def orders(names: list[str], rounds: int) -> Iterator[str]:
    """Each round begins with another one.  After everybody was first it goes the other way about,
    for what runs after a process that has left the caches cold would always be the same one."""
    for number in range(rounds):
        turns, first = divmod(number, len(names))
        order = names[first:] + names[:first]
        yield from reversed(order) if turns % 2 else order


def interleaved(
    ways: dict[str, Way],
    ours: str,
    rounds: int,
    seconds: float,
    counts: dict[str, int] | None = None,
) -> dict[str, Row]:
    """A row for each way: {"ns", "least_ns", "ratio", "quartiles", "calls", "rounds"}, or
    {"reason"} if it got lost.

    "ns" is the median; "ratio" is this way's time to that of `ours` in the same round.  A round
    takes `seconds` for each way, unless `counts` has its number of calls.  If ours gets lost, that
    is nothing to go on with: PeerLost.
    """
    lost: dict[str, str] = {}
    calls = dict(counts or {})
    taken: dict[str, list[float]] = {name: [] for name in ways}

    def turn(name: str, what: Callable[[], None]) -> None:
        if name not in lost:
            try:
                what()
            except PeerLost as error:
                if name == ours:
                    raise
                lost[name] = str(error)

    def count(name: str) -> None:
        calls[name] = calls_for(ways[name], seconds)

    def time(name: str) -> None:
        taken[name].append(ways[name](calls[name]))

    names = list(ways)
    for name in names:
        if name not in calls:
            turn(name, lambda name=name: count(name))
    for name in orders(names, rounds):
        turn(name, lambda name=name: time(name))
    return {
        name: {"reason": lost[name]}
        if name in lost
        else summary(taken[name], taken[ours]) | {"calls": calls[name]}
        for name in names
    }


def summary(times: list[float], ours: list[float]) -> Row:
    """Of the rounds of one way and the same rounds of ours."""
    ratios = [a / b for a, b in zip(times, ours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ns": round(statistics.median(times), 1),
        "least_ns": round(min(times), 1),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "rounds": len(times),
    }
