# SPDX-License-Identifier: BSD-3-Clause
# Work requests: slots, bounce buffers, posting an operation part by part.

cdef ucxm_status_t bounce_make(ib_md_t *md, ucxm_error_t *error) noexcept nogil:
    """Buffers for small transfers, then one word per work request for results of atomics."""
    cdef size_t size = IB_BOUNCE_COUNT * IB_BOUNCE_SIZE + md.wr_count * sizeof(uint64_t)
    cdef uint8_t *bytes = <uint8_t *>calloc(1, size)
    cdef uint32_t *stack = <uint32_t *>calloc(IB_BOUNCE_COUNT, sizeof(uint32_t))
    cdef ibv_mr *mr = NULL
    cdef uint32_t i
    if bytes != NULL and stack != NULL:
        ib_count(&md.counts.reg_mr, 1)
        mr = md.verbs.reg_mr(md.pd, bytes, size, IBV_ACCESS_LOCAL_WRITE)
    if mr == NULL:
        free(bytes)
        free(stack)
        return reg_failed(error, errno, "ibv_reg_mr of the bounce buffers")
    for i in range(IB_BOUNCE_COUNT):
        stack[i] = i
    md.bounce_mr = mr
    md.bounce = bytes
    md.bounce_free = stack
    md.bounce_left = IB_BOUNCE_COUNT
    return UCXM_OK


cdef inline uint8_t *bounce_at(ib_md_t *md, int32_t index) noexcept nogil:
    return md.bounce + <size_t>index * IB_BOUNCE_SIZE


cdef inline uint64_t *result_at(ib_md_t *md, uint32_t index) noexcept nogil:
    return <uint64_t *>(md.bounce + IB_BOUNCE_COUNT * IB_BOUNCE_SIZE) + index


cdef ib_wr_t *wr_take(ib_md_t *md, ib_ep_t *ep, ucxm_op_t *op, bint bounce) noexcept nogil:
    """A free work request, counted; NULL: the queue is full."""
    cdef ib_wr_t *wr = NULL
    pthread_mutex_lock(&md.lock)
    if ep.posted < md.queue_depth and md.wr_free < md.wr_count and (
            not bounce or md.bounce_left != 0):
        wr = &md.wrs[md.wr_free]
        md.wr_free = wr.next
        wr.op = op
        wr.ep = ep
        wr.bounce = -1
        if bounce:
            md.bounce_left -= 1
            wr.bounce = md.bounce_free[md.bounce_left]
        ep.posted += 1
        (<ib_op_t *>op.scratch).pending += 1
    pthread_mutex_unlock(&md.lock)
    return wr


cdef void wr_give(ib_md_t *md, ib_wr_t *wr) noexcept nogil:
    """The lock is held."""
    if wr.bounce >= 0:
        md.bounce_free[md.bounce_left] = wr.bounce
        md.bounce_left += 1
    wr.ep.posted -= 1
    wr.op = NULL
    wr.ep = NULL
    wr.generation += 1
    wr.next = md.wr_free
    md.wr_free = <uint32_t>(wr - md.wrs)


cdef void op_part_done(ib_md_t *md, ucxm_op_t *op) noexcept nogil:
    """One thing less to wait for; the last one makes it finished.  The lock is held."""
    cdef ib_op_t *mine = <ib_op_t *>op.scratch
    mine.pending -= 1
    if mine.pending != 0:
        return
    mine.next = NULL
    if md.done_tail == NULL:
        ib_store_ptr(&md.done_head, op)
    else:
        (<ib_op_t *>md.done_tail.scratch).next = op
    md.done_tail = op


cdef bint op_failed(ucxm_op_t *op, ucxm_status_t status) noexcept nogil:
    """Keep the first failure, but FLUSHED only tells of another one.  The lock is held."""
    cdef ib_op_t *mine = <ib_op_t *>op.scratch
    if mine.status != UCXM_OK and mine.status != UCXM_ERR_FLUSHED:
        return False
    mine.status = status
    return True


cdef void wr_fill(ib_md_t *md, ib_ep_t *ep, ucxm_op_t *op, ib_wr_t *slot, ibv_send_wr *wr,
                  ibv_sge *sge) noexcept nogil:
    """The native work request for the part of `op` that `slot` is for."""
    cdef ib_rkey_t *rkey = <ib_rkey_t *>op.rkey.priv
    cdef uint32_t index = <uint32_t>(slot - md.wrs)
    cdef uint8_t *local = <uint8_t *>op.local + slot.offset
    memset(wr, 0, sizeof(wr[0]))
    wr.wr_id = (<uint64_t>slot.generation << 32) | index
    wr.sg_list = sge
    wr.num_sge = 1
    wr.send_flags = IBV_SEND_SIGNALED
    sge.length = <uint32_t>slot.length
    sge.lkey = md.bounce_mr.lkey
    if op.kind == UCXM_OP_GET or op.kind == UCXM_OP_PUT:
        wr.opcode = IBV_WR_RDMA_READ if op.kind == UCXM_OP_GET else IBV_WR_RDMA_WRITE
        wr.wr.rdma.remote_addr = op.remote_address + slot.offset
        wr.wr.rdma.rkey = rkey.rma
        if slot.bounce >= 0:
            sge.addr = <uint64_t>bounce_at(md, slot.bounce)
            if op.kind == UCXM_OP_PUT:
                memcpy(bounce_at(md, slot.bounce), local, slot.length)
        else:
            sge.addr = <uint64_t>local
            sge.lkey = op.lkey
            if not op.has_lkey:
                wr.send_flags |= IBV_SEND_INLINE
        return
    sge.addr = <uint64_t>result_at(md, index)
    wr.wr.atomic.remote_addr = op.remote_address
    wr.wr.atomic.rkey = rkey.rma if rkey.amo == IB_NO_KEY else rkey.amo
    if op.kind == UCXM_OP_FETCH_ADD:
        wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD
        wr.wr.atomic.compare_add = op.operand
    else:
        wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP
        wr.wr.atomic.compare_add = op.compare
        wr.wr.atomic.swap = op.operand


