# SPDX-License-Identifier: BSD-3-Clause
"""What every backend on libibverbs shares.

The loader's tables, a device (`ib_md_t`, the first member of a backend's own Md, so that the
operations below take either), registrations and the RC endpoint.
"""
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

from ucx_memh.libmemh cimport (
    ucxm_ep_ops_t, ucxm_ep_t, ucxm_error_t, ucxm_md_attr_t, ucxm_md_ops_t, ucxm_memh_t, ucxm_op_t,
    ucxm_registration_t, ucxm_rkey_t, ucxm_status_t,
)

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass

cdef extern from "ucx_memh_ib/verbs_table.h" nogil:
    ctypedef struct ucxm_symbol_t:
        const char *name
        const char *version
        size_t offset
        int required

    ctypedef struct ucxm_library_t:
        void *handle
        char path[512]
        char reason[768]

    void ucxm_symbol_reason(const ucxm_library_t *library, const ucxm_symbol_t *symbol,
                            char *text, size_t size)
    int ucxm_library_load(ucxm_library_t *library, const char *path,
                          const ucxm_symbol_t *symbols, size_t count)

    const ucxm_symbol_t *ucxm_verbs_symbols
    const size_t UCXM_VERBS_SYMBOL_COUNT

    enum:
        IBV_ACCESS_LOCAL_WRITE
        IBV_ACCESS_REMOTE_WRITE
        IBV_ACCESS_REMOTE_READ
        IBV_ACCESS_REMOTE_ATOMIC
        IBV_ACCESS_MW_BIND

    enum:
        IBV_ATOMIC_NONE
        IBV_LINK_LAYER_ETHERNET
        IBV_GID_TYPE_ROCE_V2
        IBV_QPT_RC
        IBV_QPS_RESET
        IBV_QPS_INIT
        IBV_QPS_RTR
        IBV_QPS_RTS
        IBV_QPS_ERR
        IBV_QP_STATE
        IBV_QP_ACCESS_FLAGS
        IBV_QP_PKEY_INDEX
        IBV_QP_PORT
        IBV_QP_AV
        IBV_QP_PATH_MTU
        IBV_QP_TIMEOUT
        IBV_QP_RETRY_CNT
        IBV_QP_RNR_RETRY
        IBV_QP_RQ_PSN
        IBV_QP_MAX_QP_RD_ATOMIC
        IBV_QP_MIN_RNR_TIMER
        IBV_QP_SQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC
        IBV_QP_DEST_QPN
        IBV_SEND_SIGNALED
        IBV_SEND_INLINE
        IBV_WR_RDMA_WRITE
        IBV_WR_RDMA_READ
        IBV_WR_ATOMIC_CMP_AND_SWP
        IBV_WR_ATOMIC_FETCH_AND_ADD
        IBV_WR_LOCAL_INV
        IBV_WR_BIND_MW
        IBV_MW_TYPE_1
        IBV_MW_TYPE_2
        IBV_WC_SUCCESS
        IBV_WC_WR_FLUSH_ERR
        IBV_WC_REM_ACCESS_ERR
        IBV_WC_RETRY_EXC_ERR
        IBV_WC_RNR_RETRY_EXC_ERR
        IBV_WC_RESP_TIMEOUT_ERR
        IBV_WC_REM_INV_REQ_ERR
        IBV_EVENT_CQ_ERR
        IBV_EVENT_QP_FATAL
        IBV_EVENT_QP_REQ_ERR
        IBV_EVENT_QP_ACCESS_ERR
        IBV_EVENT_DEVICE_FATAL

    ctypedef union ibv_gid "union ibv_gid":
        uint8_t raw[16]

    ctypedef struct ibv_device "struct ibv_device":
        pass

    ctypedef struct ibv_context "struct ibv_context":
        ibv_device *device
        int async_fd

    ctypedef struct ibv_pd "struct ibv_pd":
        ibv_context *context

    ctypedef struct ibv_mr "struct ibv_mr":
        ibv_pd *pd
        void *addr
        size_t length
        uint32_t lkey
        uint32_t rkey

    ctypedef struct ibv_mw "struct ibv_mw":
        ibv_context *context
        ibv_pd *pd
        uint32_t rkey
        int type

    ctypedef struct ibv_mw_bind_info "struct ibv_mw_bind_info":
        ibv_mr *mr
        uint64_t addr
        uint64_t length
        unsigned int mw_access_flags

    ctypedef struct ibv_comp_channel "struct ibv_comp_channel":
        int fd

    ctypedef struct ibv_cq "struct ibv_cq":
        pass

    ctypedef struct ibv_qp "struct ibv_qp":
        uint32_t qp_num

    ctypedef struct ibv_device_attr "struct ibv_device_attr":
        uint64_t node_guid
        uint64_t max_mr_size
        int max_qp_wr
        unsigned int device_cap_flags
        int max_cqe
        int max_qp_rd_atom
        int max_qp_init_rd_atom
        int atomic_cap
        uint8_t phys_port_cnt

    ctypedef struct ibv_port_attr "struct ibv_port_attr":
        int state
        int active_mtu
        int gid_tbl_len
        uint32_t max_msg_sz
        uint16_t lid
        uint8_t link_layer

    ctypedef struct ibv_gid_entry "struct ibv_gid_entry":
        ibv_gid gid
        uint32_t gid_type

    ctypedef struct ibv_qp_cap "struct ibv_qp_cap":
        uint32_t max_send_wr
        uint32_t max_recv_wr
        uint32_t max_send_sge
        uint32_t max_recv_sge
        uint32_t max_inline_data

    ctypedef struct ibv_qp_init_attr "struct ibv_qp_init_attr":
        ibv_cq *send_cq
        ibv_cq *recv_cq
        ibv_qp_cap cap
        int qp_type
        int sq_sig_all

    ctypedef struct ibv_global_route "struct ibv_global_route":
        ibv_gid dgid
        uint8_t sgid_index
        uint8_t hop_limit

    ctypedef struct ibv_ah_attr "struct ibv_ah_attr":
        ibv_global_route grh
        uint16_t dlid
        uint8_t is_global
        uint8_t port_num

    ctypedef struct ibv_qp_attr "struct ibv_qp_attr":
        int qp_state
        int path_mtu
        uint32_t rq_psn
        uint32_t sq_psn
        uint32_t dest_qp_num
        unsigned int qp_access_flags
        ibv_ah_attr ah_attr
        uint16_t pkey_index
        uint8_t max_rd_atomic
        uint8_t max_dest_rd_atomic
        uint8_t min_rnr_timer
        uint8_t port_num
        uint8_t timeout
        uint8_t retry_cnt
        uint8_t rnr_retry

    ctypedef struct ibv_sge "struct ibv_sge":
        uint64_t addr
        uint32_t length
        uint32_t lkey

    ctypedef struct ib_rdma_t:
        uint64_t remote_addr
        uint32_t rkey

    ctypedef struct ib_atomic_t:
        uint64_t remote_addr
        uint64_t compare_add
        uint64_t swap
        uint32_t rkey

    ctypedef union ib_wr_kind_t:
        ib_rdma_t rdma
        ib_atomic_t atomic

    ctypedef struct ib_bind_t:
        ibv_mw *mw
        uint32_t rkey
        ibv_mw_bind_info bind_info

    ctypedef struct ibv_send_wr "struct ibv_send_wr":
        uint64_t wr_id
        ibv_send_wr *next
        ibv_sge *sg_list
        int num_sge
        int opcode
        unsigned int send_flags
        uint32_t invalidate_rkey
        ib_wr_kind_t wr
        ib_bind_t bind_mw

    ctypedef struct ibv_wc "struct ibv_wc":
        uint64_t wr_id
        int status
        uint32_t vendor_err

    ctypedef union ib_element_t:
        ibv_qp *qp

    ctypedef struct ibv_async_event "struct ibv_async_event":
        ib_element_t element
        int event_type

    int ibv_post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)
    int ibv_poll_cq(ibv_cq *cq, int count, ibv_wc *wc)
    int ibv_req_notify_cq(ibv_cq *cq, int solicited_only)

    ctypedef struct ucxm_verbs_t:
        ucxm_library_t library
        ibv_device **(*get_device_list)(int *count) noexcept nogil
        void (*free_device_list)(ibv_device **list) noexcept nogil
        const char *(*get_device_name)(ibv_device *device) noexcept nogil
        uint64_t (*get_device_guid)(ibv_device *device) noexcept nogil
        ibv_context *(*open_device)(ibv_device *device) noexcept nogil
        int (*close_device)(ibv_context *context) noexcept nogil
        int (*query_device)(ibv_context *context, ibv_device_attr *attr) noexcept nogil
        int (*query_port)(ibv_context *context, uint8_t port, ibv_port_attr *attr) noexcept nogil
        int (*query_gid)(ibv_context *context, uint8_t port, int index, ibv_gid *gid) noexcept nogil
        int (*query_gid_ex)(ibv_context *context, uint32_t port, uint32_t index,
                            ibv_gid_entry *entry, uint32_t flags, size_t entry_size) noexcept nogil
        ibv_pd *(*alloc_pd)(ibv_context *context) noexcept nogil
        int (*dealloc_pd)(ibv_pd *pd) noexcept nogil
        ibv_mr *(*reg_mr)(ibv_pd *pd, void *address, size_t length, int access) noexcept nogil
        ibv_mr *(*reg_dmabuf_mr)(ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                                 int fd, int access) noexcept nogil
        int (*dereg_mr)(ibv_mr *mr) noexcept nogil
        ibv_comp_channel *(*create_channel)(ibv_context *context) noexcept nogil
        int (*destroy_channel)(ibv_comp_channel *channel) noexcept nogil
        ibv_cq *(*create_cq)(ibv_context *context, int cqe, void *cq_context,
                             ibv_comp_channel *channel, int vector) noexcept nogil
        int (*destroy_cq)(ibv_cq *cq) noexcept nogil
        int (*get_cq_event)(ibv_comp_channel *channel, ibv_cq **cq,
                            void **cq_context) noexcept nogil
        void (*ack_cq_events)(ibv_cq *cq, unsigned count) noexcept nogil
        ibv_qp *(*create_qp)(ibv_pd *pd, ibv_qp_init_attr *attr) noexcept nogil
        int (*modify_qp)(ibv_qp *qp, ibv_qp_attr *attr, int mask) noexcept nogil
        int (*query_qp)(ibv_qp *qp, ibv_qp_attr *attr, int mask,
                        ibv_qp_init_attr *init) noexcept nogil
        int (*destroy_qp)(ibv_qp *qp) noexcept nogil
        int (*get_async_event)(ibv_context *context, ibv_async_event *event) noexcept nogil
        void (*ack_async_event)(ibv_async_event *event) noexcept nogil
        const char *(*wc_status_str)(int status) noexcept nogil

