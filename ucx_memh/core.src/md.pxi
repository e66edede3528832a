# SPDX-License-Identifier: BSD-3-Clause
# The opened memory domain.

cdef enum:
    MD_OPEN = 0
    MD_CLOSING = 1
    MD_CLOSED = 2
    PARKED_MAX = 8
    STRIPES = 64         # locks of the rkey table
    BUCKETS = 4096
    RKEYS_MAX = 65536    # more than so many known keys: each user gets its own

cdef struct md_t
cdef struct ep_t
cdef struct rkey_t

cdef struct stripe_t:
    spin_t lock
    uint64_t hits
    uint64_t pad[6]      # one cache line each

cdef struct counters_t:
    uint64_t mem_reg
    uint64_t mem_dereg
    uint64_t derive
    uint64_t revoke
    uint64_t key_create
    uint64_t key_destroy
    uint64_t parked
    uint64_t transfers
    uint64_t rkey_misses

# A native key that must not be handed out: its value was revoked lately.
cdef struct parked_t:
    ucxm_completion_t done   # first
    md_t *md
    ucxm_registration_t *reg
    ucxm_key_slot_t slot
    uint32_t state           # PARKED_*
    uint64_t born            # a placeholder's: revocations before it

# Keys that keep indices busy whose values were all revoked lately, the oldest first.
cdef struct placeholders_t:
    parked_t *ring
    uint32_t size
    uint32_t oldest
    uint32_t count

# An object of the user's that went, and what tears it down.
cdef struct dropped_t:
    dropped_t *next
    void *thing
    void (*drop)(void *thing) noexcept nogil

cdef struct md_t:
    ucxm_md_ops_t ops
    ucxm_ep_ops_t ep_ops
    ucxm_md_attr_t attr
    void *priv
    uint32_t epoch           # fork generation in which it was opened
    PyObject *holder         # what ucxm_md_open keeps for its caller
    uint32_t refs            # the Python object, handles, rkeys, endpoints
    uint32_t state
    uint32_t users           # threads inside the backend
    uint32_t component_id
    layout_t layout          # of its handles
    uint64_t next_key_id
    spin_t tree_lock         # links, states and counts of handles and endpoints
    uint32_t orphans         # handles whose users are gone, and which could not go with them
    uint32_t live_bases
    uint32_t live_derived
    uint32_t live_rkeys
    uint32_t live_endpoints
    ucxm_memh_t *bases
    ucxm_memh_t *index[2]    # of bases, of derived handles
    uint32_t indexed         # somebody has searched
    ep_t *endpoints
    pthread_mutex_t key_lock  # making and destroying native keys; quarantine; parked
    quarantine_t quarantine
    uint32_t parked_count
    parked_t parked[PARKED_MAX]
    placeholders_t placeholders
    counters_t counters
    rkey_t **buckets
    dropped_t *dropped       # of a backend written in Python
    rkey_t *private_rkeys    # not shared: RAW ones, and those over RKEYS_MAX
    stripe_t stripes[STRIPES]


cdef inline md_t *md_of(const ucxm_memh_t *memh) noexcept nogil:
    return <md_t *>memh.id.md


cdef inline ucxm_status_t md_enter(md_t *md) noexcept nogil:
    """Keep the backend alive for a call; md_leave ends it."""
    cdef uint32_t state
    if md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    while True:
        add32(&md.users, 1)
        state = load32_sc(&md.state)
        if state == MD_OPEN:
            return UCXM_OK
        sub32(&md.users, 1)
        if state == MD_CLOSED:
            return UCXM_ERR_CLOSED
        sched_yield()  # a close that is under way may still turn out to be refused


cdef inline ucxm_status_t md_lock_open(md_t *md) noexcept nogil:
    """Take the tree_lock of an open domain; who closes it looks at the tree under that lock."""
    cdef uint32_t state
    while True:
        spin_lock(&md.tree_lock)
        state = load32(&md.state)
        if state == MD_OPEN:
            return UCXM_OK
        spin_unlock(&md.tree_lock)
        if state == MD_CLOSED:
            return UCXM_ERR_CLOSED
        sched_yield()


cdef inline void md_leave(md_t *md) noexcept nogil:
    sub32(&md.users, 1)


cdef inline void md_get(md_t *md) noexcept nogil:
    add32(&md.refs, 1)


