# SPDX-License-Identifier: BSD-3-Clause
"""Moving bytes to and from another process, beside the system call itself and memcpy.

The local side is registered.  A floor is the same work from Python with nothing of ours in it;
how far we are from it says `python -m bench.ratios`, for here one bench runs after another.
"""

from types import ModuleType

import pytest

import ucx_memh as um
from bench.owner import Link, Owner
from bench.sizes import TRANSFERS, fitting, name

GET = pytest.mark.benchmark(group="data path: get")
PUT = pytest.mark.benchmark(group="data path: put")
SIZES = pytest.mark.parametrize("length", fitting(TRANSFERS), ids=name)


@GET
@SIZES
def bench_get(measure, md: um.Md, link: Link, memory: memoryview, length: int) -> None:
    with md.mem_reg(memory[:length]) as local:
        measure(md, link.ep.get, link.rkey, link.address, local, length=length)


@PUT
@SIZES
def bench_put(measure, md: um.Md, link: Link, memory: memoryview, length: int) -> None:
    with md.mem_reg(memory[:length]) as local:
        measure(md, link.ep.put, link.rkey, link.address, local, length=length)


@pytest.fixture
def pid_and_address(owner: Owner) -> tuple[int, int]:
    with um.open_md("cma") as md:
        link = owner.link(md)
        link.rkey.close()
        link.ep.close()
        return link.pid, link.address


@GET
@SIZES
def bench_bare_readv(
    measure, bare: ModuleType, pid_and_address: tuple[int, int], memory: memoryview, length: int
) -> None:
    """process_vm_readv."""
    measure(None, bare.readv, *pid_and_address, memory[:length], length=length)


@PUT
@SIZES
def bench_bare_writev(
    measure, bare: ModuleType, pid_and_address: tuple[int, int], memory: memoryview, length: int
) -> None:
    """process_vm_writev."""
    measure(None, bare.writev, *pid_and_address, memory[:length], length=length)


@GET
@SIZES
def bench_memcpy(
    measure, bare: ModuleType, memory: memoryview, source: memoryview, length: int
) -> None:
    """Within one process."""
    measure(None, bare.copy, memory[:length], source[:length], length=length)
