# SPDX-License-Identifier: BSD-3-Clause
# Windows: allocated, bound, freed.

cdef ucxm_status_t verb_failed(ucxm_error_t *error, int sys_errno,
                               const char *verb) noexcept nogil:
    return ib_fail(error, ib_errno_status(sys_errno), sys_errno, "%s failed (errno %d)", verb,
                   sys_errno)


cdef unsigned window_access(uint64_t rights) noexcept nogil:
    cdef unsigned access = 0
    if rights & UCXM_MEM_ACCESS_REMOTE_GET:
        access |= IBV_ACCESS_REMOTE_READ
    if rights & UCXM_MEM_ACCESS_REMOTE_PUT:
        access |= IBV_ACCESS_REMOTE_WRITE
    if rights & UCXM_MEM_ACCESS_REMOTE_ATOMIC:
        access |= IBV_ACCESS_REMOTE_ATOMIC
    return access


cdef window_t *window_alloc(md_t *md, bint type1, ucxm_error_t *error,
                            ucxm_status_t *status) noexcept nogil:
    cdef window_t *window = <window_t *>calloc(1, sizeof(window_t))
    if window == NULL:
        status[0] = ib_fail(error, UCXM_ERR_NO_MEMORY, ENOMEM, "out of memory")
        return NULL
    ib_count(&md.alloc_mw, 1)
    window.type1 = type1
    window.mw = ibv_alloc_mw(md.ib.pd, IBV_MW_TYPE_1 if type1 else IBV_MW_TYPE_2)
    if window.mw == NULL:
        status[0] = verb_failed(error, errno, "ibv_alloc_mw")
        free(window)
        return NULL
    status[0] = UCXM_OK
    return window


cdef int window_dealloc(md_t *md, window_t *window) noexcept nogil:
    """Ends it in every state, bound or not, of whatever queue pair; then `window` is gone."""
    cdef int failed
    ib_count(&md.dealloc_mw, 1)
    failed = ibv_dealloc_mw(window.mw)
    if failed < 0:
        failed = errno
    if failed == 0:
        free(window)
    return failed


cdef void window_discard(md_t *md, window_t *window) noexcept nogil:
    """One that nobody was told of; if the device does not free it now, then later."""
    if window_dealloc(md, window) != 0:
        pthread_mutex_lock(&md.lock)
        window.next = md.stuck
        md.stuck = window
        pthread_mutex_unlock(&md.lock)


cdef void stuck_free(md_t *md) noexcept nogil:
    cdef window_t *window
    cdef window_t *next
    pthread_mutex_lock(&md.lock)
    window = md.stuck
    md.stuck = NULL
    pthread_mutex_unlock(&md.lock)
    while window != NULL:
        next = window.next
        window_discard(md, window)
        window = next


cdef int bind_once(md_t *md, window_t *window, const ibv_mw_bind_info *info,
                   ibv_wc *wc) noexcept nogil:
    """Over the control queue pair.  An errno, or `wc` tells.  The lock is held."""
    cdef ibv_mw_bind bind
    cdef uint32_t before = window.mw.rkey
    cdef int failed = ib_control_up(&md.ib, &md.control)
    if failed:
        return failed
    memset(&bind, 0, sizeof(bind))
    md.control.last += 1
    bind.wr_id = md.control.last
    bind.send_flags = IBV_SEND_SIGNALED
    bind.bind_info = info[0]
    ib_count(&md.bind_mw, 1)
    failed = ibv_bind_mw(md.control.qp, window.mw, &bind)
    if failed < 0:
        failed = errno
    if failed:
        md.control.ready = 0
    else:
        failed = ib_control_wait(&md.ib, &md.control, wc)
    if failed or wc.status != IBV_WC_SUCCESS:
        window.mw.rkey = before  # the library has gone on, the device has not
    return failed


cdef int bind_twice(md_t *md, window_t *window, const ibv_mw_bind_info *info,
                    ibv_wc *wc) noexcept nogil:
    """A queue pair that was broken, by this very bind or before, is tried once more, made anew."""
    cdef int attempt
    cdef int failed = 0
    pthread_mutex_lock(&md.lock)
    for attempt in range(2):
        memset(wc, 0, sizeof(wc[0]))
        failed = bind_once(md, window, info, wc)
        if failed == ETIMEDOUT or failed == EOPNOTSUPP or failed == 0 and (
                wc.status == IBV_WC_SUCCESS):
            break
    pthread_mutex_unlock(&md.lock)
    return failed


cdef ucxm_status_t bind_type1(md_t *md, window_t *window, const ibv_mw_bind_info *info,
                              ucxm_error_t *error) noexcept nogil:
    """Bound, or not."""
    cdef ibv_wc wc
    cdef int failed = bind_twice(md, window, info, &wc)
    if failed == 0 and wc.status == IBV_WC_SUCCESS:
        return UCXM_OK
    if failed == EOPNOTSUPP and info.length > <uint64_t>LONG_WINDOW:
        return ib_fail(error, UCXM_ERR_EXCEEDS_LIMIT, failed,
                       "the driver binds no window of more than 2 GiB")
    if failed:
        return verb_failed(error, failed, "ibv_bind_mw")
    ib_fail(error, UCXM_ERR_IO_ERROR, 0, "the device did not bind the window: %s",
            md.ib.verbs.wc_status_str(wc.status))
    if error != NULL:
        error.syndrome = wc.vendor_err
    return UCXM_ERR_IO_ERROR


cdef ucxm_status_t bind_type2(md_t *md, window_t *window, ibv_mw_bind_info *info,
                              ucxm_memh_own_t *own, ucxm_error_t *error) noexcept nogil:
    """Over the endpoint's queue pair, which alone may use the key then."""
    cdef ibv_send_wr wr
    cdef ucxm_status_t status
    memset(&wr, 0, sizeof(wr))
    wr.opcode = IBV_WR_BIND_MW
    wr.send_flags = IBV_SEND_SIGNALED
    wr.bind_mw.mw = window.mw
    wr.bind_mw.rkey = ibv_inc_rkey(window.mw.rkey)
    wr.bind_mw.bind_info = info[0]
    ib_count(&md.bind_mw, 1)
    status = ib_ep_work(&md.ib, own.ep, &wr, error)
    if status == UCXM_OK:
        window.mw.rkey = wr.bind_mw.rkey
        window.bound = 1
        ib_ep_windows(own.ep, 1)
    return status


cdef void window_forget(md_t *md, window_t *window, const ucxm_memh_t *memh) noexcept nogil:
    """Ask once that the device drop what the window is bound to, which some want before they free
    it.  A second LOCAL_INV of one key has crashed a kernel."""
    cdef ibv_mw_bind_info nothing
    cdef ibv_send_wr wr
    cdef ibv_wc wc
    window.asked = 1
    if window.type1:
        memset(&nothing, 0, sizeof(nothing))
        nothing.mr = window.mr  # for no byte of it; the driver of rxe crashes without one
        memset(&wc, 0, sizeof(wc))
        pthread_mutex_lock(&md.lock)
        bind_once(md, window, &nothing, &wc)
        pthread_mutex_unlock(&md.lock)
    elif memh != NULL and ucxm_memh_own(memh).ep != NULL:
        memset(&wr, 0, sizeof(wr))
        wr.opcode = IBV_WR_LOCAL_INV
        wr.send_flags = IBV_SEND_SIGNALED
        wr.invalidate_rkey = window.mw.rkey
        ib_count(&md.local_inv, 1)
        ib_ep_work(&md.ib, ucxm_memh_own(memh).ep, &wr, NULL)
