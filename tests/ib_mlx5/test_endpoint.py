# SPDX-License-Identifier: BSD-3-Clause
"""The RC endpoint of ucx_memh_ib: data, error states, reset, and what does not fit."""

import ctypes
import hashlib
import os
import select
import struct
import threading

import pytest

import ucx_memh as um
from _rawqp import Qp, RawPeer, RemoteRawPeer, Wc, keys, serve
from ucx_memh import EpState, MemFlag, Status
from ucx_memh.errors import (
    FlushedError,
    InvalidParamError,
    RemoteAccessError,
    StaleKeyError,
)

MIB = 1 << 20


def open_md(**config):
    return um.open_md("ib_mlx5", device="software", **config)


@pytest.fixture
def pair(md):
    """Two connected endpoints of one domain."""
    with md.endpoint() as one, md.endpoint() as two:
        one.connect(two.address)
        two.connect(one.address)
        yield one, two


@pytest.fixture
def region(md):
    """A registered buffer, a derived handle for all of it and the rkey made of that."""
    buffer = bytearray(os.urandom(MIB))
    with md.mem_reg(buffer) as base, base.derive() as window:
        with md.rkey_unpack(window.mkey_pack()) as rkey:
            yield buffer, base, rkey


# ---- data ----


@pytest.mark.parametrize("size", [1, 7, 64, 65, 4096, 8192, 8193, 100_000, MIB])
def test_get_and_put(pair, region, size):
    """With a buffer of the caller's: inline, bounced or registered for the transfer."""
    buffer, base, rkey = region
    into = bytearray(size)
    pair[0].get(rkey, base.address + MIB - size, into)
    assert into == buffer[MIB - size :]
    data = os.urandom(size)
    pair[0].put(rkey, base.address, data)
    assert buffer[:size] == data


@pytest.mark.parametrize("size", [1, 64, 8192, MIB])
def test_registered_local_memory(md, pair, region, size):
    buffer, base, rkey = region
    mine = bytearray(os.urandom(size))
    with md.mem_reg(mine) as local:
        pair[0].put(rkey, base.address, local)
        assert buffer[:size] == mine
        buffer[:size] = bytes(size)
        pair[0].get(rkey, base.address, local)
        assert mine == bytes(size)


def test_atomics(pair, region):
    buffer, base, rkey = region
    struct.pack_into("=Q", buffer, 64, 40)
    address = base.address + 64
    assert pair[0].fetch_add(rkey, address, 2) == 40
    assert pair[1].fetch_add(rkey, address, 2**64 - 1) == 42
    assert pair[0].compare_swap(rkey, address, 41, 7) == 41
    assert pair[0].compare_swap(rkey, address, 41, 8) == 7
    assert struct.unpack_from("=Q", buffer, 64) == (7,)


def test_many_under_way(pair, region):
    buffer, base, rkey = region
    parts = [bytearray(1000) for _ in range(100)]
    operations = [pair[i % 2].get_nb(rkey, base.address + i, p) for i, p in enumerate(parts)]
    for operation in operations:
        operation.wait(20)
    for i, part in enumerate(parts):
        assert part == buffer[i : i + 1000]


def owner(conn, size):
    with open_md() as md, md.endpoint() as ep:
        buffer = bytearray(hashlib.shake_256(b"owner").digest(size))
        with md.mem_reg(buffer, MemFlag.ACCESS_ALL | MemFlag.DERIVED_ONLY) as base:
            with base.derive() as window:
                conn.send((ep.address, window.mkey_pack(), base.address))
                ep.connect(conn.recv())
                conn.send("ready")
                conn.recv()
                return hashlib.sha256(buffer).hexdigest()


def test_two_processes_move_64_mib(md, peer):
    size = 64 * MIB
    other = peer(owner, size)
    address, key, start = other.recv()
    with md.endpoint() as ep, md.rkey_unpack(key) as rkey:
        ep.connect(address)
        other.send(ep.address)
        assert other.recv() == "ready"
        into = bytearray(size)
        ep.get(rkey, start, into)
        assert into == hashlib.shake_256(b"owner").digest(size)
        into.reverse()
        ep.put(rkey, start, into)
        assert ep.fetch_add(rkey, start, 0) == int.from_bytes(into[:8], "little")
        other.send("done")
        assert other.result() == hashlib.sha256(into).hexdigest()


