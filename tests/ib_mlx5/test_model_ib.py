# SPDX-License-Identifier: BSD-3-Clause
"""The same random sequences on ib_mlx5 over softmlx5."""

from typing import Any

from hypothesis import settings

import ucx_memh as um
from _model import PROFILE, HandleMachine


class Mlx5Machine(HandleMachine):
    umr = "auto"

    def open_md(self) -> Any:
        return um.open_md("ib_mlx5", device="software", umr=self.umr)

    def nothing_left(self) -> None:
        stats = self.md.stats()
        pool = stats["device.pool_free"] + stats["device.pool_resting"]
        assert stats["device.create_mkey"] == stats["device.destroy_mkey"] + pool
        assert stats["device.pool_used"] == 0
        assert pool == 0 or self.umr == "auto"
        # The bounce buffer of the domain stays until it is closed.
        assert stats["device.reg_mr"] == stats["device.dereg_mr"] + 1


class CommandMachine(Mlx5Machine):
    umr = "off"


TestModel = Mlx5Machine.TestCase
TestModel.settings = settings(PROFILE)
TestModelByCommand = CommandMachine.TestCase
TestModelByCommand.settings = settings(PROFILE)
