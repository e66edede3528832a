# SPDX-License-Identifier: BSD-3-Clause
"""One handle, many threads of C: who loses against invalidate and dereg is told so, no more."""

import ctypes
from pathlib import Path

import pytest

OPTIONS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]


@pytest.fixture(scope="session")
def races(build):
    """(with the GIL, without it)"""
    path = str(build(Path(__file__).parent / "race.c", "race.so", *OPTIONS))
    held, free = ctypes.PyDLL(path), ctypes.CDLL(path)
    held.race_pointer.argtypes = [ctypes.py_object, ctypes.c_int]
    held.race_pointer.restype = ctypes.c_void_p
    assert held.race_init() == 0
    return held, free


def pointer(races, kind, thing):
    return ctypes.c_void_p(races[0].race_pointer(thing, kind))


@pytest.mark.parametrize("gil", [False, True])
def test_rule13_one_handle_used_and_ended_by_c_threads(fakes, races, gil):
    """Also while the caller holds the GIL all the time: none of these threads wants it."""
    md, device, one, _two = fakes.connected()
    base = md.mem_reg(bytearray(64))
    arguments = [pointer(races, kind, thing) for kind, thing in enumerate((md, base, one))]
    for _ in range(100):
        assert races[0 if gil else 1].race_run(*arguments) == 1
    assert base.derived_count == 0
    assert [kind for kind, *_ in device.live_keys.values()] == ["direct"]
    assert sum(device.gil_held(op) for op in ("key_create", "key_destroy", "post")) == 0


@pytest.mark.parametrize("gil", [False, True])
def test_rule13_the_first_pack_of_32_c_threads_makes_one_key(fakes, races, gil):
    md, device = fakes()
    base = md.mem_reg(bytearray(64))
    for rounds in range(1, 31):
        assert races[0 if gil else 1].race_first_pack(pointer(races, 1, base)) == 0
        assert device.count("key_create") == rounds
    assert base.derived_count == 0
