# SPDX-License-Identifier: BSD-3-Clause
# RC endpoints: queue pairs, addresses, connect and reset.

cdef uint32_t ib_ep_qpn(const ucxm_ep_t *ep) noexcept nogil:
    return (<ib_ep_t *>ep.priv).qpn


cdef void ib_ep_windows(ucxm_ep_t *pub, int change) noexcept nogil:
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    pthread_mutex_lock(&ep.md.lock)
    ib_store32(&ep.windows, ep.windows + <uint32_t>change)
    pthread_mutex_unlock(&ep.md.lock)


cdef int qp_modify(ib_ep_t *ep, ibv_qp_attr *attr, int mask) noexcept nogil:
    ib_count(&ep.md.counts.modify_qp, 1)
    return ep.md.verbs.modify_qp(ep.qp, attr, mask)


cdef int qp_to(ib_ep_t *ep, int state) noexcept nogil:
    """To RESET or ERR, which need nothing else."""
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = state
    return qp_modify(ep, &attr, IBV_QP_STATE)


cdef int qp_init(ib_ep_t *ep) noexcept nogil:
    """From RESET to INIT.  What peers may do is decided by keys, not by the queue pair."""
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_INIT
    attr.port_num = ep.md.port
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
    if ep.md.has_atomics:
        attr.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC
    return qp_modify(ep, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                     IBV_QP_ACCESS_FLAGS)


cdef void epoch_next(ib_ep_t *ep) noexcept nogil:
    """A new life: epochs of one queue pair number only grow, over processes, too."""
    cdef ib_md_t *md = ep.md
    pthread_mutex_lock(&md.lock)
    md.last_epoch = max(md.last_epoch + 1, ib_realtime_ns())
    ep.epoch = md.last_epoch
    ep.psn = ib_random_psn()
    ep.proved = 0
    ep.stopped = 0
    ib_store32(&ep.state, UCXM_EP_IDLE)
    pthread_mutex_unlock(&md.lock)


cdef ibv_qp *qp_create(ib_md_t *md, uint32_t *max_inline) noexcept nogil:
    cdef ibv_qp_init_attr attr
    cdef ibv_qp *qp
    memset(&attr, 0, sizeof(attr))
    attr.send_cq = md.cq
    attr.recv_cq = md.cq
    attr.qp_type = IBV_QPT_RC
    attr.cap.max_send_wr = md.queue_depth
    attr.cap.max_recv_wr = 1
    attr.cap.max_send_sge = 1
    attr.cap.max_recv_sge = 1
    attr.cap.max_inline_data = INLINE_MAX
    ib_count(&md.counts.create_qp, 1)
    qp = md.verbs.create_qp(md.pd, &attr)
    if qp == NULL and errno == EINVAL:  # a device without inline data
        attr.cap.max_inline_data = 0
        ib_count(&md.counts.create_qp, 1)
        qp = md.verbs.create_qp(md.pd, &attr)
    max_inline[0] = attr.cap.max_inline_data
    return qp


cdef ucxm_status_t ib_ep_create(void *priv, ucxm_ep_t *pub, ucxm_error_t *error) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    cdef ucxm_status_t status = UCXM_OK
    cdef int failed
    pthread_mutex_lock(&md.lock)
    if md.bounce_mr == NULL:
        status = bounce_make(md, error)
    pthread_mutex_unlock(&md.lock)
    if status != UCXM_OK:
        return status
    ep.md = md
    ep.qp = qp_create(md, &ep.max_inline)
    if ep.qp == NULL:
        return reg_failed(error, errno, "ibv_create_qp")
    ep.qpn = ep.qp.qp_num
    failed = qp_init(ep)
    if failed:
        md.verbs.destroy_qp(ep.qp)
        return call_failed(error, failed, "ibv_modify_qp to INIT")
    pthread_mutex_init(&ep.lock, NULL)
    epoch_next(ep)
    ep.born = ep.epoch
    pthread_mutex_lock(&md.lock)
    ep.next = md.eps
    if ep.next != NULL:
        ep.next.prev = ep
    md.eps = ep
    pthread_mutex_unlock(&md.lock)
    return UCXM_OK


