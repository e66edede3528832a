# SPDX-License-Identifier: BSD-3-Clause
"""Rows D1 to D16 and S1 to S13, on a device, with data.

D: a defect of the last version of openucx/ucx#10332, S: a question of its reviewers.  Each test
shows the right behaviour.  S9 and S12 are about names and have none.  What depends on how a device
makes its keys is in the backends' own test_rows.py, which take all of this in.
"""

import gc
import hashlib
import itertools
import struct

import pytest

import ucx_memh as um
from _sides import Wc, keys, link, payload, progressed, relink
from ucx_memh import MdFlag, MemFlag, MemhState, PackFlag, Status
from ucx_memh.core import memh_layout
from ucx_memh.testing import PoisonAllocator, memh_bytes

GET, PUT, ATOMIC = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT, MemFlag.REMOTE_ATOMIC
REMOTE = MemFlag.ACCESS_REMOTE
PLAIN, RMA, AMO = PackFlag.NONE, PackFlag.INVALIDATE_RMA, PackFlag.INVALIDATE_AMO
EXPORT = PackFlag.EXPORT
SIZE = 64 << 10


def text(size=SIZE, seed=b"region"):
    """Bytes that do not repeat."""
    return bytearray(hashlib.shake_256(seed).digest(size))


def word(memory, offset):
    return struct.unpack_from("=Q", memory, offset)[0]


class Unchanged:
    """`with Unchanged(md, ...)`: nothing is sent, made or counted, and the handles stay live."""

    def __init__(self, md, *handles, but=()):
        self.md, self.handles, self.but = md, handles, but

    def look(self):
        counts = {name: n for name, n in self.md.stats().items() if name not in self.but}
        return counts, [(h.state, h.derived_count, h.grant) for h in self.handles]

    def __enter__(self):
        self.before = self.look()

    def __exit__(self, kind, *exc_info):
        if kind is None:
            assert self.look() == self.before


def root(memh):
    return memh if memh.base is None else root(memh.base)


def moves(far, memory, memh, key=None):
    """The other process can use the handle's key for all that it grants."""
    key = memh.mkey_pack() if key is None else key
    address, length, rights, _ = far.unpack(key)
    start = address - root(memh).address
    if rights & GET:
        assert far.get(key, 0, length) == memory[start : start + length]
    if rights & PUT:
        data = bytes(reversed(memory[start : start + length]))
        far.put(key, 0, data)
        assert memory[start : start + length] == data
    if rights & ATOMIC:
        at = -address % 8
        before = word(memory, start + at)
        assert far.fetch_add(key, at, 3) == before
        assert word(memory, start + at) == (before + 3) % 2**64
    return True


# ---- D: defects ----


def test_D1_completion_runs_once_after_the_key_is_gone(owner, device, attacker):
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, attacker)
    win = base.derive()
    rkey, _ = keys(win.mkey_pack())
    assert attacker.read(rkey, win.address, 8) == (Wc.SUCCESS, memory[:8])
    live = device.keys(owner)
    seen = []

    def done(status):
        # An access that starts in here comes too late.
        seen.append((status, attacker.read(rkey, win.address, 8)[0], device.keys(owner)))

    win.invalidate(done)
    progressed(owner, lambda: seen)
    assert seen == [(Status.OK, Wc.REM_ACCESS_ERR, live - 1)]

    shared = []
    one, two = base.derive(), base.derive()
    one.mkey_pack(), two.mkey_pack()
    one.invalidate(shared.append)
    two.invalidate(shared.append)
    progressed(owner, lambda: len(shared) == 2)
    for again in (one, two):
        with pytest.raises(um.RevokedError):
            again.invalidate(shared.append)
        again.dereg()
    while owner.progress():
        pass
    assert shared == [Status.OK, Status.OK]


def test_D2_a_base_is_busy_while_derived_handles_live(owner, library):
    memory = text()
    base = owner.mem_reg(memory)
    link(owner, library)
    win = base.derive()
    small = win.derive(64, 4096, GET)
    tree = [base, win, small]
    assert all(moves(library, memory, memh) for memh in tree)
    with Unchanged(owner, *tree):
        for call in (base.dereg, win.dereg, win.invalidate):
            with pytest.raises(um.BusyError):
                call()
    assert all(moves(library, memory, memh) for memh in tree)
    small.invalidate()
    with pytest.raises(um.BusyError):
        base.dereg()
    win.dereg()
    assert moves(library, memory, base)
    base.dereg()
    assert [memh.state for memh in tree] == [
        MemhState.CLOSED, MemhState.CLOSED, MemhState.REVOKED,
    ]  # fmt: skip
    assert owner.stats()["live_bases"] == owner.stats()["live_derived"] == 0