@pytest.mark.parametrize("depth", [1, 3, 128])
def test_long_transfers_are_split(depth):
    """More work requests than the queue holds: the rest follows from progress()."""
    with open_md(max_msg=4096, queue_depth=depth) as md:
        buffer = bytearray(os.urandom(MIB + 5))
        with md.mem_reg(buffer) as base, md.endpoint() as one, md.endpoint() as two:
            one.connect(two.address)
            two.connect(one.address)
            into = bytearray(MIB + 5)
            with md.rkey_unpack(base.mkey_pack()) as rkey:
                operation = one.get_nb(rkey, base.address, into)
                operation.wait(20)
                assert into == buffer
                assert operation.bytes_done == MIB + 5
                assert md.stats()["device.post_send"] == 257
                into.reverse()
                one.put(rkey, base.address, into)
                assert into == buffer


def test_bytes_done_of_a_split_transfer_that_fails():
    """The key covers half of it; unpacked raw it says more, which gets past our own check."""
    with open_md(max_msg=4096) as md:
        buffer = bytearray(64 << 10)
        with md.mem_reg(buffer) as base, md.endpoint() as one, md.endpoint() as two:
            one.connect(two.address)
            two.connect(one.address)
            with base.derive(length=32 << 10) as half, too_wide(md, half) as rkey:
                operation = one.get_nb(rkey, base.address, bytearray(64 << 10))
                with pytest.raises(RemoteAccessError):
                    operation.wait(20)
                assert operation.bytes_done == 32 << 10
                assert one.state == EpState.ERROR


@pytest.mark.parametrize("depth", [1, 4])
def test_a_full_queue_loses_and_doubles_nothing(depth):
    """The library makes progress and tries again until there is room."""
    with open_md(queue_depth=depth) as md:
        with md.mem_reg(bytearray(64)) as base:
            with md.endpoint() as one, md.endpoint() as two:
                one.connect(two.address)
                two.connect(one.address)
                with md.rkey_unpack(base.mkey_pack()) as rkey:
                    taken = [one.fetch_add_nb(rkey, base.address, 1) for _ in range(500)]
                    assert [operation.wait(20) for operation in taken] == list(range(500))
                    assert md.stats()["device.post_send"] == 500


def test_threads_share_an_endpoint(md, pair, region):
    buffer, base, rkey = region
    struct.pack_into("=Q", buffer, 0, 0)
    problems = []

    def work(ep):
        try:
            for i in range(200):
                ep.fetch_add(rkey, base.address, 1)
                into = bytearray(300)
                ep.get(rkey, base.address + 4096 + i, into)
                assert into == buffer[4096 + i : 4396 + i]
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(pair[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert struct.unpack_from("=Q", buffer) == (800,)


# ---- error states ----


def too_wide(md, window):
    """An rkey that claims the whole region, so that only the device refuses what is outside."""
    return md.rkey_from_raw(window.mkey_pack(um.PackFlag.RAW), window.address, MIB)


def break_it(md, base, ep):
    """Have the device refuse an access of `ep`'s."""
    with base.derive(length=8) as window, too_wide(md, window) as rkey:
        with pytest.raises(RemoteAccessError):
            ep.get(rkey, base.address + 8, bytearray(8))


def test_a_refused_access_ends_both_sides(md, pair, region):
    _, base, rkey = region
    break_it(md, base, pair[0])
    assert pair[0].state == EpState.ERROR
    assert pair[1].state == EpState.ERROR
    with pytest.raises(FlushedError):
        pair[0].get(rkey, base.address, bytearray(8))
    assert md.stats()["device.async_events"] >= 1


def test_others_are_flushed(md, pair, region):
    buffer, base, rkey = region
    before = bytes(buffer)
    with base.derive(length=8) as window, too_wide(md, window) as bad:
        first = pair[0].get_nb(bad, base.address, bytearray(MIB))
        rest = [pair[0].put_nb(rkey, base.address + MIB - 8, b"!" * 8) for _ in range(3)]
        with pytest.raises(RemoteAccessError):
            first.wait(20)
        for operation in rest:
            with pytest.raises(FlushedError):
                operation.wait(20)
            assert operation.bytes_done == 0
    assert buffer == before


def test_reset_of_both_ends_revives(md, pair, region):
    buffer, base, rkey = region
    old = pair[1].address
    break_it(md, base, pair[0])
    for ep in pair:
        ep.reset()
        assert ep.state == EpState.IDLE
    assert pair[1].address != old
    with pytest.raises(StaleKeyError):
        pair[0].connect(old)
    pair[0].connect(pair[1].address)
    pair[1].connect(pair[0].address)
    into = bytearray(100)
    pair[0].get(rkey, base.address, into)
    assert into == buffer[:100]


def test_one_side_alone_cannot_be_reset(md, pair):
    """The peer's old address is as stale as one from before its own reset."""
    pair[0].reset()
    with pytest.raises(StaleKeyError):
        pair[0].connect(pair[1].address)


def test_old_addresses_are_stale_for_everybody(md, pair):
    old = pair[1].address
    pair[1].reset()
    with md.endpoint() as third, md.endpoint() as fourth:
        third.connect(pair[1].address)
        with pytest.raises(StaleKeyError):
            fourth.connect(old)


def test_connecting_twice_is_refused(md, pair):
    with md.endpoint() as third, pytest.raises(InvalidParamError, match="reset it first"):
        pair[0].connect(third.address)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: b"",
        lambda a: a[:1],
        lambda a: a[:-1],
        lambda a: a + b"\0",
        lambda a: b"\2" + a[1:],
        # The backend's part: version, queue pair, epoch, path MTU.
        lambda a: a[:48] + b"\2" + a[49:],
        lambda a: a[:64] + bytes(4) + a[68:],
        lambda a: a[:56] + bytes(8) + a[64:],
        lambda a: a[:50] + b"\x09" + a[51:],
        lambda a: os.urandom(len(a) - 1),
    ],
)
def test_damaged_addresses(md, damage):
    with md.endpoint() as one, md.endpoint() as two:
        with pytest.raises(InvalidParamError):
            one.connect(damage(two.address))
        one.connect(two.address)  # nothing was changed