cdef void ep_unlink(ib_ep_t *ep) noexcept nogil:
    """The lock is held."""
    if ep.prev != NULL:
        ep.prev.next = ep.next
    else:
        ep.md.eps = ep.next
    if ep.next != NULL:
        ep.next.prev = ep.prev


cdef uint32_t own_frames(ib_ep_t *ep) noexcept nogil:
    """How many of its operations this very thread is completing, further up the stack."""
    cdef ib_frame_t *frame = ib_frames
    cdef uint32_t count = 0
    while frame != NULL:
        if frame.ep == ep:
            count += 1
        frame = frame.outer
    return count


cdef bint ep_quiet(ib_ep_t *ep) noexcept nogil:
    """Has every operation completed, but those whose `complete` called us?"""
    cdef uint32_t own = own_frames(ep)
    cdef bint quiet
    pthread_mutex_lock(&ep.md.lock)
    quiet = ep.posted == 0 and ep.feed == NULL and ep.busy == own
    pthread_mutex_unlock(&ep.md.lock)
    return quiet


cdef bint ep_drain(ib_ep_t *ep) noexcept nogil:
    """Make progress until nothing of it is under way; False: the device flushes nothing."""
    cdef uint64_t end = ib_coarse_ns() + <uint64_t>DRAIN_SECONDS * 1000000000
    cdef unsigned rounds = 0
    while not ep_quiet(ep):
        if ib_progress(ep.md) != 0:
            continue
        rounds += 1
        if rounds < 100:
            sched_yield()
        elif ib_coarse_ns() > end:
            return False
        else:
            usleep(50)
    return True


cdef void ep_sweep(ib_ep_t *ep) noexcept nogil:
    """The queue pair is gone or reset and nothing comes any more: what is left is flushed."""
    cdef ib_md_t *md = ep.md
    cdef ucxm_op_t *op
    cdef uint32_t i
    pthread_mutex_lock(&md.lock)
    for i in range(md.wr_count):
        op = md.wrs[i].op
        if op == NULL or md.wrs[i].ep != ep:
            continue
        op_failed(op, UCXM_ERR_FLUSHED)
        wr_give(md, &md.wrs[i])
        op_part_done(md, op)
    if md.ticket.ep == ep:
        ticket_end(md, IBV_WC_WR_FLUSH_ERR)
    pthread_mutex_unlock(&md.lock)
    run_done(md)


cdef void ep_stop(ib_ep_t *ep) noexcept nogil:
    """Take nothing more, and have the device flush what it has."""
    cdef bint busy
    pthread_mutex_lock(&ep.lock)
    pthread_mutex_lock(&ep.md.lock)
    ib_store32(&ep.state, UCXM_EP_ERROR)
    ep.stopped = 1
    busy = ep.posted != 0
    pthread_mutex_unlock(&ep.md.lock)
    if busy:
        qp_to(ep, IBV_QPS_ERR)
    pthread_mutex_unlock(&ep.lock)


cdef void ib_ep_destroy(void *priv, ucxm_ep_t *pub) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    cdef ib_frame_t *frame
    cdef bint drained
    ep_stop(ep)
    drained = ep_drain(ep)
    ib_count(&md.counts.destroy_qp, 1)
    md.verbs.destroy_qp(ep.qp)  # no byte moves after this
    if not drained:
        ep_sweep(ep)
        ep_drain(ep)
    pthread_mutex_lock(&md.lock)
    ep_unlink(ep)
    pthread_mutex_unlock(&md.lock)
    frame = ib_frames
    while frame != NULL:
        if frame.ep == ep:
            frame.ep = NULL
        frame = frame.outer
    pthread_mutex_destroy(&ep.lock)


cdef ucxm_status_t ib_ep_address(void *priv, ucxm_ep_t *pub, uint8_t *address, size_t *length,
                                 ucxm_error_t *error) noexcept nogil:
    """Version, size, path MTU, reads answered at a time, lid u16, link layer, port, epoch u64,
    queue pair u32, first packet number u32, gid, node guid u64, first epoch u64; little-endian."""
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    pthread_mutex_lock(&ep.lock)
    address[0] = ADDRESS_VERSION
    address[1] = ADDRESS_SIZE
    address[2] = md.mtu
    address[3] = md.rd_atomic
    ib_put16(address + 4, md.lid)
    address[6] = md.link_layer
    address[7] = md.port
    ib_put64(address + 8, ep.epoch)
    ib_put32(address + 16, ep.qpn)
    ib_put32(address + 20, ep.psn)
    memcpy(address + 24, md.gid.raw, 16)
    ib_put64(address + 40, md.guid)
    ib_put64(address + 48, ep.born)
    length[0] = ADDRESS_SIZE
    pthread_mutex_unlock(&ep.lock)
    return UCXM_OK


