# SPDX-License-Identifier: BSD-3-Clause
"""Messages between the processes of an example, on one host or on two.

A message is JSON, with bytes and NumPy's arrays in it.  None is unpickled: that would let whoever
connects run what he likes.  Both ends say first which program they are, which keeps accidents out
and not attackers; keys go over it in plain text, so use a network that you trust.
"""

import argparse
import json
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import ucx_memh as um

# What an access to a process that is no more may give.
GONE = (um.PeerGoneError, um.UnreachableError, um.FlushedError, um.StaleKeyError)
PATIENCE = 90  # seconds after which the other end is taken for dead; emulated ones are slow
GREETING = 10  # seconds for the first words of who has connected
WORDS = 1000  # bytes of them, at most
HELLO = ["ucx_memh example", Path(sys.argv[0]).name, um.__version__, sys.byteorder]
Address = tuple[str, int]
# A host that vanished says nothing: the kernel asks after this many seconds, this often.
OPTIONS: tuple[tuple[int, int, int | bytes], ...] = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # each message waits for its answer
)


class Link:
    """One end.  It may be handed to a process that is started."""

    def __init__(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            for option in OPTIONS:
                sock.setsockopt(*option)
        self._conn = Connection(sock.detach())

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._conn.fileno()

    def close(self) -> None:
        self._conn.close()

    def send(self, message: Any) -> None:
        self._conn.send_bytes(json.dumps(message, default=_plain).encode())

    def receive(self, seconds: float | None = PATIENCE, most: int | None = None) -> Any:
        """The next message, in which tuples have become lists.

        EOFError, ConnectionError: the other end is gone; TimeoutError: it says nothing.
        """
        if not self._conn.poll(seconds):
            raise TimeoutError(f"nothing for {seconds} s from another process of ours")
        return json.loads(self._conn.recv_bytes(most), object_hook=_whole)

    def greet(self) -> str:
        """What is wrong with who is at the other end; "": he is of our program."""
        try:
            self.send(HELLO)
            theirs = self.receive(GREETING, WORDS)
        except Exception as error:  # whatever a stranger sends
            return str(error) or type(error).__name__
        return "" if theirs == HELLO else f"here is {HELLO}, there {theirs}"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.str, "shape": value.shape, "hex": value.tobytes().hex()}
    return value.item()  # one of NumPy's numbers


def _whole(value: dict) -> Any:
    if "hex" not in value:
        return value
    data = bytes.fromhex(value["hex"])
    return np.frombuffer(data, value["array"]).reshape(value["shape"]) if "array" in value else data


def pair() -> tuple[Link, Link]:
    """Both ends, for processes of this host."""
    ours, theirs = socket.socketpair()
    return Link(ours), Link(theirs)


def spawn(target: Callable, *args: object) -> BaseProcess:
    """A process that is started, and ends with us."""
    # Spawned: a forked child could not use what we have opened.
    process = get_context("spawn").Process(target=_child, args=(target, *args), daemon=True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has that from us: we end it
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    return process


def _child(target: Callable, *args: object) -> None:
    try:
        target(*args)
    except MemoryError as error:
        raise SystemExit(str(error)) from None
    except (EOFError, ConnectionError, *GONE):
        raise SystemExit(1) from None  # who started us notices, too, and says it


def run(main: Callable[[], int]) -> NoReturn:
    """End with the status of main(), or with one line if others have ended it."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (EOFError, ConnectionError, TimeoutError) as error:
        if isinstance(error, um.MemhError):
            raise
        why = str(error) or "it closed its link"
        raise SystemExit(f"another process of ours is gone: {why}") from None


def listen(address: Address) -> socket.socket:
    """SystemExit, with the reason, if that cannot be."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        raise SystemExit(f"cannot listen at {_text(address)}: {error.strerror}") from None


def accept(server: socket.socket, seconds: float | None = PATIENCE) -> Link:
    """The next who is of our program; all others are turned away."""
    while wait([server], seconds):
        sock, address = server.accept()
        # Or who stops in the middle of a message would keep us for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", GREETING, 0))
        link = Link(sock)
        why = link.greet()
        if not why:
            return link
        print(f"{_text(address)} is turned away: {why}", file=sys.stderr)
        link.close()
    raise TimeoutError(f"nobody came for {seconds} s")


def reach(address: Address) -> Link:
    """A connection to who listens there, or soon will.  SystemExit, with the reason, if not."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            sock = socket.create_connection(address, timeout=GREETING)
        except (ConnectionError, TimeoutError) as error:
            why = error.strerror or "no answer"
        except OSError as error:
            raise SystemExit(f"cannot connect to {_text(address)}: {error.strerror}") from None
        else:
            # A port that nobody listens at may be given to our own end: it would meet itself.
            if sock.getsockname() != sock.getpeername():
                break
            sock.close()
            why = "nobody listens"
        if time.monotonic() > deadline:
            raise SystemExit(f"cannot connect to {_text(address)}: {why}, for {PATIENCE} s")
        time.sleep(0.1)
    sock.settimeout(None)
    link = Link(sock)
    if why := link.greet():
        link.close()
        raise SystemExit(f"{_text(address)} is not who is wanted: {why}")
    return link


def _text(address: tuple) -> str:
    host, port, *_ = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address(text: str) -> Address:
    """From "HOST:PORT", for argparse."""
    host, _colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"want HOST:PORT, not {text!r}")
    return host, int(port)


def add_hosts(parser: argparse.ArgumentParser, what: str) -> None:
    """--listen and --connect: `what` runs on the host that connects."""
    hosts = parser.add_mutually_exclusive_group()
    add = hosts.add_argument
    words = f"{what} run on the host that connects here"
    add("--listen", type=address, metavar="HOST:PORT", help=words)
    words = f"run {what} for who listens there, with his arguments"
    add("--connect", type=address, metavar="HOST:PORT", help=words)
