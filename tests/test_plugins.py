# SPDX-License-Identifier: BSD-3-Clause
"""Loading plugins: each fails alone, is tried once, and its reason is kept."""

import importlib
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
    "a name that is no text": (GOOD.replace('"{name}"', "7"), "which is not named by text"),
    "a version that is no text": (GOOD.replace('"3.2"', "3.2"), "which is not named by text"),
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


@pytest.mark.parametrize("hooks", ["", GOOD])
def test_a_plugin_that_is_asked_for_in_the_middle_of_its_own_import(install, monkeypatch, hooks):
    """It was imported by somebody else: that is no fault of it, and so it is not kept as one."""
    ask = "\ntry: sys.plugins.open_md('a', {{}})\nexcept Exception as error: told = error\n"
    plugins = install({"a": "import sys\n" + hooks + ask + GOOD})
    monkeypatch.setattr(sys, "plugins", plugins, raising=False)
    told = importlib.import_module("other_dist_a").told
    assert isinstance(told, um.BusyError) and "while it was being imported" in str(told)
    assert plugins.open_md("a", {}).by == "a"


def test_two_components_of_a_module_that_replaces_itself(install):
    both = """
import sys
from ucx_memh.hookspecs import hookimpl
from ucx_memh import Component, MdResource

class Plugin:
    @hookimpl
    def ucx_memh_components(self):
        return [Component("a"), Component("b")]

    @hookimpl
    def ucx_memh_query_mds(self, component, config):
        return [MdResource(component, "one")]

sys.modules["other_dist_a"] = sys.modules["other_dist_b"] = Plugin()
"""
    plugins = install({"a": both, "b": both})
    assert states(plugins) == {"a": "unprobed", "b": "unprobed"}
    assert [str(md) for md in plugins.query_mds(None, {})] == ["a/one", "b/one"]


def test_options_from_a_generator(install):
    source = GOOD.replace("options=(", "options=iter((").replace("),))]", "),)))]")
    plugins = install({"a": source})
    assert plugins.open_md("a", {}).config == {"speed": 4}
    assert [option.name for option in plugins.components()[0].options] == ["speed"]


def test_an_entry_point_that_is_no_module(install, tmp_path):
    plugins = install({"z": GOOD})
    (tmp_path / "other_dist-1.5.dist-info/entry_points.txt").write_text(
        "[ucx_memh]\na = not a module!\nb =\nz = other_dist_z [extra]\n"
    )
    assert states(plugins) == {"a": "broken", "b": "broken", "z": "unprobed"}
    assert reason(plugins, "a") == "its entry point is 'not a module!', which is no module's name"
    assert plugins.open_md("z", {}).by == "z"


def test_a_distribution_without_metadata(install, tmp_path):
    plugins = install({"a": GOOD})
    (tmp_path / "other_dist-1.5.dist-info/METADATA").unlink()
    (info,) = plugins.components(load=True)
    assert (info.name, info.state, info.origin) == ("a", "unprobed", "")


