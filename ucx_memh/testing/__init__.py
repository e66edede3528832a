# SPDX-License-Identifier: BSD-3-Clause
"""For tests of the core and of backends: devices that count, fail and check their caller.

>>> from ucx_memh.testing import open_fake
>>> md, fake = open_fake()
>>> memh = md.mem_reg(bytearray(64))
>>> fake.count("mem_reg"), fake.violations
(1, {})

`open_fake` (in C) and `open_python_device` (in Python) both count, fail and are slow on request:
`fake.count(op)`, `fake.fail(op, status)`, `fake.slow(op, seconds)`; `device.calls`, `.faults`,
`.delays`.  `MdSuite` is the conformance kit for backends, `plugin` has fixtures for pytest.
"""

from typing import TYPE_CHECKING

from ucx_memh.testing._alloc import PoisonAllocator, memh_bytes, memh_pointer
from ucx_memh.testing._fake import OPERATIONS, FakeDevice, open_fake
from ucx_memh.testing._python import PythonDevice, open_python_device

if TYPE_CHECKING:
    from ucx_memh.testing.suite import HostMemory, MdSuite

__all__ = [
    "OPERATIONS",
    "FakeDevice",
    "HostMemory",
    "MdSuite",
    "PoisonAllocator",
    "PythonDevice",
    "memh_bytes",
    "memh_pointer",
    "open_fake",
    "open_python_device",
]


def __getattr__(name: str) -> object:
    if name in ("HostMemory", "MdSuite"):  # it needs pytest, and the fakes do not
        import pytest

        pytest.register_assert_rewrite("ucx_memh.testing.suite")
        from ucx_memh.testing import suite

        return getattr(suite, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
