# SPDX-License-Identifier: BSD-3-Clause
"""The importer's cache: equal keys are one native object, freed with its last user."""

import threading

import pytest

import ucx_memh as um
from _fakes import RAW


def test_equal_keys_are_one_object(fakes):
    md, device = fakes()
    key = md.mem_reg(bytearray(64)).mkey_pack()
    rkeys = [md.rkey_unpack(bytes(bytearray(key))) for _ in range(10)]
    assert device.count("rkey_unpack") == 1
    assert md.stats()["live_rkeys"] == 1
    assert (md.stats()["rkey_hits"], md.stats()["rkey_misses"]) == (9, 1)
    assert all(rkey.compare(rkeys[0]) == 0 for rkey in rkeys)
    for rkey in rkeys[1:]:
        rkey.close()
    assert device.count("rkey_release") == 0
    rkeys[0].close()
    assert device.count("rkey_release") == 1
    assert md.stats()["live_rkeys"] == 0


def test_a_hit_allocates_nothing_and_asks_nobody(fakes):
    md, device = fakes()
    key = md.mem_reg(bytearray(64)).mkey_pack()
    first = md.rkey_unpack(key)
    counts, allocs = device.counts, fakes.memory.allocs
    for _ in range(100):
        md.rkey_unpack(key).close()
    assert (device.counts, fakes.memory.allocs) == (counts, allocs)
    first.close()


def test_keys_of_one_handle_are_told_apart(fakes):
    """Same key id, other bytes."""
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    plain = md.rkey_unpack(base.mkey_pack())
    revocable = md.rkey_unpack(base.mkey_pack(um.PackFlag.INVALIDATE_RMA))
    assert plain.key_id == revocable.key_id == base.key_id
    assert plain.compare(revocable) == -revocable.compare(plain) != 0
    assert md.stats()["live_rkeys"] == 2


def test_compare_is_a_total_order(fakes):
    md, _ = fakes()
    rkeys = [md.rkey_unpack(md.mem_reg(bytearray(8)).mkey_pack()) for _ in range(20)]
    for one in rkeys:
        for two in rkeys:
            assert one.compare(two) == -two.compare(one)
            assert (one.compare(two) == 0) == (one is two)
            for three in rkeys:
                if one.compare(two) < 0 and two.compare(three) < 0:
                    assert one.compare(three) < 0


def test_a_failure_is_not_remembered(fakes):
    md, device = fakes()
    key = md.mem_reg(bytearray(64)).mkey_pack()
    device.fail("rkey_unpack", int(um.Status.UNREACHABLE), text="not now")
    with pytest.raises(um.UnreachableError, match="not now"):
        md.rkey_unpack(key)
    assert md.stats()["live_rkeys"] == device.count("rkey_release") == 0
    md.rkey_unpack(key).close()
    assert device.count("rkey_release") == 1


def test_an_empty_key_needs_no_device(fakes):
    md, device = fakes()
    rkey = md.rkey_unpack(md.mem_reg(b"").mkey_pack())
    assert rkey.length == 0
    rkey.close()
    assert device.count("rkey_unpack") == device.count("rkey_release") == 0


def test_raw_keys_are_not_shared(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    raw = base.mkey_pack(RAW)
    one, two = (md.rkey_from_raw(raw, base.address, 64) for _ in range(2))
    assert one.compare(two) == -two.compare(one) != 0
    assert device.count("rkey_unpack") == 2
    for rkey in (one, two):
        rkey.close()
    assert device.count("rkey_release") == 2


def test_closing_twice_and_using_after(fakes):
    md, device = fakes()
    rkey = md.rkey_unpack(md.mem_reg(bytearray(64)).mkey_pack())
    rkey.close()
    rkey.close()
    assert device.count("rkey_release") == 1
    with pytest.raises(um.ClosedError):
        _ = rkey.length


def test_a_forced_close_takes_the_native_part(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    rkey = md.rkey_unpack(base.mkey_pack())
    with pytest.raises(um.BusyError):
        md.close()
    md.close(force=True)
    assert device.count("rkey_release") == 1
    with pytest.raises(um.ClosedError):
        one.get(rkey, base.address, bytearray(1))
    rkey.close()
    assert device.count("rkey_release") == 1


def test_threads_meet_on_one_key(fakes):
    md, device = fakes()
    key = md.mem_reg(bytearray(64)).mkey_pack()
    failures = []

    def work():
        try:
            for _ in range(500):
                with md.rkey_unpack(key) as rkey:
                    assert rkey.length == 64
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert device.count("rkey_unpack") == device.count("rkey_release")
    assert md.stats()["live_rkeys"] == 0
