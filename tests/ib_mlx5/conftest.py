# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of ib_mlx5 share."""

import gc
from collections.abc import Callable, Iterator

import pytest

import ucx_memh as um
from _devices import Control, SoftwareDevice
from _rawqp import RawPeer, software_library
from _sides import Attacker, Library, Remote, opened


@pytest.fixture(scope="session")
def software() -> str:
    """Path of the software device."""
    return software_library()


@pytest.fixture(scope="session")
def device() -> SoftwareDevice:
    return SoftwareDevice()


@pytest.fixture
def soft() -> Iterator[Control]:
    """Its control surface; faults are cleared afterwards, settings by whoever made them."""
    control = Control()
    yield control
    control.fault("")


@pytest.fixture
def umr() -> str:
    """How keys are made.  A module that wants the other way, or both, has a fixture of its own."""
    return "auto"


@pytest.fixture
def md(umr: str) -> Iterator[um.Md]:
    with um.open_md("ib_mlx5", device="software", umr=umr) as opened:
        yield opened


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    with RawPeer() as opened:
        yield opened


# ---- two processes ----


@pytest.fixture
def tidy(soft: Control) -> Iterator[None]:
    """When the test has ended the device holds what it held before, and its settings are back."""
    before = soft.live()
    yield
    soft.defaults()
    gc.collect()
    assert soft.live() == before


@pytest.fixture
def owner(tidy: None, umr: str) -> Iterator[um.Md]:
    """An Md of this process; closing it leaves nothing on the device."""
    with opened(umr=umr) as md:
        yield md


@pytest.fixture
def side(peer) -> Callable[[type[Remote]], Remote]:
    """`side(Library)`: one more process of that kind."""
    return lambda kind: kind(peer)


@pytest.fixture
def library(peer) -> Library:
    """Another process, which uses our library."""
    return Library(peer)


@pytest.fixture
def attacker(peer) -> Attacker:
    """Another process, which posts raw verbs: whatever key it likes."""
    return Attacker(peer)


@pytest.fixture
def stubborn(owner: um.Md, soft: Control) -> tuple[um.Md, Callable[[int], int]]:
    """An Md, and what has its device refuse to end keys: so often, at so many commands."""

    def refuse(times: int) -> int:
        soft.fault(f"local_inv:status=6;destroy_mkey:status=6,syndrome=0xabc,count={times}")
        return times

    return owner, refuse
