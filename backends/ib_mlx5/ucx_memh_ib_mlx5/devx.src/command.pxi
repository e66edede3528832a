# SPDX-License-Identifier: BSD-3-Clause
# Firmware commands and what their refusals mean.

cdef ucxm_status_t refused(ucxm_error_t *error, const char *command, const uint8_t *out,
                           int sys_errno) noexcept nogil:
    """Firmware's refusal has a status and a syndrome in `out`; anything else is the kernel's."""
    cdef ucxm_status_t status = UCXM_ERR_IO_ERROR
    cdef uint8_t word
    if sys_errno != EREMOTEIO:
        if sys_errno == ENOMEM:
            status = UCXM_ERR_NO_MEMORY
        elif sys_errno == EAGAIN:
            status = UCXM_ERR_NO_RESOURCE
        elif sys_errno == EBUSY:
            status = UCXM_ERR_BUSY
        elif sys_errno in (EOPNOTSUPP, ENOSYS):
            status = UCXM_ERR_UNSUPPORTED
        elif sys_errno == ENODEV:
            status = UCXM_ERR_NO_DEVICE
        return ib_fail(error, status, sys_errno, "%s failed (errno %d)", command, sys_errno)
    word = <uint8_t>prm_out_status(out)
    if word == 0x02:                 # BAD_OP: no such command
        status = UCXM_ERR_UNSUPPORTED
    elif word == 0x06:               # RES_BUSY
        status = UCXM_ERR_BUSY
    elif word == 0x08:               # LIM_ERR
        status = UCXM_ERR_NO_MEMORY
    elif word == 0x0f:               # NO_RESOURCES
        status = UCXM_ERR_NO_RESOURCE
    ib_fail(error, status, sys_errno, "%s refused: %s (0x%02x), syndrome 0x%x", command,
            prm_status_name(word), <unsigned>word, <unsigned>prm_out_syndrome(out))
    if error != NULL:
        error.syndrome = <uint32_t>prm_out_syndrome(out)
    return status


cdef ucxm_status_t query_cap(md_t *md, unsigned type, uint8_t *out,
                             ucxm_error_t *error) noexcept nogil:
    """One QUERY_HCA_CAP; `out` has PRM_QUERY_HCA_CAP_OUT_SIZE bytes."""
    cdef uint8_t box[PRM_QUERY_HCA_CAP_IN_SIZE]
    cdef int failed
    memset(box, 0, sizeof(box))
    memset(out, 0, PRM_QUERY_HCA_CAP_OUT_SIZE)
    mlx5_query_cap_fill(box, type)
    ib_count(&md.query_hca_cap, 1)
    failed = md.mlx5.general_cmd(md.ib.context, box, sizeof(box), out, PRM_QUERY_HCA_CAP_OUT_SIZE)
    if failed:
        return refused(error, "QUERY_HCA_CAP", out, failed if failed > 0 else errno)
    return UCXM_OK


cdef ucxm_status_t query_caps(md_t *md, ucxm_error_t *error) noexcept nogil:
    """What keys this device can make."""
    cdef uint8_t out[PRM_QUERY_HCA_CAP_OUT_SIZE]
    cdef ucxm_status_t status = query_cap(md, PRM_CAP_GENERAL, out, error)
    if status != UCXM_OK:
        return status
    mlx5_caps_general(&md.caps, out)
    if md.caps.atomic:
        status = query_cap(md, PRM_CAP_ATOMIC, out, error)
        if status != UCXM_OK:
            return status
        mlx5_caps_atomic(&md.caps, out)
    return UCXM_OK


cdef ucxm_status_t create_mkey(md_t *md, const mlx5_mkey_t *mkey, ucxm_key_slot_t *slot,
                               ucxm_error_t *error) noexcept nogil:
    """One CREATE_MKEY."""
    cdef uint8_t small[MAILBOX_SIZE]
    cdef uint8_t out[PRM_CREATE_MKEY_OUT_SIZE]
    cdef size_t size = mlx5_create_mkey_size(mkey)
    cdef uint8_t *box = small
    cdef key_t *key = <key_t *>calloc(1, sizeof(key_t))
    cdef mlx5dv_devx_obj *made
    cdef int failed
    if size > sizeof(small):
        box = <uint8_t *>calloc(1, size)
    else:
        memset(small, 0, sizeof(small))
    if key == NULL or box == NULL:
        free(key)
        if box != small:
            free(box)
        return ib_fail(error, UCXM_ERR_NO_MEMORY, ENOMEM, "out of memory")
    memset(out, 0, sizeof(out))
    mlx5_create_mkey_fill(box, mkey)
    ib_count(&md.create_mkey, 1)
    made = md.mlx5.obj_create(md.ib.context, box, size, out, sizeof(out))
    failed = errno
    if box != small:
        free(box)
    if made == NULL:
        free(key)
        return refused(error, "CREATE_MKEY", out, failed)
    key.devx = made
    key.value = <uint32_t>(prm_out_mkey_index(out) << 8) | mkey.tag
    slot.object = key
    slot.value = key.value
    return UCXM_OK


cdef key_t *create_free_mkey(md_t *md, ucxm_error_t *error,
                             ucxm_status_t *status) noexcept nogil:
    """A mkey in the free state, as the vendor's library makes them for work requests to aim: it
    lets nobody through and stands on no registration."""
    cdef mlx5dv_mkey_init_attr attr
    cdef key_t *key = <key_t *>calloc(1, sizeof(key_t))
    if key == NULL:
        status[0] = ib_fail(error, UCXM_ERR_NO_MEMORY, ENOMEM, "out of memory")
        return NULL
    memset(&attr, 0, sizeof(attr))
    attr.pd = md.ib.pd
    attr.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT
    attr.max_entries = 1
    ib_count(&md.create_mkey, 1)
    key.mkey = md.mlx5.create_mkey(&attr)
    if key.mkey == NULL:
        status[0] = ib_fail(error, ib_errno_status(errno), errno,
                            "mlx5dv_create_mkey failed (errno %d)", errno)
        free(key)
        return NULL
    key.value = key.mkey.rkey
    status[0] = UCXM_OK
    return key


cdef ucxm_status_t destroy_mkey(md_t *md, key_t *key, ucxm_error_t *error) noexcept nogil:
    """One DESTROY_MKEY.  The kernel keeps the object, and firmware's answer to itself, if it is
    refused."""
    cdef int failed
    ib_count(&md.destroy_mkey, 1)
    if key.mkey != NULL:
        failed = md.mlx5.destroy_mkey(key.mkey)
    else:
        failed = md.mlx5.obj_destroy(key.devx)
    if failed == 0:
        return UCXM_OK
    if failed < 0:
        failed = errno
    return ib_fail(error, UCXM_ERR_BUSY if failed == EBUSY else UCXM_ERR_IO_ERROR, failed,
                   "DESTROY_MKEY of key 0x%x %s (errno %d)", key.value,
                   <const char *>b"refused by firmware" if failed == EREMOTEIO
                   else <const char *>b"failed", failed)
