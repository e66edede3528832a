# SPDX-License-Identifier: BSD-3-Clause
"""An owner and its peers, each a process: one is cut off, one is killed, one comes back."""

import gc

import pytest

import ucx_memh as um
from _sides import Library, Owner, Wc, descriptors, join, keys, link, relink, wait_for
from ucx_memh import EpState, MemFlag, MemhState, Status

GET, PUT, ATOMIC = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT, MemFlag.REMOTE_ATOMIC
MIB = 1 << 20
GONE = (um.PeerGoneError, um.UnreachableError, um.FlushedError)


@pytest.fixture
def part(device):
    return 128 << 10 if device.slow else MIB


@pytest.fixture
def memory(part):
    return bytearray(4 * part)


def test_one_of_three_is_cut_off_while_it_writes(owner, device, side, memory, part):
    """The writer's key goes in the middle of its stream; a sibling's and the base's go on."""
    base = owner.mem_reg(memory)
    times = device.times(60)
    writer, sibling, other = peers = [side(Library) for _ in range(3)]
    ends = [link(owner, each) for each in peers]
    wins = [base.derive(i * part, part) for i in range(2)]
    key = base.mkey_pack()
    rest = base.derive(2 * part, part, GET | PUT)
    sibling.start("churn", wins[1].mkey_pack(), part, times)
    other.start("churn", rest.mkey_pack(), part, times)
    old = wins[0].mkey_pack()
    writer.start("stream", old, part)
    wait_for(lambda: memory[0] >= 5, "a stream of writes")

    wins[0].invalidate()
    frozen = memory[:part]
    writes, status = writer.answer()
    assert (status, ends[0].state) == (Status.REMOTE_ACCESS, EpState.ERROR)
    assert writes >= 4
    assert sibling.answer() == other.answer() == times
    assert memory[:part] == frozen
    assert memory[part : 3 * part] == bytes([times]) * 2 * part
    assert [end.state for end in ends[1:]] == [EpState.CONNECTED] * 2
    # The same peer, with the base's key and with a new one of its own.
    relink(ends[0], writer)
    assert writer.get(key, 0, part) == frozen
    again = base.derive(0, part)
    assert writer.churn(again.mkey_pack(), part, 3) == 3
    with pytest.raises(um.RemoteAccessError):
        writer.put(old, 0, b"late")
    assert memory[:part] == bytes([3]) * part


def test_without_a_notice_the_connection_is_lost_and_made_again(owner, library, memory):
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, library)
    errors = []
    ep.on_error = errors.append
    win, other = base.derive(0, 64), base.derive(64, 64)
    key, good = win.mkey_pack(), other.mkey_pack()
    library.put(key, 0, b"before")
    win.invalidate()
    with pytest.raises(um.RemoteAccessError):
        library.put(key, 0, b"after")
    assert memory[:6] == b"before"
    with pytest.raises(um.FlushedError):
        library.get(good, 0, 64)
    assert library.state() is EpState.ERROR
    wait_for(lambda: owner.progress() or errors)
    assert (ep.state, errors) == (EpState.ERROR, [ep])
    relink(ep, library)
    assert library.get(good, 0, 6) == bytes(6)


def test_a_notice_keeps_the_connection(owner, library, memory):
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, library)
    win, other = base.derive(0, 64), base.derive(64, 64)
    key, good = win.mkey_pack(), other.mkey_pack()
    library.put(key, 0, b"before")
    with pytest.raises(um.InvalidParamError):
        win.revoke_notice()
    win.invalidate()
    assert library.notice(win.revoke_notice()) == 1
    for call in (
        lambda: library.put(key, 0, b"after"),
        lambda: library.get(key, 0, 8),
        lambda: library.fetch_add(key, 0, 1),
    ):
        with pytest.raises(um.RevokedError):
            call()
    assert memory[:6] == b"before"
    assert library.get(good, 0, 64) == bytes(64)
    assert (library.state(), ep.state) == (EpState.CONNECTED, EpState.CONNECTED)


def test_an_address_from_before_a_reset_is_refused(owner, library, memory):
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    win = base.derive(0, 64)
    ep = link(owner, library)
    theirs, ours = library.address, ep.address
    relink(ep, library)
    ep.reset()
    library.reset()
    assert (library.address != theirs, ep.address != ours) == (True, True)
    with pytest.raises(um.StaleKeyError):
        ep.connect(theirs)
    with pytest.raises(um.StaleKeyError):
        library.connect(ours)
    assert ep.state is EpState.IDLE
    join(ep, library)
    assert library.get(win.mkey_pack(), 0, 64) == bytes(64)


# ---- killed ----


