# SPDX-License-Identifier: BSD-3-Clause
"""The control queue pair fails, a bind or an invalidation does: what is never taken for done, what
is destroyed instead, and that nothing is left or told twice."""

import ctypes
import errno
import gc

import pytest

import ucx_memh as um
from _capi import Table, pointers
from _sides import Wc, keys, link, opened, progressed, relink
from ucx_memh import MemFlag, MemhState, PackFlag, Status
from ucx_memh.testing import PoisonAllocator

SIZE = 64 << 10
DEPTH = 64
# A LOCAL_INV that fails, that is flushed, that the queue pair does not take.
ENDS = ["local_inv:status=6", "local_inv:status=5", "local_inv:errno=12"]


@pytest.fixture
def base(owner):
    return owner.mem_reg(bytearray(b"secret..") * (SIZE // 8), MemFlag.DERIVED_ONLY)


def sent(md):
    """(CREATE_MKEY, DESTROY_MKEY, BIND_MW, LOCAL_INV) so far."""
    stats = md.stats()
    return tuple(
        stats[f"device.{name}"] for name in ("create_mkey", "destroy_mkey", "bind_mw", "local_inv")
    )


def pool(md):
    """(free, used, resting), and how often the queue pair was made"""
    stats = md.stats()
    names = ("pool_free", "pool_used", "pool_resting", "control_qp")
    return tuple(stats[f"device.{name}"] for name in names)


def packed(base, count):
    wins = [base.derive() for _ in range(count)]
    for win in wins:
        win.mkey_pack()
    return wins


# ---- LOCAL_INV ----


@pytest.mark.parametrize("fault", ENDS)
def test_it_is_destroyed_instead(owner, soft, base, attacker, fault):
    """One command ends it; it is not tried again, and the next key has a new queue pair."""
    ep = link(owner, attacker)
    win, sibling = packed(base, 2)
    rkey, _ = keys(win.mkey_pack())
    soft.fault(fault)
    win.invalidate()
    assert win.state is MemhState.REVOKED
    assert sent(owner) == (2, 1, 2, 1)
    assert pool(owner) == (0, 1, 0, 1)
    assert attacker.read(keys(sibling.mkey_pack())[0], base.address, 6) == (Wc.SUCCESS, b"secret")
    assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)
    sibling.invalidate()
    assert sent(owner) == (2, 1, 2, 2)
    assert pool(owner) == (1, 0, 0, 2)


@pytest.mark.parametrize("fault", ENDS)
@pytest.mark.parametrize("number", [errno.EBUSY, errno.EIO])
def test_and_if_that_is_refused_it_stays_revoking(owner, soft, base, attacker, fault, number):
    """The callback hears of it, once; a retry destroys, and never posts again."""
    ep = link(owner, attacker)
    (win,) = packed(base, 1)
    rkey, _ = keys(win.mkey_pack())
    status = Status.BUSY if number == errno.EBUSY else Status.IO_ERROR
    soft.fault(f"{fault};destroy_mkey:errno={number},count=3")
    first, second = [], []
    win.invalidate(first.append)
    progressed(owner, lambda: first)
    assert (win.state, first) == (MemhState.REVOKING, [status])
    for _ in range(2):
        with pytest.raises(um.MemhError) as caught:
            win.invalidate(second.append)
        assert (caught.value.status, caught.value.errno) == (status, number)
        assert f"DESTROY_MKEY of key {rkey:#x}" in str(caught.value)
        assert pool(owner)[1] == 1
        with pytest.raises(um.RevokedError):
            win.mkey_pack()
        with pytest.raises(um.BusyError):
            base.dereg()
    win.invalidate(second.append)
    for _ in range(5):
        owner.progress()
    assert (win.state, first, second) == (MemhState.REVOKED, [status], [Status.OK])
    assert sent(owner) == (1, 4, 1, 1)
    assert pool(owner) == (0, 0, 0, 1)
    assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)


def test_a_blocking_call_raises(owner, soft, base):
    (win,) = packed(base, 1)
    soft.fault("local_inv:status=6;destroy_mkey:errno=16")
    with pytest.raises(um.BusyError):
        win.invalidate()
    assert win.state is MemhState.REVOKING
    win.invalidate()
    assert sent(owner) == (1, 2, 1, 1)


