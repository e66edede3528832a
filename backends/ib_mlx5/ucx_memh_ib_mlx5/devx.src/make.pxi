# SPDX-License-Identifier: BSD-3-Clause
# Making and destroying a key, one way or the other.

cdef const char *command_reason(const md_t *md, const ucxm_memh_own_t *own) noexcept nogil:
    """Why the key of a derived handle is made by command; NULL: work requests do it."""
    if md.umr_missing != NULL:
        return md.umr_missing
    if own.ep != NULL:
        return b"it is bound to a queue pair"
    if own.length > MLX5_ENTITY:
        return b"it is longer than the 2 GiB of one BIND_MW"
    return NULL


cdef ucxm_status_t create_placeholder(md_t *md, ucxm_key_slot_t *slot,
                                      ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status = UCXM_OK
    cdef key_t *key = create_free_mkey(md, error, &status)
    if key != NULL:
        slot.object = key
        slot.value = key.value
    return status


cdef ucxm_status_t mlx5_key_create(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                   ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef mlx5_mkey_t mkey
    cdef ucxm_status_t status
    if slot.kind == UCXM_KEY_PLACEHOLDER:
        return create_placeholder(md, slot, error)
    mkey_describe(md, ucxm_memh_own(memh), memh.inherited.lkey, slot.kind, &mkey)
    status = mkey_check(md, &mkey, error)
    if status != UCXM_OK:
        return status
    if slot.kind == UCXM_KEY_DERIVED and command_reason(md, ucxm_memh_own(memh)) == NULL:
        status = pool_key_create(md, memh, slot, error)
        if status != UCXM_ERR_UNSUPPORTED:
            return status
        # An adapter or a network may not let a queue pair talk to itself; a command needs none.
    mkey.tag = md.tag
    status = create_mkey(md, &mkey, slot, error)
    if (status == UCXM_ERR_NO_RESOURCE or status == UCXM_ERR_NO_MEMORY) and pool_shrink(md):
        status = create_mkey(md, &mkey, slot, error)
    if status == UCXM_OK:
        next_tag(md)
    return status


cdef ucxm_status_t mlx5_key_destroy(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                    ucxm_completion_t *comp,
                                    ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef key_t *key = <key_t *>slot.object
    cdef ucxm_status_t status
    if slot.kind == UCXM_KEY_DERIVED and key.mkey != NULL:
        return pool_key_destroy(md, memh, key, comp, error)
    status = destroy_mkey(md, key, error)
    if status == UCXM_OK:
        free(key)
    return status
