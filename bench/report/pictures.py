# SPDX-License-Identifier: BSD-3-Clause
"""The two pictures, by matplotlib (the extra `report`)."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.report.page import Data, times, transfers
from bench.sizes import text

# Okabe and Ito's colours, which the colour-blind tell apart; in print the marks do.
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
STYLE = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 2.2,
    "lines.markersize": 7,
}

Points = list[tuple[float, float]]


def line(axes: Axes, points: Points, colour: str, mark: str, **more: Any) -> None:
    axes.plot(*zip(*points, strict=True), color=colour, marker=mark, **more)


def label(axes: Axes, at: tuple[float, float], words: str, colour: str, up: int = 0) -> None:
    """Right of a line's last point, in its colour: no legend to look up."""
    axes.annotate(
        words, at, (10, up), textcoords="offset points", color=colour, va="center", fontsize=12
    )


def both_logarithmic(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown: list[int] = []
    for size in reversed(sizes):  # from the largest, and what has room beside it
        if not shown or size * 4 <= shown[-1]:
            shown.append(size)
    axes.set_xticks(shown, [text(size) for size in shown], rotation=40, ha="right")
    axes.minorticks_off()


def revoke(data: Data, path: Path) -> None:
    """Above, instructions in the guest; below, time on softmlx5."""
    rows = data["headline"]
    sizes = [row["bytes"] for row in rows]
    panels = [
        (
            "instructions",
            1e3,
            f"thousands of instructions, soft-RoCE in a guest\n(Linux {data['guest']['kernel']},"
            f" {data['guest']['date']})",
        ),
        ("software_ns", 1e3, "microseconds on softmlx5:\na software device, not a NIC"),
    ]
    with plt.rc_context(STYLE):
        figure, both = plt.subplots(2, 1, figsize=(8.4, 9.2), sharex=True)
        for axes, (key, unit, words) in zip(both, panels, strict=True):
            ends = {}
            for way, colour, mark in (("registered", ORANGE, "o"), ("derived", BLUE, "s")):
                points = [(row["bytes"], row[key][way] / unit) for row in rows if row[key]]
                line(axes, points, colour, mark)
                ends[way] = points[-1]
            both_logarithmic(axes, sizes)
            axes.margins(y=0.12)
            axes.set_xlim(sizes[0] / 1.6, sizes[-1] * 40)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            label(axes, ends["registered"], "deregister,\nregister, pack", ORANGE)
            label(axes, ends["derived"], "derived key: invali-\ndate, derive, pack", BLUE)
            last = [row for row in rows if row[key]][-1]
            middle = (last[key]["registered"] * last[key]["derived"]) ** 0.5 / unit
            axes.annotate(
                "",
                (last["bytes"], ends["registered"][1] / 1.25),
                (last["bytes"], ends["derived"][1] * 1.25),
                arrowprops={"arrowstyle": "<->", "color": "#666666"},
            )
            label(axes, (last["bytes"], middle), f"{times(last[key]['ratio'])} times", "#444444")
            axes.set_title(words, loc="left", fontsize=13)
        both[1].set_xlabel("size of the registered region")
        figure.suptitle("What it costs to cut off one peer", x=0.02, ha="left", fontweight="bold")
        save(figure, path)


def data_path(data: Data, path: Path) -> None:
    """Bytes per second of get, and of put."""
    with plt.rc_context(STYLE):
        figure, both = plt.subplots(2, 1, figsize=(8.4, 9.2), sharex=True)
        for axes, way in zip(both, ("get", "put"), strict=True):
            ours = transfers(data, way, "cma")
            soft = transfers(data, way, "ib_mlx5")
            copies = transfers(data, "memcpy", None)
            copied = [(row["bytes"], row["bytes"] / row["ns"][0]) for row in copies]
            line(axes, copied, GREEN, "^")
            # The floor is broad and grey, and the library's line lies on it.
            bare = [(row["bytes"], row["bytes"] / row["ns"][1]) for row in ours]
            line(axes, bare, "#aaaaaa", "o", linewidth=7, markersize=11)
            mine = [(row["bytes"], row["bytes"] / row["ns"][0]) for row in ours]
            line(axes, mine, ORANGE, "o")
            imitated = [(row["bytes"], row["bytes"] / row["ns"][0]) for row in soft]
            line(axes, imitated, BLUE, "s", linestyle="--")
            both_logarithmic(axes, [row["bytes"] for row in ours])
            axes.set_xlim(ours[0]["bytes"] / 1.8, ours[-1]["bytes"] * 500)
            axes.yaxis.set_major_formatter("{x:,g}")
            call = "readv" if way == "get" else "writev"
            words = [
                (mine[-1], "cma (ucx_memh)", ORANGE),
                (bare[-1], f"bare process_vm_{call}", "#777777"),
                (imitated[-1], "softmlx5: software,\nnot a NIC", BLUE),
            ]
            for (at, said, colour), up in zip(words, (22, 0, -30), strict=True):
                label(axes, at, said, colour, up)  # the lines end close together
            axes.annotate(
                "memcpy, one process",
                max(copied, key=lambda point: point[1]),
                (0, 12),
                textcoords="offset points",
                color=GREEN,
                ha="center",
                fontsize=12,
            )
            axes.margins(y=0.12)
            axes.set_title(f"{way}, GB/s", loc="left", fontsize=13)
        both[1].set_xlabel("bytes moved by one call")
        title = "get and put between two processes, from Python"
        figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    # No version or date in the file: the same data makes the same picture.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
