# SPDX-License-Identifier: BSD-3-Clause
"""Random sequences on memory windows: `ib` over softmlx5's."""

from importlib.resources import files
from typing import Any

from hypothesis import settings

import ucx_memh as um
from _model import PROFILE, HandleMachine


class WindowMachine(HandleMachine):
    def open_md(self) -> Any:
        library = files("ucx_memh_ib_mlx5._soft") / "libsoftmlx5.so"
        return um.open_md("ib", library=str(library))

    def nothing_left(self) -> None:
        stats = self.md.stats()
        assert stats["device.alloc_mw"] == stats["device.dealloc_mw"]


TestModel = WindowMachine.TestCase
TestModel.settings = settings(PROFILE)
