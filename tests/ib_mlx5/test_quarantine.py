# SPDX-License-Identifier: BSD-3-Clause
"""Revoked key values do not come back, on a device that gives every index again at once."""

import random

import pytest

import ucx_memh as um
from _sides import Wc, keys, link, opened, relink
from ucx_memh import MemFlag

GET = MemFlag.REMOTE_GET
SIZE = 64 << 10
TAGS = 251  # values that the backend makes of one index


@pytest.fixture(params=["auto", "off"], ids=lambda umr: f"umr {umr}")
def umr(request):
    """Keys from the pool, which lets an index rest; and by command, where the core has to see to
    it."""
    return request.param


def value(win):
    return keys(win.mkey_pack())[0]


def test_64_and_64_more(owner, library):
    """Live at the same time, over many rounds."""
    memory = bytearray(range(256)) * (SIZE // 256)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    seen = set()
    for turn in range(25):
        wins = [base.derive(i * 64, 64, GET) for i in range(64)]
        values = {value(win) for win in wins}
        assert len(values) == 64
        assert not values & seen
        seen |= values
        at = turn % 64
        assert library.get(wins[at].mkey_pack(), 0, 64) == memory[at * 64 : at * 64 + 64]
        for win in wins[turn:] + wins[:turn]:
            win.invalidate()
    assert len(seen) == 25 * 64 == owner.stats()["keys_quarantined"]
    assert len({number >> 8 for number in seen}) <= 64 + 8  # these indices came back all the time


def test_one_after_the_other(owner, soft, umr):
    """The same index again and again: when its tags are used up its values are parked, or it
    rests."""
    base = owner.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
    live = soft.stat("mkeys.live")
    seen = set()
    rounds = 3 * TAGS
    for _ in range(rounds):
        win = base.derive(0, 64, GET)
        number = value(win)
        assert number not in seen
        seen.add(number)
        win.invalidate()
    stats = owner.stats()
    if umr == "auto":
        assert (stats["device.pool_free"], stats["device.pool_resting"]) == (0, 3)
        assert (stats["key_placeholders"], stats["keys_parked"]) == (0, 0)
        assert (stats["device.create_mkey"], stats["device.destroy_mkey"]) == (3, 0)
        assert (stats["device.bind_mw"], stats["device.local_inv"]) == (rounds, rounds)
        assert soft.stat("mkeys.live") == live + 3
        return
    # Each index whose tags were used up: four keys too many, and one that keeps the index busy.
    held = stats["key_placeholders"]
    assert held == 2
    assert stats["keys_parked"] == 4 * held
    assert stats["device.create_mkey"] == rounds + 5 * held
    assert stats["device.destroy_mkey"] == rounds + 4 * held
    assert soft.stat("mkeys.live") == live + held


@pytest.mark.parametrize("width", [1, 64])
def test_more_revocations_than_the_quarantine_is_long(owner, soft, umr, width):
    """A lease per request, for ever: never a dead end, never a value too early, bounded memory.

    With several live at a time, in random order, an index gets its tags in random order, too.
    """
    base = owner.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
    window = 65536
    chance = random.Random(width)
    last: dict[bytes, int] = {}
    live: list[tuple[um.Memh, bytes]] = []
    for revoked in range(2 * window + 5 * TAGS):
        while len(live) < chance.randint(1, width):
            win = base.derive()
            number = win.mkey_pack(um.PackFlag.RAW)
            assert revoked - last.get(number, -window - 1) > window
            live.append((win, number))
        win, number = live.pop(chance.randrange(len(live)))
        win.invalidate()
        last[number] = revoked
    stats = owner.stats()
    assert stats["keys_quarantined"] == window
    used_up = stats["key_placeholders"]
    if umr == "auto":
        assert (used_up, stats["keys_parked"], stats["device.destroy_mkey"]) == (0, 0, 0)
        made = stats["device.create_mkey"]
        if width == 1:  # those that rest together, and the one in use
            assert made == -(-window // TAGS) + 1
        else:
            assert made <= -(-window // TAGS) + 2 * width
    elif width == 1:
        assert window // 256 <= used_up <= window // TAGS + 24
    else:
        assert window // 256 <= used_up <= window // 64
    base.dereg(cascade=True)  # what keeps the indices busy stands on no registration


def test_an_old_key_never_reaches_the_next_owner(owner, attacker):
    """Of the same index, and of the same place in memory."""
    memory = bytearray(SIZE)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    ep = link(owner, attacker)
    old = []
    for turn in range(12):
        memory[:64] = bytes([turn + 1]) * 64
        win = base.derive(0, 64, GET)
        number = value(win)
        assert attacker.read(number, win.address, 64) == (Wc.SUCCESS, bytes([turn + 1]) * 64)
        for stale in old[-2:]:
            assert stale >> 8 == number >> 8
            status, data = attacker.read(stale, win.address, 64)
            assert status is Wc.REM_ACCESS_ERR
            assert bytes([turn + 1]) not in data
            relink(ep, attacker)
        old.append(number)
        win.invalidate()


def test_its_length_is_the_callers(tidy, umr):
    """As many destructions as it says, and not one more."""
    configs = [{"quarantine": length, "umr": umr} for length in (TAGS, TAGS - 1)]
    with opened(**configs[0]) as short, opened(**configs[1]) as shorter:
        for md, parked in ((short, True), (shorter, False)):
            base = md.mem_reg(bytearray(64), MemFlag.DERIVED_ONLY)
            values = []
            for _ in range(TAGS + 1):
                win = base.derive()
                values.append(value(win))
                win.invalidate()
            held = "device.pool_resting" if umr == "auto" else "keys_parked"
            assert bool(md.stats()[held]) == parked
            assert (values[TAGS] == values[0]) == (not parked)
            assert len(set(values[:TAGS])) == TAGS


def test_a_fixed_index(owner, soft):
    """A device that insists on one index whenever that is free."""
    base = owner.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
    spare = [base.derive() for _ in range(5)]
    index = value(spare[4]) + 0x100 >> 8
    soft.set("index_policy", f"fixed:{index}")
    seen = set()
    indices = []
    for _ in range(2 * TAGS):
        win = base.derive()
        number = value(win)
        assert number not in seen
        seen.add(number)
        indices.append(number >> 8)
        win.invalidate()
    assert indices[:TAGS] == [index] * TAGS
    assert index not in indices[TAGS:]


@pytest.mark.parametrize("umr", ["off"])
def test_when_only_revoked_values_are_offered(owner, soft, library):
    """It says so after eight tries, having changed nothing; what was handed out works on."""
    memory = bytearray(range(256)) * (SIZE // 256)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    good = base.derive(64, 64, GET)
    key = good.mkey_pack()
    width = 10
    seen = set()
    for _ in range(TAGS):  # all values of ten indices
        wins = [base.derive() for _ in range(width)]
        seen |= {value(win) for win in wins}
        for win in wins:
            win.invalidate()
    assert len(seen) == width * TAGS
    held = owner.stats()["key_placeholders"]
    live = soft.stat("mkeys.live")
    before = owner.stats()["device.create_mkey"]
    win = base.derive()
    with pytest.raises(um.BusyError, match="revoked lately") as caught:
        win.mkey_pack()
    assert caught.value.status is um.Status.NO_RESOURCE
    assert win.state is um.MemhState.LIVE
    after = owner.stats()
    assert after["key_placeholders"] == held + 8
    assert after["device.create_mkey"] == before + 4 * 8 + 8
    assert soft.stat("mkeys.live") == live + 8
    assert library.get(key, 0, 64) == memory[64:128]
    # It has got on: the next try has eight indices less to refuse.
    assert value(win) not in seen
    assert library.get(win.mkey_pack(), 0, 64) == memory[:64]


@pytest.mark.parametrize("umr", ["auto"])
def test_the_pool_gets_indices_that_commands_have_used_up(owner, soft, library):
    """A new key of the pool's whose value is in quarantine rests, and another one is made."""
    memory = bytearray(range(256)) * (SIZE // 256)
    base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY)
    link(owner, library)
    ep = owner.endpoint()
    width = 10
    seen = set()
    for _ in range(TAGS):
        wins = [base.derive(endpoint=ep) for _ in range(width)]
        seen |= {value(win) for win in wins}
        for win in wins:
            win.invalidate()
    assert len(seen) == width * TAGS
    before = owner.stats()
    assert before["device.bind_mw"] == 0
    win = base.derive()
    assert value(win) not in seen
    assert library.get(win.mkey_pack(), 0, 64) == memory[:64]
    after = owner.stats()
    refused = after["keys_parked"] - before["keys_parked"]
    assert after["device.pool_resting"] == refused == after["device.local_inv"]
    assert refused + after["key_placeholders"] - before["key_placeholders"] == width
    assert after["device.pool_used"] == 1
    win.invalidate()
    ep.close()
    base.dereg()
