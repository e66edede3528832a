# SPDX-License-Identifier: BSD-3-Clause
# The self-check at open: what do this device and its driver make of a window?  Soft-RoCE, for one,
# checks a window's rights and lets it reach all of the registration.

cdef enum:
    CHECK_GET = 0
    CHECK_PUT = 1
    CHECK_ATOMIC = 2
    CHECK_REFUSED = 0
    CHECK_ALLOWED = 1
    CHECK_UNCLEAR = -1
    # In the scratch page: the window, what is just outside of it, and our local buffer.
    CHECK_WINDOW = 1024
    CHECK_LOCAL = 2048
    CHECK_PAGE = 4096

cdef struct scratch_t:
    uint8_t *page
    ibv_mr *mr
    window_t *window
    uint32_t rkey


cdef int check_access(md_t *md, scratch_t *scratch, int kind, uint64_t offset) noexcept nogil:
    """Is such an access at that offset of the page let through?  It is seen by its effect, too."""
    cdef uint64_t *word = <uint64_t *>(scratch.page + offset)
    cdef uint64_t *local = <uint64_t *>(scratch.page + CHECK_LOCAL)
    cdef uint64_t *there = local if kind == CHECK_GET else word
    cdef ibv_send_wr wr
    cdef ibv_sge sge
    cdef ibv_wc wc
    cdef bint moved
    if ib_control_up(&md.ib, &md.control) != 0:
        return CHECK_UNCLEAR
    memset(&wr, 0, sizeof(wr))
    memset(&wc, 0, sizeof(wc))
    word[0] = 0x1111
    local[0] = 0x2222
    sge.addr = <uint64_t>local
    sge.length = 8
    sge.lkey = scratch.mr.lkey
    wr.sg_list = &sge
    wr.num_sge = 1
    if kind == CHECK_ATOMIC:
        wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD
        wr.wr.atomic.remote_addr = <uint64_t>word
        wr.wr.atomic.compare_add = 1
        wr.wr.atomic.rkey = scratch.rkey
    else:
        wr.opcode = IBV_WR_RDMA_READ if kind == CHECK_GET else IBV_WR_RDMA_WRITE
        wr.wr.rdma.remote_addr = <uint64_t>word
        wr.wr.rdma.rkey = scratch.rkey
    if ib_control_post(&md.ib, &md.control, &wr, &wc) != 0:
        return CHECK_UNCLEAR
    moved = ib_load64(there) != (0x2222 if kind == CHECK_GET else 0x1111)
    if wc.status == IBV_WC_SUCCESS:
        return CHECK_ALLOWED if moved else CHECK_UNCLEAR
    # Both ends are one queue pair: its error may come before the answer.
    if not moved and wc.status in (IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR):
        return CHECK_REFUSED
    return CHECK_UNCLEAR


cdef ucxm_status_t scratch_make(md_t *md, scratch_t *scratch, ucxm_error_t *error) noexcept nogil:
    """A window on the beginning of a registered page."""
    cdef unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND
    cdef ibv_mw_bind_info info
    cdef ucxm_status_t status = UCXM_OK
    if md.check.atomic_right:
        access |= IBV_ACCESS_REMOTE_ATOMIC
    ib_count(&md.ib.counts.reg_mr, 1)
    scratch.mr = md.ib.verbs.reg_mr(md.ib.pd, scratch.page, CHECK_PAGE, access)
    if scratch.mr == NULL:
        return verb_failed(error, errno, "ibv_reg_mr")
    scratch.window = window_alloc(md, True, error, &status)
    if scratch.window == NULL:
        return status
    memset(&info, 0, sizeof(info))
    info.mr = scratch.mr
    info.addr = <uint64_t>scratch.page
    info.length = CHECK_WINDOW
    info.mw_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
    if md.check.atomic:
        info.mw_access_flags |= IBV_ACCESS_REMOTE_ATOMIC
    status = bind_type1(md, scratch.window, &info, error)
    scratch.rkey = scratch.window.mw.rkey
    return status


cdef void scratch_drop(md_t *md, scratch_t *scratch) noexcept nogil:
    if scratch.window != NULL:
        window_discard(md, scratch.window)
        scratch.window = NULL
    if scratch.mr != NULL:
        ib_count(&md.ib.counts.dereg_mr, 1)
        md.ib.verbs.dereg_mr(scratch.mr)
        scratch.mr = NULL


cdef ucxm_status_t check_atomic(md_t *md, scratch_t *scratch, ucxm_error_t *error) noexcept nogil:
    """Make the window that atomics work through, if there is one: on a registration without the
    atomic right, on one with it, or else without atomics."""
    cdef ucxm_status_t status
    md.check.atomic = md.ib.has_atomics
    md.check.atomic_right = 0
    status = scratch_make(md, scratch, error)
    if not md.check.atomic or status == UCXM_OK and (
            check_access(md, scratch, CHECK_ATOMIC, 0) == CHECK_ALLOWED):
        return status
    scratch_drop(md, scratch)
    md.check.atomic_right = 1
    status = scratch_make(md, scratch, error)
    if status == UCXM_OK and check_access(md, scratch, CHECK_ATOMIC, 0) == CHECK_ALLOWED:
        return status
    scratch_drop(md, scratch)
    md.check.atomic = 0
    md.check.atomic_right = 0
    return scratch_make(md, scratch, error)


cdef void check_scratch(md_t *md, scratch_t *scratch) noexcept nogil:
    cdef check_t *check = &md.check
    cdef ucxm_error_t error
    cdef int kind
    memset(&error, 0, sizeof(error))
    if check_atomic(md, scratch, &error) != UCXM_OK:
        snprintf(check.why, sizeof(check.why), "%s", error.text)
        return
    check.binds = 1
    for kind in range(CHECK_ATOMIC + 1):
        if kind == CHECK_ATOMIC and not check.atomic:
            check.range[kind] = check.range[CHECK_GET] and check.range[CHECK_PUT]
        elif check_access(md, scratch, kind, 0) != CHECK_ALLOWED:
            snprintf(check.why, sizeof(check.why), "a window does not let its own accesses through")
            return
        else:
            check.range[kind] = check_access(md, scratch, kind, CHECK_WINDOW) == CHECK_REFUSED
    check.done = 1


cdef void self_check(md_t *md) noexcept nogil:
    """About forty verbs, once at open; what it finds decides what this domain promises."""
    cdef scratch_t scratch
    memset(&scratch, 0, sizeof(scratch))
    md.check.asked = 1
    scratch.page = <uint8_t *>aligned_alloc(CHECK_PAGE, CHECK_PAGE)
    if scratch.page == NULL:
        snprintf(md.check.why, sizeof(md.check.why), "out of memory")
        return
    memset(scratch.page, 0, CHECK_PAGE)
    check_scratch(md, &scratch)
    scratch_drop(md, &scratch)
    ib_control_up(&md.ib, &md.control)
    # Of the control queue pair's refusals.  rxe makes no events of its own.
    ib_drop_events(&md.ib)
    md.ib.config.ask_state = md.ib.counts.async_events == 0
    free(scratch.page)
    if not md.check.done:
        memset(md.check.range, 0, sizeof(md.check.range))


cdef void no_check(md_t *md) noexcept nogil:
    """Nothing is known: registrations get what some devices need below an atomic window, and no
    range is promised."""
    md.check.binds = 1
    md.check.atomic = md.ib.has_atomics
    md.check.atomic_right = md.ib.has_atomics
