/* SPDX-License-Identifier: BSD-3-Clause */
/* Everything the parts of softmlx5 know of each other.
 *
 * Data flows one way: abi.c -> {device, mr, mailbox, cq, qp} -> sendq.c -> wire.c -> responder.c.
 *
 * Lock order, outermost first:
 *   global list -> ctx.lock -> ctx.qp_list_lock / cq.list_lock -> qp.lock -> ctx.mkeys.lock ->
 * leaves No lock is held around a copy. Where a thread waits for a chunk of somebody else to end
 * under a lock (error paths), the copying thread needs no lock to end it.
 */
#ifndef SOFTMLX5_INTERNAL_H
#define SOFTMLX5_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "softmlx5.h"

#define EXPORT                        __attribute__((visibility("default")))
#define ARRAY_SIZE(a)                 (sizeof(a) / sizeof((a)[0]))
#define container_of(p, type, member) ((type *)((char *)(p) - offsetof(type, member)))
#define MIN(a, b)                     ((a) < (b) ? (a) : (b))
#define MAX(a, b)                     ((a) > (b) ? (a) : (b))

enum {
    SM_MAX_QP_WR = 16384,
    SM_MAX_SGE = 30,
    SM_MAX_INLINE = 512,
    SM_MAX_CQE = 4194303,
    SM_MAX_RD_ATOMIC = 16,
    SM_ANY_QPN = 0xffffff,
    SM_CHUNK = 256 * 1024,
    SM_MAX_FLOWS = 4096, /* both directions of a queue pair count */
    SM_POLLS_BEFORE_YIELD = 16,
};

#define SM_MAX_MSG (1ull << 30)

/* ---- lists ----------------------------------------------------------------------------------- */

struct list {
    struct list *next, *prev;
};

static inline void list_init(struct list *l)
{
    l->next = l->prev = l;
}

static inline void list_add(struct list *head, struct list *l)
{
    l->prev = head->prev;
    l->next = head;
    head->prev->next = l;
    head->prev = l;
}

/* Leaves the element pointing at itself, so that a second removal is harmless. */
static inline void list_del(struct list *l)
{
    l->prev->next = l->next;
    l->next->prev = l->prev;
    list_init(l);
}

static inline bool list_empty(const struct list *l)
{
    return l->next == l;
}

#define list_for_each_safe(it, tmp, head) \
    for (it = (head)->next, tmp = it->next; it != (head); it = tmp, tmp = it->next)
#define list_for_each(it, head) for (it = (head)->next; it != (head); it = it->next)

/* ---- control.c ------------------------------------------------------------------------------- */

#define SM_STATS(X)                           \
    X(cmd_total, "cmd.total")                 \
    X(cmd_create_mkey, "cmd.create_mkey")     \
    X(cmd_destroy_mkey, "cmd.destroy_mkey")   \
    X(cmd_query_mkey, "cmd.query_mkey")       \
    X(cmd_query_hca_cap, "cmd.query_hca_cap") \
    X(cmd_reg_mr, "cmd.reg_mr")               \
    X(cmd_dereg_mr, "cmd.dereg_mr")           \
    X(cmd_alloc_pd, "cmd.alloc_pd")           \
    X(cmd_create_cq, "cmd.create_cq")         \
    X(cmd_create_qp, "cmd.create_qp")         \
    X(cmd_modify_qp, "cmd.modify_qp")         \
    X(cmd_umem_reg, "cmd.umem_reg")           \
    X(wr_read, "wr.read")                     \
    X(wr_write, "wr.write")                   \
    X(wr_atomic, "wr.atomic")                 \
    X(wr_send, "wr.send")                     \
    X(wr_recv, "wr.recv")                     \
    X(wr_bind_mw, "wr.bind_mw")               \
    X(wr_local_inv, "wr.local_inv")           \
    X(chunks, "chunks")                       \
    X(naks, "naks")                           \
    X(path_vm, "path.vm")                     \
    X(path_socket, "path.socket")             \
    X(path_loop, "path.loop")                 \
    X(mkeys_live, "mkeys.live")               \
    X(mrs_live, "mrs.live")                   \
    X(qps_live, "qps.live")                   \
    X(cqs_live, "cqs.live")                   \
    X(pds_live, "pds.live")                   \
    X(contexts_live, "contexts.live")         \
    X(flows_live, "flows.live")               \
    X(gate_waiting, "gate.waiting")           \
    X(last_status, "last.status")             \
    X(last_syndrome, "last.syndrome")

