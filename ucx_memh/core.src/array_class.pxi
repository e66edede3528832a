# SPDX-License-Identifier: BSD-3-Clause
# Thousands of handles at once: MemhArray, PackedKeys, and what registers, packs and revokes them.

@cython.final
@cython.no_gc
cdef class MemhArray:
    """Many handles of one Md in one object (`Md.mem_reg_many`, `Memh.derive_many`).

    A sequence of Memh objects, which are made when they are asked for; at a hundred bytes less and
    a tenth of the time for each handle that nobody looks at.  A context manager that deregisters
    all.  The handles live as long as it, or an object got from it, does.  Any thread may use it.
    """

    def __init__(self):
        raise TypeError("MemhArray objects are made by Md.mem_reg_many() and Memh.derive_many()")

    def __dealloc__(self):
        cdef md_t *md = NULL
        cdef size_t i
        if self.memhs != NULL:
            md = <md_t *>self.md.md
            for i in range(self.count):
                if self.memhs[i] != NULL:
                    books_of(self.memhs[i]).object = NULL
            with nogil:
                for i in range(self.count):
                    if self.memhs[i] != NULL:
                        md_drop(md, self.memhs[i], memh_drop)
        free(self.memhs)
        free(self.each)

    def __repr__(self):
        kind = "bases" if self.base_or_none is None else "derived handles"
        return f"<MemhArray of {self.count} {kind}>"

    def __reduce__(self):
        raise TypeError("a MemhArray cannot be pickled or copied: pack its keys")

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        cdef Py_ssize_t i
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.count))]
        i = PyNumber_AsSsize_t(index, IndexError)
        if i < 0:
            i += self.count
        if not 0 <= i < <Py_ssize_t>self.count:
            raise IndexError("MemhArray index out of range")
        if self.memhs[i] == NULL:
            raise many_failure(self.each, self.count, i, self.op, <md_t *>self.md.md, NULL, {})
        return array_item(self, self.memhs[i])

    def __iter__(self):
        return map(self.__getitem__, range(self.count))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.dereg()

    @property
    def md(self):
        """Its domain."""
        return self.md

    @property
    def base(self):
        """The handle that all were derived from; None for bases."""
        return self.base_or_none

    @property
    def status(self):
        """How each item was made: a memoryview of int32, 0 for OK (`Status`)."""
        return statuses_of(self.each, self.count)

    @property
    def key_ids(self):
        """`Memh.key_id` of each, 0 for an item that failed: a memoryview of uint64."""
        return array_numbers(self, 0)

    @property
    def addresses(self):
        """`Memh.address` of each, 0 for an item that failed: a memoryview of uint64."""
        return array_numbers(self, 1)

    @property
    def lengths(self):
        """`Memh.length` of each, 0 for an item that failed: a memoryview of uint64."""
        return array_numbers(self, 2)

    def mkey_pack(self, buffer=None, flags=0, stride=None, partial=False):
        """`Md.mkey_pack_many` of all."""
        return self.md.mkey_pack_many(self, buffer, flags, stride, partial)

    def invalidate(self, partial=False):
        """`Md.invalidate_many` of all."""
        return self.md.invalidate_many(self, partial)

    def dereg(self, partial=False):
        """`Md.dereg_many` of all that were made; those that are closed already are OK."""
        cdef ucxm_status_t *each = <ucxm_status_t *>malloc((self.count + 1) * sizeof(ucxm_status_t))
        cdef size_t i
        if each == NULL:
            raise _errors.NoMemoryError(op="dereg")
        try:
            many_revoke(<md_t *>self.md.md, self.memhs, self.count, True, each)
            for i in range(self.count):
                if self.memhs[i] == NULL:
                    each[i] = UCXM_OK
            return many_result(each, self.count, partial, "dereg", <md_t *>self.md.md)
        finally:
            free(each)


cdef extern from *:
    Py_ssize_t refcount "Py_REFCNT"(PyObject *holder)
    bint is_a "Py_IS_TYPE"(PyObject *holder, PyTypeObject *type)

cdef inline bint is_dying(PyObject *holder) noexcept:
    """Its weak references are being told that it is gone: it must not be touched."""
    return refcount(holder) == 0


cdef inline object keeper_of(PyObject *holder):
    """The array that a Memh, which may be dying, came from; or None."""
    return (<Memh>holder).keeper if is_a(holder, <PyTypeObject *>Memh) else None


