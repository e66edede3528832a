# SPDX-License-Identifier: BSD-3-Clause
"""Rule 13: any call in any thread; who loses a race is told, and nothing is lost or done twice."""

import random
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

import ucx_memh as um
from _fakes import AMO, DERIVED_ONLY, RAW, RMA, native

LIVE, REVOKING, REVOKED, CLOSED = um.MemhState


@pytest.fixture(autouse=True)
def eager_switching():
    """Let threads meet more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def race(*functions):
    """Run them at the same time; returns what each returned or raised (MemhErrors only)."""
    barrier = threading.Barrier(len(functions))
    results = [None] * len(functions)
    failures = []

    def run(index, function):
        barrier.wait()
        try:
            results[index] = function()
        except um.MemhError as error:
            results[index] = type(error)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return results


def until(condition):
    while not condition():
        time.sleep(0.0005)


# ---- one of many ----


@pytest.mark.parametrize("flags", [0, RMA, AMO, RMA | AMO], ids=str)
@pytest.mark.parametrize("kind", ["base", "derived"])
def test_rule13_the_first_pack_of_32_threads_makes_one_key(fakes, kind, flags):
    md, device = fakes()
    device.slow("key_create", 0.002)
    memh = base = md.mem_reg(bytearray(64))
    if kind == "derived":
        memh = base.derive()
    keys = race(*[lambda: memh.mkey_pack(flags)] * 32)
    assert len(set(keys)) == 1
    made = 1 if kind == "derived" else bool(flags & RMA) + bool(flags & AMO)
    assert device.count("key_create") == made
    assert device.count("mkey_pack") == 1


def test_rule13_first_packs_of_many_handles(fakes):
    """Keys of one Md are made one after the other: the fake checks that."""
    md, device = fakes()
    device.slow("key_create", 0.0005)
    base = md.mem_reg(bytearray(64))
    wins = [base.derive() for _ in range(16)]
    keys = race(*[win.mkey_pack for win in wins])
    assert len({native(key)[0] for key in keys}) == 16
    race(*[win.invalidate for win in wins[:8]], *[win.mkey_pack for win in wins[8:]])
    assert len(device.live_keys) == 9


@pytest.mark.parametrize("destroy", ["now", "progress"])
def test_rule13_one_of_many_invalidates_does_it(fakes, destroy):
    md, device = fakes(destroy=destroy)
    device.slow("key_destroy", 0.001)
    base = md.mem_reg(bytearray(64))
    for _ in range(10):
        win = base.derive()
        win.mkey_pack()
        results = race(*[win.invalidate] * 6)
        assert results.count(None) == 1
        assert set(results) <= {None, um.RevokedError, um.BusyError}
        assert win.state == REVOKED
    assert device.count("key_destroy") == 10
    assert md.stats()["revoke"] == 10


def test_rule13_many_deregs_do_it_once(fakes):
    md, device = fakes()
    device.slow("mem_dereg", 0.001)
    for _ in range(10):
        memory = bytearray(64)
        base = md.mem_reg(memory)
        base.mkey_pack(RMA)
        assert race(*[base.dereg] * 6) == [None] * 6
        memory.append(0)
    assert device.count("mem_dereg") == device.count("key_destroy") == 10


def test_rule13_callbacks_of_racing_invalidates(fakes):
    md, _ = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    for _ in range(20):
        win = base.derive()
        win.mkey_pack()
        called = [[] for _ in range(4)]
        results = race(*[partial(win.invalidate, seen.append) for seen in called], md.progress)
        while win.state != REVOKED:
            md.progress()
        for result, seen in zip(results, called, strict=False):
            assert seen == ([um.Status.OK] if result is None else [])
        assert results[:4].count(None) == 1


# ---- whoever loses ----

LOSERS = (um.RevokedError, um.ClosedError, um.BusyError)


def test_rule13_pack_derive_invalidate_dereg(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    for round_ in range(150):
        win = base.derive()
        if round_ % 2:
            win.mkey_pack()
        results = race(
            win.mkey_pack,
            partial(win.derive, 0, 8),
            partial(win.invalidate, cascade=round_ % 3 == 0),
            win.dereg,
        )
        for result in results:
            assert not isinstance(result, type) or result in LOSERS
        for memh in (*(r for r in results if type(r) is type(win)), win):
            memh.dereg(cascade=True)
            assert memh.state == CLOSED
    assert base.derived_count == 0
    assert len(device.live_keys) == 1


def test_rule13_derive_against_dereg_of_the_base(fakes):
    md, device = fakes()
    outcomes = set()
    for _ in range(150):
        base = md.mem_reg(bytearray(64))
        win, closed = race(base.derive, base.dereg)
        if closed is None:  # the derive has lost
            assert win is um.ClosedError or win is um.RevokedError
        else:
            assert closed is um.BusyError
            assert win.mkey_pack()
            win.dereg()
            base.dereg()
        outcomes.add(closed)
    assert device.live_keys == {}
    assert outcomes <= {None, um.BusyError}


def test_rule13_packs_of_a_dying_handle(fakes):
    """Either the bytes, or REVOKED; and the key is gone in the end."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    for _ in range(150):
        win = base.derive()
        key, again, gone = race(win.mkey_pack, partial(win.mkey_pack, RAW), win.invalidate)
        assert gone is None
        assert key is um.RevokedError or native(key)[0] not in device.live_keys
        assert again is um.RevokedError or len(again) == 16
        assert len(device.live_keys) == 1


