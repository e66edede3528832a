# SPDX-License-Identifier: BSD-3-Clause
"""Register a file once, hand three processes a key each, revoke one of them.

The owner reads a file into memory, registers it once and derives a key for each of three peer
processes: a reader (all of it, read only), a writer (a part, read and write) and a worker (another
part, read, write and atomics).  They move data and check it.  Then the writer is cut off in the
middle of a stream of writes; the others go on.  Exit status 1 if anything is not as promised.

With --listen the peers are on another host, where the same command runs with --connect.  Keys and
commands go over TCP then, in plain text: for networks that you trust.
"""

import argparse
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ucx_memh as um
from ucx_memh.cli import add_config, config_of, demo_connect, demo_story
from ucx_memh.cli.demo_crew import ROLES, Peer, Process
from ucx_memh.cli.demo_link import Link
from ucx_memh.cli.demo_listen import Gate, Host, port_address
from ucx_memh.cli.demo_region import Region
from ucx_memh.cli.demo_show import Show

__all__ = ["add_arguments", "run"]

BACKEND = "ib_mlx5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    what = f"component, or component/device (default {BACKEND}; with --connect the owner's)"
    option("--backend", metavar="NAME", help=what)
    option("--file", type=Path, help="file to serve (default: one that it makes)")
    size = "size of the file that it makes (default 256)"
    option("--size", type=int, metavar="MIB", help=size)
    add_config(parser)
    where = parser.add_mutually_exclusive_group()
    listen = "wait for the peers' host there; without a HOST at the loopback address"
    where.add_argument("--listen", metavar="[HOST:]PORT", help=listen)
    connect = "run the peers here, for the owner who listens there"
    where.add_argument("--connect", metavar="HOST:PORT", help=connect)
    wait = "seconds that either of them waits for the other (default 60)"
    option("--wait", type=float, default=60, metavar="S", help=wait)


def run(args: argparse.Namespace) -> int:
    if args.size is not None and args.size < 1:
        raise um.InvalidParamError("--size must be at least 1", op="demo")
    if args.connect is None:
        return _own(args)
    if args.file is not None or args.size is not None:
        raise um.InvalidParamError("--file and --size are for the owner", op="demo")
    return demo_connect.run(args.connect, args.backend, args.config, args.wait)


def _own(args: argparse.Namespace) -> int:
    show = Show()
    with ExitStack() as stack:
        config = config_of(args.config)
        address = port_address(args.listen) if args.listen else None
        md = stack.enter_context(_open(args.backend or BACKEND, config))
        show.intro(md)
        host: Host | None = None
        if address:
            gate = stack.enter_context(Gate(address, md.attr.component, show.say))
            host, links = stack.enter_context(gate.admitted(args.wait))
        else:
            links = [stack.enter_context(_local(role, md, args.config)) for role in ROLES]
        region = stack.enter_context(Region.load(args.file, args.size or 256, show))
        peers = [
            stack.enter_context(Peer(role, md, link, host.link if host else None))
            for role, link in zip(ROLES, links, strict=True)
        ]
        demo_story.tell(md, region, peers, show)
        status = 1 if show.failures else 0
        if host:
            host.end(status, show.verdict())
    print("", *show.verdict(), sep="\n")
    return status


@contextmanager
def _open(backend: str, config: dict) -> Iterator[um.Md]:
    md = um.open_md(backend, **config)
    try:
        yield md
    finally:
        md.close(force=True)


@contextmanager
def _local(role: str, md: um.Md, config: list[str]) -> Iterator[Link]:
    """A peer's process on this host."""
    resource = um.MdResource(md.attr.component, md.attr.md_name, md.attr.software)
    ours, theirs = socket.socketpair()
    with Process(role, theirs, resource, config):
        try:
            yield Link(ours, f"the {role}")
        finally:
            ours.close()  # which ends it
