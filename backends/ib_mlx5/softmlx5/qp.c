/* SPDX-License-Identifier: BSD-3-Clause */
/* Queue pairs: creation, the state machine, the receive queue. Reliable connections only. */
#include "internal.h"

static _Atomic uint32_t next_qpn = 0x40;

/* ---- life ------------------------------------------------------------------------------------ */

static int check_init_attr(struct ibv_pd *pd, const struct ibv_qp_init_attr *a)
{
    const struct ibv_qp_cap *cap = &a->cap;

    if (a->qp_type != IBV_QPT_RC || a->srq)
        return EOPNOTSUPP;
    if (!a->send_cq || !a->recv_cq || a->send_cq->context != pd->context ||
        a->recv_cq->context != pd->context)
        return EINVAL;
    if (cap->max_send_wr > SM_MAX_QP_WR || cap->max_recv_wr > SM_MAX_QP_WR ||
        cap->max_send_sge > SM_MAX_SGE || cap->max_recv_sge > SM_MAX_SGE ||
        cap->max_inline_data > SM_MAX_INLINE)
        return EINVAL;
    return 0;
}

static int alloc_queues(struct sm_qp *qp)
{
    size_t ns = MAX(qp->cap.max_send_wr, 1), nr = MAX(qp->cap.max_recv_wr, 1);

    qp->sq = calloc(ns, sizeof(*qp->sq));
    qp->sq_sge = calloc(ns * MAX(qp->cap.max_send_sge, 1), sizeof(*qp->sq_sge));
    qp->sq_inline = calloc(ns, MAX(qp->cap.max_inline_data, 1));
    qp->rq = calloc(nr, sizeof(*qp->rq));
    qp->rq_sge = calloc(nr * MAX(qp->cap.max_recv_sge, 1), sizeof(*qp->rq_sge));
    if (!qp->sq || !qp->sq_sge || !qp->sq_inline || !qp->rq || !qp->rq_sge)
        return ENOMEM;
    for (size_t i = 0; i < ns; i++) {
        qp->sq[i].sge = &qp->sq_sge[i * qp->cap.max_send_sge];
        qp->sq[i].inline_data = &qp->sq_inline[i * qp->cap.max_inline_data];
    }
    for (size_t i = 0; i < nr; i++)
        qp->rq[i].sge = &qp->rq_sge[i * qp->cap.max_recv_sge];
    return 0;
}

static void qp_free(struct sm_qp *qp)
{
    pthread_mutex_destroy(&qp->qp.mutex);
    pthread_cond_destroy(&qp->qp.cond);
    pthread_mutex_destroy(&qp->lock);
    pthread_cond_destroy(&qp->cond);
    free(qp->sq);
    free(qp->sq_sge);
    free(qp->sq_inline);
    free(qp->rq);
    free(qp->rq_sge);
    free(qp);
}

void sm_qp_get(struct sm_qp *qp)
{
    atomic_fetch_add(&qp->refs, 1);
}

void sm_qp_put(struct sm_qp *qp)
{
    if (atomic_fetch_sub(&qp->refs, 1) == 1)
        qp_free(qp);
}

static int publish(struct sm_ctx *ctx, struct sm_qp *qp, struct ibv_pd *pd)
{
    struct sm_cq *scq = to_cq(qp->qp.send_cq);

    pthread_mutex_lock(&ctx->lock);
    if (ctx->nqp >= SM_MAX_FLOWS / 2 - 1) {
        pthread_mutex_unlock(&ctx->lock);
        return ENOMEM;
    }
    ctx->nqp++;
    pthread_mutex_unlock(&ctx->lock);
    atomic_fetch_add(&to_pd(pd)->users, 1);
    atomic_fetch_add(&scq->users, 1);
    atomic_fetch_add(&to_cq(qp->qp.recv_cq)->users, 1);
    pthread_mutex_lock(&ctx->qp_list_lock);
    list_add(&ctx->qps, &qp->link);
    pthread_mutex_unlock(&ctx->qp_list_lock);
    pthread_mutex_lock(&scq->list_lock);
    list_add(&scq->qps, &qp->cq_link);
    pthread_mutex_unlock(&scq->list_lock);
    return 0;
}

