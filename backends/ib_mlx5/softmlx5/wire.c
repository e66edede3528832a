/* SPDX-License-Identifier: BSD-3-Clause */
/* Connecting: how a sender finds the receiver that its GID or LID names.
 *
 * A sender calls: it connects to the abstract socket that the address stands for and says HELLO,
 * with the shared memory of the connection attached. The call is parked until a queue pair of that
 * number is ready to receive from just this sender; then it is answered. No side ever blocks, and
 * the two directions of a queue pair are two calls, so that there is nothing to arbitrate when both
 * call.
 *
 * Abstract names leave nothing behind. What the kernel says about the other side (SO_PEERCRED) has
 * to agree with the address that it claims.
 */
#include "internal.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

enum { WIRE_MAGIC = 0x354d4c58, WIRE_VERSION = 1, HELLO_FDS = 3, ANSWER_FDS = 2 };
enum { MAX_PARKED = 1024, RETRY_NS = 10000000, BACKLOG = 128, OVERFLOW_UID = 65534 };

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

struct hello {
    uint32_t magic, version;
    uint8_t gid[16];
    uint16_t lid;
    uint8_t rnr_retry, force_slow;
    uint32_t qpn, dest_qpn, psn, flow_id;
    uint64_t cookie_at; /* 32 bytes: read the first half, write the second */
    uint8_t cookie[16];
};

struct hello_answer {
    uint32_t magic, version;
    uint8_t gid[16];
    uint32_t flow_id;
    uint32_t vm; /* the responder can read and write our memory */
    uint8_t cookie[16];
};

/* ---- addresses ------------------------------------------------------------------------------- */

static socklen_t name_of(struct sockaddr_un *sa, const char *text)
{
    memset(sa, 0, sizeof(*sa));
    sa->sun_family = AF_UNIX;
    /* The leading NUL makes the name abstract. */
    snprintf(sa->sun_path + 1, sizeof(sa->sun_path) - 1, "softmlx5/%s", text);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(sa->sun_path + 1));
}

static socklen_t gid_name(struct sockaddr_un *sa, const uint8_t *gid)
{
    char text[40] = "g";

    for (int i = 0; i < 16; i++)
        snprintf(text + 1 + 2 * i, 3, "%02x", gid[i]);
    return name_of(sa, text);
}

static socklen_t lid_name(struct sockaddr_un *sa, uint16_t lid)
{
    char text[16];

    snprintf(text, sizeof(text), "l%u", lid);
    return name_of(sa, text);
}

static int listen_at(const struct sockaddr_un *sa, socklen_t len)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), err;

    if (fd < 0)
        return -1;
    if (!bind(fd, (const struct sockaddr *)sa, len) && !listen(fd, BACKLOG))
        return fd;
    err = errno;
    close(fd);
    errno = err;
    return -1;
}

/* A LID is whichever of the 48 Ki unicast ones nobody on this host has: its name is the lock. */
static int listen_at_some_lid(struct sm_ctx *ctx)
{
    enum { TRIES = 64, UNICAST = 0xbfff };
    struct sockaddr_un sa;
    int fd = -1;

    for (int i = 0; i < TRIES && fd < 0; i++) {
        uint16_t r;

        if (getrandom(&r, sizeof(r), 0) != sizeof(r))
            return -1;
        ctx->lid = (uint16_t)(r % UNICAST + 1);
        fd = listen_at(&sa, lid_name(&sa, ctx->lid));
        if (fd < 0 && errno != EADDRINUSE)
            break;
    }
    return fd;
}

