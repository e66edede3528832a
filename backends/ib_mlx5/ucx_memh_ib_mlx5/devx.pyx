# SPDX-License-Identifier: BSD-3-Clause
# cython: freethreading_compatible=True
# distutils: include_dirs = backends/ib backends/ib_mlx5
"""The component `ib_mlx5`: revocable keys on mlx5 devices, by work requests or DEVX commands.

A base has the registration's own key (direct) and, packed for invalidation, KSM keys over the
whole of it.  A derived handle has one KLM key with exactly its range and rights.  Every such key
is an object of its own in the device, and the registration under it is not touched.  That of a
derived handle comes from a pool of free ones: a BIND_MW aims it and a LOCAL_INV ends it, over a
queue pair of the domain's own.  All others, and those that are too long for it or of one endpoint,
are made by one CREATE_MKEY and ended by one DESTROY_MKEY.  Data moves over ucx_memh_ib's endpoints.
"""
from libc.errno cimport EAGAIN, EBUSY, ENODEV, ENOMEM, ENOSYS, EOPNOTSUPP, ETIMEDOUT, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strcmp

from ucx_memh.core cimport md_attr_init, md_bind
from ucx_memh.libmemh cimport (
    UCXM_BACKEND_ABI, UCXM_ENFORCE_COOPERATIVE, UCXM_ENFORCE_ENFORCED, UCXM_ENFORCE_NONE,
    UCXM_ERR_BUSY, UCXM_ERR_EXCEEDS_LIMIT, UCXM_ERR_IO_ERROR, UCXM_ERR_NO_DEVICE,
    UCXM_ERR_NO_MEMORY, UCXM_ERR_NO_RESOURCE, UCXM_ERR_UNSUPPORTED, UCXM_INPROGRESS,
    UCXM_KEY_ATOMIC, UCXM_KEY_DERIVED, UCXM_KEY_INDIRECT, UCXM_KEY_PLACEHOLDER,
    UCXM_MD_FLAG_DERIVE_ENDPOINT, UCXM_MD_FLAG_INVALIDATE, UCXM_MD_FLAG_INVALIDATE_AMO,
    UCXM_MD_FLAG_INVALIDATE_RMA, UCXM_MD_FLAG_REG_DERIVED, UCXM_MEM_ACCESS_REMOTE_ATOMIC,
    UCXM_MEM_ACCESS_REMOTE_GET, UCXM_MEM_ACCESS_REMOTE_PUT, UCXM_OK, ucxm_completion_t,
    ucxm_enforcement_t, ucxm_ep_ops_t, ucxm_error_t, ucxm_key_slot_t, ucxm_md_attr_t, ucxm_md_ops_t,
    ucxm_memh_own, ucxm_memh_own_t, ucxm_memh_t, ucxm_registration_t, ucxm_status_t,
)
from ucx_memh_ib.verbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, IBV_MW_TYPE_1, IBV_SEND_SIGNALED, IBV_WC_SUCCESS, IBV_WR_BIND_MW,
    IBV_WR_LOCAL_INV, IB_NO_KEY, ib_adopted, ib_coarse_ns, ib_config_t, ib_control_clear,
    ib_control_drop, ib_control_post, ib_control_t, ib_control_up, ib_count, ib_ep_ops,
    ib_ep_qpn, ib_errno_status, ib_event_add, ib_event_arm, ib_explain_direct, ib_explain_fork,
    ib_explain_region, ib_fail, ib_load32, ib_load64, ib_md_attr, ib_md_clear, ib_md_init,
    ib_md_ops, ib_md_t, ib_mem_dereg, ib_progress, ib_put32, ib_put64, ib_random_psn, ib_reg_t,
    ib_say, ib_stat, ib_store32, ib_text, ib_text_t, ibv_context, ibv_device, ibv_mw, ibv_pd,
    ibv_poll_cq, ibv_post_send, ibv_req_notify_cq, ibv_send_wr, ibv_wc, pthread_mutex_t,
    ucxm_library_load, ucxm_library_t, ucxm_symbol_t, ucxm_verbs_t, verbs_table,
)

