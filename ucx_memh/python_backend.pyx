# SPDX-License-Identifier: BSD-3-Clause
# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""Backends written in Python: `bind()` makes an Md of an object with the operations as methods.

Each operation of backend.h is a method of the same name; a missing one (or None) is a missing
operation.  What C passes by pointers to be filled is returned here.

=================================  ========================================================
method                             returns
=================================  ========================================================
mem_reg(reg)                       None, or (lkey, rkey): the native keys of the region
mem_dereg(reg)                     None
mem_derive(base, memh)             None: `memh`, derived from `base`, may exist
key_create(memh, key)              int: the native value, 32 bits.  `key.kind` says which kind
key_destroy(memh, key, done)       None: the key is gone.  Status.INPROGRESS: `done()` or
                                   `done(status)` will be called.  `memh` may be None
mkey_pack(memh, rma, atomic)       bytes: the payload.  `atomic` is None: one key serves both
rkey_unpack(rkey, payload, raw)    None
rkey_release(rkey)                 None
rkey_ptr(rkey, address)            int: a local pointer
progress()                         int: how many operations it completed; or None
event_fd()                         int: a file descriptor
event_arm()                        None or True: armed.  False: call progress first
mem_enforcement(memh)              EnforcementTable; missing: bind()'s for every handle
stats()                            {name: int}
explain(memh)                      str; `memh` is None: about the domain
peer_evict(identity)               None
mem_query(address, length)         MemType, of memory about which the caller did not say; missing:
                                   it is HOST, and mem_reg refuses what it cannot reach
close()                            None
ep_create(ep), ep_destroy(ep)      None
ep_address(ep)                     bytes, other ones after each ep_reset
ep_connect(ep, address)            None
ep_reset(ep)                       None
ep_state(ep)                       EpState
ep_post(ep, op)                    None: done, OK.  Status.INPROGRESS: op.complete() will be called
=================================  ========================================================

A method may keep what it likes in the `data` of `reg`, `key`, `rkey` and `ep`.

Errors: a MemhError is its status; any other exception is IO_ERROR, with its text as detail and its
traceback in the logger "ucx_memh"; so is a result of another type than above.  Nothing must have
changed then.  ep_post that raises has not taken the operation (BusyError with status NO_RESOURCE:
try again); one that was taken and failed is op.complete(status).

Completions: `done` and `op.complete` may be called in any thread, at any time, once; a second call
raises InvalidParamError.  What they lead to happens in progress().  A `done` that is dropped
without a call is a failure (CANCELED); operations that are left when their endpoint is reset or
closed complete with FLUSHED.

