# SPDX-License-Identifier: BSD-3-Clause
# The embedder's calls (memh.h): what they are given is checked here, and handed on.

cdef enum:
    SETTINGS_MAX = 64


cdef ucxm_status_t answer(const void *source, size_t size, void *out,
                          size_t out_size) noexcept nogil:
    """Fill the caller's structure as far as he knows it."""
    if out_size < 2 * sizeof(size_t):
        return UCXM_ERR_INVALID_PARAM
    memcpy(<char *>out + sizeof(size_t), <const char *>source + sizeof(size_t),
           min(size, out_size) - sizeof(size_t))
    return UCXM_OK


cdef ucxm_status_t answer_bytes(const void *source, size_t size, void *buffer, size_t *length,
                                ucxm_error_t *error) noexcept nogil:
    """Size first, then the bytes."""
    cdef size_t room = length[0]
    length[0] = size
    if buffer == NULL:
        return UCXM_OK
    if room < size:
        return refuse(error, UCXM_ERR_BUFFER_TOO_SMALL, "the buffer is too short")
    memcpy(buffer, source, size)
    return UCXM_OK


cdef const char *ucxm_status_name(ucxm_status_t status) noexcept nogil:
    return status_text(status)


# ---- memory domains ----

_opener = None


def set_opener(opener):
    """What the C call md_open asks: opener(name, {setting: text}) -> Md.

    Discovery stands above the core, which therefore cannot look for it.
    """
    global _opener
    _opener = opener


cdef ucxm_status_t open_python(bytes name, const ucxm_setting_t *settings, size_t count,
                               ucxm_md_t **md, ucxm_error_t *error):
    cdef Md opened
    if _opener is None:
        return refuse(error, UCXM_ERR_UNSUPPORTED,
                      "nobody has imported ucx_memh.capi, which knows how to open domains")
    texts = {settings[i].name.decode(): settings[i].value.decode() for i in range(count)}
    opened = _opener(name.decode(), texts)
    Py_INCREF(opened)
    (<md_t *>opened.md).holder = <PyObject *>opened
    md[0] = opened.md
    return UCXM_OK


cdef ucxm_status_t exception_status(object exception, ucxm_error_t *error) noexcept:
    """What an exception says to somebody who speaks C."""
    cdef bytes text
    cdef int32_t number = 0
    try:
        text = " ".join(str(exception).split()).encode()
        number = getattr(exception, "errno", None) or 0
        status = getattr(exception, "status", None)
        if error != NULL:
            error.sys_errno = number
            error_text(error, text)
        return status if status is not None else UCXM_ERR_IO_ERROR
    except BaseException:
        return UCXM_ERR_IO_ERROR


# With functions of their own, for one that has `with gil` in it takes it at its end in any case.
cdef ucxm_status_t open_with_gil(const char *name, const ucxm_setting_t *settings, size_t count,
                                 ucxm_md_t **md, ucxm_error_t *error) noexcept with gil:
    try:
        return open_python(name, settings, count, md, error)
    except BaseException as exception:
        return exception_status(exception, error)


cdef void release_with_gil(md_t *md) noexcept with gil:
    cdef PyObject *holder = md.holder
    md.holder = NULL
    Py_DECREF(<object>holder)


cdef ucxm_status_t ucxm_md_open(const char *name, const ucxm_setting_t *settings, size_t count,
                                ucxm_md_t **md, ucxm_error_t *error) noexcept nogil:
    error_clear(error)
    md[0] = NULL
    if count > SETTINGS_MAX or (count != 0 and settings == NULL):
        return refuse(error, UCXM_ERR_INVALID_PARAM, "too many settings, or none where some are")
    if not python_lives():
        return refuse(error, UCXM_ERR_CLOSED, "the Python interpreter has ended")
    return open_with_gil(name, settings, count, md, error)


cdef ucxm_status_t ucxm_md_query(ucxm_md_t *handle, ucxm_md_info_t *out) noexcept nogil:
    cdef md_t *md = <md_t *>handle
    cdef ucxm_md_info_t info
    memset(&info, 0, sizeof(info))
    if md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    info.flags = md.attr.flags
    info.max_reg = md.attr.max_reg if md.attr.max_reg else UINT64_MAX
    info.mem_types = md.attr.mem_types
    info.reg_alignment = md.attr.reg_alignment
    if md.attr.flags & UCXM_MD_FLAG_NEED_RKEY:
        info.key_size_max = UCXM_KEY_HEADER_SIZE + md.attr.rkey_packed_size
    info.key_size_raw = md.attr.rkey_raw_size
    info.software = md.attr.software
    info.python = md.attr.python
    info.enforcement = md.attr.enforcement
    memcpy(info.component, md.attr.component, sizeof(info.component))
    memcpy(info.md_name, md.attr.md_name, sizeof(info.md_name))
    return answer(&info, sizeof(info), out, out.struct_size)


