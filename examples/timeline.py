# SPDX-License-Identifier: BSD-3-Clause
"""A picture of who had what when: bars and marks over time, as SVG, written by hand.

The examples draw what they measured with it (--picture).
"""

from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

WIDTH, LEFT, ROW = 680, 64, 24
COLOURS = ("#4c78a8", "#54a24b", "#b279a2", "#eeca3b", "#9d755d")


def picture_path(text: str) -> Path:
    """For argparse: found out before the work and not after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"no file can be {text!r}")
    return path


class Bar(NamedTuple):
    row: int
    start: float
    end: float
    colour: int  # of those in the legend
    title: str  # shown by a browser under the mouse


class Mark(NamedTuple):
    row: int
    at: float
    text: str  # one or two characters
    colour: str
    title: str


def draw(
    path: Path,
    title: str,
    rows: Sequence[str],
    legend: Sequence[str],
    bars: Iterable[Bar],
    marks: Iterable[Mark],
) -> None:
    """Write the picture; times are seconds of any clock, and the first is the picture's 0."""
    bars, marks = list(bars), list(marks)
    first = min([bar.start for bar in bars] + [mark.at for mark in marks])
    span = max([bar.end for bar in bars] + [mark.at for mark in marks]) - first
    head = wrap(title, 84)
    top = 14 + 18 * len(head)
    height = top + ROW * len(rows) + 60

    def x(at: float) -> float:
        return LEFT + (at - first) / span * (WIDTH - LEFT - 20)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    lines += [text(LEFT, 20 + 18 * n, words, 'font-size="13"') for n, words in enumerate(head)]
    lines += [text(8, top + ROW * (row + 0.7), name) for row, name in enumerate(rows)]
    for bar in bars:
        width = max(x(bar.end) - x(bar.start), 1)
        lines.append(
            f'<rect x="{x(bar.start):.1f}" y="{top + ROW * bar.row + 3}" width="{width:.1f}" '
            f'height="{ROW - 6}" fill="{COLOURS[bar.colour % len(COLOURS)]}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    for mark in marks:
        more = (
            f'fill="{mark.colour}" font-weight="bold" text-anchor="middle" '
            'stroke="white" stroke-width="3" paint-order="stroke"'
        )
        y = top + ROW * (mark.row + 0.7)
        lines.append(f"<g>{text(x(mark.at), y, mark.text, more)}")
        lines.append(f"<title>{escape(mark.title)}</title></g>")
    axis = top + ROW * len(rows) + 6
    lines.append(f'<path d="M{LEFT} {axis}H{WIDTH - 20}" stroke="black"/>')
    for part in range(6):
        at = first + span * part / 5
        anchor = f'text-anchor="{"end" if part == 5 else "middle"}"'  # the last: within the picture
        lines.append(text(x(at), axis + 14, f"{span * part / 5 * 1e3:.1f} ms", anchor))
    for number, words in enumerate(legend):
        at = LEFT + number * 170
        colour = COLOURS[number % len(COLOURS)]
        lines.append(f'<rect x="{at}" y="{axis + 28}" width="12" height="12" fill="{colour}"/>')
        lines.append(text(at + 18, axis + 38, words))
    path.write_text("\n".join([*lines, "</svg>", ""]))
