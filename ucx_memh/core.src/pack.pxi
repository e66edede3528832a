# SPDX-License-Identifier: BSD-3-Clause
# mkey_pack: the bytes that a peer needs.  The first pack makes the native keys and keeps the
# finished bytes; every later one copies them, with no lock and no call.

cdef extern from *:
    """
    #include <stddef.h>
    #include <string.h>

    #if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "packed keys are little-endian; this machine would need byte swaps"
    #endif

    /* CRC-32C, eight bytes at a time: table k says what a byte does k places further on.  A key's
       first pack and the unpack of a new one would be half this, so processors that can do it. */
    static uint32_t ucxm_crc_table[8][256];
    static uint32_t ucxm_crc_by_table(uint32_t crc, const uint8_t *data, size_t size) {
        for (; size >= 8; size -= 8, data += 8) {
            uint64_t word, next = 0;
            memcpy(&word, data, 8);
            word ^= crc;
            for (int k = 0; k < 8; ++k)
                next ^= ucxm_crc_table[7 - k][(word >> 8 * k) & 0xff];
            crc = (uint32_t)next;
        }
        while (size--)
            crc = (crc >> 8) ^ ucxm_crc_table[0][(crc ^ *data++) & 0xff];
        return crc;
    }
    #if defined(__x86_64__)
    __attribute__((target("sse4.2")))
    static uint32_t ucxm_crc_by_instruction(uint32_t crc, const uint8_t *data, size_t size) {
        uint64_t sum = crc;
        for (; size >= 8; size -= 8, data += 8) {
            uint64_t word;
            memcpy(&word, data, 8);
            sum = __builtin_ia32_crc32di(sum, word);
        }
        while (size--)
            sum = __builtin_ia32_crc32qi((uint32_t)sum, *data++);
        return (uint32_t)sum;
    }
    static int ucxm_crc_has_instruction(void) {
        return __builtin_cpu_supports("sse4.2") != 0;
    }
    #else
    #define ucxm_crc_by_instruction ucxm_crc_by_table
    static int ucxm_crc_has_instruction(void) { return 0; }
    #endif
    static uint32_t (*ucxm_crc_add)(uint32_t, const uint8_t *, size_t) = ucxm_crc_by_table;
    static void ucxm_crc_init(void) {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; ++bit)
                crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1)));
            ucxm_crc_table[0][i] = crc;
        }
        for (int k = 1; k < 8; ++k)
            for (uint32_t i = 0; i < 256; ++i) {
                uint32_t crc = ucxm_crc_table[k - 1][i];
                ucxm_crc_table[k][i] = (crc >> 8) ^ ucxm_crc_table[0][crc & 0xff];
            }
        if (ucxm_crc_has_instruction())
            ucxm_crc_add = ucxm_crc_by_instruction;
    }
    /* Of a packed key: its own checksum counts as zero. */
    static uint32_t ucxm_key_crc(const uint8_t *key, size_t size) {
        static const uint8_t zero[4];
        const size_t at = UCXM_KEY_OFF_CRC;
        uint32_t crc = ucxm_crc_add(0xffffffffu, key, at);
        crc = ucxm_crc_add(crc, zero, 4);
        return ~ucxm_crc_add(crc, key + at + 4, size - at - 4);
    }
    static inline uint64_t ucxm_get(const uint8_t *key, size_t at, size_t size) {
        uint64_t value = 0;
        memcpy(&value, key + at, size);
        return value;
    }
    static inline void ucxm_put(uint8_t *key, size_t at, size_t size, uint64_t value) {
        memcpy(key + at, &value, size);
    }
    """
    void crc_init "ucxm_crc_init"() noexcept nogil
    bint crc_has_instruction "ucxm_crc_has_instruction"() noexcept nogil
    uint32_t crc_by_table "ucxm_crc_by_table"(uint32_t crc, const uint8_t *data,
                                              size_t size) noexcept nogil
    uint32_t crc_by_instruction "ucxm_crc_by_instruction"(uint32_t crc, const uint8_t *data,
                                                          size_t size) noexcept nogil
    uint32_t key_crc "ucxm_key_crc"(const uint8_t *key, size_t size) noexcept nogil
    uint64_t get_le "ucxm_get"(const uint8_t *key, size_t at, size_t size) noexcept nogil
    void put_le "ucxm_put"(uint8_t *key, size_t at, size_t size, uint64_t value) noexcept nogil

