# SPDX-License-Identifier: BSD-3-Clause
"""Backends written in Python: errors, completions, threads, the end of the interpreter."""

import gc
import logging
import os
import shlex
import signal
import subprocess
import sysconfig
import threading
import weakref
from importlib.resources import files
from pathlib import Path

import pytest

import ucx_memh as um
from _fakes import ALL, ATOMIC, GET, PLAIN, PUT, RMA
from _fakes import AMO as AMO_PACK
from ucx_memh import EpState, MdFlag, MemhState, Status
from ucx_memh.python_backend import KeyKind, bind
from ucx_memh.testing import PoisonAllocator, PythonDevice, open_python_device
from ucx_memh.testing._python import FLAGS
from ucx_memh.testing.plugin import PythonDevices

HERE = Path(__file__).parent
LIVE, REVOKING, REVOKED, CLOSED = MemhState


@pytest.fixture
def devices(python_devices):
    return python_devices


# ---- the whole life ----


@pytest.mark.parametrize("destroy", ["now", "progress"])
@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
def test_the_whole_life(devices, destroy, deferred):
    md, device, one, _two = devices.connected(destroy=destroy, deferred=deferred)
    memory = bytearray(b"0123456789abcdef" + bytes(48))
    with md.mem_reg(memory) as base:
        plain = base.mkey_pack()
        assert len({plain, base.mkey_pack(RMA), base.mkey_pack(AMO_PACK)}) == 3
        with base.derive(8, 16, GET | PUT | ATOMIC) as win:
            key = win.mkey_pack()
            assert (key, len(key)) == (win.mkey_pack(RMA), 80 + 16)
            with md.rkey_unpack(key) as rkey:
                into = bytearray(8)
                one.get(rkey, win.address, into)
                assert into == b"89abcdef"
                one.put(rkey, win.address, b"ABCD")
                assert memory[8:16] == b"ABCDcdef"
                assert one.fetch_add(rkey, win.address + 8, 5) == 0
                assert one.compare_swap(rkey, win.address + 8, 5, 7) == 5
                assert one.compare_swap(rkey, win.address + 8, 5, 9) == 7
                assert memory[16] == 7
                assert rkey.ptr() == win.address
                operation = one.get_nb(rkey, win.address, into)
                operation.wait()
                assert (operation.bytes_done, into) == (8, b"ABCDcdef")
                win.invalidate()
                assert win.state is REVOKED
                with pytest.raises(um.RemoteAccessError, match="the device refused the key"):
                    one.get(rkey, win.address, into)
                assert one.state is EpState.ERROR
                with pytest.raises(um.RevokedError):
                    win.mkey_pack()
        assert base.mkey_pack() == plain
    memory.append(0)
    assert device.keys == {}


def test_what_it_says_of_itself(devices):
    md, device = devices(md_name="dict0")
    assert (md.attr.python, md.attr.software, md.attr.md_name) == (True, True, "dict0")
    assert md.attr.flags == FLAGS
    assert um.testing.open_fake()[0].attr.python is False
    base = md.mem_reg(bytearray(64))
    assert base.enforcement.revoke.put == um.Enforcement.ENFORCED
    assert md.stats()["device.python_keys"] == 1
    assert "dictionary" in md.explain(base)
    md.peer_evict(bytes(32))
    assert device.calls["peer_evict"] == 1
    assert os.fstat(md.event_fd)


def test_what_methods_are_given(devices):
    seen = {}

    class Watching(PythonDevice):
        def mem_reg(self, reg):
            seen["reg"] = (reg.address, reg.length, reg.flags, reg.grant, reg.direct_rights)
            reg.data = "kept"
            return super().mem_reg(reg)

        def key_create(self, memh, key):
            seen["key"] = (memh.address, memh.length, memh.rights, memh.derived, key.kind)
            seen["kept"] = memh.reg.data
            key.data = "mine"
            return super().key_create(memh, key)

        def key_destroy(self, memh, key, done):
            seen["destroyed"] = key.data, memh.key_id
            return super().key_destroy(memh, key, done)

        def rkey_unpack(self, rkey, payload, raw):
            seen["rkey"] = (rkey.address, rkey.length, rkey.rights, rkey.key_id, raw)
            return super().rkey_unpack(rkey, payload, raw)

    md, _ = devices(device=Watching)
    base = md.mem_reg(bytearray(64), ALL | um.MemFlag.DERIVED_ONLY)
    win = base.derive(4, 8, GET)
    md.rkey_unpack(win.mkey_pack()).close()
    address = base.address
    win.invalidate()
    local = um.MemFlag.LOCAL_READ | um.MemFlag.LOCAL_WRITE
    assert seen == {
        "reg": (address, 64, ALL | um.MemFlag.DERIVED_ONLY, ALL, local),
        "key": (address + 4, 8, GET, True, KeyKind.DERIVED),
        "kept": "kept",
        "destroyed": ("mine", win.key_id),
        "rkey": (address + 4, 8, GET, win.key_id, False),
    }


