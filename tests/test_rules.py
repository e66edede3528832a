# SPDX-License-Identifier: BSD-3-Clause
"""The contract, rule by rule, on a fake device: what a base and its derived handles are.

Rules 6 to 8 and 11 to 15 are in the test_core_*.py beside this file, 17 in test_import.py.
"""

import threading
from itertools import permutations, product

import pytest

import ucx_memh as um
from _fakes import (
    ALL,
    AMO,
    ATOMIC,
    DERIVED_ONLY,
    FLAG_ENDPOINT,
    FLAG_REVOCABLE,
    GET,
    LOCAL_READ,
    LOCAL_WRITE,
    PLAIN,
    PUT,
    RAW,
    REMOTE,
    RMA,
    Books,
    Envelope,
    native,
)
from ucx_memh.testing import memh_bytes

PACKS = [PLAIN, RMA, AMO, RMA | AMO]
LIVE, REVOKING, REVOKED, CLOSED = um.MemhState


def packs(memh):
    return {flags: memh.mkey_pack(flags) for flags in [*PACKS, RAW, RAW | RMA, RAW | AMO]}


def refused(memh):
    """A revoked handle refuses everything that would use it."""
    for call in (memh.mkey_pack, memh.derive, memh.invalidate, lambda: memh.mkey_pack(RAW)):
        with pytest.raises(um.RevokedError):
            call()
    return True


# ---- 1: a base is never modified ----


def test_rule1_base_bytes_are_the_same_before_during_and_after(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(4096))
    before = packs(base)
    made = device.count("key_create")
    for flags in PACKS:
        win = base.derive(64, 128, GET | PUT)
        assert packs(base) == before
        win.mkey_pack(flags)
        assert packs(base) == before
        win.invalidate()
        assert packs(base) == before
        win.dereg()
        assert packs(base) == before
    assert device.count("key_create") == made + len(PACKS)


def test_rule1_nothing_of_the_base_is_written_but_the_list_of_its_children(fakes):
    md, _ = fakes(tail_inherit_size=8, tail_own_size=8)
    base = md.mem_reg(bytearray(4096))
    base.mkey_pack(RMA)
    size = fakes.memory.sizes[2]  # the Md, the registration, the handle
    before = memh_bytes(base, size)
    win = base.derive(64, 128, GET)
    win.mkey_pack()
    during = memh_bytes(base, size)
    changed = {i for i in range(size) if before[i] != during[i]}
    fields = (Books.children, Books.refs, Books.live_children)
    may = {at for field in fields for at in range(field.offset, field.offset + field.size)}
    assert changed <= may
    win.invalidate()
    win.dereg()
    del win
    assert memh_bytes(base, size) == before


