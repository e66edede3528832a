# SPDX-License-Identifier: BSD-3-Clause
# Waiting for the device from Python: in slices without the GIL, with a look at signals between.

cdef void call_unraisable(object callback, object argument) noexcept:
    """Call it; what it raises goes to sys.unraisablehook."""
    try:
        callback(argument)
    except BaseException as error:
        # Caught, it is no longer what PyErr_WriteUnraisable looks at.
        PyErr_SetObject(type(error), error)
        PyErr_WriteUnraisable(callback)


cdef struct waiter_t:
    ucxm_completion_t comp
    PyObject *callback


cdef void waiter_call(ucxm_completion_t *self, ucxm_status_t status) noexcept with gil:
    """Run a Python callback."""
    cdef waiter_t *waiter = <waiter_t *>self
    callback = <object>waiter.callback
    Py_DECREF(callback)
    free(waiter)
    call_unraisable(callback, _flags.Status(status))


cdef void waiter_run(ucxm_completion_t *self, ucxm_status_t status) noexcept nogil:
    if python_lives():
        waiter_call(self, status)


cdef int wait_ended(ucxm_memh_t *memh) except -1:
    """Wait until nobody is at its revocation, looking at signals now and then."""
    while load32(&books_of(memh).pending) != 0:
        with nogil:
            revoke_settled(memh, now_ns() + SLICE_NS)
        PyErr_CheckSignals()
    return 0


cdef int wait_orphans(ucxm_memh_t *memh) except -1:
    """What its user let go of is none of the live derived handles that it is BUSY of."""
    cdef bint more = True
    while more:
        with nogil:
            more = orphan_wait(memh)
        PyErr_CheckSignals()
    return 0


cdef int revoke_and_wait(ucxm_memh_t *memh, bint closing, ucxm_completion_t *comp,
                         str op) except -1:
    """Revoke; without a completion wait for the device, looking at signals now and then.

    An exception from a signal leaves the revocation under way: the library owns it.
    """
    cdef md_t *md = md_of(memh)
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    if revoke_quick(memh, closing):
        if comp != NULL:
            comp.func(comp, UCXM_OK)
        return 0
    error_clear(&error)
    if comp == NULL and load32(&md.orphans) != 0:
        wait_orphans(memh)
    if md.attr.fast_reg:
        status = revoke(memh, closing, comp, &error)
    else:
        with nogil:
            status = revoke(memh, closing, comp, &error)
    if status == UCXM_INPROGRESS and comp == NULL:
        wait_ended(memh)
        status = revoke_outcome(memh)
    if status < 0:
        raise memh_failure(status, op, memh, &error)
    return 0
