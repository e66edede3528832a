# SPDX-License-Identifier: BSD-3-Clause
# The Registration: what the device holds, and the Python buffer under it.  Its base has it, until
# the last reference to that is gone: both are one allocation.  Never copied.

cdef enum:
    LENT_BUFFER = 1
    LENT_OWNER = 2

cdef struct reg_t:
    ucxm_registration_t pub   # first: what the backend sees
    md_t *md
    slab_t *slab              # where it lies, if it is one of many
    uint32_t inflight         # transfers that use the local key
    bint held                 # the native registration exists
    uint32_t lent             # what of Python's it has: LENT_...; read without the GIL too
    uint32_t later            # who closes the base gives that back, and not who finds it closed
    PyObject *owner           # keeps plain addresses alive
    Py_buffer buffer


cdef inline reg_t *reg_of(const ucxm_memh_t *memh) noexcept nogil:
    return <reg_t *>memh.inherited.reg


cdef void reg_lend_owner(reg_t *reg, object owner) noexcept:
    """None: there is no owner."""
    if owner is not None:
        Py_INCREF(owner)
        reg.owner = <PyObject *>owner
        reg.lent |= LENT_OWNER


cdef void reg_give_back(reg_t *reg) noexcept:
    """The buffer and the owner, if it has not been done yet."""
    cdef uint32_t lent = reg.lent
    store32(&reg.lent, 0)  # first: what they run may come back here
    if lent & LENT_BUFFER:
        PyBuffer_Release(&reg.buffer)
    if lent & LENT_OWNER:
        Py_DECREF(<object>reg.owner)


cdef void reg_release_python(reg_t *reg) noexcept with gil:
    reg_give_back(reg)


cdef inline void reg_release_memory(reg_t *reg) noexcept nogil:
    if load32(&reg.lent) and python_lives():
        reg_release_python(reg)


cdef inline size_t reg_room(const md_t *md) noexcept nogil:
    """Of a Registration with the backend's part; its base's books and handle come next."""
    return align16(sizeof(reg_t)) + align16(md.ops.reg_size)


cdef inline size_t reg_size(const md_t *md) noexcept nogil:
    """Of all of it."""
    return reg_room(md) + md.layout.size


cdef reg_t *reg_alloc(md_t *md, slab_t *slab) noexcept nogil:
    """With room for its base, of which nothing is written yet; in the slab, if there is one."""
    cdef reg_t *reg = <reg_t *>room_take(slab, reg_size(md))
    if reg == NULL:
        return NULL
    memset(reg, 0, reg_room(md))
    reg.slab = slab
    reg.pub.priv = <char *>reg + align16(sizeof(reg_t))
    reg.pub.dmabuf_fd = -1
    reg.md = md
    return reg


cdef inline bint reg_native(const reg_t *reg) noexcept nogil:
    """Is there anything for the device to hold?  Not of an empty region."""
    return reg.pub.length != 0 or reg.pub.adopt != NULL


cdef ucxm_status_t reg_takes(md_t *md, reg_t *reg, ucxm_error_t *error) noexcept nogil:
    """Memory of this type?"""
    if reg.pub.mem_type < 64 and md.attr.mem_types >> reg.pub.mem_type & 1:
        return UCXM_OK
    return refuse(error, UCXM_ERR_UNSUPPORTED,
                  "host memory, of which this domain takes none"
                  if reg.pub.mem_type == UCXM_MEM_TYPE_HOST
                  else "device memory of a type that this domain does not take")


cdef ucxm_status_t reg_look(reg_t *reg, ucxm_error_t *error) noexcept nogil:
    """Of which type is this memory, about which nothing has been said?"""
    cdef md_t *md = reg.md
    cdef ucxm_status_t status = md.ops.mem_query(md.priv, reg.pub.address, reg.pub.length,
                                                 &reg.pub.mem_type, error)
    return reg_takes(md, reg, error) if status == UCXM_OK else status


cdef ucxm_status_t reg_hold(reg_t *reg, ucxm_error_t *error) noexcept nogil:
    """Register with the device."""
    cdef ucxm_status_t status
    if not reg_native(reg):
        return UCXM_OK
    if reg.pub.mem_type == UCXM_MEM_TYPE_UNKNOWN:
        status = reg_look(reg, error)
        if status != UCXM_OK:
            return status
    status = reg.md.ops.mem_reg(reg.md.priv, &reg.pub, error)
    reg.held = status == UCXM_OK
    return status


cdef ucxm_status_t reg_unhold(reg_t *reg, ucxm_error_t *error) noexcept nogil:
    """Deregister.  On failure nothing has changed."""
    cdef ucxm_status_t status
    if reg.held:
        status = reg.md.ops.mem_dereg(reg.md.priv, &reg.pub, error)
        if status != UCXM_OK:
            return status
        reg.held = False
    return UCXM_OK


