# SPDX-License-Identifier: BSD-3-Clause
"""Requests, completions, order, errors: what a program sees of a queue pair."""

import errno
import os
import select
import threading
import time

import pytest

from softmlx5 import sm5
from softmlx5.sm5 import (
    CAS,
    ERR,
    FAA,
    FLUSH,
    INLINE,
    LOC_LEN,
    OK,
    READ,
    REM_ACCESS,
    REM_INV_REQ,
    REM_OP,
    RESET,
    RETRY_EXC,
    RNR_EXC,
    RTS,
    SEND,
    SEND_IMM,
    SIGNALED,
    SOLICITED,
    WRITE,
    WRITE_IMM,
    Buf,
    Cap,
    QpInit,
)


@pytest.fixture(params=["auto", "socket"])
def both(request, dev, loop):
    """The loop, over the direct path and over the slow one; they must not differ."""
    sm5.setting("path", request.param)
    qa, qb, a, b, ma, mb = loop
    for q in (qa, qb):
        q.reset()
    for q, p in ((qa, qb), (qb, qa)):
        q.connect(p.address)
    return qa, qb, a, b, ma.contents.lkey, mb.contents.rkey


@pytest.mark.parametrize("n", [1, 7, 8, 4096, 4097, 131072, 131073, 262144, 262145, 1 << 20])
def test_read_write_sizes(both, n):
    qa, _qb, a, b, lkey, rkey = both
    data = os.urandom(n)
    a.write(data)
    assert qa.run(WRITE, [(a.addr, n, lkey)], b.addr + b.size - n, rkey) == OK
    assert b.read(b.size - n) == data
    a.fill(0)
    assert qa.run(READ, [(a.addr, n, lkey)], b.addr + b.size - n, rkey) == OK
    assert a.read(0, n) == data and not any(a.read(n))


def test_scatter_lists(both):
    qa, _qb, a, b, lkey, rkey = both
    a.write(bytes(range(200)))
    sges = [(a.addr + 150, 50, lkey), (a.addr, 0, 0), (a.addr, 100, lkey), (a.addr + 100, 50, lkey)]
    assert qa.run(WRITE, sges, b.addr, rkey) == OK
    assert b.read(0, 200) == bytes(range(150, 200)) + bytes(range(150))
    a.fill(0)
    assert qa.run(READ, sges, b.addr, rkey) == OK
    assert a.read(0, 200) == bytes(range(200))


def test_atomics(both):
    qa, _qb, a, b, lkey, rkey = both
    b.u64().value = 2**64 - 2
    sge = [(a.addr, 8, lkey)]
    assert qa.run(FAA, sge, b.addr, rkey, add=5) == OK
    assert (a.u64().value, b.u64().value) == (2**64 - 2, 3)
    assert qa.run(CAS, sge, b.addr, rkey, add=4, swap=9) == OK
    assert (a.u64().value, b.u64().value) == (3, 3)
    assert qa.run(CAS, sge, b.addr, rkey, add=3, swap=9) == OK
    assert (a.u64().value, b.u64().value) == (3, 9)
    assert qa.run(FAA, [(a.addr, 4, lkey)], b.addr, rkey) == LOC_LEN


def test_completions_say_what_they_are(both):
    qa, _qb, a, b, lkey, rkey = both
    sge = [(a.addr, 8, lkey)]
    for op, opcode, n in ((READ, 2, 8), (WRITE, 1, 0), (CAS, 3, 8), (FAA, 4, 8)):
        qa.post(op, sge, b.addr, rkey, wr_id=op + 100)
        wc = qa.dev.poll(1)[0]
        assert (wc.wr_id, wc.status, wc.opcode, wc.qp_num) == (op + 100, OK, opcode, qa.num)
        if n:
            assert wc.byte_len == n


def test_send_receive(both):
    qa, qb, a, b, lkey, rkey = both
    a.write(b"0123456789" * 30000)
    mb = qa.dev.mrs[-1].contents.lkey
    assert qb.post_recv([(b.addr, 100, mb), (b.addr + 1000, 1 << 19, mb)], wr_id=1) == 0
    assert qb.post_recv([], wr_id=2) == 0
    assert qb.post_recv([], wr_id=3) == 0
    qa.post(SEND, [(a.addr, 300000, lkey)], wr_id=10)
    qa.post(SEND_IMM, [], wr_id=11, imm=0xDEADBEEF)
    qa.post(WRITE_IMM, [(a.addr, 16, lkey)], b.addr + 8192, rkey, wr_id=12, imm=77)
    got = {(w.wr_id): w for w in qa.dev.poll(6)}
    assert all(w.status == OK for w in got.values())
    assert (got[1].opcode, got[1].byte_len, got[1].src_qp, got[1].qp_num) == (
        128,
        300000,
        qa.num,
        qb.num,
    )
    assert b.read(0, 100) + b.read(1000, 7092) == a.read(0, 7192)
    assert b.read(8192 + 16, 300000 - 7308) == a.read(7308, 300000 - 7308)  # beyond the later write
    assert (got[2].flags & 2, got[2].imm) == (2, 0xDEADBEEF)
    assert (got[3].opcode, got[3].imm, got[3].byte_len) == (129, 77, 16)
    assert b.read(8192, 16) == a.read(0, 16)


