# SPDX-License-Identifier: BSD-3-Clause
# Work requests that are no operations: a backend's own, over an endpoint's queue pair.

cdef enum:
    TICKET_SECONDS = 10  # what stands before it in the queue ends sooner, one way or the other


cdef ucxm_status_t ticket_take(ib_md_t *md, ib_ep_t *ep, ibv_send_wr *wr,
                               ucxm_error_t *error) noexcept nogil:
    """Count it and give it its wr_id."""
    cdef ucxm_status_t status = UCXM_OK
    pthread_mutex_lock(&md.lock)
    if ep.state == UCXM_EP_ERROR:
        status = ib_fail(error, UCXM_ERR_FLUSHED, 0, "the connection failed earlier")
    elif ep.state != UCXM_EP_CONNECTED:
        status = ib_fail(error, UCXM_ERR_INVALID_PARAM, 0, "the endpoint is not connected")
    elif ep.posted >= md.queue_depth:
        status = ib_fail(error, UCXM_ERR_NO_RESOURCE, 0, "the send queue is full")
    else:
        ep.posted += 1
        md.ticket.ep = ep
        md.ticket.number += 1
        wr.wr_id = <uint64_t>md.ticket.number << 32 | <uint64_t>TICKET
    pthread_mutex_unlock(&md.lock)
    return status


cdef ucxm_status_t ticket_post(ib_md_t *md, ib_ep_t *ep, ibv_send_wr *wr,
                               ucxm_error_t *error) noexcept nogil:
    """The endpoint's lock is held."""
    cdef ibv_send_wr *bad = NULL
    cdef int failed
    cdef ucxm_status_t status = ticket_take(md, ep, wr, error)
    if status != UCXM_OK:
        return status
    ib_count(&md.counts.post_send, 1)
    failed = ibv_post_send(ep.qp, wr, &bad)
    if failed == 0:
        return UCXM_OK
    pthread_mutex_lock(&md.lock)
    ticket_end(md, IBV_WC_WR_FLUSH_ERR)
    pthread_mutex_unlock(&md.lock)
    if failed in (ENOMEM, EAGAIN):
        return ib_fail(error, UCXM_ERR_NO_RESOURCE, failed, "the send queue is full")
    return call_failed(error, failed, "ibv_post_send")


cdef void ticket_poll(ib_md_t *md) noexcept nogil:
    """What else completes waits for the next progress(): nobody's `complete` may run in here,
    where locks of the core are held."""
    if pthread_mutex_trylock(&md.poll_lock) == 0:
        poll_batch(md)
        pthread_mutex_unlock(&md.poll_lock)


cdef bint ticket_wait(ib_md_t *md) noexcept nogil:
    """Until it has completed; False: it does not."""
    cdef uint64_t end = ib_coarse_ns() + <uint64_t>TICKET_SECONDS * 1000000000
    cdef uint32_t number = md.ticket.number
    cdef unsigned rounds = 0
    while True:
        ticket_poll(md)
        if ib_load32(&md.ticket.done) == number:
            return True
        rounds += 1
        if rounds < 100:
            sched_yield()
        elif ib_coarse_ns() > end:
            return False
        else:
            usleep(50)


cdef void ticket_give_up(ib_md_t *md, ib_ep_t *ep) noexcept nogil:
    """The queue pair is of no use any more; what comes of it is ignored from its error state on."""
    pthread_mutex_lock(&ep.lock)
    qp_to(ep, IBV_QPS_ERR)
    pthread_mutex_unlock(&ep.lock)
    pthread_mutex_lock(&md.lock)
    ep_fail(ep)
    pthread_mutex_unlock(&md.lock)


cdef ucxm_status_t ib_ep_work(ib_md_t *md, ucxm_ep_t *pub, ibv_send_wr *wr,
                              ucxm_error_t *error) noexcept nogil:
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    cdef uint64_t end = ib_coarse_ns() + <uint64_t>TICKET_SECONDS * 1000000000
    cdef ucxm_status_t status
    cdef int result
    while True:
        pthread_mutex_lock(&ep.lock)
        status = ticket_post(md, ep, wr, error)
        pthread_mutex_unlock(&ep.lock)
        if status != UCXM_ERR_NO_RESOURCE or ib_coarse_ns() > end:
            break
        ticket_poll(md)  # makes room
        usleep(50)
    if status != UCXM_OK:
        return status
    if not ticket_wait(md):
        ticket_give_up(md, ep)
        return ib_fail(error, UCXM_ERR_IO_ERROR, 0, "the device does not answer")
    result = md.ticket.status  # nobody writes it before the next ticket
    if result != IBV_WC_SUCCESS:
        return ib_fail(error, wc_status(ep, result), 0, "%s", md.verbs.wc_status_str(result))
    if error != NULL:
        memset(error, 0, sizeof(error[0]))  # the queue was full at first, perhaps
    return UCXM_OK


cdef void ib_drop_events(ib_md_t *md) noexcept nogil:
    async_drain(md)
