# SPDX-License-Identifier: BSD-3-Clause
"""Deriving handles from a registration; no device is asked before they are packed."""

import pytest

import ucx_memh as um
from bench.sizes import KIB, LARGEST, name

pytestmark = pytest.mark.benchmark(group="derive")


@pytest.mark.parametrize("length", [4 * KIB, LARGEST], ids=name)
def bench_derive(measure, mlx5: um.Md, memory: memoryview, length: int) -> None:
    """derive of all of it, and dereg."""
    with mlx5.mem_reg(memory[:length], um.MemFlag.DERIVED_ONLY) as base:
        measure(mlx5, lambda: base.derive().dereg(), length=length)


def bench_derive_a_part(measure, mlx5: um.Md, memory: memoryview) -> None:
    """derive of a part with one right, and dereg."""
    get = um.MemFlag.REMOTE_GET
    with mlx5.mem_reg(memory[: 64 * KIB], um.MemFlag.DERIVED_ONLY) as base:
        measure(mlx5, lambda: base.derive(4 * KIB, 8 * KIB, get).dereg(), length=64 * KIB)