def test_an_owner_hears_of_a_killed_peer(owner, device, peer, memory):
    """By its next operation, and it need not wait for that to take a key back."""
    library = Library(peer, device.where)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, library)
    win = base.derive()
    library.put(win.mkey_pack(), 0, b"alive")
    address, key = library.buffer(64)
    into = bytearray(64)
    with owner.rkey_unpack(key) as rkey:
        ep.get(rkey, address, into)
        library.peer.kill()
        win.invalidate()
        for _ in range(2):
            with pytest.raises(GONE):
                ep.get(rkey, address, into)
    assert ep.state is EpState.ERROR
    assert into == bytes([7]) * 64
    ep.close()
    base.dereg()
    memory.append(0)


def test_an_owner_that_was_killed_comes_back(owner, device, peer):
    """At the same address in memory: its old key is refused, its new one works."""
    place = 0x5_1000_0000
    first = Owner(peer, device.where)
    address = first.region(MIB, 0x11, place)
    old = first.grant()
    ep = link(owner, first)
    into = bytearray(64)
    old_rkey = owner.rkey_unpack(old)
    ep.get(old_rkey, address, into)
    assert into == b"\x11" * 64
    first.peer.kill()
    with pytest.raises(GONE):
        ep.get(old_rkey, address, into)

    new = old
    while keys(new) == keys(old):  # by chance, of one in 15,000
        second = Owner(peer, device.where)
        assert second.region(MIB, 0x22, place) == address
        new = second.grant()
    relink(ep, second)
    new_rkey = owner.rkey_unpack(new)
    assert (new_rkey.address, new_rkey.length) == (old_rkey.address, old_rkey.length)
    assert new_rkey.compare(old_rkey) != 0
    ep.get(new_rkey, address, into)
    assert into == b"\x22" * 64
    with pytest.raises((um.RemoteAccessError, um.StaleKeyError)):
        ep.get(old_rkey, address, into)
    assert into == b"\x22" * 64
    if ep.state is EpState.ERROR:
        relink(ep, second)
    ep.put(new_rkey, address, b"again")
    old_rkey.close()
    ep.get(new_rkey, address, into)
    assert into[:5] == b"again"
    new_rkey.close()


# ---- again and again ----


def rounds_by_reset(md, base, memory, far, times):
    """Refused, then both ends begin anew."""
    ep = link(md, far)
    for turn in range(times):
        win = base.derive(turn * 64, 64, GET)
        rkey, _ = keys(win.mkey_pack())
        assert far.read(rkey, win.address, 64) == (Wc.SUCCESS, memory[:64])
        win.invalidate()
        assert far.read(rkey, win.address, 64)[0] is Wc.REM_ACCESS_ERR
        relink(ep, far)


def rounds_by_new_endpoint(md, base, memory, far, times):
    """A new endpoint of ours each time, and a new life of theirs."""
    for turn in range(times):
        far.reset()
        with md.endpoint() as ep:
            join(ep, far)
            win = base.derive(turn * 64, 64, GET, endpoint=ep)
            rkey, _ = keys(win.mkey_pack())
            assert far.read(rkey, win.address, 64) == (Wc.SUCCESS, memory[:64])
            assert far.write(rkey, win.address, b"x") is Wc.REM_ACCESS_ERR
        assert win.state is MemhState.REVOKED


def rounds_of_bound_keys(md, base, memory, far, times):
    """Both, and the handles are dropped without a word."""
    for turn in range(times):
        far.reset()
        ep = md.endpoint()
        join(ep, far)
        win = base.derive(turn * 64, 64, GET)
        rkey, _ = keys(win.mkey_pack())
        assert far.read(rkey, win.address, 64) == (Wc.SUCCESS, memory[:64])
        del win
        gc.collect(0)
        assert far.read(rkey, base.address, 64)[0] is Wc.REM_ACCESS_ERR
        del ep
        md.progress()  # its end was only begun, perhaps


@pytest.mark.parametrize("rounds", [rounds_by_reset, rounds_by_new_endpoint, rounds_of_bound_keys])
def test_a_hundred_rounds_leave_nothing(owner, device, attacker, memory, rounds):
    """Neither descriptors nor anything of the device, in both processes."""
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    times = device.times(100)

    def held():
        things = device.live() | {"keys": device.keys(owner), "flows": device.flows(owner)}
        return descriptors(), attacker.descriptors(), things

    rounds(owner, base, memory, attacker, times)  # what is made once
    for ep in attacker.ends:
        ep.close()
    attacker.ends.clear()
    attacker.reset()
    before = wait_for(lambda: device.flows(owner) == 0 and held())
    rounds(owner, base, memory, attacker, times)
    for ep in attacker.ends:
        ep.close()
    attacker.reset()

    def no_more():
        # Of descriptors `before` may have seen one too many, of a connection just being closed.
        ours, theirs, things = held()
        return ours <= before[0] and theirs <= before[1] and things == before[2]

    wait_for(no_more, f"{before} again")
