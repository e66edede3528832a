# SPDX-License-Identifier: BSD-3-Clause
"""examples/timeline.py: all that it draws is within the picture."""

import re
import xml.etree.ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"


def test_all_is_within_the_picture(root, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(root / "examples")
    from timeline import LEFT, WIDTH, Bar, Mark, draw

    where = tmp_path / "picture.svg"
    marks = [Mark(0, 4.0, "R", "red", "early"), Mark(1, 9.0, "R", "red", "late")]
    draw(where, "words " * 40, ["one", "two"], ["a bar"], [Bar(0, 5.0, 6.0, 0, "bar")], marks)
    picture = ET.parse(where).getroot()
    marked = [float(text.get("x")) for text in picture.iter(f"{SVG}text") if text.text == "R"]
    assert marked == [LEFT, WIDTH - 20]
    title = [text for text in picture.iter(f"{SVG}text") if "words" in text.text]
    assert len(title) > 1 and all(len(text.text) < 90 for text in title)
    ticks = [text for text in picture.iter(f"{SVG}text") if re.fullmatch(r"[\d.]+ ms", text.text)]
    assert [ticks[0].get("text-anchor"), ticks[-1].get("text-anchor")] == ["middle", "end"]