cdef extern from "ucx_memh_ib/verbs_util.h" nogil:
    void ib_count(uint64_t *counter, uint64_t by)
    uint64_t ib_load64(const uint64_t *value)
    void ib_store64(uint64_t *value, uint64_t to)
    uint32_t ib_load32(const uint32_t *value)
    void ib_store32(uint32_t *value, uint32_t to)
    void ib_put16(uint8_t *at, uint16_t value)
    void ib_put32(uint8_t *at, uint32_t value)
    void ib_put64(uint8_t *at, uint64_t value)
    uint16_t ib_get16(const uint8_t *at)
    uint32_t ib_get32(const uint8_t *at)
    uint64_t ib_get64(const uint8_t *at)
    uint64_t ib_be64(uint64_t value)
    uint32_t ib_random_psn()
    uint64_t ib_coarse_ns()
    # Text and errno for `error`, which may be NULL; returns `status`.
    ucxm_status_t ib_fail(ucxm_error_t *error, ucxm_status_t status, int sys_errno,
                          const char *format, ...)


cdef struct ib_ep_t

cdef struct ib_counts_t:
    uint64_t reg_mr
    uint64_t dereg_mr
    uint64_t create_qp
    uint64_t destroy_qp
    uint64_t modify_qp
    uint64_t query_qp
    uint64_t post_send
    uint64_t completions
    uint64_t error_completions
    uint64_t async_events