def test_rule13_cascades_against_deregs_of_the_leaves(fakes):
    """A leaf that another thread closes first is no failure of the cascade."""
    md, device = fakes()
    device.slow("key_destroy", 0.002)
    base = md.mem_reg(bytearray(64))
    for close in ("dereg", "invalidate"):
        for _ in range(5):
            top = base.derive()
            leaves = [top.derive() for _ in range(2)]
            for leaf in leaves:
                leaf.mkey_pack()
            before = device.count("key_destroy")

            def cascade(top=top, before=before):
                until(lambda: device.count("key_destroy") > before)
                top.dereg(cascade=True)

            results = race(cascade, *[getattr(leaf, close) for leaf in leaves])
            assert results[0] is None
            assert set(results[1:]) <= {None, um.RevokedError}
            assert top.state == CLOSED


@pytest.mark.parametrize("close", ["dereg", "invalidate"])
def test_rule13_closing_an_endpoint_against_its_handles(fakes, close):
    md, device, _one, two = fakes.connected()
    device.slow("key_destroy", 0.002)
    base = md.mem_reg(bytearray(64))
    wins = [base.derive(endpoint=two) for _ in range(3)]
    for win in wins:
        win.mkey_pack()

    def close_endpoint():
        until(lambda: device.count("key_destroy"))
        two.close()

    results = race(close_endpoint, *[getattr(win, close) for win in wins])
    assert results[0] is None
    assert {win.state for win in wins} <= {REVOKED, CLOSED}


# ---- data ----


def test_rule13_nothing_moves_after_invalidate_has_returned(fakes):
    """While a peer hammers: what invalidate returns to is the last that memory has seen."""
    for _ in range(10):
        md, _, one, two = fakes.connected()
        memory = bytearray(4096)
        base = md.mem_reg(memory, DERIVED_ONLY)
        win = base.derive()
        rkey = md.rkey_unpack(win.mkey_pack())
        put = []

        def peer(one=one, rkey=rkey, win=win, put=put):
            n = 0
            while True:
                n += 1
                one.put(rkey, win.address, bytes([n & 255]) * 4096)
                put.append(n)

        snapshot = []

        def owner(win=win, put=put, memory=memory, snapshot=snapshot):
            until(lambda: len(put) > 3)
            win.invalidate()
            snapshot.append(bytes(memory))

        refused, gone = race(peer, owner)
        assert refused is um.RemoteAccessError
        assert gone is None
        assert memory == snapshot[0]
        assert two.state == um.EpState.ERROR


def test_rule13_dereg_against_transfers_from_the_memory(fakes):
    """BUSY, and nothing has changed; a transfer that comes later is refused."""
    md, device, one, _two = fakes.connected(need_memh=True, deferred=True)
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    for _ in range(100):
        source = md.mem_reg(bytearray(64))
        sent, closed = race(partial(one.put, rkey, base.address, source), source.dereg)
        if closed is None:
            assert sent in (None, um.ClosedError, um.RevokedError)
        else:
            assert (sent, closed) == (None, um.BusyError)
            source.dereg()
    assert len(device.live_keys) == 1


