# SPDX-License-Identifier: BSD-3-Clause
"""A pytest plugin: fake devices as fixtures, and a mark for tests that need a real one.

It is no entry point, so that it costs nobody a thing who does not use it.  In the top conftest.py::

    pytest_plugins = ["ucx_memh.testing.plugin"]

Fixtures: `fakes`, `python_devices`.  Mark: `needs_md(spec)` skips a test, with the reason, where
ucx_memh.open_md(spec) would find no device.
"""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("ucx_memh.testing.suite")

__all__ = ["Fakes", "PythonDevices", "fakes", "python_devices"]


class Fakes:
    """The fake devices of a test, and the allocator that the core uses meanwhile."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.opened: list[tuple[Any, Any, bool]] = []

    def __call__(self, **options: Any) -> tuple[Any, Any]:
        """(Md, FakeDevice), by the options of open_fake()."""
        from ucx_memh.testing import open_fake

        md, device = open_fake(**options)
        self.opened.append((md, device, options.get("destroy") == "manual"))
        return md, device

    def connected(self, **options: Any) -> tuple[Any, Any, Any, Any]:
        """An Md, its device and two endpoints of it that are connected to each other."""
        md, device = self(**options)
        return md, device, *_pair(md)

    def end(self) -> None:
        """Close all; then no key may be left, and no rule may have been broken meanwhile."""
        while self.opened:
            md, device, manual = self.opened.pop()
            device.clear_faults()
            device.release()
            if manual:  # a forced close waits for destructions that the test alone lets end
                closing = threading.Thread(target=md.close, args=(True,))
                closing.start()
                while closing.is_alive():
                    device.complete()
                    closing.join(0.001)
            else:
                md.close(force=True)
            assert device.closed
            assert device.live_keys == {}
            assert device.violations == {}


class PythonDevices:
    """The devices of a test that are written in Python."""

    def __init__(self) -> None:
        self.opened: list[tuple[Any, Any]] = []

    def __call__(self, **options: Any) -> tuple[Any, Any]:
        """(Md, PythonDevice), by the options of open_python_device()."""
        from ucx_memh.testing import open_python_device

        md, device = open_python_device(**options)
        self.opened.append((md, device))
        return md, device

    def connected(self, **options: Any) -> tuple[Any, Any, Any, Any]:
        """An Md, its device and two endpoints of it that are connected to each other."""
        md, device = self(**options)
        return md, device, *_pair(md)

    def end(self) -> None:
        """Close all; then no key and no endpoint may be left."""
        for md, device in self.opened:
            device.faults.clear()
            device.delays.clear()
            device.destroy = "now" if not device.dying else "progress"
            md.close(force=True)
            assert device.keys == {}
            assert device.ends == {}
            assert device.calls["close"] == 1


def _pair(md: Any) -> tuple[Any, Any]:
    one, two = md.endpoint(), md.endpoint()
    one.connect(two.address)
    two.connect(one.address)
    return one, two


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    """`fakes(**options)` is open_fake(**options), with a reckoning when the test has passed.

    No rule of backend.h was broken, and nothing is live: no native key, no block of memory.  The
    core's memory is poisoned meanwhile (`fakes.memory`).
    """
    from ucx_memh.testing import PoisonAllocator

    with PoisonAllocator() as memory:
        devices = Fakes(memory)
        yield devices
        devices.end()
        if memory.live:
            gc.collect()
        memory.check()
        assert memory.live == 0, "the core has not freed everything"


@pytest.fixture
def python_devices() -> Iterator[PythonDevices]:
    """`python_devices(**options)` is open_python_device(**options); in the end nothing is left."""
    devices = PythonDevices()
    yield devices
    devices.end()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs_md(spec): skip where ucx_memh.open_md(spec) finds no device"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs_md"):
        _need(*mark.args)


def _need(spec: str) -> None:
    import ucx_memh as um

    component, _, md_name = spec.partition("/")
    try:
        found = um.query_mds(component)
    except (um.NoDeviceError, um.InvalidParamError) as error:
        pytest.skip(f"needs {spec}: {error}")
    if md_name not in ("", *(md.md_name for md in found)):
        pytest.skip(f"needs {spec}; there is {', '.join(map(str, found))}")
