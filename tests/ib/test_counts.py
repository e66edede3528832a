# SPDX-License-Identifier: BSD-3-Clause
"""What each step costs, counted in verbs: by the backend, and by what stands below it."""

import ctypes
import mmap

import pytest

import ucx_memh as um
from _sides import Wc, descriptors, keys, link
from ucx_memh import MemFlag, PackFlag

GET, PUT = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT
SIZE = 64 << 10
VERBS = "alloc_mw dealloc_mw bind_mw local_inv reg_mr dereg_mr create_qp modify_qp".split()


class Counter:
    """{verb: how often} since it was last asked; of windows' verbs _hooks.py says the same."""

    def __init__(self, md, hooks):
        self.md, self.hooks = md, hooks
        self.last, self.below = self.look()

    def look(self):
        stats = self.md.stats()
        return {verb: stats[f"device.{verb}"] for verb in VERBS}, self.hooks.counts.copy()

    def __call__(self):
        now, below = self.look()
        change = {verb: now[verb] - self.last[verb] for verb in VERBS}
        change = {verb: n for verb, n in change.items() if n}
        there = below - self.below
        self.last, self.below = now, below
        assert there == {verb: n for verb, n in change.items() if verb.endswith(("_mw", "_inv"))}
        return change


@pytest.fixture
def md(hooks):
    with hooks.opened() as md:
        md.endpoint().close()  # registers the bounce buffers of the domain
        yield md


@pytest.fixture
def count(md, hooks):
    return Counter(md, hooks)


def test_verbs_of_a_life(md, count):
    """derive none, the first pack alloc and bind, invalidate one dealloc, and no LOCAL_INV."""
    base = md.mem_reg(bytearray(SIZE))
    assert count() == {"reg_mr": 1}
    win = base.derive(64, 4096)
    small = win.derive(64, 64, GET)
    assert count() == {}
    win.mkey_pack()
    assert count() == {"alloc_mw": 1, "bind_mw": 1}
    for flags in (0, 1, 2, 3, PackFlag.RAW):
        win.mkey_pack(flags)
    base.mkey_pack()
    assert count() == {}
    small.invalidate()  # was never packed
    assert count() == {}
    win.invalidate()
    assert count() == {"dealloc_mw": 1}
    win.dereg()
    assert count() == {}
    base.dereg()
    assert count() == {"dereg_mr": 1}


def test_verbs_of_many(md, count):
    """Linear, and the base pays nothing."""
    base = md.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
    count()
    wins = [base.derive(i * 64, 64) for i in range(200)]
    assert count() == {}
    for win in wins:
        win.mkey_pack()
    assert count() == {"alloc_mw": 200, "bind_mw": 200}
    base.dereg(cascade=True)
    assert count() == {"dealloc_mw": 200, "dereg_mr": 1}


def test_verbs_do_not_depend_on_size(md, device, count):
    """4 KiB and much: the same verbs, one for each step."""
    costs = []
    for size in (4096, (64 if device.slow else 1024) << 20):
        with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            base = md.mem_reg(memory, MemFlag.DERIVED_ONLY)
            count()
            steps = []
            win = base.derive()
            steps.append(count())
            win.mkey_pack()
            steps.append(count())
            win.invalidate()
            steps.append(count())
            costs.append(steps)
            base.dereg()
            del base, win
    assert costs[0] == costs[1] == [{}, {"alloc_mw": 1, "bind_mw": 1}, {"dealloc_mw": 1}]


def test_a_refused_call_sends_nothing(md, count):
    base = md.mem_reg(bytearray(SIZE))
    win = base.derive(0, 64, GET)
    win.mkey_pack()
    count()
    for call in (
        lambda: win.derive(0, 65),
        lambda: win.derive(flags=PUT),
        lambda: win.mkey_pack(PackFlag.EXPORT),
        lambda: base.mkey_pack(PackFlag.INVALIDATE_RMA),
        lambda: base.invalidate(),
        lambda: base.dereg(),
        lambda: md.close(),
    ):
        with pytest.raises(um.MemhError):
            call()
    assert count() == {}


def test_nothing_of_no_bytes(md, count):
    """Zero bytes have no registration and no window."""
    base = md.mem_reg(bytearray(0))
    win = base.derive()
    win.mkey_pack(), base.mkey_pack()
    win.invalidate()
    base.dereg()
    assert count() == {}


def test_opening(device):
    """The self-check frees what it made: only its queue pair stays."""
    with device.opened() as md:
        stats = md.stats()
        assert stats["device.alloc_mw"] == stats["device.dealloc_mw"] > 0
        assert stats["device.reg_mr"] == stats["device.dereg_mr"] > 0
        assert stats["device.create_qp"] == 1
        verbs = sum(n for name, n in stats.items() if name.startswith("device."))
        assert verbs < 80
    with device.opened(self_check=False) as md:
        assert md.stats()["device.create_qp"] == md.stats()["device.alloc_mw"] == 0


def test_fifty_lives_leave_nothing(tidy, device, attacker):
    """Opened, used, revoked, closed: no descriptor and nothing on the device is left of it."""
    memory = bytearray(SIZE)

    def life():
        with device.opened() as md:
            base = md.mem_reg(memory, MemFlag.DERIVED_ONLY)
            ep = link(md, attacker)
            win, bound, left = base.derive(), base.derive(endpoint=ep), base.derive()
            for memh in (win, bound, left):
                rkey, _ = keys(memh.mkey_pack())
                assert attacker.read(rkey, base.address, 8)[0] is Wc.SUCCESS
            win.invalidate()
        attacker.ends.clear()
        attacker.reset()

    life()
    before = device.live(), descriptors()
    for _ in range(device.times(50) if device.slow else 50):
        life()
    assert (device.live(), descriptors()) == before
    memory.append(0)


def test_a_region_that_a_runtime_registered(hooks, md, count):
    """Windows on it, and never a verb on itself."""
    raw = hooks.raw
    raw.lib.ibv_reg_mr.restype = ctypes.c_void_p
    memory = ctypes.create_string_buffer(4096)
    mr = ctypes.c_void_p(raw.lib.ibv_reg_mr(raw.pd, memory, ctypes.c_size_t(4096), 0x1F))
    assert mr.value
    base = md.mem_adopt(mr.value, owner=memory)
    assert count() == {"alloc_mw": 1, "bind_mw": 1, "dealloc_mw": 1}  # may windows be bound to it?
    win = base.derive(64, 64)
    win.mkey_pack()
    assert count() == {"alloc_mw": 1, "bind_mw": 1}
    win.invalidate()
    base.dereg()
    assert count() == {"dealloc_mw": 1}
    assert raw.lib.ibv_dereg_mr(mr) == 0
