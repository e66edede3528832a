# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for cuda_ipc: on the software driver, and with `-m gpu` on the machine's own."""

from collections.abc import Callable, Iterator

import pytest

import ucx_memh as um
from _gpu import REAL, Far, Gpu


@pytest.fixture(autouse=True)
def silence(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is ever printed, whatever fails."""
    yield
    assert capfd.readouterr() == ("", "")


def ended(path: str) -> Iterator[Gpu]:
    made = Gpu(path)
    yield made
    made.end()


@pytest.fixture
def settings() -> dict[str, str]:
    """The software driver's environment; a module that wants two devices has its own."""
    return {}


@pytest.fixture
def soft(
    request: pytest.FixtureRequest,
    softcuda: Callable[..., str],
    settings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Gpu]:
    """The software driver, for tests that steer it or count its calls."""
    assert not request.node.get_closest_marker("gpu"), "a test on a GPU asks for `gpu`"
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield from ended(softcuda())


@pytest.fixture(params=["soft", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """The software driver, or the real one."""
    if request.param == "soft":
        yield request.getfixturevalue("soft")
    else:
        yield from ended(REAL)


@pytest.fixture
def driver_in_use(request: pytest.FixtureRequest) -> Gpu:
    """Whichever of the two the test has asked for; the software one if it has not."""
    return request.getfixturevalue("gpu" if "gpu" in request.fixturenames else "soft")


@pytest.fixture
def md(driver_in_use: Gpu) -> Iterator[um.Md]:
    opened = driver_in_use.open()
    yield opened
    opened.close(force=True)


@pytest.fixture
def ep(md: um.Md) -> um.Endpoint:
    return md.endpoint()


@pytest.fixture
def far(driver_in_use: Gpu, peer: Callable[..., object]) -> Far:
    """Another process, with memory on the device."""
    return Far(peer, driver_in_use.where)


@pytest.fixture
def more(driver_in_use: Gpu, peer: Callable[..., object]) -> Callable[[], Far]:
    """`more()`: yet another one."""
    return lambda: Far(peer, driver_in_use.where)
