# SPDX-License-Identifier: BSD-3-Clause
# Which window stands for which key.

cdef bint has_windows(const md_t *md) noexcept nogil:
    return md.caps & IBV_DEVICE_MEM_WINDOW and md.check.binds


cdef bint has_bound_windows(const md_t *md) noexcept nogil:
    """Those that one queue pair alone may use."""
    return has_windows(md) and (md.caps & IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0


cdef ucxm_status_t window_mem_derive(void *priv, const ucxm_memh_t *base, const ucxm_memh_t *memh,
                                     ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef const ib_reg_t *reg
    if ucxm_memh_own(memh).length == 0:
        return UCXM_OK
    reg = <const ib_reg_t *>memh.inherited.reg.priv
    if not reg.access & IBV_ACCESS_MW_BIND:
        if reg.adopted:
            return no_window(error)
        if memh.inherited.reg.dmabuf_fd >= 0:
            return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0,
                           "no windows on memory of a dmabuf: ibv_reg_dmabuf_mr allows none")
        return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0,
                       "no windows on read-only memory: the kernel pins for writing")
    if ucxm_memh_own(memh).rights & UCXM_MEM_ACCESS_REMOTE_ATOMIC and not md.check.atomic:
        return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0, "no atomics through windows here")
    return UCXM_OK


cdef ucxm_status_t window_bind(md_t *md, window_t *window, const ucxm_memh_t *memh,
                               ucxm_error_t *error) noexcept nogil:
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef ibv_mw_bind_info info
    memset(&info, 0, sizeof(info))
    window.mr = info.mr = (<ib_reg_t *>memh.inherited.reg.priv).mr
    info.addr = own.address
    info.length = own.length
    info.mw_access_flags = window_access(own.rights)
    if window.type1:
        return bind_type1(md, window, &info, error)
    return bind_type2(md, window, &info, own, error)


cdef ucxm_status_t window_key_create(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                     ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef ucxm_status_t status = UCXM_OK
    cdef window_t *window
    stuck_free(md)
    window = window_alloc(md, ucxm_memh_own(memh).ep == NULL, error, &status)
    if window == NULL:
        return status
    status = window_bind(md, window, memh, error)
    if status != UCXM_OK:
        window_discard(md, window)
        return status
    slot.object = window
    slot.value = window.mw.rkey
    return UCXM_OK


cdef ucxm_status_t window_key_destroy(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                      ucxm_completion_t *comp,
                                      ucxm_error_t *error) noexcept nogil:
    """Freeing a bound window is the cheapest way, waits for accesses under way, and needs no queue
    pair in good health.  Gone is what the verb says is gone, and nothing else."""
    cdef md_t *md = <md_t *>priv
    cdef window_t *window = <window_t *>slot.object
    cdef bint bound = window.bound
    cdef int failed = window_dealloc(md, window)
    if failed and not window.asked:
        window_forget(md, window, memh)
        failed = window_dealloc(md, window)
    if failed == 0:
        if bound and memh != NULL:  # of a key without a handle the endpoint may be gone
            ib_ep_windows(ucxm_memh_own(memh).ep, -1)
        slot.object = NULL
        return UCXM_OK
    return ib_fail(error, ib_errno_status(failed) if failed in (EAGAIN, EBUSY, ENODEV, ENOMEM)
                   else UCXM_ERR_IO_ERROR, failed, "ibv_dealloc_mw failed (errno %d)", failed)


cdef ucxm_status_t window_mkey_pack(void *priv, const ucxm_memh_t *memh,
                                    const ucxm_key_slot_t *rma, const ucxm_key_slot_t *atomic,
                                    uint8_t *payload, size_t *length,
                                    ucxm_error_t *error) noexcept nogil:
    """The native 8 bytes as in UCT: the key for put and get, the key for atomics (all ones: the
    same).  Then the device's node guid."""
    cdef md_t *md = <md_t *>priv
    cdef uint32_t direct = IB_NO_KEY
    if rma != NULL:
        direct = rma.value if rma.object != NULL else memh.inherited.reg.rkey
    ib_put32(payload, direct)
    ib_put32(payload + 4, IB_NO_KEY if atomic == NULL else atomic.value)
    ib_put64(payload + 8, md.ib.guid)
    length[0] = PACKED_SIZE
    return UCXM_OK


cdef void window_mem_enforcement(void *priv, const ucxm_memh_t *memh,
                                 ucxm_enforcement_t *enforcement) noexcept nogil:
    """A base's own key is a plain registration's, which every device checks, and lasts as long.
    Of a window's range the self-check knows."""
    cdef md_t *md = <md_t *>priv
    cdef bint derived = memh == NULL or memh.id.parent != NULL
    cdef int kind
    memset(enforcement, UCXM_ENFORCE_NONE, sizeof(enforcement[0]))
    if memh == NULL and not has_windows(md):
        return
    memset(enforcement.rights, UCXM_ENFORCE_ENFORCED, sizeof(enforcement.rights))
    memset(enforcement.range, UCXM_ENFORCE_ENFORCED, sizeof(enforcement.range))
    if not derived:
        if ib_adopted(memh):  # it may allow more than its adopter knows, and more than a key says
            memset(enforcement.rights, UCXM_ENFORCE_COOPERATIVE, sizeof(enforcement.rights))
        return
    memset(enforcement.revoke, UCXM_ENFORCE_ENFORCED, sizeof(enforcement.revoke))
    for kind in range(3):
        if not md.check.range[kind]:
            enforcement.range[kind] = UCXM_ENFORCE_COOPERATIVE
