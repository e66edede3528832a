# SPDX-License-Identifier: BSD-3-Clause
"""Windows over four ranks of a real mpiexec: ours beside mpi4py's Win, one program for both.

Rank 0 works on rank 1; bench/peers/harness/mpi_window.py has the calls.  A round is COUNT calls,
timed over there: `ns` in the extra_info is for one of them, without the pipe to the program.  On
one host MPI's windows are shared memory and its puts are memcpy; ours go through the software
device where there is no adapter, so compare what each step does, not whose copy is faster.
"""

import sys
from collections.abc import Iterator

import pytest

from bench.bare import ROOT
from bench.peers.child import Child
from bench.peers.install import BUILD, mpiexec
from bench.sizes import KIB, MIB, name

RANKS = 4
COUNT = {"put": 200, "get": 200, "fetch_add": 200, "compare_swap": 200, "fence": 50, "cut": 10}
SIDES = [(side, mpi) for mpi in ("mpich", "openmpi") for side in ("ours", "win")]


@pytest.fixture(scope="module", params=SIDES, ids="-".join)
def job(request: pytest.FixtureRequest) -> Iterator[Child]:
    side, mpi = request.param
    command, env = mpiexec(mpi, RANKS)
    command += [sys.executable, "-m", "bench.peers.harness.mpi_window", side]
    with Child(command, BUILD / f"window-{side}-{mpi}.log", ROOT, env) as child:
        yield child


@pytest.fixture
def measure_ranks(benchmark, job: Child):
    def run(operation: str, length: int) -> None:
        count = COUNT[operation] if benchmark.enabled else 2
        taken: list[float] = []
        ask = lambda: taken.append(job.ask(operation, length, count))  # noqa: E731
        benchmark.pedantic(ask, rounds=7 if benchmark.enabled else 1, warmup_rounds=1)
        info = benchmark.extra_info
        info["bytes"], info["calls"], info["what"] = length, count, job.operations[operation]
        info["ns"] = sorted(taken)[len(taken) // 2]
        assert info["ns"] > 0

    return run


@pytest.mark.benchmark(group="mpi: data")
@pytest.mark.timeout(900)  # the first one may have to install an MPI
@pytest.mark.parametrize("length", [8, 4 * KIB, MIB], ids=name)
@pytest.mark.parametrize("operation", ["put", "get"])
def bench_mpi_data(measure_ranks, operation: str, length: int) -> None:
    measure_ranks(operation, length)


@pytest.mark.benchmark(group="mpi: atomics and fence")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", ["fetch_add", "compare_swap", "fence"])
def bench_mpi_words(measure_ranks, operation: str) -> None:
    measure_ranks(operation, 8)


@pytest.mark.benchmark(group="mpi: cut off one rank of four")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("length", [4 * KIB, 16 * MIB], ids=name)
def bench_mpi_cut(measure_ranks, length: int) -> None:
    """MPI has no other way than a window without that rank."""
    measure_ranks("cut", length)
