# SPDX-License-Identifier: BSD-3-Clause
# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""An allocator for the core that counts, poisons and fails; and a look at a handle's bytes.

What it gives out is filled, what it gets back is filled otherwise and kept for a while, and
behind each block lies a guard: so memory that is read before it was written, used after it was
freed or written past its end is noticed.
"""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from ucx_memh.core cimport Memh, set_allocator
from ucx_memh.libmemh cimport uint8_t, uint64_t

from ucx_memh.core import memh_layout

cdef extern from *:
    """
    #include <pthread.h>
    static pthread_mutex_t alloc_lock = PTHREAD_MUTEX_INITIALIZER;
    """
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t *mutex) nogil
    int pthread_mutex_unlock(pthread_mutex_t *mutex) nogil
    pthread_mutex_t LOCK "alloc_lock"

cdef enum:
    GUARD = 32         # bytes behind each block
    GUARD_FILL = 0x7e
    KEPT = 512         # freed blocks that are watched
    LOGGED = 4096      # sizes that are remembered

cdef struct block_t:
    uint8_t *at
    size_t size

# Blocks must be plain malloc's, as others are given back here and ours may be given back there;
# so the books are kept beside them, in a table with open addressing.
cdef struct books_t:
    block_t *table
    size_t mask
    uint64_t live
    uint64_t live_bytes
    uint64_t peak_bytes
    uint64_t allocs
    uint64_t frees
    uint64_t foreign     # frees of what another allocator gave
    uint64_t failed
    uint64_t overruns
    uint64_t touched     # written after it was freed
    uint64_t fail_in     # this many allocations from now; 0: never
    uint64_t fail_count
    uint8_t fill
    uint8_t freed_fill
    block_t kept[KEPT]
    size_t oldest
    size_t kept_count
    size_t logged
    size_t log[LOGGED]

cdef books_t books


cdef size_t place(const void *at) noexcept nogil:
    """Where the block is in the table, or the empty place where it would go."""
    cdef size_t i = ((<uintptr_t>at >> 4) * <uint64_t>0x9e3779b97f4a7c15 >> 20) & books.mask
    while books.table[i].at != NULL and books.table[i].at != at:
        i = (i + 1) & books.mask
    return i


cdef void forget(size_t hole) noexcept nogil:
    cdef size_t at = hole, home
    books.table[hole].at = NULL
    while True:
        at = (at + 1) & books.mask
        if books.table[at].at == NULL:
            return
        home = ((<uintptr_t>books.table[at].at >> 4) * <uint64_t>0x9e3779b97f4a7c15 >>
                20) & books.mask
        if ((at - home) & books.mask) >= ((at - hole) & books.mask):
            books.table[hole] = books.table[at]
            books.table[at].at = NULL
            hole = at


cdef bint grow() noexcept nogil:
    """Room for one more; False if there is none."""
    cdef block_t *old = books.table
    cdef size_t mask = books.mask
    cdef size_t i
    if books.live * 2 < mask:
        return True
    books.table = <block_t *>calloc((mask + 1) * 2, sizeof(block_t))
    if books.table == NULL:
        books.table = old
        return False
    books.mask = mask * 2 + 1
    for i in range(mask + 1):
        if old[i].at != NULL:
            books.table[place(old[i].at)] = old[i]
    free(old)
    return True


cdef bint is_filled(const uint8_t *at, size_t size, uint8_t fill) noexcept nogil:
    cdef size_t i
    for i in range(size):
        if at[i] != fill:
            return False
    return True


cdef void let_go(block_t *block) noexcept nogil:
    if not is_filled(block.at, block.size, books.freed_fill):
        books.touched += 1
    free(block.at)


cdef void *counting_alloc(size_t size) noexcept nogil:
    cdef uint8_t *at = NULL
    cdef size_t i
    pthread_mutex_lock(&LOCK)
    books.allocs += 1
    if books.fail_in != 0:
        books.fail_in -= 1
        if books.fail_in == 0:
            books.fail_count -= 1
            if books.fail_count != 0:
                books.fail_in = 1
            books.failed += 1
            pthread_mutex_unlock(&LOCK)
            return NULL
    if grow():
        at = <uint8_t *>malloc(size + GUARD)
    if at != NULL:
        memset(at, books.fill, size)
        memset(at + size, GUARD_FILL, GUARD)
        i = place(at)
        books.table[i].at = at
        books.table[i].size = size
        books.live += 1
        books.live_bytes += size
        if books.live_bytes > books.peak_bytes:
            books.peak_bytes = books.live_bytes
        books.log[books.logged % LOGGED] = size
        books.logged += 1
    pthread_mutex_unlock(&LOCK)
    return at


cdef void counting_free(void *ptr) noexcept nogil:
    cdef block_t block
    cdef size_t i
    if ptr == NULL:
        return
    pthread_mutex_lock(&LOCK)
    books.frees += 1
    i = place(ptr)
    if books.table[i].at == NULL:
        books.foreign += 1
        free(ptr)
    else:
        block = books.table[i]
        forget(i)
        books.live -= 1
        books.live_bytes -= block.size
        if not is_filled(block.at + block.size, GUARD, GUARD_FILL):
            books.overruns += 1
        memset(block.at, books.freed_fill, block.size)
        if books.kept_count == KEPT:
            let_go(&books.kept[books.oldest])
            books.kept[books.oldest] = block
            books.oldest = (books.oldest + 1) % KEPT
        else:
            books.kept[books.kept_count] = block
            books.kept_count += 1
    pthread_mutex_unlock(&LOCK)


cdef void kept_free() noexcept nogil:
    cdef size_t i
    for i in range(books.kept_count):
        let_go(&books.kept[i])
    books.kept_count = 0
    books.oldest = 0


cdef PoisonAllocator active = None


cdef class PoisonAllocator:
    """While it is entered the core's memory comes from here, filled with `fill`.

    `fail_at=n` makes the n-th allocation after entering fail.  Freed memory is filled with the
    complement of `fill`.  Only one can be entered at a time.  The counts can also be read when it
    has been left; blocks that were live then are freed as usual, and not counted.
    """
    cdef readonly int fill
    cdef object first_fail
    cdef dict last

    def __init__(self, int fill=0xa5, fail_at=None):
        if not 0 <= fill <= 255:
            raise ValueError("fill is a byte")
        self.fill = fill
        self.first_fail = fail_at

    def __enter__(self):
        global active
        if active is not None:
            raise RuntimeError("another PoisonAllocator is in use")
        memset(&books, 0, sizeof(books))
        books.mask = 1023
        books.table = <block_t *>calloc(books.mask + 1, sizeof(block_t))
        if books.table == NULL:
            raise MemoryError
        books.fill = self.fill
        books.freed_fill = 255 - self.fill
        active = self
        self.last = None
        self.fail(self.first_fail)
        set_allocator(counting_alloc, counting_free)
        return self

    def __exit__(self, *exc_info):
        global active
        set_allocator(NULL, NULL)
        pthread_mutex_lock(&LOCK)
        kept_free()
        pthread_mutex_unlock(&LOCK)
        self.last = self._counts()
        free(books.table)
        books.table = NULL
        active = None

    cdef dict _counts(self):
        cdef size_t i, first = 0
        if active is not self:
            if self.last is None:
                raise RuntimeError("it has not been entered")
            return self.last
        if books.logged > LOGGED:
            first = books.logged - LOGGED
        return {
            "allocs": books.allocs, "frees": books.frees, "foreign": books.foreign,
            "failed": books.failed, "live": books.live, "live_bytes": books.live_bytes,
            "peak_bytes": books.peak_bytes, "overruns": books.overruns,
            "touched": books.touched,
            "sizes": [books.log[i % LOGGED] for i in range(first, books.logged)],
        }

    def fail(self, at, uint64_t count=1):
        """Let the `at`-th allocation from now on fail, and `count` - 1 after it; None: no more."""
        cdef uint64_t n = 0 if at is None else at
        if at is not None and n == 0 or count == 0:
            raise ValueError("counted from 1")
        pthread_mutex_lock(&LOCK)
        books.fail_in = n
        books.fail_count = count
        pthread_mutex_unlock(&LOCK)

    def check(self):
        """Look at what was freed up to now; raises AssertionError if memory was misused."""
        counts = self._counts()
        if active is self:
            pthread_mutex_lock(&LOCK)
            kept_free()
            pthread_mutex_unlock(&LOCK)
            counts = self._counts()
        if counts["touched"] or counts["overruns"]:
            raise AssertionError(f"{counts['touched']} blocks were written after they were freed, "
                                 f"{counts['overruns']} past their end")

    @property
    def allocs(self):
        """Allocations asked for, failed ones too."""
        return self._counts()["allocs"]

    @property
    def frees(self):
        """Blocks given back."""
        return self._counts()["frees"]

    @property
    def failed(self):
        """Allocations that were made to fail."""
        return self._counts()["failed"]

    @property
    def foreign(self):
        """Blocks given back that had come from another allocator."""
        return self._counts()["foreign"]

    @property
    def live(self):
        """Blocks given out and not given back."""
        return self._counts()["live"]

    @property
    def live_bytes(self):
        """Their bytes."""
        return self._counts()["live_bytes"]

    @property
    def peak_bytes(self):
        """The most that `live_bytes` has been."""
        return self._counts()["peak_bytes"]

    @property
    def sizes(self):
        """The bytes of the last 4096 allocations that did not fail, in their order."""
        return self._counts()["sizes"]


def memh_bytes(Memh memh not None, size_t size):
    """A handle's allocation of `size` bytes as it lies in memory (see core.memh_layout)."""
    return PyBytes_FromStringAndSize(<const char *>memh.memh - <size_t>memh_layout()[0], size)


def memh_pointer(Memh memh not None):
    """Where the handle lies, which is not where its allocation begins."""
    return <uintptr_t>memh.memh
