# SPDX-License-Identifier: BSD-3-Clause
# What a person may want to know.

cdef bint range_holds(const md_t *md) noexcept nogil:
    return md.check.range[0] and md.check.range[1] and md.check.range[2]


cdef void explain_check(const md_t *md, ib_text_t *text) noexcept nogil:
    cdef char line[256]
    if not md.check.asked:
        ib_say(text, "range of a window: not tried (self_check=False), so only the peer's library "
                     "is trusted with it")
    elif not md.check.done:
        snprintf(line, sizeof(line), "range of a window: the self-check failed: %s", md.check.why)
        ib_say(text, line)
    elif range_holds(md):
        ib_say(text, "range of a window: the device refused what was outside (self-check at open)")
    else:
        ib_say(text, "range of a window: NOT checked by this device (self-check at open): a key "
                     "reaches all of its registration; rights and revocation hold")


cdef void explain_md(const md_t *md, ib_text_t *text) noexcept nogil:
    cdef char line[768]
    snprintf(line, sizeof(line), "%s: %s, by %s", md.ib.name,
             <const char *>b"a software device" if md.software else <const char *>b"a verbs device",
             md.ib.verbs.library.path)
    ib_say(text, line)
    if md.software:
        ib_say(text, "its keys are checked, and its data copied, by a library inside this process")
    if has_windows(md):
        ib_say(text, "derived keys: one memory window of type 1 each, bound over a queue pair "
                     "that is connected to itself")
    elif md.caps & IBV_DEVICE_MEM_WINDOW:
        snprintf(line, sizeof(line), "derived keys: none, binding a window failed: %s",
                 md.check.why)
        ib_say(text, line)
    else:
        ib_say(text, "derived keys: none, the device has no memory windows")
    if has_windows(md):
        ib_say(text, "keys of one endpoint: windows of type 2B, bound over it once it is connected"
               if has_bound_windows(md) else "keys of one endpoint: none, no windows of type 2B")
        explain_check(md, text)
    ib_say(text, "revocable keys of a base: none; derive one")
    if not md.ib.has_atomics:
        ib_say(text, "atomics: none")
    elif md.check.atomic:
        ib_say(text, "atomics: also through windows; not atomic against this host's own stores")
    else:
        ib_say(text, "atomics: by the direct key only")
    ib_explain_fork(text)


cdef void explain_derived(const md_t *md, const ucxm_memh_t *memh, ib_text_t *text) noexcept nogil:
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef char line[256]
    if own.ep == NULL:
        ib_say(text, "one memory window of type 1: any connection to this domain may use it")
    else:
        snprintf(line, sizeof(line),
                 "one memory window of type 2 of queue pair 0x%x: no other may use it",
                 ib_ep_qpn(own.ep))
        ib_say(text, line)
    if own.slot[0].live:
        snprintf(line, sizeof(line), "key 0x%x; ibv_dealloc_mw ends it", own.slot[0].value)
        ib_say(text, line)
    else:
        ib_say(text, "no key yet: the first pack allocates and binds a window")
    explain_check(md, text)


cdef void explain_adopted(const md_t *md, const ucxm_memh_t *memh, ib_text_t *text) noexcept nogil:
    """What was found out of it."""
    cdef const ib_reg_t *reg = <const ib_reg_t *>memh.inherited.reg.priv
    if not has_windows(md):
        ib_say(text, "its access bits are not known here")
    elif not reg.access & IBV_ACCESS_MW_BIND:
        ib_say(text, "nothing can be derived: the device refused to bind a window, as it does "
                     "without IBV_ACCESS_MW_BIND")
    elif reg.access & IBV_ACCESS_LOCAL_WRITE:
        ib_say(text, "windows can be bound to it, also for writing: that was tried")
    else:
        ib_say(text, "windows can be bound to it: that was tried, but for reading only")
    if reg.access and memh.inherited.reg.grant & UCXM_MEM_ACCESS_REMOTE_ATOMIC and (
            md.ib.config.atomic_right):
        ib_say(text, "atomics were not tried: the device may want IBV_ACCESS_REMOTE_ATOMIC of it")


cdef void explain_base(const md_t *md, const ucxm_memh_t *memh, ib_text_t *text) noexcept nogil:
    ib_explain_region(memh, text)
    if ib_adopted(memh):
        explain_adopted(md, memh, text)
    elif not (<const ib_reg_t *>memh.inherited.reg.priv).access & IBV_ACCESS_MW_BIND:
        ib_say(text, "nothing can be derived: ibv_reg_dmabuf_mr allows no windows"
               if memh.inherited.reg.dmabuf_fd >= 0 else
               "nothing can be derived: the kernel pins for writing what windows are bound to")
    ib_explain_direct(
        memh,
        "but atomics: this device wants the registration's own atomic right below a window, so "
        "who guesses the direct key may do atomics"
        if md.check.done else
        "but atomics: some devices want the registration's own atomic right below a window, so "
        "who guesses the direct key may do atomics", text)


cdef void window_explain(void *priv, const ucxm_memh_t *memh, char *out,
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
        explain_base(md, memh, &text)
    else:
        ib_say(&text, "no bytes: there is no registration and no key")
    if memh != NULL:
        ib_say(&text, "a software device enforces it" if md.software else "the device enforces it")
