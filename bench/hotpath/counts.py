# SPDX-License-Identifier: BSD-3-Clause
"""Instructions of one call, by callgrind: they repeat, to a few in a hundred, where times do not.

What the kernel does is not in them, and neither is the clock's reading without a system call.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.bare import BUILD, ROOT

Row = dict[str, Any]

MISSING = "valgrind is not installed: apt-get install valgrind"
NO_MARKS = "valgrind/callgrind.h is not there: apt-get install valgrind"


class CannotCountError(Exception):
    """Says what is missing."""


def dumped(text: str) -> tuple[list[Any], int] | None:
    """The name and the instructions of a dump that a mark asked for, of the thread that calls;
    nothing of another."""
    if not re.search(r"^thread: 1$", text, re.M):
        return None
    name = re.search(r"^desc: Trigger: Client Request: (\[.*)$", text, re.M)
    total = re.search(r"^(?:summary|totals): (\d+)$", text, re.M)
    return (json.loads(name[1]), int(total[1])) if name and total else None


def difference(dumps: list[tuple[list[Any], int]]) -> list[Row]:
    """For each way instructions for each call more."""
    found: dict[tuple[str, str, str | None], dict[int, int]] = {}
    for (table, what, component, calls), total in dumps:
        found.setdefault((table, what, component), {})[calls] = total
    rows = []
    for (table, what, component), totals in found.items():
        (few, least), (many, most) = sorted(totals.items())
        each = round((most - least) / (many - few))
        rows.append({"table": table, "what": what, "component": component, "instructions": each})
    return rows


def valgrind() -> str:
    found = shutil.which("valgrind")
    if found is None:
        raise CannotCountError(MISSING)
    return found


def version() -> str:
    done = subprocess.run([valgrind(), "--version"], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def count(calls: int) -> list[Row]:
    """Of all ways that have no kernel in them."""
    program = valgrind()
    # Its own folder: the library beside it may be from before valgrind came, without the marks.
    library = BUILD / "counted"
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--tool=callgrind", "--instr-atstart=no", "--quiet"]
        # What a device does meanwhile, in a thread of its own, is none of the call's.
        command += ["--separate-threads=yes", f"--callgrind-out-file={folder}/dump", sys.executable]
        command += ["-m", "bench.hotpath.counted", str(library), str(calls)]
        # Names fall into the same places of dictionaries each time, and none is looked up late.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise CannotCountError(f"valgrind ended with {done.returncode}: {done.stderr.strip()}")
        files = [path for path in Path(folder).iterdir() if path.suffix]
        dumps = [dump for path in files if (dump := dumped(path.read_text(errors="replace")))]
    if not dumps:
        raise CannotCountError(NO_MARKS)
    return difference(sorted(dumps, key=lambda dump: json.dumps(dump[0])))
