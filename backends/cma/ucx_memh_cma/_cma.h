/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * System calls of the cma backend: other processes' memory.
 *
 * Nothing here allocates, locks, prints or needs Python.  Failures come back
 * as errno values.
 */
#ifndef UCX_MEMH_CMA_H
#define UCX_MEMH_CMA_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <linux/capability.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <ucx_memh/process.h>

/* The kernel moves no more than this in one call (MAX_RW_COUNT, 4 KiB pages). */
#define CMA_MAX_BYTES 0x7ffff000ul
/* Elements per call; below the kernel's IOV_MAX of 1024, and small enough for a stack. */
#define CMA_WINDOW    128

/* ---- atomics -------------------------------------------------------------- */

static inline void cma_count(uint64_t *counter, uint64_t n)
{
    __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}

static inline uint64_t cma_load64(const uint64_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static inline void cma_store64(uint64_t *p, uint64_t value)
{
    __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

static inline uint32_t cma_load32(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static inline void cma_store32(uint32_t *p, uint32_t value)
{
    __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

/* Not the coarse clock: its steps (4 ms at 250 Hz) are longer than the check interval. */
static inline uint64_t cma_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* ---- the mover ------------------------------------------------------------ */

typedef struct cma_vec {
    uint64_t address;
    uint64_t length;
} cma_vec_t;

typedef struct cma_move cma_move_t;
struct cma_move {
    pid_t pid;
    int write; /* 1: local to remote */
    const cma_vec_t *local, *remote;
    size_t local_count, remote_count;
    uint64_t max_bytes; /* per call; 0: the kernel's limit */
    /* Asked before each call; non-zero ends the move.  May be NULL. */
    int (*before)(void *arg);
    void *arg;
    uint64_t done; /* out: bytes moved, exact        */
    uint64_t calls; /* out: system calls made        */
    int stopped;    /* out: what `before` said       */
};

typedef struct cma_cursor {
    const cma_vec_t *vec;
    size_t left;     /* elements, the current one included */
    uint64_t offset; /* inside the current one             */
} cma_cursor_t;

static inline void cma_skip(cma_cursor_t *c, uint64_t n)
{
    c->offset += n;
    while (c->left && c->offset >= c->vec->length) {
        c->offset -= c->vec->length;
        c->vec++;
        c->left--;
    }
}

/* Fills `iov` with at most `max` bytes from the cursor on; returns how many. */
static inline uint64_t cma_window(const cma_cursor_t *c, uint64_t max, struct iovec *iov,
                                  size_t *count)
{
    const cma_vec_t *vec = c->vec;
    uint64_t offset = c->offset, total = 0, n;
    size_t left = c->left, used = 0;

    for (; left && used < CMA_WINDOW && total < max; left--, vec++, offset = 0) {
        n = vec->length - offset;
        if (n == 0)
            continue;
        if (n > max - total)
            n = max - total;
        iov[used].iov_base = (void *)(uintptr_t)(vec->address + offset);
        iov[used].iov_len = n;
        used++;
        total += n;
    }
    *count = used;
    return total;
}

/*
 * Moves min(local total, remote total) bytes and returns 0 or an errno.
 *
 * The kernel may stop anywhere at a page, also inside an element, and says so
 * only by a smaller count; the reason comes with the next call.  So this goes
 * on from where the kernel stopped until everything is moved or a call moves
 * nothing.  No bytes: no system call.
 */
static inline int cma_move_all(cma_move_t *m)
{
    struct iovec local[CMA_WINDOW], remote[CMA_WINDOW];
    cma_cursor_t l = {m->local, m->local_count, 0}, r = {m->remote, m->remote_count, 0};
    uint64_t max = m->max_bytes && m->max_bytes < CMA_MAX_BYTES ? m->max_bytes : CMA_MAX_BYTES;
    uint64_t lmax, rmax;
    size_t nl, nr;
    ssize_t n;

    cma_skip(&l, m->done);
    cma_skip(&r, m->done);
    while (l.left && r.left) {
        lmax = cma_window(&l, max, local, &nl);
        rmax = cma_window(&r, max, remote, &nr);
        if (m->before && (m->stopped = m->before(m->arg)) != 0)
            return ECANCELED;
        m->calls++;
        if (m->write)
            n = process_vm_writev(m->pid, local, nl, remote, nr, 0);
        else
            n = process_vm_readv(m->pid, local, nl, remote, nr, 0);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return errno;
        }
        if (n == 0 || (uint64_t)n > lmax || (uint64_t)n > rmax)
            return EIO; /* the kernel never does this; a filter may */
        m->done += (uint64_t)n;
        cma_skip(&l, (uint64_t)n);
        cma_skip(&r, (uint64_t)n);
    }
    return 0;
}

static inline int cma_move(cma_move_t *m)
{
    const cma_vec_t *l = m->local, *r = m->remote;
    struct iovec local, remote;
    ssize_t n;

    m->done = 0;
    m->calls = 0;
    m->stopped = 0;
    /* Most moves are one element each and one call, and need no windows. */
    if (m->local_count == 1 && m->remote_count == 1 && l->length == r->length && l->length &&
        l->length <= CMA_MAX_BYTES && !m->max_bytes) {
        if (m->before && (m->stopped = m->before(m->arg)) != 0)
            return ECANCELED;
        local.iov_base = (void *)(uintptr_t)l->address;
        remote.iov_base = (void *)(uintptr_t)r->address;
        local.iov_len = remote.iov_len = l->length;
        m->calls = 1;
        if (m->write)
            n = process_vm_writev(m->pid, &local, 1, &remote, 1, 0);
        else
            n = process_vm_readv(m->pid, &local, 1, &remote, 1, 0);
        if (n == (ssize_t)l->length) {
            m->done = l->length;
            return 0;
        }
        if (n < 0 && errno != EINTR)
            return errno;
        if (n == 0 || (n > 0 && (uint64_t)n > l->length))
            return EIO;
        m->done = n > 0 ? (uint64_t)n : 0;
    }
    return cma_move_all(m);
}

/* Can one byte be read there?  0 or an errno. */
static inline int cma_peek(pid_t pid, uint64_t address)
{
    char byte;

    return ucxm_process_peek(pid, address, &byte, 1);
}

/* ---- what the system allows ------------------------------------------------ */

/* process_vm_readv and process_vm_writev on a small buffer of our own. */
static inline int cma_self_test(void)
{
    char from[16] = "ucx_memh_cma", to[16] = "";
    struct iovec local = {to, sizeof(to)}, remote = {from, sizeof(from)};

    errno = 0;
    if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != (ssize_t)sizeof(to) ||
        memcmp(from, to, sizeof(to)) != 0)
        return errno ? errno : EIO;
    memset(from, 0, sizeof(from));
    if (process_vm_writev(getpid(), &local, 1, &remote, 1, 0) != (ssize_t)sizeof(to) ||
        memcmp(from, to, sizeof(to)) != 0)
        return errno ? errno : EIO;
    return 0;
}

static inline int cma_has_cap_sys_ptrace(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];

    memset(data, 0, sizeof(data));
    if (syscall(SYS_capget, &header, data) != 0)
        return 0;
    return (int)((data[CAP_SYS_PTRACE / 32].effective >> (CAP_SYS_PTRACE % 32)) & 1u);
}

#endif
