# SPDX-License-Identifier: BSD-3-Clause
"""docs/mpi.md: its program prints what it says."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.source, pytest.mark.timeout(900)]


def test_the_program_prints_what_it_says(mpi, root, tmp_path):
    text = (root / "docs" / "mpi.md").read_text()
    program, said = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.S).groups()
    path = tmp_path / "window.py"
    path.write_text(program)
    command, env = mpi
    done = subprocess.run(
        [*map(str, command), sys.executable, str(path)],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == said
