# SPDX-License-Identifier: BSD-3-Clause
"""A window of memory over an MPI communicator, with a key of its own for each rank.

MPI carries addresses and keys, and nothing else: data moves by the endpoints of ucx_memh.  Each
rank registers its part once and derives a key for every rank, so that it can cut off one of them,
in constant time, while the others go on.  Needs mpi4py, which the extra `mpi` brings; importing
this module does not load it, the first Window does.
"""

import mmap
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import ucx_memh as um
from ucx_memh.errors import (
    BusyError,
    ClosedError,
    FlushedError,
    InvalidParamError,
    MemhError,
    NoMemoryError,
    RangeError,
    RemoteAccessError,
    RevokedError,
    TimedOutError,
    UnsupportedError,
    error_from_status,
    status_name,
)
from ucx_memh.flags import MdFlag, MemFlag, MemhState, Status

if TYPE_CHECKING:
    from mpi4py import MPI
    from typing_extensions import Buffer

    from ucx_memh.core import Endpoint, Md, Memh, Operation, Rkey

__all__ = ["Window"]

ASK, OFFER = 1, 2  # tags, on a communicator of our own
# So many operations may be under way before one looks which are done and lets go of their buffers.
LOOK = 64
# Reasons that speak of a backend, not of the call: the next one is tried.
ELSEWHERE = frozenset({Status.NO_DEVICE, Status.UNSUPPORTED, Status.UNREACHABLE})
NEAR = ("ib_mlx5", "ib")  # in the order of preference, all ranks on one host
FAR = ("ib", "ib_mlx5")

_left_key: int | None = None  # MPI's name for the attribute that is a communicator's _Left


class _Left:
    """What a communicator remembers of the windows made over it.

    Whoever leaves a window by an exception waits for nobody, and to free its communicator takes
    all ranks.  They are together again when they make the next window.
    """

    def __init__(self) -> None:
        self.made = 0  # the same number on all ranks
        self.comms: dict[int, MPI.Intracomm] = {}  # not freed yet, by the number of the window

    @classmethod
    def of(cls, comm: "MPI.Intracomm") -> "_Left":
        global _left_key
        if _left_key is None:
            _left_key = comm.Create_keyval()
        left: _Left | None = comm.Get_attr(_left_key)
        if left is None:
            left = cls()
            comm.Set_attr(_left_key, left)
        return left

    def free(self, everywhere: Sequence[Sequence[int]]) -> None:
        """Those that every rank has left, in the same order; collective."""
        for number in sorted(set.intersection(*map(set, everywhere))):
            self.comms.pop(number).Free()


Failure = tuple[int, str]  # status and words: what ranks tell each other of an error


class _Rank:
    """One rank as we see it: our way to its memory, and its way to ours."""

    def __init__(self) -> None:
        # Two connections for two ways: a refusal takes one down, and ours must not go with theirs.
        self.ours: Endpoint | None = None
        self.theirs: Endpoint | None = None
        self.before: Endpoint | None = None  # what `theirs` was before the last regrant
        self.rkey: Rkey | None = None  # the key that it gave us
        self.grant: Memh | None = None  # what we gave it
        self.address = 0
        self.nbytes = 0
        self.revoked = False  # it has refused us
        self.asked: Endpoint | None = None  # will be `ours` when refresh() has its answer
        self.pending: deque[Operation] = deque()
        self.error: MemhError | None = None  # of an operation, until a flush says so
        self.lock = threading.Lock()  # of whoever waits for what is pending