def test_rule13_progress_in_many_threads(fakes):
    md, device, one, _two = fakes.connected(deferred=True)
    memory = bytearray(8)
    base = md.mem_reg(memory)
    rkey = md.rkey_unpack(base.mkey_pack())
    address = base.address - base.address % 8

    def post():
        olds = [one.fetch_add_nb(rkey, address, 1) for _ in range(50)]
        return [operation.wait() for operation in olds]

    results = race(post, post, post, md.progress, md.progress)
    assert sorted([*results[0], *results[1], *results[2]]) == list(range(150))
    assert int.from_bytes(memory, "little") == 150
    assert device.count("transfer") == 150


def test_rule13_one_operation_waited_for_by_many(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(8))
    rkey = md.rkey_unpack(base.mkey_pack())
    for _ in range(20):
        device.hold()
        local = bytearray(8)
        operation = one.get_nb(rkey, base.address, local)
        assert (
            race(operation.wait, operation.wait, operation.wait, device.release)[:3] == [None] * 3
        )
        local.append(0)


@pytest.mark.parametrize("op", ["get", "fetch_add", "ptr", "retry"])
def test_rule13_an_rkey_may_be_closed_while_it_is_used(fakes, op):
    """The allocator poisons it; the operation must not look at the poison."""
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    address = base.address - base.address % 8 + 8
    rkey = md.rkey_unpack(base.mkey_pack())
    if op == "retry":
        device.fail("post", um.Status.NO_RESOURCE, count=2**40)
    else:
        device.slow("rkey_ptr" if op == "ptr" else "post", 0.02)
    called = "rkey_ptr" if op == "ptr" else "post"
    into = bytearray(8)
    calls = {
        "get": lambda: one.get(rkey, address, into),
        "retry": lambda: one.get(rkey, address, into),
        "fetch_add": lambda: one.fetch_add(rkey, address, 1),
        "ptr": rkey.ptr,
    }

    def close():
        until(lambda: device.count(called))
        rkey.close()
        device.clear_faults()

    expected = {"get": None, "retry": None, "fetch_add": 0, "ptr": base.address}
    assert race(calls[op], close) == [expected[op], None]
    assert device.count("rkey_release") == 1
    assert md.stats()["live_rkeys"] == 0


@pytest.mark.parametrize("op", ["post", "ep_address", "ep_connect", "ep_reset"])
def test_rule13_an_endpoint_may_be_closed_while_it_is_used(fakes, op):
    md, device, one, two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    before = device.count(op)
    if op == "ep_connect":
        one.reset()
    device.slow(op, 0.02)
    address = two.address if op != "ep_address" else None
    calls = {
        "post": lambda: one.put(rkey, base.address, b"x"),
        "ep_address": lambda: len(one.address) > 0,
        "ep_connect": lambda: one.connect(address),
        "ep_reset": one.reset,
    }

    def close():
        until(lambda: device.count(op) > before)
        one.close()

    used, closed = race(calls[op], close)
    assert closed is None
    assert used in (None, True, um.ClosedError, um.FlushedError, um.InvalidParamError)
    assert repr(one) == "<Endpoint closed>"


# ---- rkeys ----