cdef struct address_t:
    ib_peer_t peer
    uint32_t psn
    uint16_t lid
    uint8_t mtu
    uint8_t rd_atomic
    uint8_t link_layer


cdef ucxm_status_t address_parse(const uint8_t *bytes, size_t length, address_t *address,
                                 ucxm_error_t *error) noexcept nogil:
    memset(address, 0, sizeof(address[0]))
    if length < 2 or bytes[0] != ADDRESS_VERSION:
        return ib_fail(error, UCXM_ERR_INVALID_PARAM, 0,
                       "not an endpoint address of version %d", <int>ADDRESS_VERSION)
    if length != ADDRESS_SIZE or bytes[1] != ADDRESS_SIZE:
        return ib_fail(error, UCXM_ERR_INVALID_PARAM, 0,
                       "an endpoint address has %d bytes, not %zu", <int>ADDRESS_SIZE, length)
    address.mtu = bytes[2]
    address.rd_atomic = bytes[3]
    address.lid = ib_get16(bytes + 4)
    address.link_layer = bytes[6]
    address.peer.epoch = ib_get64(bytes + 8)
    address.peer.qpn = ib_get32(bytes + 16)
    address.psn = ib_get32(bytes + 20)
    memcpy(address.peer.gid, bytes + 24, 16)
    address.peer.guid = ib_get64(bytes + 40)
    address.peer.born = ib_get64(bytes + 48)
    if (address.peer.qpn == 0 or address.peer.qpn > 0xffffff or address.psn > 0xffffff or
            address.mtu < 1 or address.mtu > 5 or address.peer.epoch == 0):
        return ib_fail(error, UCXM_ERR_INVALID_PARAM, 0, "a damaged endpoint address")
    return UCXM_OK


cdef inline bint same_peer(const ib_peer_t *one, const ib_peer_t *other) noexcept nogil:
    return one.born == other.born and one.guid == other.guid and (
        memcmp(one.gid, other.gid, 16) == 0)


cdef ib_peer_t *peer_find(ib_md_t *md, const ib_peer_t *peer) noexcept nogil:
    """The lock is held."""
    cdef uint32_t i
    for i in range(md.peer_count):
        if same_peer(&md.peers[i], peer):
            return &md.peers[i]
    return NULL


cdef void peer_remember(ib_md_t *md, const ib_peer_t *peer) noexcept nogil:
    """The lock is held."""
    cdef ib_peer_t *known = peer_find(md, peer)
    if known == NULL:
        known = &md.peers[md.peer_next]
        md.peer_next = (md.peer_next + 1) % PEERS
        md.peer_count = min(md.peer_count + 1, <uint32_t>PEERS)
    known[0] = peer[0]


cdef ucxm_status_t connect_check(ib_ep_t *ep, const address_t *address,
                                 ucxm_error_t *error) noexcept nogil:
    """May this endpoint be connected to that address now?  Its lock is held."""
    cdef ib_md_t *md = ep.md
    cdef ib_peer_t *known
    cdef ucxm_status_t status = UCXM_OK
    pthread_mutex_lock(&md.lock)
    known = peer_find(md, &address.peer)
    if ep.state != UCXM_EP_IDLE or ep.resetting:
        status = ib_fail(error, UCXM_ERR_INVALID_PARAM, 0,
                         "the endpoint was connected before: reset it first")
    elif address.link_layer != md.link_layer:
        status = ib_fail(error, UCXM_ERR_UNREACHABLE, 0, "the peer is on another kind of network")
    elif (known != NULL and address.peer.epoch < known.epoch) or (
            same_peer(&ep.peer, &address.peer) and address.peer.epoch <= ep.peer.epoch):
        # The peer's queue pair would not know our packets, or we not its.
        status = ib_fail(error, UCXM_ERR_STALE_KEY, 0,
                         "a stale address: the peer must reset its end and send the new one")
    pthread_mutex_unlock(&md.lock)
    return status


