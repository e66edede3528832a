# SPDX-License-Identifier: BSD-3-Clause
"""Rule 8: key ids and native values come back late, or never."""

import random
from collections import deque

import pytest

import ucx_memh as um
from _fakes import RMA, native

LIVE, REVOKING, REVOKED, CLOSED = um.MemhState
IO_ERROR = um.Status.IO_ERROR


def burn(device, base, values):
    """Make and destroy keys with these native values, one after the other."""
    for value in values:
        device.next_values([value])
        win = base.derive()
        assert native(win.mkey_pack())[0] == value
        win.invalidate()


def test_rule8_key_ids_are_never_used_again(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    seen = [base.key_id]
    for i in range(2000):
        if i % 7 == 0:
            device.fail("mem_derive", IO_ERROR)
            with pytest.raises(um.DeviceError):
                base.derive()
        win = base.derive()
        seen.append(win.key_id)
        if i % 3:
            win.invalidate()
        del win
    seen.append(md.mem_reg(bytearray(8)).key_id)
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen)


def test_rule8_key_ids_of_two_mds_start_anywhere(fakes):
    ids = [fakes()[0].mem_reg(bytearray(8)).key_id for _ in range(8)]
    assert len({key_id >> 20 for key_id in ids}) == 8
    assert all(0 < key_id < 2**63 for key_id in ids)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_rule8_the_window_is_exact(fakes, size):
    """A value that was destroyed is refused until `size` others have been destroyed after it."""
    for others in range(size + 2):
        md, device = fakes(quarantine=size)
        base = md.mem_reg(bytearray(64))
        burn(device, base, [7, *range(1000, 1000 + others)])
        device.next_values([7, 8])
        value, _ = native(base.derive().mkey_pack())
        held = others < size
        assert value == (8 if held else 7)
        assert md.stats()["keys_parked"] == held
        assert md.stats()["keys_quarantined"] == min(others + 2, size)


def test_rule8_first_in_first_out(fakes):
    md, device = fakes(quarantine=4)
    base = md.mem_reg(bytearray(64))
    burn(device, base, [1, 2, 3, 4, 5, 6])
    for free, held in [(1, [6, 5, 4, 3]), (2, [1, 6, 5, 4]), (7, [2, 1, 6, 5])]:
        device.next_values([*held, free])
        win = base.derive()
        assert native(win.mkey_pack())[0] == free
        win.invalidate()


@pytest.mark.parametrize("size", [1, 2, 5, 8, 16, 31])
@pytest.mark.parametrize("seed", range(3))
def test_rule8_against_a_model(fakes, size, seed):
    """Random values of a small domain: the table must find, forget and move them up right."""
    rng = random.Random(seed)
    md, device = fakes(quarantine=size)
    base = md.mem_reg(bytearray(64))
    held = deque(maxlen=size)
    # Multiples of a power of two, so that many share a place in the table.
    domain = [(n << 27 | n) & 0xFFFFFFFF for n in range(1, size + 12)]
    parked = 0
    for _ in range(600):
        values = rng.sample(domain, 8)
        free = next((i for i, value in enumerate(values) if value not in held), 8)
        device.next_values(values[: free + 1])
        win = base.derive()
        parked += free
        if free == 8:
            with pytest.raises(um.BusyError):
                win.mkey_pack()
        else:
            assert native(win.mkey_pack())[0] == values[free]
            held.append(values[free])
        win.invalidate()
        stats = md.stats()
        assert (stats["keys_parked"], stats["keys_quarantined"]) == (parked, len(held))
    assert len(device.live_keys) == 1


def test_rule8_the_value_0_is_a_value(fakes):
    md, device = fakes(quarantine=2)
    base = md.mem_reg(bytearray(64))

    def zero():
        """The fake packs no such key, but it makes and destroys it."""
        device.next_values([0])
        device.fail("mkey_pack", IO_ERROR)
        win = base.derive()
        with pytest.raises(um.DeviceError):
            win.mkey_pack()
        win.invalidate()

    zero()
    assert md.stats()["keys_quarantined"] == 1
    device.next_values([0, 5])
    assert native(base.derive().mkey_pack())[0] == 5  # and it goes at once
    assert md.stats()["keys_parked"] == 1
    burn(device, base, [6])
    zero()
    assert md.stats()["keys_parked"] == 1


