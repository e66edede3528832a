# SPDX-License-Identifier: BSD-3-Clause
"""tools/guest: what goes into a guest, what comes out of it, and that nothing is left."""

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from _marked import MARK, marked, wait_for

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.guest, pytest.mark.source, pytest.mark.timeout(400)]


@pytest.fixture(scope="session")
def setup():
    def run() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", ROOT / "tools/guest/setup.sh"],
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


@contextmanager
def running(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """What starts run.py; afterwards none of its processes and files is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), MARK: str(tmp_path)}

    def run(*args: object, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, ROOT / "tools/guest/run.py", *map(str, args)],
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
def start(kernel, tmp_path):
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


@pytest.fixture(scope="module")
def two(kernel, tmp_path_factory):
    """The demo from one guest to the other; then one panics, and the other has its own exit code.

    All in one run: it takes half a minute until two guests have started five Pythons.
    """
    demo = [sys.executable, "-m", "ucx_memh", "demo"]
    listen = shlex.join([*demo, "--backend", "ib", "--size", "1", "--listen", "10.77.0.1:7000"])
    connect = shlex.join([*demo, "--connect", "10.77.0.1:7000"])
    one = f"{listen}; echo owner $?; sleep 3; exit 3"
    # A panic takes what is not on its way out yet.
    other = f"{connect}; echo peers $?; sleep 1; echo c >/proc/sysrq-trigger"
    with running(tmp_path_factory.mktemp("two")) as start:
        options = ["--timeout", 240, "--env", "PYTHONDONTWRITEBYTECODE=1"]
        with start(*options, "--", "sh", "-c", one, "---", "sh", "-c", other) as process:
            out, err = process.communicate(timeout=390)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_two(two):
    assert two.returncode == 3, two.stderr
    assert {line[:3] for line in two.stdout.splitlines()} == {"1| ", "2| "}
    assert "2| run.py: the guest died; its console: " in two.stderr
    assert "sysrq triggered crash" in two.stderr
    assert two.stderr.endswith("run.py: exit codes: 3 125\n")


def test_demo_across_two_hosts(two):
    """Keys by TCP, accesses by the kernel's RDMA; each side has its account, and one verdict."""
    owner, peers = (
        [line[3:] for line in two.stdout.splitlines() if line.startswith(number)]
        for number in ("1| ", "2| ")
    )
    assert owner[-1] == "owner 0", two.stdout + two.stderr
    assert peers[-1] == "peers 0"
    good, _, all_of_them, *_ = owner[-2].split()
    assert int(good) == int(all_of_them) > 20
    assert peers[-2] == owner[-2]
    assert owner[0].endswith(": ib/rxe0")

    def one(lines, start):
        (line,) = (line for line in lines if line.startswith(start))
        return line

    greeting = one(peers, "ucx_memh ")  # not the first line if the owner was later
    assert greeting.endswith(": ib/rxe0, peers of the owner at 10.77.0.1:7000")
    assert one(owner, "revoke the writer, while it streams").endswith("1 DEALLOC_MW")
    assert one(peers, "writer  write number ").endswith("refused by the device, REMOTE_ACCESS")
    # rxe does not look at a window's range: the library does, and the demo says so.
    assert "not by the device" in one(owner, "range ")
    assert "refused by its own library: RANGE" in one(owner, "writer reads outside its part")
    around = "writer reads outside, around its library"
    assert one(owner, around).endswith("let through by the device")


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
