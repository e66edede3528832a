# SPDX-License-Identifier: BSD-3-Clause
# What this process exports: one export for each allocation, however many registrations it has.

cdef struct export_t:
    uint64_t nonce      # what others look at; 0 when it has ended
    export_t *next
    cu_driver_t *cu
    uint32_t refs
    cu_wire_t wire

# What the driver says of an address.  Whatever the width of an attribute, its other bytes are 0.
cdef struct known_t:
    uint64_t memory_type
    uint64_t buffer_id
    uint64_t managed
    uint64_t ordinal
    uint64_t legacy
    uint64_t handle_types
    uint64_t pool
    cu_address_t base
    size_t size

cdef struct reg_t:
    export_t *export    # NULL: it has no remote rights

cdef export_t *exports = NULL      # under cu_exports_lock
cdef bint ptrace_allowed = False


cdef void exports_forget() noexcept nogil:
    """They are the parent's."""
    global exports, ptrace_allowed
    exports = NULL
    ptrace_allowed = False
    pthread_mutex_init(&cu_exports_lock, NULL)


cdef bint is_device_memory(const known_t *known) noexcept nogil:
    """Managed memory is, wherever it happens to be: the type is that of the page's place now."""
    return known.memory_type == CU_MEMORYTYPE_DEVICE or known.managed != 0


cdef ucxm_status_t look(device_t *device, uint64_t address, known_t *known,
                        ucxm_error_t *error) noexcept nogil:
    """Ask the driver, in the device's context."""
    cdef int names[7]
    cdef void *values[7]
    cdef cu_result_t result
    memset(known, 0, sizeof(known[0]))
    names = [CU_ATTRIBUTE_MEMORY_TYPE, CU_ATTRIBUTE_BUFFER_ID, CU_ATTRIBUTE_IS_MANAGED,
             CU_ATTRIBUTE_DEVICE_ORDINAL, CU_ATTRIBUTE_LEGACY_CAPABLE, CU_ATTRIBUTE_HANDLE_TYPES,
             CU_ATTRIBUTE_MEMPOOL]
    values = [&known.memory_type, &known.buffer_id, &known.managed, &known.ordinal, &known.legacy,
              &known.handle_types, &known.pool]
    result = device.cu.attributes(7, names, values, address)
    if result == CU_INVALID_CONTEXT:
        return UCXM_OK  # of no context: what it has written is 0
    if result != CU_SUCCESS:
        return driver_failed(device.cu, error, result, "cuPointerGetAttributes")
    if not is_device_memory(known):
        return UCXM_OK
    result = device.cu.address_range(&known.base, &known.size, address)
    if result != CU_SUCCESS:
        return driver_failed(device.cu, error, result, "cuMemGetAddressRange")
    return UCXM_OK


cdef ucxm_status_t check_memory(device_t *device, const ucxm_registration_t *reg,
                                const known_t *known, ucxm_error_t *error) noexcept nogil:
    """Is it this device's, and one allocation's?"""
    if not is_device_memory(known):
        return ucxm_refuse(error, UCXM_ERR_INVALID_PARAM,
                           "the driver knows no device memory at this address")
    if known.ordinal != <uint64_t>device.ordinal and not known.managed:
        if error != NULL:
            snprintf(error.text, sizeof(error.text),
                     "the memory is on device %d, this domain is device %d", <int>known.ordinal,
                     device.ordinal)
        return UCXM_ERR_INVALID_PARAM
    if reg.address < known.base or reg.length > known.size or (
            reg.address - known.base > known.size - reg.length):
        return ucxm_refuse(error, UCXM_ERR_INVALID_PARAM,
                           "the range goes beyond one allocation: register each by itself")
    return UCXM_OK


