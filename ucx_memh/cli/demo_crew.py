# SPDX-License-Identifier: BSD-3-Clause
"""The demo's peers: their processes, and what the owner has of them."""

import json
import socket
import subprocess
import sys
from types import TracebackType

import ucx_memh as um
from ucx_memh.cli.demo_link import Link
from ucx_memh.cli.demo_show import Show

__all__ = ["ROLES", "Peer", "Process"]

ROLES = ("reader", "writer", "worker")


class Process:
    """A peer's process; commands come to it by a socket, which is closed here."""

    def __init__(
        self,
        role: str,
        sock: socket.socket,
        resource: um.MdResource,
        config: list[str],
        account: int | None = None,
    ) -> None:
        self.role = role
        task = {"role": role, "resource": str(resource), "config": config, "account": account}
        with sock:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ucx_memh.cli.demo_peer", json.dumps(task)],
                stdin=sock.fileno(),
                stdout=sock.fileno(),
                pass_fds=() if account is None else (account,),
                # Ctrl-C is for who started it: it ends when its socket does.
                start_new_session=True,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            # After a failure it may be streaming writes without end.
            self.process.wait(10 if kind is None else 0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Peer:
    """A process with an endpoint to the owner; keys go through its link."""

    def __init__(self, role: str, md: um.Md, link: Link, host: Link | None = None) -> None:
        self.role = role
        self.endpoint = md.endpoint()
        self.link = link
        self.host = host  # who runs the process, if it is another host

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.link.close()  # the process ends when it has nothing more to read

    def start(self, command: str, **arguments: object) -> None:
        self.link.send({"command": command, **arguments})

    def answer(self) -> dict:
        message = self.link.receive(beside=self.host)
        if "failed" in message:
            raise um.DeviceError(f"the {self.role} failed: {message['failed']}", op="demo")
        return message

    def call(self, command: str, **arguments: object) -> dict:
        self.start(command, **arguments)
        return self.answer()

    def wait_event(self, event: str) -> dict:
        while (message := self.answer()).get("event") != event:
            pass
        return message

    def bulk(self, command: str, title: str, show: Show) -> dict:
        """A command that reports how far it is."""
        self.start(command)
        with show.bar(title, 0) as advance:
            while "progress" in (message := self.answer()):
                advance(message["progress"], message["total"])
        return message

    def connect(self) -> None:
        address = self.call("address")["address"]
        self.endpoint.connect(bytes.fromhex(address))
        self.call("connect", address=self.endpoint.address.hex())

    def reconnect(self) -> None:
        """After a refused access: both ends start anew, and all other keys work again."""
        self.endpoint.reset()
        self.call("reset")
        self.connect()