def test_it_is_given_back(devices):
    """Neither the backend nor what it was given is held when the Md has gone."""
    md, device, one, two = devices.connected()
    devices.opened.clear()
    base = md.mem_reg(bytearray(64))
    win = base.derive()
    rkey = md.rkey_unpack(win.mkey_pack())
    one.put(rkey, rkey.address, b"x")
    watch = weakref.ref(device)
    md.close(force=True)
    del md, device, one, two, base, win, rkey
    gc.collect()
    assert watch() is None


def test_what_is_dropped_waits_for_the_next_call(devices):
    """Not for a backend's locks, in the middle of a garbage collection."""
    md, device = devices()
    memory = bytearray(64)
    base = md.mem_reg(memory)
    win = base.derive()
    rkey, end = md.rkey_unpack(win.mkey_pack()), md.endpoint()
    before = dict(device.calls)
    del base, win, rkey, end
    assert device.calls == before
    with pytest.raises(BufferError):
        memory.append(0)
    md.progress()
    calls = ("mem_dereg", "key_destroy", "rkey_release", "ep_destroy")
    assert [device.calls[call] for call in calls] == [1, 1, 1, 1]
    memory.append(0)
    base = md.mem_reg(memory)
    del base
    md.close()  # nothing is in use
    memory.append(0)


def test_nothing_is_leaked(frozen_heap):
    with PoisonAllocator() as allocator:
        opener = PythonDevices()
        for options in ({}, {"destroy": "progress", "deferred": True}):
            shop = Shop(opener, **options)
            operation = shop.one.get_nb(shop.rkey, shop.rkey.address, bytearray(8))
            third = shop.base.derive(endpoint=shop.two)
            third.mkey_pack()
            del operation, third
            shop.md.close(force=True)
        del shop
        opener.opened.clear()
        gc.collect()
        allocator.check()
        assert allocator.live == 0


# ---- bind ----


class Nothing:
    pass


def bound(backend, flags, **options):
    return bind(backend, component="odd", md_name="odd0", flags=flags, **options)


@pytest.mark.parametrize(
    ("method", "flag"),
    [
        ("mem_reg", "REG"),
        ("mem_dereg", "REG"),
        ("mem_derive", "REG_DERIVED"),
        ("key_create", "REG_DERIVED"),
        ("key_destroy", "REG_DERIVED"),
        ("mkey_pack", "NEED_RKEY"),
        ("rkey_unpack", "NEED_RKEY"),
        ("rkey_ptr", "RKEY_PTR"),
        ("event_fd", "EVENT_FD"),
        ("event_arm", "EVENT_FD"),
        ("ep_post", "endpoint"),
        ("ep_state", "endpoint"),
    ],
)
def test_a_flag_without_its_method(method, flag):
    device = PythonDevice()
    setattr(device, method, None)  # the same as not having it
    with pytest.raises(um.InvalidParamError, match=f"{flag}.*{method}|{flag}.*incomplete"):
        bound(device, FLAGS, rkey_packed_size=16)
    delattr(device, method)
    bound(device, FLAGS, rkey_packed_size=16).close()  # it was the caller's still


