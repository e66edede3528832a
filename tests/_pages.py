# SPDX-License-Identifier: BSD-3-Clause
"""The code blocks of a page of Markdown, and a runner for those in Python.

The Python blocks of a page are one program; so are those in C.  What a block prints stands in the
block below it, if that is `text`, or behind its print() calls; else it prints nothing.  What a
block needs and a reader does not is in a comment (`<!-- python` or `<!-- c`), and one that needs
more than a process has `<!-- run by tests/... -->` above it: that test runs it.
"""

import ast
import asyncio
import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

PART = re.compile(
    r"^```(?P<shown>[\w+]*)\n(?P<code>.*?)^```$"
    r"|^<!-- (?P<hidden>python|c)\n(?P<setup>.*?)^-->$"
    r"|^<!-- run by (?P<by>[\w/.]+) -->$",
    re.S | re.M,
)
COMMENT = re.compile(r"^ *print\(.*?\) +# (.*)$", re.M)


@dataclass
class Block:
    language: str
    code: str
    prints: str
    by: str = ""


def blocks(page: Path, language: str) -> list[Block]:
    """The page's blocks of `language` and what each prints, in their order."""
    text = page.read_text()
    found: list[Block] = []
    by, before = "", ""
    for part in PART.finditer(text):
        if part["by"]:
            by = part["by"]
            continue
        if part["shown"] == "text":
            if before in ("python", "c"):
                found[-1].prints = part["code"]
        elif kind := part["shown"] or part["hidden"]:
            code = part["code"] or part["setup"]
            said = COMMENT.findall(code) if kind == "python" else []
            found.append(Block(kind, code, "".join(f"{line}\n" for line in said), by))
        by, before = "", part["shown"] or ""
    return [block for block in found if block.language == language]


def main(path: str) -> None:
    """Run the blocks of a page that are not run by others; what each printed, as JSON."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for block in blocks(Path(path), "python"):
        if block.by:
            continue
        code = compile(block.code, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            waits = eval(code, names)
            if waits is not None:
                asyncio.run(waits)
        printed.append(out.getvalue())
    json.dump(printed, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
