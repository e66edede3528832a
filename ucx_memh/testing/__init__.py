# SPDX-License-Identifier: BSD-3-Clause
"""For tests of the core and of backends: devices that count, fail and check their caller.

>>> from ucx_memh.testing import open_fake
>>> md, fake = open_fake()
>>> memh = md.mem_reg(bytearray(64))
>>> fake.count("mem_reg"), fake.violations
(1, {})
"""

from ucx_memh.testing._alloc import PoisonAllocator, memh_bytes, memh_pointer
from ucx_memh.testing._fake import OPERATIONS, FakeDevice, open_fake
from ucx_memh.testing._python import PythonDevice, open_python_device

__all__ = [
    "OPERATIONS",
    "FakeDevice",
    "PoisonAllocator",
    "PythonDevice",
    "memh_bytes",
    "memh_pointer",
    "open_fake",
    "open_python_device",
]
