/* SPDX-License-Identifier: BSD-3-Clause */
/* Completion queues and completion channels. */
#include "internal.h"

#include <fcntl.h>
#include <sched.h>

/* ---- channels -------------------------------------------------------------------------------- */

struct cq_event {
    struct list link;
    struct sm_cq *cq;
};

struct ibv_comp_channel *sm_create_channel(struct ibv_context *c)
{
    struct sm_ctx *ctx = to_ctx(c);
    struct sm_channel *ch = calloc(1, sizeof(*ch));

    if (!ch)
        return NULL;
    ch->ctx = ctx;
    ch->chan.context = c;
    ch->chan.fd = sm_eventfd(true);
    if (ch->chan.fd < 0) {
        free(ch);
        return NULL;
    }
    sm_fd_track(ctx, ch->chan.fd);
    pthread_mutex_init(&ch->lock, NULL);
    list_init(&ch->events);
    pthread_mutex_lock(&ctx->lock);
    ctx->nchan++;
    pthread_mutex_unlock(&ctx->lock);
    return &ch->chan;
}

static struct sm_channel *to_channel(struct ibv_comp_channel *c)
{
    return container_of(c, struct sm_channel, chan);
}

int sm_destroy_channel(struct ibv_comp_channel *c)
{
    struct sm_channel *ch = to_channel(c);
    struct sm_ctx *ctx = ch->ctx;

    pthread_mutex_lock(&ctx->lock);
    if (c->refcnt) {
        pthread_mutex_unlock(&ctx->lock);
        return EBUSY;
    }
    ctx->nchan--;
    pthread_mutex_unlock(&ctx->lock);
    sm_fd_close(ctx, c->fd);
    pthread_mutex_destroy(&ch->lock);
    free(ch);
    return 0;
}

static void channel_post(struct sm_channel *ch, struct sm_cq *cq)
{
    struct cq_event *e = malloc(sizeof(*e));
    uint64_t one = 1;

    if (!e)
        return;
    e->cq = cq;
    pthread_mutex_lock(&ch->lock);
    list_add(&ch->events, &e->link);
    pthread_mutex_unlock(&ch->lock);
    if (write(ch->chan.fd, &one, sizeof(one)) < 0)
        return; /* counter full: the reader has work already */
}

static void channel_forget(struct sm_channel *ch, const struct sm_cq *cq)
{
    struct list *l, *tmp;

    pthread_mutex_lock(&ch->lock);
    list_for_each_safe (l, tmp, &ch->events) {
        struct cq_event *e = container_of(l, struct cq_event, link);

        if (e->cq == cq) {
            list_del(l);
            free(e);
        }
    }
    pthread_mutex_unlock(&ch->lock);
}

int sm_get_cq_event(struct ibv_comp_channel *c, struct ibv_cq **cq, void **cq_context)
{
    struct sm_channel *ch = to_channel(c);
    struct cq_event *e = NULL;
    uint64_t one;

    /* A wake-up without an event belonged to a queue that is gone: wait for the next. */
    while (!e) {
        if (read(c->fd, &one, sizeof(one)) != sizeof(one))
            return -1;
        pthread_mutex_lock(&ch->lock);
        if (!list_empty(&ch->events)) {
            e = container_of(ch->events.next, struct cq_event, link);
            list_del(&e->link);
            atomic_fetch_add(&e->cq->events_delivered, 1);
        }
        pthread_mutex_unlock(&ch->lock);
    }
    *cq = &e->cq->cq;
    *cq_context = e->cq->cq.cq_context;
    free(e);
    return 0;
}

void sm_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += n;
    pthread_cond_broadcast(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}

/* ---- queues ---------------------------------------------------------------------------------- */

struct ibv_cq *sm_create_cq(struct ibv_context *c, int cqe, void *cq_context,
                            struct ibv_comp_channel *channel, int comp_vector)
{
    struct sm_ctx *ctx = to_ctx(c);
    struct sm_cq *cq;
    int err;

