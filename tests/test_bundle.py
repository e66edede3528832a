# SPDX-License-Identifier: BSD-3-Clause
"""Several domains as one: registrations, one block of keys, revocation that goes on."""

import ctypes
import gc
import weakref
from importlib.util import find_spec

import pytest

import ucx_memh as um
from _fakes import ATOMIC, DERIVED_ONLY, GET, RAW, RMA, Envelope, sealed
from ucx_memh import MemhState, Status
from ucx_memh.core import bundle_pack, bundle_pack_into, bundle_unpack

LIVE, REVOKING, REVOKED, CLOSED = MemhState
HEADER = 8
BUNDLE_PACK = 360  # where the call stands in ucxm_api_t, for ever


@pytest.fixture
def three(fakes):
    """Three domains of three components, and their devices."""
    both = zip(*(fakes(component=f"fake{i}", md_name=f"dev{i}") for i in range(3)), strict=True)
    domains = list(both)
    yield domains
    domains.clear()  # pytest would hold them until `fakes` has counted


def parts(block: bytes) -> list[bytes]:
    """The packed keys in a block, read without the library."""
    assert block[:2] == b"MB"
    assert block[2] == 1
    assert int.from_bytes(block[4:6], "little") == len(block)
    assert block[6:8] == bytes(2)
    found, at = [], HEADER
    for _ in range(block[3]):
        size = Envelope.of(block[at:]).total
        found.append(block[at : at + size])
        at += size
    assert at == len(block)
    return found


def block_of(keys: list[bytes]) -> bytes:
    size = HEADER + sum(map(len, keys))
    return b"MB\x01" + bytes([len(keys)]) + size.to_bytes(2, "little") + bytes(2) + b"".join(keys)


# ---- registering ----


@pytest.mark.parametrize("policy", ["any", "all"])
def test_one_of_each(three, policy):
    mds, devices = three
    memory = bytearray(64)
    bundle = um.Bundle(mds, policy)
    base = bundle.mem_reg(memory)
    assert list(base.memhs) == list(mds)
    assert base.failures == {}
    assert all(m.address == next(iter(base.memhs.values())).address for m in base.memhs.values())
    assert [d.count("mem_reg") for d in devices] == [1, 1, 1]
    with pytest.raises(BufferError):
        memory.append(0)
    with base:
        pass
    memory.append(0)
    assert [d.count("mem_dereg") for d in devices] == [1, 1, 1]
    base.dereg()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_any_keeps_the_reason_of_what_failed(three, bad):
    mds, devices = three
    devices[bad].fail("mem_reg", Status.IO_ERROR, text="no translation entries", errno=12)
    base = um.Bundle(mds).mem_reg(bytearray(64))
    assert list(base.memhs) == [md for i, md in enumerate(mds) if i != bad]
    (md, error), *others = base.failures.items()
    assert (md, others) == (mds[bad], [])
    assert (type(error), error.component) == (um.DeviceError, f"fake{bad}")
    assert "no translation entries" in str(error)
    assert [len(d.live_keys) for d in devices] == [int(i != bad) for i in range(3)]
    assert len(parts(base.mkey_pack())) == 2


def test_a_kept_reason_keeps_nothing_alive(three):
    class Memory(bytearray):
        pass

    mds, devices = three
    devices[1].fail("mem_reg", Status.IO_ERROR)
    memory = Memory(64)
    watch = weakref.ref(memory)
    base = um.Bundle(mds).mem_reg(memory)
    reasons = base.failures
    gc.disable()
    try:
        del base, memory
        assert watch() is None
    finally:
        gc.enable()
    assert len(reasons) == 1


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_all_leaves_nothing(three, bad):
    mds, devices = three
    memory = bytearray(64)
    devices[bad].fail("mem_reg", Status.IO_ERROR, text="no translation entries")
    with pytest.raises(um.DeviceError, match=f"fake{bad}: .*no translation entries"):
        um.Bundle(mds, "all").mem_reg(memory)
    assert [d.live_keys for d in devices] == [{}, {}, {}]
    assert [md.stats()["live_bases"] for md in mds] == [0, 0, 0]
    memory.append(0)