@pytest.mark.parametrize("at", [0, 3, DEPTH - 1, DEPTH, DEPTH + 2, 2 * DEPTH + 1])
def test_in_the_middle_of_a_batch(owner, soft, base, attacker, at):
    """What a completion was seen for is done; all else of the queue pair is destroyed; and what
    was not posted yet goes over a new one."""
    many = 2 * DEPTH + 10
    ep = link(owner, attacker)
    wins = packed(base, many)
    rkeys = [keys(win.mkey_pack())[0] for win in wins]
    soft.fault(f"local_inv:status=6,after={at}")
    status = (ctypes.c_int32 * many)()
    items, count = pointers(*wins), ctypes.c_size_t(many)
    assert Table().mem_invalidate_many(items, count, ctypes.c_uint32(0), status) is Status.OK
    assert list(status) == [Status.OK] * many
    lost = min(DEPTH, many - at // DEPTH * DEPTH)
    assert sent(owner) == (many, lost, many, many)
    assert pool(owner) == (many - lost, 0, 0, 1 if at >= 2 * DEPTH else 2)
    for rkey in (rkeys[0], rkeys[at], rkeys[-1]):
        assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
    (win,) = packed(base, 1)
    assert attacker.read(keys(win.mkey_pack())[0], base.address, 6) == (Wc.SUCCESS, b"secret")


def test_in_the_middle_of_a_batch_that_is_not_taken_whole(owner, soft, base):
    wins = packed(base, 10)
    soft.fault("local_inv:errno=12,after=4")
    items, count = pointers(*wins), ctypes.c_size_t(10)
    assert Table().mem_invalidate_many(items, count, ctypes.c_uint32(0), None) is Status.OK
    assert sent(owner) == (10, 10, 10, 10)
    assert pool(owner) == (0, 0, 0, 1)


def test_some_of_a_batch_resist(owner, soft, base):
    wins = packed(base, 10)
    soft.fault("local_inv:status=6,after=2;destroy_mkey:errno=16,after=3,count=2")
    status = (ctypes.c_int32 * 10)()
    items, count = pointers(*wins), ctypes.c_size_t(10)
    assert Table().mem_invalidate_many(items, count, ctypes.c_uint32(0), status) is Status.BUSY
    assert list(status) == [Status.OK] * 3 + [Status.BUSY] * 2 + [Status.OK] * 5
    assert [win.state for win in wins[3:5]] == [MemhState.REVOKING] * 2
    base.dereg(cascade=True)
    assert sent(owner) == (10, 12, 10, 10)
    assert pool(owner)[:3] == (0, 0, 0)


@pytest.mark.parametrize("command", ["create_qp", "modify_qp"])
def test_no_queue_pair_is_needed(owner, soft, base, command, attacker):
    """The old one has failed and no new one can be had: commands do, until it can."""
    ep = link(owner, attacker)
    wins = packed(base, 4)
    soft.fault(f"local_inv:status=6;{command}:errno=12,count=0")
    for win in wins:
        win.invalidate()
    assert sent(owner) == (4, 4, 4, 1)
    assert pool(owner) == (0, 0, 0, 1)
    (win,) = packed(base, 1)
    why = "no control queue pair could be made (errno 12)"
    assert why in owner.explain()
    rkey, _ = keys(win.mkey_pack())
    assert f"key {rkey:#x}, made by CREATE_MKEY: no control queue pair" in win.explain()
    assert attacker.read(rkey, base.address, 6) == (Wc.SUCCESS, b"secret")
    soft.fault("")
    (other,) = packed(base, 1)
    assert why not in owner.explain()
    assert "aimed by BIND_MW" in other.explain()
    assert f"key {rkey:#x}, made by CREATE_MKEY" in win.explain()
    win.invalidate()
    assert attacker.read(rkey, base.address, 6)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)
    other.invalidate()
    assert sent(owner) == (6, 5, 5, 2)


