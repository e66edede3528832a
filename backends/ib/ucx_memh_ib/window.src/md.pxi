# SPDX-License-Identifier: BSD-3-Clause
# Opening and closing the domain.

cdef void window_close(void *priv) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    stuck_free(md)
    ib_control_clear(&md.ib, &md.control)
    pthread_mutex_destroy(&md.lock)
    ib_md_clear(&md.ib)
    free(md)


cdef void window_stat(void *priv, unsigned index, const char **name,
                      uint64_t *value) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef const char *names[5]
    cdef uint64_t *counts[5]
    if index >= 5:
        ib_stat(&md.ib, index - 5, name, value)
        return
    names = [b"alloc_mw", b"dealloc_mw", b"bind_mw", b"local_inv", b"control_qp"]
    counts = [&md.alloc_mw, &md.dealloc_mw, &md.bind_mw, &md.local_inv, &md.control.made]
    name[0] = names[index]
    value[0] = ib_load64(counts[index])


cdef ucxm_md_ops_t OPS
memset(&OPS, 0, sizeof(OPS))
OPS.struct_size = sizeof(OPS)
OPS.abi = UCXM_BACKEND_ABI
ib_md_ops(&OPS)
OPS.close = window_close
OPS.mem_reg = window_mem_reg
OPS.mkey_pack = window_mkey_pack
OPS.mem_enforcement = window_mem_enforcement
OPS.stat = window_stat
OPS.explain = window_explain

cdef ucxm_ep_ops_t EP_OPS
memset(&EP_OPS, 0, sizeof(EP_OPS))
ib_ep_ops(&EP_OPS)


cdef ucxm_status_t md_setup(md_t *md, ucxm_verbs_t *verbs, ibv_context *context, ibv_pd *pd,
                            bint owns_context, const ib_config_t *config, bint check,
                            ucxm_error_t *error) noexcept nogil:
    """Fill a zeroed Md.  On failure the context is the caller's."""
    cdef ibv_device_attr device
    cdef ucxm_status_t status
    memset(&device, 0, sizeof(device))
    if verbs.query_device(context, &device) == 0:
        md.caps = device.device_cap_flags
    status = ib_md_init(&md.ib, verbs, context, pd, owns_context, config, error)
    if status != UCXM_OK:
        return status
    md.control.depth = CONTROL_DEPTH
    md.ib.config.ask_state = 1
    md.ib.config.renew = 1
    if md.caps & IBV_DEVICE_MEM_WINDOW == 0:
        md.ib.config.mw_bind = 0
        return UCXM_OK
    if check:
        self_check(md)
    else:
        no_check(md)
    md.ib.config.atomic_right = md.check.atomic_right
    if not md.check.binds:
        md.ib.config.mw_bind = 0
    return UCXM_OK


cdef object bind(md_t *md, uint32_t quarantine):
    cdef ucxm_md_attr_t attr
    cdef ucxm_md_ops_t ops = OPS
    md_attr_init(&attr, "ib", md.ib.name.decode("utf-8", "replace"), 0)
    ib_md_attr(&md.ib, &attr)
    attr.rkey_packed_size = PACKED_SIZE
    attr.rkey_raw_size = RAW_SIZE
    attr.quarantine = quarantine
    attr.software = md.software
    window_mem_enforcement(md, NULL, &attr.enforcement)
    # Without windows these are the core's: one refusal for all backends.
    if has_windows(md):
        attr.flags |= UCXM_MD_FLAG_REG_DERIVED
        ops.mem_derive = window_mem_derive
        ops.key_create = window_key_create
        ops.key_destroy = window_key_destroy
    if has_bound_windows(md):
        attr.flags |= UCXM_MD_FLAG_DERIVE_ENDPOINT
    return md_bind(&ops, &EP_OPS, &attr, md, None)


cdef ibv_context *open_context(ucxm_verbs_t *verbs, const char *name,
                               int *sys_errno) noexcept nogil:
    """The device of that name, opened; NULL with ENODEV: there is none."""
    cdef ibv_context *context = NULL
    cdef int i, count = 0
    cdef ibv_device **found = verbs.get_device_list(&count)
    sys_errno[0] = ENODEV
    if found == NULL:
        return NULL
    for i in range(count):
        if strcmp(verbs.get_device_name(found[i]), name) == 0:
            context = verbs.open_device(found[i])
            sys_errno[0] = errno
            break
    verbs.free_device_list(found)
    return context


def open_md(library, md_name, *, bint software, int port, int gid_index, uint32_t queue_depth,
            uint64_t max_msg, uint32_t quarantine, size_t context, size_t pd, bint self_check):
    """Open the device `md_name` of the libibverbs `library`; or stand on an open `context` and its
    `pd`, which are never closed here.  The rest are the options of that name."""
    cdef ucxm_verbs_t *verbs
    cdef ucxm_error_t error
    cdef ib_config_t config
    cdef ibv_context *opened = <ibv_context *>context
    cdef bytes path = library.encode()
    cdef bytes name = md_name.encode()
    cdef const char *c_path = path
    cdef const char *c_name = name
    cdef bint owns = context == 0
    cdef ucxm_status_t status = UCXM_OK
    cdef int failed = 0
    cdef md_t *md

    if (context == 0) != (pd == 0):
        raise InvalidParamError("context and pd go together", op="open_md", component="ib")
    memset(&error, 0, sizeof(error))
    verbs = verbs_table(c_path, &error)
    if verbs == NULL:  # `error` has room for its beginning only
        raise NoDeviceError(library_status(library)[0], op="open_md", component="ib")
    memset(&config, 0, sizeof(config))
    config.port = port
    config.gid_index = gid_index
    config.queue_depth = queue_depth
    config.max_msg = max_msg
    config.mw_bind = IB_MW_BIND_ANY
    if owns:
        with nogil:
            opened = open_context(verbs, c_name, &failed)
        if opened == NULL:
            raise NoDeviceError(
                f"no RDMA device {md_name!r}" if failed == ENODEV
                else f"{md_name} cannot be opened",
                op="open_md", component="ib", errno=failed)
    md = <md_t *>calloc(1, sizeof(md_t))
    if md != NULL:
        md.software = software
        pthread_mutex_init(&md.lock, NULL)
        with nogil:
            status = md_setup(md, verbs, opened, <ibv_pd *>pd, owns, &config, self_check, &error)
    if md == NULL or status != UCXM_OK:
        free(md)
        if owns:
            verbs.close_device(opened)
        if md == NULL:
            raise MemoryError
        raise error_from_status(
            status, op="open_md", component="ib", detail=error.text.decode(errors="replace"),
            errno=error.sys_errno or None, syndrome=error.syndrome or None)
    try:
        return bind(md, quarantine)
    except BaseException:
        window_close(md)
        raise
