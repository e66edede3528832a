# SPDX-License-Identifier: BSD-3-Clause
# Memory regions.

cdef unsigned ib_access(const ib_md_t *md, const ucxm_registration_t *reg) noexcept nogil:
    """The access bits of a registration: what its direct key must allow, and no more.

    Keys derived from it stand on its local rights, so it is writable for us if they may write.
    """
    cdef uint64_t rights = reg.direct_rights
    cdef uint64_t writes = (UCXM_MEM_ACCESS_LOCAL_WRITE | UCXM_MEM_ACCESS_REMOTE_PUT |
                            UCXM_MEM_ACCESS_REMOTE_ATOMIC)
    cdef unsigned access = 0
    if (rights | reg.grant) & writes:
        access |= IBV_ACCESS_LOCAL_WRITE
    if rights & UCXM_MEM_ACCESS_REMOTE_PUT:
        access |= IBV_ACCESS_REMOTE_WRITE
    if rights & UCXM_MEM_ACCESS_REMOTE_GET:
        access |= IBV_ACCESS_REMOTE_READ
    if md.config.atomic_right:
        rights |= reg.grant
    if rights & UCXM_MEM_ACCESS_REMOTE_ATOMIC:
        access |= IBV_ACCESS_REMOTE_ATOMIC
    if md.config.mw_bind == IB_MW_BIND_ANY and reg.grant or (
            md.config.mw_bind and reg.flags & UCXM_MEM_DERIVED_ONLY):
        access |= IBV_ACCESS_MW_BIND
    return access


cdef ibv_mr *mr_register(ib_md_t *md, ucxm_registration_t *reg, unsigned *access) noexcept nogil:
    """The kernel pins for writing what windows may be bound to, whatever rights they will have.
    Read-only memory is registered without that: it has its direct key and no windows then."""
    cdef ibv_mr *mr
    ib_count(&md.counts.reg_mr, 1)
    mr = md.verbs.reg_mr(md.pd, <void *>reg.address, reg.length, access[0])
    if mr == NULL and errno == EFAULT and access[0] & IBV_ACCESS_MW_BIND and not (
            access[0] & IBV_ACCESS_LOCAL_WRITE or reg.flags & UCXM_MEM_DERIVED_ONLY):
        access[0] &= ~<unsigned>IBV_ACCESS_MW_BIND
        ib_count(&md.counts.reg_mr, 1)
        mr = md.verbs.reg_mr(md.pd, <void *>reg.address, reg.length, access[0])
    return mr


cdef ucxm_status_t reg_adopt(ib_md_t *md, ucxm_registration_t *reg,
                             ucxm_error_t *error) noexcept nogil:
    """Stand on somebody else's ibv_mr, whose access bits no verb tells."""
    cdef ibv_mr *mr = <ibv_mr *>reg.adopt
    cdef uint64_t start = <uint64_t>mr.addr
    if mr.pd != md.pd:
        return ib_fail(error, UCXM_ERR_INVALID_PARAM, 0,
                       "the ibv_mr belongs to another protection domain")
    if reg.length == 0:
        reg.address = start
        reg.length = mr.length
    if reg.address < start or reg.length > mr.length or (
            reg.address - start > mr.length - reg.length):
        return ib_fail(error, UCXM_ERR_INVALID_PARAM, 0, "outside the range of the ibv_mr")
    (<ib_reg_t *>reg.priv).mr = mr
    (<ib_reg_t *>reg.priv).adopted = 1
    return UCXM_OK


cdef ucxm_status_t ib_mem_reg(void *priv, ucxm_registration_t *reg,
                              ucxm_error_t *error) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_reg_t *mine = <ib_reg_t *>reg.priv
    cdef unsigned access = ib_access(md, reg)
    cdef ucxm_status_t status
    if reg.adopt != NULL:
        status = reg_adopt(md, reg, error)
        if status != UCXM_OK:
            return status
    elif reg.dmabuf_fd >= 0:
        if not md.has_dmabuf:
            return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0, "no dmabuf registration here")
        # The device maps pages: an address has the place in its page that its bytes have in theirs.
        if (reg.address ^ reg.dmabuf_offset) & (<uint64_t>sysconf(_SC_PAGESIZE) - 1):
            return ib_fail(error, UCXM_ERR_INVALID_PARAM, 0,
                           "address and dmabuf_offset must have the same place in a page")
        if access & IBV_ACCESS_MW_BIND:  # ibv_reg_dmabuf_mr(3) does not take it
            if reg.flags & UCXM_MEM_DERIVED_ONLY:
                return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0, "DERIVED_ONLY, but no windows can "
                               "be bound to memory of a dmabuf")
            access &= ~<unsigned>IBV_ACCESS_MW_BIND
        ib_count(&md.counts.reg_mr, 1)
        mine.mr = md.verbs.reg_dmabuf_mr(md.pd, reg.dmabuf_offset, reg.length, reg.address,
                                         reg.dmabuf_fd, access)
        if mine.mr == NULL:
            return reg_failed(error, errno, "ibv_reg_dmabuf_mr")
    elif reg.mem_type != UCXM_MEM_TYPE_HOST:
        return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0, "device memory needs a dmabuf")
    else:
        mine.mr = mr_register(md, reg, &access)
        if mine.mr == NULL:
            return reg_failed(error, errno, "ibv_reg_mr")
    mine.access = 0 if mine.adopted else access
    reg.lkey = mine.mr.lkey
    reg.rkey = mine.mr.rkey
    return UCXM_OK


cdef ucxm_status_t ib_mem_dereg(void *priv, ucxm_registration_t *reg,
                                ucxm_error_t *error) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_reg_t *mine = <ib_reg_t *>reg.priv
    cdef int failed
    if not mine.adopted:
        ib_count(&md.counts.dereg_mr, 1)
        failed = md.verbs.dereg_mr(mine.mr)
        if failed:
            # EINVAL is what rxe says while a window is bound to it.
            if failed == EBUSY or failed == EINVAL and mine.access & IBV_ACCESS_MW_BIND:
                return ib_fail(error, UCXM_ERR_BUSY, failed,
                               "ibv_dereg_mr failed (errno %d): in use", failed)
            return ib_fail(error, UCXM_ERR_IO_ERROR, failed, "ibv_dereg_mr failed (errno %d)",
                           failed)
    mine.mr = NULL
    return UCXM_OK