@pytest.mark.parametrize("command", ["create_cq", "create_qp", "modify_qp"])
def test_none_was_ever_to_be_had(owner, soft, base, command):
    """An adapter or a network that does not let a queue pair talk to itself: as with umr="off",
    which nobody had to say."""
    soft.fault(f"{command}:errno=22,count=0")
    for _ in range(3):
        (win,) = packed(base, 1)
        assert "made by CREATE_MKEY: no control queue pair" in win.explain()
        win.invalidate()
    assert (sent(owner), pool(owner)) == ((3, 3, 0, 0), (0, 0, 0, 0))


def test_a_completion_that_does_not_come(owner, soft, base, attacker):
    """After ten seconds it is given up; the queue pair is gone before the key is destroyed."""
    ep = link(owner, attacker)
    wins = packed(base, 3)
    rkey, _ = keys(wins[0].mkey_pack())
    soft.fault("local_inv:status=255")
    for win in wins[:2]:
        win.invalidate(lambda status: None)
    wins[2].invalidate()
    assert [win.state for win in wins] == [MemhState.REVOKED] * 3
    assert sent(owner) == (3, 3, 3, 3)
    assert pool(owner) == (0, 0, 0, 1)
    assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)


def test_a_dropped_handle_is_not_forgotten(soft, tidy):
    """Neither its LOCAL_INV nor its DESTROY_MKEY went well: the Md sees to it when it is closed."""
    with opened() as md:
        base = md.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
        (win,) = packed(base, 1)
        live = soft.stat("mkeys.live")
        soft.fault("local_inv:status=6;destroy_mkey:errno=5")
        del win
        gc.collect()
        progressed(md, lambda: md.stats()["device.destroy_mkey"] == 1)
        assert soft.stat("mkeys.live") == live
        with pytest.raises(um.BusyError):
            base.dereg()
        del base


# ---- BIND_MW ----

BINDS = ["status=6", "status=5", "errno=12"]


@pytest.mark.parametrize("fault", BINDS)
def test_a_bind_is_tried_once_more(owner, soft, base, attacker, fault):
    """With another key, over a new queue pair; the first key is not trusted any more."""
    link(owner, attacker)
    spare = packed(base, 2)
    for win in spare:
        win.invalidate()
    before = sent(owner)
    soft.fault(f"bind_mw:{fault}")
    (win,) = packed(base, 1)
    assert attacker.read(keys(win.mkey_pack())[0], base.address, 6) == (Wc.SUCCESS, b"secret")
    assert [a - b for a, b in zip(sent(owner), before, strict=True)] == [0, 1, 2, 0]
    assert pool(owner) == (0, 1, 0, 2)


@pytest.mark.parametrize("fault", BINDS)
def test_then_it_is_an_error(owner, soft, base, fault):
    """That tells what is known; nothing is left, and the next pack goes on."""
    live = soft.stat("mkeys.live")
    win = base.derive()
    soft.fault(f"bind_mw:{fault},count=2")
    with pytest.raises(um.MemhError) as caught:
        win.mkey_pack()
    if fault == "errno=12":
        assert type(caught.value) is um.NoMemoryError
        assert caught.value.errno == errno.ENOMEM
    else:
        assert type(caught.value) is um.DeviceError
        assert "did not bind key 0x" in str(caught.value)
        assert f"(0x0{fault[-1]})" in str(caught.value)
        assert caught.value.context["syndrome"]
    assert win.state is MemhState.LIVE
    assert soft.stat("mkeys.live") == live
    assert sent(owner) == (2, 2, 2, 0)
    assert pool(owner)[:3] == (0, 0, 0)
    win.mkey_pack()
    assert sent(owner) == (3, 2, 3, 0)


def test_a_key_whose_bytes_find_no_memory_is_kept(owner, base):
    """The next pack has it, with no further request; without one it is ended like any other."""
    packed(base, 1)[0].invalidate()
    before = sent(owner)
    wins = [base.derive() for _ in range(2)]
    for win in wins:
        with PoisonAllocator(fail_at=1), pytest.raises(um.NoMemoryError):
            win.mkey_pack()
    wins[0].mkey_pack()
    for win in wins:
        win.invalidate()
    assert [a - b for a, b in zip(sent(owner), before, strict=True)] == [1, 0, 2, 2]


