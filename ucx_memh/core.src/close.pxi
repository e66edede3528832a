# SPDX-License-Identifier: BSD-3-Clause
# The end of an Md.

cdef enum:
    DEALLOC_NS = 1000000000  # for a device, when nobody is left who could wait for it
    CLOSE_PATIENCE = 2000  # yields, for a call that another thread is just finishing


cdef ucxm_memh_t *close_leaf(md_t *md, bint derived) noexcept nogil:
    """A live handle without live children, with a reference; only a derived one if asked so."""
    cdef ucxm_memh_t *memh
    spin_lock(&md.tree_lock)
    memh = md.bases
    while memh != NULL:
        if books_of(memh).children != NULL:
            memh = books_of(memh).children
        elif derived and memh.id.parent == NULL:
            memh = books_of(memh).next
        else:
            memh_get(memh)
            break
    spin_unlock(&md.tree_lock)
    return memh


cdef ucxm_status_t close_handles(md_t *md, bint derived, uint64_t until,
                                 ucxm_error_t *error) noexcept nogil:
    """Deregister what is live, leaves first; stops at the first that resists.

    INPROGRESS: at the time `until` the device was still at one; call again.
    """
    cdef ucxm_memh_t *memh
    cdef books_t *books
    cdef ucxm_status_t status
    while True:
        memh = close_leaf(md, derived)
        if memh == NULL:
            return UCXM_OK
        books = books_of(memh)
        status = revoke(memh, True, NULL, error)
        if load32(&books.pending) != 0:
            # The device is at it, for us or since earlier: see how that ends.
            if not revoke_settled(memh, until):
                memh_put(memh)
                return UCXM_INPROGRESS
            status = UCXM_OK if load32(&memh.id.state) >= UCXM_MEMH_REVOKED else (
                UCXM_ERR_IO_ERROR)
        orphan_reap(md, memh)
        memh_put(memh)
        if status != UCXM_OK:
            return status


cdef ucxm_status_t close_orphans(md_t *md, uint64_t until) noexcept nogil:
    """What users let go of is none of the handles that the domain is BUSY of.  INPROGRESS: the
    device was still at it at the time `until`."""
    cdef ucxm_memh_t *memh = orphan_find(md, NULL)
    cdef ucxm_status_t status = UCXM_OK
    while memh != NULL and status == UCXM_OK:
        if not revoke_settled(memh, until):
            status = UCXM_INPROGRESS
        memh_put(memh)
        memh = orphan_find(md, NULL) if status == UCXM_OK else NULL
    return status


cdef ucxm_status_t close_parked(md_t *md, uint64_t until, ucxm_error_t *error) noexcept nogil:
    """Destroy the keys that were never handed out and see to the end of it."""
    cdef ucxm_status_t status
    while True:
        pthread_mutex_lock(&md.key_lock)
        status = parked_flush(md, NULL, error)
        if status == UCXM_OK:
            status = placeholders_flush(md, error)
        pthread_mutex_unlock(&md.key_lock)
        if status != UCXM_INPROGRESS or now_ns() >= until:
            return status
        if md_progress(md) == 0:
            sched_yield()


cdef ucxm_status_t close_everything(md_t *md, uint64_t until,
                                    ucxm_error_t *error) noexcept nogil:
    """Derived handles first (their endpoints must still stand), then endpoints (what they carry
    uses the bases), then bases."""
    cdef ep_t *ep
    cdef ucxm_status_t status = close_handles(md, True, until, error)
    while status == UCXM_OK:
        spin_lock(&md.tree_lock)
        ep = md.endpoints
        if ep != NULL:
            add32(&ep.refs, 1)
        spin_unlock(&md.tree_lock)
        if ep == NULL:
            break
        status = ep_shut(ep, error)
        ep_put(ep)
    if status == UCXM_OK:
        status = close_parked(md, until, error)
    if status == UCXM_OK:
        status = close_handles(md, False, until, error)
    return status


cdef bint md_in_use(md_t *md) noexcept nogil:
    cdef bint used
    spin_lock(&md.tree_lock)
    used = md.live_bases != 0 or md.live_derived != 0 or md.live_endpoints != 0
    spin_unlock(&md.tree_lock)
    return used


cdef ucxm_status_t md_close(md_t *md, bint force, uint64_t until,
                            ucxm_error_t *error) noexcept nogil:
    """Close the domain.  BUSY, and nothing changed, while anything of it is in use; `force` closes
    all of that first.  Closing a closed one is OK.

    INPROGRESS: at the time `until` the device was still destroying a key; call again.
    """
    cdef ucxm_status_t status = UCXM_OK
    cdef int patience = CLOSE_PATIENCE
    if md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    if load32(&md.state) == MD_CLOSED:
        return UCXM_OK
    md_tidy(md)
    if force:
        status = close_everything(md, until, error)
    else:
        status = close_orphans(md, until)
        if status == UCXM_OK:
            status = close_parked(md, until, error)
    if status != UCXM_OK:
        # Another thread that closes it, too, may have been faster meanwhile.
        return UCXM_OK if load32(&md.state) == MD_CLOSED else status
    if not cas32(&md.state, MD_OPEN, MD_CLOSING):
        error_text(error, "another thread is closing it")
        return UCXM_OK if load32(&md.state) == MD_CLOSED else UCXM_ERR_BUSY
    while load32_sc(&md.users) != 0 and patience != 0:
        patience -= 1
        sched_yield()
    if load32(&md.users) != 0:
        error_text(error, "a call is under way in another thread, or this is one of its callbacks")
        status = UCXM_ERR_BUSY
    elif md_in_use(md):
        error_text(error, "handles or endpoints are live")
        status = UCXM_ERR_BUSY
    elif load32(&md.live_rkeys) and not force:
        error_text(error, "unpacked keys are in use")
        status = UCXM_ERR_BUSY
    else:  # one that came after the look above
        pthread_mutex_lock(&md.key_lock)
        status = parked_flush(md, NULL, error)
        if status == UCXM_OK:
            status = placeholders_flush(md, error)
        pthread_mutex_unlock(&md.key_lock)
    if status != UCXM_OK:
        store32(&md.state, MD_OPEN)
        return status
    rkeys_close(md)
    md.ops.close(md.priv)
    md.priv = NULL
    store32(&md.state, MD_CLOSED)
    md_tidy(md)  # what was dropped while it closed
    return UCXM_OK
