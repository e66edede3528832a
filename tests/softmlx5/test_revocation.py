# SPDX-License-Identifier: BSD-3-Clause
"""Once DESTROY_MKEY, LOCAL_INV or a deregistration has returned, the key touches nothing."""

import threading
import time

import pytest

from softmlx5 import sm5
from softmlx5.sm5 import LOC_PROT, LW, OK, READ, REM_ACCESS, RR, RW, WRITE, Buf

CHUNK = 256 << 10
SLOW = 128 << 10


class Later(threading.Thread):
    """A blocking call in a thread of its own."""

    def __init__(self, f):
        super().__init__()
        self.f, self.value = f, None
        self.start()

    def run(self):
        self.value = self.f()

    def blocked(self):
        time.sleep(0.05)
        return self.is_alive()


@pytest.fixture(params=["direct", "slow"])
def big(request, dev):
    sm5.setting("path", "socket" if request.param == "slow" else "auto")
    qa, qb = sm5.pair(dev)
    a, b = Buf(4 * CHUNK, 0x11), Buf(4 * CHUNK, 0x22)
    ma, mb = dev.reg(a), dev.reg(b)
    assert qa.run(READ, [], 0, 0) == OK  # connected
    return qa, qb, a, b, ma, mb, SLOW if request.param == "slow" else CHUNK


def gate(n):
    assert sm5.setting("gate", n) == 0


def arrived():
    sm5.wait_for(lambda: sm5.stat("gate.waiting") == 1)


@pytest.mark.parametrize("held", [0, 1, 3])
def test_destroy_waits_for_one_chunk_and_stops_the_rest(dev, big, held):
    qa, _qb, a, b, ma, mb, chunk = big
    k = dev.klm([(b.size, mb.contents.lkey, b.addr)], 0)
    chunks = sm5.stat("chunks")
    gate(held)
    qa.post(WRITE, [(a.addr, a.size, ma.contents.lkey)], 0, k.key)
    arrived()
    d = Later(k.destroy)
    assert d.blocked()
    other = dev.klm([(8, mb.contents.lkey, b.addr)], 0)  # commands go on meanwhile
    assert other.destroy() == 0
    gate("open")
    d.join(5)
    assert d.value == 0
    now = b.read()
    assert now == b"\x11" * ((held + 1) * chunk) + b"\x22" * (b.size - (held + 1) * chunk)
    b.fill(0x33)
    if (held + 1) * chunk < b.size:
        assert dev.poll(1)[0].status == REM_ACCESS
    else:
        assert dev.poll(1)[0].status == OK
    time.sleep(0.02)
    assert b.read() == b"\x33" * b.size
    assert sm5.stat("chunks") == chunks + held + 1


def test_window_invalidation_waits_too(dev, big):
    """LOCAL_INV on another, healthy queue pair of the same context."""
    qa, _qb, a, b, ma, mb, chunk = big
    qc, _qd = sm5.pair(dev)
    init = sm5.DvMkeyInit(dev.pd, 1, 1)
    k = sm5.dv_create_mkey(sm5.C.byref(init))
    key = k.contents.rkey + 1
    mw = sm5.C.pointer(sm5.Mw(dev.ctx, dev.pd, k.contents.rkey, 0, 1))
    qc.bind(mw, key, mb, b.addr, b.size, LW | RR | RW)
    assert dev.poll(1)[0].status == OK
    gate(1)
    qa.post(WRITE, [(a.addr, a.size, ma.contents.lkey)], b.addr, key, wr_id=1)
    arrived()
    d = Later(lambda: qc.post_wr(qc.wr(sm5.LOCAL_INV, imm=key, wr_id=2)))
    assert d.blocked()
    gate("open")
    d.join(5)
    assert d.value == 0
    got = {w.wr_id: w.status for w in dev.poll(2)}
    assert got == {1: REM_ACCESS, 2: OK}
    assert b.read() == b"\x11" * (2 * chunk) + b"\x22" * (b.size - 2 * chunk)
    assert sm5.dv_destroy_mkey(k) == 0


def test_dereg_of_the_target(dev, big):
    qa, _qb, a, b, ma, mb, chunk = big
    gate(0)
    qa.post(READ, [(a.addr, a.size, ma.contents.lkey)], b.addr, mb.contents.rkey)
    arrived()
    d = Later(lambda: dev.dereg(mb))
    assert d.blocked()
    gate("open")
    d.join(5)
    assert d.value == 0
    assert dev.poll(1)[0].status == REM_ACCESS
    assert a.read()[chunk:] == b"\x11" * (a.size - chunk)


