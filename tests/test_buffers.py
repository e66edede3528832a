# SPDX-License-Identifier: BSD-3-Clause
"""Memory that is no Python buffer: what mem_reg and transfers make of what an object says of it."""

import gc

import numpy as np
import pytest

import ucx_memh as um
from _tensors import CPU, CUDA_HOST, CUDA_MANAGED, Interface, Tensor
from ucx_memh import MemFlag, MemType
from ucx_memh.python_backend import bind
from ucx_memh.testing import PythonDevice, open_fake
from ucx_memh.testing._python import FLAGS

AT = 0x7F00_0000_0000
BOTH = 3  # host and device memory


@pytest.fixture
def md():
    with open_fake(mem_types=BOTH)[0] as opened:
        yield opened


def extent(md, thing):
    with md.mem_reg(thing) as memh:
        return memh.address, memh.length


# ---- __cuda_array_interface__ ----


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 96),
        ({"version": 2, "stream": ...}, 96),
        ({"shape": (2, 3, 4), "typestr": "<f8"}, 192),
        ({"shape": (2, 3, 4), "typestr": "<f8", "strides": (96, 32, 8)}, 192),
        ({"shape": (1, 3), "typestr": ">i2", "strides": (777, 2)}, 6),
        ({"shape": (), "typestr": "<c16"}, 16),
        ({"shape": (3,), "typestr": "<U5"}, 60),
        ({"shape": (3,), "typestr": "|V7"}, 21),
        ({"shape": (0, 5), "strides": (1, 1)}, 0),
        ({"stream": 1}, 96),
        ({"stream": 0x55AA55AA0000}, 96),
    ],
)
def test_an_interface_names_a_range(md, changes, length):
    assert extent(md, Interface(AT, 96, **changes)) == (AT, length)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 1}, "version 1"),
        ({"version": 4}, "version 4"),
        ({"version": ...}, "version"),
        ({"shape": ...}, "shape"),
        ({"data": ...}, "data"),
        ({"data": 5}, "TypeError"),
        ({"data": (-1, False)}, "makes no sense"),
        ({"data": (2**64, False)}, "makes no sense"),
        ({"shape": (-1,)}, "makes no sense"),
        ({"shape": (2**40, 2**40)}, "more than there can be"),
        ({"typestr": "|O8"}, "no plain bytes"),
        ({"typestr": "|t1"}, "no plain bytes"),
        ({"typestr": "u"}, "IndexError"),
        ({"typestr": "|ux"}, "ValueError"),
        ({"shape": (4, 4), "strides": (1, 4)}, "not C-contiguous"),
        ({"shape": (4,), "strides": (2,)}, "not C-contiguous"),
        ({"shape": (4,), "strides": (-1,)}, "not C-contiguous"),
        ({"shape": (4,), "typestr": "<f4", "strides": (6,)}, "not C-contiguous"),
        ({"shape": (4, 4), "strides": (1,)}, "1 strides for 2 dimensions"),
        ({"mask": object()}, "mask"),
        ({"stream": 0}, "stream 0"),
        ({"stream": -2}, "stream -2"),
    ],
)
def test_an_interface_that_names_none(md, changes, why):
    with pytest.raises(um.InvalidParamError, match=why):
        md.mem_reg(Interface(AT, 96, **changes))
    assert md.stats()["mem_reg"] == 0


def test_an_interface_that_is_no_dictionary_or_raises(md):
    class Odd:
        __cuda_array_interface__ = 5

    class Raising:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("it wants a gradient")

    with pytest.raises(um.InvalidParamError):
        md.mem_reg(Odd())
    with pytest.raises(um.InvalidParamError, match="it wants a gradient"):
        md.mem_reg(Raising())