def test_any_of_none_is_an_error_with_all_reasons(three):
    mds, devices = three
    for i, device in enumerate(devices):
        device.fail("mem_reg", Status.NO_MEMORY if i else Status.IO_ERROR, text=f"reason {i}")
    with pytest.raises(um.DeviceError, match="reason 0") as raised:
        um.Bundle(mds).mem_reg(bytearray(64))
    one, two = raised.value.__notes__
    assert ("reason 1" in one, "reason 2" in two) == (True, True)


@pytest.mark.parametrize(
    ("mds", "policy", "error"),
    [
        ([], "any", ValueError),
        (1, "some", ValueError),
        (["x"], "any", TypeError),
        (17, "any", None),
    ],
)
def test_what_makes_no_bundle(fakes, mds, policy, error):
    if isinstance(mds, int):
        mds = [fakes()[0] for _ in range(mds)]
    with pytest.raises(error or um.InvalidParamError):
        um.Bundle(mds, policy)


def test_a_domain_twice(fakes):
    md, _ = fakes()
    with pytest.raises(um.InvalidParamError):
        um.Bundle([md, md])


# ---- deriving and packing ----


def test_derive_narrows_in_each(three):
    mds, _ = three
    base = um.Bundle(mds, "all").mem_reg(bytearray(64), DERIVED_ONLY)
    win = base.derive(8, 16, GET)
    for md, memh in win.memhs.items():
        assert (memh.base, memh.md) == (base.memhs[md], md)
        assert (memh.address - base.memhs[md].address, memh.length, memh.flags) == (8, 16, GET)
    with pytest.raises(um.InvalidParamError):
        base.derive(60, 16)
    assert [memh.derived_count for memh in base.memhs.values()] == [1, 1, 1]


def test_derive_binds_to_endpoints(three):
    mds, _ = three
    base = um.Bundle(mds, "all").mem_reg(bytearray(64))
    end = mds[1].endpoint()
    win = base.derive(endpoints={mds[1]: end})
    assert [memh.endpoint for memh in win.memhs.values()] == [None, end, None]


def test_a_domain_that_does_not_derive(fakes):
    able, _ = fakes(component="able")
    unable, _ = fakes(component="unable", derive=False)
    base = um.Bundle([able, unable]).mem_reg(bytearray(64))
    win = base.derive()
    assert list(win.memhs) == [able]
    assert [type(error) for error in win.failures.values()] == [um.UnsupportedError]
    assert len(parts(win.mkey_pack())) == 1
    strict = um.Bundle([able, unable], "all").mem_reg(bytearray(64))
    with pytest.raises(um.UnsupportedError):
        strict.derive()
    assert strict.memhs[able].derived_count == 0


def test_the_block_is_the_packed_keys(three):
    mds, _ = three
    base = um.Bundle(mds).mem_reg(bytearray(64))
    win = base.derive()
    for memh, flags in ((base, 0), (base, RMA), (win, 0), (win, RMA)):
        keys = [m.mkey_pack(flags) for m in memh.memhs.values()]
        assert memh.mkey_pack(flags) == block_of(keys)
        into = bytearray(b"\xee" * 1024)
        size = memh.mkey_pack_into(into, flags)
        assert into[:size] == block_of(keys)
        assert into[size:] == b"\xee" * (1024 - size)


def test_the_block_is_cs(three):
    """By C's own table."""
    from ucx_memh import core
    from ucx_memh.testing import memh_pointer

    mds, _ = three
    base = um.Bundle(mds).mem_reg(bytearray(64))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = pointer(core._C_API, b"ucx_memh.core._C_API")
    entry = ctypes.c_void_p.from_address(table + BUNDLE_PACK).value
    pack = ctypes.CFUNCTYPE(
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )(entry)
    memhs = (ctypes.c_void_p * 3)(*map(memh_pointer, base.memhs.values()))
    buffer = ctypes.create_string_buffer(1024)
    length = ctypes.c_size_t(1024)
    assert pack(memhs, 3, 0, buffer, ctypes.byref(length), None) == 0
    assert buffer.raw[: length.value] == base.mkey_pack()


