# SPDX-License-Identifier: BSD-3-Clause
"""Externs of memh.h and backend.h; no bodies.  The headers are the manual."""
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "ucx_memh/memh.h" nogil:
    ctypedef int32_t ucxm_status_t

    enum:
        UCXM_OK
        UCXM_INPROGRESS
        UCXM_ERR_NO_RESOURCE
        UCXM_ERR_IO_ERROR
        UCXM_ERR_NO_MEMORY
        UCXM_ERR_INVALID_PARAM
        UCXM_ERR_UNREACHABLE
        UCXM_ERR_INVALID_ADDR
        UCXM_ERR_BUFFER_TOO_SMALL
        UCXM_ERR_NO_DEVICE
        UCXM_ERR_BUSY
        UCXM_ERR_CANCELED
        UCXM_ERR_TIMED_OUT
        UCXM_ERR_EXCEEDS_LIMIT
        UCXM_ERR_UNSUPPORTED
        UCXM_ERR_REVOKED
        UCXM_ERR_CLOSED
        UCXM_ERR_FORKED
        UCXM_ERR_ACCESS
        UCXM_ERR_RANGE
        UCXM_ERR_MALFORMED_KEY
        UCXM_ERR_KEY_VERSION
        UCXM_ERR_STALE_KEY
        UCXM_ERR_PEER_GONE
        UCXM_ERR_REMOTE_ACCESS
        UCXM_ERR_FLUSHED

    const uint64_t UCXM_MD_FLAG_REG
    const uint64_t UCXM_MD_FLAG_NEED_MEMH
    const uint64_t UCXM_MD_FLAG_NEED_RKEY
    const uint64_t UCXM_MD_FLAG_RKEY_PTR
    const uint64_t UCXM_MD_FLAG_INVALIDATE
    const uint64_t UCXM_MD_FLAG_REG_DMABUF
    const uint64_t UCXM_MD_FLAG_INVALIDATE_RMA
    const uint64_t UCXM_MD_FLAG_INVALIDATE_AMO
    const uint64_t UCXM_MD_FLAG_REG_DERIVED
    const uint64_t UCXM_MD_FLAG_DERIVE_ENDPOINT
    const uint64_t UCXM_MD_FLAG_ENDPOINT
    const uint64_t UCXM_MD_FLAG_ATOMIC
    const uint64_t UCXM_MD_FLAG_EVENT_FD

    const uint64_t UCXM_MEM_ACCESS_REMOTE_PUT
    const uint64_t UCXM_MEM_ACCESS_REMOTE_GET
    const uint64_t UCXM_MEM_ACCESS_REMOTE_ATOMIC
    const uint64_t UCXM_MEM_ACCESS_LOCAL_READ
    const uint64_t UCXM_MEM_ACCESS_LOCAL_WRITE
    const uint64_t UCXM_MEM_SYMMETRIC_RKEY
    const uint64_t UCXM_MEM_GVA
    const uint64_t UCXM_MEM_ACCESS_REMOTE
    const uint64_t UCXM_MEM_ACCESS_RMA
    const uint64_t UCXM_MEM_ACCESS_ALL
    const uint64_t UCXM_MEM_DERIVED_ONLY

    const uint32_t UCXM_PACK_INVALIDATE_RMA
    const uint32_t UCXM_PACK_INVALIDATE_AMO
    const uint32_t UCXM_PACK_EXPORT
    const uint32_t UCXM_PACK_RAW

    const uint32_t UCXM_MEM_TYPE_UNKNOWN

    enum:
        UCXM_MEM_TYPE_HOST
        UCXM_MEM_TYPE_CUDA
        UCXM_MEMH_LIVE
        UCXM_MEMH_REVOKING
        UCXM_MEMH_REVOKED
        UCXM_MEMH_CLOSED
        UCXM_ENFORCE_NONE
        UCXM_ENFORCE_COOPERATIVE
        UCXM_ENFORCE_ENFORCED
        UCXM_KEY_MAGIC
        UCXM_KEY_VERSION
        UCXM_KEY_HEADER_SIZE
        UCXM_KEY_MAX
        UCXM_KEY_PAYLOAD_MAX
        UCXM_KEY_OFF_MAGIC
        UCXM_KEY_OFF_VERSION
        UCXM_KEY_OFF_HEADER_LEN
        UCXM_KEY_OFF_TOTAL_LEN
        UCXM_KEY_OFF_FLAGS
        UCXM_KEY_OFF_COMPONENT
        UCXM_KEY_OFF_CRC
        UCXM_KEY_OFF_KEY_ID
        UCXM_KEY_OFF_ADDRESS
        UCXM_KEY_OFF_LENGTH
        UCXM_KEY_OFF_RIGHTS
        UCXM_KEY_OFF_PAYLOAD_LEN
        UCXM_KEY_OFF_RESERVED
        UCXM_KEY_OFF_OWNER
        UCXM_KEY_FLAG_EMPTY
        UCXM_KEY_FLAG_REVOCABLE
        UCXM_KEY_FLAG_ENDPOINT
        UCXM_KEY_FLAG_REVOKED
        UCXM_ADDRESS_MAGIC
        UCXM_ADDRESS_VERSION
        UCXM_ADDRESS_HEADER_SIZE
        UCXM_ADDRESS_MAX
        UCXM_ADDRESS_OFF_MAGIC
        UCXM_ADDRESS_OFF_VERSION
        UCXM_ADDRESS_OFF_HEADER_LEN
        UCXM_ADDRESS_OFF_TOTAL_LEN
        UCXM_ADDRESS_OFF_RESERVED
        UCXM_ADDRESS_OFF_COMPONENT
        UCXM_ADDRESS_OFF_RESERVED2
        UCXM_ADDRESS_OFF_OWNER

    ctypedef struct ucxm_enforcement_t:
        uint8_t rights[3]
        uint8_t range[3]
        uint8_t revoke[3]

    ctypedef struct ucxm_identity_t:
        uint64_t host
        uint64_t start_time
        uint32_t pid
        uint32_t pid_ns
        uint32_t user_ns
        uint32_t reserved

    ctypedef struct ucxm_md_t
    ctypedef struct ucxm_memh_t
    ctypedef struct ucxm_rkey_t
    ctypedef struct ucxm_ep_t

    ctypedef struct ucxm_error_t:
        int32_t sys_errno
        uint32_t syndrome
        char text[112]

    ctypedef struct ucxm_completion_t:
        void (*func)(ucxm_completion_t *self, ucxm_status_t status) noexcept nogil

    ctypedef struct ucxm_key_info_t:
        uint64_t key_id
        uint64_t address
        uint64_t length
        uint32_t rights
        uint16_t flags
        uint16_t reserved
        ucxm_identity_t owner

    ctypedef int ucxm_op_kind_t
    enum:
        UCXM_EP_IDLE
        UCXM_EP_CONNECTED
        UCXM_EP_ERROR
        UCXM_OP_GET
        UCXM_OP_PUT
        UCXM_OP_FETCH_ADD
        UCXM_OP_COMPARE_SWAP
        UCXM_BUNDLE_MAGIC
        UCXM_BUNDLE_VERSION
        UCXM_BUNDLE_HEADER_SIZE
        UCXM_BUNDLE_OFF_MAGIC
        UCXM_BUNDLE_OFF_VERSION
        UCXM_BUNDLE_OFF_COUNT
        UCXM_BUNDLE_OFF_TOTAL_LEN
        UCXM_BUNDLE_OFF_RESERVED
        UCXM_BUNDLE_ANY
        UCXM_BUNDLE_ALL
        UCXM_BUNDLE_MAX
        UCXM_API_ABI

    const uint64_t UCXM_LENGTH_REST
    const uint64_t UCXM_RIGHTS_ALL
    const uint32_t UCXM_DEREG_INVALIDATE
    const uint32_t UCXM_CASCADE
    const uint32_t UCXM_CLOSE_FORCE

    ctypedef struct ucxm_reg_params_t:
        size_t struct_size
        uint64_t address
        uint64_t length
        uint64_t flags
        uint32_t mem_type
        uint32_t has_dmabuf
        uint64_t dmabuf_offset
        int32_t dmabuf_fd
        uint32_t reserved
        void *adopt

    ctypedef struct ucxm_md_info_t:
        size_t struct_size
        uint64_t flags
        uint64_t max_reg
        uint64_t mem_types
        size_t reg_alignment
        size_t key_size_max
        size_t key_size_raw
        uint8_t software
        uint8_t python
        uint8_t reserved[6]
        ucxm_enforcement_t enforcement
        char component[32]
        char md_name[64]

    ctypedef struct ucxm_memh_info_t:
        size_t struct_size
        uint64_t address
        uint64_t length
        uint64_t flags
        uint64_t rights
        uint64_t grant
        uint64_t key_id
        uint32_t state
        uint32_t live_children
        uint32_t mem_type
        uint32_t lkey
        uint8_t derived
        uint8_t reserved[7]

    ctypedef struct ucxm_md_stats_t:
        size_t struct_size
        uint64_t live_bases, live_derived, live_rkeys, live_endpoints
        uint64_t mem_reg, mem_dereg, derive, revoke
        uint64_t key_create, key_destroy, keys_parked, keys_quarantined
        uint64_t rkey_hits, rkey_misses, transfers

    ctypedef struct ucxm_transfer_t:
        size_t struct_size
        ucxm_op_kind_t kind
        uint32_t reserved
        ucxm_rkey_t *rkey
        uint64_t remote_address
        void *local
        size_t length
        ucxm_memh_t *memh
        uint64_t operand
        uint64_t compare
        ucxm_completion_t comp
        ucxm_status_t status
        uint32_t reserved2
        uint64_t result
        size_t bytes_done
        ucxm_error_t error

    ctypedef struct ucxm_setting_t:
        const char *name
        const char *value

    ctypedef struct ucxm_api_t:
        size_t struct_size
        uint32_t abi
        const char *(*status_name)(ucxm_status_t status) noexcept nogil
        ucxm_status_t (*md_open)(const char *name, const ucxm_setting_t *settings, size_t count,
                                 ucxm_md_t **md, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*md_query)(ucxm_md_t *md, ucxm_md_info_t *info) noexcept nogil
        ucxm_status_t (*md_close)(ucxm_md_t *md, uint32_t flags,
                                  ucxm_error_t *error) noexcept nogil
        void (*md_release)(ucxm_md_t *md) noexcept nogil
        unsigned (*md_progress)(ucxm_md_t *md) noexcept nogil
        ucxm_status_t (*md_event_fd)(ucxm_md_t *md, int *fd, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*md_arm)(ucxm_md_t *md, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*md_stats)(ucxm_md_t *md, ucxm_md_stats_t *stats) noexcept nogil
        ucxm_status_t (*mem_reg)(ucxm_md_t *md, const ucxm_reg_params_t *params,
                                 ucxm_memh_t **memh, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*mem_derive)(ucxm_memh_t *parent, uint64_t offset, uint64_t length,
                                    uint64_t rights, ucxm_ep_t *ep, ucxm_memh_t **memh,
                                    ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*mem_query)(ucxm_memh_t *memh, ucxm_memh_info_t *info) noexcept nogil
        ucxm_status_t (*mem_enforcement)(ucxm_memh_t *memh,
                                         ucxm_enforcement_t *enforcement) noexcept nogil
        ucxm_status_t (*mem_invalidate)(ucxm_memh_t *memh, uint32_t flags, ucxm_completion_t *comp,
                                        ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*mem_dereg)(ucxm_memh_t *memh, uint32_t flags, ucxm_completion_t *comp,
                                   ucxm_error_t *error) noexcept nogil
        void (*memh_release)(ucxm_memh_t *memh) noexcept nogil
        ucxm_status_t (*mkey_pack)(ucxm_memh_t *memh, uint32_t flags, void *buffer, size_t *length,
                                   ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*revoke_notice)(ucxm_memh_t *memh, void *buffer, size_t *length,
                                       ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*key_query)(const void *key, size_t length, ucxm_key_info_t *info,
                                   uint32_t *component, size_t *size,
                                   ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*rkey_unpack)(ucxm_md_t *md, const void *key, size_t length,
                                     ucxm_rkey_t **rkey, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*rkey_from_raw)(ucxm_md_t *md, const void *raw, size_t length,
                                       uint64_t address, uint64_t size, ucxm_rkey_t **rkey,
                                       ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*rkey_query)(const ucxm_rkey_t *rkey, ucxm_key_info_t *info) noexcept nogil
        int (*rkey_compare)(const ucxm_rkey_t *one, const ucxm_rkey_t *other) noexcept nogil
        ucxm_status_t (*rkey_ptr)(ucxm_rkey_t *rkey, uint64_t address, void **ptr,
                                  ucxm_error_t *error) noexcept nogil
        void (*rkey_release)(ucxm_rkey_t *rkey) noexcept nogil
        ucxm_status_t (*rkey_revoke)(ucxm_md_t *md, const void *notice, size_t length,
                                     uint32_t *count, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*peer_probe)(ucxm_md_t *md, const void *key, size_t length,
                                    ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*peer_evict)(ucxm_md_t *md, const ucxm_identity_t *peer,
                                    ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*ep_create)(ucxm_md_t *md, ucxm_ep_t **ep,
                                   ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*ep_address)(ucxm_ep_t *ep, void *buffer, size_t *length,
                                    ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*ep_connect)(ucxm_ep_t *ep, const void *address, size_t length,
                                    ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*ep_reset)(ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*ep_state)(ucxm_ep_t *ep, uint32_t *state) noexcept nogil
        ucxm_status_t (*ep_close)(ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil
        void (*ep_release)(ucxm_ep_t *ep) noexcept nogil
        ucxm_status_t (*ep_post)(ucxm_ep_t *ep, ucxm_transfer_t *transfer,
                                 ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*ep_transfer)(ucxm_ep_t *ep, ucxm_transfer_t *transfer,
                                     ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*mem_reg_many)(ucxm_md_t *md, const ucxm_reg_params_t *params, size_t count,
                                      ucxm_memh_t **memhs, ucxm_status_t *status) noexcept nogil
        ucxm_status_t (*mem_derive_many)(ucxm_memh_t *parent, const uint64_t *offsets,
                                         const uint64_t *lengths, size_t count, uint64_t rights,
                                         ucxm_ep_t *ep, ucxm_memh_t **memhs,
                                         ucxm_status_t *status) noexcept nogil
        ucxm_status_t (*mkey_pack_many)(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                        void *buffer, size_t stride, size_t *lengths,
                                        ucxm_status_t *status) noexcept nogil
        ucxm_status_t (*mem_invalidate_many)(ucxm_memh_t *const *memhs, size_t count,
                                             uint32_t flags, ucxm_status_t *status) noexcept nogil
        ucxm_status_t (*mem_dereg_many)(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                        ucxm_status_t *status) noexcept nogil
        ucxm_status_t (*bundle_reg)(ucxm_md_t *const *mds, size_t count, uint32_t policy,
                                    const ucxm_reg_params_t *params, ucxm_memh_t **memhs,
                                    ucxm_status_t *status, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*bundle_pack)(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                     void *buffer, size_t *length,
                                     ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*bundle_unpack)(ucxm_md_t *const *mds, size_t count, const void *block,
                                       size_t length, ucxm_rkey_t **rkeys, ucxm_status_t *status,
                                       ucxm_error_t *error) noexcept nogil


cdef extern from "ucx_memh/backend.h" nogil:
    enum:
        UCXM_BACKEND_ABI
        UCXM_KEY_PLACEHOLDER
        UCXM_SLOT_PLAIN
        UCXM_SLOT_INDIRECT
        UCXM_SLOT_ATOMIC
        UCXM_SLOTS
        UCXM_EP_ADDRESS_MAX

    ctypedef struct ucxm_op_t

    ucxm_status_t ucxm_refuse(ucxm_error_t *error, ucxm_status_t status, const char *why)

    ctypedef int ucxm_key_kind_t
    enum:
        UCXM_KEY_DIRECT
        UCXM_KEY_INDIRECT
        UCXM_KEY_ATOMIC
        UCXM_KEY_DERIVED
        UCXM_KEY_KINDS

    ctypedef struct ucxm_key_slot_t:
        void *object
        uint32_t value
        uint8_t live
        uint8_t kind
        uint16_t reserved

    ctypedef struct ucxm_registration_t:
        uint64_t address
        uint64_t length
        uint64_t flags
        uint64_t grant
        uint64_t direct_rights
        uint64_t dmabuf_offset
        int32_t dmabuf_fd
        uint32_t mem_type
        void *adopt
        uint32_t lkey
        uint32_t rkey
        void *priv

    ctypedef struct ucxm_ep_t:
        void *priv

    ctypedef struct ucxm_memh_identity_t:
        ucxm_md_t *md
        ucxm_memh_t *parent
        uint64_t key_id
        uint32_t state
        uint32_t inherited_tail_offset
        uint32_t own_offset
        uint32_t own_tail_offset

    ctypedef struct ucxm_memh_inherited_t:
        ucxm_registration_t *reg
        uint64_t flags
        uint32_t lkey
        uint32_t mem_type

    ctypedef struct ucxm_memh_own_t:
        uint64_t address
        uint64_t length
        uint64_t rights
        uint64_t grant
        ucxm_ep_t *ep
        ucxm_key_slot_t slot[3]

    ctypedef struct ucxm_memh_t:
        ucxm_memh_identity_t id
        ucxm_memh_inherited_t inherited

    ucxm_memh_own_t *ucxm_memh_own(const ucxm_memh_t *memh)
    void *ucxm_memh_inherited_tail(const ucxm_memh_t *memh)
    void *ucxm_memh_own_tail(const ucxm_memh_t *memh)

    ctypedef struct ucxm_rkey_t:
        ucxm_key_info_t info
        void *priv

    ctypedef struct ucxm_md_attr_t:
        size_t struct_size
        uint64_t flags
        uint64_t max_reg
        uint64_t mem_types
        size_t reg_alignment
        size_t rkey_packed_size
        size_t rkey_raw_size
        size_t bounce_size
        uint32_t quarantine
        uint8_t software
        uint8_t python
        uint8_t fast_reg
        uint8_t placeholders
        ucxm_enforcement_t enforcement
        char component[32]
        char md_name[64]

    ctypedef struct ucxm_md_ops_t:
        size_t struct_size
        uint32_t abi
        size_t reg_size
        size_t rkey_size
        size_t tail_inherit_size
        size_t tail_own_size
        void (*tail_init)(void *md, const ucxm_memh_t *memh, void *inherited,
                          void *own) noexcept nogil
        void (*close)(void *md) noexcept nogil
        ucxm_status_t (*mem_reg)(void *md, ucxm_registration_t *reg,
                                 ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*mem_dereg)(void *md, ucxm_registration_t *reg,
                                   ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*mem_derive)(void *md, const ucxm_memh_t *base, const ucxm_memh_t *memh,
                                    ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*key_create)(void *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                    ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*key_destroy)(void *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                     ucxm_completion_t *comp,
                                     ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*mkey_pack)(void *md, const ucxm_memh_t *memh,
                                   const ucxm_key_slot_t *rma, const ucxm_key_slot_t *atomic,
                                   uint8_t *payload, size_t *length,
                                   ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*rkey_unpack)(void *md, ucxm_rkey_t *rkey, const uint8_t *payload,
                                     size_t length, int raw,
                                     ucxm_error_t *error) noexcept nogil
        void (*rkey_release)(void *md, ucxm_rkey_t *rkey) noexcept nogil
        ucxm_status_t (*rkey_ptr)(void *md, const ucxm_rkey_t *rkey, uint64_t address,
                                  void **ptr, ucxm_error_t *error) noexcept nogil
        unsigned (*progress)(void *md) noexcept nogil
        ucxm_status_t (*event_fd)(void *md, int *fd, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*event_arm)(void *md, ucxm_error_t *error) noexcept nogil
        void (*mem_enforcement)(void *md, const ucxm_memh_t *memh,
                                ucxm_enforcement_t *enforcement) noexcept nogil
        void (*stat)(void *md, unsigned index, const char **name,
                     uint64_t *value) noexcept nogil
        void (*explain)(void *md, const ucxm_memh_t *memh, char *text,
                        size_t size) noexcept nogil
        ucxm_status_t (*peer_evict)(void *md, const ucxm_identity_t *peer,
                                    ucxm_error_t *error) noexcept nogil
        void (*key_flush)(void *md) noexcept nogil
        ucxm_status_t (*mem_query)(void *md, uint64_t address, uint64_t length, uint32_t *mem_type,
                                   ucxm_error_t *error) noexcept nogil

    ctypedef struct ucxm_op_t:
        ucxm_op_kind_t kind
        uint32_t lkey
        uint8_t has_lkey
        uint64_t remote_address
        void *local
        size_t length
        uint64_t operand
        uint64_t compare
        uint64_t result
        size_t bytes_done
        ucxm_rkey_t *rkey
        ucxm_ep_t *ep
        ucxm_error_t error
        void (*complete)(ucxm_op_t *op, ucxm_status_t status) noexcept nogil
        uint64_t scratch[6]
        uint64_t local_stream

    ctypedef struct ucxm_ep_ops_t:
        size_t struct_size
        size_t ep_size
        ucxm_status_t (*ep_create)(void *md, ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil
        void (*ep_destroy)(void *md, ucxm_ep_t *ep) noexcept nogil
        ucxm_status_t (*ep_address)(void *md, ucxm_ep_t *ep, uint8_t *address, size_t *length,
                                    ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*ep_connect)(void *md, ucxm_ep_t *ep, const uint8_t *address,
                                    size_t length, ucxm_error_t *error) noexcept nogil
        ucxm_status_t (*ep_reset)(void *md, ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil
        uint32_t (*ep_state)(void *md, ucxm_ep_t *ep) noexcept nogil
        ucxm_status_t (*ep_post)(void *md, ucxm_ep_t *ep, ucxm_op_t *op,
                                 ucxm_error_t *error) noexcept nogil
