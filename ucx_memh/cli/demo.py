# SPDX-License-Identifier: BSD-3-Clause
"""Register a file once, hand three processes a key each, revoke one of them.

The owner reads a file into memory, registers it once and derives a key for each of three peer
processes: a reader (all of it, read only), a writer (a part, read and write) and a worker (another
part, read, write and atomics).  They move data and check it.  Then the writer is cut off in the
middle of a stream of writes; the others go on.  Exit status 1 if anything is not as promised.
"""

import argparse
import hashlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ucx_memh as um
from ucx_memh.cli.demo_show import MIB, Show

__all__ = ["add_arguments", "run"]

PAGE = mmap.PAGESIZE
BUMPS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="ib_mlx5", help="component to use (default ib_mlx5)")
    parser.add_argument("--file", type=Path, help="file to serve (default: one that it makes)")
    parser.add_argument(
        "--size",
        type=int,
        default=256,
        metavar="MIB",
        help="size of the file that it makes (default 256)",
    )


def run(args: argparse.Namespace) -> int:
    if args.size < 1:
        raise um.InvalidParamError("--size must be at least 1", op="demo")
    show = Show()
    with ExitStack() as stack:
        md = stack.enter_context(_open(args.backend))
        show.intro(md)
        region = stack.enter_context(Region.load(args.file, args.size, show))
        peers = [stack.enter_context(Peer(role, md)) for role in ("reader", "writer", "worker")]
        derives = um.MdFlag.REG_DERIVED in md.attr.flags
        (_with_derived_keys if derives else _without)(md, region, peers, show)
    return show.verdict()


@contextmanager
def _open(backend: str) -> Iterator[um.Md]:
    md = um.open_md(backend)
    try:
        yield md
    finally:
        md.close(force=True)


# ---- the story --------------------------------------------------------------------------------


def _with_derived_keys(md: um.Md, region: "Region", peers: list["Peer"], show: Show) -> None:
    reader, writer, worker = peers
    flag = um.MemFlag
    read, write, atomic = flag.REMOTE_GET, flag.REMOTE_PUT, flag.REMOTE_ATOMIC

    base = show.step("register, once", md, region.register(md), grows=True)
    quarter = region.data // 4 & ~7
    grants = {
        reader: (0, region.data, read),
        writer: (quarter, quarter, read | write),
        worker: (2 * quarter, quarter, read | write | atomic),
    }
    wins = show.step(
        "derive 3 handles and one for the counter",
        md,
        lambda: (
            {p: base.derive(*grants[p]) for p in peers}
            | {None: base.derive(region.data, 8, atomic)}
        ),
    )
    keys = show.step(
        "pack their keys (first time)", md, lambda: {p: win.mkey_pack() for p, win in wins.items()}
    )
    again = show.step("pack them again", md, lambda: {p: w.mkey_pack() for p, w in wins.items()})
    show.expect("a key packs to the same bytes every time", again == keys)
    for peer in peers:
        peer.connect()
        peer.call(
            "keys",
            data=keys[peer].hex(),
            counter=keys[None].hex(),
            raw=wins[peer].mkey_pack(um.PackFlag.RAW).hex(),
        )

    # Everybody moves data and checks it.
    result = reader.bulk("read", "reader reads everything", show)
    show.moved("reader reads everything", result)
    show.expect("the reader's bytes are the file's", result["sha256"] == region.digest)
    for peer in (writer, worker):
        result = peer.bulk("write", f"{peer.role} writes its part, reads it back", show)
        show.moved(f"{peer.role} writes its part, reads it back", result)
        same = result["sha256"] == region.hash(*grants[peer][:2])
        show.expect(f"the {peer.role}'s bytes are in the owner's memory", same)
    for peer in peers:
        peer.call("bump", times=BUMPS)
    show.expect("the counter counted all three", region.counter == 3 * BUMPS)
    swapped = worker.call("swap")
    show.expect("the worker's compare-and-swap swapped", swapped["swapped"])

    # What a key does not give is refused, by the library and, around it, by the device.
    before = region.hash(0, region.data)
    show.refusal("reader tries to write", reader.call("try", op="put"), "ACCESS")
    show.refusal(
        "reader writes around its library", reader.call("try", op="put", raw=True), "REMOTE_ACCESS"
    )
    show.refusal(
        "writer reads outside its part",
        writer.call("try", op="get", raw=True, skip=-64),
        "REMOTE_ACCESS",
    )
    show.expect("no refused write changed a byte", region.hash(0, region.data) == before)
    for peer in (reader, writer):
        peer.reconnect()

    # Cut the writer off in the middle of its stream.
    writer.start("stream")
    writer.wait_event("streaming")
    win = wins[writer]
    show.step("revoke the writer, while it streams writes", md, win.invalidate)
    frozen = region.hash(*grants[writer][:2])
    stopped = writer.wait_event("stopped")
    show.refusal(f"writer's write number {stopped['writes'] + 1}", stopped, "REMOTE_ACCESS")
    show.expect("its late writes changed nothing", region.hash(*grants[writer][:2]) == frozen)
    writer.call("notice", notice=win.revoke_notice().hex())
    writer.reconnect()
    show.refusal(
        "writer tries again, told of the revocation", writer.call("try", op="put"), "REVOKED"
    )

    # Only that key has gone.
    result = reader.bulk("read", "reader reads everything again", show)
    show.moved("reader reads everything again", result)
    show.expect("the reader goes on", result["sha256"] == region.hash(0, region.data))
    result = worker.bulk("write", "worker writes its part again", show)
    show.moved("worker writes its part again", result)
    show.expect("the worker goes on", result["sha256"] == region.hash(*grants[worker][:2]))
    for peer in peers:
        peer.call("bump", times=BUMPS)
    show.expect(
        "the shared counter key still works, for the writer too", region.counter == 6 * BUMPS
    )

    regrant = base.derive(*grants[writer])
    writer.call(
        "keys",
        data=regrant.mkey_pack().hex(),
        counter=keys[None].hex(),
        raw=regrant.mkey_pack(um.PackFlag.RAW).hex(),
    )
    result = writer.bulk("write", "writer, with a new key", show)
    show.moved("writer, with a new key", result)
    show.expect("the base can grant again", result["sha256"] == region.hash(*grants[writer][:2]))
    show.refusal("deregister under live keys", _refused(base.dereg), "BUSY")
    for peer in peers:
        peer.call("close")
    show.step("revoke all keys and deregister", md, lambda: base.dereg(cascade=True))
    show.costs(md, region.memory, region.data)


