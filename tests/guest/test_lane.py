# SPDX-License-Identifier: BSD-3-Clause
"""tools/guest: what goes into a guest, what comes out of it, and that nothing is left."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from _marked import MARK, marked, wait_for

pytestmark = [pytest.mark.guest, pytest.mark.source, pytest.mark.timeout(400)]


@pytest.fixture(scope="session")
def setup(root):
    def run() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", root / "tools/guest/setup.sh"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


@pytest.fixture(scope="session")
def kernel(setup):
    """There is something to boot."""
    with setup() as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


@pytest.fixture
def start(root, kernel, tmp_path):
    """run.py at work; afterwards none of its processes and files is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), MARK: str(tmp_path)}

    def run(*args: object, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, root / "tools/guest/run.py", *map(str, args)],
            cwd=tmp_path,
            env={**environment, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield run
    wait_for(lambda: not marked(tmp_path))
    assert list(temporary.iterdir()) == []


@pytest.fixture
def guest(start):
    """run.py, run to its end."""

    def run(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
        with start(*args, **env) as process:
            out, err = process.communicate(timeout=390)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    return run


# ---- one guest ----


def test_a_command(guest, tmp_path):
    """Its output, environment and folders, its exit code, and what it leaves behind."""
    shared = tmp_path / "to, write"
    shared.mkdir()
    other = tmp_path / "other"
    other.write_text("before")
    script = f"""
        echo "$WORDS|$KEPT|$LOST|$UCX_MEMH_GUEST|$PWD"
        cat "{other}"
        echo "to stderr" >&2
        echo "by its name" >/dev/stderr
        echo written >"{shared}/file"
        echo after >"{other}"
        cat "{other}"
        sleep 1000 &
        printf "no newline"
        kill -9 $$
    """
    options = ["--write", shared, "--env", "WORDS=some  '\"$words", "--env", "KEPT"]
    done = guest(*options, "--", "sh", "-c", script, KEPT="kept", LOST="lost")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert done.stdout == f"some  '\"$words|kept||1|{tmp_path}\nbeforeafter\nno newline"
    assert done.stderr == "to stderr\nby its name\n"
    assert (shared / "file").read_text() == "written\n"
    assert other.read_text() == "before"


def test_all_output_arrives_at_a_slow_reader(start):
    """The command ends long before its output is read, which is more than the pipes hold."""
    with start("--", "seq", "60000") as process:
        assert select.select([process.stdout], [], [], 300)[0]
        time.sleep(12)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "".join(f"{number}\n" for number in range(1, 60001))


def test_too_long(guest):
    done = guest("--timeout", 2, "--", "sh", "-c", "echo begun; sleep 1000")
    assert done.returncode == 124
    assert done.stdout == "begun\n"
    assert "no end after 2 s" in done.stderr


def test_instructions_are_the_clock(guest):
    """Idling takes no time then, so that no machine is too slow for this."""
    done = guest("--clock", "icount", "--timeout", 120, "--", "sh", "-c", "sleep 5000; exit 3")
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopped(start, tmp_path, number):
    """It takes QEMU along, even when it can do nothing any more."""
    with start("--", "sleep", "1000") as process:
        wait_for(lambda: len(marked(tmp_path)) == 2)
        process.send_signal(number)
        process.communicate(timeout=10)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)


def test_does_not_come_up(guest):
    """It is tried again, and then given up."""
    done = guest("--memory", 40, "--", "echo", "begun")
    assert done.returncode == 125
    assert done.stdout == ""
    assert "boot 1 of 3 failed: " in done.stderr
    assert "boot 3 of 3 failed: " in done.stderr


# ---- two guests ----


def test_two(guest):
    """They reach each other's adapter; one panics, and the other has its own exit code."""
    pingpong = "ibv_rc_pingpong -g 1 -n 20"
    listen = f"{pingpong} && echo served; sleep 1; exit 3"
    connect = f"until {pingpong} 10.77.0.1; do sleep 0.1; done; echo c >/proc/sysrq-trigger"
    done = guest("--timeout", 120, "--", "sh", "-c", listen, "---", "sh", "-c", connect)
    assert done.returncode == 3, done.stderr
    lines = done.stdout.splitlines()
    assert "1| served" in lines
    assert {line[:3] for line in lines} == {"1| ", "2| "}
    assert any(line.startswith("2| 20 iters") for line in lines)
    assert "2| run.py: the guest died; its console: " in done.stderr
    assert "sysrq triggered crash" in done.stderr
    assert done.stderr.endswith("run.py: exit codes: 3 125\n")


# ---- no guest ----


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["true"], "unrecognized"),
        ([], "one command or two are needed"),
        (["--", "a", "---", "b", "---", "c"], "one command or two are needed"),
        (["--", "a", "---"], "one command or two are needed"),
        (["--clock", "icount", "--cpus", "2", "--", "a"], "is for one CPU"),
        (["--clock", "icount", "--", "a", "---", "b"], "is for one CPU"),
        (["--write", "none", "--", "a"], "is not a folder"),
        (["--kernel", ".", "--", "a"], "setup.sh makes it"),
    ],
)
def test_usage(guest, args, error):
    done = guest(*args)
    assert done.returncode == 2
    assert error in done.stderr.splitlines()[-1]


def test_setup_again_costs_nothing(kernel, setup):
    """Also when many ask for it at once."""
    begin = time.monotonic()
    processes = [setup() for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert outputs == ["", "", ""]
    assert time.monotonic() - begin < 5
