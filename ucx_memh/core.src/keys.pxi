# SPDX-License-Identifier: BSD-3-Clause
# Making and destroying native keys.  key_lock is held throughout.

cdef enum:
    PARKED_NONE = 0
    PARKED_HELD = 1
    PARKED_DYING = 2   # the device is destroying it

cdef enum:
    SAME_INDEX = 4     # values in quarantine, one after the other, before an index is given up


cdef void parked_done(ucxm_completion_t *self, ucxm_status_t status) noexcept nogil:
    cdef parked_t *parked = <parked_t *>self
    cdef md_t *md = parked.md
    pthread_mutex_lock(&md.key_lock)
    parked.state = PARKED_HELD if status != UCXM_OK else PARKED_NONE
    if status == UCXM_OK:
        bump32(&md.parked_count, <uint32_t>-1)
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
    bump32(&md.parked_count, 1)
    bump64(&md.counters.parked, 1)


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
            bump64(&md.counters.key_destroy, 1)
            status = md.ops.key_destroy(md.priv, NULL, &parked.slot, &parked.done, error)
        if status == UCXM_OK:
            parked.state = PARKED_NONE
            bump32(&md.parked_count, <uint32_t>-1)
        else:
            if status == UCXM_INPROGRESS:
                parked.state = PARKED_DYING
            if left >= 0:
                left = status
    return left


cdef void placeholder_done(ucxm_completion_t *self, ucxm_status_t status) noexcept nogil:
    cdef parked_t *placeholder = <parked_t *>self
    cdef md_t *md = placeholder.md
    pthread_mutex_lock(&md.key_lock)
    placeholder.state = PARKED_HELD if status != UCXM_OK else PARKED_NONE
    pthread_mutex_unlock(&md.key_lock)


cdef ucxm_status_t placeholder_drop(md_t *md, ucxm_error_t *error) noexcept nogil:
    """Destroy the oldest one."""
    cdef placeholders_t *all = &md.placeholders
    cdef parked_t *oldest = &all.ring[all.oldest]
    cdef ucxm_status_t status
    if oldest.state == PARKED_DYING:
        return UCXM_INPROGRESS
    if oldest.state == PARKED_HELD:
        bump64(&md.counters.key_destroy, 1)
        status = md.ops.key_destroy(md.priv, NULL, &oldest.slot, &oldest.done, error)
        if status != UCXM_OK:
            oldest.state = PARKED_DYING if status == UCXM_INPROGRESS else PARKED_HELD
            return status
    oldest.state = PARKED_NONE
    all.oldest = (all.oldest + 1) % all.size
    bump32(&all.count, <uint32_t>-1)
    return UCXM_OK


cdef ucxm_status_t placeholders_flush(md_t *md, ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status = UCXM_OK
    while md.placeholders.count != 0 and status == UCXM_OK:
        status = placeholder_drop(md, error)
    return status


cdef void placeholders_expire(md_t *md, ucxm_error_t *error) noexcept nogil:
    """Give up those of whose index no value is in quarantine any more: all were revoked before
    the placeholder came, and none since."""
    cdef placeholders_t *all = &md.placeholders
    while all.count != 0 and (
            md.quarantine.pushed - all.ring[all.oldest].born >= md.quarantine.size):
        if placeholder_drop(md, error) != UCXM_OK:
            break


cdef ucxm_status_t placeholder_make(md_t *md, ucxm_error_t *error) noexcept nogil:
    """Keep an index busy whose key has just gone: a device that offers the lowest index, or the
    last one freed, would offer this one for ever."""
    cdef placeholders_t *all = &md.placeholders
    cdef parked_t *placeholder
    cdef ucxm_status_t status
    if all.ring == NULL:
        # An index has some 256 values, and by chance only half of them are used up when several
        # in a row are found to be: twice as many as should ever be needed.
        all.size = md.quarantine.size // 64 + PARKED_MAX
        all.ring = <parked_t *>alloc_zeroed(all.size * sizeof(parked_t))
        if all.ring == NULL:
            return UCXM_ERR_NO_MEMORY
    if all.count == all.size:
        status = placeholder_drop(md, error)
        if status != UCXM_OK:
            return status
    placeholder = &all.ring[(all.oldest + all.count) % all.size]
    memset(placeholder, 0, sizeof(placeholder[0]))
    placeholder.done.func = placeholder_done
    placeholder.md = md
    placeholder.born = md.quarantine.pushed
    placeholder.slot.kind = UCXM_KEY_PLACEHOLDER
    bump64(&md.counters.key_create, 1)
    status = md.ops.key_create(md.priv, NULL, &placeholder.slot, error)
    if status == UCXM_OK:
        placeholder.state = PARKED_HELD
        bump32(&all.count, 1)
    return status


cdef void key_refuse(md_t *md, ucxm_memh_t *memh, ucxm_key_slot_t *slot, bint used_up,
                     ucxm_error_t *error) noexcept nogil:
    """See to it that the device does not offer this value at once again, nor, if it is used up,
    its index."""
    parked_put(md, memh, slot)
    if md.attr.placeholders and parked_flush(md, NULL, error) == UCXM_OK and used_up:
        placeholder_make(md, error)


cdef ucxm_status_t key_make(md_t *md, ucxm_memh_t *memh, ucxm_key_slot_t *slot, uint8_t kind,
                            ucxm_error_t *error) noexcept nogil:
    """Fill the slot with a key whose value was not destroyed lately.

    For a value in quarantine another one is asked for.  The next may be of the same index; when
    SAME_INDEX of them were in quarantine, a placeholder takes it for as long as any of its values
    are, PARKED_MAX times at most.  Where the device has no placeholders, the key itself is parked
    until this call ends.
    """
    cdef ucxm_key_slot_t fresh
    cdef ucxm_error_t ignored
    cdef int tries
    cdef ucxm_status_t status = quarantine_prepare(&md.quarantine)
    if status != UCXM_OK:
        return status
    error_clear(&ignored)
    parked_flush(md, NULL, &ignored)
    placeholders_expire(md, &ignored)
    for tries in range(1, PARKED_MAX * SAME_INDEX + 1):
        if md.parked_count == PARKED_MAX:
            break
        memset(&fresh, 0, sizeof(fresh))
        fresh.kind = kind
        bump64(&md.counters.key_create, 1)
        status = md.ops.key_create(md.priv, memh, &fresh, error)
        if status != UCXM_OK:
            parked_flush(md, NULL, &ignored)
            return status
        if not quarantine_has(&md.quarantine, fresh.value):
            fresh.live = 1
            slot[0] = fresh
            parked_flush(md, NULL, &ignored)
            return UCXM_OK
        key_refuse(md, memh, &fresh, tries % SAME_INDEX == 0, &ignored)
    parked_flush(md, NULL, &ignored)
    error_text(error, "the device offers only key values that were revoked lately")
    return UCXM_ERR_NO_RESOURCE


cdef ucxm_status_t keys_destroy(md_t *md, ucxm_memh_t *memh,
                                ucxm_error_t *error) noexcept nogil:
    """Destroy the handle's own keys, one after the other.

    What is gone stays gone: after a failure the next call goes on where this one stopped.
    INPROGRESS: books.pending says which slot the device is at.
    """
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef books_t *books = books_of(memh)
    cdef ucxm_status_t status
    cdef uint32_t i
    for i in range(UCXM_SLOTS):
        if not own.slot[i].live:
            continue
        bump64(&md.counters.key_destroy, 1)
        status = md.ops.key_destroy(md.priv, memh, &own.slot[i], &books.device_done, error)
        if status == UCXM_INPROGRESS:
            store32(&books.pending, i + 1)
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
