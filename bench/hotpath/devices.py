# SPDX-License-Identifier: BSD-3-Clause
"""The domains that are measured, each with a base, a derived handle and a known key."""

import ctypes as c
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ucx_memh as um
from ucx_memh.testing import PoisonAllocator, open_fake

PAGE = 4096


@dataclass
class Device:
    """What the ways are called with."""

    name: str
    md: um.Md
    memory: bytearray
    address: int
    base: um.Memh
    win: um.Memh | None  # cma derives nothing
    key: bytes
    rkey: um.Rkey  # keeps the key known
    handle_size: int  # of a handle's allocation, with what the backend keeps in it

    @property
    def packs(self) -> um.Memh:
        """What a peer gets the key of."""
        return self.win or self.base


def open_device(name: str, counting: bool = False) -> um.Md:
    if name == "fake":
        return open_fake()[0]
    if name == "cma" and counting:
        # It looks at the owner each millisecond: in a loop, more often on a slower machine.
        return um.open_md(name, peer_check_interval=3600)
    return um.open_md(name)


def handle_size(md: um.Md, memory: bytearray) -> int:
    """The allocation that a registration makes last is its handle's."""
    with PoisonAllocator() as allocator:
        md.mem_reg(memory).dereg()
        return allocator.sizes[-1]


@contextmanager
def device(name: str, counting: bool = False) -> Iterator[Device]:
    memory = bytearray(PAGE)
    start = (c.c_char * PAGE).from_buffer(memory)
    md = open_device(name, counting)
    try:
        size = handle_size(md, memory)
        base = md.mem_reg(memory)
        win = base.derive() if md.attr.flags & um.MdFlag.REG_DERIVED else None
        key = (win or base).mkey_pack()
        rkey = md.rkey_unpack(key)
        yield Device(name, md, memory, c.addressof(start), base, win, key, rkey, size)
    finally:
        md.close(force=True)
