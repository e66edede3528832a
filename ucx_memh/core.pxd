# SPDX-License-Identifier: BSD-3-Clause
"""What compiled backends and embedders may cimport from the core.

The layout of the extension types is part of the contract: a compiled user checks their size.
"""
from ucx_memh.libmemh cimport (
    ucxm_completion_t, ucxm_enforcement_t, ucxm_ep_ops_t, ucxm_error_t, ucxm_identity_t,
    ucxm_key_slot_t, ucxm_md_attr_t, ucxm_md_ops_t, ucxm_md_t, ucxm_memh_t, ucxm_op_t,
    ucxm_registration_t, ucxm_rkey_t, ucxm_ep_t, ucxm_status_t, uint8_t, uint64_t,
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
