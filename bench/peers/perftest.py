# SPDX-License-Identifier: BSD-3-Clause
"""UCX's own cma, by the ucx_perftest that comes with it: two processes for each round.

`get` with a window of one waits for each get, as a blocking get does.  `put_bw` with a window of
one is the same for puts; `put_lat` is no counterpart, it waits for a put of the other side's.
"""

import contextlib
import csv
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.peers.child import libraries
from bench.peers.harness.serving import WARMUP
from bench.peers.install import BUILD, ROOT
from bench.peers.reasons import PeerLost, last_words

TESTS = {"get": "get", "put": "put_bw"}

PATIENCE = 120  # seconds for one run


def command(folder: Path, way: str, length: int, count: int, port: int) -> list[str]:
    """Of both sides; the client names the server in addition."""
    program = [str(folder / "bin/ucx_perftest"), "-p", str(port), "-d", "memory", "-x", "cma"]
    test = ["-t", TESTS[way], "-D", "zcopy", "-O", "1", "-s", str(length), "-n", str(count)]
    return [*program, *test, "-w", str(min(count, WARMUP)), "-f", "-v"]


def nanoseconds(output: str) -> float:
    """For one operation, over the whole of the run, from the lines of comma separated values."""
    for row in csv.DictReader(output.splitlines()):
        with contextlib.suppress(KeyError, ValueError, TypeError):
            return float(row["overall_lat"]) * 1000
    raise PeerLost(f"ucx_perftest gave no result: {last_words(output)}")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def listens(port: int) -> bool:
    """Connecting to see would be taken for the client."""
    sockets = Path("/proc/net/tcp").read_text().splitlines()
    return any(f":{port:04X} " in line and " 0A " in line for line in sockets)


def on(cpu: int, line: list[str]) -> list[str]:
    return ["taskset", "-c", str(cpu), *line]


@contextlib.contextmanager
def server(line: list[str], env: dict[str, str], port: int) -> Iterator[subprocess.Popen]:
    """Waiting for its client; killed in the end, if it has not ended."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "perftest.log").open("w+") as log:
        cpu = min(os.sched_getaffinity(0))
        process = subprocess.Popen(
            on(cpu, line), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            until = time.monotonic() + 20
            while not listens(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise PeerLost(f"ucx_perftest's server: {last_words(log.read())}")
                time.sleep(0.005)
            yield process
        finally:
            process.kill()
            process.wait()


def environment(env: dict[str, str]) -> dict[str, str]:
    """Pages of 4 KiB, as ours are: UCX would take huge ones."""
    return {**os.environ, **env, "UCX_ALLOC": "mmap"}


def loaded(folder: Path, env: dict[str, str]) -> list[str]:
    """The libraries of a process of it."""
    port = free_port()
    with server(command(folder, "get", 8, 1, port), environment(env), port) as process:
        return libraries(process.pid, ROOT)


def run(folder: Path, env: dict[str, str], way: str, length: int, count: int) -> float:
    """Nanoseconds for one get or put; its start and warm-up are not counted."""
    env, port = environment(env), free_port()
    line = command(folder, way, length, count, port)
    cpu = max(os.sched_getaffinity(0))
    with server(line, env, port) as process:
        try:
            done = subprocess.run(
                on(cpu, [line[0], "127.0.0.1", *line[1:]]),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            raise PeerLost(f"killed: ucx_perftest said nothing for {PATIENCE} s") from None
        if done.returncode:
            raise PeerLost(f"ucx_perftest: {last_words(done.stdout)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        return nanoseconds(done.stdout)
