# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on the fakes: what a backend can be like, it passes with all of it."""

import pytest

import ucx_memh as um
from ucx_memh.testing import MdSuite, open_fake, open_python_device

pytestmark = pytest.mark.usefixtures("frozen_heap")
FAKES = {
    "all": {},
    "deferred": dict(deferred=True, destroy="progress"),
    "flush": dict(destroy="flush"),
    "connectionless": dict(connectionless=True),
    "no derived keys": dict(derive=False, invalidate=False),
    "revocable bases only": dict(derive=False),
    "no binding": dict(derive_endpoint=False),
    "no atomics, pointers, events": dict(atomic=False, rkey_ptr=False, event=False),
    "no data path": dict(endpoint=False),
    "no keys": dict(rkey=False, derive=False, invalidate=False, rkey_ptr=False),
    "no registration": dict(reg=False, derive=False, invalidate=False),
    "limits": dict(max_reg=1 << 20, reg_alignment=1, tail_inherit_size=8, tail_own_size=8),
    "modest": dict(claim=1, lies=["rights", "range"]),
}


class TestFake(MdSuite):
    @pytest.fixture(params=FAKES.values(), ids=FAKES)
    def md(self, request):
        md, self.device = open_fake(**request.param)
        yield md
        self.device.clear_faults()
        md.close(force=True)
        assert (self.device.live_keys, self.device.violations) == ({}, {})
        del self.device  # pytest keeps `self`, and a fake its descriptor

    @pytest.fixture
    def refuse(self):
        return lambda op: self.device.fail(op, um.Status.IO_ERROR)


class TestPython(MdSuite):
    gauges = ("device.python_keys",)
    cycles = 10

    @pytest.fixture(params=[{}, dict(destroy="progress", deferred=True)], ids=["", "deferred"])
    def md(self, request):
        md, self.device = open_python_device(**request.param)
        yield md
        md.close(force=True)
        assert self.device.keys == self.device.ends == {}

    @pytest.fixture
    def refuse(self):
        return lambda op: self.device.faults.setdefault(op, []).append(um.DeviceError("busy"))
