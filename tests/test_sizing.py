# SPDX-License-Identifier: BSD-3-Clause
"""The one sizing function, against the structs of backend.h; and what each call allocates."""

import ctypes

import pytest

import ucx_memh as um
from _fakes import AMO, RAW, RMA, Books, Identity, Inherited, Own
from ucx_memh.core import memh_layout

TAILS = [0, 1, 7, 8, 15, 16, 17, 24, 63, 64, 65, 255, 4096]


def test_sizes_of_the_spans():
    """No padding anywhere: what is not written would be copied or compared as it lies."""
    for span in (Books, Identity, Inherited, Own):
        fields = [getattr(span, name) for name, _ in span._fields_]
        assert sum(field.size for field in fields) == ctypes.sizeof(span)
    assert memh_layout() == memh_layout(0, 0)


@pytest.mark.parametrize("inherit", TAILS)
def test_layout_matrix(inherit):
    for own in TAILS:
        at, copy_offset, copy_size, own_offset, size = memh_layout(inherit, own)
        assert at == ctypes.sizeof(Books)
        assert at % 16 == 0
        assert copy_offset == at + ctypes.sizeof(Identity)
        assert copy_offset + copy_size == own_offset  # no gap and no overlap
        assert own_offset % 16 == 0
        assert 0 <= own_offset - copy_offset - ctypes.sizeof(Inherited) - inherit < 16
        assert size == own_offset + ctypes.sizeof(Own) + own


@pytest.mark.parametrize("inherit", TAILS)
@pytest.mark.parametrize("own", [0, 8, 17, 4096])
def test_every_handle_is_allocated_by_it(fakes, inherit, own):
    """One allocation for each: a base's has its Registration in front of it."""
    md, _ = fakes(tail_inherit_size=inherit, tail_own_size=own)
    size = memh_layout(inherit, own)[-1]
    before = fakes.memory.allocs
    base = md.mem_reg(bytearray(64))
    assert fakes.memory.allocs == before + 1
    registration = fakes.memory.sizes[-1] - size
    assert registration > 0 and registration % 16 == 0
    win = base.derive(8, 8)
    assert fakes.memory.allocs == before + 2
    assert fakes.memory.sizes[-1] == size
    leaf = win.derive(0, 8)
    assert fakes.memory.allocs == before + 3
    assert fakes.memory.sizes[-1] == size
    frees = fakes.memory.frees
    del leaf
    assert fakes.memory.frees == frees + 1


@pytest.mark.parametrize("kind", ["base", "derived"])
def test_what_a_pack_allocates(fakes, kind):
    md, _ = fakes()
    memh = base = md.mem_reg(bytearray(64))
    base.mkey_pack(RMA)  # the quarantine's memory comes with the first key
    if kind == "derived":
        memh = base.derive()
    before = fakes.memory.allocs
    memh.mkey_pack()
    assert fakes.memory.allocs == before + 1
    assert 96 <= fakes.memory.sizes[-1] <= 104  # the packed key, and its length
    memh.mkey_pack(RAW)
    assert fakes.memory.allocs == before + 2
    for flags in (0, RAW, 0, RAW):
        memh.mkey_pack(flags)
        memh.mkey_pack_into(bytearray(96), flags)
    if kind == "derived":
        memh.mkey_pack(RMA | AMO)
    assert fakes.memory.allocs == before + 2


def test_what_an_unpack_and_a_transfer_allocate(fakes):
    md, _, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack(RMA))  # and the table
    key = base.mkey_pack()
    before = fakes.memory.allocs
    other = md.rkey_unpack(key)
    assert fakes.memory.allocs == before + 1
    hits = [md.rkey_unpack(key) for _ in range(10)]
    assert fakes.memory.allocs == before + 1
    one.put(rkey, base.address, b"x")
    assert fakes.memory.allocs == before + 2
    into = bytearray(1)
    one.get(other, base.address, into)
    assert fakes.memory.allocs == before + 3
    assert fakes.memory.frees == 2  # the two transfers, and nothing else
    del hits


def test_revoking_allocates_nothing(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    wins = [base.derive() for _ in range(100)]
    for win in wins:
        win.mkey_pack()
    fakes.memory.fail(1, count=2**60)
    for win in wins:
        win.invalidate()
        win.revoke_notice()
        win.dereg()
    base.dereg()
    fakes.memory.fail(None)
    assert fakes.memory.failed == 0


def test_derive_sends_no_command(fakes):
    """It asks the backend whether the handle may exist, and no device."""
    md, device = fakes()
    base = md.mem_reg(bytearray(1 << 20))
    device.reset_counts()
    wins = [base.derive(i, 1, um.MemFlag.REMOTE_GET) for i in range(10)]
    counts = {op: n for op, n in device.counts.items() if n}
    assert counts == {"mem_derive": 10, "tail_init": 10}
    assert len(device.live_keys) == 1
    del wins


@pytest.mark.parametrize("size", [1, 4096, 1 << 40])
def test_commands_do_not_depend_on_the_size(fakes, size):
    md, device = fakes()
    base = md.mem_reg(address=1 << 20, length=size)
    device.reset_counts()
    win = base.derive()
    win.mkey_pack()
    win.mkey_pack()
    win.invalidate()
    counts = {op: n for op, n in device.counts.items() if n}
    assert counts == {
        "mem_derive": 1,
        "tail_init": 1,
        "key_create": 1,
        "mkey_pack": 1,
        "key_destroy": 1,
    }