def test_inline_data_is_taken_at_the_post(both):
    qa, _qb, a, b, lkey, rkey = both
    a.write(b"first")
    w = qa.wr(
        WRITE, [(a.addr, 2, 0), (a.addr + 2, 3, 0xBAD)], b.addr, rkey, flags=SIGNALED | INLINE
    )
    assert qa.post_wr(w) == 0
    a.write(b"XXXXX")
    assert qa.dev.poll(1)[0].status == OK
    assert b.read(0, 5) == b"first"
    big = qa.wr(WRITE, [(a.addr, 257, lkey)], b.addr, rkey, flags=SIGNALED | INLINE)
    assert qa.post_wr(big) == errno.ENOMEM
    assert qa.post_wr(qa.wr(READ, [(a.addr, 8, lkey)], b.addr, rkey, flags=INLINE)) == errno.EINVAL


def test_order_and_unsignaled(both):
    """Writes land in order; one signaled completion stands for all before it."""
    qa, _qb, a, b, lkey, rkey = both
    for i in range(200):
        a.u64(8 * i).value = i
        qa.post(
            WRITE,
            [(a.addr + 8 * i, 8, lkey)],
            b.addr,
            rkey,
            wr_id=i,
            flags=SIGNALED if i == 199 else 0,
        )
    assert [w.wr_id for w in qa.dev.poll(1)] == [199]
    assert b.u64().value == 199
    qa.dev.poll_none()


def test_loopback_to_itself(dev):
    q = dev.qp()
    q.connect(q.address)
    b = Buf(4096, 7)
    key = dev.reg(b).contents.lkey
    assert q.run(READ, [(b.addr, 8, key)], b.addr + 100, key) == OK
    q.post_recv([(b.addr, 8, key)])
    q.post(SEND, [(b.addr + 8, 8, key)])
    assert [w.status for w in dev.poll(2)] == [OK, OK]


# ---- queue limits ----


def test_send_queue_depth_is_given_back_by_polling(dev):
    qa, qb = dev.qp(depth=4), dev.qp()
    qa.connect(qb.address)
    qb.connect(qa.address)
    b = Buf(4096)
    key = dev.reg(b).contents.lkey
    w = [
        qa.wr(READ, [(b.addr, 8, key)], b.addr, key, wr_id=i, flags=SIGNALED if i == 3 else 0)
        for i in range(4)
    ]
    for x in w:
        assert qa.post_wr(x) == 0
    time.sleep(0.02)
    assert qa.post_wr(w[0]) == errno.ENOMEM  # done perhaps, but not polled
    assert dev.poll(1)[0].wr_id == 3
    for x in w:
        assert qa.post_wr(x) == 0
    dev.poll(1)


def test_receive_queue_depth(dev):
    q = dev.qp(depth=2)
    q.init()
    assert [q.post_recv() for _ in range(3)] == [0, 0, errno.ENOMEM]
    q.reset()
    assert q.post_recv() == errno.EINVAL


def test_completion_queue_overrun(dev):
    small = sm5.create_cq(dev.ctx, 2, None, None, 0)
    qa, qb = dev.qp(cq=small), dev.qp()
    qa.connect(qb.address)
    qb.connect(qa.address)
    for i in range(4):
        qa.post(READ, [], 0, 0, wr_id=i)
    wc = (sm5.Wc * 8)()
    time.sleep(0.05)
    assert dev._poll(small, 8, wc) == 2
    assert dev._poll(small, 8, wc) < 0
    ev = (sm5.C.c_uint64 * 2)()
    assert select.select([dev_async_fd(dev)], [], [], 2)[0]
    assert sm5.lib.ibv_get_async_event(sm5.vp(dev.ctx), ev) == 0
    assert (ev[0], ev[1] & 0xFFFFFFFF) == (small, 0)  # IBV_EVENT_CQ_ERR
    sm5.lib.ibv_ack_async_event(ev)
    assert sm5.destroy_cq(small) == errno.EBUSY
    qa.destroy()
    assert sm5.destroy_cq(small) == 0


