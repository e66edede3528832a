# SPDX-License-Identifier: BSD-3-Clause
# Many revocations at once: the device gets the work of a whole batch together.

cdef enum:
    BATCH = 256


cdef inline bint batch_waits(const ucxm_memh_t *memh) noexcept nogil:
    """Is it another revocation that it is BUSY of, and not the device's refusal?"""
    cdef books_t *books = books_of(memh)
    return load32(&books.pending) != 0 or load32(&books.live_children) != 0


cdef size_t batch_start(ucxm_memh_t *const *memhs, size_t count, bint closing,
                        ucxm_status_t *each) noexcept nogil:
    """Begin to revoke the first of these handles, at most BATCH; returns how many.

    each[i] says how it went.  What is INPROGRESS must be settled before the next call: one that is
    BUSY because of it, a parent after its child, is left to that call.  So is one above a handle
    that its user let go of and the device is still at; that may be the first.
    """
    cdef size_t started = 0
    cdef size_t under_way = 0
    cdef md_t *md = NULL
    cdef ucxm_status_t status
    while started < count and started < <size_t>BATCH:
        if memhs[started] == NULL:
            status = UCXM_ERR_INVALID_PARAM
        elif under_way != 0 and md_of(memhs[started]) != md:
            break
        else:
            md = md_of(memhs[started])
            status = revoke_start(memhs[started], closing, NULL, False, NULL)
        if status == UCXM_ERR_BUSY and (batch_waits(memhs[started]) if under_way != 0 else
                                        orphan_wait(memhs[started])):
            break
        if status == UCXM_INPROGRESS:
            under_way += 1
        each[started] = status
        started += 1
    # Another thread may have progressed them, and closed the domain, meanwhile.
    if under_way != 0 and md_enter(md) == UCXM_OK:
        md.ops.key_flush(md.priv)
        md_leave(md)
    return started


cdef bint batch_settle(ucxm_memh_t *const *memhs, size_t count, ucxm_status_t *each,
                       uint64_t until) noexcept nogil:
    """Progress until none of these is INPROGRESS any more; False: the time `until` came first."""
    cdef size_t i
    for i in range(count):
        if each[i] != UCXM_INPROGRESS:
            continue
        if not revoke_settled(memhs[i], until):
            return False
        each[i] = revoke_outcome(memhs[i])
    return True
