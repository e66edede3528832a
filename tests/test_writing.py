# SPDX-License-Identifier: BSD-3-Clause
"""docs/writing-a-backend.md: its backend passes the kit, its tests exist, what it says holds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ucx_memh.core
from _pages import blocks
from ucx_memh.testing import _fake, suite

HERE = Path(__file__).parent


@pytest.fixture
def page(root):
    return root / "docs" / "writing-a-backend.md"


@pytest.fixture
def folder(page, tmp_path, monkeypatch):
    """Its files, as its reader writes them, and the plugin named as he names it."""
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block.code)[1]
        (tmp_path / name).write_text(block.code)
    monkeypatch.setenv("UCX_MEMH_BACKENDS", "+mine.py")
    return tmp_path


@pytest.mark.source
def test_the_backend_passes_the_kit(folder, python):
    said = python("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", "test_mine.py").stdout
    passed, skipped = map(int, re.search(r"(\d+) passed, (\d+) skipped", said).groups())
    assert passed > 15
    reasons = re.findall(r"^SKIPPED .*?: (.*)$", said, re.M)
    allowed = r"mine (does not declare|declares|packs no native key)|nothing is refused"
    assert skipped and all(re.match(allowed, reason) for reason in reasons), reasons


@pytest.mark.source
def test_the_backend_is_listed(folder, python):
    said = python("-m", "ucx_memh", "info", "--component", "mine").stdout
    assert "mine 1.0: available" in said
    assert "can           reg need_rkey rkey_ptr" in said
    said = python("-m", "ucx_memh", "info", "--config", "--component", "mine").stdout
    assert "words = memory of this process (default)" in said


@pytest.mark.source
def test_the_tests_that_it_names_exist(page):
    rows = re.findall(r"^\| (\d+) \| .* \| ([^|]+) \|$", page.read_text(), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 24))
    for number, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, f"expectation {number} has no test"
        for file, test in named:
            path = Path(suite.__file__) if file == "suite.py" else HERE / file
            assert re.search(rf"^ *def {test}\(", path.read_text(), re.M), f"{file}::{test}"


@pytest.mark.parametrize("module", [ucx_memh.core, _fake], ids=lambda module: module.__name__)
def test_no_names_are_exported(module):
    """Two plugins that are loaded together cannot meet in a symbol."""
    assert not sys.getdlopenflags() & os.RTLD_GLOBAL
    command = ["nm", "-D", "--defined-only", "--format=just-symbols", module.__file__]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    last = module.__name__.rpartition(".")[2]
    assert [name for name in names if not name.startswith("__pyx_module_is_main_")] == [
        f"PyInit_{last}"
    ]


@pytest.mark.source
def test_nothing_is_unloaded(root):
    paths = [p for room in ("ucx_memh", "backends") for p in sorted((root / room).rglob("*"))]
    sources = [p for p in paths if p.suffix in (".py", ".pyx", ".pxd", ".pxi", ".c", ".h")]
    assert len(sources) > 100
    assert [str(p) for p in sources if re.search(r"\bdlclose\s*\(", p.read_text())] == []
