# SPDX-License-Identifier: BSD-3-Clause
"""bench/peers: that peers are measured in turns, and that none gets lost without a word.

Nothing is installed here: the peers are small programs of the tests' own, and ucx_memh itself.
"""

import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.source

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def peers(bench):
    """bench.peers with its modules, as they are in the root of the tree."""
    import bench.peers.child
    import bench.peers.install
    import bench.peers.measure
    import bench.peers.perftest
    import bench.peers.render
    import bench.peers.roster
    import bench.peers.rounds

    return bench.peers


# ---- a peer in a process of its own ----

HELLO = """
import json, os, sys, time
def say(what):
    print(json.dumps(what), flush=True)
def hello(**more):
    say({"pid": os.getpid(), "operations": {"register": "`reg`"}, "versions": {"fake": "1.2"},
         "key_bytes": 7} | more)
"""

ANSWERS = """
hello()
for line in sys.stdin:
    operation, length, count = line.split()
    say({"ns": int(length) + int(count) / 1000} if operation == "register" else {"error": "no"})
"""


@pytest.fixture
def start(peers, root, tmp_path):
    """`start(code)` is the Child that runs this."""
    children = []

    def run(code, timeout=30.0):
        path = tmp_path / f"fake{len(children)}.py"
        path.write_text(HELLO + code)
        log = tmp_path / f"{path.stem}.log"
        children.append(peers.child.Child([sys.executable, path], log, root, timeout=timeout))
        return children[-1]

    yield run
    for child in children:
        if child.lost is None:
            child.close()


def lost(call):
    """The reason of the PeerLost that it raises."""
    from bench.peers.reasons import PeerLost

    with pytest.raises(PeerLost) as caught:
        call()
    return str(caught.value)


def test_a_peer_answers(start):
    child = start(ANSWERS)
    assert child.operations == {"register": "`reg`"}
    assert child.versions == {"fake": "1.2"} and child.key_bytes == 7
    assert child.ask("register", 64, 2000) == 66
    assert lost(lambda: child.ask("unpack", 64, 1)) == "no"
    assert child.ask("register", 1, 1000) == 2, "an error of one operation ends no peer"
    child.close()
    assert child.process.returncode == 0


SERVES = """
sys.path.insert(0, os.getcwd())
from bench.peers.harness import serving
def prepare(length):
    if length > 100:
        raise ValueError("too long: /some/where/else")
    def loop(count):
        print("noise", flush=True)
        os.system("echo more noise")
        return length / count
    return loop
serving.serve({"pack": ("`pack`", prepare)}, serving.versions("pytest"), 3)
"""


def test_a_peer_of_the_real_harness(start):
    """serving.py, with what a library prints out of the way."""
    child = start(SERVES)
    assert child.operations == {"pack": "`pack`"} and child.key_bytes == 3
    assert child.versions["pytest"] == pytest.__version__
    assert child.ask("pack", 10, 4) == 2.5
    assert lost(lambda: child.ask("pack", 101, 1)) == "ValueError: too long: else"
    assert child.ask("pack", 10, 5) == 2
    assert "noise" in child.log.read_text()


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_peer_that_hangs_is_killed_and_says_so_ever_after(start):
    child = start("hello()\ntime.sleep(1000)", timeout=0.5)
    began = time.monotonic()
    reason = lost(lambda: child.ask("register", 8, 1))
    assert 0.4 < time.monotonic() - began < 20
    assert reason == "killed: it said nothing for 0.5 s"
    assert gone(child.pid)
    assert lost(lambda: child.ask("register", 8, 1)) == reason


def test_a_peer_that_never_says_who_it_is_is_killed(start):
    assert lost(lambda: start("time.sleep(1000)", timeout=0.5)).startswith("killed: ")


@pytest.mark.parametrize(
    "code, reason",
    [
        (
            "raise ImportError('/a/b/libx.so: not found')",
            "ImportError: libx.so: not found",
        ),
        ("os.abort()", "SIGABRT: it said nothing"),
        ("print('hello', flush=True); time.sleep(1000)", "it said 'hello\\n'"),
        ("say([])", "it said '[]"),
        ("say({'pid': 1})", "its first line has no 'operations'"),
        ("os.close(1); time.sleep(0.1); sys.exit(3)", "status 3: it said nothing"),
    ],
)
def test_why_a_peer_did_not_start(start, code, reason):
    assert reason.removesuffix("\\n'") in lost(lambda: start(code))


