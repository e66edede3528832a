# SPDX-License-Identifier: BSD-3-Clause
"""Windows on what a runtime has: an Md on its ibv_context and ibv_pd, a base on its ibv_mr.

Nothing of it is registered anew, and nothing of it is ever freed by us.
"""

import ctypes as c
import errno
import threading
import weakref
from collections.abc import Iterator

import pytest

import ucx_memh as um
from _devices import Device
from _rawqp import MR_RKEY, RawPeer
from _sides import Wc, keys, link, relink
from ucx_memh import Enforcement, MemFlag

GET, PUT, ATOMIC = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT, MemFlag.REMOTE_ATOMIC
LOCAL_WRITE, WRITE, READ, ATOMICS, MW_BIND = (1 << n for n in range(5))  # IBV_ACCESS_*
EVERY = LOCAL_WRITE | WRITE | READ | ATOMICS | MW_BIND
SIZE = 8192


class Memory:
    """Registered with the runtime's own verbs."""

    def __init__(self, raw: RawPeer, access: int, pd: c.c_void_p | None = None) -> None:
        self.lib = raw.lib
        self.bytes = c.create_string_buffer(bytes(i % 251 for i in range(SIZE)), SIZE)
        self.address = c.addressof(self.bytes)
        self.lib.ibv_reg_mr.restype = c.c_void_p
        self.mr = self.lib.ibv_reg_mr(pd or raw.pd, self.bytes, c.c_size_t(SIZE), access)
        assert self.mr, c.get_errno()
        self.rkey = c.c_uint32.from_address(self.mr + MR_RKEY).value

    def deregister(self) -> int:
        """The errno, 0 if it is gone."""
        failed = self.lib.ibv_dereg_mr(c.c_void_p(self.mr))
        if not failed:
            self.mr = None
        return failed


class Runtime:
    """Somebody's device context, protection domain and regions."""

    def __init__(self, device: Device) -> None:
        self.raw = RawPeer(device.where.library, device.where.gid_index, size=4096)
        self.config = {"context": self.raw.context.value, "pd": self.raw.pd.value}
        self.memories: list[Memory] = []

    def register(self, access: int = EVERY, pd: c.c_void_p | None = None) -> Memory:
        self.memories.append(Memory(self.raw, access, pd))
        return self.memories[-1]

    def close(self) -> None:
        """All is still there, and goes."""
        for memory in self.memories:
            assert memory.mr is None or memory.deregister() == 0
        for what, free in (("qp", "destroy_qp"), ("cq", "destroy_cq"), ("mr", "dereg_mr"),
                           ("pd", "dealloc_pd"), ("context", "close_device")):  # fmt: skip
            assert getattr(self.raw.lib, f"ibv_{free}")(getattr(self.raw, what)) == 0, free
            setattr(self.raw, what, None)


@pytest.fixture
def runtime(tidy: None, device: Device) -> Iterator[Runtime]:
    runtime = Runtime(device)
    yield runtime
    runtime.close()


@pytest.fixture
def md(runtime: Runtime, device: Device) -> Iterator[um.Md]:
    with device.opened(**runtime.config) as md:
        md.endpoint().close()  # registers the bounce buffers of the domain
        yield md


def registered(md: um.Md) -> tuple[int, int]:
    stats = md.stats()
    return stats["device.reg_mr"], stats["device.dereg_mr"]


def windows(md: um.Md) -> int:
    stats = md.stats()
    return stats["device.alloc_mw"] - stats["device.dealloc_mw"]


# ---- what it is for ----


def test_a_life(runtime, md, device, attacker):
    memory = runtime.register()
    before = registered(md)
    ep = link(md, attacker)
    base = md.mem_adopt(memory.mr)
    assert (base.address, base.length) == (memory.address, SIZE)
    assert base.grant == MemFlag.ACCESS_RMA
    win = base.derive(64, 64, GET)
    rkey, _ = keys(win.mkey_pack())
    assert rkey != memory.rkey
    assert attacker.read(rkey, win.address, 64) == (Wc.SUCCESS, memory.bytes[64:128])
    assert attacker.write(rkey, win.address, b"x") is Wc.REM_ACCESS_ERR
    relink(ep, attacker)
    assert attacker.read(rkey, win.address + 64, 8)[0] is device.outside
    relink(ep, attacker)
    other = base.derive(0, 64, PUT)
    write, _ = keys(other.mkey_pack())
    win.invalidate()
    assert attacker.read(rkey, win.address, 64)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)
    assert attacker.write(write, other.address, b"seen") is Wc.SUCCESS
    assert memory.bytes[:4] == b"seen"
    base.dereg(cascade=True)
    assert attacker.write(write, other.address, b"late") is Wc.REM_ACCESS_ERR
    assert memory.bytes[:4] == b"seen"
    assert registered(md) == before  # not a page of it was pinned again, or let go
    assert windows(md) == 0