struct sm_stats {
#define X(field, name) _Atomic uint64_t field;
    SM_STATS(X)
#undef X
};

extern struct sm_stats sm_stats;
#define STAT_INC(f) atomic_fetch_add_explicit(&sm_stats.f, 1, memory_order_relaxed)
#define STAT_DEC(f) atomic_fetch_sub_explicit(&sm_stats.f, 1, memory_order_relaxed)
#define STAT_CMD(f) (STAT_INC(cmd_total), STAT_INC(f))

struct sm_fault {
    uint8_t status;
    uint32_t syndrome;
    int err;
};

/* Consumes one call of `command`; true when it is to be refused. */
bool sm_fault_any(void);
bool sm_fault_hit(const char *command, struct sm_fault *out);
/* The same for calls that know only an errno; 0 = go on. */
int sm_fault_errno(const char *command);
void sm_command_delay(void);
void sm_config_once(void);
int sm_stat_names(char *buf, size_t size);
uint64_t sm_stat(const char *name);
int sm_fault_set(const char *spec);
int sm_set(const char *name, const char *value);

enum sm_index_policy { SM_INDEX_LOWEST, SM_INDEX_FIFO, SM_INDEX_FIXED };
struct sm_config {
    _Atomic int index_policy;
    _Atomic uint32_t index_fixed;
    _Atomic bool force_slow;
    _Atomic bool memlock_enforce;
    _Atomic uint32_t cmd_delay_us;
    unsigned spin_us;
    unsigned devices;
};
extern struct sm_config sm_config;

/* Called by a responder inside each chunk, keys held. */
void sm_gate_chunk(void);

/* ---- caps.c ---------------------------------------------------------------------------------- */

enum sm_cap_type { SM_CAP_GENERAL = 0, SM_CAP_ODP = 2, SM_CAP_ATOMIC = 3, SM_CAP_GENERAL_2 = 0x20 };
enum { SM_CAP_BYTES = 4096 };

/* Fills the 4096-byte capability area; false for a type that the device does not have. */
bool sm_caps_fill(unsigned type, uint8_t *area);
int sm_caps_set(const char *name, const char *value);
uint64_t sm_caps_get(const char *name);

/* The capabilities that the data path and the mailbox parser enforce. */
struct sm_limits {
    _Atomic uint32_t ksm, atomic, max_indirection, log_max_klm, umr_atomic_off, umr_indirect_off,
        log_max_msg, log_max_mkey;
};
extern struct sm_limits sm_limits;

/* ---- util.c ---------------------------------------------------------------------------------- */

/* Big-endian bit fields: `off` counts from the most significant bit of byte 0. */
uint64_t sm_bits_get(const void *buf, unsigned off, unsigned width);
void sm_bits_set(void *buf, unsigned off, unsigned width, uint64_t value);

/* The words wait and wake across processes unless `priv`. */
void sm_futex_wait(void *word, uint32_t seen, int timeout_ms, bool priv);
void sm_futex_wake(void *word, bool priv);
uint64_t sm_now_ns(void);
int sm_eventfd(bool semaphore);

/* ---- fork.c ---------------------------------------------------------------------------------- */

struct sm_ctx;
/* One word, in a page that every fork wipes: true only in the process that loaded it. */
bool sm_ctx_alive(const struct sm_ctx *ctx);
int sm_fork_init_once(void);
void sm_fork_track(struct sm_ctx *ctx);
void sm_fork_untrack(struct sm_ctx *ctx);
/* Descriptors that a forked child must close, so that a peer sees our death in time. */
void sm_fd_track(struct sm_ctx *ctx, int fd);
void sm_fd_close(struct sm_ctx *ctx, int fd);