cdef ucxm_status_t check_kind(const known_t *known, ucxm_error_t *error) noexcept nogil:
    """Can it be shared at all?  Asks nobody."""
    cdef const char *why = NULL
    if known.managed:
        why = b"managed memory (cuMemAllocManaged) cannot be shared"
    elif known.pool:
        why = (b"memory of an exportable pool (cuMemAllocFromPoolAsync): pools are not shared here"
               if known.handle_types & (CU_HANDLE_POSIX_FD | CU_HANDLE_FABRIC) else
               b"memory of a pool without export (cuMemAllocAsync) cannot be shared")
    elif not known.legacy and (
            not known.handle_types & (CU_HANDLE_POSIX_FD | CU_HANDLE_FABRIC)):
        why = (b"cuMemCreate without a POSIX descriptor or fabric handle type, or memory of "
               b"another process: cannot be shared")
    return UCXM_OK if why == NULL else ucxm_refuse(error, UCXM_ERR_UNSUPPORTED, why)


cdef ucxm_status_t export_vmm(device_t *device, const known_t *known, cu_wire_t *wire,
                              ucxm_error_t *error) noexcept nogil:
    """By descriptor and by fabric handle, where it may; one of them is enough."""
    cdef cu_driver_t *cu = device.cu
    cdef cu_allocation_t allocation = 0
    cdef ucxm_status_t status = UCXM_OK
    cdef int fd = -1
    cdef cu_result_t result = cu.retain(&allocation, <void *>known.base)
    if result != CU_SUCCESS:
        return driver_failed(cu, error, result, "cuMemRetainAllocationHandle")
    if known.handle_types & CU_HANDLE_POSIX_FD:
        result = cu.export_handle(&fd, allocation, CU_HANDLE_POSIX_FD, 0)
        if result == CU_SUCCESS:
            cu_close_on_exec(fd)
            wire.kinds |= WIRE_FD
            wire.fd = fd
    if known.handle_types & CU_HANDLE_FABRIC:
        result = cu.export_handle(wire.handle, allocation, CU_HANDLE_FABRIC, 0)
        if result == CU_SUCCESS:
            wire.kinds |= WIRE_FABRIC
        else:
            memset(wire.handle, 0, sizeof(wire.handle))
    if wire.kinds == 0:
        status = driver_failed(cu, error, result, "cuMemExportToShareableHandle")
    cu.release(allocation)
    return status


cdef ucxm_status_t export_fill(device_t *device, const known_t *known, export_t *made,
                               ucxm_error_t *error) noexcept nogil:
    cdef cu_result_t result
    cdef cu_wire_t *wire = &made.wire
    cdef cu_handle_t handle
    cdef ucxm_status_t status = UCXM_OK
    wire.fd = -1
    wire.base = known.base
    wire.size = known.size
    wire.buffer_id = known.buffer_id
    wire.record = <uint64_t>&made.nonce
    wire.nonce = cu_nonce()
    memcpy(wire.uuid, device.uuid, sizeof(wire.uuid))
    if wire.nonce == 0:
        return ucxm_refuse(error, UCXM_ERR_NO_RESOURCE, "getrandom failed")
    if known.legacy:
        result = device.cu.ipc_get(&handle, known.base)
        if result != CU_SUCCESS:
            return driver_failed(device.cu, error, result, "cuIpcGetMemHandle")
        wire.kinds = WIRE_LEGACY
        memcpy(wire.handle, handle.bytes, sizeof(wire.handle))
    else:
        status = export_vmm(device, known, wire, error)
    made.nonce = wire.nonce
    return status


cdef ucxm_status_t export_get(device_t *device, const known_t *known, export_t **export_p,
                              ucxm_error_t *error) noexcept nogil:
    """The allocation's export, made if it has none.  In the device's context."""
    global exports, ptrace_allowed
    cdef export_t *found
    cdef ucxm_status_t status = UCXM_OK
    pthread_mutex_lock(&cu_exports_lock)
    found = exports
    while found != NULL and not (
            found.cu == device.cu and found.wire.base == known.base and
            found.wire.size == known.size and found.wire.buffer_id == known.buffer_id):
        found = found.next
    if found == NULL:
        found = <export_t *>calloc(1, sizeof(export_t))
        status = UCXM_ERR_NO_MEMORY
        if found != NULL:
            found.cu = device.cu
            status = export_fill(device, known, found, error)
        if status == UCXM_OK:
            found.next = exports
            exports = found
            if found.wire.kinds & WIRE_FD and not ptrace_allowed:
                # Else siblings could not fetch the descriptor, where Yama's scope is 1.
                ucxm_allow_ptrace()
                ptrace_allowed = True
    if status == UCXM_OK:
        found.refs += 1
        export_p[0] = found
    else:
        free(found)
    pthread_mutex_unlock(&cu_exports_lock)
    return status


