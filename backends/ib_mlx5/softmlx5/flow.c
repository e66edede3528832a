/* SPDX-License-Identifier: BSD-3-Clause */
/* One direction of a connection: its shared memory, its guards, its end. And doorbells. */
#include "internal.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

/* ---- sealed memory --------------------------------------------------------------------------- */

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

void *sm_shm_create(size_t size, int *fd)
{
    void *p;

    *fd = memfd_create("softmlx5", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0)
        return NULL;
    if (ftruncate(*fd, (off_t)size) || fcntl(*fd, F_ADD_SEALS, SEALS) ||
        !(p = sm_shm_open(*fd, size))) {
        close(*fd);
        *fd = -1;
        return NULL;
    }
    return p;
}

/* Without the seals a peer could shrink the file under us: a bus error at our next look. */
void *sm_shm_open(int fd, size_t size)
{
    struct stat st;
    void *p;

    if ((fcntl(fd, F_GET_SEALS) & SEALS) != SEALS || fstat(fd, &st) || st.st_size != (off_t)size)
        return NULL;
    p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* ---- doorbells ------------------------------------------------------------------------------- */

static void bell_ring(struct sm_bell *b, int fd, uint32_t id)
{
    uint64_t one = 1;

    atomic_fetch_or(&b->bits[id / 64], 1ull << (id % 64));
    atomic_fetch_or(&b->summary, 1ull << (id / 64));
    if (atomic_exchange(&b->sleeping, 0) && write(fd, &one, sizeof(one)) < 0)
        return; /* counter full: it cannot be asleep */
}

void sm_flow_ring(struct sm_flow *f)
{
    if (f->bell)
        bell_ring(f->bell, f->bellfd, f->peer_id);
}

void sm_ctx_kick(struct sm_ctx *ctx, uint32_t id)
{
    bell_ring(ctx->eng.bell, ctx->eng.kickfd, id);
}

/* ---- flows ----------------------------------------------------------------------------------- */

struct sm_flow *sm_flow_new(struct sm_ctx *ctx, struct sm_qp *qp, bool in)
{
    struct sm_flow *f = calloc(1, sizeof(*f));

    if (!f)
        return NULL;
    list_init(&f->link);
    f->ctx = ctx;
    f->qp = qp;
    f->in = in;
    f->refs = 1;
    f->sock = f->pidfd = f->memfd = f->bellfd = -1;
    sm_qp_get(qp);
    STAT_INC(flows_live);
    return f;
}

void sm_flow_get(struct sm_flow *f)
{
    atomic_fetch_add(&f->refs, 1);
}

void sm_flow_put(struct sm_flow *f)
{
    if (atomic_fetch_sub(&f->refs, 1) != 1)
        return;
    if (f->shm)
        munmap(f->shm, SM_SHM_SIZE);
    if (f->bell)
        munmap(f->bell, SM_BELL_SIZE);
    sm_fd_close(f->ctx, f->sock);
    sm_fd_close(f->ctx, f->pidfd);
    sm_fd_close(f->ctx, f->memfd);
    sm_fd_close(f->ctx, f->bellfd);
    sm_exec_free(f->exec);
    sm_qp_put(f->qp);
    free(f);
    STAT_DEC(flows_live);
}

/* ---- guards ---------------------------------------------------------------------------------- */

/* Both sides store first and look second, so that one of them sees the other. */
bool sm_guard_take(struct sm_shm *shm, uint64_t seq)
{
    atomic_store(&shm->slot, seq + 1);
    if (atomic_load(&shm->cancel_from) > seq)
        return true;
    sm_guard_drop(shm);
    return false;
}

void sm_guard_drop(struct sm_shm *shm)
{
    atomic_store(&shm->slot, 0);
    if (atomic_load(&shm->waiters))
        sm_futex_wake(&shm->slot, false);
}

/* A hung-up socket or a readable pidfd means that the process, and so its copying, is over: the
 * kernel takes its memory down first. A peer that lets go of the flow stops copying before it hangs
 * up. */
static bool peer_is_gone(struct sm_flow *f)
{
    struct pollfd p[2] = {{.fd = f->sock}, {.fd = f->pidfd, .events = POLLIN}};

    if (!atomic_load(&f->gone) && poll(p, 2, 0) > 0 &&
        ((p[0].revents & (POLLHUP | POLLERR)) || p[1].revents))
        atomic_store(&f->gone, true);
    return atomic_load(&f->gone);
}

void sm_flow_cancel(struct sm_flow *f, uint64_t from)
{
    enum { LOOK_MS = 10 };
    struct sm_shm *shm = f->shm;
    uint64_t c = atomic_load(&shm->cancel_from), s;

    while (c > from && !atomic_compare_exchange_weak(&shm->cancel_from, &c, from))
        ;
    while ((s = atomic_load(&shm->slot)) && s - 1 >= from && !peer_is_gone(f)) {
        atomic_fetch_add(&shm->waiters, 1);
        /* The time-out is for peers that die; one that lives wakes us. */
        if (atomic_load(&shm->slot) == s)
            sm_futex_wait(&shm->slot, (uint32_t)s, LOOK_MS, false);
        atomic_fetch_sub(&shm->waiters, 1);
    }
}

enum { COPY_IDLE, COPY_BUSY, COPY_AWAITED };

void sm_flow_copy_begin(struct sm_flow *f)
{
    atomic_store(&f->copying, COPY_BUSY);
}

void sm_flow_copy_end(struct sm_flow *f)
{
    if (atomic_exchange(&f->copying, COPY_IDLE) == COPY_AWAITED)
        sm_futex_wake(&f->copying, true);
}

/* qp.lock held: no copy begins meanwhile. */
static void wait_copying(struct sm_flow *f)
{
    uint32_t seen = COPY_BUSY;

    while (atomic_compare_exchange_strong(&f->copying, &seen, COPY_AWAITED) ||
           seen == COPY_AWAITED) {
        sm_futex_wait(&f->copying, COPY_AWAITED, -1, true);
        seen = COPY_BUSY;
    }
}

void sm_flow_detach(struct sm_flow *f)
{
    struct sm_ctx *ctx = f->ctx; /* once the flow is on the list it is the engine's to free */
    struct sm_engine *eng = &ctx->eng;
    struct sm_qp *qp = f->qp;

    f->detached = true;
    wait_copying(f);
    if (f->in) {
        qp->in = NULL;
    } else {
        sm_flow_cancel(f, 0);
        if (f->state == SM_FLOW_READY)
            sm_sq_collect(qp, f);
        qp->out = NULL;
    }
    pthread_mutex_lock(&eng->dead_lock);
    list_add(&eng->dead, &f->link);
    pthread_mutex_unlock(&eng->dead_lock);
    sm_ctx_kick(ctx, SM_BELL_CONTROL);
}