/* ---- mkey.c ---------------------------------------------------------------------------------- */

enum sm_rights {
    SM_LR = 1,
    SM_LW = 2,
    SM_RR = 4,
    SM_RW = 8,
    SM_A = 16,
};

enum sm_mkey_kind { SM_KIND_MR, SM_KIND_DEVX, SM_KIND_DV, SM_KIND_MW1, SM_KIND_MW2 };
enum sm_mkey_mode { SM_MODE_MTT = 1, SM_MODE_KLM = 2, SM_MODE_KSM = 3 };

struct sm_mkey_ent {
    uint64_t addr;
    uint64_t off; /* where the entry begins inside the key; KLM only */
    uint32_t len;
    uint32_t key;
    bool pinned; /* counted in the target's `pins` */
};

/* What a key means. Copied whole into its slot, which never moves and is never freed: a reader may
 * look at a slot at any time and trusts it only while it holds a reference. */
struct sm_mkey_desc {
    enum sm_mkey_kind kind;
    enum sm_mkey_mode mode;
    uint8_t rights;
    uint8_t log_entity;
    uint8_t variant;
    bool free;
    bool umr_en;
    bool rinval;
    bool mw_bind; /* MR only: windows may be bound to it */
    uint32_t pdn;
    uint32_t qpn;
    uint64_t start;
    uint64_t len;
    uint64_t base; /* MTT: address of the first byte */
    uint32_t nent;
    uint32_t cap; /* entries that fit: what CREATE_MKEY reserved */
    struct sm_mkey_ent *ent;
};

struct sm_mkey {
    _Atomic uint32_t ref; /* SM_REF_* bits and a count; a private futex */
    uint32_t key;
    _Atomic uint32_t pins; /* indirect keys that point here */
    struct sm_mkey_desc d;
};

enum { SM_MKEY_BITS = 18, SM_MKEY_MAX = 1 << SM_MKEY_BITS };

struct sm_mkey_table {
    pthread_mutex_t lock;
    uint32_t base; /* first index: contexts of a process do not share indices */
    struct sm_mkey *slot;
    uint64_t *used;
    uint32_t low_hint;
    uint32_t next;
    uint32_t live;
};

int sm_mkeys_init(struct sm_mkey_table *t, uint32_t base);
void sm_mkeys_fini(struct sm_mkey_table *t);

/* Takes over d->ent on success. */
int sm_mkey_create(struct sm_ctx *ctx, const struct sm_mkey_desc *d, uint32_t *key);
/* EBUSY while an indirect key points here. Returns when no chunk, local or remote, uses the key. */
int sm_mkey_destroy(struct sm_ctx *ctx, uint32_t key);
/* Copy of what a key means now, for QUERY_MKEY; `ent` is not to be followed. */
bool sm_mkey_peek(struct sm_ctx *ctx, uint32_t index, struct sm_mkey_desc *d, uint32_t *key);

struct sm_bind {
    uint32_t old_key, new_key;
    bool type2;
    uint32_t qpn, pdn;
    uint32_t mr_key;
    uint64_t addr, len;
    uint8_t rights;
};
enum ibv_wc_status sm_mkey_bind(struct sm_ctx *ctx, const struct sm_bind *b);
enum ibv_wc_status sm_mkey_invalidate(struct sm_ctx *ctx, uint32_t key, uint32_t pdn, uint32_t qpn,
                                      bool remote);

enum { SM_XLAT_IOV = 32, SM_XLAT_HOLDS = 64 };

/* A piece of a key's range, translated, with every key of the chain held until sm_xlat_put(). */
struct sm_xlat {
    struct iovec iov[SM_XLAT_IOV];
    struct sm_mkey *held[SM_XLAT_HOLDS];
    unsigned niov, nheld;
    size_t len;
};

