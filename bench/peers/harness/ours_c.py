# SPDX-License-Identifier: BSD-3-Clause
"""ucx_memh by its C API: Python only starts the loops in C."""

import ctypes as c

import ucx_memh as um
from bench.bare import BUILD
from bench.hotpath.native import Loops, pointer
from bench.peers.harness import serving

md = um.open_md("cma")
block = serving.memory()
memory, where = memoryview(block), c.c_void_p(serving.address(block))
first = md.mem_reg(memory[:1]).mkey_pack()
known = md.rkey_unpack(first)  # so that the owner is known
rights = c.c_uint64(um.MemFlag.ACCESS_RMA)
loops = Loops(BUILD)
kept: list[um.Memh | um.Rkey] = []


def base(length: int) -> um.Memh:
    made = md.mem_reg(memory[:length])
    kept.append(made)
    return made


def loop(name: str, *args: object) -> serving.Loop:
    return lambda count: loops(name, *args, count=count)


def register(length: int) -> serving.Loop:
    return loop("reg", pointer(md), where, c.c_size_t(length), rights)


def share(length: int) -> serving.Loop:
    return loop("share", pointer(md), where, c.c_size_t(length), rights)


def pack(length: int) -> serving.Loop:
    return loop("pack", pointer(base(length)), c.c_uint32(0))


def unpack(length: int) -> serving.Loop:
    return unpacking(base(length).mkey_pack())


def again(length: int) -> serving.Loop:
    key = base(length).mkey_pack()
    kept.append(md.rkey_unpack(key))
    return unpacking(key)


def unpacking(key: bytes) -> serving.Loop:
    return loop("unpack", pointer(md), c.c_char_p(key), c.c_size_t(len(key)))


if __name__ == "__main__":
    operations = {
        "register": ("`mem_reg`, `mem_dereg` and `memh_release`", register),
        "share": ("`mem_reg`, `mkey_pack`, `mem_dereg` and `memh_release`", share),
        "pack": ("`mkey_pack`", pack),
        "unpack": ("`rkey_unpack` of bytes that nobody has open, and `rkey_release`", unpack),
        "again": ("the same of bytes that are open already", again),
    }
    serving.serve(operations, {"ucx_memh": um.__version__}, len(first))