def test_a_peer_without_a_program(peers, root, tmp_path):
    command = [tmp_path / "not_there"]
    reason = lost(lambda: peers.child.Child(command, tmp_path / "log", root))
    assert "No such file" in reason and str(tmp_path) not in reason


def test_a_peer_that_dies_in_between(start):
    child = start("hello()\nsys.stdin.readline()\nsys.exit('error: had enough')")
    assert lost(lambda: child.ask("register", 8, 1)) == "ended with status 1: error: had enough"


def test_libraries_are_those_of_the_process_and_whose_they_are(peers, root):
    from pathlib import Path

    whose = peers.child.whose
    assert whose(root / "build/peers/libucx/lib/x/libucp.so.0", root) == "libucp.so.0 of libucx"
    assert whose(Path("/usr/lib/libucp.so.0"), root) == "libucp.so.0 of the system"
    assert whose(root / "ucx_memh/core.abi3.so", root) == "ucx_memh/core.abi3.so"


# ---- reasons ----


@pytest.mark.parametrize(
    "output, words",
    [
        (
            "WARNING: Location 'file:///some/simple/x/' is ignored\n"
            "ERROR: Could not find a version that satisfies the requirement x==9\n"
            "ERROR: No matching distribution found for x==9\n\n[notice] A new release of pip\n",
            "ERROR: No matching distribution found for x==9",
        ),
        (
            "ucp.c:9:10: fatal error: ucp/api/ucp.h: No such file\ncompilation terminated.\n",
            "fatal",
        ),
        ("Traceback:\nImportError: /a/b/x.so: undefined\n  ^^^^\n", "ImportError: x.so: undefined"),
        ("it is so\n", "it is so"),
        ("\n", "it said nothing"),
    ],
)
def test_last_words(peers, output, words):
    from bench.peers.reasons import last_words

    assert words in last_words(output)
    assert "/a/" not in last_words(output)


# ---- installing ----


@pytest.fixture
def no_network(peers, monkeypatch, tmp_path):
    """An install that fails, as pip does, and builds elsewhere."""
    monkeypatch.setattr(peers.install, "BUILD", tmp_path / "peers")
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
        "CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return peers


def test_a_peer_that_cannot_be_installed_says_what_pip_said(no_network):
    venv = no_network.install.Venv("none", ("no-such-distribution==1.0",))
    reason = lost(lambda: no_network.install.install(venv))
    assert reason.startswith("pip install failed: ") and "no-such-distribution==1.0" in reason
    assert not (venv.folder / "installed").exists(), "the next run must try again"


def test_what_is_installed_is_not_installed_again(no_network, monkeypatch):
    install = no_network.install
    venv = install.Venv("some", ("some==1.0",))
    commands = []

    def run(command, what):
        commands.append((what, [str(word) for word in command]))
        venv.folder.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(install, "run", run)
    install.install(venv)
    assert [what for what, _ in commands] == ["venv", "pip install"]
    assert commands[1][1][0] == str(venv.python) and commands[1][1][-1] == "some==1.0"
    install.install(venv)
    assert len(commands) == 2
    install.install(install.Venv("some", ("some==1.1",)))
    assert len(commands) == 4


def test_every_version_is_pinned(peers):
    for venv in peers.install.VENVS.values():
        assert all("==" in requirement for requirement in venv.requirements), venv


def test_a_command_that_takes_too_long_is_killed(peers, monkeypatch):
    monkeypatch.setattr(peers.install, "PATIENCE", 0.3)
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    assert lost(lambda: peers.install.run(command, "pip")) == "pip was killed after 0.3 s"


# ---- in turns ----


