# SPDX-License-Identifier: BSD-3-Clause
# Invalidate and dereg: LIVE -> REVOKING -> REVOKED -> CLOSED, and a base LIVE -> CLOSED.
#
# Both first destroy the handle's own keys.  books.pending says who is at it: nobody (0), a thread
# (AT_WORK) or the device (slot + 1, until device_done).  A failed destruction stays in REVOKING
# with nobody at it: only a retry is legal.

cdef inline void revoke_take(ucxm_memh_t *memh, bint closing) noexcept nogil:
    """From now on it is refused to others, and this thread is at it.  tree_lock is held."""
    cdef books_t *books = books_of(memh)
    if memh.id.state == UCXM_MEMH_LIVE:
        store32(&memh.id.state, UCXM_MEMH_REVOKING)
    store32(&books.pending, AT_WORK)
    books.closing |= CLOSING if closing else 0


cdef ucxm_status_t revoke_begin(md_t *md, ucxm_memh_t *memh, bint closing,
                                ucxm_error_t *error) noexcept nogil:
    """Take the handle for destruction, or say why not; then nothing has changed."""
    cdef books_t *books = books_of(memh)
    cdef ucxm_status_t status = UCXM_OK
    cdef uint32_t state, pending
    while True:
        spin_lock(&md.tree_lock)
        pending = load32(&books.pending)
        if pending != AT_WORK:
            break
        spin_unlock(&md.tree_lock)
        sched_yield()  # the other thread is done after one call of the backend

    state = memh.id.state
    if state == UCXM_MEMH_CLOSED:
        status = UCXM_ERR_CLOSED
    elif not closing and memh.id.parent == NULL:
        error_text(error, "a base's direct key dies only with its registration: use dereg")
        status = UCXM_ERR_INVALID_PARAM
    elif pending != 0:
        error_text(error, "its revocation is under way")
        status = UCXM_ERR_BUSY
    elif books_of(memh).children != NULL:
        error_text(error, "it has live derived handles")
        status = UCXM_ERR_BUSY
    elif not closing and state == UCXM_MEMH_REVOKED:
        status = UCXM_ERR_REVOKED
    else:
        if memh.id.parent == NULL and load32(&reg_of(memh).inflight) != 0:
            error_text(error, "transfers that use it as local memory are under way")
            status = UCXM_ERR_BUSY
        else:
            revoke_take(memh, closing)
    spin_unlock(&md.tree_lock)
    return status


cdef ucxm_status_t revoke_finish(md_t *md, ucxm_memh_t *memh, ucxm_status_t status,
                                 ucxm_error_t *error) noexcept nogil:
    """The keys are gone (OK) or one resisted: settle the state."""
    cdef books_t *books = books_of(memh)
    cdef bint closing = load32(&books.closing) & CLOSING  # others may just let go of it
    cdef bint last = status == UCXM_OK and closing and memh.id.parent == NULL
    cdef bint held = last and reg_of(memh).held
    if held:
        status = reg_unhold(reg_of(memh), error)
    spin_lock(&md.tree_lock)
    bump64(&md.counters.mem_dereg, held)
    if status == UCXM_OK and memh.id.state == UCXM_MEMH_REVOKING:
        memh_settle(md, memh, closing)
    elif status == UCXM_OK:
        store32(&memh.id.state, UCXM_MEMH_CLOSED)
    store32(&books.closing, books.closing & ~<uint32_t>CLOSING)
    last = last and status == UCXM_OK and not load32(&reg_of(memh).later)
    # Before `pending`: who waits for that reads it.
    store32(<uint32_t *>&books.failed, <uint32_t>status)
    store32(&books.pending, 0)
    spin_unlock(&md.tree_lock)
    # Only now: it takes the GIL, and one who has that may have waited for `pending`.
    if last:
        reg_release_memory(reg_of(memh))
    return status


