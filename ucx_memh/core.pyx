# SPDX-License-Identifier: BSD-3-Clause
# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The core: one extension that owns all state.

This file is a shell.  Its parts are included in an order in which each uses only what stands
above it; the C structs and free nogil functions come first, the Python classes last.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport (
    PyErr_CheckSignals, PyErr_SetObject, PyErr_WriteUnraisable,
)
from cpython.number cimport PyNumber_AsSsize_t, PyNumber_Index
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stddef cimport size_t
from libc.stdint cimport (
    int32_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t, UINT64_MAX,
)
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from ucx_memh.libmemh cimport *

import os as _os

from ucx_memh import errors as _errors
from ucx_memh import flags as _flags
from ucx_memh import resources as _resources

include "core.src/base.pxi"
include "core.src/slab.pxi"
include "core.src/identity.pxi"
include "core.src/kinds.pxi"
include "core.src/ops.pxi"
include "core.src/quarantine.pxi"
include "core.src/sizing.pxi"
include "core.src/md.pxi"
include "core.src/registration.pxi"
include "core.src/endpoint.pxi"
include "core.src/index.pxi"
include "core.src/memh.pxi"
include "core.src/keys.pxi"
include "core.src/revoke.pxi"
include "core.src/batch.pxi"
include "core.src/pack.pxi"
include "core.src/rkey.pxi"
include "core.src/transfer.pxi"
include "core.src/address.pxi"
include "core.src/close.pxi"
include "core.src/status.pxi"
include "core.src/args.pxi"
include "core.src/waiting.pxi"
include "core.src/rkey_class.pxi"
include "core.src/endpoint_class.pxi"
include "core.src/many.pxi"
include "core.src/memh_class.pxi"
include "core.src/array_class.pxi"
include "core.src/md_class.pxi"
include "core.src/capi.pxi"
include "core.src/capi_many.pxi"
include "core.src/bundle.pxi"
include "core.src/capsule.pxi"
