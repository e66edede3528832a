/* SPDX-License-Identifier: BSD-3-Clause */
/* The responder: executes a peer's requests on this process's memory.
 *
 * It owns what the requester may not decide: keys, rights, receives. Every chunk translates anew,
 * holds the keys of its chain while it is copied and lets go of them before anything else happens,
 * so that a key that is being destroyed waits for one chunk at most and no later chunk gets
 * through.
 */
#include "internal.h"

enum { OPS_PER_TURN = 16, RNR_FOR_EVER = 7 };

/* A request under execution. The copy of the ring entry is private: the peer may scribble on its
 * own. */
struct sm_exec {
    bool vm;      /* process_vm_* works towards the peer */
    bool stopped; /* after an error: the rest of the ring is the requester's to flush */
    uint8_t rnr_retry;
    bool active, atomic_done;
    uint64_t seq;
    struct sm_ent e;
    uint64_t off;    /* bytes done */
    uint64_t issued; /* slow path: bytes asked for or handed out */
    unsigned next_slot;
    uint64_t result; /* of an atomic */
    uint64_t rnr_deadline;
};

enum step { STEP_MORE, STEP_DONE, STEP_WAIT, STEP_GONE };

struct sm_exec *sm_exec_new(bool vm, uint8_t rnr_retry)
{
    struct sm_exec *x = calloc(1, sizeof(*x));

    if (x) {
        x->vm = vm;
        x->rnr_retry = rnr_retry & 7;
    }
    return x;
}

void sm_exec_free(struct sm_exec *x)
{
    free(x);
}

uint64_t sm_exec_deadline(const struct sm_flow *f)
{
    uint64_t d = f->exec ? f->exec->rnr_deadline : 0;

    return d == UINT64_MAX ? 0 : d;
}

static bool is_send(uint8_t op)
{
    return op == IBV_WR_SEND || op == IBV_WR_SEND_WITH_IMM || op == IBV_WR_SEND_WITH_INV;
}

static bool is_atomic(uint8_t op)
{
    return op == IBV_WR_ATOMIC_CMP_AND_SWP || op == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Does data flow from here to the requester? */
static bool is_outbound(uint8_t op)
{
    return op == IBV_WR_RDMA_READ || is_atomic(op);
}

static uint8_t right_for(uint8_t op)
{
    return is_atomic(op) ? SM_A : op == IBV_WR_RDMA_READ ? SM_RR : SM_RW;
}

static struct sm_who who_of(const struct sm_qp *qp)
{
    return (struct sm_who){qp->ctx, qp->pdn, qp->qp.qp_num};
}

/* ---- taking a request ------------------------------------------------------------------------ */

static bool load(struct sm_flow *f)
{
    struct sm_exec *x = f->exec;
    uint64_t head = atomic_load_explicit(&f->shm->head, memory_order_acquire);
    uint64_t total = 0;

    if (head == x->seq)
        return false;
    memcpy(&x->e, &f->shm->ring[x->seq % SM_RING], sizeof(x->e));
    x->active = true;
    x->atomic_done = false;
    x->off = x->issued = 0;
    x->rnr_deadline = 0;
    if (head - x->seq > SM_RING || x->e.nseg > SM_SEGS ||
        ((x->e.flags & SM_ENT_INLINE) && (x->e.len > SM_MAX_INLINE || is_outbound(x->e.op))))
        x->stopped = true;
    for (unsigned i = 0; i < x->e.nseg && i < SM_SEGS; i++)
        total += x->e.seg[i].len;
    if (!(x->e.flags & SM_ENT_INLINE) && total != x->e.len)
        x->stopped = true;
    return !x->stopped;
}

static uint64_t rnr_timer_ns(unsigned code)
{
    static const uint32_t us[32] = {655360, 10,    20,    30,     40,     60,     80,     120,
                                    160,    240,   320,   480,    640,    960,    1280,   1920,
                                    2560,   3840,  5120,  7680,   10240,  15360,  20480,  30720,
                                    40960,  61440, 81920, 122880, 163840, 245760, 327680, 491520};

    return us[code & 31] * 1000ull;
}

/* Lock held. No receive yet: the requester would be told to try again, `rnr_retry` times. */
static enum step receiver_not_ready(struct sm_qp *qp, struct sm_exec *x, enum ibv_wc_status *s)
{
    uint64_t now = sm_now_ns();

    if (!x->rnr_deadline)
        x->rnr_deadline = x->rnr_retry == RNR_FOR_EVER
                              ? UINT64_MAX
                              : now + x->rnr_retry * rnr_timer_ns(qp->attr.min_rnr_timer);
    if (now < x->rnr_deadline) {
        sm_ctx_kick(qp->ctx, SM_BELL_CONTROL); /* the engine arms its timer */
        return STEP_WAIT;
    }
    *s = IBV_WC_RNR_RETRY_EXC_ERR;
    return STEP_DONE;
}

static struct sm_rqe *receive_of(struct sm_qp *qp)
{
    return &qp->rq[qp->rq_head % MAX(qp->cap.max_recv_wr, 1)];
}

static uint64_t capacity(const struct sm_rqe *r)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < r->num_sge; i++)
        n += r->sge[i].length;
    return n;
}

