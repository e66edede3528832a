# SPDX-License-Identifier: BSD-3-Clause
# How a handle lies in memory: the one place that knows.

# The core's own books of a handle.  They lie in front of what backends see, which may then stay as
# it is when these change.
cdef struct books_t:
    ucxm_completion_t device_done  # first
    ucxm_memh_t *children
    ucxm_memh_t *next
    ucxm_memh_t *prev
    const plan_t *plan       # which slots a packed key names, for each pack flag
    uint32_t epoch           # fork generation
    uint32_t component_id    # for what outlives its domain
    uint32_t refs            # taken under the tree_lock, or by who is at work on it
    uint32_t live_children   # LIVE or REVOKING; while there are any it cannot go
    void *packed[8]          # finished keys by pack flags
    ucxm_completion_t *user_done
    uint32_t pending         # who is at it: 0 nobody, AT_WORK a thread, else slot + 1: the device
    uint32_t closing         # CLOSING, ORPHAN, HOLDS_PARENT
    ucxm_status_t failed     # how the last destruction by the device ended
    uint32_t touched         # somebody has begun to make a key for it
    PyObject *object         # who wraps it, while that lives: a Memh, or a MemhArray
    ucxm_memh_t *left        # in the Md's index, if there is one: this and the next two
    ucxm_memh_t *right
    uint64_t reach           # the highest end of a range in its subtree
    slab_t *slab             # where it lies, if it is derived and one of many
    void *aligned            # to 16 bytes

cdef enum:
    AT_WORK = 0xffff

cdef enum:
    CLOSING = 1       # dereg, not only invalidate
    ORPHAN = 2        # its user is gone but its keys would not go: the Md owns it
    HOLDS_PARENT = 4  # it went while more than its user had it, and counts as one of its parent's

cdef struct layout_t:
    size_t copy_offset  # of the inherited span, from the handle: what a clone copies
    size_t copy_size
    size_t own_offset
    size_t size         # of the allocation, which begins books_t before the handle


cdef layout_t memh_size(size_t tail_inherit_size, size_t tail_own_size) noexcept nogil:
    """Lay out books | identity | inherited + tail | own + tail.  Pure."""
    cdef layout_t layout
    layout.copy_offset = sizeof(ucxm_memh_identity_t)
    layout.own_offset = align16(sizeof(ucxm_memh_t) + tail_inherit_size)
    layout.copy_size = layout.own_offset - layout.copy_offset
    layout.size = sizeof(books_t) + layout.own_offset + sizeof(ucxm_memh_own_t) + tail_own_size
    return layout


cdef inline books_t *books_of(const ucxm_memh_t *memh) noexcept nogil:
    return <books_t *>memh - 1


def memh_layout(size_t tail_inherit_size=0, size_t tail_own_size=0):
    """Return (memh_offset, copy_offset, copy_size, own_offset, size) of a handle with such tails.

    In bytes, of and in its allocation: the handle itself lies memh_offset behind the beginning.
    """
    cdef layout_t layout = memh_size(tail_inherit_size, tail_own_size)
    cdef size_t books = sizeof(books_t)
    return (books, books + layout.copy_offset, layout.copy_size, books + layout.own_offset,
            layout.size)
