# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on memory of a device."""

import pytest

import ucx_memh as um
from _gpu import address_of
from ucx_memh.testing import MdSuite

pytestmark = pytest.mark.usefixtures("frozen_heap")


class DeviceMemory:
    """As the kit's HostMemory."""

    def __init__(self, gpu, size):
        self.gpu, self.size = gpu, size
        self.memory = gpu.memory(size)

    def load(self, offset=0, length=None):
        return self.gpu.read(self.memory, self.size - offset if length is None else length, offset)

    def store(self, offset, data):
        if data:
            self.gpu.write(self.memory, data, offset)

    def at(self, pointer, length):
        into = bytearray(length)
        self.gpu.driver.cuMemcpy(address_of(into), pointer, length)
        return bytes(into)

    def mem_reg(self, md, flags=None, offset=0, length=None):
        return md.mem_reg(
            address=self.memory.address + offset,
            length=self.size - offset if length is None else length,
            mem_type=um.MemType.CUDA,
            flags=flags,
            owner=self,
        )


class TestCuda(MdSuite):
    @pytest.fixture
    def md(self, gpu):
        md = gpu.open()
        yield md
        md.close(force=True)

    @pytest.fixture
    def allocate(self, gpu):
        return lambda size: DeviceMemory(gpu, size)
