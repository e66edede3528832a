# SPDX-License-Identifier: BSD-3-Clause
# Room for many things of one size that are made together: one allocation, where each for itself
# would cost more than what is written there, and go back to the system page by page.

cdef struct slab_t:
    uint32_t refs    # things in it that are not freed, room not taken yet, and its maker
    uint32_t taken   # the maker alone takes room, and counts it
    size_t each

cdef enum:
    SLAB_HEAD = 64   # before the first thing: a cache line


cdef slab_t *slab_new(size_t count, size_t each) noexcept nogil:
    """For so many things of so many bytes; aligned as malloc does."""
    cdef slab_t *slab
    each = align16(each)
    if count >= <uint32_t>-1 or count > (<size_t>-1 - SLAB_HEAD) // each:
        return NULL
    slab = <slab_t *>mem_alloc(SLAB_HEAD + count * each)
    if slab == NULL:
        return NULL
    slab.refs = <uint32_t>count + 1
    slab.taken = 0
    slab.each = each
    return slab


cdef inline void *slab_take(slab_t *slab) noexcept nogil:
    """Room for the next of them; there is some."""
    cdef void *room = <char *>slab + SLAB_HEAD + slab.taken * slab.each
    slab.taken += 1
    return room


cdef inline void slab_put(slab_t *slab, uint32_t things) noexcept nogil:
    """So many of them are gone; with the last the slab goes."""
    if sub32(&slab.refs, things) == 0:
        mem_free(slab)


cdef inline void slab_end(slab_t *slab, size_t count) noexcept nogil:
    """The maker of a slab for `count` is done with it; what it did not take is not needed."""
    if slab != NULL:
        slab_put(slab, <uint32_t>count + 1 - slab.taken)


cdef inline void *room_take(slab_t *slab, size_t size) noexcept nogil:
    """In the slab, or, for NULL, by itself."""
    return mem_alloc(size) if slab == NULL else slab_take(slab)


cdef inline void room_free(slab_t *slab, void *room) noexcept nogil:
    if slab == NULL:
        mem_free(room)
    else:
        slab_put(slab, 1)