@pytest.mark.parametrize("op", ["mem_derive", "key_create", "mkey_pack", "key_destroy"])
def test_rule1_also_when_the_derived_handle_fails(fakes, op):
    md, device = fakes()
    base = md.mem_reg(bytearray(4096))
    before = packs(base)
    device.fail(op, um.Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        win = base.derive(0, 64)
        win.mkey_pack()
        win.invalidate()
    assert packs(base) == before
    win = base.derive(0, 64)
    assert win.mkey_pack() not in before.values()
    assert packs(base) == before


def test_rule1_base_atomics_go_on_while_others_come_and_go(fakes):
    md, _, one, two = fakes.connected()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    rkey = md.rkey_unpack(base.mkey_pack(AMO))
    done = []
    stop = threading.Event()

    def add():
        while not stop.is_set() or not done:
            one.fetch_add(rkey, base.address, 1)
            done.append(1)

    thread = threading.Thread(target=add)
    thread.start()
    for _ in range(300):
        win = base.derive(8, 8)
        win.mkey_pack()
        win.invalidate()
    stop.set()
    thread.join()
    assert int.from_bytes(memory[:8], "little") == len(done) > 0
    assert two.state == um.EpState.CONNECTED


# ---- 2: a derived handle exposes only its own keys ----


def test_rule2_plain_and_invalidate_packs_of_a_derived_handle_are_the_same_bytes(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(4096))
    for first in PACKS:
        win = base.derive(0, 64)
        key = win.mkey_pack(first)
        assert {win.mkey_pack(flags) for flags in PACKS} == {key}
        assert len({win.mkey_pack(RAW | flags) for flags in PACKS}) == 1
        fields = Envelope.of(key)
        assert fields.flags == FLAG_REVOCABLE
        assert device.live_keys[native(key)[0]] == ("derived", base.address, 64, REMOTE)
    assert device.count("key_create") == len(PACKS)


def test_rule2_base_keys_differ_by_flags(fakes):
    """S5: a direct key, an indirect one and an atomic one, and each says what it can."""
    md, device = fakes()
    base = md.mem_reg(bytearray(4096))
    keys = {flags: base.mkey_pack(flags) for flags in PACKS}
    assert len(set(keys.values())) == 4
    kinds = {
        flags: tuple(device.live_keys[value][0] for value in native(key))
        for flags, key in keys.items()
    }
    assert kinds == {
        PLAIN: ("direct", "direct"),
        RMA: ("indirect", "indirect"),
        AMO: ("direct", "atomic"),
        RMA | AMO: ("indirect", "atomic"),
    }
    assert {flags: Envelope.of(key).rights for flags, key in keys.items()} == {
        PLAIN: REMOTE,
        RMA: PUT | GET,
        AMO: REMOTE,
        RMA | AMO: REMOTE,
    }
    assert {Envelope.of(key).flags for key in keys.values()} == {0}


@pytest.mark.parametrize("order", list(permutations(PACKS)), ids=str)
def test_rule2_any_order_of_packs_is_legal_and_changes_nothing(fakes, order):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    first = {flags: base.mkey_pack(flags) for flags in order}
    assert {flags: base.mkey_pack(flags) for flags in PACKS} == first
    assert device.count("key_create") == 2


@pytest.mark.parametrize("base_pack", [None, *PACKS], ids=str)
@pytest.mark.parametrize("win_pack", PACKS, ids=str)
@pytest.mark.parametrize("derive_first", [True, False], ids=["derive-first", "pack-first"])
def test_rule2_a_base_and_its_derived_handle_are_packed_in_any_order(
    fakes, base_pack, win_pack, derive_first
):
    """S4: the two have no native key in common, and the base's live on."""
    md, device = fakes()
    base = md.mem_reg(bytearray(4096))
    if derive_first:
        win = base.derive()
    of_base = set() if base_pack is None else {*native(base.mkey_pack(base_pack))}
    if not derive_first:
        win = base.derive()
    of_win = {*native(win.mkey_pack(win_pack))}
    if base_pack is not None:
        of_base |= {*native(base.mkey_pack(base_pack))}
    assert not of_base & of_win
    win.invalidate()
    for value in of_win:
        assert device.raw_access(value, "get", base.address, length=8)[0] == um.Status.REMOTE_ACCESS
    for value in of_base:
        assert value in device.live_keys


def test_rule2_all_that_a_derived_handle_packed_dies_with_it(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    values = {value for flags in PACKS for value in native(win.mkey_pack(flags))}
    for value in values:
        assert device.raw_access(value, "put", base.address, data=b"x")[0] == um.Status.OK
    win.invalidate()
    for value, op in product(values, ["get", "put", "fetch_add"]):
        status, _ = device.raw_access(value, op, base.address, data=b"y", length=1)
        assert status == um.Status.REMOTE_ACCESS


# ---- 3: narrow only ----

WIDER = {
    "past the end": dict(offset=0, length=4097),
    "shifted past the end": dict(offset=1, length=4096),
    "behind the end": dict(offset=4097, length=0),
    "far behind": dict(offset=2**64 - 1, length=0),
    "wraps around": dict(offset=1, length=2**64 - 1),
    "wraps around to the start": dict(offset=2**64 - 4096, length=4096),
    "longest": dict(offset=0, length=2**64 - 1),
    "no length, behind the end": dict(offset=4097),
    "DERIVED_ONLY is no right": dict(flags=DERIVED_ONLY),
}


@pytest.mark.parametrize("wanted", list(WIDER.values()), ids=list(WIDER))
def test_rule3_wider_is_refused(fakes, wanted):
    md, device = fakes()
    base = md.mem_reg(bytearray(4096))
    with pytest.raises(um.InvalidParamError):
        base.derive(**wanted)
    assert base.derived_count == 0
    assert device.count("mem_derive") == 0


@pytest.mark.parametrize("right", [GET, PUT, ATOMIC, LOCAL_READ, LOCAL_WRITE], ids=str)
def test_rule3_a_right_that_the_base_lacks_is_refused(fakes, right):
    """S7: and the others are not."""
    md, _ = fakes()
    base = md.mem_reg(bytearray(4096), ALL & ~right)
    with pytest.raises(um.InvalidParamError):
        base.derive(flags=right)
    with pytest.raises(um.InvalidParamError):
        base.derive(flags=ALL)
    win = base.derive(flags=ALL & ~right)
    assert win.flags == win.grant == ALL & ~right
    with pytest.raises(um.InvalidParamError):
        win.derive(flags=ALL)


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, None, (0, 4096)),
        (0, 4096, (0, 4096)),
        (1, None, (1, 4095)),
        (4095, 1, (4095, 1)),
        (4096, None, (4096, 0)),
        (4096, 0, (4096, 0)),
        (0, 0, (0, 0)),
    ],
)
def test_rule3_range(fakes, offset, length, expected):
    md, _ = fakes()
    base = md.mem_reg(bytearray(4096))
    win = base.derive(offset, length)
    assert (win.address - base.address, win.length) == expected
    assert (base.address, base.length) == (win.address - offset, 4096)


