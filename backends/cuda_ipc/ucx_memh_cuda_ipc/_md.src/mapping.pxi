# SPDX-License-Identifier: BSD-3-Clause
# Other processes' allocations, mapped into a device's context: once each, however many keys.
#
# A mapping ends when no key has it any more and no operation is at it; or, if its memory was found
# to have been freed, when no operation is at it.  Nothing is remembered of one that could not be
# opened.  One that cannot be closed stays, for the next key of it or the next try.

cdef extern from *:
    """
    #define MAPPING_DOOMED 0x40000000u /* is to be closed; no operation may begin */
    #define MAPPING_CLOSED 0x80000000u
    """
    const uint32_t MAPPING_DOOMED
    const uint32_t MAPPING_CLOSED

cdef struct mapping_t:
    uint32_t users             # operations at it, and the bits above
    uint32_t refs              # keys; under device.lock, as all below
    mapping_t *next
    ucxm_identity_t owner
    cu_wire_t wire
    bint stale                 # its memory has been freed, or its export has ended
    bint reserved              # of an imported allocation: the addresses are taken ...
    bint mapped                # ... and it is mapped there
    cu_address_t address       # what `wire.base` is here


cdef ucxm_status_t open_failed(device_t *device, ucxm_error_t *error, cu_result_t result,
                               const char *call) noexcept nogil:
    """Whatever the driver's reason, the key is of no use here and now."""
    cdef ucxm_status_t status = driver_failed(device.cu, error, result, call)
    return status if status == UCXM_ERR_NO_MEMORY else UCXM_ERR_UNREACHABLE


cdef ucxm_status_t legacy_open(device_t *device, mapping_t *m, ucxm_error_t *error) noexcept nogil:
    """In the device's context.  The driver says how long the memory really is: beyond it a copy
    would be the end of the context."""
    cdef cu_driver_t *cu = device.cu
    cdef cu_handle_t handle
    cdef cu_address_t base = 0
    cdef size_t size = 0
    cdef cu_result_t result
    memcpy(handle.bytes, m.wire.handle, sizeof(handle.bytes))
    result = cu.ipc_open(&m.address, handle, CU_IPC_LAZY_PEER_ACCESS)
    if result != CU_SUCCESS:
        return open_failed(device, error, result, "cuIpcOpenMemHandle")
    result = cu.address_range(&base, &size, m.address)
    if result == CU_SUCCESS and m.address - base <= size and (
            m.wire.size <= size - (m.address - base)):
        return UCXM_OK
    cu.ipc_close(m.address)
    if result != CU_SUCCESS:
        return open_failed(device, error, result, "cuMemGetAddressRange")
    return ucxm_refuse(error, UCXM_ERR_MALFORMED_KEY,
                       "the key's allocation is longer than what is there")


cdef ucxm_status_t vmm_map(device_t *device, mapping_t *m, cu_allocation_t allocation,
                           ucxm_error_t *error) noexcept nogil:
    cdef cu_driver_t *cu = device.cu
    cdef cu_access_t access
    cdef const char *call = b"cuMemAddressReserve"
    cdef cu_result_t result = cu.reserve(&m.address, m.wire.size, 0, 0, 0)
    if result == CU_SUCCESS:
        m.reserved = True
        call = b"cuMemMap"
        result = cu.map(m.address, m.wire.size, 0, allocation, 0)
    if result == CU_SUCCESS:
        m.mapped = True
        call = b"cuMemSetAccess"
        access.location_type = CU_LOCATION_DEVICE
        access.location_id = device.ordinal
        access.flags = CU_ACCESS_READWRITE
        result = cu.set_access(m.address, m.wire.size, &access, 1)
    if result == CU_SUCCESS:
        return UCXM_OK
    vmm_close(device, m)
    return open_failed(device, error, result, call)


cdef cu_result_t vmm_close(device_t *device, mapping_t *m) noexcept nogil:
    """Goes on where it stopped the last time."""
    cdef cu_result_t result = CU_SUCCESS
    if m.mapped:
        result = device.cu.unmap(m.address, m.wire.size)
        m.mapped = result != CU_SUCCESS
    if result == CU_SUCCESS and m.reserved:
        result = device.cu.unreserve(m.address, m.wire.size)
        m.reserved = result != CU_SUCCESS
    return result


cdef ucxm_status_t fd_fetch(md_t *md, const peer_t *peer, const cu_wire_t *wire, int *fd,
                            ucxm_error_t *error) noexcept nogil:
    """The exporter's descriptor, and for sure: that number may be something else's by now."""
    cdef ucxm_status_t status
    cdef bint sure = False
    fd[0] = cu_fetch_fd(peer.pidfd, wire.fd)
    status = export_check(md, peer, wire, &sure, error)  # the exporter ends it before it closes
    if fd[0] < 0:
        if status != UCXM_OK:
            return status  # it has ended meanwhile
        if fd[0] == -EMFILE or fd[0] == -ENFILE:
            return refuse(error, UCXM_ERR_NO_RESOURCE, -fd[0], &peer.identity,
                          "pidfd_getfd: out of files")
        return refuse(error, UCXM_ERR_UNREACHABLE, -fd[0], &peer.identity,
                      "its descriptor cannot be had by pidfd_getfd")
    if status == UCXM_OK and not sure:
        status = refuse(error, UCXM_ERR_UNREACHABLE, 0, &peer.identity,
                        "its memory cannot be read, so its descriptor cannot be trusted")
    if status != UCXM_OK:
        close(fd[0])
    return status


