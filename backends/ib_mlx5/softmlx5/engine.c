/* SPDX-License-Identifier: BSD-3-Clause */
/* The engine: one thread for each context. It serves requests of peers, answers and makes calls,
 * notices deaths and runs the timers. It sleeps in epoll; a doorbell wakes it only when it sleeps.
 */
#include "internal.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>

enum { EVENTS = 64, TURNS_BETWEEN_POLLS = 16 };

/* ---- descriptors ----------------------------------------------------------------------------- */

int sm_engine_watch(struct sm_ctx *ctx, int fd, enum sm_tag tag, uint32_t id, uint32_t events)
{
    struct epoll_event ev = {.events = events, .data.u64 = (uint64_t)tag << 32 | id};

    return epoll_ctl(ctx->eng.epfd, EPOLL_CTL_ADD, fd, &ev) ? errno : 0;
}

static void unwatch(struct sm_ctx *ctx, int fd)
{
    if (fd >= 0)
        epoll_ctl(ctx->eng.epfd, EPOLL_CTL_DEL, fd, NULL);
}

bool sm_engine_add(struct sm_flow *f)
{
    struct sm_engine *eng = &f->ctx->eng;

    for (uint32_t id = SM_BELL_CONTROL + 1; id < SM_MAX_FLOWS; id++) {
        if (eng->flow[id])
            continue;
        if (sm_engine_watch(f->ctx, f->sock, SM_TAG_SOCK, id, EPOLLIN | EPOLLRDHUP))
            return false;
        f->id = id;
        eng->flow[id] = f;
        return true;
    }
    return false;
}

/* A forked child of the peer may keep the socket open; the process descriptor knows better. */
void sm_engine_watch_peer(struct sm_flow *f)
{
    if (f->pidfd >= 0)
        sm_engine_watch(f->ctx, f->pidfd, SM_TAG_PID, f->id, EPOLLIN);
}

int sm_engine_resources(struct sm_ctx *ctx)
{
    struct sm_engine *eng = &ctx->eng;
    int rc;

    list_init(&eng->parked);
    list_init(&eng->dead);
    pthread_mutex_init(&eng->dead_lock, NULL);
    eng->listen_gid = eng->listen_lid = eng->bellfd = -1;
    eng->epfd = epoll_create1(EPOLL_CLOEXEC);
    eng->kickfd = sm_eventfd(false);
    eng->bell = sm_shm_create(SM_BELL_SIZE, &eng->bellfd);
    sm_fd_track(ctx, eng->epfd);
    sm_fd_track(ctx, eng->kickfd);
    sm_fd_track(ctx, eng->bellfd);
    if (eng->epfd < 0 || eng->kickfd < 0 || !eng->bell)
        return EMFILE;
    /* Edge-triggered: each ring is one event and nobody has to read the counter. */
    rc = sm_engine_watch(ctx, eng->kickfd, SM_TAG_KICK, 0, EPOLLIN | EPOLLET);
    return rc ? rc : sm_wire_listen(ctx);
}

void sm_engine_release(struct sm_ctx *ctx)
{
    struct sm_engine *eng = &ctx->eng;

    if (!eng->dead.next) /* never set up */
        return;
    sm_wire_unpark_all(ctx);
    sm_fd_close(ctx, eng->listen_gid);
    sm_fd_close(ctx, eng->listen_lid);
    sm_fd_close(ctx, eng->epfd);
    sm_fd_close(ctx, eng->kickfd);
    sm_fd_close(ctx, eng->bellfd);
    if (eng->bell)
        munmap(eng->bell, SM_BELL_SIZE);
    pthread_mutex_destroy(&eng->dead_lock);
}

/* ---- the end of flows ------------------------------------------------------------------------ */

/* Nothing copies for a flow once it is on this list, so that hanging up tells the peer the truth.
 * The descriptors stay open until the last reference is gone: somebody may be polling them. */
static void bury(struct sm_ctx *ctx)
{
    struct sm_engine *eng = &ctx->eng;
    struct sm_flow *f;

    for (;;) {
        pthread_mutex_lock(&eng->dead_lock);
        f = list_empty(&eng->dead) ? NULL : container_of(eng->dead.next, struct sm_flow, link);
        if (f)
            list_del(&f->link);
        pthread_mutex_unlock(&eng->dead_lock);
        if (!f)
            return;
        unwatch(ctx, f->sock);
        unwatch(ctx, f->pidfd);
        if (f->sock >= 0)
            shutdown(f->sock, SHUT_RDWR);
        if (f->id) {
            eng->flow[f->id] = NULL;
            eng->runnable[f->id / 64] &= ~(1ull << (f->id % 64));
        }
        sm_flow_put(f);
    }
}

