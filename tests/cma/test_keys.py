# SPDX-License-Identifier: BSD-3-Clause
"""A key never leads to the wrong process: unpack says UNREACHABLE, PEER_GONE or STALE."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import ucx_memh as um
from _cma import CLONE_NEWPID, CLONE_NEWUSER, NOBODY, become, forged, libc, owner_of, pattern
from _fakes import flipped

root_only = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def fds():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def own_key(md):
    memh = md.mem_reg(bytearray(64))
    yield memh.mkey_pack()
    memh.dereg()


# ---- what a key is ----


def test_a_key_is_its_envelope(md):
    memh = md.mem_reg(bytearray(64))
    key = memh.mkey_pack()
    assert len(key) == 80
    host, start_time, pid, pid_ns, user_ns, reserved = owner_of(key)
    assert host != 0
    assert pid == os.getpid()
    assert start_time == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert pid_ns == os.stat("/proc/self/ns/pid").st_ino & 0xFFFFFFFF
    assert user_ns == os.stat("/proc/self/ns/user").st_ino & 0xFFFFFFFF
    assert reserved == 0


def test_registering_asks_the_kernel_nothing(md, calls):
    data = bytearray(4096)
    for _ in range(100):
        memh = md.mem_reg(data)
        memh.mkey_pack()
        memh.dereg()
    md.mem_reg(address=8, length=8, mem_type=um.MemType.HOST).dereg()  # as one says
    assert calls() == 0
    assert md.stats()["device.peer_checks"] == 0


def test_an_empty_key_asks_nothing(md, ep, calls):
    """User report 4: no system call on the peer, and no file descriptor."""
    key = md.mem_reg(b"").mkey_pack()
    before = fds()
    for blob in (key, forged(key, host=1), forged(key, pid=2**22 + 1)):
        rkey = md.rkey_unpack(blob)
        ep.get(rkey, rkey.address, bytearray(0))
        with pytest.raises(um.RangeError):
            ep.get(rkey, rkey.address, bytearray(1))
    assert fds() == before
    assert calls() == 0
    assert md.stats()["device.pidfd_opens"] == 0


# ---- whose it is ----


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"host": 1}, um.UnreachableError, "another host"),
        ({"pid_ns": 1}, um.UnreachableError, "another pid namespace"),
        ({"pid": 0}, um.UnreachableError, "does not say whose"),
        ({"pid": 2**31}, um.UnreachableError, "does not say whose"),
        ({"pid": 2**32 - 1}, um.UnreachableError, "does not say whose"),
        ({"start_time": 0}, um.UnreachableError, "does not say whose"),
        ({"pid": 2**22 + 1}, um.PeerGoneError, "no such process"),
        ({"start_time": 1}, um.StaleKeyError, "another process has this pid now"),
        ({"start_time": 2**64 - 1}, um.StaleKeyError, "another process has this pid now"),
        ({"pid": 1}, um.StaleKeyError, "another process has this pid now"),
    ],
)
def test_forged_owners(md, own_key, calls, changes, error, text):
    before = fds()
    with pytest.raises(error, match=text) as caught:
        md.rkey_unpack(forged(own_key, **changes))
    expected = dict(pid=os.getpid(), start_time=owner_of(own_key)[1]) | changes
    assert f"pid {expected['pid']} start {expected['start_time']}" in str(caught.value)
    assert fds() == before
    assert calls() == 0
    assert md.stats()["device.peers"] == 0


def test_a_pid_of_a_thread_is_nobodys(md, own_key):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(um.StaleKeyError, match="thread"):
            md.rkey_unpack(forged(own_key, pid=thread.native_id))
    finally:
        stop.set()
        thread.join()


def test_damaged_and_foreign_keys(md, own_key):
    with pytest.raises(um.MalformedKeyError):
        md.rkey_unpack(own_key[:-1])
    with pytest.raises(um.MalformedKeyError):
        md.rkey_unpack(flipped(own_key, 50))


def test_pid_reuse_is_seen_at_unpack(md, tell):
    """The key of a dead process names a living one's pid, but not its start time."""
    owner = tell()
    key = owner.ask("register", 1)
    with pytest.raises(um.StaleKeyError) as caught:
        md.rkey_unpack(forged(key, start_time=owner_of(key)[1] - 1))
    assert str(owner_of(key)[1]) in str(caught.value)  # who it is now