def test_D2_in_any_order(owner, library):
    """Whoever still has live children is busy, and the others are as before."""
    memory = text()
    link(owner, library)
    parent = {"a": "base", "b": "a", "c": "base"}
    for order in itertools.permutations(["base", "a", "b", "c"]):
        live = {"base": owner.mem_reg(memory, MemFlag.DERIVED_ONLY)}
        for name, above in parent.items():
            live[name] = live[above].derive(64, 4096 - 64 * len(live), GET)
        for name in order:
            if any(parent.get(other) == name for other in live):
                with Unchanged(owner, *live.values()), pytest.raises(um.BusyError):
                    live[name].dereg()
            else:
                live.pop(name).dereg()
            assert all(moves(library, memory, memh) for n, memh in live.items() if n != "base")
        for name in ("b", "a", "c", "base"):
            if name in live:
                live.pop(name).dereg()
        stats = owner.stats()
        assert (stats["live_bases"], stats["live_derived"]) == (0, 0)


def test_D2_a_dropped_base_lives_on_under_its_derived(owner, device, library):
    memory = text()
    link(owner, library)
    regions = device.regions(owner)
    win = owner.mem_reg(memory, MemFlag.DERIVED_ONLY).derive()
    gc.collect()
    assert moves(library, memory, win)
    with pytest.raises(BufferError):
        memory.append(0)
    del win
    gc.collect()
    progressed(owner, lambda: device.regions(owner) == regions)
    memory.append(0)


def test_D3_a_derived_handle_can_be_derived_from(owner, device, library, attacker):
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    win = base.derive(4096, 16384, GET | PUT)
    small = win.derive(1024, 2048, GET)
    assert (small.address, small.length) == (base.address + 5120, 2048)
    assert (small.grant, small.base, win.derived_count, base.derived_count) == (GET, win, 1, 1)
    assert moves(library, memory, win)
    key = small.mkey_pack()
    assert library.get(key, 0, 2048) == memory[5120:7168]
    with Unchanged(owner, base, win, small):
        for offset, length, flags in [(0, 2049, GET), (2048, 1, GET), (0, 8, GET | PUT)]:
            with pytest.raises(um.InvalidParamError):
                small.derive(offset, length, flags)
    # The device holds it to its own rights, not to its parent's, and to its range if it can.
    ep = link(owner, attacker)
    rkey, _ = keys(key)
    before = bytes(memory)
    assert attacker.read(rkey, small.address - 1, 2)[0] is device.outside
    relink(ep, attacker)
    assert attacker.write(rkey, small.address, b"x") is Wc.REM_ACCESS_ERR
    assert memory == before
    small.invalidate()
    assert moves(library, memory, win)


WIDER = um.InvalidParamError
D4_TABLE = [
    ({"offset": SIZE + 1}, WIDER),
    ({"offset": 2**64 - 1}, WIDER),
    ({"offset": 2**64 - 1, "length": 2}, WIDER),
    ({"offset": -1}, um.InvalidParamError),
    ({"offset": 2**64}, um.InvalidParamError),
    ({"offset": 1.5}, um.InvalidParamError),
    ({"length": SIZE + 1}, WIDER),
    ({"length": 2**64 - 1}, WIDER),
    ({"offset": 1, "length": SIZE}, WIDER),
    ({"offset": SIZE, "length": 1}, WIDER),
    ({"flags": ATOMIC}, WIDER),
    ({"flags": GET | ATOMIC}, WIDER),
    ({"flags": MemFlag.GVA}, um.UnsupportedError),
    ({"flags": MemFlag.SYMMETRIC_RKEY | GET}, um.UnsupportedError),
    ({"flags": 1 << 20}, um.InvalidParamError),
    ({"flags": 1 << 40}, um.InvalidParamError),
    ({"flags": 1 << 64}, um.InvalidParamError),
    ({"flags": "get"}, um.InvalidParamError),
    ({"endpoint": object()}, TypeError),
    ({"mem_type": 1}, TypeError),
    ({"dmabuf_fd": 0}, TypeError),
    ({"address": 0}, TypeError),
]


