# SPDX-License-Identifier: BSD-3-Clause
"""`python -m ucx_memh check-device`: on the devices that are here, and on fakes that lie."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import ucx_memh as um
from ucx_memh import cli
from ucx_memh.cli import check

FAST = ("--quick", "--sizes", "4K,64K", "--cycles", "20")
ACCESSES = ("get", "put", "atomic")
TRIED = [
    *[
        (promise, access)
        for promise in ("works", "rights", "range", "revoke")
        for access in ACCESSES
    ],
    *[("in flight", access) for access in ("get", "put")],
    *[(promise, "") for promise in ("base key", "endpoint", "guess", "survives")],
]
STEPS = ["register", "derive", "first pack", "cached pack", "unpack", "invalidate", "deregister"]
ROW = {
    "promise", "access", "tried", "expected", "seen", "found", "claimed", "reason", "seconds",
    "verdict", "failed",
}  # fmt: skip
VERDICTS = {"enforced", "cooperative", "not_enforced", "holds", "broken", "untried", "error"}


def by_promise(report):
    return {(row["promise"], row["access"]): row for row in report["checks"]}


def verdicts(report):
    return {name: row["verdict"] for name, row in by_promise(report).items()}


def checked(report):
    """The report, if it has the form that the help describes."""
    assert list(report) == [
        "format", "version", "device", "claims", "checks", "costs", "ratios", "failures", "status",
    ]  # fmt: skip
    assert report["format"] == 1
    assert set(report["device"]) == {"component", "name", "software", "flags", "derived_keys"}
    levels = set(um.Enforcement.__members__)
    assert list(report["claims"]) == ["rights", "range", "revoke"]
    for row in report["claims"].values():
        assert list(row) == list(ACCESSES)
        assert set(row.values()) <= levels
    for row in report["checks"]:
        assert set(row) == ROW
        assert row["verdict"] in VERDICTS
        assert {row["found"], row["claimed"]} <= levels | {None}
        assert bool(row["reason"]) == (row["verdict"] in ("untried", "error"))
    for row in report["costs"]:
        assert set(row) == {"size", "step", "median_us", "p95_us", "rounds"}
        assert 0 <= row["median_us"] <= row["p95_us"]
    for row in report["ratios"]:
        assert set(row) == {"size", "invalidate_us", "reregister_us", "ratio"}
    assert report["status"] == bool(report["failures"])
    assert len(report["failures"]) >= sum(row["failed"] for row in report["checks"])
    return report


# ---- devices ----


@pytest.fixture
def device(python):
    """`device(*args)` runs the command in a process of its own: its report and status."""

    def run(*args, **options):
        done = python("-m", "ucx_memh", "check-device", "--json", *args, check=False, **options)
        assert done.stdout, done.stderr
        report = checked(json.loads(done.stdout))
        assert report["status"] == done.returncode
        return report

    return run


def windows():
    """Arguments for memory windows on the software device."""
    from _rawqp import software_library

    return ("--backend", "ib", "--config", f"library={software_library()}")


@pytest.mark.parametrize("where", ["ib_mlx5", "ib"])
def test_a_device_that_keeps_all_promises(device, where):
    args = windows() if where == "ib" else ("--md", "ib_mlx5/softmlx5_0")
    report = device(*args, *FAST)
    assert report["status"] == 0
    assert report["device"]["software"]
    assert report["device"]["derived_keys"] is None
    found = verdicts(report)
    assert list(found) == TRIED
    for (promise, access), verdict in found.items():
        expected = {"works": "holds", "survives": "holds", "base key": "untried"}
        assert verdict == expected.get(promise, "enforced"), (promise, access)
    assert [row["step"] for row in report["costs"]] == STEPS * 2
    assert [row["size"] for row in report["ratios"]] == [4 << 10, 64 << 10]


def test_a_domain_without_derived_keys(device):
    report = device("--backend", "cma", *FAST)
    assert report["status"] == 0
    assert "UNSUPPORTED" in report["device"]["derived_keys"]
    assert verdicts(report) == {
        ("works", "get"): "holds",
        ("works", "put"): "holds",
        ("works", "atomic"): "untried",
        ("rights", "get"): "cooperative",
        ("rights", "put"): "cooperative",
        ("range", "get"): "cooperative",
        ("range", "put"): "cooperative",
        ("revoke", ""): "untried",
    }
    assert "derived keys: none" in by_promise(report)["revoke", ""]["reason"]
    assert report["ratios"] == []
    assert {row["step"] for row in report["costs"]} == set(STEPS) - {"derive", "invalidate"}


def test_for_a_person(python):
    start = time.monotonic()
    done = python("-m", "ucx_memh", "check-device", "--backend", "ib_mlx5")
    assert time.monotonic() - start < 30
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "made of SOFTWARE" in done.stdout
    assert any(line.startswith("range      get") and "by the device" in line for line in lines)
    assert any(line.startswith("  register anew / invalidate") for line in lines)
    assert lines[-1].endswith("0 failed")


def test_takes_what_derives_by_itself(device):
    report = device(*FAST)
    assert "REG_DERIVED" in report["device"]["flags"]


def test_a_failing_command_is_one_row(device):
    """Not the end of the others."""
    env = {**os.environ, "SOFTMLX5_CONF": "fault=destroy_mkey:status=0x0b,syndrome=0x1234"}
    report = device("--backend", "ib_mlx5", *FAST, env=env)
    failed = [name for name, row in by_promise(report).items() if row["failed"]]
    assert report["status"] == 1
    assert len(failed) == 1
    assert by_promise(report)[failed[0]]["verdict"] == "error"
    assert "DESTROY_MKEY" in report["failures"][0]


def test_interrupt_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "ucx_memh", "check-device", "--backend", "ib_mlx5"]
    with subprocess.Popen(
        [*command, "--cycles", "100000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        for line in process.stdout:  # the cycles come next, and they take hours
            if line.startswith("guess"):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert list(tmp_path.iterdir()) == []


# ---- the command line ----


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("--backend", "nix"), 2, "no component 'nix'"),
        (("--md", "cma/nix"), 1, "no device 'cma/nix'; there is cma/memory"),
        (("--config", "a=b"), 2, "--config needs --md or --backend"),
        (("--backend", "cma", "--config", "a"), 2, "KEY=VALUE"),
        (("--backend", "cma", "--config", "a=b"), 2, "unknown configuration key 'a'"),
        (("--wait", "0"), 2, "above 0"),
        (("--cycles", "0"), 2, "above 0"),
    ],
)
def test_mistakes_are_one_line(capsys, args, status, says):
    assert cli.main(["check-device", *args]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_sizes(capsys):
    assert check._sizes("4096,1M,2g") == [4096, 1 << 20, 2 << 30]
    for text in ("", "4k,", "x", "0", "-1"):
        with pytest.raises(SystemExit) as caught:
            cli.main(["check-device", "--sizes", text])
        assert caught.value.code == 2
        assert "no sizes" in capsys.readouterr().err


def test_without_any_device_each_reason_is_told(monkeypatch, capsys):
    known = [
        um.ComponentInfo("one", "unavailable", "no adapter", "/one.py", "1"),
        um.ComponentInfo("two", "broken", "no symbol", "/two.py", ""),
    ]
    monkeypatch.setattr(um, "query_mds", lambda: [])
    monkeypatch.setattr(um, "components", lambda: known)
    assert cli.main(["check-device"]) == 1
    err = capsys.readouterr().err
    assert "one (no adapter); two (no symbol)" in err


# ---- fakes ----


@pytest.fixture
def fake(fakes, monkeypatch, capsys):
    """`fake(**options)` checks a fake device of those options: its report."""

    def run(*args, **options):
        opened = []

        def open_md(resource, **config):
            md, device = fakes(**options)
            opened.append(device)
            return md

        monkeypatch.setattr(um, "query_mds", lambda component: [um.MdResource("fake", "fake0")])
        monkeypatch.setattr(um, "open_md", open_md)
        status = cli.main(["check-device", "--backend", "fake", "--json", *FAST, *args])
        report = checked(json.loads(capsys.readouterr().out))
        assert report["status"] == status
        assert all(device.closed for device in opened)
        return report

    return run


def broken(report):
    return {name for name, row in by_promise(report).items() if row["failed"]}


def test_an_honest_fake(fake):
    report = fake(deferred=True)
    assert report["status"] == 0
    assert set(verdicts(report).values()) == {"holds", "enforced", "untried"}


EACH = {promise: {(promise, access) for access in ACCESSES} for promise in ("rights", "range")}
IN_FLIGHT = {("in flight", "get"), ("in flight", "put")}
LIES = {
    "rights": EACH["rights"],
    "range": EACH["range"],
    "revoke": {("revoke", access) for access in ACCESSES} | IN_FLIGHT,
    "in_flight": IN_FLIGHT,
    "endpoint": {("endpoint", "")},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_found_out(fake, lie):
    """It claims that it enforces, and does not: this promise fails, and only this."""
    report = fake(lies=[lie], deferred=True)
    assert report["status"] == 1
    # Where revoked keys work, a number next to a key may be one of them.
    also = {("guess", "")} & broken(report) if lie == "revoke" else set()
    assert broken(report) == LIES[lie] | also
    for name in LIES[lie]:
        row = by_promise(report)[name]
        assert row["claimed"] == "ENFORCED"
        # The library of a peer that means well knows rights, ranges, and notices of revocations.
        by_library = lie in ("rights", "range") or name[0] == "revoke"
        assert row["verdict"] == ("cooperative" if by_library else "not_enforced")
    assert len(report["failures"]) == len(LIES[lie] | also)
    assert all("claimed ENFORCED, but NOT enforced" in line for line in report["failures"])


def test_values_next_to_a_key_that_pass_for_one(fake):
    assert ("guess", "") in broken(fake(lies=["guess"], deferred=True))


def test_a_claim_that_is_modest_is_told_and_no_failure(fake):
    report = fake(claim=um.Enforcement.COOPERATIVE, deferred=True)
    assert report["status"] == 0
    row = by_promise(report)["range", "put"]
    assert (row["found"], row["claimed"]) == ("ENFORCED", "COOPERATIVE")


def test_a_lie_that_is_not_told_is_none(fake):
    """A device that does not keep the range, and says so."""
    report = fake(lies=["range"], claim=um.Enforcement.COOPERATIVE, deferred=True)
    assert report["status"] == 0
    assert verdicts(report)["range", "get"] == "cooperative"


def test_a_device_too_fast_to_be_met_in_flight(fake):
    report = fake()  # it has done all when it has taken it
    assert report["status"] == 0
    assert verdicts(report)["in flight", "put"] == "untried"


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"atomic": False}, ("works", "atomic"), "no atomics"),
        ({"derive": False}, ("revoke", ""), "derived keys: none"),
        ({"derive_endpoint": False}, ("endpoint", ""), "binds no keys"),
        ({"endpoint": False}, ("works", ""), "moves no data"),
    ],
)
def test_what_is_not_there_has_its_reason(fake, options, name, reason):
    report = fake(**options, deferred=True)
    assert report["status"] == 0
    assert by_promise(report)[name]["verdict"] == "untried"
    assert reason in by_promise(report)[name]["reason"]


def test_an_operation_that_never_ends_is_told(fakes, monkeypatch, capsys):
    """As on an old soft-RoCE: the key is gone, no byte moves, and nobody tells the peer."""
    opened = []

    def open_md(resource, **config):
        md, device = fakes(deferred=True)
        opened.append(device)
        return md

    settle, works_again = check.Rig.settle, check.Rig.works_again

    def held(rig, operations):
        if not all(operation.done for operation in operations):
            opened[-1].hold()
        return settle(rig, operations)

    def released(rig, *args):
        rig.link.far.reset()  # flushes what is held
        opened[-1].release()
        return works_again(rig, *args)

    monkeypatch.setattr(um, "query_mds", lambda component: [um.MdResource("fake", "fake0")])
    monkeypatch.setattr(um, "open_md", open_md)
    monkeypatch.setattr(check.Rig, "settle", held)
    monkeypatch.setattr(check.Rig, "works_again", released)
    args = ["check-device", "--backend", "fake", "--json", "--wait", "0.2", *FAST]
    status = cli.main(args)
    report = checked(json.loads(capsys.readouterr().out))
    for access in ("get", "put"):
        row = by_promise(report)["in flight", access]
        assert "NEVER TOLD of 32 in 0.2 s" in row["seen"]
        assert row["verdict"] == "enforced"
    assert status == 0


def test_a_device_that_does_not_come_back_is_told(fakes, monkeypatch, capsys):
    """What was found until then is in the report."""
    left = [None, None]

    def open_md(resource, **config):
        if not left:
            raise um.NoDeviceError("it is gone", component="fake")
        left.pop()
        md, device = fakes(deferred=True)
        device.fail("mem_derive", um.Status.IO_ERROR, after=6, text="broken")
        return md

    monkeypatch.setattr(um, "query_mds", lambda component: [um.MdResource("fake", "fake0")])
    monkeypatch.setattr(um, "open_md", open_md)
    assert cli.main(["check-device", "--backend", "fake", "--json", *FAST]) == 1
    report = checked(json.loads(capsys.readouterr().out))
    assert verdicts(report)["works", "get"] == "holds"
    assert report["checks"][-1]["verdict"] == "error"
    assert "broken" in report["failures"][0]
    assert "given up" in report["failures"][1]
    assert "it is gone" in report["failures"][1]
