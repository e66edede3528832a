# SPDX-License-Identifier: BSD-3-Clause
# The embedder's calls for many items at once.  Each item stands alone: a failure stops none.

cdef struct tally_t:
    ucxm_status_t first      # that was not OK
    ucxm_status_t *each      # or NULL


cdef inline tally_t tally_begin(ucxm_status_t *each) noexcept nogil:
    cdef tally_t all
    all.first = UCXM_OK
    all.each = each
    return all


cdef void tally(tally_t *all, size_t i, ucxm_status_t status) noexcept nogil:
    if all.each != NULL:
        all.each[i] = status
    if all.first == UCXM_OK:
        all.first = status


cdef ucxm_status_t ucxm_mem_reg_many(ucxm_md_t *md, const ucxm_reg_params_t *params, size_t count,
                                     ucxm_memh_t **memhs, ucxm_status_t *status) noexcept nogil:
    cdef const ucxm_reg_params_t *one
    cdef tally_t all = tally_begin(status)
    cdef size_t i
    for i in range(count):
        # The caller's structures may be longer than ours: they lie as far apart as the first says.
        one = <const ucxm_reg_params_t *>(<const char *>params + i * params.struct_size)
        tally(&all, i, ucxm_mem_reg(md, one, &memhs[i], NULL))
    return all.first


cdef ucxm_status_t ucxm_mem_derive_many(ucxm_memh_t *parent, const uint64_t *offsets,
                                        const uint64_t *lengths, size_t count, uint64_t rights,
                                        ucxm_ep_t *ep, ucxm_memh_t **memhs,
                                        ucxm_status_t *status) noexcept nogil:
    cdef tally_t all = tally_begin(status)
    cdef size_t i
    for i in range(count):
        tally(&all, i, ucxm_mem_derive(parent, offsets[i], lengths[i], rights, ep, &memhs[i],
                                       NULL))
    return all.first


cdef ucxm_status_t ucxm_mkey_pack_many(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                       void *buffer, size_t stride, size_t *lengths,
                                       ucxm_status_t *status) noexcept nogil:
    cdef tally_t all = tally_begin(status)
    cdef ucxm_status_t one
    cdef size_t i
    for i in range(count):
        lengths[i] = stride
        one = UCXM_ERR_INVALID_PARAM if memhs[i] == NULL else ucxm_mkey_pack(
            memhs[i], flags, <char *>buffer + i * stride, &lengths[i], NULL)
        if one != UCXM_OK:
            lengths[i] = 0
        tally(&all, i, one)
    return all.first


cdef ucxm_status_t revoke_many(ucxm_memh_t *const *memhs, size_t count, bint closing,
                               ucxm_status_t *status) noexcept nogil:
    cdef ucxm_status_t each[BATCH]
    cdef tally_t all = tally_begin(status)
    cdef size_t i, started
    cdef size_t done = 0
    while done < count:
        started = batch_start(memhs + done, count - done, closing, each)
        batch_settle(memhs + done, started, each, UINT64_MAX)
        for i in range(started):
            tally(&all, done + i, each[i])
        done += started
    return all.first


cdef ucxm_status_t ucxm_mem_invalidate_many(ucxm_memh_t *const *memhs, size_t count,
                                            uint32_t flags,
                                            ucxm_status_t *status) noexcept nogil:
    cdef tally_t all = tally_begin(status)
    cdef size_t i
    if flags == 0:
        return revoke_many(memhs, count, False, status)
    for i in range(count):
        tally(&all, i, UCXM_ERR_INVALID_PARAM if memhs[i] == NULL
              else ucxm_mem_invalidate(memhs[i], flags, NULL, NULL))
    return all.first


cdef ucxm_status_t ucxm_mem_dereg_many(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                       ucxm_status_t *status) noexcept nogil:
    cdef tally_t all = tally_begin(status)
    cdef size_t i
    if flags == 0:
        return revoke_many(memhs, count, True, status)
    for i in range(count):
        tally(&all, i, UCXM_ERR_INVALID_PARAM if memhs[i] == NULL
              else ucxm_mem_dereg(memhs[i], flags, NULL, NULL))
    return all.first