@pytest.mark.parametrize("flag", ["REG", "REG_DERIVED", "RKEY_PTR", "EVENT_FD", "ENDPOINT"])
def test_a_method_without_its_flag(flag):
    device = PythonDevice()
    with pytest.raises(um.InvalidParamError, match="bind"):
        bound(device, FLAGS & ~MdFlag[flag], rkey_packed_size=16)
    device.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"flags": "REG"},
        {"rkey_packed_size": -1},
        {"rkey_packed_size": 177},
        {"rkey_raw_size": 17},
        {"mem_types": (9,)},
        {"mem_types": 1},
        {"quarantine": 1 << 33},
        {"enforcement": 2},
        {"component": ""},
        {"component": "x" * 32},
        {"md_name": "x" * 64},
        {"md_name": "a\0b"},
    ],
    ids=str,
)
def test_bind_refuses(wrong):
    device = PythonDevice()
    right = {"component": "odd", "md_name": "odd0", "flags": FLAGS, "rkey_packed_size": 16}
    with pytest.raises(um.InvalidParamError):
        bind(device, **{**right, **wrong})
    device.close()


def test_a_domain_that_can_do_nothing():
    md = bound(Nothing(), 0)
    for call in (
        lambda: md.mem_reg(bytearray(8)),
        lambda: md.endpoint(),
        lambda: md.event_fd,
        lambda: md.arm(),
    ):
        with pytest.raises(um.UnsupportedError):
            call()
    assert md.progress() == 0
    assert md.explain() == (
        "odd/odd0 says no more than what it declares\n"
        "rights: get NONE, put NONE, atomic NONE\n"
        "range: get NONE, put NONE, atomic NONE\n"
        "revoke: get NONE, put NONE, atomic NONE\n"
    )
    md.close()


def test_a_method_that_is_none():
    backend = Nothing()
    backend.mem_reg = 5
    with pytest.raises(um.InvalidParamError, match="no method"):
        bound(backend, MdFlag.REG)


# ---- errors ----


class Shop:
    """One way into each method."""

    def __init__(self, devices, **options):
        self.md, self.device, self.one, self.two = devices.connected(**options)
        self.memory = bytearray(64)
        self.base = self.md.mem_reg(self.memory)
        self.win = self.base.derive()
        self.key = self.win.mkey_pack()
        self.rkey = self.md.rkey_unpack(self.key)


CALLS = {
    "mem_reg": lambda s: s.md.mem_reg(bytearray(8)),
    "mem_dereg": lambda s: s.base.dereg(cascade=True),
    "mem_derive": lambda s: s.base.derive(),
    "key_create": lambda s: s.base.derive().mkey_pack(),
    "key_destroy": lambda s: s.win.invalidate(),
    "mkey_pack": lambda s: s.base.mkey_pack(),
    "rkey_unpack": lambda s: s.md.rkey_unpack(s.base.derive().mkey_pack()),
    "rkey_ptr": lambda s: s.rkey.ptr(),
    "event_fd": lambda s: s.md.event_fd,
    "event_arm": lambda s: s.md.arm(),
    "peer_evict": lambda s: s.md.peer_evict(bytes(32)),
    "ep_create": lambda s: s.md.endpoint(),
    "ep_address": lambda s: s.one.address,
    "ep_connect": lambda s: s.md.endpoint().connect(s.two.address),
    "ep_reset": lambda s: s.one.reset(),
    "ep_post": lambda s: s.one.put(s.rkey, s.rkey.address, b"x"),
}


@pytest.mark.parametrize("method", CALLS)
def test_an_exception_of_ours_is_its_status(devices, method, caplog):
    shop = Shop(devices)
    error = um.UnreachableError("the far end of the world", errno=113)
    shop.device.faults[method] = [error]
    with caplog.at_level(logging.INFO, "ucx_memh"), pytest.raises(um.UnreachableError) as raised:
        CALLS[method](shop)
    assert (raised.value.detail, raised.value.errno) == ("the far end of the world", 113)
    assert raised.value.component == "python"
    assert caplog.records == []
    CALLS[method](shop)


@pytest.mark.parametrize("method", CALLS)
def test_any_other_is_an_io_error_and_logged(devices, method, caplog):
    shop = Shop(devices)
    shop.device.faults[method] = [ZeroDivisionError("no\nsuch luck")]
    with caplog.at_level(logging.INFO, "ucx_memh"), pytest.raises(um.DeviceError) as raised:
        CALLS[method](shop)
    assert raised.value.detail == "ZeroDivisionError: no such luck"
    assert raised.value.status == Status.IO_ERROR
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("ucx_memh", "ERROR")
    assert "python/python0" in record.message
    assert method in record.message
    assert "_enter" in caplog.text  # a traceback
    CALLS[method](shop)


