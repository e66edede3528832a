# SPDX-License-Identifier: BSD-3-Clause
"""Batches of revocations: one by one in their order, and together to the device."""

import gc
import os
import signal
import sys
import threading
import time

import pytest

import ucx_memh as um
from _fakes import DERIVED_ONLY, RMA
from _fork import MAY_FORK, in_child
from ucx_memh import Status
from ucx_memh.testing import PythonDevice, open_python_device

LIVE, REVOKING, REVOKED, CLOSED = um.MemhState
OK = Status.OK
MODES = ["now", "progress", "flush"]
BATCH = 256


def packed(base, count, length=8):
    """So many derived handles that have keys."""
    array = base.derive_many(0, [length] * count)
    array.mkey_pack()
    return array


def states(memhs):
    return [memh.state for memh in memhs]


def until(condition):
    while not condition():
        time.sleep(0.0005)


def together(*functions):
    """Run them at the same time; what each returned, or the MemhError that it raised."""
    barrier = threading.Barrier(len(functions))
    results = [None] * len(functions)

    def run(index, function):
        barrier.wait()
        try:
            results[index] = function()
        except um.MemhError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---- one after the other ----


@pytest.mark.parametrize("destroy", MODES)
@pytest.mark.parametrize("call", ["invalidate_many", "dereg_many"])
def test_what_one_by_one_would_do(fakes, call, destroy):
    """Doubles, parents before and after their children, bases, and what is gone."""
    md, device = fakes(destroy=destroy)
    base = md.mem_reg(bytearray(64))
    busy, up, over, alone, double, revoked, closed = packed(base, 7)
    kept = busy.derive()
    below, under = up.derive(), over.derive()
    for memh in (below, under):
        memh.mkey_pack()
    revoked.invalidate()
    closed.dereg()
    done = device.count("key_destroy")
    closing = call == "dereg_many"
    gone = OK if closing else Status.REVOKED
    wanted = [
        (alone, OK),
        (below, OK),
        (up, OK),  # its child went before it
        (double, OK),
        (double, gone),
        (over, Status.BUSY),  # its child goes after it
        (under, OK),
        (busy, Status.BUSY),
        (revoked, gone),
        (closed, OK if closing else Status.CLOSED),
        (base, Status.BUSY if closing else Status.INVALID_PARAM),
    ]
    memhs, statuses = zip(*wanted, strict=True)
    assert list(getattr(md, call)(memhs, partial=True)) == list(statuses)
    assert device.count("key_destroy") == done + 5
    assert set(states([alone, below, up, double, under])) == {CLOSED if closing else REVOKED}
    assert states([over, busy, kept, base]) == [LIVE] * 4
    for memh in (over, busy, kept):
        memh.mkey_pack()  # as before
    with pytest.raises(um.BusyError if closing else um.RevokedError) as caught:
        getattr(md, call)(memhs)
    first = 7 if closing else 0
    assert caught.value.context["item"] == first
    again = [gone if status is OK else status for status in statuses]
    again[5] = OK
    assert list(caught.value.statuses) == again
    assert over.state is (CLOSED if closing else REVOKED)


@pytest.mark.parametrize("destroy", MODES)
def test_a_tree_from_its_leaves(fakes, destroy):
    """Each waits for what was before it in the same list."""
    md, device = fakes(destroy=destroy)
    memory = bytearray(64)
    base = md.mem_reg(memory)
    chain = [base]
    for _ in range(20):
        chain.append(chain[-1].derive())
        chain[-1].mkey_pack()
    assert list(md.dereg_many(reversed(chain))) == [OK] * 21
    assert set(states(chain)) == {CLOSED}
    assert device.count("key_destroy") == 20
    memory.append(0)


