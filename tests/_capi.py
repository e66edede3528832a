# SPDX-License-Identifier: BSD-3-Clause
"""The embedders' table, called from Python."""

import ctypes as c
import re
from pathlib import Path

import ucx_memh as um
from ucx_memh import capi, core
from ucx_memh.testing import memh_pointer

S = um.Status
assert capi  # what pyapi.h imports


def capsule(name: str) -> int:
    get = c.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = [c.py_object, c.c_char_p], c.c_void_p
    return get(getattr(core, name), f"ucx_memh.core.{name}".encode())


class Table:
    """The calls by name; each argument is a ctypes object, and what comes back a Status."""

    def __init__(self) -> None:
        text = Path(um.get_include(), "ucx_memh", "memh.h").read_text()
        text = text[text.index("typedef struct ucxm_api {") :]
        self.at = capsule("_C_API")
        self.names = re.findall(r"\(\*(\w+)\)\(", text[: text.index("} ucxm_api_t;")])

    def __getattr__(self, name: str):
        place = self.at + 16 + 8 * self.names.index(name)
        address = c.c_void_p.from_address(place).value
        if name.endswith("_release"):
            return c.CFUNCTYPE(None)(address)
        function = c.CFUNCTYPE(c.c_int32)(address)
        return lambda *args: S(function(*args))


def pointers(*memhs):
    return (c.c_void_p * len(memhs))(*(memh and memh_pointer(memh) for memh in memhs))


class Params(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        *((name, c.c_uint64) for name in ("address", "length", "flags")),
        *((name, c.c_uint32) for name in ("mem_type", "has_dmabuf")),
        ("dmabuf_offset", c.c_uint64),
        ("dmabuf_fd", c.c_int32),
        ("reserved", c.c_uint32),
        ("adopt", c.c_void_p),
    ]


def pointer_to(md):
    """The first function of the objects' table."""
    place = c.c_void_p.from_address(capsule("_C_PYTHON") + 8).value
    return c.c_void_p(c.PYFUNCTYPE(c.c_void_p, c.py_object)(place)(md))


def params(kind=Params, **fields):
    memory = c.create_string_buffer(4096)
    at = {"address": c.addressof(memory), "length": 4096, "flags": int(um.MemFlag.ACCESS_ALL)}
    made = kind(struct_size=c.sizeof(kind), **{**at, **fields})
    made.memory = memory
    return made
