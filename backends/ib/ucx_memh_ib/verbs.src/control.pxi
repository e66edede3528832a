# SPDX-License-Identifier: BSD-3-Clause
# The control queue pair.

cdef enum:
    CONTROL_SECONDS = 10  # a device that completes nothing for so long is given up


cdef int control_modify(ib_md_t *md, ib_control_t *control, ibv_qp_attr *attr,
                        int mask) noexcept nogil:
    ib_count(&md.counts.modify_qp, 1)
    return md.verbs.modify_qp(control.qp, attr, mask)


cdef int control_init(ib_md_t *md, ib_control_t *control) noexcept nogil:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_INIT
    attr.port_num = md.port
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
    if md.has_atomics:
        attr.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC
    return control_modify(md, control, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                          IBV_QP_ACCESS_FLAGS)


cdef int control_rtr(ib_md_t *md, ib_control_t *control, uint32_t psn) noexcept nogil:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RTR
    attr.path_mtu = md.mtu
    attr.dest_qp_num = control.qp.qp_num
    attr.rq_psn = psn
    attr.max_dest_rd_atomic = min(md.rd_atomic, <uint8_t>1)
    attr.min_rnr_timer = 12
    attr.ah_attr.port_num = md.port
    attr.ah_attr.dlid = md.lid
    if md.link_layer == IBV_LINK_LAYER_ETHERNET or md.lid == 0:
        attr.ah_attr.is_global = 1
        memcpy(attr.ah_attr.grh.dgid.raw, md.gid.raw, 16)
        attr.ah_attr.grh.sgid_index = <uint8_t>md.gid_index
        attr.ah_attr.grh.hop_limit = 64
    return control_modify(md, control, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                          IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                          IBV_QP_MIN_RNR_TIMER)


cdef int control_rts(ib_md_t *md, ib_control_t *control, uint32_t psn) noexcept nogil:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RTS
    attr.sq_psn = psn
    attr.timeout = 14
    attr.retry_cnt = 6
    attr.rnr_retry = 7
    attr.max_rd_atomic = min(md.rd_atomic_init, <uint8_t>1)
    return control_modify(md, control, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
                          IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)


cdef int control_connect(ib_md_t *md, ib_control_t *control) noexcept nogil:
    """From RESET to RTS, with itself."""
    cdef uint32_t psn = ib_random_psn()
    cdef int failed = control_init(md, control)
    if failed == 0:
        failed = control_rtr(md, control, psn)
    if failed == 0:
        failed = control_rts(md, control, psn)
    return failed


cdef int control_reset(ib_md_t *md, ib_control_t *control) noexcept nogil:
    """Windows of type 1 outlive the queue pair that they were bound over."""
    cdef ibv_qp_attr attr
    cdef ibv_wc wc[POLL_BATCH]
    cdef int failed
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RESET
    failed = control_modify(md, control, &attr, IBV_QP_STATE)
    while ibv_poll_cq(control.cq, POLL_BATCH, wc) > 0:
        pass
    return failed


cdef int control_create(ib_md_t *md, ib_control_t *control) noexcept nogil:
    cdef ibv_qp_init_attr attr
    if control.cq == NULL:
        control.cq = md.verbs.create_cq(md.context, 2 * control.depth, NULL,
                                        md.channel if control.events else NULL, 0)
        if control.cq == NULL:
            return errno
    memset(&attr, 0, sizeof(attr))
    attr.send_cq = control.cq
    attr.recv_cq = control.cq
    attr.qp_type = IBV_QPT_RC
    attr.cap.max_send_wr = control.depth
    attr.cap.max_recv_wr = 1
    attr.cap.max_send_sge = 1
    attr.cap.max_recv_sge = 1
    ib_count(&md.counts.create_qp, 1)
    control.qp = md.verbs.create_qp(md.pd, &attr)
    return errno if control.qp == NULL else 0


cdef void ib_control_drop(ib_md_t *md, ib_control_t *control) noexcept nogil:
    control.ready = 0
    if control.qp != NULL:
        ib_count(&md.counts.destroy_qp, 1)
        md.verbs.destroy_qp(control.qp)
        control.qp = NULL


cdef void ib_control_clear(ib_md_t *md, ib_control_t *control) noexcept nogil:
    ib_control_drop(md, control)
    if control.cq != NULL:
        md.verbs.destroy_cq(control.cq)
        control.cq = NULL


cdef int ib_control_up(ib_md_t *md, ib_control_t *control) noexcept nogil:
    cdef int failed = ENODEV
    if control.ready:
        return 0
    if control.qp != NULL:
        failed = control_reset(md, control)
        if failed == 0:
            failed = control_connect(md, control)
    if failed:
        ib_control_drop(md, control)
        failed = control_create(md, control)
        if failed == 0:
            failed = control_connect(md, control)
    if failed:
        ib_control_drop(md, control)
    else:
        control.ready = 1
        ib_count(&control.made, 1)
    return failed


cdef int ib_control_wait(ib_md_t *md, ib_control_t *control, ibv_wc *wc) noexcept nogil:
    cdef uint64_t end = ib_coarse_ns() + <uint64_t>CONTROL_SECONDS * 1000000000
    cdef unsigned rounds = 0
    cdef int count
    while True:
        count = ibv_poll_cq(control.cq, 1, wc)
        if count > 0 and wc.wr_id == control.last:
            if wc.status != IBV_WC_SUCCESS:
                control.ready = 0
            return 0
        if count > 0:
            if control.seen != NULL:
                control.seen(control, wc)
            continue
        rounds += 1
        if rounds < 1000:
            sched_yield()
        elif count < 0 or ib_coarse_ns() > end:
            control.ready = 0
            return ETIMEDOUT
        else:
            usleep(20)


cdef int ib_control_post(ib_md_t *md, ib_control_t *control, ibv_send_wr *wr,
                         ibv_wc *wc) noexcept nogil:
    cdef ibv_send_wr *bad = NULL
    cdef int failed
    control.last += 1
    wr.wr_id = control.last
    wr.send_flags = IBV_SEND_SIGNALED
    failed = ibv_post_send(control.qp, wr, &bad)
    if failed:
        control.ready = 0
        return failed
    return ib_control_wait(md, control, wc)
