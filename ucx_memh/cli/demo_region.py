# SPDX-License-Identifier: BSD-3-Clause
"""The owner's memory in the demo."""

import hashlib
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ucx_memh as um
from ucx_memh.cli.demo_show import MIB, Show

__all__ = ["Region"]

PAGE = mmap.PAGESIZE


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
