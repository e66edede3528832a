# SPDX-License-Identifier: BSD-3-Clause
"""Importing ucx_memh does nothing to the process (rule 17)."""

import json

import pytest

WATCH = """
import json, sys
events = []
def watch(event, args):
    # Only while the import runs: a hook cannot be taken away again.
    if watching and event.split(".")[0] in ("open", "socket", "ctypes", "subprocess", "os"):
        events.append([event, str(args[0]) if args else ""])
watching = False
sys.addaudithook(watch)
watching = True
{statement}
watching = False
maps = sorted({{line.split()[-1] for line in open("/proc/self/maps") if "/" in line}})
import os
tasks = len(os.listdir("/proc/self/task"))
print(json.dumps(dict(events=events, maps=maps, modules=sorted(sys.modules), tasks=tasks)))
"""
VENDORS = ("ibverbs", "mlx", "rdmacm", "cuda", "nvidia", "softmlx5")
IMPORTS = ["import ucx_memh", "import ucx_memh.core", "from ucx_memh import *"]


@pytest.fixture(params=IMPORTS)
def seen(request, python):
    return json.loads(python("-c", WATCH.format(statement=request.param)).stdout)


def test_rule17_loads_no_vendor_library(seen):
    files = [path.rpartition("/")[2] for path in seen["maps"]]
    assert not [name for name in files if any(vendor in name for vendor in VENDORS)]
    assert not [event for event in seen["events"] if event[0].startswith("ctypes")]


def test_rule17_starts_no_thread_or_process(seen):
    assert seen["tasks"] == 1
    assert not [e for e in seen["events"] if e[0] in ("subprocess.Popen", "os.fork", "os.exec")]


def test_rule17_reads_nothing_of_the_system(seen):
    opened = [path for event, path in seen["events"] if event == "open"]
    assert opened, "the watcher sees nothing"
    assert not [path for path in opened if path.startswith(("/proc", "/sys", "/dev", "/etc"))]
    assert not [event for event in seen["events"] if event[0].startswith("socket")]


def test_no_pluggy_and_no_backend(seen):
    names = {name.partition(".")[0] for name in seen["modules"]}
    assert "pluggy" not in names
    assert not [name for name in names if name.startswith("ucx_memh_")]
    assert "ucx_memh.plugins" not in seen["modules"]


def test_import_alone_does_not_need_the_core(seen, request):
    if request.node.callspec.params["seen"] == "import ucx_memh":
        assert "ucx_memh.core" not in seen["modules"]


def test_every_public_name_is_there(python):
    python("-c", "import ucx_memh as um; [getattr(um, name) for name in um.__all__]")


def test_unknown_names_are_attribute_errors(python):
    done = python("-c", "import ucx_memh; ucx_memh.nothing", check=False)
    assert "AttributeError: module 'ucx_memh' has no attribute 'nothing'" in done.stderr


def test_silent(python):
    done = python("-W", "error", "-c", "import ucx_memh as um; um.components(); um.query_mds()")
    assert (done.stdout, done.stderr) == ("", "")
