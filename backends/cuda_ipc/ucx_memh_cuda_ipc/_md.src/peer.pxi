# SPDX-License-Identifier: BSD-3-Clause
# The processes whose keys a domain holds.

cdef ucxm_status_t refuse(ucxm_error_t *error, ucxm_status_t status, int sys_errno,
                          const ucxm_identity_t *who, const char *why) noexcept nogil:
    if error != NULL:
        error.sys_errno = sys_errno
        snprintf(error.text, sizeof(error.text), "pid %u start %llu: %s", who.pid,
                 <unsigned long long>who.start_time, why)
    return status


cdef bint is_local(const md_t *md, const ucxm_identity_t *who) noexcept nogil:
    """On this host, and its pid is one of ours."""
    return who.host == md.self.host and who.pid_ns == md.self.pid_ns


cdef bint peer_ended(const peer_t *peer) noexcept nogil:
    return peer.pidfd >= 0 and ucxm_pidfd_ended(peer.pidfd) > 0


cdef ucxm_status_t peer_identify(peer_t *peer, ucxm_error_t *error) noexcept nogil:
    """Open the process and make sure that it is the one that the identity names."""
    cdef const ucxm_identity_t *who = &peer.identity
    cdef ucxm_process_t process
    cdef int result, fd
    peer.pidfd = ucxm_pidfd_open(<pid_t>who.pid)
    if peer.pidfd < 0:
        result = -peer.pidfd
        peer.pidfd = -1
        if result == ESRCH:
            return refuse(error, UCXM_ERR_PEER_GONE, ESRCH, who, "no such process")
        if result == EMFILE or result == ENFILE:
            return refuse(error, UCXM_ERR_NO_RESOURCE, result, who, "pidfd_open: out of files")
        return refuse(error, UCXM_ERR_UNREACHABLE, result, who, "pidfd_open failed")
    fd = ucxm_process_open(<pid_t>who.pid)
    result = -fd
    if fd >= 0:
        result = ucxm_process_read(fd, &process)
        close(fd)
    # Asked last: if the pidfd's process lives now, the pid was its own all the time.
    if peer_ended(peer):
        return refuse(error, UCXM_ERR_PEER_GONE, 0, who, "the process has ended")
    if result != 0:
        return refuse(error, UCXM_ERR_UNREACHABLE, result, who,
                      "its /proc/PID/stat cannot be read, so it cannot be identified")
    if process.start_time != who.start_time:
        return refuse(error, UCXM_ERR_STALE_KEY, 0, who, "another process has this pid now")
    return UCXM_OK


cdef peer_t *peer_find(md_t *md, const ucxm_identity_t *who) noexcept nogil:
    """The peer with one more reference, or NULL; md.lock is held."""
    cdef peer_t *peer = md.peers
    while peer != NULL and memcmp(&peer.identity, who, sizeof(who[0])) != 0:
        peer = peer.next
    if peer != NULL:
        peer.refs += 1
    return peer


cdef void peer_unlink(md_t *md, peer_t *peer) noexcept nogil:
    """A later key of the same process makes another one; md.lock is held."""
    cdef peer_t **at = &md.peers
    if not peer.linked:
        return
    while at[0] != peer:
        at = &at[0].next
    at[0] = peer.next
    peer.linked = False


cdef void peer_free(peer_t *peer) noexcept nogil:
    if peer.pidfd >= 0:
        close(peer.pidfd)
    free(peer)


cdef void peer_put(md_t *md, peer_t *peer) noexcept nogil:
    cdef bint last
    pthread_mutex_lock(&md.lock)
    peer.refs -= 1
    last = peer.refs == 0
    if last:
        peer_unlink(md, peer)
    pthread_mutex_unlock(&md.lock)
    if last:
        peer_free(peer)


cdef ucxm_status_t peer_get(md_t *md, const ucxm_identity_t *who, peer_t **peer_p,
                            ucxm_error_t *error) noexcept nogil:
    """A reference to the identified peer, alive if that can be told."""
    cdef peer_t *peer
    cdef peer_t *other
    cdef ucxm_status_t status = UCXM_OK
    if who.start_time == 0 or who.pid == 0 or who.pid > 0x7fffffff:
        return refuse(error, UCXM_ERR_UNREACHABLE, 0, who, "the key does not say whose it is")
    pthread_mutex_lock(&md.lock)
    peer = peer_find(md, who)
    pthread_mutex_unlock(&md.lock)
    if peer == NULL:
        peer = <peer_t *>calloc(1, sizeof(peer_t))
        if peer == NULL:
            return UCXM_ERR_NO_MEMORY
        peer.identity = who[0]
        peer.refs = 1
        peer.pidfd = -1
        peer.own = memcmp(who, &md.self, sizeof(who[0])) == 0
        if not peer.own and is_local(md, who):
            status = peer_identify(peer, error)
        if status != UCXM_OK:
            peer_free(peer)
            return status
        pthread_mutex_lock(&md.lock)
        other = peer_find(md, who)  # another thread may have been faster
        if other == NULL:
            peer.next = md.peers
            md.peers = peer
            peer.linked = True
        pthread_mutex_unlock(&md.lock)
        if other != NULL:
            peer_free(peer)
            peer = other
    if peer_ended(peer):
        peer_put(md, peer)
        return refuse(error, UCXM_ERR_PEER_GONE, 0, who, "the process has ended")
    peer_p[0] = peer
    return UCXM_OK


cdef ucxm_status_t export_check(md_t *md, const peer_t *peer, const cu_wire_t *wire, bint *sure,
                                ucxm_error_t *error) noexcept nogil:
    """Is the allocation still exported?  `sure`: it is; else that could not be found out."""
    cdef uint64_t word = 0
    cdef int result
    sure[0] = False
    if not is_local(md, &peer.identity):
        return UCXM_OK
    result = ucxm_process_peek(<pid_t>peer.identity.pid, wire.record, &word, sizeof(word))
    if peer_ended(peer) or result == ESRCH:
        return refuse(error, UCXM_ERR_PEER_GONE, 0, &peer.identity, "the process has ended")
    if result == EFAULT or (result == 0 and word != wire.nonce):
        return refuse(error, UCXM_ERR_STALE_KEY, 0, &peer.identity,
                      "it does not export this memory any more")
    sure[0] = result == 0
    return UCXM_OK
