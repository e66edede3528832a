# SPDX-License-Identifier: BSD-3-Clause
"""The pytest plugin, in a project that is not ours."""

import pytest

pytest_plugins = ["pytester"]

USES = """
import pytest
import ucx_memh as um

def test_fake(fakes):
    md, fake, one, two = fakes.connected()
    assert fake.count("ep_connect") == 2
    md.mem_reg(bytearray(64))

def test_slow(python_devices):
    md, device = python_devices(destroy="progress")
    device.delays["mem_reg"] = 0.001
    device.faults["mem_reg"] = [um.DeviceError("out of order")]
    with pytest.raises(um.DeviceError, match="out of order"):
        md.mem_reg(bytearray(64))
    md.mem_reg(bytearray(64)).derive().mkey_pack()
    assert device.calls["mem_reg"] == 2

def test_a_leak(fakes):
    test_a_leak.kept = fakes()[0].mem_reg(bytearray(64))

@pytest.mark.needs_md("cma")
def test_cma():
    pass

@pytest.mark.needs_md("cma/elsewhere")
def test_other():
    assert False

@pytest.mark.needs_md("nobody")
def test_unknown():
    assert False
"""


def test_in_a_project_of_its_own(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest('pytest_plugins = ["ucx_memh.testing.plugin"]')
    pytester.makepyfile(USES)
    done = pytester.runpytest_subprocess("--strict-markers", "-rs", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=4, errors=1, skipped=2)
    done.stdout.fnmatch_lines(["*the core has not freed everything*"])
    done.stdout.fnmatch_lines_random(
        ["*needs cma/elsewhere; there is cma/memory*", "*needs nobody: *no component 'nobody'*"]
    )


@pytest.mark.parametrize("module", ["ucx_memh", "ucx_memh.testing"])
def test_who_does_not_use_it_does_not_pay(python, module):
    python("-c", f"import sys, {module}; sys.exit('pytest' in sys.modules)")


def test_the_suite_names_what_to_override(pytester):
    pytester.makepyfile(
        "from ucx_memh.testing import MdSuite\nclass TestMine(MdSuite):\n    pass\n"
    )
    done = pytester.runpytest_subprocess("-k", "test_packs", "-p", "no:cacheprovider")
    done.assert_outcomes(errors=2)
    done.stdout.fnmatch_lines(["*a subclass of MdSuite overrides the fixture `md`*"])