    STAT_CMD(cmd_create_cq);
    sm_command_delay();
    err = sm_fault_errno("create_cq");
    if (!err && (cqe < 1 || cqe > SM_MAX_CQE || comp_vector < 0 ||
                 comp_vector >= c->num_comp_vectors || (channel && channel->context != c)))
        err = EINVAL;
    cq = err ? NULL : calloc(1, sizeof(*cq));
    if (cq)
        cq->ring = calloc((size_t)cqe, sizeof(*cq->ring));
    if (!cq || !cq->ring) {
        free(cq);
        errno = err ? err : ENOMEM;
        return NULL;
    }
    cq->ctx = ctx;
    cq->cap = (uint32_t)cqe;
    cq->cq.context = c;
    cq->cq.channel = channel;
    cq->cq.cq_context = cq_context;
    cq->cq.cqe = cqe;
    pthread_mutex_init(&cq->cq.mutex, NULL);
    pthread_cond_init(&cq->cq.cond, NULL);
    pthread_mutex_init(&cq->list_lock, NULL);
    pthread_mutex_init(&cq->lock, NULL);
    list_init(&cq->qps);
    pthread_mutex_lock(&ctx->lock);
    ctx->ncq++;
    if (channel)
        channel->refcnt++;
    pthread_mutex_unlock(&ctx->lock);
    STAT_INC(cqs_live);
    return &cq->cq;
}

int sm_resize_cq(struct ibv_cq *ibcq, int cqe)
{
    struct sm_cq *cq = to_cq(ibcq);
    struct sm_cqe *ring;

    if (cqe < 1 || cqe > SM_MAX_CQE)
        return EINVAL;
    ring = calloc((size_t)cqe, sizeof(*ring));
    if (!ring)
        return ENOMEM;
    pthread_mutex_lock(&cq->lock);
    if (cq->count > (uint32_t)cqe) {
        pthread_mutex_unlock(&cq->lock);
        free(ring);
        return EINVAL;
    }
    for (uint32_t i = 0; i < cq->count; i++)
        ring[i] = cq->ring[(cq->head + i) % cq->cap];
    free(cq->ring);
    cq->ring = ring;
    cq->cap = (uint32_t)cqe;
    cq->head = 0;
    ibcq->cqe = cqe;
    pthread_mutex_unlock(&cq->lock);
    return 0;
}

int sm_destroy_cq(struct ibv_cq *ibcq)
{
    struct sm_cq *cq = to_cq(ibcq);
    struct sm_ctx *ctx = cq->ctx;

    if (atomic_load(&cq->users))
        return EBUSY;
    if (ibcq->channel)
        channel_forget(to_channel(ibcq->channel), cq);
    /* As the real library: not before every event that was read has been acknowledged. */
    pthread_mutex_lock(&ibcq->mutex);
    while (ibcq->comp_events_completed != cq->events_delivered)
        pthread_cond_wait(&ibcq->cond, &ibcq->mutex);
    pthread_mutex_unlock(&ibcq->mutex);
    sm_async_forget(ctx, ibcq);
    pthread_mutex_lock(&ctx->lock);
    ctx->ncq--;
    if (ibcq->channel)
        ibcq->channel->refcnt--;
    pthread_mutex_unlock(&ctx->lock);
    pthread_mutex_destroy(&ibcq->mutex);
    pthread_cond_destroy(&ibcq->cond);
    pthread_mutex_destroy(&cq->list_lock);
    pthread_mutex_destroy(&cq->lock);
    free(cq->ring);
    free(cq);
    STAT_DEC(cqs_live);
    return 0;
}

void sm_cq_push(struct sm_cq *cq, const struct sm_cqe *e, bool solicited)
{
    bool overrun = false, notify = false;
    int arm;

    pthread_mutex_lock(&cq->lock);
    if (cq->count == cq->cap) {
        overrun = !cq->overrun;
        cq->overrun = true;
    } else {
        cq->ring[(cq->head + cq->count) % cq->cap] = *e;
        cq->count++;
    }
    arm = atomic_load(&cq->arm);
    if (arm == SM_ARM_NEXT || (arm == SM_ARM_SOLICITED && (solicited || e->wc.status))) {
        atomic_store(&cq->arm, SM_ARM_NONE);
        notify = cq->cq.channel != NULL;
    }
    pthread_mutex_unlock(&cq->lock);
    if (notify)
        channel_post(to_channel(cq->cq.channel), cq);
    if (overrun)
        sm_async_post(cq->ctx, IBV_EVENT_CQ_ERR, &cq->cq);
}

