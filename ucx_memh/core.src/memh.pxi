# SPDX-License-Identifier: BSD-3-Clause
# Handles: allocate, clone, link, release.  Base and derived are one type; what differs between
# them is decided here, by init, and when their native state goes (revoke.pxi).

cdef void init_books(ucxm_memh_t *memh, md_t *md, slab_t *slab,
                     const plan_t *plan) noexcept nogil:
    """One that its maker is still at work on."""
    cdef books_t *books = books_of(memh)
    books.device_done.func = NULL
    books.children = NULL
    books.plan = plan
    books.epoch = md.epoch
    books.component_id = md.component_id
    books.refs = 1
    books.live_children = 0
    zero64(books.packed)
    books.user_done = NULL
    books.pending = AT_WORK
    books.closing = 0
    books.failed = UCXM_OK
    books.touched = 0
    books.object = NULL
    books.left = NULL
    books.right = NULL
    books.reach = 0
    books.slab = slab
    books.aligned = NULL


cdef void init_identity(ucxm_memh_t *memh, md_t *md, ucxm_memh_t *parent,
                        const layout_t *layout) noexcept nogil:
    cdef ucxm_memh_identity_t *identity = &memh.id
    identity.md = <ucxm_md_t *>md
    identity.parent = parent
    identity.key_id = 0  # given when it is linked
    identity.state = UCXM_MEMH_LIVE
    identity.inherited_tail_offset = sizeof(ucxm_memh_t)
    identity.own_offset = <uint32_t>layout.own_offset
    identity.own_tail_offset = <uint32_t>(layout.own_offset + sizeof(ucxm_memh_own_t))


cdef void init_inherited(ucxm_memh_t *memh, reg_t *reg, size_t tail_size) noexcept nogil:
    memh.inherited.reg = &reg.pub
    memh.inherited.flags = reg.pub.flags
    # The backend's answers, as the slot's value.
    memh.inherited.lkey = 0
    memh.inherited.mem_type = 0
    memset(ucxm_memh_inherited_tail(memh), 0, tail_size)


cdef void init_own(ucxm_memh_t *memh, uint64_t address, uint64_t length, uint64_t rights,
                   uint64_t grant, ucxm_ep_t *ep) noexcept nogil:
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    own.address = address
    own.length = length
    own.rights = rights
    own.grant = grant
    own.ep = ep
    memset(own.slot, 0, sizeof(own.slot))


cdef ucxm_memh_t *memh_base(md_t *md, reg_t *reg, uint64_t rights) noexcept nogil:
    """The base of a Registration, which may still be to be made; lies in the room behind that.

    Not linked yet: the caller may still throw both away with reg_free.
    """
    cdef const layout_t *layout = &md.layout
    cdef books_t *books = <books_t *>(<char *>reg + reg_room(md))
    cdef ucxm_memh_t *memh = <ucxm_memh_t *>(books + 1)
    init_books(memh, md, NULL, &BASE_PLAN)
    init_identity(memh, md, NULL, layout)
    init_inherited(memh, reg, layout.own_offset - sizeof(ucxm_memh_t))
    init_own(memh, reg.pub.address, reg.pub.length, rights, reg.pub.grant, NULL)
    return memh


cdef inline ucxm_memh_t *memh_room(const md_t *md, slab_t *slab) noexcept nogil:
    """For a derived handle; nothing of it is written yet."""
    cdef books_t *books = <books_t *>room_take(slab, md.layout.size)
    return NULL if books == NULL else <ucxm_memh_t *>(books + 1)


cdef inline void memh_clone(md_t *md, ucxm_memh_t *parent, ucxm_memh_t *memh, slab_t *slab,
                            uint64_t address, uint64_t length, uint64_t grant,
                            ucxm_ep_t *ep) noexcept nogil:
    """Write a derived handle: one memcpy of the inherited span, init of the rest.

    Not linked yet, and its own tail is still to be written.
    """
    cdef const layout_t *layout = &md.layout
    init_books(memh, md, slab, &DERIVED_PLAN)
    init_identity(memh, md, parent, layout)
    memcpy(<char *>memh + layout.copy_offset, <char *>parent + layout.copy_offset,
           layout.copy_size)
    init_own(memh, address, length, grant, grant, ep)


cdef inline void memh_free(ucxm_memh_t *memh) noexcept nogil:
    room_free(books_of(memh).slab, books_of(memh))


