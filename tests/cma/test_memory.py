# SPDX-License-Identifier: BSD-3-Clause
"""What can be registered: by address only what can be read there, or what one vouches for."""

import ctypes
import errno
import mmap

import pytest

import ucx_memh as um
from _cma import PAGE, Pages, pattern
from ucx_memh import MemType

NONE, READ = 0, 1


def test_what_somebody_vouches_for_is_not_looked_at(md, ep, calls):
    """And a lie is found by the transfer."""
    md.mem_reg(bytearray(8)).dereg()
    md.mem_reg_many([bytearray(8)]).dereg()
    pages = Pages(1)
    pages.protect(0, NONE)
    for base in (
        md.mem_reg(address=pages.address, length=PAGE, owner=pages, mem_type=MemType.HOST),
        *md.mem_reg_many(
            addresses=[pages.address], lengths=PAGE, owner=pages, mem_type=MemType.HOST
        ),
    ):
        assert calls() == 0
        with md.rkey_unpack(base.mkey_pack()) as rkey, pytest.raises(um.DeviceError) as raised:
            ep.get(rkey, rkey.address, bytearray(8))
        assert raised.value.status is um.Status.INVALID_ADDR
        base.dereg()
        calls()
    pages.close()


def test_one_call_for_an_address(md, ep, calls):
    pages = Pages(2)
    pages.view[: 2 * PAGE] = pattern(2 * PAGE)
    for length in (1, 2, PAGE, PAGE + 1, 2 * PAGE):
        with md.mem_reg(address=pages.address, length=length, owner=pages) as base:
            assert calls() == 1
            into = bytearray(length)
            with md.rkey_unpack(base.mkey_pack()) as rkey:
                ep.get(rkey, rkey.address, into)
            assert into == pattern(length)
            calls()
    addresses = [pages.address + 64 * i for i in range(10)]
    md.mem_reg_many(addresses=addresses, lengths=64, owner=pages).dereg()
    assert calls() == 10
    md.mem_reg(address=0, length=0).dereg()
    assert calls() == 0
    pages.close()


def refused(md, address, length):
    """As one and among many; nothing is left of it."""
    for call, where in (
        (
            lambda: md.mem_reg(address=address, length=length),
            {"address": address, "length": length},
        ),
        (lambda: md.mem_reg_many(addresses=[address], lengths=length), {"item": 0}),
    ):
        with pytest.raises(um.DeviceError, match="say mem_type if it is host memory") as raised:
            call()
        assert raised.value.status is um.Status.INVALID_ADDR
        assert raised.value.context == {**where, "errno": errno.EFAULT}
    assert md.stats()["live_bases"] == 0


@pytest.mark.parametrize("page", [0, 2], ids=["begin", "end"])
def test_an_end_that_cannot_be_read(md, page):
    """A PROT_NONE map, as a GPU's driver reserves for its memory; a hole; a file's missing end."""
    pages = Pages(3)
    pages.protect(page, NONE)
    refused(md, pages.address, pages.length)
    refused(md, pages.address + page * PAGE, 8)
    inner = pages.address + (PAGE if page == 0 else 0)
    md.mem_reg(address=inner, length=2 * PAGE, owner=pages).dereg()
    pages.protect(page, READ)
    md.mem_reg(address=pages.address, length=pages.length, owner=pages).dereg()
    pages.unmap(page)
    refused(md, pages.address, pages.length)
    pages.close()


def test_the_missing_end_of_a_file(md, tmp_path):
    """Where a load would be a SIGBUS."""
    file = tmp_path / "short"
    file.write_bytes(bytes(PAGE))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as whole:
        start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        md.mem_reg(address=start, length=PAGE, owner=whole).dereg()
        opened.truncate(0)
        refused(md, start, PAGE)


def test_where_nobody_maps(md):
    for address, length in [(0, 4096), (4096, 4096), (2**47 - 8192, 8192), (2**64 - 4096, 4095)]:
        refused(md, address, length)
