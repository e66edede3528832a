# SPDX-License-Identifier: BSD-3-Clause
# The importer's side: rkey_unpack, and the cache that makes equal keys one object.
#
# A hit is a look-up by key id and a memcmp of the whole key; checksum and identity are looked at
# on a miss only.  The table holds no key that nobody uses, so it needs no eviction, and nothing
# is remembered of a key that could not be unpacked.

cdef enum:
    RKEY_LIVE = 0
    RKEY_REVOKED = 1   # a notice came
    RKEY_CLOSED = 2    # its native part went with the Md

cdef struct rkey_t:
    ucxm_rkey_t pub    # first: what the backend sees
    md_t *md
    rkey_t *next
    rkey_t *prev
    uint32_t refs
    uint32_t state
    uint32_t shared    # in the table
    uint32_t native    # the backend has unpacked it
    uint32_t size
    uint8_t key[UCXM_KEY_MAX]


cdef inline uint32_t rkey_bucket(uint64_t key_id) noexcept nogil:
    return <uint32_t>((key_id * <uint64_t>0x9e3779b97f4a7c15) >> 32) % BUCKETS


cdef inline rkey_t **rkey_home(md_t *md, rkey_t *rkey, spin_t **lock_p) noexcept nogil:
    """The list that this rkey is (or will be) in, and the list's lock."""
    cdef uint32_t bucket
    if not rkey.shared:
        lock_p[0] = &md.tree_lock
        return &md.private_rkeys
    bucket = rkey_bucket(rkey.pub.info.key_id)
    lock_p[0] = &md.stripes[bucket % STRIPES].lock
    return &md.buckets[bucket]


cdef inline void rkey_link(rkey_t **head, rkey_t *rkey) noexcept nogil:
    rkey.prev = NULL
    rkey.next = head[0]
    if head[0] != NULL:
        head[0].prev = rkey
    head[0] = rkey


cdef inline void rkey_unlink(rkey_t **head, rkey_t *rkey) noexcept nogil:
    if rkey.prev != NULL:
        rkey.prev.next = rkey.next
    else:
        head[0] = rkey.next
    if rkey.next != NULL:
        rkey.next.prev = rkey.prev


cdef inline rkey_t *rkey_find(rkey_t *rkey, uint64_t key_id, const uint8_t *key,
                              size_t size) noexcept nogil:
    """The same key in this list; the list's lock is held."""
    while rkey != NULL:
        if rkey.pub.info.key_id == key_id and rkey.size == size and (
                memcmp(rkey.key, key, size) == 0):
            return rkey
        rkey = rkey.next
    return NULL


cdef inline void rkey_get(rkey_t *rkey) noexcept nogil:
    add32(&rkey.refs, 1)


cdef void rkey_put(rkey_t *rkey) noexcept nogil:
    cdef md_t *md = rkey.md
    cdef spin_t *lock = NULL
    cdef rkey_t **head
    cdef bint entered
    cdef uint32_t refs
    if md.epoch != fork_epoch:
        return  # the parent's; nothing of it is freed here
    refs = load32(&rkey.refs)
    while refs > 1:
        if cas32(&rkey.refs, refs, refs - 1):
            return
        refs = load32(&rkey.refs)
    # The count falls to zero under the lock under which a hit raises it.
    head = rkey_home(md, rkey, &lock)
    # Inside, so that a close of the Md does not walk the lists at the same time.
    entered = md_enter(md) == UCXM_OK
    spin_lock(lock)
    if sub32(&rkey.refs, 1) != 0:
        spin_unlock(lock)
        if entered:
            md_leave(md)
        return
    rkey_unlink(head, rkey)
    spin_unlock(lock)
    if entered:
        if rkey.native:
            md.ops.rkey_release(md.priv, &rkey.pub)
        md_leave(md)
    sub32(&md.live_rkeys, 1)
    mem_free(rkey)
    md_put(md)


cdef ucxm_status_t key_parse(const uint8_t *key, size_t length, size_t *size_p,
                             ucxm_error_t *error) noexcept nogil:
    """Is this a key that we can read?  Looks at no byte beyond `length`."""
    cdef size_t header, size
    if length < UCXM_KEY_HEADER_SIZE:
        error_text(error, "shorter than a key's header")
        return UCXM_ERR_MALFORMED_KEY
    if get_le(key, UCXM_KEY_OFF_MAGIC, 2) != UCXM_KEY_MAGIC:
        error_text(error, "no key: its magic number is another")
        return UCXM_ERR_MALFORMED_KEY
    if get_le(key, UCXM_KEY_OFF_VERSION, 1) != UCXM_KEY_VERSION:
        error_text(error, "a key of another version")
        return UCXM_ERR_KEY_VERSION
    header = get_le(key, UCXM_KEY_OFF_HEADER_LEN, 1)
    size = get_le(key, UCXM_KEY_OFF_TOTAL_LEN, 2)
    if header < UCXM_KEY_HEADER_SIZE or size > length or size > UCXM_KEY_MAX or (
            header + get_le(key, UCXM_KEY_OFF_PAYLOAD_LEN, 2) > size):
        error_text(error, "truncated: its lengths do not fit")
        return UCXM_ERR_MALFORMED_KEY
    size_p[0] = size
    return UCXM_OK


