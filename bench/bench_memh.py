# SPDX-License-Identifier: BSD-3-Clause
"""What a registration, a derived key and a revocation cost, from Python.

Times of a software device are not a NIC's: compare within one run, and read the command counts.
"""

import mmap
from collections.abc import Iterator

import pytest

import ucx_memh as um

SIZES = [4 << 10, 1 << 20, 64 << 20, 256 << 20]
COMPONENTS = ["cma", "ib_mlx5"]


@pytest.fixture(params=COMPONENTS)
def md(request: pytest.FixtureRequest) -> Iterator[um.Md]:
    with um.open_md(request.param) as md:
        yield md


@pytest.fixture
def mlx5() -> Iterator[um.Md]:
    with um.open_md("ib_mlx5") as md:
        yield md


def region(length: int) -> mmap.mmap:
    """Memory that is really there, so that no bench pays for its first touch."""
    memory = mmap.mmap(-1, length)
    memory[::4096] = bytes(len(range(0, length, 4096)))
    return memory


def sizes(length: int) -> str:
    return f"length={length >> 10}KiB"


@pytest.mark.benchmark(group="register and deregister")
@pytest.mark.parametrize("length", SIZES, ids=sizes)
def bench_mem_reg(benchmark, md: um.Md, length: int) -> None:
    memory = region(length)
    benchmark(lambda: md.mem_reg(memory).dereg())


@pytest.mark.benchmark(group="revoke one peer")
@pytest.mark.parametrize("length", SIZES, ids=sizes)
def bench_revoke_derived(benchmark, mlx5: um.Md, length: int) -> None:
    """By a derived key: derive, pack (the new grant), invalidate."""
    with mlx5.mem_reg(region(length), um.MemFlag.DERIVED_ONLY) as base:

        def revoke() -> None:
            win = base.derive()
            win.mkey_pack()
            win.invalidate()

        benchmark(revoke)


@pytest.mark.benchmark(group="revoke one peer")
@pytest.mark.parametrize("length", SIZES, ids=sizes)
def bench_revoke_by_dereg(benchmark, mlx5: um.Md, length: int) -> None:
    """As everybody does it without derived keys: deregister, register again, pack."""
    memory = region(length)
    benchmark(lambda: (base := mlx5.mem_reg(memory)).mkey_pack() and base.dereg())


@pytest.mark.benchmark(group="derive")
def bench_derive(benchmark, mlx5: um.Md) -> None:
    with mlx5.mem_reg(region(4096)) as base:
        benchmark(lambda: base.derive().dereg())


@pytest.mark.benchmark(group="pack")
def bench_pack_cached(benchmark, md: um.Md) -> None:
    with md.mem_reg(region(4096)) as base:
        benchmark(base.mkey_pack)


@pytest.mark.benchmark(group="unpack")
def bench_unpack_known(benchmark, md: um.Md) -> None:
    with md.mem_reg(region(4096)) as base:
        key = base.mkey_pack()
        with md.rkey_unpack(key):
            benchmark(lambda: md.rkey_unpack(key).close())


@pytest.mark.benchmark(group="data path")
@pytest.mark.parametrize("length", [8, 4 << 10, 1 << 20, 64 << 20], ids=lambda n: f"bytes={n}")
@pytest.mark.parametrize("way", ["get", "put"])
def bench_transfer(benchmark, md: um.Md, length: int, way: str) -> None:
    """Within one process; the local side is registered too."""
    with md.mem_reg(region(length)) as remote, md.mem_reg(region(length)) as local:
        with md.endpoint() as one, md.endpoint() as two:
            one.connect(two.address)
            two.connect(one.address)
            with md.rkey_unpack(remote.mkey_pack()) as rkey:
                benchmark(getattr(one, way), rkey, remote.address, local)