class Window:
    """`nbytes` bytes of this rank's memory, open to all ranks of `comm`; collective.

    `nbytes` may differ from rank to rank and be 0; the memory is new and zero.  `revocable` says
    that each rank gets a derived key, which `revoke` ends; it takes a backend that can derive:
    ib_mlx5 (softmlx5 where there is no adapter) before ib on one host, ib before ib_mlx5 across
    hosts.  Without it, all ranks share the region's key, and cma, on one host, comes first.
    `backends` names others to try, in their order: "ib_mlx5", "ib/rxe0".  The first is taken with
    which each rank reaches each.

    It is made on all ranks or on none, and then every rank raises: UnsupportedError, none of the
    backends fits, with the reason of each; InvalidParamError, an argument is wrong or not the same
    everywhere; what Md.mem_reg, derive and connect raise.  A rank where nothing was wrong raises
    what the first other one has, its number in `.context["rank"]`.  TypeError, of this rank alone
    and before anything is sent: `comm` is no intracommunicator.

    A context manager.  Left by an exception, it gives back what is this rank's and waits for
    nobody: the exception is to be seen, not hidden by a wait for ranks that wait elsewhere.  Its
    duplicate of `comm`, which takes all ranks to free, is freed when they make the next window
    over `comm`.

    Any thread may call put, get, fetch_add, compare_swap, flush and revoke; what talks to other
    ranks (making it, fence, regrant, refresh, close) one thread at a time, as MPI was initialised
    for.  All waits are without the GIL, those inside MPI too.
    """

    def __init__(
        self,
        comm: "MPI.Intracomm",
        nbytes: int,
        revocable: bool = True,
        *,
        backends: Sequence[str] | None = None,
    ) -> None:
        try:
            from mpi4py import MPI
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "ucx_memh.mpi needs mpi4py: install ucx_memh[mpi]", name="mpi4py"
            ) from error
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            what = "one that was freed, or never was" if comm == MPI.COMM_NULL else repr(comm)
            raise TypeError(f"want an intracommunicator of mpi4py, not {what}")
        self._closed = True  # until it is made
        self._left = _Left.of(comm)
        self._comm = comm.Dup()
        self._left.made += 1
        self._number = self._left.made
        self._sent: list[MPI.Request] = []
        self._ranks: list[_Rank] = []
        self._md: Md | None = None
        self._base: Memh | None = None
        self._memory: mmap.mmap | None = None
        try:
            self._make(MPI.COMM_TYPE_SHARED, nbytes, revocable, backends)
        except BaseException:
            self._release()
            self._comm.Free()  # all ranks are here, or one was interrupted
            raise
        self._closed = False

    # ---- what it is ----

    def __repr__(self) -> str:
        if self._closed:
            return "<Window closed>"
        how = "revocable" if self._revocable else "not revocable"
        return f"<Window {self.md.attr.component}, rank {self.rank} of {self.size}, {how}>"

    @property
    def rank(self) -> int:
        """This process's number in the communicator."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each rank's part."""
        return self._sizes

    @property
    def revocable(self) -> bool:
        """Whether each rank has a key of its own."""
        return self._revocable

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def md(self) -> "Md":
        """The domain that was chosen: register buffers with it that are used often.

        The window's own, which closes it.  ClosedError.
        """
        self._check()
        assert self._md is not None
        return self._md

    @property
    def local(self) -> memoryview:
        """This rank's part, writable, for NumPy's frombuffer too.  ClosedError.

        Others write there when they please: look after a fence.  A view that was taken before
        close() stays memory, of this process alone.
        """
        self._check()
        return self._view()

    # ---- operations ----

    def put(self, rank: int, data: "Buffer | Memh", offset: int = 0) -> None:
        """Start writing `data` at byte `offset` of the rank's part; flush() completes it.

        `data` must stay as it is until then; it is held meanwhile.  A Memh of `md` is read
        whole, and spares registering a large buffer each time.

        RevokedError: the rank refuses us since we tried; refresh() there, after its regrant().
        RangeError, AccessError, InvalidParamError: nothing was sent.  FlushedError: the
        connection has failed.  ClosedError.
        """
        peer = self._peer(rank)
        assert peer.ours is not None
        self._start(peer, rank, peer.ours.put_nb, offset, data)

    def get(self, rank: int, into: "Buffer | Memh", offset: int = 0) -> None:
        """Start reading from byte `offset` of the rank's part, as much as `into` is long.

        The bytes are there after flush().  Otherwise as put().
        """
        peer = self._peer(rank)
        assert peer.ours is not None
        self._start(peer, rank, peer.ours.get_nb, offset, into)

    def fetch_add(self, rank: int, value: int, offset: int = 0) -> int:
        """Add to the 64-bit number at byte `offset`, a multiple of 8; returns what it was.

        Modulo 2^64, `value` 0 to 2^64-1, in the machine's byte order; returns when it is done.
        RemoteAccessError: the rank has revoked our key, and this was refused by its device;
        then RevokedError.  UnsupportedError: the backend has no atomics.  Otherwise as put().
        """
        peer = self._peer(rank)
        assert peer.ours is not None
        return self._fetch(peer, rank, peer.ours.fetch_add_nb, offset, value)

    def compare_swap(self, rank: int, expect: int, value: int, offset: int = 0) -> int:
        """Write `value` there if it is `expect`; returns what it was.  Otherwise as fetch_add()."""
        peer = self._peer(rank)
        assert peer.ours is not None
        return self._fetch(peer, rank, peer.ours.compare_swap_nb, offset, expect, value)

    def flush(self, rank: int | None = None) -> None:
        """Wait until all that was started, at `rank` or at all, is done there and here.

        Raises the first error of an operation since the last flush: RemoteAccessError, the rank
        has revoked our key, and what came after is lost too; FlushedError, the connection failed.
        Of several ranks the first one's, with a note for each other.  A put that failed may have
        written a prefix.
        """
        self._check()
        chosen = self._ranks if rank is None else [self._peer(rank)]
        errors: list[MemhError] = []
        for peer in chosen:
            self._drain(peer)
            error, peer.error = peer.error, None
            if error is not None:
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and {other}")
            raise errors[0]

    def fence(self) -> None:
        """flush(), then wait for all ranks to be here: what any of them put is in `local`.

        Collective.  What flush() raises comes after that wait, so no rank waits for one that had
        an error.
        """
        self._check()
        try:
            self.flush()
        finally:
            self._comm.Barrier()

    # ---- who may ----

    def revoke(self, rank: int) -> None:
        """End the key that `rank` holds to this rank's memory; nobody else notices.

        Local, in constant time at any size, and `rank` need not take part.  When it returns no
        byte is read or written by that key any more, whatever was under way.

        RevokedError: it was already; UnsupportedError: the window is not revocable;
        InvalidParamError: there is no such rank.  If the device refuses, its error: the key is
        being revoked and this may be repeated.
        """
        self._grant(rank, "revoke").invalidate()

    def regrant(self, rank: int, timeout: float | None = None) -> None:
        """Hand `rank` a new key, which takes its refresh(this rank): a matched pair, as send and
        receive are.

        Waits for the other side to ask, `timeout` seconds at most (None: as long as it takes),
        and returns with everything ready on this side.  A key that `rank` still has ends: this
        is also how to change keys.  Of this rank itself it needs no refresh.

        TimedOutError: nobody asked; nothing was changed.  What revoke, derive and connect raise:
        the other side raises it too, and the old key is as it was; only if it is the old key that
        the device would not end, nobody can say whether it works: revoke(rank) tries again.
        """
        self._grant(rank, "regrant")
        if rank != self._rank:
            self._offer(rank, timeout)
            return
        # Without messages: of a failure in between one would be left for the next time.
        assert self._md is not None
        peer = self._ranks[rank]
        self._drain(peer)
        new = self._md.endpoint()
        try:
            self._use(peer, new, *self._renew(peer, new.address))
        except BaseException:
            new.close()
            raise

    def refresh(self, rank: int, timeout: float | None = None) -> None:
        """Ask for a new key to the memory of `rank`, and wait for its regrant(this rank).

        First waits for what was started there; if some of it failed, the next flush says so.

        TimedOutError: no answer in `timeout` seconds (None: as long as it takes); call it again
        and it goes on waiting.  What the other side's regrant raised; UnsupportedError: the
        window is not revocable; InvalidParamError: there is no such rank, or it is this one.
        """
        peer = self._peer(rank)
        if not self._revocable:
            raise UnsupportedError("the window is not revocable", op="refresh")
        if rank == self._rank:
            raise InvalidParamError("regrant() of this rank itself needs no refresh", op="refresh")
        if peer.asked is None:
            self._ask(peer, rank)
        self._take(rank, timeout)

    # ---- the end ----

    def close(self) -> None:
        """flush(), wait for all ranks, then give everything back; again: nothing.  Collective.

        What flush() raises comes last, when all is closed.
        """
        if self._closed:
            return
        error: MemhError | None = None
        try:
            self.flush()
        except MemhError as failed:
            error = failed
        self._comm.Barrier()
        self._closed = True
        self._release()
        self._comm.Free()
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._release()
            self._left.comms[self._number] = self._comm  # to free it takes the others

    # ---- making it ----

    def _make(
        self, one_host: int, nbytes: int, revocable: bool, backends: Sequence[str] | None
    ) -> None:
        comm = self._comm
        self._rank: int = comm.Get_rank()
        self._left.free(comm.allgather(tuple(self._left.comms)))
        # Asked once: whatever they do when they are asked must not happen on one rank alone.
        given: list[tuple[int, bool, tuple[str, ...] | None]] = []
        self._agree("", lambda: given.append(_arguments(nbytes, revocable, backends)))
        sizes, *same = zip(*comm.allgather(given[0]), strict=True)
        if any(len(set(each)) > 1 for each in same):
            raise InvalidParamError(
                "revocable and backends are not the same on all ranks", op="Window"
            )
        self._sizes: tuple[int, ...] = sizes
        _, self._revocable, backends = given[0]
        reasons: list[str] = []
        for name in self._candidates(one_host, backends):
            try:
                self._try(name, self._sizes[self._rank])
                return
            except MemhError as error:
                self._release()
                # All ranks have the same one, so all go on or none does.
                if error.status not in ELSEWHERE:
                    raise
                where = error.context.get("rank")
                rank = "" if where is None else f"rank {where}: "
                reasons.append(f"{name}: {rank}{error.detail or status_name(error.status)}")
        wanted = "can revoke and reaches all ranks" if revocable else "reaches all ranks"
        raise UnsupportedError(f"no backend {wanted}: {'; '.join(reasons)}", op="Window")

    def _candidates(self, one_host: int, backends: Sequence[str] | None) -> list[str]:
        """Names, in the same order on all ranks; also those that will not do, for their reasons."""
        if backends is not None:
            return list(backends)
        shared = self._comm.Split_type(one_host)
        near = min(self._comm.allgather(shared.Get_size())) == self._comm.Get_size()
        shared.Free()
        found: list[str] = []
        self._agree("", lambda: found.extend(info.name for info in um.components()))
        known = self._comm.allgather(found)
        first = NEAR if near else FAR
        order = [*first, "cma"] if self._revocable or not near else ["cma", *first]
        others = sorted({name for names in known for name in names} - set(order))
        return [name for name in [*order, *others] if any(name in names for names in known)]

    def _try(self, name: str, nbytes: int) -> None:
        """Everything by this backend, or the same status raised on all ranks."""
        everyone = range(self._comm.Get_size())
        self._agree(name, lambda: self._open(name))
        self._ranks = [_Rank() for _ in everyone]
        parts: list[tuple[bytes, bytes, bytes, int]] = []
        self._agree(name, lambda: parts.extend(self._grants(nbytes)))
        theirs = self._comm.alltoall(parts)
        # Our way in is their way out: the other address of the two.
        self._agree(name, lambda: self._connect(theirs))
        # Nobody sends before everybody listens: each _agree is also a barrier.
        self._agree(name, self._reach)

    def _open(self, name: str) -> None:
        self._md = um.open_md(name)
        flags = self._md.attr.flags
        if self._revocable and MdFlag.REG_DERIVED not in flags:
            raise UnsupportedError("it has no derived keys, so none could be revoked alone")
        if MdFlag.ENDPOINT not in flags:
            raise UnsupportedError("it moves no data")

    def _grants(self, nbytes: int) -> list[tuple[bytes, bytes, bytes, int]]:
        """Register our part; for each rank two addresses, a key, and where our part is."""
        assert self._md is not None
        try:
            self._memory = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise NoMemoryError(f"no {nbytes} bytes: {error.strerror}", op="Window") from None
        # A base that others use itself grants all that its domain can, by its default.
        flags = MemFlag.DERIVED_ONLY if self._revocable else None
        self._base = self._md.mem_reg(self._view(), flags)
        parts = []
        for peer in self._ranks:
            peer.ours, peer.theirs = self._md.endpoint(), self._md.endpoint()
            key = self._key(peer)
            parts.append((peer.ours.address, peer.theirs.address, key, self._base.address))
        return parts

    def _key(self, peer: _Rank) -> bytes:
        assert self._base is not None
        if not self._revocable:
            return self._base.mkey_pack()
        peer.grant = self._base.derive()
        return peer.grant.mkey_pack()

    def _connect(self, parts: list[tuple[bytes, bytes, bytes, int]]) -> None:
        assert self._md is not None
        for rank, (ours, theirs, key, address) in enumerate(parts):
            peer = self._ranks[rank]
            assert peer.ours is not None and peer.theirs is not None
            peer.theirs.connect(ours)
            peer.ours.connect(theirs)
            peer.rkey = self._md.rkey_unpack(key)
            peer.address, peer.nbytes = address, self._sizes[rank]

    def _reach(self) -> None:
        """Read a byte of every rank: a device connects to an address where nobody is, too."""
        found = bytearray(len(self._ranks))
        reads = []
        for rank, peer in enumerate(self._ranks):
            if peer.nbytes:
                assert peer.ours is not None and peer.rkey is not None
                into = memoryview(found)[rank : rank + 1]
                reads.append(peer.ours.get_nb(peer.rkey, peer.address, into))
        for read in reads:
            read.wait()

    def _agree(self, component: str, act: Callable[[], object]) -> None:
        """Do it on all ranks; if it failed on one, raise on each.

        If a failure is of the call and not of the backend, on any rank, this is what all raise.
        """
        mine: BaseException | None = None
        try:
            act()
        except BaseException as error:  # a signal's too: the others wait here
            mine = error.with_traceback(None)  # it would hold what is being taken down
        told = self._comm.allgather(None if mine is None else _failure(mine))
        failed = {rank: failure for rank, failure in enumerate(told) if failure is not None}
        if not failed:
            return
        serious = {r: f for r, f in failed.items() if f[0] not in ELSEWHERE}
        if serious and self._rank in serious:
            assert mine is not None
            raise mine
        rank, (status, words) = next(iter((serious or failed).items()))
        raise error_from_status(status, "Window", component, words, rank=rank)

    # ---- operations ----

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the window was closed", op="Window")

    def _view(self) -> memoryview:
        assert self._memory is not None
        return memoryview(self._memory)[: self._sizes[self._rank]]

    def _peer(self, rank: int) -> _Rank:
        self._check()
        try:
            number = operator.index(rank)
        except TypeError:
            words = f"a rank is a number, not {type(rank).__name__}"
            raise InvalidParamError(words, op="Window") from None
        if not 0 <= number < len(self._ranks):
            words = f"ranks are 0 to {len(self._ranks) - 1}, not {number}"
            raise InvalidParamError(words, op="Window")
        return self._ranks[number]

    def _grant(self, rank: int, op: str) -> "Memh":
        grant = self._peer(rank).grant
        if grant is None:
            raise UnsupportedError("the window is not revocable", op=op)
        return grant

    def _start(
        self, peer: _Rank, rank: int, call: "Callable[..., Operation]", offset: int, *args: Any
    ) -> None:
        operation = self._begin(peer, rank, call, offset, *args)
        peer.pending.append(operation)
        if len(peer.pending) >= LOOK:
            self._reap(peer)

    def _fetch(
        self, peer: _Rank, rank: int, call: "Callable[..., Operation]", offset: int, *args: Any
    ) -> int:
        operation = self._begin(peer, rank, call, offset, *args)
        try:
            value = operation.wait()
        except MemhError as error:
            if isinstance(error, RemoteAccessError):
                peer.revoked = True
            self._explain(peer, rank, error)
            raise
        assert value is not None
        return value

    def _begin(
        self, peer: _Rank, rank: int, call: "Callable[..., Operation]", offset: int, *args: Any
    ) -> "Operation":
        if peer.revoked:
            raise self._refused(rank)
        try:
            offset = operator.index(offset)
        except TypeError:
            words = f"offset is a number of bytes, not {type(offset).__name__}"
            raise InvalidParamError(words, op="Window") from None
        if not 0 <= offset <= peer.nbytes:  # the sum might be no address, or another one's
            words = f"offset {offset} of the {peer.nbytes} bytes that rank {rank} has"
            raise RangeError(words, op="Window")
        address = peer.address + offset
        while True:
            try:
                return call(peer.rkey, address, *args)
            except RangeError as error:
                length = error.context.get("length", "its")
                raise RangeError(
                    f"{length} bytes at {offset} of the {peer.nbytes} bytes that rank {rank} has",
                    op=error.op,
                    component=error.component,
                ) from None
            except BusyError:  # a full queue
                if not peer.pending:
                    raise
                with peer.lock:
                    self._finish(peer)
            except FlushedError as error:
                self._explain(peer, rank, error)
                raise

    def _explain(self, peer: _Rank, rank: int, error: MemhError) -> None:
        """A connection that failed: was it because the rank has revoked our key?"""
        if isinstance(error, FlushedError):
            self._drain(peer)
            if peer.revoked:
                raise self._refused(rank) from error

    def _refused(self, rank: int) -> RevokedError:
        words = f"rank {rank} has revoked this rank's key: its regrant() and refresh() here"
        return RevokedError(f"{words} give a new one", op="Window", rank=rank)

    def _reap(self, peer: _Rank) -> None:
        """Let go of what is done, without a wait: not for another thread's flush, either."""
        if not peer.lock.acquire(blocking=False):
            return
        try:
            while peer.pending and peer.pending[0].done:
                self._finish(peer)
        finally:
            peer.lock.release()

    def _drain(self, peer: _Rank) -> None:
        with peer.lock:
            while peer.pending:
                self._finish(peer)

    def _finish(self, peer: _Rank) -> None:
        """Wait for the oldest; its lock is held.  A signal's exception leaves it where it is."""
        if not peer.pending:
            return
        try:
            peer.pending[0].wait()
        except MemhError as error:
            if isinstance(error, RemoteAccessError):
                peer.revoked = True
            peer.error = peer.error or error
        peer.pending.popleft()

    # ---- a new key ----

    def _ask(self, peer: _Rank, rank: int) -> None:
        assert self._md is not None
        self._drain(peer)
        asked = self._md.endpoint()
        self._send(asked.address, rank, ASK)
        peer.asked = asked

    def _offer(self, rank: int, timeout: float | None) -> None:
        address = self._receive(rank, ASK, timeout, "regrant")
        try:
            answer = self._renew(self._ranks[rank], address)
        except BaseException as error:
            self._send(_failure(error), rank, OFFER)
            raise
        self._send(answer, rank, OFFER)

    def _renew(self, peer: _Rank, address: bytes) -> tuple[bytes, bytes]:
        """A key for who is at `address`, and our end of its connection; its old key ends."""
        assert self._md is not None and self._base is not None
        new: Endpoint | None = None
        grant: Memh | None = None
        try:
            new = self._md.endpoint()
            new.connect(address)
            grant = self._base.derive()
            answer = grant.mkey_pack(), new.address
            if peer.grant is not None and peer.grant.state < MemhState.REVOKED:
                peer.grant.invalidate()
        except BaseException:
            for made in (new, grant):
                if made is not None:
                    _end(made)
            raise
        old_grant, old = peer.grant, peer.before
        # Until it has our answer it may use the connection that it has, and ought to be refused
        # there, not to find nobody.  That it has asked says that the one before is not used.
        peer.grant, peer.theirs, peer.before = grant, new, peer.theirs
        for gone in (old_grant, old):
            if gone is not None:
                _end(gone)
        return answer

    def _take(self, rank: int, timeout: float | None) -> None:
        peer = self._ranks[rank]
        answer = self._receive(rank, OFFER, timeout, "refresh")
        new, peer.asked = peer.asked, None
        assert new is not None
        try:
            if not isinstance(answer[0], bytes):
                status, words = answer
                raise error_from_status(status, "refresh", "", f"rank {rank}: {words}", rank=rank)
            self._use(peer, new, *answer)
        except BaseException:
            new.close()
            raise

    def _use(self, peer: _Rank, new: "Endpoint", key: bytes, address: bytes) -> None:
        """From now on this key, over this connection."""
        assert self._md is not None
        new.connect(address)
        rkey = self._md.rkey_unpack(key)
        old, old_rkey = peer.ours, peer.rkey
        peer.ours, peer.rkey, peer.revoked = new, rkey, False
        for gone in (old_rkey, old):
            if gone is not None:
                gone.close()

    def _send(self, what: object, rank: int, tag: int) -> None:
        """Never waits; the message is kept until it has gone."""
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._comm.isend(what, rank, tag))

    def _receive(self, rank: int, tag: int, timeout: float | None, op: str) -> Any:
        """A message, for which it asks so that a time can be kept and a signal gets through."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 1e-5
        while not self._comm.Iprobe(rank, tag):
            if end is not None and time.monotonic() >= end:
                raise TimedOutError(f"nothing from rank {rank} for {timeout:g} s", op=op)
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return self._comm.recv(source=rank, tag=tag)

    # ---- the end ----

    def _release(self) -> None:
        """What is this rank's, whatever state it is in."""
        for request in self._sent:
            if not request.Test():
                request.Free()
        self._sent = []
        ranks, self._ranks = self._ranks, []
        base, self._base = self._base, None
        md, self._md = self._md, None
        self._memory = None  # goes when the last view of it does
        for peer in ranks:
            for thing in (peer.rkey, peer.grant, peer.ours, peer.theirs, peer.before, peer.asked):
                if thing is not None:
                    _end(thing)
        if base is not None:
            _end(base)
        if md is not None:
            md.close(force=True)


