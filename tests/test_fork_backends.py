# SPDX-License-Identifier: BSD-3-Clause
"""Rule 14 on real backends: fork, forkserver and spawn; the parent's keys work on."""

import gc
import multiprocessing
from contextlib import suppress
from importlib.util import find_spec

import pytest

import ucx_memh as um
from _fork import (
    MAY_FORK,
    answer_of,
    in_child,
    living_child,
    opened_anew,
    process_opened_anew,
    talk,
)
from _sides import Library, Where, link

pytestmark = pytest.mark.filterwarnings(MAY_FORK)

NAMES = [name for name in ("cma", "ib_mlx5", "ib") if find_spec(f"ucx_memh_{name}")]


def where_is(name: str) -> Where:
    if name == "cma":
        return Where("cma", {})
    if name == "ib_mlx5":
        return Where()
    from _rawqp import software_library

    return Where("ib", {"library": software_library()})


class Family:
    """One of each kind of object of a domain."""

    def __init__(self, where: Where) -> None:
        self.md = where.open()
        self.derives = um.MdFlag.REG_DERIVED in self.md.attr.flags
        self.one, self.two = self.md.endpoint(), self.md.endpoint()
        self.one.connect(self.two.address)
        self.two.connect(self.one.address)
        self.memory = bytearray(b"original" + bytes(8184))
        self.base = self.md.mem_reg(self.memory)
        self.win = self.base.derive() if self.derives else self.base
        self.key = self.win.mkey_pack()
        self.rkey = self.md.rkey_unpack(self.key)
        self.into = bytearray(8)
        self.operation = self.one.get_nb(self.rkey, self.base.address, self.into)
        self.operation.wait()

    def close(self) -> None:
        self.md.close(force=True)


@pytest.fixture(params=NAMES)
def where(request):
    return where_is(request.param)


@pytest.fixture
def family(where):
    made = Family(where)
    yield made
    made.close()


def at(f):
    return f.rkey, f.base.address


CALLS = {
    "mem_reg": lambda f: f.md.mem_reg(bytearray(8)),
    "rkey_unpack": lambda f: f.md.rkey_unpack(f.key),
    "endpoint": lambda f: f.md.endpoint(),
    "progress": lambda f: f.md.progress(),
    "event_fd": lambda f: f.md.event_fd,
    "arm": lambda f: f.md.arm(),
    "stats": lambda f: f.md.stats(),
    "explain": lambda f: f.md.explain(),
    "peer_evict": lambda f: f.md.peer_evict(bytes(32)),
    "derive": lambda f: f.base.derive(),
    "pack": lambda f: f.win.mkey_pack(),
    "first pack": lambda f: f.win.mkey_pack(um.PackFlag.INVALIDATE_RMA),
    "invalidate": lambda f: f.win.invalidate(),
    "enforcement": lambda f: f.win.enforcement,
    "address": lambda f: f.one.address,
    "state": lambda f: f.one.state,
    "reset": lambda f: f.one.reset(),
    "get": lambda f: f.one.get(*at(f), bytearray(8)),
    "put": lambda f: f.one.put(*at(f), b"x"),
    "get big": lambda f: f.one.get(*at(f), bytearray(8192)),
    "fetch_add": lambda f: f.one.fetch_add(*at(f), 1),
    "wait": lambda f: f.operation.wait(),
    "bundle": lambda f: um.Bundle([f.md]).mem_reg(bytearray(8)),
    "ptr": lambda f: f.rkey.ptr(),
    "ep.close": lambda f: f.two.close(),
    "dereg": lambda f: f.win.dereg(),
    "cascade": lambda f: f.base.dereg(cascade=True),
    "close": lambda f: f.md.close(),
    "close(force)": lambda f: f.md.close(force=True),
}


def test_rule14_every_call_in_the_child(family):
    def child():
        wrong = {}
        for name, call in CALLS.items():
            try:
                wrong[name] = call(family)
            except um.ForkedError:
                pass
            except BaseException as error:
                wrong[name] = repr(error)
        return wrong

    before = family.md.stats()
    assert in_child(child) == {}
    assert family.md.stats() == before