void sm_cq_forget(struct sm_cq *cq, const struct sm_qp *qp)
{
    uint32_t kept = 0;

    pthread_mutex_lock(&cq->lock);
    for (uint32_t i = 0; i < cq->count; i++) {
        struct sm_cqe *e = &cq->ring[(cq->head + i) % cq->cap];

        if (e->qp != qp)
            cq->ring[(cq->head + kept++) % cq->cap] = *e;
    }
    cq->count = kept;
    pthread_mutex_unlock(&cq->lock);
}

/* Send completions wait in the queue pairs' rings until somebody looks. */
static void collect(struct sm_cq *cq)
{
    struct list *l;

    pthread_mutex_lock(&cq->list_lock);
    list_for_each (l, &cq->qps) {
        struct sm_qp *qp = container_of(l, struct sm_qp, cq_link);

        if (!atomic_load_explicit(&qp->sq_pending, memory_order_relaxed))
            continue;
        pthread_mutex_lock(&qp->lock);
        sm_sq_progress(qp);
        pthread_mutex_unlock(&qp->lock);
    }
    pthread_mutex_unlock(&cq->list_lock);
}

static int take(struct sm_cq *cq, int n, struct ibv_wc *wc)
{
    int got = 0;

    pthread_mutex_lock(&cq->lock);
    for (; got < n && cq->count; got++) {
        struct sm_cqe *e = &cq->ring[cq->head];

        wc[got] = e->wc;
        /* Only a polled completion gives its slots back, as on the device: a program that never
         * asks for one runs out of them. */
        atomic_store_explicit(e->send ? &e->qp->sq_free : &e->qp->rq_free, e->seq + 1,
                              memory_order_release);
        cq->head = (cq->head + 1) % cq->cap;
        cq->count--;
    }
    if (!got && cq->overrun)
        got = -EOVERFLOW;
    pthread_mutex_unlock(&cq->lock);
    return got;
}

int sm_poll_cq(struct ibv_cq *ibcq, int n, struct ibv_wc *wc)
{
    struct sm_cq *cq = to_cq(ibcq);
    int got;

    if (!sm_ctx_alive(cq->ctx))
        return -EIO;
    if (n <= 0)
        return 0;
    collect(cq);
    got = take(cq, n, wc);
    if (got) {
        atomic_store_explicit(&cq->empty_polls, 0, memory_order_relaxed);
    } else if (atomic_fetch_add_explicit(&cq->empty_polls, 1, memory_order_relaxed) >=
               SM_POLLS_BEFORE_YIELD) {
        /* Spinning takes the processor from the responder that we are waiting for. */
        sched_yield();
    }
    return got;
}

int sm_req_notify_cq(struct ibv_cq *ibcq, int solicited_only)
{
    struct sm_cq *cq = to_cq(ibcq);
    int want = solicited_only ? SM_ARM_SOLICITED : SM_ARM_NEXT;
    struct list *l;

    if (!sm_ctx_alive(cq->ctx))
        return EIO;
    pthread_mutex_lock(&cq->lock);
    if (want > atomic_load(&cq->arm))
        atomic_store(&cq->arm, want);
    pthread_mutex_unlock(&cq->lock);
    /* From now on somebody has to look at the rings although nobody polls. */
    pthread_mutex_lock(&cq->list_lock);
    list_for_each (l, &cq->qps) {
        struct sm_qp *qp = container_of(l, struct sm_qp, cq_link);

        pthread_mutex_lock(&qp->lock);
        sm_sq_progress(qp);
        pthread_mutex_unlock(&qp->lock);
    }
    pthread_mutex_unlock(&cq->list_lock);
    return 0;
}