Threads: methods are called with the GIL, in whichever thread made the call, also in one that
Python has not seen before, and by several threads at a time; key_create, key_destroy and mkey_pack
of one Md never at the same time.  They run inside the Md's own calls, some with its locks held,
and must not call it: that can wait for ever.  (So can a signal handler that calls it, if it comes
while a method runs in the main thread.)  Objects of the Md that are dropped without dereg() or
close() are torn down by the Md's next call, for a garbage collection may come in the middle of a
method.  When the interpreter has ended, or another thread is ending it, calls give CLOSED.
"""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy, memset

from ucx_memh.core cimport md_attr_init, md_bind
from ucx_memh.libmemh cimport (
    UCXM_BACKEND_ABI, UCXM_EP_ADDRESS_MAX, UCXM_EP_ERROR, UCXM_ERR_BUSY, UCXM_ERR_CANCELED,
    UCXM_ERR_CLOSED, UCXM_ERR_FLUSHED, UCXM_ERR_IO_ERROR, UCXM_INPROGRESS, UCXM_OK,
    UCXM_OP_GET, UCXM_OP_PUT, int32_t, ucxm_completion_t, ucxm_enforcement_t,
    ucxm_ep_ops_t, ucxm_ep_t, ucxm_error_t, ucxm_identity_t, ucxm_key_slot_t, ucxm_md_attr_t,
    ucxm_md_ops_t, ucxm_memh_own, ucxm_memh_own_t, ucxm_memh_t, ucxm_op_t, ucxm_registration_t,
    ucxm_rkey_t, ucxm_status_t, uint8_t, uint32_t, uint64_t,
)

import _thread
import atexit
import logging
from collections import deque
from enum import IntEnum
from operator import index

from ucx_memh.errors import InvalidParamError, MemhError
from ucx_memh.flags import Enforcement, EpState, MemFlag, MemType, Status
from ucx_memh.resources import EnforcementTable

cdef extern from "Python.h":
    int Py_IsInitialized() nogil
    int Py_AtExit(void (*func)() noexcept nogil)

cdef extern from "pthread.h" nogil:
    ctypedef unsigned long pthread_t
    pthread_t pthread_self()

log = logging.getLogger("ucx_memh")
log.addHandler(logging.NullHandler())


class KeyKind(IntEnum):
    """Which native key is wanted (ucxm_key_kind_t)."""

    DIRECT = 0
    INDIRECT = 1
    ATOMIC = 2
    DERIVED = 3


class OpKind(IntEnum):
    """What an operation does (ucxm_op_kind_t)."""

    GET = 0
    PUT = 1
    FETCH_ADD = 2
    COMPARE_SWAP = 3


# ---- is there a Python to call? -------------------------------------------------------------

cdef bint gone = False             # the interpreter has been taken down
cdef bint ending = False           # ... is being
cdef pthread_t ending_thread = 0   # by this thread, which may still use it


cdef void interpreter_gone() noexcept nogil:
    global gone
    gone = True


@atexit.register
def _interpreter_ends():
    global ending, ending_thread
    ending_thread = pthread_self()
    ending = True


if Py_AtExit(interpreter_gone) != 0:
    raise ImportError("ucx_memh.python_backend: the interpreter takes no more exit functions")


cdef bint alive() noexcept nogil:
    """May this thread take the GIL?  Without an interpreter that would crash or hang."""
    if gone:
        return False
    return Py_IsInitialized() or (ending and ending_thread == pthread_self())


# ---- what the methods are given -------------------------------------------------------------

@cython.final
@cython.freelist(16)
cdef class Registration:
    """Memory that is registered; of one Md."""

    cdef readonly uint64_t address, length, dmabuf_offset, adopt
    cdef readonly int dmabuf_fd
    cdef readonly uint32_t lkey, rkey
    cdef public object data
    cdef uint64_t _flags, _grant, _direct_rights
    cdef uint32_t _mem_type

    @property
    def flags(self):
        return MemFlag(self._flags)

    @property
    def grant(self):
        return MemFlag(self._grant)

    @property
    def direct_rights(self):
        return MemFlag(self._direct_rights)

    @property
    def mem_type(self):
        return MemType(self._mem_type)


@cython.final
@cython.freelist(16)
cdef class Ep:
    """An endpoint."""

    cdef public object data
    cdef set ops  # taken, and not complete
    cdef object __weakref__


@cython.final
@cython.freelist(16)
cdef class Handle:
    """A handle as it is at this call."""

    cdef readonly uint64_t address, length, key_id
    cdef readonly bint derived
    cdef readonly Registration reg
    cdef readonly Ep endpoint
    cdef uint64_t _rights, _grant

    @property
    def rights(self):
        return MemFlag(self._rights)

    @property
    def grant(self):
        return MemFlag(self._grant)


@cython.final
@cython.freelist(16)
cdef class Key:
    """A native key."""

    cdef readonly uint32_t value
    cdef readonly object kind
    cdef public object data


@cython.final
@cython.freelist(16)
cdef class RemoteKey:
    """What was unpacked; of a raw one the range is what its user claims."""

    cdef readonly uint64_t address, length, key_id
    cdef readonly uint32_t flags
    cdef readonly bytes owner
    cdef public object data
    cdef uint32_t _rights

    @property
    def rights(self):
        return MemFlag(self._rights)


cdef enum:
    OFFERED     # in the call that hands it over
    TAKEN       # the call has said INPROGRESS
    CALLED      # complete() came; progress() will tell the core
    DONE        # the core has been told, or the call refused


cdef int32_t as_status(object status) except? -1:
    number = index(status)
    if not -(1 << 31) <= number <= 0:
        raise InvalidParamError(f"{status!r} is no status to complete with", op="complete")
    return number


@cython.final
@cython.no_gc_clear
cdef class Completion:
    """Called once, when the key is gone (no argument, or OK) or could not be destroyed."""

    cdef ucxm_completion_t *comp
    cdef _Served served
    cdef Key key
    cdef int state
    cdef int32_t status

    def __dealloc__(self):
        # Nobody can call it any more.
        if self.state == TAKEN:
            self.served.queue.append((<uintptr_t>self.comp, UCXM_ERR_CANCELED, self.key))

    def __call__(self, status=Status.OK):
        cdef int32_t number = as_status(status)
        if self.state == CALLED or self.state == DONE:
            raise InvalidParamError("completed already, or the destruction was refused",
                                    op="key_destroy")
        self.status = number
        if self.state == TAKEN:
            self.served.queue.append((<uintptr_t>self.comp, number, self.key))
        self.state = CALLED


@cython.final
cdef class Transfer:
    """An operation.  `local`, a memoryview of the caller's memory, is None for atomics; it must
    not be used after complete()."""

    cdef ucxm_op_t *op
    cdef _Served served
    cdef Ep ep
    cdef int state
    cdef int32_t status
    cdef str detail
    cdef readonly object kind
    cdef readonly uint64_t remote_address, length, operand, compare
    cdef readonly object lkey
    cdef readonly object local
    cdef readonly RemoteKey rkey
    cdef public uint64_t result, bytes_done

    def complete(self, status=Status.OK, detail=""):
        """It is done.  `result` (atomics: the old value) and `bytes_done` count; OK means all."""
        cdef int32_t number = as_status(status)
        if self.state == CALLED or self.state == DONE:
            raise InvalidParamError("completed already, refused, or flushed", op="ep_post")
        if number == UCXM_OK:
            self.bytes_done = self.length
        self.status = number
        self.detail = str(detail)
        if self.state == TAKEN:
            self.served.queue.append(self)
        self.state = CALLED

    cdef ucxm_op_t *end(self, int32_t status) noexcept:
        """Fill the core's operation, which is then to be completed; NULL: it was already."""
        cdef ucxm_op_t *op = self.op
        if self.state == DONE:
            return NULL
        self.state = DONE
        self.op = NULL
        self.ep.ops.discard(self)
        op.result = self.result
        op.bytes_done = min(self.bytes_done, self.length)
        if status != UCXM_OK and self.detail:
            say(&op.error, self.detail)
        if self.local is not None:
            try:
                self.local.release()
            except BaseException:
                pass  # the backend has views of it
        return op


