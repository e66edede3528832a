# SPDX-License-Identifier: BSD-3-Clause
"""Memory given by address: whose word is taken for its type, and who looks."""

import ctypes as c

import pytest

import ucx_memh as um
from _capi import Table, params, pointer_to
from ucx_memh import MemType
from ucx_memh.testing import memh_pointer, open_python_device

S = um.Status
AT = 0x7E0000000000
UNKNOWN = 0xFFFFFFFF
TYPE_AT = 64  # in ucxm_memh_info_t


@pytest.fixture(scope="module")
def table():
    return Table()


def mem_type(table, memh):
    info = c.create_string_buffer(80)
    info[:8] = len(info).to_bytes(8, "little")
    assert table.mem_query(c.c_void_p(memh_pointer(memh)), info) is S.OK
    return int.from_bytes(info.raw[TYPE_AT : TYPE_AT + 4], "little")


def test_asked_once_and_only_where_nothing_is_said(fakes, table):
    md, device = fakes(mem_types=1 << MemType.CUDA | 1 << MemType.HOST, dmabuf=True)
    for said in (
        {"buffer": bytearray(8)},
        {"address": AT, "length": 8, "mem_type": MemType.HOST},
        {"address": AT, "length": 8, "mem_type": 0},
        {"address": AT, "length": 8, "mem_type": MemType.CUDA},
        {"address": AT, "length": 8, "dmabuf_fd": 3},  # is named by the descriptor
        {"address": AT, "length": 0},
    ):
        with md.mem_reg(**said) as base:
            assert mem_type(table, base) == said.get("mem_type", 0)
    assert device.count("mem_query") == 0
    with md.mem_reg(address=AT, length=8) as base:
        assert base.derive(0, 4).mkey_pack()
        assert device.count("mem_query") == 1
        base.dereg(cascade=True)


def test_the_answer_is_the_type(fakes, table):
    md, device = fakes(mem_types=1 << MemType.CUDA)
    with md.mem_reg(address=AT, length=8) as base:
        assert mem_type(table, base) == MemType.CUDA
        win = base.derive()
        assert mem_type(table, win) == MemType.CUDA
        win.dereg()
    assert not device.violations


@pytest.mark.parametrize("partial", [False, True])
def test_many(fakes, table, partial):
    md, device = fakes(mem_types=1 << MemType.CUDA)
    addresses = [AT + 64 * i for i in range(5)]
    with md.mem_reg_many(addresses=addresses, lengths=8, partial=partial) as bases:
        assert device.count("mem_query") == 5
        assert {mem_type(table, base) for base in bases} == {MemType.CUDA}
    md.mem_reg_many(addresses=addresses, lengths=8, partial=partial, mem_type=MemType.CUDA).dereg()
    assert device.count("mem_query") == 5
    device.fail("mem_query", S.INVALID_ADDR, after=2)
    if partial:
        bases = md.mem_reg_many(addresses=addresses, lengths=8, partial=True)
        assert list(bases.status) == [0, 0, S.INVALID_ADDR, 0, 0]
        bases.dereg()
    else:
        with pytest.raises(um.DeviceError) as raised:
            md.mem_reg_many(addresses=addresses, lengths=8)
        assert raised.value.context["item"] == 2
    assert md.stats()["live_bases"] == 0
    assert device.live_keys == {}


def test_what_is_refused_leaves_nothing(fakes):
    md, device = fakes()
    live = fakes.memory.live
    device.fail("mem_query", S.INVALID_ADDR, text="nobody there", errno=14)
    with pytest.raises(um.DeviceError, match="nobody there") as raised:
        md.mem_reg(address=AT, length=8)
    assert (raised.value.status, raised.value.errno) == (S.INVALID_ADDR, 14)
    assert raised.value.context == {"address": AT, "length": 8, "errno": 14}
    assert device.count("mem_reg") == 0
    assert (md.stats()["live_bases"], fakes.memory.live) == (0, live)
    del raised
    md.mem_reg(address=AT, length=8).dereg()


