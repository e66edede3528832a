# SPDX-License-Identifier: BSD-3-Clause
# cython: freethreading_compatible=True
# distutils: include_dirs = backends/ib
"""The component `ib`: revocable keys made of memory windows, on any verbs device that has them.

A base has the registration's own key.  A derived handle has one memory window with exactly its
range and rights: of type 1, bound over a queue pair of the domain that is connected to itself, and
good on every connection of the domain; or, for a key of one endpoint, of type 2, bound over that.
One bind makes it, freeing the window ends it, and the registration is not touched.
"""
from libc.errno cimport (
    EACCES, EAGAIN, EBUSY, EINVAL, ENODEV, ENOMEM, EOPNOTSUPP, EPERM, ETIMEDOUT, errno,
)
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strcmp

from ucx_memh.core cimport md_attr_init, md_bind
from ucx_memh.libmemh cimport (
    UCXM_BACKEND_ABI, UCXM_ENFORCE_COOPERATIVE, UCXM_ENFORCE_ENFORCED, UCXM_ENFORCE_NONE,
    UCXM_ERR_ACCESS, UCXM_ERR_EXCEEDS_LIMIT, UCXM_ERR_IO_ERROR, UCXM_ERR_NO_MEMORY,
    UCXM_ERR_UNSUPPORTED, UCXM_MD_FLAG_DERIVE_ENDPOINT, UCXM_MD_FLAG_REG_DERIVED,
    UCXM_MEM_ACCESS_REMOTE_ATOMIC, UCXM_MEM_ACCESS_REMOTE_GET, UCXM_MEM_ACCESS_REMOTE_PUT,
    UCXM_MEM_DERIVED_ONLY, UCXM_OK, ucxm_completion_t, ucxm_enforcement_t, ucxm_ep_ops_t,
    ucxm_error_t, ucxm_key_slot_t, ucxm_md_attr_t, ucxm_md_ops_t, ucxm_memh_own, ucxm_memh_own_t,
    ucxm_memh_t, ucxm_registration_t, ucxm_status_t,
)
from ucx_memh_ib.verbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, IBV_MW_TYPE_1, IBV_MW_TYPE_2, IBV_SEND_SIGNALED, IBV_WC_REM_ACCESS_ERR,
    IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_BIND_MW,
    IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IB_MW_BIND_ANY, IB_NO_KEY, ib_adopted,
    ib_config_t, ib_control_clear, ib_control_post, ib_control_t, ib_control_up, ib_control_wait,
    ib_count, ib_drop_events, ib_ep_ops, ib_ep_qpn, ib_ep_windows, ib_ep_work, ib_errno_status,
    ib_explain_direct, ib_explain_fork, ib_explain_region, ib_fail, ib_load64, ib_md_attr,
    ib_md_clear, ib_md_init, ib_md_ops, ib_md_t, ib_mem_reg, ib_put32, ib_put64, ib_reg_t, ib_say,
    ib_stat, ib_text, ib_text_t, ibv_context, ibv_device, ibv_device_attr, ibv_mr, ibv_mw,
    ibv_mw_bind_info, ibv_pd, ibv_qp, ibv_send_wr, ibv_sge, ibv_wc, pthread_mutex_t, ucxm_verbs_t,
    verbs_table,
)

from ucx_memh.errors import InvalidParamError, NoDeviceError, error_from_status
from ucx_memh_ib.verbs import library_status

cdef extern from "ucx_memh_ib/verbs_table.h" nogil:
    enum:
        IBV_DEVICE_MEM_WINDOW
        IBV_DEVICE_MEM_WINDOW_TYPE_2B

    ctypedef struct ibv_mw_bind "struct ibv_mw_bind":
        uint64_t wr_id
        unsigned int send_flags
        ibv_mw_bind_info bind_info

    ibv_mw *ibv_alloc_mw(ibv_pd *pd, int kind)
    int ibv_dealloc_mw(ibv_mw *mw)
    int ibv_bind_mw(ibv_qp *qp, ibv_mw *mw, ibv_mw_bind *bind)
    uint32_t ibv_inc_rkey(uint32_t rkey)

cdef extern from "<stdlib.h>" nogil:
    void *aligned_alloc(size_t alignment, size_t size)

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)

cdef extern from "<stdio.h>" nogil:
    int snprintf(char *text, size_t size, const char *format, ...)

cdef enum:
    PACKED_SIZE = 16
    RAW_SIZE = 8
    CONTROL_DEPTH = 16
    LONG_WINDOW = 1 << 31  # some drivers bind none that is longer

cdef struct window_t:
    ibv_mw *mw
    ibv_mr *mr             # that it was to be bound to
    window_t *next         # in the list of those that could not be freed
    uint8_t type1
    uint8_t bound          # of type 2: to the handle's endpoint
    uint8_t asked          # the device was told to forget what it is bound to; never twice

# What the self-check at open has found.
cdef struct check_t:
    uint8_t asked
    uint8_t done
    uint8_t binds          # windows can be bound at all
    uint8_t range[3]       # get, put, atomic: the device refuses what is outside
    uint8_t atomic         # windows serve atomics ...
    uint8_t atomic_right   # ... if the registration has that right itself
    char why[128]          # it could not be done

cdef struct md_t:
    ib_md_t ib              # first: the shared operations take it
    pthread_mutex_t lock    # mem_adopt binds, too, and not under the core's key lock; guards ...
    ib_control_t control    # windows of type 1 are bound over it, and outlive it
    window_t *stuck         # windows of nobody that could not be freed yet
    check_t check
    unsigned caps           # IBV_DEVICE_*
    uint8_t software
    uint64_t alloc_mw       # verbs called
    uint64_t dealloc_mw
    uint64_t bind_mw
    uint64_t local_inv

include "window.src/bind.pxi"
include "window.src/check.pxi"
include "window.src/adopt.pxi"
include "window.src/keys.pxi"
include "window.src/explain.pxi"
include "window.src/md.pxi"
