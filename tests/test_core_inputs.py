# SPDX-License-Identifier: BSD-3-Clause
"""Rule 15: what is refused, with which error, and that nothing has changed then; and length 0."""

import array
import ctypes
import mmap
import weakref

import numpy as np
import pytest

import ucx_memh as um
from _fakes import (
    ALL,
    AMO,
    ATOMIC,
    DERIVED_ONLY,
    FLAG_EMPTY,
    FLAG_REVOCABLE,
    GET,
    LOCAL_READ,
    LOCAL_WRITE,
    PLAIN,
    PUT,
    RAW,
    REMOTE,
    RMA,
    Envelope,
)

BAD_NUMBERS = [True, False, 1.0, float("nan"), "1", b"1", -1, -(2**64), 2**64, 2**65, [1], object()]
NUMBER_IDS = [f"{type(v).__name__}-{n}" for n, v in enumerate(BAD_NUMBERS)]


def released():
    view = memoryview(bytearray(8))
    view.release()
    return view


class Device:
    """Memory of a GPU, as other libraries show it."""

    __cuda_array_interface__ = {"shape": (8,), "typestr": "|u1", "data": (0, False), "version": 3}


BAD_BUFFERS = {
    "str": "text",
    "int": 7,
    "list": [1, 2],
    "object": object(),
    "every other byte": memoryview(bytearray(8))[::2],
    "backwards": memoryview(bytearray(8))[::-1],
    "released": released(),
    "columns": np.zeros((4, 4))[:, 1],
    "Fortran order": np.asfortranarray(np.zeros((4, 5))),
    "transposed": np.zeros((4, 5)).T,
    "Python objects": np.array([object(), None]),
    "a record with Python objects": np.zeros(2, dtype=[("a", "i8"), ("b", "O")]),
}


class Setting:
    """Handles and keys, and a record of all that a refused call could have changed."""

    def __init__(self, fakes):
        self.memory = fakes.memory
        self.md, self.device, self.one, self.two = fakes.connected()
        self.buffer = bytearray(64)
        self.base = self.md.mem_reg(self.buffer)
        self.win = self.base.derive()
        self.rkey = self.md.rkey_unpack(self.win.mkey_pack())
        self.out = bytearray(b"\xaa" * 256)
        self.base.mkey_pack()

    def record(self):
        return (
            {name: n for name, n in self.device.counts.items() if name != "progress"},
            self.memory.live,
            {k: v for k, v in self.md.stats().items() if not k.startswith("device.")},
            [(m.state, m.derived_count, m.mkey_pack()) for m in (self.base, self.win)],
            bytes(self.out),
            bytes(self.buffer),
            self.one.state,
        )

    def refuses(self, error, call):
        before = self.record()
        with pytest.raises(error):
            call()
        assert self.record() == before


@pytest.fixture
def setting(fakes):
    setting = Setting(fakes)
    yield setting
    setting.__dict__.clear()


# ---- numbers ----

NUMBERS = {
    "address": lambda s, v: s.md.mem_reg(address=v, length=8),
    "length": lambda s, v: s.md.mem_reg(address=s.base.address, length=v),
    "reg flags": lambda s, v: s.md.mem_reg(bytearray(8), v),
    "mem_type": lambda s, v: s.md.mem_reg(bytearray(8), mem_type=v),
    "dmabuf_fd": lambda s, v: s.md.mem_reg(bytearray(8), dmabuf_fd=v),
    "offset": lambda s, v: s.base.derive(v),
    "derive length": lambda s, v: s.base.derive(0, v),
    "derive flags": lambda s, v: s.base.derive(flags=v),
    "pack flags": lambda s, v: s.win.mkey_pack(v),
    "pack_into flags": lambda s, v: s.win.mkey_pack_into(s.out, v),
    "raw address": lambda s, v: s.md.rkey_from_raw(bytes(16), v, 8),
    "raw length": lambda s, v: s.md.rkey_from_raw(bytes(16), 8, v),
    "ptr": lambda s, v: s.rkey.ptr(v),
    "get address": lambda s, v: s.one.get(s.rkey, v, s.out),
    "put address": lambda s, v: s.one.put(s.rkey, v, s.out),
    "atomic address": lambda s, v: s.one.fetch_add(s.rkey, v, 1),
    "operand": lambda s, v: s.one.fetch_add(s.rkey, s.base.address, v),
    "expect": lambda s, v: s.one.compare_swap(s.rkey, s.base.address, v, 1),
}


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=NUMBER_IDS)
@pytest.mark.parametrize("call", list(NUMBERS.values()), ids=list(NUMBERS))
def test_rule15_a_number_must_be_an_integer_of_64_bits(setting, call, value):
    setting.refuses(um.InvalidParamError, lambda: call(setting, value))


