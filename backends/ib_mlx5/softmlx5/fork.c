/* SPDX-License-Identifier: BSD-3-Clause */
/* Fork: a child inherits memory and descriptors, but neither threads nor the right to use either.
 *
 * Liveness is a word in a page that the kernel wipes at every fork, whichever way it was made
 * (raw clone included, where no handler runs). The handler only closes descriptors, so that a peer
 * of the parent does not have to wait for the child's end to see the parent's.
 */
#include "internal.h"

#include <sys/mman.h>

static pthread_mutex_t track_lock = PTHREAD_MUTEX_INITIALIZER;
static struct list tracked = {&tracked, &tracked};
static _Atomic uint64_t *alive_page;
static uint64_t next_generation = 1;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int init_error;

static void before_fork(void)
{
    struct list *l;

    pthread_mutex_lock(&track_lock);
    list_for_each (l, &tracked)
        pthread_mutex_lock(&container_of(l, struct sm_ctx, link)->fd_lock);
}

static void unlock_all(void)
{
    struct list *l;

    list_for_each (l, &tracked)
        pthread_mutex_unlock(&container_of(l, struct sm_ctx, link)->fd_lock);
    pthread_mutex_unlock(&track_lock);
}

static void after_fork_child(void)
{
    struct list *l, *tmp;

    list_for_each (l, &tracked) {
        struct sm_ctx *ctx = container_of(l, struct sm_ctx, link);

        for (unsigned i = 0; i < ctx->nfds; i++)
            close(ctx->fds[i]);
        ctx->nfds = 0;
    }
    unlock_all();
    list_for_each_safe (l, tmp, &tracked)
        list_del(l);
    memset(&sm_stats, 0, sizeof(sm_stats));
    atomic_store(alive_page, ++next_generation);
}

static void init(void)
{
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED || madvise(page, 4096, MADV_WIPEONFORK) ||
        pthread_atfork(before_fork, unlock_all, after_fork_child)) {
        init_error = ENOMEM;
        return;
    }
    alive_page = page;
    atomic_store(alive_page, next_generation);
}

int sm_fork_init_once(void)
{
    pthread_once(&once, init);
    if (init_error)
        return init_error;
    /* A child made without handlers: its page reads 0 until somebody opens a device there. */
    if (!atomic_load(alive_page))
        atomic_store(alive_page, ++next_generation);
    return 0;
}

bool sm_ctx_alive(const struct sm_ctx *ctx)
{
    return atomic_load_explicit(ctx->alive, memory_order_relaxed) == ctx->generation;
}

void sm_fork_track(struct sm_ctx *ctx)
{
    pthread_mutex_lock(&track_lock);
    ctx->alive = alive_page;
    ctx->generation = atomic_load(alive_page);
    list_add(&tracked, &ctx->link);
    pthread_mutex_unlock(&track_lock);
}

void sm_fork_untrack(struct sm_ctx *ctx)
{
    pthread_mutex_lock(&track_lock);
    list_del(&ctx->link);
    pthread_mutex_unlock(&track_lock);
}

void sm_fd_track(struct sm_ctx *ctx, int fd)
{
    pthread_mutex_lock(&ctx->fd_lock);
    if (fd >= 0 && ctx->nfds == ctx->cap_fds) {
        unsigned cap = ctx->cap_fds ? 2 * ctx->cap_fds : 32;
        int *p = realloc(ctx->fds, cap * sizeof(*p));

        /* Without memory the child keeps one descriptor too many: late news, not a wrong result. */
        if (!p)
            goto out;
        ctx->fds = p;
        ctx->cap_fds = cap;
    }
    if (fd >= 0)
        ctx->fds[ctx->nfds++] = fd;
out:
    pthread_mutex_unlock(&ctx->fd_lock);
}

void sm_fd_close(struct sm_ctx *ctx, int fd)
{
    if (fd < 0)
        return;
    pthread_mutex_lock(&ctx->fd_lock);
    for (unsigned i = 0; i < ctx->nfds; i++) {
        if (ctx->fds[i] == fd) {
            ctx->fds[i] = ctx->fds[--ctx->nfds];
            break;
        }
    }
    close(fd);
    pthread_mutex_unlock(&ctx->fd_lock);
}