# ---- DLPack ----


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("shape", "strides", "more", "address", "length"),
    [
        ((96,), None, {}, AT, 96),
        ((2, 3), (3, 1), {"bits": 32}, AT, 24),
        ((1, 3), (99, 1), {"bits": 16, "lanes": 4}, AT, 24),
        ((5,), (1,), {"byte_offset": 64}, AT + 64, 5),
        ((9,), None, {"bits": 4}, AT, 5),
        ((), None, {"bits": 64}, AT, 8),
        ((0, 7), (3, 3), {}, AT, 0),
        ((8,), None, {"kind": CUDA_MANAGED}, AT, 8),
    ],
)
def test_a_tensor_names_a_range(md, version, shape, strides, more, address, length):
    tensor = Tensor(AT, shape, strides, version=version, **more)
    assert extent(md, tensor) == (address, length)
    assert tensor.streams == [-1]  # registering reads nothing
    gc.collect()
    assert tensor.live == 0


@pytest.mark.parametrize(
    ("shape", "strides", "more", "error", "why"),
    [
        ((4, 4), (1, 4), {}, um.InvalidParamError, "not C-contiguous"),
        ((4,), (2,), {}, um.InvalidParamError, "not C-contiguous"),
        ((-4,), None, {}, um.InvalidParamError, "makes no sense"),
        ((2**40, 2**40), None, {}, um.InvalidParamError, "more than there can be"),
        ((4,), None, {"version": 2}, um.InvalidParamError, "version 2"),
        ((4,), None, {"flags": 2}, um.InvalidParamError, "copy"),
        ((4,), None, {"kind": 10}, um.UnsupportedError, "device of type 10"),
        ((4,), None, {"claims": (2, 1)}, um.InvalidParamError, "another device"),
    ],
)
def test_a_tensor_that_names_none(md, shape, strides, more, error, why):
    tensor = Tensor(AT, shape, strides, **more)
    with pytest.raises(error, match=why):
        md.mem_reg(tensor)
    gc.collect()
    assert (md.stats()["mem_reg"], tensor.live) == (0, 0)


def test_a_tensor_that_is_no_capsule_or_raises(md):
    class Odd(Tensor):
        def __dlpack__(self, **more):
            return 5

    class Raising(Tensor):
        def __dlpack__(self, **more):
            raise BufferError("it wants a gradient")

    with pytest.raises(um.InvalidParamError, match="int, no tensor's capsule"):
        md.mem_reg(Odd(AT, (4,)))
    with pytest.raises(um.InvalidParamError, match="it wants a gradient"):
        md.mem_reg(Raising(AT, (4,)))


