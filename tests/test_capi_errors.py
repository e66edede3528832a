# SPDX-License-Identifier: BSD-3-Clause
"""The embedders' table, called from here: what is refused, and that nothing changes by it."""

import ctypes as c
import gc
import itertools

import pytest

import ucx_memh as um
from _capi import Params, Table, params, pointer_to, pointers
from _fakes import Envelope, native
from ucx_memh.testing import memh_pointer

S = um.Status
ALL = um.MemFlag.ACCESS_ALL


class LongParams(Params):
    """Of a later version."""

    _fields_ = [("more", c.c_uint64 * 3)]


@pytest.fixture(scope="module")
def table():
    return Table()


def test_the_table_says_what_it_is(table):
    size, abi = c.c_size_t.from_address(table.at), c.c_uint32.from_address(table.at + 8)
    assert (size.value, abi.value) == (16 + 8 * len(table.names), 1)
    for number in range(len(table.names)):
        assert c.c_void_p.from_address(table.at + 16 + 8 * number).value


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"struct_size": 8}, S.INVALID_PARAM),
        ({"reserved": 1}, S.INVALID_PARAM),
        ({"flags": 1 << 60}, S.INVALID_PARAM),
        ({"flags": int(um.MemFlag.GVA)}, S.UNSUPPORTED),
        ({"adopt": 8}, S.INVALID_PARAM),
        ({"address": 2**64 - 8}, S.INVALID_PARAM),
        ({"mem_type": 70}, S.UNSUPPORTED),
        ({"has_dmabuf": 1}, S.UNSUPPORTED),
    ],
    ids=str,
)
def test_mem_reg_refuses(table, fakes, fields, status):
    md, device = fakes()
    pointer = pointer_to(md)
    before = md.stats(), device.counts, fakes.memory.live
    wanted = params()
    for name, value in fields.items():
        setattr(wanted, name, value)
    memh = c.c_void_p(1)
    assert table.mem_reg(pointer, c.byref(wanted), c.byref(memh), None) is status
    assert memh.value is None
    assert (md.stats(), device.counts, fakes.memory.live) == before


def test_mem_reg_fails_whole(table, fakes):
    """By the device, or for want of memory."""
    md, device = fakes()
    pointer = pointer_to(md)
    live = fakes.memory.live
    device.fail("mem_reg", S.NO_MEMORY, text="no room", errno=12)
    error, memh = c.create_string_buffer(120), c.c_void_p(1)
    wanted = params()
    assert table.mem_reg(pointer, c.byref(wanted), c.byref(memh), error) is S.NO_MEMORY
    assert (memh.value, error.raw[8:16]) == (None, b"no room\0")
    assert int.from_bytes(error.raw[:4], "little") == 12
    fakes.memory.fail(1)
    memh = c.c_void_p(1)
    assert table.mem_reg(pointer, c.byref(wanted), c.byref(memh), None) is S.NO_MEMORY
    fakes.memory.fail(None)
    assert (memh.value, fakes.memory.live, md.stats()["live_bases"]) == (None, live, 0)
    assert device.live_keys == {}


def test_many_registrations_lie_as_far_apart_as_they_say(table, fakes):
    """A program of a later version has longer structures; one item fails alone."""
    md, _ = fakes()
    pointer = pointer_to(md)
    each = [params(LongParams, length=64 * (i + 1)) for i in range(4)]
    each[2].flags = 1 << 60
    array = (LongParams * 4)(*each)
    memhs, status = (c.c_void_p * 4)(*[1] * 4), (c.c_int32 * 4)()
    first = table.mem_reg_many(pointer, array, c.c_size_t(4), memhs, status)
    assert first is S.INVALID_PARAM
    assert list(status) == [S.OK, S.OK, S.INVALID_PARAM, S.OK]
    assert [bool(memh) for memh in memhs] == [True, True, False, True]
    assert md.stats()["live_bases"] == 3
    good = (c.c_void_p * 3)(memhs[0], memhs[1], memhs[3])
    assert table.mem_dereg_many(good, c.c_size_t(3), c.c_uint32(0), None) is S.OK
    for memh in good:
        table.memh_release(c.c_void_p(memh))
    table.memh_release(None)
    table.rkey_release(None)
    table.ep_release(None)
    table.md_release(None)
    assert md.stats()["live_bases"] == 0