def test_rule8_parks_at_most_8_and_says_so(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    old = list(range(500, 520))
    burn(device, base, old)
    device.reset_counts()
    device.next_values([*old, 600])
    win = base.derive()
    for n in (1, 2):
        with pytest.raises(um.BusyError) as raised:
            win.mkey_pack()
        assert raised.value.status == um.Status.NO_RESOURCE
        del raised
        assert win.state == LIVE
        assert md.stats()["keys_parked"] == device.count("key_create") == 8 * n
        assert device.count("key_destroy") == 8 * n  # what was parked is destroyed
        assert md.stats()["keys_parked_now"] == 0
        assert len(device.live_keys) == 1
    assert native(win.mkey_pack())[0] == 600
    assert md.stats()["keys_parked"] == 20


def test_rule8_parked_keys_are_held_until_a_good_one_has_come(fakes):
    """Or firmware would offer the same again."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    burn(device, base, [500, 501, 502])
    device.reset_counts()
    device.next_values([500, 501, 502, 600])
    device.fail("key_create", IO_ERROR, after=3)
    device.fail("key_destroy", IO_ERROR, count=3)
    win = base.derive()
    with pytest.raises(um.DeviceError):
        win.mkey_pack()
    assert sorted(device.live_keys)[:3] == [500, 501, 502]
    assert md.stats()["keys_parked_now"] == 3
    assert native(win.mkey_pack())[0] == 600


def test_rule8_parked_keys_that_cannot_be_destroyed_are_kept(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    burn(device, base, list(range(500, 512)))
    device.next_values([500, 501, 600])
    device.fail("key_destroy", IO_ERROR, count=2)
    win = base.derive()
    assert native(win.mkey_pack())[0] == 600
    assert md.stats()["keys_parked_now"] == 2
    assert {500, 501} <= set(device.live_keys)
    # They take places: 6 are left, as long as they resist.
    device.fail("key_destroy", IO_ERROR, count=10**6)
    device.reset_counts()
    device.next_values(range(502, 512))
    other = base.derive()
    with pytest.raises(um.BusyError):
        other.mkey_pack()
    assert device.count("key_create") == 6
    assert md.stats()["keys_parked_now"] == 8
    with pytest.raises(um.BusyError):
        other.mkey_pack()
    assert device.count("key_create") == 6
    device.clear_faults()
    assert native(other.mkey_pack())[0] not in range(500, 512)
    assert md.stats()["keys_parked_now"] == 0


def test_rule8_parked_keys_go_before_their_registration(fakes):
    md, device = fakes()
    base, other = md.mem_reg(bytearray(64)), md.mem_reg(bytearray(64))
    burn(device, base, [500])
    device.next_values([500, 600])
    device.fail("key_destroy", IO_ERROR, count=3)
    win = base.derive()
    win.mkey_pack()
    assert 500 in device.live_keys
    other.dereg()  # that key is not on it
    assert 500 in device.live_keys
    with pytest.raises(um.DeviceError):
        win.dereg()
    with pytest.raises(um.DeviceError):
        win.dereg()
    win.dereg()
    base.dereg()
    assert device.live_keys == {}
    assert md.stats()["keys_parked_now"] == 0


def test_rule8_a_parked_key_that_resists_keeps_the_registration(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    burn(device, base, [500])
    device.next_values([500, 600])
    device.fail("key_destroy", IO_ERROR)
    win = base.derive()
    win.mkey_pack()
    win.dereg()
    device.fail("key_destroy", IO_ERROR)
    with pytest.raises(um.DeviceError):
        base.dereg()
    assert device.count("mem_dereg") == 0
    assert base.state == REVOKING
    base.dereg()
    assert device.live_keys == {}


@pytest.mark.parametrize("end", ["close", "dereg", "pack"])
@pytest.mark.parametrize("status", [um.Status.OK, IO_ERROR], ids=["gone", "fails-later"])
def test_rule8_parked_keys_of_a_slow_device(fakes, end, status):
    md, device = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    burn(device, base, [500])
    device.next_values([500, 600])
    win = base.derive()
    assert native(win.mkey_pack())[0] == 600
    assert (device.destroying, md.stats()["keys_parked_now"]) == (1, 1)
    if status != um.Status.OK:
        device.fail("key_destroy_done", status)
    if end == "pack":
        md.progress()
        assert md.stats()["keys_parked_now"] == (status != um.Status.OK)
        base.derive().mkey_pack()
        md.progress()
        assert md.stats()["keys_parked_now"] == 0
    win.dereg()
    if end == "dereg":
        while base.state != CLOSED:
            try:
                base.dereg()
            except (um.BusyError, um.DeviceError):
                md.progress()
    md.close(force=True)
    assert device.live_keys == {}


def test_rule8_64_revoked_keys_do_not_come_back_for_the_next_64(fakes):
    """D14: the quarantine counts destroyed keys, not live ones."""
    md, device = fakes(quarantine=64)
    base = md.mem_reg(bytearray(64))
    old = [base.derive() for _ in range(64)]
    values = [native(win.mkey_pack())[0] for win in old]
    for win in old:
        win.invalidate()
    # Firmware that returns every index at once, the last one first.
    device.next_values([v for i, value in enumerate(reversed(values)) for v in (value, 5000 + i)])
    new = [base.derive() for _ in range(64)]
    assert not {native(win.mkey_pack())[0] for win in new} & set(values)
    assert md.stats()["keys_parked"] == 64
    assert len(device.live_keys) == 65


def test_rule8_direct_keys_are_not_quarantined(fakes):
    md, _ = fakes()
    for _ in range(5):
        with md.mem_reg(bytearray(64)) as base:
            base.mkey_pack()
    assert md.stats()["keys_quarantined"] == 0
    with md.mem_reg(bytearray(64)) as base:
        base.mkey_pack(RMA)
    assert md.stats()["keys_quarantined"] == 1


def test_rule8_each_md_has_its_own(fakes):
    one, two = fakes(), fakes()
    bases = [md.mem_reg(bytearray(64)) for md, _ in (one, two)]
    burn(one[1], bases[0], [500])
    burn(two[1], bases[1], [500])
    assert two[0].stats()["keys_parked"] == 0


def test_rule8_without_a_quarantine_a_value_comes_back_at_once(fakes):
    md, device = fakes(quarantine=0)
    base = md.mem_reg(bytearray(64))
    burn(device, base, [500] * 5)
    assert md.stats()["keys_quarantined"] == md.stats()["keys_parked"] == 0


def test_rule8_bounded_memory_got_before_the_first_key(fakes):
    """A revocation must not fail for want of it."""
    md, _ = fakes(quarantine=1000)
    base = md.mem_reg(bytearray(64))
    before = fakes.memory.live_bytes
    base.derive().mkey_pack()
    used = fakes.memory.live_bytes - before
    assert 0 < used < 32 * 1000
    for _ in range(3000):
        base.derive().mkey_pack()
    assert fakes.memory.live_bytes - before == used


@pytest.mark.parametrize("size", [2**24 + 1, 2**31, 2**32 - 1])
def test_rule8_a_quarantine_without_bounds_is_refused(fakes, size):
    with pytest.raises(um.InvalidParamError):
        fakes(quarantine=size)


@pytest.mark.parametrize("destroy", ["now", "progress", "manual"])
def test_rule8_placeholders_and_what_is_refused_is_destroyed_once(fakes, destroy):
    """Also by a device that takes its time for a destruction: nothing is asked of it twice."""
    md, device = fakes(quarantine=8, placeholders=True, destroy=destroy)
    base = md.mem_reg(bytearray(64))

    ended = []

    def revoke(win):
        win.invalidate(lambda status: ended.append(status))
        if destroy == "manual":
            device.complete()
        md.progress()
        assert ended.pop() == um.Status.OK

    for value in range(1, 6):
        device.next_values([value])
        win = base.derive()
        win.mkey_pack()
        revoke(win)
    # The fourth in a row gets a placeholder, once it is gone itself.
    held = [90] if destroy == "now" else []
    device.next_values([1, 2, 3, 4, *held, 5, 6])
    before = device.count("key_destroy")
    win = base.derive()
    assert native(win.mkey_pack())[0] == 6
    if destroy == "manual":
        device.complete()
    md.progress()
    kinds = [kind for kind, *_ in device.live_keys.values()]
    assert kinds.count("placeholder") == len(held) == md.stats()["key_placeholders"]
    assert kinds.count("derived") == 1
    assert device.count("key_destroy") - before == 5
    assert md.stats()["keys_parked"] == 5
    assert md.stats()["keys_parked_now"] == 0
    assert device.violations == {}
    revoke(win)
    for _ in range(8):  # the placeholder's index is free again, and it goes
        win = base.derive()
        win.mkey_pack()
        revoke(win)
    base.derive().mkey_pack()
    assert md.stats()["key_placeholders"] == 0
