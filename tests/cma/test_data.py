# SPDX-License-Identifier: BSD-3-Clause
"""get and put: what they move, what they say when they cannot, and who is asked how often."""

import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import ucx_memh as um
from _cma import PAGE, Pages, owner_of, pattern, peer_error_fields


def test_own_process(md, ep, calls):
    """Goes the same way as another's, so that a bad address is an error and no crash."""
    data = bytearray(pattern(10_000))
    memh = md.mem_reg(data)
    rkey = md.rkey_unpack(memh.mkey_pack())
    into = bytearray(10_000)
    ep.get(rkey, rkey.address, into)
    ep.put(rkey, rkey.address + 1, b"mine")
    assert into == pattern(10_000)
    assert data[:6] == pattern(1) + b"mine" + pattern(6)[5:]
    assert calls() == 2
    assert md.stats()["device.peer_checks"] == 0
    assert md.stats()["device.pidfd_opens"] == 0
    hole = Pages(2)
    memh = md.mem_reg(address=hole.address, length=hole.length, owner=hole)
    rkey = md.rkey_unpack(memh.mkey_pack())
    hole.close()
    with pytest.raises(um.DeviceError, match="bad remote address"):
        ep.put(rkey, rkey.address, b"x")


@pytest.mark.parametrize("length", [1, 7, 8, 4095, 4096, 4097, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_lengths(md, ep, tell, length, offset):
    owner = tell()
    pages = (offset + length) // PAGE + 1
    rkey = md.rkey_unpack(owner.ask("register", pages, pattern(pages * PAGE)))
    into = bytearray(length)
    ep.get(rkey, rkey.address + offset, into)
    assert into == pattern(pages * PAGE)[offset : offset + length]
    ep.put(rkey, rkey.address + offset, pattern(length, 9))
    assert owner.ask("read", offset, length) == pattern(length, 9)


def test_nothing_is_no_system_call(md, ep, tell, calls):
    owner = tell()
    rkey = md.rkey_unpack(owner.ask("register", 1))
    ep.get(rkey, rkey.address, bytearray(0))
    ep.put(rkey, rkey.address + PAGE, b"")
    assert calls() == 0
    owner.peer.kill()
    ep.get(rkey, rkey.address, bytearray(0))  # touches nothing, so nobody is missing
    assert calls() == 0


def test_range_and_rights_are_kept_by_the_reader(md, ep, calls):
    memh = md.mem_reg(bytearray(64), um.MemFlag.LOCAL_READ | um.MemFlag.REMOTE_GET)
    rkey = md.rkey_unpack(memh.mkey_pack())
    with pytest.raises(um.AccessError):
        ep.put(rkey, rkey.address, b"x")
    for address, length in ((rkey.address - 1, 1), (rkey.address + 64, 1), (rkey.address, 65)):
        with pytest.raises(um.RangeError):
            ep.get(rkey, address, bytearray(length))
    assert calls() == 0


def test_no_atomics(md, ep, calls):
    data = bytearray(64)
    memh = md.mem_reg(data)
    rkey = md.rkey_unpack(memh.mkey_pack())
    with pytest.raises(um.UnsupportedError):
        ep.fetch_add(rkey, rkey.address + -rkey.address % 8, 1)
    with pytest.raises(um.UnsupportedError):
        ep.compare_swap(rkey, rkey.address + -rkey.address % 8, 0, 1)
    assert data == bytes(64)
    assert calls() == 0


def test_remote_hole(md, ep, tell):
    owner = tell()
    key = owner.ask("register", 8, pattern(8 * PAGE))
    rkey = md.rkey_unpack(key)
    owner.ask("unmap", 4)
    into = bytearray(8 * PAGE)
    operation = ep.get_nb(rkey, rkey.address + 100, memoryview(into)[: 8 * PAGE - 100])
    with pytest.raises(um.DeviceError, match="bad remote address") as caught:
        operation.wait()
    done = 4 * PAGE - 100
    assert operation.bytes_done == done
    assert into[:done] == pattern(8 * PAGE)[100 : 4 * PAGE]
    assert into[done:] == bytes(8 * PAGE - done)
    assert caught.value.status == um.Status.INVALID_ADDR
    peer_error_fields(
        caught.value,
        f"pid {owner.pid}",
        f"start {owner_of(key)[1]}",
        f"{rkey.address + 100:#x}+{8 * PAGE - 100}",
        f"done {done}",
    )
    ep.get(rkey, rkey.address + 5 * PAGE, memoryview(into)[:PAGE])  # the rest is as good as ever
    assert into[:PAGE] == pattern(8 * PAGE)[5 * PAGE : 6 * PAGE]


def test_remote_read_only_page(md, ep, tell):
    owner = tell()
    rkey = md.rkey_unpack(owner.ask("register", 4))
    owner.ask("protect", 2, mmap.PROT_READ)
    operation = ep.put_nb(rkey, rkey.address + 8, pattern(4 * PAGE - 8))
    with pytest.raises(um.DeviceError, match="bad remote address"):
        operation.wait()
    assert operation.bytes_done == 2 * PAGE - 8
    assert owner.ask("read", 0, 4 * PAGE) == bytes(8) + pattern(2 * PAGE - 8) + bytes(2 * PAGE)


@pytest.mark.parametrize("kind", ["get", "put"])
def test_local_hole(md, ep, tell, kind):
    owner = tell()
    rkey = md.rkey_unpack(owner.ask("register", 4, pattern(4 * PAGE)))
    here = Pages(4)
    here.unmap(3)
    post = ep.get_nb if kind == "get" else ep.put_nb
    operation = post(rkey, rkey.address, here.part(0, here.length))
    with pytest.raises(um.DeviceError, match="bad local address") as caught:
        operation.wait()
    assert operation.bytes_done == 3 * PAGE
    assert caught.value.status == um.Status.INVALID_ADDR
    here.close()


def test_a_read_only_local_page(md, ep, tell):
    rkey = md.rkey_unpack(tell().ask("register", 2, pattern(2 * PAGE)))
    here = Pages(2)
    here.protect(1, mmap.PROT_READ)
    operation = ep.get_nb(rkey, rkey.address, here.part(0, here.length))
    with pytest.raises(um.DeviceError, match="bad local address"):
        operation.wait()
    assert operation.bytes_done == PAGE
    here.close()


# ---- peers that go ----


def wait_state(pid, wanted):
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != wanted:
        time.sleep(0.001)


@pytest.mark.parametrize("reaped", [True, False])
def test_15_a_peer_dies(md, ep, tell, reaped):
    """User report 15: PEER_GONE, and the message says who, where, how much."""
    owner = tell()
    key, second = owner.ask("register", 1), owner.ask("register", 1)
    rkey, other = md.rkey_unpack(key), md.rkey_unpack(second)
    ep.get(rkey, rkey.address, bytearray(8))
    if reaped:
        owner.peer.kill()
    else:
        os.kill(owner.pid, signal.SIGKILL)
        wait_state(owner.pid, "Z")
    for dead in (rkey, rkey, other):
        with pytest.raises(um.PeerGoneError) as caught:
            ep.put(dead, dead.address + 8, b"late")
        peer_error_fields(
            caught.value,
            f"pid {owner.pid}",
            f"start {owner_of(key)[1]}",
            f"put {dead.address + 8:#x}+4",
            "done 0",
            "the process has ended",
        )
    other.close()  # a key in use is known already: unpacking it again asks nobody
    with pytest.raises(um.PeerGoneError):
        md.rkey_unpack(second)
    assert ep.state == um.EpState.CONNECTED  # others are reached as before
    with md.mem_reg(bytearray(8)) as memh, md.rkey_unpack(memh.mkey_pack()) as mine:
        ep.put(mine, mine.address, b"x")


def test_a_peer_dies_in_a_long_transfer(md, ep, tell):
    owner = tell()
    rkey = md.rkey_unpack(owner.ask("register", (64 << 20) // PAGE))
    into = bytearray(64 << 20)
    failed = []

    def stream():
        try:
            while True:
                ep.get(rkey, rkey.address, into)
        except um.MemhError as error:
            failed.append(error)

    thread = threading.Thread(target=stream)
    thread.start()
    time.sleep(0.05)
    owner.peer.kill()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(failed[0], um.PeerGoneError), failed


def test_a_peer_that_runs_another_program(md, ep, tell):
    """Its pid and start time stay; its memory does not."""
    owner = tell()
    key = owner.ask("register", 1, b"old")
    rkey = md.rkey_unpack(key)
    owner.peer.send(("exec", ["-c", "import time; time.sleep(60)"]))
    while b"sleep" not in Path(f"/proc/{owner.pid}/cmdline").read_bytes():
        time.sleep(0.001)
    time.sleep(0.002)  # longer than the check interval
    for _ in range(2):
        with pytest.raises(um.StaleKeyError, match="another program") as caught:
            ep.get(rkey, rkey.address, bytearray(3))
        assert f"pid {owner.pid} start {owner_of(key)[1]}" in str(caught.value)


# ---- how often the peer is looked at ----


def test_checks_are_rare(md, ep, tell):
    rkey = md.rkey_unpack(tell().ask("register", 1))
    into = bytearray(8)
    checks = md.stats()["device.peer_checks"]
    began = time.monotonic()
    for _ in range(2000):
        ep.get(rkey, rkey.address, into)
    spent = time.monotonic() - began
    checks = md.stats()["device.peer_checks"] - checks
    assert checks <= spent / 0.001 + 1
    time.sleep(0.002)
    before = md.stats()["device.peer_checks"]
    ep.get(rkey, rkey.address, into)
    assert md.stats()["device.peer_checks"] == before + 1


@pytest.mark.parametrize(("interval", "expected"), [(0, 50), (3600, 0)])
def test_the_interval_is_configurable(tell, interval, expected):
    owner = tell()
    with um.open_md("cma", peer_check_interval=interval) as md:
        with md.endpoint() as ep, md.rkey_unpack(owner.ask("register", 1)) as rkey:
            before = md.stats()
            for _ in range(50):
                ep.get(rkey, rkey.address, bytearray(8))
            after = md.stats()
    assert after["device.peer_checks"] - before["device.peer_checks"] == expected
    assert after["device.process_vm_calls"] - before["device.process_vm_calls"] == 50


def test_death_inside_the_interval_is_told_by_the_kernel(tell):
    owner = tell()
    with um.open_md("cma", peer_check_interval=3600) as md:
        with md.endpoint() as ep, md.rkey_unpack(owner.ask("register", 1)) as rkey:
            owner.peer.kill()
            with pytest.raises(um.PeerGoneError, match="the process has ended"):
                ep.get(rkey, rkey.address, bytearray(8))


def test_many_threads_on_one_peer_while_it_is_evicted(md, ep, tell):
    owner = tell(config={"peer_check_interval": 0})
    key = owner.ask("register", 4, pattern(4 * PAGE))
    stop, wrong = threading.Event(), []

    def work():
        into = bytearray(PAGE)
        while not stop.is_set():
            with md.rkey_unpack(key) as rkey:
                try:
                    ep.get(rkey, rkey.address, into)
                except um.StaleKeyError:
                    continue
                except BaseException as error:
                    wrong.append(error)
                    return
                if into != pattern(PAGE):
                    wrong.append(into)
                    return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    identity = key[48:80]
    for _ in range(200):
        md.peer_evict(identity)
        time.sleep(0.001)
    stop.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not wrong
    assert md.stats()["device.peers"] == 0
