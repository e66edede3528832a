# SPDX-License-Identifier: BSD-3-Clause
"""The parts that a call from Python consists of, and the floors that they add up to."""

import timeit
from pathlib import Path
from typing import Any

from bench import bare
from bench.hotpath.rounds import Times, Way

SOURCE = Path(__file__).parent / "_floor.c"

LOOP = "the loop"

# What is timed, and what is taken off it: the rest is the part alone.
PARTS = {
    LOOP: ("pass", None),
    "call": ("thing.call0()", LOOP),
    "call with 1 argument": ("thing.call(octets)", LOOP),
    "call with 3 arguments": ("thing.call(octets, octets, octets)", LOOP),
    "object": ("thing.make()", "call"),
    "buffer": ("thing.look(octets)", "call with 1 argument"),
    "96 bytes": ("thing.bytes96()", "call"),
    "with": ("with thing: pass", LOOP),
}


def statement(text: str, **names: Any) -> Way:
    """A statement in a loop, as timeit has it: the loop's own time is in it."""
    timer = timeit.Timer(text, globals=names)
    return lambda count: timer.timeit(count) * 1e9 / count


def ways() -> dict[str, Way]:
    thing = bare.extension(SOURCE).thing
    names = {"thing": thing, "octets": bytearray(4096)}
    return {part: statement(text, **names) for part, (text, _) in PARTS.items()}


def parts(times: Times) -> Times:
    """Of each round, what each part takes by itself.

    One that a neighbour disturbed may be below nothing; in a sum that falls out again.
    """
    alone = {}
    for part, (_, off) in PARTS.items():
        taken = times[off] if off else [0.0] * len(times[part])
        alone[part] = [a - b for a, b in zip(times[part], taken, strict=True)]
    return alone


def floor(alone: Times, needed: list[str]) -> list[float]:
    """In each round, the loop and all that is needed."""
    return [sum(each) for each in zip(*(alone[part] for part in [LOOP, *needed]), strict=True)]
