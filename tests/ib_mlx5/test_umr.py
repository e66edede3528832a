# SPDX-License-Identifier: BSD-3-Clause
"""Keys that work requests aim and end: which ones, in which order, and that old ones are dead."""

import mmap
import select
import threading

import pytest

import ucx_memh as um
from _rawqp import RawPeer
from _sides import Wc, keys, link, opened, progressed, relink, wait_for
from ucx_memh import MemFlag, PackFlag, Status

GET, PUT, ATOMIC = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT, MemFlag.REMOTE_ATOMIC
SIZE = 64 << 10
TAGS = 251
MAP_NORESERVE = 0x4000


def value(win):
    return keys(win.mkey_pack())[0]


def sent(md):
    """(CREATE_MKEY, DESTROY_MKEY, BIND_MW, LOCAL_INV) so far."""
    stats = md.stats()
    return tuple(
        stats[f"device.{name}"] for name in ("create_mkey", "destroy_mkey", "bind_mw", "local_inv")
    )


def pool(md):
    """(free, used, resting)"""
    stats = md.stats()
    return tuple(stats[f"device.pool_{name}"] for name in ("free", "used", "resting"))


@pytest.fixture
def base(owner):
    return owner.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)


# ---- which way ----


def test_it_says_which_way(owner, base):
    assert "aimed by BIND_MW and ended by LOCAL_INV" in owner.explain()
    win = base.derive()
    assert "the first pack aims one by BIND_MW" in win.explain()
    number = value(win)
    text = win.explain()
    assert f"key {number:#x}, aimed by BIND_MW over the control queue pair" in text
    assert "LOCAL_INV ends it" in text and "MKEY;" not in text


def test_it_says_nothing_of_a_key_that_is_gone(owner, base, soft):
    """Nor promises one, nor names a way to end it that is not left."""
    wins = [base.derive() for _ in range(2)]
    number = value(wins[0])
    soft.fault("local_inv:status=6;destroy_mkey:errno=16")
    wins[0].invalidate(lambda status: None)
    for _ in range(2):  # it is under way; it has failed
        text = wins[0].explain()
        assert f"key {number:#x} is not known to be dead" in text
        assert "LOCAL_INV" not in text and "first pack" not in text
        owner.progress()
    wins[0].invalidate()
    wins[1].invalidate()
    for win in wins:
        assert win.explain() == "it has no key any more, and gets none\n"
        win.dereg()
        assert win.explain() == "it has no key any more, and gets none\n"


def test_a_bound_key_is_made_by_command(owner, base):
    ep = owner.endpoint()
    win = base.derive(endpoint=ep)
    assert "the first pack sends CREATE_MKEY: it is bound to a queue pair" in win.explain()
    number = value(win)
    assert f"key {number:#x}, made by CREATE_MKEY: it is bound" in win.explain()
    win.invalidate()
    assert sent(owner) == (1, 1, 0, 0)