def _end(thing: "Memh | Rkey | Endpoint") -> None:
    """One that resists, a refused revocation say, ends with its domain, or when it is let go."""
    end = getattr(thing, "dereg", None) or thing.close  # type: ignore[union-attr]
    with suppress(MemhError):
        end()


def _arguments(
    nbytes: int, revocable: bool, backends: Sequence[str] | None
) -> tuple[int, bool, tuple[str, ...] | None]:
    """What they say."""
    try:
        number = operator.index(nbytes)
    except TypeError:
        words = f"nbytes is a number, not {type(nbytes).__name__}"
        raise InvalidParamError(words, op="Window") from None
    if not 0 <= number < 1 << 62:
        raise InvalidParamError(f"nbytes is at least 0, not {number}", op="Window")
    try:
        can_revoke = bool(revocable)
    except (TypeError, ValueError):  # NumPy's arrays are neither
        words = f"revocable is true or false, not {type(revocable).__name__}"
        raise InvalidParamError(words, op="Window") from None
    if backends is None:
        return number, can_revoke, None
    good = isinstance(backends, Sequence) and not isinstance(backends, str)
    if not good or not all(isinstance(name, str) for name in backends):
        raise InvalidParamError("backends is a sequence of names", op="Window")
    if not backends:
        raise InvalidParamError("backends names none", op="Window")
    return number, can_revoke, tuple(backends)


def _failure(error: BaseException) -> Failure:
    """What another rank is told of it."""
    if isinstance(error, MemhError):
        return int(error.status), error.detail or str(error)
    words = f"{type(error).__name__}: {error}"
    return int(Status.NO_MEMORY if isinstance(error, MemoryError) else Status.IO_ERROR), words