cdef inline void memh_link(md_t *md, ucxm_memh_t *memh) noexcept nogil:
    """Put a live handle under its parent or among the bases; it gets its key id.  tree_lock is
    held."""
    cdef books_t *books = books_of(memh)
    cdef ucxm_memh_t **head
    if memh.id.parent != NULL:
        head = &books_of(memh.id.parent).children
        bump32(&books_of(memh.id.parent).live_children, 1)
        bump32(&md.live_derived, 1)
    else:
        head = &md.bases
        bump32(&md.live_bases, 1)
    memh.id.key_id = md.next_key_id
    md.next_key_id += 1
    books.prev = NULL
    books.next = head[0]
    if head[0] != NULL:
        books_of(head[0]).prev = memh
    head[0] = memh
    if md.indexed:
        index_insert(index_root(md, memh), memh)


cdef inline void memh_unlink(md_t *md, ucxm_memh_t *memh) noexcept nogil:
    """Its keys are gone.  tree_lock is held."""
    cdef books_t *books = books_of(memh)
    cdef ucxm_memh_t **head
    if memh.id.parent != NULL:
        head = &books_of(memh.id.parent).children
        bump32(&books_of(memh.id.parent).live_children, <uint32_t>-1)
        bump32(&md.live_derived, <uint32_t>-1)
    else:
        head = &md.bases
        bump32(&md.live_bases, <uint32_t>-1)
    if books.prev != NULL:
        books_of(books.prev).next = books.next
    else:
        head[0] = books.next
    if books.next != NULL:
        books_of(books.next).prev = books.prev
    books.next = NULL
    books.prev = NULL
    if md.indexed:
        index_erase(index_root(md, memh), memh)


cdef inline void memh_get(ucxm_memh_t *memh) noexcept nogil:
    add32(&books_of(memh).refs, 1)


cdef void memh_put(ucxm_memh_t *memh) noexcept nogil:
    """Drop a reference; the last one frees a handle whose native state is gone already.

    Registration and domain are held by the base alone, and the base by what is derived from it.
    """
    cdef ucxm_memh_t *parent
    cdef ucxm_memh_own_t *own
    cdef books_t *books
    cdef md_t *md
    cdef int i
    while memh != NULL:
        books = books_of(memh)
        # The only one who has it need not tell other processors: nobody can find it any more.
        if load32(&books.refs) != 1 and sub32(&books.refs, 1) != 0:
            return
        own = ucxm_memh_own(memh)
        md = md_of(memh)
        parent = memh.id.parent
        if books.touched:
            for i in range(8):
                mem_free(books.packed[i])
        if own.ep != NULL:
            ep_put(<ep_t *>own.ep)
        if parent == NULL:
            reg_free(reg_of(memh))
            md_put(md)
            return
        if not books.closing & HOLDS_PARENT:
            parent = NULL
        memh_free(memh)
        memh = parent  # a loop: chains of derived handles may be long


cdef inline void memh_settle(md_t *md, ucxm_memh_t *memh, bint closing) noexcept nogil:
    """Its keys are gone, and with `closing` all it had: REVOKED or CLOSED.  tree_lock is held.

    Until now its parent could not go, because of it.  From now on one that is closed and that only
    its user has needs no parent any more; any other one holds it.
    """
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef books_t *books = books_of(memh)
    if memh.id.parent != NULL:
        bump64(&md.counters.revoke, 1)
        if not closing or load32(&books.refs) != 1:
            memh_get(memh.id.parent)
            books.closing |= HOLDS_PARENT
    memh_unlink(md, memh)
    if own.ep != NULL:
        (<ep_t *>own.ep).bound -= 1
    store32(&memh.id.state, UCXM_MEMH_CLOSED if closing else UCXM_MEMH_REVOKED)


cdef inline ucxm_status_t memh_check(ucxm_memh_t *memh) noexcept nogil:
    """Is it live, in this process?"""
    cdef uint32_t state
    if books_of(memh).epoch != fork_epoch:
        return UCXM_ERR_FORKED
    state = load32(&memh.id.state)
    if state == UCXM_MEMH_LIVE:
        return UCXM_OK
    return UCXM_ERR_CLOSED if state == UCXM_MEMH_CLOSED else UCXM_ERR_REVOKED


cdef void memh_undo(md_t *md, ucxm_memh_t *memh) noexcept nogil:
    """The backend would not make it: as if it had never been linked.  A forced close of the domain
    may have found it meanwhile, and waits for it."""
    spin_lock(&md.tree_lock)
    memh_unlink(md, memh)
    if memh.id.parent != NULL:
        bump64(&md.counters.derive, <uint64_t>-1)
    if ucxm_memh_own(memh).ep != NULL:
        (<ep_t *>ucxm_memh_own(memh).ep).bound -= 1
    store32(&memh.id.state, UCXM_MEMH_CLOSED)
    store32(&books_of(memh).pending, 0)
    spin_unlock(&md.tree_lock)
    memh_put(memh)


