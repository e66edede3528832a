# SPDX-License-Identifier: BSD-3-Clause
"""What is wanted of which row, and whether it was reached.  Nothing here measures."""

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """`row[key]` is to be at most (or, `least`, at least) `bound`."""

    key: str
    bound: float
    least: bool = False
    words: str | None = None  # for what says more than the key

    def reached(self, row: Row) -> bool:
        value = row[self.key]
        return value >= self.bound if self.least else value <= self.bound


BANDWIDTH = Target("ratio", 1 / 0.97, words="at least 0.97 of its bandwidth")

C = {
    "derive + dereg + release": Target("ratio", 2.5),
    "mkey_pack, again": Target("at_phase_ns", 12),
    "mkey_pack RAW, again": Target("at_phase_ns", 5),
    "rkey_unpack of a known key + release": Target("at_phase_ns", 30),
    "get of 8 B": Target("ratio", 1.05),
}
PYTHON = {
    "mem_reg + dereg": Target("at_phase_ns", 150),
    "mkey_pack, again": Target("at_phase_ns", 70),
    "rkey_unpack of a known key + close": Target("at_phase_ns", 130),
    "derive + dereg": Target("at_phase_ns", 100),
    "get of 8 B": Target("ratio", 1.2),
    "get of 64 MiB": BANDWIDTH,
    "put of 64 MiB": BANDWIDTH,
}
# Of 10,000 at once: beside the loop, and beside 1,000 at once.
CHEAPER = Target("ratio", 5, least=True)
FLAT = Target("growth", 1.25)

# Without a device, or with one that costs next to nothing.  softmlx5 looks at every page of a
# registration, as a kernel has to, so that one is no library's time.
DEVICE_TIME = {("mem_reg + dereg", "ib_mlx5"), ("register", "ib_mlx5")}


def target(table: str, row: Row) -> Target | None:
    """What is wanted of a row of the tables "c" and "python"."""
    if (row["what"], row["component"]) in DEVICE_TIME:
        return None
    return {"c": C, "python": PYTHON}[table].get(row["what"])