static void out_flow_hangup(struct sm_flow *f)
{
    struct sm_qp *qp = f->qp;
    bool was_ready = f->state == SM_FLOW_READY;

    /* Not served is not the same as served by somebody who died: only the latter has lost requests.
     */
    sm_flow_detach(f);
    if (qp->failed)
        sm_qp_error(qp);
    else if (was_ready && qp->sq_head != qp->sq_pumped)
        sm_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
    else
        qp->next_try = qp->sq_head != qp->sq_tail ? sm_now_ns() + 10000000 : UINT64_MAX;
    sm_sq_progress(qp);
}

static void flow_hangup(struct sm_flow *f)
{
    struct sm_qp *qp = f->qp;

    atomic_store(&f->gone, true);
    pthread_mutex_lock(&qp->lock);
    if (!f->detached) {
        if (f->in)
            sm_flow_detach(f);
        else
            out_flow_hangup(f);
    }
    pthread_mutex_unlock(&qp->lock);
}

static void flow_event(struct sm_flow *f, uint32_t events)
{
    bool ok = true;

    if ((events & EPOLLIN) && !f->in) {
        pthread_mutex_lock(&f->qp->lock);
        if (!f->detached && f->state == SM_FLOW_CONNECTING) {
            ok = sm_wire_answer(f);
            if (ok && f->state == SM_FLOW_READY)
                sm_sq_progress(f->qp);
        }
        pthread_mutex_unlock(&f->qp->lock);
    }
    if (!ok || (events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)))
        flow_hangup(f);
}

/* ---- events ---------------------------------------------------------------------------------- */

static void dispatch(struct sm_ctx *ctx, const struct epoll_event *ev)
{
    struct sm_engine *eng = &ctx->eng;
    uint32_t id = (uint32_t)ev->data.u64;
    struct sm_flow *f = id < SM_MAX_FLOWS ? eng->flow[id] : NULL;

    switch ((enum sm_tag)(ev->data.u64 >> 32)) {
    case SM_TAG_KICK:
        break;
    case SM_TAG_LISTEN_GID:
        sm_wire_accept(ctx, eng->listen_gid);
        break;
    case SM_TAG_LISTEN_LID:
        sm_wire_accept(ctx, eng->listen_lid);
        break;
    case SM_TAG_PARKED:
        sm_wire_parked_event(ctx, id);
        break;
    case SM_TAG_SOCK:
        if (f)
            flow_event(f, ev->events);
        break;
    case SM_TAG_PID:
        if (f)
            flow_hangup(f);
        break;
    }
}

static void poll_events(struct sm_ctx *ctx, int timeout_ms)
{
    struct epoll_event ev[EVENTS];
    int n = epoll_wait(ctx->eng.epfd, ev, EVENTS, timeout_ms);

    for (int i = 0; i < n; i++)
        dispatch(ctx, &ev[i]);
}

/* Doorbells rung since the last look; true when the control bell was among them. */
static bool collect_bells(struct sm_engine *eng)
{
    uint64_t words = atomic_exchange(&eng->bell->summary, 0);
    bool control = false;

    while (words) {
        unsigned w = (unsigned)__builtin_ctzll(words);
        uint64_t bits = atomic_exchange(&eng->bell->bits[w], 0);

        words &= words - 1;
        if (w == SM_BELL_CONTROL / 64 && (bits & 1ull << SM_BELL_CONTROL)) {
            control = true;
            bits &= ~(1ull << SM_BELL_CONTROL);
        }
        eng->runnable[w] |= bits;
    }
    return control;
}

/* One turn for each flow that has something to do; true when one has more. */
static bool run_flows(struct sm_engine *eng)
{
    bool more = false;

    for (unsigned w = 0; w < ARRAY_SIZE(eng->runnable); w++) {
        uint64_t bits = eng->runnable[w];

        for (; bits; bits &= bits - 1) {
            unsigned bit = (unsigned)__builtin_ctzll(bits);
            struct sm_flow *f = eng->flow[w * 64 + bit];

            if (f && (f->in ? sm_respond(f) : sm_initiate(f)))
                more = true;
            else
                eng->runnable[w] &= ~(1ull << bit);
        }
    }
    return more;
}

/* ---- timers ---------------------------------------------------------------------------------- */

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return !a || (b && b < a) ? b : a;
}

