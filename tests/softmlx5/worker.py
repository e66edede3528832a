# SPDX-License-Identifier: BSD-3-Clause
"""Another process to talk to: executes what it is sent, in one namespace that has sm5 in it.

Started as a program by `Worker`; both ends are in this file so that they cannot disagree.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path


class Worker:
    def __init__(self, **env):
        self.proc = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            text=True,
        )
        self.pid = self.proc.pid

    def send(self, code):
        self.proc.stdin.write(json.dumps(code) + "\n")
        self.proc.stdin.flush()

    def answer(self):
        line = self.proc.stdout.readline()
        if not line:
            raise EOFError("the worker has gone")
        ok, value = json.loads(line)
        if not ok:
            raise AssertionError(value)
        return value

    def __call__(self, code):
        """The value of an expression, or None for statements."""
        self.send(code)
        return self.answer()

    def kill(self):
        self.proc.kill()
        self.proc.wait()

    def close(self):
        if self.proc.poll() is None:
            self.proc.stdin.close()
            try:
                self.proc.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
        self.proc.stdout.close()
        if not self.proc.stdin.closed:
            self.proc.stdin.close()
        return self.proc.returncode


def run(code, space):
    try:
        compiled = compile(code, "<worker>", "eval")
    except SyntaxError:
        exec(code, space)
        return None
    return eval(compiled, space)


def plain(value):
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool)) else None


def main():
    sys.path.insert(0, str(Path(__file__).parent))
    import sm5

    space = dict(vars(sm5))
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        try:
            reply = [True, plain(run(json.loads(line), space))]
        except BaseException:
            reply = [False, traceback.format_exc()]
        out.write(json.dumps(reply) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