cdef Memh array_item(MemhArray array, ucxm_memh_t *memh):
    cdef PyObject *holder = books_of(memh).object
    if holder != <PyObject *>array and not is_dying(holder):
        return <Memh>holder
    return memh_wrap(memh, array.md, array.base_or_none, array.bound, array)


cdef object array_numbers(MemhArray array, int which):
    cdef uint64_t *numbers
    cdef const ucxm_memh_t *memh
    cdef size_t i
    data = PyBytes_FromStringAndSize(NULL, array.count * sizeof(uint64_t))
    numbers = <uint64_t *><char *>data
    for i in range(array.count):
        memh = array.memhs[i]
        if memh == NULL:
            numbers[i] = 0
        elif which == 0:
            numbers[i] = memh.id.key_id
        elif which == 1:
            numbers[i] = ucxm_memh_own(memh).address
        else:
            numbers[i] = ucxm_memh_own(memh).length
    return memoryview(data).cast("Q")


cdef class Handles:
    """The C handles of a MemhArray, or of any iterable of Memh objects, held meanwhile."""

    cdef object held
    cdef ucxm_memh_t **memhs
    cdef ucxm_status_t *each
    cdef size_t count
    cdef bint own

    def __dealloc__(self):
        if self.own:
            free(self.memhs)
        free(self.each)


cdef Handles handles_of(Md md, object memhs, str op):
    cdef Handles handles = Handles.__new__(Handles)
    cdef size_t i
    if type(memhs) is MemhArray:
        handles.held = memhs
        handles.memhs = (<MemhArray>memhs).memhs
        handles.count = (<MemhArray>memhs).count
        if (<MemhArray>memhs).md is not md:
            raise _errors.InvalidParamError("handles of another Md", op=op)
    else:
        handles.held = list(memhs)
        handles.count = len(handles.held)
        handles.own = True
        handles.memhs = <ucxm_memh_t **>malloc((handles.count + 1) * sizeof(ucxm_memh_t *))
        if handles.memhs == NULL:
            raise _errors.NoMemoryError(op=op)
        for i, memh in enumerate(<list>handles.held):
            if type(memh) is not Memh or (<Memh>memh).md is not md:
                raise _errors.InvalidParamError(
                    f"item {i} is not a Memh of this Md", op=op)
            handles.memhs[i] = (<Memh>memh).memh
    handles.each = <ucxm_status_t *>malloc((handles.count + 1) * sizeof(ucxm_status_t))
    if handles.each == NULL:
        raise _errors.NoMemoryError(op=op)
    return handles


cdef object many_result(ucxm_status_t *each, size_t count, bint partial, str op, md_t *md):
    """The statuses; without `partial` the first that is not OK is raised."""
    cdef size_t first = first_failed(each, count)
    if first < count and not partial:
        raise many_failure(each, count, first, op, md, NULL, {})
    return statuses_of(each, count)


cdef void batch_later(md_t *md, ucxm_memh_t *const *memhs, size_t count,
                      bint later) noexcept nogil:
    """Is what Python lent to the bases among them given back later, or by whoever closes them?"""
    cdef size_t i
    spin_lock(&md.tree_lock)  # who closes one looks under it
    for i in range(count):
        if memhs[i] != NULL and memhs[i].id.parent == NULL:
            store32(&reg_of(memhs[i]).later, later)
    spin_unlock(&md.tree_lock)


cdef void batch_give_back(md_t *md, ucxm_memh_t *const *memhs, size_t count) noexcept:
    """What those that are closed now had of Python's.  Those that are not do it when they are."""
    cdef size_t i
    batch_later(md, memhs, count, False)
    for i in range(count):
        if memhs[i] != NULL and memhs[i].id.parent == NULL and (
                load32(&memhs[i].id.state) == UCXM_MEMH_CLOSED):
            reg_give_back(reg_of(memhs[i]))