@pytest.mark.parametrize(
    "error",
    [um.MemhError("x", status=0), um.MemhError("x", status=1), SystemExit(3), GeneratorExit()],
    ids=repr,
)
def test_odd_exceptions(devices, error):
    shop = Shop(devices)
    shop.device.faults["mem_reg"] = [error]
    with pytest.raises(um.DeviceError):
        shop.md.mem_reg(bytearray(8))


def test_an_exception_that_cannot_be_shown(devices):
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("no")

    shop = Shop(devices)
    shop.device.faults["mem_reg"] = [Broken()]
    with pytest.raises(um.DeviceError):
        shop.md.mem_reg(bytearray(8))


def test_a_long_text_is_cut(devices):
    shop = Shop(devices)
    shop.device.faults["mem_reg"] = [um.DeviceError("é" * 200)]
    with pytest.raises(um.DeviceError) as raised:
        shop.md.mem_reg(bytearray(8))
    assert 50 <= len(raised.value.detail) <= 112


WRONG = {
    "mem_reg": [5, (1,), (1, 2, 3), (1, -1), (1 << 32, 0), ("a", "b"), [1, 2]],
    "mem_dereg": [0],
    "mem_derive": [True],
    "key_create": [None, -1, 1 << 32, "1", 1.5, True],
    "key_destroy": [0, Status.OK, "gone", 2],
    "mkey_pack": [None, "text", bytearray(16), bytes(177), bytes(17), bytes(15)],
    "rkey_unpack": [5],
    "rkey_ptr": [None, -1, 1 << 64, "p"],
    "event_fd": [None, -1, 1 << 31],
    "event_arm": [1, "armed"],
    "peer_evict": [0],
    "ep_create": [0],
    "ep_address": [None, "text", bytes(257)],
    "ep_connect": [True],
    "ep_reset": [True],
    "ep_post": [5, "done", Status.OK],
}


@pytest.mark.parametrize("method", CALLS)
def test_a_result_of_a_wrong_type(devices, method):
    shop = Shop(devices)
    right = getattr(shop.device, method)
    for value in WRONG[method]:
        setattr(shop.device, method, lambda *args, value=value: value)
        with pytest.raises(um.DeviceError) as raised:
            CALLS[method](shop)
        assert (
            "must return" in raised.value.detail or "size than it declared" in raised.value.detail
        )
    setattr(shop.device, method, right)
    CALLS[method](shop)


def test_methods_that_cannot_fail_only_log(devices, caplog):
    shop = Shop(devices)
    methods = ["progress", "mem_enforcement", "explain", "ep_state", "rkey_release", "ep_destroy"]
    shop.device.faults = {method: [KeyError(method)] for method in methods}
    shop.device.stats = lambda: 1 / 0
    assert shop.md.progress() == 0
    assert shop.base.enforcement.revoke.get == um.Enforcement.NONE
    assert "says no more than what it declares" in shop.md.explain()
    assert shop.one.state is EpState.ERROR
    assert not any(name.startswith("device.") for name in shop.md.stats())
    shop.rkey.close()
    third = shop.md.endpoint()
    third.close()
    del shop.device.ends[3]  # what the failed ep_destroy left
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 7


def test_keyboard_interrupt_in_a_method(devices):
    """The call fails, with nothing changed, and the interrupt comes out."""
    shop = Shop(devices)

    def interrupted(reg):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
        return 1, 1

    shop.device.mem_reg = interrupted
    with pytest.raises(KeyboardInterrupt):
        try:
            shop.md.mem_reg(bytearray(8))
        except um.DeviceError as error:
            assert "KeyboardInterrupt" in error.detail
        for _ in range(1000):
            pass
    del shop.device.mem_reg
    shop.md.mem_reg(bytearray(8))


# ---- keys that go later ----


def test_destroyed_later(devices):
    shop = Shop(devices, destroy="manual")
    ends = []
    shop.win.invalidate(ends.append)
    assert (shop.win.state, ends) == (REVOKING, [])
    shop.md.progress()
    assert ends == []
    assert shop.device.complete() == 1
    assert (shop.win.state, ends) == (REVOKING, [])  # only progress tells
    assert shop.md.arm() is False
    assert shop.md.progress() == 1
    assert (shop.win.state, ends) == (REVOKED, [Status.OK])
    assert shop.md.progress() == 0