cdef ucxm_status_t key_decode(md_t *md, const uint8_t *key, size_t size, ucxm_key_info_t *info,
                              ucxm_error_t *error) noexcept nogil:
    """Check a parsed key's contents and read its header.  `md` NULL: of any component."""
    if get_le(key, UCXM_KEY_OFF_CRC, 4) != key_crc(key, size):
        error_text(error, "damaged: its checksum does not fit")
        return UCXM_ERR_MALFORMED_KEY
    if md != NULL and get_le(key, UCXM_KEY_OFF_COMPONENT, 4) != md.component_id:
        error_text(error, "a key of another component")
        return UCXM_ERR_INVALID_PARAM
    info.key_id = get_le(key, UCXM_KEY_OFF_KEY_ID, 8)
    info.address = get_le(key, UCXM_KEY_OFF_ADDRESS, 8)
    info.length = get_le(key, UCXM_KEY_OFF_LENGTH, 8)
    info.rights = <uint32_t>get_le(key, UCXM_KEY_OFF_RIGHTS, 4)
    info.flags = <uint16_t>get_le(key, UCXM_KEY_OFF_FLAGS, 2)
    info.reserved = 0
    memcpy(&info.owner, key + UCXM_KEY_OFF_OWNER, sizeof(info.owner))
    if info.length > UINT64_MAX - info.address or (
            info.rights & ~<uint32_t>UCXM_MEM_ACCESS_REMOTE or
            (info.length == 0) != ((info.flags & UCXM_KEY_FLAG_EMPTY) != 0)):
        error_text(error, "its range or rights make no sense")
        return UCXM_ERR_MALFORMED_KEY
    if info.flags & UCXM_KEY_FLAG_REVOKED:
        error_text(error, "a notice that a key was revoked, not a key")
        return UCXM_ERR_REVOKED
    return UCXM_OK


cdef rkey_t *rkey_alloc(md_t *md) noexcept nogil:
    cdef rkey_t *rkey = <rkey_t *>alloc_zeroed(align16(sizeof(rkey_t)) + md.ops.rkey_size)
    if rkey == NULL:
        return NULL
    rkey.pub.priv = <char *>rkey + align16(sizeof(rkey_t))
    rkey.md = md
    rkey.refs = 1
    return rkey


cdef ucxm_status_t rkey_make(md_t *md, const uint8_t *key, size_t size, rkey_t **rkey_p,
                             ucxm_error_t *error) noexcept nogil:
    """A new rkey for a parsed key, known to nobody yet; rkey_discard is its end until it is."""
    cdef size_t header = get_le(key, UCXM_KEY_OFF_HEADER_LEN, 1)
    cdef ucxm_status_t status
    cdef rkey_t *rkey
    if not md.attr.flags & UCXM_MD_FLAG_NEED_RKEY:
        return refuse(error, UCXM_ERR_UNSUPPORTED, "this domain does not unpack keys")
    rkey = rkey_alloc(md)
    if rkey == NULL:
        return UCXM_ERR_NO_MEMORY
    status = key_decode(md, key, size, &rkey.pub.info, error)
    if status == UCXM_OK and rkey.pub.info.length != 0:
        status = md.ops.rkey_unpack(md.priv, &rkey.pub, key + header,
                                    get_le(key, UCXM_KEY_OFF_PAYLOAD_LEN, 2), False, error)
        rkey.native = status == UCXM_OK
    if status == UCXM_OK:
        rkey_p[0] = rkey
    else:
        mem_free(rkey)
    return status


cdef void rkey_discard(rkey_t *rkey) noexcept nogil:
    """One that was not published."""
    if rkey.native:
        rkey.md.ops.rkey_release(rkey.md.priv, &rkey.pub)
    mem_free(rkey)


cdef ucxm_status_t rkey_table(md_t *md) noexcept nogil:
    """The table is made by the first unpack: an owner needs none."""
    cdef rkey_t **buckets
    if load_ptr(<void **>&md.buckets) != NULL:
        return UCXM_OK
    buckets = <rkey_t **>alloc_zeroed(BUCKETS * sizeof(rkey_t *))
    if buckets == NULL:
        return UCXM_ERR_NO_MEMORY
    spin_lock(&md.tree_lock)
    if md.buckets == NULL:
        store_ptr(<void **>&md.buckets, buckets)
        buckets = NULL
    spin_unlock(&md.tree_lock)
    mem_free(buckets)
    return UCXM_OK


