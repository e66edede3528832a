# SPDX-License-Identifier: BSD-3-Clause
"""examples/link.py: what is sent arrives, and who does not belong is turned away."""

import importlib.util
import pickle
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.source


def module(root, greeting):
    """examples/link.py, with so many seconds for the first words."""
    spec = importlib.util.spec_from_file_location("link", root / "examples/link.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PATIENCE, module.GREETING = 1, greeting
    return module


@pytest.fixture
def link(root):
    return module(root, 1)


@pytest.fixture
def other(root):
    """The same in another process, as it were."""
    return module(root, 60)


@pytest.fixture
def server(link):
    with link.listen(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def call(link, other, server):
    """`call()`: both ends of a connection by TCP."""

    def call():
        with ThreadPoolExecutor() as pool:
            theirs = pool.submit(other.reach, server.getsockname())
            return link.accept(server), theirs.result()

    return call


def test_what_is_sent_arrives(link, call):
    message = {"bytes": bytes(range(256)), "text": "\u2620", "list": [1, 2.5, None, True, b""]}
    arrays = [np.arange(6).reshape(2, 3), np.array([np.nan, -0.0]), np.empty((0, 4), np.int8)]
    for ours, theirs in (link.pair(), call()):
        with ours, theirs:
            ours.send({**message, "numbers": (np.int64(-1), np.bool_(True)), "big": 2**64 - 1})
            assert theirs.receive() == {**message, "numbers": [-1, True], "big": 2**64 - 1}
            theirs.send(arrays)
            for sent, came in zip(arrays, ours.receive(), strict=True):
                assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
                assert came.tobytes() == sent.tobytes()
            with ThreadPoolExecutor() as pool:  # more than a socket holds
                pool.submit(theirs.send, b"x" * 1_000_000)
                assert ours.receive() == b"x" * 1_000_000
            with pytest.raises(TimeoutError, match="nothing for 0 s"):
                ours.receive(0)
            theirs.close()
            with pytest.raises(EOFError):
                ours.receive()


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def frame(data):
    return len(data).to_bytes(4, "big") + data


def test_strangers_are_turned_away_and_nothing_is_unpickled(link, other, server, capsys, tmp_path):
    touched = tmp_path / "touched"
    words = [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(pickle.dumps(Malice(touched))),
        frame(b"[" * 900),
        frame(b'{"hex": 5}'),
        frame(b'["ucx_memh example", "another.py"]'),
        b"\xff\xff\xff\xff" + bytes(8),
        frame(b"[" * 1001),
        b"\0\0\0\x09half",  # and then nothing
        b"",
    ]
    strangers = []
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(link.accept, server, 60)
        for each in words:
            strangers.append(socket.create_connection(server.getsockname()))
            strangers[-1].sendall(each)
        theirs = pool.submit(other.reach, server.getsockname())
        with accepted.result() as ours, theirs.result() as theirs:
            ours.send("welcome")
            assert theirs.receive() == "welcome"
    for stranger in strangers:
        stranger.close()
    assert not touched.exists()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(words)
    assert all(re.match(r"127\.0\.0\.1:\d+ is turned away: .", line) for line in said)


def test_another_program_is_told(link, other, server, capsys):
    other.HELLO = ["somebody else"]
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(link.accept, server, 2)
        with pytest.raises(SystemExit, match=r"not who is wanted: here is \['somebody else'\]"):
            other.reach(server.getsockname())
        with pytest.raises(TimeoutError, match="nobody came for 2 s"):
            accepted.result()
    assert "there ['somebody else']" in capsys.readouterr().err


def test_nobody_there(link, port):
    with pytest.raises(SystemExit, match=rf"cannot connect to 127\.0\.0\.1:{port}: .*, for 1 s"):
        link.reach(("127.0.0.1", port))
    with pytest.raises(SystemExit, match=r"cannot connect to no\.such\.host\.invalid:1: "):
        link.reach(("no.such.host.invalid", 1))
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(
            SystemExit, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already"
        ):
            link.listen(("127.0.0.1", port))


def test_addresses(link):
    assert link.address("host:7000") == ("host", 7000)
    assert link.address("[::1]:7000") == ("::1", 7000)
