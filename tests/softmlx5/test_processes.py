# SPDX-License-Identifier: BSD-3-Clause
"""Two processes: paths, rights, death, fork."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from softmlx5 import sm5
from softmlx5.sm5 import ERR, FAA, FLUSH, LOC_PROT, OK, READ, RETRY_EXC, RTS, SEND, WRITE, Buf


@pytest.fixture
def local(dev):
    b = Buf(4 << 20)
    return b, dev.reg(b).contents.lkey


def exercise(r, dev, local, n):
    b, lkey = local
    data = os.urandom(n)
    b.write(data)
    assert r.q.run(WRITE, [(b.addr, n, lkey)], r.addr, r.rkey) == OK
    assert bytes(r.w(f"buf.read(0, {n})")) == data
    r.w(f"buf.fill(0x5a, 0, {n})")
    assert r.q.run(READ, [(b.addr, n, lkey)], r.addr, r.rkey) == OK
    assert b.read(0, n) == b"\x5a" * n
    r.w("setattr(buf.u64(), 'value', 40)")
    assert r.q.run(FAA, [(b.addr, 8, lkey)], r.addr, r.rkey, add=2) == OK
    assert (b.u64().value, r.w("buf.u64().value")) == (40, 42)
    r.w("q.post_recv([(buf.addr, 64, mr.contents.lkey)])")
    assert r.q.run(SEND, [(b.addr, 64, lkey)]) == OK
    assert r.w("[w.byte_len for w in dev.poll(1)]") == [64]
    assert bytes(r.w("buf.read(0, 64)")) == b.read(0, 64)


@pytest.mark.parametrize("n", [64, 300000])
def test_direct_path(dev, remote, local, n):
    r = remote()
    exercise(r, dev, local, n)
    assert r.w("(stat('path.vm'), stat('path.socket'))") == [1, 0]
    # the worker reads our memory, too
    b, lkey = local
    b.fill(3)
    r.w(f"x = q.run(READ, [(buf.addr, 4096, mr.contents.lkey)], {b.addr}, {lkey})")
    assert r.w("(x, set(buf.read(0, 4096)) == {3})") == [OK, True]


@pytest.mark.parametrize("n", [64, 300000])
@pytest.mark.parametrize("who", ["owner", "initiator"])
def test_slow_path_by_choice_of_either(dev, remote, local, n, who):
    if who == "initiator":
        sm5.setting("path", "socket")
    r = remote(**({"SOFTMLX5_PATH": "socket"} if who == "owner" else {}))
    exercise(r, dev, local, n)
    assert r.w("(stat('path.vm'), stat('path.socket'))") == [0, 1]


def test_owner_without_ptrace_rights(dev, remote, local):
    """Another user may not look into our process: the bounce buffers do it all."""
    if os.geteuid():
        pytest.skip("needs root to become somebody else")
    r = remote(first="os.setgid(65534); os.setuid(65533)")
    exercise(r, dev, local, 300000)
    assert r.w("(stat('path.vm'), stat('path.socket'))") == [0, 1]


def test_configuration_from_the_environment(dev, remote, local):
    conf = "gate=0;fault=reg_mr:errno=12,after=1;max_indirection=2;nonsense;x=y"
    r = remote(SOFTMLX5_CONF=conf)
    b, lkey = local
    r.q.post(READ, [(b.addr, 8, lkey)], r.addr, r.rkey)
    sm5.wait_for(lambda: r.w("stat('gate.waiting')") == 1)
    dev.poll_none(0.02)
    r.w("setting('gate', 'open')")
    assert dev.poll(1)[0].status == OK
    with pytest.raises(AssertionError, match="ENOMEM"):
        r.w("dev.reg(buf)")


# ---- death ----


@pytest.mark.parametrize("path", ["auto", "socket"])
def test_killed_owner_is_noticed(dev, remote, local, path):
    sm5.setting("path", path)
    r = remote(SOFTMLX5_CONF="gate=1", size=2 << 20)
    b, lkey = local
    for i in range(3):
        r.q.post(READ, [(b.addr, 1 << 20, lkey)], r.addr, r.rkey, wr_id=i)
    r.q.post_recv(wr_id=9)
    sm5.wait_for(lambda: r.w("stat('gate.waiting')") == 1)
    t = time.monotonic()
    r.w.kill()
    got = dev.poll(4)
    assert time.monotonic() - t < 1
    assert [(w.wr_id, w.status) for w in got] == [
        (0, RETRY_EXC),
        (1, FLUSH),
        (2, FLUSH),
        (9, FLUSH),
    ]
    assert r.q.state == ERR


def test_dereg_that_waits_for_an_owner_that_dies(dev, remote, local):
    r = remote(SOFTMLX5_CONF="gate=0")
    b = Buf(1 << 20)
    mr = dev.reg(b)
    r.q.post(READ, [(b.addr, 1 << 20, mr.contents.lkey)], r.addr, r.rkey)
    sm5.wait_for(lambda: r.w("stat('gate.waiting')") == 1)
    done = []
    t = threading.Thread(target=lambda: done.append(dev.dereg(mr)))
    t.start()
    time.sleep(0.1)
    assert not done  # the owner is inside a chunk of ours
    r.w.kill()
    t.join(2)
    assert done == [0]
    assert dev.poll(1)[0].status == RETRY_EXC


def test_idle_queue_pair_survives_its_peer(dev, remote, local):
    r = remote()
    b, lkey = local
    assert r.q.run(READ, [(b.addr, 8, lkey)], r.addr, r.rkey) == OK
    r.w.kill()
    time.sleep(0.05)
    assert r.q.state == RTS
    assert r.q.run(READ, [(b.addr, 8, lkey)], r.addr, r.rkey) == RETRY_EXC


@pytest.mark.parametrize("at_once", [True, False])
def test_killed_initiator_leaves_the_owner_usable(dev, worker, at_once):
    """The mirror image: the one who asked dies in mid-copy."""
    flows = sm5.stat("flows.live")
    buf = Buf(64 << 20)
    mr = dev.reg(buf)
    q = dev.qp()
    w = worker()
    w("dev = Device(); q = dev.qp(); buf = Buf(64 << 20); mr = dev.reg(buf)")
    gid, lid, num = w("q.address")
    q.connect((bytes(gid), lid, num))
    w(f"q.connect((bytes({list(q.address[0])}), {q.address[1]}, {q.num}))")
    w(
        f"[q.post(READ, [(buf.addr, 64 << 20, mr.contents.lkey)], {buf.addr}, {mr.contents.rkey})"
        " for _ in range(8)]"
    )
    w.kill()
    if not at_once:
        sm5.wait_for(lambda: sm5.stat("flows.live") == flows)
    assert dev.dereg(mr) == 0
    # What the dead one had asked for is dropped; or refused, if its key went first.
    assert q.state in ((RTS, ERR) if at_once else (RTS,))
    w2 = worker()
    w2("dev = Device(); q = dev.qp()")
    gid, lid, num = w2("q.address")
    q.reset()
    q.connect((bytes(gid), lid, num))
    w2(f"q.connect((bytes({list(q.address[0])}), {q.address[1]}, {q.num}))")
    assert w2("q.run(READ, [], 0, 0)") == OK


def test_stopped_owner_is_slow_not_dead(dev, remote, local):
    r = remote()
    b, lkey = local
    assert (
        r.q.run(READ, [(b.addr, 8, lkey)], r.addr, r.rkey) == OK
    )  # connected: the retry clock is off
    os.kill(r.w.pid, signal.SIGSTOP)
    os.waitpid(r.w.pid, os.WUNTRACED)  # really stopped
    r.q.post(READ, [(b.addr, 8, lkey)], r.addr, r.rkey)
    dev.poll_none(0.1)
    os.kill(r.w.pid, signal.SIGCONT)
    assert dev.poll(1)[0].status == OK


def test_nothing_is_left(dev, remote, local):
    before = len(os.listdir("/proc/self/fd")), sm5.stat("flows.live")
    for _ in range(3):
        r = remote()
        b, lkey = local
        assert r.q.run(READ, [(b.addr, 8, lkey)], r.addr, r.rkey) == OK
        r.w.kill()
        r.q.destroy()
        r.w.close()
    sm5.wait_for(lambda: (len(os.listdir("/proc/self/fd")), sm5.stat("flows.live")) == before)


# ---- fork, exec, exit ----


def in_child(f):
    """f in a forked child, by hand: its exceptions must not reach pytest twice."""
    pid = os.fork()
    if not pid:
        rc = 99
        try:
            rc = f() or 0
        finally:
            os._exit(rc)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused(dev, loop):
    qa, _qb, a, b, ma, mb = loop
    k = dev.klm([(4096, mb.contents.lkey, b.addr)], 0)

    def child():
        wc = (sm5.Wc * 1)()
        checks = [
            qa.post_wr(qa.wr(READ, [(a.addr, 8, ma.contents.lkey)], b.addr, mb.contents.rkey))
            == errno.EIO,
            qa.post_recv() == errno.EIO,
            dev._poll(dev.cq, 1, wc) < 0,
            not sm5.reg_mr(dev.pd, a.addr, 4096, a.addr, 0) and ctypes.get_errno() == errno.EIO,
            sm5.dereg_mr(ma) == errno.EIO,
            k.destroy() == errno.EIO,
            not sm5.alloc_pd(dev.ctx),
            qa.modify(qp_state=sm5.ERR) == errno.EIO,
            sm5.destroy_qp(qa.qp) == errno.EIO,
            sm5.close_device(dev.ctx) == errno.EIO,
        ]
        fresh = sm5.Device()  # its own is fine
        q = fresh.qp()
        q.connect(q.address)
        checks.append(q.run(READ, [], 0, 0) == OK)
        fresh.close()
        return checks.index(False) + 1 if False in checks else 0

    assert in_child(child) == 0
    assert (
        qa.run(READ, [(a.addr, 8, ma.contents.lkey)], 0, k.key) == OK
    )  # the parent noticed nothing
    k.destroy()


def test_owner_with_a_forked_child_dies_at_once_for_us(dev, remote, local):
    """A child that lives on must not hide its parent's end, however it was forked."""
    for how in ("os.fork()", "ctypes.CDLL(None).syscall(57)"):
        r = remote()
        r.w("import ctypes, time, os")
        r.w(f"pid = {how}\nif pid == 0:\n    time.sleep(3); os._exit(0)")
        b, lkey = local
        assert r.q.run(READ, [(b.addr, 8, lkey)], r.addr, r.rkey) == OK
        t = time.monotonic()
        os.kill(r.w.pid, signal.SIGKILL)
        r.w.proc.wait()
        time.sleep(0.02)
        assert r.q.run(READ, [(b.addr, 8, lkey)], r.addr, r.rkey) == RETRY_EXC
        assert time.monotonic() - t < 1.5


