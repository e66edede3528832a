# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on cma."""

import pytest

import ucx_memh as um
from ucx_memh.testing import MdSuite

pytestmark = pytest.mark.usefixtures("frozen_heap")


class TestCma(MdSuite):
    @pytest.fixture
    def md(self):
        md = um.open_md("cma")
        yield md
        md.close(force=True)
