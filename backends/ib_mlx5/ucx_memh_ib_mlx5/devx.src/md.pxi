# SPDX-License-Identifier: BSD-3-Clause
# Opening and closing the domain.

cdef void mlx5_close(void *priv) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    pool_clear(md)
    ib_md_clear(&md.ib)
    free(md)


cdef void mlx5_stat(void *priv, unsigned index, const char **name,
                    uint64_t *value) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef pool_t *pool = &md.pool
    cdef const char *names[8]
    cdef uint64_t *counts[8]
    cdef const char *size_names[3]
    cdef uint32_t *sizes[3]
    if index >= 11:
        ib_stat(&md.ib, index - 11, name, value)
        return
    if index >= 8:
        size_names = [b"pool_free", b"pool_used", b"pool_resting"]
        sizes = [&pool.free.count, &pool.used, &pool.resting.count]
        name[0] = size_names[index - 8]
        value[0] = ib_load32(sizes[index - 8])
        return
    names = [b"create_mkey", b"destroy_mkey", b"query_hca_cap", b"init_obj", b"bind_mw",
             b"local_inv", b"doorbells", b"control_qp"]
    counts = [&md.create_mkey, &md.destroy_mkey, &md.query_hca_cap, &md.init_obj, &pool.bind_mw,
              &pool.local_inv, &pool.doorbells, &pool.control.made]
    name[0] = names[index]
    value[0] = ib_load64(counts[index])


cdef ucxm_md_ops_t OPS
memset(&OPS, 0, sizeof(OPS))
OPS.struct_size = sizeof(OPS)
OPS.abi = UCXM_BACKEND_ABI
ib_md_ops(&OPS)
OPS.close = mlx5_close
OPS.mem_dereg = mlx5_mem_dereg
OPS.progress = mlx5_progress
OPS.event_arm = mlx5_event_arm
OPS.mkey_pack = mlx5_mkey_pack
OPS.mem_enforcement = mlx5_mem_enforcement
OPS.stat = mlx5_stat
OPS.explain = mlx5_explain

cdef ucxm_ep_ops_t EP_OPS
memset(&EP_OPS, 0, sizeof(EP_OPS))
ib_ep_ops(&EP_OPS)


cdef ucxm_status_t find_pdn(md_t *md, ucxm_error_t *error) noexcept nogil:
    """The number by which firmware knows the protection domain."""
    cdef mlx5dv_obj query
    cdef mlx5dv_pd pd
    cdef int failed
    memset(&query, 0, sizeof(query))
    memset(&pd, 0, sizeof(pd))
    query.pd.in_ = md.ib.pd
    query.pd.out = &pd
    ib_count(&md.init_obj, 1)
    failed = md.mlx5.init_obj(&query, MLX5DV_OBJ_PD)
    if failed:
        return ib_fail(error, UCXM_ERR_IO_ERROR, failed, "mlx5dv_init_obj failed (errno %d)",
                       failed)
    md.pdn = pd.pdn
    return UCXM_OK


cdef const char *umr_missing(const md_t *md) noexcept nogil:
    """What this device lacks; NULL: nothing."""
    if not md.can_derive:
        return b"the device makes no KLM keys"
    if md.caps.umr_indirect_mkey_disabled:
        return b"umr_indirect_mkey_disabled"
    if md.caps.umr_modify_atomic_disabled:
        # A BIND_MW always says what becomes of the atomic right.
        return b"umr_modify_atomic_disabled"
    return NULL


cdef void decide(md_t *md) noexcept nogil:
    """What the capabilities allow."""
    cdef bint indirect = md.caps.max_indirection >= 1
    # A list is a multiple of four entries.
    md.can_derive = indirect and md.caps.max_klm_list >= 4
    if md.caps.atomic_align == 0:
        md.ib.has_atomics = 0
    md.can_atomic = (md.ib.has_atomics and indirect and
                     not md.caps.umr_modify_atomic_disabled)
    if md.can_derive:
        md.derive_length = min(md.caps.max_klm_list, <uint64_t>1 << 32) // 4 * 4 * MLX5_ENTITY
    md.derive_never = 0 if md.can_atomic else UCXM_MEM_ACCESS_REMOTE_ATOMIC
    if md.umr_missing == NULL:  # nobody said that it is not to be used
        md.umr_missing = umr_missing(md)


cdef uint64_t capability_flags(const md_t *md) noexcept nogil:
    cdef uint64_t flags = 0
    if md.can_derive:
        flags |= UCXM_MD_FLAG_REG_DERIVED | UCXM_MD_FLAG_DERIVE_ENDPOINT
    if md.caps.fixed_buffer_size and md.caps.max_indirection >= 1:
        flags |= UCXM_MD_FLAG_INVALIDATE_RMA
        if md.can_atomic:
            flags |= UCXM_MD_FLAG_INVALIDATE_AMO | UCXM_MD_FLAG_INVALIDATE
    return flags