def test_with_our_own_library(runtime, md, library):
    """The peer need not know whose registration it is; and it serves transfers of ours."""
    memory = runtime.register()
    base = md.mem_adopt(memory.mr, flags=MemFlag.ACCESS_RMA | MemFlag.DERIVED_ONLY)
    win = base.derive(4096, 1024)
    with pytest.raises(um.UnsupportedError):
        base.mkey_pack()
    ep = link(md, library)
    key = win.mkey_pack()
    library.put(key, 8, b"through a key")
    assert library.get(key, 8, 13) == memory.bytes[4104:4117] == b"through a key"
    address, other = library.buffer(SIZE)
    ep.get(md.rkey_unpack(other), address, base)
    assert memory.bytes[:] == bytes([7]) * SIZE
    win.invalidate()
    with pytest.raises(um.RemoteAccessError):
        library.get(key, 8, 13)


def test_closing_leaves_what_the_runtime_has(runtime, device, attacker):
    memory = runtime.register()
    kept = []
    for force in (False, True):
        md = device.where.open(**runtime.config)
        base = md.mem_adopt(memory.mr)
        ep = link(md, attacker)
        win = base.derive()
        kept.append(keys(win.mkey_pack())[0])
        assert attacker.read(kept[-1], base.address, 8)[0] is Wc.SUCCESS
        if not force:
            ep.close()
            base.dereg(cascade=True)
        md.close(force=force)
        attacker.ends.clear()
        attacker.reset()
    for number in (*kept, memory.rkey):  # over the runtime's own connection
        runtime.raw.connect(attacker.address)
        attacker.connect(runtime.raw.address)
        status, data = attacker.read(number, memory.address, 8)
        assert status is (Wc.SUCCESS if number == memory.rkey else Wc.REM_ACCESS_ERR)
        assert number != memory.rkey or data == memory.bytes[:8]
        runtime.raw.renew()
        attacker.reset()
    assert runtime.register().deregister() == 0


def test_an_owner_is_held_until_dereg(runtime, md):
    memory = runtime.register()

    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    base = md.mem_adopt(memory.mr, owner=owner)
    del owner
    win = base.derive(0, 64)
    assert gone() is not None
    win.dereg()
    base.dereg()
    assert gone() is None


def test_two_domains_on_one_context(runtime, md, device, attacker):
    """Each has its own keys to the same region, and does not notice what the other revokes."""
    memory = runtime.register()
    with device.opened(**runtime.config) as other:
        mine, theirs = md.mem_adopt(memory.mr).derive(), other.mem_adopt(memory.mr).derive()
        ours, others = (keys(win.mkey_pack())[0] for win in (mine, theirs))
        ep = link(other, attacker)
        for number in (ours, others):  # one protection domain
            assert attacker.read(number, memory.address, 8) == (Wc.SUCCESS, memory.bytes[:8])
        mine.invalidate()
        assert attacker.read(others, memory.address, 8)[0] is Wc.SUCCESS
        assert attacker.read(ours, memory.address, 8)[0] is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
        new = mine.base.derive()
        again, _ = keys(new.mkey_pack())
        assert attacker.read(again, memory.address, 8)[0] is Wc.SUCCESS
        other.close(force=True)
    attacker.ends.clear()
    attacker.reset()
    link(md, attacker)
    assert attacker.read(again, memory.address, 8)[0] is Wc.SUCCESS
    assert attacker.read(others, memory.address, 8)[0] is Wc.REM_ACCESS_ERR