static enum ibv_wc_status check_rights(const struct sm_qp *qp, const struct sm_exec *x)
{
    static const struct {
        uint8_t right;
        unsigned access;
    } map[] = {{SM_RR, IBV_ACCESS_REMOTE_READ},
               {SM_RW, IBV_ACCESS_REMOTE_WRITE},
               {SM_A, IBV_ACCESS_REMOTE_ATOMIC}};
    const struct sm_who who = who_of(qp);
    uint8_t right = right_for(x->e.op);

    for (size_t i = 0; i < ARRAY_SIZE(map); i++) {
        if (right == map[i].right && !(qp->attr.qp_access_flags & map[i].access))
            return IBV_WC_REM_INV_REQ_ERR;
    }
    if (is_outbound(x->e.op) && !qp->attr.max_dest_rd_atomic)
        return IBV_WC_REM_INV_REQ_ERR;
    if (is_atomic(x->e.op) &&
        (x->e.remote_addr % 8 || x->e.len != 8 || !atomic_load(&sm_limits.atomic)))
        return IBV_WC_REM_INV_REQ_ERR;
    /* The whole range before the first byte, so that an access that leaves it changes nothing. */
    if (!sm_xlat_check(&who, x->e.rkey, x->e.remote_addr, x->e.len, right))
        return IBV_WC_REM_ACCESS_ERR;
    return IBV_WC_SUCCESS;
}

/* Lock held. STEP_MORE: carry on with the data. */
static enum step begin(struct sm_qp *qp, struct sm_exec *x, enum ibv_wc_status *s)
{
    uint8_t op = x->e.op;
    bool receives = is_send(op) || op == IBV_WR_RDMA_WRITE_WITH_IMM;

    if (!is_send(op)) {
        *s = op <= IBV_WR_ATOMIC_FETCH_AND_ADD ? check_rights(qp, x) : IBV_WC_REM_INV_REQ_ERR;
        if (*s)
            return STEP_DONE;
    }
    if (receives && qp->rq_head == qp->rq_tail)
        return receiver_not_ready(qp, x, s);
    x->rnr_deadline = 0;
    if (is_send(op) && capacity(receive_of(qp)) < x->e.len) {
        const struct ibv_wc wc = {.status = IBV_WC_LOC_LEN_ERR, .opcode = IBV_WC_RECV};

        sm_rq_complete(qp, &wc, false);
        *s = IBV_WC_REM_INV_REQ_ERR;
        return STEP_DONE;
    }
    return STEP_MORE;
}

/* ---- our side of a chunk: keys held ---------------------------------------------------------- */

/* The receive under way does not move while the engine copies: whoever flushes it waits for us. */
static bool own_memory(struct sm_flow *f, uint64_t off, uint64_t len, struct sm_xlat *own)
{
    const struct sm_exec *x = f->exec;
    const struct sm_who who = who_of(f->qp);
    bool ok;

    if (is_send(x->e.op)) {
        const struct sm_rqe *r = receive_of(f->qp);

        ok = sm_xlat_sges(&who, r->sge, r->num_sge, off, len, SM_LW, own);
    } else {
        ok = sm_xlat(&who, x->e.rkey, x->e.remote_addr + off, len, right_for(x->e.op), own);
    }
    if (ok && own->len) {
        STAT_INC(chunks);
        return true;
    }
    sm_xlat_put(own);
    return false;
}