# One work request under way.  Its index and generation are the wr_id, so that a completion
# that comes after its queue pair was destroyed finds nobody.
cdef struct ib_wr_t:
    ucxm_op_t *op        # NULL: free
    ib_ep_t *ep
    uint64_t length      # bytes that it moves
    uint64_t offset      # of these in the operation
    uint32_t generation
    uint32_t next        # in the free list
    int32_t bounce       # index of a bounce buffer, or -1

# A work request that is no operation (ib_ep_work); one at a time.
cdef struct ib_ticket_t:
    ib_ep_t *ep          # NULL: none under way
    uint32_t number
    uint32_t done        # the last number that has completed
    int status           # of its completion

# The backend's part of an operation (ucxm_op_t.scratch).
cdef struct ib_op_t:
    ucxm_op_t *next      # in the list of finished operations
    uint64_t posted      # bytes
    uint32_t pending     # work requests under way, plus one while some are still to be posted
    int32_t status

# The last epoch seen of a peer's endpoint, which `born`, its first one, tells from all others.
cdef struct ib_peer_t:
    uint8_t gid[16]
    uint64_t guid
    uint64_t born
    uint64_t epoch
    uint32_t qpn

cdef struct ib_config_t:
    uint8_t port         # 0: the first one
    int gid_index        # -1: choose
    uint32_t queue_depth  # work requests per endpoint
    uint64_t max_msg     # bytes per work request, 0: the device's
    uint8_t atomic_right  # derived keys need the registration's own right for atomics
    uint8_t mw_bind      # which registrations may be bound to windows: IB_MW_BIND_*
    uint8_t renew        # a reset makes a new queue pair: not every driver forgets at RESET
    uint8_t ask_state    # of queue pairs: not every driver makes an event of a refused peer

