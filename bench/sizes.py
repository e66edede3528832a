# SPDX-License-Identifier: BSD-3-Clause
"""Which sizes are measured, and how they are written."""

import os

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

REGIONS = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB, GIB]
TRANSFERS = [8, 256, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, GIB]


def available() -> int:
    """Bytes of memory that may be had without swapping."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KIB
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")


# Three regions of the largest size are there at once: two here and the owner's.
LARGEST = GIB if available() > 5 * GIB else 64 * MIB


def fitting(sizes: list[int]) -> list[int]:
    """Those that this machine has the memory for."""
    return [size for size in sizes if size <= LARGEST]


def text(size: int) -> str:
    """8 B, 64 KiB, 1 GiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def name(size: int) -> str:
    """As a part of a bench's name."""
    return text(size).replace(" ", "")