static struct sm_qp *qp_new(struct ibv_pd *pd, const struct ibv_qp_init_attr *a)
{
    struct sm_qp *qp = calloc(1, sizeof(*qp));

    if (!qp)
        return NULL;
    qp->ctx = to_ctx(pd->context);
    qp->refs = 1;
    qp->cap = a->cap;
    qp->sig_all = a->sq_sig_all;
    qp->pdn = to_pd(pd)->pdn;
    qp->qp.context = pd->context;
    qp->qp.qp_context = a->qp_context;
    qp->qp.pd = pd;
    qp->qp.send_cq = a->send_cq;
    qp->qp.recv_cq = a->recv_cq;
    qp->qp.qp_type = a->qp_type;
    qp->qp.qp_num = atomic_fetch_add(&next_qpn, 1) % 0xfffff0 + 2;
    qp->qp.handle = qp->qp.qp_num;
    pthread_mutex_init(&qp->qp.mutex, NULL);
    pthread_cond_init(&qp->qp.cond, NULL);
    pthread_mutex_init(&qp->lock, NULL);
    pthread_cond_init(&qp->cond, NULL);
    if (alloc_queues(qp)) {
        qp_free(qp);
        return NULL;
    }
    return qp;
}

struct ibv_qp *sm_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct sm_qp *qp = NULL;
    int err;

    STAT_CMD(cmd_create_qp);
    sm_command_delay();
    err = sm_fault_errno("create_qp");
    if (!err)
        err = check_init_attr(pd, attr);
    if (!err) {
        qp = qp_new(pd, attr);
        err = qp ? publish(qp->ctx, qp, pd) : ENOMEM;
    }
    if (err) {
        if (qp)
            qp_free(qp);
        errno = err;
        return NULL;
    }
    attr->cap = qp->cap;
    STAT_INC(qps_live);
    return &qp->qp;
}

/* Lock held. After this nobody, here or at a peer, touches memory for the queue pair. */
static void let_go(struct sm_qp *qp)
{
    if (qp->out)
        sm_flow_detach(qp->out);
    if (qp->in)
        sm_flow_detach(qp->in);
}

static void stop_to_state(struct sm_qp *qp, enum ibv_qp_state state)
{
    pthread_mutex_lock(&qp->lock);
    qp->state = qp->qp.state = state;
    qp->deadline = 0;
    let_go(qp);
    while (qp->pump_busy)
        pthread_cond_wait(&qp->cond, &qp->lock);
    if (state == IBV_QPS_ERR) {
        sm_sq_flush(qp);
        sm_rq_flush(qp);
    }
    pthread_mutex_unlock(&qp->lock);
}

static void clear_queues(struct sm_qp *qp)
{
    pthread_mutex_lock(&qp->lock);
    sm_cq_forget(to_cq(qp->qp.send_cq), qp);
    sm_cq_forget(to_cq(qp->qp.recv_cq), qp);
    qp->sq_tail = qp->sq_pumped = qp->sq_head = 0;
    qp->rq_tail = qp->rq_head = 0;
    atomic_store(&qp->sq_free, 0);
    atomic_store(&qp->rq_free, 0);
    atomic_store(&qp->sq_pending, 0);
    qp->sent = qp->received = 0;
    qp->failed = false;
    pthread_mutex_unlock(&qp->lock);
}

