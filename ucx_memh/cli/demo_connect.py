# SPDX-License-Identifier: BSD-3-Clause
"""The other side of a demo on two hosts: runs the peers, and ends with the owner's verdict."""

import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import ucx_memh as um
from ucx_memh.cli import config_of
from ucx_memh.cli.demo_crew import ROLES, Process
from ucx_memh.cli.demo_link import Link, reason
from ucx_memh.cli.demo_listen import HELLO, PATIENCE, address_text, hello, port_address
from ucx_memh.cli.demo_show import Show

__all__ = ["run"]

# What may pass when the owner starts later than we do.
PASSING = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ETIMEDOUT)


def run(where: str, backend: str | None, settings: list[str], wait: float) -> int:
    """Run the peers here for the owner at `where`; his verdict."""
    if ":" not in where:
        raise um.InvalidParamError(f"--connect wants HOST:PORT, not {where!r}", op="demo")
    address = port_address(where)
    config = config_of(settings)
    show = Show()
    with ExitStack() as stack:
        owner = _reach(address, wait, show.say)
        stack.callback(owner.close)
        account = os.dup(1)  # the peers' own standard output goes to the owner
        stack.callback(os.close, account)
        component = backend and backend.partition("/")[0]
        try:
            welcome = _greet(owner, component=component)
            resource = _device(backend or welcome["component"], config)
            show.say(f"ucx_memh {um.__version__}: {resource}, peers of the owner at {owner.name}")
            for role in ROLES:
                link = _reach(address, wait, show.say)
                _greet(link, run=welcome["run"], role=role)
                stack.enter_context(Process(role, link.sock, resource, settings, account))
            owner.send({"ready": True})
            message = owner.receive(None)
        except BaseException as error:
            with suppress(um.MemhError):
                owner.send({"left": reason(error)})
            raise
        if "verdict" not in message:
            raise um.DeviceError(f"the owner failed: {message.get('failed')}", op="demo")
    print("\nThe owner says:", *message["lines"], sep="\n")
    return int(message["verdict"])


def _reach(address: tuple[str, int], seconds: float, say: Callable) -> Link:
    """A connection, as soon as somebody listens."""
    name = address_text(address)
    deadline = time.monotonic() + seconds
    told = False
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            sock = socket.create_connection(address, timeout=min(left, PATIENCE))
        except TimeoutError:
            why = "no answer"
        except (socket.gaierror, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise OSError(f"cannot connect to {name}: {why}") from None
        except OSError as error:
            why = os.strerror(error.errno or errno.EIO)
            if error.errno not in PASSING:
                raise OSError(f"cannot connect to {name}: {why}") from None
        else:
            # A port that nobody listens at may be given to our own end: it would meet itself.
            if sock.getsockname() != sock.getpeername():
                sock.settimeout(None)
                return Link(sock, name)
            sock.close()
            why = os.strerror(errno.ECONNREFUSED)
        if not told:
            told = True
            say(f"nobody listens at {name} yet: {why}")
        if time.monotonic() >= deadline:
            raise OSError(f"cannot connect to {name}: {why}, for {seconds:g} s")
        time.sleep(0.1)


def _greet(link: Link, **words: object) -> dict:
    """Say who we are; the answer.  UnreachableError: we are not who is wanted."""
    link.send(hello(**words))
    answer = link.receive(PATIENCE)
    if HELLO not in answer and "joined" not in answer:
        raise um.DeviceError(f"{link.name} is no owner of a demo", op="demo")
    if "refused" in answer:
        raise um.UnreachableError(f"{link.name} turns us away: {answer['refused']}", op="demo")
    return answer


def _device(spec: str, config: dict) -> um.MdResource:
    """Open it here once: what is wrong is said by one process instead of three."""
    with um.open_md(spec, **config) as md:
        return um.MdResource(md.attr.component, md.attr.md_name, md.attr.software)