def test_a_type_that_was_not_declared(fakes):
    """From the caller, and from a backend that was asked."""
    md, device = fakes()
    for kind in (MemType.CUDA, 63, 64, UNKNOWN, UNKNOWN + 1, 2**64 - 1):
        with pytest.raises(um.UnsupportedError, match="device memory"):
            md.mem_reg(address=AT, length=8, mem_type=kind)
        with pytest.raises(um.UnsupportedError, match="device memory"):
            md.mem_reg_many(addresses=[AT], lengths=8, mem_type=kind)
    assert device.count("mem_query") == device.count("mem_reg") == 0
    for wrong in (-1, 2**64, "host", True):
        with pytest.raises(um.InvalidParamError, match="mem_type"):
            md.mem_reg_many(addresses=[AT], lengths=8, mem_type=wrong)
    with pytest.raises(um.InvalidParamError, match="mem_type goes with addresses"):
        md.mem_reg_many([bytearray(8)], mem_type=MemType.HOST)

    md, python = open_python_device()
    with md:
        python.mem_query = lambda address, length: MemType.CUDA
        with pytest.raises(um.UnsupportedError, match="device memory"):
            md.mem_reg(address=AT, length=8)
        assert python.calls["mem_reg"] == md.stats()["live_bases"] == 0
        seen = []
        python.mem_query = lambda *given: seen.append(given) or MemType.HOST
        md.mem_reg(address=AT, length=8).dereg()
        assert seen == [(AT, 8)]


@pytest.mark.parametrize("how", [{"abi": 3}, {"without_ops": ["mem_query"]}], ids=str)
def test_who_cannot_be_asked_registers_and_finds_out(fakes, table, how):
    md, device = fakes(**how)
    with md.mem_reg(address=AT, length=8) as base:
        assert mem_type(table, base) == MemType.HOST
    assert (device.count("mem_query"), device.count("mem_reg")) == (0, 1)
    md, device = fakes(mem_types=1 << MemType.CUDA, **how)
    with pytest.raises(um.UnsupportedError, match="host memory"):
        md.mem_reg(address=AT, length=8)
    assert device.count("mem_reg") == 0


def test_from_C(fakes, table):
    """HOST is 0, and believed; who does not know says so."""
    md, device = fakes()
    for kind, asked in ((MemType.HOST, 0), (UNKNOWN, 1)):
        memh = c.c_void_p()
        wanted = params(mem_type=kind)
        assert table.mem_reg(pointer_to(md), c.byref(wanted), c.byref(memh), None) is S.OK
        assert table.mem_dereg(memh, 0, None, None) is S.OK
        table.memh_release(memh)
        assert device.count("mem_query") == asked
    device.fail("mem_query", S.INVALID_ADDR)
    assert table.mem_reg(pointer_to(md), c.byref(wanted), c.byref(memh), None) is S.INVALID_ADDR
    assert memh.value is None
    wanted = params(mem_type=UNKNOWN - 1)
    assert table.mem_reg(pointer_to(md), c.byref(wanted), c.byref(memh), None) is S.UNSUPPORTED


LOOKS = """
import os, threading, time
from ucx_memh.testing import open_fake
md, device = open_fake(fast_reg=True)
device.slow("mem_query", 3600)
call = {"one": lambda: md.mem_reg(address=64, length=8),
        "many": lambda: md.mem_reg_many(addresses=[64], lengths=8)}["%s"]
threading.Thread(target=call, daemon=True).start()
while not device.count("mem_query"):
    time.sleep(0.001)
md.mem_reg(bytearray(8))
os._exit(0)
"""


@pytest.mark.parametrize("how", ["one", "many"])
def test_no_look_keeps_the_GIL(python, how):
    """Would hang: the thread that looks sleeps for an hour."""
    python("-c", LOOKS % how, timeout=30)
