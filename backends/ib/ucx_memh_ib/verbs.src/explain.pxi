# SPDX-License-Identifier: BSD-3-Clause
# What a person may want to know, and every backend here says alike.

cdef ib_text_t ib_text(char *at, size_t size) noexcept nogil:
    cdef ib_text_t text
    at[0] = 0
    text.at = at
    text.left = size
    return text


cdef void ib_say(ib_text_t *text, const char *line) noexcept nogil:
    cdef int size = snprintf(text.at, text.left, "%s%s", line, <const char *>b"\n")
    if size < 0:
        return
    size = min(size, <int>text.left - 1)
    text.at += size
    text.left -= size


cdef bint ib_adopted(const ucxm_memh_t *memh) noexcept nogil:
    return ucxm_memh_own(memh).length != 0 and (<ib_reg_t *>memh.inherited.reg.priv).adopted


cdef void ib_explain_region(const ucxm_memh_t *memh, ib_text_t *text) noexcept nogil:
    cdef const ib_reg_t *reg = <const ib_reg_t *>memh.inherited.reg.priv
    cdef char line[256]
    if reg.adopted:
        snprintf(line, sizeof(line), "adopted registration, direct key 0x%x: its maker's, and "
                 "never deregistered here", memh.inherited.reg.rkey)
    else:
        snprintf(line, sizeof(line), "registration with access bits 0x%x, direct key 0x%x",
                 reg.access, memh.inherited.reg.rkey)
    ib_say(text, line)


cdef void ib_explain_direct(const ucxm_memh_t *memh, const char *atomics,
                            ib_text_t *text) noexcept nogil:
    cdef const ib_reg_t *reg = <const ib_reg_t *>memh.inherited.reg.priv
    cdef bint kept = (memh.inherited.flags & UCXM_MEM_DERIVED_ONLY) != 0
    if reg.adopted:
        ib_say(text, "DERIVED_ONLY: no pack gives its direct key away, which allows whatever its "
                     "maker said"
               if kept else
               "its direct key allows whatever its maker said, until he deregisters it")
    elif kept:
        ib_say(text, "DERIVED_ONLY: the direct key allows no put and no get")
        if reg.access & IBV_ACCESS_REMOTE_ATOMIC:
            ib_say(text, atomics)
    else:
        ib_say(text, "whoever guesses the direct key has its rights until the region is "
                     "deregistered: DERIVED_ONLY avoids that")


cdef void ib_explain_fork(ib_text_t *text) noexcept nogil:
    ib_say(text, "fork: ibv_fork_init is not called; since Linux 5.12 fork copies pinned pages, "
                 "and a child may not use the parent's domain")
