# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on softmlx5, with keys by work requests and by commands."""

import pytest

from _sides import opened
from ucx_memh.testing import MdSuite

pytestmark = pytest.mark.usefixtures("frozen_heap")


class TestMlx5(MdSuite):
    other_payloads = (8,)  # the native key alone

    @pytest.fixture(params=["auto", "off"], ids=["umr", "devx"])
    def md(self, tidy, request):
        with opened(umr=request.param) as md:
            yield md

    @pytest.fixture
    def refuse(self, soft):
        def refuse(op):
            ending = "local_inv:status=6;destroy_mkey:status=6,syndrome=0xabc,count=1"
            soft.fault("dereg_mr:status=6" if op == "mem_dereg" else ending)

        return refuse
