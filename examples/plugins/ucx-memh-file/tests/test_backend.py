# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on this backend, and what it does between processes."""

import fcntl
import itertools
import os
import signal
import subprocess
import sys

import pytest
from ucx_memh_file import memory

import ucx_memh as um
from ucx_memh import MemFlag, MemhState
from ucx_memh.testing import HostMemory, MdSuite

STRIDE = 1 << 20


class Part(HostMemory):
    """What the kit registers parts of: a piece of the domain's own memory."""

    def __init__(self, part):
        self.bytes = part


@pytest.fixture
def md(tmp_path):
    md = um.open_md("file", folder=tmp_path)
    yield md
    md.close(force=True)
    assert os.listdir(tmp_path) == []


class TestKit(MdSuite):
    @pytest.fixture
    def md(self, md):
        return md

    @pytest.fixture
    def allocate(self, md):
        starts = itertools.count(0, STRIDE)

        def take(size):
            start = next(starts)
            return Part(memory(md)[start : start + size])

        return take


PEER = """
import sys
import ucx_memh as um
md = um.open_md("file")
ep, rkey = md.endpoint(), md.rkey_unpack(bytes.fromhex(sys.argv[1]))
"""


def peer(key, code):
    """Run `code` in another process, with the unpacked key as `rkey`, and an endpoint `ep`."""
    command = [sys.executable, "-c", PEER + code, key.hex()]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_peer_reads_and_writes(md):
    part = memory(md)[4096:8192]
    part[:5] = b"hello"
    window = md.mem_reg(part).derive(0, 64)
    code = """
into = bytearray(5)
ep.get(rkey, rkey.address, into)
print(into.decode())
ep.put(rkey, rkey.address + 5, b"!!")
md.close(force=True)
"""
    out, err = peer(window.mkey_pack(), code).communicate(timeout=60)
    assert (out, err) == ("hello\n", "")
    assert part[:8] == b"hello!!\0"


def test_what_was_taken_back_is_refused_to_a_peer_that_had_it(md):
    base = md.mem_reg(memory(md)[:4096])
    one, other = base.derive(0, 64), base.derive(0, 64)
    key = one.mkey_pack()
    code = """
ep.get(rkey, rkey.address, bytearray(1))
print("ready", flush=True)
input()
try:
    ep.get(rkey, rkey.address, bytearray(1))
except um.MemhError as error:
    print(error.status.name)
md.close(force=True)
"""
    peers = [peer(window.mkey_pack(), code) for window in (one, other)]
    for each in peers:
        assert each.stdout.readline() == "ready\n"
    one.invalidate()
    assert [each.communicate("\n", timeout=60)[0] for each in peers] == ["REVOKED\n", ""]
    with pytest.raises(um.RevokedError):
        md.peer_probe(key)


def key_files(md, tmp_path):
    (folder,) = tmp_path.iterdir()
    return sorted(path for path in folder.iterdir() if path.name != "memory")


def test_a_revocation_waits_for_what_is_under_way(md, tmp_path):
    window = md.mem_reg(memory(md)[:4096]).derive()
    key = window.mkey_pack()
    seen = []
    with open(key_files(md, tmp_path)[-1]) as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as a transfer does
        window.invalidate(seen.append)
        for _ in range(3):
            md.progress()
        assert (seen, window.state) == ([], MemhState.REVOKING)
        with pytest.raises(um.RevokedError):  # but none begins any more
            md.rkey_unpack(key)
    while not seen:
        md.progress()
    assert (seen, window.state) == ([um.Status.OK], MemhState.REVOKED)


def test_a_registration_that_a_peer_uses_is_busy(md, tmp_path):
    base = md.mem_reg(memory(md)[:4096])
    with md.rkey_unpack(base.mkey_pack()) as rkey, md.endpoint() as ep:
        with open(key_files(md, tmp_path)[0]) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            with pytest.raises(um.BusyError):
                base.dereg()
        ep.get(rkey, rkey.address, bytearray(1))  # it goes on as before
        base.dereg()
        with pytest.raises(um.RevokedError):
            ep.get(rkey, rkey.address, bytearray(1))


def test_other_memory_is_refused(md, tmp_path):
    for buffer in (bytearray(64), bytearray(1)):
        with pytest.raises(um.DeviceError) as caught:
            md.mem_reg(buffer)
        assert caught.value.status is um.Status.INVALID_ADDR
    assert key_files(md, tmp_path) == []


def test_a_killed_owner_is_gone_when_its_folder_is(md, tmp_path):
    code = """
import ucx_memh_file
base = md.mem_reg(ucx_memh_file.memory(md)[:64])
print(base.mkey_pack().hex(), flush=True)
input()
"""
    owner = peer(md.mem_reg(memory(md)[:64]).mkey_pack(), code)
    key = bytes.fromhex(owner.stdout.readline())
    md.rkey_unpack(key).close()
    owner.send_signal(signal.SIGTERM)
    owner.communicate(timeout=60)
    folder = os.fsdecode(key[key.rindex(b"\0") + 1 :])  # what is before it ends in a small number
    subprocess.run(["rm", "-r", folder], check=True)
    with pytest.raises(um.PeerGoneError):
        md.peer_probe(key)


def test_a_long_name_is_refused_and_leaves_nothing(tmp_path):
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    with pytest.raises(um.NoDeviceError, match="too long for a key"):
        um.open_md("file", folder=folder)
    assert list(folder.iterdir()) == []


def test_settings(tmp_path):
    with um.open_md("file", size="4096", folder=tmp_path) as small:
        assert len(memory(small)) == 4096
        base = small.mem_reg(memory(small), MemFlag.REMOTE_GET)
        base.dereg()
    with pytest.raises(um.NoDeviceError, match="No such file"):
        um.open_md("file", folder=tmp_path / "missing")