int sm_destroy_qp(struct ibv_qp *ibqp)
{
    struct sm_qp *qp = to_qp(ibqp);
    struct sm_ctx *ctx = qp->ctx;
    struct sm_cq *scq = to_cq(ibqp->send_cq), *rcq = to_cq(ibqp->recv_cq);
    struct sm_pd *pd = to_pd(ibqp->pd);

    pthread_mutex_lock(&ctx->qp_list_lock);
    list_del(&qp->link);
    pthread_mutex_unlock(&ctx->qp_list_lock);
    pthread_mutex_lock(&scq->list_lock);
    list_del(&qp->cq_link);
    pthread_mutex_unlock(&scq->list_lock);
    stop_to_state(qp, IBV_QPS_RESET);
    clear_queues(qp);

    sm_async_forget(ctx, ibqp);
    pthread_mutex_lock(&ibqp->mutex);
    while (ibqp->events_completed != atomic_load(&qp->events_delivered))
        pthread_cond_wait(&ibqp->cond, &ibqp->mutex);
    pthread_mutex_unlock(&ibqp->mutex);

    atomic_fetch_sub(&scq->users, 1);
    atomic_fetch_sub(&rcq->users, 1);
    atomic_fetch_sub(&pd->users, 1);
    pthread_mutex_lock(&ctx->lock);
    ctx->nqp--;
    pthread_mutex_unlock(&ctx->lock);
    STAT_DEC(qps_live);
    sm_qp_put(qp);
    return 0;
}

/* ---- errors ---------------------------------------------------------------------------------- */

/* What a ConnectX reports beside the status. */
uint32_t sm_vendor_err(enum ibv_wc_status s)
{
    switch (s) {
    case IBV_WC_SUCCESS:
        return 0;
    case IBV_WC_WR_FLUSH_ERR:
        return 0xf9;
    case IBV_WC_REM_ACCESS_ERR:
        return 0x88;
    case IBV_WC_REM_INV_REQ_ERR:
        return 0x8a;
    case IBV_WC_REM_OP_ERR:
        return 0x89;
    case IBV_WC_RETRY_EXC_ERR:
        return 0x81;
    case IBV_WC_RNR_RETRY_EXC_ERR:
        return 0x87;
    case IBV_WC_LOC_PROT_ERR:
        return 0x51;
    default:
        return 0x32;
    }
}

void sm_rq_complete(struct sm_qp *qp, const struct ibv_wc *wc, bool solicited)
{
    struct sm_cqe e = {.wc = *wc, .qp = qp, .seq = qp->rq_head};

    e.wc.wr_id = qp->rq[qp->rq_head % MAX(qp->cap.max_recv_wr, 1)].wr_id;
    e.wc.qp_num = qp->qp.qp_num;
    e.wc.vendor_err = sm_vendor_err(wc->status);
    qp->rq_head++;
    sm_cq_push(to_cq(qp->qp.recv_cq), &e, solicited);
}

void sm_rq_flush(struct sm_qp *qp)
{
    const struct ibv_wc wc = {.status = IBV_WC_WR_FLUSH_ERR, .opcode = IBV_WC_RECV};

    while (qp->rq_head != qp->rq_tail)
        sm_rq_complete(qp, &wc, false);
}

void sm_qp_error(struct sm_qp *qp)
{
    if (qp->state == IBV_QPS_ERR || qp->state == IBV_QPS_RESET)
        return;
    qp->state = qp->qp.state = IBV_QPS_ERR;
    qp->deadline = 0;
    let_go(qp);
    sm_sq_collect(qp, NULL);
    sm_sq_flush(qp);
    sm_rq_flush(qp);
}

/* ---- modify ---------------------------------------------------------------------------------- */

enum { ALT_PATH = IBV_QP_ALT_PATH, MIG = IBV_QP_PATH_MIG_STATE };

static const struct transition {
    enum ibv_qp_state from, to;
    int required, optional;
} transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | ALT_PATH},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | ALT_PATH | MIG},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | ALT_PATH | MIG},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0,
     IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
         IBV_QP_RNR_RETRY | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

