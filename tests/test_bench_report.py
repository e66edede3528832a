# SPDX-License-Identifier: BSD-3-Clause
"""bench/report: that it says what was measured; and that the benches are all there.  No times."""

import json
import re

import pytest

pytestmark = pytest.mark.source

GROUPS = {"register", "derive", "pack", "unpack", "invalidate", "revoke one peer", "batches"}
GROUPS |= {"data path: get", "data path: put"}

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def page(bench):
    from bench.report import page

    return page


@pytest.fixture
def data(root):
    return json.loads((root / "docs/bench.json").read_text())


# ---- a small recorded run ----


def a_bench(group, name, median, commands=None, component="ib_mlx5", length=None):
    info = {"component": component, "device": "dev", "software": component == "ib_mlx5"}
    if length is not None:
        info["bytes"] = length
    stats = {"min": median / 2, "median": median, "iqr": 0.0, "rounds": 5, "iterations": 2}
    return {
        "group": group,
        "name": f"{name}[x]",
        "extra_info": info | {"commands": commands or {}},
        "stats": stats,
    }


def a_ratio(what, component, length, ours, other, **more):
    times = {"ns": [ours, other], "ratio": ours / other, "quartiles": [1.0, 9.0]}
    row = {"what": what, "component": component, "software": component == "ib_mlx5"}
    return row | {"bytes": length, **times, **more}


@pytest.fixture
def recorded():
    """What pytest-benchmark, bench.ratios and `make costs` gave, for two regions."""
    found = []
    for length in (4 * KIB, 16 * MIB):
        one, two = {"destroy_mkey": 1}, {"create_mkey": 1, "destroy_mkey": 1}
        again = {"reg_mr": 1, "dereg_mr": 1}
        found += [
            a_bench("invalidate", "bench_invalidate", 1e-6, one, length=length),
            a_bench("revoke one peer", "bench_revoke_derived", 2e-6, two, length=length),
            a_bench("revoke one peer", "bench_revoke_by_dereg", 9e-6, again, length=length),
            a_bench("register", "bench_register", 4e-6, again, length=length),
            a_bench("register", "bench_register", 5e-7, component="cma", length=length),
        ]
    found.append(a_bench("unpack", "bench_unpack_known", 1.5e-7, component="cma"))
    ratios = [
        a_ratio("revoke", "ib_mlx5", 4 * KIB, 9000.0, 4500.0),
        a_ratio("revoke", "ib_mlx5", 16 * MIB, 1.23456e6, 4000.0),
        a_ratio("memcpy", None, 8, 50.0, 500.0),
    ]
    for way in ("get", "put"):
        floor = {"floor": "process_vm_" + ("readv" if way == "get" else "writev")}
        small, large = 600.0 if way == "get" else 700.0, 2e7
        ratios += [
            a_ratio(way, "cma", 8, small, 500.0, **floor),
            a_ratio(way, "cma", 64 * MIB, large, 1.96e7 if way == "get" else 1.8e7, **floor),
            a_ratio(way, "ib_mlx5", 8, 5000.0, 500.0, **floor),
            a_ratio(way, "ib_mlx5", 64 * MIB, 4e7, 2e7, **floor),
        ]
    region = {"length": 16 * MIB, "pages": "4 KiB"}
    region |= {"invalidate": [1, 5290, 9], "derived": [1, 20000, 9], "registered": [1, 2500000, 9]}
    huge = region | {"pages": "2 MiB", "registered": [1, 7, 9]}
    costs = {"date": "2026-01-02", "kernel": "6.12-x", "qemu": "7.2", "device": "rxe0", "unit": "x"}
    return {"benchmarks": found}, ratios, costs | {"regions": [region, huge]}


@pytest.fixture
def small(page, recorded):
    found, ratios, costs = recorded
    benches, guest = page.benches(found), page.guest(costs)
    here = {"cpu": "a cpu", "cpus": 2, "memory": 8 << 30, "page": 4096, "kernel": "6.1"}
    here |= {"python": "3.11", "ucx_memh": "0.1.0", "load": 0.25}
    data = {"date": "2026-01-03", "machine": here}
    data["headline"] = page.headline(benches, ratios, guest, 4096)
    data["guest"] = {name: guest[name] for name in guest if name != "regions"}
    return data | {"ratios": ratios, "benches": benches, "sections": ["## Of others\n\nTheirs.\n"]}