cdef void revoke_device_done(ucxm_completion_t *self, ucxm_status_t status) noexcept nogil:
    """The device has destroyed (or failed to destroy) the key that it was at."""
    cdef books_t *books = <books_t *>self
    cdef ucxm_memh_t *memh = <ucxm_memh_t *>(books + 1)
    cdef md_t *md = md_of(memh)
    cdef ucxm_completion_t *user_done
    cdef ucxm_error_t error
    error_clear(&error)
    pthread_mutex_lock(&md.key_lock)
    if status == UCXM_OK:
        key_gone(md, &ucxm_memh_own(memh).slot[books.pending - 1])
        store32(&books.pending, AT_WORK)
        status = keys_destroy(md, memh, &error)
    else:
        store32(&books.pending, AT_WORK)
    pthread_mutex_unlock(&md.key_lock)
    if status == UCXM_INPROGRESS:
        md.ops.key_flush(md.priv)
        return
    user_done = books.user_done
    books.user_done = NULL
    status = revoke_finish(md, memh, status, &error)
    if user_done != NULL:
        user_done.func(user_done, status)
    orphan_reap(md, memh)
    orphans_revoke(orphan_above(md, memh))
    memh_put(memh)


cdef void orphan_reap(md_t *md, ucxm_memh_t *memh) noexcept nogil:
    """Give up the reference of a user who is gone, once there is nothing left to tear down."""
    cdef books_t *books = books_of(memh)
    cdef bint reap
    spin_lock(&md.tree_lock)
    reap = books.closing & ORPHAN and memh.id.state >= UCXM_MEMH_REVOKED
    if reap:
        store32(&books.closing, books.closing & ~<uint32_t>ORPHAN)
        bump32(&md.orphans, <uint32_t>-1)
    spin_unlock(&md.tree_lock)
    if reap:
        memh_put(memh)


cdef ucxm_memh_t *orphan_above(md_t *md, const ucxm_memh_t *memh) noexcept nogil:
    """The parent, with a reference, if it is an orphan that waited for this one alone.  The caller
    was at work on this one, which therefore holds its parent."""
    cdef ucxm_memh_t *parent = memh.id.parent
    if parent == NULL or load32(&md.orphans) == 0:
        return NULL
    spin_lock(&md.tree_lock)
    if books_of(parent).closing & ORPHAN and parent.id.state == UCXM_MEMH_LIVE and (
            books_of(parent).children == NULL and load32(&books_of(parent).pending) == 0):
        memh_get(parent)
    else:
        parent = NULL
    spin_unlock(&md.tree_lock)
    return parent


cdef void orphans_revoke(ucxm_memh_t *memh) noexcept nogil:
    """One that nothing is below any more, or NULL, and then whatever waited for it.  Takes the
    reference."""
    cdef ucxm_memh_t *above
    while memh != NULL:  # a loop: chains of derived handles may be long
        above = NULL
        revoke_step(memh, True, NULL, True, &above, NULL)
        orphan_reap(md_of(memh), memh)
        memh_put(memh)
        memh = above


cdef inline bint revoke_keyless(md_t *md, ucxm_memh_t *memh, bint closing) noexcept nogil:
    """Most handles of a short life have no key of their own.  A derived one goes in this one step;
    of a base only the registration is left, and this thread has taken it.  False: the handle takes
    the long way, which also finds out what is wrong."""
    cdef books_t *books = books_of(memh)
    cdef bint keyless
    if load32(&books.touched) != 0 or not (closing or memh.id.parent != NULL):
        return False
    spin_lock(&md.tree_lock)
    keyless = (memh.id.state == UCXM_MEMH_LIVE and books.children == NULL and
               load32(&books.pending) == 0 and load32(&books.touched) == 0 and
               md.orphans == 0)  # one may be above it
    if keyless and memh.id.parent != NULL:
        memh_settle(md, memh, closing)
    elif keyless:
        keyless = load32(&reg_of(memh).inflight) == 0 and load32(&md.parked_count) == 0
        if keyless:
            revoke_take(memh, True)
    spin_unlock(&md.tree_lock)
    return keyless


cdef inline bint revoke_quick(ucxm_memh_t *memh, bint closing) noexcept nogil:
    """A live derived handle without keys: gone, if it is one."""
    return (memh.id.parent != NULL and books_of(memh).epoch == fork_epoch and
            load32(&memh.id.state) == UCXM_MEMH_LIVE and
            revoke_keyless(md_of(memh), memh, closing))


