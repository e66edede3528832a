# SPDX-License-Identifier: BSD-3-Clause
"""ucx_memh.mpi: windows under `mpiexec -n 4`; what the ranks do is in programs.py."""

import pytest

# The first run installs an MPI.
pytestmark = [pytest.mark.source, pytest.mark.timeout(900)]

PROGRAMS = [
    "data",
    "many",
    "atomics",
    "threads",
    "sizes",
    "shared",
    "revoke",
    "revoked_atomic",
    "each_other",
    "regrant",
    "renew",
    "failed_regrant",
    "late",
    "unsupported",
    "one_fails",
    "arguments",
    "exception",
    "lost",
    "cycles",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_four_ranks(ranks, program):
    ranks(program)


def test_every_program_is_run(root):
    lines = (root / "tests/mpi/programs.py").read_text().splitlines()
    names = [line[4:].split("(")[0] for line in lines if line.startswith("def ")]
    assert set(names) - {"raises", "until", "pattern"} == set(PROGRAMS)


def test_importing_it_does_not_load_mpi4py(python):
    code = "import sys, ucx_memh as um; um.mpi.Window; assert 'mpi4py' not in sys.modules"
    python("-c", code)


def test_without_mpi4py_it_says_what_to_install(python):
    code = (
        "import sys, ucx_memh as um; sys.modules['mpi4py'] = None\n"
        "try: um.mpi.Window(None, 8)\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert python("-c", code).stdout == "ucx_memh.mpi needs mpi4py: install ucx_memh[mpi]\n"