cdef void memh_place(md_t *md, ucxm_memh_t *memh, uint64_t address,
                     uint64_t length) noexcept nogil:
    """An adopted registration tells its range when it has been taken."""
    spin_lock(&md.tree_lock)
    if md.indexed:
        index_erase(index_root(md, memh), memh)
    ucxm_memh_own(memh).address = address
    ucxm_memh_own(memh).length = length
    if md.indexed:
        index_insert(index_root(md, memh), memh)
    spin_unlock(&md.tree_lock)


cdef void index_below(md_t *md, ucxm_memh_t *memh) noexcept nogil:
    """Into the index with these siblings and all that was derived from them."""
    while memh != NULL:
        index_insert(index_root(md, memh), memh)
        if books_of(memh).children != NULL:
            memh = books_of(memh).children
            continue
        while memh != NULL and books_of(memh).next == NULL:
            memh = memh.id.parent
        if memh != NULL:
            memh = books_of(memh).next


cdef size_t md_find(md_t *md, uint64_t address, uint64_t length, uint32_t kinds,
                    ucxm_memh_t **found, size_t room, bint hold) noexcept nogil:
    """Live handles that cover address .. +length, bases before derived ones, each by address.

    As many as there is room for, with a reference if `hold`; returns how many there are.
    """
    cdef size_t count = 0
    cdef size_t i
    if length > UINT64_MAX - address:
        return 0
    spin_lock(&md.tree_lock)
    if not md.indexed:
        md.indexed = 1
        index_below(md, md.bases)
    for i in range(2):
        if kinds & <uint32_t>1 << i:
            index_cover(md.index[i], address, length, found, room, &count)
    for i in range(min(count, room)):
        if hold:
            memh_get(found[i])
    spin_unlock(&md.tree_lock)
    return count


cdef inline ucxm_memh_t *reg_link(md_t *md, reg_t *reg) noexcept nogil:
    """A base of the prepared Registration, which nobody can end yet.  tree_lock is held, and the
    caller takes the reference to the domain."""
    cdef uint64_t rights = reg.pub.grant
    cdef ucxm_memh_t *memh
    if reg.pub.flags & UCXM_MEM_DERIVED_ONLY:
        rights &= ~UCXM_MEM_ACCESS_REMOTE
    memh = memh_base(md, reg, rights)
    memh_link(md, memh)
    bump64(&md.counters.mem_reg, reg_native(reg))
    return memh


cdef ucxm_status_t reg_settle(md_t *md, ucxm_memh_t *memh, ucxm_memh_t **memh_p,
                              ucxm_error_t *error) noexcept nogil:
    """Register with the device; or what was linked is gone again."""
    cdef reg_t *reg = reg_of(memh)
    cdef ucxm_status_t status = reg_hold(reg, error)
    if status != UCXM_OK:
        memh_undo(md, memh)
        return status
    memh.inherited.lkey = reg.pub.lkey
    memh.inherited.mem_type = reg.pub.mem_type
    if reg.pub.adopt != NULL:
        memh_place(md, memh, reg.pub.address, reg.pub.length)
    ucxm_memh_own(memh).slot[UCXM_SLOT_PLAIN].value = reg.pub.rkey
    md.ops.tail_init(md.priv, memh, ucxm_memh_inherited_tail(memh), ucxm_memh_own_tail(memh))
    store32(&books_of(memh).pending, 0)
    memh_p[0] = memh
    return UCXM_OK


cdef ucxm_status_t mem_reg(md_t *md, reg_t *reg, ucxm_memh_t **memh_p,
                           ucxm_error_t *error) noexcept nogil:
    """Register what the prepared Registration says; takes it over, also on failure.

    The base is linked first, for a domain is not closed over one that is being made.
    """
    cdef ucxm_status_t status = UCXM_ERR_FORKED
    cdef ucxm_memh_t *memh
    memh_p[0] = NULL
    md_orphans(md)
    if md.epoch == fork_epoch:
        status = md_lock_open(md)
    if status != UCXM_OK:
        reg_free(reg)
        return status
    md_get(md)
    memh = reg_link(md, reg)
    spin_unlock(&md.tree_lock)
    return reg_settle(md, memh, memh_p, error)