def test_rule3_the_key_has_exactly_that_range_and_these_rights(fakes):
    """S7: as the device sees it, with no library in between."""
    md, device = fakes()
    memory = bytearray(range(256))
    base = md.mem_reg(memory)
    win = base.derive(64, 32, GET)
    value, _ = native(win.mkey_pack())

    def raw(op, offset, length=1):
        status, _ = device.raw_access(
            value, op, base.address + offset, length=length, data=b"x" * length
        )
        return um.Status(status)

    assert raw("get", 64, 32) == raw("get", 95) == um.Status.OK
    for offset, length in [(63, 1), (96, 1), (64, 33), (63, 2), (0, 256)]:
        assert raw("get", offset, length) == um.Status.REMOTE_ACCESS
    assert raw("put", 64) == raw("fetch_add", 64) == um.Status.REMOTE_ACCESS
    assert memory == bytes(range(256))
    direct, _ = native(base.mkey_pack())
    assert device.raw_access(direct, "put", base.address + 64, data=b"!")[0] == um.Status.OK


def test_rule3_deriving_from_a_derived_handle(fakes):
    """D3: a derive of the same registration, within the parent."""
    md, device = fakes()
    base = md.mem_reg(bytearray(4096))
    parent = base.derive(1024, 1024, GET | PUT)
    parent.mkey_pack()
    child = parent.derive(512, 256, GET)
    assert (child.address, child.length) == (base.address + 1536, 256)
    assert (child.flags, child.base, parent.base) == (GET, parent, base)
    assert (base.derived_count, parent.derived_count, child.derived_count) == (1, 1, 0)
    for wider in (dict(offset=0, length=1025), dict(offset=1024, length=1), dict(flags=ATOMIC)):
        with pytest.raises(um.InvalidParamError):
            parent.derive(**wider)
    value, _ = native(child.mkey_pack())
    assert device.live_keys[value] == ("derived", child.address, 256, GET)
    assert device.count("mem_reg") == 1
    child.invalidate()
    assert parent.state == LIVE
    assert native(parent.mkey_pack())[0] in device.live_keys


def test_rule3_derived_only(fakes):
    """The region's own key gives nothing to peers; derive narrows from the grant."""
    md, device = fakes()
    memory = bytearray(64)
    base = md.mem_reg(memory, DERIVED_ONLY | GET | PUT)
    assert base.flags == DERIVED_ONLY | GET | PUT
    assert base.grant == GET | PUT
    ((direct, row),) = device.live_keys.items()
    assert row == ("direct", base.address, 64, 0)
    for flags in [*PACKS, RAW]:
        with pytest.raises(um.UnsupportedError):
            base.mkey_pack(flags)
    with pytest.raises(um.InvalidParamError):
        base.derive(flags=ATOMIC)
    win = base.derive()
    assert win.flags == GET | PUT
    value, _ = native(win.mkey_pack())
    assert device.raw_access(value, "put", base.address, data=b"x" * 64)[0] == um.Status.OK
    for op in ("get", "put", "fetch_add"):
        status, _ = device.raw_access(direct, op, base.address, data=b"y", length=1)
        assert status == um.Status.REMOTE_ACCESS
    assert memory == b"x" * 64
    assert device.count("key_create") == 1


@pytest.mark.parametrize(
    ("buffer", "grant"), [(bytearray(8), ALL), (bytes(8), LOCAL_READ | GET)], ids=["rw", "ro"]
)
def test_rule3_derived_only_alone_grants_all_that_the_memory_allows(fakes, buffer, grant):
    md, _ = fakes()
    base = md.mem_reg(buffer, DERIVED_ONLY)
    assert base.grant == base.derive().flags == grant


def test_rule3_bound_to_an_endpoint(fakes):
    md, _, one, two = fakes.connected()
    other, its_peer = md.endpoint(), md.endpoint()
    other.connect(its_peer.address)
    its_peer.connect(other.address)
    base = md.mem_reg(bytearray(64))
    win = base.derive(endpoint=two)
    assert win.endpoint is two
    assert base.endpoint is None
    key = win.mkey_pack()
    assert Envelope.of(key).flags == FLAG_REVOCABLE | FLAG_ENDPOINT
    rkey = md.rkey_unpack(key)
    one.put(rkey, win.address, b"bound")  # `one` talks to `two`
    with pytest.raises(um.RemoteAccessError):
        other.put(rkey, win.address, b"loose")
    into = bytearray(5)
    one.get(rkey, win.address, into)
    assert into == b"bound"


