/* SPDX-License-Identifier: BSD-3-Clause */
/* The send queue: posting, handing over to the ring, completing.
 *
 * A request waits in the private queue until the pump translates its local buffers and puts it into
 * the ring that the peer's responder serves. Binds and invalidations are executed by the pump
 * itself, in their turn. Completions come back through the ring's `done` counter and are collected
 * by whoever looks next: a poller, or the engine when it was asked to (want_kick).
 */
#include "internal.h"

#define SLOT(qp, seq) (&(qp)->sq[(seq) % MAX((qp)->cap.max_send_wr, 1)])

static bool is_local(enum ibv_wr_opcode op)
{
    return op == IBV_WR_BIND_MW || op == IBV_WR_LOCAL_INV;
}

static bool is_atomic(enum ibv_wr_opcode op)
{
    return op == IBV_WR_ATOMIC_CMP_AND_SWP || op == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static bool fills_local(enum ibv_wr_opcode op)
{
    return op == IBV_WR_RDMA_READ || is_atomic(op);
}

static struct sm_who who_of(const struct sm_qp *qp)
{
    return (struct sm_who){qp->ctx, qp->pdn, qp->qp.qp_num};
}

/* ---- posting --------------------------------------------------------------------------------- */

static int copy_inline(const struct ibv_send_wr *wr, struct sm_wqe *w, uint32_t max)
{
    uint32_t n = 0;

    for (int i = 0; i < wr->num_sge; i++) {
        if (wr->sg_list[i].length > max - n)
            return ENOMEM;
        memcpy(w->inline_data + n, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
        n += wr->sg_list[i].length;
    }
    return 0;
}

static int take_buffers(const struct sm_qp *qp, const struct ibv_send_wr *wr, struct sm_wqe *w)
{
    uint64_t len = 0;

    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge)
        return EINVAL;
    for (int i = 0; i < wr->num_sge; i++)
        len += wr->sg_list[i].length;
    w->len = (uint32_t)MIN(len, UINT32_MAX);
    w->num_sge = (uint32_t)wr->num_sge;
    if (wr->send_flags & IBV_SEND_INLINE) {
        if (fills_local(wr->opcode))
            return EINVAL;
        return copy_inline(wr, w, qp->cap.max_inline_data);
    }
    if (w->num_sge)
        memcpy(w->sge, wr->sg_list, w->num_sge * sizeof(*w->sge));
    return 0;
}

static uint8_t window_rights(unsigned access)
{
    uint8_t r = 0;

    if (access & IBV_ACCESS_LOCAL_WRITE)
        r |= SM_LW;
    if (access & IBV_ACCESS_REMOTE_READ)
        r |= SM_RR;
    if (access & IBV_ACCESS_REMOTE_WRITE)
        r |= SM_RW;
    if (access & IBV_ACCESS_REMOTE_ATOMIC)
        r |= SM_A;
    return r;
}

static int take_bind(const struct sm_qp *qp, const struct ibv_send_wr *wr, struct sm_wqe *w)
{
    const unsigned allowed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                             IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    const struct ibv_mw_bind_info *b = &wr->bind_mw.bind_info;

    if (!wr->bind_mw.mw || (b->mw_access_flags & ~allowed) || (b->length && !b->mr))
        return EINVAL;
    if (b->length > 1ull << 31)
        return EOPNOTSUPP;
    w->bind = (struct sm_bind){
        .old_key = wr->bind_mw.mw->rkey,
        .new_key = wr->bind_mw.rkey,
        .type2 = wr->bind_mw.mw->type == IBV_MW_TYPE_2,
        .qpn = qp->qp.qp_num,
        .pdn = qp->pdn,
        .mr_key = b->mr ? b->mr->lkey : 0,
        .addr = b->addr,
        .len = b->length,
        .rights = window_rights(b->mw_access_flags),
    };
    return 0;
}

static int take_wr(struct sm_qp *qp, const struct ibv_send_wr *wr, struct sm_wqe *w)
{
    w->wr_id = wr->wr_id;
    w->op = wr->opcode;
    w->flags = wr->send_flags;
    w->state = SM_WQE_QUEUED;
    w->status = IBV_WC_SUCCESS;
    w->imm = wr->imm_data;
    w->len = w->num_sge = 0;
    switch (wr->opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_RDMA_READ:
        w->remote_addr = wr->wr.rdma.remote_addr;
        w->rkey = wr->wr.rdma.rkey;
        return take_buffers(qp, wr, w);
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_SEND_WITH_INV:
        return take_buffers(qp, wr, w);
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        w->remote_addr = wr->wr.atomic.remote_addr;
        w->rkey = wr->wr.atomic.rkey;
        w->compare_add = wr->wr.atomic.compare_add;
        w->swap = wr->wr.atomic.swap;
        return take_buffers(qp, wr, w);
    case IBV_WR_BIND_MW:
        return take_bind(qp, wr, w);
    case IBV_WR_LOCAL_INV:
        w->imm = wr->invalidate_rkey;
        return 0;
    default:
        return EINVAL;
    }
}

static void count_wr(enum ibv_wr_opcode op)
{
    switch (op) {
    case IBV_WR_RDMA_READ:
        STAT_INC(wr_read);
        break;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        STAT_INC(wr_write);
        break;
    case IBV_WR_BIND_MW:
        STAT_INC(wr_bind_mw);
        break;
    case IBV_WR_LOCAL_INV:
        STAT_INC(wr_local_inv);
        break;
    default:
        if (is_atomic(op))
            STAT_INC(wr_atomic);
        else
            STAT_INC(wr_send);
    }
}

/* A refusal to take it, or how it will complete. */
static int local_fault(enum ibv_wr_opcode op, struct sm_wqe *w)
{
    struct sm_fault f;

    w->fault = 0;
    if (!is_local(op) || !sm_fault_hit(op == IBV_WR_BIND_MW ? "bind_mw" : "local_inv", &f))
        return 0;
    w->fault = f.status;
    return f.err;
}

static int post_one(struct sm_qp *qp, const struct ibv_send_wr *wr)
{
    int rc;

    if (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_SQD && qp->state != IBV_QPS_ERR)
        return EINVAL;
    if (qp->sq_tail - atomic_load_explicit(&qp->sq_free, memory_order_acquire) >=
        qp->cap.max_send_wr)
        return ENOMEM;
    rc = take_wr(qp, wr, SLOT(qp, qp->sq_tail));
    if (!rc)
        rc = local_fault(wr->opcode, SLOT(qp, qp->sq_tail));
    if (rc)
        return rc;
    qp->sq_tail++;
    atomic_fetch_add_explicit(&qp->sq_pending, 1, memory_order_relaxed);
    count_wr(wr->opcode);
    return 0;
}

int sm_post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct sm_qp *qp = to_qp(ibqp);
    int rc = 0;

    if (!sm_ctx_alive(qp->ctx)) {
        *bad = wr;
        return EIO;
    }
    pthread_mutex_lock(&qp->lock);
    for (; wr; wr = wr->next) {
        rc = post_one(qp, wr);
        if (rc) {
            *bad = wr;
            break;
        }
    }
    if (qp->state == IBV_QPS_ERR)
        sm_sq_flush(qp);
    else
        sm_sq_progress(qp);
    pthread_mutex_unlock(&qp->lock);
    return rc;
}