cdef void reg_free(reg_t *reg) noexcept nogil:
    """With its base, if there ever was one."""
    reg_release_memory(reg)
    room_free(reg.slab, reg)


cdef void reg_rights(reg_t *reg, uint64_t asked, bint default, bint writable) noexcept nogil:
    """What it is registered for.  `default`: as much as the memory and the domain allow; so is
    DERIVED_ONLY alone.  No access bit at all: local rights only.  Of an adopted registration it
    is what its maker is taken to have allowed, of which atomics are the exception."""
    cdef uint64_t access = asked & UCXM_MEM_ACCESS_ALL
    if default or (access == 0 and asked & UCXM_MEM_DERIVED_ONLY):
        access = UCXM_MEM_ACCESS_LOCAL_READ | UCXM_MEM_ACCESS_REMOTE_GET
        if writable:
            access = UCXM_MEM_ACCESS_ALL
        if reg.pub.adopt != NULL or not reg.md.attr.flags & UCXM_MD_FLAG_ATOMIC:
            access &= ~UCXM_MEM_ACCESS_REMOTE_ATOMIC
    elif access == 0:
        access = UCXM_MEM_ACCESS_LOCAL_READ
        if writable:
            access |= UCXM_MEM_ACCESS_LOCAL_WRITE
    reg.pub.flags = access | (asked & UCXM_MEM_DERIVED_ONLY)
    reg.pub.grant = access


cdef ucxm_status_t reg_check(md_t *md, reg_t *reg, bint writable,
                             ucxm_error_t *error) noexcept nogil:
    """What can be told without the device, for a Registration about to be made or adopted."""
    cdef uint64_t grant = reg.pub.grant
    cdef uint64_t writes = (UCXM_MEM_ACCESS_LOCAL_WRITE | UCXM_MEM_ACCESS_REMOTE_PUT |
                            UCXM_MEM_ACCESS_REMOTE_ATOMIC)
    cdef ucxm_status_t status
    if grant & writes and not writable:
        return refuse(error, UCXM_ERR_ACCESS, "the buffer is read-only")
    if reg.pub.length > UINT64_MAX - reg.pub.address:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "the range wraps around")
    if not md.attr.flags & UCXM_MD_FLAG_REG:
        return refuse(error, UCXM_ERR_UNSUPPORTED, "this domain does not register memory")
    if reg.pub.adopt != NULL and not md.attr.flags & UCXM_MD_FLAG_NEED_MEMH:
        return refuse(error, UCXM_ERR_UNSUPPORTED,
                      "this domain has no native registrations to adopt")
    if reg.pub.mem_type == UCXM_MEM_TYPE_UNKNOWN and (
            reg.pub.length == 0 or reg.pub.adopt != NULL or reg.pub.dmabuf_fd >= 0 or
            md.ops.mem_query == default_mem_query):
        reg.pub.mem_type = UCXM_MEM_TYPE_HOST  # there is nothing to look at, or nobody who looks
    if reg.pub.mem_type != UCXM_MEM_TYPE_UNKNOWN:
        status = reg_takes(md, reg, error)
        if status != UCXM_OK:
            return status
    if reg.pub.dmabuf_fd >= 0 and not md.attr.flags & UCXM_MD_FLAG_REG_DMABUF:
        return refuse(error, UCXM_ERR_UNSUPPORTED, "this domain takes no dmabuf")
    if reg.pub.flags & UCXM_MEM_DERIVED_ONLY and not md.attr.flags & UCXM_MD_FLAG_REG_DERIVED:
        return refuse(error, UCXM_ERR_UNSUPPORTED, "DERIVED_ONLY, but this domain does not derive")
    if grant & UCXM_MEM_ACCESS_REMOTE_ATOMIC and not md.attr.flags & UCXM_MD_FLAG_ATOMIC:
        return refuse(error, UCXM_ERR_UNSUPPORTED, "this domain has no atomics")
    if md.attr.max_reg and reg.pub.length > md.attr.max_reg:
        return refuse(error, UCXM_ERR_EXCEEDS_LIMIT,
                      "longer than what the domain registers at once (max_reg)")
    if reg.pub.address % md.attr.reg_alignment and reg.pub.length:
        return refuse(error, UCXM_ERR_INVALID_PARAM,
                      "the address is not aligned as the domain wants it (reg_alignment)")
    reg.pub.direct_rights = grant
    if reg.pub.flags & UCXM_MEM_DERIVED_ONLY:
        reg.pub.direct_rights = grant & ~UCXM_MEM_ACCESS_REMOTE
        # Peers will write through derived keys, and the device must be able to.
        if grant & (UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_ATOMIC):
            reg.pub.direct_rights |= UCXM_MEM_ACCESS_LOCAL_WRITE
    return UCXM_OK