cdef int qp_rtr(ib_ep_t *ep, const address_t *address) noexcept nogil:
    cdef ib_md_t *md = ep.md
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RTR
    attr.path_mtu = min(md.mtu, address.mtu)
    attr.dest_qp_num = address.peer.qpn
    attr.rq_psn = address.psn
    attr.max_dest_rd_atomic = md.rd_atomic
    attr.min_rnr_timer = 12
    attr.ah_attr.port_num = md.port
    attr.ah_attr.dlid = address.lid
    if md.link_layer == IBV_LINK_LAYER_ETHERNET or address.lid == 0:
        attr.ah_attr.is_global = 1
        memcpy(attr.ah_attr.grh.dgid.raw, address.peer.gid, 16)
        attr.ah_attr.grh.sgid_index = <uint8_t>md.gid_index
        attr.ah_attr.grh.hop_limit = 64
    return qp_modify(ep, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                     IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)


cdef int qp_rts(ib_ep_t *ep, const address_t *address) noexcept nogil:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RTS
    attr.sq_psn = ep.psn
    attr.timeout = 14       # 67 ms, times
    attr.retry_cnt = 6      # to rxe 7 is for ever, so that a dead peer would never be noticed
    attr.rnr_retry = 7
    attr.max_rd_atomic = min(ep.md.rd_atomic_init, address.rd_atomic)
    return qp_modify(ep, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
                     IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)


cdef ucxm_status_t ib_ep_connect(void *priv, ucxm_ep_t *pub, const uint8_t *bytes, size_t length,
                                 ucxm_error_t *error) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    cdef address_t address
    cdef int failed
    cdef ucxm_status_t status = address_parse(bytes, length, &address, error)
    if status != UCXM_OK:
        return status
    pthread_mutex_lock(&ep.lock)
    status = connect_check(ep, &address, error)
    if status == UCXM_OK:
        failed = qp_rtr(ep, &address)
        if failed == 0:
            failed = qp_rts(ep, &address)
        if failed:
            qp_to(ep, IBV_QPS_RESET)
            qp_init(ep)
            status = ib_fail(error, UCXM_ERR_UNREACHABLE, failed,
                             "no connection to queue pair %u (errno %d)", address.peer.qpn, failed)
    if status == UCXM_OK:
        pthread_mutex_lock(&md.lock)
        peer_remember(md, &address.peer)
        ep.peer = address.peer
        ib_store32(&ep.state, UCXM_EP_CONNECTED)
        pthread_mutex_unlock(&md.lock)
    pthread_mutex_unlock(&ep.lock)
    return status


cdef int qp_forget(ib_ep_t *ep) noexcept nogil:
    """Back to INIT, with nothing left of the life before.  The endpoint's lock is held."""
    cdef ib_md_t *md = ep.md
    cdef ibv_qp *old = ep.qp
    cdef ibv_qp *fresh
    cdef int failed = qp_to(ep, IBV_QPS_RESET)
    if failed == 0 and md.config.renew and ib_load32(&ep.windows) == 0:
        # rxe goes on refusing after it has refused a read in the middle, also after RESET.
        fresh = qp_create(md, &ep.max_inline)
        if fresh != NULL:
            pthread_mutex_lock(&md.lock)
            ep.qp = fresh
            ep.qpn = fresh.qp_num
            pthread_mutex_unlock(&md.lock)
            ib_count(&md.counts.destroy_qp, 1)
            md.verbs.destroy_qp(old)
    return failed if failed else qp_init(ep)


cdef ucxm_status_t ib_ep_reset(void *priv, ucxm_ep_t *pub, ucxm_error_t *error) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    cdef bint first
    cdef int failed
    pthread_mutex_lock(&md.lock)
    first = not ep.resetting
    ep.resetting = 1
    pthread_mutex_unlock(&md.lock)
    if not first:
        return ib_fail(error, UCXM_ERR_BUSY, 0, "another thread is resetting it")
    ep_stop(ep)
    ep_drain(ep)
    pthread_mutex_lock(&ep.lock)
    failed = qp_forget(ep)
    pthread_mutex_unlock(&ep.lock)
    if failed == 0:
        ep_sweep(ep)
        async_drain(md)  # what it said of the life that is over must not end the new one
        epoch_next(ep)
    pthread_mutex_lock(&md.lock)
    ep.resetting = 0
    pthread_mutex_unlock(&md.lock)
    return UCXM_OK if failed == 0 else call_failed(error, failed, "ibv_modify_qp to INIT")


