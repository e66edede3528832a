# SPDX-License-Identifier: BSD-3-Clause
# The operations that endpoints carry.

cdef extern from "poll.h" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *fds, unsigned long count, int timeout)
    const short POLLIN

cdef enum:
    SPIN_NS = 1000000       # busy polling before the thread sleeps


cdef struct transfer_t:
    ucxm_op_t op       # first: what the backend sees
    md_t *md
    uint32_t refs      # the user and the device
    uint32_t done
    ucxm_status_t status
    reg_t *local           # of the local memory, counted in its inflight: it stays meanwhile
    ucxm_memh_t *borrowed  # a registration for this transfer alone
    bint has_buffer
    Py_buffer buffer
    ucxm_transfer_t *user  # an embedder's, who is told when it is done


cdef ucxm_memh_t *ep_bound_leaf(ep_t *ep) noexcept nogil:
    """A live handle bound to the endpoint that has no live children, with a reference."""
    cdef md_t *md = ep.md
    cdef ucxm_memh_t *memh
    spin_lock(&md.tree_lock)
    memh = md.bases if ep.bound != 0 else NULL
    while memh != NULL:
        if books_of(memh).children != NULL:
            memh = books_of(memh).children
            continue
        if ucxm_memh_own(memh).ep == &ep.pub:
            memh_get(memh)
            break
        while memh != NULL and books_of(memh).next == NULL:
            memh = memh.id.parent
        if memh != NULL:
            memh = books_of(memh).next
    spin_unlock(&md.tree_lock)
    return memh


cdef transfer_t *transfer_alloc(md_t *md) noexcept nogil:
    """One that its user alone has.  Field by field: most of it is room for an error."""
    cdef transfer_t *transfer = <transfer_t *>mem_alloc(sizeof(transfer_t))
    cdef ucxm_op_t *op
    if transfer == NULL:
        return NULL
    transfer.md = md
    transfer.refs = 1
    transfer.done = 0
    transfer.status = UCXM_INPROGRESS
    transfer.local = NULL
    transfer.borrowed = NULL
    transfer.has_buffer = False
    transfer.user = NULL
    op = &transfer.op
    op.lkey = 0
    op.has_lkey = 0
    op.remote_address = 0
    op.local = NULL
    op.length = 0
    op.operand = 0
    op.compare = 0
    op.result = 0
    op.bytes_done = 0
    op.rkey = NULL
    op.ep = NULL
    error_clear(&op.error)
    op.complete = transfer_complete
    memset(op.scratch, 0, sizeof(op.scratch))
    op.local_stream = 0
    return transfer


cdef void transfer_release_buffer(transfer_t *transfer) noexcept with gil:
    transfer.has_buffer = False
    PyBuffer_Release(&transfer.buffer)


cdef void transfer_put(transfer_t *transfer) noexcept nogil:
    # The only one who has it need not tell other processors.
    if load32(&transfer.refs) != 1 and sub32(&transfer.refs, 1) != 0:
        return
    if transfer.has_buffer and python_lives():
        transfer_release_buffer(transfer)
    mem_free(transfer)


cdef ucxm_status_t transfer_use(transfer_t *transfer, ucxm_memh_t *memh) noexcept nogil:
    """Count the transfer as a user of the local handle's memory, or find it closed."""
    cdef md_t *md = transfer.md
    cdef ucxm_status_t status = memh_check(memh)
    if status != UCXM_OK:
        return status
    spin_lock(&md.tree_lock)
    status = memh_check(memh)
    if status == UCXM_OK:
        add32(&reg_of(memh).inflight, 1)
    spin_unlock(&md.tree_lock)
    if status != UCXM_OK:
        return status
    transfer.local = reg_of(memh)
    transfer.op.lkey = memh.inherited.lkey
    transfer.op.has_lkey = 1
    return UCXM_OK


cdef void transfer_unuse(transfer_t *transfer) noexcept nogil:
    """Let go of the rkey, the local memory, and a registration made for this transfer alone."""
    cdef ucxm_memh_t *memh = transfer.borrowed
    cdef reg_t *reg = transfer.local
    if transfer.op.rkey != NULL:
        rkey_put(<rkey_t *>transfer.op.rkey)
        transfer.op.rkey = NULL
    if reg != NULL:
        transfer.local = NULL
        sub32(&reg.inflight, 1)
    if memh != NULL:
        transfer.borrowed = NULL
        memh_drop(memh)


