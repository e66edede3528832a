# SPDX-License-Identifier: BSD-3-Clause
"""docs/plugins-tutorial.md, from top to bottom, in a fresh environment."""

import re
import shlex
import shutil

import pytest

from _pages import blocks

pytestmark = pytest.mark.source


def commands(page):
    """(command, what it prints) for each block; in it a line `...` is any number of lines."""
    for block in blocks(page, "console"):
        command, _, said = block.code.partition("\n")
        assert command.startswith("$ ")
        yield command[2:], said


def normal(text):
    """Without what differs from run to run."""
    return re.sub("=+", "=", re.sub(r"\d+\.\d\ds", "Ns", text))


@pytest.fixture
def shell(place):
    """`shell(command)`: what a command of the page prints in the place."""
    project = place.folder / "ucx-memh-mine"

    def run(command):
        program, *args = shlex.split(command)
        if program == "python":
            return place.run(*args)
        assert program == "pip"
        return place.pip(*args)

    yield run
    place.pip("uninstall", "--yes", "ucx-memh-mine")
    shutil.rmtree(project)


def test_every_command_prints_what_it_says(place, root, shell):
    page = root / "docs" / "plugins-tutorial.md"
    ran = [(command, said, shell(command)) for command, said in commands(page)]
    assert len(ran) == 5
    for command, said, printed in ran:
        pattern = re.escape(normal(said)).replace(re.escape("...\n"), "(?:.*\n)*")
        assert re.fullmatch(pattern, normal(printed)), f"{command} printed\n{printed}"
    (program,) = blocks(page, "python")
    assert place.run("-c", program.code) == program.prints
