# SPDX-License-Identifier: BSD-3-Clause
# Adopting: no verb tells what an ibv_mr was registered with, so a window is bound to it and freed
# again.  Nobody sees its key, and not a byte is touched.

cdef enum:
    TRY_BOUND = 0
    TRY_REFUSED = 1
    TRY_FAILED = -1  # which says nothing of the ibv_mr

cdef enum:
    WRITES = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC


cdef int try_bind(md_t *md, ucxm_registration_t *reg, window_t *window, unsigned access,
                  ucxm_error_t *error) noexcept nogil:
    """Does its first byte take a window with that access?"""
    cdef ibv_mw_bind_info info
    cdef ibv_wc wc
    cdef int failed
    memset(&info, 0, sizeof(info))
    window.mr = info.mr = (<ib_reg_t *>reg.priv).mr
    info.addr = reg.address
    info.length = 1
    info.mw_access_flags = access
    failed = bind_twice(md, window, &info, &wc)
    if failed in (0, EINVAL, EPERM, EACCES, EOPNOTSUPP):
        return TRY_REFUSED if failed or wc.status != IBV_WC_SUCCESS else TRY_BOUND
    verb_failed(error, failed, "ibv_bind_mw")
    return TRY_FAILED


cdef ucxm_status_t try_access(md_t *md, ucxm_registration_t *reg, window_t *window,
                              ucxm_error_t *error) noexcept nogil:
    """Find out what windows on it can do, as far as somebody wants that of them."""
    cdef ib_reg_t *mine = <ib_reg_t *>reg.priv
    cdef unsigned access = window_access(reg.grant)
    cdef int found
    if not md.check.atomic:
        access &= ~<unsigned>IBV_ACCESS_REMOTE_ATOMIC
    found = try_bind(md, reg, window, access, error)
    if found == TRY_REFUSED and access & WRITES:
        found = try_bind(md, reg, window, IBV_ACCESS_REMOTE_READ, error)
        if found == TRY_BOUND:
            return ib_fail(error, UCXM_ERR_ACCESS, 0,
                           "the ibv_mr lacks IBV_ACCESS_LOCAL_WRITE, below put and atomics: adopt "
                           "it without")
    if found == TRY_FAILED:
        return ib_errno_status(error.sys_errno) if error != NULL else UCXM_ERR_IO_ERROR
    if found == TRY_BOUND:
        mine.access = IBV_ACCESS_MW_BIND
        if access & WRITES:
            mine.access |= IBV_ACCESS_LOCAL_WRITE
    elif reg.flags & UCXM_MEM_DERIVED_ONLY:
        return no_window(error)
    return UCXM_OK


cdef ucxm_status_t no_window(ucxm_error_t *error) noexcept nogil:
    return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0,
                   "the adopted ibv_mr takes no window: most likely it was registered without "
                   "IBV_ACCESS_MW_BIND")


cdef void window_end(md_t *md, window_t *window) noexcept nogil:
    """One of type 1 that may be bound; what resists lets go of the ibv_mr, and is freed later."""
    cdef int failed = window_dealloc(md, window)
    if failed:
        window_forget(md, window, NULL)
        window_discard(md, window)


cdef ucxm_status_t adopt_try(md_t *md, ucxm_registration_t *reg,
                             ucxm_error_t *error) noexcept nogil:
    cdef ucxm_error_t reason
    cdef ucxm_status_t status = UCXM_OK
    cdef window_t *window
    memset(&reason, 0, sizeof(reason))
    stuck_free(md)
    window = window_alloc(md, True, &reason, &status)
    if window != NULL:
        status = try_access(md, reg, window, &reason)
        window_end(md, window)
    if status != UCXM_OK and error != NULL:
        error[0] = reason
    return status


cdef ucxm_status_t window_mem_reg(void *priv, ucxm_registration_t *reg,
                                  ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef ucxm_status_t status = ib_mem_reg(priv, reg, error)
    if status == UCXM_OK and reg.adopt != NULL and has_windows(md) and reg.length != 0:
        status = adopt_try(md, reg, error)
    return status