def test_a_damaged_distribution_of_others_hides_nobody(python, tmp_path, monkeypatch):
    """importlib.metadata would give none at all."""
    for name, text in {"cut": b"[console_scripts]\njunk", "odd": b"[x]\ny = \xff"}.items():
        folder = tmp_path / "packages" / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "entry_points.txt").write_bytes(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    code = (
        "import logging, sys, ucx_memh as um; logging.basicConfig(stream=sys.stdout)\n"
        "print(*(info.name for info in um.components()))"
    )
    *told, names = python("-c", code).stdout.splitlines()
    assert names.split() == [info.name for info in um.components()]
    assert sorted({line.partition("packages/")[2].partition(":")[0] for line in told}) == [
        "cut-1.0.dist-info cannot be read",
        "odd-1.0.dist-info cannot be read",
    ]


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
    for prefer in ("aaa", "AAA", "aaa_cma"):
        assert plugins.open_md("cma", {"prefer": prefer}).by == "thief"
        assert plugins.open_md(um.MdResource("cma", "one"), {"prefer": prefer}).by == "thief"
        assert len(plugins.query_mds("cma", {"prefer": prefer})) == 2
    assert plugins.open_md("cma", {}).by == "cma"
    assert [info.state for info in plugins.components()] == ["available", "unprobed", "hidden"]
    for call in (plugins.query_mds, plugins.open_md):
        for prefer in ("bbb", "", 7):
            with pytest.raises(um.InvalidParamError, match=f"'cma' of {prefer!r}; there is: "):
                call("cma", {"prefer": prefer})


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
        assert reason(plugins, name).startswith("UCX_MEMH_BACKENDS leaves it out")
        for config in ({}, {"prefer": "other_dist"}):
            with pytest.raises(um.MemhError):
                plugins.open_md(name, config)
    told = "UCX_MEMH_BACKENDS names nobody, and nothing of that name is installed"
    assert (told in caplog.messages) == (choice == "nobody")


@pytest.mark.parametrize("choice", ["nobdy", "a,nobdy", "nobdy@x", "a@other_dist,nobdy@x,^b"])
def test_a_name_that_nobody_has_is_told(install, monkeypatch, choice):
    """To who lists the components, and to who opens it or what it leaves out."""
    monkeypatch.setenv("UCX_MEMH_BACKENDS", choice)
    plugins = install({"a": GOOD, "b": GOOD})
    why = "UCX_MEMH_BACKENDS names it, and nothing of that name is installed"
    listed = {info.name: (info.state, info.reason) for info in plugins.components()}
    assert listed["nobdy"] == ("unavailable", why)
    for call in (plugins.open_md, plugins.query_mds):
        with pytest.raises(um.NoDeviceError, match=why):
            call("nobdy", {})
    if choice == "nobdy":
        with pytest.raises(um.NoDeviceError, match="leaves it out, and names nobdy, of which noth"):
            plugins.open_md("b", {})


def test_who_leaves_out_what_is_not_there_has_what_he_wants(install, monkeypatch):
    monkeypatch.setenv("UCX_MEMH_BACKENDS", "^nobody")
    assert states(install({"a": GOOD})) == {"a": "unprobed"}


@pytest.mark.parametrize("item", ["+", "^", "@x", "a@", "+a=", "+.", "+="])
def test_an_item_that_names_nothing_is_told(install, monkeypatch, item):
    monkeypatch.setenv("UCX_MEMH_BACKENDS", item)
    plugins = install({"a": GOOD})
    assert states(plugins) == {"a": "unprobed", item: "broken"}
    assert reason(plugins, item) == f"UCX_MEMH_BACKENDS has {item!r}, which names nothing"


@pytest.mark.parametrize("origin", ["ucx-memh", "ucx_memh", "UCX.memh"])
def test_distributions_are_named_as_pip_names_them(install, monkeypatch, origin):
    monkeypatch.setenv("UCX_MEMH_BACKENDS", f"cma@{origin}")
    plugins = install({"cma": GOOD}, dist="ucx_memh")
    assert plugins.open_md("cma", {}).by == "cma"
    assert plugins.open_md("cma", {"prefer": origin}).by == "cma"


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
        ("raise type('Panic', (BaseException,), {{}})('rust')", "broken", "Panic: rust"),
        ("return [MdResource('a', 1)]", "broken", "which is not named by text"),
        ("yield 7", "broken", "which is no device of its own"),
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


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit", "GeneratorExit"])
def test_open_fails_and_takes_nobody_along(install, error):
    source = GOOD + f"\n@hookimpl\ndef ucx_memh_open_md(resource, config): raise {error}('no\\nw')"
    with pytest.raises(um.DeviceError) as caught:
        install({"a": source}).open_md("a", {})
    assert (caught.value.component, caught.value.op) == ("a", "open_md")
    assert caught.value.detail == f"its plugin failed: {error}: no w"
    assert type(caught.value.__cause__).__name__ == error


def test_an_interrupt_comes_through(install):
    hooks = "\n@hookimpl\ndef ucx_memh_open_md(resource, config): raise KeyboardInterrupt"
    plugins = install({"a": GOOD + hooks, "b": GOOD + QUERY + "raise KeyboardInterrupt"})
    for name in "ab":
        with pytest.raises(KeyboardInterrupt):
            plugins.open_md(name, {})


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