from ucx_memh.errors import InvalidParamError, NoDeviceError, error_from_status
from ucx_memh_ib.verbs import library_status

cdef extern from "ucx_memh_ib_mlx5/mlx5_table.h" nogil:
    """
    static pthread_mutex_t mlx5_tables_lock = PTHREAD_MUTEX_INITIALIZER;
    """
    ctypedef struct mlx5dv_context_attr "struct mlx5dv_context_attr":
        uint32_t flags

    ctypedef struct mlx5dv_pd "struct mlx5dv_pd":
        uint32_t pdn

    ctypedef struct pd_obj_t:
        ibv_pd *in_ "in"
        mlx5dv_pd *out

    ctypedef struct mlx5dv_obj "struct mlx5dv_obj":
        pd_obj_t pd

    ctypedef struct mlx5dv_devx_obj "struct mlx5dv_devx_obj":
        pass

    ctypedef struct mlx5dv_mkey "struct mlx5dv_mkey":
        uint32_t rkey

    ctypedef struct mlx5dv_mkey_init_attr "struct mlx5dv_mkey_init_attr":
        ibv_pd *pd
        uint32_t create_flags
        uint16_t max_entries

    ctypedef struct ucxm_mlx5_t:
        ucxm_library_t library
        bint (*is_supported)(ibv_device *device) noexcept nogil
        ibv_context *(*open_device)(ibv_device *device, mlx5dv_context_attr *attr) noexcept nogil
        int (*init_obj)(mlx5dv_obj *query, uint64_t type) noexcept nogil
        int (*general_cmd)(ibv_context *context, const void *in_, size_t in_size, void *out,
                           size_t out_size) noexcept nogil
        mlx5dv_devx_obj *(*obj_create)(ibv_context *context, const void *in_, size_t in_size,
                                       void *out, size_t out_size) noexcept nogil
        int (*obj_destroy)(mlx5dv_devx_obj *obj) noexcept nogil
        mlx5dv_mkey *(*create_mkey)(mlx5dv_mkey_init_attr *attr) noexcept nogil
        int (*destroy_mkey)(mlx5dv_mkey *mkey) noexcept nogil

    enum:
        MLX5DV_CONTEXT_FLAGS_DEVX
        MLX5DV_OBJ_PD
        MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT

    const ucxm_symbol_t *ucxm_mlx5_symbols
    const size_t UCXM_MLX5_SYMBOL_COUNT

    pthread_mutex_t mlx5_tables_lock
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_mutex_trylock(pthread_mutex_t *mutex)
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)

cdef extern from "ucx_memh_ib_mlx5/mailbox.h" nogil:
    enum:
        PRM_CREATE_MKEY_OUT_SIZE
        PRM_QUERY_HCA_CAP_IN_SIZE
        PRM_QUERY_HCA_CAP_OUT_SIZE
        PRM_CAP_GENERAL
        PRM_CAP_ATOMIC
        PRM_QPN_ANY
    const uint64_t MLX5_ENTITY

    ctypedef struct mlx5_mkey_t:
        uint64_t start
        uint64_t length
        uint64_t entries
        uint64_t list_size
        uint32_t lkey
        uint32_t pdn
        uint32_t qpn
        uint8_t tag
        uint8_t a
        uint8_t rw
        uint8_t rr
        uint8_t lw

    ctypedef struct mlx5_caps_t:
        uint64_t max_klm_list
        uint32_t atomic_align
        uint8_t max_indirection
        uint8_t fixed_buffer_size
        uint8_t umr_modify_atomic_disabled
        uint8_t umr_indirect_mkey_disabled
        uint8_t atomic

    void mlx5_mkey_klm(mlx5_mkey_t *mkey, uint64_t address, uint64_t length)
    void mlx5_mkey_ksm(mlx5_mkey_t *mkey, uint64_t address, uint64_t length, uint64_t page,
                       uint64_t atomic_align)
    size_t mlx5_create_mkey_size(const mlx5_mkey_t *mkey)
    void mlx5_create_mkey_fill(uint8_t *box, const mlx5_mkey_t *mkey)
    void mlx5_query_cap_fill(uint8_t *box, unsigned type)
    void mlx5_caps_general(mlx5_caps_t *caps, const uint8_t *out)
    void mlx5_caps_atomic(mlx5_caps_t *caps, const uint8_t *out)
    const char *prm_status_name(uint8_t status)
    uint64_t prm_out_status(const uint8_t *out)
    uint64_t prm_out_syndrome(const uint8_t *out)
    uint64_t prm_out_mkey_index(const uint8_t *out)

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned value, int flags)
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK

cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    ssize_t read(int fd, void *to, size_t size)
    ssize_t write(int fd, const void *what, size_t size)
    long sysconf(int name)
    enum:
        _SC_PAGESIZE

cdef extern from "<errno.h>" nogil:
    enum:
        EREMOTEIO

cdef extern from "<stdio.h>" nogil:
    int snprintf(char *text, size_t size, const char *format, ...)

cdef enum:
    TAGS = 251          # higher ones mark keys made by work requests
    MAILBOX_SIZE = 400  # on the stack: up to eight translation entries
    PACKED_SIZE = 16
    RAW_SIZE = 8

# A native key: an object in the device.  It is the core's, in a slot, or in a list of the pool's.
cdef struct key_t:
    mlx5dv_devx_obj *devx   # made by CREATE_MKEY ...
    mlx5dv_mkey *mkey       # ... or for work requests to aim
    uint32_t value          # index and tag, as the device has them
    # of what work requests aim
    uint8_t tag             # of its next use
    uint8_t state           # KEY_*
    uint16_t uses           # since its tags were all to be had
    uint64_t wr             # wr_id of its LOCAL_INV
    uint64_t rest           # pool.ended, when its tags were used up
    ucxm_completion_t *comp
    ucxm_status_t status    # for it
    key_t *next

cdef struct key_list_t:
    key_t *head             # the oldest one
    key_t *tail
    uint32_t count          # may be read without the lock

cdef struct pool_t:
    ib_control_t control    # first
    pthread_mutex_t wire    # guards it and ...
    key_list_t flying       # LOCAL_INV posted, in that order
    uint64_t deadline
    int wake                # an eventfd in the Md's descriptor, from the first arm() on
    uint8_t armed           # somebody may sleep on that
    uint8_t asked           # ... and the completion queue was asked for an event since
    pthread_mutex_t lock    # guards all below
    key_list_t free
    key_list_t resting
    key_list_t pending      # LOCAL_INV to be posted
    key_list_t finished     # `comp` to be run
    key_list_t stuck        # of nobody, and could not be destroyed yet
    uint32_t missing        # errno: why there is no queue pair; may be read without the lock
    uint32_t used
    uint32_t busy           # in pending, flying, finished
    uint32_t quarantine
    uint64_t ended          # keys
    uint64_t told           # of these the core knows
    uint64_t bind_mw        # work requests posted
    uint64_t local_inv
    uint64_t doorbells

cdef struct md_t:
    ib_md_t ib              # first: the shared operations take it
    ucxm_mlx5_t *mlx5
    mlx5_caps_t caps
    pool_t pool
    const char *umr_missing  # why no key is aimed by work requests; NULL: they are
    uint64_t page
    uint32_t pdn
    uint8_t tag             # of the next key; under the core's key lock
    uint8_t software
    uint8_t can_derive
    uint8_t can_atomic      # indirect keys may carry the atomic right
    uint64_t derive_length  # whatever is no longer ...
    uint64_t derive_never   # ... and has none of these rights, a key can be made for
    uint64_t create_mkey    # commands sent
    uint64_t destroy_mkey
    uint64_t query_hca_cap
    uint64_t init_obj

include "devx.src/library.pxi"
include "devx.src/command.pxi"
include "devx.src/keys.pxi"
include "devx.src/pool.pxi"
include "devx.src/wire.pxi"
include "devx.src/aim.pxi"
include "devx.src/make.pxi"
include "devx.src/explain.pxi"
include "devx.src/md.pxi"