/* The verb for type-1 windows: the library chooses the next key. */
int sm_bind_mw(struct ibv_qp *ibqp, struct ibv_mw *mw, struct ibv_mw_bind *b)
{
    struct ibv_send_wr wr = {
        .wr_id = b->wr_id,
        .opcode = IBV_WR_BIND_MW,
        .send_flags = b->send_flags,
        .bind_mw = {.mw = mw, .rkey = ibv_inc_rkey(mw->rkey), .bind_info = b->bind_info},
    };
    struct ibv_send_wr *bad;
    int rc = sm_post_send(ibqp, &wr, &bad);

    if (!rc)
        mw->rkey = wr.bind_mw.rkey;
    return rc;
}

/* ---- completing ------------------------------------------------------------------------------ */

static enum ibv_wc_opcode wc_opcode(enum ibv_wr_opcode op)
{
    switch (op) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_WC_FETCH_ADD;
    case IBV_WR_BIND_MW:
        return IBV_WC_BIND_MW;
    case IBV_WR_LOCAL_INV:
        return IBV_WC_LOCAL_INV;
    default:
        return IBV_WC_SEND;
    }
}

static void complete_head(struct sm_qp *qp, enum ibv_wc_status s)
{
    struct sm_wqe *w = SLOT(qp, qp->sq_head);
    struct sm_cqe e = {
        .wc = {.wr_id = w->wr_id,
               .status = s,
               .opcode = wc_opcode(w->op),
               .vendor_err = sm_vendor_err(s),
               .byte_len = fills_local(w->op) ? w->len : 0,
               .qp_num = qp->qp.qp_num},
        .qp = qp,
        .seq = qp->sq_head,
        .send = true,
    };

    qp->sq_head++;
    atomic_fetch_sub_explicit(&qp->sq_pending, 1, memory_order_relaxed);
    if (s || qp->sig_all || (w->flags & IBV_SEND_SIGNALED))
        sm_cq_push(to_cq(qp->qp.send_cq), &e, false);
}

