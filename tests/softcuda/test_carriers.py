# SPDX-License-Identifier: BSD-3-Clause
"""The small objects that hand memory over as libraries do; numpy is who takes it here."""

import ctypes as C
import gc

import numpy as np
import pytest

from softcuda.driver import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, CudaArray, Tensor, lent


@pytest.fixture
def host():
    return (C.c_uint32 * 6)(*range(6))


@pytest.mark.parametrize("versioned", [True, False])
def test_numpy_takes_a_tensor_and_gives_it_back(driver, host, versioned):
    before = lent()
    tensor = Tensor(
        driver,
        C.addressof(host),
        24,
        (CPU, 0),
        shape=(2, 2),
        strides=(3, 1),
        bits=32,
        byte_offset=4,
        versioned=versioned,
    )
    array = np.from_dlpack(tensor)
    assert (array.dtype, array.tolist()) == (np.uint32, [[1, 2], [4, 5]])
    assert lent() == before + 1
    host[1] = 77
    assert array[0, 0] == 77
    del array
    gc.collect()
    assert lent() == before


def test_read_only_is_said_where_it_can_be(driver, host):
    tensor = Tensor(driver, C.addressof(host), 24, (CPU, 0), readonly=True)
    assert not np.from_dlpack(tensor).flags.writeable
    assert tensor.streams == [None]


def test_nobody_took_it(driver, host):
    before = lent()
    tensor = Tensor(driver, C.addressof(host), 24)
    capsules = [tensor.__dlpack__(stream=2), tensor.__dlpack__(max_version=(1, 0))]
    assert [repr(capsule).split('"')[1] for capsule in capsules] == [
        "dltensor",
        "dltensor_versioned",
    ]
    assert lent() == before + 2
    assert tensor.streams == [2, None]
    capsules.clear()
    assert lent() == before


def test_it_says_where_it_is(gpu):
    kinds = {"device": CUDA, "host": CUDA_HOST, "managed": CUDA_MANAGED}
    for kind, number in kinds.items():
        tensor = gpu.alloc(8, kind).tensor()
        assert tensor.__dlpack_device__() == (number, 0)


def test_a_refused_tensor_is_given_back(gpu):
    """Its capsule is dropped while an exception is on its way."""
    before = lent()
    with pytest.raises((RuntimeError, BufferError)):
        np.from_dlpack(gpu.alloc(8).tensor())
    assert lent() == before


def test_an_array_says_what_it_is_asked_to(gpu):
    memory = gpu.alloc(8)
    assert memory.array().__cuda_array_interface__ == {
        "shape": (8,),
        "typestr": "|u1",
        "data": (memory.address, False),
        "version": 3,
    }
    changed = CudaArray(16, 8, shape=(2,), typestr="<f4", readonly=True, stream=1)
    assert changed.__cuda_array_interface__["data"] == (16, True)
    assert changed.__cuda_array_interface__["typestr"] == "<f4"