def test_rule13_unpack_and_close_in_many_threads(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    wins = [base.derive(i, 1) for i in range(4)]
    keys = [win.mkey_pack() for win in wins]

    def work(seed):
        rng = random.Random(seed)
        held = []
        for _ in range(300):
            if held and rng.random() < 0.5:
                held.pop(rng.randrange(len(held))).close()
            else:
                index = rng.randrange(4)
                held.append(md.rkey_unpack(keys[index]))
                assert held[-1].key_id == wins[index].key_id
        for rkey in held:
            rkey.close()

    race(*[partial(work, seed) for seed in range(4)])
    assert md.stats()["live_rkeys"] == 0
    assert device.count("rkey_unpack") == device.count("rkey_release") > 0
    stats = md.stats()
    assert stats["rkey_misses"] == device.count("rkey_unpack")


def test_rule13_the_first_unpack_of_16_threads_gives_one_object(fakes):
    md, device = fakes()
    device.slow("rkey_unpack", 0.002)
    key = md.mem_reg(bytearray(64)).derive().base.mkey_pack()
    rkeys = race(*[lambda: md.rkey_unpack(key)] * 16)
    assert {rkey.compare(rkeys[0]) for rkey in rkeys} == {0}
    assert md.stats()["live_rkeys"] == 1
    assert device.count("rkey_unpack") - device.count("rkey_release") == 1


# ---- closing the domain ----


def test_rule13_the_md_may_be_closed_while_it_is_used(fakes):
    """The others get CLOSED, and no call reaches the device after its close (the fake checks)."""
    allowed = (*LOSERS, um.RemoteAccessError, um.FlushedError, um.PeerGoneError)
    for seed in range(12):
        md, device, one, _two = fakes.connected()
        base = md.mem_reg(bytearray(64))
        key = base.mkey_pack()
        empty = base.derive(0, 0).mkey_pack()
        started = threading.Semaphore(0)

        def work(seed, md=md, base=base, one=one, key=key, empty=empty, started=started):
            rng = random.Random(seed)
            held = []
            started.release()
            while not md.closed:
                try:
                    what = rng.randrange(6)
                    if what == 0:
                        held.append(base.derive())
                        held[-1].mkey_pack()
                    elif what == 1:
                        held.append(md.rkey_unpack(rng.choice([key, empty])))
                    elif what == 2:
                        one.put(md.rkey_unpack(key), base.address, b"x")
                    elif what == 3:
                        with md.mem_reg(bytearray(8)) as other:
                            other.mkey_pack(RMA)
                    elif what == 4:
                        held.append(md.endpoint())
                        md.stats()
                    elif held:
                        held.pop(rng.randrange(len(held)))
                    md.progress()
                except allowed:
                    pass

        def close(md=md, started=started):
            for _ in range(3):
                started.acquire()
            while not md.closed:
                with suppress(um.BusyError):
                    md.close(force=True)

        results = race(*[partial(work, seed * 3 + n) for n in range(3)], close)
        assert results == [None] * 4
        assert device.closed
        assert device.live_keys == {}


def test_rule13_two_closes(fakes):
    for _ in range(30):
        md, device = fakes()
        base = md.mem_reg(bytearray(64))
        base.derive().mkey_pack()
        results = race(*[partial(md.close, True)] * 3)
        assert set(results) <= {None, um.BusyError}
        assert None in results
        assert device.count("close") == 1


NO_LOCK = """
import os, threading, time
import ucx_memh as um
from ucx_memh.testing import open_fake
md, device = open_fake()
one, two = md.endpoint(), md.endpoint()
one.connect(two.address)
two.connect(one.address)
base = md.mem_reg(bytearray(64))
win = base.derive()
key = win.mkey_pack()
rkey = md.rkey_unpack(key)
device.slow("{op}", 3600)  # its caller holds the Md's lock for keys
slow = base.derive()
if "{op}" == "key_destroy":
    slow.mkey_pack()
made = device.count("{op}")
call = slow.mkey_pack if "{op}" == "key_create" else slow.invalidate
threading.Thread(target=call, daemon=True).start()
while device.count("{op}") == made:
    time.sleep(0.001)
assert win.mkey_pack() == key
assert win.mkey_pack_into(bytearray(256)) == len(key)
assert md.rkey_unpack(key).compare(rkey) == 0
one.put(rkey, win.address, b"x")
kept = base.derive(0, 8), md.mem_reg(bytearray(8)), md.endpoint()
md.progress()
md.stats()
os._exit(0)
"""


@pytest.mark.parametrize("op", ["key_create", "key_destroy"])
def test_rule13_the_hot_path_takes_no_lock_of_the_slow_one(python, op):
    """Would hang: the thread that holds that lock sleeps for an hour."""
    python("-c", NO_LOCK.format(op=op), timeout=30)


FAST_DOMAIN = """
import threading, time
from ucx_memh.testing import open_fake
for last in ("close", "dereg", "derived"):
    md, device = open_fake(fast_reg=True)
    memory = bytearray(64)
    base = md.mem_reg(memory)
    win = base.derive()
    win.mkey_pack()
    device.slow("mem_dereg", 0.05)
    closing = threading.Thread(target=md.close, args=(True,))
    closing.start()
    while not device.count("mem_dereg"):
        time.sleep(0.001)
    # The other thread is in mem_dereg and wants the GIL next; this one has it.
    (base if last == "dereg" else win).dereg()
    if last == "close":
        del win, base
    closing.join()
    assert md.closed
    memory.append(0)
"""


def test_rule13_a_domain_that_keeps_the_gil_does_not_deadlock(python):
    python("-c", FAST_DOMAIN, timeout=30)