@pytest.mark.parametrize(("arguments", "error"), D4_TABLE, ids=lambda value: str(value))
def test_D4_what_derive_cannot_do_is_refused(owner, arguments, error):
    base = owner.mem_reg(text(), MemFlag.DERIVED_ONLY | MemFlag.ACCESS_RMA)
    win = base.derive()
    for memh in (base, win):
        with Unchanged(owner, base, win), pytest.raises(error):
            memh.derive(**arguments)
    win.mkey_pack()


def test_D4_what_is_asked_for_is_what_one_gets(owner, library):
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    spans = [(0, None), (0, 8), (4096, 8192), (13, 1001), (SIZE - 8, None)]
    for (offset, length), flags in itertools.product(spans, [GET, GET | PUT, ATOMIC, None]):
        win = base.derive(offset, length, flags)
        expected = (base.address + offset, SIZE - offset if length is None else length)
        assert (win.address, win.length) == expected
        rights = REMOTE if flags is None else flags
        assert library.unpack(win.mkey_pack()) == (*expected, rights, win.key_id)
        assert moves(library, memory, win)


def test_D4_nothing_of_the_region_is_legal(owner, device, library):
    base = owner.mem_reg(text(), MemFlag.DERIVED_ONLY)
    link(owner, library)
    win = base.derive(SIZE, 0)
    commands = owner.stats()[device.made]
    key = win.mkey_pack()
    assert payload(key) == b""
    assert library.get(key, 0, 0) == b""
    with pytest.raises(um.RangeError):
        library.get(key, 0, 1)
    win.invalidate()
    assert owner.stats()[device.made] == commands


def refused_everywhere(md, far, memory, base, flag):
    """Neither a registration nor a derive with this flag, and nothing has happened."""
    win = base.derive(flags=GET)
    moves(far, memory, win)
    with Unchanged(md, base, win):
        for call in (
            lambda: md.mem_reg(bytearray(SIZE), flag),
            lambda: md.mem_reg(bytearray(SIZE), flag | MemFlag.ACCESS_ALL),
            lambda: md.mem_reg(address=0, length=2**64 - 1, flags=flag),
            lambda: base.derive(flags=flag),
            lambda: base.derive(flags=flag | GET),
            lambda: win.derive(flags=flag | GET),
        ):
            with pytest.raises(um.UnsupportedError) as caught:
                call()
            assert caught.value.status is Status.UNSUPPORTED
    return moves(far, memory, win)


def test_D5_the_whole_address_space_is_refused(owner, library):
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    assert refused_everywhere(owner, library, memory, base, MemFlag.GVA)
    assert moves(library, memory, base.derive())


def test_D6_one_key_for_put_get_and_atomics(owner, library):
    """There is no second, strictly ordered region whose key could get lost."""
    memory = text()
    base = owner.mem_reg(memory)
    link(owner, library)
    win = base.derive()
    for memh in (base, win):
        rma, amo = keys(memh.mkey_pack())
        assert rma == amo
        assert moves(library, memory, memh)
    assert keys(base.mkey_pack())[0] != keys(win.mkey_pack())[0]


def test_D7_a_derived_handle_packs_its_own_key_only(owner, library, attacker):
    memory = text()
    base = owner.mem_reg(memory)
    ep = link(owner, attacker)
    direct = base.mkey_pack()
    win = base.derive()
    packs = {win.mkey_pack(flags) for flags in (PLAIN, RMA, AMO, RMA | AMO)}
    assert len(packs) == 1
    (key,) = packs
    rkey, amo = keys(key)
    assert rkey not in keys(direct)
    assert attacker.read(rkey, base.address, SIZE) == (Wc.SUCCESS, memory)
    win.invalidate()
    before = bytes(memory)
    for attack in (
        lambda: attacker.read(rkey, base.address, 1)[0],
        lambda: attacker.write(rkey, base.address, b"x"),
        lambda: attacker.fetch_add(amo, base.address, 1)[0],
    ):
        assert attack() is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
    assert memory == before
    link(owner, library)
    assert moves(library, memory, base, direct)


def test_D8_symmetric_keys_are_refused(owner, library):
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    assert refused_everywhere(owner, library, memory, base, MemFlag.SYMMETRIC_RKEY)
    assert moves(library, memory, base.derive())


