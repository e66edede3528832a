# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on memory windows."""

import errno

import pytest

from ib.conftest import IN_GUEST
from ucx_memh.testing import MdSuite

pytestmark = pytest.mark.usefixtures("frozen_heap")


class TestWindows(MdSuite):
    other_payloads = (8,)  # the native key alone

    @pytest.fixture
    def md(self, hooks):
        with hooks.opened() as md:
            yield md

    @pytest.fixture
    def refuse(self, hooks, request):
        if IN_GUEST:  # nothing there refuses to end a registration
            return None
        soft = request.getfixturevalue("soft")

        def refuse(op):
            if op == "mem_dereg":
                soft.fault("dereg_mr:status=6")
            else:
                hooks.refuse("dealloc_mw", errno.EBUSY, 2)  # the first time it is tried twice

        return refuse