def dev_async_fd(dev):
    # struct ibv_context: device, 32 pointers of ops, cmd_fd, async_fd
    return sm5.C.c_int.from_address(dev.ctx + 8 + 32 * 8 + 4).value


def test_resize_cq_keeps_what_is_there(dev, loop):
    qa, _qb, _a, _b, _ma, _mb = loop
    for i in range(5):
        qa.post(READ, [], 0, 0, wr_id=i)
    time.sleep(0.05)
    wc = (sm5.Wc * 1)()
    assert dev._poll(dev.cq, 1, wc) == 1
    assert sm5.resize_cq(dev.cq, 3) == errno.EINVAL
    assert sm5.resize_cq(dev.cq, 4) == 0
    assert [w.wr_id for w in dev.poll(4)] == [1, 2, 3, 4]


# ---- errors ----


def test_remote_access_error_takes_both_ends(both):
    qa, qb, a, b, lkey, rkey = both
    sge = [(a.addr, 8, lkey)]
    qb.post_recv(wr_id=50)
    qb.post_recv(wr_id=51)
    qa.post_recv(wr_id=60)
    naks = sm5.stat("naks")
    qa.post(READ, sge, b.addr, rkey, wr_id=1)
    qa.post(READ, sge, b.addr, 0xBAD00, wr_id=2, flags=0)  # an error completes, signaled or not
    qa.post(WRITE, sge, b.addr, rkey, wr_id=3, flags=0)
    got = qa.dev.poll(6)
    assert [(w.wr_id, w.status) for w in got if w.qp_num == qa.num and w.wr_id < 50] == [
        (1, OK),
        (2, REM_ACCESS),
        (3, FLUSH),
    ]
    assert sorted((w.wr_id, w.status) for w in got if w.wr_id >= 50) == [
        (50, FLUSH),
        (51, FLUSH),
        (60, FLUSH),
    ]
    assert next(w for w in got if w.wr_id == 2).vendor_err == 0x88
    assert (qa.state, qb.state) == (ERR, ERR)
    assert sm5.stat("naks") == naks + 1
    qa.post(READ, sge, b.addr, rkey, wr_id=9)  # legal in the error state: flushed at once
    assert [(w.wr_id, w.status) for w in qa.dev.poll(1)] == [(9, FLUSH)]
    ev = (sm5.C.c_uint64 * 2)()
    assert sm5.lib.ibv_get_async_event(sm5.vp(qa.dev.ctx), ev) == 0
    assert (ev[0], ev[1] & 0xFFFFFFFF) == (qb.qp, 3)  # QP_ACCESS_ERR, at the responder
    sm5.lib.ibv_ack_async_event(ev)


def test_both_ends_work_again_after_reset(both):
    qa, qb, a, b, lkey, rkey = both
    sge = [(a.addr, 8, lkey)]
    for _ in range(5):
        assert qa.run(READ, sge, b.addr, 0xBAD00) == REM_ACCESS
        qa.reset()
        qb.reset()
        qa.connect(qb.address)
        qb.connect(qa.address)
        assert qa.run(READ, sge, b.addr, rkey) == OK
        assert qb.run(READ, [(b.addr, 8, rkey)], a.addr, lkey) == OK


def test_receive_too_small(both):
    qa, qb, a, b, lkey, rkey = both
    qb.post_recv([(b.addr, 7, rkey)], wr_id=1)
    qa.post(SEND, [(a.addr, 8, lkey)], wr_id=2)
    assert sorted((w.wr_id, w.status) for w in qa.dev.poll(2)) == [(1, LOC_LEN), (2, REM_INV_REQ)]
    assert (qa.state, qb.state) == (ERR, ERR)


def test_receive_into_what_is_not_ours(both):
    qa, qb, a, b, lkey, _rkey = both
    qb.post_recv([(b.addr, 8, 0xBAD00)], wr_id=1)
    qa.post(SEND, [(a.addr, 8, lkey)], wr_id=2)
    got = {w.wr_id: w.status for w in qa.dev.poll(2)}
    assert got[2] == REM_OP and got[1] != OK
    assert (qa.state, qb.state) == (ERR, ERR)


