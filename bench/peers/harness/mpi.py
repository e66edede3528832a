# SPDX-License-Identifier: BSD-3-Clause
"""mpi4py: memory that comes and goes in a dynamic window of one rank.  It has no keys."""

from mpi4py import MPI

from bench.peers.harness import serving

memory = memoryview(serving.memory())
window = MPI.Win.Create_dynamic(MPI.INFO_NULL, MPI.COMM_SELF)


def register(length: int) -> serving.Loop:
    return serving.timed("win.Attach(part); win.Detach(part)", win=window, part=memory[:length])


def share(length: int) -> serving.Loop:
    statement = "win.Attach(part); address(part).to_bytes(8, 'little'); win.Detach(part)"
    names = {"win": window, "address": MPI.Get_address, "part": memory[:length]}
    return serving.timed(statement, **names)


def pack(length: int) -> serving.Loop:
    statement = "address(part).to_bytes(8, 'little')"
    return serving.timed(statement, address=MPI.Get_address, part=memory[:length])


if __name__ == "__main__":
    about = serving.versions("mpi4py")
    first = MPI.Get_library_version().splitlines()[0].partition(",")[0]
    about["library"] = " ".join(first.split())
    operations = {
        "register": ("`Win.Attach` and `Detach`", register),
        "share": ("`Attach`, `Get_address` to 8 bytes, `Detach`", share),
        "pack": ("`Get_address` to 8 bytes, for there is no key", pack),
    }
    serving.serve(operations, about)
    window.Free()
