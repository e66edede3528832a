# SPDX-License-Identifier: BSD-3-Clause
"""The same random sequences on ib_mlx5 over softmlx5."""

from typing import Any

from hypothesis import settings

import ucx_memh as um
from _model import PROFILE, HandleMachine


class Mlx5Machine(HandleMachine):
    def open_md(self) -> Any:
        return um.open_md("ib_mlx5", device="software")

    def nothing_left(self) -> None:
        stats = self.md.stats()
        assert stats["device.create_mkey"] == stats["device.destroy_mkey"]
        # The bounce buffer of the domain stays until it is closed.
        assert stats["device.reg_mr"] == stats["device.dereg_mr"] + 1


TestModel = Mlx5Machine.TestCase
TestModel.settings = settings(PROFILE)