def test_destroyed_later_by_a_thread_of_the_backends(devices):
    shop = Shop(devices, destroy="manual")
    thread = threading.Timer(0.05, shop.device.complete)
    thread.start()
    shop.win.invalidate()
    thread.join()
    assert shop.win.state is REVOKED


def test_done_is_called_once(devices):
    shop = Shop(devices, destroy="manual")
    ends = []
    shop.win.invalidate(ends.append)
    ((_, done),) = shop.device.dying
    shop.device.complete()
    for _ in range(3):
        with pytest.raises(um.InvalidParamError, match="completed already"):
            done()
        shop.md.progress()
    assert ends == [Status.OK]


@pytest.mark.parametrize("status", [1, 5, "OK", None, 1.5, -(1 << 40)])
def test_done_with_what_is_no_status(devices, status):
    shop = Shop(devices, destroy="manual")
    shop.win.invalidate(lambda status: None)
    ((_, done),) = shop.device.dying
    with pytest.raises((um.InvalidParamError, TypeError)):
        done(status)
    shop.device.complete()
    shop.md.progress()
    assert shop.win.state is REVOKED


def test_done_with_an_error(devices):
    shop = Shop(devices, destroy="manual")
    ends = []
    shop.win.invalidate(ends.append)
    shop.device.complete(status=Status.TIMED_OUT)
    shop.md.progress()
    assert (shop.win.state, ends) == (REVOKING, [Status.TIMED_OUT])
    shop.win.invalidate(ends.append)
    shop.device.complete()
    shop.md.progress()
    assert (shop.win.state, ends) == (REVOKED, [Status.TIMED_OUT, Status.OK])


def test_done_that_is_dropped_is_a_failure(devices):
    shop = Shop(devices, destroy="manual")
    ends = []
    shop.win.invalidate(ends.append)
    value, done = shop.device.dying.pop()
    del done
    shop.md.progress()
    assert (shop.win.state, ends) == (REVOKING, [Status.CANCELED])
    assert value in shop.device.keys
    shop.win.invalidate(ends.append)
    shop.device.complete()
    shop.md.progress()
    assert ends == [Status.CANCELED, Status.OK]


def test_done_that_is_called_inside(devices):
    shop = Shop(devices)

    def destroy(memh, key, done):
        del shop.device.keys[key.value]
        done()
        return Status.INPROGRESS

    shop.device.key_destroy = destroy
    shop.win.invalidate()
    assert shop.win.state is REVOKED


@pytest.mark.parametrize("how", ["called and gone", "called and raised", "kept and raised"])
def test_done_counts_only_after_in_progress(devices, how):
    shop = Shop(devices)
    kept = []

    def destroy(memh, key, done):
        kept.append(done)
        if "called" in how:
            done()
        if "raised" in how:
            raise um.TimedOutError("no answer")
        del shop.device.keys[key.value]

    shop.device.key_destroy = destroy
    if "raised" in how:
        with pytest.raises(um.TimedOutError):
            shop.win.invalidate()
        assert shop.win.state is REVOKING
        with pytest.raises(um.InvalidParamError):
            kept[0]()
        assert shop.md.progress() == 0
        assert shop.win.state is REVOKING
        del shop.device.key_destroy
        shop.win.invalidate()
    else:
        shop.win.invalidate()
        assert shop.md.progress() == 0
    assert shop.win.state is REVOKED


def test_a_value_in_quarantine(devices):
    """The key is refused and destroyed, also where that takes its time."""
    shop = Shop(devices, destroy="progress")
    revoked = shop.device.next_value - 1
    shop.win.invalidate()
    shop.device.next_value = revoked
    other = shop.base.derive()
    other.mkey_pack()
    assert [value for value, _ in shop.device.dying] == [revoked]
    shop.md.progress()
    assert sorted(shop.device.keys) == [revoked - 1, revoked + 1]


# ---- operations that end later ----