def test_exit_and_exec_leave_quietly():
    for end in ("sys.exit(0)", "os._exit(0)", "os.execv('/bin/true', ['true'])"):
        code = (
            "import sys, os; sys.path.insert(0, sys.argv[1]); from sm5 import *\n"
            "d = Device(); qa, qb = pair(d); b = Buf(1 << 20); k = d.reg(b).contents.lkey\n"
            "[qa.post(READ, [(b.addr, 1 << 20, k)], b.addr, k) for _ in range(20)]\n" + end
        )
        p = subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            capture_output=True,
            timeout=10,
        )
        assert (p.returncode, p.stdout, p.stderr) == (0, b"", b""), end


def test_local_key_that_another_process_is_writing_to(dev, remote):
    """The READ's own buffer is deregistered while the owner copies into it."""
    n = 1 << 20
    r = remote(SOFTMLX5_CONF="gate=1", size=n)
    r.w("buf.fill(0x77)")
    b = Buf(n)
    mr = dev.reg(b)
    r.q.post(READ, [(b.addr, n, mr.contents.lkey)], r.addr, r.rkey, wr_id=1)
    sm5.wait_for(lambda: r.w("stat('gate.waiting')") == 1)
    done = []
    t = threading.Thread(target=lambda: done.append(dev.dereg(mr)))
    t.start()
    time.sleep(0.05)
    assert not done
    r.w("setting('gate', 'open')")
    t.join(5)
    assert done == [0]
    b.fill(0x11)
    assert dev.poll(1)[0].status == LOC_PROT
    time.sleep(0.05)
    assert b.read() == b"\x11" * n  # nothing after the dereg
    assert r.w("stat('chunks')") == 3  # two copied; of the third only the keys were looked at
    assert r.w("q.state") == RTS
