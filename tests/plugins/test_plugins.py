# SPDX-License-Identifier: BSD-3-Clause
"""The example plugins, and what new-backend writes: built, installed, listed, tested, removed."""

import re

import pytest

pytestmark = pytest.mark.source

KINDS = {"shm": ["--cython"], "file": []}  # which example new-backend copies
SKIPS = r"\w+ (does not declare|declares|packs no native key)|nothing is refused"


def states(place):
    return dict(re.findall(r"^(\w+) 0\.1\.0: (\w+)", place.ucx_memh("info"), re.M))


def files(project):
    return {
        str(path.relative_to(project)): path.read_text()
        for path in project.rglob("*")
        if path.suffix in (".toml", ".py", ".pyx", ".md")
    }


@pytest.mark.parametrize("name", KINDS)
def test_an_example_is_built_installed_listed_tested_and_removed(place, plugins, name):
    project = plugins / f"ucx-memh-{name}"
    assert name not in states(place)
    with place.installed(project):
        assert states(place)[name] == "available"
        passed, reasons = place.test(project)
        assert passed > 40
        assert reasons and all(re.match(SKIPS, reason) for reason in reasons), reasons
    assert name not in states(place)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_under_its_name_is_the_example(place, plugins, tmp_path, name):
    """The wheel has the examples, whole."""
    place.ucx_memh("new-backend", name, *KINDS[name], "--into", tmp_path)
    assert files(tmp_path / f"ucx-memh-{name}") == files(plugins / f"ucx-memh-{name}")


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_works_as_it_stands(place, plugins, tmp_path, name):
    said = place.ucx_memh("new-backend", "my_own", *KINDS[name], "--into", tmp_path)
    project = tmp_path / "ucx-memh-my-own"
    assert said.splitlines()[0] == f"wrote {project}; next:"
    for path, text in files(project).items():
        assert not re.search(rf"ucx.memh.{name}\b|[\"`]{name}[\"`]", f"{path}\n{text}", re.I), path
    with place.installed(project):
        assert states(place)["my_own"] == "available"
        assert place.test(project)[0] > 40
    assert "my_own" not in states(place)


def test_the_example_in_cython_is_short(plugins):
    """Under 80 lines that are neither empty nor a comment nor a docstring."""
    text = (plugins / "ucx-memh-shm/ucx_memh_shm/_md.pyx").read_text()
    text = re.sub(r'"""(?:.|\n)*?"""', "", text)
    lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
    assert 50 < len(lines) < 80
