# SPDX-License-Identifier: BSD-3-Clause
"""ucx_memh from Python, component cma: it asks no device, as no peer here does."""

import sys

import ucx_memh as um
from bench.peers.harness import serving

md = um.open_md("cma")
memory = memoryview(serving.memory())
key = md.mem_reg(memory[:1]).mkey_pack()
known = md.rkey_unpack(key)  # so that the owner is known


def register(length: int) -> serving.Loop:
    return serving.timed("reg(part).dereg()", reg=md.mem_reg, part=memory[:length])


def share(length: int) -> serving.Loop:
    statement = "memh = reg(part); memh.mkey_pack(); memh.dereg()"
    return serving.timed(statement, reg=md.mem_reg, part=memory[:length])


def pack(length: int) -> serving.Loop:
    return serving.timed("pack()", pack=md.mem_reg(memory[:length]).mkey_pack)


def unpack(length: int) -> serving.Loop:
    key = md.mem_reg(memory[:length]).mkey_pack()
    return serving.timed("unpack(key).close()", unpack=md.rkey_unpack, key=key)


def again(length: int) -> serving.Loop:
    key = md.mem_reg(memory[:length]).mkey_pack()
    return serving.timed(
        "unpack(key).close()", unpack=md.rkey_unpack, key=key, held=md.rkey_unpack(key)
    )


if __name__ == "__main__":
    operations = {
        "register": ("`mem_reg` and `dereg`", register),
        "share": ("`mem_reg`, `mkey_pack` and `dereg`", share),
        "pack": ("`mkey_pack`", pack),
        "unpack": ("`rkey_unpack` of bytes that nobody has open, and `close`", unpack),
        "again": ("the same of bytes that are open already", again),
    }
    about = {"ucx_memh": um.__version__, "Python": sys.version.partition(" ")[0]}
    serving.serve(operations, about, len(key))