def test_two_gib_and_a_byte_more(owner):
    """One bind covers 2 GiB; what is longer has a list, which a command makes."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    size = 1 << 31
    with mmap.mmap(-1, size + 4096, flags=flags, prot=mmap.PROT_READ) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        with owner.mem_reg(memory, MemFlag.DERIVED_ONLY | MemFlag.LOCAL_READ | GET) as base:
            with base.derive(1, size) as win:
                win.mkey_pack()
                assert sent(owner) == (1, 0, 1, 0)
            assert sent(owner) == (1, 0, 1, 1)
            with base.derive(1, size + 1) as win:
                win.mkey_pack()
                assert "longer than the 2 GiB of one BIND_MW" in win.explain()
                assert sent(owner) == (2, 0, 1, 1)
            assert sent(owner) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("config", "cap", "why"),
    [
        ({"umr": "off"}, None, 'umr="off"'),
        ({}, "umr_indirect_mkey_disabled", "umr_indirect_mkey_disabled"),
        ({}, "umr_modify_atomic_disabled", "umr_modify_atomic_disabled"),
    ],
)
def test_without(tidy, soft, config, cap, why):
    """Every key is made by command, and both the domain and the handle say why."""
    if cap:
        soft.set(cap, 1)
    try:
        with opened(**config) as md:
            assert f"made by CREATE_MKEY, not by work requests: {why}" in md.explain()
            base = md.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY | GET | PUT)
            with base.derive(flags=GET) as win:
                win.mkey_pack()
                assert f"made by CREATE_MKEY: {why}" in win.explain()
            assert sent(md) == (1, 1, 0, 0)
            assert (pool(md), md.stats()["device.control_qp"]) == ((0, 0, 0), 0)
    finally:
        if cap:
            soft.set(cap, "default")


@pytest.mark.parametrize("umr", ["on", "", 1, None])
def test_another_word(umr):
    with pytest.raises(um.InvalidParamError, match="one of auto, off"):
        um.open_md("ib_mlx5", device="software", umr=umr)


def test_a_bases_own_keys_are_made_by_command(owner):
    base = owner.mem_reg(bytearray(SIZE))
    base.mkey_pack(PackFlag.INVALIDATE_RMA | PackFlag.INVALIDATE_AMO)
    assert sent(owner) == (2, 0, 0, 0)


def test_no_bytes_no_key(owner, base):
    with base.derive(0, 0) as win:
        win.mkey_pack()
    assert sent(owner) == (0, 0, 0, 0)


@pytest.mark.parametrize("rights", [GET, PUT, ATOMIC, GET | PUT, GET | PUT | ATOMIC])
def test_the_rights_are_the_handles(owner, attacker, rights):
    memory = bytearray(SIZE)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, attacker)
    win = base.derive(64, 64, rights)
    rma, amo = keys(win.mkey_pack())
    for right, attack in [
        (GET, lambda: attacker.read(rma, win.address, 8)[0]),
        (PUT, lambda: attacker.write(rma, win.address, b"put")),
        (ATOMIC, lambda: attacker.fetch_add(amo, win.address, 1)[0]),
    ]:
        good = attack() is Wc.SUCCESS
        assert good == bool(rights & right)
        if not good:
            relink(ep, attacker)


# ---- order ----


def test_first_in_first_out_and_the_next_tag(owner, base):
    """Each index in turn, each with the tag after its last."""
    width = 5
    wins = [base.derive() for _ in range(width)]
    values = [value(win) for win in wins]
    assert len({number >> 8 for number in values}) == width
    order = [3, 0, 4, 1, 2]
    for at in order:
        wins[at].invalidate()
    expected = [values[at] for at in order]
    for _ in range(width * TAGS):
        win = base.derive()
        number = value(win)
        last = expected.pop(0)
        if number >> 8 != last >> 8:  # its tags are used up
            assert pool(owner)[2] == width
            break
        assert number & 0xFF == ((last & 0xFF) + 1) % TAGS
        expected.append(number)
        win.invalidate()
    else:
        raise AssertionError("no index ever rested")
    assert sent(owner)[0] == width + 1


def test_tags_begin_elsewhere_each_time(tidy):
    """Firmware may give us the indices of a process that was here before."""
    tags = set()
    for _ in range(8):
        with opened() as md:
            tags.add(value(md.mem_reg(bytearray(64), MemFlag.DERIVED_ONLY).derive()) & 0xFF)
    assert len(tags) > 1


@pytest.mark.parametrize("lives", [1, 3])
def test_an_old_value_is_dead(owner, attacker, lives):
    """Of the same key, which is aimed at the same bytes once more."""
    memory = bytearray(b"secret..") * (SIZE // 8)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, attacker)
    old = base.derive()
    stale = value(old)
    assert attacker.read(stale, base.address, 8) == (Wc.SUCCESS, memory[:8])
    old.invalidate()
    for life in range(1, lives + 1):
        win = base.derive()
        assert value(win) == (stale & ~0xFF) | ((stale & 0xFF) + life) % TAGS
        for attack in (
            lambda: attacker.read(stale, base.address, 8)[0],
            lambda: attacker.write(stale, base.address, b"evil"),
            lambda: attacker.fetch_add(stale, base.address, 1)[0],
        ):
            assert attack() is Wc.REM_ACCESS_ERR
            relink(ep, attacker)
        assert attacker.read(value(win), base.address, 8) == (Wc.SUCCESS, memory[:8])
        win.invalidate()
    # Free, it lets nobody through: not by its last value, and not by the next.
    for tag in (stale + lives, stale + lives + 1, stale & ~0xFF):
        assert attacker.read(tag, base.address, 8)[0] is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
    assert memory == b"secret.." * (SIZE // 8)


# ---- progress and events ----


def test_a_callback_runs_in_progress(owner, base):
    seen = []
    win = base.derive()
    win.mkey_pack()
    win.invalidate(seen.append)
    assert (win.state, seen) == (um.MemhState.REVOKING, [])
    assert sent(owner)[3] == 1  # but it is posted
    with pytest.raises(um.BusyError, match="under way"):
        win.invalidate()
    with pytest.raises(um.BusyError):
        base.dereg()
    assert owner.progress() == 1
    assert (win.state, seen) == (um.MemhState.REVOKED, [Status.OK])
    assert owner.progress() == 0
    base.dereg()


def test_a_callback_may_derive_again(owner, base):
    """Of the key that has just ended."""
    values = []

    def again(status):
        assert status is Status.OK
        if len(values) < 10:
            win = base.derive()
            values.append(value(win))
            win.invalidate(again)

    win = base.derive()
    values.append(value(win))
    win.invalidate(again)
    progressed(owner, lambda: owner.stats()["live_derived"] == 0)
    assert len(values) == len(set(values)) == 10
    assert (sent(owner), pool(owner)) == ((1, 0, 10, 10), (1, 0, 0))


def test_an_event_wakes_who_sleeps(owner, base, soft):
    """Over the domain's one descriptor, without any endpoint."""
    seen = []
    wins = [base.derive() for _ in range(2)]
    for win in wins:
        win.mkey_pack()
    while not owner.arm():
        owner.progress()
    soft.fault("local_inv:status=255")  # it is held
    wins[0].invalidate(seen.append)
    while not owner.arm():
        owner.progress()
    ready = select.poll()
    ready.register(owner.event_fd, select.POLLIN)
    assert ready.poll(20) == []
    soft.fault("")
    wins[1].invalidate(seen.append)
    assert ready.poll(10000) != []
    assert seen == []
    assert not owner.arm()  # there is something to tell
    progressed(owner, lambda: len(seen) == 2)
    while not owner.arm():
        owner.progress()
    assert ready.poll(20) == []
    assert seen == [Status.OK, Status.OK]


