# SPDX-License-Identifier: BSD-3-Clause
"""Fork and registered pages: what explain() says of ibv_fork_init, tried.

The device goes on with the parent's pages, whoever writes first after the fork: on softmlx5, and
in the guest on rxe, where the kernel has really pinned them.
"""

import ctypes
import gc
import mmap
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

import ucx_memh as um
from _fork import MAY_FORK, answer_of, in_child, living_child, opened_anew, talk
from _sides import link

pytestmark = pytest.mark.filterwarnings(MAY_FORK)

IN_GUEST = "UCX_MEMH_GUEST" in os.environ
PAGE = mmap.PAGESIZE
PAGES = 16
SOME = range(0, PAGES, 3)  # looked at, one by one


def pages(private=True):
    """Memory of its own pages, page n full of the letter n."""
    flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, PAGES * PAGE, flags)
    for page in range(PAGES):
        memory[page * PAGE : (page + 1) * PAGE] = bytes([65 + page]) * PAGE
    return memory


def put_all(memory, data):
    for page in range(PAGES):
        memory[page * PAGE : page * PAGE + len(data)] = data


def seen_by(far, key):
    return [far.get(key, page * PAGE, 8) for page in SOME]


def seen_here(memory):
    return [memory[page * PAGE : page * PAGE + 8] for page in SOME]


@pytest.fixture
def shop(owner, library):
    memory = pages()
    base = owner.mem_reg(memory, um.MemFlag.DERIVED_ONLY)
    win = base.derive()
    link(owner, library)
    yield memory, win, library
    base.dereg(cascade=True)
    memory.close()


def test_what_is_tried_here_is_what_explain_says(owner):
    text = owner.explain()
    assert "ibv_fork_init is not called" in text
    assert "fork copies pinned pages" in text
    assert "a child may not use the parent's domain" in text
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    assert release >= (5, 12), "the premise of that policy does not hold on this kernel"


@pytest.mark.skipif(not IN_GUEST, reason="the kernel's own RDMA stack is in the guest")
def test_the_kernel_says_that_it_copies_on_fork():
    done = subprocess.run(["rdma", "system", "show"], capture_output=True, text=True, check=True)
    assert "copy-on-fork on" in done.stdout


def test_no_fork_init_in_the_tables():
    """Nobody calls it: no backend even looks the name up."""
    from ucx_memh_ib import verbs

    assert b"ibv_fork_init\0" not in Path(verbs.__file__).read_bytes()


def test_the_child_writes_first(shop):
    memory, win, far = shop
    key = win.mkey_pack()
    before = seen_here(memory)

    def child(conn):
        put_all(memory, b"childs!!")
        conn.send("written")
        conn.recv()
        return seen_here(memory)

    with living_child(child) as conn:
        assert answer_of(conn) == "written"
        assert seen_by(far, key) == before == seen_here(memory)
        for page in SOME:
            far.put(key, page * PAGE, b"by-peer!")
        assert seen_here(memory) == [b"by-peer!"] * len(SOME)
        put_all(memory, b"parents!")
        assert seen_by(far, key) == [b"parents!"] * len(SOME)
        conn.send("end")
        assert answer_of(conn) == [b"childs!!"] * len(SOME)
    assert seen_by(far, key) == [b"parents!"] * len(SOME)
    far.put(key, 0, b"at last!")
    assert memory[:8] == b"at last!"


def test_the_parent_writes_first(shop):
    """Where fork did not copy, the parent would go on with a new page and the device with the
    old one."""
    memory, win, far = shop
    key = win.mkey_pack()
    before = seen_here(memory)

    def child(conn):
        conn.recv()
        return seen_here(memory)

    with living_child(child) as conn:
        put_all(memory, b"parents!")
        assert seen_by(far, key) == [b"parents!"] * len(SOME)
        for page in SOME:
            far.put(key, page * PAGE, b"by-peer!")
        assert seen_here(memory) == [b"by-peer!"] * len(SOME)
        conn.send("end")
        assert answer_of(conn) == before
    put_all(memory, b"again...")
    assert seen_by(far, key) == [b"again..."] * len(SOME)