# ---- the Md's own object --------------------------------------------------------------------

@cython.final
cdef class _Served:
    """A backend and what it owes."""

    cdef object backend
    cdef object queue          # completions that progress() is to run
    cdef object enforcement
    cdef dict names            # of counters, as C sees them
    cdef list counters
    cdef str where


cdef void say(ucxm_error_t *error, str text) noexcept:
    cdef bytes data
    try:
        data = " ".join(text.split()).encode("utf-8", "replace")[:sizeof(error.text) - 1]
        memcpy(error.text, <const char *>data, len(data))
        error.text[len(data)] = 0
    except BaseException:
        error.text[0] = 0


cdef ucxm_status_t told(_Served self, str op, object error, ucxm_error_t *out) noexcept:
    """The status for an exception."""
    cdef int32_t status = UCXM_ERR_IO_ERROR
    try:
        if isinstance(error, MemhError) and -(1 << 31) <= index(error.status) < 0:
            status = error.status
            text = error.detail
            log.debug("%s: %s: %s", self.where, op, error, exc_info=error)
        else:
            text = f"{type(error).__name__}: {error}"
            log.error("%s: %s failed", self.where, op, exc_info=error)
        if out != NULL:
            out.sys_errno = getattr(error, "errno", None) or 0
            say(out, text)
        if isinstance(error, KeyboardInterrupt):
            _thread.interrupt_main()  # it was for the program: let it come again outside
    except BaseException:
        pass  # the interpreter is ending, or the exception itself is broken
    return status


cdef object nothing(object value, str op):
    if value is not None:
        raise TypeError(f"{op} must return None, not {type(value).__name__}")


cdef uint64_t number(object value, str op, uint64_t largest) except? 0xdeadbeef:
    number = None
    if hasattr(type(value), "__index__") and not isinstance(value, bool):
        number = index(value)
    if number is None or not 0 <= number <= largest:
        raise TypeError(f"{op} must return integers in 0 .. {largest:#x}, not {value!r}")
    return number


cdef Registration reg_of(const ucxm_registration_t *reg):
    cdef PyObject *kept = (<PyObject **>reg.priv)[0]
    return <Registration>kept if kept != NULL else None  # NULL: nothing is registered


cdef Ep end_of(const ucxm_ep_t *ep):
    return <Ep>(<PyObject **>ep.priv)[0]


cdef Handle handle_of(const ucxm_memh_t *memh):
    cdef const ucxm_memh_own_t *own
    cdef Handle handle
    if memh == NULL:
        return None
    own = ucxm_memh_own(memh)
    handle = Handle.__new__(Handle)
    handle.address = own.address
    handle.length = own.length
    handle._rights = own.rights
    handle._grant = own.grant
    handle.key_id = memh.id.key_id
    handle.derived = memh.id.parent != NULL
    handle.reg = reg_of(memh.inherited.reg)
    handle.endpoint = end_of(own.ep) if own.ep != NULL else None
    return handle


cdef Key key_of(const ucxm_key_slot_t *slot):
    cdef Key key
    if slot == NULL:
        return None
    if slot.object != NULL:
        return <Key>slot.object
    key = Key.__new__(Key)  # a region's own
    key.kind = KeyKind.DIRECT
    key.value = slot.value
    return key


cdef RemoteKey remote_of(const ucxm_rkey_t *rkey):
    return <RemoteKey>(<PyObject **>rkey.priv)[0]


# ---- trampolines: out here without the GIL, in_... with it -----------------------------------