static enum ibv_wc_status refused(const struct sm_exec *x)
{
    /* A receive whose buffer is not ours to write is our fault, not the requester's. */
    return is_send(x->e.op) ? IBV_WC_REM_OP_ERR : IBV_WC_REM_ACCESS_ERR;
}

static enum ibv_wc_status do_atomic(struct sm_exec *x, const struct sm_xlat *own)
{
    uint64_t addr = (uintptr_t)own->iov[0].iov_base;
    _Atomic uint64_t *word = own->iov[0].iov_base;

    if (own->niov != 1 || own->len != 8 || addr % 8)
        return IBV_WC_REM_INV_REQ_ERR;
    if (!sm_word_writable(addr))
        return IBV_WC_REM_OP_ERR;
    if (x->e.op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        x->result = atomic_fetch_add(word, x->e.compare_add);
    } else {
        x->result = x->e.compare_add;
        atomic_compare_exchange_strong(word, &x->result, x->e.swap);
    }
    x->atomic_done = true;
    return IBV_WC_SUCCESS;
}

/* The result of an atomic is sent as if it were the memory. */
static void send_result(struct sm_exec *x, struct sm_xlat *own)
{
    own->iov[0] = (struct iovec){&x->result, sizeof(x->result)};
}

/* ---- copying --------------------------------------------------------------------------------- */

/* The requester's buffers from `off` on, as process_vm_* wants them. */
static unsigned slice(const struct sm_ent *e, uint64_t off, uint64_t len, struct iovec *iov)
{
    unsigned n = 0;

    for (unsigned i = 0; i < e->nseg && len; i++) {
        uint64_t skip = MIN(off, e->seg[i].len), take = MIN(e->seg[i].len - skip, len);

        off -= skip;
        if (!take)
            continue;
        iov[n++] = (struct iovec){(void *)(uintptr_t)(e->seg[i].addr + skip), take};
        len -= take;
    }
    return n;
}

/* A copy stopped after `done` bytes: at our page or at theirs? */
static enum ibv_wc_status blame(const struct sm_exec *x, const struct sm_xlat *own, size_t done)
{
    for (unsigned i = 0; i < own->niov; i++) {
        if (done < own->iov[i].iov_len)
            return sm_pin_pages((uintptr_t)own->iov[i].iov_base + done, 1, !is_outbound(x->e.op))
                       ? IBV_WC_REM_OP_ERR
                       : IBV_WC_LOC_PROT_ERR;
        done -= own->iov[i].iov_len;
    }
    return IBV_WC_LOC_PROT_ERR;
}

/* The requester's memory is guarded by our caller. */
static enum step copy_direct(struct sm_flow *f, const struct sm_xlat *own, enum ibv_wc_status *s)
{
    struct sm_exec *x = f->exec;
    struct iovec theirs[SM_SEGS];
    unsigned n = slice(&x->e, x->off, own->len, theirs);
    ssize_t r = is_outbound(x->e.op) ? process_vm_writev(f->pid, own->iov, own->niov, theirs, n, 0)
                                     : process_vm_readv(f->pid, own->iov, own->niov, theirs, n, 0);

    if (r == (ssize_t)own->len)
        return STEP_MORE;
    /* The peer has gone, or has become somebody else whom we may not touch. */
    if (r < 0 && (errno == ESRCH || errno == EPERM))
        return STEP_GONE;
    *s = blame(x, own, r < 0 ? 0 : (size_t)r);
    return STEP_DONE;
}

/* The data came with the request. It goes to our own memory by way of the kernel: a bad page is an
 * error then, not a signal. */