def test_a_buffer_that_is_too_short(three):
    base = um.Bundle(three[0]).mem_reg(bytearray(64))
    size = len(base.mkey_pack())
    for room in (0, 7, 8, size - 1):
        into = bytearray(b"\xee" * room)
        with pytest.raises(um.InvalidParamError, match=f"{size} bytes") as raised:
            base.mkey_pack_into(into)
        assert raised.value.status == Status.BUFFER_TOO_SMALL
        assert into == b"\xee" * room
    assert base.mkey_pack_into(bytearray(size)) == size


def test_what_is_not_packed(three):
    mds, _ = three
    base = um.Bundle(mds).mem_reg(bytearray(64))
    win = base.derive()
    win.memhs[mds[1]].invalidate()
    for memh, flags, error in (
        (base, RAW, um.InvalidParamError),
        (base, 1 << 40, um.InvalidParamError),
        (base, -1, um.InvalidParamError),
        (win, 0, um.RevokedError),
    ):
        with pytest.raises(error):
            memh.mkey_pack(flags)
        with pytest.raises(error):
            memh.mkey_pack_into(bytearray(1024), flags)
    with pytest.raises(um.InvalidParamError):
        bundle_pack([])
    with pytest.raises(um.InvalidParamError):
        bundle_pack([base.memhs[mds[0]]] * 17)
    with pytest.raises(TypeError):
        bundle_pack([None])
    with pytest.raises(um.AccessError):
        bundle_pack_into([base.memhs[mds[0]]], b"read-only")


# ---- unpacking ----


def test_the_reader_takes_what_it_knows(three):
    mds, _ = three
    block = um.Bundle(mds).mem_reg(bytearray(64)).derive().mkey_pack()
    for known in ([0, 1, 2], [2, 0], [1]):
        reader = um.Bundle([mds[i] for i in known], "all")
        with reader.rkey_unpack(block) as rkeys:
            assert list(rkeys.rkeys) == [mds[i] for i in known]
            assert rkeys.failures == {}
            for md, rkey in rkeys.rkeys.items():
                assert rkey.compare(md.rkey_unpack(parts(block)[mds.index(md)])) == 0
        with pytest.raises(um.ClosedError):
            rkey.ptr()


def test_a_part_of_an_unknown_component_or_version_is_skipped(three):
    mds, _ = three
    keys = [m.mkey_pack() for m in um.Bundle(mds).mem_reg(bytearray(64)).memhs.values()]
    strange = [sealed(keys[0], component=0xDEADBEEF), sealed(keys[1], version=9)]
    block = block_of([strange[0], keys[2], strange[1], keys[0]])
    found = um.Bundle(mds).rkey_unpack(block)
    assert list(found.rkeys) == [mds[0], mds[2]]
    assert isinstance(found.failures[mds[1]], um.UnreachableError)
    with pytest.raises(um.UnreachableError, match="no part for this domain"):
        um.Bundle(mds, "all").rkey_unpack(block)
    with pytest.raises(um.UnreachableError):
        um.Bundle([mds[1]]).rkey_unpack(block)


def test_a_part_that_cannot_be_unpacked_fails_alone(three):
    mds, devices = three
    block = um.Bundle(mds).mem_reg(bytearray(64)).mkey_pack()
    devices[1].fail("rkey_unpack", Status.PEER_GONE, text="it has ended", count=2)
    found = um.Bundle(mds).rkey_unpack(block)
    assert list(found.rkeys) == [mds[0], mds[2]]
    assert isinstance(found.failures[mds[1]], um.PeerGoneError)
    assert "fake1" in str(found.failures[mds[1]])
    assert "it has ended" in str(found.failures[mds[1]])
    found.close()
    with pytest.raises(um.PeerGoneError, match="it has ended"):
        um.Bundle(mds, "all").rkey_unpack(block)
    assert [md.stats()["live_rkeys"] for md in mds] == [0, 0, 0]


