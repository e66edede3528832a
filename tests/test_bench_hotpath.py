# SPDX-License-Identifier: BSD-3-Clause
"""bench/hotpath: that it runs, and says of its figures what is so.  No time is judged."""

import json
import os
import shlex
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.source

MISSING = "valgrind is not installed: apt-get install valgrind"


@pytest.fixture
def rounds(bench):
    from bench.hotpath import rounds

    return rounds


@pytest.fixture
def render(bench):
    from bench.hotpath import render

    return render


@pytest.fixture
def counts(bench):
    from bench.hotpath import counts

    return counts


# ---- it runs ----


def run(python, root, **options):
    done = python("-m", "bench.hotpath", "--quick", "--json", cwd=root, timeout=110, **options)
    return json.loads(done.stdout), done.stderr


def keys(rows, *names):
    return {tuple(row[name] for name in names) for row in rows}


def test_a_quick_run_has_every_row(python, root, tmp_path):
    """Where valgrind is not: all else is measured, and what is missing is said."""
    (tmp_path / "bin").mkdir()
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))[0]
    for tool in {compiler, "gcc", "cc", "as", "ld", "collect2"}:
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    before = (root / "docs/hotpath.json").read_bytes()
    data, said = run(python, root, env={**os.environ, "PATH": str(tmp_path / "bin")})
    assert (root / "docs/hotpath.json").read_bytes() == before  # quick ones are not written
    assert MISSING in said and data["not_counted"] == MISSING
    assert data["counts"] == [] and data["valgrind"] is None

    all_three, two = ("fake", "ib_mlx5", "cma"), ("fake", "ib_mlx5")
    from_c = keys(data["c"], "what", "component")
    assert {what for what, of in from_c if of is None} >= {
        "malloc + free of 64 B",
        "process_vm_readv of 8 B",
    }
    assert {key for key in from_c if key[1]} == {
        *(("mem_reg + dereg + release", name) for name in all_three),
        *(("mkey_pack, again", name) for name in all_three),
        *(("rkey_unpack of a known key + release", name) for name in all_three),
        *(("derive + dereg + release", name) for name in two),
        *(("mkey_pack RAW, again", name) for name in two),
        *(("derive + mkey_pack + invalidate", name) for name in two),
        ("get of 8 B", "cma"),
    }
    assert {key for key in keys(data["python"], "what", "component") if key[1]} == {
        *(("mem_reg + dereg", name) for name in all_three),
        *(("mkey_pack, again", name) for name in all_three),
        *(("rkey_unpack of a known key + close", name) for name in all_three),
        *(("derive + dereg", name) for name in two),
        *(("derive of a part + dereg", name) for name in two),
        *(("with derive", name) for name in two),
        *((f"{way} of {size}", "cma") for way in ("get", "put") for size in ("8 B", "1 MiB")),
    }
    for row in data["c"] + data["python"]:
        assert 0 < row["least_ns"] <= row["ns"], row
        assert row["limit"] is None or (row["ratio"] > 0 and row["limit_ns"] > 0), row
    assert all(row["at_phase_ns"] > 0 for row in data["c"])
    loop, *others = data["floor"]  # which are differences
    assert loop["part"] == "the loop" and loop["ns"] > 0 and len(others) == 7

    assert keys(data["batches"], "handles", "what", "component") == {
        *(("bases", what, name) for name in ("cma", "ib_mlx5") for what in ("register", "dereg")),
        *(("bases", what, name) for name in ("cma", "ib_mlx5") for what in ("pack", "pack again")),
        *(("derived", what, "ib_mlx5") for what in ("derive", "pack", "pack again", "invalidate")),
        *(("derived", what, "fake") for what in ("derive", "dereg")),
        *(("bases", what, name) for name in ("cma", "ib_mlx5") for what in ("let go", "all")),
        *(("derived", what, name) for name in two for what in ("let go", "all")),
    }
    assert {row["items"] for row in data["batches"]} == {100, 1000}
    for row in data["batches"]:
        assert min(row["loop_ns"], row["many_ns"], row["ratio"]) > 0
        assert ("growth" in row) == (row["items"] == 1000)


# ---- arithmetic ----


