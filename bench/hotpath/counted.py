# SPDX-License-Identifier: BSD-3-Clause
"""What bench.hotpath.counts runs under callgrind: each way twice, between two marks.

    python -m bench.hotpath.counted FOLDER CALLS

FOLDER is where loops.c is compiled into.  Of the calls that are counted, three times as many are
in the second dump as in the first: what is no call's falls out of the difference.
"""

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path

from bench.hotpath import native_ways, python_ways
from bench.hotpath.native import HERE, compile_library
from bench.hotpath.rounds import Way

WARM = 100  # calls before: CPython specializes, caches fill


@contextmanager
def all_ways(folder: Path) -> Iterator[dict[tuple[str, str, str | None], Way]]:
    with (
        native_ways.entries(folder, counting=True) as c,
        python_ways.entries(counting=True) as python,
    ):
        tables = {"c": c, "python": python}
        yield {
            (table, entry.what, entry.component): entry.way
            for table, found in tables.items()
            for entry in found
        }


def main() -> None:
    folder, calls = Path(sys.argv[1]), int(sys.argv[2])
    marks = CDLL(str(compile_library(HERE / "loops.c", folder)))
    gc.disable()  # a collection would be in one count and not in the other
    with all_ways(folder) as ways:
        for key, way in ways.items():
            # The first dump is thrown away: it has in it what is done once.
            for name, count in (
                (None, WARM),
                ([*key, calls], calls),
                ([*key, 3 * calls], 3 * calls),
            ):
                label = json.dumps(name).encode()
                marks.mark_begin()
                way(count)
                marks.mark_end(label)


if __name__ == "__main__":
    main()
