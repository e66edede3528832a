# SPDX-License-Identifier: BSD-3-Clause
# Making and destroying native keys.  key_lock is held throughout.

cdef enum:
    PARKED_NONE = 0
    PARKED_HELD = 1
    PARKED_DYING = 2   # the device is destroying it


cdef void parked_done(ucxm_completion_t *self, ucxm_status_t status) noexcept nogil:
    cdef parked_t *parked = <parked_t *>self
    cdef md_t *md = parked.md
    pthread_mutex_lock(&md.key_lock)
    parked.state = PARKED_HELD if status != UCXM_OK else PARKED_NONE
    md.parked_count -= status == UCXM_OK
    pthread_mutex_unlock(&md.key_lock)


cdef void parked_put(md_t *md, ucxm_memh_t *memh, const ucxm_key_slot_t *slot) noexcept nogil:
    """Park a key; there is a place."""
    cdef uint32_t i = 0
    while md.parked[i].state != PARKED_NONE:
        i += 1
    md.parked[i].done.func = parked_done
    md.parked[i].md = md
    md.parked[i].reg = memh.inherited.reg
    md.parked[i].slot = slot[0]
    md.parked[i].state = PARKED_HELD
    md.parked_count += 1
    md.counters.parked += 1


cdef ucxm_status_t parked_flush(md_t *md, const ucxm_registration_t *reg,
                                ucxm_error_t *error) noexcept nogil:
    """Destroy what is parked; what resists stays.  OK: nothing is left (on `reg`, if not NULL)."""
    cdef uint32_t i
    cdef ucxm_status_t status
    cdef ucxm_status_t left = UCXM_OK
    cdef parked_t *parked
    if md.parked_count == 0:
        return UCXM_OK
    for i in range(PARKED_MAX):
        parked = &md.parked[i]
        if parked.state == PARKED_NONE or reg != NULL and parked.reg != reg:
            continue
        status = UCXM_INPROGRESS
        if parked.state == PARKED_HELD:
            md.counters.key_destroy += 1
            status = md.ops.key_destroy(md.priv, NULL, &parked.slot, &parked.done, error)
        if status == UCXM_OK:
            parked.state = PARKED_NONE
            md.parked_count -= 1
        else:
            if status == UCXM_INPROGRESS:
                parked.state = PARKED_DYING
            if left >= 0:
                left = status
    return left


cdef ucxm_status_t key_make(md_t *md, ucxm_memh_t *memh, ucxm_key_slot_t *slot, uint8_t kind,
                            ucxm_error_t *error) noexcept nogil:
    """Fill the slot with a key whose value was not destroyed lately.

    A value in quarantine is parked, so that firmware cannot offer it again, until a good one has
    come or PARKED_MAX have been refused.
    """
    cdef ucxm_key_slot_t fresh
    cdef ucxm_error_t ignored
    cdef ucxm_status_t status = quarantine_prepare(&md.quarantine)
    if status != UCXM_OK:
        return status
    memset(&ignored, 0, sizeof(ignored))
    parked_flush(md, NULL, &ignored)
    while md.parked_count < PARKED_MAX:
        memset(&fresh, 0, sizeof(fresh))
        fresh.kind = kind
        md.counters.key_create += 1
        status = md.ops.key_create(md.priv, memh, &fresh, error)
        if status != UCXM_OK:
            break
        if not quarantine_has(&md.quarantine, fresh.value):
            fresh.live = 1
            slot[0] = fresh
            break
        parked_put(md, memh, &fresh)
    else:
        error_text(error, "the device offers only key values that were revoked lately")
        status = UCXM_ERR_NO_RESOURCE
    parked_flush(md, NULL, &ignored)
    return status


cdef ucxm_status_t keys_destroy(md_t *md, ucxm_memh_t *memh,
                                ucxm_error_t *error) noexcept nogil:
    """Destroy the handle's own keys, one after the other.

    What is gone stays gone: after a failure the next call goes on where this one stopped.
    INPROGRESS: own.pending says which slot the device is at.
    """
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef ucxm_status_t status
    cdef uint32_t i
    for i in range(UCXM_SLOTS):
        if not own.slot[i].live:
            continue
        md.counters.key_destroy += 1
        status = md.ops.key_destroy(md.priv, memh, &own.slot[i], &own.device_done, error)
        if status == UCXM_INPROGRESS:
            own.pending = i + 1
        if status != UCXM_OK:
            return status
        key_gone(md, &own.slot[i])
    if memh.id.parent != NULL:
        return UCXM_OK
    # The registration goes next, and none of its keys may be left: no parked one either.
    status = parked_flush(md, memh.inherited.reg, error)
    if status == UCXM_INPROGRESS:
        error_text(error, "a key that was never handed out is being destroyed: try again")
        status = UCXM_ERR_BUSY
    return status


cdef void key_gone(md_t *md, ucxm_key_slot_t *slot) noexcept nogil:
    quarantine_push(&md.quarantine, slot.value)
    memset(slot, 0, sizeof(slot[0]))