def test_rule3_a_child_of_a_bound_handle_is_bound_too(fakes):
    md, _, one, two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    win = base.derive(endpoint=two)
    child = win.derive(0, 8)
    assert child.endpoint is two
    assert Envelope.of(child.mkey_pack()).flags & FLAG_ENDPOINT
    with pytest.raises(um.InvalidParamError):
        win.derive(endpoint=one)
    assert win.derive(endpoint=two).endpoint is two


def test_rule3_an_endpoint_that_cannot_be_bound_is_refused(fakes):
    md, device = fakes(derive_endpoint=False)
    base = md.mem_reg(bytearray(64))
    with pytest.raises(um.UnsupportedError):
        base.derive(endpoint=md.endpoint())
    for wrong in (object(), 3, base):
        with pytest.raises((TypeError, um.InvalidParamError)):
            base.derive(endpoint=wrong)
    assert base.derived_count == 0
    assert device.count("mem_derive") == 0


def test_rule3_an_endpoint_of_another_md_is_refused(fakes):
    md, device = fakes()
    other, _ = fakes()
    base = md.mem_reg(bytearray(64))
    theirs = other.endpoint()
    with pytest.raises(um.InvalidParamError):
        base.derive(endpoint=theirs)
    theirs.close()
    ours = md.endpoint()
    ours.close()
    with pytest.raises(um.ClosedError):
        base.derive(endpoint=ours)
    assert device.count("mem_derive") == 0


# ---- 4: states ----


def test_rule4_live_revoked_closed(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    assert (base.state, win.state) == (LIVE, LIVE)
    win.invalidate()
    assert (base.state, win.state) == (LIVE, REVOKED)
    win.dereg()
    assert win.state == CLOSED
    base.dereg()
    assert base.state == CLOSED


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "never-packed"])
def test_rule4_invalidate_is_terminal(fakes, packed):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    if packed:
        win.mkey_pack()
    win.invalidate()
    calls = device.counts
    assert refused(win)
    assert device.counts == calls
    assert base.derive().mkey_pack()  # a new grant is a new derive


@pytest.mark.parametrize("state", ["live", "revoked"])
def test_rule4_a_closed_handle_refuses_all_but_a_second_dereg(fakes, state):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    win.mkey_pack()
    if state == "revoked":
        win.invalidate()
    for memh in (win, base):
        memh.dereg()
        for call in (memh.mkey_pack, memh.derive, memh.invalidate):
            with pytest.raises(um.ClosedError):
                call()
        memh.dereg()
        memh.dereg(invalidate=True, cascade=True)
        with memh:
            pass
    assert device.count("mem_dereg") == device.count("key_destroy") == 1


def test_rule4_a_base_cannot_be_invalidated(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    key = base.mkey_pack(RMA)
    for options in ({}, {"cascade": True}, {"callback": print}):
        with pytest.raises(um.InvalidParamError):
            base.invalidate(**options)
    assert base.state == LIVE
    assert base.mkey_pack(RMA) == key
    assert device.count("key_destroy") == 0


@pytest.mark.parametrize("close", ["invalidate", "dereg"])
def test_rule4_a_failed_destruction_stays_in_revoking_and_can_only_be_retried(fakes, close):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    value, _ = native(win.mkey_pack())
    device.fail("key_destroy", um.Status.IO_ERROR, count=2, text="broken", errno=5, syndrome=0xBAD)
    for _ in range(2):
        with pytest.raises(um.DeviceError, match="broken") as raised:
            getattr(win, close)()
        assert (raised.value.errno, raised.value.context["syndrome"]) == (5, 0xBAD)
        del raised
        assert win.state == REVOKING
        assert value in device.live_keys
        for call in (win.mkey_pack, win.derive):
            with pytest.raises(um.RevokedError):
                call()
        with pytest.raises(um.BusyError):
            base.dereg()
    getattr(win, close)()
    assert win.state == (REVOKED if close == "invalidate" else CLOSED)
    assert value not in device.live_keys
    assert device.count("key_destroy") == 3
    base.dereg()


@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1])
def test_rule4_keys_already_gone_stay_gone_and_none_is_destroyed_twice(fakes, at, failures):
    """D16: a base has two keys; the fake notices a second destruction of either."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    base.mkey_pack(RMA | AMO)
    device.fail("key_destroy", um.Status.IO_ERROR, after=at, count=failures)
    for _ in range(failures):
        with pytest.raises(um.DeviceError):
            base.dereg()
        assert len(device.live_keys) == 3 - at
        assert base.state == REVOKING
    base.dereg()
    assert base.state == CLOSED
    assert device.live_keys == {}
    assert device.count("key_destroy") == 2 + failures


def test_rule4_a_failed_deregistration_leaves_the_registration_whole(fakes):
    md, device = fakes()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    base.mkey_pack(RMA)
    device.fail("mem_dereg", um.Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        base.dereg()
    assert base.state == REVOKING
    assert len(device.live_keys) == 1
    with pytest.raises(BufferError):
        memory.append(0)  # still exported
    with pytest.raises(um.BusyError):
        md.close()
    base.dereg()
    assert base.state == CLOSED
    assert device.count("key_destroy") == 1
    memory.append(0)


@pytest.mark.parametrize("op", ["key_destroy_done", "mem_dereg"])
def test_rule4_failures_that_the_device_reports_later(fakes, op):
    md, device = fakes(destroy="progress")
    base = md.mem_reg(bytearray(64))
    base.mkey_pack(RMA | AMO)
    device.fail(op, um.Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        base.dereg()
    assert base.state == REVOKING
    base.dereg()
    assert base.state == CLOSED
    assert device.live_keys == {}


def test_rule4_while_the_device_is_at_it_nothing_else_is_legal(fakes):
    md, device = fakes(destroy="manual")
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    win.mkey_pack()
    done = []
    win.invalidate(done.append)
    assert win.state == REVOKING
    for call in (win.mkey_pack, win.derive):
        with pytest.raises(um.RevokedError):
            call()
    for call in (win.invalidate, win.dereg, base.dereg):
        with pytest.raises(um.BusyError):
            call()
    assert device.complete() == 1
    assert (done, win.state) == ([um.Status.OK], REVOKED)
    base.dereg()


# ---- 5: lifetime ----


def test_rule5_live_descendants_keep_a_handle(fakes):
    """D2: BUSY, and nothing has changed."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    leaf = win.derive()
    keys = [memh.mkey_pack() for memh in (base, win, leaf)]
    calls = device.counts
    for call in (base.dereg, win.invalidate, win.dereg, lambda: base.dereg(invalidate=True)):
        with pytest.raises(um.BusyError):
            call()
    assert device.counts == calls
    assert [memh.mkey_pack() for memh in (base, win, leaf)] == keys
    assert (base.derived_count, win.derived_count) == (1, 1)
    leaf.invalidate()
    win.invalidate()
    base.dereg()


