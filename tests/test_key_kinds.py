# SPDX-License-Identifier: BSD-3-Clause
"""The key-kind table against what happens: which native keys each pack makes (S3)."""

from itertools import product

import pytest

import ucx_memh as um
from _fakes import (
    AMO,
    ATOMIC,
    DERIVED_ONLY,
    GET,
    LOCAL_READ,
    LOCAL_WRITE,
    PLAIN,
    PUT,
    REMOTE,
    RMA,
    Envelope,
    native,
)
from ucx_memh.core import key_kinds

PACKS = [PLAIN, RMA, AMO, RMA | AMO]
LOCAL = LOCAL_READ | LOCAL_WRITE
ACCESS = [sum(rights) for rights in product((0, GET), (0, PUT), (0, ATOMIC))]
M = um.MdFlag
PLAIN_CAPS = M.REG | M.NEED_RKEY | M.RKEY_PTR | M.ENDPOINT | M.ATOMIC | M.EVENT_FD
CAPS = {
    "nothing": dict(derive=False, invalidate=False),
    "derive": dict(flags=PLAIN_CAPS | M.REG_DERIVED),
    "rma": dict(derive=False, flags=PLAIN_CAPS | M.INVALIDATE_RMA),
    "amo": dict(derive=False, flags=PLAIN_CAPS | M.INVALIDATE_AMO),
    "both": dict(derive=False),
    "all": dict(),
}
TABLE = {row["kind"]: row for row in key_kinds()}


def expected(kind, caps, access, flags):
    """The kinds of key that such a pack makes, or the errors that it may raise."""
    errors = set()
    if not access:
        errors.add(um.AccessError)
    if kind == "derived":
        return errors or {"derived"}
    made = set()
    for flag, cap, name, rights in [
        (RMA, M.INVALIDATE_RMA, "indirect", GET | PUT),
        (AMO, M.INVALIDATE_AMO, "atomic", ATOMIC),
    ]:
        if flags & flag:
            made.add(name)
            if not caps & cap:
                errors.add(um.UnsupportedError)
            if not access & rights:
                errors.add(um.InvalidParamError)
    return errors or made


def kinds_of(device):
    return sorted(row[0] for row in device.live_keys.values())


@pytest.mark.parametrize("caps", list(CAPS.values()), ids=list(CAPS))
@pytest.mark.parametrize("kind", ["base", "derived"])
def test_S3_keys_by_access_flags_and_caps(fakes, kind, caps):
    md, device = fakes(**caps)
    has = md.attr.flags
    if kind == "derived" and M.REG_DERIVED not in has:
        assert TABLE["derived"]["needs"] == M.REG_DERIVED
        with pytest.raises(um.UnsupportedError):
            md.mem_reg(bytearray(64)).derive()
        assert device.count("key_create") == 0
        return
    for access, flags in product(ACCESS, PACKS):
        base = md.mem_reg(bytearray(64), (access if kind == "base" else REMOTE) | LOCAL)
        memh = base if kind == "base" else base.derive(0, 32, access | LOCAL)
        before = device.count("key_create")
        wanted = expected(kind, has, access, flags)
        if wanted and all(isinstance(each, type) for each in wanted):
            with pytest.raises(tuple(wanted)):
                memh.mkey_pack(flags)
            wanted = set()
        else:
            memh.mkey_pack(flags)
            memh.mkey_pack(flags)
        assert kinds_of(device) == sorted(["direct", *wanted])
        assert device.count("key_create") == before + len(wanted)
        memh.dereg()
        base.dereg()
        assert device.live_keys == {}
    assert device.count("key_destroy") == device.count("key_create")


@pytest.mark.parametrize("kind", ["base", "derived"])
@pytest.mark.parametrize("access", ACCESS[1:], ids=lambda access: str(um.MemFlag(access)))
def test_S3_a_key_has_the_rights_of_its_kind_and_handle(fakes, kind, access):
    md, device = fakes()
    base = md.mem_reg(bytearray(64), (access if kind == "base" else REMOTE) | LOCAL)
    memh = base if kind == "base" else base.derive(16, 32, access | LOCAL)
    for flags in PACKS:
        if all(isinstance(each, str) for each in expected(kind, md.attr.flags, access, flags)):
            rights = Envelope.of(memh.mkey_pack(flags)).rights
            named = native(memh.mkey_pack(flags))
            live = device.live_keys
            rma, atomic = live[named[0]], live[named[1]]
            assert rights == (rma[3] | atomic[3]) & access
    for name, address, length, rights in device.live_keys.values():
        if name != "direct" or kind == "base":
            assert (address, length) == (memh.address, memh.length)
            assert rights == access & TABLE[name]["rights"]


@pytest.mark.parametrize("first", PACKS, ids=str)
@pytest.mark.parametrize("second", PACKS, ids=str)
def test_S3_a_later_pack_makes_only_what_is_missing(fakes, first, second):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    base.mkey_pack(first)
    made = kinds_of(device)
    one = expected("base", md.attr.flags, REMOTE, first)
    two = expected("base", md.attr.flags, REMOTE, second)
    assert made == sorted(["direct", *one])
    base.mkey_pack(second)
    assert kinds_of(device) == sorted(["direct", *(one | two)])
    assert device.count("key_create") == len(one | two)


@pytest.mark.parametrize("at", [0, 1])
def test_S3_a_failure_at_the_second_key_keeps_the_first(fakes, at):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    device.fail("key_create", um.Status.IO_ERROR, after=at)
    with pytest.raises(um.DeviceError):
        base.mkey_pack(RMA | AMO)
    assert device.count("key_create") == at + 1
    key = base.mkey_pack(RMA | AMO)
    assert device.count("key_create") == 3
    assert kinds_of(device) == ["atomic", "direct", "indirect"]
    assert {*native(key)} < {*device.live_keys}


def test_table_made_when(fakes):
    """mem_reg makes the direct key, the first pack that names it any other."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    assert kinds_of(device) == [n for n, row in TABLE.items() if row["made"] == "mem_reg"]
    base.mkey_pack(RMA | AMO)
    win.mkey_pack()
    assert kinds_of(device) == sorted(TABLE)
    assert {row["made"] for row in TABLE.values()} == {"mem_reg", "first mkey_pack"}


def test_table_revocable_by_and_destroyed_how(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    base.mkey_pack(RMA | AMO)
    win.mkey_pack()
    before = set(kinds_of(device))
    win.invalidate()
    gone = before - set(kinds_of(device))
    assert gone == {n for n, row in TABLE.items() if row["revocable_by"] == "invalidate"}
    assert device.count("key_destroy") == 1
    base.dereg()
    assert device.live_keys == {}
    destroyed_by_key_destroy = [n for n, r in TABLE.items() if "key_destroy" in r["destroyed"]]
    assert device.count("key_destroy") == len(destroyed_by_key_destroy) == 3
    assert device.count("mem_dereg") == 1
    assert [n for n, r in TABLE.items() if r["destroyed"] == "mem_dereg"] == ["direct"]


def test_table_is_a_copy():
    key_kinds()[0]["kind"] = "spoilt"
    assert [row["kind"] for row in key_kinds()] == ["direct", "indirect", "atomic", "derived"]


def test_derived_only_makes_no_key_but_derived_ones(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64), DERIVED_ONLY)
    for flags in PACKS:
        with pytest.raises(um.UnsupportedError):
            base.mkey_pack(flags)
    for flags in PACKS:
        base.derive().mkey_pack(flags)
    assert device.count("key_create") == device.count("key_destroy") == len(PACKS)