cdef ucxm_status_t ucxm_md_close(ucxm_md_t *handle, uint32_t flags,
                                 ucxm_error_t *error) noexcept nogil:
    error_clear(error)
    if flags & ~UCXM_CLOSE_FORCE:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "unknown flags")
    return md_close(<md_t *>handle, (flags & UCXM_CLOSE_FORCE) != 0, UINT64_MAX, error)


cdef void ucxm_md_release(ucxm_md_t *handle) noexcept nogil:
    cdef md_t *md = <md_t *>handle
    if md == NULL or md.epoch != fork_epoch or md.holder == NULL or not python_lives():
        return
    release_with_gil(md)


cdef unsigned ucxm_md_progress(ucxm_md_t *md) noexcept nogil:
    return md_progress(<md_t *>md)


cdef ucxm_status_t ucxm_md_event_fd(ucxm_md_t *handle, int *fd,
                                    ucxm_error_t *error) noexcept nogil:
    error_clear(error)
    fd[0] = -1
    return md_event_fd(<md_t *>handle, fd, error)


cdef ucxm_status_t ucxm_md_arm(ucxm_md_t *handle, ucxm_error_t *error) noexcept nogil:
    error_clear(error)
    return md_arm(<md_t *>handle, error)


cdef ucxm_status_t ucxm_md_stats(ucxm_md_t *handle, ucxm_md_stats_t *out) noexcept nogil:
    cdef md_t *md = <md_t *>handle
    cdef ucxm_md_stats_t stats
    if md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    md_count(md, &stats)
    return answer(&stats, sizeof(stats), out, out.struct_size)


# ---- memory handles ----

cdef ucxm_status_t ucxm_mem_reg(ucxm_md_t *handle, const ucxm_reg_params_t *params,
                                ucxm_memh_t **memh, ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>handle
    cdef ucxm_status_t status
    cdef reg_t *reg
    error_clear(error)
    memh[0] = NULL
    if params.struct_size < sizeof(params[0]) or params.reserved != 0:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "params: struct_size, or what must be 0")
    if params.adopt != NULL and (params.address != 0 or params.length != 0 or params.has_dmabuf):
        return refuse(error, UCXM_ERR_INVALID_PARAM, "an adopted registration has its own range")
    if md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    reg = reg_alloc(md, NULL)
    if reg == NULL:
        return UCXM_ERR_NO_MEMORY
    reg.pub.address = params.address
    reg.pub.length = params.length
    reg.pub.mem_type = params.mem_type
    reg.pub.adopt = params.adopt
    if params.has_dmabuf:
        reg.pub.dmabuf_fd = params.dmabuf_fd
        reg.pub.dmabuf_offset = params.dmabuf_offset
    status = mem_flags_check(params.flags, error)
    if status == UCXM_OK:
        reg_rights(reg, params.flags, False, True)
        status = reg_check(md, reg, True, error)
    if status != UCXM_OK:
        reg_free(reg)
        return status
    return mem_reg(md, reg, memh, error)


cdef ucxm_status_t ucxm_mem_derive(ucxm_memh_t *parent, uint64_t offset, uint64_t length,
                                   uint64_t rights, ucxm_ep_t *ep, ucxm_memh_t **memh,
                                   ucxm_error_t *error) noexcept nogil:
    cdef const ucxm_memh_own_t *own = ucxm_memh_own(parent)
    cdef ucxm_status_t status
    error_clear(error)
    memh[0] = NULL
    if length == UCXM_LENGTH_REST:
        length = own.length - offset if offset <= own.length else 0
    if rights == UCXM_RIGHTS_ALL:
        rights = own.grant
    else:
        status = mem_flags_check(rights, error)
        if status != UCXM_OK:
            return status
    return mem_derive(parent, offset, length, rights, ep, memh, error)


