# SPDX-License-Identifier: BSD-3-Clause
# The device: what it can, its queue and events.

cdef void set_nonblocking(int fd) noexcept nogil:
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK)


cdef int gid_choose(ib_md_t *md, const ibv_port_attr *port) noexcept nogil:
    """On Ethernet a RoCE v2 entry that can be routed, if the library can tell; else the first."""
    cdef ibv_gid_entry entry
    cdef int i, best = 0, score, best_score = 0
    if md.link_layer != IBV_LINK_LAYER_ETHERNET or md.verbs.query_gid_ex == NULL:
        return 0
    for i in range(min(port.gid_tbl_len, 256)):
        memset(&entry, 0, sizeof(entry))
        if md.verbs.query_gid_ex(md.context, md.port, i, &entry, 0, sizeof(entry)) != 0:
            continue
        score = 1
        if entry.gid_type == IBV_GID_TYPE_ROCE_V2:
            score += 2
        if entry.gid.raw[0] != 0xfe:  # not link-local
            score += 1
        if score > best_score:
            best = i
            best_score = score
    return best


cdef ucxm_status_t md_query(ib_md_t *md, ucxm_error_t *error) noexcept nogil:
    """What the device and its port say of themselves."""
    cdef ibv_device_attr device
    cdef ibv_port_attr port
    cdef int failed
    memset(&device, 0, sizeof(device))
    memset(&port, 0, sizeof(port))  # the exported function writes only a part of it
    failed = md.verbs.query_device(md.context, &device)
    if failed:
        return call_failed(error, failed, "ibv_query_device")
    md.port = md.config.port if md.config.port else 1
    failed = md.verbs.query_port(md.context, md.port, &port)
    if failed:
        return call_failed(error, failed, "ibv_query_port")
    md.guid = ib_be64(device.node_guid)
    md.max_mr_size = device.max_mr_size
    md.has_atomics = device.atomic_cap != IBV_ATOMIC_NONE
    md.rd_atomic = <uint8_t>min(max(device.max_qp_rd_atom, 0), <int>RD_ATOMIC)
    md.rd_atomic_init = <uint8_t>min(max(device.max_qp_init_rd_atom, 0), <int>RD_ATOMIC)
    md.link_layer = port.link_layer
    md.lid = port.lid
    md.mtu = <uint8_t>port.active_mtu
    md.max_msg = port.max_msg_sz if port.max_msg_sz else 1u << 30
    if md.config.max_msg:
        md.max_msg = min(md.max_msg, md.config.max_msg)
    md.queue_depth = min(md.config.queue_depth, <uint32_t>max(device.max_qp_wr, 1))
    md.wr_count = min(<uint32_t>WR_COUNT, <uint32_t>max(device.max_cqe // 2, 1))
    md.gid_index = md.config.gid_index
    if md.gid_index < 0:
        md.gid_index = gid_choose(md, &port)
    failed = md.verbs.query_gid(md.context, md.port, md.gid_index, &md.gid)
    if failed:
        return call_failed(error, errno, "ibv_query_gid")
    return UCXM_OK


cdef void md_probe_dmabuf(ib_md_t *md) noexcept nogil:
    """A kernel that knows the call complains of the descriptor, not of the call."""
    if md.verbs.reg_dmabuf_mr == NULL:
        return
    if md.verbs.reg_dmabuf_mr(md.pd, 0, 4096, 0, -1, 0) == NULL:
        md.has_dmabuf = errno == EBADF


cdef ucxm_status_t md_make_wrs(ib_md_t *md, ucxm_error_t *error) noexcept nogil:
    cdef uint32_t i
    md.wrs = <ib_wr_t *>calloc(md.wr_count, sizeof(ib_wr_t))
    md.peers = <ib_peer_t *>calloc(PEERS, sizeof(ib_peer_t))
    if md.wrs == NULL or md.peers == NULL:
        return ib_fail(error, UCXM_ERR_NO_MEMORY, ENOMEM, "out of memory")
    for i in range(md.wr_count):
        md.wrs[i].next = i + 1
        md.wrs[i].generation = 1
    return UCXM_OK


cdef int ib_event_add(ib_md_t *md, int fd) noexcept nogil:
    cdef epoll_event event
    memset(&event, 0, sizeof(event))
    event.events = EPOLLIN
    set_nonblocking(fd)
    return epoll_ctl(md.event_fd, EPOLL_CTL_ADD, fd, &event)


cdef ucxm_status_t md_make_queue(ib_md_t *md, ucxm_error_t *error) noexcept nogil:
    """The completion queue, and one descriptor for all events that progress() looks after."""
    cdef int failed = 0
    md.channel = md.verbs.create_channel(md.context)
    if md.channel == NULL:
        return call_failed(error, errno, "ibv_create_comp_channel")
    # Room for twice of what can be under way, for completions that nobody waits for any more.
    md.cq = md.verbs.create_cq(md.context, 2 * md.wr_count, NULL, md.channel, 0)
    if md.cq == NULL:
        return reg_failed(error, errno, "ibv_create_cq")
    md.event_fd = epoll_create1(EPOLL_CLOEXEC)
    if md.event_fd < 0:
        return call_failed(error, errno, "epoll_create1")
    failed = ib_event_add(md, md.channel.fd)
    if failed == 0 and md.owns_context:  # somebody else reads the events of a borrowed context
        failed = ib_event_add(md, md.context.async_fd)
    if failed:
        return call_failed(error, errno, "epoll_ctl")
    return UCXM_OK


cdef ucxm_status_t ib_md_init(ib_md_t *md, ucxm_verbs_t *verbs, ibv_context *context, ibv_pd *pd,
                              int owns_context, const ib_config_t *config,
                              ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status
    md.verbs = verbs
    md.context = context
    md.owns_context = owns_context != 0
    md.config = config[0]
    md.event_fd = -1
    pthread_mutex_init(&md.lock, NULL)
    pthread_mutex_init(&md.poll_lock, NULL)
    snprintf(md.name, sizeof(md.name), "%s", verbs.get_device_name(context.device))
    if pd != NULL and pd.context != context:
        status = ib_fail(error, UCXM_ERR_INVALID_PARAM, 0, "the ibv_pd is not of this ibv_context")
    else:
        status = md_query(md, error)
    if status == UCXM_OK:
        md.pd = pd
        if pd == NULL:
            md.pd = verbs.alloc_pd(context)
            md.owns_pd = 1
            if md.pd == NULL:
                status = call_failed(error, errno, "ibv_alloc_pd")
    if status == UCXM_OK:
        status = md_make_wrs(md, error)
    if status == UCXM_OK:
        status = md_make_queue(md, error)
    if status == UCXM_OK:
        md_probe_dmabuf(md)
    else:
        md.owns_context = 0
        ib_md_clear(md)
    return status


cdef void ib_md_clear(ib_md_t *md) noexcept nogil:
    if md.bounce_mr != NULL:
        md.verbs.dereg_mr(md.bounce_mr)
    if md.cq != NULL:
        md.verbs.destroy_cq(md.cq)
    if md.channel != NULL:
        md.verbs.destroy_channel(md.channel)
    if md.event_fd >= 0:
        close(md.event_fd)
    if md.owns_pd and md.pd != NULL:
        md.verbs.dealloc_pd(md.pd)
    if md.owns_context:
        md.verbs.close_device(md.context)
    free(md.bounce)
    free(md.bounce_free)
    free(md.wrs)
    free(md.peers)
    pthread_mutex_destroy(&md.lock)
    pthread_mutex_destroy(&md.poll_lock)
    memset(md, 0, sizeof(md[0]))
    md.event_fd = -1


cdef void ib_md_attr(const ib_md_t *md, ucxm_md_attr_t *attr) noexcept nogil:
    """Adds what any device of verbs has to attributes that md_attr_init has begun."""
    attr.flags |= (UCXM_MD_FLAG_REG | UCXM_MD_FLAG_NEED_MEMH | UCXM_MD_FLAG_NEED_RKEY |
                   UCXM_MD_FLAG_ENDPOINT | UCXM_MD_FLAG_EVENT_FD)
    if md.has_atomics:
        attr.flags |= UCXM_MD_FLAG_ATOMIC
    if md.has_dmabuf:
        attr.flags |= UCXM_MD_FLAG_REG_DMABUF
        attr.mem_types |= 1 << UCXM_MEM_TYPE_CUDA  # by dmabuf only
    attr.max_reg = md.max_mr_size
    attr.bounce_size = IB_BOUNCE_SIZE


cdef void ib_stat(ib_md_t *md, unsigned index, const char **name, uint64_t *value) noexcept nogil:
    cdef const char *names[10]
    cdef uint64_t *counts = <uint64_t *>&md.counts
    names = [b"reg_mr", b"dereg_mr", b"create_qp", b"destroy_qp", b"modify_qp", b"query_qp",
             b"post_send", b"completions", b"error_completions", b"async_events"]
    if index >= sizeof(names) // sizeof(names[0]):
        name[0] = NULL
        return
    name[0] = names[index]
    value[0] = ib_load64(&counts[index])
