# SPDX-License-Identifier: BSD-3-Clause
"""Rule 14: a forked child uses and frees nothing of its parent's, and may open anew."""

import gc
import os
import subprocess
import threading
import time
from contextlib import suppress

import pytest

import ucx_memh as um
from _fakes import IDENTITY, RAW, RMA
from _fork import in_child


class Family:
    """One of each kind of object."""

    def __init__(self, fakes, **options):
        self.md, self.device, self.one, self.two = fakes.connected(**options)
        self.memory = bytearray(64)
        self.base = self.md.mem_reg(self.memory)
        self.base.mkey_pack(RMA)
        self.win = self.base.derive()
        self.key = self.win.mkey_pack()
        self.bound = self.base.derive(endpoint=self.two)
        self.bound.mkey_pack()
        self.gone = self.base.derive()
        self.gone.invalidate()
        self.rkey = self.md.rkey_unpack(self.key)
        self.device.hold()
        self.operation = self.one.put_nb(self.rkey, self.base.address, b"x")


CALLS = {
    "mem_reg": lambda f: f.md.mem_reg(bytearray(8)),
    "rkey_unpack": lambda f: f.md.rkey_unpack(f.key),
    "rkey_unpack new": lambda f: f.md.rkey_unpack(bytes(80)),
    "rkey_from_raw": lambda f: f.md.rkey_from_raw(bytes(16), 0, 8),
    "rkey_revoke": lambda f: f.md.rkey_revoke(f.key),
    "endpoint": lambda f: f.md.endpoint(),
    "progress": lambda f: f.md.progress(),
    "event_fd": lambda f: f.md.event_fd,
    "arm": lambda f: f.md.arm(),
    "stats": lambda f: f.md.stats(),
    "explain": lambda f: f.md.explain(),
    "peer_evict": lambda f: f.md.peer_evict(bytes(32)),
    "md.close": lambda f: f.md.close(),
    "md.close(force)": lambda f: f.md.close(force=True),
    "with md": lambda f: f.md.__exit__(None, None, None),
    "derive": lambda f: f.base.derive(),
    "derive of a derived": lambda f: f.win.derive(0, 8),
    "derive of a revoked": lambda f: f.gone.derive(),
    "pack": lambda f: f.win.mkey_pack(),
    "first pack": lambda f: f.base.mkey_pack(RAW),
    "pack_into": lambda f: f.win.mkey_pack_into(bytearray(256)),
    "invalidate": lambda f: f.win.invalidate(),
    "invalidate(callback)": lambda f: f.win.invalidate(print),
    "invalidate a base": lambda f: f.base.invalidate(),
    "dereg": lambda f: f.win.dereg(),
    "dereg(cascade)": lambda f: f.base.dereg(cascade=True),
    "dereg(invalidate)": lambda f: f.base.dereg(invalidate=True),
    "with memh": lambda f: f.win.__exit__(None, None, None),
    "enforcement": lambda f: f.win.enforcement,
    "memh.explain": lambda f: f.win.explain(),
    "revoke_notice": lambda f: f.gone.revoke_notice(),
    "revoke_notice of a live": lambda f: f.win.revoke_notice(),
    "ptr": lambda f: f.rkey.ptr(),
    "address": lambda f: f.one.address,
    "state": lambda f: f.one.state,
    "connect": lambda f: f.one.connect(b""),
    "reset": lambda f: f.one.reset(),
    "ep.close": lambda f: f.two.close(),
    "get": lambda f: f.one.get(f.rkey, f.base.address, bytearray(1)),
    "put of nothing": lambda f: f.one.put(f.rkey, f.base.address, b""),
    "put_nb": lambda f: f.one.put_nb(f.rkey, f.base.address, b"x"),
    "fetch_add": lambda f: f.one.fetch_add(f.rkey, f.base.address, 1),
    "compare_swap": lambda f: f.one.compare_swap(f.rkey, f.base.address, 1, 2),
    "wait": lambda f: f.operation.wait(),
    "wait(timeout)": lambda f: f.operation.wait(timeout=0),
}


def test_rule14_forked_on_every_call(fakes):
    family = Family(fakes)

    def child():
        calls = family.device.counts
        wrong = {}
        for name, call in CALLS.items():
            try:
                wrong[name] = call(family)
            except um.ForkedError:
                pass
            except BaseException as error:
                wrong[name] = repr(error)
        return wrong, family.device.counts == calls

    assert in_child(child) == ({}, True)


def test_rule14_the_child_may_look(fakes):
    """What needs no device: values, texts, references."""
    f = Family(fakes)

    def child():
        return (
            [type(repr(o)) for o in (f.md, f.base, f.win, f.gone, f.rkey, f.one, f.operation)],
            f.win.address,
            f.win.length,
            f.win.key_id,
            f.win.base is f.base,
            f.win.state,
            f.rkey.address,
            f.md.attr,
            f.operation.done,
        )

    w = f.win
    state = (w.address, w.length, w.key_id, True, w.state, f.rkey.address, f.md.attr, False)
    assert in_child(child) == ([str] * 7, *state)