def test_an_operation_is_completed_once(devices):
    shop = Shop(devices)
    held = []

    def post(ep, op):
        held.append(op)
        return Status.INPROGRESS

    shop.device.ep_post = post
    into = bytearray(8)
    operation = shop.one.get_nb(shop.rkey, shop.rkey.address, into)
    shop.md.progress()
    assert not operation.done
    held[0].local[:4] = b"half"
    held[0].bytes_done = 4
    held[0].complete(Status.TIMED_OUT, "no more came")
    assert not operation.done
    assert shop.md.progress() == 1
    with pytest.raises(um.TimedOutError, match="no more came"):
        operation.wait()
    assert (operation.bytes_done, into[:4]) == (4, b"half")
    for _ in range(2):
        with pytest.raises(um.InvalidParamError, match="completed already"):
            held[0].complete()
    with pytest.raises(ValueError, match="released"):
        held[0].local[0]
    into.append(0)


def test_an_operation_of_a_thread_of_the_backends(devices):
    shop = Shop(devices)

    def post(ep, op):
        def later():
            op.result = 42
            op.complete()

        threading.Timer(0.02, later).start()
        return Status.INPROGRESS

    shop.device.ep_post = post
    assert shop.one.fetch_add(shop.rkey, shop.rkey.address, 1) == 42


def test_a_full_queue_is_tried_again(devices):
    shop = Shop(devices)
    shop.device.faults["ep_post"] = [um.BusyError(status=Status.NO_RESOURCE) for _ in range(3)]
    shop.one.put(shop.rkey, shop.rkey.address, b"x")
    assert shop.memory[0] == ord("x")
    assert shop.device.calls["ep_post"] == 4


@pytest.mark.parametrize("how", ["reset", "close", "md.close"])
@pytest.mark.parametrize("called", [False, True], ids=["forgotten", "called"])
def test_what_an_endpoint_still_has_is_flushed(devices, how, called):
    shop = Shop(devices)
    held = []

    def post(ep, op):
        held.append(op)
        return Status.INPROGRESS

    shop.device.ep_post = post
    operations = [shop.one.put_nb(shop.rkey, shop.rkey.address, b"x") for _ in range(3)]
    if called:
        held[1].complete()
    if how == "md.close":
        shop.md.close(force=True)
    else:
        getattr(shop.one, how)()
    flushed = [Status.FLUSHED] * 3
    if called:
        flushed[1] = Status.OK
    assert [operation.status for operation in operations] == flushed
    with pytest.raises(um.InvalidParamError):
        held[0].complete()
    shop.md.closed or shop.md.progress()


def test_raised_is_not_taken(devices):
    shop = Shop(devices)
    held = []

    def post(ep, op):
        held.append(op)
        raise um.UnreachableError("no route")

    shop.device.ep_post = post
    with pytest.raises(um.UnreachableError):
        shop.one.put_nb(shop.rkey, shop.rkey.address, b"x")
    with pytest.raises(um.InvalidParamError):
        held[0].complete()


# ---- threads ----

WATCHED = """
import faulthandler, gc, random, sys, threading, time
import ucx_memh as um
from ucx_memh.testing import PythonDevice, open_python_device
faulthandler.dump_traceback_later(40, exit=True)
sys.setswitchinterval(1e-6)
"""

EVERY_PATH = (
    WATCHED
    + """
class Slow(PythonDevice):
    # A backend that lets other threads in wherever it can.
    def _enter(self, method):
        super()._enter(method)
        time.sleep(0)

def work(md, seed):
    rng = random.Random(seed)
    memory = bytearray(64)
    one, two = md.endpoint(), md.endpoint()
    one.connect(two.address)
    two.connect(one.address)
    into = bytearray(8)
    while time.monotonic() < end:
        base = md.mem_reg(memory)
        wins = [base.derive(flags=um.MemFlag.REMOTE_GET) for _ in range(3)]
        rkeys = [md.rkey_unpack(win.mkey_pack()) for win in wins]
        one.get(rkeys[0], base.address, into)
        operation = one.get_nb(rkeys[1], base.address, into)
        rng.choice([lambda: md.arm(), lambda: md.event_fd, md.progress, md.stats, md.explain])()
        rng.choice([lambda: one.state, lambda: repr(two), lambda: two.address])()
        base.enforcement, wins[0].explain(), rkeys[2].ptr()
        bound = base.derive(endpoint=two)
        bound.mkey_pack()
        operation.wait()
        del operation
        try: one.get_nb(rkeys[1], base.address + 60, into)
        except um.RangeError: pass
        rkeys.pop().close()
        wins[0].invalidate()
        wins[1].invalidate(lambda status: None)
        for _ in range(3):
            md.progress()
        del rkeys, wins[2]
        bound.dereg()
        if rng.random() < 0.1:
            cycle = [md.mem_reg(bytearray(8)).derive()]
            cycle.append(cycle)
            cycle[0].mkey_pack()
        del base, wins, bound

end = time.monotonic() + 3
for options in ({}, {"destroy": "progress"}, {"deferred": True}):
    end = time.monotonic() + 1.2
    md, device = open_python_device(device=Slow, **options)
    threads = [threading.Thread(target=work, args=(md, n)) for n in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    gc.collect()
    while device.dying: md.progress()
    md.close(force=True)
    assert device.keys == {} and device.ends == {}, (device.keys, device.ends)
print("fine")
"""
)