cdef void export_put(export_t *export) noexcept nogil:
    """The last one ends it: first the word that others look at, then the descriptor."""
    global exports
    cdef export_t **at = &exports
    pthread_mutex_lock(&cu_exports_lock)
    export.refs -= 1
    if export.refs == 0:
        while at[0] != export:
            at = &at[0].next
        at[0] = export.next
        cu_store64(&export.nonce, 0)
        if export.wire.fd >= 0:
            close(export.wire.fd)
        free(export)
    pthread_mutex_unlock(&cu_exports_lock)


cdef bint export_lives(const cu_wire_t *wire) noexcept nogil:
    """Is it one of ours?"""
    cdef export_t *export
    pthread_mutex_lock(&cu_exports_lock)
    export = exports
    while export != NULL and not (
            export.nonce == wire.nonce and export.wire.base == wire.base and
            export.wire.size == wire.size):
        export = export.next
    pthread_mutex_unlock(&cu_exports_lock)
    return export != NULL


cdef uint64_t exports_count() noexcept nogil:
    cdef uint64_t count = 0
    cdef export_t *export
    pthread_mutex_lock(&cu_exports_lock)
    export = exports
    while export != NULL:
        count += 1
        export = export.next
    pthread_mutex_unlock(&cu_exports_lock)
    return count


# ---- registrations ----

cdef ucxm_status_t cuda_mem_reg(void *priv, ucxm_registration_t *reg,
                                ucxm_error_t *error) noexcept nogil:
    """What can be told without the driver is, first."""
    cdef device_t *device = (<md_t *>priv).device
    cdef reg_t *mine = <reg_t *>reg.priv
    cdef known_t known
    cdef ucxm_status_t status
    if reg.mem_type != UCXM_MEM_TYPE_CUDA or reg.dmabuf_fd >= 0:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED,
                           "cuda_ipc takes CUDA memory only, by its address")
    if reg.adopt != NULL:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED,
                           "cuda_ipc has no native registration to stand on")
    if reg.flags & ~UCXM_MEM_ACCESS_ALL:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED,
                           "cuda_ipc cannot derive, nor register in any special way")
    status = device_enter(device, error)
    if status != UCXM_OK:
        return status
    status = look(device, reg.address, &known, error)
    if status == UCXM_OK:
        status = check_memory(device, reg, &known, error)
    if status == UCXM_OK and reg.grant & UCXM_MEM_ACCESS_REMOTE:
        status = check_kind(&known, error)
        if status == UCXM_OK:
            status = export_get(device, &known, &mine.export, error)
    device_leave(device)
    return status


cdef ucxm_status_t cuda_mem_dereg(void *priv, ucxm_registration_t *reg,
                                  ucxm_error_t *error) noexcept nogil:
    """Asks nobody, so it cannot fail.  What peers have mapped stays mapped."""
    cdef reg_t *mine = <reg_t *>reg.priv
    if mine.export != NULL:
        export_put(mine.export)
        mine.export = NULL
    return UCXM_OK


cdef ucxm_status_t cuda_mkey_pack(void *priv, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
                                  const ucxm_key_slot_t *atomic, uint8_t *payload,
                                  size_t *length, ucxm_error_t *error) noexcept nogil:
    cdef reg_t *mine = <reg_t *>memh.inherited.reg.priv
    length[0] = wire_pack(&mine.export.wire, payload)
    return UCXM_OK
