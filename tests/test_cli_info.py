# SPDX-License-Identifier: BSD-3-Clause
"""`python -m ucx_memh info`, and what the command line does with failures."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import ucx_memh as um
from ucx_memh import cli
from ucx_memh.cli import info

ATTR = um.MdAttr(
    component="soft",
    md_name="soft0",
    software=True,
    flags=um.MdFlag.REG | um.MdFlag.REG_DERIVED,
    rkey_packed_size=24,
    key_size_max=104,
    max_reg=0,
    reg_alignment=1,
    mem_types=frozenset({um.MemType.HOST}),
    enforcement=um.EnforcementTable.of([2, 2, 1], [2, 1, 0], [2, 2, 2]),
)


@pytest.fixture
def machine(monkeypatch):
    """A machine with one software device, one without a device, one that cannot be opened."""
    found = [um.MdResource("soft", "soft0", True), um.MdResource("bad", "bad0")]
    known = [
        um.ComponentInfo("soft", "available", "", "/soft.py", "1"),
        um.ComponentInfo("none", "unavailable", "no adapter", "/none.py", ""),
        um.ComponentInfo("bad", "available", "", "/bad.py", "2"),
    ]

    @contextmanager
    def open_md(resource):
        if resource.component == "bad":
            raise um.DeviceError("out of order", component="bad")
        yield SimpleNamespace(attr=ATTR)

    monkeypatch.setattr(um, "query_mds", lambda: found)
    monkeypatch.setattr(um, "components", lambda load=False: known)
    monkeypatch.setattr(um, "open_md", open_md)


def test_json(machine, capsys):
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == um.__version__
    soft, none, bad = report["components"]
    assert (soft["name"], soft["state"], soft["reason"], soft["version"]) == (
        "soft",
        "available",
        "",
        "1",
    )
    (device,) = soft["devices"]
    assert (device["name"], device["software"]) == ("soft0", True)
    assert device["flags"] == ["REG", "REG_DERIVED"]
    assert device["mem_types"] == ["HOST"]
    assert device["enforcement"] == {
        "rights": {"get": "ENFORCED", "put": "ENFORCED", "atomic": "COOPERATIVE"},
        "range": {"get": "ENFORCED", "put": "COOPERATIVE", "atomic": "NONE"},
        "revoke": {"get": "ENFORCED", "put": "ENFORCED", "atomic": "ENFORCED"},
    }
    assert (none["reason"], none["devices"]) == ("no adapter", [])
    assert "out of order" in bad["devices"][0]["error"]


def test_text(machine, capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for line in (
        "soft 1: available",
        "  device soft0: made of software",
        "    can           reg reg_derived",
        "      range       enforced     cooperative  none",
        "none: unavailable (no adapter)",
        "    cannot be opened: bad: IO_ERROR: out of order",
    ):
        assert line in text.splitlines()


def test_settings(monkeypatch, capsys):
    """`info --config`: where each value comes from, what is wrong, and what nothing reads."""
    options = (
        um.Option("depth", int, 128, "how deep", minimum=1),
        um.Option("check", bool, True, "whether to look"),
        um.Option("path", str, "", "where"),
        um.Option("context", int, 0, "an address", environment=False),
    )
    known = [
        um.ComponentInfo("soft", "unprobed", "", "/soft.py", "1", options),
        um.ComponentInfo("none", "broken", "why", "/none.py", ""),
    ]
    monkeypatch.setattr(um, "components", lambda load: known)
    monkeypatch.setattr(um, "query_mds", None)  # no device is asked
    monkeypatch.setenv("UCX_MEMH_SOFT_DEPTH", "0x40")
    monkeypatch.setenv("UCX_MEMH_SOFT_CHECK", "perhaps")
    monkeypatch.setenv("UCX_MEMH_SOFT_DEPHT", "1")
    assert cli.main(["info", "--config"]) == 0
    text = capsys.readouterr().out
    assert text == f"""\
ucx_memh {um.__version__}

