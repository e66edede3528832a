# SPDX-License-Identifier: BSD-3-Clause
"""What the sdist and the wheel carry, and what the build says when it cannot go on."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import ucx_memh as um

pytestmark = pytest.mark.source
SOURCES = {".py", ".pyx", ".pxi", ".pxd", ".pyi", ".h", ".c", ".map"}


def setup_py(root, *args, **env):
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", *args],
        cwd=root,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def built(root, tmp_path, command, **env):
    """The names in the one archive that `command` makes; nothing is compiled for it."""
    env = {"UCX_MEMH_EXTENSIONS": "0", **env}
    base = ["egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path / "build"]
    done = setup_py(root, *base, command, "--dist-dir", tmp_path / "dist", **env)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    if command == "sdist":
        with tarfile.open(archive) as tar:
            return {name.partition("/")[2] for name in tar.getnames()}
    with zipfile.ZipFile(archive) as wheel:
        return set(wheel.namelist())


def test_sdist_has_every_source(root, tmp_path):
    names = built(root, tmp_path, "sdist")
    wanted = {
        str(path.relative_to(root))
        for room in ("ucx_memh", "backends", "tests", "bench")
        for path in (root / room).rglob("*")
        if path.suffix in SOURCES
    }
    assert len(wanted) > 20
    assert wanted - names == set()
    top = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py", "Makefile"}
    assert top - names == set()
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert not [name for name in names if name.startswith(("build/", ".venv/"))]


def test_wheel_has_what_a_user_needs_and_no_sources(root, tmp_path):
    names = built(root, tmp_path, "bdist_wheel")
    assert names >= {
        "ucx_memh/py.typed",
        "ucx_memh/core.pxd",
        "ucx_memh/libmemh.pxd",
        "ucx_memh/__init__.pxd",
        "ucx_memh/include/ucx_memh/memh.h",
        "ucx_memh/include/ucx_memh/backend.h",
        "ucx_memh/cli/info.py",
        "ucx_memh/windows.pxd",
        "ucx_memh/include/ucx_memh/windows.h",
        "ucx_memh_cma/__init__.py",
    }
    templates = {name for name in names if name.startswith("ucx_memh/templates/")}
    assert {name.split("/")[2] for name in templates} == {"ucx-memh-file", "ucx-memh-shm"}
    names -= templates  # sources of a new backend
    assert not [n for n in names if Path(n).suffix in (".pyx", ".pxi", ".c", ".map")]
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {"tests", "bench", "backends", "build", "docs", "tools"}


def test_chosen_backends(root, tmp_path):
    names = built(root, tmp_path, "bdist_wheel", UCX_MEMH_BUILD_BACKENDS="cma")
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ucx_memh", "ucx_memh_cma"}


def test_unknown_backend(root):
    done = setup_py(root, "--version", UCX_MEMH_BUILD_BACKENDS="cma,nothing")
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "UCX_MEMH_BUILD_BACKENDS names nothing, but the tree has: cma" in done.stderr


@pytest.fixture
def compiler_without_rdma(tmp_path):
    """A compiler that finds no RDMA header, and for the rest makes empty files: quickly."""
    script = tmp_path / "cc"
    script.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -E "*) ! grep -q infiniband; exit;; esac\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n'
    )
    script.chmod(0o755)
    return str(script)


def build_ext(root, tmp_path, **env):
    options = ["--force", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    return setup_py(root, "build_ext", *options, **env)


def test_missing_header_is_one_line(root, tmp_path, compiler_without_rdma):
    done = build_ext(root, tmp_path, CC=compiler_without_rdma)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "install libibverbs-dev" in done.stderr
    assert "UCX_MEMH_BUILD_BACKENDS=cma" in done.stderr


def test_missing_header_and_no_rdma_wanted(root, tmp_path, compiler_without_rdma):
    done = build_ext(root, tmp_path, CC=compiler_without_rdma, UCX_MEMH_BUILD_BACKENDS="cma")
    assert done.returncode == 0, done.stderr
    made = {path.parent.name for path in (tmp_path / "lib").rglob("*.so")}
    assert made >= {"ucx_memh", "ucx_memh_cma"}
    assert not [name for name in made if name.startswith("ucx_memh_ib")]


def test_missing_compiler_is_one_line(root, tmp_path):
    done = build_ext(root, tmp_path, CC=str(tmp_path / "no-such-cc"))
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "install gcc" in done.stderr


def test_version_is_said_once(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert um.__version__ == project["version"]


def test_entry_points_are_packages_of_the_tree(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for name, module in project["entry-points"]["ucx_memh"].items():
        path = root / "backends" / name / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists()
