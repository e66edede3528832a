# SPDX-License-Identifier: BSD-3-Clause
# cython: freethreading_compatible=True
# distutils: include_dirs = backends/ib
"""libibverbs, opened at run time: loader table, device, registration and RC endpoint.

A library for backends, which cimport it.  From Python it only tells what can be loaded and why
not (`library_status`, `symbol_reason`, `devices`).

Locks, outermost first: an endpoint's lock (posting, changes of its queue pair), the Md's lock
(work requests, lists, states).  The poll lock is held around ibv_poll_cq and may be followed by
the Md's lock.  None is held while an operation's `complete` runs.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from libc.errno cimport (
    EACCES, EAGAIN, EBADF, EBUSY, EFAULT, EINVAL, ENODEV, ENOMEM, ENOSYS, EOPNOTSUPP, EPERM,
    ETIMEDOUT, errno,
)
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strcmp

from ucx_memh.libmemh cimport (
    UCXM_EP_CONNECTED, UCXM_EP_ERROR, UCXM_EP_IDLE, UCXM_ERR_ACCESS, UCXM_ERR_BUSY,
    UCXM_ERR_FLUSHED, UCXM_ERR_INVALID_ADDR, UCXM_ERR_INVALID_PARAM, UCXM_ERR_IO_ERROR,
    UCXM_ERR_MALFORMED_KEY, UCXM_ERR_NO_DEVICE, UCXM_ERR_NO_MEMORY, UCXM_ERR_NO_RESOURCE,
    UCXM_ERR_PEER_GONE, UCXM_ERR_REMOTE_ACCESS, UCXM_ERR_STALE_KEY, UCXM_ERR_UNREACHABLE,
    UCXM_ERR_UNSUPPORTED, UCXM_KEY_FLAG_EMPTY, UCXM_MD_FLAG_ATOMIC, UCXM_MD_FLAG_ENDPOINT,
    UCXM_MD_FLAG_EVENT_FD, UCXM_MD_FLAG_NEED_MEMH, UCXM_MD_FLAG_NEED_RKEY, UCXM_MD_FLAG_REG,
    UCXM_MD_FLAG_REG_DMABUF, UCXM_MEM_ACCESS_LOCAL_WRITE, UCXM_MEM_ACCESS_REMOTE_ATOMIC,
    UCXM_MEM_ACCESS_REMOTE_GET, UCXM_MEM_ACCESS_REMOTE_PUT, UCXM_MEM_DERIVED_ONLY,
    UCXM_MEM_TYPE_CUDA, UCXM_MEM_TYPE_HOST, UCXM_OK, UCXM_OP_FETCH_ADD, UCXM_OP_GET, UCXM_OP_PUT,
    ucxm_memh_own,
)

cdef extern from *:
    """
    static pthread_mutex_t ib_tables_lock = PTHREAD_MUTEX_INITIALIZER;
    /* The operations whose `complete` runs in this thread now, innermost first. */
    typedef struct ib_frame {
        void *ep;
        struct ib_frame *outer;
    } ib_frame_t;
    static __thread ib_frame_t *ib_frames;

    static inline void *ib_load_ptr(void *at)
    {
        return __atomic_load_n((void **)at, __ATOMIC_RELAXED);
    }
    static inline void ib_store_ptr(void *at, void *to)
    {
        __atomic_store_n((void **)at, to, __ATOMIC_RELAXED);
    }
    """
    ctypedef struct ib_frame_t:
        void *ep
        ib_frame_t *outer
    ib_frame_t *ib_frames
    pthread_mutex_t ib_tables_lock
    void *ib_load_ptr(void *at) noexcept nogil
    void ib_store_ptr(void *at, void *to) noexcept nogil

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_trylock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<unistd.h>" nogil:
    long sysconf(int name)
    enum:
        _SC_PAGESIZE
    int close(int fd)
    int usleep(unsigned int usec)

cdef extern from "<fcntl.h>" nogil:
    int fcntl(int fd, int command, ...)
    enum:
        F_GETFL
        F_SETFL
        O_NONBLOCK

cdef extern from "<sys/epoll.h>" nogil:
    enum:
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLLIN
    ctypedef struct epoll_event "struct epoll_event":
        uint32_t events
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int operation, int fd, epoll_event *event)

cdef extern from "<sys/resource.h>" nogil:
    ctypedef struct rlimit "struct rlimit":
        unsigned long rlim_cur
    enum:
        RLIMIT_MEMLOCK
    const unsigned long RLIM_INFINITY
    int getrlimit(int resource, rlimit *limit)

cdef extern from "ucx_memh_ib/verbs_util.h" nogil:
    uint64_t ib_realtime_ns()

cdef extern from "<stdio.h>" nogil:
    int snprintf(char *text, size_t size, const char *format, ...)

cdef enum:
    WR_COUNT = 1024          # work requests of one Md under way
    POLL_BATCH = 16
    FEED_BATCH = 8
    RD_ATOMIC = 16
    INLINE_MAX = 64
    PEERS = 1024             # peers whose last epoch is remembered
    ASYNC_INTERVAL = 1024    # empty polls between two looks at the device's events
    DRAIN_SECONDS = 10       # a device that flushes nothing for so long is given up
    TICKET = 0x7fffffff      # the low half of such a wr_id; of an operation it is a small index
    ADDRESS_VERSION = 1
    ADDRESS_SIZE = 56

include "verbs.src/loader.pxi"
include "verbs.src/errors.pxi"
include "verbs.src/device.pxi"
include "verbs.src/registration.pxi"
include "verbs.src/rkey.pxi"
include "verbs.src/work.pxi"
include "verbs.src/completion.pxi"
include "verbs.src/endpoint.pxi"
include "verbs.src/ticket.pxi"
include "verbs.src/control.pxi"
include "verbs.src/explain.pxi"
include "verbs.src/tables.pxi"
