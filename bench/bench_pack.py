# SPDX-License-Identifier: BSD-3-Clause
"""Making the bytes that a peer gets."""

import pytest

import ucx_memh as um
from bench.sizes import KIB, LARGEST, name

pytestmark = pytest.mark.benchmark(group="pack")


def bench_pack_base(measure, md: um.Md, memory: memoryview) -> None:
    """A base's key, packed before."""
    with md.mem_reg(memory[: 4 * KIB]) as base:
        measure(md, base.mkey_pack, length=4 * KIB)


def bench_pack_again(measure, mlx5: um.Md, memory: memoryview) -> None:
    """A derived handle's key, packed before."""
    with mlx5.mem_reg(memory[: 4 * KIB], um.MemFlag.DERIVED_ONLY) as base:
        with base.derive() as win:
            measure(mlx5, win.mkey_pack, length=4 * KIB)


def bench_pack_into(measure, mlx5: um.Md, memory: memoryview) -> None:
    """The same into the caller's buffer."""
    with mlx5.mem_reg(memory[: 4 * KIB], um.MemFlag.DERIVED_ONLY) as base:
        with base.derive() as win:
            measure(mlx5, win.mkey_pack_into, bytearray(256), length=4 * KIB)


@pytest.mark.parametrize("length", [4 * KIB, LARGEST], ids=name)
def bench_pack_first(measure, mlx5: um.Md, memory: memoryview, length: int) -> None:
    """A derived handle's first pack: the device makes its key."""
    with mlx5.mem_reg(memory[:length], um.MemFlag.DERIVED_ONLY) as base:
        measure.prepared(
            mlx5, base.derive, um.Memh.mkey_pack, after=um.Memh.invalidate, length=length
        )