/* Lock held. Calls the peer, gives up, or tells when to look again (ns, 0 = never). */
static uint64_t qp_timers(struct sm_qp *qp, uint64_t now)
{
    uint64_t next = 0;

    if (qp->state == IBV_QPS_RTS && !qp->out) {
        if (qp->deadline && qp->next_try == UINT64_MAX)
            qp->next_try = 0;
        if (now >= qp->next_try)
            sm_wire_connect(qp, now);
        if (!qp->out && qp->next_try != UINT64_MAX)
            next = qp->next_try;
    }
    if (qp->deadline && qp->out && qp->out->state == SM_FLOW_READY)
        qp->deadline = 0;
    if (qp->deadline && now >= qp->deadline)
        sm_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
    else if (qp->deadline != UINT64_MAX)
        next = sooner(next, qp->deadline);
    if (qp->in)
        next = sooner(next, sm_exec_deadline(qp->in));
    return next;
}

static uint64_t run_timers(struct sm_ctx *ctx)
{
    uint64_t now = sm_now_ns(), next = 0;
    struct list *l;

    pthread_mutex_lock(&ctx->qp_list_lock);
    list_for_each (l, &ctx->qps) {
        struct sm_qp *qp = container_of(l, struct sm_qp, link);
        uint64_t t;

        pthread_mutex_lock(&qp->lock);
        t = qp_timers(qp, now);
        next = sooner(next, t);
        /* A receiver-not-ready wait that is over is the responder's to end. */
        if (qp->in && sm_exec_deadline(qp->in) && now >= sm_exec_deadline(qp->in))
            ctx->eng.runnable[qp->in->id / 64] |= 1ull << (qp->in->id % 64);
        pthread_mutex_unlock(&qp->lock);
    }
    pthread_mutex_unlock(&ctx->qp_list_lock);
    return next;
}

static int ms_until(uint64_t next)
{
    uint64_t now;

    if (!next)
        return -1;
    now = sm_now_ns();
    return next <= now ? 0 : (int)MIN((next - now + 999999) / 1000000, 60000);
}

/* ---- the loop -------------------------------------------------------------------------------- */

static void spin(struct sm_engine *eng)
{
    uint64_t end = sm_now_ns() + sm_config.spin_us * 1000ull;

    while (!atomic_load_explicit(&eng->bell->summary, memory_order_relaxed) && sm_now_ns() < end)
        sched_yield();
}

static void go_to_sleep(struct sm_ctx *ctx, uint64_t next)
{
    struct sm_engine *eng = &ctx->eng;

    if (sm_config.spin_us)
        spin(eng);
    atomic_store(&eng->bell->sleeping, 1);
    /* Looking again after saying so: a bell in between is not lost. The bell of a stop may have been
     * collected in this very turn. */
    poll_events(ctx,
                atomic_load(&eng->bell->summary) || atomic_load(&eng->stop) ? 0 : ms_until(next));
    atomic_store(&eng->bell->sleeping, 0);
}

static void *engine_main(void *arg)
{
    struct sm_ctx *ctx = arg;
    struct sm_engine *eng = &ctx->eng;
    uint64_t next_timer = 0;
    unsigned turn = 0;

    while (!atomic_load(&eng->stop)) {
        bool control = collect_bells(eng), more;

        bury(ctx);
        if (control && atomic_exchange(&eng->rescan, false))
            sm_wire_rescan(ctx);
        more = run_flows(eng);
        if (control || (next_timer && sm_now_ns() >= next_timer))
            next_timer = run_timers(ctx);
        if (!more)
            go_to_sleep(ctx, next_timer);
        else if (++turn % TURNS_BETWEEN_POLLS == 0)
            poll_events(ctx, 0);
    }
    bury(ctx);
    return NULL;
}

int sm_engine_start(struct sm_ctx *ctx)
{
    sigset_t all, old;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* the program's signals are not ours to take */
    rc = pthread_create(&ctx->eng.thread, NULL, engine_main, ctx);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    ctx->eng.started = !rc;
    if (!rc)
        pthread_setname_np(ctx->eng.thread, "softmlx5");
    return rc;
}

void sm_engine_stop(struct sm_ctx *ctx)
{
    if (!ctx->eng.started)
        return;
    atomic_store(&ctx->eng.stop, true);
    sm_ctx_kick(ctx, SM_BELL_CONTROL);
    pthread_join(ctx->eng.thread, NULL);
    ctx->eng.started = false;
}