/* Requests that the responder of `f` (or the pump) has finished, up to the first error. */
static enum ibv_wc_status drain(struct sm_qp *qp, struct sm_flow *f)
{
    uint64_t done = f ? atomic_load_explicit(&f->shm->done, memory_order_acquire) : 0;

    while (qp->sq_head != qp->sq_pumped) {
        struct sm_wqe *w = SLOT(qp, qp->sq_head);

        if (w->state == SM_WQE_RING) {
            if (!f || w->ring_seq >= done)
                break;
            w->status = (enum ibv_wc_status)atomic_load_explicit(
                &f->shm->ring[w->ring_seq % SM_RING].status, memory_order_relaxed);
            if (w->status > IBV_WC_GENERAL_ERR) /* shared memory is not to be believed */
                w->status = IBV_WC_FATAL_ERR;
        }
        if (w->status)
            return w->status;
        complete_head(qp, IBV_WC_SUCCESS);
    }
    return IBV_WC_SUCCESS;
}

/* Nobody may see the completion while a chunk of the request is still under way: going to error
 * stops the connection first and then collects what is marked here. */
void sm_sq_fail_head(struct sm_qp *qp, enum ibv_wc_status s)
{
    struct sm_wqe *w = SLOT(qp, qp->sq_head);

    w->state = SM_WQE_DONE;
    w->status = s;
    if (qp->sq_pumped == qp->sq_head)
        qp->sq_pumped++;
    sm_qp_error(qp);
}

struct sm_wqe *sm_sq_find(struct sm_qp *qp, uint64_t ring_seq)
{
    for (uint64_t i = qp->sq_head; i != qp->sq_pumped; i++) {
        struct sm_wqe *w = SLOT(qp, i);

        if (w->state == SM_WQE_RING && w->ring_seq == ring_seq)
            return w;
    }
    return NULL;
}

void sm_sq_collect(struct sm_qp *qp, struct sm_flow *f)
{
    enum ibv_wc_status s;

    if (qp->failed) /* after an error everything else is flushed, finished or not */
        return;
    s = drain(qp, f);
    if (s) {
        qp->failed = true;
        complete_head(qp, s);
    }
}

void sm_sq_flush(struct sm_qp *qp)
{
    while (qp->sq_head != qp->sq_tail)
        complete_head(qp, IBV_WC_WR_FLUSH_ERR);
    qp->sq_pumped = qp->sq_head;
}

/* ---- the pump -------------------------------------------------------------------------------- */

/* Local buffers as addresses. All of them or nothing: the responder knows no keys of ours. */
static enum ibv_wc_status translate_local(struct sm_qp *qp, const struct sm_wqe *w,
                                          struct sm_xlat *x)
{
    struct sm_who who = who_of(qp);

    if (!sm_xlat_sges(&who, w->sge, w->num_sge, 0, w->len, fills_local(w->op) ? SM_LW : SM_LR, x))
        return IBV_WC_LOC_PROT_ERR;
    return x->len == w->len ? IBV_WC_SUCCESS
                            : IBV_WC_LOC_LEN_ERR; /* more pieces than can be named */
}

static enum ibv_wc_status check_request(const struct sm_qp *qp, const struct sm_wqe *w)
{
    if (w->len > 1ull << atomic_load_explicit(&sm_limits.log_max_msg, memory_order_relaxed))
        return IBV_WC_LOC_LEN_ERR;
    if (is_atomic(w->op) && w->len != sizeof(uint64_t))
        return IBV_WC_LOC_LEN_ERR;
    if (fills_local(w->op) && !qp->attr.max_rd_atomic)
        return IBV_WC_LOC_QP_OP_ERR;
    return IBV_WC_SUCCESS;
}