cdef ucxm_status_t derive_check(ucxm_memh_t *parent, uint64_t grant, ucxm_ep_t **ep_p,
                                ucxm_error_t *error) noexcept nogil:
    """All but the range.  The endpoint of what is derived: `ep_p`, or the parent's for NULL."""
    cdef md_t *md = md_of(parent)
    cdef ucxm_memh_own_t *base = ucxm_memh_own(parent)
    cdef ucxm_ep_t *ep = ep_p[0]
    cdef ucxm_status_t status = memh_check(parent)
    if status != UCXM_OK:
        return status
    if not md.attr.flags & UCXM_MD_FLAG_REG_DERIVED:
        return md.ops.mem_derive(md.priv, parent, parent, error)
    if grant & ~base.grant:
        error_text(error, "derive only narrows: the parent does not have these rights")
        return UCXM_ERR_INVALID_PARAM
    if ep == NULL:
        ep_p[0] = ep = base.ep
    elif base.ep != NULL and base.ep != ep:
        error_text(error, "the parent is bound to another endpoint")
        return UCXM_ERR_INVALID_PARAM
    if ep != NULL:
        if (<ep_t *>ep).md != md:
            error_text(error, "the endpoint belongs to another domain")
            return UCXM_ERR_INVALID_PARAM
        if not md.attr.flags & UCXM_MD_FLAG_DERIVE_ENDPOINT:
            error_text(error, "this domain does not bind keys to endpoints")
            return UCXM_ERR_UNSUPPORTED
        status = ep_check(<ep_t *>ep)
        if status != UCXM_OK:
            error_text(error, "the endpoint is closed")
    return status


cdef inline ucxm_status_t derive_check_range(const ucxm_memh_t *parent, uint64_t offset,
                                             uint64_t length, ucxm_error_t *error) noexcept nogil:
    cdef const ucxm_memh_own_t *base = ucxm_memh_own(parent)
    if offset > base.length or length > base.length - offset:
        error_text(error, "derive only narrows: outside the parent's range")
        return UCXM_ERR_INVALID_PARAM
    return UCXM_OK


cdef inline ucxm_status_t derive_lock(ucxm_memh_t *parent, ucxm_ep_t *ep) noexcept nogil:
    """Take the tree_lock of a parent and an endpoint that are still there.

    Whoever closed one of them meanwhile has won; from here on it cannot go.
    """
    cdef md_t *md = md_of(parent)
    cdef ucxm_status_t status
    spin_lock(&md.tree_lock)
    status = memh_check(parent)
    if status == UCXM_OK and ep != NULL:
        status = ep_check(<ep_t *>ep)
    if status != UCXM_OK:
        spin_unlock(&md.tree_lock)
    return status


cdef inline void derive_link(ucxm_memh_t *parent, ucxm_memh_t *memh, slab_t *slab, uint64_t offset,
                             uint64_t length, uint64_t grant, ucxm_ep_t *ep) noexcept nogil:
    """Write and link what was checked, in its room.  tree_lock is held."""
    cdef md_t *md = md_of(parent)
    memh_clone(md, parent, memh, slab, ucxm_memh_own(parent).address + offset, length, grant, ep)
    memh_link(md, memh)
    bump64(&md.counters.derive, 1)
    if ep != NULL:
        (<ep_t *>ep).bound += 1
        add32(&(<ep_t *>ep).refs, 1)


cdef inline ucxm_status_t derive_settle(ucxm_memh_t *parent, ucxm_memh_t *memh,
                                        ucxm_memh_t **memh_p,
                                        ucxm_error_t *error) noexcept nogil:
    """The backend's part; or what was linked is gone again."""
    cdef md_t *md = md_of(parent)
    cdef ucxm_status_t status
    memh_p[0] = NULL
    if md.ops.tail_init != default_tail_init:
        md.ops.tail_init(md.priv, memh, NULL, ucxm_memh_own_tail(memh))
    status = md.ops.mem_derive(md.priv, parent, memh, error)
    if status != UCXM_OK:
        memh_undo(md, memh)
        return status
    store32(&books_of(memh).pending, 0)
    memh_p[0] = memh
    return UCXM_OK


cdef ucxm_status_t mem_derive(ucxm_memh_t *parent, uint64_t offset, uint64_t length,
                              uint64_t grant, ucxm_ep_t *ep, ucxm_memh_t **memh_p,
                              ucxm_error_t *error) noexcept nogil:
    """Clone, narrowed to offset .. +length of the parent and to `grant`.

    No command is sent and nothing of the parent but the list of its children is written.
    """
    cdef md_t *md = md_of(parent)
    cdef ucxm_memh_t *memh
    cdef ucxm_status_t status
    memh_p[0] = NULL
    status = derive_check(parent, grant, &ep, error)
    if status == UCXM_OK:
        status = derive_check_range(parent, offset, length, error)
    if status != UCXM_OK:
        return status
    memh = memh_room(md, NULL)
    if memh == NULL:
        return UCXM_ERR_NO_MEMORY
    # Taking a lock waits for all that was written before: so the handle is written under it.
    status = derive_lock(parent, ep)
    if status != UCXM_OK:
        mem_free(books_of(memh))
        return status
    derive_link(parent, memh, NULL, offset, length, grant, ep)
    spin_unlock(&md.tree_lock)
    return derive_settle(parent, memh, memh_p, error)