def test_receiver_not_ready(dev):
    a = Buf(4096, 9)
    key = dev.reg(a).contents.lkey
    qa, qb = dev.qp(), dev.qp()
    qa.connect(qb.address, rnr=0)
    qb.connect(qa.address)
    assert qa.run(SEND, [(a.addr, 8, key)]) == RNR_EXC
    assert (qa.state, qb.state) == (ERR, RTS)
    qa, qb = sm5.pair(dev, rnr=7)  # for ever
    qa.post(SEND, [(a.addr, 8, key)], wr_id=1)
    dev.poll_none(0.05)
    qb.post_recv([(a.addr + 8, 8, key)], wr_id=2)
    assert [w.status for w in dev.poll(2)] == [OK, OK]
    qa, qb = dev.qp(), dev.qp()
    qa.connect(qb.address, rnr=2)
    qb.connect(qa.address, min_rnr=24)  # 40.96 ms, twice
    t = time.monotonic()
    assert qa.run(SEND, [(a.addr, 8, key)]) == RNR_EXC
    assert 0.06 < time.monotonic() - t < 1


def test_nobody_there(dev):
    qa = dev.qp()
    qa.connect((bytes.fromhex("fe80000000000000") + bytes(8), 1, 5), timeout=10, retry=1)
    qa.post(READ, [], 0, 0, wr_id=1)
    qa.post(READ, [], 0, 0, wr_id=2)
    t = time.monotonic()
    assert [(w.wr_id, w.status) for w in dev.poll(2)] == [(1, RETRY_EXC), (2, FLUSH)]
    assert time.monotonic() - t < 1
    assert qa.state == ERR


def test_receiver_that_is_not_for_us(dev):
    """Right address, but that queue pair talks to somebody else, or at another sequence number."""
    qa, qb, qc = dev.qp(), dev.qp(), dev.qp()
    qb.connect(qc.address)
    qa.connect(qb.address, timeout=8)
    assert qa.run(READ, [], 0, 0) == RETRY_EXC
    qd, qe = dev.qp(), dev.qp()
    qd.connect(qe.address, timeout=8, psn=5)
    qe.connect(qd.address)
    assert qd.run(READ, [], 0, 0) == RETRY_EXC
    assert qe.state == RTS


def test_sender_may_be_first(dev):
    qa, qb = dev.qp(), dev.qp()
    qa.connect(qb.address, timeout=14)
    qa.post(READ, [], 0, 0, wr_id=1)
    dev.poll_none(0.03)
    qb.init()
    dev.poll_none(0.03)
    qb.rtr(qa.address)
    assert dev.poll(1)[0].status == OK  # ready to receive is enough


def test_old_incarnation_is_not_mixed_up(dev, loop):
    """One end is reconnected to somebody new: the other's connection is over."""
    qa, qb, a, b, ma, mb = loop
    qc = dev.qp()
    sge = [(a.addr, 8, ma.contents.lkey)]
    assert qa.run(READ, sge, b.addr, mb.contents.rkey) == OK
    qb.reset()
    qb.connect(qc.address)
    qc.connect(qb.address)
    assert qc.run(READ, sge, b.addr, mb.contents.rkey) == OK
    assert qa.run(READ, sge, b.addr, mb.contents.rkey) == RETRY_EXC
    assert qc.run(READ, sge, b.addr, mb.contents.rkey) == OK


# ---- states ----


def test_transitions_are_checked(dev):
    q = dev.qp()
    assert q.modify(qp_state=RTS) == errno.EINVAL
    assert q.modify(qp_state=sm5.INIT) == errno.EINVAL  # attributes missing
    mask = sm5.M_STATE | sm5.M_PKEY | sm5.M_PORT | sm5.M_ACCESS
    assert q.modify(mask, qp_state=sm5.INIT, port_num=2) == errno.EINVAL
    assert q.modify(mask | sm5.M_QKEY, qp_state=sm5.INIT, port_num=1) == errno.EINVAL
    assert (
        q.modify(mask | sm5.M_CUR, qp_state=sm5.INIT, port_num=1, cur_qp_state=RTS) == errno.EINVAL
    )
    assert q.post_wr(q.wr(READ)) == errno.EINVAL
    q.init()
    assert q.post_wr(q.wr(READ)) == errno.EINVAL
    assert q.modify(qp_state=sm5.RTR) == errno.EINVAL
    q.rtr(q.address)
    assert q.post_wr(q.wr(READ)) == errno.EINVAL
    q.rts()
    assert q.state == RTS
    assert q.modify(qp_state=sm5.INIT) == errno.EINVAL
    q.error()
    assert q.modify(qp_state=RTS) == errno.EINVAL
    q.reset()
    assert q.state == RESET


def test_drained_state_holds_requests_back(dev, loop):
    qa, _qb, _a, _b, _ma, _mb = loop
    assert qa.run(READ, [], 0, 0) == OK
    assert qa.modify(qp_state=sm5.SQD) == 0
    qa.post(READ, [], 0, 0, wr_id=3)
    dev.poll_none(0.03)
    assert qa.modify(qp_state=RTS) == 0
    assert dev.poll(1)[0].status == OK