def test_a_peers_key(md, ep, tell, calls):
    owner = tell()
    key = owner.ask("register", 2, pattern(8192))
    before = fds()
    rkey = md.rkey_unpack(key)
    # Permission is asked without looking at one byte of the peer.
    assert calls() == 0
    assert fds() == before + 2
    into = bytearray(8192)
    ep.get(rkey, rkey.address, into)
    assert into == pattern(8192)
    ep.put(rkey, rkey.address + 100, b"written")
    assert owner.ask("read", 99, 9) == pattern(8192)[99:100] + b"written" + pattern(8192)[107:108]
    assert calls() == 2
    rkey.close()
    assert fds() == before


def test_one_look_serves_all_keys_of_a_peer(md, tell):
    owner = tell()
    rkeys = [md.rkey_unpack(owner.ask("register", 1)) for _ in range(5)]
    stats = md.stats()
    assert stats["device.peers"] == 1
    assert stats["device.pidfd_opens"] == 1
    other = md.rkey_unpack(tell().ask("register", 1))
    assert md.stats()["device.peers"] == 2
    for rkey in rkeys:
        rkey.close()
    assert md.stats()["device.peers"] == 1
    other.close()
    assert md.stats()["device.peers"] == 0


def test_descriptors_are_closed_on_exec(md, tell):
    rkey = md.rkey_unpack(tell().ask("register", 1))
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            targets[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    ours = [fd for fd, target in targets.items() if "pidfd" in target or "/stat" in target]
    assert len(ours) >= 2
    assert not any(os.get_inheritable(fd) for fd in ours)
    rkey.close()


def test_the_dead_are_gone(md, tell):
    owner = tell()
    key = owner.ask("register", 1)
    owner.peer.kill()
    with pytest.raises(um.PeerGoneError, match="no such process") as caught:
        md.rkey_unpack(key)
    assert f"pid {owner.pid} start {owner_of(key)[1]}" in str(caught.value)


def test_a_zombie_is_gone(md, tell):
    owner = tell()
    key = owner.ask("register", 1)
    os.kill(owner.pid, signal.SIGKILL)
    while state_of(owner.pid) != "Z":
        time.sleep(0.001)
    with pytest.raises(um.PeerGoneError):
        md.rkey_unpack(key)


def test_a_stopped_peer_is_there(md, ep, tell):
    owner = tell()
    key = owner.ask("register", 1, b"stopped")
    owner.peer.signal(signal.SIGSTOP)
    while state_of(owner.pid) != "T":
        time.sleep(0.001)
    rkey = md.rkey_unpack(key)
    into = bytearray(7)
    ep.get(rkey, rkey.address, into)
    assert into == b"stopped"


def test_evicted_keys_are_stale_and_new_ones_are_not(md, ep, tell):
    owner = tell()
    key, second = owner.ask("register", 1), owner.ask("register", 1)
    rkey = md.rkey_unpack(key)
    before = fds()
    md.peer_evict(rkey.owner)
    assert fds() == before - 2
    with pytest.raises(um.StaleKeyError, match="evicted"):
        ep.get(rkey, rkey.address, bytearray(8))
    fresh = md.rkey_unpack(second)
    ep.get(fresh, fresh.address, bytearray(8))
    rkey.close()
    again = md.rkey_unpack(key)
    ep.get(again, again.address, bytearray(8))
    md.peer_evict(bytes(32))  # nobody that we know


def test_many_threads_meet_one_new_peer(md, ep, tell):
    owner = tell()
    keys = [owner.ask("register", 1, bytes([i])) for i in range(16)]
    barrier, seen = threading.Barrier(16), {}

    def work(i):
        barrier.wait()
        rkey = md.rkey_unpack(keys[i])
        into = bytearray(1)
        ep.get(rkey, rkey.address, into)
        seen[i] = into[0], rkey

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: value for i, (value, _) in seen.items()} == {i: i for i in range(16)}
    assert md.stats()["device.peers"] == 1
    seen.clear()
    assert md.stats()["device.peers"] == 0


# ---- namespaces and permissions ----


def in_a_pid_namespace(conn):
    """The key of a process with pid 1, and what that one makes of the given key."""
    libc("unshare", CLONE_NEWPID)
    conn.send("ready")
    theirs = conn.recv()
    child = os.fork()
    if child == 0:
        try:
            md = um.open_md("cma")
            key = md.mem_reg(bytearray(64)).mkey_pack()
            try:
                md.rkey_unpack(theirs)
                answer = "unpacked"
            except um.MemhError as error:
                answer = f"{type(error).__name__}: {error}"
            conn.send((os.getpid(), key, answer))
            conn.recv()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@root_only
