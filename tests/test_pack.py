# SPDX-License-Identifier: BSD-3-Clause
"""The packed key, byte for byte, and everything that is not one."""

import os
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ucx_memh as um
from _fakes import (
    AMO,
    DERIVED_ONLY,
    EXPORT,
    GET,
    HEADER,
    IDENTITY,
    PUT,
    RAW,
    REMOTE,
    RMA,
    Envelope,
    crc32c,
    key_crc,
    payload,
    sealed,
)
from ucx_memh.core import key_checksums
from ucx_memh.testing import open_fake


def fnv1a(text: str) -> int:
    digest = 2166136261
    for byte in text.encode():
        digest = (digest ^ byte) * 16777619 % 2**32
    return digest


def test_the_reader_here_knows_crc32c():
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=300))
def test_a_sum_is_the_same_however_it_is_made(data):
    """By the table, and by an instruction where the processor has one."""
    by_table, by_instruction = key_checksums(data)
    assert by_table == crc32c(data)
    has = "sse4_2" in Path("/proc/cpuinfo").read_text()
    assert by_instruction == (by_table if has else None)


def test_every_field_of_a_derived_key(fakes):
    md, _ = fakes()
    memory = bytearray(4096)
    base = md.mem_reg(memory, DERIVED_ONLY)
    win = base.derive(100, 200, GET)
    key = win.mkey_pack()
    fields = Envelope.of(key)
    assert HEADER.size + IDENTITY.size == 80
    assert fields == Envelope(
        magic=0x4B4D,
        version=1,
        header=80,
        total=len(key),
        flags=2,  # revocable
        component=fnv1a("fake"),
        crc=key_crc(key),
        key_id=win.key_id,
        address=base.address + 100,
        length=200,
        rights=int(GET),
        payload_length=len(key) - 80,
        reserved=0,
    )
    assert len(key) <= 256


def test_the_owner_is_this_process(fakes):
    md, _ = fakes()
    key = md.mem_reg(bytearray(8)).mkey_pack()
    host, start, pid, pid_ns, user_ns, reserved = IDENTITY.unpack_from(key, HEADER.size)
    stat = Path("/proc/self/stat").read_text()
    assert host != 0
    assert start == int(stat.rpartition(")")[2].split()[19])
    assert pid == os.getpid()
    assert pid_ns == os.stat("/proc/self/ns/pid").st_ino & 0xFFFFFFFF
    assert user_ns == os.stat("/proc/self/ns/user").st_ino & 0xFFFFFFFF
    assert reserved == 0


def test_a_base_packs_a_key_for_each_purpose(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    keys = {flags: base.mkey_pack(flags) for flags in (0, RMA, AMO, RMA | AMO)}
    assert len(set(keys.values())) == 4
    rights = {flags: Envelope.of(key).rights for flags, key in keys.items()}
    every = int(um.MemFlag.ACCESS_REMOTE)
    assert rights == {0: every, RMA: int(GET | PUT), AMO: every, RMA | AMO: every}
    assert {Envelope.of(key).flags for key in keys.values()} == {0}
    for flags, key in keys.items():
        assert base.mkey_pack(flags) == key


def test_a_cached_pack_asks_nobody_and_allocates_nothing(fakes):
    md, device = fakes()
    win = md.mem_reg(bytearray(64), DERIVED_ONLY).derive()
    key = win.mkey_pack()
    counts, allocs = device.counts, fakes.memory.allocs
    assert all(win.mkey_pack(flags) == key for flags in (0, RMA, AMO, RMA | AMO) * 10)
    assert (device.counts, fakes.memory.allocs) == (counts, allocs)


def test_raw_is_the_first_bytes_of_the_payload(fakes):
    md, _ = fakes(rkey_packed_size=16, rkey_raw_size=8)
    base = md.mem_reg(bytearray(64))
    assert base.mkey_pack(RAW) == payload(base.mkey_pack())[:8]
    assert base.mkey_pack(RAW | RMA) == payload(base.mkey_pack(RMA))[:8]


def test_keys_outlive_everything_they_came_from(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64), DERIVED_ONLY)
    win = base.derive()
    key = win.mkey_pack()
    copy = bytes(bytearray(key))
    base.dereg(cascade=True)
    md.close()
    del base, win, md
    assert key == copy


@pytest.mark.parametrize("short", [0, 1, 79, -1])
def test_a_buffer_too_small_is_left_alone(fakes, short):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    size = len(base.mkey_pack())
    buffer = bytearray(b"\xaa" * (short if short >= 0 else size - 1))
    with pytest.raises(um.InvalidParamError, match=f"needs {size} bytes") as caught:
        base.mkey_pack_into(buffer)
    assert caught.value.status is um.Status.BUFFER_TOO_SMALL
    assert set(buffer) <= {0xAA}