def test_targets_are_for_a_phase(rounds):
    """A machine that takes twice as long for malloc gets half of each round's time."""
    assert rounds.PHASE_NS == 8.5
    assert rounds.at_phase([20, 10, 60], [17, 8.5, 17]) == 10
    row = rounds.summary([20, 10, 60], phase=[17, 8.5, 17])
    assert row == {"ns": 20, "least_ns": 10, "rounds": 3, "at_phase_ns": 10}


def test_ratios_are_of_one_round(rounds):
    """Not of the medians, which are 20 and 10."""
    row = rounds.summary([10, 20, 30], limit=[10, 40, 10])
    assert rounds.ratios([10, 20, 30], [10, 40, 10]) == [1, 0.5, 3]
    assert row["ratio"] == 1 and row["quartiles"] == [0.75, 2] and row["limit_ns"] == 10


def test_each_round_has_each_way_once_and_begins_with_another(rounds):
    seen = []

    def way(name):
        def calls(count):
            seen.append(name)
            return 1000.0

        return calls

    names = ["a", "b", "c"]
    times = rounds.measure({name: way(name) for name in names}, 4, 1e-3)
    assert times == {name: [1000.0] * 4 for name in names}
    assert "".join(seen[-12:]) == "abc" + "bca" + "cab" + "abc"


def test_slices_are_as_long_as_asked(rounds):
    assert rounds.calls_for(lambda count: 10.0, 2e6) == 200_000
    assert rounds.calls_for(lambda count: 1e9, 2e6) == 1
    interrupted = iter([1e9, 10.0, 1e9] + [10.0] * 100)
    assert rounds.calls_for(lambda count: next(interrupted), 2e6) == 200_000


def test_floor_is_the_sum_of_its_parts(bench):
    from bench.hotpath import floor

    taken = {"the loop": 4, "call": 9, "call with 1 argument": 12, "call with 3 arguments": 16}
    taken |= {"object": 15, "buffer": 20, "96 bytes": 8, "with": 50}
    alone = floor.parts({part: [float(ns), 2 * ns] for part, ns in taken.items()})
    assert {part: ns[0] for part, ns in alone.items()} == {
        "the loop": 4,
        "call": 5,
        "call with 1 argument": 8,
        "call with 3 arguments": 12,
        "object": 6,
        "buffer": 8,
        "96 bytes": -1,
        "with": 46,
    }
    assert floor.floor(alone, ["call", "object", "call"]) == [4 + 5 + 6 + 5, 2 * 20]


def test_growth_is_beside_the_next_fewer(bench):
    from bench.hotpath import batches

    sizes = {100: 50.0, 1000: 10.0, 10_000: 12.0}
    rows = [
        {"what": "derive", "handles": "derived", "component": "x", "items": items, "many_ns": ns}
        for items, ns in sizes.items()
    ]
    batches.grown(rows)
    assert [row.get("growth") for row in rows] == [None, None, 1.2]
    assert batches.compared([50.0, 60.0], [10.0, 10.0])["ratio"] == 5.5


# ---- counts ----

DUMP = """\
version: 1
thread: {thread}
desc: Timerange: Basic block 0 - 36501
desc: Trigger: Client Request: {name}

positions: line
events: Ir
summary: {total}


fn=(1) f
1 {total}
totals: {total}
"""


def test_dumps_are_read_and_the_rest_is_not(counts):
    name = ["c", "derive", "fake", 100]
    text = DUMP.format(thread=1, name=json.dumps(name), total=1234)
    assert counts.dumped(text) == (name, 1234)
    device = DUMP.format(thread=2, name=json.dumps(name), total=1234)
    assert counts.dumped(device) is None
    assert counts.dumped(DUMP.format(thread=1, name="null", total=9)) is None  # the calls before
    ended = "thread: 1\ndesc: Trigger: Program termination\nsummary: 5\n"
    assert counts.dumped(ended) is None


def test_what_is_no_calls_falls_out(counts):
    rows = counts.difference(
        [(["c", "derive", "fake", 3000], 700 + 3000 * 41), (["c", "derive", "fake", 1000], 41_700)]
    )
    assert rows == [{"table": "c", "what": "derive", "component": "fake", "instructions": 41}]