def test_damaged_blocks(three):
    mds, _ = three
    block = um.Bundle(mds).mem_reg(bytearray(64)).mkey_pack()
    reader = um.Bundle(mds)
    for size in range(len(block)):
        with pytest.raises((um.MalformedKeyError, um.KeyVersionError)):
            reader.rkey_unpack(block[:size])
    longer = reader.rkey_unpack(block + bytes(7))  # its own length counts
    assert len(longer.rkeys) == 3
    with pytest.raises(um.KeyVersionError):
        reader.rkey_unpack(block[:2] + b"\x02" + block[3:])
    with pytest.raises(um.MalformedKeyError):
        reader.rkey_unpack(b"XX" + block[2:])
    for md in mds:
        assert md.stats()["live_rkeys"] == 1  # `longer`'s
    with pytest.raises(um.InvalidParamError):
        bundle_unpack([], block)
    with pytest.raises(TypeError):
        bundle_unpack([None], block)


# ---- revoking and closing, with failures in between ----


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_invalidate_tries_all_and_goes_on(three, bad):
    mds, devices = three
    base = um.Bundle(mds).mem_reg(bytearray(64))
    win = base.derive()
    win.mkey_pack()
    devices[bad].fail("key_destroy", Status.IO_ERROR, text="the firmware refused")
    with pytest.raises(um.DeviceError, match=f"fake{bad}: .*the firmware refused") as raised:
        win.invalidate()
    assert not hasattr(raised.value, "__notes__")
    states = [memh.state for memh in win.memhs.values()]
    assert states == [REVOKING if i == bad else REVOKED for i in range(3)]
    win.invalidate()
    assert [memh.state for memh in win.memhs.values()] == [REVOKED] * 3
    assert [d.count("key_destroy") for d in devices] == [1 + (i == bad) for i in range(3)]
    with pytest.raises(um.RevokedError):
        win.invalidate()
    base.mkey_pack()


def test_several_failures_are_all_told(three):
    mds, devices = three
    win = um.Bundle(mds).mem_reg(bytearray(64)).derive()
    win.mkey_pack()
    devices[0].fail("key_destroy", Status.TIMED_OUT, text="first")
    devices[2].fail("key_destroy", Status.IO_ERROR, text="second")
    with pytest.raises(um.TimedOutError, match="first") as raised:
        win.invalidate()
    (note,) = raised.value.__notes__
    assert "fake2" in note
    assert "second" in note
    win.invalidate()


def test_dereg_tries_all_and_goes_on(three):
    mds, devices = three
    memory = bytearray(64)
    base = um.Bundle(mds).mem_reg(memory)
    win = base.derive()
    with pytest.raises(um.BusyError) as raised:
        base.dereg()
    assert len(raised.value.__notes__) == 2
    assert [memh.state for memh in base.memhs.values()] == [LIVE] * 3
    devices[1].fail("mem_dereg", Status.IO_ERROR, text="held by a driver")
    with pytest.raises(um.DeviceError, match="held by a driver"):
        base.dereg(cascade=True)
    assert [m.state for m in base.memhs.values()] == [CLOSED, REVOKING, CLOSED]
    assert [m.state for m in win.memhs.values()] == [REVOKED] * 3
    base.dereg()
    memory.append(0)
    win.dereg()


def test_dereg_with_a_promise_that_one_cannot_keep(fakes):
    able, _ = fakes(component="able")
    unable, _ = fakes(component="unable", invalidate=False)
    base = um.Bundle([able, unable]).mem_reg(bytearray(64))
    with pytest.raises(um.UnsupportedError):
        base.dereg(invalidate=True)
    assert [m.state for m in base.memhs.values()] == [CLOSED, LIVE]
    base.dereg()


# ---- real domains ----

REAL = [name for name in ("ib_mlx5", "ib", "cma") if find_spec(f"ucx_memh_{name}")]