static int check_transition(enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
    mask &= ~IBV_QP_STATE;
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
        return mask & ~IBV_QP_CUR_STATE ? EINVAL : 0;
    for (size_t i = 0; i < ARRAY_SIZE(transitions); i++) {
        const struct transition *t = &transitions[i];

        if (t->from == from && t->to == to)
            return (mask & t->required) != t->required || (mask & ~(t->required | t->optional))
                       ? EINVAL
                       : 0;
    }
    return EINVAL;
}

static int check_values(const struct ibv_qp_attr *a, int mask)
{
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                       IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;

    if (((mask & IBV_QP_PORT) && a->port_num != 1) ||
        ((mask & IBV_QP_PKEY_INDEX) && a->pkey_index) ||
        ((mask & IBV_QP_ACCESS_FLAGS) && (a->qp_access_flags & ~(unsigned)access)) ||
        ((mask & IBV_QP_PATH_MTU) && (a->path_mtu < IBV_MTU_256 || a->path_mtu > IBV_MTU_4096)) ||
        ((mask & IBV_QP_DEST_QPN) && a->dest_qp_num > 0xffffff) ||
        ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) && a->max_dest_rd_atomic > SM_MAX_RD_ATOMIC) ||
        ((mask & IBV_QP_MAX_QP_RD_ATOMIC) && a->max_rd_atomic > SM_MAX_RD_ATOMIC) ||
        ((mask & IBV_QP_MIN_RNR_TIMER) && a->min_rnr_timer > 31) ||
        ((mask & IBV_QP_TIMEOUT) && a->timeout > 31) ||
        ((mask & IBV_QP_RETRY_CNT) && a->retry_cnt > 7) ||
        ((mask & IBV_QP_RNR_RETRY) && a->rnr_retry > 7) || (mask & (ALT_PATH | MIG)))
        return EINVAL;
    if ((mask & IBV_QP_AV) &&
        (a->ah_attr.port_num != 1 || (a->ah_attr.is_global && a->ah_attr.grh.sgid_index) ||
         (!a->ah_attr.is_global && !a->ah_attr.dlid)))
        return EINVAL;
    return 0;
}