def test_rule14_the_parents_keys_work_on(family, where, peer):
    """While the child lives, while it lets go of all that it has, and when it has ended."""
    f = family
    far = Library(peer, where)
    ep = link(f.md, far)

    def use(data):
        assert far.get(f.key, 0, 8) == f.memory[:8]
        far.put(f.key, 8, data)
        assert f.memory[8:16] == data
        f.one.get(*at(f), f.into)
        assert f.into == f.memory[:8]

    use(b"before--")

    def child(conn):
        conn.recv()
        f.memory[:8] = b"childs!!"  # its own copy
        for call in CALLS.values():
            with suppress(um.ForkedError):
                call(f)
        f.rkey.close()
        f.__dict__.clear()
        gc.collect()
        conn.send("let go")
        conn.recv()

    with living_child(child) as conn:
        use(b"while-it")
        conn.send("let go")
        assert answer_of(conn) == "let go"
        f.memory[:8] = b"changed!"
        use(b"let-go--")
        conn.send("end")
        assert answer_of(conn) is None
    use(b"ended---")
    assert f.win.mkey_pack() == f.key
    f.base.derive().mkey_pack() if f.derives else f.base.mkey_pack()
    if f.derives:
        f.win.invalidate()
        with pytest.raises(um.RemoteAccessError):
            far.get(f.key, 0, 8)
    ep.close()


def test_rule14_the_child_opens_anew(family, where):
    with living_child(lambda conn: opened_anew(conn, where)) as conn:
        talk(conn, family.md, family.memory, family.key)
    family.one.get(*at(family), family.into)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_rule14_processes_of_multiprocessing(family, where, method):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=process_opened_anew, args=(theirs, tuple(where)), daemon=True)
    process.start()
    theirs.close()
    try:
        talk(ours, family.md, family.memory, family.key)
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
    family.one.put(*at(family), b"after")
    assert family.memory[:5] == b"after"


def test_rule14_a_pool_of_forked_workers(family):
    """What frameworks do: the domain is inherited by workers that never asked for it."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, range(-8, 0)) == list(range(8, 0, -1))
        family.one.get(*at(family), family.into)
        assert family.into == b"original"
    family.one.get(*at(family), family.into)


ORDINARY = """
import os, sys
import ucx_memh as um
md = um.open_md({component!r}, **{config!r})
one, two = md.endpoint(), md.endpoint()
one.connect(two.address); two.connect(one.address)
memory = bytearray(b"parents!")
base = md.mem_reg(memory)
win = base.derive() if um.MdFlag.REG_DERIVED in md.attr.flags else base
rkey = md.rkey_unpack(win.mkey_pack())
into = bytearray(8)
if os.fork() == 0:
    memory[:] = b"childs!!"
    sys.exit(0)  # the ordinary way, with all of the parent's objects
assert os.wait()[1] == 0
one.get(rkey, base.address, into)
assert into == b"parents!", into
md.close(force=True)
print("fine")
"""


def test_rule14_the_child_ends_the_ordinary_way(python, where):
    script = ORDINARY.format(component=where.component, config=where.config)
    done = python("-X", "faulthandler", "-W", "ignore::DeprecationWarning", "-c", script)
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_rule14_a_child_of_a_child(family, where):
    def child():
        with where.open() as md:
            base = md.mem_reg(bytearray(8))
            key = base.mkey_pack()

            def grandchild():
                for call in (family.win.mkey_pack, base.mkey_pack, md.progress):
                    with pytest.raises(um.ForkedError):
                        call()
                with where.open() as own, own.mem_reg(bytearray(8)) as memh:
                    return memh.mkey_pack() != key

            good = in_child(grandchild) and base.mkey_pack() == key
            base.dereg()
            return good

    assert in_child(child)
    family.one.get(*at(family), family.into)
