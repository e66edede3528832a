# SPDX-License-Identifier: BSD-3-Clause
# What a person may want to know.

cdef struct text_t:
    char *at
    size_t left


cdef void say(text_t *text, const char *line) noexcept nogil:
    """Append a line; what does not fit is cut off."""
    cdef int size = snprintf(text.at, text.left, "%s%s", line, <const char *>b"\n")
    if size < 0:
        return
    size = min(size, <int>text.left - 1)
    text.at += size
    text.left -= size


cdef void explain_md(const md_t *md, text_t *text) noexcept nogil:
    cdef char line[768]
    snprintf(line, sizeof(line), "%s: %s, by %s", md.ib.name,
             <const char *>b"a software device" if md.software else <const char *>b"hardware",
             md.mlx5.library.path)
    say(text, line)
    if md.software:
        say(text, "its keys are checked, and its data copied, by a library inside this process")
    else:
        say(text, "written after the programmer's manual; never tried on hardware by its authors")
    say(text, "derived keys: one KLM mkey each, exact range and rights"
        if md.can_derive else "derived keys: none, the device lacks KLM lists or indirection")
    say(text, "revocable keys of a base: KSM mkeys"
        if md.caps.fixed_buffer_size and md.caps.max_indirection
        else "revocable keys of a base: none, the device lacks fixed_buffer_size")
    if not md.ib.has_atomics:
        say(text, "atomics: none")
    elif md.can_atomic:
        say(text, "atomics: also through indirect keys (unproven on hardware for KLM); not atomic "
                  "against this host's own stores")
    else:
        say(text, "atomics: by the direct key only (umr_modify_atomic_disabled)")
    say(text, "fork: ibv_fork_init is not called; since Linux 5.12 fork copies pinned pages, and "
              "a child may not use the parent's domain")


cdef void explain_derived(const md_t *md, const ucxm_memh_t *memh, text_t *text) noexcept nogil:
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef mlx5_mkey_t mkey
    cdef char line[256]
    mkey_describe(md, own, memh.inherited.lkey, UCXM_KEY_DERIVED, &mkey)
    snprintf(line, sizeof(line),
             "one KLM mkey of %llu entries (list of %llu) on the registration's local key 0x%x",
             <unsigned long long>mkey.entries, <unsigned long long>mkey.list_size, mkey.lkey)
    say(text, line)
    if own.ep == NULL:
        say(text, "bound to no queue pair: any connection to this domain may use it")
    else:
        snprintf(line, sizeof(line), "bound to queue pair 0x%x: no other may use it", mkey.qpn)
        say(text, line)
    if own.slot[0].live:
        snprintf(line, sizeof(line), "key 0x%x; DESTROY_MKEY ends it", own.slot[0].value)
        say(text, line)
    else:
        say(text, "no key yet: the first pack sends CREATE_MKEY")
    if mkey.a:
        say(text, "atomics go through KLM, which is unproven on hardware")


cdef void explain_adopted(const ucxm_memh_t *memh, text_t *text) noexcept nogil:
    cdef uint64_t grant = memh.inherited.reg.grant
    cdef char line[256]
    snprintf(line, sizeof(line), "adopted registration, direct key 0x%x: its maker's, and never "
             "deregistered here", memh.inherited.reg.rkey)
    say(text, line)
    say(text, "its access bits are not known here: the device refuses, at the first use, a key "
              "that grants more than they do")
    if grant & (UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_ATOMIC):
        say(text, "put needs IBV_ACCESS_LOCAL_WRITE of it, atomics IBV_ACCESS_REMOTE_ATOMIC, too")
    if memh.inherited.flags & UCXM_MEM_DERIVED_ONLY:
        say(text, "DERIVED_ONLY: no pack gives its direct key away, which allows whatever its "
                  "maker said")
    else:
        say(text, "its direct key allows whatever its maker said, until he deregisters it")


cdef void explain_base(const md_t *md, const ucxm_memh_t *memh, text_t *text) noexcept nogil:
    cdef const ib_reg_t *reg = <const ib_reg_t *>memh.inherited.reg.priv
    cdef char line[256]
    if reg.adopted:
        explain_adopted(memh, text)
        return
    snprintf(line, sizeof(line), "registration with access bits 0x%x, direct key 0x%x",
             reg.access, memh.inherited.reg.rkey)
    say(text, line)
    if memh.inherited.flags & UCXM_MEM_DERIVED_ONLY:
        say(text, "DERIVED_ONLY: the direct key allows no put and no get")
        if reg.access & IBV_ACCESS_REMOTE_ATOMIC:
            say(text, "but atomics: mlx5 wants the registration's own atomic right below an "
                      "atomic key, so who guesses the direct key may do atomics")
    else:
        say(text, "whoever guesses the direct key has its rights until the region is "
                  "deregistered: DERIVED_ONLY avoids that")


cdef void mlx5_explain(void *priv, const ucxm_memh_t *memh, char *out,
                       size_t size) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef text_t text
    if size == 0:
        return
    out[0] = 0
    text.at = out
    text.left = size
    if memh == NULL:
        explain_md(md, &text)
    elif memh.id.parent != NULL:
        explain_derived(md, memh, &text)
    elif ucxm_memh_own(memh).length != 0:
        explain_base(md, memh, &text)
    else:
        say(&text, "no bytes: there is no registration and no key")
    if memh != NULL:
        say(&text, "a software device enforces it" if md.software
            else "the device enforces it; never tried on hardware")