/* Who asks: every key of a chain must be of this domain and free for this queue pair. */
struct sm_who {
    struct sm_ctx *ctx;
    uint32_t pdn, qpn;
};

/* Translates as much of [addr, addr + len) as there is room for; false = some part that was reached
 * is refused. Appends, so that several ranges may share one object; x->len tells how far it got. */
bool sm_xlat(const struct sm_who *who, uint32_t key, uint64_t addr, uint64_t len, uint8_t need,
             struct sm_xlat *x);
/* The same for part of a scatter list. */
bool sm_xlat_sges(const struct sm_who *who, const struct ibv_sge *sge, uint32_t n, uint64_t off,
                  uint64_t len, uint8_t need, struct sm_xlat *x);
/* Would the whole range pass? Holds nothing. */
bool sm_xlat_check(const struct sm_who *who, uint32_t key, uint64_t addr, uint64_t len,
                   uint8_t need);
void sm_xlat_put(struct sm_xlat *x);

/* ---- device.c -------------------------------------------------------------------------------- */

struct sm_device {
    struct ibv_device dev;
    uint64_t guid; /* host order */
    unsigned index;
};

struct sm_bell;
struct sm_flow;
struct sm_engine {
    pthread_t thread;
    bool started;
    _Atomic bool stop;
    int epfd, kickfd, listen_gid, listen_lid, bellfd;
    struct sm_bell *bell;
    struct sm_flow *flow[SM_MAX_FLOWS];
    uint64_t runnable[SM_MAX_FLOWS / 64];
    struct list parked; /* callers that no queue pair answers yet */
    unsigned nparked;
    uint32_t next_parked;
    pthread_mutex_t dead_lock;
    struct list dead; /* flows that their queue pairs have let go */
    _Atomic bool rescan;
};

struct sm_ctx {
    struct verbs_context v;
    _Atomic uint64_t *alive;
    uint64_t generation;
    struct sm_device *dev;
    struct list link;
    uint32_t seq;
    union ibv_gid gid;
    uint16_t lid;
    bool devx;
    int devfd; /* stands for the command descriptor */

    pthread_mutex_t lock; /* PDs, counts, async events */
    struct list pds;
    uint32_t next_pdn;
    uint32_t npd, ncq, nqp, nobj, nchan;
    struct list async;
    struct list umems;
    uint32_t next_umem;

    struct sm_mkey_table mkeys;

    pthread_mutex_t qp_list_lock;
    struct list qps;

    pthread_mutex_t fd_lock;
    int *fds;
    unsigned nfds, cap_fds;

    struct sm_engine eng;
};

struct sm_pd {
    struct ibv_pd pd;
    struct list link;
    uint32_t pdn;
    _Atomic uint32_t users;
};

static inline struct sm_ctx *to_ctx(struct ibv_context *c)
{
    return container_of(c, struct sm_ctx, v.context);
}

static inline struct sm_pd *to_pd(struct ibv_pd *p)
{
    return container_of(p, struct sm_pd, pd);
}

struct ibv_device **sm_device_list(int *num);
struct ibv_context *sm_open(struct ibv_device *dev, bool devx);
int sm_close(struct ibv_context *c);
struct ibv_pd *sm_alloc_pd(struct ibv_context *c);
int sm_dealloc_pd(struct ibv_pd *pd);
/* By number, counted as a user of it; NULL when there is none. */
struct sm_pd *sm_pd_get(struct sm_ctx *ctx, uint32_t pdn);
void sm_pd_put(struct sm_pd *pd);
void sm_query_device(struct sm_ctx *ctx, struct ibv_device_attr *a);
int sm_query_port(struct sm_ctx *ctx, uint8_t port, struct ibv_port_attr *a, size_t size);

struct sm_async {
    struct list link;
    struct ibv_async_event ev;
};
void sm_async_post(struct sm_ctx *ctx, enum ibv_event_type type, void *element);
void sm_async_forget(struct sm_ctx *ctx, const void *element);
int sm_async_get(struct ibv_context *c, struct ibv_async_event *ev);
void sm_async_ack(struct ibv_async_event *ev);

