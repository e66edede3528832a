# SPDX-License-Identifier: BSD-3-Clause
# What Python hands in: numbers, flags, buffers.

cdef uint64_t as_u64(object value, str name, str op) except? 0xdeadbeefdeadbeef:
    """An address, offset, length or operand, or InvalidParamError."""
    cdef uint64_t number
    if type(value) is int:
        try:
            number = value  # Cython's conversion knows addresses; C-API's takes 40 ns for them
        except OverflowError:
            raise _errors.InvalidParamError(
                f"{name} must be in 0 .. 2^64-1, not {value}", op=op) from None
        return number
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise _errors.InvalidParamError(
            f"{name} must be an integer, not {type(value).__name__}", op=op)
    # Whatever __index__ returns, an exact int: a subclass's could go on for ever.
    return as_u64(int.__add__(PyNumber_Index(value), 0), name, op)


cdef uint64_t as_mem_type(object value, str op) except? 0xdeadbeefdeadbeef:
    """What is beyond all types stays so; None stands for the one that is unknown."""
    return min(as_u64(value, "mem_type", op), <uint64_t>UCXM_MEM_TYPE_UNKNOWN - 1)


cdef uint64_t as_access(object flags, str op) except? 0xdeadbeefdeadbeef:
    """Flags of mem_reg or derive: known and supported ones, or an error."""
    cdef uint64_t value = as_u64(flags, "flags", op)
    if value & MEM_FLAGS_HINT:
        raise _errors.UnsupportedError(
            f"{_flags.MemFlag(value & MEM_FLAGS_HINT)!r} is not supported", op=op)
    if value & ~MEM_FLAGS_KNOWN:
        raise _errors.InvalidParamError(
            f"unknown flags {value & ~MEM_FLAGS_KNOWN:#x}", op=op)
    return value


cdef object enforcement_table(ucxm_enforcement_t *cells):
    # As numbers one by one: Cython takes an array of uint8_t for a C string and reads on.
    return _resources.EnforcementTable.of(
        [cells.rights[i] for i in range(3)], [cells.range[i] for i in range(3)],
        [cells.revoke[i] for i in range(3)])


cdef bint holds_objects(const char *format) noexcept nogil:
    """Does an item of this format hold Python references?  ':' encloses the names of fields."""
    cdef bint named = False
    while format != NULL and format[0] != 0:
        if format[0] == c':':
            named = not named
        elif format[0] == c'O' and not named:
            return True
        format += 1
    return False


cdef int get_buffer(object buffer, Py_buffer *view, bint writable, str op) except -1:
    """Export a C-contiguous buffer, or say in our words why not."""
    if not PyObject_CheckBuffer(buffer):
        raise _errors.InvalidParamError(
            f"{type(buffer).__name__} does not export a buffer", op=op)
    try:
        PyObject_GetBuffer(buffer, view, PyBUF_ND | PyBUF_FORMAT)
    except (BufferError, ValueError) as error:
        raise _errors.InvalidParamError(f"no C-contiguous buffer: {error}", op=op) from error
    if writable and view.readonly:
        PyBuffer_Release(view)
        raise _errors.AccessError("the buffer is read-only", op=op)
    if holds_objects(view.format):
        PyBuffer_Release(view)
        raise _errors.InvalidParamError("the buffer holds Python objects, not plain bytes", op=op)
    return 0


cdef int get_memory(object thing, Py_buffer *view, uint32_t *mem_type, uint64_t *stream,
                    bint writable, str op) except -1:
    """Export memory that is to be registered or moved: a buffer, or what buffers.py knows.

    Of the latter the view holds what keeps it alive.  `stream` NULL: it is not to be moved.
    """
    mem_type[0] = UCXM_MEM_TYPE_HOST
    if PyObject_CheckBuffer(thing):
        return get_buffer(thing, view, writable, op)
    from ucx_memh import buffers
    memory = buffers.memory_of(thing, stream != NULL, op)
    if memory is None:
        return get_buffer(thing, view, writable, op)  # says why not
    if writable and memory.readonly:
        raise _errors.AccessError("the memory is read-only", op=op)
    mem_type[0] = memory.mem_type
    if stream != NULL:
        stream[0] = memory.stream
    return PyBuffer_FillInfo(view, memory, <void *><uintptr_t>memory.address, memory.length,
                             memory.readonly, PyBUF_SIMPLE)
