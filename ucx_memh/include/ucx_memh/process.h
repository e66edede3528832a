/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * For backends of one host: which process is behind an identity (memh.h), by
 * pidfd and start time, and may it be reached.
 *
 * Nothing here allocates, locks, prints or needs Python.  Failures come back
 * as errno values.
 */
#ifndef UCX_MEMH_PROCESS_H
#define UCX_MEMH_PROCESS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif
#ifndef PR_SET_PTRACER_ANY
#define PR_SET_PTRACER_ANY ((unsigned long)-1)
#endif

/* A file descriptor (close-on-exec), or -errno. */
static inline int ucxm_pidfd_open(pid_t pid)
{
    long fd = syscall(SYS_pidfd_open, (long)pid, 0l);

    return fd < 0 ? -errno : (int)fd;
}

/* Has the process ended (a zombie has)?  1, 0, or -errno. */
static inline int ucxm_pidfd_ended(int pidfd)
{
    struct pollfd p = {pidfd, POLLIN, 0};
    int n;

    do {
        n = poll(&p, 1, 0);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n != 0;
}

/*
 * Would process_vm_readv be allowed?  The kernel asks pidfd_getfd the same
 * question (PTRACE_MODE_ATTACH_REALCREDS), before it looks at the descriptor
 * number, and -1 is never one: so nothing of the peer is touched.  0: yes,
 * else an errno; EPERM can also come from a seccomp filter that knows only
 * this call.
 */
static inline int ucxm_pidfd_allowed(int pidfd)
{
    long fd = syscall(SYS_pidfd_getfd, (long)pidfd, -1l, 0l);

    if (fd >= 0) {
        close((int)fd);
        return 0;
    }
    return errno == EBADF ? 0 : errno;
}

typedef struct ucxm_process {
    uint64_t start_time; /* clock ticks after boot                     */
    uint64_t program;    /* changes with exec; 0: not to be seen by us */
    char state;
} ucxm_process_t;

static inline int ucxm_process_open(pid_t pid)
{
    char path[48];
    int fd;

    snprintf(path, sizeof(path), "/proc/%ld/stat", (long)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

/* Reads /proc/PID/stat through an open descriptor, which stays bound to the process
 * (ESRCH after it, whoever has the pid then).  0 or an errno. */
static inline int ucxm_process_read(int fd, ucxm_process_t *st)
{
    char text[1024], *p, *end;
    uint64_t hash = 0xcbf29ce484222325u;
    int visible = 0;
    unsigned field;
    ssize_t n;

    do {
        n = pread(fd, text, sizeof(text) - 1, 0);
    } while (n < 0 && errno == EINTR);
    if (n <= 0)
        return n < 0 ? errno : ESRCH;
    text[n] = '\0';
    p = strrchr(text, ')'); /* the name may hold anything, parentheses too */
    if (p == NULL || p[1] != ' ' || p[2] == '\0' || p[3] != ' ')
        return EBADMSG;
    st->state = p[2];
    st->start_time = 0;
    st->program = 0;
    p += 4;
    for (field = 4; field <= 46 && *p != '\0'; field++, p = end + (*end != '\0')) {
        for (end = p; *end != ' ' && *end != '\n' && *end != '\0'; end++)
            ;
        if (field == 22)
            st->start_time = strtoull(p, NULL, 10);
        if (field == 28)
            visible = *p != '0'; /* zeros: no permission to see it */
        /* Where code, stack and data of the program begin and end. */
        if (field == 26 || field == 27 || field == 28 || field == 45 || field == 46)
            for (; p <= end; p++)
                hash = (hash ^ (unsigned char)*p) * 0x100000001b3u;
    }
    if (field <= 22)
        return EBADMSG;
    if (field > 46 && visible)
        st->program = hash;
    return 0;
}

/* Reads another process's memory, or our own; all of it or nothing is told.  0 or an errno. */
static inline int ucxm_process_peek(pid_t pid, uint64_t address, void *into, size_t size)
{
    struct iovec local = {into, size}, remote = {(void *)(uintptr_t)address, size};
    ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);

    return n == (ssize_t)size ? 0 : n < 0 ? errno : EFAULT;
}

/* Can our own memory be read at both its ends?  One system call, which looks at nothing between.
 * `length` is not 0.  0; EFAULT: it cannot; or why this could not be asked. */
static inline int ucxm_process_readable(uint64_t address, uint64_t length)
{
    char ends[2];
    struct iovec local = {ends, 2}, remote[2] = {
                                        {(void *)(uintptr_t)address, 1},
                                        {(void *)(uintptr_t)(address + length - 1), 1},
                                    };
    ssize_t n = process_vm_readv(getpid(), &local, 1, remote, 2, 0);

    return n == 2 ? 0 : n < 0 ? errno : EFAULT;
}

/* Yama, scope 1: lets any process with our credentials reach us.  0 or an errno. */
static inline int ucxm_allow_ptrace(void)
{
    return prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0ul, 0ul, 0ul) == 0 ? 0 : errno;
}

#endif
