# SPDX-License-Identifier: BSD-3-Clause
"""The examples run, and wait as they say."""

import asyncio
import importlib.util
import time
from importlib.util import find_spec

import pytest

import ucx_memh as um

pytestmark = [
    pytest.mark.source,
    pytest.mark.skipif(not find_spec("ucx_memh_ib_mlx5"), reason="ib_mlx5 was left out"),
]


@pytest.fixture
def example(root):
    """examples/asyncio_progress.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "asyncio_progress", root / "examples" / "asyncio_progress.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gate():
    """`gate("0")` stops the device's responder, `gate("open")` lets it go on."""
    from _devices import Control

    control = Control()
    yield lambda value: control.set("gate", value)
    control.set("gate", "open")


def test_it_runs_as_a_program(python, root):
    done = python("-W", "error", root / "examples" / "asyncio_progress.py")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "16 of 16 transfers of 1048576 bytes, awaited together",
        "the loop went on meanwhile: True",
        "revoked: the handle is REVOKED",
        "refused by the device: REMOTE_ACCESS",
    ]


def run(use):
    """await use(md, peer, rkey, win, memory) with the software device."""

    async def main():
        memory = bytearray(b"abcdefgh" * 8192)
        with um.open_md("ib_mlx5", device="software") as md:
            with md.endpoint() as owner, md.endpoint() as peer:
                owner.connect(peer.address)
                peer.connect(owner.address)
                with md.mem_reg(memory) as base, base.derive() as win:
                    with md.rkey_unpack(win.mkey_pack()) as rkey:
                        return await asyncio.wait_for(use(md, peer, rkey, win, memory), 30)

    return asyncio.run(main(), debug=True)


def test_the_loop_sleeps_until_the_descriptor_is_readable(example, gate):
    async def use(md, peer, rkey, win, memory):
        async with example.Progress(md) as progress:
            gate("0")
            into = bytearray(1024)
            asyncio.get_running_loop().call_later(0.5, gate, "open")
            start, cpu = time.monotonic(), time.process_time()
            await progress.done(peer.get_nb(rkey, rkey.address, into))
            assert into == memory[:1024]
            return time.monotonic() - start, time.process_time() - cpu, progress.wakeups

    waited, burnt, wakeups = run(use)
    assert waited >= 0.45
    assert burnt < 0.2
    assert 1 <= wakeups < 10


def test_results_and_errors_come_out(example):
    async def use(md, peer, rkey, win, memory):
        async with example.Progress(md) as progress:
            old = await progress.done(peer.fetch_add_nb(rkey, rkey.address, 1))
            assert old == int.from_bytes(b"abcdefgh", "little")
            assert memory[:1] == b"b"
            with pytest.raises(um.RangeError):
                await progress.done(peer.get_nb(rkey, rkey.address + 65530, bytearray(8)))
            await progress.invalidate(win)
            with pytest.raises(um.RevokedError):
                await progress.invalidate(win)
            with pytest.raises(um.RemoteAccessError):
                await progress.done(peer.put_nb(rkey, rkey.address, b"late"))
            assert (progress.operations, progress.revocations) == ({}, 0)

    run(use)


def test_a_cancelled_task_leaves_its_operation(example, gate):
    async def use(md, peer, rkey, win, memory):
        async with example.Progress(md) as progress:
            gate("0")
            into = bytearray(1024)
            task = asyncio.create_task(progress.done(peer.get_nb(rkey, rkey.address, into)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            (operation,) = progress.operations
            assert not operation.done
            with pytest.raises(BufferError):
                into.append(0)
            gate("open")
            while progress.operations:
                await asyncio.sleep(0.001)
            assert (operation.done, into) == (True, memory[:1024])
            operation.wait()
            into.append(0)

    run(use)


def test_on_another_backend(example, fakes):
    """The pattern needs EVENT_FD and nothing else."""
    md, device, one, _two = fakes.connected(deferred=True, destroy="progress")

    async def main():
        base = md.mem_reg(bytearray(b"abcdefgh"))
        win = base.derive()
        async with example.Progress(md) as progress:
            into = bytearray(8)
            with md.rkey_unpack(win.mkey_pack()) as rkey:
                await progress.done(one.get_nb(rkey, base.address, into))
            assert into == b"abcdefgh"
            await progress.invalidate(win)
            assert win.state is um.MemhState.REVOKED
            other = base.derive()
            other.mkey_pack()
            device.fail("key_destroy_done", um.Status.IO_ERROR)
            with pytest.raises(um.DeviceError):
                await progress.invalidate(other)
            await progress.invalidate(other)

    asyncio.run(asyncio.wait_for(main(), 30))
