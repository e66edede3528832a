# SPDX-License-Identifier: BSD-3-Clause
"""Blocks of a KV cache, leased: each lease has a key of its own, which dies with it.

    python examples/kv_leases.py [--leases N] [--readers N] [--picture leases.svg]
    python examples/kv_leases.py --listen HOST:PORT     # here the owner, and there the readers:
    python examples/kv_leases.py --connect HOST:PORT

An owner has a pool of blocks, registered once.  A request gets a lease to a block: a derived key,
for the bytes and with the rights that it needs.  At the end of the lease the key is invalidated
and only then is the block used again, so a reader that comes late gets an error and never the
bytes of another request.  The owner and the readers are processes; the owner is killed in the
end, and the readers go on with the next one.  Status 1 if anything is not as it says here.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from device import announce
from link import GONE, PATIENCE, Link, accept, add_hosts, listen, pair, reach, run, spawn
from timeline import Bar, Mark, draw, picture_path

import ucx_memh as um

GET, PUT = um.MemFlag.REMOTE_GET, um.MemFlag.REMOTE_PUT
# What a key of an owner that was killed may give.
LIVES = range(2)  # of the owner
BLOCKS_SHOWN, LEASES_SHOWN = 8, 32  # in the picture


# ---- the owner ----


class Reader:
    """What the owner has of a reader: where to send keys, and a connection to its memory's."""

    def __init__(self, md: um.Md, link: Link) -> None:
        self.link = link
        self.endpoint = md.endpoint()
        self.connect(link.receive(None))  # the next owner's has one before it

    def connect(self, address: bytes) -> None:
        self.endpoint.connect(address)
        self.link.send(self.endpoint.address)

    def call(self, *message: object) -> Any:
        self.link.send(message)
        return self.link.receive()

    def reconnect(self, address: bytes) -> None:
        """A refused access takes the connection down; both ends begin anew, all keys stay."""
        self.endpoint.reset()
        self.connect(address)