soft 1
  depth = 64 (UCX_MEMH_SOFT_DEPTH)
      a whole number of 1 at least: how deep
      UCX_MEMH_SOFT_DEPTH
  check = wrong: UCX_MEMH_SOFT_CHECK: check is 'perhaps', not yes or no
      yes or no: whether to look
      UCX_MEMH_SOFT_CHECK
  path = "" (default)
      text: where
      UCX_MEMH_SOFT_PATH
  context = 0 (default)
      a whole number: an address

none: broken (why)

set, but no setting of a component:
  UCX_MEMH_SOFT_DEPHT
"""
    assert cli.main(["info", "--config", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ignored"] == ["UCX_MEMH_SOFT_DEPHT"]
    depth, check, path, context = report["components"][0]["settings"]
    assert (depth["value"], depth["source"]) == (64, "UCX_MEMH_SOFT_DEPTH")
    assert (depth["default"], depth["variable"]) == (128, "UCX_MEMH_SOFT_DEPTH")
    assert "perhaps" in check["error"]
    assert "value" not in check
    assert (path["value"], path["source"]) == ("", "default")
    assert context["variable"] is None


PLUGIN = """
from ucx_memh import Component
from ucx_memh.hookspecs import hookimpl
@hookimpl
def ucx_memh_components():
    return [Component("{name}", "3.2")]
"""


@pytest.fixture
def plugged(tmp_path, monkeypatch):
    """`plugged({name: source})` installs plugins for the processes that are started."""

    def install(sources):
        info = tmp_path / "plugged-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.5\n")
        lines = "".join(f"{name} = plugged_{name}\n" for name in sources)
        (info / "entry_points.txt").write_text(f"[ucx_memh]\n{lines}")
        for name, source in sources.items():
            (tmp_path / f"plugged_{name}.py").write_text(source.format(name=name))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def told(done):
    found = json.loads(done.stdout)["components"]
    return {component["name"]: (component["state"], component["reason"]) for component in found}


def test_each_in_a_process_of_its_own(plugged, python):
    """User reports 67 and 72: one that ends its process has its state and reason, like others."""
    plugged(
        {
            "aborts": "import os; os.abort()",
            "exits": "import os; os._exit(3)",
            "prints": "print('hello')\n" + PLUGIN,
            "fails": "1 / 0",
            "good": PLUGIN,
        }
    )
    done = python("-m", "ucx_memh", "info", "--isolate", "--json", "--timeout", "100")
    found = told(done)
    assert found["aborts"][0] == found["exits"][0] == "broken"
    assert found["aborts"][1].startswith("it ended its process: SIGABRT")
    assert found["exits"][1] == "it ended its process: status 3"
    assert found["fails"] == ("broken", "ZeroDivisionError: division by zero")
    assert found["good"] == found["prints"] == ("unavailable", "it has no device")
    assert found["cma"][0] == "available"
    text = python("-m", "ucx_memh", "info", "--isolate").stdout
    assert "aborts 1.5: broken (it ended its process: SIGABRT" in text


OPENS = """
from ucx_memh import MdResource
@hookimpl
def ucx_memh_query_mds(component, config):
    return [MdResource("{name}", "one")]
@hookimpl
def ucx_memh_open_md(resource, config):
    raise SystemExit("no more")
