# SPDX-License-Identifier: BSD-3-Clause
"""A peer process of the demo: commands as lines of JSON on stdin, answers on stdout.

Its argument, of JSON, says which peer it is and what it opens; `account` is a file descriptor, or
null, for what a person on this host wants to read.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator

import ucx_memh as um
from ucx_memh.cli import config_of
from ucx_memh.cli.demo_show import MIB, seconds_text

CHUNK = 8 << 20
BLOCK = 1 << 20  # of the stream of writes
STREAM = 60  # seconds after which nobody has stopped it


class PeerProcess:
    """One endpoint, a data key, a counter key; a method for each command."""

    def __init__(
        self, role: str, resource: str, config: list[str], account: int | None = None
    ) -> None:
        self.role = role
        self.account = account
        self.md = um.open_md(resource, **config_of(config))
        self.endpoint = self.md.endpoint()
        self.data: um.Rkey  # by keys()
        self.counter: um.Rkey
        self.raw: um.Rkey
        # Registered once, or each bulk transfer would register its buffer for itself.
        self.memory = bytearray(CHUNK)
        rights = um.MemFlag.ACCESS_LOCAL_READ | um.MemFlag.ACCESS_LOCAL_WRITE
        self.buffer = self.md.mem_reg(self.memory, rights)

    def address(self) -> dict:
        return {"address": self.endpoint.address.hex()}

    def connect(self, address: str) -> dict:
        self.endpoint.connect(bytes.fromhex(address))
        return {}

    def reset(self) -> dict:
        self.endpoint.reset()
        return {}

    def keys(self, data: str, counter: str, raw: str) -> dict:
        self.data = self.md.rkey_unpack(bytes.fromhex(data))
        self.counter = self.md.rkey_unpack(bytes.fromhex(counter))
        if raw:  # the same native key without the library's knowledge of its rights and range
            self.raw = self.md.rkey_from_raw(bytes.fromhex(raw), 0, 2**64 - 1)
        self.tell(f"has a key to {self.data.length} bytes at {self.data.address:#x}")
        return {}

    def read(self) -> Iterator[dict]:
        """Everything that the data key covers; the answer holds the bytes' digest."""
        digest = hashlib.sha256()
        seconds = 0.0
        for at, count in self._chunks():
            part, local = self._local(count)
            start = time.perf_counter()
            self.endpoint.get(self.data, at, local)
            seconds += time.perf_counter() - start
            digest.update(part)
            yield {"progress": count, "total": self.data.length}
        self._tell_moved("read all of it", self.data.length, seconds)
        yield {"sha256": digest.hexdigest(), "bytes": self.data.length, "seconds": seconds}

    def write(self) -> Iterator[dict]:
        """New bytes all over; then read them back and compare."""
        digest = hashlib.sha256()
        seconds = 0.0
        for at, count in self._chunks():
            part, local = self._local(count)
            data = (os.urandom(min(count, BLOCK)) * -(-count // BLOCK))[:count]
            part[:] = data
            start = time.perf_counter()
            self.endpoint.put(self.data, at, local)
            seconds += time.perf_counter() - start
            part[:] = bytes(count)
            start = time.perf_counter()
            self.endpoint.get(self.data, at, local)
            seconds += time.perf_counter() - start
            if part != data:
                raise um.DeviceError("read back other bytes than written", op="demo")
            digest.update(data)
            yield {"progress": count, "total": self.data.length}
        self._tell_moved("wrote all of it and read it back", 2 * self.data.length, seconds)
        yield {"sha256": digest.hexdigest(), "bytes": 2 * self.data.length, "seconds": seconds}

    def bump(self, times: int) -> dict:
        for _ in range(times):
            value = self.endpoint.fetch_add(self.counter, self.counter.address, 1)
        self.tell(f"added 1 to the counter, {times} times: {value + 1}")
        return {"value": value}

    def swap(self) -> dict:
        """Compare-and-swap a word of the data range, and put it back."""
        at = self.data.address
        old = bytearray(8)
        self.endpoint.get(self.data, at, old)
        word = int.from_bytes(old, sys.byteorder)
        first = self.endpoint.compare_swap(self.data, at, word, 42)
        second = self.endpoint.compare_swap(self.data, at, 42, word)
        self.tell("swapped a word for another, and back")
        return {"swapped": first == word and second == 42}

    def stream(self) -> Iterator[dict]:
        """Write without end, until it is refused."""
        size = min(BLOCK, self.data.length)
        writes = 0
        self.tell("streams writes until it is stopped")
        end = time.monotonic() + STREAM
        while time.monotonic() < end:
            block = bytes([writes & 0xFF]) * size
            offset = writes * size % (self.data.length - size + 1) & ~7
            try:
                self.endpoint.put(self.data, self.data.address + offset, block)
            except um.MemhError as error:
                refusal = self._refusal(error)
                self._tell_outcome(f"write number {writes + 1}", refusal)
                yield {"event": "stopped", "writes": writes, **refusal}
                return
            writes += 1
            if writes == 20:
                yield {"event": "streaming"}
        yield {"event": "stopped", "writes": writes, "status": "OK", "by": ""}

    def try_(self, op: str, raw: bool = False, skip: int = 0) -> dict:
        """One access that ought to be refused; with `raw` around the library's own checks."""
        outcome = {"status": "OK", "by": ""}
        rkey = self.raw if raw else self.data
        at = self.data.address + skip
        try:
            if op == "put":
                self.endpoint.put(rkey, at, b"\xa5" * 64)
            elif op == "get":
                self.endpoint.get(rkey, at, bytearray(64))
            else:
                self.endpoint.fetch_add(rkey, at, 1)
        except um.MemhError as error:
            outcome = self._refusal(error)
        where = " outside its range" if skip else ""
        how = " around its own library" if raw else ""
        self._tell_outcome(f"tried a {op}{where}{how}", outcome)
        return outcome

    def notice(self, notice: str) -> dict:
        keys = self.md.rkey_revoke(bytes.fromhex(notice))
        self.tell("was told that its key is revoked")
        return {"keys": keys}

    def close(self) -> dict:
        self.md.close(force=True)
        return {}

    def tell(self, text: str) -> None:
        """One line of the account, whole whoever else writes there."""
        if self.account is not None:
            os.write(self.account, f"{self.role:<7} {text}\n".encode())

    def _tell_moved(self, what: str, count: int, seconds: float) -> None:
        self.tell(f"{what}: {count / MIB:.1f} MiB in {seconds_text(seconds)}")

    def _tell_outcome(self, what: str, outcome: dict) -> None:
        by = outcome["by"]
        self.tell(f"{what}: " + (f"refused by {by}, {outcome['status']}" if by else "done"))

    def _local(self, count: int) -> tuple[memoryview, "um.Memh | memoryview"]:
        """The first `count` bytes of our memory: to look at, and to move data with."""
        part = memoryview(self.memory)[:count]
        return part, self.buffer if count == CHUNK else part

    def _chunks(self) -> Iterator[tuple[int, int]]:
        start, end = self.data.address, self.data.address + self.data.length
        return ((at, min(CHUNK, end - at)) for at in range(start, end, CHUNK))

    def _refusal(self, error: um.MemhError) -> dict:
        by = "the device" if isinstance(error, um.RemoteAccessError) else "its own library"
        return {"status": um.errors.status_name(error.status), "by": by}


def answers(peer: PeerProcess, message: dict) -> Iterator[dict]:
    """Do what the owner says."""
    method = getattr(peer, {"try": "try_"}.get(command := message.pop("command"), command))
    result = method(**message)
    yield from [result] if isinstance(result, dict) else result


def main() -> None:
    peer: PeerProcess | None = None
    task = json.loads(sys.argv[1])
    for line in sys.stdin:
        try:
            # Only now, when somebody listens to what is wrong.
            peer = peer or PeerProcess(**task)
            for answer in answers(peer, json.loads(line)):
                print(json.dumps(answer), flush=True)
        except um.MemhError as error:
            print(json.dumps({"failed": str(error)}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except OSError:
        # The owner has gone, or the account's reader.  Nothing more to say, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