def test_the_runtime_deregisters_first(runtime, md, attacker):
    """It is told that windows are bound; when they are revoked it succeeds, base or no base."""
    memory = runtime.register()
    base = md.mem_adopt(memory.mr)
    win = base.derive(0, 64)
    number, _ = keys(win.mkey_pack())
    link(md, attacker)
    assert memory.deregister() in (errno.EBUSY, errno.EINVAL)
    assert attacker.read(number, base.address, 8) == (Wc.SUCCESS, memory.bytes[:8])
    assert win.state is um.MemhState.LIVE
    win.invalidate()
    assert memory.deregister() == 0
    assert attacker.read(number, base.address, 8)[0] is Wc.REM_ACCESS_ERR
    before = registered(md)
    base.dereg(cascade=True)
    assert registered(md) == before


# ---- what it does not allow ----


def healthy(runtime: Runtime, md: um.Md) -> None:
    """Nothing is left of what was refused, and windows are bound as before."""
    bases = md.stats()["live_bases"]
    assert windows(md) == 0
    memory = runtime.register()
    base = md.mem_adopt(memory.mr)
    win = base.derive()
    win.mkey_pack()
    assert windows(md) == 1
    base.dereg(cascade=True)
    assert memory.deregister() == 0
    assert windows(md) == 0
    assert md.stats()["live_bases"] == bases


def test_no_window_binding(runtime, md, attacker):
    """Its direct key is of use, but nothing can be derived: said before a key is packed."""
    memory = runtime.register(EVERY & ~MW_BIND)
    with pytest.raises(um.UnsupportedError, match="without IBV_ACCESS_MW_BIND"):
        md.mem_adopt(memory.mr, flags=MemFlag.DERIVED_ONLY)
    assert md.stats()["live_bases"] == 0
    base = md.mem_adopt(memory.mr)
    with pytest.raises(um.UnsupportedError, match="without IBV_ACCESS_MW_BIND"):
        base.derive()
    assert base.derived_count == 0
    assert "nothing can be derived" in base.explain()
    healthy(runtime, md)
    link(md, attacker)
    number, _ = keys(base.mkey_pack())
    assert number == memory.rkey
    assert attacker.read(number, base.address, 8) == (Wc.SUCCESS, memory.bytes[:8])
    base.dereg()


def test_no_local_write(runtime, md, attacker):
    """What peers would write through keys of it: said when it is adopted."""
    memory = runtime.register(READ | MW_BIND)
    for flags in (None, PUT, ATOMIC | GET, MemFlag.DERIVED_ONLY, MemFlag.DERIVED_ONLY | PUT):
        with pytest.raises(um.AccessError, match="lacks IBV_ACCESS_LOCAL_WRITE"):
            md.mem_adopt(memory.mr, flags=flags)
    assert md.stats()["live_bases"] == 0
    healthy(runtime, md)
    base = md.mem_adopt(memory.mr, flags=GET)
    assert "for reading only" in base.explain()
    with pytest.raises(um.InvalidParamError):
        base.derive(flags=PUT)
    win = base.derive()
    number, _ = keys(win.mkey_pack())
    link(md, attacker)
    assert attacker.read(number, base.address, 8) == (Wc.SUCCESS, memory.bytes[:8])
    assert attacker.write(number, base.address, b"x") is Wc.REM_ACCESS_ERR
    base.dereg(cascade=True)


def test_no_atomics(runtime, md, device, attacker):
    """Nobody gets them unasked.  Whether a window needs the registration's own right is up to the
    device: it cannot be tried without touching a byte, and `explain` says so."""
    memory = runtime.register(EVERY & ~ATOMICS)
    base = md.mem_adopt(memory.mr)
    with pytest.raises(um.InvalidParamError):
        base.derive(flags=ATOMIC)
    assert "atomics" not in base.explain()
    base.dereg()
    link(md, attacker)
    base = md.mem_adopt(memory.mr, flags=MemFlag.ACCESS_ALL)
    win = base.derive(flags=ATOMIC)
    _, number = keys(win.mkey_pack())
    status, _ = attacker.fetch_add(number, base.address, 0)
    assert status is (Wc.REM_ACCESS_ERR if device.direct_atomics else Wc.SUCCESS)
    assert ("atomics were not tried" in base.explain()) == device.direct_atomics
    base.dereg(cascade=True)


