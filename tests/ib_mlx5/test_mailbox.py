# SPDX-License-Identifier: BSD-3-Clause
"""The bytes of CREATE_MKEY, read back by the offsets of the programmer's reference manual."""

import pytest

from ucx_memh import MemFlag
from ucx_memh_ib_mlx5 import devx

GIB = 1 << 30
GET, PUT, ATOMIC = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT, MemFlag.REMOTE_ATOMIC
ALL = GET | PUT | ATOMIC

# name: (offset, width) in bits from the start of the mailbox
IN = {
    "opcode": (0x00, 16),
    "uid": (0x10, 16),
    "op_mod": (0x30, 16),
    "input_mkey_index": (0x48, 24),
    "pg_access": (0x60, 1),
    "mkey_umem_valid": (0x61, 1),
    "translations_octword_actual_size": (0x300, 32),
    "mkey_umem_id": (0x320, 32),
    "mkey_umem_offset": (0x340, 64),
}
# from the start of the memory key context, which begins at bit 0x80
MKC = {
    "free": (0x01, 1),
    "access_mode_4_2": (0x03, 3),
    "relaxed_ordering_write": (0x0D, 1),
    "umr_en": (0x10, 1),
    "a": (0x11, 1),
    "rw": (0x12, 1),
    "rr": (0x13, 1),
    "lw": (0x14, 1),
    "lr": (0x15, 1),
    "access_mode_1_0": (0x16, 2),
    "qpn": (0x20, 24),
    "mkey_7_0": (0x38, 8),
    "length64": (0x60, 1),
    "bsf_en": (0x61, 1),
    "en_rinval": (0x67, 1),
    "pd": (0x68, 24),
    "start_addr": (0x80, 64),
    "len": (0xC0, 64),
    "bsf_octword_size": (0x100, 32),
    "translations_octword_size": (0x1A0, 32),
    "relaxed_ordering_read": (0x1D9, 1),
    "log_entity_size": (0x1DB, 5),
}
KLM, KSM = 2, 3


def bits(box: bytes, offset: int, width: int) -> int:
    return int.from_bytes(box, "big") >> (len(box) * 8 - offset - width) & ((1 << width) - 1)


def decode(box: bytes) -> dict:
    fields = {name: bits(box, *where) for name, where in IN.items()}
    fields |= {name: bits(box, 0x80 + at, width) for name, (at, width) in MKC.items()}
    fields["entries"] = [
        (bits(box, at * 8, 32), bits(box, at * 8 + 32, 32), bits(box, at * 8 + 64, 64))
        for at in range(272, len(box), 16)
    ]
    return fields


def known_bits(box: bytes) -> set[int]:
    known = set()
    for at, width in IN.values():
        known |= set(range(at, at + width))
    for at, width in MKC.values():
        known |= set(range(0x80 + at, 0x80 + at + width))
    return known | set(range(272 * 8, len(box) * 8))


def make(kind, address, length, rights, **options):
    options = {"lkey": 0x1A2B3C, "pdn": 0x77, **options}
    box = devx.create_mkey_mailbox(kind, address, length, int(rights), **options)
    everything = int.from_bytes(box, "big")
    set_bits = {i for i in range(len(box) * 8) if everything >> (len(box) * 8 - 1 - i) & 1}
    assert set_bits <= known_bits(box), "a bit outside of every field is set"
    return decode(box)


def test_derived_is_exact_klm():
    key = make("derived", 0x7F0000001003, 12345, GET, tag=0x5A)
    assert key == {
        "opcode": 0x200,
        "uid": 0,
        "op_mod": 0,
        "input_mkey_index": 0,
        "pg_access": 0,
        "mkey_umem_valid": 0,
        "translations_octword_actual_size": 4,
        "mkey_umem_id": 0,
        "mkey_umem_offset": 0,
        "free": 0,
        "access_mode_4_2": 0,
        "relaxed_ordering_write": 0,
        "umr_en": 0,
        "a": 0,
        "rw": 0,
        "rr": 1,
        "lw": 0,
        "lr": 1,
        "access_mode_1_0": KLM,
        "qpn": 0xFFFFFF,
        "mkey_7_0": 0x5A,
        "length64": 0,
        "bsf_en": 0,
        "en_rinval": 0,
        "pd": 0x77,
        "start_addr": 0x7F0000001003,
        "len": 12345,
        "bsf_octword_size": 0,
        "translations_octword_size": 4,
        "relaxed_ordering_read": 0,
        "log_entity_size": 0,
        "entries": [(12345, 0x1A2B3C, 0x7F0000001003), (0, 0, 0), (0, 0, 0), (0, 0, 0)],
    }


