# SPDX-License-Identifier: BSD-3-Clause
# Endpoints: a stream of the device's context each, and the copies that are under way on it.

cdef struct event_t:
    cu_event_t native
    event_t *next

# What an operation under way has of ours, in its scratch.
cdef struct flight_t:
    ucxm_op_t *next
    mapping_t *mapping
    event_t *done        # reached when the copy is
    event_t *before      # what the copy waits for; NULL: nothing
    cu_result_t result

cdef struct ep_t:
    md_t *md
    ep_t *next
    uint64_t epoch
    pthread_mutex_t lock     # of all below
    cu_stream_t stream
    ucxm_op_t *oldest
    ucxm_op_t *newest
    uint32_t flying
    event_t *free_events

# What an endpoint hands out.
cdef struct ep_address_t:
    ucxm_identity_t identity
    uint64_t epoch


cdef inline flight_t *flight_of(ucxm_op_t *op) noexcept nogil:
    return <flight_t *>op.scratch


cdef ucxm_status_t event_take(ep_t *ep, event_t **event_p, ucxm_error_t *error) noexcept nogil:
    """In the device's context, with the endpoint's lock held."""
    cdef event_t *event = ep.free_events
    cdef cu_driver_t *cu = ep.md.device.cu
    cdef cu_result_t result
    if event != NULL:
        ep.free_events = event.next
    else:
        event = <event_t *>calloc(1, sizeof(event_t))
        if event == NULL:
            return UCXM_ERR_NO_MEMORY
        result = cu.event_create(&event.native, CU_EVENT_DISABLE_TIMING)
        if result != CU_SUCCESS:
            free(event)
            return driver_failed(cu, error, result, "cuEventCreate")
    event_p[0] = event
    return UCXM_OK


cdef void event_give(ep_t *ep, event_t *event) noexcept nogil:
    if event != NULL:
        event.next = ep.free_events
        ep.free_events = event


# ---- completing ----

cdef void flight_land(ep_t *ep, cu_result_t result, ucxm_op_t ***tail) noexcept nogil:
    """The oldest operation is done; it goes to the list that ends at `tail`.  The endpoint's lock
    is held."""
    cdef ucxm_op_t *op = ep.oldest
    cdef flight_t *flight = flight_of(op)
    ep.oldest = flight.next
    ep.flying -= 1
    cu_sub32(&ep.md.flying, 1)
    event_give(ep, flight.done)
    event_give(ep, flight.before)
    flight.result = result
    flight.next = NULL
    tail[0][0] = op
    tail[0] = &flight.next


cdef void flight_end(md_t *md, ucxm_op_t *op) noexcept nogil:
    """Tell whoever waits for it.  No lock is held; `op` may be gone afterwards."""
    cdef flight_t *flight = flight_of(op)
    cdef ucxm_status_t status = UCXM_OK
    if flight.mapping != NULL:
        mapping_unuse(md.device, flight.mapping)
    if flight.result == CU_SUCCESS:
        op.bytes_done = op.length
        cu_count(&md.bytes, op.length)
    else:
        status = driver_failed(md.device.cu, &op.error, flight.result, "the copy")
    op.complete(op, status)


cdef unsigned flights_end(md_t *md, ucxm_op_t *op) noexcept nogil:
    cdef ucxm_op_t *next
    cdef unsigned count = 0
    while op != NULL:
        next = flight_of(op).next
        flight_end(md, op)
        op = next
        count += 1
    return count


cdef cu_result_t stream_finish(ep_t *ep) noexcept nogil:
    """Wait for all that is on the stream."""
    cdef device_t *device = ep.md.device
    cdef cu_result_t result = CU_INVALID_CONTEXT
    cdef ucxm_error_t ignored
    if device_enter(device, &ignored) == UCXM_OK:
        result = device.cu.stream_finish(ep.stream)
        device_leave(device)
    return result


cdef cu_result_t flight_ask(ep_t *ep) noexcept nogil:
    """Is the oldest one done?  Its memory is the caller's again when it is, so an error of the
    question is not yet one of the copy."""
    cdef cu_result_t result = ep.md.device.cu.event_query(flight_of(ep.oldest).done.native)
    if result != CU_SUCCESS and result != CU_NOT_READY:
        result = stream_finish(ep)
    return result


cdef unsigned cuda_progress(void *priv) noexcept nogil:
    """Copies of one endpoint are done in order: only the oldest is asked for.  An endpoint that
    another thread is at is left to that."""
    cdef md_t *md = <md_t *>priv
    cdef ucxm_op_t *done = NULL
    cdef ucxm_op_t **tail = &done
    cdef ep_t *ep
    cdef cu_result_t result
    if cu_load32(&md.flying) == 0:
        return 0
    pthread_mutex_lock(&md.ep_lock)
    ep = md.eps
    while ep != NULL:
        if pthread_mutex_trylock(&ep.lock) == 0:
            while ep.oldest != NULL:
                result = flight_ask(ep)
                if result == CU_NOT_READY:
                    break
                flight_land(ep, result, &tail)
            pthread_mutex_unlock(&ep.lock)
        ep = ep.next
    pthread_mutex_unlock(&md.ep_lock)
    return flights_end(md, done)


