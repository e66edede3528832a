# SPDX-License-Identifier: BSD-3-Clause
# How big a handle is: the one place that knows.

cdef struct layout_t:
    size_t copy_offset  # the inherited span: what a clone copies
    size_t copy_size
    size_t own_offset
    size_t size


cdef layout_t memh_size(size_t tail_inherit_size, size_t tail_own_size) noexcept nogil:
    """Lay out identity | inherited + tail | own + tail.  Pure."""
    cdef layout_t layout
    layout.copy_offset = sizeof(ucxm_memh_identity_t)
    layout.own_offset = align16(sizeof(ucxm_memh_t) + tail_inherit_size)
    layout.copy_size = layout.own_offset - layout.copy_offset
    layout.size = layout.own_offset + sizeof(ucxm_memh_own_t) + tail_own_size
    return layout


def memh_layout(size_t tail_inherit_size=0, size_t tail_own_size=0):
    """Return (copy_offset, copy_size, own_offset, size) of a handle with such tails, in bytes."""
    cdef layout_t layout = memh_size(tail_inherit_size, tail_own_size)
    return layout.copy_offset, layout.copy_size, layout.own_offset, layout.size