cdef int many_revoke(md_t *md, ucxm_memh_t **memhs, size_t count, bint closing,
                     ucxm_status_t *each) except -1:
    """All of them, the device's work in batches, with a look at signals between.

    An exception from a signal leaves what has begun under way, and the rest as it is.  What Python
    lent to bases is given back by this thread, which need not take the GIL for each.
    """
    cdef bint lent = closing and md.epoch == fork_epoch  # a forked child has no right to it
    cdef size_t done = 0
    cdef size_t started, some
    cdef bint settled
    while done < count:
        some = min(count - done, <size_t>BATCH)
        if lent:
            batch_later(md, memhs + done, some, True)
        try:
            with nogil:
                started = batch_start(memhs + done, some, closing, each + done)
            settled = False
            while not settled:
                with nogil:
                    settled = batch_settle(memhs + done, started, each + done, now_ns() + SLICE_NS)
                PyErr_CheckSignals()
        finally:
            if lent:
                batch_give_back(md, memhs + done, some)
        done += started
    return 0


cdef size_t many_reg(md_t *md, reg_t **regs, MemhArray array, size_t done,
                     ucxm_error_t **error) noexcept nogil:
    """Register the next few of what has been prepared, linked under one lock; NULL: it could not
    be."""
    cdef size_t count = min(array.count - done, <size_t>MANY_LOCKED)
    cdef ucxm_status_t *each = array.each + done
    cdef ucxm_memh_t **memhs = array.memhs + done
    cdef ucxm_memh_t *memh
    cdef ucxm_status_t status = UCXM_ERR_FORKED
    cdef size_t i
    md_orphans(md)
    regs += done
    if md.epoch == fork_epoch:
        status = md_lock_open(md)
    if status == UCXM_OK:
        for i in range(count):
            if regs[i] != NULL:
                md_get(md)
                memhs[i] = reg_link(md, regs[i])
        spin_unlock(&md.tree_lock)
    for i in range(count):
        if regs[i] == NULL:
            continue
        each[i] = status
        if status == UCXM_OK:
            memh = memhs[i]
            memhs[i] = NULL
            each[i] = reg_settle(md, memh, &memhs[i], error[0])
        else:
            reg_free(regs[i])
        regs[i] = NULL
        if each[i] != UCXM_OK:
            error[0] = NULL
    return done + count


cdef ucxm_status_t many_prepare(md_t *md, uint64_t address, uint64_t length, uint64_t asked,
                                bint default, bint writable, reg_t *reg,
                                ucxm_error_t *error) noexcept nogil:
    reg.pub.address = address
    reg.pub.length = length
    reg_rights(reg, asked, default, writable)
    return reg_check(md, reg, writable, error)


cdef MemhArray reg_many(Md self, md_t *md, list buffers, Numbers addresses, Numbers lengths,
                        uint32_t mem_type, object owner, uint64_t asked, bint default,
                        bint partial):
    """One base for each buffer, or for each address and length."""
    cdef size_t count = max(addresses.count, lengths.count) if buffers is None else len(buffers)
    cdef MemhArray array = array_new(self, None, None, count, "mem_reg_many")
    cdef reg_t **regs = <reg_t **>malloc((count + 1) * sizeof(reg_t *))
    cdef ucxm_error_t error
    cdef ucxm_error_t *say = &error
    cdef size_t i, end, failed, made = 0
    cdef size_t done = 0
    cdef reg_t *reg
    cdef slab_t *slab = slab_new(count, reg_size(md)) if regs != NULL else NULL
    if slab == NULL:
        free(regs)
        raise _errors.NoMemoryError(op="mem_reg_many")
    error_clear(&error)
    try:
        for i in range(count):
            reg = reg_alloc(md, slab)
            regs[i] = reg
            made = i + 1
            reg_lend_owner(reg, owner)
            if buffers is not None:
                try:
                    get_memory(buffers[i], &reg.buffer, &reg.pub.mem_type, NULL, False,
                               "mem_reg_many")
                except _errors.MemhError as reason:
                    array.each[i] = reason.status
                    text = reason.detail.encode()
                    error_text(say, text)
                    say = NULL
                    regs[i] = NULL
                    reg_free(reg)
                    continue
                reg.lent |= LENT_BUFFER
                array.each[i] = many_prepare(md, <uint64_t>reg.buffer.buf,
                                             <uint64_t>reg.buffer.len, asked, default,
                                             not reg.buffer.readonly, reg, say)
            else:
                reg.pub.mem_type = mem_type
                array.each[i] = many_prepare(md, addresses.at(i), lengths.at(i), asked, default,
                                             True, reg, say)
            if array.each[i] != UCXM_OK:
                say = NULL
                regs[i] = NULL
                reg_free(reg)
        while done < count and (partial or say != NULL):
            with nogil:
                end = min(count, done + <size_t>MANY_SLICE)
                while done < end:
                    done = many_reg(md, regs, array, done, &say)
            PyErr_CheckSignals()
    finally:
        failed = first_failed(array.each, made)
        for i in range(done, made):
            if regs[i] != NULL:
                reg_free(regs[i])
                if i > failed:  # nobody tried
                    array.each[i] = UCXM_ERR_CANCELED
        free(regs)
        slab_end(slab, count)
    return array_finish(array, partial, &error)