def test_closing_flushes_what_is_under_way(md, region):
    _, base, rkey = region
    with md.endpoint() as two:
        one = md.endpoint()
        one.connect(two.address)
        two.connect(one.address)
        operations = [one.get_nb(rkey, base.address, bytearray(MIB)) for _ in range(20)]
        one.close()
        assert all(operation.done for operation in operations)
        assert {operation.status for operation in operations} <= {Status.OK, Status.FLUSHED}


def dies(conn):
    md = open_md()
    ep = md.endpoint()
    base = md.mem_reg(bytearray(64 * MIB))
    conn.send((ep.address, base.mkey_pack(), base.address))
    ep.connect(conn.recv())
    conn.send("ready")
    conn.recv()


def test_a_killed_peer_is_noticed(md, peer):
    other = peer(dies)
    address, key, start = other.recv()
    with md.endpoint() as ep, md.rkey_unpack(key) as rkey:
        ep.connect(address)
        other.send(ep.address)
        other.recv()
        ep.get(rkey, start, bytearray(8))
        other.kill()
        with pytest.raises((um.PeerGoneError, FlushedError)):
            for _ in range(1000):
                ep.get(rkey, start, bytearray(8))
        assert ep.state == EpState.ERROR


# ---- waiting ----


def test_event_fd(md, pair, region):
    _, base, rkey = region
    poller = select.poll()
    poller.register(md.event_fd, select.POLLIN)
    for _ in range(5):
        while not md.arm():
            md.progress()
        operation = pair[0].get_nb(rkey, base.address, bytearray(8))
        while not operation.done:
            assert poller.poll(20_000), "no event for a completion"
            while not md.arm():
                md.progress()
            md.progress()
        operation.wait(1)


def test_event_fd_tells_of_a_refused_peer(md, pair, region, raw):
    """The victim has no completion of its own; the device's event wakes it."""
    _, base, _ = region
    with md.endpoint() as victim:
        raw.connect(victim.address)
        victim.connect(raw.address)
        while not md.arm():
            md.progress()
        status, _ = raw.read(0x123456, base.address, 8)
        assert status == Wc.REM_ACCESS_ERR
        assert select.select([md.event_fd], [], [], 20)[0]
        md.arm()
        assert victim.state == EpState.ERROR


# ---- keys, by raw verbs ----


def attack(md, raw):
    """A function attempt(method, ...): over a fresh connection to a fresh victim each time."""

    def attempt(method, *args):
        with md.endpoint() as victim:
            raw.reset()
            raw.connect(victim.address)
            victim.connect(raw.address)
            answer = getattr(raw, method)(*args)
            return answer[0] if isinstance(answer, tuple) else answer

    return attempt


def test_the_device_checks_rights_range_and_binding(md, raw, region):
    buffer, base, _ = region
    window = base.derive(4096, 4096, MemFlag.REMOTE_GET)
    key = keys(window.mkey_pack())[0]
    start = base.address + 4096
    attempt = attack(md, raw)
    assert attempt("read", key, start, 4096) == Wc.SUCCESS
    for method, *args in [
        ("read", key, start - 1, 1),
        ("read", key, start + 4096, 1),
        ("read", key, start, 4097),
        ("write", key, start, b"x"),
        ("fetch_add", key, start, 1),
        ("compare_swap", key, start, 0, 1),
        ("read", key ^ 1, start, 8),
        ("read", key + 256, start, 8),
    ]:
        before = bytes(buffer)
        assert attempt(method, key if args[0] == key else args[0], *args[1:]) == Wc.REM_ACCESS_ERR
        assert bytes(buffer) == before
    window.invalidate()
    assert attempt("read", key, start, 8) == Wc.REM_ACCESS_ERR