def test_dereg_of_the_initiators_own_buffer(dev):
    qa, _qb = sm5.pair(dev)
    a, b = Buf(4 * CHUNK, 0x11), Buf(4 * CHUNK, 0x22)
    ma, mb = dev.reg(a), dev.reg(b)
    gate(0)
    qa.post(READ, [(a.addr, a.size, ma.contents.lkey)], b.addr, mb.contents.rkey)
    arrived()
    d = Later(lambda: dev.dereg(ma))
    assert d.blocked()
    gate("open")
    d.join(5)
    assert d.value == 0
    a.fill(0x44)
    assert dev.poll(1)[0].status == LOC_PROT
    time.sleep(0.02)
    assert a.read() == b"\x44" * a.size


def test_queued_requests_lose_their_local_key(dev):
    """Two requests wait behind a gated one; the second's buffer goes."""
    qa, _qb = sm5.pair(dev)
    a, a2, b = Buf(4096, 1), Buf(4096, 1), Buf(4096, 2)
    ma, ma2, mb = dev.reg(a), dev.reg(a2), dev.reg(b)
    gate(0)
    for i, (buf, m) in enumerate(((a, ma), (a, ma), (a2, ma2), (a, ma))):
        qa.post(READ, [(buf.addr, 4096, m.contents.lkey)], b.addr, mb.contents.rkey, wr_id=i)
    arrived()
    assert dev.dereg(ma2) == 0  # nobody is copying for it: no wait
    gate("open")
    assert [(w.wr_id, w.status) for w in dev.poll(4)] == [
        (0, OK),
        (1, OK),
        (2, LOC_PROT),
        (3, sm5.FLUSH),
    ]
    assert a2.read() == b"\1" * 4096


def test_dereg_of_an_unrelated_key_does_not_wait(dev, big):
    qa, _qb, a, b, ma, mb, _chunk = big
    other = Buf(4096)
    mo = dev.reg(other)
    gate(0)
    qa.post(READ, [(a.addr, a.size, ma.contents.lkey)], b.addr, mb.contents.rkey)
    arrived()
    assert dev.dereg(mo) == 0
    gate("open")
    assert dev.poll(1)[0].status == OK


@pytest.mark.parametrize("end", ["reset", "error", "destroy"])
def test_ending_a_queue_pair_waits_for_its_chunk(dev, big, end):
    """After the call the initiator's buffer is the program's again."""
    qa, _qb, a, b, ma, mb, _chunk = big
    gate(0)
    qa.post(READ, [(a.addr, a.size, ma.contents.lkey)], b.addr, mb.contents.rkey)
    arrived()
    d = Later(getattr(qa, end))
    time.sleep(0.05)
    gate("open")
    d.join(5)
    assert not d.is_alive()
    a.fill(0x55)
    time.sleep(0.02)
    assert a.read() == b"\x55" * a.size


@pytest.mark.parametrize("kind", ["klm", "dereg"])
def test_no_late_write_in_many_races(dev, kind):
    """No gate: destroy at odd moments, then look whether anything still changes."""
    a = Buf(16 * CHUNK, 0x11)
    b = Buf(16 * CHUNK)
    ma = dev.reg(a)
    refused = 0
    for i in range(40):
        qa, qb = sm5.pair(dev)
        mb = dev.reg(b)
        k = dev.klm([(b.size, mb.contents.lkey, b.addr)], 0) if kind == "klm" else None
        qa.post(
            WRITE,
            [(a.addr, a.size, ma.contents.lkey)],
            0 if k else b.addr,
            k.key if k else mb.contents.rkey,
        )
        time.sleep(i * 0.00005)
        assert (k.destroy() if k else dev.dereg(mb)) == 0
        b.fill(0x77)
        status = dev.poll(1)[0].status
        assert b.read() == b"\x77" * b.size
        refused += status == REM_ACCESS
        assert status in (OK, REM_ACCESS)
        qa.destroy()
        qb.destroy()
        if k:
            dev.dereg(mb)
    assert refused


def test_reused_index_with_another_tag_is_another_key(dev):
    qa, _qb = sm5.pair(dev)
    b = Buf(4096)
    key = dev.reg(b).contents.lkey
    old = dev.klm([(4096, key, b.addr)], 0, tag=1)
    old.destroy()
    new = dev.klm([(4096, key, b.addr)], 0, tag=2)
    assert new.index == old.index
    assert qa.run(READ, [(b.addr, 8, key)], 0, new.key) == OK
    assert qa.run(READ, [(b.addr, 8, key)], 0, old.key) == REM_ACCESS
    new.destroy()