def test_pack_into_writes_the_key_and_not_a_byte_more(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    key = base.mkey_pack()
    buffer = bytearray(b"\xaa" * 300)
    assert base.mkey_pack_into(memoryview(buffer)[10:]) == len(key)
    assert buffer == b"\xaa" * 10 + key + b"\xaa" * (290 - len(key))
    for wrong in (bytes(300), memoryview(bytearray(600))[::2]):
        with pytest.raises((um.AccessError, um.InvalidParamError)):
            base.mkey_pack_into(wrong)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (EXPORT, um.UnsupportedError),
        (1 << 9, um.InvalidParamError),
        (1 << 40, um.InvalidParamError),
        (-1, um.InvalidParamError),
        ("plain", um.InvalidParamError),
    ],
)
def test_other_flags_are_refused(fakes, flags, error):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    with pytest.raises(error):
        base.mkey_pack(flags)
    assert device.count("key_create") == 0


# ---- what is no key ----


@pytest.fixture(scope="module")
def one_key():
    md, _ = open_fake()
    base = md.mem_reg(bytearray(64))
    key = base.mkey_pack()
    base.dereg()
    yield md, key
    md.close()


def test_every_truncation_is_malformed(one_key):
    md, key = one_key
    for size in range(len(key)):
        with pytest.raises(um.MalformedKeyError):
            md.rkey_unpack(key[:size])
    md.rkey_unpack(key).close()  # nothing is remembered of a failure


def test_every_flipped_bit_is_refused(one_key):
    md, key = one_key
    for bit in range(8 * len(key)):
        bad = bytearray(key)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises((um.MalformedKeyError, um.KeyVersionError)):
            md.rkey_unpack(bad)
    assert md.stats()["live_rkeys"] == 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=300))
def test_noise_is_refused(one_key, noise):
    md, _ = one_key
    with pytest.raises((um.MalformedKeyError, um.KeyVersionError)):
        md.rkey_unpack(noise)
    with pytest.raises((um.MalformedKeyError, um.KeyVersionError)):
        md.rkey_unpack(struct.pack("<HB", 0x4B4D, 1) + noise)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 2}, um.KeyVersionError),
        ({"component": fnv1a("other")}, um.InvalidParamError),
        ({"address": 2**64 - 8}, um.MalformedKeyError),
        ({"rights": 1}, um.MalformedKeyError),
        ({"rights": 0xFFFFFFFF}, um.MalformedKeyError),
        ({"length": 0}, um.MalformedKeyError),
        ({"flags": 1}, um.MalformedKeyError),
        ({"header": 79}, um.MalformedKeyError),
        ({"total": 40}, um.MalformedKeyError),
        ({"payload_length": 177}, um.MalformedKeyError),
    ],
)
def test_a_good_checksum_does_not_save_nonsense(one_key, changes, error):
    md, key = one_key
    with pytest.raises(error):
        md.rkey_unpack(sealed(key, **changes))


def test_a_longer_header_is_skipped(one_key):
    """A later version may say more; what it says in the first 80 bytes stays."""
    md, key = one_key
    longer = key[:80] + b"more to come" + key[80:]
    with md.rkey_unpack(sealed(longer, header=92, total=len(longer))) as rkey:
        assert rkey.length == 64


def test_a_key_in_a_larger_slot(one_key):
    md, key = one_key
    with md.rkey_unpack(key + b"\xff" * 300) as one, md.rkey_unpack(key) as two:
        assert one.compare(two) == 0


def test_the_first_pack_of_32_threads_makes_one_key(fakes):
    md, device = fakes()
    win = md.mem_reg(bytearray(64), DERIVED_ONLY).derive()
    start, keys = threading.Barrier(32), []

    def pack():
        start.wait()
        keys.append(win.mkey_pack())

    threads = [threading.Thread(target=pack) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 32
    assert len(set(keys)) == 1
    assert device.count("key_create") == 1


# ---- asked without a domain ----


def test_key_query_reads_the_envelope(fakes):
    md, _, _one, two = fakes.connected()
    base = md.mem_reg(bytearray(4096))
    win = base.derive(64, 128, GET, endpoint=two)
    for memh, revocable, bound in [(base, False, False), (win, True, True)]:
        key = memh.mkey_pack()
        info = um.key_query(key + b"another one")
        assert (info.key_id, info.address, info.length) == (memh.key_id, memh.address, memh.length)
        assert info.flags == (REMOTE if memh is base else GET)
        assert (info.size, info.owner) == (len(key), key[48:80])
        assert (info.revocable, info.endpoint_bound) == (revocable, bound)
        assert info.component == Envelope.of(key).component
    with pytest.raises(um.MalformedKeyError):
        um.key_query(key[:-1])
    with pytest.raises(um.KeyVersionError):
        um.key_query(sealed(key, version=2))
    win.invalidate()
    with pytest.raises(um.RevokedError):
        um.key_query(win.revoke_notice())


def test_peer_probe_keeps_nothing(fakes):
    md, device = fakes()
    key = md.mem_reg(bytearray(64)).mkey_pack()
    assert md.peer_probe(key) is None
    assert md.stats()["live_rkeys"] == 0
    rkey = md.rkey_unpack(key)
    asked = device.count("rkey_unpack")
    device.fail("rkey_unpack", um.Status.PEER_GONE)
    with pytest.raises(um.PeerGoneError):
        md.peer_probe(key)  # though it is known
    md.peer_probe(key)
    assert device.count("rkey_unpack") == asked + 2
    assert rkey.length == 64
    with pytest.raises(um.MalformedKeyError):
        md.peer_probe(b"")