@pytest.mark.parametrize(
    ("rights", "fields"),
    [
        (GET, {"rr": 1, "rw": 0, "a": 0, "lw": 0}),
        (PUT, {"rr": 0, "rw": 1, "a": 0, "lw": 1}),
        (ATOMIC, {"rr": 0, "rw": 0, "a": 1, "lw": 1}),
        (ALL, {"rr": 1, "rw": 1, "a": 1, "lw": 1}),
        (GET | MemFlag.ACCESS_LOCAL_WRITE, {"rr": 1, "rw": 0, "a": 0, "lw": 0}),
    ],
)
def test_derived_rights(rights, fields):
    key = make("derived", 4096, 64, rights)
    assert {name: key[name] for name in fields} == fields
    assert key["lr"] == 1


def test_derived_is_bound_to_a_queue_pair():
    assert make("derived", 4096, 64, GET, qpn=0xABCDEF)["qpn"] == 0xABCDEF


@pytest.mark.parametrize(
    ("length", "counts"),
    [
        (1, [1]),
        (2 * GIB - 1, [2 * GIB - 1]),
        (2 * GIB, [2 * GIB]),
        (2 * GIB + 1, [2 * GIB, 1]),
        (8 * GIB, [2 * GIB] * 4),
        (8 * GIB + 5, [2 * GIB] * 4 + [5]),
        (64 * GIB + 9, [2 * GIB] * 32 + [9]),
    ],
)
def test_derived_entries_are_at_most_2_gib_and_padded_to_four(length, counts):
    address = 0x7F1234567000
    key = make("derived", address, length, GET)
    padded = -len(counts) % 4
    assert [entry[0] for entry in key["entries"]] == counts + [0] * padded
    used = key["entries"][: len(counts)]
    assert [entry[1] for entry in used] == [0x1A2B3C] * len(counts)
    assert [entry[2] for entry in used] == [address + sum(counts[:i]) for i in range(len(counts))]
    assert key["translations_octword_size"] == len(counts) + padded
    assert key["translations_octword_actual_size"] == len(counts) + padded
    assert key["len"] == sum(counts) == length


def test_indirect_is_ksm_of_2_gib_entities():
    address = 3 * GIB + 0x1234
    key = make("indirect", address, 4096, GET | PUT | ATOMIC, atomic_align=8)
    assert key["access_mode_1_0"] == KSM
    assert key["log_entity_size"] == 31
    assert (key["rr"], key["rw"], key["a"], key["lw"], key["lr"]) == (1, 1, 0, 1, 1)
    assert key["start_addr"] == 2 * GIB
    assert key["len"] == (GIB + 0x1234 + 4096 + 7) // 8 * 8
    assert key["translations_octword_size"] == key["translations_octword_actual_size"] == 1
    assert key["entries"] == [(2 * GIB, 0x1A2B3C, 2 * GIB)]


def test_indirect_has_room_for_one_page_more():
    # Exactly one entity, so only the page of slack makes it two.
    key = make("indirect", 4 * GIB, 2 * GIB, GET)
    assert key["entries"] == [(2 * GIB, 0x1A2B3C, 4 * GIB), (2 * GIB, 0x1A2B3C, 6 * GIB)]
    key = make("indirect", 4 * GIB, 2 * GIB - 4096, GET)
    assert len(key["entries"]) == 1
    assert key["rw"] == 0  # rights as the handle has them, not everything


def test_indirect_length_is_a_multiple_of_the_largest_atomic():
    assert make("indirect", 4 * GIB + 1, 1, GET, atomic_align=128)["len"] == 128


def test_atomic_is_ksm_with_the_atomic_right_alone():
    key = make("atomic", 2 * GIB, 4096, ALL)
    assert key["access_mode_1_0"] == KSM
    assert (key["rr"], key["rw"], key["a"], key["lw"], key["lr"]) == (0, 0, 1, 1, 1)
    assert key["start_addr"] == 2 * GIB


def test_nothing_is_sent_for_an_uneven_top_of_the_address_space():
    """The last bytes of the 64-bit space do not wrap."""
    key = make("derived", 2**64 - 4096, 4096, GET)
    assert key["start_addr"] == 2**64 - 4096
    assert key["entries"][0] == (4096, 0x1A2B3C, 2**64 - 4096)