def open_real() -> list[um.Md]:
    from _rawqp import software_library

    config = {"ib_mlx5": {"device": "software"}, "ib": {"library": software_library()}, "cma": {}}
    return [um.open_md(name, **config[name]) for name in REAL]


def reader(conn, names):
    """Unpack a block with the domains of these names; then get and put by each, as told."""
    mds = {md.attr.component: md for md in open_real()}
    bundle = um.Bundle([mds[name] for name in names], "all")
    ends = {name: mds[name].endpoint() for name in names}
    conn.send({name: end.address for name, end in ends.items()})
    for name, address in conn.recv().items():
        ends[name].connect(address)
    while (request := conn.recv()) is not None:
        block, data = request
        answers = {}
        with bundle.rkey_unpack(block) as found:
            for name in names:
                rkey = found.rkeys[mds[name]]
                into = bytearray(8)
                try:
                    ends[name].get(rkey, rkey.address, into)
                    ends[name].put(rkey, rkey.address + 8, data)
                    answers[name] = bytes(into)
                except um.MemhError as error:
                    answers[name] = error.status
        conn.send(answers)
    for md in mds.values():
        md.close(force=True)


@pytest.mark.skipif(REAL != ["ib_mlx5", "ib", "cma"], reason="a backend was left out of the build")
def test_three_real_domains_two_processes(peer):
    mds = open_real()
    names = [md.attr.component for md in mds]
    memory = bytearray(b"original" + bytes(4088))
    bundle = um.Bundle(mds)
    base = bundle.mem_reg(memory)
    assert base.failures == {}
    block = base.mkey_pack()
    assert len(parts(block)) == 3
    assert len(block) < 1024
    far = peer(reader, names)
    ends = {md.attr.component: md.endpoint() for md in mds}
    for name, address in far.recv().items():
        ends[name].connect(address)
    far.send({name: end.address for name, end in ends.items()})

    far.send((block, b"by-base!"))
    assert far.recv() == dict.fromkeys(names, b"original")
    assert memory[8:16] == b"by-base!"

    # Keys that can be revoked: cma has none, and says so.
    win = base.derive(flags=GET | um.MemFlag.REMOTE_PUT)
    assert [md.attr.component for md in win.memhs] == ["ib_mlx5", "ib"]
    assert [type(error) for error in win.failures.values()] == [um.UnsupportedError]
    revocable = win.mkey_pack()
    assert len(parts(revocable)) == 2
    far.send(None)
    far.result()
    narrow = peer(reader, names[:2])
    for end in ends.values():
        end.reset()
    for name, address in narrow.recv().items():
        ends[name].connect(address)
    narrow.send({name: ends[name].address for name in names[:2]})
    narrow.send((revocable, b"by-win!!"))
    assert narrow.recv() == dict.fromkeys(names[:2], b"original")
    assert memory[8:16] == b"by-win!!"
    win.invalidate()
    narrow.send((revocable, b"too late"))
    assert narrow.recv() == dict.fromkeys(names[:2], Status.REMOTE_ACCESS)
    assert memory[8:16] == b"by-win!!"
    narrow.send(None)
    narrow.result()

    base.dereg(cascade=True)
    memory.append(0)
    for end in ends.values():
        end.close()
    for md in mds:
        md.close()


@pytest.mark.skipif(REAL != ["ib_mlx5", "ib", "cma"], reason="a backend was left out of the build")
def test_three_real_domains_all_or_nothing():
    mds = open_real()
    memory = bytearray(4096)
    with pytest.raises(um.UnsupportedError, match="cma"):
        um.Bundle(mds, "all").mem_reg(memory, DERIVED_ONLY)
    with pytest.raises(um.UnsupportedError, match="cma"):
        um.Bundle(mds, "all").mem_reg(memory, GET | ATOMIC)
    memory.append(0)  # nothing holds it
    some = um.Bundle(mds).mem_reg(memory, DERIVED_ONLY)
    assert [md.attr.component for md in some.memhs] == ["ib_mlx5", "ib"]
    some.dereg()
    for md in mds:
        md.close()