int sm_wire_listen(struct sm_ctx *ctx)
{
    struct sm_engine *eng = &ctx->eng;
    struct sockaddr_un sa;
    socklen_t len = gid_name(&sa, ctx->gid.raw);
    int rc;

    eng->listen_gid = listen_at(&sa, len);
    eng->listen_lid = listen_at_some_lid(ctx);
    if (eng->listen_gid < 0 || eng->listen_lid < 0)
        return errno;
    sm_fd_track(ctx, eng->listen_gid);
    sm_fd_track(ctx, eng->listen_lid);
    rc = sm_engine_watch(ctx, eng->listen_gid, SM_TAG_LISTEN_GID, 0, EPOLLIN);
    return rc ? rc : sm_engine_watch(ctx, eng->listen_lid, SM_TAG_LISTEN_LID, 0, EPOLLIN);
}

/* ---- messages with descriptors --------------------------------------------------------------- */

static bool send_msg(int sock, const void *data, size_t size, const int *fds, int nfds)
{
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof(int) * HELLO_FDS)];
    } c = {.buf = {0}};
    struct iovec iov = {(void *)(uintptr_t)data, size};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = c.buf,
                       .msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)nfds)};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);

    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)nfds);
    memcpy(CMSG_DATA(h), fds, sizeof(int) * (size_t)nfds);
    return sendmsg(sock, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size;
}

