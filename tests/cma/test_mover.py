# SPDX-License-Identifier: BSD-3-Clause
"""The mover on lists and holes, inside this process (user reports 6, 7; semantics 4.3)."""

import ctypes
import errno
import mmap
import os
import random
import signal
import time

import pytest

import ucx_memh as um
from _cma import MAP_FIXED, MAP_NORESERVE, PAGE, Pages, libc, pattern
from ucx_memh_cma._md import move

SELF = os.getpid()
WINDOW = 128


@pytest.fixture
def pages():
    made = []

    def make(count, flags=0):
        made.append(Pages(count, flags))
        return made[-1]

    yield make
    for mapping in made:
        mapping.close()


def address_of(buffer):
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def cut(address, lengths):
    vec = []
    for length in lengths:
        vec.append((address, length))
        address += length
    return vec


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("local", "remote"),
    [(1024, 1024), (1025, 1025), (3000, 3000), (1, 1025), (1025, 1), (1000, 3000), (3000, 1000)],
)
def test_lists_longer_than_the_kernel_takes(write, local, remote):
    total = 3000 * 8
    here, there = bytearray(total), bytearray(total)
    source = there if not write else here
    source[:] = pattern(total)
    result = move(
        SELF,
        write,
        cut(address_of(here), [total // local] * local),
        cut(address_of(there), [total // remote] * remote),
    )
    moved = min(total // local * local, total // remote * remote)
    assert result[:2] == (0, moved)
    assert here[:moved] == there[:moved] == pattern(total)[:moved]


def test_zero_lengths_anywhere():
    data, into = bytearray(pattern(3000)), bytearray(3000)
    local = cut(address_of(into), [0, 1000, 0, 0, 2000, 0])
    remote = cut(address_of(data), [0, 0, 2999, 0, 1, 0])
    remote[1] = (0, 0)
    assert move(SELF, False, local, remote) == (0, 3000, 1)
    assert into == data


@pytest.mark.parametrize(
    ("local", "remote"), [([], []), ([(0, 0)], [(0, 0)]), ([(8, 8)], []), ([(8, 8)], [(0, 0)])]
)
def test_nothing_is_no_system_call(local, remote):
    assert move(SELF, False, local, remote) == (0, 0, 0)
    assert move(SELF, True, local, remote) == (0, 0, 0)
    assert move(0, True, [(8, 0)] * 2000, remote) == (0, 0, 0)


def test_any_cut_gives_the_same_bytes():
    rng = random.Random(5)
    data = bytearray(pattern(20_000))
    for _ in range(200):
        lists = []
        into = bytearray(len(data))
        for base in (address_of(into), address_of(data)):
            lengths, left = [], len(data)
            while left and len(lengths) < 1000:
                lengths.append(min(left, rng.choice([0, 1, 7, 100, 4096, rng.randrange(9000)])))
                left -= lengths[-1]
            lists.append(cut(base, lengths))
        total = min(sum(n for _, n in vec) for vec in lists)
        cap = rng.choice([0, 1000, 4096, 10_001])
        failed, done, _ = move(SELF, False, *lists, cap)
        assert (failed, done) == (0, total)
        assert into == data[:total] + bytes(len(data) - total)


def test_calls_are_counted_and_capped():
    data, into = bytearray(pattern(10_000)), bytearray(10_000)
    args = SELF, False, [(address_of(into), 10_000)], [(address_of(data), 10_000)]
    assert move(*args) == (0, 10_000, 1)
    assert move(*args, 1000) == (0, 10_000, 10)
    assert move(*args, 3333) == (0, 10_000, 4)
    vec = cut(address_of(data), [1] * 1000)
    assert move(SELF, False, [(address_of(into), 10_000)], vec) == (0, 1000, -(-1000 // WINDOW))


@pytest.mark.parametrize("offset", [0, 100, PAGE - 1])
def test_stops_at_a_hole_inside_an_element(pages, offset):
    there = pages(8)
    there.view[: 4 * PAGE] = pattern(4 * PAGE)
    there.unmap(4)
    into = bytearray(8 * PAGE)
    vec = [(there.address + offset, 8 * PAGE - offset)]
    failed, done, calls = move(SELF, False, [(address_of(into), len(into))], vec)
    assert (failed, done, calls) == (errno.EFAULT, 4 * PAGE - offset, 2)
    assert into == pattern(4 * PAGE)[offset:] + bytes(4 * PAGE + offset)


def test_a_write_stops_at_a_read_only_page(pages):
    there = pages(8)
    there.protect(5, mmap.PROT_READ, 3)
    data = pattern(8 * PAGE)
    source = bytearray(data)
    vec = [(there.address + 10, 8 * PAGE - 10)]
    failed, done, _ = move(SELF, True, [(address_of(source), len(source))], vec)
    assert (failed, done) == (errno.EFAULT, 5 * PAGE - 10)
    assert there.view[10 : 5 * PAGE] == data[: 5 * PAGE - 10]
    assert there.view[5 * PAGE :] == bytes(3 * PAGE)


def test_a_bad_local_element(pages):
    here = pages(4)
    here.unmap(2)
    data = bytearray(pattern(4 * PAGE))
    vec = [(here.address, 4 * PAGE)]
    failed, done, _ = move(SELF, False, vec, [(address_of(data), len(data))])
    assert (failed, done) == (errno.EFAULT, 2 * PAGE)
    assert here.part(0, 2 * PAGE).raw == data[: 2 * PAGE]


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1])
def test_no_such_process(pid):
    data = bytearray(8)
    vec = [(address_of(data), 8)]
    assert move(pid, False, vec, vec) == (errno.ESRCH, 0, 1)


def test_6_more_than_two_gibibytes(md, ep, pages):
    """One system call moves 0x7ffff000 bytes at most.  Sparse: this needs a few MiB only."""
    length = 2**31 + 8192
    there = pages(length // PAGE, MAP_NORESERVE)
    marks = {0: b"first", 0x7FFFF000 - 3: b"border", 2**31 - 3: b"border", length - 4: b"last"}
    for at, text in marks.items():
        there.part(at, len(text))[:] = text
    # The other side is one small piece of memory, mapped over and over.
    chunk = 4 << 20
    fd = os.memfd_create("small")
    os.ftruncate(fd, chunk)
    here = pages(length // PAGE, MAP_NORESERVE)
    try:
        for at in range(0, length, chunk):
            size = min(chunk, length - at)
            libc("mmap", here.address + at, size, 3, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
        ends = bytearray(8192)
        memh = md.mem_reg(address=there.address, length=length, owner=there)
        rkey = md.rkey_unpack(memh.mkey_pack())
        before = md.stats()
        began = time.monotonic()
        operation = ep.get_nb(rkey, rkey.address, here.part(0, length))
        operation.wait()
        assert time.monotonic() - began < 30
        assert operation.bytes_done == length
        after = md.stats()
        assert after["device.process_vm_calls"] - before["device.process_vm_calls"] == 2
        assert after["device.bytes"] - before["device.bytes"] == length
        # What was moved last is what the small piece holds now.
        assert here.part(length - 4, 4).raw == b"last"
        assert here.part(2**31, 5).raw == b"der\0\0"
        for at, text in marks.items():
            ep.get(rkey, rkey.address + at, memoryview(ends)[: len(text)])
            assert ends[: len(text)] == text
    finally:
        os.close(fd)


def test_a_storm_of_signals(md, ep):
    hits = 0

    def handler(number, frame):
        nonlocal hits
        hits += 1

    data = bytearray(pattern(32 << 20))
    into = bytearray(len(data))
    memh = md.mem_reg(data)
    rkey = md.rkey_unpack(memh.mkey_pack())
    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for turn in range(10):
            data[0] = turn
            ep.get(rkey, rkey.address, into)
            assert into[0] == turn
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert into == data
    assert hits


def test_a_long_hole_costs_no_extra_bytes(md, ep, pages):
    there = pages(4)
    there.view[: 4 * PAGE] = pattern(4 * PAGE)
    memh = md.mem_reg(there.view)
    rkey = md.rkey_unpack(memh.mkey_pack())
    there.unmap(2, 2)
    operation = ep.get_nb(rkey, rkey.address, bytearray(4 * PAGE))
    with pytest.raises(um.DeviceError) as caught:
        operation.wait()
    assert operation.bytes_done == 2 * PAGE
    assert caught.value.status == um.Status.INVALID_ADDR
    assert caught.value.errno == errno.EFAULT
    # Two to move and to learn why it stopped; one to learn which side was wrong.
    assert md.stats()["device.process_vm_calls"] == 3