@pytest.mark.parametrize(
    "name", [name for name in NUMBERS if name not in ("dmabuf_fd", "derive length", "ptr")]
)
def test_rule15_none_is_a_number_only_where_it_is_the_default(setting, name):
    if name in ("reg flags", "derive flags", "mem_type"):
        NUMBERS[name](setting, None).dereg()
    else:
        setting.refuses(um.InvalidParamError, lambda: NUMBERS[name](setting, None))


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Endless(int):
    def __index__(self):
        return self


@pytest.mark.parametrize(
    "value", [8, np.int8(8), np.uint64(8), np.int64(8), Index(8), Endless(8), um.EpState(1) + 7]
)
def test_rule15_what_has_an_index_is_an_integer(fakes, value):
    md, _ = fakes()
    base = md.mem_reg(bytearray(64))
    assert base.derive(value, value).length == 8
    assert md.rkey_unpack(base.mkey_pack()).ptr(base.address) == base.address


@pytest.mark.parametrize("value", [Index(None), Index("x"), Index(KeyError("own")), np.True_])
def test_rule15_what_has_none_is_not(setting, value):
    setting.refuses((um.InvalidParamError, TypeError, KeyError), lambda: setting.base.derive(value))


# ---- ranges ----


@pytest.mark.parametrize(
    ("address", "length"),
    [(1, 2**64 - 1), (2**64 - 1, 1), (2**64 - 4096, 4096), (2**63, 2**63), (2**64 - 1, 2**64 - 1)],
)
def test_rule15_a_range_that_wraps_around_is_refused(setting, address, length):
    setting.refuses(
        um.InvalidParamError, lambda: setting.md.mem_reg(address=address, length=length)
    )
    setting.refuses(
        um.InvalidParamError, lambda: setting.md.rkey_from_raw(bytes(16), address, length)
    )


def test_rule15_the_last_range_that_does_not_wrap_around(fakes):
    md, _ = fakes()
    with md.mem_reg(address=2**64 - 4096, length=4095) as base:
        assert md.rkey_unpack(base.derive(4094, 1).base.mkey_pack()).length == 4095


@pytest.mark.parametrize("at", [-1, 65, -65, 1 << 40])
def test_rule15_ptr_outside_is_refused(setting, at):
    address = setting.base.address
    setting.refuses(um.RangeError, lambda: setting.rkey.ptr(address + at))
    assert setting.rkey.ptr() == address
    assert setting.rkey.ptr(address + 64) == address + 64


# ---- flags ----


@pytest.mark.parametrize("bit", [bit for bit in range(64) if bit not in (5, 6, 7, 8, 9, 32)])
def test_rule15_unknown_registration_flags_are_refused(setting, bit):
    error = um.UnsupportedError if bit in (10, 11) else um.InvalidParamError
    setting.refuses(error, lambda: setting.md.mem_reg(bytearray(8), 1 << bit))
    setting.refuses(error, lambda: setting.base.derive(flags=1 << bit))
    setting.refuses(error, lambda: setting.base.derive(flags=ALL | 1 << bit))


@pytest.mark.parametrize("bit", [bit for bit in range(64) if bit not in (0, 1, 16)])
def test_rule15_unknown_pack_flags_are_refused(setting, bit):
    error = um.UnsupportedError if bit == 2 else um.InvalidParamError
    for memh in (setting.base, setting.win):
        setting.refuses(error, lambda memh=memh: memh.mkey_pack(1 << bit))
        setting.refuses(error, lambda memh=memh: memh.mkey_pack_into(setting.out, 1 << bit | RMA))


@pytest.mark.parametrize(
    ("flags", "grant"),
    [
        (None, ALL),
        (0, LOCAL_READ | LOCAL_WRITE),
        (GET, GET),
        (REMOTE, REMOTE),
        (DERIVED_ONLY, ALL),
        (DERIVED_ONLY | GET, GET),
        (int(ALL), ALL),
    ],
    ids=str,
)
def test_rule15_default_rights_of_writable_memory(fakes, flags, grant):
    md, _ = fakes()
    base = md.mem_reg(bytearray(8), flags)
    assert base.grant == grant
    assert base.flags == grant | (DERIVED_ONLY & (flags or 0))


