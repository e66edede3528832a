# SPDX-License-Identifier: BSD-3-Clause
"""Registering memory and giving it back."""

import pytest

import ucx_memh as um
from bench.sizes import REGIONS, fitting, name

pytestmark = pytest.mark.benchmark(group="register")


@pytest.mark.parametrize("length", fitting(REGIONS), ids=name)
def bench_register(measure, md: um.Md, memory: memoryview, length: int) -> None:
    """mem_reg and dereg."""
    part = memory[:length]
    measure(md, lambda: md.mem_reg(part).dereg(), length=length)


@pytest.mark.parametrize("length", fitting(REGIONS), ids=name)
def bench_register_derived_only(measure, mlx5: um.Md, memory: memoryview, length: int) -> None:
    """The same for a base without a key of its own."""
    part = memory[:length]
    only = um.MemFlag.DERIVED_ONLY
    measure(mlx5, lambda: mlx5.mem_reg(part, only).dereg(), length=length)
