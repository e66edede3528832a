# SPDX-License-Identifier: BSD-3-Clause
"""ours.c, compiled and ready to be called."""

import ctypes as c
from pathlib import Path

import ucx_memh as um
from bench.bare import BUILD
from bench.hotpath.native import capsule, compile_library
from bench.peers.harness.serving import Loop


class Ours:
    """`ours(function, *args)` is the loop around it."""

    def __init__(self) -> None:
        self.library = c.CDLL(str(compile_library(Path(__file__).with_name("ours.c"), BUILD)))
        self.api = c.c_void_p(capsule("_C_API"))

    def __call__(self, name: str, *args: object) -> Loop:
        function = getattr(self.library, name)
        function.restype = c.c_double

        def loop(count: int) -> float:
            taken = function(*args, c.c_size_t(count))
            if taken < 0:
                raise um.MemhError(f"{name}: {um.Status(int(taken)).name}")
            return taken / count

        return loop