def test_rule5_revoked_descendants_do_not(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    wins = [base.derive() for _ in range(3)]
    for win in wins:
        win.mkey_pack()
        win.invalidate()
    assert base.derived_count == 0
    base.dereg()
    assert device.live_keys == {}
    assert {win.state for win in wins} == {REVOKED}


def family(base):
    """Two sons with two sons each; the leaves last."""
    sons = [base.derive(i * 8, 16) for i in range(2)]
    return sons, [son.derive(i * 8, 8) for son in sons for i in range(2)]


@pytest.mark.parametrize("last", ["dereg", "invalidate"])
def test_rule5_cascade_revokes_leaves_first(fakes, last):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    top = base.derive() if last == "invalidate" else base
    sons, leaves = family(top)
    everyone = [top, *sons, *leaves]
    owner = {native(memh.mkey_pack())[0]: memh for memh in everyone}
    order = []
    while True:
        # One destruction at a time succeeds: so the order can be seen.
        before = set(device.live_keys)
        device.clear_faults()
        device.fail("key_destroy", um.Status.IO_ERROR, after=1, count=1)
        device.fail("mem_dereg", um.Status.IO_ERROR, count=1)
        try:
            getattr(top, last)(cascade=True)
        except um.DeviceError:
            order += [owner[value] for value in before - set(device.live_keys)]
        else:
            order += [owner[value] for value in before - set(device.live_keys)]
            break
        if len(order) == 6 and last == "dereg":
            break
    device.clear_faults()
    if last == "dereg":
        base.dereg(cascade=True)
        order.append(base)
    for parent, child in [(top, sons[0]), (top, sons[1])] + [
        (sons[i // 2], leaves[i]) for i in range(4)
    ]:
        assert order.index(child) < order.index(parent)
    assert len(order) == len(set(order)) == 7
    assert {memh.state for memh in sons + leaves} == {REVOKED}
    assert top.state == (REVOKED if last == "invalidate" else CLOSED)


@pytest.mark.parametrize("after", list(range(6)))
def test_rule5_cascade_stops_at_a_failure_and_can_be_repeated(fakes, after):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    sons, leaves = family(base)
    for memh in sons + leaves:
        memh.mkey_pack()
    device.fail("key_destroy", um.Status.IO_ERROR, after=after)
    with pytest.raises(um.DeviceError):
        base.dereg(cascade=True)
    states = [memh.state for memh in sons + leaves]
    assert (states.count(REVOKED), states.count(REVOKING)) == (after, 1)
    assert base.state == LIVE
    assert base.mkey_pack()
    base.dereg(cascade=True)
    assert device.count("key_destroy") == 7
    assert base.state == CLOSED


def test_rule5_cascade_of_a_base_that_cannot_be_invalidated_changes_nothing(fakes):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    key = win.mkey_pack()
    with pytest.raises(um.InvalidParamError):
        base.invalidate(cascade=True)
    assert win.state == LIVE
    assert win.mkey_pack() == key
    assert device.count("key_destroy") == 0


def test_rule5_the_registration_outlives_the_base_object(fakes):
    """A derived handle holds all that it stands on."""
    md, device = fakes()
    memory = bytearray(b"data" * 16)
    win = md.mem_reg(memory).derive()
    value, _ = native(win.mkey_pack())
    assert device.raw_access(value, "get", win.address, length=4) == (um.Status.OK, b"data")
    assert device.count("mem_dereg") == 0
    assert win.base.state == LIVE
    del win
    assert device.count("mem_dereg") == 1


# ---- 9: told truthfully ----


def test_rule9_enforcement_is_what_the_device_says(fakes):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    enforced = um.EnforcementRow(*[um.Enforcement.ENFORCED] * 3)
    assert win.enforcement == um.EnforcementTable(enforced, enforced, enforced)
    assert base.enforcement.revoke == um.EnforcementRow()
    assert md.attr.enforcement == um.EnforcementTable(enforced, enforced, enforced)
    win.invalidate()
    assert win.enforcement == um.EnforcementTable(enforced, enforced, enforced)
    md.close(force=True)
    with pytest.raises(um.ClosedError):
        _ = win.enforcement


def test_rule9_without_an_operation_all_handles_have_what_the_device_declares(fakes):
    md, _ = fakes(without_ops=["mem_enforcement"])
    declared = md.attr.enforcement
    assert md.mem_reg(bytearray(64)).derive().enforcement == declared != um.EnforcementTable()


def test_rule9_attr(fakes):
    md, _ = fakes(max_reg=1 << 20, mem_types=3, reg_alignment=8)
    attr = md.attr
    assert (attr.component, attr.md_name, attr.software) == ("fake", "fake0", True)
    assert (attr.max_reg, attr.reg_alignment) == (1 << 20, 8)
    assert attr.mem_types == {um.MemType.HOST, um.MemType.CUDA}
    assert attr.key_size_max == 80 + attr.rkey_packed_size == 96
    assert fakes()[0].attr.max_reg == 2**64 - 1
    assert um.UCT_MD_FLAG_REG_DERIVED in attr.flags


# ---- 10: declare or inherit ----

D, R, A, P, E, K, V, X = (
    um.MdFlag.REG_DERIVED,
    um.MdFlag.INVALIDATE_RMA,
    um.MdFlag.INVALIDATE_AMO,
    um.MdFlag.RKEY_PTR,
    um.MdFlag.ENDPOINT,
    um.MdFlag.NEED_RKEY,
    um.MdFlag.EVENT_FD,
    um.MdFlag.DERIVE_ENDPOINT,
)
REG = um.MdFlag.REG
FULL = REG | K | D | R | A | um.MdFlag.INVALIDATE | P | E | um.MdFlag.ATOMIC | V | X
LIES = {
    "REG without mem_reg": dict(without_ops=["mem_reg"]),
    "REG without mem_dereg": dict(without_ops=["mem_dereg"]),
    "mem_reg without REG": dict(flags=FULL & ~REG),
    "REG_DERIVED without mem_derive": dict(without_ops=["mem_derive"]),
    "REG_DERIVED with the stub": dict(stub_ops=["mem_derive"]),
    "mem_derive without REG_DERIVED": dict(flags=FULL & ~D & ~X),
    "keys without key_create": dict(without_ops=["key_create"]),
    "keys without key_destroy": dict(stub_ops=["key_destroy"]),
    "key_create without keys": dict(
        flags=FULL & ~(D | R | A | X | um.MdFlag.INVALIDATE), without_ops=["mem_derive"]
    ),
    "NEED_RKEY without rkey_unpack": dict(without_ops=["rkey_unpack"]),
    "NEED_RKEY without mkey_pack": dict(without_ops=["mkey_pack"]),
    "rkey_unpack without NEED_RKEY": dict(flags=FULL & ~K),
    "RKEY_PTR without rkey_ptr": dict(without_ops=["rkey_ptr"]),
    "rkey_ptr without RKEY_PTR": dict(flags=FULL & ~P),
    "EVENT_FD without event_fd": dict(without_ops=["event_fd"]),
    "EVENT_FD without event_arm": dict(without_ops=["event_arm"]),
    "event_fd without EVENT_FD": dict(flags=FULL & ~V),
    "ENDPOINT without endpoint operations": dict(endpoint=False, flags=FULL),
    "endpoint operations without ENDPOINT": dict(flags=FULL & ~(E | X)),
    **{
        f"no {op}": dict(without_ops=[op])
        for op in ("ep_create", "ep_destroy", "ep_address", "ep_connect", "ep_reset", "ep_state")
    },
    "no ep_post": dict(without_ops=["ep_post"]),
    "INVALIDATE without both kinds": dict(flags=FULL & ~A),
    "both kinds without INVALIDATE": dict(flags=FULL & ~um.MdFlag.INVALIDATE),
    "DERIVE_ENDPOINT without REG_DERIVED": dict(flags=FULL & ~D, without_ops=["mem_derive"]),
    "a payload that is too long": dict(rkey_packed_size=177),
    "a raw key longer than the payload": dict(rkey_packed_size=16, rkey_raw_size=17),
    "a newer ABI": dict(abi=99),
    "an ABI before the first": dict(abi=0),
    "tables that are too short": dict(ops_size=-184),
    "an attribute table that is too short": dict(attr_size=-8),
    "endpoint tables that are too short": dict(ep_ops_size=-8),
}


@pytest.mark.parametrize("lie", list(LIES.values()), ids=list(LIES))
def test_rule10_a_lie_is_refused_when_the_md_is_bound(fakes, lie):
    with pytest.raises(um.InvalidParamError) as raised:
        fakes(**{"component": "liar", **lie})
    assert (raised.value.op, raised.value.component) == ("bind", "liar")
    assert fakes.memory.live == 0


@pytest.mark.parametrize("extra", [8, 800])
def test_rule10_a_newer_table_is_read_as_far_as_it_is_known(fakes, extra):
    """The fake puts garbage behind what it states."""
    md, _ = fakes(ops_size=extra, ep_ops_size=extra, attr_size=extra)
    win = md.mem_reg(bytearray(64)).derive()
    assert md.rkey_unpack(win.mkey_pack()).length == 64


def test_rule10_an_older_table_lacks_its_last_operations(fakes):
    md, device = fakes(ops_size=-24)
    assert md.peer_evict(bytes(32)) is None
    assert device.count("peer_evict") == 0
    fakes()[0].peer_evict(bytes(32))


def test_rule10_a_domain_that_cannot_derive_says_so_and_nothing_happens(fakes):
    """S8, D13: the shared stub, by one central check."""
    md, device = fakes(derive=False)
    base = md.mem_reg(bytearray(64))
    key = base.mkey_pack()
    calls, memory = device.counts, fakes.memory.allocs
    for wanted in ({}, dict(offset=99), dict(flags=GET), dict(length=0)):
        with pytest.raises(um.UnsupportedError, match="does not support derived") as raised:
            base.derive(**wanted)
        assert (raised.value.op, raised.value.component) == ("derive", "fake")
        del raised
    assert (device.counts, fakes.memory.allocs) == (calls, memory)
    assert (base.state, base.derived_count, base.mkey_pack()) == (LIVE, 0, key)
    with pytest.raises(um.UnsupportedError):
        md.mem_reg(bytearray(8), DERIVED_ONLY)


@pytest.mark.parametrize("flags", [RMA, AMO, RMA | AMO], ids=str)
def test_rule10_a_domain_that_cannot_invalidate_says_so(fakes, flags):
    md, device = fakes(derive=False, invalidate=False)
    base = md.mem_reg(bytearray(64))
    with pytest.raises(um.UnsupportedError):
        base.mkey_pack(flags)
    with pytest.raises(um.UnsupportedError):
        base.dereg(invalidate=True)
    assert base.state == LIVE
    assert base.mkey_pack()
    assert device.count("key_create") == device.count("mem_dereg") == 0


UNSUPPORTED = {
    "mem_reg": (dict(reg=False, derive=False, invalidate=False), lambda md: md.mem_reg(b"x")),
    "mem_type": (dict(), lambda md: md.mem_reg(b"x", mem_type=um.MemType.CUDA)),
    "dmabuf": (dict(), lambda md: md.mem_reg(b"x", dmabuf_fd=0)),
    "symmetric": (dict(), lambda md: md.mem_reg(b"x", um.MemFlag.SYMMETRIC_RKEY)),
    "whole space": (dict(), lambda md: md.mem_reg(b"x", um.MemFlag.GVA)),
    "export": (dict(), lambda md: md.mem_reg(b"x").mkey_pack(um.PackFlag.EXPORT)),
    "pack": (dict(rkey=False), lambda md: md.mem_reg(b"x").mkey_pack()),
    "raw pack": (dict(rkey_raw_size=0), lambda md: md.mem_reg(b"x").mkey_pack(RAW)),
    "from_raw": (dict(rkey_raw_size=0), lambda md: md.rkey_from_raw(bytes(16), 0, 8)),
    "endpoint": (dict(endpoint=False), lambda md: md.endpoint()),
    "event_fd": (dict(event=False), lambda md: md.event_fd),
    "arm": (dict(event=False), lambda md: md.arm()),
    "ptr": (dict(rkey_ptr=False), lambda md: md.rkey_unpack(md.mem_reg(b"x").mkey_pack()).ptr()),
    "atomic right": (dict(atomic=False), lambda md: md.mem_reg(bytearray(8), ATOMIC)),
}


@pytest.mark.parametrize(("options", "call"), list(UNSUPPORTED.values()), ids=list(UNSUPPORTED))
def test_rule10_what_a_domain_lacks_is_unsupported(fakes, options, call):
    md, device = fakes(**options)
    with pytest.raises(um.UnsupportedError):
        call(md)
    assert device.live_keys == {} or len(device.live_keys) == 1
    assert md.stats()["live_derived"] == md.stats()["live_endpoints"] == 0


def test_rule10_unpack_is_unsupported_without_need_rkey(fakes):
    key = fakes()[0].mem_reg(b"x").mkey_pack()
    md, device = fakes(rkey=False)
    with pytest.raises(um.UnsupportedError):
        md.rkey_unpack(key)
    assert device.count("rkey_unpack") == 0


# ---- 16: atomics ----


def test_rule16_64_bit_atomics(fakes):
    md, _, one, _two = fakes.connected()
    memory = bytearray(16)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    assert one.fetch_add(rkey, base.address, 5) == 0
    assert one.fetch_add(rkey, base.address, 2**64 - 1) == 5
    assert one.compare_swap(rkey, base.address, 4, 2**63) == 4
    assert one.compare_swap(rkey, base.address, 4, 1) == 2**63
    assert one.compare_swap_nb(rkey, base.address + 8, 0, 7).wait() == 0
    assert one.fetch_add_nb(rkey, base.address + 8, 1).wait() == 7
    assert memory == (2**63).to_bytes(8, "little") + (8).to_bytes(8, "little")


@pytest.mark.parametrize("offset", list(range(1, 8)))
@pytest.mark.parametrize("call", ["fetch_add", "compare_swap"])
def test_rule16_unaligned_is_invalid(fakes, offset, call):
    md, device, one, _two = fakes.connected()
    memory = bytearray(32)
    base = md.mem_reg(memory)
    rkey = md.rkey_unpack(base.mkey_pack())
    arguments = (1,) if call == "fetch_add" else (0, 1)
    address = base.address - base.address % 8 + 8 + offset
    with pytest.raises(um.InvalidParamError, match="aligned"):
        getattr(one, call)(rkey, address, *arguments)
    assert one.state == um.EpState.CONNECTED
    assert device.count("post") == 0
    assert memory == bytes(32)


def test_rule16_atomics_are_checked_like_other_accesses(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(32))
    win = base.derive(0, 12)
    rkey = md.rkey_unpack(win.mkey_pack())
    for address in (base.address + 8, base.address + 16, base.address - 8):
        with pytest.raises(um.RangeError):
            one.fetch_add(rkey, address, 1)
    for flags in (GET, PUT, GET | PUT):
        rkey = md.rkey_unpack(base.derive(flags=flags).mkey_pack())
        with pytest.raises(um.AccessError):
            one.compare_swap(rkey, base.address, 0, 1)
    assert device.count("post") == 0


def test_rule16_one_key_serves_rma_and_amo(fakes):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(16))
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    one.put(rkey, base.address, bytes(8))
    assert one.fetch_add(rkey, base.address, 1) == 0
    into = bytearray(8)
    one.get(rkey, base.address, into)
    assert int.from_bytes(into, "little") == 1
    assert device.count("key_create") == 1


def test_rule16_a_domain_without_atomics_never_emulates_them(fakes):
    md, device, one, _two = fakes.connected(atomic=False)
    memory = bytearray(16)
    base = md.mem_reg(memory)
    assert not base.grant & ATOMIC
    rkey = md.rkey_unpack(base.mkey_pack())
    for address in (base.address, base.address + 1):
        with pytest.raises(um.UnsupportedError):
            one.fetch_add(rkey, address, 1)
        with pytest.raises(um.UnsupportedError):
            one.compare_swap_nb(rkey, address, 0, 1)
    assert device.count("post") == 0
    assert memory == bytes(16)


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, None, "1", True, b"1"], ids=repr)
def test_rule16_operands_are_64_bit_integers(fakes, value):
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(16))
    rkey = md.rkey_unpack(base.mkey_pack())
    for call, arguments in [
        ("fetch_add", (value,)),
        ("compare_swap", (value, 0)),
        ("compare_swap", (0, value)),
    ]:
        with pytest.raises(um.InvalidParamError):
            getattr(one, call)(rkey, base.address, *arguments)
    assert device.count("post") == 0