def asleep(md):
    """Armed with nothing under way: what begins from now on must wake it."""
    while not md.arm():
        md.progress()
    ready = select.poll()
    ready.register(md.event_fd, select.POLLIN)
    assert ready.poll(0) == []
    return ready


@pytest.mark.parametrize("packed", [False, True])
def test_what_begins_after_arm_wakes_too(owner, base, packed):
    """As with a transfer: who sleeps need not know that somebody revokes.  Without a key made
    before there is not even a queue to be armed."""
    wins = [base.derive() for _ in range(2)]
    if packed:
        for win in wins:
            win.mkey_pack()
    for win in wins:
        ready = asleep(owner)
        seen = []
        win.mkey_pack()
        win.invalidate(seen.append)
        assert ready.poll(10000) != []
        progressed(owner, lambda seen=seen: seen == [Status.OK])


@pytest.mark.parametrize(
    "fault",
    [
        "local_inv:status=6",
        "local_inv:errno=12",
        "local_inv:status=6;create_qp:errno=12,count=0",
        "local_inv:errno=12;destroy_mkey:errno=16",
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_a_revocation_by_command_wakes_too(owner, base, soft, fault, broken):
    """No completion queue tells of that one.  `broken`: the queue pair was, before it began."""
    wins = [base.derive() for _ in range(2)]
    for win in wins:
        win.mkey_pack()
    soft.fault(fault)
    if broken:
        wins.pop().invalidate(lambda status: None)
        for _ in range(3):
            owner.progress()
    ready = asleep(owner)
    seen = []
    wins[0].invalidate(seen.append)
    assert ready.poll(10000) != []
    progressed(owner, lambda: seen)
    soft.fault("")
    assert asleep(owner).poll(20) == []


def test_what_finds_the_wire_taken_is_posted_by_who_has_it(owner, base, soft):
    """Nobody else may ever progress: the sleeper waits for a completion, and there must be one."""
    wins = [base.derive() for _ in range(2)]
    for win in wins:
        win.mkey_pack()
    soft.fault("local_inv:status=6")
    wins[0].invalidate(lambda status: None)
    soft.set("cmd_delay_us", 500000)  # its destruction, with the wire held
    holder = threading.Thread(target=owner.progress)
    holder.start()
    wait_for(lambda: sent(owner)[1] == 1)
    seen = []
    wins[1].invalidate(seen.append)
    holder.join(60)
    assert sent(owner)[3] == 2
    soft.set("cmd_delay_us", 0)
    progressed(owner, lambda: seen == [Status.OK])


# ---- threads ----


@pytest.mark.parametrize("fault", ["", "local_inv:status=6,after=100,count=3", "bind_mw:status=6"])
def test_threads_share_the_pool(owner, base, soft, fault):
    """Some derive and revoke, with and without waiting, while one progresses, arms and counts."""
    rounds, threads = 150, 4
    told, failed, kept = [], [], []
    stop = threading.Event()

    def lives(index):
        try:
            for turn in range(rounds):
                win = base.derive(64 * index, 64)
                kept.append(win)
                win.mkey_pack()
                win.invalidate(told.append if turn % 2 else None)
        except BaseException as error:
            failed.append(error)

    def look():
        while not stop.is_set():
            owner.progress()
            owner.arm()
            owner.stats()
            owner.explain()
            for win in kept[-threads:]:
                win.explain()

    soft.fault(fault)
    watcher = threading.Thread(target=look)
    workers = [threading.Thread(target=lives, args=(index,)) for index in range(threads)]
    for thread in (watcher, *workers):
        thread.start()
    for thread in workers:
        thread.join(60)
    stop.set()
    watcher.join(60)
    progressed(owner, lambda: owner.stats()["live_derived"] == 0)
    assert failed == []
    assert told == [Status.OK] * (threads * rounds // 2)
    creates, destroys, binds, ends = sent(owner)
    free, used, resting = pool(owner)
    # The index of a key that was destroyed comes back at once, with values that were used before.
    refused, held = (owner.stats()[name] for name in ("keys_parked", "key_placeholders"))
    assert (used, creates - destroys) == (0, free + resting + held)
    assert ends == threads * rounds + refused
    # A bind behind an invalidation that fails is flushed, and made once more.
    assert ends <= binds <= ends + destroys
    assert (refused, binds) == (0, ends) or fault
    assert bool(destroys) == bool(fault)
    base.dereg()


def test_threads_let_go(owner):
    """Of bases and handles, in any order, while others' ends are under way: all goes, unasked."""
    failed = []

    def lives():
        try:
            for turn in range(100):
                base = owner.mem_reg(bytearray(4096))
                win = base.derive()
                small = win.derive(0, 64)
                win.mkey_pack(), small.mkey_pack()
                if turn % 4 == 0:
                    del base, win, small
                elif turn % 4 == 1:
                    small.invalidate(lambda status: None)
                    del base, win
                elif turn % 4 == 2:
                    del small
                    win.dereg()
                else:
                    del small
                    base.dereg(cascade=True)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=lives) for _ in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(60)
    assert failed == []
    progressed(owner, lambda: owner.stats()["live_bases"] == 0)
    assert owner.stats()["live_derived"] == pool(owner)[1] == 0
    assert sent(owner)[0] <= 8 * len(workers)  # the same few keys all along
    owner.close()


# ---- the domain ----


def test_close_leaves_nothing(tidy, soft):
    """Free, resting and live keys, the queue pair, its queue."""
    before = soft.live()
    with opened() as md:
        base = md.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
        wins = [base.derive() for _ in range(10)]
        for win in wins:
            win.mkey_pack()
        for win in wins[:5]:
            win.invalidate()
        for _ in range(6 * TAGS):
            win = base.derive()
            win.mkey_pack()
            win.invalidate()
        wins[5].invalidate(lambda status: None)
        assert all(pool(md))
    assert soft.live() == before


def test_two_domains_have_a_pool_each(tidy, attacker):
    with opened() as one, opened() as two:
        bases = [md.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY) for md in (one, two)]
        for _ in range(3):
            wins = [base.derive() for base in bases]
            for win in wins:
                win.mkey_pack()
            for win in wins:
                win.invalidate()
        assert sent(one) == sent(two) == (1, 0, 3, 3)
        assert pool(one) == pool(two) == (1, 0, 0)


def test_on_what_a_runtime_has_opened(tidy):
    """Its context, domain and region; all of ours is gone before it closes them."""
    with RawPeer(size=4096) as runtime:
        context, pd = runtime.context.value, runtime.pd.value
        with um.open_md("ib_mlx5", device="software", context=context, pd=pd) as md:
            with md.mem_adopt(runtime.mr.value, owner=runtime) as base:
                with base.derive(64, 64, GET) as win:
                    win.mkey_pack()
                    assert sent(md) == (1, 0, 1, 0)
            assert sent(md) == (1, 0, 1, 1)