def test_D9_one_allocator(tidy, device, library):
    """Whatever the core takes it gives back to where it came from, in time and whole."""
    with PoisonAllocator() as allocator:
        with device.opened() as md:
            memory = text()
            base = md.mem_reg(memory)
            link(md, library)
            wins = [base.derive(i * 64, 4096) for i in range(16)]
            assert all(moves(library, memory, memh) for memh in [base, *wins])
            base.mkey_pack(device.ways[-1])
            for win in wins:
                win.invalidate()
            base.dereg(cascade=True)
            del base, win, wins
        del md, library.ends[:]
        gc.collect()
        allocator.check()
        assert (allocator.live, allocator.foreign) == (0, 0)
        assert allocator.frees == allocator.allocs


def test_D10_base_and_derived_have_one_size(owner, library):
    """There is one sizing function, so a copy cannot be of another size than what is copied.

    A base's Registration is in front of it, in the same allocation.
    """
    memory = text()
    link(owner, library)
    with PoisonAllocator() as allocator:
        base = owner.mem_reg(memory)
        (with_registration,) = allocator.sizes
        win = base.derive()
        small = win.derive(64, 64, GET | PUT)
        size = allocator.sizes[-1]
        assert allocator.sizes == [with_registration, size, size]
        assert with_registration > size
        _, copied, copy_size, _, bare = memh_layout()
        assert memh_layout(size - bare)[-1] == size
        one, two, three = (memh_bytes(memh, size) for memh in (base, win, small))
        inherited = slice(copied, copied + copy_size)
        assert one[inherited] == two[inherited] == three[inherited]
        for memh in (base, win, small):
            moves(library, memory, memh)
        del base, win, small, memh
        gc.collect()
        allocator.check()


def test_D11_flag_bits_are_their_own(owner, library):
    """UCX has used bit 14 of its Md flags and bit 6 of its handles for something else since."""
    for flags in (MemFlag, MdFlag, PackFlag):
        single = [flag.value for flag in flags if flag.value]
        assert all(value & (value - 1) == 0 for value in single)
        assert len(set(single)) == len(single)
    own = [MdFlag.REG_DERIVED, MdFlag.DERIVE_ENDPOINT, MdFlag.ENDPOINT, MemFlag.DERIVED_ONLY]
    assert min(own) >= 1 << 32  # UCX's grow from below
    assert um.UCT_MD_FLAG_REG_DERIVED is MdFlag.REG_DERIVED
    assert owner.attr.flags & MdFlag.REG_DERIVED
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    for rights in (GET, PUT, ATOMIC, GET | PUT, GET | ATOMIC, PUT | ATOMIC, REMOTE):
        win = base.derive(flags=rights)
        assert library.unpack(win.mkey_pack())[2] == win.flags == rights
        assert moves(library, memory, win)


def test_D12_device_memory_is_refused(owner, library):
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    win = base.derive()

    class OnDevice:
        __cuda_array_interface__ = {
            "data": (base.address, False),
            "shape": (SIZE,),
            "typestr": "|u1",
            "version": 3,
        }

    with Unchanged(owner, base, win, but=["mem_reg"]):  # that one counts what was asked of it
        for call in (
            lambda: owner.mem_reg(OnDevice()),
            lambda: owner.mem_reg(address=base.address, length=SIZE, mem_type=um.MemType.CUDA),
            lambda: owner.mem_reg(address=base.address, length=SIZE, mem_type=7),
        ):
            with pytest.raises(um.UnsupportedError) as caught:
                call()
            assert caught.value.status is Status.UNSUPPORTED
    assert moves(library, memory, win)


def test_D14_no_value_comes_back_soon(owner, attacker):
    """Also not when 64 are destroyed at once; a device may give every index again at once."""
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, attacker)
    old = []
    for _ in range(2):
        wins = [base.derive(i * 64, 64, GET) for i in range(64)]
        values = [keys(win.mkey_pack())[0] for win in wins]
        assert len(set(values)) == 64
        assert not set(values) & set(old)
        for stale in (old[0], old[-1]) if old else ():
            assert attacker.read(stale, base.address, 1)[0] is Wc.REM_ACCESS_ERR
            relink(ep, attacker)
        assert attacker.read(values[9], wins[9].address, 64) == (Wc.SUCCESS, memory[576:640])
        for win in wins:
            win.invalidate()
        old += values
    assert owner.stats()["keys_quarantined"] == 128


