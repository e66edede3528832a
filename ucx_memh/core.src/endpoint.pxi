# SPDX-License-Identifier: BSD-3-Clause
# Endpoints: open, close, count.

cdef struct ep_t:
    ucxm_ep_t pub      # first: what the backend sees
    md_t *md
    ep_t *next
    ep_t *prev
    uint32_t refs      # the user, the Md's list, handles bound to it
    uint32_t closed
    uint32_t bound     # live handles whose keys only this endpoint may use
    uint32_t users     # threads inside the backend with it
    uint32_t orphan    # its user is gone, but handles bound to it resist
    ucxm_identity_t peer  # whom it was connected to; zero: nobody, or not told


cdef inline ucxm_status_t ep_check(ep_t *ep) noexcept nogil:
    if ep.md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    return UCXM_ERR_CLOSED if load32(&ep.closed) else UCXM_OK


cdef inline ucxm_status_t ep_enter(ep_t *ep) noexcept nogil:
    """Keep the backend and its part of the endpoint alive for a call; ep_leave ends it.  The
    domain is not closed before its endpoints are."""
    if ep.md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    add32(&ep.users, 1)
    if load32_sc(&ep.closed):
        ep_leave(ep)
        return UCXM_ERR_CLOSED
    return UCXM_OK


cdef inline void ep_leave(ep_t *ep) noexcept nogil:
    sub32(&ep.users, 1)


cdef ucxm_status_t ep_query(ep_t *ep, uint32_t *state) noexcept nogil:
    """The endpoint's state; without the GIL, which the backend may want."""
    cdef ucxm_status_t status = ep_enter(ep)
    if status == UCXM_OK:
        state[0] = ep.md.ep_ops.ep_state(ep.md.priv, &ep.pub)
        ep_leave(ep)
    return status


cdef void ep_release(ep_t *ep) noexcept nogil:
    cdef md_t *md = ep.md
    if sub32(&ep.refs, 1) == 0:
        mem_free(ep)
        md_put(md)


cdef void ep_put(ep_t *ep) noexcept nogil:
    """Drop a reference.  The last one beside the list's, of an endpoint whose user is gone, closes
    it first: without a reference somebody else might free it meanwhile."""
    cdef uint32_t refs = load32(&ep.refs)
    cdef ucxm_error_t ignored
    while refs > 2 or refs == 2 and not load32(&ep.orphan):
        if cas32(&ep.refs, refs, refs - 1):
            return
        refs = load32(&ep.refs)
    if refs == 2:
        error_clear(&ignored)
        ep_shut(ep, &ignored)
    ep_release(ep)


cdef ucxm_status_t ep_open(md_t *md, ep_t **ep_p, ucxm_error_t *error) noexcept nogil:
    cdef ep_t *ep
    cdef ucxm_status_t status
    ep_p[0] = NULL
    if not md.attr.flags & UCXM_MD_FLAG_ENDPOINT:
        error_text(error, "this domain has no data path")
        return UCXM_ERR_UNSUPPORTED
    status = md_enter(md)
    if status != UCXM_OK:
        return status
    ep = <ep_t *>alloc_zeroed(align16(sizeof(ep_t)) + md.ep_ops.ep_size)
    if ep == NULL:
        md_leave(md)
        return UCXM_ERR_NO_MEMORY
    ep.pub.priv = <char *>ep + align16(sizeof(ep_t))
    ep.md = md
    ep.refs = 2
    status = md.ep_ops.ep_create(md.priv, &ep.pub, error)
    if status != UCXM_OK:
        mem_free(ep)
        md_leave(md)
        return status
    md_get(md)
    spin_lock(&md.tree_lock)
    ep.next = md.endpoints
    if ep.next != NULL:
        ep.next.prev = ep
    md.endpoints = ep
    bump32(&md.live_endpoints, 1)
    spin_unlock(&md.tree_lock)
    md_leave(md)
    ep_p[0] = ep
    return UCXM_OK


cdef ucxm_status_t ep_shut(ep_t *ep, ucxm_error_t *error) noexcept nogil:
    """Close; the handles bound to it must have been revoked before."""
    cdef md_t *md = ep.md
    cdef ucxm_status_t status
    if md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    status = md_enter(md)
    if status != UCXM_OK:
        return UCXM_OK if status == UCXM_ERR_CLOSED else status
    spin_lock(&md.tree_lock)
    if ep.closed:
        spin_unlock(&md.tree_lock)
        md_leave(md)
        return UCXM_OK
    if ep.bound != 0:
        spin_unlock(&md.tree_lock)
        md_leave(md)
        error_text(error, "live handles are bound to it")
        return UCXM_ERR_BUSY
    cas32(&ep.closed, 0, 1)  # sequentially consistent, as in ep_enter
    if ep.prev != NULL:
        ep.prev.next = ep.next
    else:
        md.endpoints = ep.next
    if ep.next != NULL:
        ep.next.prev = ep.prev
    bump32(&md.live_endpoints, <uint32_t>-1)
    spin_unlock(&md.tree_lock)
    while load32_sc(&ep.users) != 0:
        sched_yield()  # a call that has begun before
    md.ep_ops.ep_destroy(md.priv, &ep.pub)
    md_leave(md)
    ep_release(ep)  # the list's
    return UCXM_OK


cdef void ep_drop(ep_t *ep) noexcept nogil:
    """Its user lets go of it, closed or not."""
    cdef ucxm_error_t ignored
    error_clear(&ignored)
    if ep_shut(ep, &ignored) != UCXM_OK:
        store32(&ep.orphan, 1)
    ep_put(ep)