def test_rounds_go_around(peers):
    order = []

    def way(name, ns):
        def times(count):
            order.append(name)
            return ns

        return times

    ways = {"a": way("a", 10.0), "b": way("b", 20.0), "c": way("c", 5.0)}
    rows = peers.rounds.interleaved(ways, "a", 7, 1.0, {"a": 1, "b": 2, "c": 3})
    assert "".join(order) == "abc" + "bca" + "cab" + "cba" + "acb" + "bac" + "abc"
    assert [rows[name]["ratio"] for name in "abc"] == [1, 2, 0.5]
    assert [rows[name]["calls"] for name in "abc"] == [1, 2, 3]


def test_ratio_is_of_the_same_round(peers):
    """On a machine that is ten times slower in one round of two."""
    row = peers.rounds.summary([20.0, 200.0, 30.0, 200.0], [10.0, 100.0, 10.0, 100.0])
    assert row == {
        "ns": 115.0,
        "least_ns": 20.0,
        "ratio": 2.0,
        "quartiles": [2.0, 2.75],
        "rounds": 4,
    }
    assert peers.rounds.summary([6.0], [4.0])["quartiles"] == [1.5, 1.5]


@pytest.mark.parametrize("ns", [2.0, 3e3, 5e7])
def test_calls_take_as_long_as_was_said(peers, ns):
    asked = []

    def way(count):
        asked.append(count)
        return ns

    count = peers.rounds.calls_for(way, 0.02)
    assert count == max(1, round(0.02e9 / ns))
    assert sum(asked) * ns < max(0.02e9, 4 * ns), "finding out took longer than measuring"


def test_a_slow_moment_does_not_make_rounds_short(peers):
    times = iter([1e6, 9e3, 9e3, 1e3, 2e3])
    assert peers.rounds.calls_for(lambda count: next(times), 0.02) == 20000


def test_a_peer_lost_on_the_way_is_named_and_the_others_go_on(peers):
    from bench.peers.reasons import PeerLost

    asked = []

    def weak(count):
        asked.append(count)
        if len(asked) == 3:
            raise PeerLost("had enough")
        return 1.0

    calls = {"ours": 1, "weak": 1, "other": 1}
    ways = {"ours": lambda count: 2.0, "weak": weak, "other": lambda count: 6.0}
    rows = peers.rounds.interleaved(ways, "ours", 8, 1.0, calls)
    assert rows["weak"] == {"reason": "had enough"} and len(asked) == 3
    assert rows["other"]["ratio"] == 3 and rows["other"]["rounds"] == 8
    asked.clear()
    with pytest.raises(PeerLost, match="had enough"):  # without ours there is no ratio
        peers.rounds.interleaved(ways, "weak", 8, 1.0, calls)


# ---- all together ----


def test_peers_beside_ours(peers, start, monkeypatch, capsys):
    """The real ucx_memh, one that answers, one that cannot be installed and one that hangs."""
    Peer = peers.roster.Peer

    def refused():
        peers.install.run([sys.executable, "-c", "raise SystemExit('ERROR: none')"], "pip install")

    (ours,) = [peer for peer in peers.roster.PEERS if peer.key == "ours"]
    table = [
        ours,
        Peer("fake", "A fake", "Python", lambda: start(ANSWERS)),
        Peer("absent", "The absent", "Python", refused),
        Peer("slow", "The slow", "Python", lambda: start("hello()\ntime.sleep(1000)", 0.5)),
    ]
    monkeypatch.setattr(peers.measure, "STEPS", [("register", 4 * KIB), ("pack", 4 * KIB)])
    about, rows = peers.measure.steps(table, 2, 0.0005)
    found = {(row["operation"], row["peer"]): row for row in rows}
    assert set(found) == {
        ("register", "ours"),
        ("register", "fake"),
        ("register", "slow"),
        ("pack", "ours"),
    }
    assert found["register", "fake"]["ns"] >= 4096
    assert found["register", "fake"]["ratio"] > 0
    assert "reason" not in found["register", "ours"]
    assert found["register", "slow"] == {
        "table": "Python",
        "operation": "register",
        "bytes": 4 * KIB,
        "peer": "slow",
        "reason": "killed: it said nothing for 0.5 s",
    }
    by_key = {peer["key"]: peer for peer in about}
    assert by_key["absent"]["reason"] == "pip install failed: ERROR: none"
    assert by_key["fake"]["versions"] == {"fake": "1.2"}
    assert any("core" in library for library in by_key["ours"]["loaded"])
    said = capsys.readouterr().err
    assert "The absent: NOT MEASURED: pip install failed" in said
    assert "slow: NOT MEASURED: killed" in said


