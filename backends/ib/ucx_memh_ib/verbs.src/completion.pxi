# SPDX-License-Identifier: BSD-3-Clause
# Polling, completions, the device's events.

cdef void wc_good(ib_md_t *md, ib_wr_t *slot) noexcept nogil:
    """Hand over what came back.  The lock is held."""
    cdef ucxm_op_t *op = slot.op
    op.bytes_done += slot.length
    slot.ep.proved = 1
    if op.kind == UCXM_OP_GET:
        if slot.bounce >= 0:
            memcpy(<uint8_t *>op.local + slot.offset, bounce_at(md, slot.bounce), slot.length)
    elif op.kind != UCXM_OP_PUT:
        op.result = result_at(md, <uint32_t>(slot - md.wrs))[0]


cdef void wc_bad(ib_md_t *md, ib_wr_t *slot, const ibv_wc *wc) noexcept nogil:
    """Keep the reason; the queue pair is in its error state now.  The lock is held."""
    cdef ucxm_op_t *op = slot.op
    cdef ucxm_status_t status = wc_status(slot.ep, wc.status)
    if slot.ep.stopped and status == UCXM_ERR_IO_ERROR:
        status = UCXM_ERR_FLUSHED  # it was cut off in the middle, which a device may call anything
    ib_count(&md.counts.error_completions, 1)
    if op_failed(op, status):
        ib_fail(&op.error, status, 0, "%s", md.verbs.wc_status_str(wc.status))
        op.error.syndrome = wc.vendor_err
    ep_fail(slot.ep)


cdef void ticket_end(ib_md_t *md, int status) noexcept nogil:
    """The lock is held."""
    md.ticket.ep.posted -= 1
    md.ticket.ep = NULL
    md.ticket.status = status
    ib_store32(&md.ticket.done, md.ticket.number)


cdef void ticket_handle(ib_md_t *md, const ibv_wc *wc) noexcept nogil:
    """The lock is held."""
    if md.ticket.ep == NULL or md.ticket.number != wc.wr_id >> 32:
        return  # it was given up
    if wc.status != IBV_WC_SUCCESS:
        ib_count(&md.counts.error_completions, 1)
        ep_fail(md.ticket.ep)
    ticket_end(md, wc.status)


cdef void wc_handle(ib_md_t *md, const ibv_wc *wc) noexcept nogil:
    """The lock is held."""
    cdef uint32_t index = <uint32_t>wc.wr_id
    cdef ucxm_op_t *op
    cdef ib_wr_t *slot
    if index == TICKET:
        ticket_handle(md, wc)
        return
    if index >= md.wr_count:
        return
    slot = &md.wrs[index]
    op = slot.op
    if op == NULL or slot.generation != wc.wr_id >> 32:
        return  # of a queue pair that was given up
    if wc.status == IBV_WC_SUCCESS:
        wc_good(md, slot)
    else:
        wc_bad(md, slot, wc)
    wr_give(md, slot)
    op_part_done(md, op)


cdef int poll_batch(ib_md_t *md) noexcept nogil:
    """Take completions off the queue; returns how many.  The poll lock is held."""
    cdef ibv_wc wc[POLL_BATCH]
    cdef int i, count = ibv_poll_cq(md.cq, POLL_BATCH, wc)
    if count > 0:
        pthread_mutex_lock(&md.lock)
        ib_count(&md.counts.completions, count)
        for i in range(count):
            wc_handle(md, &wc[i])
        pthread_mutex_unlock(&md.lock)
    return count


cdef unsigned run_done(ib_md_t *md) noexcept nogil:
    """Run `complete` of what is finished, with no lock held.  It may call anything of ours."""
    cdef ib_frame_t frame
    cdef ucxm_op_t *op
    cdef unsigned count = 0
    global ib_frames
    while ib_load_ptr(&md.done_head) != NULL:
        pthread_mutex_lock(&md.lock)
        op = md.done_head
        if op == NULL:
            pthread_mutex_unlock(&md.lock)
            break
        ib_store_ptr(&md.done_head, (<ib_op_t *>op.scratch).next)
        if md.done_head == NULL:
            md.done_tail = NULL
        pthread_mutex_unlock(&md.lock)
        frame.ep = op.ep.priv
        frame.outer = ib_frames
        ib_frames = &frame
        op.complete(op, (<ib_op_t *>op.scratch).status)
        ib_frames = frame.outer
        count += 1
        if frame.ep != NULL:  # not destroyed by what `complete` called
            pthread_mutex_lock(&md.lock)
            (<ib_ep_t *>frame.ep).busy -= 1
            pthread_mutex_unlock(&md.lock)
    return count


cdef void ep_fail(ib_ep_t *ep) noexcept nogil:
    """The lock is held."""
    if ep.state == UCXM_EP_CONNECTED:
        ib_store32(&ep.state, UCXM_EP_ERROR)


cdef void async_handle(ib_md_t *md, const ibv_async_event *event) noexcept nogil:
    """A queue pair that refused its peer an access goes to its error state, and this is how we
    hear of it: it has no completion to tell us by."""
    cdef bint one = event.event_type in (IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR,
                                         IBV_EVENT_QP_ACCESS_ERR)
    cdef bint every = event.event_type in (IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL)
    cdef ib_ep_t *ep
    pthread_mutex_lock(&md.lock)
    ib_count(&md.counts.async_events, 1)
    if every:
        md.lost = 1
    ep = md.eps
    while ep != NULL:
        if every or (one and ep.qp == event.element.qp):
            ep_fail(ep)
        ep = ep.next
    pthread_mutex_unlock(&md.lock)


cdef int async_drain(ib_md_t *md) noexcept nogil:
    """Read the device's own events; returns how many there were."""
    cdef ibv_async_event event
    cdef int count = 0
    if not md.owns_context:
        return 0
    while count < 64 and md.verbs.get_async_event(md.context, &event) == 0:
        async_handle(md, &event)
        md.verbs.ack_async_event(&event)
        count += 1
    return count


cdef unsigned ib_progress(void *priv) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef int count = 0
    if pthread_mutex_trylock(&md.poll_lock) == 0:
        count = poll_batch(md)
        if count == 0:
            ib_store32(&md.idle_polls, md.idle_polls + 1)
        pthread_mutex_unlock(&md.poll_lock)
    if ib_load32(&md.feeding) != 0:
        feed_all(md)
    if count == 0 and ib_load32(&md.idle_polls) % ASYNC_INTERVAL == 0:
        async_drain(md)
    return run_done(md)


cdef ucxm_status_t ib_event_fd(void *priv, int *fd, ucxm_error_t *error) noexcept nogil:
    fd[0] = (<ib_md_t *>priv).event_fd
    return UCXM_OK


cdef ucxm_status_t ib_event_arm(void *priv, ucxm_error_t *error) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ibv_cq *cq = NULL
    cdef void *context = NULL
    cdef unsigned events = 0
    cdef int failed, count
    if async_drain(md) != 0:
        return UCXM_ERR_BUSY
    pthread_mutex_lock(&md.poll_lock)
    while events < 64 and md.verbs.get_cq_event(md.channel, &cq, &context) == 0:
        md.verbs.ack_cq_events(cq, 1)  # a backend's own queue may share the channel
        events += 1
    failed = ibv_req_notify_cq(md.cq, 0)
    count = poll_batch(md)  # what came before the request makes no event
    pthread_mutex_unlock(&md.poll_lock)
    if failed:
        return call_failed(error, failed, "ibv_req_notify_cq")
    if count != 0 or ib_load_ptr(&md.done_head) != NULL:
        return UCXM_ERR_BUSY
    return UCXM_OK
