# SPDX-License-Identifier: BSD-3-Clause
"""docs/mpi.md and the README: their programs print what they say."""

import re

import pytest

pytestmark = [pytest.mark.source, pytest.mark.timeout(900)]


@pytest.fixture
def prints(mpirun, tmp_path):
    """`prints(program)`: what its source prints on four ranks."""

    def run(program):
        path = tmp_path / "window.py"
        path.write_text(program)
        status, printed, errors = mpirun(path)
        assert status == 0, errors
        return printed

    return run


def test_the_tutorial(prints, root):
    text = (root / "docs" / "mpi.md").read_text()
    program, said = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.S).groups()
    assert prints(program) == said


def test_the_readme(prints, root):
    (program,) = re.findall(r"```py\n(.*?)```", (root / "README.md").read_text(), re.S)
    (said,) = re.findall(r"print\(.*\) +# (.*)", program)
    assert prints(program) == said + "\n"