def test_D15_there_are_no_imported_handles(owner, library):
    """A peer's key makes an rkey, which cannot be registered, derived from or packed again."""
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    win = base.derive()
    key = win.mkey_pack()
    with owner.rkey_unpack(key) as rkey, Unchanged(owner, base, win):
        with pytest.raises(um.UnsupportedError) as caught:
            win.mkey_pack(EXPORT)
        assert caught.value.status is Status.UNSUPPORTED
        with pytest.raises(um.InvalidParamError):
            owner.mem_reg(rkey)
        for name in ("derive", "mkey_pack", "invalidate"):
            assert not hasattr(rkey, name)
        assert not hasattr(owner, "mem_attach")
    assert moves(library, memory, win)


def test_D16_a_destruction_that_failed_goes_on_where_it_stopped(device, stubborn, library):
    owner, refuse = stubborn
    memory = text()
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    win, other = base.derive(), base.derive()
    win.mkey_pack()
    seen = []
    refused = refuse(3)
    before = owner.stats()
    # With a callback the first try may be under way when the call returns.
    for callback in (None, seen.append, seen.append):
        with pytest.raises(um.MemhError):
            win.invalidate(callback)
        assert (win.state, seen) == (MemhState.REVOKING, [])
        for call in (win.mkey_pack, win.derive):
            with pytest.raises(um.RevokedError):
                call()
        with pytest.raises(um.BusyError):
            base.dereg()
    assert moves(library, memory, other)
    win.invalidate(seen.append)
    assert (win.state, seen) == (MemhState.REVOKED, [Status.OK])
    with pytest.raises(um.RevokedError):
        win.invalidate(seen.append)
    win.dereg()
    assert seen == [Status.OK]
    assert owner.stats()[device.ended] - before[device.ended] == refused + 1
    assert moves(library, memory, other)


# ---- S: questions ----


@pytest.mark.parametrize("flags", [None, MemFlag.ACCESS_RMA])
def test_S1_a_base_is_never_modified(owner, device, library, flags):
    memory = text()
    base = owner.mem_reg(memory, flags)
    link(owner, library)
    ways = [way for way in device.ways if flags is None or not way & AMO]
    before = {way: base.mkey_pack(way) for way in ways}
    raw = base.mkey_pack(PackFlag.RAW)
    for way in ways:
        win = base.derive(64, 4096)
        win.mkey_pack(way)
        assert {w: base.mkey_pack(w) for w in ways} == before
        win.invalidate()
        assert {w: base.mkey_pack(w) for w in ways} == before
    assert base.mkey_pack(PackFlag.RAW) == raw
    assert all(moves(library, memory, base, key) for key in before.values())


def test_S1_atomics_of_the_base_go_on_meanwhile(owner, device, library):
    memory = bytearray(SIZE)
    base = owner.mem_reg(memory)
    link(owner, library)
    key = base.mkey_pack()
    times = device.times(1000)
    library.start("add_many", key, 0, times)
    for _ in range(1500):
        win = base.derive(64, 4096)
        win.mkey_pack()
        win.invalidate()
        if word(memory, 0) == times:
            break
    assert library.answer() == times - 1
    assert word(memory, 0) == times
    assert base.mkey_pack() == key


def test_S2_a_base_packs_one_value_for_life(owner, device, library):
    memory = text()
    base = owner.mem_reg(memory)
    link(owner, library)
    ways = device.ways
    seen = {way: set() for way in ways}
    made = owner.stats()[device.made]
    for i in range(8):
        for way in ways[i % 4 :] + ways[: i % 4]:
            seen[way].add(base.mkey_pack(way))
            base.derive(i * 64, 64).invalidate()
    assert [len(packs) for packs in seen.values()] == [1] * len(ways)
    assert owner.stats()[device.made] - made == (2 if device.base_keys else 0)
    assert all(moves(library, memory, base, *packs) for packs in seen.values())


def test_S4_base_and_derived_pack_in_any_order(owner, device, library):
    memory = text()
    link(owner, library)
    for base_way, derived_way, first in itertools.product(
        [None, *device.ways], [PLAIN, RMA, AMO], [False, True]
    ):
        base = owner.mem_reg(memory)
        win = base.derive(64, 4096) if first else None
        base_key = None if base_way is None else base.mkey_pack(base_way)
        win = win or base.derive(64, 4096)
        key = win.mkey_pack(derived_way)
        assert moves(library, memory, win, key)
        if base_key is not None:
            assert moves(library, memory, base, base_key)
            assert not set(keys(base_key)) & set(keys(key))
        win.invalidate()
        assert moves(library, memory, base, base_key)
        base.dereg()


