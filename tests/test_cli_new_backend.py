# SPDX-License-Identifier: BSD-3-Clause
"""`python -m ucx_memh new-backend`: what it refuses, and that it leaves nothing half written.

tests/plugins has what it writes.
"""

import os
import shlex
from pathlib import Path

import pytest

from ucx_memh.cli import main


@pytest.fixture
def refused(tmp_path, capsys):
    """`refused(name, why, status)`: one line that says why, and the folder is as before."""

    def check(name, why, status=2):
        before = sorted(tmp_path.rglob("*"))
        assert main(["new-backend", name, "--into", str(tmp_path)]) == status
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert why in err
        assert sorted(tmp_path.rglob("*")) == before

    return check


@pytest.mark.parametrize(
    "name",
    ["", "1st", "a-b", "Mine", "two words", "a__b", "a_", "_a", "../up", "a/b", "class", "\u00fc"],
)
def test_what_is_no_name(refused, name):
    refused(name, f"{name!r} is no name for a backend")


def test_a_name_that_no_domain_has_room_for(refused, tmp_path, capsys):
    refused("a" * 32, "is longer than 31 letters")


def test_a_name_that_is_taken(refused, tmp_path, monkeypatch):
    refused("cma", "there is a component 'cma' already: ")
    (tmp_path / "ucx_memh_there.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    refused("there", "there is a package ucx_memh_there already")


def test_a_name_that_was_asked_for_before_it_was_written(tmp_path, python, monkeypatch):
    monkeypatch.setenv("UCX_MEMH_BACKENDS", "mine")
    python("-m", "ucx_memh", "new-backend", "mine", "--into", tmp_path)
    assert (tmp_path / "ucx-memh-mine").is_dir()


@pytest.mark.parametrize("make", ["mkdir", "touch", "link"])
def test_what_is_there_already(refused, tmp_path, make):
    project = tmp_path / "ucx-memh-my-own"
    project.symlink_to("nowhere") if make == "link" else getattr(project, make)()
    refused("my_own", f"{project} is there already")


@pytest.mark.parametrize("into", ["", "two words", "it's"])
def test_the_commands_that_it_names_can_be_given_to_a_shell(tmp_path, monkeypatch, capsys, into):
    """And pip takes what has a slash for a folder; it would ask an index for anything else."""
    monkeypatch.chdir(tmp_path)
    Path(into).mkdir(exist_ok=True)
    assert main(["new-backend", "mine", "--into", into]) == 0
    install, _, test = map(shlex.split, capsys.readouterr().out.splitlines()[1:])
    project = os.path.join(".", into, "ucx-memh-mine")
    assert install == ["pip", "install", "--no-build-isolation", f"{project}[test]"]
    assert test == ["python", "-m", "pytest", project]
    assert os.path.isdir(project)


def test_no_folder_to_write_to(refused, tmp_path):
    assert main(["new-backend", "mine", "--into", str(tmp_path / "missing")]) == 1
    refused_folder = tmp_path / "file"
    refused_folder.touch()
    assert main(["new-backend", "mine", "--into", str(refused_folder)]) == 1


@pytest.mark.source
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch, capsys, error):
    written = []

    def write_text(path, text):
        written.append(path)
        if len(written) == 3:
            raise error

    monkeypatch.setattr(Path, "write_text", write_text)
    status = main(["new-backend", "mine", "--into", str(tmp_path)])
    assert (status, len(written)) == (1 if isinstance(error, OSError) else 130, 3)
    assert list(tmp_path.iterdir()) == []