class Owner:
    def __init__(self, links: list[Link], args: argparse.Namespace) -> None:
        self.args = args
        self.md = um.open_md(args.backend)
        self.pool = np.zeros((args.blocks, args.block_size // 8), np.uint64)
        # Without DERIVED_ONLY a key to all of the pool would exist, that no lease's end revokes.
        self.base = self.md.mem_reg(self.pool, um.MemFlag.DERIVED_ONLY)
        self.endless: list[um.Memh] = []
        self.request = 0
        self.counts: Counter[str] = Counter()
        self.spans: list[tuple[int, int, float, float, int]] = []  # for the picture
        self.marks: list[tuple[int, int, float]] = []
        self.readers = [Reader(self.md, link) for link in links]

    def new_request(self, block: int) -> int:
        """Use a block: all its words are the request's number, so nobody else's bytes pass."""
        self.request += 1
        self.pool[block] = self.request
        return self.request

    def end(self, wins: um.MemhArray | list[um.Memh]) -> list[bytes]:
        """The end of leases: afterwards the blocks may be used again.  Notices for the readers."""
        if self.args.no_revoke:
            self.endless.extend(wins)  # or their keys would go with them
            return []
        self.md.invalidate_many(wins)  # no byte is read or written by these keys from here on
        return [win.revoke_notice() for win in wins]

    def steady(self) -> float:
        """As many leases as are wanted, all blocks at a time; how many a second."""
        size = self.args.block_size
        generator = np.random.default_rng(1)
        share = self.args.blocks // len(self.readers)
        notices: list[list[bytes]] = [[] for _ in self.readers]
        done, turn, start = 0, 0, time.perf_counter()
        while done < self.args.leases:
            under_way = []
            for number, reader in enumerate(self.readers):
                # Another reader's blocks each time: what one has ended, the next one gets.
                first = (number + turn) % len(self.readers) * share
                blocks = np.arange(first, first + share)
                lengths = generator.integers(1, size // 64, share, endpoint=True) * 64
                rights = GET | PUT if (number + turn) % 2 else GET
                requests = [self.new_request(block) for block in blocks]
                wins = self.base.derive_many(blocks * size, lengths, rights)
                keys = self.md.mkey_pack_many(wins)
                reader.link.send(("lease", list(keys), requests, notices[number]))
                under_way.append((number, blocks, lengths, rights, requests, wins))
            for number, blocks, lengths, rights, requests, wins in under_way:
                self.counts.update(self.readers[number].link.receive())
                notices[number] = self.end(wins)
                for block, length, request in zip(blocks, lengths // 8, requests, strict=True):
                    # Who may write has written his answer, all over his range and nowhere else.
                    wanted = ~np.uint64(request) if rights & PUT else np.uint64(request)
                    good = np.all(self.pool[block, :length] == wanted)
                    good &= np.all(self.pool[block, length:] == request)
                    self.counts["wrong blocks"] += not good
                done += share
            turn += 1
        seconds = time.perf_counter() - start
        for reader, each in zip(self.readers, notices, strict=True):
            for block in range(self.args.blocks):
                self.new_request(block)  # or they would find their own bytes
            self.counts.update(reader.call("lease", [], [], each))
        self.counts["leases"] = done
        return done / seconds

    def untold(self, number: int, block: int) -> float:
        """A reader is late and does not know: refused by the device, and soon back.  How soon."""
        reader, other = self.readers[number], self.readers[number - 1]
        place = block * self.args.block_size
        win, since = self.base.derive(place, self.args.block_size, GET), time.monotonic()
        request = self.new_request(block)
        self.counts.update(reader.call("lease", [win.mkey_pack()], [request], []))
        self.end([win])
        self.span(number, block, since, request)
        # At the same address, for somebody else.
        again, since = self.base.derive(place, self.args.block_size, GET), time.monotonic()
        request = self.new_request(block)
        self.counts.update(other.call("lease", [again.mkey_pack()], [request], []))
        self.refused(number, block, *reader.call("late"))
        # The key for the same bytes from now on; and the old one is released before or after it.
        counts, seconds = reader.call("regain", again.mkey_pack(), request, self.request % 2)
        self.counts.update(counts)
        again.invalidate()
        self.span(number - 1, block, since, request)
        # Told, and with its connection, for the next one.
        other.call("forget", again.revoke_notice())
        reader.call("forget", again.revoke_notice())
        self.counts["leases"] += 2
        return seconds

    def race(self, number: int, block: int) -> None:
        """A reader that reads all the time, while its lease ends and the block is used again."""
        reader = self.readers[number]
        win = self.base.derive(block * self.args.block_size, self.args.block_size, GET)
        since, request = time.monotonic(), self.new_request(block)
        reader.call("race", win.mkey_pack(), request)  # returns when it reads
        self.end([win])
        self.new_request(block)
        self.span(number, block, since, request)
        self.refused(number, block, *reader.link.receive())
        self.counts["leases"] += 1

    def refused(self, number: int, block: int, counts: dict, address: bytes | None) -> None:
        """How a reader that did not know fared; its address if it needs a new connection."""
        self.counts.update(counts)
        if address is not None:
            self.marks.append((number, block, time.monotonic()))
            self.readers[number].reconnect(address)

    def span(self, number: int, block: int, since: float, request: int) -> None:
        self.spans.append((number % len(self.readers), block, since, time.monotonic(), request))


def own(links: list[Link], args: argparse.Namespace, life: int) -> None:
    """The owner's process, in its first life or in its second."""
    *readers, parent = links
    owner = Owner(readers, args)
    if life == 0:
        rate = owner.steady()
        turns = [(n, turn) for turn in range(args.late) for n in range(args.readers)]
        back = [owner.untold(n, turn % args.blocks) for n, turn in turns]
        for n, turn in turns:
            owner.race(n, turn % args.blocks)
        parent.send((owner.counts, rate, back, owner.spans, owner.marks))
    win = owner.base.derive(0, args.block_size, GET)
    request = owner.new_request(0)
    counts: Counter[str] = Counter()
    for reader in owner.readers:
        counts.update(reader.call("hold", win.mkey_pack(), request))
    parent.send(counts)
    parent.receive()  # it is killed here


# ---- a reader ----


class ReaderProcess:
    """What a reader does: one connection to the owner, and the leases that it holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.md = um.open_md(args.backend)
        self.endpoint = self.md.endpoint()
        self.kept: list[tuple[um.Rkey, int]] = []
        self.into = np.zeros(args.block_size // 8, np.uint64)
        # Registered once, or each read would register its buffer for itself.
        self.local = self.md.mem_reg(self.into, um.MemFlag.ACCESS_LOCAL_WRITE)
        self.counts: Counter[str] = Counter()
        self.link: Link

    def serve(self, link: Link) -> None:
        """Do what an owner says, until it ends."""
        with link as self.link:
            link.send(self.endpoint.address)
            self.endpoint.connect(link.receive())
            while True:
                try:
                    what, *message = link.receive()
                except (EOFError, ConnectionError):
                    return
                getattr(self, what)(*message)

    def answer(self, *more: object) -> None:
        self.link.send((self.counts, *more) if more else self.counts)
        self.counts = Counter()

    def read(self, rkey: um.Rkey) -> np.ndarray:
        """What the key gives; its error if none."""
        self.into[:] = 0
        part = self.into[: rkey.length // 8]
        whole = rkey.length == self.into.nbytes
        self.endpoint.get(rkey, rkey.address, self.local if whole else part)
        return part

    def check(self, rkey: um.Rkey, request: int) -> None:
        part = self.read(rkey)
        self.counts["wrong reads"] += bool(np.any(part != request))
        self.counts["bytes"] += part.nbytes

    def check_refused(self, request: int) -> None:
        """Nothing of another request may have come before a read was refused."""
        self.counts["wrong reads"] += bool(np.any((self.into != 0) & (self.into != request)))

    def too_late(self, rkey: um.Rkey, request: int) -> um.MemhError | None:
        """A read after the end of the lease: the error that it gives."""
        try:
            part = self.read(rkey)
        except (um.RevokedError, um.RemoteAccessError) as error:
            self.check_refused(request)
            return error
        self.counts["late reads served"] += 1
        self.counts["wrong reads"] += bool(np.any(part != request))
        return None

    # What the owner says.

    def lease(self, keys: list[bytes], requests: list[int], notices: list[bytes]) -> None:
        """The last leases have ended, as the notices say; use these."""
        for notice in notices:
            self.md.rkey_revoke(notice)
        for rkey, request in self.kept:
            told = isinstance(self.too_late(rkey, request), um.RevokedError)
            self.counts["late reads refused, told"] += told
            rkey.close()
        # Told, the library refuses by itself: the connection is as it was.
        self.counts["connections lost"] += self.endpoint.state is not um.EpState.CONNECTED
        self.kept = [(self.md.rkey_unpack(key), r) for key, r in zip(keys, requests, strict=True)]
        for rkey, request in self.kept:
            self.check(rkey, request)
            if rkey.flags & PUT:
                answer = np.full(rkey.length // 8, ~np.uint64(request))
                self.endpoint.put(rkey, rkey.address, answer)
        for rkey, _request in self.kept[:1]:
            self.refused(um.RangeError, self.endpoint.get, rkey, rkey.address + 8)
            if not rkey.flags & PUT:
                self.refused(um.AccessError, self.endpoint.put, rkey, rkey.address)
        self.answer()

    def refused(self, kind: type[um.MemhError], call: Any, rkey: um.Rkey, address: int) -> None:
        """What a lease does not give."""
        try:
            call(rkey, address, np.zeros(rkey.length // 8, np.uint64))
        except kind:
            self.counts["other accesses refused"] += 1
        else:
            self.counts["other accesses served"] += 1

    def late(self) -> None:
        """Without a notice: the device refuses, and takes the connection down."""
        rkey, request = self.kept[0]
        self.lost(self.too_late(rkey, request))

    def lost(self, error: um.MemhError | None) -> None:
        self.since = time.monotonic()
        if isinstance(error, um.RemoteAccessError):
            self.counts["late reads refused, untold"] += 1
            self.endpoint.reset()
            self.answer(self.endpoint.address)
            self.endpoint.connect(self.link.receive())
        else:
            self.answer(None)

    def regain(self, key: bytes, request: int, old_first: int) -> None:
        """Read by the new key to the same address; release the old one before it, or after."""
        old = self.kept[0][0]
        new = self.md.rkey_unpack(key)
        self.counts["keys mixed up"] += (new.address, new.compare(old)) == (old.address, 0)
        if old_first:
            old.close()
        self.check(new, request)
        seconds = time.monotonic() - self.since
        old.close()
        self.check(new, request)
        self.kept = [(new, request)]
        self.answer(seconds)

    def forget(self, notice: bytes) -> None:
        """A lease has ended, and we are told."""
        self.md.rkey_revoke(notice)
        self.kept.clear()
        self.answer()

    def race(self, key: bytes, request: int) -> None:
        """Read until it is refused: all that comes is the request's own."""
        rkey = self.md.rkey_unpack(key)
        self.check(rkey, request)
        self.link.send(None)
        error = None
        end = time.monotonic() + PATIENCE
        while error is None and time.monotonic() < end and not self.counts["wrong reads"]:
            try:
                self.check(rkey, request)
            except um.RemoteAccessError as refusal:
                self.check_refused(request)
                error = refusal
        rkey.close()
        self.lost(error)

    def hold(self, key: bytes, request: int) -> None:
        """A lease of an owner that will be killed, or of the one after it."""
        for rkey, _request in self.kept:
            # The old one's, now that we are connected to the new one, at the same address or not.
            try:
                self.read(rkey)
            except GONE:
                self.counts["keys of the dead refused"] += 1
            rkey.close()
        rkey = self.md.rkey_unpack(key)
        self.check(rkey, request)
        self.kept = [(rkey, request)]
        self.answer()

    def bereaved(self) -> None:
        """The owner was killed between our unpack and this read; then be ready for the next."""
        for rkey, _request in self.kept[:1]:  # none, if it was killed before its time
            try:
                self.read(rkey)
            except GONE:
                self.counts["reads from the dead refused"] += 1
        self.endpoint.reset()


def read(links: list[Link], args: argparse.Namespace) -> None:
    """The process of a reader, which outlives its owner."""
    reader = ReaderProcess(args)
    reader.serve(links[0])
    reader.bereaved()
    reader.serve(links[1])


# ---- all of them ----


def start(target: Callable, links: list[Link], *args: object) -> BaseProcess:
    """A process that has these ends of links, which are not ours any more."""
    process = spawn(target, links, *args)
    for link in links:
        link.close()
    return process


def main(args: argparse.Namespace) -> int:
    if args.connect:
        return serve(args)
    if args.listen:
        with listen(args.listen) as server:
            print("waiting for the readers' host", flush=True)
            host = accept(server, None)
            host.send({"readers": args.readers, "block_size": args.block_size})
            lives = [[accept(server) for _ in range(args.readers)] for _ in LIVES]
        verdict = own_all(lives, args)
        host.send(verdict)
        return verdict[0]
    pairs = [[pair() for _ in range(args.readers)] for _ in LIVES]
    readers = [
        start(read, [theirs for _, theirs in each], args) for each in zip(*pairs, strict=True)
    ]
    status, _words = own_all([[ours for ours, _ in each] for each in pairs], args)
    for each in readers:
        each.join(PATIENCE)
    return status


def serve(args: argparse.Namespace) -> int:
    """The readers, for an owner on another host, whose verdict is ours."""
    with reach(args.connect) as owner:
        vars(args).update(owner.receive())
        lives = [[reach(args.connect) for _ in range(args.readers)] for _ in LIVES]
        readers = [start(read, list(links), args) for links in zip(*lives, strict=True)]
        try:
            status, words = owner.receive(None)
        except (EOFError, ConnectionError):
            raise SystemExit("the owner is gone") from None
        for each in readers:
            each.join(PATIENCE)
    print(f"{args.readers} readers; the owner says: {words}")
    return status


def own_all(lives: list[list[Link]], args: argparse.Namespace) -> tuple[int, str]:
    """Both lives of the owner; its verdict."""
    pairs = [pair() for _ in LIVES]
    # The next one stands by, until it hears from the readers.
    owners = [start(own, [*lives[life], pairs[life][1]], args, life) for life in LIVES]
    first, rate, back, spans, marks = pairs[0][0].receive(None)
    counts = Counter(first)
    for owner, (ours, _) in zip(owners, pairs, strict=True):
        counts.update(ours.receive())
        owner.kill()  # not a word to the readers
        owner.join()
    if args.picture:
        picture(args.picture, args.readers, spans, marks)
    return show(args, counts, rate, back)


def show(
    args: argparse.Namespace, counts: Counter[str], rate: float, back: list[float]
) -> tuple[int, str]:
    told, untold = counts["late reads refused, told"], counts["late reads refused, untold"]
    print(f"{counts['leases']} leases of {args.blocks} blocks, {args.readers} readers")
    print(f"{rate:.0f} leases/s")
    print(f"{counts['bytes'] / 1e6:.1f} MB read and checked, {counts['wrong reads']} reads wrong")
    print(f"late reads refused: {told} by the reader's library, which was told; connection kept")
    print(f"late reads refused: {untold} by the device; connection back and a good read after")
    print(f"    {statistics.median(back) * 1e3:.2f} ms (median), {max(back) * 1e3:.2f} ms (worst)")
    print(f"late reads served: {counts['late reads served']}")
    print(f"accesses outside a lease's range or rights refused: {counts['other accesses refused']}")
    dead = counts["reads from the dead refused"], counts["keys of the dead refused"]
    print(f"owner killed: {dead[0]} reads refused; with the next owner {dead[1]} old keys refused,")
    print(f"    {args.readers} new ones work")
    both = 2 * args.late * args.readers
    checks = {
        "a read gave another request's bytes": counts["wrong reads"] == 0,
        "a block has other bytes than its lease wrote": counts["wrong blocks"] == 0,
        "a late read was served": counts["late reads served"] == 0,
        "a late reader was not refused": untold == both and told >= args.leases,
        "a reader that was told lost its connection": counts["connections lost"] == 0,
        "a lease gave more than its range or rights": counts["other accesses served"] == 0,
        "two keys were taken for one": counts["keys mixed up"] == 0,
        "a key of the killed owner worked": dead == (args.readers, args.readers),
    }
    failed = [what for what, good in checks.items() if not good]
    for what in failed:
        print(f"FAILED: {what}")
    words = f"{len(checks) - len(failed)} of {len(checks)} checks hold"
    print(words)
    return 1 if failed else 0, words


def picture(path: Path, readers: int, spans: list, marks: list) -> None:
    """Leases of some blocks, and when a late reader was refused."""
    spans = sorted((s for s in spans if s[1] < BLOCKS_SHOWN), key=lambda s: s[2])[:LEASES_SHOWN]
    last = max(end for *_, end, _request in spans)
    rows = sorted({block for _reader, block, *_ in spans})
    draw(
        path,
        "Leases end, and their keys with them; \u00d7: a late read, refused by the device",
        [f"block {block}" for block in rows],
        [f"leased to reader {number}" for number in range(readers)],
        [
            Bar(rows.index(block), start, end, reader, f"request {request}")
            for reader, block, start, end, request in spans
        ],
        [
            Mark(rows.index(block), at, "\u00d7", "#d62728", f"reader {reader} refused")
            for reader, block, at in marks
            if block in rows and at <= last
        ],
    )
    print(f"wrote {path}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    option = parser.add_argument
    option("--backend", default="ib_mlx5", metavar="NAME", help="component, or component/device")
    option("--leases", type=int, default=20000, metavar="N", help="at least so many (%(default)s)")
    option("--readers", type=int, default=2, metavar="N", help="processes (%(default)s)")
    option("--blocks", type=int, default=256, metavar="N", help="in the pool (%(default)s)")
    size = "bytes of a block, a multiple of 64 (%(default)s)"
    option("--block-size", type=int, default=16384, metavar="N", help=size)
    late = "times that each reader is late without having been told (%(default)s)"
    option("--late", type=int, default=50, metavar="N", help=late)
    option("--no-revoke", action="store_true", help="keys outlive leases: see what goes wrong")
    option("--picture", type=picture_path, metavar="SVG", help="draw who had what block when")
    add_hosts(parser, "the readers")
    args = parser.parse_args()
    if args.readers < 2:
        parser.error("--readers must be at least 2: one uses the block that another had")
    if min(args.leases, args.late) < 1 or args.blocks < args.readers:
        parser.error("--leases and --late must be at least 1, --blocks at least --readers")
    if args.block_size < 64 or args.block_size % 64:
        parser.error("--block-size must be a multiple of 64")
    announce(parser, args.backend, "no lease can end")
    return args


if __name__ == "__main__":
    run(lambda: main(arguments()))