/* ---- mr.c ------------------------------------------------------------------------------------ */

struct sm_mr {
    struct ibv_mr mr;
    uint64_t pages; /* counted against RLIMIT_MEMLOCK */
    void *map;      /* dmabuf: our mapping of it */
    size_t map_len;
};

struct ibv_mr *sm_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                         unsigned access);
struct ibv_mr *sm_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                                int fd, int access);
int sm_dereg_mr(struct ibv_mr *mr);
/* Faults the pages in as a pinning device would; 0 or an errno. */
int sm_pin_pages(uint64_t addr, uint64_t len, bool write);
/* An 8-byte word that a store will not fault on. */
bool sm_word_writable(uint64_t addr);

struct ibv_mw *sm_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int sm_dealloc_mw(struct ibv_mw *mw);

struct sm_umem {
    struct mlx5dv_devx_umem umem;
    struct list link;
    struct sm_ctx *ctx;
    uint64_t addr, len, pages;
    bool writable;
    _Atomic uint32_t users;
};
struct mlx5dv_devx_umem *sm_umem_reg(struct ibv_context *c, void *addr, size_t size,
                                     uint32_t access);
int sm_umem_dereg(struct mlx5dv_devx_umem *umem);
struct sm_umem *sm_umem_get(struct sm_ctx *ctx, uint32_t id);
void sm_umem_put(struct sm_umem *u);

/* ---- mailbox.c ------------------------------------------------------------------------------- */

struct mlx5dv_devx_obj *sm_devx_create(struct ibv_context *c, const void *in, size_t inlen,
                                       void *out, size_t outlen);
int sm_devx_query(struct mlx5dv_devx_obj *obj, const void *in, size_t inlen, void *out,
                  size_t outlen);
int sm_devx_modify(struct mlx5dv_devx_obj *obj, const void *in, size_t inlen, void *out,
                   size_t outlen);
int sm_devx_destroy(struct mlx5dv_devx_obj *obj);
int sm_devx_general(struct ibv_context *c, const void *in, size_t inlen, void *out, size_t outlen);
struct mlx5dv_mkey *sm_dv_create_mkey(struct mlx5dv_mkey_init_attr *attr);
int sm_dv_destroy_mkey(struct mlx5dv_mkey *mkey);

/* ---- cq.c ------------------------------------------------------------------------------------ */

struct sm_qp;
struct sm_cqe {
    struct ibv_wc wc;
    struct sm_qp *qp;
    uint64_t seq; /* polling this gives back the queue's slots up to here */
    bool send;
};

struct sm_channel {
    struct ibv_comp_channel chan;
    struct sm_ctx *ctx;
    pthread_mutex_t lock;
    struct list events;
    int users;
};

enum sm_arm { SM_ARM_NONE, SM_ARM_SOLICITED, SM_ARM_NEXT };

struct sm_cq {
    struct ibv_cq cq;
    struct sm_ctx *ctx;
    pthread_mutex_t list_lock;
    struct list qps; /* queue pairs that complete their sends here */
    pthread_mutex_t lock;
    struct sm_cqe *ring;
    uint32_t cap, head, count;
    _Atomic int arm;
    bool overrun;
    _Atomic uint32_t users;
    _Atomic uint32_t events_delivered;
    _Atomic unsigned empty_polls;
};

static inline struct sm_cq *to_cq(struct ibv_cq *c)
{
    return container_of(c, struct sm_cq, cq);
}

struct ibv_cq *sm_create_cq(struct ibv_context *c, int cqe, void *cq_context,
                            struct ibv_comp_channel *channel, int comp_vector);
int sm_resize_cq(struct ibv_cq *cq, int cqe);
int sm_destroy_cq(struct ibv_cq *cq);
int sm_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int sm_req_notify_cq(struct ibv_cq *cq, int solicited_only);
struct ibv_comp_channel *sm_create_channel(struct ibv_context *c);
int sm_destroy_channel(struct ibv_comp_channel *ch);
int sm_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **cq_context);
void sm_ack_cq_events(struct ibv_cq *cq, unsigned n);
void sm_cq_push(struct sm_cq *cq, const struct sm_cqe *e, bool solicited);
/* Drops what a queue pair that goes away has left behind. */
void sm_cq_forget(struct sm_cq *cq, const struct sm_qp *qp);

