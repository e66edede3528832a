# SPDX-License-Identifier: BSD-3-Clause
"""The tests' own helper: what fails in a peer fails the test, and no peer outlives it."""

import os
import signal

import pytest


def echo(conn, word):
    conn.send((word, os.getpid()))
    return conn.recv() * 2


def boom(conn):
    raise KeyError("boom in the peer")


def ends(conn):
    os._exit(7)


def waits(conn):
    conn.recv()


def test_messages_and_result(peer):
    other = peer(echo, "hello")
    assert other.recv() == ("hello", other.pid)
    assert other.pid != os.getpid()
    other.send(21)
    assert other.result() == 42
    assert other.process.returncode == 0


def test_an_exception_comes_here(peer):
    with pytest.raises(AssertionError, match="boom in the peer"):
        peer(boom).result()


def test_a_silent_end_is_an_error(peer):
    with pytest.raises(AssertionError, match="ended with status 7"):
        peer(ends).result()


def test_a_peer_that_says_nothing_is_an_error(peer):
    with pytest.raises(AssertionError, match=r"within 0\.05 s"):
        peer(waits).recv(timeout=0.05)


def test_killed_even_when_stopped(peer):
    other = peer(waits)
    other.signal(signal.SIGSTOP)
    other.close()
    assert other.process.returncode == -signal.SIGKILL