/* Every descriptor that arrived is closed or handed out: a stranger's message must not leak any. */
static ssize_t recv_msg(int sock, void *data, size_t size, int *fds, int want)
{
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof(int) * 8)];
    } c;
    struct iovec iov = {data, size};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = c.buf, .msg_controllen = sizeof(c.buf)};
    ssize_t n = recvmsg(sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    int got = 0;

    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? -EAGAIN : -EPROTO;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
        int count = (int)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));

        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        for (int i = 0; i < count; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(h) + sizeof(int) * (size_t)i, sizeof(fd));
            if (got < want)
                fds[got++] = fd;
            else
                close(fd);
        }
    }
    if (n == (ssize_t)size && got == want && !(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
        return n;
    while (got)
        close(fds[--got]);
    return -EPROTO;
}

/* ---- who is there ---------------------------------------------------------------------------- */

static bool uid_agrees(const uint8_t *gid, uid_t uid)
{
    uint32_t claimed;

    memcpy(&claimed, gid + 4, sizeof(claimed));
    /* From another user namespace everybody looks like "nobody": there is nothing to compare. */
    return uid == be32toh(claimed) || uid == OVERFLOW_UID;
}

static bool peer_cred(int sock, struct ucred *cred)
{
    socklen_t len = sizeof(*cred);

    return !getsockopt(sock, SOL_SOCKET, SO_PEERCRED, cred, &len);
}

static int peer_pidfd(int sock, pid_t pid)
{
    socklen_t len = sizeof(int);
    int fd;

    if (pid <= 0 || pid == getpid())
        return -1;
    if (!getsockopt(sock, SOL_SOCKET, SO_PEERPIDFD, &fd, &len))
        return fd;
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

/* Yama's scope 1 lets only a declared process look into us, and only one: the first peer gets it,
 * the others take the slow path. */
static void declare_to_yama(pid_t pid)
{
    static _Atomic int declared;
    int expected = 0, fd;
    char scope = '0';

    if (pid <= 0 || pid == getpid() || atomic_load(&declared))
        return;
    fd = open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    if (read(fd, &scope, 1) == 1 && scope == '1' &&
        atomic_compare_exchange_strong(&declared, &expected, 1))
        prctl(PR_SET_PTRACER, (unsigned long)pid, 0, 0, 0);
    close(fd);
}

/* The only test that counts: can we really move bytes, both ways? */
static bool probe_memory(pid_t pid, const struct hello *h, uint8_t reply[16])
{
    uint8_t seen[16];
    struct iovec mine = {seen, 16}, theirs = {(void *)(uintptr_t)h->cookie_at, 16};

    if (h->force_slow || atomic_load(&sm_config.force_slow) || pid <= 0)
        return false;
    if (process_vm_readv(pid, &mine, 1, &theirs, 1, 0) != 16 || memcmp(seen, h->cookie, 16))
        return false;
    mine.iov_base = reply;
    theirs.iov_base = (char *)theirs.iov_base + 16;
    return process_vm_writev(pid, &mine, 1, &theirs, 1, 0) == 16;
}

/* ---- calling --------------------------------------------------------------------------------- */

static uint32_t send_psn(const struct sm_qp *qp)
{
    return (qp->attr.sq_psn + qp->sent) & 0xffffff;
}

static uint32_t expected_psn(const struct sm_qp *qp)
{
    return (qp->attr.rq_psn + qp->received) & 0xffffff;
}

static bool dial(struct sm_flow *f)
{
    const struct ibv_ah_attr *ah = &f->qp->attr.ah_attr;
    struct sockaddr_un sa;
    socklen_t len = ah->is_global ? gid_name(&sa, ah->grh.dgid.raw) : lid_name(&sa, ah->dlid);
    struct ucred cred;

    f->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (f->sock < 0)
        return false;
    sm_fd_track(f->ctx, f->sock);
    if (connect(f->sock, (struct sockaddr *)&sa, len) || !peer_cred(f->sock, &cred))
        return false;
    if (ah->is_global && !uid_agrees(ah->grh.dgid.raw, cred.uid))
        return false;
    f->pid = cred.pid;
    f->pidfd = peer_pidfd(f->sock, cred.pid);
    sm_fd_track(f->ctx, f->pidfd);
    declare_to_yama(cred.pid);
    return true;
}

static bool say_hello(struct sm_flow *f)
{
    struct sm_qp *qp = f->qp;
    struct sm_ctx *ctx = f->ctx;
    struct hello h = {
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .lid = ctx->lid,
        .rnr_retry = qp->attr.rnr_retry,
        .force_slow = atomic_load(&sm_config.force_slow),
        .qpn = qp->qp.qp_num,
        .dest_qpn = qp->attr.dest_qp_num,
        .psn = send_psn(qp),
        .flow_id = f->id,
        .cookie_at = (uintptr_t)f->cookie,
    };
    int fds[HELLO_FDS] = {f->memfd, ctx->eng.bellfd, ctx->eng.kickfd};

    memcpy(h.gid, ctx->gid.raw, 16);
    if (getrandom(f->cookie, sizeof(f->cookie), 0) != sizeof(f->cookie))
        return false;
    memcpy(h.cookie, f->cookie, 16);
    return send_msg(f->sock, &h, sizeof(h), fds, HELLO_FDS);
}

void sm_wire_connect(struct sm_qp *qp, uint64_t now)
{
    struct sm_flow *f = sm_flow_new(qp->ctx, qp, false);

    qp->next_try = qp->deadline ? now + RETRY_NS : UINT64_MAX;
    if (!f)
        return;
    f->shm = sm_shm_create(SM_SHM_SIZE, &f->memfd);
    sm_fd_track(qp->ctx, f->memfd);
    if (!f->shm || !dial(f) || !sm_engine_add(f)) {
        sm_flow_put(f);
        return;
    }
    atomic_store(&f->shm->cancel_from, UINT64_MAX);
    qp->out = f;
    sm_engine_watch_peer(f);
    if (!say_hello(f))
        sm_flow_detach(f);
}

/* Both ends move data directly: the file behind the shared memory has served. Descriptors are what
 * a process with many queue pairs runs out of first. */
static void drop_file(struct sm_flow *f)
{
    sm_fd_close(f->ctx, f->memfd);
    f->memfd = -1;
}

bool sm_wire_answer(struct sm_flow *f)
{
    struct hello_answer a;
    struct ucred cred;
    int fds[ANSWER_FDS];
    ssize_t n = recv_msg(f->sock, &a, sizeof(a), fds, ANSWER_FDS);

    if (n < 0)
        return n == -EAGAIN;
    f->bell = sm_shm_open(fds[0], SM_BELL_SIZE);
    close(fds[0]);
    f->bellfd = fds[1];
    sm_fd_track(f->ctx, f->bellfd);
    f->peer_id = a.flow_id;
    if (!f->bell || a.magic != WIRE_MAGIC || a.version != WIRE_VERSION ||
        a.flow_id >= SM_MAX_FLOWS || !peer_cred(f->sock, &cred) || !uid_agrees(a.gid, cred.uid))
        return false;
    if (a.vm && memcmp(f->cookie + 16, a.cookie, 16))
        return false; /* it says that it wrote to us, but it was to somebody else */
    if (a.vm)
        drop_file(f);
    f->state = SM_FLOW_READY;
    f->qp->deadline = 0;
    return true;
}

/* ---- being called ---------------------------------------------------------------------------- */

struct parked {
    struct list link;
    uint32_t id;
    int sock;
    bool said_hello;
    struct hello h;
    int fds[HELLO_FDS];
    struct ucred cred;
};

/* Closes what the call still owns. */
static void unpark(struct sm_ctx *ctx, struct parked *p)
{
    list_del(&p->link);
    ctx->eng.nparked--;
    for (int i = 0; p->said_hello && i < HELLO_FDS; i++) {
        if (p->fds[i] >= 0)
            close(p->fds[i]);
    }
    if (p->sock >= 0)
        epoll_ctl(ctx->eng.epfd, EPOLL_CTL_DEL, p->sock, NULL);
    sm_fd_close(ctx, p->sock);
    free(p);
}

void sm_wire_unpark_all(struct sm_ctx *ctx)
{
    while (!list_empty(&ctx->eng.parked))
        unpark(ctx, container_of(ctx->eng.parked.next, struct parked, link));
}

static bool is_for(const struct sm_qp *qp, const struct hello *h)
{
    const struct ibv_ah_attr *ah = &qp->attr.ah_attr;

    if (qp->state != IBV_QPS_RTR && qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_SQD)
        return false;
    if (qp->attr.dest_qp_num != h->qpn || expected_psn(qp) != h->psn)
        return false;
    return ah->is_global ? !memcmp(ah->grh.dgid.raw, h->gid, 16) : ah->dlid == h->lid;
}

/* An old connection whose end has not been processed yet must not keep a new one waiting. */
static void drop_dead_predecessor(struct sm_qp *qp)
{
    struct pollfd p = {.fd = qp->in ? qp->in->sock : -1, .events = POLLRDHUP};

    if (qp->in && poll(&p, 1, 0) > 0 && (p.revents & (POLLHUP | POLLRDHUP | POLLERR)))
        sm_flow_detach(qp->in);
}

static void count_path(const struct sm_flow *f, bool vm)
{
    if (!vm)
        STAT_INC(path_socket);
    else if (f->pid == getpid())
        STAT_INC(path_loop);
    else
        STAT_INC(path_vm);
}

/* qp.lock held. Takes what it needs from the parked call; false = the caller is not acceptable. */
static bool answer_call(struct sm_qp *qp, struct parked *p)
{
    struct sm_ctx *ctx = qp->ctx;
    struct hello_answer a = {.magic = WIRE_MAGIC, .version = WIRE_VERSION};
    int fds[ANSWER_FDS] = {ctx->eng.bellfd, ctx->eng.kickfd};
    struct sm_flow *f;

    if (getrandom(a.cookie, sizeof(a.cookie), 0) != sizeof(a.cookie))
        return false;
    f = sm_flow_new(ctx, qp, true);
    if (!f)
        return false;
    f->pid = p->cred.pid;
    f->memfd = p->fds[0];
    f->bellfd = p->fds[2];
    p->fds[0] = p->fds[2] = -1;
    sm_fd_track(ctx, f->memfd);
    sm_fd_track(ctx, f->bellfd);
    f->shm = sm_shm_open(f->memfd, SM_SHM_SIZE);
    f->bell = sm_shm_open(p->fds[1], SM_BELL_SIZE);
    f->peer_id = p->h.flow_id;
    a.vm = probe_memory(f->pid, &p->h, a.cookie);
    f->exec = sm_exec_new(a.vm, p->h.rnr_retry);
    f->pidfd = peer_pidfd(p->sock, f->pid);
    sm_fd_track(ctx, f->pidfd);
    epoll_ctl(ctx->eng.epfd, EPOLL_CTL_DEL, p->sock, NULL);
    f->sock = p->sock;
    p->sock = -1;
    if (!f->shm || !f->bell || !f->exec || !sm_engine_add(f)) {
        sm_flow_put(f);
        return false;
    }
    f->state = SM_FLOW_READY;
    qp->in = f;
    sm_engine_watch_peer(f);
    a.flow_id = f->id;
    memcpy(a.gid, ctx->gid.raw, 16);
    count_path(f, a.vm);
    if (a.vm)
        drop_file(f);
    if (!send_msg(f->sock, &a, sizeof(a), fds, ANSWER_FDS))
        sm_flow_detach(f);
    return true;
}

/* Finds the queue pair that the call is for. True: answered or refused, no longer parked. */
static bool try_answer(struct sm_ctx *ctx, struct parked *p)
{
    bool over = false;
    struct list *l;

    pthread_mutex_lock(&ctx->qp_list_lock);
    list_for_each (l, &ctx->qps) {
        struct sm_qp *qp = container_of(l, struct sm_qp, link);

        if (qp->qp.qp_num != p->h.dest_qpn)
            continue;
        pthread_mutex_lock(&qp->lock);
        drop_dead_predecessor(qp);
        if (is_for(qp, &p->h) && !qp->in) {
            answer_call(qp, p);
            over = true;
        }
        pthread_mutex_unlock(&qp->lock);
        break;
    }
    pthread_mutex_unlock(&ctx->qp_list_lock);
    if (over)
        unpark(ctx, p);
    return over;
}

void sm_wire_rescan(struct sm_ctx *ctx)
{
    struct list *l, *tmp;

    list_for_each_safe (l, tmp, &ctx->eng.parked) {
        struct parked *p = container_of(l, struct parked, link);

        if (p->said_hello)
            try_answer(ctx, p);
    }
}

void sm_wire_parked_event(struct sm_ctx *ctx, uint32_t id)
{
    struct parked *p = NULL;
    struct list *l;
    ssize_t n;

    list_for_each (l, &ctx->eng.parked) {
        if (container_of(l, struct parked, link)->id == id)
            p = container_of(l, struct parked, link);
    }
    if (!p)
        return;
    if (p->said_hello) { /* nothing more is due: it has hung up */
        unpark(ctx, p);
        return;
    }
    n = recv_msg(p->sock, &p->h, sizeof(p->h), p->fds, HELLO_FDS);
    if (n == -EAGAIN)
        return;
    p->said_hello = n > 0;
    if (n < 0 || p->h.magic != WIRE_MAGIC || p->h.version != WIRE_VERSION ||
        p->h.flow_id >= SM_MAX_FLOWS || !uid_agrees(p->h.gid, p->cred.uid)) {
        unpark(ctx, p);
        return;
    }
    try_answer(ctx, p);
}

void sm_wire_accept(struct sm_ctx *ctx, int listener)
{
    struct sm_engine *eng = &ctx->eng;
    struct parked *p;
    int sock;

    while ((sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        p = calloc(1, sizeof(*p));
        if (!p || !peer_cred(sock, &p->cred)) {
            free(p);
            close(sock);
            continue;
        }
        if (eng->nparked >= MAX_PARKED)
            unpark(ctx, container_of(eng->parked.next, struct parked, link));
        p->sock = sock;
        p->id = ++eng->next_parked;
        sm_fd_track(ctx, sock);
        list_add(&eng->parked, &p->link);
        eng->nparked++;
        if (sm_engine_watch(ctx, sock, SM_TAG_PARKED, p->id, EPOLLIN | EPOLLRDHUP))
            unpark(ctx, p);
    }
}