cdef ucxm_status_t ucxm_mem_query(ucxm_memh_t *memh, ucxm_memh_info_t *out) noexcept nogil:
    cdef const ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef ucxm_memh_info_t info
    if books_of(memh).epoch != fork_epoch:
        return UCXM_ERR_FORKED
    memset(&info, 0, sizeof(info))
    info.address = own.address
    info.length = own.length
    info.flags = memh.inherited.flags
    info.rights = own.rights
    info.grant = own.grant
    info.key_id = memh.id.key_id
    info.state = load32(&memh.id.state)
    info.live_children = load32(&books_of(memh).live_children)
    info.mem_type = memh.inherited.mem_type
    info.lkey = memh.inherited.lkey
    info.derived = memh.id.parent != NULL
    return answer(&info, sizeof(info), out, out.struct_size)


cdef ucxm_status_t ucxm_mem_enforcement(ucxm_memh_t *memh,
                                        ucxm_enforcement_t *enforcement) noexcept nogil:
    cdef md_t *md = md_of(memh)
    cdef ucxm_status_t status
    memset(enforcement, 0, sizeof(enforcement[0]))
    if load32(&memh.id.state) == UCXM_MEMH_CLOSED:  # domain and registration may be gone
        return UCXM_ERR_CLOSED
    status = md_enter(md)
    if status == UCXM_OK:
        memh_enforcement(md, memh, enforcement)
        md_leave(md)
    return status


cdef ucxm_status_t revoke_wait(ucxm_memh_t *memh, ucxm_status_t status) noexcept nogil:
    """Progress until the device is done with a revocation that is under way."""
    if status != UCXM_INPROGRESS:
        return status
    revoke_settled(memh, UINT64_MAX)
    return revoke_outcome(memh)


cdef ucxm_status_t revoke_blocking(ucxm_memh_t *memh, bint closing,
                                   ucxm_error_t *error) noexcept nogil:
    """What users let go of below it is none of the handles that it is BUSY of."""
    if revoke_quick(memh, closing):
        return UCXM_OK
    while orphan_wait(memh):
        pass
    return revoke_wait(memh, revoke(memh, closing, NULL, error))


cdef ucxm_status_t revoke_below(ucxm_memh_t *memh, ucxm_error_t *error) noexcept nogil:
    """Revoke what was derived from it, leaves first; stops at the first that resists."""
    cdef ucxm_status_t status = UCXM_OK
    cdef ucxm_memh_t *leaf
    if books_of(memh).epoch != fork_epoch:  # before any lock, which may have been forked locked
        return UCXM_ERR_FORKED
    if load32(&memh.id.state) == UCXM_MEMH_CLOSED:  # its domain may be gone
        return UCXM_OK
    while status == UCXM_OK:
        leaf = revoke_leaf(md_of(memh), memh)
        if leaf == NULL:
            break
        revoke_settled(leaf, UINT64_MAX)  # somebody may have begun
        status = revoke_wait(leaf, revoke(leaf, False, NULL, error))
        if revoke_overtaken(leaf, status):
            status = UCXM_OK
        memh_put(leaf)
    return status


cdef ucxm_status_t ucxm_mem_invalidate(ucxm_memh_t *memh, uint32_t flags, ucxm_completion_t *comp,
                                       ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status
    error_clear(error)
    if flags & ~UCXM_CASCADE:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "unknown flags")
    if flags & UCXM_CASCADE and memh.id.parent != NULL:  # a base is refused, with nothing changed
        status = revoke_below(memh, error)
        if status != UCXM_OK:
            return status
    if comp == NULL:
        return revoke_blocking(memh, False, error)
    return revoke(memh, False, comp, error)


