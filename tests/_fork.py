# SPDX-License-Identifier: BSD-3-Clause
"""Children of this process, made in each way that Python has, and what they do."""

import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import ucx_memh as um
from _sides import Where

# Python 3.12 and later warn of a fork in a process that has threads; softmlx5 has one.
MAY_FORK = "ignore:.*fork.*:DeprecationWarning"


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` returns in a forked child; what it raises there fails the test."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = None
        try:
            os.close(reading)
            answer = True, function()
        except BaseException:
            answer = False, traceback.format_exc()
        finally:
            os.write(writing, pickle.dumps(answer))
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0
    good, value = pickle.loads(data)
    assert good, value
    return value


@contextmanager
def living_child(function: Callable[[Connection], Any]) -> Iterator[Connection]:
    """A forked child that runs function(conn), and our end of the pipe to it.

    What it returns is the last thing to receive; what it raises there fails the test.
    """
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            theirs.send(function(theirs))
        except BaseException:
            theirs.send(AssertionError(traceback.format_exc()))
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        _, status = os.waitpid(pid, 0)
    assert status == 0


def answer_of(conn: Connection, timeout: float = 30) -> Any:
    assert conn.poll(timeout), "nothing from the child"
    value = conn.recv()
    if isinstance(value, BaseException):
        raise value
    return value


def opened_anew(conn: Connection, where: tuple) -> tuple[bytes, bytes]:
    """A child's own domain: reads and writes the parent's memory, and offers its own."""
    with Where(*where).open() as md, md.endpoint() as ep:
        conn.send(ep.address)
        ep.connect(conn.recv())
        key = conn.recv()
        with md.rkey_unpack(key) as rkey:
            into = bytearray(8)
            ep.get(rkey, rkey.address, into)
            ep.put(rkey, rkey.address + 8, b"by-child")
        memory = bytearray(b"children" + bytes(4088))
        with md.mem_reg(memory) as base:
            conn.send((base.address, base.mkey_pack()))
            conn.recv()  # the parent has read and written it
        return bytes(into), bytes(memory[8:16])


def process_opened_anew(conn: Connection, where: tuple) -> None:
    """The same as a multiprocessing.Process's target."""
    try:
        conn.send(opened_anew(conn, where))
    except BaseException as error:
        conn.send(AssertionError(f"{error!r}\n{traceback.format_exc()}"))
        raise


def talk(conn: Connection, md: um.Md, memory: bytearray, key: bytes) -> None:
    """The parent's side of opened_anew: asserts what both see."""
    with md.endpoint() as ep:
        theirs = answer_of(conn)
        conn.send(ep.address)
        ep.connect(theirs)
        conn.send(key)
        address, their_key = answer_of(conn)
        with md.rkey_unpack(their_key) as rkey:
            into = bytearray(8)
            ep.get(rkey, address, into)
            ep.put(rkey, address + 8, b"by-owner")
        conn.send("done")
        assert into == b"children"
        assert answer_of(conn) == (bytes(memory[:8]), b"by-owner")
        assert memory[8:16] == b"by-child"
