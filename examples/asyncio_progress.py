# SPDX-License-Identifier: BSD-3-Clause
"""Transfers and revocations as awaitables: asyncio waits for the domain's descriptor.

    python examples/asyncio_progress.py [component]

`Progress` is all that a program needs: it copies well.  The rest shows it at work.
"""

import asyncio
import sys
from types import TracebackType

import ucx_memh as um
from ucx_memh.errors import error_from_status


class Progress:
    """Makes the progress of one Md, in the event loop that is running.

    Nothing polls: between completions the loop sleeps until `md.event_fd` is readable.  Use the
    Md in that loop's thread only, for callbacks run in the thread that makes progress.
    """

    def __init__(self, md: um.Md) -> None:
        self.md = md
        self.loop = asyncio.get_running_loop()
        self.operations: dict[um.Operation, asyncio.Future[None]] = {}
        self.revocations = 0
        self.wakeups = 0

    async def __aenter__(self) -> "Progress":
        self.loop.add_reader(self.md.event_fd, self._readable)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.loop.remove_reader(self.md.event_fd)

    async def done(self, operation: um.Operation) -> int | None:
        """Wait for what ep.get_nb() and its like returned; returns or raises as ep.get() does.

        A task that is cancelled meanwhile leaves the operation under way, with its buffer held.
        """
        self.operations[operation] = future = self.loop.create_future()
        self._progress()
        await future
        return operation.wait()  # it is done: this fetches the result, or the error

    async def invalidate(self, memh: um.Memh) -> None:
        """Memh.invalidate() that does not block the loop."""
        future: asyncio.Future[um.Status] = self.loop.create_future()

        def ended(status: um.Status) -> None:
            self.revocations -= 1
            if not future.cancelled():
                future.set_result(status)

        self.revocations += 1
        try:
            memh.invalidate(callback=ended)
        except um.MemhError:
            self.revocations -= 1  # then the callback never runs
            raise
        self._progress()
        if (status := await future) != um.Status.OK:
            raise error_from_status(status, "invalidate", self.md.attr.component)

    def _readable(self) -> None:
        self.wakeups += 1
        self._progress()

    def _progress(self) -> None:
        """Progress until there is nothing to do, then ask to be woken."""
        while True:
            while self.md.progress():
                pass
            for operation in [each for each in self.operations if each.done]:
                future = self.operations.pop(operation)
                if not future.cancelled():
                    future.set_result(None)
            # False: something completed since the last look, and no event will tell of it.
            if not (self.operations or self.revocations) or self.md.arm():
                return


async def main(component: str = "ib_mlx5", size: int = 1 << 20, count: int = 16) -> None:
    memory = bytearray(b"0123456789abcdef" * (size * count // 16))
    with um.open_md(component) as md, md.endpoint() as owner, md.endpoint() as peer:
        owner.connect(peer.address)  # usually in two processes
        peer.connect(owner.address)
        async with Progress(md) as progress:
            with md.mem_reg(memory, um.MemFlag.DERIVED_ONLY) as base, base.derive() as win:
                with md.rkey_unpack(win.mkey_pack()) as rkey:
                    await transfers(progress, peer, rkey, size, count)
                    await progress.invalidate(win)
                    print(f"revoked: the handle is {win.state.name}")
                    try:
                        await progress.done(peer.get_nb(rkey, rkey.address, bytearray(size)))
                    except um.RemoteAccessError as error:
                        print(f"refused by the device: {error.status.name}")


async def transfers(
    progress: Progress, peer: um.Endpoint, rkey: um.Rkey, size: int, count: int
) -> None:
    """Many at a time, while other tasks of the loop go on."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    buffers = [bytearray(size) for _ in range(count)]
    ticking = asyncio.create_task(tick())
    await asyncio.gather(
        *(
            progress.done(peer.get_nb(rkey, rkey.address + i * size, buffer))
            for i, buffer in enumerate(buffers)
        )
    )
    ticking.cancel()
    good = sum(buffer[:16] == b"0123456789abcdef" for buffer in buffers)
    print(f"{good} of {count} transfers of {size} bytes, awaited together")
    print(f"the loop went on meanwhile: {ticks > 0}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