class Wrapped:
    """NumPy's own producer, without its buffer."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **more):
        return self.array.__dlpack__(**more)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_host_memory_by_dlpack(fakes):
    """Of a framework whose host arrays export no buffer: as good as one, and really read."""
    md, _ = fakes()
    array = np.arange(64, dtype=np.float64)
    one, two = md.endpoint(), md.endpoint()
    one.connect(two.address)
    two.connect(one.address)
    with md.mem_reg(Wrapped(array)) as memh, md.rkey_unpack(memh.mkey_pack()) as rkey:
        assert (memh.address, memh.length) == (array.ctypes.data, array.nbytes)
        into = np.zeros_like(array)
        one.get(rkey, memh.address, Wrapped(into))
        assert (into == array).all()
    pinned = Tensor(array.ctypes.data, (8,), kind=CUDA_HOST)
    assert extent(md, pinned) == (array.ctypes.data, 8)
    assert pinned.streams == [None]
    assert extent(md, Tensor(array.ctypes.data, (8,), kind=CPU)) == (array.ctypes.data, 8)


# ---- both ----


@pytest.mark.parametrize(
    "thing",
    [Interface(AT, 8, data=(AT, True)), Tensor(AT, (8,), flags=1)],
    ids=["interface", "tensor"],
)
def test_read_only_memory(md, thing):
    with md.mem_reg(thing) as memh:
        assert memh.flags == MemFlag.LOCAL_READ | MemFlag.REMOTE_GET
    with pytest.raises(um.AccessError):
        md.mem_reg(thing, MemFlag.REMOTE_PUT)
    made = md.stats()["mem_reg"]
    array = md.mem_reg_many([thing, thing])
    assert [memh.flags for memh in array] == [MemFlag.LOCAL_READ | MemFlag.REMOTE_GET] * 2
    assert md.stats()["mem_reg"] == made + 2


def test_the_owner_is_held_until_dereg(md):
    tensor = Tensor(AT, (8,))
    memh = md.mem_reg(tensor)
    gc.collect()
    assert tensor.live == 1
    memh.dereg()
    assert tensor.live == 0
    thing = Interface(AT, 8)
    before = len(gc.get_referrers(thing))
    memh = md.mem_reg(thing)
    assert md.find(AT) == [memh]
    memh.dereg()
    assert len(gc.get_referrers(thing)) == before


def test_a_type_that_contradicts_the_memory(md):
    with pytest.raises(um.InvalidParamError, match="mem_type is 0"):
        md.mem_reg(Interface(AT, 8), mem_type=um.MemType.HOST + np.int64(0))
    with md.mem_reg(Interface(AT, 8), mem_type=MemType.CUDA) as memh:
        assert memh.length == 8


def test_row79_device_memory_is_refused_by_a_domain_of_host_memory(fakes):
    """Before its backend hears of it, let alone a device; in all ways in which it can be given."""
    md, device = fakes()
    one, two = md.endpoint(), md.endpoint()
    one.connect(two.address)
    two.connect(one.address)
    host = bytearray(64)
    with md.mem_reg(host) as memh, md.rkey_unpack(memh.mkey_pack()) as rkey:
        before = dict(device.counts)
        for thing in (Interface(AT, 64), Tensor(AT, (64,))):
            for call in (
                lambda thing=thing: md.mem_reg(thing),
                lambda thing=thing: md.mem_reg_many([thing]),
                lambda thing=thing: one.get(rkey, memh.address, thing),
                lambda thing=thing: one.put(rkey, memh.address, thing),
                lambda thing=thing: one.get_nb(rkey, memh.address, thing),
            ):
                with pytest.raises(um.UnsupportedError, match="device memory"):
                    call()
        with pytest.raises(um.UnsupportedError, match="device memory"):
            md.mem_reg(address=AT, length=64, mem_type=MemType.CUDA)
        assert dict(device.counts) == before


def test_host_memory_is_refused_by_a_domain_of_device_memory(fakes):
    md, device = fakes(mem_types=1 << MemType.CUDA, without_ops=["mem_query"])
    for call in (
        lambda: md.mem_reg(bytearray(8)),
        lambda: md.mem_reg_many([bytearray(8)]),
        lambda: md.mem_reg(address=AT, length=8),
        lambda: md.mem_reg(Tensor(AT, (8,), kind=CPU)),
    ):
        with pytest.raises(um.UnsupportedError, match="host memory, of which"):
            call()
    assert device.count("mem_reg") == 0


@pytest.mark.parametrize("options", [{"need_memh": True}, {"abi": 2}], ids=["handles", "version 2"])
def test_a_transfer_of_device_memory_needs_a_domain_that_knows_of_it(fakes, options):
    md, device = fakes(mem_types=BOTH, **options)
    one, two = md.endpoint(), md.endpoint()
    one.connect(two.address)
    two.connect(one.address)
    with md.mem_reg(bytearray(64)) as memh, md.rkey_unpack(memh.mkey_pack()) as rkey:
        before = device.count("post")
        with pytest.raises(um.UnsupportedError, match="device memory"):
            one.get(rkey, memh.address, Interface(AT, 64))
        assert device.count("post") == before


def test_a_backend_in_python_is_not_handed_a_devices_memory():
    md = bind(
        PythonDevice(),
        component="odd",
        md_name="odd0",
        flags=FLAGS,
        rkey_packed_size=16,
        mem_types=(MemType.HOST, MemType.CUDA),
    )
    with md, md.endpoint() as one, md.endpoint() as two:
        one.connect(two.address)
        two.connect(one.address)
        with md.mem_reg(bytearray(64)) as memh, md.rkey_unpack(memh.mkey_pack()) as rkey:
            with pytest.raises(um.UnsupportedError, match="device memory"):
                one.get(rkey, memh.address, Interface(AT, 64))
