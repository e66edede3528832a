# SPDX-License-Identifier: BSD-3-Clause
"""What compiled backends and embedders may cimport from the core.

The layout of the extension types is part of the contract: a compiled user checks their size.
"""
from ucx_memh.libmemh cimport (
    int32_t, ucxm_completion_t, ucxm_enforcement_t, ucxm_ep_ops_t, ucxm_ep_t, ucxm_error_t,
    ucxm_identity_t, ucxm_key_info_t, ucxm_key_slot_t, ucxm_md_attr_t, ucxm_md_info_t,
    ucxm_md_ops_t, ucxm_md_stats_t, ucxm_md_t, ucxm_memh_info_t, ucxm_memh_t, ucxm_op_t,
    ucxm_reg_params_t, ucxm_registration_t, ucxm_rkey_t, ucxm_setting_t, ucxm_status_t,
    ucxm_transfer_t, uint8_t, uint32_t, uint64_t,
)

cdef class Md:
    cdef ucxm_md_t *md
    cdef object keep
    cdef dict endpoints
    cdef object __weakref__

cdef class Memh:
    cdef ucxm_memh_t *memh
    cdef Md md
    cdef object base_or_none
    cdef Endpoint bound
    cdef object keeper
    cdef object __weakref__

cdef class MemhArray:
    cdef ucxm_memh_t **memhs
    cdef ucxm_status_t *each
    cdef size_t count
    cdef Md md
    cdef object base_or_none
    cdef Endpoint bound
    cdef str op
    cdef object __weakref__

cdef class Rkey:
    cdef ucxm_rkey_t *rkey
    cdef Md md
    cdef object __weakref__

cdef class Endpoint:
    cdef ucxm_ep_t *ep
    cdef Md md
    cdef object error_callback
    cdef object __weakref__

# Fills the attributes of a domain that registers host memory of any length and alignment and
# promises nothing, packs no payload and has no limits; what differs is set afterwards.
# InvalidParamError: a name is empty or too long.
cdef int md_attr_init(ucxm_md_attr_t *attr, str component, str md_name,
                      uint64_t flags) except -1

# Copies the tables by their size, puts the stubs below in place of what is missing and
# refuses (InvalidParamError) a flag without its operation or an operation without its flag.
# From then on the Md owns `priv` and calls ops.close(priv); when binding is refused the
# caller still owns it.  `keep` is any object that must live as long as the Md, or None.
cdef Md md_bind(const ucxm_md_ops_t *ops, const ucxm_ep_ops_t *ep_ops,
                const ucxm_md_attr_t *attr, void *priv, object keep)

# Every handle, registration, key and operation is allocated through these; NULL restores
# malloc and free.  For tests that count and poison.
cdef void set_allocator(void *(*alloc)(size_t size) noexcept nogil,
                        void (*release)(void *ptr) noexcept nogil) noexcept nogil

# The identity that this process puts into its keys.  Takes the GIL the first time.
cdef ucxm_status_t identity_self(ucxm_identity_t *identity) noexcept nogil

