# SPDX-License-Identifier: BSD-3-Clause
"""Loading plugins: each fails alone, is tried once, and its reason is kept."""

import os
import sys
import threading
from importlib.metadata import distributions
from types import ModuleType

import pytest

import ucx_memh as um
from ucx_memh import hookspecs
from ucx_memh.core import key_query
from ucx_memh.plugins import Plugins

GOOD = """
from ucx_memh.hookspecs import hookimpl
from ucx_memh import Component, MdResource, NoDeviceError, Option

@hookimpl
def ucx_memh_components():
    return [Component("{name}", "3.2", options=(Option("speed", int, 4, "words"),))]

@hookimpl
def ucx_memh_query_mds(component, config):
    return [MdResource("{name}", md) for md in ("one", "two")] if component == "{name}" else None

@hookimpl
def ucx_memh_open_md(resource, config):
    from ucx_memh.core import Md
    if resource.component == "{name}":
        return Md("{name}", resource, config)
"""
OFFERS = '[Component("{name}", "3.2", options=(Option("speed", int, 4, "words"),))]'
COUNT = "with open('{}', 'a') as tries: tries.write('x')\n"
QUERY = "\n@hookimpl\ndef ucx_memh_query_mds(component, config):\n    "


class FakeMd:
    """In the place of core.Md: discovery does not look inside."""

    def __init__(self, by, resource, config):
        self.by, self.resource, self.config = by, resource, config


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install({"name": source})` makes a distribution for real; gives the Plugins that see it."""
    monkeypatch.syspath_prepend(tmp_path)
    core = ModuleType("ucx_memh.core")
    core.Md = FakeMd
    monkeypatch.setitem(sys.modules, "ucx_memh.core", core)
    monkeypatch.setitem(sys.modules, "compiled", key_query)
    before = set(sys.modules)

    def entry_points(group):
        return [
            point
            for dist in distributions(path=[str(tmp_path)])
            for point in dist.entry_points
            if point.group == group
        ]

    def install(sources, dist="other_dist", wrappers=None):
        info = tmp_path / f"{dist}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.5\n")
        stem = dist.replace("-", "_")
        groups = {"ucx_memh": sources, "ucx_memh.wrappers": wrappers or {}}
        lines = [
            "\n".join([f"[{group}]", *(f"{name} = {stem}_{name}" for name in named)])
            for group, named in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for name, source in {**sources, **groups["ucx_memh.wrappers"]}.items():
            # A test before may have loaded the real one of this name.
            monkeypatch.delitem(sys.modules, f"{stem}_{name}", raising=False)
            if source is not None:
                (tmp_path / f"{stem}_{name}.py").write_text(source.format(name=name))
        return Plugins(entry_points)

    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]


def states(plugins, load=True):
    return {info.name: info.state for info in plugins.components(load)}


def reason(plugins, name):
    return next(info.reason for info in plugins.components(load=True) if info.name == name)


# ---- the good case ----


def test_discovery_asks_no_device(install):
    plugins = install({"a": GOOD})
    (info,) = plugins.components(load=True)
    assert (info.name, info.state, info.reason, info.version) == ("a", "unprobed", "", "3.2")
    assert info.path.endswith("other_dist_a.py")
    assert info.origin == "other_dist"
    assert plugins.query_mds("a", {}) == [um.MdResource("a", "one"), um.MdResource("a", "two")]
    assert states(plugins) == {"a": "available"}


def test_no_plugins(install):
    plugins = install({})
    assert plugins.components() == []
    assert plugins.query_mds(None, {}) == []


def test_all_devices(install):
    plugins = install({"a": GOOD, "b": GOOD})
    assert [str(md) for md in plugins.query_mds(None, {})] == ["a/one", "a/two", "b/one", "b/two"]


@pytest.mark.parametrize(
    ("spec", "md_name"), [("a", "one"), ("a/two", "two"), (um.MdResource("a", "two"), "two")]
)
def test_open(install, spec, md_name):
    md = install({"a": GOOD, "b": GOOD}).open_md(spec, {"speed": 9})
    assert (md.by, md.resource.md_name, md.config) == ("a", md_name, {"speed": 9})


def test_a_plugin_gets_all_settings_and_no_others(install, monkeypatch):
    plugins = install({"a": GOOD})
    assert plugins.open_md("a", {}).config == {"speed": 4}
    monkeypatch.setenv("UCX_MEMH_A_SPEED", "5")
    assert plugins.open_md("a", {}).config == {"speed": 5}
    assert plugins.open_md("a", {"speed": "6"}).config == {"speed": 6}
    for call in (plugins.query_mds, plugins.open_md):
        with pytest.raises(um.InvalidParamError, match="'sped'; known are speed"):
            call("a", {"sped": 1})
    (info,) = plugins.components()
    assert (info.state, [option.name for option in info.options]) == ("available", ["speed"])


def test_a_variable_that_is_no_setting_is_told(install, monkeypatch, caplog):
    monkeypatch.setenv("UCX_MEMH_A_SPED", "5")
    assert states(install({"a": GOOD})) == {"a": "unprobed"}
    assert caplog.messages == ["UCX_MEMH_A_SPED is set, and a has no such setting"]


def test_a_plugin_cannot_change_the_callers_config(install):
    config = {"speed": 9}
    install({"a": GOOD + QUERY + "config.clear(); return [MdResource('a', 'one')]"}).open_md(
        "a", config
    )
    assert config == {"speed": 9}


# ---- plugins that fail while they are loaded ----

BROKEN = {
    "ImportError": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_"),
    "SystemExit": ("raise SystemExit('bye')", "SystemExit: bye"),
    "Exception": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "BaseException": ("class Odd(BaseException): pass\nraise Odd", "Odd"),
    "SyntaxError": ("def (", "SyntaxError"),
    "no hooks": ("x = 1", "it has no hooks"),
    "misspelt hook": (
        GOOD + "\n@hookimpl\ndef ucx_memh_open(resource): pass",
        "unknown hook 'ucx_memh_open'",
    ),
    "misspelt argument": (
        GOOD.replace("(component, config)", "(name, config)"),
        "PluginValidationError",
    ),
    "wrong descriptor": (
        GOOD.replace(OFFERS, '["a"]'),
        "gave 'a', which is no Component",
    ),
    "no list": (GOOD.replace(OFFERS, "7"), "TypeError"),
    "no options": (GOOD.replace(", options=(", ", options=(7,"), "are not all an Option"),
    "an option twice": (GOOD.replace("options=(", "options=2 * ("), "a has two options 'speed'"),
    "a wrong option": (GOOD.replace("int, 4", "int, '4'"), "the default of speed is '4'"),
    # What a function compiled by Cython is to pluggy: callable, and no Python function.
    "compiled hookimpl": (
        GOOD + "\nclass Compiled:\n    def __init__(self, f): self.f = f\n"
        "    def __getattr__(self, name): return getattr(self.f, name)\n"
        "    def __call__(self, *args): return self.f(*args)\n"
        "ucx_memh_query_mds = Compiled(ucx_memh_query_mds)",
        "ucx_memh_query_mds is not seen as a hook: it must be a plain Python function",
    ),
    "really compiled": (
        GOOD + "\nimport sys\nucx_memh_query_mds = sys.modules['compiled']",
        "ucx_memh_query_mds is not seen as a hook: it must be a plain Python function",
    ),
    "another major version": (
        GOOD + "\nAPI_VERSION = (2, 0)",
        "it is for version 2.0 of the hooks, and this is 1.0",
    ),
    "a newer minor version": (
        GOOD + "\nAPI_VERSION = (1, 7)",
        "it is for version 1.7 of the hooks, and this is 1.0",
    ),
    "an older major version": (GOOD + "\nAPI_VERSION = (0, 9)", "version 0.9 of the hooks, and"),
    "no version": (GOOD + "\nAPI_VERSION = '1.0'", "its API_VERSION is '1.0', not (major, minor)"),
    "another's name": (
        GOOD.replace('"{name}"', '"other"'),
        "its entry point is named a, and its components are: other",
    ),
    "an option that is taken": (GOOD.replace('"speed"', '"prefer"'), "which open_md() needs"),
    "hookimpl forgotten": (GOOD + "\ndef ucx_memh_query_mds(): pass", "is not seen as a hook"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_alone(install, case):
    source, why = BROKEN[case]
    plugins = install({"a": source, "z": GOOD})
    assert states(plugins) == {"a": "broken", "z": "unprobed"}
    assert why in reason(plugins, "a")
    assert "\n" not in reason(plugins, "a")
    assert [md.component for md in plugins.query_mds(None, {})] == ["z", "z"]
    assert plugins.open_md("z", {}).by == "z"
    with pytest.raises(um.NoDeviceError, match="broken") as caught:
        plugins.open_md("a", {})
    assert why in caught.value.detail


def test_the_cause_is_kept(install):
    plugins = install({"a": "1 / 0"})
    with pytest.raises(um.NoDeviceError) as caught:
        plugins.open_md("a", {})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_left_out_of_the_installation(install):
    plugins = install({"a": None, "z": GOOD})
    assert states(plugins) == {"a": "unavailable", "z": "unprobed"}
    assert "not part of this installation" in reason(plugins, "a")


def test_interrupted_discovery_starts_again(install, monkeypatch):
    source = "import sys\nif hasattr(sys, 'stop'): raise KeyboardInterrupt\n" + GOOD
    plugins = install({"a": GOOD, "b": source})
    monkeypatch.setattr(sys, "stop", True, raising=False)
    with pytest.raises(KeyboardInterrupt):
        plugins.components(load=True)
    monkeypatch.delattr(sys, "stop")
    assert states(plugins) == {"a": "unprobed", "b": "unprobed"}


def test_one_try(install, tmp_path):
    count = COUNT.format(tmp_path / "tries")
    plugins = install({"a": count + "1 / 0", "b": count + GOOD})
    for _ in range(3):
        plugins.components()
        plugins.query_mds(None, {})
    assert (tmp_path / "tries").read_text() == "xx"


def test_many_threads_one_discovery(install, tmp_path):
    slow = "import time; time.sleep(0.2)\n" + COUNT.format(tmp_path / "tries")
    plugins = install({"a": slow + GOOD, "b": GOOD})
    barrier, answers = threading.Barrier(8), []

    def ask():
        barrier.wait()
        answers.append(states(plugins))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{"a": "unprobed", "b": "unprobed"}] * 8
    assert (tmp_path / "tries").read_text() == "x"


def test_a_plugin_that_asks_back(install, monkeypatch):
    plugins = install({"a": "import sys\nsys.plugins.query_mds('a', {{}})", "z": GOOD})
    monkeypatch.setattr(sys, "plugins", plugins, raising=False)
    assert states(plugins) == {"a": "broken", "z": "unprobed"}
    assert "BusyError" in reason(plugins, "a")


def test_a_child_forked_during_discovery(peer):
    assert peer(fork_while_locked).result() == 0


def fork_while_locked(conn):
    from ucx_memh import plugins

    held = threading.Event()
    release = threading.Event()

    def hold():
        with plugins._plugins._lock, plugins._plugins._record("cma", None).lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        threading.Timer(10, os._exit, (1,)).start()
        um.components(load=True)
        os._exit(0)
    release.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- only who is asked for is loaded ----


def test_listing_imports_no_plugin(install):
    """User report 72: nobody pays, or dies, for a plugin that he did not ask for."""
    plugins = install({"a": "import os; os.abort()", "z": GOOD})
    assert states(plugins, load=False) == {"a": "unprobed", "z": "unprobed"}
    assert plugins.open_md("z", {}).by == "z"
    assert plugins.query_mds("z", {})
    with pytest.raises(um.InvalidParamError):
        plugins.open_md("y", {})
    assert "other_dist_a" not in sys.modules


def test_a_plugin_that_takes_its_time_keeps_nobody_waiting(install, monkeypatch):
    """User report 70: one that hangs; others, and the list, are there meanwhile."""
    monkeypatch.setattr(sys, "go", threading.Event(), raising=False)
    monkeypatch.setattr(sys, "begun", threading.Event(), raising=False)
    plugins = install({"a": "import sys\nsys.begun.set(); sys.go.wait()\n" + GOOD, "z": GOOD})
    opened = []
    thread = threading.Thread(target=lambda: opened.append(plugins.open_md("a", {}).by))
    thread.start()
    try:
        assert sys.begun.wait(30)
        assert states(plugins, load=False) == {"a": "unprobed", "z": "unprobed"}
        assert plugins.open_md("z", {}).by == "z"
        assert opened == []
    finally:
        sys.go.set()
        thread.join()
    assert opened == ["a"]


def test_many_threads_open_it_first(install, tmp_path):
    """User report 69."""
    slow = "import time; time.sleep(0.05)\n" + COUNT.format(tmp_path / "tries")
    plugins = install({"a": slow + GOOD})
    barrier, opened = threading.Barrier(32), []

    def work():
        barrier.wait()
        opened.append(plugins.open_md("a", {}).by)

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == ["a"] * 32
    assert (tmp_path / "tries").read_text() == "x"


@pytest.mark.parametrize("version", ["(1, 0)", "(1, 2)", "(1, 3)"])
def test_an_older_minor_version_is_good(install, monkeypatch, version):
    monkeypatch.setattr(hookspecs, "API_VERSION", (1, 3))
    assert install({"a": GOOD + f"\nAPI_VERSION = {version}"}).open_md("a", {}).by == "a"


def test_a_module_that_is_missing_gives_its_name_to_others(install):
    """Ours, built without a backend, still has its entry point."""
    install({"no": None}, dist="ucx-memh")
    plugins = install({"no": GOOD}, dist="aaa")
    assert plugins.open_md("no", {}).by == "no"
    assert [info.state for info in plugins.components()] == ["available", "unavailable"]


# ---- names ----


def test_built_in_wins_a_clash(install):
    install({"cma": GOOD}, dist="ucx-memh")
    thief = GOOD.replace('Md("{name}"', 'Md("thief"')
    plugins = install({"cma": thief, "x": GOOD}, dist="aaa")
    (ours, x, clash) = plugins.components()
    assert (ours.name, ours.state, x.name) == ("cma", "unprobed", "x")
    assert (clash.name, clash.state, clash.origin) == ("cma", "hidden", "aaa")
    assert clash.reason == "the name is taken by ucx_memh_cma (ucx-memh 1.5)"
    assert plugins.open_md("cma", {}).by == "cma"
    assert [str(device) for device in plugins.query_mds("cma", {})] == ["cma/one", "cma/two"]
    for prefer in ("aaa", "aaa_cma"):
        assert plugins.open_md("cma", {"prefer": prefer}).by == "thief"
        assert plugins.open_md(um.MdResource("cma", "one"), {"prefer": prefer}).by == "thief"
        assert len(plugins.query_mds("cma", {"prefer": prefer})) == 2
    assert plugins.open_md("cma", {}).by == "cma"
    assert [info.state for info in plugins.components()] == ["available", "unprobed", "hidden"]
    for call in (plugins.query_mds, plugins.open_md):
        with pytest.raises(um.InvalidParamError, match=r"no component 'cma' of 'bbb'; there is: "):
            call("cma", {"prefer": "bbb"})


def test_a_clash_of_two_plugins_is_an_error_that_names_both(install, monkeypatch):
    """User report 71: two of one name, versions 1.0 and 1.1."""
    install({"foo": GOOD.replace('Md("{name}"', 'Md("first"')}, dist="aaa")
    plugins = install({"foo": GOOD.replace('Md("{name}"', 'Md("second"'), "x": GOOD}, dist="bbb")
    assert [(i.name, i.state) for i in plugins.components()] == [
        ("x", "unprobed"), ("foo", "hidden"), ("foo", "hidden"),
    ]  # fmt: skip
    for call in (plugins.query_mds, plugins.open_md):
        with pytest.raises(um.NoDeviceError, match="plugins have the same name") as caught:
            call("foo", {})
        assert "aaa_foo (aaa 1.5) and bbb_foo (bbb 1.5)" in caught.value.detail
    assert {md.component for md in plugins.query_mds(None, {})} == {"x"}
    assert not {"aaa_foo", "bbb_foo"} & set(sys.modules)  # neither was even imported
    assert plugins.open_md("foo", {"prefer": "bbb"}).by == "second"
    assert plugins.open_md("foo", {"prefer": "aaa"}).by == "first"


# ---- UCX_MEMH_BACKENDS ----


@pytest.mark.parametrize(
    ("choice", "usable"),
    [
        ("", "a b c"),
        ("a", "a"),
        (" c , a ,", "a c"),
        ("^b", "a c"),
        ("^a,^b", "c"),
        ("a,b,^b", "a"),
        ("nobody", ""),
    ],
)
def test_the_environment_chooses(install, monkeypatch, caplog, choice, usable):
    monkeypatch.setenv("UCX_MEMH_BACKENDS", choice)
    plugins = install(dict.fromkeys("abc", GOOD))
    assert {md.component for md in plugins.query_mds(None, {})} == set(usable.split())
    for name in set("abc") - set(usable.split()):
        assert f"other_dist_{name}" not in sys.modules
        assert reason(plugins, name) == "UCX_MEMH_BACKENDS leaves it out"
        for config in ({}, {"prefer": "other_dist"}):
            with pytest.raises(um.MemhError):
                plugins.open_md(name, config)
    told = "UCX_MEMH_BACKENDS names nobody, and nothing of that name is installed"
    assert (told in caplog.messages) == (choice == "nobody")


def test_the_environment_settles_a_clash(install, monkeypatch):
    monkeypatch.setenv("UCX_MEMH_BACKENDS", "foo@bbb,x@nobody")
    install({"foo": GOOD.replace('Md("{name}"', 'Md("first"'), "y": GOOD}, dist="aaa")
    plugins = install({"foo": GOOD.replace('Md("{name}"', 'Md("second"'), "x": GOOD}, dist="bbb")
    assert plugins.open_md("foo", {}).by == "second"
    assert plugins.open_md("y", {}).by == "y"
    assert reason(plugins, "x") == "UCX_MEMH_BACKENDS wants it of nobody"
    hidden = [info for info in plugins.components() if info.state == "hidden"]
    assert {info.origin: info.reason for info in hidden} == {
        "aaa": "UCX_MEMH_BACKENDS takes bbb_foo (bbb 1.5)",
        "bbb": "UCX_MEMH_BACKENDS wants it of nobody",
    }


@pytest.mark.parametrize("item", ["+{path}", "+cma={other}", "+cma=a_module"])
def test_a_path_wins_over_all(install, monkeypatch, tmp_path, item):
    source = GOOD.format(name="cma").replace('Md("cma"', 'Md("path"')
    for name in ("cma.py", "other.py", "a_module.py"):
        (tmp_path / name).write_text(source)
    item = item.format(path=tmp_path / "cma.py", other=tmp_path / "other.py")
    monkeypatch.setenv("UCX_MEMH_BACKENDS", item)
    plugins = install({"cma": GOOD, "x": GOOD}, dist="ucx-memh")
    assert plugins.open_md("cma", {}).by == "path"
    assert plugins.open_md("x", {}).by == "x"
    assert plugins.open_md("cma", {"prefer": "ucx-memh"}).by == "cma"
    assert [(i.name, i.state) for i in plugins.components()][-1] == ("cma", "hidden")


@pytest.mark.parametrize("path", ["+/nowhere/foo.py", "+/nowhere/foo", "+foo=no_such_module"])
def test_a_path_that_leads_nowhere(install, monkeypatch, path):
    monkeypatch.setenv("UCX_MEMH_BACKENDS", path)
    plugins = install({"x": GOOD})
    assert states(plugins)["foo"] in ("broken", "unavailable")
    assert reason(plugins, "foo")
    assert plugins.open_md("x", {}).by == "x"


def test_unknown_component(install):
    plugins = install({"a": GOOD, "b": "1 / 0"})
    assert states(plugins) == {"a": "unprobed", "b": "broken"}
    for call in (plugins.query_mds, plugins.open_md):
        with pytest.raises(um.InvalidParamError, match=r"'c'; known: a \(unprobed\), b \(broken\)"):
            call("c", {})
    with pytest.raises(um.InvalidParamError):
        plugins.open_md(um.MdResource("c", "one"), {})


def test_unknown_device(install):
    with pytest.raises(um.NoDeviceError, match="no device 'three'; it has: one, two"):
        install({"a": GOOD}).open_md("a/three", {})


@pytest.mark.parametrize("spec", [None, 7, b"a"])
def test_wrong_spec(install, spec):
    with pytest.raises(um.InvalidParamError, match=type(spec).__name__):
        install({"a": GOOD}).open_md(spec, {})


# ---- plugins that fail when they are asked ----


@pytest.mark.parametrize(
    ("body", "state", "why"),
    [
        ("raise NoDeviceError('no adapter')", "unavailable", "no adapter"),
        ("return []", "unavailable", "it has no device"),
        ("return None", "unavailable", "it has no device"),
        ("1 / 0", "broken", "ZeroDivisionError: division by zero"),
        ("raise SystemExit", "broken", "SystemExit"),
        ("return ['one']", "broken", "gave 'one', which is no device of its own"),
        ("return [MdResource('z', 'one')]", "broken", "which is no device of its own"),
        ("return 7", "broken", "TypeError"),
    ],
)
def test_query_fails_alone(install, body, state, why):
    plugins = install({"a": GOOD + QUERY + body, "z": GOOD})
    assert [md.component for md in plugins.query_mds(None, {})] == ["z", "z"]
    assert states(plugins) == {"a": state, "z": "available"}
    assert why in reason(plugins, "a")
    for call in (plugins.query_mds, plugins.open_md):
        with pytest.raises(um.NoDeviceError) as caught:
            call("a", {})
        assert (caught.value.component, why in caught.value.detail) == ("a", True)


def test_asked_anew(install, monkeypatch):
    monkeypatch.setattr(sys, "there", [], raising=False)
    body = "import sys; return [MdResource('a', name) for name in sys.there]"
    plugins = install({"a": GOOD + QUERY + body})
    with pytest.raises(um.NoDeviceError):
        plugins.query_mds("a", {})
    sys.there.append("plugged_in")
    assert [md.md_name for md in plugins.query_mds("a", {})] == ["plugged_in"]
    (info,) = plugins.components()
    assert (info.name, info.state, info.reason) == ("a", "available", "")


def test_wrong_config_does_not_break_a_component(install):
    body = (
        "from ucx_memh import InvalidParamError\n"
        "    if config['speed'] == 9: raise InvalidParamError('speed')"
    )
    plugins = install({"a": GOOD + QUERY + body + "\n    return [MdResource('a', 'one')]"})
    with pytest.raises(um.InvalidParamError, match="speed"):
        plugins.open_md("a", {"speed": 9})
    assert plugins.open_md("a", {}).by == "a"
    assert states(plugins) == {"a": "available"}


@pytest.mark.parametrize("answer", ["None", "7"])
def test_open_answers_wrongly(install, answer):
    source = GOOD + f"\n@hookimpl\ndef ucx_memh_open_md(resource, config): return {answer}"
    with pytest.raises(um.DeviceError, match=f"its plugin answered {answer}"):
        install({"a": source}).open_md("a", {})


def test_open_errors_come_through(install):
    source = (
        GOOD + "\n@hookimpl\ndef ucx_memh_open_md(resource, config): raise NoDeviceError('gone')"
    )
    with pytest.raises(um.NoDeviceError, match="gone"):
        install({"a": source}).open_md("a", {})


def test_a_wrapping_plugin_sees_every_call(install, caplog):
    trace = """
from ucx_memh.hookspecs import hookimpl
seen = []

@hookimpl(wrapper=True)
def ucx_memh_query_mds(component, config):
    seen.append(component)
    return (yield)
"""
    wrappers = {"trace": trace, "wrong": "1 / 0", "more": GOOD}
    plugins = install({"a": GOOD, "b": GOOD}, wrappers=wrappers)
    assert len(plugins.query_mds(None, {})) == 4
    assert sys.modules["other_dist_trace"].seen == ["a", "b"]
    assert caplog.messages == [
        "wrapper more is broken: it has components: they need entry points",
        "wrapper wrong is broken: ZeroDivisionError: division by zero",
    ]


# ---- silence ----


def test_reasons_are_logged_and_nothing_is_printed(install, caplog, capfd):
    with caplog.at_level("INFO", "ucx_memh"):
        plugins = install({"a": "1 / 0", "b": GOOD + QUERY + "return []"})
        for _ in range(2):
            plugins.query_mds(None, {})
    assert [record.getMessage() for record in caplog.records] == [
        "component a is broken: ZeroDivisionError: division by zero",
        "component b is unavailable: it has no device",
    ]
    assert capfd.readouterr() == ("", "")
