# SPDX-License-Identifier: BSD-3-Clause
"""A peer process of the demo: commands as lines of JSON on stdin, answers on stdout."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator

import ucx_memh as um

CHUNK = 8 << 20
BLOCK = 1 << 20  # of the stream of writes


class PeerProcess:
    """One endpoint, a data key, a counter key; a method for each command."""

    def __init__(self, resource: str) -> None:
        self.md = um.open_md(resource)
        self.endpoint = self.md.endpoint()
        self.data: um.Rkey | None = None
        self.counter: um.Rkey | None = None
        self.raw: um.Rkey | None = None
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
        yield {"sha256": digest.hexdigest(), "bytes": 2 * self.data.length, "seconds": seconds}

    def bump(self, times: int) -> dict:
        for _ in range(times):
            value = self.endpoint.fetch_add(self.counter, self.counter.address, 1)
        return {"value": value}

    def swap(self) -> dict:
        """Compare-and-swap a word of the data range, and put it back."""
        at = self.data.address
        old = bytearray(8)
        self.endpoint.get(self.data, at, old)
        word = int.from_bytes(old, sys.byteorder)
        first = self.endpoint.compare_swap(self.data, at, word, 42)
        second = self.endpoint.compare_swap(self.data, at, 42, word)
        return {"swapped": first == word and second == 42}

    def stream(self) -> Iterator[dict]:
        """Write without end, until it is refused."""
        size = min(BLOCK, self.data.length)
        writes = 0
        while True:
            block = bytes([writes & 0xFF]) * size
            offset = writes * size % (self.data.length - size + 1) & ~7
            try:
                self.endpoint.put(self.data, self.data.address + offset, block)
            except um.MemhError as error:
                yield {"event": "stopped", "writes": writes, **self._refusal(error)}
                return
            writes += 1
            if writes == 20:
                yield {"event": "streaming"}

    def try_(self, op: str, raw: bool = False, skip: int = 0) -> dict:
        """One access that ought to be refused; with `raw` around the library's own checks."""
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
            return self._refusal(error)
        return {"status": "OK", "by": ""}

    def notice(self, notice: str) -> dict:
        return {"keys": self.md.rkey_revoke(bytes.fromhex(notice))}

    def close(self) -> dict:
        self.md.close(force=True)
        return {}

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


def main() -> None:
    peer = PeerProcess(sys.argv[1])
    for line in sys.stdin:
        message = json.loads(line)
        method = getattr(peer, {"try": "try_"}.get(command := message.pop("command"), command))
        try:
            result = method(**message)
            for answer in [result] if isinstance(result, dict) else result:
                print(json.dumps(answer), flush=True)
        except um.MemhError as error:
            print(json.dumps({"failed": str(error)}), flush=True)


if __name__ == "__main__":
    main()