@pytest.mark.parametrize("destroy", MODES)
@pytest.mark.parametrize("closing", [False, True], ids=["invalidate", "dereg"])
def test_a_device_that_fails_one(fakes, closing, destroy):
    md, device = fakes(destroy=destroy)
    base = md.mem_reg(bytearray(64))
    array = packed(base, 5)
    device.fail("key_destroy" if destroy == "now" else "key_destroy_done", Status.IO_ERROR, after=2)
    call = array.dereg if closing else array.invalidate
    with pytest.raises(um.DeviceError) as caught:
        call()
    assert caught.value.context["item"] == 2
    assert list(caught.value.statuses) == [OK, OK, Status.IO_ERROR, OK, OK]
    gone = CLOSED if closing else REVOKED
    assert states(array) == [gone, gone, REVOKING, gone, gone]
    assert len(device.live_keys) == 2
    again = [OK if closing else Status.REVOKED] * 5
    again[2] = OK
    assert list(call(partial=True)) == again
    assert states(array) == [gone] * 5
    assert len(device.live_keys) == 1


def test_bases_and_their_regions(fakes):
    md, device = fakes(destroy="progress")
    regions = [bytearray(8) for _ in range(5)]
    array = md.mem_reg_many(regions)
    array.mkey_pack(flags=RMA)
    assert set(array.invalidate(partial=True)) == {Status.INVALID_PARAM}
    assert states(array) == [LIVE] * 5
    device.fail("mem_dereg", Status.BUSY, after=3)
    assert list(array.dereg(partial=True)) == [OK, OK, OK, Status.BUSY, OK]
    for i, region in enumerate(regions):
        if i == 3:
            with pytest.raises(BufferError):
                region.append(0)
        else:
            region.append(0)
    assert md.stats()["live_bases"] == 1
    array.dereg()
    regions[3].append(0)


# ---- together ----


