# SPDX-License-Identifier: BSD-3-Clause
# Endpoint addresses: who the endpoint belongs to, then the backend's part.

cdef ucxm_status_t ep_address(ep_t *ep, uint8_t *address, size_t *length,
                              ucxm_error_t *error) noexcept nogil:
    """Write at most UCXM_ADDRESS_MAX bytes."""
    cdef md_t *md = ep.md
    cdef ucxm_identity_t owner
    cdef size_t size = UCXM_EP_ADDRESS_MAX
    cdef ucxm_status_t status = identity_self(&owner)
    if status != UCXM_OK:
        return status
    status = ep_enter(ep)
    if status != UCXM_OK:
        return status
    status = md.ep_ops.ep_address(md.priv, &ep.pub, address + UCXM_ADDRESS_HEADER_SIZE, &size,
                                  error)
    ep_leave(ep)
    if status != UCXM_OK:
        return status
    put_le(address, UCXM_ADDRESS_OFF_MAGIC, 2, UCXM_ADDRESS_MAGIC)
    put_le(address, UCXM_ADDRESS_OFF_VERSION, 1, UCXM_ADDRESS_VERSION)
    put_le(address, UCXM_ADDRESS_OFF_HEADER_LEN, 1, UCXM_ADDRESS_HEADER_SIZE)
    put_le(address, UCXM_ADDRESS_OFF_TOTAL_LEN, 2, UCXM_ADDRESS_HEADER_SIZE + size)
    put_le(address, UCXM_ADDRESS_OFF_RESERVED, 2, 0)
    put_le(address, UCXM_ADDRESS_OFF_COMPONENT, 4, md.component_id)
    put_le(address, UCXM_ADDRESS_OFF_RESERVED2, 4, 0)
    memcpy(address + UCXM_ADDRESS_OFF_OWNER, &owner, sizeof(owner))
    length[0] = UCXM_ADDRESS_HEADER_SIZE + size
    return UCXM_OK


cdef ucxm_status_t address_check(md_t *md, const uint8_t *address, size_t length,
                                 ucxm_error_t *error) noexcept nogil:
    """Is it an address, and of our kind?"""
    cdef uint64_t component
    if length < UCXM_ADDRESS_HEADER_SIZE or (
            get_le(address, UCXM_ADDRESS_OFF_MAGIC, 2) != UCXM_ADDRESS_MAGIC):
        error_text(error, "not an endpoint's address")
        return UCXM_ERR_INVALID_PARAM
    if get_le(address, UCXM_ADDRESS_OFF_VERSION, 1) != UCXM_ADDRESS_VERSION:
        error_text(error, "an endpoint's address of another version of this library")
        return UCXM_ERR_INVALID_PARAM
    if get_le(address, UCXM_ADDRESS_OFF_TOTAL_LEN, 2) != length or (
            get_le(address, UCXM_ADDRESS_OFF_HEADER_LEN, 1) != UCXM_ADDRESS_HEADER_SIZE):
        error_text(error, "a damaged endpoint's address: it has another length than it says")
        return UCXM_ERR_INVALID_PARAM
    component = get_le(address, UCXM_ADDRESS_OFF_COMPONENT, 4)
    if component != 0 and component != md.component_id:
        error_text(error, "the address of another component's endpoint")
        return UCXM_ERR_INVALID_PARAM
    return UCXM_OK


cdef ucxm_status_t ep_connect(ep_t *ep, const uint8_t *address, size_t length,
                              ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = ep.md
    cdef ucxm_status_t status = address_check(md, address, length, error)
    if status != UCXM_OK:
        return status
    status = ep_enter(ep)
    if status != UCXM_OK:
        return status
    status = md.ep_ops.ep_connect(md.priv, &ep.pub, address + UCXM_ADDRESS_HEADER_SIZE,
                                  length - UCXM_ADDRESS_HEADER_SIZE, error)
    if status == UCXM_OK:
        memcpy(&ep.peer, address + UCXM_ADDRESS_OFF_OWNER, sizeof(ep.peer))
    ep_leave(ep)
    return status


cdef ucxm_status_t ep_reset(ep_t *ep, ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = ep.md
    cdef ucxm_status_t status = ep_enter(ep)
    if status == UCXM_OK:
        status = md.ep_ops.ep_reset(md.priv, &ep.pub, error)
        if status == UCXM_OK:
            memset(&ep.peer, 0, sizeof(ep.peer))
        ep_leave(ep)
    return status