# The shared equivalents of UCX's unsupported macros: the right status, no side effect.
cdef ucxm_status_t unsupported_mem_reg(
    void *md, ucxm_registration_t *reg, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t unsupported_mem_dereg(
    void *md, ucxm_registration_t *reg, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t unsupported_mem_derive(
    void *md, const ucxm_memh_t *base, const ucxm_memh_t *memh,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t unsupported_key_create(
    void *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t unsupported_key_destroy(
    void *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot, ucxm_completion_t *comp,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t unsupported_mkey_pack(
    void *md, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
    const ucxm_key_slot_t *atomic, uint8_t *payload, size_t *length,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t unsupported_rkey_unpack(
    void *md, ucxm_rkey_t *rkey, const uint8_t *payload, size_t length, int raw,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t unsupported_rkey_ptr(
    void *md, const ucxm_rkey_t *rkey, uint64_t address, void **ptr,
    ucxm_error_t *error) noexcept nogil

# ---- the embedder's calls: memh.h is their manual ----

cdef const char *ucxm_status_name(ucxm_status_t status) noexcept nogil
cdef ucxm_status_t ucxm_md_open(
    const char *name, const ucxm_setting_t *settings, size_t count, ucxm_md_t **md,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_md_query(ucxm_md_t *md, ucxm_md_info_t *info) noexcept nogil
cdef ucxm_status_t ucxm_md_close(ucxm_md_t *md, uint32_t flags, ucxm_error_t *error) noexcept nogil
cdef void ucxm_md_release(ucxm_md_t *md) noexcept nogil
cdef unsigned ucxm_md_progress(ucxm_md_t *md) noexcept nogil
cdef ucxm_status_t ucxm_md_event_fd(ucxm_md_t *md, int *fd, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_md_arm(ucxm_md_t *md, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_md_stats(ucxm_md_t *md, ucxm_md_stats_t *stats) noexcept nogil
cdef ucxm_status_t ucxm_mem_reg(
    ucxm_md_t *md, const ucxm_reg_params_t *params, ucxm_memh_t **memh,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_mem_derive(
    ucxm_memh_t *parent, uint64_t offset, uint64_t length, uint64_t rights, ucxm_ep_t *ep,
    ucxm_memh_t **memh, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_mem_query(ucxm_memh_t *memh, ucxm_memh_info_t *info) noexcept nogil
cdef ucxm_status_t ucxm_mem_enforcement(
    ucxm_memh_t *memh, ucxm_enforcement_t *enforcement) noexcept nogil
cdef ucxm_status_t ucxm_mem_invalidate(
    ucxm_memh_t *memh, uint32_t flags, ucxm_completion_t *comp, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_mem_dereg(
    ucxm_memh_t *memh, uint32_t flags, ucxm_completion_t *comp, ucxm_error_t *error) noexcept nogil
cdef void ucxm_memh_release(ucxm_memh_t *memh) noexcept nogil
cdef ucxm_status_t ucxm_mkey_pack(
    ucxm_memh_t *memh, uint32_t flags, void *buffer, size_t *length,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_revoke_notice(
    ucxm_memh_t *memh, void *buffer, size_t *length, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_key_query(
    const void *key, size_t length, ucxm_key_info_t *info, uint32_t *component, size_t *size,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_rkey_unpack(
    ucxm_md_t *md, const void *key, size_t length, ucxm_rkey_t **rkey,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_rkey_from_raw(
    ucxm_md_t *md, const void *raw, size_t length, uint64_t address, uint64_t size,
    ucxm_rkey_t **rkey, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_rkey_query(const ucxm_rkey_t *rkey, ucxm_key_info_t *info) noexcept nogil
cdef int ucxm_rkey_compare(const ucxm_rkey_t *one, const ucxm_rkey_t *other) noexcept nogil
cdef ucxm_status_t ucxm_rkey_ptr(
    ucxm_rkey_t *rkey, uint64_t address, void **ptr, ucxm_error_t *error) noexcept nogil
cdef void ucxm_rkey_release(ucxm_rkey_t *rkey) noexcept nogil
cdef ucxm_status_t ucxm_rkey_revoke(
    ucxm_md_t *md, const void *notice, size_t length, uint32_t *count,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_peer_probe(
    ucxm_md_t *md, const void *key, size_t length, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_peer_evict(
    ucxm_md_t *md, const ucxm_identity_t *peer, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_ep_create(ucxm_md_t *md, ucxm_ep_t **ep, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_ep_address(
    ucxm_ep_t *ep, void *buffer, size_t *length, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_ep_connect(
    ucxm_ep_t *ep, const void *address, size_t length, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_ep_reset(ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_ep_state(ucxm_ep_t *ep, uint32_t *state) noexcept nogil
cdef ucxm_status_t ucxm_ep_close(ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil
cdef void ucxm_ep_release(ucxm_ep_t *ep) noexcept nogil
cdef ucxm_status_t ucxm_ep_post(
    ucxm_ep_t *ep, ucxm_transfer_t *transfer, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_ep_transfer(
    ucxm_ep_t *ep, ucxm_transfer_t *transfer, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_mem_reg_many(
    ucxm_md_t *md, const ucxm_reg_params_t *params, size_t count, ucxm_memh_t **memhs,
    ucxm_status_t *status) noexcept nogil
cdef ucxm_status_t ucxm_mem_derive_many(
    ucxm_memh_t *parent, const uint64_t *offsets, const uint64_t *lengths, size_t count,
    uint64_t rights, ucxm_ep_t *ep, ucxm_memh_t **memhs, ucxm_status_t *status) noexcept nogil
cdef ucxm_status_t ucxm_mkey_pack_many(
    ucxm_memh_t *const *memhs, size_t count, uint32_t flags, void *buffer, size_t stride,
    size_t *lengths, ucxm_status_t *status) noexcept nogil
cdef ucxm_status_t ucxm_mem_invalidate_many(
    ucxm_memh_t *const *memhs, size_t count, uint32_t flags, ucxm_status_t *status) noexcept nogil
cdef ucxm_status_t ucxm_mem_dereg_many(
    ucxm_memh_t *const *memhs, size_t count, uint32_t flags, ucxm_status_t *status) noexcept nogil
cdef ucxm_status_t ucxm_bundle_reg(
    ucxm_md_t *const *mds, size_t count, uint32_t policy, const ucxm_reg_params_t *params,
    ucxm_memh_t **memhs, ucxm_status_t *status, ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_bundle_pack(
    ucxm_memh_t *const *memhs, size_t count, uint32_t flags, void *buffer, size_t *length,
    ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ucxm_bundle_unpack(
    ucxm_md_t *const *mds, size_t count, const void *block, size_t length, ucxm_rkey_t **rkeys,
    ucxm_status_t *status, ucxm_error_t *error) noexcept nogil
