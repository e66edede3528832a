# SPDX-License-Identifier: BSD-3-Clause
"""The two ways to cut off one peer of several; afterwards a new one has a key in its place."""

from typing import Any, Self

import ucx_memh as um


class ByDerived:
    """Each peer has a derived key, and this one's is invalidated."""

    def __init__(self, md: um.Md, memory: memoryview) -> None:
        self.base = md.mem_reg(memory, um.MemFlag.DERIVED_ONLY)
        self.stays = self.base.derive()
        self.stays.mkey_pack()
        self.win = self.base.derive()
        self.win.mkey_pack()

    def revoke(self) -> None:
        self.win.invalidate()
        self.win = self.base.derive()
        self.win.mkey_pack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.base.dereg(cascade=True)


class ByRegistration:
    """All peers have the registration's key, and it is replaced."""

    def __init__(self, md: um.Md, memory: memoryview) -> None:
        self.md, self.memory = md, memory
        self.base = md.mem_reg(memory)
        self.base.mkey_pack()

    def revoke(self) -> None:
        self.base.dereg()
        self.base = self.md.mem_reg(self.memory)
        self.base.mkey_pack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.base.dereg()