def _without(md: um.Md, region: "Region", peers: list["Peer"], show: Show) -> None:
    """What a domain without derived handles can do, and what it refuses."""
    base = show.step("register, once", md, region.register(md))
    key = show.step("pack the region's key", md, base.mkey_pack)
    flag = um.MemFlag
    show.refusal("derive a key for each peer", _refused(base.derive), "UNSUPPORTED")
    show.refusal(
        "register with derived keys only",
        _refused(lambda: region.register(md, flag.DERIVED_ONLY)()),
        "UNSUPPORTED",
    )
    show.refusal(
        "pack a revocable key",
        _refused(lambda: base.mkey_pack(um.PackFlag.INVALIDATE_RMA)),
        "UNSUPPORTED",
    )
    for peer in peers:
        peer.connect()
        peer.call("keys", data=key.hex(), counter=key.hex(), raw="")
        result = peer.bulk("read", f"{peer.role} reads everything", show)
        show.moved(f"{peer.role} reads everything", result)
        show.expect(
            f"the {peer.role}'s bytes are the file's",
            result["sha256"] == region.hash(0, base.length),
        )
    result = peers[1].bulk("write", "writer writes everything, reads it back", show)
    show.moved("writer writes everything, reads it back", result)
    show.expect(
        "the writer's bytes are in the owner's memory",
        result["sha256"] == region.hash(0, base.length),
    )
    show.refusal("worker bumps a counter", peers[2].call("try", op="bump"), "UNSUPPORTED")
    show.refusal(
        "deregister, promising that no key works",
        _refused(lambda: base.dereg(invalidate=True)),
        "UNSUPPORTED",
    )
    for peer in peers:
        peer.call("close")
    show.step("deregister", md, base.dereg)


def _refused(call: Callable[[], object]) -> dict:
    try:
        call()
    except um.MemhError as error:
        return {"status": um.errors.status_name(error.status), "by": "the owner's library"}
    return {"status": "OK", "by": ""}