def test_error_by_request_flushes(dev, loop):
    qa, _qb, *_ = loop
    qa.post_recv(wr_id=1)
    qa.error()
    assert [(w.wr_id, w.status) for w in dev.poll(1)] == [(1, FLUSH)]
    qa.post_recv(wr_id=2)
    assert [(w.wr_id, w.status) for w in dev.poll(1)] == [(2, FLUSH)]


def test_children_keep_their_parents(dev):
    q = dev.qp()
    assert sm5.close_device(dev.ctx) == errno.EBUSY
    assert sm5.dealloc_pd(dev.pd) == errno.EBUSY
    assert sm5.destroy_cq(dev.cq) == errno.EBUSY
    q.destroy()


def test_create_qp_limits(dev):
    for change in (
        {"qp_type": 4},
        {"send_cq": None},
        {"cap": Cap(1 << 20, 1, 1, 1, 0)},
        {"cap": Cap(1, 1, 31, 1, 0)},
        {"cap": Cap(1, 1, 1, 1, 4096)},
    ):
        init = QpInit(None, dev.cq, dev.cq, None, Cap(1, 1, 1, 1, 0), 2, 0)
        for k, v in change.items():
            setattr(init, k, v)
        assert not sm5.create_qp(dev.pd, sm5.C.byref(init))


# ---- completion events ----


def test_completion_events():
    dev = sm5.Device(channel=True)
    qa, qb = sm5.pair(dev)
    fd = sm5.C.c_int.from_address(dev.channel + 8).value

    def ready(t):
        return bool(select.select([fd], [], [], t)[0])

    qa.post(READ, [], 0, 0)
    assert not ready(0.05)  # not armed
    assert dev._notify(dev.cq, 0) == 0
    dev.poll(1)
    assert dev._notify(dev.cq, 0) == 0
    while ready(0):  # the first arming may have fired for what was there
        take_event(dev)
        dev._notify(dev.cq, 0)
    qa.post(READ, [], 0, 0)
    assert ready(2)  # nobody polls: the engine looks for us
    take_event(dev)
    dev.poll(1)
    qa.post(READ, [], 0, 0)
    assert not ready(0.05)  # one event for one arming
    dev.poll(1)
    dev._notify(dev.cq, 1)
    for flags, want in ((SIGNALED, False), (SIGNALED | SOLICITED, True)):
        qb.post_recv()
        qa.post(SEND, [], flags=flags)
        assert ready(0.1) == want
        dev.poll(2)
    take_event(dev)
    dev.close()


def take_event(dev):
    cq, ctx = sm5.vp(), sm5.vp()
    assert sm5.get_cq_event(dev.channel, sm5.C.byref(cq), sm5.C.byref(ctx)) == 0
    assert cq.value == dev.cq
    sm5.ack_cq_events(dev.cq, 1)


# ---- many at once ----


def test_threads_on_their_own_queue_pairs(dev):
    """Four threads, each with its connection and queue; data and counts come out exact."""
    errors = []

    def work(i):
        try:
            cq = sm5.create_cq(dev.ctx, 64, None, None, 0)
            qa, qb = dev.qp(cq=cq), dev.qp(cq=cq)
            qa.connect(qb.address)
            qb.connect(qa.address)
            b = Buf(8192)
            key = dev.reg(b).contents.lkey
            for n in range(200):
                assert qa.run(FAA, [(b.addr + 8, 8, key)], shared.addr, skey, add=1) == OK
                b.u64(64).value = n
                assert qa.run(WRITE, [(b.addr + 64, 8, key)], b.addr + 4096, key) == OK
                assert b.u64(4096).value == n
            qa.destroy()
            qb.destroy()
            assert sm5.destroy_cq(cq) == 0
        except BaseException as e:
            errors.append(e)

    shared = Buf(4096)
    skey = dev.reg(shared).contents.rkey
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors
    assert shared.u64().value == 800


def test_two_contexts_of_one_process(dev, dev2):
    qa, _qb = sm5.pair(dev, dev2)
    a, b = Buf(1 << 16, 1), Buf(1 << 16, 2)
    ka, kb = dev.reg(a).contents.lkey, dev2.reg(b).contents.rkey
    assert qa.run(READ, [(a.addr, 1 << 16, ka)], b.addr, kb) == OK
    assert a.read() == b.read()
    assert qa.run(READ, [(a.addr, 8, ka)], a.addr, ka) == REM_ACCESS  # our key is none over there
