# SPDX-License-Identifier: BSD-3-Clause
# The control queue pair's work: one request and its completion, or many LOCAL_INVs by one doorbell.
# The wire lock is held throughout.

cdef enum:
    POOL_DEPTH = 64      # LOCAL_INVs under way, and the most that one doorbell takes
    POLL_BATCH = 16
    INVALIDATE_SECONDS = 10  # what completes no sooner is given up


cdef void pool_wake(pool_t *pool) noexcept nogil:
    """Something has ended of which no completion queue tells; whoever sleeps on the descriptor must
    hear of it, too."""
    cdef uint64_t one = 1
    if pool.armed:
        pool.armed = 0
        write(pool.wake, &one, sizeof(one))  # it fails if there are 2 ** 64 - 1 wake-ups already


cdef void pool_finish(pool_t *pool, key_t *key, ucxm_status_t status) noexcept nogil:
    """Its end is known; progress() tells."""
    key.status = status
    pool_add(pool, &pool.finished, key)


cdef void pool_seen(ib_control_t *control, const ibv_wc *wc) noexcept nogil:
    """A completion that is good is so for all that was posted before, too.  Of what was posted
    before a bad one nothing is known."""
    cdef pool_t *pool = <pool_t *>control
    if wc.status != IBV_WC_SUCCESS:
        control.ready = 0
        return
    while pool.flying.head != NULL and pool.flying.head.wr <= wc.wr_id:
        pool_finish(pool, list_take(&pool.flying), UCXM_OK)


cdef void pool_drop(md_t *md) noexcept nogil:
    """End the queue pair.  What is under way on it is never taken for done and never repeated: its
    keys are destroyed, and what resists, its owner must try again."""
    cdef pool_t *pool = &md.pool
    cdef key_t *key
    ib_control_drop(&md.ib, &pool.control)
    while pool.flying.head != NULL:
        key = list_take(&pool.flying)
        key.state = KEY_LOST
        pool_finish(pool, key, destroy_mkey(md, key, NULL))
        pool_wake(pool)


cdef void pool_poll(md_t *md) noexcept nogil:
    """Take completions off the queue; one that is bad, or does not come, ends the queue pair."""
    cdef pool_t *pool = &md.pool
    cdef ibv_wc wc[POLL_BATCH]
    cdef int i
    cdef int count = POLL_BATCH
    if pool.control.qp == NULL:
        return
    while count == POLL_BATCH:
        count = ibv_poll_cq(pool.control.cq, POLL_BATCH, wc)
        for i in range(count):
            pool_seen(&pool.control, &wc[i])
    if count < 0 or pool.flying.head != NULL and ib_coarse_ns() > pool.deadline:
        pool.control.ready = 0
    if not pool.control.ready:
        pool_drop(md)


cdef int pool_up(md_t *md) noexcept nogil:
    """A queue pair in good health; an errno: there is none."""
    cdef int failed
    if md.pool.control.ready:
        return 0
    pool_poll(md)
    failed = ib_control_up(&md.ib, &md.pool.control)
    ib_store32(&md.pool.missing, <uint32_t>failed)
    return failed


cdef int pool_do(md_t *md, ibv_send_wr *wr, ibv_wc *wc) noexcept nogil:
    """Post one request over a queue pair that is up, and wait for it.  An errno, or `wc` tells; if
    it was not good the queue pair is gone, and with it the request."""
    cdef int failed
    ib_count(&md.pool.doorbells, 1)
    memset(wc, 0, sizeof(wc[0]))
    failed = ib_control_post(&md.ib, &md.pool.control, wr, wc)
    if failed == 0:
        pool_seen(&md.pool.control, wc)
    if failed or wc.status != IBV_WC_SUCCESS:
        pool_poll(md)
    return failed


cdef void pool_ask(pool_t *pool) noexcept nogil:
    """Have the next completion wake whoever sleeps.  Once for each sleep, and not for binds alone,
    whose completions their callers wait for."""
    if pool.armed and not pool.asked:
        pool.asked = 1
        if ibv_req_notify_cq(pool.control.cq, 0) != 0:
            pool.control.ready = 0