cdef ucxm_status_t in_mem_reg(void *priv, ucxm_registration_t *reg,
                              ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef Registration view
    try:
        view = Registration.__new__(Registration)
        view.address = reg.address
        view.length = reg.length
        view._flags = reg.flags
        view._grant = reg.grant
        view._direct_rights = reg.direct_rights
        view._mem_type = reg.mem_type
        view.dmabuf_fd = reg.dmabuf_fd
        view.dmabuf_offset = reg.dmabuf_offset
        view.adopt = <uintptr_t>reg.adopt
        keys = self.backend.mem_reg(view)
        if keys is not None:
            if not isinstance(keys, tuple) or len(keys) != 2:
                raise TypeError(f"mem_reg must return None or (lkey, rkey), not {keys!r}")
            view.lkey = <uint32_t>number(keys[0], "mem_reg", 0xffffffff)
            view.rkey = <uint32_t>number(keys[1], "mem_reg", 0xffffffff)
        reg.lkey = view.lkey
        reg.rkey = view.rkey
        Py_INCREF(view)
        (<PyObject **>reg.priv)[0] = <PyObject *>view
        return UCXM_OK
    except BaseException as failure:
        return told(self, "mem_reg", failure, error)


cdef ucxm_status_t py_mem_reg(void *priv, ucxm_registration_t *reg,
                              ucxm_error_t *error) noexcept nogil:
    return in_mem_reg(priv, reg, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_mem_dereg(void *priv, ucxm_registration_t *reg,
                                ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef Registration view = reg_of(reg)
    try:
        nothing(self.backend.mem_dereg(view), "mem_dereg")
    except BaseException as failure:
        return told(self, "mem_dereg", failure, error)
    (<PyObject **>reg.priv)[0] = NULL
    Py_DECREF(view)
    return UCXM_OK


cdef ucxm_status_t py_mem_dereg(void *priv, ucxm_registration_t *reg,
                                ucxm_error_t *error) noexcept nogil:
    return in_mem_dereg(priv, reg, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_mem_derive(void *priv, const ucxm_memh_t *base, const ucxm_memh_t *memh,
                                 ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        nothing(self.backend.mem_derive(handle_of(base), handle_of(memh)), "mem_derive")
        return UCXM_OK
    except BaseException as failure:
        return told(self, "mem_derive", failure, error)


cdef ucxm_status_t py_mem_derive(void *priv, const ucxm_memh_t *base, const ucxm_memh_t *memh,
                                 ucxm_error_t *error) noexcept nogil:
    return in_mem_derive(priv, base, memh, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_key_create(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                 ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef Key key
    try:
        key = Key.__new__(Key)
        key.kind = KeyKind(slot.kind)
        key.value = <uint32_t>number(self.backend.key_create(handle_of(memh), key),
                                     "key_create", 0xffffffff)
        slot.value = key.value
        Py_INCREF(key)
        slot.object = <PyObject *>key
        return UCXM_OK
    except BaseException as failure:
        return told(self, "key_create", failure, error)


cdef ucxm_status_t py_key_create(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                 ucxm_error_t *error) noexcept nogil:
    return in_key_create(priv, memh, slot, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_key_destroy(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                  ucxm_completion_t *comp,
                                  ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef Completion done = None
    try:
        done = Completion.__new__(Completion)
        done.comp = comp
        done.served = self
        done.key = key_of(slot)
        answer = self.backend.key_destroy(handle_of(memh), done.key, done)
        if answer is not None and answer is not Status.INPROGRESS:
            raise TypeError(f"key_destroy must return None or Status.INPROGRESS, not {answer!r}")
        if answer is None:
            done.state = DONE
            slot.object = NULL
            Py_DECREF(done.key)
            return UCXM_OK
        if done.state == CALLED:
            self.queue.append((<uintptr_t>comp, done.status, done.key))
        else:
            done.state = TAKEN
        return UCXM_INPROGRESS
    except BaseException as failure:
        if done is not None:
            done.state = DONE
        return told(self, "key_destroy", failure, error)


cdef ucxm_status_t py_key_destroy(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                  ucxm_completion_t *comp, ucxm_error_t *error) noexcept nogil:
    return in_key_destroy(priv, memh, slot, comp, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_mkey_pack(void *priv, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
                                const ucxm_key_slot_t *atomic, uint8_t *payload, size_t *length,
                                size_t room, ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef bytes data
    try:
        answer = self.backend.mkey_pack(handle_of(memh), key_of(rma), key_of(atomic))
        if not isinstance(answer, bytes) or len(answer) > room:
            raise TypeError(f"mkey_pack must return at most {room} bytes, not {answer!r}")
        data = answer
        memcpy(payload, <const char *>data, len(data))
        length[0] = len(data)
        return UCXM_OK
    except BaseException as failure:
        return told(self, "mkey_pack", failure, error)


cdef ucxm_status_t py_mkey_pack(void *priv, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
                                const ucxm_key_slot_t *atomic, uint8_t *payload, size_t *length,
                                ucxm_error_t *error) noexcept nogil:
    # More than was declared the core refuses; this much there is room for.
    return in_mkey_pack(priv, memh, rma, atomic, payload, length, PAYLOAD_ROOM,
                        error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_rkey_unpack(void *priv, ucxm_rkey_t *rkey, const uint8_t *payload,
                                  size_t length, int raw,
                                  ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef RemoteKey view
    try:
        view = RemoteKey.__new__(RemoteKey)
        view.address = rkey.info.address
        view.length = rkey.info.length
        view.key_id = rkey.info.key_id
        view.flags = rkey.info.flags
        view._rights = rkey.info.rights
        view.owner = PyBytes_FromStringAndSize(<const char *>&rkey.info.owner,
                                               sizeof(ucxm_identity_t))
        nothing(self.backend.rkey_unpack(
            view, PyBytes_FromStringAndSize(<const char *>payload, length), bool(raw)),
            "rkey_unpack")
        Py_INCREF(view)
        (<PyObject **>rkey.priv)[0] = <PyObject *>view
        return UCXM_OK
    except BaseException as failure:
        return told(self, "rkey_unpack", failure, error)


cdef ucxm_status_t py_rkey_unpack(void *priv, ucxm_rkey_t *rkey, const uint8_t *payload,
                                  size_t length, int raw, ucxm_error_t *error) noexcept nogil:
    return in_rkey_unpack(priv, rkey, payload, length, raw,
                          error) if alive() else UCXM_ERR_CLOSED


cdef void in_rkey_release(void *priv, ucxm_rkey_t *rkey) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef RemoteKey view = remote_of(rkey)
    try:
        release = getattr(self.backend, "rkey_release", None)
        if release is not None:
            nothing(release(view), "rkey_release")
    except BaseException as failure:
        told(self, "rkey_release", failure, NULL)
    (<PyObject **>rkey.priv)[0] = NULL
    Py_DECREF(view)


cdef void py_rkey_release(void *priv, ucxm_rkey_t *rkey) noexcept nogil:
    if alive():
        in_rkey_release(priv, rkey)


cdef ucxm_status_t in_rkey_ptr(void *priv, const ucxm_rkey_t *rkey, uint64_t address, void **ptr,
                               ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        ptr[0] = <void *><uintptr_t>number(self.backend.rkey_ptr(remote_of(rkey), address),
                                           "rkey_ptr", <uint64_t>-1)
        return UCXM_OK
    except BaseException as failure:
        return told(self, "rkey_ptr", failure, error)


cdef ucxm_status_t py_rkey_ptr(void *priv, const ucxm_rkey_t *rkey, uint64_t address, void **ptr,
                               ucxm_error_t *error) noexcept nogil:
    return in_rkey_ptr(priv, rkey, address, ptr, error) if alive() else UCXM_ERR_CLOSED


# ---- progress

cdef struct due_t:
    ucxm_completion_t *comp
    ucxm_op_t *op
    ucxm_status_t status


cdef unsigned in_progress(void *priv) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        progress = getattr(self.backend, "progress", None)
        count = progress() if progress is not None else None
        return <unsigned>number(count, "progress", 0xffffffff) if count is not None else 0
    except BaseException as failure:
        told(self, "progress", failure, NULL)
        return 0


cdef bint in_next(void *priv, due_t *due) noexcept with gil:
    """The next completion that was called."""
    cdef _Served self = <_Served>priv
    cdef Transfer transfer
    cdef uintptr_t comp
    memset(due, 0, sizeof(due[0]))
    while self.queue:
        try:
            entry = self.queue.popleft()
        except IndexError:  # another thread was faster
            return False
        if type(entry) is Transfer:
            transfer = <Transfer>entry
            due.status = transfer.status
            due.op = transfer.end(transfer.status)
            if due.op == NULL:
                continue  # flushed meanwhile
            return True
        comp, status, key = entry
        due.comp = <ucxm_completion_t *>comp
        due.status = status
        if due.status == UCXM_OK:
            Py_DECREF(key)  # the slot's
        return True
    return False


cdef unsigned run_due(void *priv) noexcept nogil:
    """Tell the core; it takes its locks, so without the GIL."""
    cdef unsigned count = 0
    cdef due_t due
    while in_next(priv, &due):
        if due.op != NULL:
            due.op.complete(due.op, due.status)
        else:
            due.comp.func(due.comp, due.status)
        count += 1
    return count


cdef unsigned py_progress(void *priv) noexcept nogil:
    cdef unsigned count
    if not alive():
        return 0
    count = in_progress(priv)
    return max(count, run_due(priv))


cdef ucxm_status_t in_event_fd(void *priv, int *fd, ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        fd[0] = <int>number(self.backend.event_fd(), "event_fd", 0x7fffffff)
        return UCXM_OK
    except BaseException as failure:
        return told(self, "event_fd", failure, error)


cdef ucxm_status_t py_event_fd(void *priv, int *fd, ucxm_error_t *error) noexcept nogil:
    return in_event_fd(priv, fd, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_event_arm(void *priv, ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        armed = self.backend.event_arm()
        if armed is not None and not isinstance(armed, bool):
            raise TypeError(f"event_arm must return None or a bool, not {armed!r}")
        return UCXM_ERR_BUSY if armed is False or self.queue else UCXM_OK
    except BaseException as failure:
        return told(self, "event_arm", failure, error)


cdef ucxm_status_t py_event_arm(void *priv, ucxm_error_t *error) noexcept nogil:
    return in_event_arm(priv, error) if alive() else UCXM_ERR_CLOSED


# ---- what it says of itself

cdef int cells_fill(ucxm_enforcement_t *cells, object table) except -1:
    if not isinstance(table, EnforcementTable):
        raise TypeError(f"mem_enforcement must return an EnforcementTable, not {table!r}")
    for i, name in enumerate(("get", "put", "atomic")):
        cells.rights[i] = Enforcement(getattr(table.rights, name))
        cells.range[i] = Enforcement(getattr(table.range, name))
        cells.revoke[i] = Enforcement(getattr(table.revoke, name))
    return 0


cdef void in_mem_enforcement(void *priv, const ucxm_memh_t *memh,
                             ucxm_enforcement_t *cells) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        ask = getattr(self.backend, "mem_enforcement", None)
        cells_fill(cells, self.enforcement if ask is None else ask(handle_of(memh)))
    except BaseException as failure:
        memset(cells, 0, sizeof(cells[0]))  # nobody keeps anything
        told(self, "mem_enforcement", failure, NULL)


cdef void py_mem_enforcement(void *priv, const ucxm_memh_t *memh,
                             ucxm_enforcement_t *cells) noexcept nogil:
    memset(cells, 0, sizeof(cells[0]))
    if alive():
        in_mem_enforcement(priv, memh, cells)


cdef void in_stat(void *priv, unsigned at, const char **name, uint64_t *value) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef bytes text
    try:
        if at == 0:
            stats = self.backend.stats()
            self.counters = [
                (self.names.setdefault(key, str(key).encode()), number(count, "stats",
                                                                       <uint64_t>-1))
                for key, count in stats.items()
            ]
        if at < len(self.counters):
            text, count = self.counters[at]
            name[0] = text
            value[0] = count
    except BaseException as failure:
        told(self, "stats", failure, NULL)


cdef void py_stat(void *priv, unsigned at, const char **name, uint64_t *value) noexcept nogil:
    name[0] = NULL
    if alive():
        in_stat(priv, at, name, value)


cdef void in_explain(void *priv, const ucxm_memh_t *memh, char *text,
                     size_t size) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef bytes data
    try:
        answer = self.backend.explain(handle_of(memh))
        if not isinstance(answer, str):
            raise TypeError(f"explain must return a str, not {answer!r}")
        data = answer.encode("utf-8", "replace")[:size - 1]
        memcpy(text, <const char *>data, len(data))
        text[len(data)] = 0
    except BaseException as failure:
        told(self, "explain", failure, NULL)


cdef void py_explain(void *priv, const ucxm_memh_t *memh, char *text, size_t size) noexcept nogil:
    text[0] = 0
    if alive():
        in_explain(priv, memh, text, size)


cdef ucxm_status_t in_peer_evict(void *priv, const ucxm_identity_t *peer,
                                 ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        nothing(self.backend.peer_evict(
            PyBytes_FromStringAndSize(<const char *>peer, sizeof(peer[0]))), "peer_evict")
        return UCXM_OK
    except BaseException as failure:
        return told(self, "peer_evict", failure, error)


cdef ucxm_status_t py_peer_evict(void *priv, const ucxm_identity_t *peer,
                                 ucxm_error_t *error) noexcept nogil:
    return in_peer_evict(priv, peer, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_mem_query(void *priv, uint64_t address, uint64_t length,
                                uint32_t *mem_type, ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        answer = self.backend.mem_query(address, length)
        if not isinstance(answer, MemType):
            raise TypeError(f"mem_query must return a MemType, not {answer!r}")
        mem_type[0] = answer
        return UCXM_OK
    except BaseException as failure:
        return told(self, "mem_query", failure, error)


cdef ucxm_status_t py_mem_query(void *priv, uint64_t address, uint64_t length,
                                uint32_t *mem_type, ucxm_error_t *error) noexcept nogil:
    return in_mem_query(priv, address, length, mem_type, error) if alive() else UCXM_ERR_CLOSED


cdef void in_close(void *priv) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        close = getattr(self.backend, "close", None)
        if close is not None:
            nothing(close(), "close")
    except BaseException as failure:
        told(self, "close", failure, NULL)
    Py_DECREF(self)


cdef void py_close(void *priv) noexcept nogil:
    if alive():
        in_close(priv)


# ---- endpoints

cdef ucxm_status_t in_ep_create(void *priv, ucxm_ep_t *ep,
                                ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef Ep end
    try:
        end = Ep.__new__(Ep)
        end.ops = set()
        nothing(self.backend.ep_create(end), "ep_create")
        Py_INCREF(end)
        (<PyObject **>ep.priv)[0] = <PyObject *>end
        return UCXM_OK
    except BaseException as failure:
        return told(self, "ep_create", failure, error)


cdef ucxm_status_t py_ep_create(void *priv, ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil:
    return in_ep_create(priv, ep, error) if alive() else UCXM_ERR_CLOSED


cdef bint in_ep_flush(void *priv, ucxm_ep_t *ep, due_t *due) noexcept with gil:
    """One operation that the endpoint still had."""
    cdef Ep end = end_of(ep)
    cdef Transfer transfer
    memset(due, 0, sizeof(due[0]))
    while end.ops:
        transfer = end.ops.pop()
        due.status = transfer.status if transfer.state == CALLED else UCXM_ERR_FLUSHED
        due.op = transfer.end(due.status)
        if due.op != NULL:
            return True
    return False


cdef void ep_flush(void *priv, ucxm_ep_t *ep) noexcept nogil:
    cdef due_t due
    while in_ep_flush(priv, ep, &due):
        due.op.complete(due.op, due.status)


cdef void in_ep_destroy(void *priv, ucxm_ep_t *ep) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        nothing(self.backend.ep_destroy(end_of(ep)), "ep_destroy")
    except BaseException as failure:
        told(self, "ep_destroy", failure, NULL)


cdef void in_ep_free(ucxm_ep_t *ep) noexcept with gil:
    cdef Ep end = end_of(ep)
    (<PyObject **>ep.priv)[0] = NULL
    Py_DECREF(end)


cdef void py_ep_destroy(void *priv, ucxm_ep_t *ep) noexcept nogil:
    if alive():
        in_ep_destroy(priv, ep)
        ep_flush(priv, ep)
        in_ep_free(ep)


cdef ucxm_status_t in_ep_address(void *priv, ucxm_ep_t *ep, uint8_t *address, size_t *length,
                                 ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef bytes data
    try:
        answer = self.backend.ep_address(end_of(ep))
        if not isinstance(answer, bytes) or len(answer) > UCXM_EP_ADDRESS_MAX:
            raise TypeError(
                f"ep_address must return at most {UCXM_EP_ADDRESS_MAX} bytes, not {answer!r}")
        data = answer
        memcpy(address, <const char *>data, len(data))
        length[0] = len(data)
        return UCXM_OK
    except BaseException as failure:
        return told(self, "ep_address", failure, error)


cdef ucxm_status_t py_ep_address(void *priv, ucxm_ep_t *ep, uint8_t *address, size_t *length,
                                 ucxm_error_t *error) noexcept nogil:
    return in_ep_address(priv, ep, address, length, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_ep_connect(void *priv, ucxm_ep_t *ep, const uint8_t *address,
                                 size_t length, ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        nothing(self.backend.ep_connect(
            end_of(ep), PyBytes_FromStringAndSize(<const char *>address, length)), "ep_connect")
        return UCXM_OK
    except BaseException as failure:
        return told(self, "ep_connect", failure, error)


cdef ucxm_status_t py_ep_connect(void *priv, ucxm_ep_t *ep, const uint8_t *address,
                                 size_t length, ucxm_error_t *error) noexcept nogil:
    return in_ep_connect(priv, ep, address, length, error) if alive() else UCXM_ERR_CLOSED


cdef ucxm_status_t in_ep_reset(void *priv, ucxm_ep_t *ep,
                               ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        nothing(self.backend.ep_reset(end_of(ep)), "ep_reset")
        return UCXM_OK
    except BaseException as failure:
        return told(self, "ep_reset", failure, error)


cdef ucxm_status_t py_ep_reset(void *priv, ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status = in_ep_reset(priv, ep, error) if alive() else UCXM_ERR_CLOSED
    if status == UCXM_OK:
        ep_flush(priv, ep)
    return status


cdef uint32_t in_ep_state(void *priv, ucxm_ep_t *ep) noexcept with gil:
    cdef _Served self = <_Served>priv
    try:
        return <uint32_t>EpState(self.backend.ep_state(end_of(ep)))
    except BaseException as failure:
        told(self, "ep_state", failure, NULL)
        return UCXM_EP_ERROR


cdef uint32_t py_ep_state(void *priv, ucxm_ep_t *ep) noexcept nogil:
    return in_ep_state(priv, ep) if alive() else UCXM_EP_ERROR


cdef Transfer transfer_new(_Served self, Ep end, ucxm_op_t *op):
    cdef Transfer transfer = Transfer.__new__(Transfer)
    transfer.op = op
    transfer.served = self
    transfer.ep = end
    transfer.kind = OpKind(op.kind)
    transfer.remote_address = op.remote_address
    transfer.length = op.length
    transfer.operand = op.operand
    transfer.compare = op.compare
    transfer.lkey = op.lkey if op.has_lkey else None
    transfer.rkey = remote_of(op.rkey)
    if op.kind == UCXM_OP_GET or op.kind == UCXM_OP_PUT:
        transfer.local = PyMemoryView_FromMemory(
            <char *>op.local, op.length, PyBUF_WRITE if op.kind == UCXM_OP_GET else PyBUF_READ)
    return transfer


cdef ucxm_status_t in_ep_post(void *priv, ucxm_ep_t *ep, ucxm_op_t *op, due_t *due,
                              ucxm_error_t *error) noexcept with gil:
    cdef _Served self = <_Served>priv
    cdef Ep end = end_of(ep)
    cdef Transfer transfer = None
    memset(due, 0, sizeof(due[0]))
    try:
        transfer = transfer_new(self, end, op)
        answer = self.backend.ep_post(end, transfer)
        if answer is not None and answer is not Status.INPROGRESS:
            raise TypeError(f"ep_post must return None or Status.INPROGRESS, not {answer!r}")
        if answer is None and transfer.state != CALLED:
            transfer.bytes_done = transfer.length
            transfer.state = CALLED
        if transfer.state == CALLED:
            due.status = transfer.status
            due.op = transfer.end(transfer.status)
        else:
            transfer.state = TAKEN
            end.ops.add(transfer)
        return UCXM_OK
    except BaseException as failure:
        if transfer is not None:
            transfer.state = DONE
            transfer.op = NULL
        return told(self, "ep_post", failure, error)


cdef ucxm_status_t py_ep_post(void *priv, ucxm_ep_t *ep, ucxm_op_t *op,
                              ucxm_error_t *error) noexcept nogil:
    cdef due_t due
    cdef ucxm_status_t status
    if not alive():
        return UCXM_ERR_CLOSED
    status = in_ep_post(priv, ep, op, &due, error)
    if status == UCXM_OK and due.op != NULL:
        due.op.complete(due.op, due.status)
    return status


# ---- bind -------------------------------------------------------------------------------------

cdef enum:
    PAYLOAD_ROOM = 176  # UCXM_KEY_PAYLOAD_MAX


cdef bint has(object backend, str name) except -1:
    method = getattr(backend, name, None)
    if method is not None and not callable(method):
        raise InvalidParamError(f"{name} is no method", op="bind")
    return method is not None


cdef void tables_fill(object backend, ucxm_md_ops_t *ops, ucxm_ep_ops_t *ep_ops):
    """What the backend has; what it does not have stays NULL."""
    ops.struct_size = sizeof(ops[0])
    ops.abi = UCXM_BACKEND_ABI
    ops.reg_size = ops.rkey_size = ep_ops.ep_size = sizeof(PyObject *)
    ep_ops.struct_size = sizeof(ep_ops[0])
    # These keep our own books, or answer for the backend.
    ops.close = py_close
    ops.progress = py_progress
    ops.rkey_release = py_rkey_release
    ops.mem_enforcement = py_mem_enforcement
    if has(backend, "mem_reg"):
        ops.mem_reg = py_mem_reg
    if has(backend, "mem_dereg"):
        ops.mem_dereg = py_mem_dereg
    if has(backend, "mem_derive"):
        ops.mem_derive = py_mem_derive
    if has(backend, "key_create"):
        ops.key_create = py_key_create
    if has(backend, "key_destroy"):
        ops.key_destroy = py_key_destroy
    if has(backend, "mkey_pack"):
        ops.mkey_pack = py_mkey_pack
    if has(backend, "rkey_unpack"):
        ops.rkey_unpack = py_rkey_unpack
    if has(backend, "rkey_ptr"):
        ops.rkey_ptr = py_rkey_ptr
    if has(backend, "event_fd"):
        ops.event_fd = py_event_fd
    if has(backend, "event_arm"):
        ops.event_arm = py_event_arm
    if has(backend, "stats"):
        ops.stat = py_stat
    if has(backend, "explain"):
        ops.explain = py_explain
    if has(backend, "peer_evict"):
        ops.peer_evict = py_peer_evict
    if has(backend, "mem_query"):
        ops.mem_query = py_mem_query
    if has(backend, "ep_create"):
        ep_ops.ep_create = py_ep_create
    if has(backend, "ep_destroy"):
        ep_ops.ep_destroy = py_ep_destroy
    if has(backend, "ep_address"):
        ep_ops.ep_address = py_ep_address
    if has(backend, "ep_connect"):
        ep_ops.ep_connect = py_ep_connect
    if has(backend, "ep_reset"):
        ep_ops.ep_reset = py_ep_reset
    if has(backend, "ep_state"):
        ep_ops.ep_state = py_ep_state
    if has(backend, "ep_post"):
        ep_ops.ep_post = py_ep_post


def bind(
    backend, *, str component, str md_name, flags, rkey_packed_size=0, rkey_raw_size=0,
    max_reg=0, mem_types=(MemType.HOST,), reg_alignment=1, bounce_size=0, quarantine=65536,
    bint software=False, enforcement=EnforcementTable(),
):
    """An Md whose operations are `backend`'s methods (see this module's text).

    The rest is ucxm_md_attr_t's: `flags` (MdFlag) say what it can do and must agree with the
    methods that there are; `rkey_packed_size` is the most that mkey_pack returns, of which the
    first `rkey_raw_size` bytes are the native key; `max_reg` 0: no limit; transfers of up to
    `bounce_size` bytes need no local key; `quarantine` destructions pass before a native value
    is handed out again; `enforcement` is the least that any derived handle gets.

    The Md owns the backend from then on and calls its close().  Raises InvalidParamError (a flag
    without its method, a method without its flag, sizes), and `backend` is the caller's still.
    """
    cdef ucxm_md_ops_t ops
    cdef ucxm_ep_ops_t ep_ops
    cdef ucxm_md_attr_t attr
    cdef _Served served
    cdef bint has_ep = False
    memset(&ops, 0, sizeof(ops))
    memset(&ep_ops, 0, sizeof(ep_ops))
    md_attr_init(&attr, component, md_name, 0)
    attr.python = True
    attr.mem_types = 0
    try:
        attr.flags = index(flags)
        attr.rkey_packed_size = index(rkey_packed_size)
        attr.rkey_raw_size = index(rkey_raw_size)
        attr.max_reg = index(max_reg)
        attr.reg_alignment = index(reg_alignment)
        attr.bounce_size = index(bounce_size)
        attr.quarantine = index(quarantine)
        for mem_type in mem_types:
            attr.mem_types |= <uint64_t>1 << <int>MemType(mem_type)
        cells_fill(&attr.enforcement, enforcement)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidParamError(f"bind: {error}", op="bind", component=component) from error
    attr.software = software
    for name in ("create", "destroy", "address", "connect", "reset", "state", "post"):
        has_ep |= has(backend, "ep_" + name)
    tables_fill(backend, &ops, &ep_ops)
    served = _Served.__new__(_Served)
    served.backend = backend
    served.queue = deque()
    served.enforcement = enforcement
    served.names = {}
    served.counters = []
    served.where = f"{component}/{md_name}"
    Py_INCREF(served)  # the Md's; close() gives it back
    try:
        return md_bind(&ops, &ep_ops if has_ep else NULL, &attr, <void *>served, None)
    except BaseException:
        Py_DECREF(served)
        raise
