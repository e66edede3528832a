# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit can fail: each lie is found out, and by the tests that are for it."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import _liars

FILE = Path(_liars.__file__)


@pytest.fixture(scope="module")
def run():
    """The kit on all liars, in a process of its own: its output."""
    plugins = ["-p", "no:cacheprovider", "-p", "no:logging", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "-rA", "--tb=no"]
    done = subprocess.run([*command, FILE], cwd=FILE.parent, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def ended(run):
    """{class: {test: how it ended}}"""
    found = defaultdict(dict)
    for how, suite, test in re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\w+)::(\w+)", run, re.M):
        if found[suite].get(test, "PASSED") == "PASSED":
            found[suite][test] = how
    return found


@pytest.mark.parametrize("suite", _liars.SUITES)
def test_a_lie_is_found_out_and_nothing_else(ended, suite):
    failed = {test for test, how in ended[suite].items() if how != "PASSED"}
    assert failed == _liars.SUITES[suite]
    assert len(ended[suite]) > 35


def test_each_lie_is_listed(ended):
    assert set(ended) == set(_liars.SUITES)
