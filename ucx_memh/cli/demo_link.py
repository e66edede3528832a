# SPDX-License-Identifier: BSD-3-Clause
"""Lines of JSON over a stream socket: between the demo's processes, on one host or on two."""

import json
import select
import socket
import time

import ucx_memh as um

__all__ = ["Link", "reason"]

LINE = 1 << 16  # bytes of a line at most: a stranger's stream must not fill our memory
ANSWER = 120  # seconds for the next message; emulated peers are slow
# A host that vanished says nothing: the kernel asks after this many seconds, this often.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)


def reason(error: BaseException) -> str:
    """What ends us, for the other side."""
    return "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error)


class Link:
    """A socket that it owns; `name` is who is at the other end, for people."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock = sock
        self.name = name
        self._rest = b""
        if sock.family != socket.AF_UNIX:
            for level, option, value in KEEPALIVE:
                sock.setsockopt(level, option, value)
            # Questions and answers are small, and each waits for the other.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, message: dict) -> None:
        """PeerGoneError: nobody is there to read it."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._gone(error) from error

    def receive(self, seconds: float | None = ANSWER, beside: "Link | None" = None) -> dict:
        """The next message.

        PeerGoneError: the other end was closed, or `beside` was, or had something to say;
        TimedOutError: nothing for so many seconds; DeviceError: this is not our protocol.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        links = [self] if beside is None else [beside, self]
        while (message := self.next()) is None:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            ready, _, _ = select.select(links, [], [], left)
            if not ready:
                raise um.TimedOutError(f"nothing from {self.name} for {seconds:g} s", op="demo")
            if beside in ready:
                beside.fill()
                if (last := beside.next()) is not None:
                    why = str(last.get("left", "it broke the protocol"))
                    raise um.PeerGoneError(f"{beside.name} left: {why}", op="demo")
            if self in ready:
                self.fill()
        return message

    def fill(self) -> None:
        """Take what has arrived; waits if nothing has."""
        try:
            data = self.sock.recv(1 << 16)
        except OSError as error:
            raise self._gone(error) from error
        if not data:
            raise self._gone()
        self._rest += data

    def next(self) -> dict | None:
        """A message that has arrived, if one has as a whole."""
        line, whole, rest = self._rest.partition(b"\n")
        if not whole and len(line) <= LINE:
            return None
        self._rest = rest
        try:
            message = json.loads(line[:LINE])
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            start = line[:20].decode("ascii", "backslashreplace")
            raise um.DeviceError(f"{self.name} does not speak this protocol: {start!r}", op="demo")
        return message

    def _gone(self, error: OSError | None = None) -> um.PeerGoneError:
        why = f": {error.strerror}" if error else ""
        return um.PeerGoneError(f"{self.name} ended or closed the connection{why}", op="demo")
