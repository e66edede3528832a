# SPDX-License-Identifier: BSD-3-Clause
# Making and destroying native keys.  key_lock is held throughout.

cdef void parked_done(ucxm_completion_t *self, ucxm_status_t status) noexcept nogil:
    pass

cdef ucxm_completion_t PARKED_DONE
PARKED_DONE.func = parked_done


cdef void parked_flush(md_t *md, ucxm_error_t *error) noexcept nogil:
    """Destroy what is parked; what resists stays parked."""
    cdef uint32_t i, left = 0
    cdef ucxm_status_t status
    for i in range(md.parked_count):
        md.counters.key_destroy += 1
        status = md.ops.key_destroy(md.priv, NULL, &md.parked[i], &PARKED_DONE, error)
        if status < 0:
            md.parked[left] = md.parked[i]
            left += 1
    md.parked_count = left


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
    parked_flush(md, &ignored)
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
        md.parked[md.parked_count] = fresh
        md.parked_count += 1
        md.counters.parked += 1
    else:
        error_text(error, "the device offers only key values that were revoked lately")
        status = UCXM_ERR_NO_RESOURCE
    parked_flush(md, &ignored)
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
    return UCXM_OK


cdef void key_gone(md_t *md, ucxm_key_slot_t *slot) noexcept nogil:
    quarantine_push(&md.quarantine, slot.value)
    memset(slot, 0, sizeof(slot[0]))
