# SPDX-License-Identifier: BSD-3-Clause
"""The other end of conftest.Peer: runs one function and sends back what came of it."""

import ctypes
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Messages:
    """What the function talks through."""

    def __init__(self, conn: Connection) -> None:
        self.recv = conn.recv
        self._conn = conn

    def send(self, message: object) -> None:
        self._conn.send(("message", message))


def main() -> None:
    # Even if the test run itself is killed, no process is left behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    fd, parent = map(int, sys.argv[1:])
    if os.getppid() != parent:
        return
    conn = Connection(fd)
    try:
        path, name, args = conn.recv()
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        answer = "result", getattr(module, name)(Messages(conn), *pickle.loads(args))
    except EOFError:  # the test has ended
        return
    except BaseException:
        answer = "error", traceback.format_exc()
    with suppress(BrokenPipeError):
        conn.send(answer)


if __name__ == "__main__":
    main()
