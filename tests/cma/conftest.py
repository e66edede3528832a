# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for cma: real system calls, real peers."""

import os

import pytest

import ucx_memh as um
from _cma import Told


@pytest.fixture(autouse=True)
def silence(capfd):
    """Nothing is ever printed, whatever fails."""
    yield
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def md():
    """An open domain; nothing of it is left open."""
    before = len(os.listdir("/proc/self/fd"))
    domain = um.open_md("cma")
    yield domain
    domain.close(force=True)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def ep(md):
    return md.endpoint()


@pytest.fixture
def tell(peer):
    """`tell(uid, config)` starts a process that does as it is told."""

    def start(uid=0, config=None):
        return Told(peer, uid, config)

    return start


@pytest.fixture
def calls(md):
    """How often the domain made process_vm calls since it was last asked."""
    last = 0

    def new():
        nonlocal last
        before, last = last, md.stats()["device.process_vm_calls"]
        return last - before

    return new