cdef void pool_ring(md_t *md, key_t *key, uint32_t count) noexcept nogil:
    """One doorbell for the last `count` of what flies, from `key` on."""
    cdef pool_t *pool = &md.pool
    cdef ibv_send_wr wrs[POOL_DEPTH]
    cdef ibv_send_wr *bad = NULL
    cdef uint32_t i
    memset(wrs, 0, count * sizeof(wrs[0]))
    for i in range(count):
        pool.control.last += 1
        key.wr = pool.control.last
        wrs[i].wr_id = key.wr
        wrs[i].opcode = IBV_WR_LOCAL_INV
        wrs[i].invalidate_rkey = key.value
        if i + 1 < count:
            wrs[i].next = &wrs[i + 1]
        key = key.next
    wrs[count - 1].send_flags = IBV_SEND_SIGNALED
    pool.deadline = ib_coarse_ns() + <uint64_t>INVALIDATE_SECONDS * 1000000000
    ib_count(&pool.local_inv, count)
    ib_count(&pool.doorbells, 1)
    if ibv_post_send(pool.control.qp, wrs, &bad) != 0:
        pool.control.ready = 0  # some may be done, and no completion will say so


cdef uint32_t pool_post(md_t *md) noexcept nogil:
    """Post what lies, as far as there is room; returns how many."""
    cdef pool_t *pool = &md.pool
    cdef key_t *first = NULL
    cdef key_t *key
    cdef uint32_t count = 0
    cdef bint up
    if ib_load32(&pool.pending.count) == 0:
        return 0
    up = pool_up(md) == 0
    while pool.flying.count < POOL_DEPTH:
        key = pool_take(pool, &pool.pending)
        if key == NULL:
            break
        list_add(&pool.flying, key)
        first = key if first == NULL else first
        count += 1
    if not up:
        pool_drop(md)
    elif count != 0:
        pool_ask(pool)
        if pool.control.ready:
            pool_ring(md, first, count)
        if not pool.control.ready:  # no completion can be relied on to have somebody look
            pool_poll(md)
    return count


cdef bint pool_lies(pool_t *pool) noexcept nogil:
    """Is there something to post?  By the lock, so that of two threads, one that leaves something
    and then finds the wire taken and one that lets go of the wire and then looks here, the second
    sees it."""
    cdef bint lies
    pthread_mutex_lock(&pool.lock)
    lies = pool.pending.head != NULL
    pthread_mutex_unlock(&pool.lock)
    return lies


cdef void pool_flush(md_t *md) noexcept nogil:
    """Post what lies.  If another thread has the wire, it does so when it lets go; if there is no
    room, who progresses the completion that makes some."""
    cdef uint32_t count = 1
    while count != 0 and pool_lies(&md.pool) and pthread_mutex_trylock(&md.pool.wire) == 0:
        count = pool_post(md)
        pthread_mutex_unlock(&md.pool.wire)


cdef void pool_release(md_t *md) noexcept nogil:
    """Let go of the wire."""
    pthread_mutex_unlock(&md.pool.wire)
    pool_flush(md)


cdef void pool_init(md_t *md, uint32_t quarantine) noexcept nogil:
    pthread_mutex_init(&md.pool.wire, NULL)
    pthread_mutex_init(&md.pool.lock, NULL)
    md.pool.control.depth = POOL_DEPTH + 1  # and a BIND_MW
    md.pool.control.events = 1
    md.pool.control.seen = pool_seen
    md.pool.wake = -1
    md.pool.quarantine = quarantine


cdef void pool_clear(md_t *md) noexcept nogil:
    cdef pool_t *pool = &md.pool
    cdef key_t *key
    ib_control_clear(&md.ib, &pool.control)
    pool_destroy_all(md, &pool.free)
    pool_destroy_all(md, &pool.resting)
    pool_destroy_all(md, &pool.stuck)
    key = list_take(&pool.stuck)
    while key != NULL:  # the device keeps it until its context is closed
        free(key)
        key = list_take(&pool.stuck)
    if pool.wake >= 0:
        close(pool.wake)
    pthread_mutex_destroy(&pool.wire)
    pthread_mutex_destroy(&pool.lock)