@pytest.mark.parametrize(
    "buffer", [b"12345678", memoryview(b"12345678"), np.frombuffer(b"12345678")]
)
def test_rule15_read_only_memory(fakes, buffer):
    md, device = fakes()
    base = md.mem_reg(buffer)
    assert base.flags == base.grant == LOCAL_READ | GET
    assert md.mem_reg(buffer, 0).grant == LOCAL_READ
    regs = device.count("mem_reg")
    for right in (PUT, ATOMIC, LOCAL_WRITE, ALL, GET | PUT, DERIVED_ONLY | PUT):
        with pytest.raises(um.AccessError):
            md.mem_reg(buffer, right)
    assert device.count("mem_reg") == regs


@pytest.mark.parametrize("flags", [0, LOCAL_READ, LOCAL_WRITE, LOCAL_READ | LOCAL_WRITE], ids=str)
def test_rule15_a_handle_without_remote_rights_packs_no_key(setting, flags):
    setting.local = setting.md.mem_reg(bytearray(8), flags)
    setting.win0 = setting.base.derive(flags=flags)
    for memh in (setting.local, setting.win0):
        for pack in (PLAIN, RMA, AMO, RAW):
            setting.refuses(um.AccessError, lambda m=memh, p=pack: m.mkey_pack(p))


# ---- buffers ----


@pytest.mark.parametrize("buffer", list(BAD_BUFFERS.values()), ids=list(BAD_BUFFERS))
def test_rule15_what_is_no_contiguous_buffer_is_refused(setting, buffer):
    md = setting.md
    for call in (
        lambda: md.mem_reg(buffer),
        lambda: setting.one.put(setting.rkey, setting.base.address, buffer),
        lambda: setting.one.get(setting.rkey, setting.base.address, buffer),
    ):
        setting.refuses(um.InvalidParamError, call)
    if isinstance(buffer, memoryview | str | int | list):
        for call in (md.rkey_unpack, md.rkey_revoke, setting.one.connect, md.peer_evict):
            setting.refuses(um.InvalidParamError, lambda call=call: call(buffer))
        setting.refuses(um.InvalidParamError, lambda: setting.win.mkey_pack_into(buffer))
        setting.refuses(um.InvalidParamError, lambda: md.rkey_from_raw(buffer, 0, 8))


def test_rule15_device_memory_on_a_host_domain_is_unsupported(setting):
    setting.refuses(um.UnsupportedError, lambda: setting.md.mem_reg(Device()))


def test_rule15_one_of_buffer_and_address(setting):
    md, address = setting.md, setting.base.address
    for call in (
        lambda: md.mem_reg(),
        lambda: md.mem_reg(None),
        lambda: md.mem_reg(length=8),
        lambda: md.mem_reg(address=address),
        lambda: md.mem_reg(bytearray(8), address=address, length=8),
        lambda: md.mem_reg(bytearray(8), length=8),
        lambda: md.mem_reg(bytearray(8), dmabuf_offset=8),
    ):
        setting.refuses(um.InvalidParamError, call)


@pytest.mark.parametrize("value", [2, 63, 64, 2**31, 2**32, 2**32 + 1, 2**63])
def test_rule15_memory_types_that_the_domain_does_not_have(setting, value):
    """2**32 is not HOST, whatever its low half says."""
    setting.refuses(
        (um.UnsupportedError, um.InvalidParamError),
        lambda: setting.md.mem_reg(bytearray(8), mem_type=value),
    )


@pytest.mark.parametrize("value", [2**31, 2**32, 2**32 + 3, 2**63])
def test_rule15_descriptors_that_are_none(fakes, value):
    md, device = fakes(dmabuf=True)
    with pytest.raises(um.InvalidParamError):
        md.mem_reg(address=0, length=8, dmabuf_fd=value)
    assert device.count("mem_reg") == 0
    with md.mem_reg(address=4096, length=8, dmabuf_fd=3, dmabuf_offset=64):
        assert device.count("mem_reg") == 1