def test_a_bound_key_works_over_its_endpoint_alone(md, raw, region):
    _, base, _ = region
    with md.endpoint() as right, md.endpoint() as wrong:
        window = base.derive(endpoint=right)
        key = keys(window.mkey_pack())[0]
        raw.connect(right.address)
        right.connect(raw.address)
        assert raw.read(key, base.address, 8)[0] == Wc.SUCCESS
        raw.reset()
        raw.connect(wrong.address)
        wrong.connect(raw.address)
        assert raw.read(key, base.address, 8)[0] == Wc.REM_ACCESS_ERR
        window.invalidate()


def test_derived_only_direct_key_opens_nothing(md, raw):
    buffer = bytearray(4096)
    rights = MemFlag.ACCESS_RMA | MemFlag.DERIVED_ONLY
    with md.mem_reg(buffer, rights) as base, base.derive() as window:
        direct = int(base.explain().split("key 0x")[1].split()[0], 16)
        attempt = attack(md, raw)
        assert attempt("read", keys(window.mkey_pack())[0], base.address, 8) == Wc.SUCCESS
        for method, *args in [("read", 8), ("write", b"x"), ("fetch_add", 1)]:
            assert attempt(method, direct, base.address, *args) == Wc.REM_ACCESS_ERR
        assert not any(buffer)


def test_remote_attacker(md, peer, region):
    """The same helper in another process."""
    buffer, base, _ = region
    remote = RemoteRawPeer(peer(serve))
    window = base.derive(0, 64)
    key = keys(window.mkey_pack())[0]
    with md.endpoint() as victim:
        remote.connect(victim.address)
        victim.connect(remote.address)
        assert remote.read(key, base.address, 64) == (Wc.SUCCESS, bytes(buffer[:64]))
        assert remote.write(key, base.address, b"written") == Wc.SUCCESS
        assert buffer[:7] == b"written"
        status, old = remote.fetch_add(key, base.address + 8, 1)
        assert status == Wc.SUCCESS
        assert old + 1 == struct.unpack_from("=Q", buffer, 8)[0]
        assert remote.compare_swap(key, base.address + 8, old, 0) == (Wc.SUCCESS, old + 1)
        window.invalidate()
        assert remote.read(key, base.address, 8)[0] == Wc.REM_ACCESS_ERR
        assert remote.state == Qp.ERR
    remote.close()
    assert remote.other.result() is None


def test_two_raw_peers_alone():
    """The helper can talk to itself, so a failing attack is not just a broken helper."""
    with RawPeer() as one, RawPeer() as two:
        one.connect(two.address)
        two.connect(one.address)
        start = ctypes.addressof(two.buffer)
        assert one.write(two.rkey, start, b"hello") == Wc.SUCCESS
        assert two.buffer.raw[:5] == b"hello"
        assert one.read(two.rkey, start, 5) == (Wc.SUCCESS, b"hello")


# ---- on what a runtime has opened ----


def test_stands_on_somebody_elses_context(raw):
    """Nothing of theirs is closed, and their events are not read: the state is asked for."""
    theirs = {"context": raw.context.value, "pd": raw.pd.value}
    with open_md(**theirs) as md, md.mem_reg(bytearray(b"x" * 64)) as base:
        with md.endpoint() as one, md.endpoint() as two, base.derive(length=8) as window:
            one.connect(two.address)
            two.connect(one.address)
            into = bytearray(8)
            with md.rkey_unpack(window.mkey_pack()) as rkey:
                one.get(rkey, base.address, into)
            assert into == b"x" * 8
            with too_wide(md, window) as rkey, pytest.raises(RemoteAccessError):
                one.get(rkey, base.address + 8, into)
            assert one.state == EpState.ERROR
            assert two.state == EpState.ERROR
            assert md.stats()["device.query_qp"] >= 1
            assert md.stats()["device.async_events"] == 0
    with RawPeer() as other:  # the context and its domain still work
        raw.connect(other.address)
        other.connect(raw.address)
        assert raw.write(other.rkey, ctypes.addressof(other.buffer), b"alive") == Wc.SUCCESS
