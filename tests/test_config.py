# SPDX-License-Identifier: BSD-3-Clause
"""Settings: declared, read from a call or the environment, and all else refused."""

import pathlib

import numpy as np
import pytest

import ucx_memh as um
from ucx_memh.config import Option, setting_of, settings, strangers, variable

DEPTH = Option("depth", int, 128, "how deep", minimum=1, maximum=1000)
DELAY = Option("delay", float, 0.5, "how long", minimum=0)
CHECK = Option("check", bool, True, "whether")
PATH = Option("path", str, "/default", "where")
KIND = Option("kind", ("auto", "off"), "auto", "which")
SECRET = Option("secret", int, 0, "an address here", environment=False)
OPTIONS = (DEPTH, DELAY, CHECK, PATH, KIND, SECRET)


def values(given, options=OPTIONS):
    return {s.option.name: s.value for s in settings("my-comp", options, given)}


def test_defaults():
    found = settings("my-comp", OPTIONS, {})
    assert {s.source for s in found} == {"default"}
    assert [s.value for s in found] == [128, 0.5, True, "/default", "auto", 0]


@pytest.mark.parametrize(
    ("option", "given", "value"),
    [
        (DEPTH, 7, 7),
        (DEPTH, "7", 7),
        (DEPTH, " 0x10 ", 16),
        (DEPTH, np.int64(9), 9),
        (DEPTH, 1, 1),
        (DEPTH, 1000, 1000),
        (DELAY, 2, 2.0),
        (DELAY, "1e-3", 0.001),
        (CHECK, False, False),
        (CHECK, "No", False),
        (CHECK, "1", True),
        (CHECK, "on", True),
        (PATH, "a=b", "a=b"),
        (PATH, "123", "123"),
        (PATH, "", ""),
        (PATH, pathlib.Path("/x/y"), "/x/y"),
        (KIND, "off", "off"),
    ],
)
def test_what_is_given_in_the_call(option, given, value):
    found = values({option.name: given})[option.name]
    assert (found, type(found)) == (value, type(value))
    assert setting_of("c", option, {option.name: given}).source == "call"


@pytest.mark.parametrize(
    ("option", "given", "wanted"),
    [
        (DEPTH, 0, "a whole number from 1 to 1000"),
        (DEPTH, 1001, "a whole number from 1 to 1000"),
        (DEPTH, 2**70, "a whole number"),
        (DEPTH, True, "a whole number"),
        (DEPTH, 1.0, "a whole number"),
        (DEPTH, "many", "a whole number"),
        (DEPTH, "", "a whole number"),
        (DEPTH, None, "a whole number"),
        (DELAY, -0.1, "a number of 0 at least"),
        (DELAY, float("nan"), "a number"),
        (DELAY, float("inf"), "a number"),
        (DELAY, "soon", "a number"),
        (DELAY, [1], "a number"),
        (CHECK, 1, "yes or no"),
        (CHECK, "maybe", "yes or no"),
        (PATH, 7, "text"),
        (PATH, b"/x", "text"),
        (PATH, None, "text"),
        (KIND, "on", "one of auto, off"),
        (KIND, ["auto"], "one of auto, off"),
        (KIND, None, "one of auto, off"),
    ],
)
def test_wrong_values_are_refused(option, given, wanted):
    with pytest.raises(um.InvalidParamError) as caught:
        values({option.name: given})
    assert caught.value.component == "my-comp"
    assert f"{option.name} is {given!r}, not {wanted}" in caught.value.detail


def test_unknown_keys_are_refused():
    with pytest.raises(um.InvalidParamError, match="'depht'; known are depth, delay, check"):
        values({"depht": 1, "depth": 1})
    with pytest.raises(um.InvalidParamError, match="unknown configuration key 'x'; it has none"):
        values({"x": 1}, options=())


def test_the_environment(monkeypatch):
    assert variable("my-comp", "depth") == "UCX_MEMH_MY_COMP_DEPTH"
    monkeypatch.setenv("UCX_MEMH_MY_COMP_DEPTH", "9")
    monkeypatch.setenv("UCX_MEMH_MY_COMP_KIND", "")  # counts as not set
    monkeypatch.setenv("UCX_MEMH_MY_COMP_SECRET", "77")  # nobody's
    found = {s.option.name: (s.value, s.source) for s in settings("my-comp", OPTIONS, {})}
    assert found["depth"] == (9, "UCX_MEMH_MY_COMP_DEPTH")
    assert (found["kind"], found["secret"]) == (("auto", "default"), (0, "default"))
    assert values({"depth": 3})["depth"] == 3


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("UCX_MEMH_MY_COMP_DEPTH", "deep")
    with pytest.raises(um.InvalidParamError, match="UCX_MEMH_MY_COMP_DEPTH: depth is 'deep', not"):
        values({})
    assert values({"depth": 3})["depth"] == 3  # it is not even looked at


def test_variables_that_nothing_reads(monkeypatch):
    for name in ("MY_COMP_DEPTH", "MY_COMP_DEPHT", "MY_COMP_SECRET", "OTHER_DEPTH", "BACKENDS"):
        monkeypatch.setenv(f"UCX_MEMH_{name}", "1")
    monkeypatch.setenv("UCX_MEMH_LAZY_DEPTH", "1")
    assert strangers({"lazy": None}) == strangers({"my-comp": OPTIONS}, "lazy") == []
    assert strangers({"my-comp": OPTIONS, "my": (), "lazy": None}) == [
        "UCX_MEMH_MY_COMP_DEPHT",
        "UCX_MEMH_MY_COMP_SECRET",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        dict(name="Depth"),
        dict(name=""),
        dict(name="a-b"),
        dict(type=list),
        dict(type=()),
        dict(type=(1, 2)),
        dict(default="7"),
        dict(default=None),
        dict(default=0),
        dict(type=("a", "b"), default="c"),
    ],
    ids=str,
)
def test_an_option_that_contradicts_itself(wrong):
    good = dict(name="depth", type=int, default=128, help="", minimum=1)
    Option(**good)
    with pytest.raises(um.InvalidParamError):
        Option(**{**good, **wrong})


# ---- of our own components ----


def test_ours_are_all_declared():
    known = {info.name: info.options for info in um.components(load=True)}
    assert {option.name for option in known["cma"]} == {"peer_check_interval", "yama_scope_path"}
    assert all(option.help for options in known.values() for option in options)


def test_an_opened_domain_has_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("UCX_MEMH_CMA_PEER_CHECK_INTERVAL", "7200")
    with pytest.raises(um.InvalidParamError, match="UCX_MEMH_CMA_PEER_CHECK_INTERVAL"):
        um.open_md("cma")
    assert "cma" not in {md.component for md in um.query_mds()}  # and the others are there
    (cma,) = [info for info in um.components() if info.name == "cma"]
    assert cma.state == "unavailable"
    assert "UCX_MEMH_CMA_PEER_CHECK_INTERVAL: peer_check_interval is '7200'" in cma.reason
    monkeypatch.setenv("UCX_MEMH_CMA_PEER_CHECK_INTERVAL", "0.25")
    with um.open_md("cma") as md:
        assert "250000 us" in md.explain()
