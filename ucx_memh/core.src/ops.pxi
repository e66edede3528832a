# SPDX-License-Identifier: BSD-3-Clause
# The shared stubs for operations that a backend does not have, and bind's checks.

cdef ucxm_status_t unsupported_mem_reg(
        void *md, ucxm_registration_t *reg, ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain does not register memory")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_mem_dereg(
        void *md, ucxm_registration_t *reg, ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain does not register memory")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_mem_derive(
        void *md, const ucxm_memh_t *base, const ucxm_memh_t *memh,
        ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain does not support derived memory handles")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_key_create(
        void *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
        ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain makes no revocable keys")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_key_destroy(
        void *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot, ucxm_completion_t *comp,
        ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain makes no revocable keys")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_mkey_pack(
        void *md, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
        const ucxm_key_slot_t *atomic, uint8_t *payload, size_t *length,
        ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain does not pack keys")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_rkey_unpack(
        void *md, ucxm_rkey_t *rkey, const uint8_t *payload, size_t length, int raw,
        ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain does not unpack keys")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_rkey_ptr(
        void *md, const ucxm_rkey_t *rkey, uint64_t address, void **ptr,
        ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain has no local pointers to remote memory")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_event_fd(
        void *md, int *fd, ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain has no event to wait for")
    return UCXM_ERR_UNSUPPORTED


cdef ucxm_status_t unsupported_event_arm(void *md, ucxm_error_t *error) noexcept nogil:
    error_text(error, "this domain has no event to wait for")
    return UCXM_ERR_UNSUPPORTED


cdef void default_tail_init(
        void *md, const ucxm_memh_t *memh, void *inherited, void *own) noexcept nogil:
    pass


cdef void default_close(void *md) noexcept nogil:
    pass


cdef void default_rkey_release(void *md, ucxm_rkey_t *rkey) noexcept nogil:
    pass


cdef unsigned default_progress(void *md) noexcept nogil:
    return 0


cdef void default_stat(
        void *md, unsigned index, const char **name, uint64_t *value) noexcept nogil:
    name[0] = NULL


cdef void default_explain(
        void *md, const ucxm_memh_t *memh, char *text, size_t size) noexcept nogil:
    text[0] = 0


cdef ucxm_status_t default_peer_evict(
        void *md, const ucxm_identity_t *peer, ucxm_error_t *error) noexcept nogil:
    return UCXM_OK  # a domain that remembers nothing has nothing to forget


cdef void default_key_flush(void *md) noexcept nogil:
    pass  # a domain whose key_destroy leaves nothing lying


cdef ucxm_status_t default_mem_query(
        void *md, uint64_t address, uint64_t length, uint32_t *mem_type,
        ucxm_error_t *error) noexcept nogil:
    mem_type[0] = UCXM_MEM_TYPE_HOST  # mem_reg will find out
    return UCXM_OK


cdef void ops_fill(ucxm_md_ops_t *ops) noexcept nogil:
    """Put the stubs where nothing is.  mem_enforcement stays NULL: memh_enforcement() knows."""
    if ops.tail_init == NULL:
        ops.tail_init = default_tail_init
    if ops.close == NULL:
        ops.close = default_close
    if ops.mem_reg == NULL:
        ops.mem_reg = unsupported_mem_reg
    if ops.mem_dereg == NULL:
        ops.mem_dereg = unsupported_mem_dereg
    if ops.mem_derive == NULL:
        ops.mem_derive = unsupported_mem_derive
    if ops.key_create == NULL:
        ops.key_create = unsupported_key_create
    if ops.key_destroy == NULL:
        ops.key_destroy = unsupported_key_destroy
    if ops.mkey_pack == NULL:
        ops.mkey_pack = unsupported_mkey_pack
    if ops.rkey_unpack == NULL:
        ops.rkey_unpack = unsupported_rkey_unpack
    if ops.rkey_release == NULL:
        ops.rkey_release = default_rkey_release
    if ops.rkey_ptr == NULL:
        ops.rkey_ptr = unsupported_rkey_ptr
    if ops.progress == NULL:
        ops.progress = default_progress
    if ops.event_fd == NULL:
        ops.event_fd = unsupported_event_fd
    if ops.event_arm == NULL:
        ops.event_arm = unsupported_event_arm
    if ops.stat == NULL:
        ops.stat = default_stat
    if ops.explain == NULL:
        ops.explain = default_explain
    if ops.key_flush == NULL:
        ops.key_flush = default_key_flush
    if ops.mem_query == NULL:
        ops.mem_query = default_mem_query
    if ops.peer_evict == NULL:
        ops.peer_evict = default_peer_evict


cdef int bind_check_op(str component, uint64_t flags, uint64_t needs_one_of, str flag_name,
                       bint present, str op_name) except -1:
    """A flag without its operation, or the operation without a flag, is a lie."""
    if bool(flags & needs_one_of) == present:
        return 0
    if present:
        detail = f"has {op_name} but does not declare {flag_name}"
    else:
        detail = f"declares {flag_name} but has no {op_name}"
    raise _errors.InvalidParamError(f"backend {detail}", op="bind", component=component)


cdef enum:
    QUARANTINE_MAX = 1 << 24  # that costs 192 MiB

cdef int bind_check(str component, const ucxm_md_ops_t *ops, const ucxm_ep_ops_t *ep_ops,
                    const ucxm_md_attr_t *attr) except -1:
    """Refuse a table that says one thing and does another (ops have been filled)."""
    cdef uint64_t flags = attr.flags
    cdef uint64_t keyed = (UCXM_MD_FLAG_REG_DERIVED | UCXM_MD_FLAG_INVALIDATE_RMA |
                           UCXM_MD_FLAG_INVALIDATE_AMO)
    cdef uint64_t both = UCXM_MD_FLAG_INVALIDATE_RMA | UCXM_MD_FLAG_INVALIDATE_AMO

    bind_check_op(component, flags, UCXM_MD_FLAG_REG, "REG",
                  ops.mem_reg != unsupported_mem_reg, "mem_reg")
    bind_check_op(component, flags, UCXM_MD_FLAG_REG, "REG",
                  ops.mem_dereg != unsupported_mem_dereg, "mem_dereg")
    bind_check_op(component, flags, UCXM_MD_FLAG_REG_DERIVED, "REG_DERIVED",
                  ops.mem_derive != unsupported_mem_derive, "mem_derive")
    bind_check_op(component, flags, keyed, "REG_DERIVED, INVALIDATE_RMA or INVALIDATE_AMO",
                  ops.key_create != unsupported_key_create, "key_create")
    bind_check_op(component, flags, keyed, "REG_DERIVED, INVALIDATE_RMA or INVALIDATE_AMO",
                  ops.key_destroy != unsupported_key_destroy, "key_destroy")
    bind_check_op(component, flags, UCXM_MD_FLAG_NEED_RKEY, "NEED_RKEY",
                  ops.rkey_unpack != unsupported_rkey_unpack, "rkey_unpack")
    bind_check_op(component, flags, UCXM_MD_FLAG_NEED_RKEY, "NEED_RKEY",
                  ops.mkey_pack != unsupported_mkey_pack, "mkey_pack")
    bind_check_op(component, flags, UCXM_MD_FLAG_RKEY_PTR, "RKEY_PTR",
                  ops.rkey_ptr != unsupported_rkey_ptr, "rkey_ptr")
    bind_check_op(component, flags, UCXM_MD_FLAG_EVENT_FD, "EVENT_FD",
                  ops.event_fd != unsupported_event_fd, "event_fd")
    bind_check_op(component, flags, UCXM_MD_FLAG_EVENT_FD, "EVENT_FD",
                  ops.event_arm != unsupported_event_arm, "event_arm")
    bind_check_op(component, flags, UCXM_MD_FLAG_ENDPOINT, "ENDPOINT",
                  ep_ops != NULL, "endpoint operations")

    if ep_ops != NULL and (
            ep_ops.ep_create == NULL or ep_ops.ep_destroy == NULL or ep_ops.ep_address == NULL or
            ep_ops.ep_connect == NULL or ep_ops.ep_reset == NULL or ep_ops.ep_state == NULL or
            ep_ops.ep_post == NULL):
        raise _errors.InvalidParamError("backend's endpoint operations are incomplete",
                                        op="bind", component=component)
    if bool(flags & UCXM_MD_FLAG_INVALIDATE) != ((flags & both) == both):
        raise _errors.InvalidParamError(
            "backend must declare INVALIDATE if and only if it declares both kinds of it",
            op="bind", component=component)
    if flags & UCXM_MD_FLAG_DERIVE_ENDPOINT and not (
            flags & UCXM_MD_FLAG_REG_DERIVED and flags & UCXM_MD_FLAG_ENDPOINT):
        raise _errors.InvalidParamError(
            "backend declares DERIVE_ENDPOINT without REG_DERIVED and ENDPOINT",
            op="bind", component=component)
    if attr.quarantine > QUARANTINE_MAX:
        raise _errors.InvalidParamError(
            f"a quarantine of {attr.quarantine} destructions is over {QUARANTINE_MAX}",
            op="bind", component=component)
    if attr.rkey_packed_size > UCXM_KEY_PAYLOAD_MAX or (
            attr.rkey_raw_size > attr.rkey_packed_size):
        raise _errors.InvalidParamError(
            f"backend's key payload of {attr.rkey_packed_size} bytes (raw {attr.rkey_raw_size}) "
            f"is over {UCXM_KEY_PAYLOAD_MAX}", op="bind", component=component)
    return 0