cdef rkey_t *rkey_publish(md_t *md, rkey_t *rkey) noexcept nogil:
    """Put a new rkey where others find it; or give the one that came first."""
    cdef spin_t *lock = NULL
    cdef rkey_t *first = NULL
    cdef rkey_t **head
    rkey.shared = rkey.size != 0 and add32(&md.live_rkeys, 1) <= RKEYS_MAX
    if rkey.size == 0:
        add32(&md.live_rkeys, 1)
    head = rkey_home(md, rkey, &lock)
    md_get(md)
    spin_lock(lock)
    if rkey.shared:
        first = rkey_find(head[0], rkey.pub.info.key_id, rkey.key, rkey.size)
    if first == NULL:
        rkey_link(head, rkey)
        spin_unlock(lock)
        return rkey
    rkey_get(first)
    spin_unlock(lock)
    sub32(&md.live_rkeys, 1)
    rkey_discard(rkey)
    md_put(md)
    return first


cdef ucxm_status_t rkey_miss(md_t *md, const uint8_t *key, size_t size, rkey_t **rkey_p,
                             ucxm_error_t *error) noexcept nogil:
    cdef rkey_t *rkey = NULL
    cdef ucxm_status_t status = rkey_make(md, key, size, &rkey, error)
    if status == UCXM_OK:
        status = rkey_table(md)
        if status != UCXM_OK:
            rkey_discard(rkey)
    if status != UCXM_OK:
        return status
    rkey.size = <uint32_t>size
    memcpy(rkey.key, key, size)
    rkey_p[0] = rkey_publish(md, rkey)
    return UCXM_OK


cdef inline rkey_t *rkey_hit(md_t *md, const uint8_t *key, size_t size) noexcept nogil:
    """The known rkey for these bytes, with a reference; or NULL."""
    cdef uint64_t key_id = get_le(key, UCXM_KEY_OFF_KEY_ID, 8)
    cdef uint32_t bucket = rkey_bucket(key_id)
    cdef stripe_t *stripe = &md.stripes[bucket % STRIPES]
    cdef rkey_t *rkey
    if load_ptr(<void **>&md.buckets) == NULL:
        return NULL
    spin_lock(&stripe.lock)
    rkey = rkey_find(md.buckets[bucket], key_id, key, size)
    if rkey != NULL:
        rkey_get(rkey)
        bump64(&stripe.hits, 1)
    spin_unlock(&stripe.lock)
    return rkey


cdef ucxm_status_t rkey_unpack_hit(md_t *md, const uint8_t *key, size_t length, size_t *size_p,
                                   rkey_t **rkey_p, ucxm_error_t *error) noexcept nogil:
    """The short part: OK with *rkey_p NULL means that the long part must follow."""
    cdef ucxm_status_t status
    rkey_p[0] = NULL
    if md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    if load32(&md.state) == MD_CLOSED:
        return UCXM_ERR_CLOSED
    status = key_parse(key, length, size_p, error)
    if status == UCXM_OK:
        rkey_p[0] = rkey_hit(md, key, size_p[0])
    return status