cdef void ep_drain(ep_t *ep) noexcept nogil:
    """Wait for all that is under way: a copy cannot be stopped, and its memory is the caller's
    again once it completes."""
    cdef ucxm_op_t *done = NULL
    cdef ucxm_op_t **tail = &done
    cdef cu_result_t result
    pthread_mutex_lock(&ep.lock)
    if ep.oldest != NULL:
        stream_finish(ep)
    while ep.oldest != NULL:
        result = flight_ask(ep)
        if result == CU_NOT_READY:  # the call above failed
            sched_yield()
        else:
            flight_land(ep, result, &tail)
    pthread_mutex_unlock(&ep.lock)
    flights_end(ep.md, done)


# ---- the endpoint ----

cdef ucxm_status_t cuda_ep_create(void *priv, ucxm_ep_t *pub,
                                  ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef device_t *device = md.device
    cdef ep_t *ep = <ep_t *>pub.priv
    cdef cu_result_t result
    cdef ucxm_status_t status = device_enter(device, error)
    if status != UCXM_OK:
        return status
    # The default streams wait for each other; what we are to wait for we are told.
    result = device.cu.stream_create(&ep.stream, CU_STREAM_NON_BLOCKING)
    device_leave(device)
    if result != CU_SUCCESS:
        return driver_failed(device.cu, error, result, "cuStreamCreate")
    ep.md = md
    pthread_mutex_init(&ep.lock, NULL)
    pthread_mutex_lock(&md.ep_lock)
    ep.next = md.eps
    md.eps = ep
    pthread_mutex_unlock(&md.ep_lock)
    return UCXM_OK


cdef void cuda_ep_destroy(void *priv, ucxm_ep_t *pub) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef device_t *device = md.device
    cdef ep_t *ep = <ep_t *>pub.priv
    cdef ep_t **at = &md.eps
    cdef event_t *event
    cdef ucxm_error_t ignored
    cdef bint inside
    pthread_mutex_lock(&md.ep_lock)
    while at[0] != ep:
        at = &at[0].next
    at[0] = ep.next
    pthread_mutex_unlock(&md.ep_lock)
    ep_drain(ep)
    inside = device_enter(device, &ignored) == UCXM_OK
    while ep.free_events != NULL:
        event = ep.free_events
        ep.free_events = event.next
        device.cu.event_destroy(event.native)
        free(event)
    device.cu.stream_destroy(ep.stream)
    if inside:
        device_leave(device)
    pthread_mutex_destroy(&ep.lock)


cdef ucxm_status_t cuda_ep_address(void *priv, ucxm_ep_t *pub, uint8_t *address, size_t *length,
                                   ucxm_error_t *error) noexcept nogil:
    cdef ep_address_t out
    out.identity = (<md_t *>priv).self
    out.epoch = cu_load64(&(<ep_t *>pub.priv).epoch)
    memcpy(address, &out, sizeof(out))
    length[0] = sizeof(out)
    return UCXM_OK


cdef ucxm_status_t cuda_ep_connect(void *priv, ucxm_ep_t *pub, const uint8_t *address,
                                   size_t length, ucxm_error_t *error) noexcept nogil:
    """Not needed; says early whether the process is there."""
    cdef md_t *md = <md_t *>priv
    cdef ep_address_t theirs
    cdef peer_t *peer = NULL
    cdef ucxm_status_t status
    if length != sizeof(theirs):
        return ucxm_refuse(error, UCXM_ERR_INVALID_PARAM, "that is no cuda_ipc endpoint's address")
    memcpy(&theirs, address, sizeof(theirs))
    status = peer_get(md, &theirs.identity, &peer, error)
    if status == UCXM_OK:
        peer_put(md, peer)
    return status


cdef ucxm_status_t cuda_ep_reset(void *priv, ucxm_ep_t *pub, ucxm_error_t *error) noexcept nogil:
    cdef ep_t *ep = <ep_t *>pub.priv
    ep_drain(ep)
    cu_count(&ep.epoch, 1)
    return UCXM_OK


cdef uint32_t cuda_ep_state(void *priv, ucxm_ep_t *pub) noexcept nogil:
    """It reaches every key's owner, from the start; a failed copy spoils no connection."""
    return UCXM_EP_CONNECTED


# ---- posting ----

cdef ucxm_status_t wait_for(ep_t *ep, ucxm_op_t *op, ucxm_error_t *error) noexcept nogil:
    """Have the copy wait for the work that is under way on its local memory."""
    cdef device_t *device = ep.md.device
    cdef cu_driver_t *cu = device.cu
    cdef flight_t *flight = flight_of(op)
    cdef known_t known
    cdef const char *call = b"cuEventRecord"
    cdef cu_result_t result
    cdef ucxm_status_t status = look(device, <uint64_t>op.local, &known, error)
    if status != UCXM_OK:
        return status
    if not is_device_memory(&known):
        return ucxm_refuse(error, UCXM_ERR_INVALID_PARAM,
                           "the driver knows no device memory at the local address")
    if not known.managed and known.ordinal != <uint64_t>device.ordinal:
        # Small numbers name streams of whatever context is current.
        return ucxm_refuse(
            error, UCXM_ERR_INVALID_PARAM,
            "the local memory, and its stream, are another device's than this domain's")
    status = event_take(ep, &flight.before, error)
    if status != UCXM_OK:
        return status
    result = cu.event_record(flight.before.native, <cu_stream_t>op.local_stream)
    if result == CU_SUCCESS:
        call = b"cuStreamWaitEvent"
        result = cu.stream_wait(ep.stream, flight.before.native, 0)
    return UCXM_OK if result == CU_SUCCESS else driver_failed(cu, error, result, call)


cdef ucxm_status_t copy_start(ep_t *ep, ucxm_op_t *op, bint *done,
                              ucxm_error_t *error) noexcept nogil:
    """In the device's context.  An error: nothing has begun.  `done`: it is over already."""
    cdef device_t *device = ep.md.device
    cdef flight_t *flight = flight_of(op)
    cdef rkey_t *rkey = <rkey_t *>op.rkey.priv
    cdef cu_address_t remote = op.remote_address + rkey.distance
    cdef cu_address_t local = <cu_address_t>op.local
    cdef cu_result_t result
    cdef ucxm_status_t status = event_take(ep, &flight.done, error)
    if status == UCXM_OK and op.local_stream != 0:
        status = wait_for(ep, op, error)
    if status != UCXM_OK:
        return status
    if op.kind == UCXM_OP_GET:
        result = device.cu.copy(local, remote, op.length, ep.stream)
    else:
        result = device.cu.copy(remote, local, op.length, ep.stream)
    if result != CU_SUCCESS:
        return driver_failed(device.cu, error, result, "cuMemcpyAsync")
    result = device.cu.event_record(flight.done.native, ep.stream)
    done[0] = result != CU_SUCCESS
    if done[0]:  # the copy is under way all the same
        flight.result = device.cu.stream_finish(ep.stream)
    return UCXM_OK


cdef ucxm_status_t ep_start(ep_t *ep, ucxm_op_t *op, bint *done,
                            ucxm_error_t *error) noexcept nogil:
    """With the endpoint's lock held."""
    cdef md_t *md = ep.md
    cdef flight_t *flight = flight_of(op)
    cdef ucxm_status_t status
    if ep.flying == md.queue_depth:
        return ucxm_refuse(error, UCXM_ERR_NO_RESOURCE,
                           "as much is under way as queue_depth allows")
    status = device_enter(md.device, error)
    if status != UCXM_OK:
        return status
    status = copy_start(ep, op, done, error)
    device_leave(md.device)
    if status != UCXM_OK or done[0]:
        event_give(ep, flight.done)
        event_give(ep, flight.before)
        return status
    if ep.oldest == NULL:
        ep.oldest = op
    else:
        flight_of(ep.newest).next = op
    ep.newest = op
    ep.flying += 1
    cu_add32(&md.flying, 1)
    return UCXM_OK


cdef ucxm_status_t cuda_ep_post(void *priv, ucxm_ep_t *pub, ucxm_op_t *op,
                                ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef ep_t *ep = <ep_t *>pub.priv
    cdef flight_t *flight = flight_of(op)
    cdef bint done = False
    cdef ucxm_status_t status
    if op.kind != UCXM_OP_GET and op.kind != UCXM_OP_PUT:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED, "cuda_ipc has no atomics")
    op.bytes_done = 0
    memset(flight, 0, sizeof(flight[0]))
    status = key_use(md, op.rkey, &flight.mapping, error)
    if status != UCXM_OK:
        return status
    pthread_mutex_lock(&ep.lock)
    status = ep_start(ep, op, &done, error)
    pthread_mutex_unlock(&ep.lock)
    if status != UCXM_OK:
        if flight.mapping != NULL:
            mapping_unuse(md.device, flight.mapping)
        return status
    cu_count(&md.copies, 1)
    if done:
        flight_end(md, op)
    return UCXM_OK
