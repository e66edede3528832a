# SPDX-License-Identifier: BSD-3-Clause
"""docs/mpi.md and the README: their programs print what they say."""

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

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


def test_the_example_and_its_picture(mpirun, root, tmp_path):
    file = root / "examples" / "mpi_window.py"
    status, printed, errors = mpirun(file, "--writes", 20, "--picture", "window.svg")
    assert status == 0, printed + errors
    said = r"""<Window \w+, rank 0 of 4, revocable>
wrote window.svg
(\d+) writes; revoke took \d+ us
words of rank 2 that came while it was cut off: 0
the last write of each rank is there, whole: yes
"""
    assert int(re.fullmatch(said, printed)[1]) > 3 * 20
    titles = [
        node.text
        for node in ElementTree.parse(tmp_path / "window.svg").iter()
        if "title" in node.tag
    ]
    assert [words for words in titles if not words.endswith(" ms")] == [
        "rank 2 revoked",
        "rank 2 let in again",
        "refused by the device",
    ]
    # The pages show a run of this program.
    page = (root / "docs/mpi.md").read_text()
    (shown,) = (
        block for block in re.findall(r"```text\n(.*?)```", page, re.S) if "window.svg" in block
    )
    assert re.fullmatch(said, shown)


def test_the_example_refuses_at_once(mpi, root):
    """On one rank, which needs no mpiexec."""
    _, env = mpi
    for args, why in (
        ([], "want at least 3 ranks"),
        (["--writes", "0"], "--writes wants at least 1"),
        (["--picture", "no/where.svg"], "no file can be 'no/where.svg'"),
    ):
        done = subprocess.run(
            [sys.executable, root / "examples" / "mpi_window.py", *args],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr
