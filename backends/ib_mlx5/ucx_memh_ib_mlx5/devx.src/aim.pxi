# SPDX-License-Identifier: BSD-3-Clause
# Keys that work requests aim and end: what the core calls for them.

cdef ucxm_status_t aim(md_t *md, key_t *key, const ucxm_memh_t *memh, bint *again,
                       ucxm_error_t *error) noexcept nogil:
    """One BIND_MW.  Type 1 does not have the device check that the key is free, so we do."""
    cdef mlx5_mkey_t mkey
    cdef ibv_mw window
    cdef ibv_send_wr wr
    cdef ibv_wc wc
    cdef int failed
    if key.state != KEY_FREE:
        return ib_fail(error, UCXM_ERR_IO_ERROR, 0, "key 0x%x is in state %u, not free",
                       key.value, <unsigned>key.state)
    mkey_describe(md, ucxm_memh_own(memh), memh.inherited.lkey, UCXM_KEY_DERIVED, &mkey)
    memset(&window, 0, sizeof(window))
    memset(&wr, 0, sizeof(wr))
    window.context = md.ib.context
    window.pd = md.ib.pd
    window.type = IBV_MW_TYPE_1
    window.rkey = key.value
    wr.opcode = IBV_WR_BIND_MW
    wr.bind_mw.mw = &window
    wr.bind_mw.rkey = (key.value & ~<uint32_t>0xff) | key.tag
    wr.bind_mw.bind_info.mr = (<ib_reg_t *>memh.inherited.reg.priv).mr
    wr.bind_mw.bind_info.addr = mkey.start
    wr.bind_mw.bind_info.length = mkey.length
    wr.bind_mw.bind_info.mw_access_flags = mkey_access(&mkey)
    ib_count(&md.pool.bind_mw, 1)
    failed = pool_do(md, &wr, &wc)
    if failed == 0 and wc.status == IBV_WC_SUCCESS:
        key.state = KEY_AIMED
        key.value = wr.bind_mw.rkey
        key.tag = <uint8_t>((key.tag + 1) % TAGS)
        key.uses += 1
        return UCXM_OK
    key.state = KEY_LOST
    again[0] = failed != ETIMEDOUT
    if failed:
        return ib_fail(error, ib_errno_status(failed), failed,
                       "BIND_MW over the control queue pair failed (errno %d)", failed)
    ib_fail(error, UCXM_ERR_IO_ERROR, 0, "the device did not bind key 0x%x: %s (0x%02x), "
            "syndrome 0x%x", wr.bind_mw.rkey, md.ib.verbs.wc_status_str(wc.status),
            <unsigned>wc.status, <unsigned>wc.vendor_err)
    if error != NULL:
        error.syndrome = wc.vendor_err
    return UCXM_ERR_IO_ERROR


cdef ucxm_status_t pool_aim(md_t *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot, bint *again,
                            ucxm_error_t *error) noexcept nogil:
    """A key that failed is not trusted any more.  UNSUPPORTED: there is no queue pair."""
    cdef pool_t *pool = &md.pool
    cdef ucxm_status_t status
    cdef key_t *key
    if pool_up(md) != 0:
        return UCXM_ERR_UNSUPPORTED
    key = pool_get(md, error, &status)
    if key == NULL:
        return status
    status = aim(md, key, memh, again, error)
    if status == UCXM_OK:
        pthread_mutex_lock(&pool.lock)
        ib_store32(&pool.used, pool.used + 1)
        pthread_mutex_unlock(&pool.lock)
        slot.object = key
        slot.value = key.value
    elif key.state == KEY_LOST:
        pool_destroy(md, key)
    return status


cdef ucxm_status_t pool_key_create(md_t *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                   ucxm_error_t *error) noexcept nogil:
    """A bind that fails is tried once more, with another key over a new queue pair.  UNSUPPORTED:
    for want of one it was not tried."""
    cdef pool_t *pool = &md.pool
    cdef ucxm_error_t reason
    cdef ucxm_status_t status
    cdef bint again = False
    memset(&reason, 0, sizeof(reason))
    pthread_mutex_lock(&pool.wire)
    pool_unstick(md)
    status = pool_aim(md, memh, slot, &again, &reason)
    if status != UCXM_OK and again:
        memset(&reason, 0, sizeof(reason))
        status = pool_aim(md, memh, slot, &again, &reason)
    pool_release(md)
    if status != UCXM_OK and error != NULL:
        error[0] = reason
    return status


cdef ucxm_status_t pool_gone(md_t *md, key_t *key, ucxm_error_t *error) noexcept nogil:
    """Destroy one whose LOCAL_INV, or bind, nobody saw done."""
    cdef ucxm_status_t status = destroy_mkey(md, key, error)
    if status == UCXM_OK:
        pthread_mutex_lock(&md.pool.lock)
        ib_store32(&md.pool.used, md.pool.used - 1)
        pthread_mutex_unlock(&md.pool.lock)
        free(key)
    return status


cdef ucxm_status_t pool_end(md_t *md, key_t *key, ucxm_error_t *error) noexcept nogil:
    """At once, of one that was never handed out: the core has its value in quarantine, and most
    likely others of its index.  So it rests, as if its tags were used up."""
    cdef pool_t *pool = &md.pool
    cdef bint ended = False
    cdef ibv_send_wr wr
    cdef ibv_wc wc
    memset(&wr, 0, sizeof(wr))
    wr.opcode = IBV_WR_LOCAL_INV
    wr.invalidate_rkey = key.value
    key.state = KEY_LOST
    pthread_mutex_lock(&pool.wire)
    if pool_up(md) == 0:
        ib_count(&pool.local_inv, 1)
        ended = pool_do(md, &wr, &wc) == 0 and wc.status == IBV_WC_SUCCESS
    pool_release(md)
    if not ended:
        return pool_gone(md, key, error)
    pthread_mutex_lock(&pool.lock)
    key.uses = TAGS
    pool_put(pool, key)
    pthread_mutex_unlock(&pool.lock)
    return UCXM_OK


cdef ucxm_status_t pool_key_destroy(md_t *md, const ucxm_memh_t *memh, key_t *key,
                                    ucxm_completion_t *comp, ucxm_error_t *error) noexcept nogil:
    """Leave the LOCAL_INV lying until key_flush or progress posts it with others."""
    cdef pool_t *pool = &md.pool
    if key.state == KEY_LOST:
        return pool_gone(md, key, error)
    if key.state != KEY_AIMED:
        return ib_fail(error, UCXM_ERR_IO_ERROR, 0, "key 0x%x is in state %u, not aimed",
                       key.value, <unsigned>key.state)
    if memh == NULL or comp == NULL:
        return pool_end(md, key, error)
    key.comp = comp
    key.state = KEY_ENDING
    pthread_mutex_lock(&pool.lock)
    list_add(&pool.pending, key)
    ib_store32(&pool.busy, pool.busy + 1)
    pthread_mutex_unlock(&pool.lock)
    return UCXM_INPROGRESS


cdef ucxm_status_t mlx5_mem_dereg(void *priv, ucxm_registration_t *reg,
                                  ucxm_error_t *error) noexcept nogil:
    """A bind that failed may have been executed all the same, and its key, which the core does not
    know, stand on the registration until it is destroyed."""
    cdef md_t *md = <md_t *>priv
    if ib_load32(&md.pool.stuck.count) != 0:
        pool_destroy_all(md, &md.pool.stuck)
    return ib_mem_dereg(priv, reg, error)


cdef void mlx5_key_flush(void *priv) noexcept nogil:
    pool_flush(<md_t *>priv)


cdef unsigned pool_tell(md_t *md) noexcept nogil:
    """Run the completions of what has ended, with no lock held; they may call anything of ours."""
    cdef pool_t *pool = &md.pool
    cdef ucxm_completion_t *comp
    cdef ucxm_status_t status
    cdef unsigned count = 0
    cdef bint gone
    cdef key_t *key
    while ib_load32(&pool.finished.count) != 0:
        pthread_mutex_lock(&pool.lock)
        key = list_take(&pool.finished)
        if key == NULL:
            pthread_mutex_unlock(&pool.lock)
            break
        comp = key.comp
        status = key.status
        gone = status == UCXM_OK and key.state == KEY_LOST
        ib_store32(&pool.busy, pool.busy - 1)
        pool.ended += status == UCXM_OK
        if gone:
            ib_store32(&pool.used, pool.used - 1)
        elif status == UCXM_OK:
            pool_put(pool, key)
        pthread_mutex_unlock(&pool.lock)
        if gone:
            free(key)
        comp.func(comp, status)
        count += 1
        pthread_mutex_lock(&pool.lock)
        pool.told += status == UCXM_OK
        pthread_mutex_unlock(&pool.lock)
    return count


cdef unsigned mlx5_progress(void *priv) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef unsigned count = 0
    if ib_load32(&md.pool.busy) != 0:
        if pthread_mutex_trylock(&md.pool.wire) == 0:
            pool_post(md)
            pool_poll(md)
            pool_release(md)
        count = pool_tell(md)
    return count + ib_progress(priv)


cdef ucxm_status_t pool_arm(md_t *md, ucxm_error_t *error) noexcept nogil:
    """What a later call leaves to be progressed must wake, too, so this is not only about what is
    under way.  The wire lock is held."""
    cdef pool_t *pool = &md.pool
    cdef uint64_t count
    if pool.wake < 0:
        pool.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if pool.wake < 0 or ib_event_add(&md.ib, pool.wake) != 0:
            ib_fail(error, UCXM_ERR_IO_ERROR, errno, "no descriptor to wake by (errno %d)", errno)
            if pool.wake >= 0:
                close(pool.wake)
            pool.wake = -1
            return UCXM_ERR_IO_ERROR
    read(pool.wake, &count, sizeof(count))
    pool.armed = 1
    pool.asked = 0
    if pool.flying.head != NULL:
        pool_ask(pool)
        pool_poll(md)  # what came before the request makes no event
    return UCXM_ERR_BUSY if ib_load32(&pool.finished.count) != 0 else UCXM_OK


cdef ucxm_status_t mlx5_event_arm(void *priv, ucxm_error_t *error) noexcept nogil:
    """Its queue shares the Md's channel, whose events the shared part reads first."""
    cdef md_t *md = <md_t *>priv
    cdef ucxm_status_t status = ib_event_arm(priv, error)
    if status != UCXM_OK or md.umr_missing != NULL:
        return status
    if pthread_mutex_trylock(&md.pool.wire) != 0:
        return UCXM_ERR_BUSY
    status = pool_arm(md, error)
    pool_release(md)
    return status