def test_another_protection_domain(runtime, md):
    raw = runtime.raw
    raw.lib.ibv_alloc_pd.restype = c.c_void_p
    pd = c.c_void_p(raw.lib.ibv_alloc_pd(raw.context))
    memory = runtime.register(EVERY, pd)
    before = windows(md), registered(md)
    with pytest.raises(um.InvalidParamError, match="another protection domain"):
        md.mem_adopt(memory.mr)
    assert (windows(md), registered(md)) == before
    assert md.stats()["live_bases"] == 0
    assert memory.deregister() == raw.lib.ibv_dealloc_pd(pd) == 0


def test_a_domain_of_another_context(runtime, device):
    with RawPeer(device.where.library, device.where.gid_index, size=64) as other:
        with pytest.raises(um.InvalidParamError, match="not of this ibv_context"):
            device.where.open(context=runtime.raw.context.value, pd=other.pd.value)
    for half in runtime.config:
        with pytest.raises(um.InvalidParamError, match="go together"):
            device.where.open(**{half: runtime.config[half]})


def test_its_own_key_may_do_more_than_was_said(runtime, md, attacker):
    """So the device is not said to enforce the rights of such a key."""
    memory = runtime.register()
    base = md.mem_adopt(memory.mr, flags=GET)
    assert base.enforcement.rights.put is Enforcement.COOPERATIVE
    assert base.derive().enforcement.rights.put is Enforcement.ENFORCED
    number, _ = keys(base.mkey_pack())
    link(md, attacker)
    assert attacker.write(number, base.address, b"more") is Wc.SUCCESS
    assert memory.bytes[:4] == b"more"
    base.dereg(cascade=True)


# ---- trying fails ----


@pytest.fixture
def hooked(hooks) -> Iterator[um.Md]:
    with hooks.opened() as md:
        yield md


@pytest.mark.parametrize("verb", ["alloc_mw", "bind_mw"])
def test_the_device_has_no_room_for_a_window(hooks, hooked, verb):
    memory = Memory(hooks.raw, EVERY)
    hooks.counts.clear()
    hooks.refuse(verb, errno.ENOMEM, 2 if verb == "bind_mw" else 1)
    with pytest.raises(um.NoMemoryError, match=f"ibv_{verb}"):
        hooked.mem_adopt(memory.mr)
    assert hooks.counts["dealloc_mw"] == (verb == "bind_mw")
    assert hooked.stats()["live_bases"] == 0
    hooked.mem_adopt(memory.mr).dereg()
    assert memory.deregister() == 0


def test_the_device_does_not_free_the_window(hooks, hooked):
    """It lets go of the region all the same, and is freed when it can be."""
    memory = Memory(hooks.raw, EVERY)
    hooks.refuse("dealloc_mw", errno.EBUSY, 2)
    base = hooked.mem_adopt(memory.mr)
    assert memory.deregister() == 0
    base.dereg()
    memory = Memory(hooks.raw, EVERY)
    before = hooks.counts["dealloc_mw"]
    hooked.mem_adopt(memory.mr).dereg()
    assert hooks.counts["dealloc_mw"] - before == 2
    assert memory.deregister() == 0


def test_a_lost_control_queue_pair(hooks, hooked):
    """Once is no reason to call a region unfit."""
    memory = Memory(hooks.raw, EVERY)
    hooks.spoil_next(lambda info: setattr(info, "length", 2 * SIZE))
    base = hooked.mem_adopt(memory.mr, flags=MemFlag.DERIVED_ONLY)
    assert "also for writing" in base.explain()
    base.dereg()
    assert memory.deregister() == 0


def test_adopting_and_packing_at_the_same_time(runtime, md, device):
    """Both bind over the one control queue pair, and refused ones break it."""
    good, bad = runtime.register(), runtime.register(EVERY & ~MW_BIND)
    base = md.mem_adopt(good.mr)
    failures: list[BaseException] = []

    def work(turn) -> None:
        try:
            for _ in range(device.times(100)):
                turn()
        except BaseException as failure:
            failures.append(failure)

    def pack() -> None:
        with base.derive(0, 64) as win:
            win.mkey_pack()

    turns = [
        pack,
        lambda: md.mem_adopt(good.mr, flags=MemFlag.DERIVED_ONLY).dereg(),
        lambda: md.mem_adopt(bad.mr).dereg(),
    ]
    threads = [threading.Thread(target=work, args=(turn,)) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    base.dereg()
    assert windows(md) == 0
