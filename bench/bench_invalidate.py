# SPDX-License-Identifier: BSD-3-Clause
"""Revoking a derived key."""

import pytest

import ucx_memh as um
from bench.sizes import KIB, REGIONS, fitting, name

pytestmark = pytest.mark.benchmark(group="invalidate")


@pytest.mark.parametrize("length", fitting(REGIONS), ids=name)
def bench_invalidate(measure, mlx5: um.Md, memory: memoryview, length: int) -> None:
    """Of a key that the device knows."""
    with mlx5.mem_reg(memory[:length], um.MemFlag.DERIVED_ONLY) as base:

        def packed() -> um.Memh:
            win = base.derive()
            win.mkey_pack()
            return win

        measure.prepared(mlx5, packed, um.Memh.invalidate, length=length)


def bench_invalidate_among_many(measure, mlx5: um.Md, memory: memoryview) -> None:
    """The same while a thousand others live."""
    with mlx5.mem_reg(memory[: 4 * KIB], um.MemFlag.DERIVED_ONLY) as base:

        def packed() -> um.Memh:
            win = base.derive()
            win.mkey_pack()
            return win

        others = [packed() for _ in range(1000)]
        measure.prepared(mlx5, packed, um.Memh.invalidate, length=4 * KIB)
        for win in others:
            win.invalidate()


def bench_invalidate_unpacked(measure, mlx5: um.Md, memory: memoryview) -> None:
    """Of a handle that was never packed: there is no key."""
    with mlx5.mem_reg(memory[: 4 * KIB], um.MemFlag.DERIVED_ONLY) as base:
        measure.prepared(mlx5, base.derive, um.Memh.invalidate, length=4 * KIB)