static enum ibv_wc_status publish(struct sm_qp *qp, struct sm_wqe *w)
{
    struct sm_flow *f = qp->out;
    struct sm_ent *e = &f->shm->ring[f->head % SM_RING];
    struct sm_xlat x = {.niov = 0};
    enum ibv_wc_status s = check_request(qp, w);

    e->flags = w->flags & IBV_SEND_SOLICITED ? SM_ENT_SOLICITED : 0;
    if (!s && (w->flags & IBV_SEND_INLINE)) {
        memcpy(e->data, w->inline_data, w->len);
        e->flags |= SM_ENT_INLINE;
        e->nseg = 0;
    } else if (!s) {
        s = translate_local(qp, w, &x);
        e->nseg = (uint16_t)x.niov;
        for (unsigned i = 0; i < x.niov; i++)
            e->seg[i] = (struct sm_seg){(uintptr_t)x.iov[i].iov_base, x.iov[i].iov_len};
        sm_xlat_put(&x);
    }
    if (s)
        return s;
    e->op = (uint8_t)w->op;
    e->remote_addr = w->remote_addr;
    e->compare_add = w->compare_add;
    e->swap = w->swap;
    e->rkey = w->rkey;
    e->imm = w->imm;
    e->len = w->len;
    w->ring_seq = f->head++;
    w->state = SM_WQE_RING;
    qp->sent++;
    atomic_store_explicit(&f->shm->head, f->head, memory_order_release);
    return IBV_WC_SUCCESS;
}

/* Lock held, dropped while the command runs. */
static enum ibv_wc_status run_local(struct sm_qp *qp, const struct sm_wqe *w)
{
    const struct sm_bind bind = w->bind; /* the slot may be flushed and posted again meanwhile */
    const uint32_t key = w->imm;
    bool binds = w->op == IBV_WR_BIND_MW;
    enum ibv_wc_status s;

    if (w->fault && w->fault != SM_HELD)
        return (enum ibv_wc_status)w->fault;
    pthread_mutex_unlock(&qp->lock);
    s = binds ? sm_mkey_bind(qp->ctx, &bind)
              : sm_mkey_invalidate(qp->ctx, key, qp->pdn, qp->qp.qp_num, false);
    pthread_mutex_lock(&qp->lock);
    return s;
}

static bool must_wait(const struct sm_qp *qp, const struct sm_wqe *w)
{
    const struct sm_flow *f = qp->out;

    if (is_local(w->op))
        return (w->fault == SM_HELD && sm_fault_any()) ||
               ((w->flags & IBV_SEND_FENCE) && qp->sq_head != qp->sq_pumped);
    return !f || f->state != SM_FLOW_READY ||
           f->head - atomic_load_explicit(&f->shm->done, memory_order_acquire) >= SM_RING;
}

/* One request further. False: it has to wait. */
static bool pump_one(struct sm_qp *qp, bool *rang)
{
    struct sm_wqe *w = SLOT(qp, qp->sq_pumped);

    if (must_wait(qp, w))
        return false;
    if (is_local(w->op)) {
        enum ibv_wc_status s = run_local(qp, w);

        if (qp->state != IBV_QPS_RTS) /* reset or flushed meanwhile */
            return false;
        w->status = s;
        w->state = SM_WQE_DONE;
    } else {
        w->status = publish(qp, w);
        if (w->status)
            w->state = SM_WQE_DONE;
        else
            *rang = true;
    }
    qp->sq_pumped++;
    return !w->status;
}

static void pump(struct sm_qp *qp)
{
    bool rang = false, error = false;

    if (qp->pump_busy) /* whoever drops the lock in there comes back and looks again */
        return;
    qp->pump_busy = true;
    while (qp->state == IBV_QPS_RTS && !error && qp->sq_pumped != qp->sq_tail) {
        if (!pump_one(qp, &rang))
            break;
    }
    qp->pump_busy = false;
    pthread_cond_broadcast(&qp->cond);
    if (rang && qp->out)
        sm_flow_ring(qp->out);
}

/* The queue has work that no connection takes: start the clock of the retry counter. */
static void arm_timer(struct sm_qp *qp)
{
    struct sm_wqe *w = SLOT(qp, qp->sq_pumped);
    unsigned t = qp->attr.timeout;
    uint64_t floor = 250000000ull, budget = (4096ull << t) * (qp->attr.retry_cnt + 1u);

    if (qp->state != IBV_QPS_RTS || qp->sq_pumped == qp->sq_tail || is_local(w->op) ||
        (qp->out && qp->out->state == SM_FLOW_READY) || qp->deadline)
        return;
    /* 0 is "never"; a tiny budget would measure the scheduler, not the peer. */
    qp->deadline = t ? sm_now_ns() + MAX(budget, floor) : UINT64_MAX;
    sm_ctx_kick(qp->ctx, SM_BELL_CONTROL);
}