cdef ucxm_status_t ucxm_mem_dereg(ucxm_memh_t *memh, uint32_t flags, ucxm_completion_t *comp,
                                  ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status
    error_clear(error)
    if flags & ~(UCXM_DEREG_INVALIDATE | UCXM_CASCADE):
        return refuse(error, UCXM_ERR_INVALID_PARAM, "unknown flags")
    if flags & UCXM_DEREG_INVALIDATE:
        status = dereg_check(memh, error)
        if status != UCXM_OK:
            return status
    if flags & UCXM_CASCADE:
        status = revoke_below(memh, error)
        if status != UCXM_OK:
            return status
    if comp == NULL:
        return revoke_blocking(memh, True, error)
    return revoke(memh, True, comp, error)


cdef void ucxm_memh_release(ucxm_memh_t *memh) noexcept nogil:
    if memh != NULL:
        memh_drop(memh)


# ---- keys ----

cdef ucxm_status_t ucxm_mkey_pack(ucxm_memh_t *memh, uint32_t flags, void *buffer, size_t *length,
                                  ucxm_error_t *error) noexcept nogil:
    cdef packed_t *packed = NULL
    cdef ucxm_status_t status
    error_clear(error)
    status = mkey_pack(memh, flags, &packed, error)
    if status != UCXM_OK:
        length[0] = 0
        return status
    return answer_bytes(packed.bytes, packed.size, buffer, length, error)


cdef ucxm_status_t ucxm_revoke_notice(ucxm_memh_t *memh, void *buffer, size_t *length,
                                      ucxm_error_t *error) noexcept nogil:
    cdef uint8_t notice[UCXM_KEY_HEADER_SIZE]
    cdef ucxm_status_t status
    error_clear(error)
    status = revoke_notice(memh, notice, error)
    if status != UCXM_OK:
        length[0] = 0
        return status
    return answer_bytes(notice, sizeof(notice), buffer, length, error)


cdef ucxm_status_t ucxm_key_query(const void *key, size_t length, ucxm_key_info_t *info,
                                  uint32_t *component, size_t *size_out,
                                  ucxm_error_t *error) noexcept nogil:
    cdef size_t size = 0
    cdef ucxm_status_t status
    error_clear(error)
    memset(info, 0, sizeof(info[0]))
    if component != NULL:
        component[0] = 0
    if size_out != NULL:
        size_out[0] = 0
    status = key_parse(<const uint8_t *>key, length, &size, error)
    if status == UCXM_OK:
        status = key_decode(NULL, <const uint8_t *>key, size, info, error)
    if status != UCXM_OK:
        memset(info, 0, sizeof(info[0]))
        return status
    if component != NULL:
        component[0] = <uint32_t>get_le(<const uint8_t *>key, UCXM_KEY_OFF_COMPONENT, 4)
    if size_out != NULL:
        size_out[0] = size
    return UCXM_OK


cdef ucxm_status_t ucxm_rkey_unpack(ucxm_md_t *md, const void *key, size_t length,
                                    ucxm_rkey_t **rkey_p, ucxm_error_t *error) noexcept nogil:
    cdef size_t size = 0
    cdef rkey_t *rkey = NULL
    cdef ucxm_status_t status
    error_clear(error)
    status = rkey_unpack_hit(<md_t *>md, <const uint8_t *>key, length, &size, &rkey, error)
    if status == UCXM_OK and rkey == NULL:
        status = rkey_unpack_miss(<md_t *>md, <const uint8_t *>key, size, &rkey, error)
    rkey_p[0] = &rkey.pub if rkey != NULL else NULL
    return status


cdef ucxm_status_t ucxm_rkey_from_raw(ucxm_md_t *md, const void *raw, size_t length,
                                      uint64_t address, uint64_t size, ucxm_rkey_t **rkey_p,
                                      ucxm_error_t *error) noexcept nogil:
    cdef rkey_t *rkey = NULL
    cdef ucxm_status_t status
    error_clear(error)
    status = rkey_from_raw(<md_t *>md, <const uint8_t *>raw, length, address, size, &rkey, error)
    rkey_p[0] = &rkey.pub if rkey != NULL else NULL
    return status


cdef ucxm_status_t ucxm_rkey_query(const ucxm_rkey_t *rkey, ucxm_key_info_t *info) noexcept nogil:
    info[0] = rkey.info
    return rkey_check(<rkey_t *>rkey)


cdef int ucxm_rkey_compare(const ucxm_rkey_t *one, const ucxm_rkey_t *other) noexcept nogil:
    return rkey_compare(<const rkey_t *>one, <const rkey_t *>other)


cdef ucxm_status_t ucxm_rkey_ptr(ucxm_rkey_t *rkey, uint64_t address, void **ptr,
                                 ucxm_error_t *error) noexcept nogil:
    error_clear(error)
    ptr[0] = NULL
    return rkey_ptr(<rkey_t *>rkey, address, ptr, error)


cdef void ucxm_rkey_release(ucxm_rkey_t *rkey) noexcept nogil:
    if rkey != NULL:
        rkey_put(<rkey_t *>rkey)


cdef ucxm_status_t ucxm_rkey_revoke(ucxm_md_t *md, const void *notice, size_t length,
                                    uint32_t *count_p, ucxm_error_t *error) noexcept nogil:
    cdef uint32_t count = 0
    cdef ucxm_status_t status
    error_clear(error)
    status = rkey_revoke(<md_t *>md, <const uint8_t *>notice, length, &count, error)
    if count_p != NULL:
        count_p[0] = count
    return status


cdef ucxm_status_t ucxm_peer_probe(ucxm_md_t *md, const void *key, size_t length,
                                   ucxm_error_t *error) noexcept nogil:
    error_clear(error)
    return peer_probe(<md_t *>md, <const uint8_t *>key, length, error)


cdef ucxm_status_t ucxm_peer_evict(ucxm_md_t *handle, const ucxm_identity_t *peer,
                                   ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>handle
    cdef ucxm_status_t status
    error_clear(error)
    status = md_enter(md)
    if status == UCXM_OK:
        status = md.ops.peer_evict(md.priv, peer, error)
        md_leave(md)
    return status


# ---- endpoints ----

cdef ucxm_status_t ucxm_ep_create(ucxm_md_t *md, ucxm_ep_t **ep_p,
                                  ucxm_error_t *error) noexcept nogil:
    cdef ep_t *ep = NULL
    cdef ucxm_status_t status
    error_clear(error)
    status = ep_open(<md_t *>md, &ep, error)
    ep_p[0] = &ep.pub if ep != NULL else NULL
    return status


cdef ucxm_status_t ucxm_ep_address(ucxm_ep_t *ep, void *buffer, size_t *length,
                                   ucxm_error_t *error) noexcept nogil:
    cdef uint8_t address[UCXM_ADDRESS_MAX]
    cdef size_t size = 0
    cdef ucxm_status_t status
    error_clear(error)
    status = ep_address(<ep_t *>ep, address, &size, error)
    if status != UCXM_OK:
        length[0] = 0
        return status
    return answer_bytes(address, size, buffer, length, error)


cdef ucxm_status_t ucxm_ep_connect(ucxm_ep_t *ep, const void *address, size_t length,
                                   ucxm_error_t *error) noexcept nogil:
    error_clear(error)
    return ep_connect(<ep_t *>ep, <const uint8_t *>address, length, error)


cdef ucxm_status_t ucxm_ep_reset(ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil:
    error_clear(error)
    return ep_reset(<ep_t *>ep, error)


cdef ucxm_status_t ucxm_ep_state(ucxm_ep_t *handle, uint32_t *state) noexcept nogil:
    state[0] = UCXM_EP_IDLE
    return ep_query(<ep_t *>handle, state)


cdef ucxm_status_t ucxm_ep_close(ucxm_ep_t *handle, ucxm_error_t *error) noexcept nogil:
    cdef ep_t *ep = <ep_t *>handle
    cdef ucxm_status_t status = UCXM_OK
    cdef ucxm_memh_t *memh
    error_clear(error)
    while status == UCXM_OK and ep_check(ep) == UCXM_OK:
        memh = ep_bound_leaf(ep)
        if memh == NULL:
            break
        status = revoke_wait(memh, revoke(memh, False, NULL, error))
        if revoke_overtaken(memh, status):
            status = UCXM_OK
        memh_put(memh)
    return ep_shut(ep, error) if status == UCXM_OK else status


cdef void ucxm_ep_release(ucxm_ep_t *handle) noexcept nogil:
    cdef ep_t *ep = <ep_t *>handle
    if ep != NULL and ep.md.epoch == fork_epoch:
        ep_drop(ep)


cdef ucxm_status_t transfer_of(ep_t *ep, ucxm_transfer_t *user, transfer_t **transfer_p,
                               ucxm_error_t *error) noexcept nogil:
    """Check what the caller asks for, and prepare it."""
    cdef rkey_t *rkey = <rkey_t *>user.rkey
    cdef uint64_t length = 8 if user.kind > UCXM_OP_PUT else user.length
    cdef ucxm_status_t status
    cdef transfer_t *transfer
    transfer_p[0] = NULL
    if user.struct_size < sizeof(user[0]) or rkey == NULL or (
            <uint32_t>user.kind > <uint32_t>UCXM_OP_COMPARE_SWAP):
        return refuse(error, UCXM_ERR_INVALID_PARAM, "transfer: struct_size, rkey or kind")
    status = transfer_check(ep, rkey, user.kind, user.remote_address, length, error)
    if status != UCXM_OK:
        return status
    transfer = transfer_alloc(ep.md)
    if transfer == NULL:
        return UCXM_ERR_NO_MEMORY
    rkey_get(rkey)
    transfer.op.rkey = &rkey.pub
    transfer.op.kind = user.kind
    transfer.op.remote_address = user.remote_address
    transfer.op.operand = user.operand
    transfer.op.compare = user.compare
    transfer.op.length = length
    transfer.op.local = user.local
    transfer.user = user
    if user.kind <= UCXM_OP_PUT and user.memh != NULL:
        status = transfer_local_check(transfer, user.memh, error)
        if status == UCXM_OK:
            status = transfer_use(transfer, user.memh)
        if status != UCXM_OK:
            transfer_unuse(transfer)
            transfer_put(transfer)
            return status
    transfer_p[0] = transfer
    return UCXM_OK


cdef ucxm_status_t transfer_send(ep_t *ep, ucxm_transfer_t *user, transfer_t *transfer,
                                 ucxm_error_t *error) noexcept nogil:
    """Post what was prepared, keeping a reference to it only on NO_RESOURCE."""
    cdef ucxm_status_t status
    user.result = 0
    user.bytes_done = 0
    error_clear(&user.error)
    store32(<uint32_t *>&user.status, <uint32_t>UCXM_INPROGRESS)
    status = transfer_post(transfer, ep, error)
    if status != UCXM_OK:
        store32(<uint32_t *>&user.status, <uint32_t>status)
    return status


cdef void transfer_end(transfer_t *transfer, ucxm_status_t status) noexcept nogil:
    """The caller's side of a posted one, or of one that could not be posted."""
    if status != UCXM_OK or transfer.op.length == 0:  # the device never had it
        transfer_unuse(transfer)
        if status == UCXM_OK:
            transfer_tell(transfer)
    transfer_put(transfer)


cdef ucxm_status_t ucxm_ep_post(ucxm_ep_t *handle, ucxm_transfer_t *user,
                                ucxm_error_t *error) noexcept nogil:
    cdef ep_t *ep = <ep_t *>handle
    cdef transfer_t *transfer = NULL
    cdef ucxm_status_t status
    error_clear(error)
    status = transfer_of(ep, user, &transfer, error)
    if status == UCXM_OK:
        status = transfer_send(ep, user, transfer, error)
        transfer_end(transfer, status)
    return status


cdef ucxm_status_t ucxm_ep_transfer(ucxm_ep_t *handle, ucxm_transfer_t *user,
                                    ucxm_error_t *error) noexcept nogil:
    cdef ep_t *ep = <ep_t *>handle
    cdef transfer_t *transfer = NULL
    cdef ucxm_status_t status
    error_clear(error)
    status = transfer_of(ep, user, &transfer, error)
    if status != UCXM_OK:
        return status
    while True:
        status = transfer_send(ep, user, transfer, error)
        if status != UCXM_ERR_NO_RESOURCE:
            break
        if md_progress(ep.md) == 0:
            sched_yield()
        error_clear(error)
    while status == UCXM_OK and not load32(&transfer.done):
        transfer_wait(transfer, UINT64_MAX)
    if status == UCXM_OK:
        status = transfer.status
        error_copy(error, &transfer.op.error, status)
        transfer_end(transfer, UCXM_OK)
    else:
        transfer_end(transfer, status)
    return status


# ---- and from Python ----

def key_query(key):
    """What a packed key says (KeyInfo): its envelope, checked; nothing is attached or asked.

    Raises MalformedKeyError, KeyVersionError, RevokedError (a revoke notice).
    """
    cdef Py_buffer view
    cdef ucxm_key_info_t info
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    cdef uint32_t component = 0
    cdef size_t size = 0
    get_buffer(key, &view, False, "key_query")
    status = ucxm_key_query(view.buf, view.len, &info, &component, &size, &error)
    PyBuffer_Release(&view)
    if status != UCXM_OK:
        raise failure(status, "key_query", NULL, &error, {})
    return _resources.KeyInfo(
        component=component, key_id=info.key_id, address=info.address, length=info.length,
        flags=_flags.MemFlag(info.rights),
        owner=PyBytes_FromStringAndSize(<const char *>&info.owner, sizeof(info.owner)),
        size=size, revocable=bool(info.flags & UCXM_KEY_FLAG_REVOCABLE),
        endpoint_bound=bool(info.flags & UCXM_KEY_FLAG_ENDPOINT))


def key_checksums(data):
    """CRC-32C by the table, and by this processor's instruction (None: it has none)."""
    cdef Py_buffer view
    cdef uint32_t table, instruction
    get_buffer(data, &view, False, "key_checksums")
    table = ~crc_by_table(<uint32_t>0xffffffff, <const uint8_t *>view.buf, view.len)
    instruction = 0
    if crc_has_instruction():
        instruction = ~crc_by_instruction(<uint32_t>0xffffffff, <const uint8_t *>view.buf,
                                          view.len)
    PyBuffer_Release(&view)
    return table, instruction if crc_has_instruction() else None