crc_init()

cdef struct packed_t:
    uint32_t size
    uint8_t bytes[4]  # and on

cdef enum:
    PACK_RAW_INDEX = 4  # packed[]: 0..3 with the envelope, 4..7 raw


cdef void key_envelope(uint32_t component, const ucxm_key_info_t *info, const uint8_t *payload,
                       size_t payload_size, uint8_t *key) noexcept nogil:
    """Write header and payload: UCXM_KEY_HEADER_SIZE + payload_size bytes."""
    cdef size_t size = UCXM_KEY_HEADER_SIZE + payload_size
    put_le(key, UCXM_KEY_OFF_MAGIC, 2, UCXM_KEY_MAGIC)
    put_le(key, UCXM_KEY_OFF_VERSION, 1, UCXM_KEY_VERSION)
    put_le(key, UCXM_KEY_OFF_HEADER_LEN, 1, UCXM_KEY_HEADER_SIZE)
    put_le(key, UCXM_KEY_OFF_TOTAL_LEN, 2, size)
    put_le(key, UCXM_KEY_OFF_FLAGS, 2, info.flags)
    put_le(key, UCXM_KEY_OFF_COMPONENT, 4, component)
    put_le(key, UCXM_KEY_OFF_KEY_ID, 8, info.key_id)
    put_le(key, UCXM_KEY_OFF_ADDRESS, 8, info.address)
    put_le(key, UCXM_KEY_OFF_LENGTH, 8, info.length)
    put_le(key, UCXM_KEY_OFF_RIGHTS, 4, info.rights)
    put_le(key, UCXM_KEY_OFF_PAYLOAD_LEN, 2, payload_size)
    put_le(key, UCXM_KEY_OFF_RESERVED, 2, 0)
    memcpy(key + UCXM_KEY_OFF_OWNER, &info.owner, sizeof(info.owner))
    memcpy(key + UCXM_KEY_HEADER_SIZE, payload, payload_size)
    put_le(key, UCXM_KEY_OFF_CRC, 4, key_crc(key, size))


cdef ucxm_status_t pack_info(md_t *md, ucxm_memh_t *memh, const choice_t *choice,
                             ucxm_key_info_t *info) noexcept nogil:
    """What the envelope says of this handle, packed this way."""
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef uint64_t rights = KINDS[choice.rma_kind].rights
    if choice.atomic_slot != NO_SLOT:
        rights |= KINDS[choice.atomic_kind].rights
    info.key_id = memh.id.key_id
    info.address = own.address
    info.length = own.length
    info.rights = <uint32_t>(own.rights & rights & UCXM_MEM_ACCESS_REMOTE)
    info.flags = (<const plan_t *>books_of(memh).plan).key_flags
    if own.length == 0:
        info.flags |= UCXM_KEY_FLAG_EMPTY
    if own.ep != NULL:
        info.flags |= UCXM_KEY_FLAG_ENDPOINT
    info.reserved = 0
    return identity_self(&info.owner)


cdef ucxm_status_t pack_slot(md_t *md, ucxm_memh_t *memh, uint8_t index, uint8_t kind,
                             ucxm_key_slot_t **slot_p, ucxm_error_t *error) noexcept nogil:
    """The slot, with its key in it."""
    cdef ucxm_key_slot_t *slot = &ucxm_memh_own(memh).slot[index]
    slot_p[0] = slot
    if KINDS[kind].made == MADE_BY_REG or slot.live:
        return UCXM_OK
    return key_make(md, memh, slot, kind, error)


