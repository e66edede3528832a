# SPDX-License-Identifier: BSD-3-Clause
"""Write a new backend: a project that works as it stands, with its tests.

The project ucx-memh-NAME is a copy of one of the example plugins under another name: memory in a
file, in Python; or with --cython a segment of POSIX shared memory.  Change what it does to yours,
and keep its tests passing.
"""

import argparse
import keyword
import os
import re
import shlex
import tempfile
from importlib.util import find_spec
from pathlib import Path

import ucx_memh as um

__all__ = ["add_arguments", "run"]

EXAMPLES = {False: "file", True: "shm"}  # --cython: which is copied
# No more than these: where somebody has built an example, there are other files beside them.
FILES = ("*.toml", "setup.py", "*.md", "ucx_memh_*/*.py", "ucx_memh_*/*.pyx", "tests/*.py")
NAME_MAX = 31  # bytes, of a component


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the component: um.open_md(NAME)")
    parser.add_argument("--cython", action="store_true", help="in Cython, without the GIL")
    parser.add_argument(
        "--into", metavar="FOLDER", type=Path, default=Path(), help="where; default: here"
    )


def run(args: argparse.Namespace) -> int:
    project = args.into / f"ucx-memh-{check_name(args.name).replace('_', '-')}"
    if os.path.lexists(project):
        raise um.InvalidParamError(f"{project} is there already")
    write(project, args.name, EXAMPLES[args.cython])
    there = os.path.join(os.curdir, project)  # without a slash pip would ask an index for it
    print(
        f"wrote {project}; next:\n"
        f"  pip install --no-build-isolation {shlex.quote(f'{there}[test]')}\n"
        f"  python -m ucx_memh info\n"
        f"  python -m pytest {shlex.quote(there)}"
    )
    return 0


def check_name(name: str) -> str:
    """The name, if a component can have it; else InvalidParamError."""
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise um.InvalidParamError(
            f"{name!r} is no name for a backend: lower-case letters, digits and single _, "
            "a letter first, no word of Python's"
        )
    if len(name) > NAME_MAX:
        raise um.InvalidParamError(f"{name!r} is longer than {NAME_MAX} letters")
    for info in um.components():
        if info.name == name and info.path:  # not one that UCX_MEMH_BACKENDS asks for in vain
            raise um.InvalidParamError(f"there is a component {name!r} already: {info.path}")
    if find_spec(f"ucx_memh_{name}"):
        raise um.InvalidParamError(f"there is a package ucx_memh_{name} already")
    return name


def write(project: Path, name: str, example: str) -> None:
    """Copy the example under another name; all of it or, when that fails, nothing."""
    source = templates() / f"ucx-memh-{example}"
    with tempfile.TemporaryDirectory(prefix=".new-backend-", dir=project.parent) as folder:
        made = Path(folder, "project")
        made.mkdir()
        for path in sorted(path for pattern in FILES for path in source.glob(pattern)):
            copy = made / renamed(str(path.relative_to(source)), example, name)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(renamed(path.read_text(), example, name))
        made.rename(project)


def renamed(text: str, example: str, name: str) -> str:
    """The text with the name in the places in which the examples have theirs."""
    kebab = name.replace("_", "-")
    text = text.replace(f"ucx-memh-{example}", f"ucx-memh-{kebab}")
    text = re.sub(rf"\bucx_memh_{example}(?![a-z0-9])", f"ucx_memh_{name}", text)
    text = text.replace(f"UCX_MEMH_{example.upper()}_", f"UCX_MEMH_{name.upper()}_")
    text = re.sub(rf'(["`]){example}\1', rf"\g<1>{name}\g<1>", text)
    return re.sub(rf"^{example}(?= = )", name, text, flags=re.M)  # the entry point


def templates() -> Path:
    """The example plugins: packed into the wheel, or the source tree's own."""
    package = Path(um.__file__).parent
    packed = package / "templates"
    return packed if packed.is_dir() else package.parent / "examples" / "plugins"