cdef struct ib_md_t:
    ucxm_verbs_t *verbs
    ibv_context *context
    ibv_pd *pd
    ibv_comp_channel *channel
    ibv_cq *cq
    int event_fd           # the channel's and the device's events together
    uint8_t owns_context
    uint8_t owns_pd
    uint8_t port
    uint8_t link_layer
    uint8_t mtu
    uint8_t rd_atomic      # reads and atomics that a queue pair answers at a time
    uint8_t rd_atomic_init  # ... that it asks at a time
    uint8_t has_atomics
    uint8_t has_dmabuf
    uint8_t lost           # the device failed
    uint16_t lid
    int gid_index
    ibv_gid gid
    uint64_t guid
    uint64_t max_mr_size
    uint64_t max_msg
    uint32_t queue_depth
    ib_config_t config
    char name[64]

    pthread_mutex_t poll_lock  # one poller at a time: completions stay in order
    pthread_mutex_t lock       # guards all below, and of each endpoint what its comment says
    ib_wr_t *wrs
    uint32_t wr_count
    uint32_t wr_free           # head of the free list, wr_count: none
    uint32_t feeding           # endpoints with an operation that is posted in part
    uint32_t idle_polls
    ucxm_op_t *done_head
    ucxm_op_t *done_tail
    ib_ep_t *eps
    uint64_t last_epoch
    ib_peer_t *peers
    uint32_t peer_count
    uint32_t peer_next
    # Buffers for small transfers and atomic results; made with the first endpoint.
    ibv_mr *bounce_mr
    uint8_t *bounce
    uint32_t *bounce_free
    uint32_t bounce_left
    ib_ticket_t ticket
    ib_counts_t counts

# The backend's part of an endpoint.  Lock order: ep.lock, md.lock.
cdef struct ib_ep_t:
    ib_md_t *md
    ibv_qp *qp
    ib_ep_t *next
    ib_ep_t *prev
    pthread_mutex_t lock   # serialises posting and changes of the queue pair
    uint32_t qpn
    uint32_t psn
    uint64_t epoch
    uint64_t born          # its first epoch
    uint32_t max_inline
    # guarded by md.lock
    uint32_t state         # UCXM_EP_*
    uint32_t posted        # work requests without a completion yet
    uint32_t busy          # operations not completed yet, and threads that hold the endpoint
    uint8_t proved         # something came back over this connection
    uint8_t resetting
    uint8_t stopped        # by us: what is under way is flushed
    uint32_t windows       # bound to the queue pair, which must therefore stay
    uint32_t asked         # its state was asked for, and nothing posted since
    uint64_t asked_at
    ucxm_op_t *feed        # posted in part; the rest follows from progress()
    ib_peer_t peer         # of the last connect()

# A queue pair of a backend's own, connected to itself so that no peer can break it.  One thread at
# a time: the backend sees to that.
cdef struct ib_control_t:
    uint32_t depth         # work requests under way
    uint8_t events         # its completions make events on the Md's channel, once asked for
    # Completions that ib_control_wait finds before the one that it waits for; or NULL.
    void (*seen)(ib_control_t *control, const ibv_wc *wc) noexcept nogil
    uint8_t ready
    ibv_cq *cq
    ibv_qp *qp
    uint64_t last          # wr_id
    uint64_t made          # how often it was brought up

# The backend's part of a Registration ...
cdef struct ib_reg_t:
    ibv_mr *mr
    uint32_t access        # of one that was adopted: what is known of it
    uint32_t adopted

# ... and of an Rkey.
cdef struct ib_rkey_t:
    uint32_t rma
    uint32_t amo           # 0xffffffff: rma serves atomics, too
    uint64_t guid

cdef enum:
    IB_MW_BIND_DERIVED_ONLY = 1
    IB_MW_BIND_ANY = 2      # all that something may be derived from

cdef enum:
    IB_BOUNCE_SIZE = 8192   # transfers up to here need no local key
    IB_BOUNCE_COUNT = 32

cdef extern from *:
    """
    #define IB_NO_KEY 0xffffffffu
    """
    const uint32_t IB_NO_KEY

