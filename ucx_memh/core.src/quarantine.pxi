# SPDX-License-Identifier: BSD-3-Clause
# Native values that were destroyed lately and must not be handed out again yet.
#
# A peer that still holds a revoked key would reach whatever the same value stands for next, and
# firmware is free to return a freed index at once.  A ring remembers the last `size` destroyed
# values in order; an open-addressed table answers whether a value is among them.

cdef struct quarantine_t:
    uint32_t size    # how many destructions are remembered
    uint32_t count
    uint32_t oldest  # in the ring
    uint32_t mask    # of the table
    uint32_t zeros   # the table cannot hold 0, its mark for an empty place
    uint64_t pushed  # in all
    uint32_t *ring
    uint32_t *table


cdef inline uint32_t quarantine_home(quarantine_t *q, uint32_t value) noexcept nogil:
    return <uint32_t>((value * <uint64_t>0x9e3779b97f4a7c15) >> 32) & q.mask


cdef ucxm_status_t quarantine_prepare(quarantine_t *q) noexcept nogil:
    """Get the memory before the first key exists: a revocation must not fail for want of it."""
    cdef uint32_t places = 16
    if q.size == 0 or q.ring != NULL:
        return UCXM_OK
    while places < 2 * q.size:
        places *= 2
    q.ring = <uint32_t *>mem_alloc(q.size * sizeof(uint32_t))
    q.table = <uint32_t *>alloc_zeroed(places * sizeof(uint32_t))
    if q.ring == NULL or q.table == NULL:
        quarantine_free(q)
        return UCXM_ERR_NO_MEMORY
    q.mask = places - 1
    return UCXM_OK


cdef void quarantine_free(quarantine_t *q) noexcept nogil:
    mem_free(q.ring)
    mem_free(q.table)
    q.ring = NULL
    q.table = NULL
    q.count = 0
    q.zeros = 0


cdef uint32_t quarantine_place(quarantine_t *q, uint32_t value) noexcept nogil:
    """Where the value is, or the empty place where it would go."""
    cdef uint32_t at = quarantine_home(q, value)
    while q.table[at] != 0 and q.table[at] != value:
        at = (at + 1) & q.mask
    return at


cdef bint quarantine_has(quarantine_t *q, uint32_t value) noexcept nogil:
    if q.count == 0:
        return False
    if value == 0:
        return q.zeros != 0
    return q.table[quarantine_place(q, value)] == value


cdef void quarantine_forget(quarantine_t *q, uint32_t value) noexcept nogil:
    cdef uint32_t hole, at, home
    if value == 0:
        q.zeros = 0
        return
    hole = quarantine_place(q, value)
    # Move up whoever would no longer be found across the hole.
    at = (hole + 1) & q.mask
    while q.table[at] != 0:
        home = quarantine_home(q, q.table[at])
        if ((at - home) & q.mask) >= ((at - hole) & q.mask):
            q.table[hole] = q.table[at]
            hole = at
        at = (at + 1) & q.mask
    q.table[hole] = 0


cdef void quarantine_push(quarantine_t *q, uint32_t value) noexcept nogil:
    if q.size == 0 or quarantine_has(q, value):
        return
    q.pushed += 1
    if q.count == q.size:
        quarantine_forget(q, q.ring[q.oldest])
        q.ring[q.oldest] = value
        q.oldest = (q.oldest + 1) % q.size
    else:
        q.ring[(q.oldest + q.count) % q.size] = value
        bump32(&q.count, 1)
    if value == 0:
        q.zeros = 1
    else:
        q.table[quarantine_place(q, value)] = value
