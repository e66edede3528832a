# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for the tests of the software device itself. Nothing of ucx_memh is used here."""

import pytest

from softmlx5 import sm5
from softmlx5.worker import Worker


@pytest.fixture(autouse=True)
def neutral():
    """Settings are process-wide: every test begins and ends with the defaults."""
    yield
    sm5.setting("gate", "open")
    sm5.fault("")
    sm5.setting("path", "auto")
    sm5.setting("memlock", "auto")
    sm5.setting("index_policy", "lowest")


@pytest.fixture
def dev(neutral):
    d = sm5.Device()
    yield d
    sm5.setting("gate", "open")
    d.close()


@pytest.fixture
def dev2(neutral):
    d = sm5.Device()
    yield d
    sm5.setting("gate", "open")
    d.close()


@pytest.fixture
def loop(dev):
    """Two queue pairs of one context, connected, and two registered buffers: (local, remote)."""
    qa, qb = sm5.pair(dev)
    a, b = sm5.Buf(1 << 20), sm5.Buf(1 << 20)
    return qa, qb, a, b, dev.reg(a), dev.reg(b)


@pytest.fixture
def worker():
    made = []

    def make(**kw):
        made.append(Worker(**kw))
        return made[-1]

    yield make
    for w in made:
        w.close()


OWNER = """
dev = Device()
q = dev.qp()
buf = Buf({size})
mr = dev.reg(buf)
"""


class Remote:
    """A worker that owns memory, connected to a queue pair here."""

    def __init__(self, dev, worker, size=1 << 20, first="None", **env):
        self.w = worker(**env)
        self.w(first)
        self.w(OWNER.format(size=size))
        self.q = dev.qp()
        gid, lid, num = self.w("q.address")
        self.w(f"q.connect((bytes({list(self.q.address[0])}), {self.q.address[1]}, {self.q.num}))")
        self.q.connect((bytes(gid), lid, num))
        self.addr, self.rkey = self.w("(buf.addr, mr.contents.rkey)")


@pytest.fixture
def remote(dev, worker):
    return lambda *args, **kw: Remote(dev, worker, *args, **kw)