"""


def test_one_that_exits_when_it_is_opened(plugged, python):
    """The rest of the list is there."""
    plugged({"a": PLUGIN + OPENS})
    report = json.loads(python("-m", "ucx_memh", "info", "--json").stdout)
    devices = {component["name"]: component["devices"] for component in report["components"]}
    assert "its plugin failed: SystemExit: no more" in devices["a"][0]["error"]
    assert "flags" in devices["cma"][0]


def test_isolated_from_all_that_they_do(plugged, python, tmp_path):
    """Bytes that are no text, a signal without a name, and a process that it leaves behind, which
    keeps its outputs open until we have the answer."""
    os.mkfifo(tmp_path / "go")
    daemon = f"import os\nif not os.fork():\n    open('{tmp_path}/go', 'rb'); os._exit(0)\n"
    plugged(
        {
            "bytes": "import os; os.write(1, b'\\xff'); os.write(2, b'\\xff')\n" + PLUGIN,
            "rtsig": "import os; os.kill(os.getpid(), 40)",
            "daemon": daemon + PLUGIN,
        }
    )
    try:
        found = told(python("-m", "ucx_memh", "info", "--isolate", "--json", "--timeout", "30"))
    finally:
        os.close(os.open(tmp_path / "go", os.O_RDWR))  # it has a reader and a writer: all go on
    assert found["bytes"] == found["daemon"] == ("unavailable", "it has no device")
    assert found["rtsig"] == ("broken", "it ended its process: signal 40")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_wrong_timeout(capsys, seconds):
    with pytest.raises(SystemExit):
        cli.main(["info", "--isolate", f"--timeout={seconds}"])
    assert f"want a number of seconds above 0, not '{seconds}'" in capsys.readouterr().err


def test_a_reason_that_is_no_text(plugged, python):
    """The name of a file, say; some terminals take no such thing."""
    plugged({"odd": "raise RuntimeError('\\udcff')"})
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    said = python("-m", "ucx_memh", "info", "--component", "odd", env=env).stdout
    assert "odd 1.5: broken (RuntimeError: \\udcff)" in said


def test_a_name_that_nobody_has(monkeypatch, python):
    monkeypatch.setenv("UCX_MEMH_BACKENDS", "ib_mlx")
    said = python("-m", "ucx_memh", "info").stdout
    why = "UCX_MEMH_BACKENDS names it, and nothing of that name is installed"
    assert f"\nib_mlx: unavailable ({why})\n" in said
    assert "ib_mlx5 0.1.0: hidden (UCX_MEMH_BACKENDS leaves it out, and names ib_mlx, " in said
    done = python("-m", "ucx_memh", "info", "--component", "ib_mlx", "--config")
    assert f"ib_mlx: unavailable ({why})" in done.stdout


def test_one_that_never_answers(plugged, python):
    plugged({"hangs": "import threading; threading.Event().wait()"})
    arguments = ("info", "--isolate", "--json", "--component", "hangs", "--timeout", "0.5")
    found = told(python("-m", "ucx_memh", *arguments))
    assert found == {"hangs": ("broken", "no answer within 0.5 s")}


def test_one_component_alone(python):
    for more in ((), ("--config",), ("--isolate",)):
        done = python("-m", "ucx_memh", "info", "--json", "--component", "cma", *more)
        assert list(told(done)) == ["cma"]
    done = python("-m", "ucx_memh", "info", "--component", "nobody", check=False)
    assert done.returncode == 2
    assert "no component 'nobody'; known: cma" in done.stderr


def test_this_machine(python):
    report = json.loads(python("-m", "ucx_memh", "info", "--json").stdout)
    names = [component["name"] for component in report["components"]]
    assert "cma" in names
    text = python("-m", "ucx_memh", "info").stdout
    assert all(f"\n{name}" in text for name in names)
    broken = [c["reason"] for c in report["components"] if c["state"] == "broken"]
    assert not broken


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (um.NoDeviceError("none"), 1),
        (FileNotFoundError(2, "No such file", "x"), 1),
        (um.InvalidParamError("wrong\nword"), 2),
    ],
)
def test_failures_are_one_line(monkeypatch, capsys, error, status):
    def run(args):
        raise error

    monkeypatch.setattr(info, "run", run)
    assert cli.main(["info"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ucx_memh: ")
    assert err.count("\n") == 1


def test_wrong_command_line(python):
    done = python("-m", "ucx_memh", "no-such-command", check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_reader_has_gone():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        command = [sys.executable, "-m", "ucx_memh", "info"]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")


def test_version(python):
    assert python("-m", "ucx_memh", "--version").stdout == f"ucx_memh {um.__version__}\n"
