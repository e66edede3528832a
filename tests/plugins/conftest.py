# SPDX-License-Identifier: BSD-3-Clause
"""A fresh virtual environment, and what builds plugins and installs them there."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest

# There, at run time; and what a backend is built with.
NEEDED = ["pluggy", "pytest", "iniconfig", "packaging", "pygments", "setuptools"]


class Place:
    """A virtual environment in which ucx_memh is installed from its wheel, and pytest."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self._run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        (self.packages,) = (folder / "venv" / "lib").glob("python3*/site-packages")
        for name in NEEDED:  # copied, so that no network is needed
            self._copy(name)
        self._install_library(root)

    def _run(
        self, *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> str:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env={**clean, **(env or {})},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _copy(self, name: str) -> None:
        for file in distribution(name).files:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = self.packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)

    def _install_library(self, root: Path) -> None:
        """Its wheel; what is compiled is taken from the tree, where `make build` has put it."""
        build = ["egg_info", "--egg-base", self.folder, "build", "--build-base", self.folder / "b"]
        wheels = self.folder / "library"
        self._run(
            *[sys.executable, "setup.py", "--quiet", *build, "bdist_wheel", "--dist-dir", wheels],
            cwd=root,
            env={"UCX_MEMH_EXTENSIONS": "0"},
        )
        self.pip("install", *wheels.iterdir())
        for room in [root, *(root / "backends").iterdir()]:
            for library in room.glob("ucx_memh*/**/*.so"):
                shutil.copy(library, self.packages / library.relative_to(room))

    def pip(self, *args: str | Path) -> str:
        """The tests' own pip at work in here; it loads nothing from anywhere."""
        quiet = ["--disable-pip-version-check", "--no-input", "--quiet"]
        offline = ["--no-index", "--no-deps"] if args[0] == "install" else []
        first, *rest = args
        return self._run(
            *[sys.executable, "-m", "pip", "--python", self.python, *quiet, first, *offline, *rest]
        )

    def run(self, *args: str | Path) -> str:
        """What this Python prints, given `args`; the folder is the place's own."""
        return self._run(self.python, *args, env={"PYTHONDONTWRITEBYTECODE": "1"})

    def ucx_memh(self, *args: str | Path) -> str:
        """What `python -m ucx_memh` says here."""
        return self.run("-m", "ucx_memh", *args)

    def build(self, project: Path) -> Path:
        """The wheel of a project, which is copied: nothing is left in it."""
        copy = Path(tempfile.mkdtemp(dir=self.folder)) / project.name
        shutil.copytree(project, copy)
        wheels = copy / "dist"
        self._run(
            *[sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"],
            *["--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, copy],
            env={"CFLAGS": "-O0"},  # sooner compiled
        )
        (wheel,) = wheels.iterdir()
        return wheel

    def files(self) -> set[Path]:
        """What is installed, but for compiled bytecode."""
        found = self.packages.rglob("*")
        return {path for path in found if "__pycache__" not in path.parts and path.is_file()}

    @contextmanager
    def installed(self, project: Path) -> Iterator[None]:
        """The project's wheel is installed meanwhile; then it leaves nothing."""
        before = self.files()
        wheel = self.build(project)
        self.pip("install", wheel)
        yield
        self.pip("uninstall", "--yes", wheel.name.partition("-")[0])
        assert self.files() == before

    def test(self, project: Path) -> tuple[int, list[str]]:
        """How many of its tests pass, and why others are skipped; the rest may not be."""
        said = self.run("-m", "pytest", "-p", "no:cacheprovider", "-q", project)
        *lines, last = said.splitlines()
        passed = int(last.split(" passed")[0].split()[-1])
        reasons = [line.split(": ", 1)[1] for line in lines if line.startswith("SKIPPED")]
        return passed, reasons


@pytest.fixture(scope="session")
def place(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(root, tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def plugins(root: Path) -> Path:
    return root / "examples" / "plugins"