def test_headline_has_counts_pages_times_and_instructions(small):
    page, large = small["headline"]
    assert [page["bytes"], large["bytes"]] == [4 * KIB, 16 * MIB]
    assert large["commands"]["invalidate"] == {"destroy_mkey": 1}
    assert large["pages_pinned"] == {"derived": 0, "registered": 4096}
    assert large["software_ns"] == {
        "derived": 4000,
        "registered": 1234560,
        "ratio": 308.64,
        "quartiles": [1.0, 9.0],
    }
    assert large["instructions"]["ratio"] == 125
    assert page["instructions"] is None  # was not counted


def test_page_says_what_was_recorded(page, small):
    text = page.render(small)
    for line in (
        "| 4 KiB | 1 | 2 | 2 | 0 | 1 | 4.50 us | 9.00 us | **2.0** (1.0 .. 9.0) |",
        "| 16 MiB | 1 | 2 | 2 | 0 | 4,096 | 4.00 us | 1.23 ms | **309** (1.0 .. 9.0) |",
        "| 16 MiB | 5,290 | 20,000 | 2,500,000 | **125** |",
        "| 16 MiB | 500 ns (250 ns) | 4.00 us (2.00 us) |  |",
        "| `rkey_unpack` of known bytes, `close` | cma |  | 150 ns (75 ns) | none |",
        "| 8 B | 600 ns | 500 ns | **1.20** (1.00 .. 9.00) | 5.00 us | 10 | 50 ns |",
        "- get of 8 B: 1.20 times process_vm_readv; at most 1.2 is wanted, reached.",
        "- put of 8 B: 1.40 times process_vm_writev; at most 1.2 is wanted, **not reached**.",
        "- get of 64 MiB: 0.98 of process_vm_readv's bandwidth; at least 0.97 is wanted, reached.",
        "- put of 64 MiB: 0.90 of process_vm_writev's bandwidth; at least 0.97 is wanted,"
        " **not reached**.",
        "## Of others",
    ):
        assert line in text.splitlines()
    assert "2026-01-02 under Linux 6.12-x" in text


def test_json_gives_the_same_page(page, small):
    again = json.loads(page.written(small))
    assert again == small
    assert page.render(again) == page.render(small)


@pytest.mark.parametrize("lost", ["bench_invalidate", "bench_revoke_by_dereg", "ratio"])
def test_headline_with_a_hole_is_refused(page, recorded, lost):
    found, ratios, costs = recorded
    rows = [row for row in page.benches(found) if not row["name"].startswith(lost)]
    ratios = [row for row in ratios if lost != "ratio" or row["what"] != "revoke"]
    with pytest.raises(ValueError, match="not all was measured"):
        page.headline(rows, ratios, page.guest(costs), 4096)


def test_headline_of_another_device_is_refused(page, recorded):
    """The page says that it was the software device."""
    found, ratios, costs = recorded
    rows = [row | {"software": False} for row in page.benches(found)]
    with pytest.raises(ValueError, match="software device"):
        page.headline(rows, ratios, page.guest(costs), 4096)


@pytest.mark.parametrize(
    "ns, text", [(0.4, "0 ns"), (999, "999 ns"), (999.9, "1.00 us"), (12345, "12.3 us")]
)
def test_durations(page, ns, text):
    assert page.duration(ns) == text
    assert page.duration(4.567e9) == "4.57 s"
    assert page.duration(999_960) == "1.00 ms"