cdef ucxm_status_t pack_make(md_t *md, ucxm_memh_t *memh, const choice_t *choice, bint raw,
                             packed_t **packed_p, ucxm_error_t *error) noexcept nogil:
    """Make the keys that the choice names and the finished bytes.  key_lock is held."""
    cdef uint8_t key[UCXM_KEY_MAX]
    cdef uint8_t payload[UCXM_KEY_PAYLOAD_MAX]
    cdef uint8_t *bytes = key
    cdef size_t payload_size = 0
    cdef size_t size
    cdef ucxm_key_info_t info
    cdef ucxm_key_slot_t *rma = NULL
    cdef ucxm_key_slot_t *atomic = NULL
    cdef packed_t *packed
    cdef ucxm_status_t status = pack_info(md, memh, choice, &info)
    if status != UCXM_OK:
        return status
    if not info.flags & UCXM_KEY_FLAG_EMPTY:
        status = pack_slot(md, memh, choice.rma_slot, choice.rma_kind, &rma, error)
        if status == UCXM_OK and choice.atomic_slot != NO_SLOT:
            status = pack_slot(md, memh, choice.atomic_slot, choice.atomic_kind, &atomic, error)
        if status == UCXM_OK:
            status = md.ops.mkey_pack(md.priv, memh, rma, atomic, payload, &payload_size, error)
        if status != UCXM_OK:
            return status
        if payload_size > md.attr.rkey_packed_size or payload_size < md.attr.rkey_raw_size:
            error_text(error, "the backend wrote a payload of another size than it declared")
            return UCXM_ERR_IO_ERROR
    if raw:
        bytes = payload
        size = md.attr.rkey_raw_size
    else:
        key_envelope(md.component_id, &info, payload, payload_size, key)
        size = UCXM_KEY_HEADER_SIZE + payload_size
    packed = <packed_t *>mem_alloc(sizeof(packed_t) + size)
    if packed == NULL:
        return UCXM_ERR_NO_MEMORY
    packed.size = <uint32_t>size
    memcpy(packed.bytes, bytes, size)
    packed_p[0] = packed
    return UCXM_OK


cdef ucxm_status_t pack_check(md_t *md, ucxm_memh_t *memh, uint32_t flags,
                              ucxm_error_t *error) noexcept nogil:
    """May this handle be packed this way?"""
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef uint64_t rights = own.rights & UCXM_MEM_ACCESS_REMOTE
    if flags & ~(UCXM_PACK_INVALIDATE_RMA | UCXM_PACK_INVALIDATE_AMO | UCXM_PACK_EXPORT |
                 UCXM_PACK_RAW):
        error_text(error, "unknown pack flags")
        return UCXM_ERR_INVALID_PARAM
    if flags & UCXM_PACK_EXPORT:
        error_text(error, "exported keys are not supported")
        return UCXM_ERR_UNSUPPORTED
    if not md.attr.flags & UCXM_MD_FLAG_NEED_RKEY:
        error_text(error, "this domain does not pack keys")
        return UCXM_ERR_UNSUPPORTED
    if flags & UCXM_PACK_RAW and (md.attr.rkey_raw_size == 0 or own.length == 0):
        error_text(error, "there is no native key to pack raw")
        return UCXM_ERR_UNSUPPORTED
    if flags & UCXM_PACK_INVALIDATE_RMA and not (
            md.attr.flags & (UCXM_MD_FLAG_INVALIDATE_RMA | UCXM_MD_FLAG_REG_DERIVED)):
        error_text(error, "this domain makes no revocable keys for put and get")
        return UCXM_ERR_UNSUPPORTED
    if flags & UCXM_PACK_INVALIDATE_AMO and not (
            md.attr.flags & (UCXM_MD_FLAG_INVALIDATE_AMO | UCXM_MD_FLAG_REG_DERIVED)):
        error_text(error, "this domain makes no revocable keys for atomics")
        return UCXM_ERR_UNSUPPORTED
    if rights == 0:
        if memh.inherited.flags & UCXM_MEM_DERIVED_ONLY and memh.id.parent == NULL:
            error_text(error, "registered DERIVED_ONLY: pack a handle derived from it")
            return UCXM_ERR_UNSUPPORTED
        error_text(error, "the handle has no remote right")
        return UCXM_ERR_ACCESS
    return UCXM_OK