# ---- the owner's memory -----------------------------------------------------------------------


@dataclass
class Region:
    """A memfd with the file's bytes, padding to a page, and a page for the counter."""

    memory: mmap.mmap
    data: int  # bytes before the counter's page
    digest: str  # of these bytes, taken while they were read from the file

    @classmethod
    @contextmanager
    def load(cls, path: Path | None, mib: int, show: Show) -> Iterator["Region"]:
        with ExitStack() as stack:
            if path is None:
                path = stack.enter_context(_made_file(mib * MIB, show))
            source = stack.enter_context(path.open("rb"))
            size = os.fstat(source.fileno()).st_size
            data = max(-(-size // PAGE) * PAGE, 16 * PAGE)
            fd = os.memfd_create("ucx_memh-demo")
            stack.callback(os.close, fd)
            os.ftruncate(fd, data + PAGE)
            memory = mmap.mmap(fd, data + PAGE)
            digest = hashlib.sha256()
            view = memoryview(memory)
            at = 0
            with show.bar(f"owner reads {path.name}", size) as advance:
                while count := source.readinto(view[at : at + 8 * MIB]):
                    digest.update(view[at : at + count])
                    at += count
                    advance(count)
            digest.update(view[at:data])
            view.release()
            show.say(
                f"file {path.name}: {size} bytes, sha256 of its pages {digest.hexdigest()[:16]}"
            )
            yield cls(memory, data, digest.hexdigest())

    def register(self, md: um.Md, flags: um.MemFlag | None = None) -> Callable[[], um.Memh]:
        """A call that registers the whole region; derived keys only, where there are any."""
        if flags is None and um.MdFlag.REG_DERIVED in md.attr.flags:
            flags = um.MemFlag.DERIVED_ONLY
        return lambda: md.mem_reg(self.memory, flags)

    def hash(self, offset: int, length: int) -> str:
        with memoryview(self.memory) as view, view[offset : offset + length] as part:
            return hashlib.sha256(part).hexdigest()

    @property
    def counter(self) -> int:
        return int.from_bytes(self.memory[self.data : self.data + 8], sys.byteorder)


@contextmanager
def _made_file(size: int, show: Show) -> Iterator[Path]:
    """A file of bytes that do not repeat, removed afterwards."""
    with tempfile.NamedTemporaryFile(prefix="ucx_memh-demo-") as file:
        with show.bar("make a file", size) as advance:
            for _ in range(size // MIB):
                file.write(os.urandom(MIB))
                advance(MIB)
        file.flush()
        yield Path(file.name)


# ---- the peers --------------------------------------------------------------------------------


class Peer:
    """A process of its own with an endpoint to the owner; keys go through its pipes."""

    def __init__(self, role: str, md: um.Md) -> None:
        self.role = role
        self.endpoint = md.endpoint()
        resource = um.MdResource(md.attr.component, md.attr.md_name, md.attr.software)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ucx_memh.cli.demo_peer", str(resource)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # it ends when it has nothing more to read
        try:
            # After a failure it may be streaming writes without end.
            self.process.wait(10 if kind is None else 0.2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def start(self, command: str, **arguments: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"command": command, **arguments}), file=self.process.stdin, flush=True)

    def answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise um.PeerGoneError(f"the {self.role} ended", op="demo", pid=self.process.pid)
        message = json.loads(line)
        if "failed" in message:
            raise um.DeviceError(f"the {self.role} failed: {message['failed']}", op="demo")
        return message

    def call(self, command: str, **arguments: object) -> dict:
        self.start(command, **arguments)
        return self.answer()

    def wait_event(self, event: str) -> dict:
        while (message := self.answer()).get("event") != event:
            pass
        return message

    def bulk(self, command: str, title: str, show: Show) -> dict:
        """A command that reports how far it is."""
        self.start(command)
        with show.bar(title, 0) as advance:
            while "progress" in (message := self.answer()):
                advance(message["progress"], message["total"])
        return message

    def connect(self) -> None:
        address = self.call("address")["address"]
        self.endpoint.connect(bytes.fromhex(address))
        self.call("connect", address=self.endpoint.address.hex())

    def reconnect(self) -> None:
        """After a refused access: both ends start anew, and all other keys work again."""
        self.endpoint.reset()
        self.call("reset")
        self.connect()