def test_rule15_limits_of_the_domain(fakes):
    md, device = fakes(max_reg=64, reg_alignment=8)
    base = md.mem_reg(address=4096, length=64)
    with pytest.raises(um.InvalidParamError) as raised:
        md.mem_reg(address=4096, length=65)
    assert raised.value.status == um.Status.EXCEEDS_LIMIT
    for address in (4097, 4100):
        with pytest.raises(um.InvalidParamError, match="aligned"):
            md.mem_reg(address=address, length=8)
    assert md.mem_reg(address=4097, length=0).length == 0
    assert device.count("mem_reg") == 1
    assert base.derive(1, 1).address == 4097  # derived handles need not be


def test_rule15_the_owner_is_held_until_dereg(fakes):
    md, device = fakes()

    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    base = md.mem_reg(address=4096, length=8, owner=owner)
    del owner
    assert alive() is not None
    base.dereg()
    assert alive() is None
    owner = Owner()
    alive = weakref.ref(owner)
    device.fail("mem_reg", um.Status.IO_ERROR)
    with pytest.raises(um.DeviceError):
        md.mem_reg(address=4096, length=8, owner=owner)
    del owner
    assert alive() is None


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (um.Status.NO_MEMORY, um.NoMemoryError),
        (um.Status.IO_ERROR, um.DeviceError),
        (um.Status.INVALID_ADDR, um.DeviceError),
        (um.Status.ACCESS, um.AccessError),
        (-99, um.MemhError),
    ],
)
def test_rule15_a_failed_registration_leaves_nothing(fakes, status, error):
    md, device = fakes()
    memory = bytearray(64)
    live = fakes.memory.live
    device.fail("mem_reg", status, text="why", errno=12)
    with pytest.raises(error, match="why") as raised:
        md.mem_reg(memory)
    assert (raised.value.status, raised.value.op) == (status, "mem_reg")
    assert raised.value.context["length"] == 64
    del raised
    memory.append(0)
    assert (fakes.memory.live, md.stats()["live_bases"]) == (live, 0)


@pytest.mark.parametrize("identity", [b"", bytes(31), bytes(33), 32, 31, None, "x" * 32], ids=repr)
def test_rule15_an_identity_has_32_bytes(setting, identity):
    setting.refuses(um.InvalidParamError, lambda: setting.md.peer_evict(identity))
    assert setting.md.peer_evict(setting.rkey.owner) is None
    assert setting.md.peer_evict(bytearray(setting.rkey.owner)) is None


def test_rule15_objects_of_another_kind_or_md(fakes, setting):
    other, _ = fakes()
    setting.refuses(um.InvalidParamError, lambda: other.explain(setting.base))
    for wrong in (3, "x", object()):
        setting.refuses((TypeError, um.InvalidParamError), lambda w=wrong: setting.md.explain(w))
        setting.refuses((TypeError, um.InvalidParamError), lambda w=wrong: setting.rkey.compare(w))
    setting.refuses((TypeError, um.InvalidParamError), lambda: setting.rkey.compare(None))
    assert "fake" in setting.md.explain(setting.base) and "fake" in setting.base.explain()


@pytest.mark.parametrize("name", ["Md", "Memh", "Rkey", "Endpoint", "Operation"])
def test_rule15_objects_are_not_made_by_hand(name):
    with pytest.raises(TypeError):
        getattr(um, name)()
    with pytest.raises(TypeError):
        type("Sub", (getattr(um, name),), {})


def test_rule15_errors_say_what_and_where(fakes):
    md, device = fakes(component="speaking", md_name="here")
    base = md.mem_reg(bytearray(64))
    with pytest.raises(um.InvalidParamError) as raised:
        base.derive(65)
    error = raised.value
    assert (error.op, error.component) == ("derive", "speaking")
    assert error.context == {"address": base.address, "length": 64}
    assert f"{base.address:#x}" in str(error)
    device.fail("key_create", um.Status.IO_ERROR, text="no such luck", errno=5, syndrome=0x1234)
    with pytest.raises(um.DeviceError, match=r"no such luck.*0x1234") as raised:
        base.mkey_pack(RMA)
    assert raised.value.errno == 5
    del raised, error


# ---- length 0 ----

NOTHING = {
    "bytes": b"",
    "bytearray": bytearray(),
    "memoryview": memoryview(b""),
    "empty slice": memoryview(bytearray(8))[3:3],
    "array": array.array("d"),
    "ctypes": (ctypes.c_char * 0)(),
    "numpy": np.empty(0),
    "numpy with two dimensions": np.empty((0, 5)),
}


