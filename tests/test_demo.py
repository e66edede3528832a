# SPDX-License-Identifier: BSD-3-Clause
"""The demo, as a person runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress

import pytest

import ucx_memh as um
from _marked import MARK, marked, wait_for
from _rawqp import software_library

SMALL = ("--size", "4")


@pytest.fixture
def demo(python):
    def run(*args, env=None, **options):
        env = {**os.environ, **(env or {})}
        return python("-m", "ucx_memh", "demo", *args, env=env, **options)

    return run


def verdict(done):
    good, _, rest = done.stdout.splitlines()[-1].partition(" of ")
    return int(good), int(rest.split()[0])


def row(done, title):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(title)]
    return line


def test_cuts_one_peer_off(demo):
    done = demo(*SMALL)
    good, all_of_them = verdict(done)
    assert good == all_of_them > 20
    assert done.stderr == ""
    assert "made of SOFTWARE" in done.stdout
    assert row(done, "register, once").endswith("1 REG_MR                   grows with size")
    assert "no command" in row(done, "derive 3 handles")
    assert "4 CREATE_MKEY, 4 BIND_MW" in row(done, "pack their keys (first time)")
    assert "no command" in row(done, "pack them again")
    assert row(done, "revoke the writer, while it streams writes").endswith("1 LOCAL_INV")
    assert "refused by the device: REMOTE_ACCESS" in row(done, "writer's write number")
    assert "refused by its own library: REVOKED" in row(done, "writer tries again")


def test_cma_shows_what_it_refuses(demo):
    done = demo(*SMALL, "--backend", "cma")
    good, all_of_them = verdict(done)
    assert good == all_of_them > 8
    assert "SOFTWARE" not in done.stdout
    assert "UNSUPPORTED" in row(done, "derive a key for each peer")
    assert "UNSUPPORTED" in row(done, "deregister, promising that no key works")


@pytest.mark.parametrize("checks", [True, False])
def test_ib_shows_who_keeps_a_window_to_its_range(demo, checks):
    """Without the self-check `ib` does not promise that the device does."""
    library = f"library={software_library()}"
    settings = ("--config", library, "--config", f"self_check={checks}")
    done = demo(*SMALL, "--backend", "ib", *settings)
    good, all_of_them = verdict(done)
    assert good == all_of_them > 20
    assert "4 ALLOC_MW, 4 BIND_MW" in row(done, "pack their keys (first time)")
    assert row(done, "revoke the writer, while it streams writes").endswith("1 DEALLOC_MW")
    keeper = "kept by the device" if checks else "kept by the peers' own library"
    assert keeper in row(done, "range ")
    assert "refused by its own library: RANGE" in row(done, "writer reads outside its part")
    title = "  checked: writer reads outside, around its library: "
    promise = "REMOTE_ACCESS" if checks else "`enforcement` promises nothing there"
    assert row(done, title) == title + promise


@pytest.mark.parametrize("size", [0, 1, 4097, 1_000_003])
@pytest.mark.parametrize("backend", ["ib_mlx5", "cma"])
def test_files_of_any_size(demo, tmp_path, size, backend):
    path = tmp_path / "served"
    path.write_bytes(os.urandom(size))
    content = path.read_bytes()
    done = demo("--file", str(path), "--backend", backend)
    good, all_of_them = verdict(done)
    assert good == all_of_them
    assert f"file served: {size} bytes" in done.stdout
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("--file", "/does/not/exist"), 1, "No such file"),
        (("--backend", "nix"), 2, "no component 'nix'"),
        (("--size", "0"), 2, "--size must be at least 1"),
        (("--config", "library"), 2, "--config wants KEY=VALUE"),
        (("--config", "colour=3"), 2, "unknown configuration key 'colour'"),
        (("--listen", "here"), 2, "want HOST:PORT, not 'here'"),
        (("--listen", ":7000"), 2, "want HOST:PORT, not ':7000'"),
        (("--listen", "70000"), 2, "want HOST:PORT, not '70000'"),
        (("--listen", "192.0.2.1:7000"), 1, "cannot listen at 192.0.2.1:7000: "),
        (("--listen", "0", "--wait", "0.2"), 1, "no host came to run the peers for 0.2 s"),
        (("--connect", "7000"), 2, "--connect wants HOST:PORT"),
        (("--connect", "a:7000", "--size", "4"), 2, "--file and --size are for the owner"),
        (("--connect", "no.such.invalid:7000"), 1, "cannot connect to no.such.invalid:7000: "),
    ],
)
def test_mistakes_are_one_line(demo, args, status, says):
    done = demo(*args, check=False)
    assert done.returncode == status
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_broken_promise_is_told(demo):
    """A device that cannot destroy the key: the demo does not say that all is well."""
    env = {"SOFTMLX5_CONF": "fault=destroy_mkey:status=0x0b,syndrome=0x1234"}
    done = demo(*SMALL, "--config", "umr=off", env=env, check=False)
    assert done.returncode == 1
    assert "DESTROY_MKEY of key" in done.stderr


# ---- on two hosts, which are one here ----


class Side:
    """The owner or the peers' host at work."""

    def __init__(self, mark, *args):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ucx_memh", "demo", *args],
            env={**os.environ, MARK: str(mark)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out = ""

    def read_to(self, text):
        """Its output up to the line that has that text, which is the answer."""
        for line in self.process.stdout:
            self.out += line
            if text in line:
                return line
        raise AssertionError(self.out + self.process.stderr.read())

    def end(self, status=0):
        """Its errors, when it has ended with that status; `out` is all of its output."""
        rest, errors = self.process.communicate(timeout=60)
        self.out += rest
        assert self.process.returncode == status, self.out + errors
        return errors


@pytest.fixture
def side(tmp_path):
    """What starts one; in the end nothing of it may be left, nor its peers."""
    sides = []

    def start(*args):
        sides.append(Side(tmp_path, *args))
        return sides[-1]

    yield start
    with suppress(AssertionError):
        wait_for(lambda: not marked(tmp_path), 5)
    left = marked(tmp_path)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for each in sides:
        each.process.communicate()
    assert left == []


@pytest.fixture
def owner(side):
    """One that listens, and where."""
    started = side(*SMALL, "--listen", "0")
    return started, started.read_to("listening at").split()[-1]


@pytest.fixture
def held(side, owner, tmp_path):
    """Both, and the peers, who are stopped before they did anything: reader, writer, worker."""
    owning, where = owner
    hosting = side("--connect", where)
    owning.read_to("runs the peers")
    peers = sorted(set(marked(tmp_path)) - {owning.process.pid, hosting.process.pid})
    assert len(peers) == 3
    for pid in peers:
        os.kill(pid, signal.SIGSTOP)
    yield owning, hosting, peers
    for pid in peers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.mark.parametrize("backend", ["ib_mlx5", "cma"])
def test_two_hosts(side, backend):
    """Whichever starts first; both have an account, and the same verdict."""
    where = f"127.0.0.1:{free_port()}"
    peers = side("--connect", where)
    peers.read_to("nobody listens")
    owner = side(*SMALL, "--backend", backend, "--listen", where.removeprefix("127.0.0.1:"))
    assert [owner.end(), peers.end()] == ["", ""]
    good, _, all_of_them, *_ = owner.out.splitlines()[-1].split()
    assert int(good) == int(all_of_them) > 8
    assert peers.out.splitlines()[-1] == owner.out.splitlines()[-1]
    assert f"peers of the owner at {where}" in peers.out
    assert "reader  read all of it: 4.0 MiB in " in peers.out
    if backend == "ib_mlx5":
        assert ": refused by the device, REMOTE_ACCESS" in peers.out
    else:
        assert "worker  tried a bump: refused by its own library, UNSUPPORTED" in peers.out


def test_strangers_are_turned_away(side, owner):
    """And the one who is waited for is still let in."""
    owner, where = owner
    host, _, port = where.partition(":")
    greeting = {"ucx_memh demo": 1, "version": um.__version__, "byteorder": sys.byteorder}
    with ExitStack() as stack:

        def visit(words):
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            sock.sendall(words if isinstance(words, bytes) else json.dumps(words).encode() + b"\n")
            return sock

        def answer(words):
            with visit(words).makefile() as file:
                return json.loads(file.readline())

        visit(b"")  # says nothing, and holds up nobody
        assert answer(b"GET / HTTP/1.0\r\n\r\n")["refused"] == "this is no peers' host of a demo"
        assert answer(b"x" * 70_000)["refused"] == "this is no peers' host of a demo"
        assert answer(b"[1]\n")["refused"] == "this is no peers' host of a demo"
        assert answer({})["refused"] == "ucx_memh demo here is 1, there None"
        other = f"version here is {um.__version__}, there 0.0.9"
        assert answer({**greeting, "version": "0.0.9"})["refused"] == other
        other = "the owner's component is ib_mlx5, not cma"
        assert answer({**greeting, "component": "cma"})["refused"] == other
        welcome = answer(greeting)
        assert welcome["component"] == "ib_mlx5"
        assert "is the peers' host already" in answer(greeting)["refused"]
        other = "that is not the number of this run"
        assert answer({**greeting, "run": "0", "role": "reader"})["refused"] == other
        joining = {**greeting, "run": welcome["run"], "role": "reader"}
        assert answer(joining) == {"joined": "reader"}
        assert answer(joining)["refused"] == "no reader is wanted"
        assert answer({**joining, "role": "king"})["refused"] == "no king is wanted"
    owner.read_to("left: it closed the connection")  # who was the host
    there = side("--connect", where, "--config", "device=hardware")
    assert "NO_DEVICE" in there.end(1)
    owner.read_to("left: ib_mlx5: NO_DEVICE")
    assert "the owner's component is ib_mlx5, not cma" in side(
        "--connect", where, "--backend", "cma"
    ).end(1)
    there = side("--connect", where)
    assert [owner.end(), there.end()] == ["", ""]
    assert owner.out.count(" is turned away: ") == 11


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak this protocol: 'SSH-2.0-OpenSSH_9.2"),
        (b"{}\n", "is no owner of a demo"),
        (b'{"ucx_memh demo": 2, "refused": "it is new"}\n', "turns us away: it is new"),
        (b"", "ended or closed the connection"),
    ],
)
def test_another_listens_there(side, words, says):
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers = side("--connect", f"127.0.0.1:{server.getsockname()[1]}")
        sock, _ = server.accept()
        with sock:
            sock.recv(1000)
            sock.sendall(words)
        error = peers.end(1)
    assert says in error
    assert len(error.splitlines()) == 1