/* ---- qp.c ------------------------------------------------------------------------------------ */

enum sm_wqe_state { SM_WQE_QUEUED, SM_WQE_RING, SM_WQE_DONE };

enum { SM_HELD = 255 };

struct sm_wqe {
    uint64_t wr_id;
    uint64_t remote_addr, compare_add, swap;
    uint64_t ring_seq;
    struct ibv_sge *sge;
    uint8_t *inline_data;
    uint32_t rkey, imm, len;
    uint32_t num_sge;
    unsigned flags;
    enum ibv_wr_opcode op;
    enum sm_wqe_state state;
    enum ibv_wc_status status;
    struct sm_bind bind;
    uint8_t fault; /* a completion status that was injected, or SM_HELD */
};

struct sm_rqe {
    uint64_t wr_id;
    struct ibv_sge *sge;
    uint32_t num_sge;
};

struct sm_qp {
    struct ibv_qp qp;
    struct sm_ctx *ctx;
    struct list link;    /* ctx.qps */
    struct list cq_link; /* send cq */
    _Atomic uint32_t refs;
    pthread_mutex_t lock;
    pthread_cond_t cond; /* the pump has become idle */
    struct ibv_qp_cap cap;
    bool sig_all;
    bool destroyed;
    uint32_t pdn;
    enum ibv_qp_state state;
    struct ibv_qp_attr attr;
    _Atomic uint32_t events_delivered;

    struct sm_wqe *sq;
    struct ibv_sge *sq_sge;
    uint8_t *sq_inline;
    /* free <= head <= pumped <= tail: polled, completed, handed over, posted */
    uint64_t sq_tail, sq_pumped, sq_head;
    _Atomic uint64_t sq_free;
    _Atomic uint32_t sq_pending; /* tail - head: is a look worth while when polling? */
    bool pump_busy;
    bool failed; /* an error has been completed: the rest is flushed */

    struct sm_rqe *rq;
    struct ibv_sge *rq_sge;
    uint64_t rq_tail, rq_head;
    _Atomic uint64_t rq_free;

    struct sm_flow *out, *in;
    uint32_t sent, received; /* messages; stand for the packet sequence numbers */
    uint64_t deadline; /* ns; when a send queue that nobody serves gives up, 0 = not running */
    uint64_t next_try; /* ns; when to call the peer, UINT64_MAX = not before there is work */
};

static inline struct sm_qp *to_qp(struct ibv_qp *q)
{
    return container_of(q, struct sm_qp, qp);
}

struct ibv_qp *sm_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int sm_destroy_qp(struct ibv_qp *qp);
int sm_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int sm_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
                struct ibv_qp_init_attr *init);
int sm_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
void sm_qp_get(struct sm_qp *qp);
void sm_qp_put(struct sm_qp *qp);
/* Lock held. Both flows are let go, then both queues flushed; nobody copies for either by then. */
void sm_qp_error(struct sm_qp *qp);
/* Lock held, error state, no chunk under way. */
void sm_rq_flush(struct sm_qp *qp);
/* Lock held: completes the oldest receive. */
void sm_rq_complete(struct sm_qp *qp, const struct ibv_wc *wc, bool solicited);
uint32_t sm_vendor_err(enum ibv_wc_status s);

/* ---- sendq.c --------------------------------------------------------------------------------- */

