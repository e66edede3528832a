# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on this backend, and what it does between processes."""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from ucx_memh_shm import memory

import ucx_memh as um
from ucx_memh import MemFlag
from ucx_memh.testing import HostMemory, MdSuite

STRIDE = 1 << 20


class Part(HostMemory):
    """What the kit registers parts of: a piece of the domain's own memory."""

    def __init__(self, part):
        self.bytes = part


@pytest.fixture
def md():
    md = um.open_md("shm")
    yield md
    md.close(force=True)


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
import ctypes, sys
import ucx_memh as um
rkey = um.open_md("shm").rkey_unpack(bytes.fromhex(sys.argv[1]))
"""


def peer(key, code):
    """Run `code` in another process, with the unpacked key as `rkey`."""
    command = [sys.executable, "-c", PEER + code, key.hex()]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_peer_reads_and_writes(md):
    part = memory(md)[4096:8192]
    part[:5] = b"hello"
    window = md.mem_reg(part).derive(0, 64)
    code = "print(ctypes.string_at(rkey.ptr(), 5)); ctypes.memset(rkey.ptr() + 5, 33, 2)"
    out, err = peer(window.mkey_pack(), code).communicate(timeout=60)
    assert (out, err) == ("b'hello'\n", "")
    assert part[:8] == b"hello!!\0"


def test_what_was_taken_back_is_refused_to_a_peer_that_had_it(md):
    base = md.mem_reg(memory(md)[:4096])
    one, other = base.derive(0, 64), base.derive(0, 64)
    code = """
rkey.ptr()
print("ready", flush=True)
input()
try:
    rkey.ptr()
except um.MemhError as error:
    print(error.status.name)
"""
    peers = [peer(window.mkey_pack(), code) for window in (one, other)]
    for each in peers:
        assert each.stdout.readline() == "ready\n"
    one.invalidate()
    assert [each.communicate("\n", timeout=60)[0] for each in peers] == ["REVOKED\n", ""]
    assert other.mkey_pack()


def test_the_key_of_a_registration_ends_with_it(md):
    base = md.mem_reg(memory(md)[:4096])
    assert base.enforcement == md.attr.enforcement
    assert base.enforcement.revoke == um.EnforcementRow(*[um.Enforcement.COOPERATIVE] * 2)
    with md.rkey_unpack(base.mkey_pack()) as rkey:
        assert rkey.ptr()
        base.dereg()
        with pytest.raises(um.RevokedError):
            rkey.ptr()


def test_a_key_for_reading_cannot_be_written_through(md):
    part = memory(md)[:4096]
    window = md.mem_reg(part).derive(flags=MemFlag.REMOTE_GET)
    writer = peer(window.mkey_pack(), "ctypes.memset(rkey.ptr(), 1, 1)")
    writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGSEGV
    assert part[0] == 0


def test_a_key_for_writing_gives_no_pointer(md):
    """Which would read, too."""
    window = md.mem_reg(memory(md)[:4096]).derive(flags=MemFlag.REMOTE_PUT)
    with md.rkey_unpack(window.mkey_pack()) as rkey, pytest.raises(um.AccessError):
        rkey.ptr()


def test_a_window_is_its_range_and_no_more(md):
    part = memory(md)[4096:8192]
    part[64:128] = bytes(range(64))
    window = md.mem_reg(part).derive(64, 64)
    with md.rkey_unpack(window.mkey_pack()) as rkey:
        assert ctypes.string_at(rkey.ptr(window.address + 3), 4) == bytes([3, 4, 5, 6])
        for address in (window.address - 1, window.address + 65):
            with pytest.raises(um.RangeError):
                rkey.ptr(address)


def test_other_memory_is_refused(md):
    whole = memory(md)
    first = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    for address, length in [(first - 1, 2), (first + len(whole) - 1, 2), (4096, 4096)]:
        with pytest.raises(um.DeviceError):
            md.mem_reg(address=address, length=length, owner=whole)
    md.mem_reg(address=first, length=len(whole), owner=whole).dereg()


def test_a_segment_has_no_name_under_which_it_would_stay(md):
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that has just listed them
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    (segment,) = (link for link in links if link.startswith("/dev/shm/"))
    assert segment.endswith(" (deleted)")


def test_a_killed_owner_leaves_nothing(md):
    code = """
import ucx_memh_shm
md = um.open_md("shm")
base = md.mem_reg(ucx_memh_shm.memory(md)[:4096])
print(base.mkey_pack().hex(), flush=True)
input()
"""
    owner = peer(md.mem_reg(memory(md)[:64]).mkey_pack(), code)
    key = bytes.fromhex(owner.stdout.readline())
    with md.rkey_unpack(key) as rkey:
        owner.kill()
        owner.communicate()
        assert ctypes.string_at(rkey.ptr(), 4) == bytes(4)  # it lives until we let go of it
        with pytest.raises(um.PeerGoneError):
            md.peer_probe(key)


def test_a_full_table_is_said_and_lasts_no_longer_than_that(md):
    base = md.mem_reg(memory(md)[:64])
    windows = base.derive_many(list(itertools.repeat(0, 16383)), 64)
    statuses = list(md.mkey_pack_many(windows, partial=True).status)
    assert statuses == [um.Status.OK] * 16382 + [um.Status.NO_RESOURCE]  # the base has one
    windows[0].invalidate()
    assert windows[16382].mkey_pack()


def test_the_size_is_a_setting():
    with um.open_md("shm", size="4096") as small:
        assert len(memory(small)) == 4096
        small.mem_reg(memory(small)).dereg()
    with pytest.raises(um.InvalidParamError):
        um.open_md("shm", size=0)
