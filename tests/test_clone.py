# SPDX-License-Identifier: BSD-3-Clause
"""A handle's bytes: every one is initialised, and the inherited ones are the base's."""

import gc

import pytest

import ucx_memh as um
from _fakes import ALL, GET, PUT, REMOTE, Books, Identity, Inherited, Own
from ucx_memh.core import memh_layout
from ucx_memh.testing import PoisonAllocator, memh_bytes, memh_pointer, open_fake

TAILS = [(0, 0), (1, 1), (8, 0), (0, 8), (15, 17), (24, 40), (64, 255), (16, 16)]


class Look:
    """A handle, taken apart."""

    def __init__(self, memh, tails):
        at, copy_offset, copy_size, own_offset, size = memh_layout(*tails)
        data = self.data = memh_bytes(memh, size)
        self.at = memh_pointer(memh)
        self.books = Books.from_buffer_copy(data)
        self.id = Identity.from_buffer_copy(data, at)
        self.inherited = Inherited.from_buffer_copy(data, copy_offset)
        self.span = data[copy_offset : copy_offset + copy_size]
        self.own = Own.from_buffer_copy(data, own_offset)
        self.id_offset = at
        self.own_tail = data[size - tails[1] :] if tails[1] else b""

    def neutral(self):
        """All bytes; what must differ between two handles is checked and then made equal."""
        data = bytearray(self.data)
        tail = bytes((0xC3 + i + (self.at >> 4)) & 255 for i in range(len(self.own_tail)))
        assert self.own_tail == tail  # what the fake writes there
        data[len(data) - len(tail) :] = bytes(len(tail))
        for at, field in [(0, Books.next), (0, Books.prev), (self.id_offset, Identity.key_id)]:
            data[at + field.offset : at + field.offset + field.size] = bytes(field.size)
        return bytes(data)


def poisoned(fill, tails, act):
    with PoisonAllocator(fill) as memory:
        result = act(*open_fake(tail_inherit_size=tails[0], tail_own_size=tails[1]))
        gc.collect()
        assert memory.live == 0
        memory.check()
    return result


@pytest.mark.parametrize("tails", TAILS, ids=str)
def test_clones_under_two_poisons_are_equal(frozen_heap, tails):
    """Of one base, so that only pointers and ids of the clones' own may differ."""
    md, device = open_fake(tail_inherit_size=tails[0], tail_own_size=tails[1])
    base = md.mem_reg(bytearray(4096))
    seen = set()
    for fill in (0xA5, 0x5A, 0x00, 0xFF):
        with PoisonAllocator(fill) as memory:
            win = base.derive(64, 128, GET | PUT)
            seen.add(Look(win, tails).neutral())
            del win
            assert (memory.allocs, memory.frees, memory.live) == (1, 1, 0)
    assert len(seen) == 1
    assert device.violations == {}
    base.dereg()
    md.close()


@pytest.mark.parametrize("tails", TAILS, ids=str)
@pytest.mark.parametrize("kind", ["base", "derived", "derived of a derived"])
def test_every_byte_is_initialised(frozen_heap, kind, tails):
    """No byte is the poison under two different poisons."""

    def act(md, device):
        memh = base = md.mem_reg(buffer)
        if kind != "base":
            memh = parent = base.derive(8, 64)
        if kind == "derived of a derived":
            memh = parent.derive(8, 8, GET)
        look = Look(memh, tails).data
        assert device.violations == {}
        return look

    buffer = bytearray(4096)
    looks = {fill: poisoned(fill, tails, act) for fill in (0xA5, 0x5A, 0x3C, 0xC3)}
    size = memh_layout(*tails)[-1]
    left = [
        i for i in range(size) if sum(look[i] == fill for fill, look in looks.items()) == len(looks)
    ]
    assert left == []
    # The method sees a byte that was left alone.
    assert memh_layout(*tails)[-1] == len(looks[0xA5])


@pytest.mark.parametrize("tails", TAILS, ids=str)
def test_the_inherited_span_is_the_bases(fakes, tails):
    md, _ = fakes(tail_inherit_size=tails[0], tail_own_size=tails[1])
    base = md.mem_reg(bytearray(4096), ALL)
    base.mkey_pack()
    win = base.derive(64, 128, GET)
    leaf = win.derive(1, 2)
    spans = {Look(memh, tails).span for memh in (base, win, leaf)}
    assert len(spans) == 1
    other = md.mem_reg(bytearray(4096), ALL)
    assert Look(other, tails).span not in spans


def counts(memh):
    """References to it, and its live children."""
    books = Look(memh, (0, 0)).books
    return books.refs, books.live_children


@pytest.mark.parametrize("packed", [False, True], ids=["", "of-a-packed-base"])
def test_a_clones_own_fields(fakes, packed):
    """S10, S11: nothing of the base's key slots, links, counts or cached bytes comes along."""
    md, _, _one, two = fakes.connected()
    base = md.mem_reg(bytearray(4096))
    if packed:
        for flags in range(4):
            base.mkey_pack(flags)
    sibling = base.derive()
    win = base.derive(64, 128, GET | PUT, endpoint=two)
    of_base, look = Look(base, (0, 0)), Look(win, (0, 0))
    assert look.id.md == of_base.id.md
    assert look.id.parent == of_base.at
    assert (look.books.children, look.books.refs, look.books.live_children) == (None, 1, 0)
    assert (look.books.next, look.books.prev) == (memh_pointer(sibling), None)
    assert look.id.state == um.MemhState.LIVE
    assert look.books.epoch == of_base.books.epoch
    assert look.id.key_id == win.key_id > base.key_id
    assert look.books.plan != of_base.books.plan
    own = look.own
    assert (own.address, own.length) == (base.address + 64, 128)
    assert own.rights == own.grant == GET | PUT
    assert own.ep is not None
    assert all((slot.object, slot.value, slot.live) == (None, 0, 0) for slot in own.slot)
    books = look.books
    assert not any(books.packed)
    assert (books.user_done, books.pending, books.closing, books.failed) == (None, 0, 0, 0)
    # The base's are as they were.
    assert of_base.own.rights & REMOTE == REMOTE
    assert of_base.own.slot[0].value != 0
    assert [bool(packed_key) for packed_key in of_base.books.packed[:4]] == [packed] * 4
    assert (of_base.books.children, of_base.books.live_children) == (look.at, 2)
    # Live children keep it by being there; one that is revoked, but not closed, is counted.
    assert of_base.books.refs == 1
    sibling.invalidate()
    assert counts(base) == (2, 1)
    sibling.dereg()
    assert counts(base) == (2, 1)
    del sibling
    assert counts(base) == (1, 1)
    win.dereg()
    assert counts(base) == (1, 0)


def test_handles_that_live_long_are_not_written_to(fakes):
    """Handles with neighbours of every size: no guard behind a block is touched, no freed block."""
    md, _ = fakes(tail_inherit_size=24, tail_own_size=40)
    base = md.mem_reg(bytearray(4096))
    wins = [base.derive(i, 8) for i in range(200)]
    before = [Look(win, (24, 40)).span for win in wins]
    for win in wins[::2]:
        win.mkey_pack()
        win.invalidate()
    assert [Look(win, (24, 40)).span for win in wins] == before
    del wins
    fakes.memory.check()
