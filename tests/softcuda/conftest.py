# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for the tests of the software CUDA driver itself. Nothing of ucx_memh is used here."""

import pytest


@pytest.fixture
def gpu(driver):
    """The same, with the context of device 0."""
    driver.use()
    return driver


@pytest.fixture
def two_gpus(driver, monkeypatch):
    """Two devices; the context is that of device 0."""
    monkeypatch.setenv("SOFTCUDA_DEVICES", "2")
    driver.use()
    return driver