@pytest.mark.parametrize("count", [1, BATCH, BATCH + 1, 1000])
@pytest.mark.parametrize("call", ["invalidate", "dereg"])
def test_the_device_gets_them_together(fakes, count, call):
    md, device = fakes(destroy="flush")
    base = md.mem_reg(bytearray(64))
    array = packed(base, count)
    assert list(getattr(array, call)()) == [OK] * count
    assert device.count("key_destroy") == device.count("key_destroy_done") == count
    assert device.count("key_flush") == -(-count // BATCH)


def test_what_waits_for_another_needs_a_flush_of_its_own(fakes):
    md, device = fakes(destroy="flush")
    base = md.mem_reg(bytearray(64))
    array = packed(base, 3)
    leaf = array[1].derive()
    leaf.mkey_pack()
    assert list(md.invalidate_many([array[0], leaf, array[1], array[2]])) == [OK] * 4
    assert device.count("key_flush") == 2
    array.dereg()
    leaf.dereg()
    assert device.count("key_flush") == 2  # there was nothing left to destroy


def test_without_keys_the_device_is_not_asked(fakes):
    md, device = fakes(destroy="flush")
    base = md.mem_reg(bytearray(64))
    counts = device.counts
    array = base.derive_many(range(64), 1)
    array.invalidate()
    array.dereg()
    assert {op: n - counts[op] for op, n in device.counts.items() if n != counts[op]} == {
        "mem_derive": 64,
        "tail_init": 64,
    }


@pytest.mark.parametrize("call", ["dereg_many", "invalidate_many"])
def test_what_was_let_go_of_is_no_live_derived_handle(fakes, call):
    """As one by one: a parent waits for it, and is BUSY only of what somebody has."""
    md, _ = fakes(destroy="progress")
    above = [md.mem_reg(bytearray(64)) for _ in range(3)]
    if call == "invalidate_many":  # of which bases have none
        above = [base.derive() for base in above]
    let_go = [packed(each, 2) for each in above]
    kept = above[1].derive()
    before = md.stats()["live_derived"]
    del let_go
    gc.collect()
    assert md.stats()["live_derived"] == before
    statuses = getattr(md, call)(above, partial=True)
    assert list(statuses) == [OK, Status.BUSY, OK]
    assert states([above[1], kept]) == [LIVE, LIVE]


@pytest.mark.parametrize("destroy", MODES)
def test_an_array_that_is_let_go(fakes, destroy):
    md, device = fakes(destroy=destroy)
    base = md.mem_reg(bytearray(64))
    array = packed(base, 300)
    del array
    while len(device.live_keys) > 1:
        assert md.progress()
    assert device.count("key_destroy") == 300
    assert (md.stats()["live_derived"], base.derived_count) == (0, 0)
    base.dereg()


# ---- signals ----


@pytest.mark.parametrize("call", ["invalidate", "dereg"])
def test_a_signal_in_the_middle(fakes, call):
    """What has begun goes on, the rest is as it was; doing it again does the rest."""
    md, device = fakes(destroy="manual")
    base = md.mem_reg(bytearray(64))
    array = packed(base, BATCH + 50)

    def interrupt():
        until(lambda: device.destroying == BATCH)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        getattr(array, call)()
    thread.join()
    assert states(array) == [REVOKING] * BATCH + [LIVE] * 50
    assert device.count("key_destroy") == BATCH
    begun = md.invalidate_many(array[:BATCH], partial=True)
    assert set(begun) == {Status.BUSY}
    assert device.complete() == BATCH
    gone = CLOSED if call == "dereg" else REVOKED
    assert states(array) == [gone] * BATCH + [LIVE] * 50

    def finish():
        until(lambda: device.destroying == 50)
        device.complete()

    thread = threading.Thread(target=finish)
    thread.start()
    ended = getattr(array, call)(partial=True)
    thread.join()
    assert list(ended) == [OK if call == "dereg" else Status.REVOKED] * BATCH + [OK] * 50
    assert states(array) == [gone] * len(array)
    assert device.count("key_destroy") == len(array)


def test_a_signal_between_bases(fakes):
    """Their memory is given back when the device has done with it, whoever waits for that."""
    md, device = fakes(destroy="manual")
    regions = [bytearray(8) for _ in range(3)]
    array = md.mem_reg_many(regions)
    array.mkey_pack(flags=RMA)

    def interrupt():
        until(lambda: device.destroying == 3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        array.dereg()
    thread.join()
    for region in regions:
        with pytest.raises(BufferError):
            region.append(0)
    assert device.complete() == 3
    for region in regions:
        region.append(0)
    assert states(array) == [CLOSED] * 3


@pytest.mark.parametrize("what", ["derive", "register"])
def test_a_signal_while_they_are_made(fakes, what):
    """Then there are none."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    region = bytearray(8)
    before = md.stats()["live_bases"], fakes.memory.live, len(device.live_keys)
    op = "mem_derive" if what == "derive" else "mem_reg"
    begun = device.count(op)
    device.slow(op, 0.0001)

    def interrupt():
        until(lambda: device.count(op) > begun + 10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        if what == "derive":
            base.derive_many(0, [8] * 2000)
        else:
            md.mem_reg_many([region] * 2000)
    thread.join()
    assert device.count(op) < begun + 2000
    assert base.derived_count == 0
    assert (md.stats()["live_bases"], fakes.memory.live, len(device.live_keys)) == before
    region.append(0)


# ---- threads ----


@pytest.fixture
def eager():
    """Let threads meet more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


OPS = {
    "mem_reg": lambda md, base: md.mem_reg_many(addresses=[8] * 30, lengths=8),
    "mem_derive": lambda md, base: base.derive_many(0, [8] * 30),
    "key_create": lambda md, base: packed(base, 30),
    "key_destroy": lambda md, base: packed(base, 30).invalidate(),
    "mem_dereg": lambda md, base: md.mem_reg_many(addresses=[8] * 30, lengths=8).dereg(),
}


@pytest.mark.parametrize("op", OPS)
def test_another_thread_goes_on_meanwhile(fakes, op):
    """It takes the GIL, and tells the device to go on, which the batch waits for."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    device.slow(op, 0.005)
    before, held = device.count(op), device.gil_held(op)
    seen = []
    thread = threading.Thread(target=lambda: OPS[op](md, base))
    thread.start()
    while thread.is_alive():
        seen.append(device.count(op) - before)
        time.sleep(0.001)
    thread.join()
    assert device.count(op) == before + 30
    assert any(0 < count < 30 for count in seen)
    assert device.gil_held(op) == held


@pytest.mark.parametrize("destroy", MODES)
@pytest.mark.parametrize("call", ["invalidate", "dereg"])
def test_four_threads_on_one_array(fakes, eager, call, destroy):
    """Each key is destroyed once, and each thread is told what became of each handle."""
    md, device = fakes(destroy=destroy)
    base = md.mem_reg(bytearray(64))
    for _ in range(5):
        array = packed(base, 400)
        before = device.count("key_destroy")
        results = together(*[lambda: getattr(array, call)(partial=True)] * 4)  # noqa: B023
        assert device.count("key_destroy") == before + 400
        assert set(states(array)) == {CLOSED if call == "dereg" else REVOKED}
        for each in zip(*results, strict=True):
            if call == "dereg":
                assert OK in each and set(each) <= {OK, Status.BUSY}
            else:
                assert each.count(OK) == 1
                assert set(each) <= {OK, Status.BUSY, Status.REVOKED}
        array.dereg()
    assert len(device.live_keys) == 1


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "with keys"])
def test_regions_come_back_whoever_ends_them(fakes, eager, keys):
    """A batch, another one from behind, and one by one."""
    md, _ = fakes(destroy="flush")
    for _ in range(10):
        regions = [bytearray(8) for _ in range(300)]
        array = md.mem_reg_many(regions)
        if keys:
            array.mkey_pack(flags=RMA)
        items = list(array)

        def one_by_one(items=items):
            for memh in items[::3]:
                try:
                    memh.dereg()
                except um.BusyError:
                    assert keys

        results = together(
            lambda array=array: array.dereg(partial=True),
            lambda items=items: md.dereg_many(items[::-1], partial=True),
            one_by_one,
        )
        assert not any(isinstance(result, um.MemhError) for result in results)
        if keys:
            while md.progress():
                pass
        assert states(items) == [CLOSED] * 300
        for region in regions:
            region.append(0)
    assert md.stats()["live_bases"] == 0


def test_two_threads_pack_into_one_buffer(fakes, eager):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    array = base.derive_many(0, [8] * 500)
    size = md.attr.key_size_max
    buffer = bytearray(1000 * size)
    view = memoryview(buffer)
    one, two = together(
        lambda: array.mkey_pack(view[: 500 * size]), lambda: array.mkey_pack(view[500 * size :])
    )
    assert buffer[: 500 * size] == buffer[500 * size :]
    assert list(one) == list(two) == [memh.mkey_pack() for memh in array]
    assert device.count("key_create") == 500


def test_items_of_many_threads(fakes, eager):
    """They are made when they are asked for, and one only."""
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    array = base.derive_many(0, [8] * 200)
    for _ in range(5):
        lists = together(*[lambda: list(array)] * 4)
        for same in zip(*lists, strict=True):
            assert len({id(memh) for memh in same}) == 1
        del lists, same
    assert md.stats()["live_derived"] == 200


def test_the_domain_is_closed_meanwhile(fakes, eager):
    md, device = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    array = packed(base, 1000)
    closed, each = together(lambda: md.close(force=True), lambda: array.invalidate(partial=True))
    assert closed is None or type(closed) is um.BusyError  # it found one at work
    md.close(force=True)
    if not isinstance(each, um.ClosedError):
        allowed = {OK, Status.BUSY, Status.REVOKED, Status.CLOSED}
        assert len(each) == 1000 and set(each) <= allowed
    assert set(states(array)) == {CLOSED} or set(states(array)) <= {CLOSED, REVOKED}
    assert device.closed and device.count("key_destroy") == 1000


# ---- a backend written in Python ----


@pytest.mark.parametrize("destroy", ["now", "progress"])
def test_a_backend_in_python(destroy):
    md, device = open_python_device(destroy=destroy)
    with md:
        base = md.mem_reg(bytearray(64), DERIVED_ONLY)
        array = packed(base, 300)
        assert (device.calls["mem_derive"], device.calls["key_create"]) == (300, 300)
        device.faults["key_destroy"] = [um.BusyError("not now")]
        each = array.invalidate(partial=True)
        assert list(each) == [Status.BUSY] + [OK] * 299
        assert states(array) == [REVOKING] + [REVOKED] * 299
        assert list(array.dereg()) == [OK] * 300
        regions = [bytearray(8) for _ in range(10)]
        device.faults["mem_reg"] = [um.DeviceError("broken")]
        with pytest.raises(um.DeviceError, match="broken") as caught:
            md.mem_reg_many(regions)
        assert caught.value.context["item"] == 0
        for region in regions:
            region.append(0)
        more = md.mem_reg_many(regions)
        del array, more  # torn down by the next call
        assert md.stats()["live_bases"] == 1
        for region in regions:
            region.append(0)
        base.dereg()
    assert device.keys == {}


def test_a_backend_in_python_that_uses_batches(fakes):
    """One on top of another domain: calls within calls."""
    lower, fake = fakes()

    class OnTop(PythonDevice):
        def mem_reg(self, reg):
            reg.data = lower.mem_reg_many(addresses=[reg.address], lengths=reg.length)
            return super().mem_reg(reg)

        def mem_dereg(self, reg):
            lower.dereg_many(reg.data)
            return super().mem_dereg(reg)

    md, _ = open_python_device(device=OnTop)
    with md, md.mem_reg_many([bytearray(8)] * 100) as array:
        assert lower.stats()["live_bases"] == 100
        assert len(lower.find(array.addresses[0], 8)) == 100
    assert (lower.stats()["live_bases"], fake.count("mem_dereg")) == (0, 100)


# ---- fork, and the end ----


@pytest.mark.filterwarnings(MAY_FORK)
def test_a_forked_child_can_do_nothing_with_them(fakes):
    md, device = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    array, regions = packed(base, 300), [bytearray(8), bytearray(8)]
    bases = md.mem_reg_many(regions)
    item = array[1]
    md.find(base.address)

    def child():
        seen, counts = [], device.counts
        for call in (
            lambda: md.mem_reg_many([b""]),
            lambda: base.derive_many([0], 8),
            lambda: md.invalidate_many(array),
            lambda: md.dereg_many([item]),
            lambda: array.mkey_pack(),
            lambda: array.invalidate(),
            lambda: array.dereg(),
            lambda: bases.dereg(),
            lambda: bases.__exit__(None, None, None),
            lambda: md.find(base.address),
        ):
            try:
                seen.append(repr(call()))
            except um.ForkedError as error:
                seen.append(set(error.statuses or [Status.FORKED]))
        looks = len(array), array[1] is item, array[0].length, list(bases.lengths), item.state
        held = list(bases.dereg(partial=True))
        bases_gone = array_gone = None
        return seen, looks, held, bases_gone, array_gone, device.counts == counts

    seen, looks, held, _, _, same = in_child(child)
    assert seen == [{Status.FORKED}] * 10
    assert looks == (300, True, 8, [8, 8], LIVE)
    assert held == [Status.FORKED] * 2
    assert same

    def child_that_frees():
        nonlocal array, bases, item
        counts = device.counts
        array = bases = item = None
        gc.collect()
        return device.counts == counts

    assert in_child(child_that_frees) is True
    for region in regions:
        with pytest.raises(BufferError):
            region.append(0)
    assert states(array) == [LIVE] * 300 and md.find(base.address, 8, derived=True)
    array.dereg()
    bases.dereg()


@pytest.mark.parametrize("keep", ["array", "item", "cycle", "module"])
@pytest.mark.parametrize("component", ["cma", "ib_mlx5", "fake"])
def test_alive_at_the_end_of_the_interpreter(python, component, keep):
    code = f"""
import ucx_memh as um
from ucx_memh.testing import open_fake
md = open_fake(destroy="flush")[0] if {component!r} == "fake" else um.open_md({component!r})
regions = [bytearray(64) for _ in range(300)]
array = md.mem_reg_many(regions)
array.mkey_pack()
below = array[0].derive_many([0, 8], 8) if {component!r} != "cma" else None
if below:
    below.mkey_pack()
item = array[1]
md.find(item.address)
if {keep!r} == "item":
    del array
elif {keep!r} == "cycle":
    class Owner:
        pass
    owner = Owner()
    owner.array = md.mem_reg_many(addresses=[item.address] * 2, lengths=8, owner=owner)
    del array, item, owner
elif {keep!r} == "module":
    import sys
    sys.kept = array, below
    del array, md
print("done")
"""
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("done\n", "")