@pytest.mark.parametrize("destroy", ["now", "progress", "flush"])
@pytest.mark.parametrize("call", ["mem_invalidate_many", "mem_dereg_many"])
def test_many_revocations_end_as_one_after_the_other(table, fakes, destroy, call):
    """A child before its parent, a handle twice, none at all, one that the device keeps."""
    md, device = fakes(destroy=destroy)
    base = md.mem_reg(bytearray(64))
    parent, kept, other = base.derive(), base.derive(), base.derive()
    child = parent.derive()
    for win in (child, parent, kept, other):
        win.mkey_pack()
    # Of four destructions the last but one.
    device.fail("key_destroy", S.BUSY, after=2)
    items = pointers(child, parent, child, None, kept, other)
    status = (c.c_int32 * 6)()
    first = getattr(table, call)(items, c.c_size_t(6), c.c_uint32(0), status)
    again = S.OK if call == "mem_dereg_many" else S.REVOKED
    assert list(status) == [S.OK, S.OK, again, S.INVALID_PARAM, S.BUSY, S.OK]
    assert first is next(S(one) for one in status if one)
    assert kept.state is um.MemhState.REVOKING and base.derived_count == 1
    (kept.invalidate if call == "mem_invalidate_many" else kept.dereg)()
    assert device.counts["key_destroy"] == 5
    assert [key[0] for key in device.live_keys.values()] == ["direct"]