/* Does somebody have to look at the ring although nobody may be polling? */
static bool wants_kick(const struct sm_qp *qp)
{
    return qp->out && qp->out->state == SM_FLOW_READY && qp->sq_head != qp->sq_pumped &&
           (qp->sq_pumped != qp->sq_tail ||
            atomic_load(&to_cq(qp->qp.send_cq)->arm) != SM_ARM_NONE);
}

void sm_sq_progress(struct sm_qp *qp)
{
    bool asked = false;

    while (qp->state == IBV_QPS_RTS || qp->state == IBV_QPS_SQD) {
        enum ibv_wc_status s = drain(qp, qp->out);
        uint64_t before = qp->sq_pumped;

        if (s) {
            sm_sq_fail_head(qp, s);
            return;
        }
        if (qp->sq_head == qp->sq_tail) {
            qp->deadline = 0;
            return;
        }
        pump(qp);
        if (qp->sq_pumped != before)
            continue;
        if (asked || !wants_kick(qp))
            break;
        /* Asking and then looking once more: a completion in between is not overlooked. */
        atomic_store(&qp->out->shm->want_kick, 1);
        asked = true;
    }
    arm_timer(qp);
}

/* ---- local keys that go away ----------------------------------------------------------------- */

/* First request in the ring that no longer may touch its buffers; UINT64_MAX = none. */
static uint64_t first_stale(struct sm_qp *qp, struct sm_flow *f)
{
    uint64_t done = atomic_load(&f->shm->done);

    for (uint64_t i = qp->sq_head; i != qp->sq_pumped; i++) {
        struct sm_wqe *w = SLOT(qp, i);
        const struct sm_ent *e;
        struct sm_xlat x = {.niov = 0};
        bool same;

        if (w->state != SM_WQE_RING || w->ring_seq < done || (w->flags & IBV_SEND_INLINE))
            continue;
        e = &f->shm->ring[w->ring_seq % SM_RING];
        same = !translate_local(qp, w, &x) && x.niov == e->nseg;
        for (unsigned k = 0; same && k < x.niov; k++)
            same =
                (uintptr_t)x.iov[k].iov_base == e->seg[k].addr && x.iov[k].iov_len == e->seg[k].len;
        sm_xlat_put(&x);
        if (!same)
            return w->ring_seq;
    }
    return UINT64_MAX;
}

struct stale {
    struct sm_flow *flow;
    uint64_t from;
};

static bool find_stale(struct sm_qp *qp, struct stale *out)
{
    pthread_mutex_lock(&qp->lock);
    out->flow = NULL;
    if (qp->out && qp->out->state == SM_FLOW_READY && qp->sq_head != qp->sq_pumped) {
        out->from = first_stale(qp, qp->out);
        if (out->from != UINT64_MAX) {
            out->flow = qp->out;
            sm_flow_get(out->flow);
        }
    }
    pthread_mutex_unlock(&qp->lock);
    return out->flow != NULL;
}

/* The waiting happens without locks, except when there is no memory for a list of what to wait for.
 * A request that somebody else cancelled before is waited for all the same: we, too, promise its
 * end. */
void sm_sq_revalidate(struct sm_ctx *ctx)
{
    struct stale *list = NULL, s;
    size_t n = 0;
    struct list *l;

    pthread_mutex_lock(&ctx->qp_list_lock);
    list_for_each (l, &ctx->qps) {
        struct stale *more;

        if (!find_stale(container_of(l, struct sm_qp, link), &s))
            continue;
        more = realloc(list, (n + 1) * sizeof(*list));
        if (more) {
            list = more;
            list[n++] = s;
        } else {
            sm_flow_cancel(s.flow, s.from);
            sm_flow_put(s.flow);
        }
    }
    pthread_mutex_unlock(&ctx->qp_list_lock);
    for (size_t i = 0; i < n; i++) {
        sm_flow_cancel(list[i].flow, list[i].from);
        sm_flow_put(list[i].flow);
    }
    free(list);
}