cdef void qp_look(ib_ep_t *ep) noexcept nogil:
    """Ask the device for the state, where its events go to somebody else."""
    cdef ibv_qp_attr attr
    cdef ibv_qp_init_attr init
    memset(&attr, 0, sizeof(attr))
    memset(&init, 0, sizeof(init))
    ib_count(&ep.md.counts.query_qp, 1)
    if ep.md.verbs.query_qp(ep.qp, &attr, IBV_QP_STATE, &init) == 0 and (
            attr.qp_state == IBV_QPS_ERR):
        pthread_mutex_lock(&ep.md.lock)
        ep_fail(ep)
        pthread_mutex_unlock(&ep.md.lock)


cdef uint32_t ib_ep_state(void *priv, ucxm_ep_t *pub) noexcept nogil:
    """Cheap between two posts; otherwise it looks whether the device refused the peer."""
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    cdef uint64_t now
    if ib_load32(&ep.state) != UCXM_EP_CONNECTED:
        return ib_load32(&ep.state)
    now = ib_coarse_ns()
    if ib_load32(&ep.asked) or now != ib_load64(&ep.asked_at):
        async_drain(md)
        if not md.owns_context or md.config.ask_state:
            qp_look(ep)
        ib_store64(&ep.asked_at, now)
    ib_store32(&ep.asked, 1)
    return ib_load32(&ep.state)


cdef ucxm_status_t op_start(ib_md_t *md, ib_ep_t *ep, ucxm_op_t *op,
                            ucxm_error_t *error) noexcept nogil:
    """The endpoint's lock is held."""
    cdef ucxm_status_t status = UCXM_OK
    pthread_mutex_lock(&md.lock)
    if ep.state == UCXM_EP_ERROR:
        status = ib_fail(error, UCXM_ERR_FLUSHED, 0, "the connection failed earlier")
    elif ep.state != UCXM_EP_CONNECTED:
        status = ib_fail(error, UCXM_ERR_INVALID_PARAM, 0, "the endpoint is not connected")
    elif ep.feed != NULL:
        status = ib_fail(error, UCXM_ERR_NO_RESOURCE, 0, "the send queue is full")
    else:
        ep.busy += 1
    pthread_mutex_unlock(&md.lock)
    if status != UCXM_OK:
        return status
    memset(op.scratch, 0, sizeof(op.scratch))
    (<ib_op_t *>op.scratch).pending = 1
    op.bytes_done = 0
    status = part_post(md, ep, op, error)
    if status != UCXM_OK:
        pthread_mutex_lock(&md.lock)
        ep.busy -= 1
        pthread_mutex_unlock(&md.lock)
        return status
    parts_continue(md, ep, op)
    return UCXM_OK


cdef ucxm_status_t ib_ep_post(void *priv, ucxm_ep_t *pub, ucxm_op_t *op,
                              ucxm_error_t *error) noexcept nogil:
    cdef ib_md_t *md = <ib_md_t *>priv
    cdef ib_ep_t *ep = <ib_ep_t *>pub.priv
    cdef ucxm_status_t status
    if op.length == 0:
        op.bytes_done = 0
        op.complete(op, UCXM_OK)
        return UCXM_OK
    if op.kind > UCXM_OP_PUT:
        if not md.has_atomics:
            return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0, "the device has no atomics")
        if op.length != 8 or op.remote_address % 8:
            return ib_fail(error, UCXM_ERR_INVALID_PARAM, 0, "atomics want 8 aligned bytes")
    elif not op.has_lkey and op.length > IB_BOUNCE_SIZE:
        return ib_fail(error, UCXM_ERR_INVALID_PARAM, 0, "so large a transfer needs a local key")
    pthread_mutex_lock(&ep.lock)
    ib_store32(&ep.asked, 0)
    status = op_start(md, ep, op, error)
    pthread_mutex_unlock(&ep.lock)
    # Another thread may have polled the last completion while we were still posting.
    if status == UCXM_OK and ib_load_ptr(&md.done_head) != NULL:
        run_done(md)
    return status
