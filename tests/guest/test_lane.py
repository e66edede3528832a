# SPDX-License-Identifier: BSD-3-Clause
"""tools/guest: what goes into a guest, what comes out of it, and that nothing is left."""

import select
import signal
import subprocess
import time

import pytest

from _marked import marked, wait_for

pytestmark = [pytest.mark.guest, pytest.mark.source, pytest.mark.timeout(400)]


@pytest.fixture
def start(running, tmp_path):
    with running(tmp_path) as start:
        yield start


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


def test_three_at_once(start):
    """They do not disturb each other, and one processor is busy while another waits."""
    slow = start("--", "seq", "60000")
    too_long = start("--timeout", 4, "--", "sh", "-c", "echo begun; sleep 1000")
    # Idling takes no time there, so that no machine is too slow for this.
    instructions = ["--clock", "icount", "--timeout", 120, "--", "sh", "-c", "sleep 5000; exit 3"]
    instructions = start(*instructions)

    # The command ends long before its output is read, which is more than the pipes hold.
    with slow:
        assert select.select([slow.stdout], [], [], 300)[0]
        time.sleep(12)
        out, err = slow.communicate(timeout=60)
    assert slow.returncode == 0, err
    assert out == "".join(f"{number}\n" for number in range(1, 60001))

    with too_long:
        out, err = too_long.communicate(timeout=120)
    assert too_long.returncode == 124
    assert out == "begun\n"
    assert "no end after 4 s" in err

    with instructions:
        _, err = instructions.communicate(timeout=300)
    assert instructions.returncode == 3, err


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


def test_two(two):
    """Two panics in the end, and One has its own exit code."""
    assert two.returncode == 3, two.stderr
    assert {line[:3] for line in two.stdout.splitlines()} == {"1| ", "2| "}
    assert "2| run.py: the guest died; its console: " in two.stderr
    assert "sysrq triggered crash" in two.stderr
    assert two.stderr.endswith("run.py: exit codes: 3 125\n")


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