def test_the_device_writes_first(shop):
    memory, win, far = shop
    key = win.mkey_pack()
    before = seen_here(memory)

    def child(conn):
        conn.recv()
        return seen_here(memory)

    with living_child(child) as conn:
        for page in SOME:
            far.put(key, page * PAGE, b"by-peer!")
        assert seen_here(memory) == [b"by-peer!"] * len(SOME)
        conn.send("end")
        assert answer_of(conn) == before


def test_a_child_that_was_there_before(owner, library):
    """Registered after the fork, while both have the pages."""
    memory = pages()

    def child(conn):
        conn.recv()
        put_all(memory, b"childs!!")
        conn.send("written")
        conn.recv()

    with living_child(child) as conn, owner.mem_reg(memory) as base:
        link(owner, library)
        key = base.mkey_pack()
        put_all(memory, b"parents!")
        conn.send("write")
        assert answer_of(conn) == "written"
        assert seen_by(library, key) == [b"parents!"] * len(SOME) == seen_here(memory)
        library.put(key, 0, b"by-peer!")
        assert memory[:8] == b"by-peer!"
        conn.send("end")
        assert answer_of(conn) is None
    memory.close()


def test_local_memory_of_a_transfer(owner, library):
    """The parent's get lands in the parent's pages, whatever its child did to its own."""
    memory = pages()
    base = owner.mem_reg(memory)
    ep = link(owner, library)
    address, key = library.buffer(PAGES * PAGE)

    def child(conn):
        put_all(memory, b"childs!!")
        conn.send("written")
        conn.recv()
        return seen_here(memory)

    with living_child(child) as conn:
        assert answer_of(conn) == "written"
        with owner.rkey_unpack(key) as rkey:
            ep.get(rkey, address, base)
            assert seen_here(memory) == [b"\7" * 8] * len(SOME)
            put_all(memory, b"parents!")
            ep.put(rkey, address, base)
            back = bytearray(PAGES * PAGE)
            ep.get(rkey, address, back)
            assert seen_here(back) == [b"parents!"] * len(SOME)
        conn.send("end")
        assert answer_of(conn) == [b"childs!!"] * len(SOME)
    base.dereg()
    memory.close()


def test_the_child_is_refused_and_frees_nothing(owner, shop, device):
    memory, win, far = shop
    key = win.mkey_pack()
    ep = far.ends[-1]
    live = device.live()

    def child():
        wrong = []
        for call in (
            win.mkey_pack,
            win.derive,
            win.invalidate,
            win.dereg,
            owner.progress,
            owner.explain,
            lambda: owner.mem_reg(memory),
            lambda: owner.rkey_unpack(key),
            lambda: ep.address,
            ep.reset,
            ep.close,
            owner.close,
            lambda: owner.close(force=True),
        ):
            with suppress(um.ForkedError):
                wrong.append(repr(call()))
        gc.collect()
        return wrong

    assert in_child(child) == []
    assert device.live() == live
    assert seen_by(far, key) == seen_here(memory)
    win.invalidate()


def test_the_child_opens_anew(owner, device):
    memory = bytearray(b"original" + bytes(4088))
    with owner.mem_reg(memory) as base:
        key = base.mkey_pack()
        with living_child(lambda conn: opened_anew(conn, device.where)) as conn:
            talk(conn, owner, memory, key)


def test_a_child_that_execs(shop):
    """subprocess and posix_spawn: the device's descriptors are not inherited."""
    memory, win, far = shop
    key = win.mkey_pack()
    subprocess.run(["true"], check=True)
    with suppress(ChildProcessError):
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    assert ctypes.string_at(win.address, 8) == memory[:8]
    assert far.get(key, 0, 8) == memory[:8]
