# SPDX-License-Identifier: BSD-3-Clause
# The Registration: what the device holds, and the Python buffer under it.  Counted, never copied.

cdef struct reg_t:
    ucxm_registration_t pub   # first: what the backend sees
    md_t *md
    uint32_t refs             # handles
    uint32_t inflight         # transfers that use the local key
    bint held                 # the native registration exists
    PyObject *owner           # keeps plain addresses alive
    bint has_buffer
    Py_buffer buffer


cdef inline reg_t *reg_of(const ucxm_memh_t *memh) noexcept nogil:
    return <reg_t *>memh.inherited.reg


cdef void reg_release_python(reg_t *reg) noexcept with gil:
    """Give the buffer or the owner back."""
    cdef PyObject *owner = reg.owner
    if reg.has_buffer:
        reg.has_buffer = False
        PyBuffer_Release(&reg.buffer)
    if owner != NULL:
        reg.owner = NULL
        Py_DECREF(<object>owner)


cdef inline void reg_release_memory(reg_t *reg) noexcept nogil:
    if reg.has_buffer or reg.owner != NULL:
        reg_release_python(reg)


cdef reg_t *reg_alloc(md_t *md) noexcept nogil:
    cdef reg_t *reg = <reg_t *>alloc_zeroed(align16(sizeof(reg_t)) + md.ops.reg_size)
    if reg == NULL:
        return NULL
    reg.pub.priv = <char *>reg + align16(sizeof(reg_t))
    reg.pub.dmabuf_fd = -1
    reg.refs = 1
    reg.md = md
    return reg


cdef ucxm_status_t reg_hold(reg_t *reg, ucxm_error_t *error) noexcept nogil:
    """Register with the device; an empty region holds nothing."""
    cdef ucxm_status_t status
    if reg.pub.length == 0 and reg.pub.adopt == NULL:
        return UCXM_OK
    fetch_add64(&reg.md.counters.mem_reg, 1)
    status = reg.md.ops.mem_reg(reg.md.priv, &reg.pub, error)
    reg.held = status == UCXM_OK
    return status


cdef ucxm_status_t reg_unhold(reg_t *reg, ucxm_error_t *error) noexcept nogil:
    """Deregister.  On failure nothing has changed."""
    cdef ucxm_status_t status
    if reg.held:
        fetch_add64(&reg.md.counters.mem_dereg, 1)
        status = reg.md.ops.mem_dereg(reg.md.priv, &reg.pub, error)
        if status != UCXM_OK:
            return status
        reg.held = False
    return UCXM_OK


cdef inline void reg_get(reg_t *reg) noexcept nogil:
    add32(&reg.refs, 1)


cdef void reg_put(reg_t *reg) noexcept nogil:
    if sub32(&reg.refs, 1) != 0:
        return
    reg_release_memory(reg)
    mem_free(reg)
