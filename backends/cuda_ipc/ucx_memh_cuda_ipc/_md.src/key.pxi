# SPDX-License-Identifier: BSD-3-Clause
# Unpacked keys, and forgetting a peer.

cdef ucxm_status_t key_check(const cu_wire_t *wire, const ucxm_rkey_t *rkey,
                             ucxm_error_t *error) noexcept nogil:
    """Does the key's range lie in its allocation?"""
    cdef uint64_t address = rkey.info.address
    cdef uint64_t length = rkey.info.length
    if address < wire.base or length > wire.size or (
            address - wire.base > wire.size - length):
        return ucxm_refuse(error, UCXM_ERR_MALFORMED_KEY,
                           "the key's range is outside of its allocation")
    return UCXM_OK


cdef bint key_link(md_t *md, rkey_t *mine) noexcept nogil:
    """To its peer, where an eviction finds it.  False: that came first."""
    cdef peer_t *peer = mine.peer
    cdef bint in_time
    pthread_mutex_lock(&md.lock)
    in_time = not peer.evicted
    if in_time:
        mine.next = peer.rkeys
        if mine.next != NULL:
            mine.next.prev = mine
        peer.rkeys = mine
    pthread_mutex_unlock(&md.lock)
    return in_time


cdef ucxm_status_t cuda_rkey_unpack(void *priv, ucxm_rkey_t *rkey, const uint8_t *payload,
                                    size_t length, int raw, ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef rkey_t *mine = <rkey_t *>rkey.priv
    cdef cu_wire_t wire
    cdef peer_t *peer = NULL
    cdef const char *why
    cdef ucxm_status_t status
    if raw:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED,
                           "a cuda_ipc key is of no use without its envelope")
    why = wire_parse(payload, length, &wire)
    if why != NULL:
        return ucxm_refuse(error, UCXM_ERR_MALFORMED_KEY, why)
    status = key_check(&wire, rkey, error)
    if status == UCXM_OK:
        status = peer_get(md, &rkey.info.owner, &peer, error)
    if status != UCXM_OK:
        return status
    if peer.own:  # CUDA opens no handle of the same process, nor is there a need
        if not export_lives(&wire):
            status = refuse(error, UCXM_ERR_STALE_KEY, 0, &peer.identity,
                            "we do not export this memory any more")
    elif not is_local(md, &peer.identity) and not wire.kinds & WIRE_FABRIC:
        status = refuse(error, UCXM_ERR_UNREACHABLE, 0, &peer.identity,
                        "on another host or in another pid namespace, and no fabric handle")
    else:
        status = mapping_get(md, peer, &wire, &mine.mapping, error)
        if status == UCXM_OK:
            mine.distance = mine.mapping.address - wire.base
    if status != UCXM_OK:
        peer_put(md, peer)
        return status
    mine.peer = peer
    if key_link(md, mine):
        return UCXM_OK
    if mine.mapping != NULL:
        mapping_drop(md.device, mine.mapping)
    status = refuse(error, UCXM_ERR_STALE_KEY, 0, &peer.identity, "it was evicted meanwhile")
    peer_put(md, peer)
    return status


cdef void cuda_rkey_release(void *priv, ucxm_rkey_t *rkey) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef rkey_t *mine = <rkey_t *>rkey.priv
    cdef mapping_t *m
    pthread_mutex_lock(&md.lock)
    if mine.prev != NULL:
        mine.prev.next = mine.next
    else:
        mine.peer.rkeys = mine.next
    if mine.next != NULL:
        mine.next.prev = mine.prev
    m = mine.mapping
    mine.mapping = NULL
    pthread_mutex_unlock(&md.lock)
    if m != NULL:
        mapping_drop(md.device, m)
    peer_put(md, mine.peer)


cdef ucxm_status_t key_use(md_t *md, const ucxm_rkey_t *rkey, mapping_t **mapping_p,
                           ucxm_error_t *error) noexcept nogil:
    """May it be used now?  Then its mapping (NULL: our own memory) stays until mapping_unuse."""
    cdef rkey_t *mine = <rkey_t *>rkey.priv
    cdef peer_t *peer = mine.peer
    cdef bint usable = True
    cdef bint evicted
    pthread_mutex_lock(&md.lock)
    evicted = peer.evicted
    mapping_p[0] = mine.mapping
    if not evicted and mine.mapping != NULL:
        usable = mapping_use(mine.mapping)
    pthread_mutex_unlock(&md.lock)
    if evicted:
        return refuse(error, UCXM_ERR_STALE_KEY, 0, &peer.identity, "it was evicted")
    if peer_ended(peer):
        if usable and mapping_p[0] != NULL:
            mapping_unuse(md.device, mapping_p[0])
        return refuse(error, UCXM_ERR_PEER_GONE, 0, &peer.identity, "the process has ended")
    if not usable:
        return refuse(error, UCXM_ERR_STALE_KEY, 0, &peer.identity,
                      "it has freed this memory or exports it anew")
    return UCXM_OK


cdef ucxm_status_t cuda_rkey_ptr(void *priv, const ucxm_rkey_t *rkey, uint64_t address,
                                 void **ptr, ucxm_error_t *error) noexcept nogil:
    """A device pointer, good for as long as the key is."""
    cdef md_t *md = <md_t *>priv
    cdef mapping_t *m = NULL
    cdef ucxm_status_t status = key_use(md, rkey, &m, error)
    if status != UCXM_OK:
        return status
    ptr[0] = <void *>(address + (<rkey_t *>rkey.priv).distance)
    if m != NULL:
        mapping_unuse(md.device, m)
    return UCXM_OK


cdef ucxm_status_t cuda_peer_evict(void *priv, const ucxm_identity_t *identity,
                                   ucxm_error_t *error) noexcept nogil:
    """All that its keys have mapped goes, at once or with the operations that are at it."""
    cdef md_t *md = <md_t *>priv
    cdef peer_t *peer
    cdef rkey_t *rkey
    cdef mapping_t *m
    pthread_mutex_lock(&md.lock)
    peer = peer_find(md, identity)
    if peer != NULL:
        peer_unlink(md, peer)
        peer.evicted = 1
    pthread_mutex_unlock(&md.lock)
    if peer == NULL:
        return UCXM_OK
    while True:
        m = NULL
        pthread_mutex_lock(&md.lock)
        rkey = peer.rkeys
        while rkey != NULL and rkey.mapping == NULL:
            rkey = rkey.next
        if rkey != NULL:
            m = rkey.mapping
            rkey.mapping = NULL
        pthread_mutex_unlock(&md.lock)
        if m == NULL:
            break
        mapping_drop(md.device, m)
    peer_put(md, peer)
    return UCXM_OK
