# SPDX-License-Identifier: BSD-3-Clause
# The objects of handles, one or thousands: what Python hands in for them, and how they are derived.

import array as _array

cdef enum:
    MANY_SLICE = 1024   # items between two looks at signals
    MANY_LOCKED = 64    # of which so many are linked at a time


cdef class Numbers:
    """64-bit numbers, one for each item: an array of them, any sequence, or one for all."""

    cdef Py_buffer view
    cdef bint exported
    cdef const uint64_t *items
    cdef uint64_t all
    cdef size_t count       # 0: `all` is for each

    def __dealloc__(self):
        if self.exported:
            PyBuffer_Release(&self.view)

    cdef inline uint64_t at(self, size_t i) noexcept nogil:
        return self.items[i] if self.items != NULL else self.all


cdef Numbers numbers_of(object given, str name, str op):
    cdef Numbers numbers = Numbers.__new__(Numbers)
    cdef size_t i
    # What has neither a length nor items is one number; NumPy's arrays have __index__, too.
    if getattr(given, "ndim", 1) == 0 and PyObject_CheckBuffer(given):
        given = given[()]  # has an __index__, which need not work
    if not hasattr(given, "__len__"):
        numbers.all = as_u64(given, name, op)
        return numbers
    if not PyObject_CheckBuffer(given):
        try:
            given = _array.array("Q", given)
        except (TypeError, OverflowError) as error:
            raise _errors.InvalidParamError(f"{name}: {error}", op=op) from None
    try:
        get_buffer(given, &numbers.view, False, op)
    except _errors.InvalidParamError as error:
        raise _errors.InvalidParamError(f"{name}: {error.detail}", op=op) from error.__cause__
    numbers.exported = True
    kind = numbers.view.format.decode() if numbers.view.format != NULL else "B"
    if numbers.view.ndim != 1 or numbers.view.itemsize != 8 or kind.lstrip("@=<") not in (
            "Q", "L", "N", "q", "l", "n"):
        raise _errors.InvalidParamError(
            f"{name} must be one row of 64-bit integers, not {numbers.view.ndim} dimensions of "
            f"format {kind!r}", op=op)
    numbers.items = <const uint64_t *>numbers.view.buf
    numbers.count = <size_t>numbers.view.len // 8
    if kind.endswith(("q", "l", "n")):
        for i in range(numbers.count):
            if numbers.items[i] >> 63:
                raise _errors.InvalidParamError(f"{name}[{i}] is negative", op=op)
    return numbers


cdef bytes status_bytes(const ucxm_status_t *each, size_t count):
    """A copy, for Python: one int32 for each item."""
    return PyBytes_FromStringAndSize(<const char *>each, count * sizeof(ucxm_status_t))


cdef object statuses_of(const ucxm_status_t *each, size_t count):
    return memoryview(status_bytes(each, count)).cast("i")


cdef object many_failure(ucxm_status_t *each, size_t count, size_t first, str op, md_t *md,
                         ucxm_error_t *error, dict context):
    """The error of the first item that failed; it has the statuses of all."""
    context["item"] = first
    reason = failure(each[first], op, md, error, context)
    # Unlike a memoryview it can be pickled.
    reason.statuses = _array.array("i", status_bytes(each, count))
    return reason


cdef inline size_t first_failed(const ucxm_status_t *each, size_t count) noexcept nogil:
    cdef size_t i = 0
    while i < count and each[i] == UCXM_OK:
        i += 1
    return i


cdef Memh memh_wrap(ucxm_memh_t *memh, Md md, object base, Endpoint bound, object keeper):
    """The object of a handle, which it owns unless somebody keeps that for it."""
    cdef Memh self = Memh.__new__(Memh)
    self.memh = memh
    self.md = md
    self.base_or_none = base
    self.bound = bound
    self.keeper = keeper
    books_of(memh).object = <PyObject *>self
    return self


cdef MemhArray array_new(Md md, object base, Endpoint bound, size_t count, str op):
    """Room for `count` handles, none there yet."""
    cdef MemhArray array = MemhArray.__new__(MemhArray)
    cdef size_t i
    if count > <size_t>-1 // 64:
        raise _errors.NoMemoryError(op=op)
    array.md = md
    array.base_or_none = base
    array.bound = bound
    array.op = op
    array.each = <ucxm_status_t *>malloc((count + 1) * sizeof(ucxm_status_t))
    array.memhs = <ucxm_memh_t **>malloc((count + 1) * sizeof(ucxm_memh_t *))
    if array.each == NULL or array.memhs == NULL:
        raise _errors.NoMemoryError(op=op)
    for i in range(count):
        array.memhs[i] = NULL
        array.each[i] = UCXM_ERR_CANCELED
    array.count = count
    return array


