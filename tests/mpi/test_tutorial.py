# SPDX-License-Identifier: BSD-3-Clause
"""docs/mpi.md and the README: their programs print what they say."""

import pytest

from _pages import blocks

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


@pytest.mark.parametrize("page", ["docs/mpi.md", "README.md"])
def test_the_program_of(page, prints, root):
    (block,) = [block for block in blocks(root / page, "python") if "mpi4py" in block.code]
    assert block.by == "tests/mpi/test_tutorial.py"
    assert prints(block.code) == block.prints