cdef ucxm_status_t rkey_unpack_miss(md_t *md, const uint8_t *key, size_t size, rkey_t **rkey_p,
                                    ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t status = md_enter(md)
    if status != UCXM_OK:
        return status
    fetch_add64(&md.counters.rkey_misses, 1)
    status = rkey_miss(md, key, size, rkey_p, error)
    md_leave(md)
    return status


cdef ucxm_status_t rkey_from_raw(md_t *md, const uint8_t *raw, size_t length, uint64_t address,
                                 uint64_t size, rkey_t **rkey_p,
                                 ucxm_error_t *error) noexcept nogil:
    """A native payload without an envelope: nothing of it can be checked."""
    cdef ucxm_status_t status
    cdef rkey_t *rkey
    rkey_p[0] = NULL
    if size > UINT64_MAX - address:
        error_text(error, "the range wraps around")
        return UCXM_ERR_INVALID_PARAM
    if md.attr.rkey_raw_size == 0:
        error_text(error, "this domain has no native keys")
        return UCXM_ERR_UNSUPPORTED
    status = md_enter(md)
    if status != UCXM_OK:
        return status
    rkey = rkey_alloc(md)
    if rkey == NULL:
        status = UCXM_ERR_NO_MEMORY
    else:
        rkey.pub.info.address = address
        rkey.pub.info.length = size
        rkey.pub.info.rights = UCXM_MEM_ACCESS_REMOTE
        status = md.ops.rkey_unpack(md.priv, &rkey.pub, raw, length, True, error)
        if status == UCXM_OK:
            rkey.native = 1
            rkey_p[0] = rkey_publish(md, rkey)
        else:
            mem_free(rkey)
    md_leave(md)
    return status


cdef ucxm_status_t rkey_revoke(md_t *md, const uint8_t *notice, size_t length, uint32_t *count_p,
                               ucxm_error_t *error) noexcept nogil:
    """Mark the rkeys that a revoke notice names; they refuse from now on, asking no device."""
    cdef size_t size = 0
    cdef uint64_t key_id
    cdef uint32_t bucket
    cdef stripe_t *stripe
    cdef rkey_t *rkey
    cdef ucxm_status_t status
    count_p[0] = 0
    if md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    status = key_parse(notice, length, &size, error)
    if status != UCXM_OK:
        return status
    if get_le(notice, UCXM_KEY_OFF_CRC, 4) != key_crc(notice, size) or (
            not get_le(notice, UCXM_KEY_OFF_FLAGS, 2) & UCXM_KEY_FLAG_REVOKED):
        error_text(error, "not a revoke notice")
        return UCXM_ERR_MALFORMED_KEY
    if load_ptr(<void **>&md.buckets) == NULL:
        return UCXM_OK
    key_id = get_le(notice, UCXM_KEY_OFF_KEY_ID, 8)
    bucket = rkey_bucket(key_id)
    stripe = &md.stripes[bucket % STRIPES]
    spin_lock(&stripe.lock)
    rkey = md.buckets[bucket]
    while rkey != NULL:
        if rkey.pub.info.key_id == key_id and (
                memcmp(rkey.key + UCXM_KEY_OFF_OWNER, notice + UCXM_KEY_OFF_OWNER,
                       sizeof(ucxm_identity_t)) == 0):
            if cas32(&rkey.state, RKEY_LIVE, RKEY_REVOKED):
                count_p[0] += 1
        rkey = rkey.next
    spin_unlock(&stripe.lock)
    return UCXM_OK


cdef ucxm_status_t rkey_check(rkey_t *rkey) noexcept nogil:
    cdef uint32_t state
    if rkey.md.epoch != fork_epoch:
        return UCXM_ERR_FORKED
    state = load32(&rkey.state)
    if state == RKEY_LIVE:
        return UCXM_OK
    return UCXM_ERR_REVOKED if state == RKEY_REVOKED else UCXM_ERR_CLOSED


cdef void rkeys_close(md_t *md) noexcept nogil:
    """The Md goes: release the native part of what its users still hold."""
    cdef uint32_t bucket
    cdef rkey_t *rkey
    for bucket in range(BUCKETS + 1):
        if bucket == BUCKETS:
            rkey = md.private_rkeys
        elif md.buckets == NULL:
            continue
        else:
            rkey = md.buckets[bucket]
        while rkey != NULL:
            if rkey.native:
                md.ops.rkey_release(md.priv, &rkey.pub)
            store32(&rkey.state, RKEY_CLOSED)
            rkey = rkey.next


cdef int rkey_compare(const rkey_t *one, const rkey_t *two) noexcept nogil:
    """A total order by owner, key id and contents."""
    cdef int order
    if one == two:
        return 0
    order = memcmp(&one.pub.info.owner, &two.pub.info.owner, sizeof(ucxm_identity_t))
    if order == 0:
        order = memcmp(&one.pub.info.key_id, &two.pub.info.key_id, sizeof(uint64_t))
    if order == 0:
        order = (one.size > two.size) - (one.size < two.size)
    if order == 0:
        order = memcmp(one.key, two.key, one.size)
    if order == 0:  # RAW keys have neither: tell the objects apart
        order = 1 if <uintptr_t>one > <uintptr_t>two else -1
    return (order > 0) - (order < 0)


cdef ucxm_status_t rkey_ptr(rkey_t *rkey, uint64_t address, void **pointer,
                            ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = rkey.md
    cdef ucxm_status_t status = rkey_check(rkey)
    if status != UCXM_OK:
        return status
    # An empty key has no native part, and there is nothing to point at.
    if rkey.pub.info.length == 0 or address - rkey.pub.info.address > rkey.pub.info.length:
        return UCXM_ERR_RANGE
    status = md_enter(md)
    if status == UCXM_OK:
        status = md.ops.rkey_ptr(md.priv, &rkey.pub, address, pointer, error)
        md_leave(md)
    return status


cdef ucxm_status_t peer_probe(md_t *md, const uint8_t *key, size_t length,
                              ucxm_error_t *error) noexcept nogil:
    """Unpack it anew, whatever is known of it, and keep nothing."""
    cdef size_t size = 0
    cdef rkey_t *rkey = NULL
    cdef ucxm_status_t status = md_enter(md)
    if status != UCXM_OK:
        return status
    status = key_parse(key, length, &size, error)
    if status == UCXM_OK:
        status = rkey_make(md, key, size, &rkey, error)
    if status == UCXM_OK:
        rkey_discard(rkey)
    md_leave(md)
    return status