cdef ucxm_status_t transfer_borrow(transfer_t *transfer, uint64_t rights,
                                   ucxm_error_t *error) noexcept nogil:
    """Register the caller's plain buffer for as long as the transfer lasts."""
    cdef reg_t *reg = reg_alloc(transfer.md, NULL)
    cdef ucxm_status_t status
    if reg == NULL:
        return UCXM_ERR_NO_MEMORY
    if transfer.md.attr.max_reg and transfer.op.length > transfer.md.attr.max_reg:
        error_text(error, "longer than what the domain registers at once: register it in parts")
        reg_free(reg)
        return UCXM_ERR_EXCEEDS_LIMIT
    reg.pub.address = <uint64_t>transfer.op.local
    reg.pub.length = transfer.op.length
    reg.pub.flags = rights
    reg.pub.grant = rights
    reg.pub.direct_rights = rights
    status = mem_reg(transfer.md, reg, &transfer.borrowed, error)
    if status == UCXM_OK:
        status = transfer_use(transfer, transfer.borrowed)
    return status


cdef void transfer_tell(transfer_t *transfer) noexcept nogil:
    """Tell the embedder, if it is his; from then on his memory is his own again."""
    cdef ucxm_transfer_t *user = transfer.user
    cdef ucxm_completion_t *comp
    if user == NULL:
        return
    transfer.user = NULL
    user.result = transfer.op.result
    user.bytes_done = transfer.op.bytes_done
    error_copy(&user.error, &transfer.op.error, transfer.status)
    comp = &user.comp if user.comp.func != NULL else NULL
    store32(<uint32_t *>&user.status, <uint32_t>transfer.status)
    if comp != NULL:
        comp.func(comp, transfer.status)


cdef ucxm_status_t transfer_local_check(transfer_t *transfer, ucxm_memh_t *memh,
                                        ucxm_error_t *error) noexcept nogil:
    """Does the local handle cover what is moved, and allow it?"""
    cdef const ucxm_memh_own_t *own = ucxm_memh_own(memh)
    if md_of(memh) != transfer.md:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "a local handle of another domain")
    if not own.grant & (UCXM_MEM_ACCESS_LOCAL_WRITE if transfer.op.kind == UCXM_OP_GET
                        else UCXM_MEM_ACCESS_LOCAL_READ):
        return refuse(error, UCXM_ERR_ACCESS, "the local handle does not give this right")
    if not inside(<uint64_t>transfer.op.local, transfer.op.length, own.address, own.length):
        return refuse(error, UCXM_ERR_RANGE, "outside the local handle's range")
    return UCXM_OK


cdef void transfer_complete(ucxm_op_t *op, ucxm_status_t status) noexcept nogil:
    cdef transfer_t *transfer = <transfer_t *>op
    transfer_unuse(transfer)
    transfer.status = status
    store32(&transfer.done, 1)
    transfer_tell(transfer)
    transfer_put(transfer)