def test_14_a_pid_of_another_namespace(md, own_key, peer):
    """User report 14: equal pids of two namespaces are two processes, and unreachable."""
    two = [peer(in_a_pid_namespace) for _ in range(2)]
    keys = []
    for other in two:
        assert other.recv() == "ready"
        other.send(own_key)
        pid, key, answer = other.recv()
        assert pid == 1
        assert "UnreachableError" in answer
        assert "another pid namespace" in answer
        assert owner_of(key)[2] == 1
        keys.append(key)
    assert owner_of(keys[0])[3] != owner_of(keys[1])[3]
    for key in keys:
        with pytest.raises(um.UnreachableError, match=r"pid 1 start .* another pid namespace"):
            md.rkey_unpack(key)
    for other in two:
        other.send("end")


def in_a_user_namespace(conn):
    become(NOBODY)
    libc("unshare", CLONE_NEWUSER)
    md = um.open_md("cma")
    data = bytearray(b"from inside")
    memh = md.mem_reg(data)
    conn.send(memh.mkey_pack())
    key = conn.recv()
    before = md.stats()["device.process_vm_calls"]
    try:
        md.rkey_unpack(key)
        answer = "unpacked"
    except um.MemhError as error:
        answer = f"{type(error).__name__}: {error}"
    conn.send((answer, md.stats()["device.process_vm_calls"] - before))
    conn.recv()


@root_only
def test_10_user_namespaces(peer, tell):
    """User report 10: refused at unpack and not by EPERM in the first get; one way only."""
    inside, outside = peer(in_a_user_namespace), tell(NOBODY)
    key = inside.recv()
    inside.send(outside.ask("register", 1))
    answer, probes = inside.recv()
    assert "UnreachableError" in answer
    assert "no ptrace permission" in answer
    assert probes == 1  # of one byte, inside the region that the key names
    # The owner of the namespace may look in.
    assert outside.ask("get", key, 0, 11) == b"from inside"
    inside.send("end")


@root_only
def test_another_users_process(tell):
    """Not root, not the same user: no permission, and the key says so when it is unpacked."""
    owner, reader = tell(NOBODY), tell(NOBODY - 1)
    _, error, text = reader.answer("get", owner.ask("register", 1), 0, 8)
    assert error == "UnreachableError"
    assert "no ptrace permission" in text
    assert f"pid {owner.pid} start " in text


@root_only
def test_11_a_peer_that_closes_itself_up(tell):
    """User report 11: EPERM in the middle of a run is an error of that one get."""
    owner, other, reader = tell(NOBODY), tell(NOBODY), tell(NOBODY)
    key, second = owner.ask("register", 1, b"first"), other.ask("register", 1, b"second")
    assert reader.ask("get", key, 0, 5) == b"first"
    owner.ask("dumpable", 0)
    _, error, text = reader.answer("get", key, 0, 5)
    assert error == "UnreachableError"
    assert "no ptrace permission" in text
    assert f"pid {owner.pid} start " in text
    assert reader.ask("get", second, 0, 6) == b"second"
    owner.ask("dumpable", 1)  # not remembered: the next get asks the kernel again
    assert reader.ask("get", key, 0, 5) == b"first"


def test_out_of_files(md, tell):
    """No descriptor left: said so, and nothing is half done."""
    key = tell().ask("register", 1)
    taken = []
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds() + 8, hard))
    try:
        for spare in (0, 1):
            while True:
                try:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    break
            for _ in range(spare):
                os.close(taken.pop())
            with pytest.raises(um.BusyError, match="out of files"):
                md.rkey_unpack(key)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rkey = md.rkey_unpack(key)
    rkey.close()
    assert md.stats()["device.peers"] == 0


def test_endpoint_addresses(md, tell, own_key):
    ep = md.endpoint()
    assert ep.state == um.EpState.CONNECTED
    first = ep.address
    assert first[16:48] == first[48:80] == own_key[48:80]  # as the core tells it, and to cma
    ep.connect(first)
    ep.reset()
    assert ep.address != first
    assert ep.state == um.EpState.CONNECTED
    for bad in (b"", first[:-1], first + b"x"):
        with pytest.raises(um.InvalidParamError):
            ep.connect(bad)
    with pytest.raises(um.UnreachableError):
        ep.connect(first[:48] + bytes(len(first) - 48))
    gone = bytearray(first)
    ctypes.c_uint32.from_buffer(gone, 64).value = 2**22 + 1
    with pytest.raises(um.PeerGoneError):
        ep.connect(bytes(gone))
    assert ep.state == um.EpState.CONNECTED
    assert md.stats()["device.peers"] == 0
