# SPDX-License-Identifier: BSD-3-Clause
"""Rule 14 with CUDA, which does not survive a fork: the child is told so, the parent notices
nothing, and processes that are started anew work."""

import gc
from contextlib import suppress

import pytest

import ucx_memh as um
from _fork import MAY_FORK, in_child

pytestmark = pytest.mark.filterwarnings(MAY_FORK)


def test_rule14_every_call_in_the_child(gpu, md, ep, far):
    memory = gpu.memory()
    base = md.mem_reg(memory.array())
    rkey = md.rkey_unpack(far.region(b"theirs"))
    operation = ep.get_nb(rkey, rkey.address, bytearray(6))
    calls = {
        "mem_reg": lambda: md.mem_reg(memory.array()),
        "pack": base.mkey_pack,
        "dereg": base.dereg,
        "ptr": rkey.ptr,
        "get": lambda: ep.get(rkey, rkey.address, bytearray(6)),
        "wait": operation.wait,
        "progress": md.progress,
        "evict": lambda: md.peer_evict(rkey.owner),
        "endpoint": md.endpoint,
        "close": lambda: md.close(force=True),
    }

    def child():
        wrong = {}
        for name, call in calls.items():
            try:
                wrong[name] = call()
            except um.ForkedError:
                pass
            except BaseException as error:
                wrong[name] = repr(error)
        # Nor can it begin anew, and that is no crash either.
        try:
            gpu.open().close()
            wrong["open"] = "opened"
        except um.NoDeviceError as error:
            assert "CUDA_ERROR_NOT_INITIALIZED" in str(error)
        um.open_md("cma").close()
        return wrong

    assert in_child(child) == {}
    operation.wait()
    into = bytearray(6)
    ep.get(rkey, rkey.address, into)
    assert into == b"theirs"


def test_rule14_the_child_lets_go_of_all(soft, md, ep, far):
    """It gives back nothing of the parent's: neither mappings nor descriptors."""
    key = far.region(b"theirs", 4096, "vmm", 1)
    rkey = md.rkey_unpack(key)
    base = md.mem_reg(soft.memory(kind="vmm", types=1).array())
    packed = base.mkey_pack()
    before = soft.calls()

    def child():
        nonlocal rkey, base
        with suppress(um.MemhError):
            rkey.close()
        del rkey, base
        gc.collect()
        return soft.calls() - before

    assert in_child(child) == 0
    assert far.get(packed, 0, 4) == bytes(4)
    into = bytearray(6)
    ep.get(rkey, rkey.address, into)
    assert into == b"theirs"
    far.forget(packed)


def test_rule14_a_process_that_is_started_anew(gpu, md, far, more):
    """While a forked child is there, and afterwards."""
    in_child(lambda: None)
    memory = gpu.memory(4096, b"parents!")
    with md.mem_reg(memory.array()) as base:
        other = more()
        assert other.get(base.mkey_pack(), 0, 8) == b"parents!"
        other.forget(base.mkey_pack())