cdef void md_put(md_t *md) noexcept nogil:
    if sub32(&md.refs, 1) != 0:
        return
    quarantine_free(&md.quarantine)
    mem_free(md.placeholders.ring)
    mem_free(md.buckets)
    pthread_mutex_destroy(&md.key_lock)
    mem_free(md)


cdef void md_drop(md_t *md, void *thing, void (*drop)(void *thing) noexcept nogil) noexcept nogil:
    """A Python object goes.  That may be a garbage collection's doing, in the middle of a backend
    that is written in Python, with its locks or ours held: then it waits for the next call."""
    cdef dropped_t *dropped
    if md.epoch != fork_epoch:
        return  # the parent's; nothing of it is freed here
    if not md.attr.python or load32(&md.state) == MD_CLOSED:
        drop(thing)
        return
    dropped = <dropped_t *>mem_alloc(sizeof(dropped_t))
    if dropped == NULL:
        return  # the close of the Md finds it
    dropped.thing = thing
    dropped.drop = drop
    push_ptr(<void **>&md.dropped, <void **>&dropped.next, dropped)


cdef void md_tidy(md_t *md) noexcept nogil:
    """Tear down what was dropped.  No lock is held, nor the GIL."""
    cdef dropped_t *dropped
    cdef dropped_t *oldest = NULL
    if load_ptr(<void **>&md.dropped) == NULL:
        return
    dropped = <dropped_t *>swap_ptr(<void **>&md.dropped, NULL)
    while dropped != NULL:  # derived handles went before their bases
        next = dropped.next
        dropped.next = oldest
        oldest = dropped
        dropped = next
    while oldest != NULL:
        next = oldest.next
        oldest.drop(oldest.thing)
        mem_free(oldest)
        oldest = next


cdef inline void memh_enforcement(md_t *md, const ucxm_memh_t *memh,
                                  ucxm_enforcement_t *cells) noexcept nogil:
    """Who keeps the promises of this handle's keys; the Md has been entered."""
    if md.ops.mem_enforcement == NULL:
        cells[0] = md.attr.enforcement
    else:
        md.ops.mem_enforcement(md.priv, memh, cells)


cdef uint32_t fnv1a(const char *text) noexcept nogil:
    """The 32-bit FNV-1a hash: a component's id in packed keys is that of its name."""
    cdef uint32_t digest = 2166136261
    while text[0] != 0:
        digest = (digest ^ <uint8_t>text[0]) * 16777619
        text += 1
    return digest


cdef unsigned md_progress(md_t *md) noexcept nogil:
    cdef unsigned count
    if md_enter(md) != UCXM_OK:
        return 0
    md_tidy(md)
    count = md.ops.progress(md.priv)
    md_leave(md)
    return count


cdef inline void md_orphans(md_t *md) noexcept nogil:
    """A program that only makes handles and lets go of them makes no progress otherwise, and what
    the device has done with stays."""
    if load32(&md.orphans) != 0:
        md_progress(md)


cdef ucxm_status_t md_event_fd(md_t *md, int *fd, ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status = md_enter(md)
    if status == UCXM_OK:
        status = md.ops.event_fd(md.priv, fd, error)
        md_leave(md)
    return status


cdef ucxm_status_t md_arm(md_t *md, ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status = md_enter(md)
    if status == UCXM_OK:
        status = md.ops.event_arm(md.priv, error)
        md_leave(md)
    return status


cdef void md_count(md_t *md, ucxm_md_stats_t *stats) noexcept nogil:
    """What the core has counted.  Without a lock: the numbers need not be of one moment."""
    cdef int i
    memset(stats, 0, sizeof(stats[0]))
    for i in range(STRIPES):
        stats.rkey_hits += load64(&md.stripes[i].hits)
    stats.live_bases = load32(&md.live_bases)
    stats.live_derived = load32(&md.live_derived)
    stats.live_rkeys = load32(&md.live_rkeys)
    stats.live_endpoints = load32(&md.live_endpoints)
    stats.mem_reg = load64(&md.counters.mem_reg)
    stats.mem_dereg = load64(&md.counters.mem_dereg)
    stats.derive = load64(&md.counters.derive)
    stats.revoke = load64(&md.counters.revoke)
    stats.key_create = load64(&md.counters.key_create)
    stats.key_destroy = load64(&md.counters.key_destroy)
    stats.keys_parked = load64(&md.counters.parked)
    stats.keys_quarantined = load32(&md.quarantine.count)
    stats.rkey_misses = load64(&md.counters.rkey_misses)
    stats.transfers = load64(&md.counters.transfers)
