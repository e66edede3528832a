# SPDX-License-Identifier: BSD-3-Clause
"""On a GPU: arrays of CuPy and tensors of torch, where they are installed."""

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("gpu", ["real"], indirect=True)]


def make_cupy(size):
    cupy = pytest.importorskip("cupy")
    return cupy.zeros(size, cupy.uint8), lambda array: array.get().tobytes()


def make_torch(size):
    torch = pytest.importorskip("torch")
    made = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    return made, lambda tensor: tensor.cpu().numpy().tobytes()


class OnlyDLPack:
    """Without the other protocol."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.fixture(params=[make_cupy, make_torch], ids=["cupy", "torch"])
def make(request):
    return request.param


def test_what_a_framework_has_allocated_is_shared(gpu, md, far, make):
    array, contents = make(1 << 20)
    for given in (array, OnlyDLPack(array)):
        with md.mem_reg(given) as base:
            key = base.mkey_pack()
            far.put(key, 100, b"written by the peer")
            assert contents(array)[100:119] == b"written by the peer"
            array[:4] = 42
            contents(array)  # waits for that
            assert far.get(key, 0, 4) == b"****"
            far.forget(key)


def test_a_framework_has_the_local_side(gpu, md, ep, far, make):
    """What it has queued on its stream comes first."""
    array, contents = make(1 << 20)
    key = far.region(bytes(1 << 20), 1 << 20)
    with md.rkey_unpack(key) as rkey:
        for given, value in ((array, 7), (OnlyDLPack(array), 9)):
            array[:] = value
            ep.put(rkey, rkey.address, given)
            assert far.seen(key, 0, 1 << 20) == bytes([value]) * (1 << 20)
            array[:] = 0
            ep.get(rkey, rkey.address, given)
            assert contents(array) == bytes([value]) * (1 << 20)
