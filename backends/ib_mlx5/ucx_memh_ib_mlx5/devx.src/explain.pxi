# SPDX-License-Identifier: BSD-3-Clause
# What a person may want to know.

cdef void explain_md(const md_t *md, ib_text_t *text) noexcept nogil:
    cdef char line[768]
    snprintf(line, sizeof(line), "%s: %s, by %s", md.ib.name,
             <const char *>b"a software device" if md.software else <const char *>b"hardware",
             md.mlx5.library.path)
    ib_say(text, line)
    if md.software:
        ib_say(text, "its keys are checked, and its data copied, by a library inside this process")
    else:
        ib_say(text, "written after the programmer's manual; never tried on hardware by its "
                     "authors")
    ib_say(text, "derived keys: one KLM mkey each, exact range and rights"
           if md.can_derive else "derived keys: none, the device lacks KLM lists or indirection")
    if md.umr_missing == NULL:
        ib_say(text, "they are aimed by BIND_MW and ended by LOCAL_INV over a control queue pair, "
                     "with no command; those bound to a queue pair or longer than 2 GiB are made "
                     "by CREATE_MKEY")
        if ib_load32(&md.pool.missing) != 0:
            snprintf(line, sizeof(line), "and so are all others for now: no control queue pair "
                     "could be made (errno %u)", <unsigned>ib_load32(&md.pool.missing))
            ib_say(text, line)
    elif md.can_derive:
        snprintf(line, sizeof(line), "they are made by CREATE_MKEY, not by work requests: %s",
                 md.umr_missing)
        ib_say(text, line)
    ib_say(text, "revocable keys of a base: KSM mkeys"
           if md.caps.fixed_buffer_size and md.caps.max_indirection
           else "revocable keys of a base: none, the device lacks fixed_buffer_size")
    if not md.ib.has_atomics:
        ib_say(text, "atomics: none")
    elif md.can_atomic:
        ib_say(text, "atomics: also through indirect keys (unproven on hardware for KLM); not "
                     "atomic against this host's own stores")
    else:
        ib_say(text, "atomics: by the direct key only (umr_modify_atomic_disabled)")
    ib_explain_fork(text)


cdef void explain_key(const md_t *md, const ucxm_memh_own_t *own,
                      ib_text_t *text) noexcept nogil:
    """Which way its key was, or will be, made.  The core explains live handles only, and under its
    key lock."""
    cdef const char *reason = command_reason(md, own)
    cdef const ucxm_key_slot_t *slot = &own.slot[0]
    cdef char line[256]
    if slot.live and reason == NULL and (<const key_t *>slot.object).mkey == NULL:
        reason = b"no control queue pair, or no key for one, could be made"
    if slot.live and reason == NULL:
        snprintf(line, sizeof(line), "key 0x%x, aimed by BIND_MW over the control queue pair; "
                 "LOCAL_INV ends it", slot.value)
    elif slot.live:
        snprintf(line, sizeof(line), "key 0x%x, made by CREATE_MKEY: %s; DESTROY_MKEY ends it",
                 slot.value, reason)
    elif reason == NULL:
        snprintf(line, sizeof(line), "no key yet: the first pack aims one by BIND_MW")
    else:
        snprintf(line, sizeof(line), "no key yet: the first pack sends CREATE_MKEY: %s", reason)
    ib_say(text, line)


cdef void explain_derived(const md_t *md, const ucxm_memh_t *memh, ib_text_t *text) noexcept nogil:
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef mlx5_mkey_t mkey
    cdef char line[256]
    mkey_describe(md, own, memh.inherited.lkey, UCXM_KEY_DERIVED, &mkey)
    snprintf(line, sizeof(line),
             "one KLM mkey of %llu entries (list of %llu) on the registration's local key 0x%x",
             <unsigned long long>mkey.entries, <unsigned long long>mkey.list_size, mkey.lkey)
    ib_say(text, line)
    if own.ep == NULL:
        ib_say(text, "bound to no queue pair: any connection to this domain may use it")
    else:
        snprintf(line, sizeof(line), "bound to queue pair 0x%x: no other may use it", mkey.qpn)
        ib_say(text, line)
    explain_key(md, own, text)
    if mkey.a:
        ib_say(text, "atomics go through KLM, which is unproven on hardware")


cdef void explain_adopted(const ucxm_memh_t *memh, ib_text_t *text) noexcept nogil:
    ib_say(text, "its access bits are not known here: the device refuses, at the first use, a key "
                 "that grants more than they do")
    if memh.inherited.reg.grant & (UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_ATOMIC):
        ib_say(text, "put needs IBV_ACCESS_LOCAL_WRITE of it, atomics IBV_ACCESS_REMOTE_ATOMIC, "
                     "too")


cdef void explain_base(const ucxm_memh_t *memh, ib_text_t *text) noexcept nogil:
    ib_explain_region(memh, text)
    if ib_adopted(memh):
        explain_adopted(memh, text)
    ib_explain_direct(memh, "but atomics: mlx5 wants the registration's own atomic right below an "
                            "atomic key, so who guesses the direct key may do atomics", text)


cdef void mlx5_explain(void *priv, const ucxm_memh_t *memh, char *out,
                       size_t size) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef ib_text_t text
    if size == 0:
        return
    text = ib_text(out, size)
    if memh == NULL:
        explain_md(md, &text)
    elif memh.id.parent != NULL:
        explain_derived(md, memh, &text)
    elif ucxm_memh_own(memh).length != 0:
        explain_base(memh, &text)
    else:
        ib_say(&text, "no bytes: there is no registration and no key")
    if memh != NULL:
        ib_say(&text, "a software device enforces it" if md.software
               else "the device enforces it; never tried on hardware")