cdef ucxm_status_t transfer_check(ep_t *ep, rkey_t *rkey, ucxm_op_kind_t kind, uint64_t address,
                                  uint64_t length, ucxm_error_t *error) noexcept nogil:
    """What a well-behaved peer finds out without asking the device (and losing its connection)."""
    cdef md_t *md = ep.md
    cdef ucxm_status_t status = ep_check(ep)
    cdef uint64_t right
    if status != UCXM_OK:
        return status
    status = rkey_check(rkey)
    if status != UCXM_OK:
        return status
    if rkey.md != md:
        error_text(error, "the rkey belongs to another domain than the endpoint")
        return UCXM_ERR_INVALID_PARAM
    if ep.peer.pid != 0 and rkey.pub.info.owner.pid != 0 and (
            memcmp(&ep.peer, &rkey.pub.info.owner, sizeof(ep.peer)) != 0):
        # That process may have died, and its successor's device given the same value again.
        error_text(error, "the key's owner is not the process that the endpoint is connected to")
        return UCXM_ERR_STALE_KEY
    if kind == UCXM_OP_GET:
        right = UCXM_MEM_ACCESS_REMOTE_GET
    elif kind == UCXM_OP_PUT:
        right = UCXM_MEM_ACCESS_REMOTE_PUT
    else:
        right = UCXM_MEM_ACCESS_REMOTE_ATOMIC
        if not md.attr.flags & UCXM_MD_FLAG_ATOMIC:
            error_text(error, "this domain has no atomics")
            return UCXM_ERR_UNSUPPORTED
        if address % 8:
            error_text(error, "atomics want an address aligned to 8 bytes")
            return UCXM_ERR_INVALID_PARAM
    if not inside(address, length, rkey.pub.info.address, rkey.pub.info.length):
        error_text(error, "outside the key's range")
        return UCXM_ERR_RANGE
    if not rkey.pub.info.rights & right:
        error_text(error, "the key does not give this right")
        return UCXM_ERR_ACCESS
    return UCXM_OK


cdef ucxm_status_t transfer_post(transfer_t *transfer, ep_t *ep,
                                 ucxm_error_t *error) noexcept nogil:
    """Hand a checked and filled transfer to the device.

    OK: it has been taken, and may have completed.  An error: not taken; NO_RESOURCE wants progress
    and another try.  An access of no bytes touches nothing and needs no device.  It does not hold
    the endpoint: closing that completes it first, and completing it does not look at that.
    """
    cdef md_t *md = transfer.md
    cdef ucxm_status_t status = ep_enter(ep)
    cdef uint32_t state
    if status != UCXM_OK:
        return status
    state = md.ep_ops.ep_state(md.priv, &ep.pub)
    if transfer.op.length == 0:
        transfer.status = UCXM_OK
        store32(&transfer.done, 1)
    elif state == UCXM_EP_ERROR:
        error_text(error, "the connection failed earlier: reset both ends")
        status = UCXM_ERR_FLUSHED
    elif state != UCXM_EP_CONNECTED:
        error_text(error, "the endpoint is not connected")
        status = UCXM_ERR_INVALID_PARAM
    elif (md.attr.flags & UCXM_MD_FLAG_NEED_MEMH and not transfer.op.has_lkey and
          transfer.op.kind <= UCXM_OP_PUT and transfer.op.length > md.attr.bounce_size):
        status = transfer_borrow(
            transfer, UCXM_MEM_ACCESS_LOCAL_WRITE | UCXM_MEM_ACCESS_LOCAL_READ
            if transfer.op.kind == UCXM_OP_GET else UCXM_MEM_ACCESS_LOCAL_READ, error)
    if status == UCXM_OK and not transfer.done:
        transfer.op.ep = &ep.pub
        transfer.refs = 2  # nobody but the user knew it so far; the device comes in
        fetch_add64(&md.counters.transfers, 1)
        status = md.ep_ops.ep_post(md.priv, &ep.pub, &transfer.op, error)
        if status != UCXM_OK:
            transfer.refs = 1
    ep_leave(ep)
    return status


cdef void transfer_wait(transfer_t *transfer, uint64_t until) noexcept nogil:
    """Progress for a slice of time, or until it is done: first busily, then asleep if possible."""
    cdef md_t *md = transfer.md
    cdef uint64_t start = now_ns()
    cdef uint64_t now = start
    cdef pollfd event
    cdef ucxm_error_t error
    while not load32(&transfer.done):
        if md_progress(md) != 0:
            continue
        now = now_ns()
        if now >= until or now - start > SLICE_NS:
            return
        if now - start < SPIN_NS or not md.attr.flags & UCXM_MD_FLAG_EVENT_FD:
            sched_yield()
            continue
        if md_enter(md) != UCXM_OK:
            return
        error_clear(&error)
        event.fd = -1
        event.events = POLLIN
        event.revents = 0
        if md.ops.event_fd(md.priv, &event.fd, &error) == UCXM_OK and (
                md.ops.event_arm(md.priv, &error) == UCXM_OK):
            md_leave(md)
            if not load32(&transfer.done):
                poll(&event, 1, 5)
        else:
            md_leave(md)