@pytest.mark.parametrize("key", ["ours", "ours-c"])
def test_our_own_harness(peers, key):
    (peer,) = [peer for peer in peers.roster.PEERS if peer.key == key]
    with peer.start() as child:
        assert set(child.operations) == set(peers.render.STEPS)
        for operation, length in peers.measure.STEPS:
            assert 0 < child.ask(operation, length, 50) < 1e7
        # The same work, whatever it is asked for: a loop that does nothing would take no time.
        assert child.ask("share", 4 * KIB, 2000) > child.ask("pack", 4 * KIB, 2000)
        assert child.key_bytes > 40
    assert child.process.returncode == 0


def test_our_own_data_path(peers):
    rows = peers.measure.transfers([8, 4 * KIB], 2, None)
    assert {(row["way"], row["bytes"], row["peer"]) for row in rows} == {
        (way, length, peer)
        for way in ("get", "put")
        for length in (8, 4 * KIB)
        for peer in ("bare", "c", "python")
    }
    assert all(50 < row["ns"] < 1e8 for row in rows)


# ---- ucx_perftest ----

CSV = """\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
50000,1.542,3.722,3.725,2.05,2.05,268691,268691
"""


def test_perftest_lines(peers):
    assert peers.perftest.nanoseconds(CSV) == 3725
    reason = lost(lambda: peers.perftest.nanoseconds("error: no device\n"))
    assert reason == "ucx_perftest gave no result: error: no device"


def fake_perftest(folder, body):
    program = folder / "bin/ucx_perftest"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{body}")
    program.chmod(0o755)


SERVER = """
import socket, sys
port = int(sys.argv[sys.argv.index("-p") + 1])
if sys.argv[1] == "127.0.0.1":
    socket.create_connection(("127.0.0.1", port)).close()
    {client}
else:
    with socket.create_server(("0.0.0.0", port)) as server:
        server.accept()
"""


def test_perftest_without_ucx_is_named(no_network, monkeypatch):
    venv = no_network.install.Venv("libucx", ("no-such-distribution==1.0",))
    monkeypatch.setitem(no_network.install.VENVS, "libucx", venv)
    about, theirs = no_network.measure.ucx_perftest()
    assert theirs is None and about["reason"].startswith("pip install failed: ")


def test_perftest_runs_two_processes(peers, tmp_path, monkeypatch):
    monkeypatch.setattr(peers.perftest, "BUILD", tmp_path / "log")
    fake_perftest(tmp_path, SERVER.format(client=f"print({CSV!r}, end='')"))
    assert peers.perftest.run(tmp_path, {}, "get", 8, 10) == 3725