@pytest.mark.parametrize("buffer", list(NOTHING.values()), ids=list(NOTHING))
def test_rule15_empty_memory_of_every_kind(fakes, buffer):
    md, device = fakes()
    base = md.mem_reg(buffer)
    assert base.length == 0
    assert Envelope.of(base.mkey_pack()).flags == FLAG_EMPTY
    base.dereg()
    assert device.count("mem_reg") == device.count("mem_dereg") == 0


@pytest.mark.parametrize("address", [0, 1, 4096, 2**64 - 1])
def test_rule15_an_empty_region(fakes, address):
    """Legal, without native keys; whatever is accessed through it is out of range."""
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(address=address, length=0)
    win = base.derive()
    for memh, flag in [(base, 0), (win, FLAG_REVOCABLE)]:
        for flags in (PLAIN, RMA, AMO, RMA | AMO):
            fields = Envelope.of(memh.mkey_pack(flags))
            assert (fields.flags, fields.payload_length) == (FLAG_EMPTY | flag, 0)
            assert (fields.address, fields.length, fields.total) == (address, 0, 80)
        with pytest.raises(um.UnsupportedError):
            memh.mkey_pack(RAW)
    rkey = md.rkey_unpack(win.mkey_pack())
    assert (rkey.address, rkey.length, rkey.key_id) == (address, 0, win.key_id)
    assert one.get(rkey, address, bytearray()) is None
    assert one.put(rkey, address, b"") is None
    for call in (
        lambda: one.get(rkey, address, bytearray(1)),
        lambda: one.put(rkey, address, b"x"),
        lambda: one.fetch_add(rkey, address // 8 * 8, 1),
        rkey.ptr,
    ):
        with pytest.raises(um.RangeError):
            call()
    assert win.derive(0, 0).length == 0
    with pytest.raises(um.InvalidParamError):
        base.derive(0, 1)
    win.invalidate()
    with pytest.raises(um.RevokedError):
        win.mkey_pack()
    base.dereg()
    rkey.close()
    for op in ("mem_reg", "key_create", "mkey_pack", "rkey_unpack", "rkey_release", "rkey_ptr"):
        assert device.count(op) == 0, op


@pytest.mark.parametrize("offset", [0, 1, 63, 64])
def test_rule15_an_empty_window_of_a_region(fakes, offset):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive(offset, 0)
    assert Envelope.of(win.mkey_pack()).flags == FLAG_EMPTY | FLAG_REVOCABLE
    assert md.rkey_unpack(win.mkey_pack()).address == base.address + offset
    win.invalidate()
    assert device.count("key_create") == device.count("key_destroy") == 0


# ---- what can be registered ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(64),
        lambda: memoryview(bytearray(128))[32:96],
        lambda: np.zeros(8),
        lambda: np.zeros((4, 2, 8), dtype="u1"),
        lambda: np.zeros(8)[2:4],
        lambda: np.zeros((), dtype="f8"),
        lambda: array.array("i", range(16)),
        lambda: (ctypes.c_int * 16)(),
        lambda: mmap.mmap(-1, 4096),
        lambda: np.zeros(4, dtype=[("a", "i8"), ("b", "f8")]),
    ],
)
def test_rule15_every_contiguous_buffer_can_be_registered(fakes, make):
    md, device = fakes()
    buffer = make()
    with memoryview(buffer).cast("B") if memoryview(buffer).ndim else memoryview(buffer) as view:
        size = view.nbytes
    base = md.mem_reg(buffer)
    assert base.length == size
    value = device.raw_access(
        next(iter(device.live_keys)), "put", base.address, data=b"\x01" * size
    )
    assert value[0] == um.Status.OK
    assert bytes(memoryview(buffer).tobytes()) == b"\x01" * size
    base.dereg()
    if isinstance(buffer, mmap.mmap):
        buffer.close()


@pytest.mark.parametrize(
    ("able", "flags"),
    [
        ({"derive": False}, um.MemFlag.DERIVED_ONLY | um.MemFlag.ACCESS_RMA),
        ({"atomic": False}, um.MemFlag.ACCESS_ALL),
        ({"reg": False, "derive": False, "invalidate": False}, um.MemFlag.ACCESS_RMA),
    ],
)
def test_adopting_takes_the_checks_of_registering(fakes, able, flags):
    """What the domain cannot do is refused before it sees the registration."""
    md, device = fakes(need_memh=True, **able)
    with pytest.raises(um.UnsupportedError) as refused:
        md.mem_adopt(0x1000, flags=flags)
    assert refused.value.op == "mem_adopt"
    assert device.count("mem_reg") == 0