static void store_values(struct ibv_qp_attr *to, const struct ibv_qp_attr *a, int mask)
{
#define TAKE(bit, field)          \
    do {                          \
        if (mask & (bit))         \
            to->field = a->field; \
    } while (0)
    TAKE(IBV_QP_PORT, port_num);
    TAKE(IBV_QP_PKEY_INDEX, pkey_index);
    TAKE(IBV_QP_ACCESS_FLAGS, qp_access_flags);
    TAKE(IBV_QP_PATH_MTU, path_mtu);
    TAKE(IBV_QP_DEST_QPN, dest_qp_num);
    TAKE(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
    TAKE(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
    TAKE(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
    TAKE(IBV_QP_TIMEOUT, timeout);
    TAKE(IBV_QP_RETRY_CNT, retry_cnt);
    TAKE(IBV_QP_RNR_RETRY, rnr_retry);
    TAKE(IBV_QP_RQ_PSN, rq_psn);
    TAKE(IBV_QP_SQ_PSN, sq_psn);
    TAKE(IBV_QP_AV, ah_attr);
#undef TAKE
}

static void enter_reset(struct sm_qp *qp)
{
    stop_to_state(qp, IBV_QPS_RESET);
    clear_queues(qp);
    memset(&qp->attr, 0, sizeof(qp->attr));
}

static int modify_checks(struct sm_qp *qp, const struct ibv_qp_attr *attr, int mask,
                         enum ibv_qp_state to)
{
    int rc = sm_fault_errno("modify_qp");

    if (!rc && (mask & IBV_QP_CUR_STATE) && attr->cur_qp_state != qp->state)
        rc = EINVAL;
    if (!rc)
        rc = check_transition(qp->state, to, mask);
    return rc ? rc : check_values(attr, mask);
}

int sm_modify_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask)
{
    struct sm_qp *qp = to_qp(ibqp);
    enum ibv_qp_state to;
    int rc;

    STAT_CMD(cmd_modify_qp);
    sm_command_delay();
    pthread_mutex_lock(&qp->lock);
    to = mask & IBV_QP_STATE ? attr->qp_state : qp->state;
    rc = modify_checks(qp, attr, mask, to);
    if (!rc && to != IBV_QPS_RESET && to != IBV_QPS_ERR) {
        store_values(&qp->attr, attr, mask);
        if (to == IBV_QPS_RTS)
            qp->next_try = 0;
        qp->state = ibqp->state = to;
        sm_sq_progress(qp);
    }
    pthread_mutex_unlock(&qp->lock);
    if (rc)
        return rc;
    if (to == IBV_QPS_ERR)
        stop_to_state(qp, IBV_QPS_ERR);
    else if (to == IBV_QPS_RESET)
        enter_reset(qp);
    /* The engine connects a new sender and answers callers that waited for a new receiver. */
    if (to == IBV_QPS_RTR || to == IBV_QPS_RTS) {
        atomic_store(&qp->ctx->eng.rescan, true);
        sm_ctx_kick(qp->ctx, SM_BELL_CONTROL);
    }
    return 0;
}

int sm_query_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask,
                struct ibv_qp_init_attr *init)
{
    struct sm_qp *qp = to_qp(ibqp);

    (void)mask; /* everything is cheap to tell */
    pthread_mutex_lock(&qp->lock);
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = qp->state;
    attr->cap = qp->cap;
    attr->sq_psn = (qp->attr.sq_psn + qp->sent) & 0xffffff;
    attr->rq_psn = (qp->attr.rq_psn + qp->received) & 0xffffff;
    ibqp->state = qp->state;
    pthread_mutex_unlock(&qp->lock);
    *init = (struct ibv_qp_init_attr){
        .qp_context = ibqp->qp_context,
        .send_cq = ibqp->send_cq,
        .recv_cq = ibqp->recv_cq,
        .cap = qp->cap,
        .qp_type = ibqp->qp_type,
        .sq_sig_all = qp->sig_all,
    };
    return 0;
}

/* ---- the receive queue ----------------------------------------------------------------------- */

static int post_one_recv(struct sm_qp *qp, const struct ibv_recv_wr *wr)
{
    struct sm_rqe *r = &qp->rq[qp->rq_tail % MAX(qp->cap.max_recv_wr, 1)];

    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_recv_sge)
        return EINVAL;
    if (qp->rq_tail - atomic_load(&qp->rq_free) >= qp->cap.max_recv_wr)
        return ENOMEM;
    r->wr_id = wr->wr_id;
    r->num_sge = (uint32_t)wr->num_sge;
    memcpy(r->sge, wr->sg_list, r->num_sge * sizeof(*r->sge));
    qp->rq_tail++;
    STAT_INC(wr_recv);
    return 0;
}

int sm_post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct sm_qp *qp = to_qp(ibqp);
    int rc = 0;
    bool stalled;

    if (!sm_ctx_alive(qp->ctx)) {
        *bad = wr;
        return EIO;
    }
    pthread_mutex_lock(&qp->lock);
    stalled = qp->in && qp->rq_head == qp->rq_tail;
    for (; wr && !rc; wr = rc ? wr : wr->next)
        rc = qp->state == IBV_QPS_RESET ? EINVAL : post_one_recv(qp, wr);
    if (rc)
        *bad = wr;
    if (qp->state == IBV_QPS_ERR)
        sm_rq_flush(qp);
    /* A message may have found no receive and be waiting for one. */
    if (stalled && qp->in)
        sm_ctx_kick(qp->ctx, qp->in->id);
    pthread_mutex_unlock(&qp->lock);
    return rc;
}
