# SPDX-License-Identifier: BSD-3-Clause
# The control queue pair.

cdef int control_modify(md_t *md, ibv_qp_attr *attr, int mask) noexcept nogil:
    ib_count(&md.ib.counts.modify_qp)
    return md.ib.verbs.modify_qp(md.control.qp, attr, mask)


cdef int control_init(md_t *md) noexcept nogil:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_INIT
    attr.port_num = md.ib.port
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
    if md.ib.has_atomics:
        attr.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC
    return control_modify(md, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                          IBV_QP_ACCESS_FLAGS)


cdef int control_rtr(md_t *md, uint32_t psn) noexcept nogil:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RTR
    attr.path_mtu = md.ib.mtu
    attr.dest_qp_num = md.control.qp.qp_num
    attr.rq_psn = psn
    attr.max_dest_rd_atomic = min(md.ib.rd_atomic, <uint8_t>1)
    attr.min_rnr_timer = 12
    attr.ah_attr.port_num = md.ib.port
    attr.ah_attr.dlid = md.ib.lid
    if md.ib.link_layer == IBV_LINK_LAYER_ETHERNET or md.ib.lid == 0:
        attr.ah_attr.is_global = 1
        memcpy(attr.ah_attr.grh.dgid.raw, md.ib.gid.raw, 16)
        attr.ah_attr.grh.sgid_index = <uint8_t>md.ib.gid_index
        attr.ah_attr.grh.hop_limit = 64
    return control_modify(md, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                          IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                          IBV_QP_MIN_RNR_TIMER)


cdef int control_rts(md_t *md, uint32_t psn) noexcept nogil:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RTS
    attr.sq_psn = psn
    attr.timeout = 14
    attr.retry_cnt = 6
    attr.rnr_retry = 7
    attr.max_rd_atomic = min(md.ib.rd_atomic_init, <uint8_t>1)
    return control_modify(md, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
                          IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)


cdef int control_connect(md_t *md) noexcept nogil:
    """From RESET to RTS, with itself."""
    cdef uint32_t psn = ib_random_psn()
    cdef int failed = control_init(md)
    if failed == 0:
        failed = control_rtr(md, psn)
    if failed == 0:
        failed = control_rts(md, psn)
    return failed


cdef int control_reset(md_t *md) noexcept nogil:
    """Windows of type 1 outlive the queue pair that they were bound over."""
    cdef ibv_qp_attr attr
    cdef ibv_wc wc[CONTROL_DEPTH]
    cdef int failed
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RESET
    failed = control_modify(md, &attr, IBV_QP_STATE)
    while ibv_poll_cq(md.control.cq, CONTROL_DEPTH, wc) > 0:
        pass
    return failed


cdef int control_create(md_t *md) noexcept nogil:
    cdef ibv_qp_init_attr attr
    if md.control.cq == NULL:
        md.control.cq = md.ib.verbs.create_cq(md.ib.context, 2 * CONTROL_DEPTH, NULL, NULL, 0)
        if md.control.cq == NULL:
            return errno
    memset(&attr, 0, sizeof(attr))
    attr.send_cq = md.control.cq
    attr.recv_cq = md.control.cq
    attr.qp_type = IBV_QPT_RC
    attr.cap.max_send_wr = CONTROL_DEPTH
    attr.cap.max_recv_wr = 1
    attr.cap.max_send_sge = 1
    attr.cap.max_recv_sge = 1
    ib_count(&md.ib.counts.create_qp)
    md.control.qp = md.ib.verbs.create_qp(md.ib.pd, &attr)
    return errno if md.control.qp == NULL else 0


cdef void control_drop(md_t *md) noexcept nogil:
    md.control.ready = 0
    if md.control.qp != NULL:
        ib_count(&md.ib.counts.destroy_qp)
        md.ib.verbs.destroy_qp(md.control.qp)
        md.control.qp = NULL


cdef void control_clear(md_t *md) noexcept nogil:
    control_drop(md)
    if md.control.cq != NULL:
        md.ib.verbs.destroy_cq(md.control.cq)
        md.control.cq = NULL


cdef int control_up(md_t *md) noexcept nogil:
    """Make it, or bring it back from its error state; a new one if it does not come back."""
    cdef int failed = ENODEV
    if md.control.ready:
        return 0
    if md.control.qp != NULL:
        failed = control_reset(md)
        if failed == 0:
            failed = control_connect(md)
    if failed:
        control_drop(md)
        failed = control_create(md)
        if failed == 0:
            failed = control_connect(md)
    if failed:
        control_drop(md)
    else:
        md.control.ready = 1
        md.control.made += 1
    return failed


cdef int control_wait(md_t *md, ibv_wc *wc) noexcept nogil:
    """The completion of the last request; ETIMEDOUT: none comes.  What is not good ends the queue
    pair, so it is to be made anew."""
    cdef uint64_t end = ib_coarse_ns() + <uint64_t>CONTROL_SECONDS * 1000000000
    cdef unsigned rounds = 0
    cdef int count
    while True:
        count = ibv_poll_cq(md.control.cq, 1, wc)
        if count > 0 and wc.wr_id == md.control.last:
            if wc.status != IBV_WC_SUCCESS:
                md.control.ready = 0
            return 0
        if count > 0:
            continue  # of a request that was given up
        rounds += 1
        if rounds < 1000:
            sched_yield()
        elif count < 0 or ib_coarse_ns() > end:
            md.control.ready = 0
            return ETIMEDOUT
        else:
            usleep(20)


cdef int control_post(md_t *md, ibv_send_wr *wr, ibv_wc *wc) noexcept nogil:
    """Post one request and wait for it."""
    cdef ibv_send_wr *bad = NULL
    cdef int failed
    md.control.last += 1
    wr.wr_id = md.control.last
    wr.send_flags = IBV_SEND_SIGNALED
    failed = ibv_post_send(md.control.qp, wr, &bad)
    if failed:
        md.control.ready = 0
        return failed
    return control_wait(md, wc)