static enum step copy_inline(struct sm_flow *f, const struct sm_xlat *own, enum ibv_wc_status *s)
{
    struct sm_exec *x = f->exec;
    struct iovec data = {x->e.data + x->off, own->len};
    off_t at = (off_t)(offsetof(struct sm_shm, ring) + x->seq % SM_RING * sizeof(struct sm_ent) +
                       offsetof(struct sm_ent, data) + x->off);
    ssize_t r = f->memfd < 0 ? process_vm_readv(getpid(), own->iov, own->niov, &data, 1, 0)
                             : preadv(f->memfd, own->iov, (int)own->niov, at);

    if (r == (ssize_t)own->len)
        return STEP_MORE;
    *s = IBV_WC_REM_OP_ERR;
    return STEP_DONE;
}

static enum step copy_held(struct sm_flow *f, struct sm_xlat *own, enum ibv_wc_status *s)
{
    struct sm_exec *x = f->exec;

    sm_gate_chunk();
    if (is_atomic(x->e.op)) {
        if (!x->atomic_done && (*s = do_atomic(x, own)))
            return STEP_DONE;
        send_result(x, own);
    }
    return x->e.flags & SM_ENT_INLINE ? copy_inline(f, own, s) : copy_direct(f, own, s);
}

/* No lock held. One chunk of a request whose data we can reach ourselves: our keys are held, theirs
 * are guarded, then the bytes move. */
static enum step chunk_direct(struct sm_flow *f, enum ibv_wc_status *s)
{
    struct sm_exec *x = f->exec;
    struct sm_xlat own = {.niov = 0};
    enum step st = STEP_DONE;

    if (!own_memory(f, x->off, MIN(x->e.len - x->off, SM_CHUNK), &own)) {
        *s = refused(x);
        return STEP_DONE;
    }
    if (sm_guard_take(f->shm, x->seq)) {
        st = copy_held(f, &own, s);
        sm_guard_drop(f->shm);
    } else {
        *s = IBV_WC_LOC_PROT_ERR;
    }
    if (st == STEP_MORE)
        x->off += own.len;
    sm_xlat_put(&own);
    return st;
}

/* ---- the slow path: through the bounce buffers ----------------------------------------------- */

static off_t bounce_at(unsigned slot)
{
    return (off_t)(SM_SHM_BOUNCE_OFF + (size_t)slot * SM_BOUNCE_SIZE);
}

/* One piece of ours to or from a bounce buffer; `done` bytes of the buffer are behind us. */
static bool bounce_piece(struct sm_flow *f, unsigned slot, uint64_t off, uint32_t len,
                         uint32_t *done, enum ibv_wc_status *s)
{
    struct sm_exec *x = f->exec;
    struct sm_xlat own = {.niov = 0};
    off_t at = bounce_at(slot) + *done;
    ssize_t r;

    if (!own_memory(f, off + *done, len - *done, &own)) {
        *s = refused(x);
        return false;
    }
    sm_gate_chunk();
    if (is_atomic(x->e.op)) {
        if (!x->atomic_done && (*s = do_atomic(x, &own))) {
            sm_xlat_put(&own);
            return false;
        }
        send_result(x, &own);
    }
    r = is_outbound(x->e.op) ? pwritev(f->memfd, own.iov, (int)own.niov, at)
                             : preadv(f->memfd, own.iov, (int)own.niov, at);
    if (r != (ssize_t)own.len)
        *s = IBV_WC_REM_OP_ERR;
    *done += (uint32_t)own.len;
    sm_xlat_put(&own);
    return !*s;
}

static bool bounce_all(struct sm_flow *f, unsigned slot, uint64_t off, uint32_t len,
                       enum ibv_wc_status *s)
{
    uint32_t done = 0;

    while (done < len) {
        if (!bounce_piece(f, slot, off, len, &done, s))
            return false;
    }
    return true;
}

static void slot_give(struct sm_bounce *b, const struct sm_exec *x, uint32_t len, uint32_t state)
{
    b->seq = x->seq;
    b->off = x->issued;
    b->len = len;
    atomic_store_explicit(&b->state, state, memory_order_release);
}

/* Lengths and offsets are ours by position; nothing that the peer may have written into a slot
 * counts, its state excepted. */
static uint32_t slot_len(const struct sm_exec *x, uint64_t off)
{
    return (uint32_t)MIN(x->e.len - off, SM_BOUNCE_SIZE);
}