cdef ucxm_status_t md_setup(md_t *md, ucxm_verbs_t *verbs, ibv_context *context, ibv_pd *pd,
                            bint owns_context, const ib_config_t *config,
                            ucxm_error_t *error) noexcept nogil:
    """Fill a zeroed Md whose `mlx5` is set.  On failure the context is the caller's."""
    cdef ucxm_status_t status = ib_md_init(&md.ib, verbs, context, pd, owns_context, config, error)
    if status != UCXM_OK:
        return status
    md.page = <uint64_t>sysconf(_SC_PAGESIZE)
    status = query_caps(md, error)
    if status == UCXM_OK:
        status = find_pdn(md, error)
    if status == UCXM_OK:
        decide(md)
    else:
        md.ib.owns_context = 0
        ib_md_clear(&md.ib)
    return status


cdef object bind(md_t *md, uint32_t quarantine):
    cdef ucxm_md_attr_t attr
    cdef ucxm_md_ops_t ops = OPS
    md_attr_init(&attr, "ib_mlx5", md.ib.name.decode("utf-8", "replace"), 0)
    ib_md_attr(&md.ib, &attr)
    attr.flags |= capability_flags(md)
    attr.rkey_packed_size = PACKED_SIZE
    attr.rkey_raw_size = RAW_SIZE
    attr.quarantine = quarantine
    attr.software = md.software
    attr.placeholders = 1
    mlx5_mem_enforcement(md, NULL, &attr.enforcement)
    # An operation that no key can need is left out, as its flag is.
    if md.can_derive:
        ops.mem_derive = mlx5_mem_derive
    if attr.flags & (UCXM_MD_FLAG_REG_DERIVED | UCXM_MD_FLAG_INVALIDATE_RMA):
        ops.key_create = mlx5_key_create
        ops.key_destroy = mlx5_key_destroy
        ops.key_flush = mlx5_key_flush
    return md_bind(&ops, &EP_OPS, &attr, md, None)


def open_md(verbs_path, mlx5_path, md_name, *, bint software, int port, int gid_index,
            uint32_t queue_depth, uint64_t max_msg, uint32_t quarantine, size_t context, size_t pd,
            umr):
    """Open the device `md_name` of the two libraries; or stand on an open `context` and its `pd`,
    which are never closed here.  The rest are the options of that name."""
    cdef ucxm_verbs_t *verbs = NULL
    cdef ucxm_mlx5_t *mlx5 = NULL
    cdef ucxm_error_t error
    cdef ib_config_t config
    cdef ibv_context *opened = <ibv_context *>context
    cdef bytes name = md_name.encode()
    cdef const char *c_name = name
    cdef bint owns = context == 0
    cdef ucxm_status_t status = UCXM_OK
    cdef int failed = 0
    cdef md_t *md

    if (context == 0) != (pd == 0):
        raise InvalidParamError("context and pd go together", op="open_md", component="ib_mlx5")
    load(verbs_path, mlx5_path, &verbs, &mlx5)
    memset(&error, 0, sizeof(error))
    memset(&config, 0, sizeof(config))
    config.port = port
    config.gid_index = gid_index
    config.queue_depth = queue_depth
    config.max_msg = max_msg
    config.atomic_right = 1
    # Keys stand on the local key.  With window binding the kernel would pin for writing.
    config.mw_bind = 0
    if owns:
        with nogil:
            opened = open_context(verbs, mlx5, c_name, &failed)
        if opened == NULL:
            raise NoDeviceError(
                f"no mlx5 device {md_name!r}" if failed == ENODEV
                else f"{md_name} cannot be opened for DEVX",
                op="open_md", component="ib_mlx5", errno=failed)
    md = <md_t *>calloc(1, sizeof(md_t))
    if md != NULL:
        md.mlx5 = mlx5
        md.software = software
        # Not the tags of a process that was here before: firmware may give us its indices.
        md.tag = ib_random_psn() % TAGS
        if umr == "off":
            md.umr_missing = b'umr="off"'
        pool_init(md, quarantine)
        with nogil:
            status = md_setup(md, verbs, opened, <ibv_pd *>pd, owns, &config, &error)
    if md == NULL or status != UCXM_OK:
        if md != NULL:
            pool_clear(md)
        free(md)
        if owns:
            verbs.close_device(opened)
        if md == NULL:
            raise MemoryError
        raise error_from_status(
            status, op="open_md", component="ib_mlx5",
            detail=error.text.decode(errors="replace"), errno=error.sys_errno or None,
            syndrome=error.syndrome or None)
    try:
        return bind(md, quarantine)
    except BaseException:
        mlx5_close(md)
        raise