cdef ucxm_status_t pack_check_kind(md_t *md, ucxm_memh_t *memh, uint8_t kind,
                                   ucxm_error_t *error) noexcept nogil:
    """Does the Md make such keys, and would this one carry any of the handle's rights?"""
    if KINDS[kind].needs & ~md.attr.flags:
        error_text(error, "this domain does not make such keys")
        return UCXM_ERR_UNSUPPORTED
    if not KINDS[kind].rights & ucxm_memh_own(memh).rights:
        error_text(error, "the handle has no right that such a key could carry")
        return UCXM_ERR_INVALID_PARAM
    return UCXM_OK


cdef ucxm_status_t pack_slow(ucxm_memh_t *memh, uint32_t flags, packed_t **packed_p,
                             ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = md_of(memh)
    cdef const plan_t *plan = <const plan_t *>books_of(memh).plan
    cdef bint raw = (flags & UCXM_PACK_RAW) != 0
    cdef const choice_t *choice
    cdef uint32_t index
    cdef void **place
    cdef ucxm_status_t status = pack_check(md, memh, flags, error)
    if status != UCXM_OK:
        return status
    choice = &plan.choice[flags & 3]
    status = pack_check_kind(md, memh, choice.rma_kind, error)
    if status == UCXM_OK and choice.atomic_slot != NO_SLOT:
        status = pack_check_kind(md, memh, choice.atomic_kind, error)
    if status != UCXM_OK:
        return status
    index = choice.same_as + (PACK_RAW_INDEX if raw else 0)
    place = &books_of(memh).packed[index]
    md_orphans(md)
    status = md_enter(md)
    if status != UCXM_OK:
        return status
    pthread_mutex_lock(&md.key_lock)
    spin_lock(&md.tree_lock)
    status = memh_check(memh)
    if status == UCXM_OK:  # whoever revokes it later waits for the key_lock, and finds the key
        store32(&books_of(memh).touched, 1)
    spin_unlock(&md.tree_lock)
    packed_p[0] = <packed_t *>place[0]
    if status == UCXM_OK and place[0] == NULL:
        status = pack_make(md, memh, choice, raw, packed_p, error)
        if status == UCXM_OK:
            store_ptr(place, packed_p[0])
    pthread_mutex_unlock(&md.key_lock)
    md_leave(md)
    return status


cdef inline packed_t *pack_cached(ucxm_memh_t *memh, uint32_t flags) noexcept nogil:
    """The finished bytes for these flags, if there are any yet."""
    cdef const plan_t *plan = <const plan_t *>books_of(memh).plan
    cdef uint32_t index
    if flags & ~(UCXM_PACK_INVALIDATE_RMA | UCXM_PACK_INVALIDATE_AMO | UCXM_PACK_RAW):
        return NULL
    index = plan.choice[flags & 3].same_as
    if flags & UCXM_PACK_RAW:
        index += PACK_RAW_INDEX
    return <packed_t *>load_ptr(&books_of(memh).packed[index])


cdef inline ucxm_status_t mkey_pack(ucxm_memh_t *memh, uint32_t flags, packed_t **packed_p,
                                    ucxm_error_t *error) noexcept nogil:
    """Find or make the packed bytes; they live as long as the handle."""
    cdef ucxm_status_t status = memh_check(memh)
    if status != UCXM_OK:
        return status
    packed_p[0] = pack_cached(memh, flags)
    if packed_p[0] != NULL:
        return UCXM_OK
    return pack_slow(memh, flags, packed_p, error)


cdef ucxm_status_t revoke_notice(ucxm_memh_t *memh, uint8_t *notice,
                                 ucxm_error_t *error) noexcept nogil:
    """UCXM_KEY_HEADER_SIZE bytes that say that the handle's key is dead."""
    cdef ucxm_key_info_t info
    cdef ucxm_status_t status
    if books_of(memh).epoch != fork_epoch:  # the identity below is not the packed key's
        return UCXM_ERR_FORKED
    if load32(&memh.id.state) == UCXM_MEMH_LIVE:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "the handle is live: there is nothing to tell")
    memset(&info, 0, sizeof(info))
    info.key_id = memh.id.key_id
    info.address = ucxm_memh_own(memh).address
    info.flags = UCXM_KEY_FLAG_REVOKED | UCXM_KEY_FLAG_EMPTY
    status = identity_self(&info.owner)
    if status == UCXM_OK:
        key_envelope(books_of(memh).component_id, &info, NULL, 0, notice)
    return status