cdef ucxm_status_t revoke_step(ucxm_memh_t *memh, bint closing, ucxm_completion_t *comp,
                               bint flush, ucxm_memh_t **above,
                               ucxm_error_t *error) noexcept nogil:
    """As revoke_start(), but leaves to the caller what waited for this one: `above`, if set, is
    for orphans_revoke."""
    cdef md_t *md = md_of(memh)
    cdef books_t *books = books_of(memh)
    cdef ucxm_status_t status
    if books_of(memh).epoch != fork_epoch:
        return UCXM_ERR_FORKED
    if load32(&memh.id.state) == UCXM_MEMH_CLOSED:  # the domain may be gone
        if not closing:
            return UCXM_ERR_CLOSED
        if comp != NULL:
            comp.func(comp, UCXM_OK)
        return UCXM_OK
    if revoke_keyless(md, memh, closing):
        if memh.id.parent == NULL:
            status = revoke_finish(md, memh, UCXM_OK, error)
            if status != UCXM_OK:
                return status
        if comp != NULL:
            comp.func(comp, UCXM_OK)
        return UCXM_OK
    status = md_enter(md)
    if status != UCXM_OK:
        return status
    status = revoke_begin(md, memh, closing, error)
    if status != UCXM_OK:
        md_leave(md)
        if not (closing and status == UCXM_ERR_CLOSED):
            return status
        if comp != NULL:
            comp.func(comp, UCXM_OK)
        return UCXM_OK
    books.device_done.func = revoke_device_done
    books.user_done = comp
    memh_get(memh)  # the device's
    pthread_mutex_lock(&md.key_lock)
    status = keys_destroy(md, memh, error)
    pthread_mutex_unlock(&md.key_lock)
    if status != UCXM_INPROGRESS:
        books.user_done = NULL
        status = revoke_finish(md, memh, status, error)
        if status == UCXM_OK:
            above[0] = orphan_above(md, memh)
        md_leave(md)
        if comp != NULL and status == UCXM_OK:
            comp.func(comp, UCXM_OK)
        memh_put(memh)
        return status
    if flush:
        md.ops.key_flush(md.priv)
    md_leave(md)
    return UCXM_INPROGRESS


cdef ucxm_status_t revoke_start(ucxm_memh_t *memh, bint closing, ucxm_completion_t *comp,
                                bint flush, ucxm_error_t *error) noexcept nogil:
    """As revoke(); without `flush` what is INPROGRESS may lie with the backend until its
    key_flush or progress."""
    cdef ucxm_memh_t *above = NULL
    cdef ucxm_status_t status = revoke_step(memh, closing, comp, flush, &above, error)
    orphans_revoke(above)
    return status


cdef ucxm_status_t revoke(ucxm_memh_t *memh, bint closing, ucxm_completion_t *comp,
                          ucxm_error_t *error) noexcept nogil:
    """Destroy the handle's own keys; with `closing` deregister it too.

    OK or INPROGRESS: `comp` (may be NULL) runs exactly once, after the last key is gone, with no
    lock held.  An error: it never runs.  Deregistering what is closed already is OK.
    """
    return revoke_start(memh, closing, comp, True, error)


cdef enum:
    SLICE_NS = 20000000     # without the GIL, before signals are looked at


cdef bint revoke_settled(ucxm_memh_t *memh, uint64_t until) noexcept nogil:
    """Progress until nobody is at its revocation; False: the time `until` came first."""
    cdef md_t *md = md_of(memh)
    while load32(&books_of(memh).pending) != 0:
        if now_ns() >= until:
            return False
        if md_progress(md) == 0:
            sched_yield()
    return True


cdef inline ucxm_status_t revoke_outcome(const ucxm_memh_t *memh) noexcept nogil:
    """Of what has settled.  Another thread may be at the next one already, a dereg after this
    invalidate, and its end is as good an answer."""
    return <ucxm_status_t>load32(<uint32_t *>&books_of(memh).failed)


cdef inline bint revoke_overtaken(ucxm_memh_t *memh, ucxm_status_t status) noexcept nogil:
    """Another thread was faster; and not a backend that says so and has not done it."""
    return (status == UCXM_ERR_REVOKED or status == UCXM_ERR_CLOSED) and (
        load32(&memh.id.state) >= UCXM_MEMH_REVOKED)


