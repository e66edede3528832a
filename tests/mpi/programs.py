# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks do: `mpiexec -n 4 python programs.py NAMES SECONDS` runs the functions NAMES.

An assert that fails on one rank ends all of them.
"""

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from contextlib import suppress

import numpy as np
from mpi4py import MPI

import ucx_memh as um

COMM = MPI.COMM_WORLD
ME, SIZE = COMM.Get_rank(), COMM.Get_size()
HOST = COMM.Split_type(MPI.COMM_TYPE_SHARED)
COMPONENT = "ib_mlx5" if HOST.Get_size() == SIZE else "ib"  # what a revocable window takes
HOST.Free()
PAGE = 4096
WAIT = 60  # seconds, of what ought to take none


def raises(kind, call, *words):
    """The error; of exactly this kind, with these words in it."""
    try:
        call()
    except um.MemhError as error:
        assert type(error) is kind, repr(error)
        for word in words:
            assert word in str(error), (word, str(error))
        return error
    raise AssertionError(f"no {kind.__name__}")


def until(what):
    """Wait for something in memory that others write to."""
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


def pattern(writer, reader, length):
    return np.random.default_rng(writer * SIZE + reader).bytes(length)


# ---- data ----


def data():
    """Everybody writes to everybody, itself too, and reads it back."""
    part = 100_000
    with um.mpi.Window(COMM, SIZE * part) as win:
        assert (win.rank, win.size, win.sizes) == (ME, SIZE, (SIZE * part,) * SIZE)
        assert win.revocable and win.md.attr.component == COMPONENT
        assert not any(win.local) and len(win.local) == SIZE * part
        for other in range(SIZE):
            win.put(other, pattern(ME, other, part), ME * part)
        win.fence()
        here = np.frombuffer(win.local, np.uint8)
        for writer in range(SIZE):
            assert here[writer * part :][:part].tobytes() == pattern(writer, ME, part)
        into = [bytearray(part) for _ in range(SIZE)]
        for other in range(SIZE):  # what the rank after us had from it
            win.get(other, into[other], (ME + 1) % SIZE * part)
        win.flush()
        for other in range(SIZE):
            assert into[other] == pattern((ME + 1) % SIZE, other, part)
        win.fence()
        with win.md.mem_reg(np.full(64, 7, np.uint8)) as local:  # a buffer that is used often
            win.put((ME + 1) % SIZE, local, ME * 64)
            win.flush((ME + 1) % SIZE)
        win.fence()
        assert bytes(win.local[(ME - 1) % SIZE * 64 :][:64]) == bytes([7]) * 64
        del here


def many():
    """More operations than a queue holds, without a flush in between."""
    count = 5000
    with um.mpi.Window(COMM, count * 8) as win:
        for i in range(count):
            win.put((ME + 1) % SIZE, i.to_bytes(8, sys.byteorder), i * 8)
        win.fence()
        assert (np.frombuffer(bytes(win.local), np.uint64) == np.arange(count)).all()


def atomics():
    with um.mpi.Window(COMM, 64) as win:
        tickets = [win.fetch_add(0, 1) for _ in range(100)]
        assert len(set(np.concatenate(COMM.allgather(tickets)))) == 100 * SIZE
        win.fence()
        assert int.from_bytes(bytes(win.local[:8]), sys.byteorder) == (100 * SIZE if ME == 0 else 0)
        won = win.compare_swap(1, 0, ME + 1, 8) == 0
        assert sum(COMM.allgather(won)) == 1, "one of them finds the 0"
        win.fence()
        winner = COMM.allgather(won).index(True)
        assert win.compare_swap(1, winner + 1, winner + 1, 8) == winner + 1
        win.fetch_add(ME, 2**64 - 1, 16)
        assert win.fetch_add(ME, 0, 16) == 2**64 - 1


def threads():
    """Several threads of each rank, at all ranks."""
    with um.mpi.Window(COMM, 8 * SIZE * 4 + 8) as win:
        errors = []

        def work(number):
            try:
                for i in range(50):
                    for other in range(SIZE):
                        win.put(other, bytes([i + 1]) * 8, 8 + 8 * (4 * ME + number))
                        win.fetch_add(other, 1)
                        win.flush(other)
            except BaseException as error:
                errors.append(error)

        crew = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        assert errors == []
        win.fence()
        assert int.from_bytes(bytes(win.local[:8]), sys.byteorder) == 50 * SIZE * 4
        assert bytes(win.local[8:]) == bytes([50]) * 8 * SIZE * 4


def sizes():
    """Parts of different sizes, one of them empty."""
    for revocable in (True, False):
        with um.mpi.Window(COMM, 24 * ME, revocable) as win:
            assert win.sizes == tuple(24 * rank for rank in range(SIZE))
            win.put(SIZE - 1, bytes([65 + ME]) * 8, 8 * ME)
            raises(um.RangeError, lambda: win.put(0, b"x"), "bytes at 0 of the 0 bytes that rank 0")
            win.put(0, b"")
            win.fence()
            if ME == SIZE - 1:
                assert bytes(win.local)[:32] == b"".join(bytes([65 + r]) * 8 for r in range(SIZE))


def shared():
    """Without keys of their own cma will do, which then has no atomics and revokes nothing."""
    with um.mpi.Window(COMM, PAGE, revocable=False) as win:
        assert win.md.attr.component == "cma" and "not revocable" in repr(win)
        win.put((ME + 1) % SIZE, bytes([ME + 1]) * 100)
        win.fence()
        assert bytes(win.local[:100]) == bytes([(ME - 1) % SIZE + 1]) * 100
        into = bytearray(100)
        win.get((ME + 1) % SIZE, into)
        win.flush()
        assert into == bytes([ME + 1]) * 100
        for call in (win.revoke, win.regrant, win.refresh):
            raises(um.UnsupportedError, lambda call=call: call(1), "not revocable")
        raises(um.UnsupportedError, lambda: win.fetch_add(1, 1), "cma")
    with um.mpi.Window(COMM, PAGE, revocable=False, backends=["ib_mlx5"]) as win:
        assert win.fetch_add(ME, 5) == 0
        raises(um.UnsupportedError, lambda: win.revoke(1), "not revocable")


# ---- who may ----


def revoke():
    """Rank 0 cuts off rank 2; nobody else notices, and rank 2 only at rank 0."""
    with um.mpi.Window(COMM, PAGE) as win:
        win.put(0, bytes([ME + 1]) * 8, ME * 8)
        win.fence()
        if ME == 0:
            win.revoke(2)
            raises(um.RevokedError, lambda: win.revoke(2))
        COMM.Barrier()
        for _ in range(50):
            if ME != 2:
                win.put(0, bytes([ME + 101]) * 8, ME * 8)
                win.fetch_add(0, 1, 512)
                win.flush()
            for other in range(1, SIZE):
                win.put(other, bytes([ME + 1]) * 8, ME * 8)
                win.fetch_add(other, 1, 512)
        if ME == 2:
            with suppress(um.RevokedError):  # the first may have been refused by now
                for i in range(3):
                    win.put(0, b"LATE" * 2, 16 + i)
            raises(um.RemoteAccessError, lambda: win.flush(0))
            win.flush()  # it has been said
            refused = (
                lambda: win.put(0, b"x"),
                lambda: win.get(0, bytearray(1)),
                lambda: win.fetch_add(0, 1),
                lambda: win.compare_swap(0, 0, 1),
            )
            for call in refused:
                raises(um.RevokedError, call, "rank 0 has revoked this rank's key")
        win.fence()
        words = np.frombuffer(bytes(win.local[: SIZE * 8]), np.uint8)[::8].tolist()
        assert words == ([101, 102, 3, 104] if ME == 0 else [1, 2, 3, 4])
        adds = int.from_bytes(bytes(win.local[512:520]), sys.byteorder)
        assert adds == 50 * (SIZE - 1 if ME == 0 else SIZE)


def revoked_atomic():
    """The first that a rank learns of it may be an atomic, or what comes after a put."""
    with um.mpi.Window(COMM, PAGE) as win:
        if ME == 0:
            for other in (1, 2):
                win.revoke(other)
        COMM.Barrier()
        if ME == 1:
            raises(um.RemoteAccessError, lambda: win.fetch_add(0, 1))
            raises(um.RevokedError, lambda: win.fetch_add(0, 1))
            win.flush()
        if ME == 2:
            win.put(0, b"x" * 8)
            raises(um.RevokedError, lambda: win.fetch_add(0, 1))
            raises(um.RemoteAccessError, win.flush)
        win.fence()
        assert not any(win.local)


def each_other():
    """All cut off each other and still reach themselves; then all is as before."""
    others = [rank for rank in range(SIZE) if rank != ME]
    with um.mpi.Window(COMM, PAGE) as win:
        for other in others:
            win.revoke(other)
        COMM.Barrier()
        for other in others:
            win.put(other, b"never")
        error = raises(um.RemoteAccessError, win.flush)
        assert len(error.__notes__) == SIZE - 2
        win.put(ME, b"mine")
        win.fence()
        assert bytes(win.local[:5]) == b"mine\0"
        for low in range(SIZE):  # in the same order everywhere, each pair both ways
            for high in range(low + 1, SIZE):
                for owner, peer in ((low, high), (high, low)):
                    if owner == ME:
                        win.regrant(peer, WAIT)
                    elif peer == ME:
                        win.refresh(owner, WAIT)
        for other in others:
            win.put(other, bytes([ME + 1]) * 8, 8 * ME)
        win.fence()
        assert all(bytes(win.local[8 * r :][:8]) == bytes([r + 1]) * 8 for r in others)
        win.revoke(ME)
        win.put(ME, b"not mine")
        raises(um.RemoteAccessError, win.flush)
        win.regrant(ME, WAIT)
        win.put(ME, b"mine now")
        win.fence()
        assert bytes(win.local[:8]) == b"mine now"


def regrant():
    """Revoked and let in again, ten times; others go on meanwhile, with no word to them."""
    with um.mpi.Window(COMM, PAGE) as win:
        for turn in range(10):
            if ME == 0:
                win.revoke(1)
                COMM.send(turn, 1)
                win.regrant(1, WAIT)
                COMM.recv(source=1)
                assert bytes(win.local[:8]) == bytes([turn + 1]) * 8
            elif ME == 1:
                COMM.recv(source=0)
                if turn % 2:  # it may have noticed or not
                    win.put(0, b"LATE" * 2)
                    raises(um.RemoteAccessError, win.flush)
                win.refresh(0, WAIT)
                win.put(0, bytes([turn + 1]) * 8)
                win.flush(0)
                COMM.send(turn, 0)
            else:
                for _ in range(20):
                    win.fetch_add(0, 1, 8 * ME)
        win.fence()
        if ME == 0:
            assert np.frombuffer(bytes(win.local[16:32]), np.uint64).tolist() == [200, 200]


def renew():
    """A regrant without a revoke changes the key: what was flushed is there, the old key dead."""
    with um.mpi.Window(COMM, PAGE) as win:
        if ME == 0:
            raises(um.TimedOutError, lambda: win.regrant(1, 0.05), "nothing from rank 1")
        COMM.Barrier()
        if ME == 1:
            win.put(0, b"before", 0)  # it was not harmed
            win.flush()
            win.put(0, b"under way", 16)
            raises(um.TimedOutError, lambda: win.refresh(0, 0.05), "nothing from rank 0")
            win.put(0, b"still", 32)  # while it waits for the new one
            win.flush()  # or it would be under way when the old key ends
        COMM.Barrier()
        if ME == 0:
            win.regrant(1, WAIT)
        COMM.Barrier()
        if ME == 1:
            win.put(0, b"LATE", 48)  # with the old key
            raises(um.RemoteAccessError, lambda: win.flush(0))
            win.refresh(0, WAIT)  # goes on waiting for what it asked for
            win.put(0, b"after", 64)
        win.fence()
        if ME == 0:
            words = bytes(win.local[:80]).replace(b"\0", b" ").split()
            assert words == [b"before", b"under", b"way", b"still", b"after"], words


def failed_regrant():
    """What one regrant failed of is not told by the next one, to this rank or to another."""

    class Full:
        def derive(self):
            raise um.NoMemoryError("no key left")

    with um.mpi.Window(COMM, PAGE) as win:
        base = win._base
        for turn in range(3):
            full = turn < 2
            if ME == 0:
                win._base = Full() if full else base
                for rank in (0, 1):
                    if full:
                        raises(um.NoMemoryError, lambda r=rank: win.regrant(r, WAIT), "no key left")
                    else:
                        win.regrant(rank, WAIT)
            elif ME == 1 and full:
                raises(um.NoMemoryError, lambda: win.refresh(0, WAIT), "rank 0: no key left")
            elif ME == 1:
                win.refresh(0, WAIT)
            win.put(0, bytes([turn + 1]) * 8, 8 * ME)  # the key that it has
            win.fence()
        win._base = base
        if ME == 0:
            assert bytes(win.local[: 8 * SIZE]) == bytes([3]) * 8 * SIZE


def late():
    """A stream of writes is under way when it is revoked: no byte changes afterwards."""
    length, chunk = 1 << 20, 1 << 16
    for _ in range(3):
        with um.mpi.Window(COMM, length) as win:
            if ME == 1:
                block = win.md.mem_reg(np.full(chunk, 0xA5, np.uint8))
                turn = 0
                try:
                    while True:
                        win.put(0, block, turn * chunk % length)
                        win.put(2, block, turn * chunk % length)
                        turn += 1
                        if turn % 16 == 0:
                            win.flush()
                            win.fetch_add(0, 1, length - 8)
                except (um.RemoteAccessError, um.RevokedError):
                    pass
                block.dereg()
                win.put(2, b"goes on")
                win.flush(2)
            if ME == 0:
                until(lambda: any(win.local[length - 8 :]))
                win.local[:] = bytes(length)
                win.revoke(1)
                there = bytes(win.local)
                win.local[:chunk] = bytes(chunk)
                time.sleep(0.05)
                assert bytes(win.local[chunk:]) == there[chunk:] and not any(win.local[:chunk])
                win.local[chunk:] = bytes(length - chunk)
            try:
                win.fence()
            except um.RemoteAccessError:
                assert ME == 1
            if ME == 0:
                assert not any(win.local)
            if ME == 2:
                assert bytes(win.local[:7]) == b"goes on"


# ---- bad input ----


def unsupported():
    def make():
        um.mpi.Window(COMM, PAGE, backends=("cma", "ib"))

    error = raises(um.UnsupportedError, make, "cma: ", "no derived keys", "; ib: ")
    (reason,) = [info.reason for info in um.components() if info.name == "ib"]
    assert reason in str(error)
    # One rank has no device: nobody can, and all know why.
    real = um.open_md

    def open_md(spec, **config):
        if ME == 2 and str(spec).startswith("ib_mlx5"):
            raise um.NoDeviceError("it was pulled out", op="open_md")
        return real(spec, **config)

    um.open_md = open_md
    for revocable in (True, False):
        if revocable:
            error = raises(um.UnsupportedError, lambda: um.mpi.Window(COMM, PAGE))
            for word in ("ib_mlx5: rank 2: it was pulled out", "; ib: ", "; cma: "):
                assert word in str(error), str(error)
        else:
            um.mpi.Window(COMM, PAGE, revocable=False).close()
    um.open_md = real
    # A rank that does not listen is found before the window is used.
    connect, reach = um.mpi.Window._connect, um.mpi.Window._reach
    if ME == 2:
        um.mpi.Window._connect = um.mpi.Window._reach = lambda *args: None
    call = lambda: um.mpi.Window(COMM, PAGE, backends=["ib_mlx5"])  # noqa: E731
    raises(um.UnsupportedError, call, "ib_mlx5: rank 0: ")
    if ME == 2:
        um.mpi.Window._connect, um.mpi.Window._reach = connect, reach
    um.mpi.Window(COMM, PAGE).close()


def one_fails():
    """What is wrong on one rank is wrong everywhere, and nothing stays."""
    for wrong in (-1, "much", None, 2.5, 1 << 62):
        error = raises(
            um.InvalidParamError, lambda w=wrong: um.mpi.Window(COMM, w if ME == 1 else PAGE)
        )
        assert ME == 1 or error.context["rank"] == 1
    error = raises(um.NoMemoryError, lambda: um.mpi.Window(COMM, 1 << 60 if ME == 3 else PAGE))
    assert ME == 3 or error.context["rank"] == 3
    different = (
        lambda: um.mpi.Window(COMM, PAGE, revocable=ME != 0),
        lambda: um.mpi.Window(COMM, PAGE, backends=["ib_mlx5"] if ME else None),
    )
    for call in different:
        raises(um.InvalidParamError, call, "not the same on all ranks")
    # What goes wrong in asking, too, and no rank waits for the others.
    neither = np.array([True, False])
    error = raises(
        um.InvalidParamError, lambda: um.mpi.Window(COMM, PAGE, neither if ME == 1 else True)
    )
    assert ME == 1 or error.context["rank"] == 1

    class Once:
        asked = 0

        def __index__(self):
            self.asked += 1
            assert self.asked == 1
            return PAGE

    um.mpi.Window(COMM, Once() if ME == 1 else PAGE).close()
    real = um.components

    def components():
        if ME == 3:
            raise OSError("no folder of plugins")
        return real()

    um.components = components
    try:
        um.mpi.Window(COMM, PAGE)
    except OSError as error:
        words = "no folder of plugins" if ME == 3 else "rank=3"
        assert words in str(error), str(error)
    else:
        raise AssertionError("no OSError")
    um.components = real
    for names in ("ib_mlx5", [], [1], ["nothing"], 5):
        raises(um.InvalidParamError, lambda n=names: um.mpi.Window(COMM, PAGE, backends=n))
    freed = COMM.Dup()
    freed.Free()
    one = COMM.Split(ME % 2, ME)  # of every second rank
    inter = one.Create_intercomm(0, COMM, 1 - ME % 2)
    wrong = ((None, "None"), (freed, "freed"), (MPI.COMM_NULL, "freed"), (inter, "Intercomm"))
    for comm, word in (*wrong, ("world", "'world'")):
        try:
            um.mpi.Window(comm, PAGE)
        except TypeError as error:
            assert "intracommunicator" in str(error) and word in str(error), error
        else:
            raise AssertionError("no TypeError")
    inter.Free()
    # Communicators that are not all of the world, at the same time.
    with um.mpi.Window(one, 8) as few, um.mpi.Window(MPI.COMM_SELF, 8) as alone:
        few.put(1 - few.rank, bytes([ME + 1]) * 8)
        alone.put(0, bytes([ME + 1]) * 8)
        few.fence()
        alone.fence()
        assert bytes(few.local) == bytes([(ME ^ 2) + 1]) * 8
        assert bytes(alone.local) == bytes([ME + 1]) * 8
    one.Free()
    um.mpi.Window(COMM, PAGE).close()


def arguments():
    with um.mpi.Window(COMM, PAGE) as win:
        for rank in (-1, SIZE, "0", None, 1.0):
            calls = (
                lambda r=rank: win.put(r, b"x"),
                lambda r=rank: win.get(r, bytearray(1)),
                lambda r=rank: win.fetch_add(r, 1),
                lambda r=rank: win.compare_swap(r, 0, 1),
                lambda r=rank: win.revoke(r),
                lambda r=rank: win.regrant(r),
                lambda r=rank: win.refresh(r),
            )
            for call in calls:
                raises(um.InvalidParamError, call, "rank")
        raises(um.InvalidParamError, lambda: win.flush("0"), "rank")
        wrong = (
            lambda: win.put(1, 5),
            lambda: win.put(1, b"x", "0"),
            lambda: win.get(1, 5),
            lambda: win.fetch_add(1, -1),
            lambda: win.fetch_add(1, 2**64),
            lambda: win.fetch_add(1, 1, 4),
            lambda: win.refresh(ME),
        )
        for call in wrong:
            raises(um.InvalidParamError, call)
        raises(um.AccessError, lambda: win.get(1, b"read only"))
        words = "of the 4096 bytes that rank 1 has"
        for offset in (-1, PAGE, PAGE - 7, 2**64, -(2**70)):
            raises(um.RangeError, lambda o=offset: win.put(1, b"x" * 8, o), words)
        win.fence()
        assert not any(win.local)
    raises(um.ClosedError, lambda: win.put(1, b"x"))
    raises(um.ClosedError, lambda: win.local)
    raises(um.ClosedError, lambda: win.md)
    for call in (win.flush, win.fence, win.__enter__):
        raises(um.ClosedError, call)
    win.close()
    assert win.closed and repr(win) == "<Window closed>"


def exception():
    """It comes out, no rank waits for another, and what was left is freed with the next one."""
    comm = COMM.Dup()
    left = []
    for _ in range(3):
        try:
            with um.mpi.Window(comm, PAGE) as win:
                win.put((ME + 1) % SIZE, b"x")
                raise KeyError(ME)
        except KeyError:
            assert win.closed
        assert [each == MPI.COMM_NULL for each in left] == [True] * len(left)
        win.close()
        left.append(win._comm)
    assert left[-1] != MPI.COMM_NULL
    with um.mpi.Window(COMM, PAGE):  # over another communicator
        assert left[-1] != MPI.COMM_NULL
    raises(um.InvalidParamError, lambda: um.mpi.Window(comm, -1))
    assert left[-1] == MPI.COMM_NULL
    win = um.mpi.Window(comm, PAGE)
    if ME == 1:  # alone: the others do not free what they still use
        win.__exit__(KeyError, KeyError(), None)
    um.mpi.Window(comm, PAGE).close()
    assert win._comm != MPI.COMM_NULL
    if ME != 1:
        win.__exit__(KeyError, KeyError(), None)
    um.mpi.Window(comm, PAGE).close()
    assert win._comm == MPI.COMM_NULL
    comm.Free()


def lost():
    """close() says what no flush has said, when all is closed."""
    win = um.mpi.Window(COMM, PAGE)
    if ME == 0:
        win.revoke(1)
    COMM.Barrier()
    if ME == 1:
        win.put(0, b"x")
        raises(um.RemoteAccessError, win.close)
    win.close()
    assert win.closed


def cycles():
    """Windows come and go, with revocations, regrants and failures: nothing stays behind."""

    def cycle():
        with um.mpi.Window(COMM, 1 << 20) as win:
            win.put((ME + 1) % SIZE, b"x")
            win.fence()
            if ME == 0:
                win.revoke(1)
                win.regrant(1, WAIT)
                win.revoke(2)
            if ME == 1:
                win.refresh(0, WAIT)
            win.local[:] = bytes([1]) * (1 << 20)
        raises(um.NoMemoryError, lambda: um.mpi.Window(COMM, 1 << 60 if ME == 3 else PAGE))

    def held():
        gc.collect()
        with open("/proc/self/status") as status:
            (rss,) = [int(line.split()[1]) for line in status if line.startswith("VmRSS")]
        with open("/proc/self/maps") as maps:
            count = sum(1 for _ in maps)
        return len(os.listdir("/proc/self/fd")), count, len(os.listdir("/proc/self/task")), rss

    for _ in range(10):
        cycle()
    before = held()
    for _ in range(40):
        cycle()
    after = held()
    assert after[0] <= before[0] and after[2] <= before[2], (before, after)
    assert after[1] <= before[1] + 10, (before, after)
    assert after[3] < before[3] + 8192, (before, after)  # KiB; 40 windows are 40960


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    try:
        assert SIZE == 4
        for name in sys.argv[1].split(","):
            globals()[name]()
            COMM.Barrier()
            if ME == 0:
                print(f"{name} done", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        COMM.Abort(1)