int sm_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int sm_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *b);
/* Lock held: moves finished requests to the completion queue, then hands over new ones. */
void sm_sq_progress(struct sm_qp *qp);
/* Lock held: completes what the responder of `f`, now stopped, has finished. */
void sm_sq_collect(struct sm_qp *qp, struct sm_flow *f);
/* Lock held: completes everything that is left with a flush error. */
void sm_sq_flush(struct sm_qp *qp);
/* Lock held: the oldest request fails with `s`, the queue pair goes to error. */
void sm_sq_fail_head(struct sm_qp *qp, enum ibv_wc_status s);
/* The private request behind a ring entry; NULL when it is over. Lock held. */
struct sm_wqe *sm_sq_find(struct sm_qp *qp, uint64_t ring_seq);
/* After a key has been blocked: stops requests whose local buffers it named, and waits. */
void sm_sq_revalidate(struct sm_ctx *ctx);

/* ---- flow.c: shared memory of a connection, guards, doorbells -------------------------------- */

enum { SM_RING = 64, SM_SEGS = SM_XLAT_IOV, SM_BOUNCE = 4, SM_BOUNCE_SIZE = 128 * 1024 };

struct sm_seg {
    uint64_t addr, len;
};

enum sm_ent_flags { SM_ENT_INLINE = 1, SM_ENT_SOLICITED = 2 };

/* A work request in the ring. The responder copies it out before it looks at it. */
struct sm_ent {
    uint64_t remote_addr, compare_add, swap;
    uint32_t rkey, imm, len;
    uint16_t nseg;
    uint8_t op, flags;
    _Atomic uint32_t status; /* the answer, valid once `done` has passed */
    uint32_t pad[5];
    union {
        struct sm_seg seg[SM_SEGS];
        uint8_t data[SM_MAX_INLINE];
    };
};
_Static_assert(sizeof(struct sm_ent) == 64 + SM_MAX_INLINE, "ring entry layout");

enum sm_bounce_state { SM_B_EMPTY, SM_B_WANT, SM_B_FULL, SM_B_FAIL };

/* One bounce buffer of the slow path. The responder asks (WANT) or fills (FULL, a READ); the
 * initiator fills (FULL, a WRITE) or empties. */
struct sm_bounce {
    _Atomic uint32_t state;
    uint32_t len;
    uint64_t seq, off;
};

struct sm_shm {
    _Alignas(64) _Atomic uint64_t head; /* initiator: requests published */
    _Alignas(64) _Atomic uint64_t done; /* responder: requests finished */
    _Alignas(64) _Atomic uint32_t want_kick;
    /* Guard of the initiator's memory. `slot` holds 1 + the number of the request that the
     * responder is copying for; requests from `cancel_from` on are not to touch memory any more. */
    _Alignas(64) _Atomic uint64_t slot;
    _Atomic uint64_t cancel_from;
    _Atomic uint32_t waiters;
    _Alignas(64) struct sm_bounce bounce[SM_BOUNCE];
    _Alignas(4096) struct sm_ent ring[SM_RING];
};

enum { SM_SHM_BOUNCE_OFF = (sizeof(struct sm_shm) + 4095) & ~4095 };
#define SM_SHM_SIZE (SM_SHM_BOUNCE_OFF + (size_t)SM_BOUNCE * SM_BOUNCE_SIZE)

/* The doorbell page of a context, mapped by its peers. Anybody may ring: it only makes us look. */
struct sm_bell {
    _Alignas(64) _Atomic uint32_t sleeping;
    _Alignas(64) _Atomic uint64_t summary;
    _Alignas(64) _Atomic uint64_t bits[SM_MAX_FLOWS / 64];
};
enum { SM_BELL_SIZE = 4096, SM_BELL_CONTROL = 0 };
_Static_assert(sizeof(struct sm_bell) <= SM_BELL_SIZE, "doorbell page");

enum sm_flow_state { SM_FLOW_CONNECTING, SM_FLOW_READY };

/* One direction of a connection, seen from one end: `in` at the responder, else at the initiator.
 */
struct sm_flow {
    struct list link; /* engine.dead */
    struct sm_ctx *ctx;
    struct sm_qp *qp; /* a reference */
    _Atomic uint32_t refs;
    uint32_t id, peer_id;
    bool in;
    enum sm_flow_state state; /* under qp.lock */
    _Atomic bool gone;        /* the peer has gone: it can touch nothing any more */
    bool detached;            /* under qp.lock: no longer the queue pair's */
    _Atomic uint32_t copying; /* the engine is; set under qp.lock, cleared without. A futex */