@pytest.mark.parametrize("how", ["del", "collect", "close"])
def test_rule14_the_child_frees_nothing_of_the_parents(fakes, how):
    family = Family(fakes)

    def child():
        device, memory = family.device, fakes.memory
        calls, frees = device.counts, memory.frees
        fakes.opened.clear()
        if how == "close":
            family.rkey.close()
        if how == "collect":
            family.me = family
            family.__dict__.update(dict.fromkeys(["one", "operation"]))
        family.__dict__.clear()
        gc.collect()
        return device.counts == calls, memory.frees - frees

    assert in_child(child) == (True, 0)
    assert family.win.mkey_pack() == family.key


def test_rule14_the_parent_is_unaffected(fakes):
    f = Family(fakes)
    calls = f.device.counts
    owner = f.rkey.owner

    def child():
        for call in CALLS.values():
            with suppress(um.ForkedError):
                call(f)
        f.__dict__.clear()
        gc.collect()

    in_child(child)
    assert f.device.counts == calls
    assert not f.operation.done
    f.device.release()
    f.operation.wait()
    assert f.memory[:1] == b"x"
    assert f.win.mkey_pack() == f.key
    assert f.md.rkey_unpack(f.base.derive().base.mkey_pack()).owner == owner
    f.one.put(f.rkey, f.win.address, b"after")
    f.win.invalidate()
    f.base.derive().mkey_pack()


def test_rule14_the_child_may_open_anew(fakes):
    f = Family(fakes)
    parent = f.rkey.owner

    def child():
        md, device, one, _two = fakes.connected()
        memory = bytearray(64)
        base = md.mem_reg(memory)
        win = base.derive()
        rkey = md.rkey_unpack(win.mkey_pack())
        one.put(rkey, win.address, b"child")
        win.invalidate()
        owner = rkey.owner
        with pytest.raises(um.ForkedError):
            f.win.mkey_pack()
        return owner, bytes(memory[:5]), device.violations, os.getpid()

    owner, data, violations, pid = in_child(child)
    assert (data, violations) == (b"child", {})
    mine, theirs = IDENTITY.unpack(parent), IDENTITY.unpack(owner)
    assert (mine[2], theirs[2]) == (os.getpid(), pid)
    assert mine[0] == theirs[0]  # the same host
    assert mine[3:] == theirs[3:]  # and namespaces
    assert f.memory == bytes(64)


def test_rule14_a_grandchild_is_a_child_too(fakes):
    f = Family(fakes)

    def child():
        md, _ = fakes()
        base = md.mem_reg(bytearray(8))
        key = base.mkey_pack()

        def grandchild():
            for forked in (f.win.mkey_pack, base.mkey_pack, md.progress):
                with pytest.raises(um.ForkedError):
                    forked()
            return fakes()[0].mem_reg(bytearray(8)).mkey_pack() != key

        return in_child(grandchild) and base.mkey_pack() == key

    assert in_child(child)


def test_rule14_forked_while_another_thread_is_in_the_library(fakes):
    """Its locks stay locked in the child, where nobody will ever unlock them."""
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    key = win.mkey_pack()
    device.slow("key_create", 0.3)
    made = device.count("key_create")
    thread = threading.Thread(target=base.mkey_pack, args=(RMA,))
    thread.start()
    while device.count("key_create") == made:
        time.sleep(0.001)

    def child():
        for call in (
            lambda: base.mkey_pack(RMA),
            win.mkey_pack,
            win.invalidate,
            lambda: base.dereg(cascade=True),
            lambda: md.close(force=True),
            lambda: md.rkey_unpack(key),
        ):
            with pytest.raises(um.ForkedError):
                call()
        return True

    assert in_child(child)
    thread.join()
    assert win.mkey_pack() == key


def test_rule14_other_ways_to_start_a_process_change_nothing(fakes):
    f = Family(fakes)
    subprocess.run(["true"], check=True)
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    assert f.win.mkey_pack() == f.key
    f.md.progress()


CHILD_EXITS = """
import os, sys
from ucx_memh.testing import open_fake
if {before}:
    if os.fork() == 0:
        md, device = open_fake()
        assert md.mem_reg(bytearray(8)).derive().mkey_pack()
        md.close(force=True)
        sys.exit(0)
    assert os.wait()[1] == 0
md, device = open_fake()
one, two = md.endpoint(), md.endpoint()
one.connect(two.address); two.connect(one.address)
base = md.mem_reg(bytearray(8))
win = base.derive(endpoint=two)
rkey = md.rkey_unpack(win.mkey_pack())
device.hold()
operation = one.put_nb(rkey, base.address, bytearray(8))
win.invalidate()
one.on_error = lambda end: win
if os.fork() == 0:
    sys.exit(0)  # the ordinary way, with all of the parent's objects
assert os.wait()[1] == 0
assert device.count("mem_dereg") == 0
md.progress()
print("fine")
"""


@pytest.mark.parametrize("before", [False, True], ids=["", "forked-before-the-first-open"])
def test_rule14_the_child_ends_the_ordinary_way(python, before):
    done = python("-X", "faulthandler", "-c", CHILD_EXITS.format(before=before))
    assert (done.stdout, done.stderr) == ("fine\n", "")
