# SPDX-License-Identifier: BSD-3-Clause
# Which mkey stands for which key.

cdef void mkey_rights(mlx5_mkey_t *mkey, uint64_t rights) noexcept nogil:
    """What the key allows a peer.  Its writes are local writes on the registration below."""
    mkey.rr = (rights & UCXM_MEM_ACCESS_REMOTE_GET) != 0
    mkey.rw = (rights & UCXM_MEM_ACCESS_REMOTE_PUT) != 0
    mkey.a = (rights & UCXM_MEM_ACCESS_REMOTE_ATOMIC) != 0
    mkey.lw = mkey.rw or mkey.a


cdef unsigned mkey_access(const mlx5_mkey_t *mkey) noexcept nogil:
    """The same in the words of verbs."""
    cdef unsigned access = 0
    if mkey.rr:
        access |= IBV_ACCESS_REMOTE_READ
    if mkey.rw:
        access |= IBV_ACCESS_REMOTE_WRITE
    if mkey.a:
        access |= IBV_ACCESS_REMOTE_ATOMIC
    if mkey.lw:
        access |= IBV_ACCESS_LOCAL_WRITE
    return access


cdef uint8_t next_tag(md_t *md) noexcept nogil:
    """An index that firmware gives again gets another value."""
    cdef uint8_t tag = md.tag
    md.tag = <uint8_t>((tag + 1) % TAGS)
    return tag


cdef void mkey_describe(const md_t *md, const ucxm_memh_own_t *own, uint32_t lkey, uint8_t kind,
                        mlx5_mkey_t *mkey) noexcept nogil:
    """The mkey of that kind for a handle, but for its tag."""
    cdef uint64_t rights = own.rights
    memset(mkey, 0, sizeof(mkey[0]))
    if kind == UCXM_KEY_DERIVED:
        mlx5_mkey_klm(mkey, own.address, own.length)
    else:
        mlx5_mkey_ksm(mkey, own.address, own.length, md.page, max(md.caps.atomic_align, 8u))
        if kind == UCXM_KEY_ATOMIC:
            rights &= UCXM_MEM_ACCESS_REMOTE_ATOMIC
        else:
            rights &= UCXM_MEM_ACCESS_REMOTE_GET | UCXM_MEM_ACCESS_REMOTE_PUT
    mkey_rights(mkey, rights)
    mkey.lkey = lkey
    mkey.pdn = md.pdn
    mkey.qpn = PRM_QPN_ANY if own.ep == NULL else ib_ep_qpn(own.ep)


cdef ucxm_status_t mkey_check(const md_t *md, const mlx5_mkey_t *mkey,
                              ucxm_error_t *error) noexcept nogil:
    """Would the device take it?"""
    if mkey.list_size > md.caps.max_klm_list:
        return ib_fail(error, UCXM_ERR_EXCEEDS_LIMIT, 0,
                       "the key needs %llu translation entries, the device takes %llu",
                       <unsigned long long>mkey.list_size,
                       <unsigned long long>md.caps.max_klm_list)
    if mkey.a and not md.can_atomic:
        return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0,
                       "this device has no atomics through indirect keys")
    return UCXM_OK


cdef ucxm_status_t mlx5_mem_derive(void *priv, const ucxm_memh_t *base, const ucxm_memh_t *memh,
                                   ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef const ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef mlx5_mkey_t mkey
    if own.length <= md.derive_length and not own.rights & md.derive_never:
        return UCXM_OK  # what nearly all are, without describing a key that may never be made
    if not md.can_derive:
        return ib_fail(error, UCXM_ERR_UNSUPPORTED, 0, "this device makes no KLM keys")
    if own.length == 0:
        return UCXM_OK
    mkey_describe(md, own, memh.inherited.lkey, UCXM_KEY_DERIVED, &mkey)
    return mkey_check(md, &mkey, error)


cdef ucxm_status_t mlx5_mkey_pack(void *priv, const ucxm_memh_t *memh,
                                  const ucxm_key_slot_t *rma, const ucxm_key_slot_t *atomic,
                                  uint8_t *payload, size_t *length,
                                  ucxm_error_t *error) noexcept nogil:
    """The native 8 bytes as in UCT: the key for put and get, the key for atomics (all ones: the
    same).  Then the device's node guid."""
    cdef md_t *md = <md_t *>priv
    cdef uint32_t direct = IB_NO_KEY
    if rma != NULL:
        direct = rma.value if rma.object != NULL else memh.inherited.reg.rkey
    ib_put32(payload, direct)
    ib_put32(payload + 4, IB_NO_KEY if atomic == NULL else atomic.value)
    ib_put64(payload + 8, md.ib.guid)
    length[0] = PACKED_SIZE
    return UCXM_OK


cdef void mlx5_mem_enforcement(void *priv, const ucxm_memh_t *memh,
                               ucxm_enforcement_t *enforcement) noexcept nogil:
    """The device checks every access against the key; a base's own key lasts as long as its
    registration."""
    cdef bint derived = memh == NULL or memh.id.parent != NULL
    memset(enforcement, UCXM_ENFORCE_NONE, sizeof(enforcement[0]))
    if memh == NULL and not (<md_t *>priv).can_derive:
        return
    memset(enforcement.rights, UCXM_ENFORCE_ENFORCED, sizeof(enforcement.rights))
    memset(enforcement.range, UCXM_ENFORCE_ENFORCED, sizeof(enforcement.range))
    if not derived and ib_adopted(memh):
        # It may allow more than its adopter knows, and more than a key says.
        memset(enforcement.rights, UCXM_ENFORCE_COOPERATIVE, sizeof(enforcement.rights))
    if derived:
        memset(enforcement.revoke, UCXM_ENFORCE_ENFORCED, sizeof(enforcement.revoke))


def create_mkey_mailbox(kind, address, length, rights, *, lkey, pdn, qpn=0xffffff, tag=0,
                        page=4096, atomic_align=8):
    """The bytes of the CREATE_MKEY for such a key: `kind` is "derived", "indirect" or "atomic".

    For people who want to see, or check, what is sent.
    """
    cdef ucxm_memh_own_t own
    cdef md_t md
    cdef mlx5_mkey_t mkey
    cdef uint8_t *box
    cdef size_t size
    kinds = {"derived": UCXM_KEY_DERIVED, "indirect": UCXM_KEY_INDIRECT,
             "atomic": UCXM_KEY_ATOMIC}
    memset(&own, 0, sizeof(own))
    memset(&md, 0, sizeof(md))
    own.address = address
    own.length = length
    own.rights = rights
    md.page = page
    md.caps.atomic_align = atomic_align
    md.pdn = pdn
    mkey_describe(&md, &own, lkey, kinds[kind], &mkey)
    mkey.qpn = qpn
    mkey.tag = tag
    size = mlx5_create_mkey_size(&mkey)
    box = <uint8_t *>calloc(1, size)
    if box == NULL:
        raise MemoryError
    try:
        mlx5_create_mkey_fill(box, &mkey)
        return (<char *>box)[:size]
    finally:
        free(box)