    int sock, pidfd, memfd;
    pid_t pid;
    struct sm_shm *shm;
    struct sm_bell *bell; /* the peer's */
    int bellfd;           /* the peer's eventfd */

    uint64_t head;        /* initiator: requests published */
    uint8_t cookie[32];   /* initiator: what the peer's probe reads and writes */
    struct sm_exec *exec; /* responder */
};

struct sm_flow *sm_flow_new(struct sm_ctx *ctx, struct sm_qp *qp, bool in);
void sm_flow_get(struct sm_flow *f);
void sm_flow_put(struct sm_flow *f);
/* qp.lock held: takes the flow from its queue pair. When this returns nobody copies for it, here or
 * at the peer, and nobody will. The engine buries it. */
void sm_flow_detach(struct sm_flow *f);
/* Initiator: forbids requests from `from` on, then waits until the peer does not copy for one. The
 * peer's death is noticed here, so that a lock may be held. */
void sm_flow_cancel(struct sm_flow *f, uint64_t from);
void sm_flow_copy_begin(struct sm_flow *f); /* qp.lock held */
void sm_flow_copy_end(struct sm_flow *f);
void sm_flow_ring(struct sm_flow *f); /* tells the other end to look */
void sm_ctx_kick(struct sm_ctx *ctx, uint32_t id);

/* The responder's side of the guard. False: the request is not to touch memory. */
bool sm_guard_take(struct sm_shm *shm, uint64_t seq);
void sm_guard_drop(struct sm_shm *shm);

/* A sealed memfd, mapped; or a received one, checked and mapped. */
void *sm_shm_create(size_t size, int *fd);
void *sm_shm_open(int fd, size_t size);

/* ---- engine.c: the thread -------------------------------------------------------------------- */

enum sm_tag {
    SM_TAG_KICK,
    SM_TAG_LISTEN_GID,
    SM_TAG_LISTEN_LID,
    SM_TAG_SOCK,
    SM_TAG_PID,
    SM_TAG_PARKED
};

int sm_engine_resources(struct sm_ctx *ctx);
void sm_engine_release(struct sm_ctx *ctx);
int sm_engine_start(struct sm_ctx *ctx);
void sm_engine_stop(struct sm_ctx *ctx);
/* Engine thread only: gives the flow an id and watches its descriptors. */
bool sm_engine_add(struct sm_flow *f);
int sm_engine_watch(struct sm_ctx *ctx, int fd, enum sm_tag tag, uint32_t id, uint32_t events);
void sm_engine_watch_peer(struct sm_flow *f);

/* ---- wire.c: connecting ---------------------------------------------------------------------- */

int sm_wire_listen(struct sm_ctx *ctx);
/* qp.lock held: tries once, without blocking. */
void sm_wire_connect(struct sm_qp *qp, uint64_t now);
/* qp.lock held: the answer to our HELLO; false = the peer is not one of us. */
bool sm_wire_answer(struct sm_flow *f);
void sm_wire_accept(struct sm_ctx *ctx, int listener);
void sm_wire_parked_event(struct sm_ctx *ctx, uint32_t id);
void sm_wire_rescan(struct sm_ctx *ctx);
void sm_wire_unpark_all(struct sm_ctx *ctx);

/* ---- responder.c, bounce.c ------------------------------------------------------------------- */

struct sm_exec *sm_exec_new(bool vm, uint8_t rnr_retry);
void sm_exec_free(struct sm_exec *x);
/* One turn of a flow; true when there is more to do at once. */
bool sm_respond(struct sm_flow *f);
bool sm_initiate(struct sm_flow *f);
/* When (ns) an incoming flow wants a turn although nothing happens; 0 = never. */
uint64_t sm_exec_deadline(const struct sm_flow *f);

#endif