def test_no_deadlock_on_any_path(python):
    """Locks are taken before the GIL: nobody who has the GIL waits for one."""
    done = python("-c", EVERY_PATH)
    assert (done.stdout, done.stderr) == ("fine\n", "")


CLOSING = (
    WATCHED
    + """
class Slow(PythonDevice):
    def rkey_release(self, rkey): time.sleep(0.002)
    def close(self): time.sleep(0.002); super().close()

LOOK = [lambda md, end, base, rkey: md.event_fd, lambda md, end, base, rkey: md.arm(),
        lambda md, end, base, rkey: md.stats(), lambda md, end, base, rkey: md.explain(),
        lambda md, end, base, rkey: base.enforcement, lambda md, end, base, rkey: base.derive(),
        lambda md, end, base, rkey: end.state, lambda md, end, base, rkey: end.address,
        lambda md, end, base, rkey: repr(end), lambda md, end, base, rkey: rkey.close()]

def look(call, *args):
    while not args[0].closed:
        try: call(*args)
        except um.MemhError: pass

for call in LOOK * 3:
    md, device = open_python_device(device=Slow)
    end, base = md.endpoint(), md.mem_reg(bytearray(8))
    rkeys = [md.rkey_unpack(base.derive().mkey_pack()) for _ in range(3)]
    threads = [threading.Thread(target=look, args=(call, md, end, base, rkeys[0])) for _ in "ab"]
    for thread in threads: thread.start()
    while True:
        try: md.close(force=True)
        except um.BusyError: continue
        break
    for thread in threads: thread.join()
print("fine")
"""
)


def test_no_deadlock_with_a_close(python):
    """A close waits for Python, and others for the close."""
    done = python("-c", CLOSING)
    assert (done.stdout, done.stderr) == ("fine\n", "")


COLLECTED = (
    WATCHED
    + """
class Littering(PythonDevice):
    # Each call makes garbage enough for a collection.
    def _enter(self, method):
        super()._enter(method)
        for _ in range(50):
            cycle = []
            cycle.append(cycle)

gc.set_threshold(20, 1, 1)
md, device = open_python_device(device=Littering)
base = md.mem_reg(bytearray(64))
end = md.endpoint()
for _ in range(300):
    win = base.derive()
    cycle = [win, md.rkey_unpack(win.mkey_pack()), md.endpoint(), md.mem_reg(bytearray(8))]
    cycle.append(cycle)
    del win, cycle
    base.derive().mkey_pack()
assert device.calls["key_destroy"] > 100, device.calls
assert gc.isenabled()
md.close(force=True)
print("fine")
"""
)


def test_garbage_collected_inside_a_method(python):
    """A handle that goes then wants a lock that the very call may hold."""
    done = python("-c", COLLECTED)
    assert (done.stdout, done.stderr) == ("fine\n", "")


# ---- from C ----


@pytest.fixture(scope="session")
def c_user(tmp_path_factory):
    """tests/python_backend.c as a shared library."""
    library = tmp_path_factory.mktemp("c") / "python_backend.so"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    include = files("ucx_memh") / "include"
    options = ["-shared", "-fPIC", "-pthread", "-O1", "-Wall", "-Wextra", "-Werror"]
    command = [*compiler, *options, f"-I{include}", HERE / "python_backend.c", "-o", library]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(library)


