# SPDX-License-Identifier: BSD-3-Clause
"""Memory windows on two devices: on the host softmlx5's, in a guest those of the kernel's rxe."""

import errno
import gc
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest

import ucx_memh as um
from _devices import Control, Device, SoftwareDevice
from _rawqp import SYSTEM, software_library
from _sides import Attacker, Library, Remote, Where
from ib._hooks import Hooks

IN_GUEST = "UCX_MEMH_GUEST" in os.environ
# Hypothesis takes minutes to import in a guest; the others change the software device.
HOST_ONLY = ["test_model_windows.py", "test_gated.py", "test_caps.py"]
collect_ignore = HOST_ONLY if IN_GUEST else []
collect_ignore_glob = [] if IN_GUEST or find_spec("ucx_memh_ib_mlx5") else ["test_*.py"]

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")

Far = TypeVar("Far", bound=Remote)


class WindowDevice(Device):
    made = "device.alloc_mw"
    ended = "device.dealloc_mw"
    base_keys = False


class SoftWindows(WindowDevice, SoftwareDevice):
    """softmlx5's: they are checked like hardware's."""

    @property
    def where(self) -> Where:
        return Where("ib", {"library": software_library()})

    def endings(self, md: um.Md) -> int:
        return md.stats()[self.ended]


class Rxe(WindowDevice):
    """The kernel's soft-RoCE: rights and revocation hold, the range of a window does not."""

    where = Where("ib", {}, SYSTEM, gid_index=1)
    keeps_range = False
    direct_atomics = False
    slow = True

    def moved(self) -> int:
        """Packets."""
        return sum(int((COUNTERS / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))

    def live(self) -> dict[str, int]:
        """What the kernel has of this process; it does not tell of windows."""
        kinds = ("qp", "cq", "mr", "pd")
        asked = subprocess.run(
            ["rdma", "-j", "-b", "-"],
            input="".join(f"resource show {kind}\n" for kind in kinds),
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, int] = {}
        decoder, text = json.JSONDecoder(), asked.stdout.strip()
        for kind in kinds:
            items, end = decoder.raw_decode(text)
            text = text[end:].strip()
            found[kind] = sum(item.get("pid") == os.getpid() for item in items)
        return found


@pytest.fixture(scope="session")
def device() -> Device:
    return Rxe() if IN_GUEST else SoftWindows()


@pytest.fixture
def soft() -> Iterator[Control]:
    """The software device's control surface."""
    control = Control()
    yield control
    control.defaults()


@pytest.fixture(scope="module", autouse=True)
def tidy_module(device: Device) -> Iterator[None]:
    """When a module has ended the device holds for this process what it held before."""
    before = device.live()
    yield
    gc.collect()
    assert device.live() == before


@pytest.fixture
def tidy(device: Device) -> Iterator[None]:
    """When the test has ended, too, but where asking is slow."""
    before = None if device.slow else device.live()
    yield
    device.restore()
    gc.collect()
    assert before is None or device.live() == before


@pytest.fixture
def owner(tidy: None, device: Device) -> Iterator[um.Md]:
    """An Md of this process; closing it leaves nothing on the device."""
    with device.opened() as md:
        yield md


@pytest.fixture
def hooks(tidy: None, device: Device) -> Iterator[Hooks]:
    with Hooks(device.where) as hooks:
        yield hooks


@pytest.fixture
def stubborn(hooks: Hooks) -> Iterator[tuple[um.Md, Callable[[int], int]]]:
    """An Md, and what has its device refuse to end keys: so often, at so many commands."""

    def refuse(times: int) -> int:
        hooks.refuse("dealloc_mw", errno.EBUSY, times + 1)  # the first time it is tried twice
        return times + 1

    with hooks.opened() as md:
        yield md, refuse


# ---- other processes; in a guest it takes seconds to start one ----


class Crew:
    """Those that outlive a test.  One that is still busy when a test has ended is replaced."""

    def __init__(self, peer: Callable, where: Where) -> None:
        self.peer, self.where = peer, where
        self.idle: list[Remote] = []

    def take(self, kind: type[Far]) -> Far:
        for far in self.idle:
            if type(far) is kind:
                self.idle.remove(far)
                return far
        return kind(self.peer, self.where)

    def give(self, far: Remote) -> None:
        far.ends.clear()
        if far.waiting == 0 and far.peer.process.poll() is None:
            with suppress(Exception):
                far.renew()
                self.idle.append(far)
                return
        far.peer.close()


@pytest.fixture(scope="session")
def crew(lasting_peer: Callable, device: Device) -> Crew:
    return Crew(lasting_peer, device.where)


@pytest.fixture
def side(crew: Crew) -> Iterator[Callable[[type[Far]], Far]]:
    """`side(Library)`: a process of that kind, for as long as the test takes."""
    taken: list[Remote] = []

    def take(kind: type[Far]) -> Far:
        taken.append(crew.take(kind))
        return taken[-1]

    yield take
    for far in taken:
        crew.give(far)


@pytest.fixture
def library(side: Callable) -> Library:
    """Another process, which uses our library."""
    return side(Library)


@pytest.fixture
def attacker(side: Callable) -> Attacker:
    """Another process, which posts raw verbs: whatever key it likes."""
    return side(Attacker)