cdef bytes octets_of(object buffer, size_t start, size_t length):
    """A copy; of items of any format."""
    cdef Py_buffer view
    get_buffer(buffer, &view, False, "PackedKeys")
    try:
        if length > <size_t>view.len or start > <size_t>view.len - length:
            raise IndexError("the buffer has been made shorter")
        return PyBytes_FromStringAndSize(<const char *>view.buf + start, length)
    finally:
        PyBuffer_Release(&view)


class PackedKeys:
    """What `Md.mkey_pack_many` packed: key i is `data[i * stride :][: lengths[i]]`, or keys[i].

    `data` is the buffer, `lengths` (memoryview of uint64, bytes; 0: this one failed), `status`
    (memoryview of int32, 0: OK), `stride` in bytes.
    """

    __slots__ = ("data", "lengths", "status", "stride")

    def __init__(self, data, stride, lengths, status):
        self.data = data
        self.stride = stride
        self.lengths = lengths
        self.status = status

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        start = range(len(self.lengths))[index] * self.stride
        return octets_of(self.data, start, self.lengths[index])

    def __iter__(self):
        return map(self.__getitem__, range(len(self.lengths)))


cdef size_t many_pack(Handles handles, uint32_t flags, uint8_t *buffer, size_t stride,
                      uint64_t *lengths, size_t done, ucxm_error_t **error) noexcept nogil:
    """Pack the next slice."""
    cdef size_t end = min(handles.count, done + <size_t>MANY_SLICE)
    cdef ucxm_status_t status
    cdef packed_t *packed
    while done < end:
        packed = NULL
        lengths[done] = 0
        status = UCXM_ERR_INVALID_PARAM
        if handles.memhs[done] != NULL:
            status = mkey_pack(handles.memhs[done], flags, &packed, error[0])
        if status == UCXM_OK and packed.size > stride:
            status = UCXM_ERR_BUFFER_TOO_SMALL
        if status == UCXM_OK:
            memcpy(buffer + done * stride, packed.bytes, packed.size)
            lengths[done] = packed.size
        else:
            error[0] = NULL
        handles.each[done] = status
        done += 1
    return done


cdef object pack_many(Md self, Handles handles, object buffer, uint64_t flags, size_t stride,
                      bint partial):
    cdef size_t done = 0
    cdef size_t first
    cdef Py_buffer view
    cdef ucxm_error_t error
    cdef ucxm_error_t *say = &error
    cdef object sizes = PyBytes_FromStringAndSize(NULL, handles.count * sizeof(uint64_t))
    cdef uint64_t *lengths = <uint64_t *><char *>sizes
    if buffer is None:
        buffer = bytearray(handles.count * stride)
    error_clear(&error)
    get_buffer(buffer, &view, True, "mkey_pack_many")
    try:
        if stride == 0 or <size_t>view.len // stride < handles.count:
            raise _errors.error_from_status(
                UCXM_ERR_BUFFER_TOO_SMALL, "mkey_pack_many", md_component(<md_t *>self.md),
                f"{handles.count} keys of {stride} bytes in a buffer of {view.len}")
        while done < handles.count:
            with nogil:
                done = many_pack(handles, <uint32_t>flags, <uint8_t *>view.buf, stride, lengths,
                                 done, &say)
            PyErr_CheckSignals()
    finally:
        PyBuffer_Release(&view)
    first = first_failed(handles.each, handles.count)
    if first < handles.count and not partial:
        raise many_failure(handles.each, handles.count, first, "mkey_pack_many",
                           <md_t *>self.md, &error, {})
    return PackedKeys(buffer, stride, memoryview(sizes).cast("Q"),
                      statuses_of(handles.each, handles.count))