def test_S6_none_means_the_default(owner, library):
    memory = text()
    link(owner, library)
    base = owner.mem_reg(memory, None)
    assert base.flags == MemFlag.ACCESS_ALL
    win = base.derive(0, None, None, None)
    assert (win.address, win.length, win.flags) == (base.address, SIZE, MemFlag.ACCESS_ALL)
    assert moves(library, memory, win)
    with Unchanged(owner, base, win):
        for call in (
            lambda: owner.mem_reg(None),
            lambda: owner.mem_reg(None, address=None),
            lambda: owner.mem_reg(address=base.address),
            lambda: owner.rkey_unpack(None),
            lambda: base.derive(None),
            lambda: win.mkey_pack(None),
            lambda: win.mkey_pack_into(None),
        ):
            with pytest.raises((um.InvalidParamError, TypeError)):
                call()
    win.invalidate(None, False)


def test_S7_a_derived_handle_has_fewer_rights(owner, library, attacker):
    memory = text()
    base = owner.mem_reg(memory)
    ep = link(owner, attacker)
    win = base.derive(flags=GET)
    rkey, amo = keys(win.mkey_pack())
    assert attacker.read(rkey, base.address, SIZE) == (Wc.SUCCESS, memory)
    before = bytes(memory)
    for attack in (
        lambda: attacker.write(rkey, base.address, b"x"),
        lambda: attacker.fetch_add(amo, base.address, 1)[0],
        lambda: attacker.compare_swap(amo, base.address, word(memory, 0), 1)[0],
    ):
        assert attack() is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
    assert memory == before
    for flags in (PUT, GET | PUT, ATOMIC):
        with Unchanged(owner, base, win), pytest.raises(um.InvalidParamError):
            win.derive(flags=flags)
    link(owner, library)
    assert moves(library, memory, base)  # which is as writable as ever
    assert library.get(win.mkey_pack(), 0, SIZE) == memory


def test_S10_a_clone_writes_every_byte_once(owner, library):
    """No byte of a derived handle is what the allocator left there."""
    memory = text()
    base = owner.mem_reg(memory)
    link(owner, library)
    size = memh_layout()[-1]
    found, handles = [], []
    for fill in (0xA5, 0x5A):
        with PoisonAllocator(fill=fill) as allocator:
            handles.append(base.derive(64, 4096, GET | PUT))
            assert allocator.sizes[0] >= size
            found.append((fill, memh_bytes(handles[-1], allocator.sizes[0])))
    (fill, one), (other_fill, two) = found
    left = [i for i in range(len(one)) if one[i] == fill and two[i] == other_fill]
    assert left == []
    assert all(moves(library, memory, memh) for memh in [base, *handles])


def test_S11_base_and_derived_are_one_type(owner, library):
    """No field is for one kind only: both do all that any handle does, through the same calls."""
    memory = text()
    base = owner.mem_reg(memory)
    win = base.derive()
    link(owner, library)
    _, copied, copy_size, own, _ = memh_layout()
    one, two = memh_bytes(base, own + 32), memh_bytes(win, own + 32)
    assert type(base) is type(win)
    assert one[copied : copied + copy_size] == two[copied : copied + copy_size]
    assert one[own : own + 16] == two[own : own + 16]  # address and length: the same place
    assert struct.unpack_from("=QQ", one, own) == (base.address, base.length)
    for memh in (base, win):
        assert moves(library, memory, memh)
        assert (memh.address, memh.length, memh.grant) == (win.address, SIZE, base.grant)
        # As local memory of a transfer: the data path looks at what all handles have.
        mine, rkey = library.buffer(SIZE)
        with owner.rkey_unpack(rkey) as theirs:
            library.ends[0].get(theirs, mine, memh)
        assert memory == bytes([7]) * SIZE
        memory[:] = text()
    for memh in (win, base):
        memh.dereg()
        assert memh.state is MemhState.CLOSED


def test_S13_exported_keys_are_refused(owner, library):
    memory = text()
    base = owner.mem_reg(memory)
    link(owner, library)
    win = base.derive()
    win.mkey_pack()
    with Unchanged(owner, base, win):
        for memh, flags in itertools.product((base, win), (EXPORT, EXPORT | RMA, EXPORT | AMO)):
            with pytest.raises(um.UnsupportedError) as caught:
                memh.mkey_pack(flags)
            assert caught.value.status is Status.UNSUPPORTED
    assert moves(library, memory, base)
    assert moves(library, memory, win)
