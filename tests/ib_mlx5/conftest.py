# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of ib_mlx5 share."""

import ctypes
import gc
from collections.abc import Iterator

import pytest

import ucx_memh as um
from _rawqp import RawPeer, software_library
from _sides import Attacker, Library, opened


class Control:
    """The software device's control surface, for what no driver could ask or do."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        self._lib.softmlx5_stat.restype = ctypes.c_uint64

    def stat(self, name: str) -> int:
        value = self._lib.softmlx5_stat(name.encode())
        assert value != 2**64 - 1, f"no counter {name}"
        return value

    def set(self, name: str, value: object) -> None:
        assert self._lib.softmlx5_set(name.encode(), str(value).encode()) == 0, (name, value)

    def fault(self, text: str) -> None:
        assert self._lib.softmlx5_fault(text.encode()) == 0, text


@pytest.fixture(scope="session")
def software() -> str:
    """Path of the software device."""
    return software_library()


@pytest.fixture
def soft(software) -> Iterator[Control]:
    """Its control surface; faults are cleared afterwards, settings by whoever made them."""
    control = Control(software)
    yield control
    control.fault("")


@pytest.fixture
def md() -> Iterator[um.Md]:
    with um.open_md("ib_mlx5", device="software") as opened:
        yield opened


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    with RawPeer() as opened:
        yield opened


# ---- two processes ----


@pytest.fixture
def tidy(soft: Control) -> Iterator[None]:
    """When the test has ended the device holds what it held before, and its settings are back."""
    live = [f"{name}.live" for name in ("mkeys", "mrs", "qps", "cqs", "pds", "contexts")]
    before = [soft.stat(name) for name in live]
    yield
    soft.set("gate", "open")
    soft.set("path", "auto")
    soft.set("index_policy", "lowest")
    gc.collect()
    assert dict(zip(live, [soft.stat(name) for name in live], strict=True)) == dict(
        zip(live, before, strict=True)
    )


@pytest.fixture
def owner(tidy: None) -> Iterator[um.Md]:
    """An Md of this process; closing it leaves nothing on the device."""
    with opened() as md:
        yield md


@pytest.fixture
def library(peer) -> Library:
    """Another process, which uses our library."""
    return Library(peer)


@pytest.fixture
def attacker(peer) -> Attacker:
    """Another process, which posts raw verbs: whatever key it likes."""
    return Attacker(peer)