static enum step slow_outbound(struct sm_flow *f, enum ibv_wc_status *s)
{
    struct sm_exec *x = f->exec;
    struct sm_bounce *b = &f->shm->bounce[x->next_slot];
    bool rung = false;

    for (unsigned i = 0; i < SM_BOUNCE; i++) {
        if (atomic_load_explicit(&f->shm->bounce[i].state, memory_order_acquire) == SM_B_FAIL) {
            *s = IBV_WC_LOC_PROT_ERR;
            return STEP_DONE;
        }
    }
    if (x->issued < x->e.len &&
        atomic_load_explicit(&b->state, memory_order_acquire) == SM_B_EMPTY) {
        uint32_t len = slot_len(x, x->issued);

        if (!bounce_all(f, x->next_slot, x->issued, len, s))
            return STEP_DONE;
        slot_give(b, x, len, SM_B_FULL);
        sm_flow_ring(f);
        x->issued += len;
        x->next_slot = (x->next_slot + 1) % SM_BOUNCE;
        rung = true;
    }
    if (x->issued == x->e.len) {
        for (unsigned i = 0; i < SM_BOUNCE; i++) {
            if (atomic_load_explicit(&f->shm->bounce[i].state, memory_order_acquire) != SM_B_EMPTY)
                return STEP_WAIT;
        }
        x->off = x->e.len;
        return STEP_MORE;
    }
    return rung ? STEP_MORE : STEP_WAIT;
}

static enum step slow_inbound(struct sm_flow *f, enum ibv_wc_status *s)
{
    struct sm_exec *x = f->exec;
    struct sm_bounce *b;
    uint32_t len;

    /* Ask for as much as there are buffers, then take what has come, in order. */
    while (x->issued < x->e.len) {
        b = &f->shm->bounce[x->issued / SM_BOUNCE_SIZE % SM_BOUNCE];
        if (x->issued - x->off >= (uint64_t)SM_BOUNCE * SM_BOUNCE_SIZE)
            break;
        len = slot_len(x, x->issued);
        slot_give(b, x, len, SM_B_WANT);
        x->issued += len;
        sm_flow_ring(f);
    }
    b = &f->shm->bounce[x->off / SM_BOUNCE_SIZE % SM_BOUNCE];
    switch (atomic_load_explicit(&b->state, memory_order_acquire)) {
    case SM_B_FULL:
        len = slot_len(x, x->off);
        if (!bounce_all(f, (unsigned)(b - f->shm->bounce), x->off, len, s))
            return STEP_DONE;
        atomic_store_explicit(&b->state, SM_B_EMPTY, memory_order_release);
        x->off += len;
        return STEP_MORE;
    case SM_B_FAIL:
        *s = IBV_WC_LOC_PROT_ERR;
        return STEP_DONE;
    default:
        return STEP_WAIT;
    }
}

/* ---- finishing ------------------------------------------------------------------------------- */

/* Lock held. What a message that has arrived does to the receive queue. */
static void deliver(struct sm_flow *f)
{
    struct sm_exec *x = f->exec;
    struct sm_qp *qp = f->qp;
    struct ibv_wc wc = {
        .opcode = IBV_WC_RECV, .byte_len = x->e.len, .src_qp = qp->attr.dest_qp_num};

    switch ((enum ibv_wr_opcode)x->e.op) {
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.imm_data = x->e.imm;
        break;
    case IBV_WR_SEND_WITH_IMM:
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.imm_data = x->e.imm;
        break;
    case IBV_WR_SEND_WITH_INV:
        wc.wc_flags = IBV_WC_WITH_INV;
        wc.invalidated_rkey = x->e.imm;
        break;
    case IBV_WR_SEND:
        break;
    default:
        return;
    }
    sm_rq_complete(qp, &wc, x->e.flags & SM_ENT_SOLICITED);
}

static void nak_event(struct sm_qp *qp, enum ibv_wc_status s)
{
    STAT_INC(naks);
    if (s == IBV_WC_REM_ACCESS_ERR)
        sm_async_post(qp->ctx, IBV_EVENT_QP_ACCESS_ERR, &qp->qp);
    else if (s == IBV_WC_REM_INV_REQ_ERR)
        sm_async_post(qp->ctx, IBV_EVENT_QP_REQ_ERR, &qp->qp);
}

