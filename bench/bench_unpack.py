# SPDX-License-Identifier: BSD-3-Clause
"""Making a key of the bytes from a peer.  No device is asked."""

import pytest

import ucx_memh as um
from bench.owner import Link, Owner
from bench.sizes import KIB

pytestmark = pytest.mark.benchmark(group="unpack")


def bench_unpack_known(measure, md: um.Md, memory: memoryview) -> None:
    """The same bytes are unpacked already; and close."""
    with md.mem_reg(memory[: 4 * KIB]) as base:
        key = base.mkey_pack()
        with md.rkey_unpack(key):
            measure(md, lambda: md.rkey_unpack(key).close())


def bench_unpack_new(measure, md: um.Md, memory: memoryview) -> None:
    """Nobody has unpacked them, of an owner who is known; and close."""
    with md.mem_reg(memory[: 4 * KIB]) as base, md.mem_reg(memory[: 8 * KIB]) as other:
        key, another = base.mkey_pack(), other.mkey_pack()
        with md.rkey_unpack(another):
            measure(md, lambda: md.rkey_unpack(key).close())


def bench_unpack_of_a_stranger(measure, md: um.Md, owner: Owner, link: Link) -> None:
    """Nor is the owner known, who is another process: cma finds out who it is; and close."""
    link.rkey.close()
    key, _ = owner.ask("grant", md.attr.component)
    measure(md, lambda: md.rkey_unpack(key).close())
