# SPDX-License-Identifier: BSD-3-Clause
"""The owner's side of a demo on two hosts: who is let in, and who is turned away.

The peers' host says hello, learns the number of this run, and comes back with it once for each
peer.  That keeps accidents out, not attackers: all of it is plain text.
"""

import errno
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import ucx_memh as um
from ucx_memh.cli.demo_crew import ROLES
from ucx_memh.cli.demo_link import Link, reason

__all__ = ["HELLO", "PATIENCE", "Gate", "Host", "address_text", "hello", "port_address"]

HELLO = "ucx_memh demo"
PROTOCOL = 1
PATIENCE = 10  # seconds for the first words of who has connected


def hello(**more: object) -> dict:
    """What both sides must have in common: keys and commands of one version, words of one order."""
    return {HELLO: PROTOCOL, "version": um.__version__, "byteorder": sys.byteorder, **more}


def port_address(text: str, host: str = "127.0.0.1") -> tuple[str, int]:
    """From "[HOST:]PORT"."""
    before, colon, port = text.rpartition(":")
    before = before[1:-1] if before.startswith("[") and before.endswith("]") else before
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or (colon and not before):
        raise um.InvalidParamError(f"want HOST:PORT, not {text!r}", op="demo")
    return (before if colon else host), int(port)


def address_text(address: tuple) -> str:
    host, port, *_ = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Host:
    """Who runs the peers."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.run = secrets.token_hex(8)

    def end(self, status: int, lines: list[str]) -> None:
        """The verdict: it is that side's, too."""
        self.link.send({"verdict": status, "lines": lines})


class Gate:
    """A listening socket."""

    def __init__(self, address: tuple[str, int], component: str, say: Callable) -> None:
        self.component = component
        self.say = say
        self.new: dict[Link, float] = {}  # who has not said who he is, and until when he must
        self.host: Host | None = None
        self.peers: dict[str, Link] = {}
        self.ready = False  # all is there, and its processes are started
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self.server = socket.create_server(address, family=family)
        except (socket.gaierror, UnicodeError) as error:
            why = getattr(error, "strerror", error)
            raise OSError(f"cannot listen at {address_text(address)}: {why}") from None
        except OSError as error:
            why = os.strerror(error.errno or errno.EIO)
            raise OSError(f"cannot listen at {address_text(address)}: {why}") from None
        self.say(f"listening at {address_text(self.server.getsockname())}")

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.server.close()
        for link in list(self.new):
            self._drop(link)
        self._forget_host()

    @contextmanager
    def admitted(self, seconds: float) -> Iterator[tuple[Host, list[Link]]]:
        """The host and its peers' links; it is told of what goes wrong meanwhile.

        TimedOutError: nobody came within that time.
        """
        deadline = time.monotonic() + seconds
        try:
            while not self.ready:
                self._serve(deadline, seconds)
            self.server.close()
            assert self.host is not None
            self.say(f"{self.host.link.name} runs the peers\n")
            yield self.host, [self.peers[role] for role in ROLES]
        except BaseException as error:
            with suppress(um.MemhError):
                if self.host is not None:
                    self.host.link.send({"failed": reason(error)})
            raise

    def _serve(self, deadline: float, seconds: float) -> None:
        links = [*self.new, *([self.host.link] if self.host else [])]
        until = min([deadline, *self.new.values()])
        timeout = max(until - time.monotonic(), 0)
        waited: list[socket.socket | Link] = [self.server, *links]
        ready, _, _ = select.select(waited, [], [], timeout)
        now = time.monotonic()
        if now >= deadline:
            raise um.TimedOutError(f"no host came to run the peers for {seconds:g} s", op="demo")
        for link in ready:
            if isinstance(link, socket.socket):
                sock, address = link.accept()
                self.new[Link(sock, address_text(address))] = now + PATIENCE
            elif self.host and link is self.host.link:
                self._hear_host()
            else:
                self._hear(link)
        for link in [link for link, until in self.new.items() if until <= now]:
            self._turn_away(link, f"nothing heard for {PATIENCE} s")

    def _hear(self, link: Link) -> None:
        try:
            link.fill()
            message = link.next()
        except um.PeerGoneError:
            self._drop(link)
        except um.DeviceError:
            self._turn_away(link, "this is no peers' host of a demo")
        else:
            if message is not None and (refusal := self._refusal(link, message)):
                self._turn_away(link, refusal)

    def _refusal(self, link: Link, message: dict) -> str:
        """Let him in, or say why not."""
        for key, ours in hello().items():
            if (theirs := message.get(key)) != ours:
                return f"{key} here is {ours}, there {theirs}"
        if "role" in message:
            role = message["role"]
            if self.host is None or message.get("run") != self.host.run:
                return "that is not the number of this run"
            if role not in ROLES or role in self.peers:
                return f"no {role} is wanted"
            self.peers[role] = link
            link.name = f"the {role}"
            link.send({"joined": role})
        else:
            if self.host is not None:
                return f"{self.host.link.name} is the peers' host already"
            if message.get("component") not in (None, self.component):
                return f"the owner's component is {self.component}, not {message['component']}"
            self.host = Host(link)
            link.send(hello(run=self.host.run, component=self.component))
        del self.new[link]
        return ""

    def _hear_host(self) -> None:
        """It has nothing to say yet but that it leaves, or that its peers are all there."""
        assert self.host is not None
        link, why = self.host.link, "it closed the connection"
        with suppress(um.MemhError):
            link.fill()
            message = link.next()
            if message is None:
                return
            # Earlier, our first command could be read along with our consent.
            self.ready = "ready" in message and len(self.peers) == len(ROLES)
            if self.ready:
                return
            why = str(message.get("left", "it broke the protocol"))
        self.say(f"{link.name} left: {why}")
        self._forget_host()

    def _forget_host(self) -> None:
        for link in [*self.peers.values(), *([self.host.link] if self.host else [])]:
            link.close()
        self.host, self.peers = None, {}

    def _turn_away(self, link: Link, why: str) -> None:
        self.say(f"{link.name} is turned away: {why}")
        with suppress(um.MemhError):
            link.send(hello(refused=why))
        self._drop(link)

    def _drop(self, link: Link) -> None:
        del self.new[link]
        link.close()