cdef ucxm_memh_t *revoke_leaf(md_t *md, ucxm_memh_t *memh) noexcept nogil:
    """A live descendant that has none itself, with a reference; NULL when there is none."""
    cdef ucxm_memh_t *leaf
    spin_lock(&md.tree_lock)
    leaf = books_of(memh).children
    while leaf != NULL and books_of(leaf).children != NULL:
        leaf = books_of(leaf).children
    if leaf != NULL:
        memh_get(leaf)
    spin_unlock(&md.tree_lock)
    return leaf


cdef void memh_drop(void *thing) noexcept nogil:
    """The user lets go of the handle, deregistered or not.

    What cannot be torn down now becomes an orphan of the Md: one that the device is still at goes
    when that is done, one with derived handles after the last of them, and what the device refuses
    is tried again when the Md is closed.
    """
    cdef ucxm_memh_t *memh = <ucxm_memh_t *>thing
    cdef md_t *md = md_of(memh)
    cdef books_t *books = books_of(memh)
    cdef bint orphan = False
    cdef bint late = False
    if books.epoch != fork_epoch:
        return  # the parent's; nothing of it is freed here
    if load32(&memh.id.state) == UCXM_MEMH_CLOSED:
        memh_put(memh)
        return
    if revoke(memh, True, NULL, NULL) != UCXM_OK:
        spin_lock(&md.tree_lock)
        orphan = memh.id.state == UCXM_MEMH_LIVE or memh.id.state == UCXM_MEMH_REVOKING
        if orphan:
            store32(&books.closing, books.closing | ORPHAN)
            bump32(&md.orphans, 1)
            # The last one below it may have gone between the look above and this.
            late = (memh.id.state == UCXM_MEMH_LIVE and books.children == NULL and
                    load32(&books.pending) == 0)
            if late:
                memh_get(memh)
        spin_unlock(&md.tree_lock)
    if late:
        orphans_revoke(memh)
    elif not orphan:
        memh_put(memh)


cdef ucxm_memh_t *orphan_find(md_t *md, ucxm_memh_t *root) noexcept nogil:
    """One below it, or anywhere for NULL, that its user let go of and the device is at; with a
    reference, or NULL."""
    cdef ucxm_memh_t *found
    if load32(&md.orphans) == 0:
        return NULL
    spin_lock(&md.tree_lock)
    found = md.bases if root == NULL else books_of(root).children
    while found != NULL:
        if books_of(found).closing & ORPHAN and load32(&books_of(found).pending) != 0:
            memh_get(found)
            break
        if books_of(found).children != NULL:
            found = books_of(found).children
            continue
        while found != root and books_of(found).next == NULL:
            found = found.id.parent
        found = NULL if found == root else books_of(found).next
    spin_unlock(&md.tree_lock)
    return found


cdef bint orphan_wait(ucxm_memh_t *memh) noexcept nogil:
    """Is a handle below it ending that its user let go of?  Waits a slice for that one.  The handle
    may be closed or another process's."""
    cdef ucxm_memh_t *found
    if books_of(memh).epoch != fork_epoch or load32(&memh.id.state) == UCXM_MEMH_CLOSED:
        return False
    found = orphan_find(md_of(memh), memh)
    if found == NULL:
        return False
    revoke_settled(found, now_ns() + SLICE_NS)
    memh_put(found)
    return True


cdef ucxm_status_t dereg_check(ucxm_memh_t *memh, ucxm_error_t *error) noexcept nogil:
    """Can the domain promise that no key of this handle works after its dereg?"""
    cdef uint64_t rights = ucxm_memh_own(memh).rights
    cdef uint64_t needs = 0
    if memh.id.parent != NULL or load32(&memh.id.state) == UCXM_MEMH_CLOSED:
        return UCXM_OK
    if rights & (UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_GET):
        needs |= UCXM_MD_FLAG_INVALIDATE_RMA
    if rights & UCXM_MEM_ACCESS_REMOTE_ATOMIC:
        needs |= UCXM_MD_FLAG_INVALIDATE_AMO
    if needs & ~md_of(memh).attr.flags:
        return refuse(error, UCXM_ERR_UNSUPPORTED,
                      "this domain cannot promise that no key works afterwards")
    return UCXM_OK