def test_perftest_that_fails_or_hangs_is_named(peers, tmp_path, monkeypatch):
    monkeypatch.setattr(peers.perftest, "BUILD", tmp_path / "log")
    monkeypatch.setattr(peers.perftest, "PATIENCE", 0.5)
    for name, client, reason in [
        ("fails", "sys.exit('error: refused')", "ucx_perftest: error: refused"),
        ("hangs", "import time; time.sleep(1000)", "killed: ucx_perftest said nothing for 0.5 s"),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        fake_perftest(folder, SERVER.format(client=client))
        assert lost(lambda: peers.perftest.run(folder, {}, "get", 8, 10)) == reason  # noqa: B023
    folder = tmp_path / "none"
    folder.mkdir()
    fake_perftest(folder, "raise SystemExit('error: no such device')")
    reason = lost(lambda: peers.perftest.run(folder, {}, "get", 8, 10))
    assert reason == "ucx_perftest's server: error: no such device"


# ---- the page ----


@pytest.fixture
def recorded():
    times = {"least_ns": 50.0, "quartiles": [1.5, 2.5], "rounds": 4, "calls": 9}
    step = {"table": "C", "operation": "register", "bytes": 4 * KIB}
    move = {"way": "get", "bytes": 8}
    here = {"cpu": "a cpu", "cpus": 2, "memory": 8 << 30, "page": 4096, "kernel": "6.1"}
    here |= {"python": "3.11", "ucx_memh": "0.1.0", "load": 0.25}
    calls = {"register": "`reg`", "get": "`get`"}
    about = {"loaded": ["libx.so"], "calls": calls, "key_bytes": 80}
    return {
        "date": "2026-01-03",
        "machine": here,
        "rounds": {"steps": 4, "seconds": 0.02, "data": 3},
        "peers": [
            {"key": "ours-c", "name": "ucx_memh", "table": "C", "versions": {"ucx_memh": "0.1.0"}}
            | about,
            {"key": "ucx", "name": "UCX", "table": "C", "versions": {"UCX": "1.22.0"}} | about,
            {"key": "bad", "name": "Bad", "table": "C", "reason": "pip | failed"},
            {"key": "perftest", "name": "ucx_perftest", "table": "cma", "versions": {}} | about,
        ],
        "steps": [
            step | {"peer": "ours-c", "ns": 60.0, "ratio": 1.0} | times,
            step | {"peer": "ucx", "ns": 120.0, "ratio": 2.0} | times,
        ],
        "transfers": [
            move | {"peer": "bare", "ns": 400.0, "ratio": 0.8} | times,
            move | {"peer": "c", "ns": 500.0, "ratio": 1.0} | times,
            move | {"peer": "python", "ns": 600.0, "ratio": 1.2} | times,
            move | {"peer": "perftest", "ns": 1250.0, "ratio": 2.5} | times,
            {"way": "put", "bytes": 8, "peer": "perftest", "reason": "it broke"},
        ],
    }


def test_page_says_what_was_recorded(peers, recorded):
    text = peers.render.page(recorded)
    for line in (
        "| ucx_memh (C) | ucx_memh 0.1.0 | libx.so | 80 B |",
        "| Bad | **not measured** | pip \\| failed |  |",
        "| register, deregister | 4 KiB | ucx_memh | `reg` | 60 ns (50 ns) |  |",
        "| register, deregister | 4 KiB | UCX | `reg` | 120 ns (50 ns) | **2.00** (1.50 .. 2.50) |",
        "- Bad was not measured: pip | failed",
        "| 8 B | 400 ns (50 ns) | 500 ns (50 ns) | 600 ns (50 ns) | 1.25 us (50 ns) "
        "| **2.50** (1.50 .. 2.50) |",
        "| 8 B | not measured | not measured | not measured | it broke |  |",
    ):
        assert line in text.splitlines()


def test_report_has_the_section_when_there_is_one(peers, recorded, tmp_path):
    from bench.report import page, sections

    assert "bench.peers.render" in sections.SECTIONS
    assert peers.render.render(tmp_path / "none.json") is None
    (tmp_path / "peers.json").write_text(page.written(recorded))
    text = peers.render.render(tmp_path / "peers.json")
    assert text.startswith("## ") and text in peers.render.page(recorded)


def test_committed_page_is_of_the_committed_data(peers, root):
    from bench.report.page import written

    file = root / "docs/peers.json"
    data = json.loads(file.read_text())
    again = "python -m bench.peers --render"
    assert peers.render.page(data) == (root / "docs/peers.md").read_text(), again
    assert written(data) == file.read_text()
    keys = {peer.key for peer in peers.roster.PEERS} | {"perftest"}
    assert {peer["key"] for peer in data["peers"]} == keys, "a peer was dropped"
    for peer in data["peers"]:
        assert ("reason" in peer) != bool(peer.get("versions") and peer.get("loaded")), peer


def test_options(root):
    def run(*args):
        command = [sys.executable, "-m", "bench.peers", *args]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)

    assert "perftest" in run("--help").stdout
    assert run("--only", "nobody").returncode == 2
    assert run("--rounds", "0").returncode == 2
    assert run("--render", "--only", "ucx").returncode == 2
