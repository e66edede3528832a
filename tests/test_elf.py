# SPDX-License-Identifier: BSD-3-Clause
"""Shared objects that would end the process are found before they are opened (user report 67)."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import ucx_memh.core
from ucx_memh.elf import trouble

GOOD = Path(ucx_memh.core.__file__)


def loaded():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if ".so" in line}


def libc():
    """One that is stripped: what is behind its segments is hardly anything."""
    return next(Path(path) for path in loaded() if Path(path).name.startswith("libc.so"))


def test_what_is_loaded_is_good():
    assert trouble(str(GOOD)) == ""
    libraries = loaded()
    assert libraries
    assert {path: why for path in sorted(libraries) if (why := trouble(path))} == {}


@pytest.mark.parametrize("keep", [0, 1, 63, 64, 100, 0.1, 0.5, 0.9])
def test_cut_off(tmp_path, keep):
    data = libc().read_bytes()
    path = tmp_path / "cut.so"
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    expected = "it has only" if keep in (0, 1, 63) else "it is cut off"
    assert trouble(str(path)).startswith(expected)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, 0, "no ELF file"),
        (4, 1, "another machine"),
        (4, 7, "damaged"),
        (5, 9, "damaged"),
        (16, 2, "no shared object"),
        (18, 0xF7, "another machine"),
    ],
)
def test_another_kind_of_file(tmp_path, at, value, why):
    data = bytearray(GOOD.read_bytes())
    data[at] = value
    path = tmp_path / "odd.so"
    path.write_bytes(data)
    assert why in trouble(str(path))


def test_no_file(tmp_path):
    assert "cannot be read: No such file" in trouble(str(tmp_path / "none.so"))
    assert "cannot be read: Is a directory" in trouble(str(tmp_path))
    text = tmp_path / "text.so"
    text.write_text("not a library\n" * 20)
    assert trouble(str(text)) == "it is no ELF file"


# ---- in a plugin ----

HOOKS = """
from ucx_memh import Component
from ucx_memh.hookspecs import hookimpl
from {name} import _part
@hookimpl
def ucx_memh_components():
    return [Component("{name}")]
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A plugin that is a package with a compiled part; gives its folder, and what is told of it."""
    folder = tmp_path / "cutoff"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "hooks.py").write_text(HOOKS.format(name="cutoff"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("UCX_MEMH_BACKENDS", "+cutoff=cutoff.hooks")
    return folder


def told(python):
    program = (
        "import ucx_memh as um\n"
        "(info,) = [i for i in um.components(load=True) if i.name == 'cutoff']\n"
        "print(info.state, info.reason)\n"
        "um.open_md('cma').close()\n"
    )
    return python("-c", program).stdout


def test_a_plugin_whose_part_is_cut_off(package, python):
    """The process lives, and others can be used."""
    data = libc().read_bytes()
    (package / "_part.so").write_bytes(data[: len(data) // 2])
    assert "_part.so: it is cut off" in told(python)


def test_a_plugin_that_lacks_a_symbol(package, python):
    """User report 65: said with the symbol's name, and no silence."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler: the tests need one")
    part = f"_part{sysconfig.get_config_var('EXT_SUFFIX')}"
    source = "void ucxm_no_such_symbol(void); void *PyInit__part(void)"
    source += " { ucxm_no_such_symbol(); return 0; }"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", package / part],
        input=source.encode(),
        check=True,
    )
    said = told(python)
    assert said.startswith("broken ImportError")
    assert "undefined symbol: ucxm_no_such_symbol" in said