@pytest.mark.timeout(300)  # a processor in software, on a machine that others use
def test_instructions_repeat(counts, root, monkeypatch):
    """By valgrind itself; without it there is an error that names it."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    if shutil.which("valgrind") is None:
        with pytest.raises(counts.CannotCountError, match=MISSING):
            counts.count(10)
        return
    with ThreadPoolExecutor(2) as both:
        one, two = both.map(counts.count, (500, 500))
    assert len(one) > 30
    for first, second in zip(one, two, strict=True):
        assert first | {"instructions": 0} == second | {"instructions": 0}
        assert first["instructions"] > 0
        # Where the heap's pools end differs between processes: an object that begins a new one at
        # each call costs some ten instructions more (822 for 811 were seen).
        most = max(20, first["instructions"] // 20)
        assert abs(first["instructions"] - second["instructions"]) <= most, (first, second)


def test_no_valgrind_is_said_by_name(counts, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(counts.CannotCountError, match=MISSING):
        counts.count(10)


def test_a_valgrind_that_fails_is_quoted(counts, monkeypatch, tmp_path):
    tool = tmp_path / "valgrind"
    tool.write_text("#!/bin/sh\necho no such processor >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(counts.CannotCountError, match="ended with 3: no such processor"):
        counts.count(10)
    tool.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(counts.CannotCountError, match=r"callgrind\.h is not there"):
        counts.count(10)


# ---- words ----


def a_call(what, component, ns, ratio=None, phase_ns=None):
    row = {"what": what, "component": component, "limit": None, "ns": ns, "least_ns": ns / 2}
    if phase_ns is not None:
        row["at_phase_ns"] = phase_ns
    if ratio is not None:
        row |= {"limit": "a limit", "limit_ns": 1.0, "ratio": ratio, "quartiles": [1.0, 9.0]}
    return row | {"rounds": 3}


def a_batch(what, component, items, many, ratio, **more):
    row = {"what": what, "handles": "bases", "component": component, "items": items}
    row |= {"loop_ns": many * ratio, "many_ns": many, "ratio": ratio, "quartiles": [1.0, 9.0]}
    return row | more


@pytest.fixture
def recorded():
    here = {"cpus": 2, "cpu": "a cpu", "kernel": "6.1", "python": "3.11", "load": 0.25}
    data = {"date": "2026-01-02", "machine": here, "phase_ns": 8.5, "valgrind": "valgrind-1"}
    data["c"] = [
        a_call("malloc + free of 64 B", None, 5.25, phase_ns=8.5),
        a_call("derive + dereg + release", "fake", 20, ratio=2.5),
        a_call("derive + dereg + release", "ib_mlx5", 21, ratio=2.51),
        a_call("mkey_pack, again", "cma", 7, phase_ns=12.1),
        a_call("rkey_unpack of a known key + release", "cma", 50, phase_ns=30),
        a_call("get of 8 B", "cma", 600, ratio=1.06),
    ]
    data["python"] = [
        a_call("mem_reg + dereg", "cma", 140, phase_ns=151),
        a_call("mem_reg + dereg", "ib_mlx5", 9000, phase_ns=9000),
        a_call("get of 64 MiB", "cma", 8e6, ratio=1.03),
        a_call("put of 64 MiB", "cma", 8e6, ratio=1.04),
    ]
    data["floor"] = [{"part": "call", "ns": 5.5, "at_phase_ns": 9.0}]
    data["batches"] = [
        a_batch("register", "cma", 1000, 80.0, 4.0),
        a_batch("register", "cma", 10_000, 104.0, 5.0, growth=1.3),
        a_batch("register", "ib_mlx5", 1000, 8000.0, 1.0),
        a_batch("register", "ib_mlx5", 10_000, 8000.0, 1.0, growth=1.0),
    ]
    data["counts"] = [
        {"table": "c", "what": "derive", "component": "fake", "instructions": 1900},
        {"table": "python", "what": "derive", "component": "fake", "instructions": 50},
    ]
    return data


def test_it_says_what_was_reached(render, recorded):
    lines = render.text(recorded).splitlines()
    assert lines[0].startswith("## ")
    no = "**not reached**"
    for line in (
        "| derive + dereg + release | fake | a limit | at most 2.5 times: reached"
        " | 20.0 | 10.0 |  | 1.0 | 2.50 (1.00 .. 9.00) |",
        f"| derive + dereg + release | ib_mlx5 | a limit | at most 2.5 times: {no}"
        " | 21.0 | 10.5 |  | 1.0 | 2.51 (1.00 .. 9.00) |",
        f"| mkey_pack, again | cma |  | at most 12 ns in that phase: {no}"
        " | 7.0 | 3.5 | 12.1 |  |  |",
        "| rkey_unpack of a known key + release | cma |  | at most 30 ns in that phase: reached"
        " | 50.0 | 25.0 | 30.0 |  |  |",
        f"| get of 8 B | cma | a limit | at most 1.05 times: {no}"
        " | 600 | 300 |  | 1.0 | 1.06 (1.00 .. 9.00) |",
        f"| mem_reg + dereg | cma |  | at most 150 ns in that phase: {no}"
        " | 140 | 70.0 | 151 |  |  |",
        "| mem_reg + dereg | ib_mlx5 |  |  | 9,000 | 4,500 | 9,000 |  |  |",
        "| get of 64 MiB | cma | a limit | at least 0.97 of its bandwidth: reached"
        " | 8.00 ms | 4.00 ms |  | 1.0 | 1.03 (1.00 .. 9.00) |",
        f"| put of 64 MiB | cma | a limit | at least 0.97 of its bandwidth: {no}"
        " | 8.00 ms | 4.00 ms |  | 1.0 | 1.04 (1.00 .. 9.00) |",
        f"| register | bases | cma | at least 5 times: reached; at most 1.25 times: {no}"
        " | 320 : 80.0 | 520 : 104 | 5.00 (1.00 .. 9.00) | 1.30 |",
        "| register | bases | ib_mlx5 | at most 1.25 times: reached"
        " | 8,000 : 8,000 | 8,000 : 8,000 | 1.00 (1.00 .. 9.00) | 1.00 |",
        "| derive | C | fake | 1,900 |",
    ):
        assert line in lines, line


def test_a_change_of_the_counts_shows(render, recorded):
    def row(table, instructions):
        return {"table": table, "what": "derive", "component": "fake"} | {
            "instructions": instructions
        }

    before = [row("c", 2000), row("python", 50), row("c", 7) | {"what": "away"}]
    lines = render.text(recorded, before).splitlines()
    assert "| derive | C | fake | 1,900 | was 2,000 |" in lines
    assert "| derive | Python | fake | 50 | the same |" in lines
    assert "| away | C | fake | gone | was 7 |" in lines
    assert "| derive | C | fake | 1,900 | new |" in render.text(recorded, []).splitlines()


def test_no_counts_are_said(render, recorded):
    recorded |= {"counts": [], "valgrind": None, "not_counted": MISSING}
    assert MISSING in render.text(recorded) and "**Not counted here**" in render.text(recorded)


def test_nothing_measured_is_nothing_said(render, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "DATA", tmp_path / "hotpath.json")
    assert render.render() is None


def test_json_gives_the_same_page(render, recorded, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "DATA", tmp_path / "hotpath.json")
    render.DATA.write_text(render.written(recorded))
    assert json.loads(render.DATA.read_text()) == recorded
    assert render.render() == render.text(recorded)
    assert len(render.DATA.read_text().splitlines()) > 15  # a line for each row


def test_what_is_committed_is_what_is_written(render):
    data = render.committed()
    assert render.written(data) == render.DATA.read_text()
    assert data["counts"] and {row["items"] for row in data["batches"]} == {100, 1000, 10_000}
    assert "reached" in render.render()


def test_the_floor_does_what_its_names_say(bench):
    from bench import bare
    from bench.hotpath import floor

    thing = bare.extension(floor.SOURCE).thing
    assert thing.call0() is None and thing.call(1, 2, 3) is None and thing.look(b"1") is None
    assert len(thing.bytes96()) == 96
    one, two = thing.make(), thing.make()
    assert type(one) is type(two) is type(thing) and one is not two
    with thing as entered:
        assert entered is thing
    octets = bytearray(4)
    thing.look(octets)
    octets.append(1)  # no export is left
    before = sys.getrefcount(thing)
    thing.make()
    assert sys.getrefcount(thing) == before