def test_a_failed_key_that_resists_is_destroyed_later(owner, soft, base):
    live = soft.stat("mkeys.live")
    soft.fault("bind_mw:status=6;destroy_mkey:errno=16,count=2")
    wins = packed(base, 1)
    assert soft.stat("mkeys.live") == live + 2
    wins += packed(base, 1)  # it is refused once more
    assert soft.stat("mkeys.live") == live + 3
    wins += packed(base, 1)
    assert soft.stat("mkeys.live") == live + 3
    assert sent(owner) == (4, 3, 4, 0)
    assert pool(owner)[:3] == (0, 3, 0)


def test_or_before_what_it_may_stand_on_is_deregistered(owner, soft, base):
    """A bind whose completion is bad, or lost, may have been executed."""
    live = soft.stat("mkeys.live")
    soft.fault("bind_mw:status=6;destroy_mkey:errno=16")
    (win,) = packed(base, 1)
    assert soft.stat("mkeys.live") == live + 2
    win.invalidate()
    base.dereg()
    assert sent(owner) == (2, 2, 2, 1)
    assert soft.stat("mkeys.live") == live  # the pool's own, without the registration's


def test_many_that_resist_cost_one_command_each_time(owner, soft, base):
    live = soft.stat("mkeys.live")
    many = 5
    soft.fault(f"bind_mw:status=6,count={2 * many};destroy_mkey:errno=16,count=0")
    for _ in range(many):
        with pytest.raises(um.DeviceError):
            base.derive().mkey_pack()
    assert soft.stat("mkeys.live") == live + 2 * many
    soft.fault("")
    before = sent(owner)
    wins = packed(base, 1)
    assert sent(owner)[1] == before[1] + 1
    wins += packed(base, 2 * many)
    assert soft.stat("mkeys.live") == live + 2 * many + 1


def test_or_at_the_latest_when_the_domain_is_closed(soft, tidy):
    with opened() as md:
        base = md.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
        soft.fault("bind_mw:status=6;destroy_mkey:errno=16")
        packed(base, 1)


def test_a_bind_behind_a_failed_invalidation(owner, soft, base):
    """It is flushed with that, and goes over the new queue pair; that key is destroyed."""
    (win,) = packed(base, 1)
    seen = []
    soft.fault("local_inv:status=6")
    win.invalidate(seen.append)  # posted, its completion not looked at
    other = packed(base, 1)
    assert seen == []
    progressed(owner, lambda: seen)
    assert (win.state, seen) == (MemhState.REVOKED, [Status.OK])
    creates, destroys, binds, ends = sent(owner)
    assert ends == 1
    assert destroys >= 1 and creates == binds == destroys + 1
    assert pool(owner) == (0, len(other), 0, 2)


@pytest.mark.parametrize("shortage", ["status=8", "status=15", "errno=12"])
def test_free_keys_are_given_back_when_the_device_has_no_other(owner, soft, shortage):
    """Or a burst of derived handles would cost everybody else his keys until the domain closes."""
    base = owner.mem_reg(bytearray(SIZE))
    wins = packed(base, 70)
    for win in wins[:67]:
        win.invalidate()
    soft.fault(f"create_mkey:{shortage}")
    base.mkey_pack(PackFlag.INVALIDATE_RMA)
    assert pool(owner)[:2] == (3, 3)
    assert sent(owner) == (72, 64, 70, 67)
    soft.fault(f"create_mkey:{shortage},count=0")
    other = base.derive(endpoint=owner.endpoint())
    with pytest.raises(um.MemhError):  # even so
        other.mkey_pack()
    assert pool(owner)[:2] == (0, 3)
    with pytest.raises(um.MemhError):
        other.mkey_pack()
    assert sent(owner) == (75, 67, 70, 67)


@pytest.mark.parametrize("queue", ["", "create_cq:errno=12;", "create_qp:errno=12;"])
def test_no_key_is_to_be_had(owner, soft, base, queue):
    """Neither way: nothing has changed."""
    win = base.derive()
    soft.fault(f"{queue}create_mkey:errno=12")
    with pytest.raises(um.NoMemoryError):
        win.mkey_pack()
    assert (win.state, sent(owner)[2:]) == (MemhState.LIVE, (0, 0))
    soft.fault("")
    win.mkey_pack()
    win.invalidate()
    assert sent(owner)[2:] == (1, 1)