cdef ucxm_status_t vmm_open(md_t *md, const peer_t *peer, mapping_t *m,
                            ucxm_error_t *error) noexcept nogil:
    cdef device_t *device = md.device
    cdef cu_allocation_t allocation = 0
    cdef cu_result_t result
    cdef ucxm_status_t status = UCXM_ERR_UNREACHABLE
    cdef int fd = -1
    if m.wire.kinds & WIRE_FD and peer.pidfd >= 0:
        status = fd_fetch(md, peer, &m.wire, &fd, error)
        if status == UCXM_OK:
            result = device.cu.import_handle(&allocation, <void *><size_t>fd, CU_HANDLE_POSIX_FD)
            close(fd)
            if result != CU_SUCCESS:
                status = open_failed(device, error, result, "cuMemImportFromShareableHandle")
    elif not m.wire.kinds & WIRE_FABRIC:
        return refuse(error, UCXM_ERR_UNREACHABLE, 0, &peer.identity,
                      "its descriptor is on another host or in another pid namespace")
    if status == UCXM_ERR_UNREACHABLE and m.wire.kinds & WIRE_FABRIC:
        result = device.cu.import_handle(&allocation, m.wire.handle, CU_HANDLE_FABRIC)
        status = UCXM_OK
        if result == CU_SUCCESS:
            memset(error, 0, sizeof(error[0]))  # what was said of the descriptor
        else:
            status = open_failed(device, error, result, "cuMemImportFromShareableHandle (fabric)")
    if status != UCXM_OK:
        return status
    status = vmm_map(device, m, allocation, error)
    device.cu.release(allocation)  # the mapping keeps it
    return status


cdef void mapping_unlink(device_t *device, mapping_t *m) noexcept nogil:
    cdef mapping_t **at = &device.mappings
    while at[0] != m:
        at = &at[0].next
    at[0] = m.next
    free(m)


cdef bint mapping_close(device_t *device, mapping_t *m) noexcept nogil:
    cdef cu_result_t result
    cdef ucxm_error_t ignored
    if device_enter(device, &ignored) != UCXM_OK:
        cu_count(&device.close_failures, 1)
        return False
    if m.wire.kinds == WIRE_LEGACY:
        result = device.cu.ipc_close(m.address)
    else:
        result = vmm_close(device, m)
    device_leave(device)
    cu_count(&device.closes if result == CU_SUCCESS else &device.close_failures, 1)
    return result == CU_SUCCESS


cdef void mapping_reap(device_t *device, mapping_t *m) noexcept nogil:
    """Close it if nobody is at it, and forget it if nobody has it.  device.lock is held."""
    if m.refs == 0 or m.stale:
        cu_or32(&m.users, MAPPING_DOOMED)
        if cu_cas32(&m.users, MAPPING_DOOMED, MAPPING_DOOMED | MAPPING_CLOSED):
            if not mapping_close(device, m):
                cu_and32(&m.users, ~MAPPING_CLOSED)
    if m.refs == 0 and cu_load32(&m.users) == (MAPPING_DOOMED | MAPPING_CLOSED):
        mapping_unlink(device, m)


cdef void mappings_reap(device_t *device) noexcept nogil:
    """Try again with those that resisted.  device.lock is held."""
    cdef mapping_t *m = device.mappings
    cdef mapping_t *next
    while m != NULL:
        next = m.next
        mapping_reap(device, m)
        m = next


cdef void mappings_forget(device_t *device) noexcept nogil:
    """The device goes; what could not be closed is tried once more, and goes with the context."""
    pthread_mutex_lock(&device.lock)
    mappings_reap(device)
    while device.mappings != NULL:
        mapping_unlink(device, device.mappings)
    pthread_mutex_unlock(&device.lock)


cdef bint mapping_use(mapping_t *m) noexcept nogil:
    """An operation begins; a key keeps the mapping meanwhile.  False: it is closed or will be."""
    cdef uint32_t users = cu_load32(&m.users)
    while not users & (MAPPING_DOOMED | MAPPING_CLOSED):
        if cu_cas32(&m.users, users, users + 1):
            return True
        users = cu_load32(&m.users)
    return False


cdef void mapping_unuse(device_t *device, mapping_t *m) noexcept nogil:
    """An operation has ended.  The last one at a doomed mapping closes it; if somebody else has
    done so meanwhile, it is not in the list any more, or as good as not."""
    cdef mapping_t *other
    if cu_sub32(&m.users, 1) != MAPPING_DOOMED:
        return
    pthread_mutex_lock(&device.lock)
    other = device.mappings
    while other != NULL and other != m:
        other = other.next
    if other != NULL:
        mapping_reap(device, m)
    pthread_mutex_unlock(&device.lock)