cdef ucxm_status_t part_post(ib_md_t *md, ib_ep_t *ep, ucxm_op_t *op,
                             ucxm_error_t *error) noexcept nogil:
    """Post the next part of `op`.  The endpoint's lock is held."""
    cdef ib_op_t *mine = <ib_op_t *>op.scratch
    cdef bint rma = op.kind == UCXM_OP_GET or op.kind == UCXM_OP_PUT
    cdef bint bounce = rma and not op.has_lkey and not (
        op.kind == UCXM_OP_PUT and op.length <= ep.max_inline)
    cdef ibv_send_wr wr
    cdef ibv_send_wr *bad = NULL
    cdef ibv_sge sge
    cdef ib_wr_t *slot
    cdef uint64_t length
    cdef int failed

    slot = wr_take(md, ep, op, bounce)
    if slot == NULL:
        return ib_fail(error, UCXM_ERR_NO_RESOURCE, 0, "the send queue is full")
    length = min(op.length - mine.posted, md.max_msg)
    slot.offset = mine.posted
    slot.length = length
    wr_fill(md, ep, op, slot, &wr, &sge)
    mine.posted += length
    ib_count(&md.counts.post_send, 1)
    failed = ibv_post_send(ep.qp, &wr, &bad)
    if failed == 0:
        return UCXM_OK
    pthread_mutex_lock(&md.lock)
    wr_give(md, slot)
    mine.pending -= 1  # never the last: the caller holds one
    mine.posted -= length
    pthread_mutex_unlock(&md.lock)
    if failed in (ENOMEM, EAGAIN):
        return ib_fail(error, UCXM_ERR_NO_RESOURCE, failed, "the send queue is full")
    return ib_fail(error, UCXM_ERR_IO_ERROR, failed, "ibv_post_send failed (errno %d)", failed)


cdef bint op_stopped(ib_md_t *md, ib_ep_t *ep, ucxm_op_t *op) noexcept nogil:
    """Has something failed, so that the rest of `op` need not be posted?"""
    cdef bint stopped
    pthread_mutex_lock(&md.lock)
    if ep.state != UCXM_EP_CONNECTED:
        op_failed(op, UCXM_ERR_FLUSHED)
    stopped = (<ib_op_t *>op.scratch).status != UCXM_OK
    pthread_mutex_unlock(&md.lock)
    return stopped


cdef void parts_continue(ib_md_t *md, ib_ep_t *ep, ucxm_op_t *op) noexcept nogil:
    """Post what fits; the rest follows from progress().  The endpoint's lock is held."""
    cdef ib_op_t *mine = <ib_op_t *>op.scratch
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    while mine.posted < op.length and not op_stopped(md, ep, op):
        memset(&error, 0, sizeof(error))
        status = part_post(md, ep, op, &error)
        if status == UCXM_OK:
            continue
        pthread_mutex_lock(&md.lock)
        if status == UCXM_ERR_NO_RESOURCE:
            if ep.feed == NULL:
                ep.feed = op
                md.feeding += 1
            pthread_mutex_unlock(&md.lock)
            return
        op_failed(op, status)
        op.error = error
        pthread_mutex_unlock(&md.lock)
        break
    pthread_mutex_lock(&md.lock)
    if ep.feed == op:
        ep.feed = NULL
        md.feeding -= 1
    op_part_done(md, op)
    pthread_mutex_unlock(&md.lock)


cdef void feed_all(ib_md_t *md) noexcept nogil:
    """Go on with operations that did not fit into their queues."""
    cdef ib_ep_t *found[FEED_BATCH]
    cdef ib_ep_t *ep
    cdef int i, count = 0
    pthread_mutex_lock(&md.lock)
    ep = md.eps
    while ep != NULL and count < FEED_BATCH:
        # With nothing of it under way its room comes from others' completions.
        if ep.feed != NULL and (ep.posted < md.queue_depth or ep.state != UCXM_EP_CONNECTED):
            ep.busy += 1
            found[count] = ep
            count += 1
        ep = ep.next
    pthread_mutex_unlock(&md.lock)
    for i in range(count):
        ep = found[i]
        pthread_mutex_lock(&ep.lock)
        if ep.feed != NULL:
            parts_continue(md, ep, ep.feed)
        pthread_mutex_unlock(&ep.lock)
        pthread_mutex_lock(&md.lock)
        ep.busy -= 1
        pthread_mutex_unlock(&md.lock)
