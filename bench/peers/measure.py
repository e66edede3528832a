# SPDX-License-Identifier: BSD-3-Clause
"""From the peers to what docs/peers.json has of them."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bench.machine import machine
from bench.peers import install, perftest, roster
from bench.peers.child import Child
from bench.peers.reasons import PeerLost
from bench.peers.rounds import Row, Way, calls_for, interleaved
from bench.sizes import GIB, KIB, MIB, fitting, text

STEPS = [("register", 4 * KIB), ("register", 64 * MIB), ("share", 4 * KIB)]
STEPS += [("pack", 4 * KIB), ("unpack", 4 * KIB), ("again", 4 * KIB)]

TRANSFERS = [8, 4 * KIB, 64 * KIB, MIB, 64 * MIB, GIB]

ROUNDS, SECONDS = 60, 0.02
DATA_ROUNDS, DATA_SECONDS = 15, 0.03


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def entry(peer: roster.Peer, child: Child | None, reason: str | None) -> Row:
    """What the page says of a peer, beside its times."""
    row: Row = {"key": peer.key, "name": peer.name, "table": peer.table}
    if child is None:
        return row | {"reason": reason}
    loaded = child.loaded()
    say(f"{peer.table}: {peer.name}: {child.versions} loaded {', '.join(loaded)}")
    row |= {"versions": child.versions, "loaded": loaded, "key_bytes": child.key_bytes}
    return row | {"calls": child.operations}


def start(
    peers: list[roster.Peer], ours: str, stack: ExitStack
) -> tuple[dict[str, Child], dict[str, str]]:
    """(who runs, and why the others do not), by key."""
    started: dict[str, Child] = {}
    lost: dict[str, str] = {}
    for peer in peers:
        say(f"{peer.table}: {peer.name}: installing and starting")
        try:
            started[peer.key] = stack.enter_context(peer.start())
        except PeerLost as error:
            if peer.key == ours:
                raise
            lost[peer.key] = str(error)
            say(f"{peer.table}: {peer.name}: NOT MEASURED: {error}")
    return started, lost


def steps(
    peers: list[roster.Peer], rounds: int, seconds: float = SECONDS
) -> tuple[list[Row], list[Row]]:
    """(a row for each peer, a row for each step of it), of one table."""
    table, rows = peers[0].table, []
    ours = roster.OURS[table]
    with ExitStack() as stack:
        started, lost = start(peers, ours, stack)
        for operation, length in STEPS:
            ways = {
                key: way(child, operation, length)
                for key, child in started.items()
                if operation in child.operations
            }
            say(f"{table}: {operation} of {text(length)}: {', '.join(ways)}")
            step = {"table": table, "operation": operation, "bytes": length}
            for key, row in interleaved(ways, ours, rounds, seconds).items():
                rows.append(step | {"peer": key} | row)
                if "reason" in row:
                    say(f"  {key}: NOT MEASURED: {row['reason']}")
        about = [entry(peer, started.get(peer.key), lost.get(peer.key)) for peer in peers]
    return about, rows


def way(child: Child, operation: str, length: int) -> Way:
    return lambda count: child.ask(operation, length, count)


def ucx_perftest() -> tuple[Row, Callable[[str, int], Way] | None]:
    """(its row, what makes a way of "get" or "put" and a number of bytes, if it could be had)."""
    about: Row = {"key": "perftest", "name": "ucx_perftest", "table": "cma"}
    say("cma: ucx_perftest: installing and starting")
    try:
        folder, env = install.ucx()
        version = roster.ucx_version(folder, {**os.environ, **env})
        about |= {"versions": {"UCX": version}, "loaded": perftest.loaded(folder, env)}
    except PeerLost as error:
        say(f"cma: ucx_perftest: NOT MEASURED: {error}")
        return about | {"reason": str(error)}, None
    say(f"cma: ucx_perftest: UCX {version} loaded {', '.join(about['loaded'])}")

    def make(name: str, length: int) -> Way:
        return lambda count: perftest.run(folder, env, name, length, count)

    return about, make


def transfers(sizes: list[int], rounds: int, theirs: Callable[[str, int], Way] | None) -> list[Row]:
    """get and put over cma; `theirs` is ucx_perftest's."""
    rows: list[Row] = []
    with roster.data(max(sizes)) as child:
        for name in perftest.TESTS:
            for length in sizes:
                say(f"cma: {name} of {text(length)}")
                ways = {key: way(child, f"{name}:{key}", length) for key in ("c", "bare", "python")}
                calls = max(2, calls_for(ways["bare"], DATA_SECONDS))
                if theirs is not None:
                    ways["perftest"] = theirs(name, length)
                counts = dict.fromkeys(ways, calls)
                for key, row in interleaved(ways, "c", rounds, DATA_SECONDS, counts).items():
                    rows.append({"way": name, "bytes": length, "peer": key} | row)
                    if "reason" in row:
                        say(f"  {key}: NOT MEASURED: {row['reason']}")
    return rows


def measure(only: list[str] | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """All that the page says; `only`: of these peers, and of ours."""
    data: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    data_rounds = max(2, round(rounds * DATA_ROUNDS / ROUNDS))
    data["rounds"] = {"steps": rounds, "seconds": SECONDS, "data": data_rounds}
    data |= {"peers": [], "steps": [], "transfers": []}
    for table, ours in roster.OURS.items():
        chosen = [
            peer
            for peer in roster.PEERS
            if peer.table == table and (not only or peer.key in (*only, ours))
        ]
        if len(chosen) > 1:
            about, rows = steps(chosen, rounds)
            data["peers"] += about
            data["steps"] += rows
    if not only or "perftest" in only:
        about, theirs = ucx_perftest()
        data["peers"].append(about)
        data["transfers"] = transfers(fitting(TRANSFERS), data_rounds, theirs)
    return data
