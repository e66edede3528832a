# SPDX-License-Identifier: BSD-3-Clause
# Atomics, locks, the clock and the allocator.

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>
    #include <stdint.h>

    static inline uint32_t ucxm_load32(const uint32_t *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline void ucxm_store32(uint32_t *p, uint32_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
    }
    static inline void ucxm_store32_sc(uint32_t *p, uint32_t v) {
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
    }
    static inline int ucxm_cas32(uint32_t *p, uint32_t from, uint32_t to) {
        return __atomic_compare_exchange_n(p, &from, to, 0, __ATOMIC_SEQ_CST,
                                           __ATOMIC_SEQ_CST);
    }
    /* Sequentially consistent: users of a count check a state right after. */
    static inline uint32_t ucxm_add32(uint32_t *p, uint32_t v) {
        return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST);
    }
    static inline uint32_t ucxm_sub32(uint32_t *p, uint32_t v) {
        return __atomic_sub_fetch(p, v, __ATOMIC_SEQ_CST);
    }
    static inline uint32_t ucxm_load32_sc(const uint32_t *p) {
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);
    }
    static inline uint64_t ucxm_load64(const uint64_t *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline uint64_t ucxm_fetch_add64(uint64_t *p, uint64_t v) {
        return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
    }
    /* For what is written under a lock and read without. */
    static inline void ucxm_bump32(uint32_t *p, uint32_t v) {
        __atomic_store_n(p, *p + v, __ATOMIC_RELAXED);
    }
    static inline void ucxm_bump64(uint64_t *p, uint64_t v) {
        __atomic_store_n(p, *p + v, __ATOMIC_RELAXED);
    }
    static inline void *ucxm_load_ptr(void **p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline void ucxm_store_ptr(void **p, void *v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
    }

    /* 64 bytes, by four stores: for so little a memset becomes a string instruction, which takes
     * longer to start. */
    static inline void ucxm_zero64(void *p) {
        for (int i = 0; i < 4; ++i)
            __builtin_memset((char *)p + 16 * i, 0, 16);
    }

    static inline void *ucxm_swap_ptr(void **p, void *v) {
        return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL);
    }
    static inline void ucxm_push_ptr(void **head, void **next, void *node) {
        *next = __atomic_load_n(head, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(head, next, node, 1, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED))
            ;
    }

    /* For sections of a few instructions that call nothing. */
    typedef uint32_t ucxm_spin_t;
    static inline void ucxm_spin_lock(ucxm_spin_t *lock) {
        while (__builtin_expect(__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE), 0)) {
            int n = 0;
            while (__atomic_load_n(lock, __ATOMIC_RELAXED)) {
                if (++n == 64) { /* the holder may have been preempted */
                    sched_yield();
                    n = 0;
                }
            }
        }
    }
    static inline void ucxm_spin_unlock(ucxm_spin_t *lock) {
        __atomic_store_n(lock, 0, __ATOMIC_RELEASE);
    }
    """
    uint32_t load32 "ucxm_load32"(const uint32_t *p) noexcept nogil
    uint32_t load32_sc "ucxm_load32_sc"(const uint32_t *p) noexcept nogil
    void store32 "ucxm_store32"(uint32_t *p, uint32_t v) noexcept nogil
    void store32_sc "ucxm_store32_sc"(uint32_t *p, uint32_t v) noexcept nogil
    bint cas32 "ucxm_cas32"(uint32_t *p, uint32_t old, uint32_t new) noexcept nogil
    uint32_t add32 "ucxm_add32"(uint32_t *p, uint32_t v) noexcept nogil
    uint32_t sub32 "ucxm_sub32"(uint32_t *p, uint32_t v) noexcept nogil
    uint64_t load64 "ucxm_load64"(const uint64_t *p) noexcept nogil
    uint64_t fetch_add64 "ucxm_fetch_add64"(uint64_t *p, uint64_t v) noexcept nogil
    void bump32 "ucxm_bump32"(uint32_t *p, uint32_t v) noexcept nogil
    void bump64 "ucxm_bump64"(uint64_t *p, uint64_t v) noexcept nogil
    void *load_ptr "ucxm_load_ptr"(void **p) noexcept nogil
    void store_ptr "ucxm_store_ptr"(void **p, void *v) noexcept nogil
    void zero64 "ucxm_zero64"(void *p) noexcept nogil
    void *swap_ptr "ucxm_swap_ptr"(void **p, void *v) noexcept nogil
    void push_ptr "ucxm_push_ptr"(void **head, void **next, void *node) noexcept nogil
    ctypedef uint32_t spin_t "ucxm_spin_t"
    void spin_lock "ucxm_spin_lock"(spin_t *lock) noexcept nogil
    void spin_unlock "ucxm_spin_unlock"(spin_t *lock) noexcept nogil
    bint likely "__builtin_expect"(bint condition, int expected) noexcept nogil

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_atfork(void (*prepare)() noexcept, void (*parent)() noexcept,
                       void (*child)() noexcept)

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from "Python.h" nogil:
    int Py_IsInitialized()
    void *PyGILState_GetThisThreadState()

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec


cdef inline bint python_lives() noexcept nogil:
    """May this thread take the GIL?  A C caller may outlive the interpreter; then what Python gave
    is not given back any more.  The thread that ends the interpreter still may."""
    return Py_IsInitialized() or PyGILState_GetThisThreadState() != NULL


ctypedef void *(*alloc_fn)(size_t size) noexcept nogil
ctypedef void (*release_fn)(void *ptr) noexcept nogil

# Every handle, registration, key and operation comes from here, so that a test can count and
# poison them.
cdef alloc_fn mem_alloc = malloc
cdef release_fn mem_free = free


cdef void set_allocator(alloc_fn alloc, release_fn release) noexcept nogil:
    """Replace the allocator; NULL restores malloc and free.

    What one allocator gave the other may be asked to free, so both must end in malloc.
    """
    global mem_alloc, mem_free
    mem_alloc = alloc if alloc != NULL else <alloc_fn>malloc
    mem_free = release if release != NULL else <release_fn>free


cdef inline size_t align16(size_t size) noexcept nogil:
    return (size + 15) & ~<size_t>15


cdef inline void *alloc_zeroed(size_t size) noexcept nogil:
    cdef void *ptr = mem_alloc(size)
    if ptr != NULL:
        memset(ptr, 0, size)
    return ptr


cdef inline bint inside(uint64_t address, uint64_t length, uint64_t start,
                        uint64_t size) noexcept nogil:
    """Does address .. +length lie within start .. +size, none of which wraps around?"""
    return address >= start and length <= size and address - start <= size - length


cdef inline void error_clear(ucxm_error_t *error) noexcept nogil:
    """Nothing is wrong yet, whatever it holds from an earlier call.  NULL: nobody asks."""
    if error != NULL:
        error.sys_errno = 0
        error.syndrome = 0
        error.text[0] = 0


cdef inline void error_copy(ucxm_error_t *error, const ucxm_error_t *said,
                            ucxm_status_t status) noexcept nogil:
    """Tell `error`, if there is one, what was said of this status."""
    if status == UCXM_OK:
        error_clear(error)
    elif error != NULL:
        error[0] = said[0]


cdef void error_text(ucxm_error_t *error, const char *text) noexcept nogil:
    """Say why, unless somebody nearer to the cause has said it already."""
    ucxm_refuse(error, UCXM_OK, text)


cdef inline ucxm_status_t refuse(ucxm_error_t *error, ucxm_status_t status,
                                 const char *text) noexcept nogil:
    return ucxm_refuse(error, status, text)


cdef uint64_t MEM_FLAGS_HINT = UCXM_MEM_SYMMETRIC_RKEY | UCXM_MEM_GVA
cdef uint64_t MEM_FLAGS_KNOWN = UCXM_MEM_ACCESS_ALL | UCXM_MEM_DERIVED_ONLY


cdef ucxm_status_t mem_flags_check(uint64_t flags, ucxm_error_t *error) noexcept nogil:
    """Flags of mem_reg or derive: known and supported ones only."""
    if flags & MEM_FLAGS_HINT:
        return refuse(error, UCXM_ERR_UNSUPPORTED, "SYMMETRIC_RKEY and GVA are not supported")
    if flags & ~MEM_FLAGS_KNOWN:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "unknown flags")
    return UCXM_OK


cdef const char *status_text(ucxm_status_t status) noexcept nogil:
    """The status's name, as in memh.h."""
    if status == UCXM_OK:
        return b"OK"
    if status == UCXM_INPROGRESS:
        return b"INPROGRESS"
    if status == UCXM_ERR_NO_RESOURCE:
        return b"NO_RESOURCE"
    if status == UCXM_ERR_IO_ERROR:
        return b"IO_ERROR"
    if status == UCXM_ERR_NO_MEMORY:
        return b"NO_MEMORY"
    if status == UCXM_ERR_INVALID_PARAM:
        return b"INVALID_PARAM"
    if status == UCXM_ERR_UNREACHABLE:
        return b"UNREACHABLE"
    if status == UCXM_ERR_INVALID_ADDR:
        return b"INVALID_ADDR"
    if status == UCXM_ERR_BUFFER_TOO_SMALL:
        return b"BUFFER_TOO_SMALL"
    if status == UCXM_ERR_NO_DEVICE:
        return b"NO_DEVICE"
    if status == UCXM_ERR_BUSY:
        return b"BUSY"
    if status == UCXM_ERR_CANCELED:
        return b"CANCELED"
    if status == UCXM_ERR_TIMED_OUT:
        return b"TIMED_OUT"
    if status == UCXM_ERR_EXCEEDS_LIMIT:
        return b"EXCEEDS_LIMIT"
    if status == UCXM_ERR_UNSUPPORTED:
        return b"UNSUPPORTED"
    if status == UCXM_ERR_REVOKED:
        return b"REVOKED"
    if status == UCXM_ERR_CLOSED:
        return b"CLOSED"
    if status == UCXM_ERR_FORKED:
        return b"FORKED"
    if status == UCXM_ERR_ACCESS:
        return b"ACCESS"
    if status == UCXM_ERR_RANGE:
        return b"RANGE"
    if status == UCXM_ERR_MALFORMED_KEY:
        return b"MALFORMED_KEY"
    if status == UCXM_ERR_KEY_VERSION:
        return b"KEY_VERSION"
    if status == UCXM_ERR_STALE_KEY:
        return b"STALE_KEY"
    if status == UCXM_ERR_PEER_GONE:
        return b"PEER_GONE"
    if status == UCXM_ERR_REMOTE_ACCESS:
        return b"REMOTE_ACCESS"
    if status == UCXM_ERR_FLUSHED:
        return b"FLUSHED"
    return b"UNKNOWN"