# The table of the libibverbs at `path`, filled once and shared.  NULL: `error` says why.
cdef ucxm_verbs_t *verbs_table(const char *path, ucxm_error_t *error) noexcept nogil
# What an errno of a verb means.
cdef ucxm_status_t ib_errno_status(int sys_errno) noexcept nogil

# Fills a zeroed `md` on an open context.  `pd` NULL: a new one.  The context (and a new pd) are
# the Md's from here on if `owns_context`; on failure everything is the caller's again.
cdef ucxm_status_t ib_md_init(ib_md_t *md, ucxm_verbs_t *verbs, ibv_context *context, ibv_pd *pd,
                              int owns_context, const ib_config_t *config,
                              ucxm_error_t *error) noexcept nogil
# Undoes ib_md_init; does not free `md`.
cdef void ib_md_clear(ib_md_t *md) noexcept nogil
# The data path and registration part of attr and ops.
cdef void ib_md_attr(const ib_md_t *md, ucxm_md_attr_t *attr) noexcept nogil
cdef void ib_md_ops(ucxm_md_ops_t *ops) noexcept nogil
cdef void ib_ep_ops(ucxm_ep_ops_t *ops) noexcept nogil
# The i-th counter of this layer; *name NULL at the end.
cdef void ib_stat(ib_md_t *md, unsigned index, const char **name, uint64_t *value) noexcept nogil

cdef unsigned ib_progress(void *priv) noexcept nogil
cdef ucxm_status_t ib_event_arm(void *priv, ucxm_error_t *error) noexcept nogil
# One more descriptor that makes the Md's readable.  Not 0: errno says why not.
cdef int ib_event_add(ib_md_t *md, int fd) noexcept nogil

cdef unsigned ib_access(const ib_md_t *md, const ucxm_registration_t *reg) noexcept nogil
cdef ucxm_status_t ib_mem_reg(void *priv, ucxm_registration_t *reg,
                              ucxm_error_t *error) noexcept nogil
cdef ucxm_status_t ib_mem_dereg(void *priv, ucxm_registration_t *reg,
                                ucxm_error_t *error) noexcept nogil
cdef uint32_t ib_ep_qpn(const ucxm_ep_t *ep) noexcept nogil

# A window was bound to its queue pair (1) or freed (-1).
cdef void ib_ep_windows(ucxm_ep_t *ep, int change) noexcept nogil
# Posts `wr`, which moves no data, over a connected endpoint and waits until the device has done
# it.  One call at a time for an Md: those under the core's key lock are.
cdef ucxm_status_t ib_ep_work(ib_md_t *md, ucxm_ep_t *ep, ibv_send_wr *wr,
                              ucxm_error_t *error) noexcept nogil
# Reads and forgets the device's events; of endpoints they are handled.
cdef void ib_drop_events(ib_md_t *md) noexcept nogil

# Makes the queue pair, or brings it back from its error state; a new one if it does not come back.
# An errno.
cdef int ib_control_up(ib_md_t *md, ib_control_t *control) noexcept nogil
# Posts one request and waits for it.  An errno, or `wc` tells.
cdef int ib_control_post(ib_md_t *md, ib_control_t *control, ibv_send_wr *wr,
                         ibv_wc *wc) noexcept nogil
# The completion of the last request; ETIMEDOUT: none comes.  What is not good ends the queue pair,
# so it is to be made anew.
cdef int ib_control_wait(ib_md_t *md, ib_control_t *control, ibv_wc *wc) noexcept nogil
# After this nothing that was posted over it is executed any more; what nobody polled is lost.
cdef void ib_control_drop(ib_md_t *md, ib_control_t *control) noexcept nogil
cdef void ib_control_clear(ib_md_t *md, ib_control_t *control) noexcept nogil

# What a person may want to know: a line, cut off where the room ends (`size` is not 0).
cdef struct ib_text_t:
    char *at
    size_t left

cdef ib_text_t ib_text(char *at, size_t size) noexcept nogil
cdef void ib_say(ib_text_t *text, const char *line) noexcept nogil
# The registration of a base; what its direct key allows, and `atomics` if it allows them alone.
cdef void ib_explain_region(const ucxm_memh_t *memh, ib_text_t *text) noexcept nogil
cdef void ib_explain_direct(const ucxm_memh_t *memh, const char *atomics,
                            ib_text_t *text) noexcept nogil
cdef void ib_explain_fork(ib_text_t *text) noexcept nogil
# Does it stand on a registration that is somebody else's?
cdef bint ib_adopted(const ucxm_memh_t *memh) noexcept nogil
