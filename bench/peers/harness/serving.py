# SPDX-License-Identifier: BSD-3-Clause
"""The harness's side of the pipe; the other side is bench/peers/child.py.

First the harness says who it is, as a line of JSON:
    {"pid": 7, "operations": {"register": "what it calls"}, "versions": {"package": "1.0"},
     "key_bytes": 64}, where null stands for no key
Then each line "OPERATION BYTES COUNT" is answered by {"ns": for one call} or {"error": "why"}.
"""

import ctypes
import gc
import importlib.metadata
import json
import mmap
import os
import platform
import sys
import timeit
from collections.abc import Callable
from typing import Any

LARGEST = 64 << 20

WARMUP = 1000  # operations on the data path that are not timed, or as many as are timed

Loop = Callable[[int], float]  # from a count of calls to nanoseconds for one of them


def memory() -> mmap.mmap:
    """64 MiB that have been touched, for pages that are not there would be measured too."""
    made = mmap.mmap(-1, LARGEST, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, LARGEST, mmap.PAGESIZE):
        made[page] = 1
    return made


def address(of: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(of))


def timed(statement: str, **names: Any) -> Loop:
    """A loop around the statement, without a call of its own; the garbage collector rests."""
    timer = timeit.Timer(statement, globals=names)
    return lambda count: timer.timeit(count) * 1e9 / count


def loaded_ucx() -> str | None:
    """What the libucp in this process says of itself, wherever it came from."""
    with open("/proc/self/maps") as lines:
        paths = {line.split()[-1] for line in lines if "/libucp" in line}
    for path in paths:
        ask = ctypes.CDLL(path).ucp_get_version_string
        ask.restype = ctypes.c_char_p
        return ask().decode()
    return None


def versions(*packages: str) -> dict[str, str]:
    """Of the packages, of Python, and of the UCX that came along."""
    found = {name: importlib.metadata.version(name) for name in packages}
    ucx = loaded_ucx()
    return found | ({"UCX": ucx} if ucx else {}) | {"Python": platform.python_version()}


def serve(
    prepare: dict[str, tuple[str, Callable[[int], Loop]]],
    versions: dict[str, str],
    key_bytes: int | None = None,
) -> None:
    """Until the pipe ends.  `prepare`: by operation what it calls, and what makes the loop for a
    number of bytes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    words = {name: text for name, (text, _) in prepare.items()}
    say(
        {
            "pid": os.getpid(),
            "operations": words,
            "versions": versions,
            "key_bytes": key_bytes,
        }
    )
    loops: dict[tuple[str, int], Loop] = {}
    gc.disable()
    for line in sys.stdin:
        operation, length, count = line.split()
        wanted = operation, int(length)
        try:
            if wanted not in loops:
                loops[wanted] = prepare[operation][1](wanted[1])
            say({"ns": loops[wanted](int(count))})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