def test_others_have_their_say(bench, tmp_path, monkeypatch):
    from bench.report import sections

    (tmp_path / "says.py").write_text("def render(): return '\\n## It says\\n'\n")
    (tmp_path / "silent.py").write_text("def render(): return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sections, "SECTIONS", ["not_there.render", "silent", "says"])
    assert sections.collect(tmp_path) == ["## It says\n"]
    monkeypatch.setattr(sections, "PAGES", {"silent": ("peers.md", "## A link\n")})
    assert sections.collect(tmp_path) == ["## It says\n"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/peers.md").touch()
    assert sections.collect(tmp_path) == ["## A link\n", "## It says\n"]


# ---- what is committed ----


def test_committed_page_is_of_the_committed_data(page, data, root):
    assert page.render(data) == (root / "docs/bench.md").read_text(), "python -m bench.report"
    assert page.written(data) == (root / "docs/bench.json").read_text()


def test_pictures_are_there_and_shown(root):
    text = (root / "docs/bench.md").read_text()
    for name in re.findall(r"\]\(([\w-]+\.png)\)", text):
        assert (root / "docs" / name).read_bytes().startswith(b"\x89PNG\r\n"), name
    assert text.count(".png)") == 2
    assert "](docs/bench-revoke.png)" in (root / "README.md").read_text()


def numbers(value):
    """All that are in the JSON."""
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def test_headline_numbers_of_the_page_are_in_the_data(page, data, root):
    """Not by what renders it: every number of both tables, to the digits that are shown."""
    text = (root / "docs/bench.md").read_text()
    section = text[text.index("## Revoke one peer") : text.index("## Register")]
    rows = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) >= len(data["headline"])
    known = [*numbers(data["headline"])]
    units = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9, "KiB": KIB, "MiB": MIB, "GiB": 1 << 30}
    for row in rows:
        for digits, unit in re.findall(r"([\d,.]*\d)(?: ([a-zA-Z]+))?", row):
            shown = float(digits.replace(",", "")) * units.get(unit, 1)
            decimals = len(digits.partition(".")[2])
            step = 10.0**-decimals * units.get(unit, 1)
            counts = {0, 1, 2}  # commands, by adding up
            assert shown in counts or any(abs(shown - real) <= step / 2 + 1e-9 for real in known), (
                f"{digits} {unit} of {row}"
            )


def test_headline_says_what_the_project_claims(data):
    """Derived: the same commands at each size and no page.  Otherwise all pages again."""
    for row in data["headline"]:
        commands = row["commands"]
        assert commands["invalidate"] == {"local_inv": 1}
        assert commands["derived"] == {"bind_mw": 1, "local_inv": 1}
        assert commands["registered"] == {"reg_mr": 1, "dereg_mr": 1}
        assert row["pages_pinned"] == {"derived": 0, "registered": row["bytes"] // 4096}
    assert data["headline"][-1]["software_ns"]["ratio"] > 100


def test_instructions_are_those_of_make_costs(page, data, root):
    guest = page.guest(json.loads((root / "docs/costs.json").read_text()))
    assert {name: guest[name] for name in data["guest"]} == data["guest"], "python -m bench.report"
    for row in data["headline"]:
        counted = guest["regions"].get(row["bytes"])
        assert (counted is None) == (row["instructions"] is None)
        assert counted is None or counted.items() <= row["instructions"].items()


# ---- the benches ----


def test_each_group_has_benches(python, root):
    code = """
import pytest
class Groups:
    def pytest_collection_finish(self, session):
        marks = [item.get_closest_marker("benchmark") for item in session.items]
        print("GROUPS", *sorted({mark.kwargs["group"] for mark in marks if mark}), sep=";")
options = ["--collect-only", "-q", "-p", "no:cacheprovider", "bench"]
raise SystemExit(pytest.main(options, plugins=[Groups()]))
"""
    out = python("-c", code, cwd=root).stdout
    (line,) = [line for line in out.splitlines() if line.startswith("GROUPS")]
    assert set(line.split(";")[1:]) >= GROUPS


def test_ratios_are_of_both_in_turns(bench, monkeypatch):
    """With a clock that only the calls move."""
    from bench import ratios

    now, calls = 0, []

    def call(name, ns):
        nonlocal now
        now += ns
        calls.append(name)

    monkeypatch.setattr(ratios.time, "perf_counter_ns", lambda: now)
    row = ratios.in_turns((call, ("a", 300)), (call, ("b", 100)), 0.005)
    assert row["ns"] == [300, 100] and row["ratio"] == 3 and row["quartiles"] == [3, 3]
    assert row["rounds"] >= 5
    order = "".join(calls).replace("a" * row["calls"][0], "A").replace("b" * row["calls"][1], "B")
    assert "ABBA" in order and "BAAB" in order


def test_ratios_run(python, root):
    done = python("-m", "bench.ratios", "--quick", "--json", cwd=root)
    rows = json.loads(done.stdout)
    assert {(row["what"], row["component"]) for row in rows} == {
        ("get", "cma"),
        ("put", "cma"),
        ("get", "ib_mlx5"),
        ("put", "ib_mlx5"),
        ("memcpy", None),
        ("revoke", "ib_mlx5"),
    }
    assert all(row["ratio"] > 0 for row in rows)
