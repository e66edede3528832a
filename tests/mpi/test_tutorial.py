# SPDX-License-Identifier: BSD-3-Clause
"""docs/mpi.md: its program prints what it says."""

import re

import pytest

pytestmark = [pytest.mark.source, pytest.mark.timeout(900)]


def test_the_program_prints_what_it_says(mpirun, root, tmp_path):
    text = (root / "docs" / "mpi.md").read_text()
    program, said = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.S).groups()
    path = tmp_path / "window.py"
    path.write_text(program)
    status, printed, errors = mpirun(path)
    assert status == 0, errors
    assert printed == said