@pytest.mark.parametrize("count", [1, 100, 256, 257, 1000])
def test_many_revocations_go_to_the_device_together(table, fakes, count):
    md, device = fakes(destroy="flush")
    base = md.mem_reg(bytearray(64))
    wins = [base.derive() for _ in range(count)]
    for win in wins:
        win.mkey_pack()
    items = pointers(*wins)
    assert table.mem_invalidate_many(items, c.c_size_t(count), c.c_uint32(0), None) is S.OK
    assert device.counts["key_destroy"] == count
    assert device.counts["key_flush"] == -(-count // 256)
    assert {win.state for win in wins} == {um.MemhState.REVOKED}


@pytest.mark.parametrize("packed", [False, True])
def test_a_closed_handle_outlives_all_that_it_came_from(table, fakes, packed):
    """What is left of it is its own: it may be asked, and released, after the domain."""
    md, device = fakes()
    derived, base = c.c_void_p(), c.c_void_p()
    wanted = params()
    assert table.mem_reg(pointer_to(md), c.byref(wanted), c.byref(base), None) is S.OK
    everything = (c.c_uint64(0), c.c_uint64(2**64 - 1), c.c_uint64(2**64 - 1), None)
    assert table.mem_derive(base, *everything, c.byref(derived), None) is S.OK
    room, length = c.create_string_buffer(256), c.c_size_t(256)
    if packed:
        assert table.mkey_pack(derived, c.c_uint32(0), room, c.byref(length), None) is S.OK
    assert table.mem_dereg(derived, c.c_uint32(0), None, None) is S.OK
    assert table.mem_dereg(base, c.c_uint32(0), None, None) is S.OK
    table.memh_release(base)
    md.close()
    assert device.closed
    fakes.opened.clear()
    del md
    gc.collect()
    info = (c.c_uint64 * 12)(8 * 12)
    assert table.mem_query(derived, info) is S.OK
    assert info[2] == 4096
    other = c.c_void_p(1)
    assert table.mem_derive(derived, *everything, c.byref(other), None) is S.CLOSED
    assert table.mkey_pack(derived, c.c_uint32(0), room, c.byref(length), None) is S.CLOSED
    for flags in (0, 2):  # 2: CASCADE
        assert table.mem_invalidate(derived, c.c_uint32(flags), None, None) is S.CLOSED
    for flags in (0, 1, 2, 3):
        assert table.mem_dereg(derived, c.c_uint32(flags), None, None) is S.OK
    assert table.mem_enforcement(derived, room) is S.CLOSED
    length.value = 256
    assert table.revoke_notice(derived, room, c.byref(length), None) is S.OK
    assert Envelope.of(room.raw[: length.value]).address == wanted.address
    assert table.mem_dereg_many((c.c_void_p * 1)(derived), c.c_size_t(1), c.c_uint32(0), None) == 0
    table.memh_release(derived)
    fakes.memory.check()


@pytest.mark.parametrize("destroy", ["now", "progress", "flush"])
@pytest.mark.parametrize("packed", [False, True])
def test_release_in_any_order_frees(table, fakes, destroy, packed):
    """A parent that is released first goes with the last of its derived handles."""
    md, device = fakes(destroy=destroy)
    everything = (c.c_uint64(0), c.c_uint64(2**64 - 1), c.c_uint64(2**64 - 1), None)
    room, length = c.create_string_buffer(256), c.c_size_t(256)
    chain = [c.c_void_p() for _ in range(4)]
    wanted = params()
    assert table.mem_reg(pointer_to(md), c.byref(wanted), c.byref(chain[0]), None) is S.OK
    for parent, win in itertools.pairwise(chain):
        assert table.mem_derive(parent, *everything, c.byref(win), None) is S.OK
    if packed:
        for win in chain[1:]:
            assert table.mkey_pack(win, c.c_uint32(0), room, c.byref(length), None) is S.OK
    for memh in chain:
        assert md.stats()["live_bases"] == 1
        table.memh_release(memh)
    for _ in chain:
        md.progress()
    stats = md.stats()
    assert (stats["live_bases"], stats["live_derived"], device.live_keys) == (0, 0, {})
    fakes.memory.check()


def test_mkey_pack_many_takes_a_failed_item(table, fakes):
    """What mem_reg_many left NULL."""
    md, _ = fakes()
    base = md.mem_reg(bytearray(8))
    key = base.mkey_pack()
    room, lengths, status = c.create_string_buffer(512), (c.c_size_t * 2)(), (c.c_int32 * 2)()
    args = (c.c_size_t(2), c.c_uint32(0), room, c.c_size_t(256), lengths, status)
    assert table.mkey_pack_many(pointers(None, base), *args) is S.INVALID_PARAM
    assert (list(status), list(lengths)) == ([S.INVALID_PARAM, S.OK], [0, len(key)])
    assert room.raw[256 : 256 + len(key)] == key


@pytest.mark.parametrize(
    ("offset", "length", "rights"),
    [(65, 0, 2**64 - 1), (1, 64, 2**64 - 1), (2**64 - 1, 2, 2**64 - 1), (0, 8, 1 << 60)],
)
def test_mem_derive_refuses(table, fakes, offset, length, rights):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    before = md.stats(), fakes.memory.live
    args = [c.c_void_p(memh_pointer(base)), c.c_uint64(offset), c.c_uint64(length)]
    memh = c.c_void_p(1)
    status = table.mem_derive(*args, c.c_uint64(rights), None, c.byref(memh), None)
    assert (status, memh.value) == (S.INVALID_PARAM, None)
    assert (md.stats(), fakes.memory.live) == before


def test_mkey_pack_writes_all_or_nothing(table, fakes):
    md, device = fakes()
    win = md.mem_reg(bytearray(64)).derive()
    memh = c.c_void_p(memh_pointer(win))
    length, room = c.c_size_t(0), c.create_string_buffer(b"\xee" * 256, 256)
    assert table.mkey_pack(memh, c.c_uint32(0), None, c.byref(length), None) is S.OK
    size = length.value
    length.value = size - 1
    status = table.mkey_pack(memh, c.c_uint32(0), room, c.byref(length), None)
    assert (status, length.value) == (S.BUFFER_TOO_SMALL, size)
    assert room.raw == b"\xee" * 256
    assert table.mkey_pack(memh, c.c_uint32(0), room, c.byref(length), None) is S.OK
    assert room.raw == win.mkey_pack() + b"\xee" * (256 - size)
    assert native(room.raw)[0] in device.live_keys
    unknown = table.mkey_pack(memh, c.c_uint32(1 << 30), room, c.byref(length), None)
    assert (unknown, length.value) == (S.INVALID_PARAM, 0)
    assert table.mem_invalidate(memh, c.c_uint32(8), None, None) is S.INVALID_PARAM
    assert table.mem_invalidate(memh, c.c_uint32(0), None, None) is S.OK
    assert table.mkey_pack(memh, c.c_uint32(0), None, c.byref(length), None) is S.REVOKED
    assert table.mem_invalidate(memh, c.c_uint32(0), None, None) is S.REVOKED
    assert table.mem_dereg(memh, c.c_uint32(0), None, None) is S.OK
    assert table.mem_dereg(memh, c.c_uint32(0), None, None) is S.OK
    assert table.mkey_pack(memh, c.c_uint32(0), None, c.byref(length), None) is S.CLOSED


def test_rkey_unpack_reads_no_further(table, fakes):
    md, _ = fakes()
    pointer = pointer_to(md)
    key = md.mem_reg(bytearray(64)).derive().mkey_pack()
    for length in (0, 1, 79, len(key) - 1):
        rkey = c.c_void_p(1)
        args = [pointer, c.create_string_buffer(key[:length], length or 1), c.c_size_t(length)]
        assert table.rkey_unpack(*args, c.byref(rkey), None) is S.MALFORMED_KEY
        assert rkey.value is None
    assert md.stats()["live_rkeys"] == 0


def test_an_older_program_is_served(table, fakes):
    """Its structure ends earlier, and nothing is written behind it."""
    md, _ = fakes()
    pointer = pointer_to(md)
    room = (c.c_uint64 * 64)(*[7] * 64)
    room[0] = 32  # up to max_reg and mem_types
    assert table.md_query(pointer, room) is S.OK
    assert (room[0], list(room[4:])) == (32, [7] * 60)
    assert room[1] & um.MdFlag.REG_DERIVED
    room[0] = 8
    assert table.md_query(pointer, room) is S.INVALID_PARAM