static bool is_nak(enum ibv_wc_status s)
{
    return s == IBV_WC_REM_ACCESS_ERR || s == IBV_WC_REM_INV_REQ_ERR || s == IBV_WC_REM_OP_ERR;
}

/* Lock held. The answer is visible before the connection can be seen to end. */
static void finish(struct sm_flow *f, enum ibv_wc_status s)
{
    struct sm_exec *x = f->exec;
    struct sm_qp *qp = f->qp;

    if (!s)
        deliver(f);
    atomic_store_explicit(&f->shm->ring[x->seq % SM_RING].status, (uint32_t)s,
                          memory_order_relaxed);
    x->active = false;
    x->rnr_deadline = 0;
    x->seq++;
    qp->received++;
    x->stopped = s != IBV_WC_SUCCESS;
    /* Our side hears of it no later than the requester: event first, and whoever asks for our state
     * waits for the lock. */
    if (is_nak(s))
        nak_event(qp, s);
    atomic_store(&f->shm->done, x->seq);
    /* The requester asks first and looks second; we answer first and look second. */
    if (atomic_load(&f->shm->want_kick) && atomic_exchange(&f->shm->want_kick, 0))
        sm_flow_ring(f);
    if (is_nak(s))
        sm_qp_error(qp);
}

static enum ibv_wc_status remote_invalidate(struct sm_flow *f)
{
    return sm_mkey_invalidate(f->ctx, f->exec->e.imm, f->qp->pdn, f->qp->qp.qp_num, true)
               ? IBV_WC_REM_ACCESS_ERR
               : IBV_WC_SUCCESS;
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* No lock held, `copying` set. */
static enum step move_data(struct sm_flow *f, enum ibv_wc_status *s)
{
    struct sm_exec *x = f->exec;
    enum step st = STEP_MORE;

    if (x->off < x->e.len) {
        if (x->vm || (x->e.flags & SM_ENT_INLINE))
            st = chunk_direct(f, s);
        else
            st = is_outbound(x->e.op) ? slow_outbound(f, s) : slow_inbound(f, s);
    }
    return st == STEP_MORE && x->off == x->e.len ? STEP_DONE : st;
}

/* One step of one request. Lock held, dropped while data moves. */
static enum step step(struct sm_flow *f)
{
    struct sm_exec *x = f->exec;
    enum ibv_wc_status s = IBV_WC_SUCCESS;
    enum step st;

    if (f->detached || x->stopped)
        return STEP_WAIT;
    if (!x->active && !load(f))
        return x->stopped ? STEP_GONE : STEP_WAIT;
    st = x->off || x->issued ? STEP_MORE : begin(f->qp, x, &s);
    if (st == STEP_MORE) {
        sm_flow_copy_begin(f);
        pthread_mutex_unlock(&f->qp->lock);
        st = move_data(f, &s);
        sm_flow_copy_end(f);
        /* Not within the copy: whoever waits for that holds a lock that this may want. */
        if (st == STEP_DONE && !s && x->e.op == IBV_WR_SEND_WITH_INV)
            s = remote_invalidate(f);
        pthread_mutex_lock(&f->qp->lock);
        if (f->detached)
            return STEP_WAIT;
    }
    if (st == STEP_DONE) {
        finish(f, s);
        return STEP_MORE;
    }
    return st;
}

/* A turn ends after one chunk or a few small requests, so that no peer waits for another's bulk. */
bool sm_respond(struct sm_flow *f)
{
    struct sm_exec *x = f->exec;
    enum step st = STEP_MORE;

    pthread_mutex_lock(&f->qp->lock);
    for (unsigned i = 0; i < OPS_PER_TURN && st == STEP_MORE; i++) {
        st = step(f);
        if (x->active && x->off)
            break;
    }
    /* A peer that breaks the protocol, or whose memory is gone, is not served any more. */
    if (st == STEP_GONE && !f->detached)
        sm_flow_detach(f);
    pthread_mutex_unlock(&f->qp->lock);
    return st == STEP_MORE;
}