def test_nobody_listens_there(side):
    where = f"127.0.0.1:{free_port()}"
    error = side("--connect", where, "--wait", "0.3").end(1)
    assert error == f"ucx_memh: cannot connect to {where}: Connection refused, for 0.3 s\n"


def test_the_port_is_in_use(side):
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        error = side(*SMALL, "--listen", where).end(1)
    assert error == f"ucx_memh: cannot listen at {where}: Address already in use\n"


def test_the_owners_verdict_is_that_sides_too(side):
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        peers = side("--connect", f"127.0.0.1:{server.getsockname()[1]}")

        def visited(**answer):
            sock = stack.enter_context(closing(server.accept()[0]))
            file = stack.enter_context(sock.makefile("rw"))
            message = json.loads(file.readline())
            print(json.dumps({**message, **answer}), file=file, flush=True)
            return file

        control = visited(run="1", component="ib_mlx5")
        for _ in range(3):
            visited(joined="whoever")
        assert json.loads(control.readline()) == {"ready": True}
        print(json.dumps({"verdict": 7, "lines": ["it is bad"]}), file=control, flush=True)
    assert peers.end(7) == ""
    assert peers.out.endswith("The owner says:\nit is bad\n")


# ---- one of them ends in the middle ----


@pytest.mark.parametrize(
    ("number", "status", "why"),
    [
        (signal.SIGKILL, -9, "ended or closed the connection"),
        (signal.SIGINT, 130, "left: it was interrupted"),
    ],
)
def test_the_peers_host_ends(held, number, status, why):
    owner, peers, processes = held
    peers.process.send_signal(number)
    assert why in owner.end(1)
    for pid in processes if number == signal.SIGKILL else ():
        os.kill(pid, signal.SIGCONT)  # they find out by themselves then
    peers.end(status)


@pytest.mark.parametrize(
    ("number", "status", "why"),
    [
        (signal.SIGKILL, -9, "ended or closed the connection"),
        (signal.SIGINT, 130, "the owner failed: it was interrupted"),
    ],
)
def test_the_owner_ends(held, number, status, why):
    owner, peers, _ = held
    owner.process.send_signal(number)
    assert why in peers.end(1)
    owner.end(status)


def test_a_peer_ends(held):
    owner, peers, (reader, writer, worker) = held
    os.kill(writer, signal.SIGKILL)
    for pid in (reader, worker):
        os.kill(pid, signal.SIGCONT)
    assert "PEER_GONE: the writer ended" in owner.end(1)
    assert "the owner failed: demo: PEER_GONE: the writer ended" in peers.end(1)