TABLE = """
import ctypes
import ucx_memh as um
from ucx_memh import core
from ucx_memh.testing import open_python_device
def pointer(capsule, name):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)
api = ctypes.c_void_p(pointer(core._C_API, b"ucx_memh.core._C_API"))
class Python(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t),
                ("md", ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object))]
of = Python.from_address(pointer(core._C_PYTHON, b"ucx_memh.core._C_PYTHON")).md
"""


@pytest.mark.parametrize("options", [{}, {"destroy": "progress", "deferred": True}], ids=str)
def test_from_threads_that_python_has_not_seen(python, c_user, options):
    script = f"""
{WATCHED}
{TABLE}
library = ctypes.CDLL({c_user!r})
md, device = open_python_device(**{options!r})
answer = []
thread = threading.Thread(target=lambda: answer.append(
    library.run_threads(api, ctypes.c_void_p(of(md)), 6, 40)))
thread.start()
own = md.mem_reg(bytearray(8))
while thread.is_alive():  # Python is at work meanwhile
    own.derive().mkey_pack()
    md.progress()
thread.join()
assert answer == [0], answer
del own
while device.dying: md.progress()
md.close(force=True)
assert device.keys == {{}} and device.ends == {{}}
print("fine")
"""
    done = python("-c", script)
    assert (done.stdout, done.stderr) == ("fine\n", "")


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_when_the_interpreter_has_ended(python, c_user, kept):
    """Calls of C find a domain that is closed, and crash nothing."""
    script = f"""
{TABLE}
import atexit
library = ctypes.CDLL({c_user!r})
md, device = open_python_device()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(md))
assert library.call_late(api, ctypes.c_void_p(of(md))) == 0
if not {kept}:
    del device
atexit.register(lambda: print(md.mem_reg(bytearray(8)).state.name))  # Python may still
"""
    done = python("-X", "faulthandler", "-c", script)
    assert done.stdout.splitlines() == ["LIVE", "every call as it should be"]
    assert done.stderr == ""


def test_backends_in_c_outlive_the_interpreter(python, c_user):
    """With what Python had registered, derived and left under way."""
    script = f"""
{TABLE}
from ucx_memh.testing import open_fake
library = ctypes.CDLL({c_user!r})
md, device = open_fake(destroy="progress")
kept = [md, device, md.mem_reg(bytearray(64)), md.mem_reg(address=1, length=8, owner=object())]
kept += [kept[2].derive(), kept[2].derive()]
kept[4].mkey_pack()
kept[4].invalidate(print)
kept[5].mkey_pack()
for thing in kept:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
assert library.call_late_c(api, ctypes.c_void_p(of(md))) == 0
"""
    done = python("-X", "faulthandler", "-c", script)
    assert done.stdout.splitlines() == ["every call as it should be"]
    assert done.stderr == ""


def test_an_md_that_is_left_to_the_end(python):
    """Its object goes with the interpreter, in the thread that ends it."""
    script = """
from ucx_memh.testing import open_python_device
md, device = open_python_device()
base = md.mem_reg(bytearray(64))
win = base.derive()
win.mkey_pack()
me = [md, win]
me.append(me)
print("fine")
"""
    done = python("-X", "faulthandler", "-c", script)
    assert (done.stdout, done.stderr) == ("fine\n", "")


# ---- fork ----


def test_rule14_the_child_calls_no_method(devices):
    shop = Shop(devices)
    before = sum(shop.device.calls.values())
    pid = os.fork()
    if pid == 0:
        wrong = 99
        try:
            wrong = 0
            for call in CALLS.values():
                try:
                    call(shop)
                    wrong += 1
                except um.ForkedError:
                    pass
            device = shop.device
            shop.__dict__.clear()
            gc.collect()
            wrong += sum(device.calls.values()) != before
            md, _ = open_python_device()
            wrong += md.mem_reg(bytearray(8)).derive().state != LIVE
        finally:
            os._exit(wrong)
    assert os.waitpid(pid, 0)[1] == 0
    assert shop.win.mkey_pack(PLAIN) == shop.key
    shop.one.put(shop.rkey, shop.rkey.address, b"after")
    assert shop.memory[:5] == b"after"
