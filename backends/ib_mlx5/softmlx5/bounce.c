/* SPDX-License-Identifier: BSD-3-Clause */
/* The initiator's part of the slow path, and its turn in general: collect and hand over. */
#include "internal.h"

/* Moves one bounce buffer between the file and our own buffers. What it may touch comes from the
 * private request, not from the shared entry: the peer could have changed that. */
static bool serve_slot(struct sm_flow *f, const struct sm_wqe *w, unsigned slot, uint64_t off,
                       uint32_t len, bool fill)
{
    const struct sm_who who = {f->ctx, f->qp->pdn, f->qp->qp.qp_num};
    off_t at = (off_t)(SM_SHM_BOUNCE_OFF + (size_t)slot * SM_BOUNCE_SIZE);

    for (uint32_t done = 0; done < len;) {
        struct sm_xlat x = {.niov = 0};
        bool ok = sm_xlat_sges(&who, w->sge, w->num_sge, off + done, len - done,
                               fill ? SM_LR : SM_LW, &x);
        ssize_t want = (ssize_t)x.len, r = -1;

        if (ok && want)
            r = fill ? pwritev(f->memfd, x.iov, (int)x.niov, at + done)
                     : preadv(f->memfd, x.iov, (int)x.niov, at + done);
        sm_xlat_put(&x);
        if (r <= 0 || r != want)
            return false;
        done += (uint32_t)want;
    }
    return true;
}

/* Lock held, dropped while bytes move: the request cannot be completed meanwhile, since completing
 * it takes the flow away first and that waits for `copying`. */
static bool bounce_turn(struct sm_flow *f, unsigned slot)
{
    struct sm_bounce *b = &f->shm->bounce[slot];
    uint32_t state = atomic_load_explicit(&b->state, memory_order_acquire), len = b->len;
    uint64_t off = b->off, seq = b->seq;
    const struct sm_wqe *w;
    bool fill = state == SM_B_WANT, ok;

    if (state != SM_B_WANT && state != SM_B_FULL)
        return false;
    w = sm_sq_find(f->qp, seq);
    if (!w || len > SM_BOUNCE_SIZE || off > w->len || len > w->len - off)
        return false; /* not a question that this request can raise */
    /* A full buffer of an outbound request that we filled ourselves is waiting for the responder.
     */
    if (fill == (w->op == IBV_WR_RDMA_READ || w->op == IBV_WR_ATOMIC_CMP_AND_SWP ||
                 w->op == IBV_WR_ATOMIC_FETCH_AND_ADD))
        return false;
    sm_flow_copy_begin(f);
    pthread_mutex_unlock(&f->qp->lock);
    ok = serve_slot(f, w, slot, off, len, fill);
    atomic_store_explicit(&b->state,
                          !ok    ? SM_B_FAIL
                          : fill ? SM_B_FULL
                                 : SM_B_EMPTY,
                          memory_order_release);
    sm_flow_copy_end(f);
    sm_flow_ring(f);
    pthread_mutex_lock(&f->qp->lock);
    return true;
}

bool sm_initiate(struct sm_flow *f)
{
    struct sm_qp *qp = f->qp;

    pthread_mutex_lock(&qp->lock);
    for (unsigned i = 0; i < SM_BOUNCE && !f->detached && f->state == SM_FLOW_READY; i++)
        bounce_turn(f, i);
    if (!f->detached)
        sm_sq_progress(qp);
    pthread_mutex_unlock(&qp->lock);
    return false;
}