cdef void mapping_drop(device_t *device, mapping_t *m) noexcept nogil:
    """A key lets go of it."""
    pthread_mutex_lock(&device.lock)
    m.refs -= 1
    mapping_reap(device, m)
    pthread_mutex_unlock(&device.lock)


cdef bint same_allocation(const mapping_t *m, const cu_wire_t *wire) noexcept nogil:
    """A descriptor says nothing of what it is of, and a driver might number mappings by their
    addresses: there it must be the same export."""
    return (m.wire.base == wire.base and m.wire.size == wire.size and
            m.wire.buffer_id == wire.buffer_id and m.wire.kinds == wire.kinds and
            (wire.kinds != WIRE_FD or m.wire.nonce == wire.nonce) and
            memcmp(m.wire.handle, wire.handle, sizeof(wire.handle)) == 0)


cdef bint overlap(const cu_wire_t *one, const cu_wire_t *other) noexcept nogil:
    return one.base < other.base + other.size and other.base < one.base + one.size


cdef ucxm_status_t mappings_clear(device_t *device, const ucxm_identity_t *owner,
                                  const cu_wire_t *wire, ucxm_error_t *error) noexcept nogil:
    """The owner has another allocation where it had these, or exports one by another descriptor:
    they were freed or deregistered.  Their keys are stale from now on, and what they have mapped is
    closed."""
    cdef mapping_t *m = device.mappings
    cdef mapping_t *next
    cdef bint busy = False
    while m != NULL:
        next = m.next
        if memcmp(&m.owner, owner, sizeof(owner[0])) == 0 and overlap(&m.wire, wire) and (
                not same_allocation(m, wire)):
            m.stale = True
            # The same handle cannot be opened anew as long as it is open.
            busy = busy or (
                wire.kinds == WIRE_LEGACY and
                memcmp(m.wire.handle, wire.handle, sizeof(wire.handle)) == 0 and
                cu_load32(&m.users) & ~(MAPPING_DOOMED | MAPPING_CLOSED) != 0)
            mapping_reap(device, m)
        m = next
    if busy:
        return ucxm_refuse(
            error, UCXM_ERR_NO_RESOURCE,
            "transfers on what was there before are under way: progress and try again")
    return UCXM_OK


cdef ucxm_status_t mapping_open(md_t *md, const peer_t *peer, const cu_wire_t *wire,
                                mapping_t *m, ucxm_error_t *error) noexcept nogil:
    cdef device_t *device = md.device
    cdef ucxm_status_t status = device_enter(device, error)
    if status != UCXM_OK:
        return status if status == UCXM_ERR_NO_MEMORY else UCXM_ERR_UNREACHABLE
    m.owner = peer.identity
    m.wire = wire[0]
    if wire.kinds == WIRE_LEGACY:
        status = legacy_open(device, m, error)
    else:
        status = vmm_open(md, peer, m, error)
    device_leave(device)
    return status


cdef ucxm_status_t mapping_get(md_t *md, const peer_t *peer, const cu_wire_t *wire,
                               mapping_t **mapping_p, ucxm_error_t *error) noexcept nogil:
    """The peer's allocation, mapped here, with a reference."""
    cdef device_t *device = md.device
    cdef mapping_t *m
    cdef bint sure = False
    cdef ucxm_status_t status = export_check(md, peer, wire, &sure, error)
    if status != UCXM_OK:
        return status
    pthread_mutex_lock(&device.lock)
    mappings_reap(device)
    m = device.mappings
    while m != NULL and not (
            not m.stale and memcmp(&m.owner, &peer.identity, sizeof(m.owner)) == 0 and
            same_allocation(m, wire) and not cu_load32(&m.users) & MAPPING_CLOSED):
        m = m.next
    if m == NULL:
        if sure:
            status = mappings_clear(device, &peer.identity, wire, error)
        if status == UCXM_OK:
            m = <mapping_t *>calloc(1, sizeof(mapping_t))
            if m == NULL:
                status = UCXM_ERR_NO_MEMORY
            else:
                status = mapping_open(md, peer, wire, m, error)
        if status == UCXM_OK:
            cu_count(&device.opens, 1)
            m.next = device.mappings
            device.mappings = m
        else:
            free(m)
    if status == UCXM_OK:
        m.refs += 1
        cu_and32(&m.users, ~MAPPING_DOOMED)  # one that could not be closed
        mapping_p[0] = m
    pthread_mutex_unlock(&device.lock)
    return status


cdef uint64_t mappings_count(device_t *device) noexcept nogil:
    """Those that are open."""
    cdef uint64_t count = 0
    cdef mapping_t *m
    pthread_mutex_lock(&device.lock)
    m = device.mappings
    while m != NULL:
        count += not cu_load32(&m.users) & MAPPING_CLOSED
        m = m.next
    pthread_mutex_unlock(&device.lock)
    return count
