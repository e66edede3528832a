# SPDX-License-Identifier: BSD-3-Clause
"""Random sequences of calls on a fake device against a plain Python model."""

from typing import Any

from hypothesis import settings

from _model import PROFILE, HandleMachine
from ucx_memh.testing import open_fake


class FakeMachine(HandleMachine):
    def open_md(self) -> Any:
        md, self.device = open_fake()
        return md

    def nothing_left(self) -> None:
        assert self.device.live_keys == {}
        assert self.device.violations == {}


TestModel = FakeMachine.TestCase
TestModel.settings = settings(PROFILE)
