# SPDX-License-Identifier: BSD-3-Clause
"""The headline: one peer is cut off, and a new one gets a key in its place."""

import pytest

import ucx_memh as um
from bench.revoke import ByDerived, ByRegistration
from bench.sizes import REGIONS, fitting, name

pytestmark = pytest.mark.benchmark(group="revoke one peer")


@pytest.mark.parametrize("length", fitting(REGIONS), ids=name)
def bench_revoke_derived(measure, mlx5: um.Md, memory: memoryview, length: int) -> None:
    """invalidate, derive, pack."""
    with ByDerived(mlx5, memory[:length]) as way:
        measure(mlx5, way.revoke, length=length)


@pytest.mark.parametrize("length", fitting(REGIONS), ids=name)
def bench_revoke_by_dereg(measure, mlx5: um.Md, memory: memoryview, length: int) -> None:
    """As everybody does it without derived keys: deregister, register again, pack."""
    with ByRegistration(mlx5, memory[:length]) as way:
        measure(mlx5, way.revoke, length=length)
