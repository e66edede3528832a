# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the guest itself; they take minutes, and run when `-m guest` asks for them."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "guest: boots guests; runs when asked for by -m")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "guest" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("guest")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
