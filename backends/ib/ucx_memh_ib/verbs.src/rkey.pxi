# SPDX-License-Identifier: BSD-3-Clause
# What a peer's key says.

cdef ucxm_status_t ib_rkey_unpack(void *priv, ucxm_rkey_t *rkey, const uint8_t *payload,
                                  size_t length, int raw, ucxm_error_t *error) noexcept nogil:
    """8 bytes: the key for put and get, and that for atomics; 8 more: the device's node guid."""
    cdef ib_rkey_t *mine = <ib_rkey_t *>rkey.priv
    mine.rma = IB_NO_KEY
    mine.amo = IB_NO_KEY
    if length == 0 and not raw and rkey.info.flags & UCXM_KEY_FLAG_EMPTY:
        return UCXM_OK
    if length != 8 and (raw or length != 16):
        return ib_fail(error, UCXM_ERR_MALFORMED_KEY, 0, "an RDMA key has 8 or 16 bytes, not %zu",
                       length)
    mine.rma = ib_get32(payload)
    mine.amo = ib_get32(payload + 4)
    if length == 16:
        mine.guid = ib_get64(payload + 8)
    return UCXM_OK