cdef void array_own(MemhArray array) noexcept:
    """From now on a search finds it by its handles."""
    cdef size_t i
    for i in range(array.count):
        if array.memhs[i] != NULL:
            books_of(array.memhs[i]).object = <PyObject *>array


cdef size_t many_derive(ucxm_memh_t *parent, Numbers offsets, Numbers lengths, bint rest,
                        uint64_t grant, ucxm_ep_t *ep, slab_t *slab, MemhArray array, size_t done,
                        ucxm_error_t **error) noexcept nogil:
    """Derive the next few of them, under one lock; only the first failure of all has an `error`.

    The numbers are read once: they may change at any time.
    """
    cdef size_t count = min(array.count - done, <size_t>MANY_LOCKED)
    cdef ucxm_status_t *each = array.each + done
    cdef ucxm_memh_t **memhs = array.memhs + done
    cdef uint64_t offset[MANY_LOCKED]
    cdef uint64_t length[MANY_LOCKED]
    cdef ucxm_status_t status = derive_check(parent, grant, &ep, error[0])
    cdef size_t i
    for i in range(count):
        each[i] = status
        if status == UCXM_OK:
            offset[i] = offsets.at(done + i)
            if not rest:
                length[i] = lengths.at(done + i)
            else:
                length[i] = ucxm_memh_own(parent).length - min(offset[i],
                                                               ucxm_memh_own(parent).length)
            each[i] = derive_check_range(parent, offset[i], length[i], error[0])
        if each[i] != UCXM_OK:
            error[0] = NULL
        else:
            memhs[i] = memh_room(md_of(parent), slab)
    if status == UCXM_OK:
        status = derive_lock(parent, ep)
        if status == UCXM_OK:
            for i in range(count):
                if memhs[i] != NULL:
                    derive_link(parent, memhs[i], slab, offset[i], length[i], grant, ep)
            spin_unlock(&md_of(parent).tree_lock)
        for i in range(count):
            if memhs[i] == NULL:
                continue
            if status == UCXM_OK:
                each[i] = derive_settle(parent, memhs[i], &memhs[i], error[0])
            else:
                room_free(slab, books_of(memhs[i]))
                memhs[i] = NULL
                each[i] = status
            if each[i] != UCXM_OK:
                error[0] = NULL
    return done + count


cdef MemhArray derive_many(Memh self, Numbers offsets, Numbers lengths, uint64_t grant,
                           Endpoint endpoint, bint partial):
    cdef size_t count = max(offsets.count, lengths.count if lengths is not None else 0)
    cdef ucxm_ep_t *ep = endpoint.ep if endpoint is not None else NULL
    cdef bint rest = lengths is None
    cdef size_t done = 0
    cdef size_t end
    cdef MemhArray array
    cdef slab_t *slab
    cdef ucxm_error_t error
    cdef ucxm_error_t *say = &error
    if offsets.items != NULL and not rest and lengths.items != NULL and (
            offsets.count != lengths.count):
        raise _errors.InvalidParamError(
            f"{offsets.count} offsets and {lengths.count} lengths", op="derive_many")
    if offsets.items == NULL and (rest or lengths.items == NULL):
        raise _errors.InvalidParamError("offsets or lengths must be an array", op="derive_many")
    array = array_new(self.md, self, endpoint if endpoint is not None else self.bound, count,
                      "derive_many")
    slab = slab_new(count, (<md_t *>self.md.md).layout.size)
    if slab == NULL:
        raise _errors.NoMemoryError(op="derive_many")
    error_clear(&error)
    try:
        while done < count:
            end = min(count, done + <size_t>MANY_SLICE)
            with nogil:
                while done < end:
                    done = many_derive(self.memh, offsets, lengths, rest, grant, ep, slab, array,
                                       done, &say)
            PyErr_CheckSignals()
    finally:
        slab_end(slab, count)
    return array_finish(array, partial, &error)


cdef void array_undo(MemhArray array) noexcept:
    """Nobody has seen it.  It does not go as an object would: that may have to wait for the next
    call."""
    cdef ucxm_memh_t *memh
    cdef size_t i
    with nogil:
        for i in range(array.count):
            memh = array.memhs[i]
            array.memhs[i] = NULL
            if memh != NULL:
                memh_drop(memh)


cdef MemhArray array_finish(MemhArray array, bint partial, ucxm_error_t *error):
    """All was tried.  Without `partial` one that failed takes all others with it."""
    cdef size_t first = first_failed(array.each, array.count)
    if first < array.count and not partial:
        array_undo(array)
        raise many_failure(array.each, array.count, first, array.op, <md_t *>array.md.md, error,
                           {})
    array_own(array)
    return array
