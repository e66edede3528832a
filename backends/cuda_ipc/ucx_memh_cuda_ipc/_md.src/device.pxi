# SPDX-License-Identifier: BSD-3-Clause
# The device: one object for each that the process uses, and its primary context.

cdef device_t *devices_used = NULL  # under cu_tables_lock
cdef bint fork_watched = False


cdef ucxm_status_t device_enter(device_t *device, ucxm_error_t *error) noexcept nogil:
    """Make the device's context this thread's; device_leave makes it what it was."""
    cdef cu_result_t result = device.cu.context_push(device.context)
    if result != CU_SUCCESS:
        return driver_failed(device.cu, error, result, "cuCtxPushCurrent")
    return UCXM_OK


cdef void device_leave(device_t *device) noexcept nogil:
    cdef cu_context_t ignored = NULL
    device.cu.context_pop(&ignored)


cdef void fork_child() noexcept nogil:
    """What the locks guard is the parent's, or was half changed: begin anew, and free nothing."""
    global devices_used
    devices_used = NULL
    pthread_mutex_init(&cu_tables_lock, NULL)
    exports_forget()


cdef ucxm_status_t device_fill(device_t *device, ucxm_error_t *error) noexcept nogil:
    cdef cu_driver_t *cu = device.cu
    cdef cu_device_t native
    cdef cu_result_t result = cu.device_get(&native, device.ordinal)
    if result != CU_SUCCESS:
        return driver_failed(cu, error, result, "cuDeviceGet")
    if cu.device_uuid_v2 != NULL:
        result = cu.device_uuid_v2(device.uuid, native)
    else:
        result = cu.device_uuid(device.uuid, native)
    if result != CU_SUCCESS:
        return driver_failed(cu, error, result, "cuDeviceGetUuid")
    device.ordinal = native
    result = cu.context_retain(&device.context, native)
    if result != CU_SUCCESS:
        return driver_failed(cu, error, result, "cuDevicePrimaryCtxRetain")
    return UCXM_OK


cdef device_t *device_get(cu_driver_t *cu, int ordinal, ucxm_status_t *status,
                          ucxm_error_t *error) noexcept nogil:
    """A reference to the device; NULL: `status` says why not."""
    global devices_used, fork_watched
    cdef device_t *device
    pthread_mutex_lock(&cu_tables_lock)
    status[0] = UCXM_OK
    if not fork_watched:
        if pthread_atfork(NULL, NULL, fork_child) != 0:
            status[0] = UCXM_ERR_NO_MEMORY
        fork_watched = status[0] == UCXM_OK
    device = devices_used
    while device != NULL and (device.cu != cu or device.ordinal != ordinal):
        device = device.next
    if device == NULL and status[0] == UCXM_OK:
        device = <device_t *>calloc(1, sizeof(device_t))
        if device == NULL:
            status[0] = UCXM_ERR_NO_MEMORY
        else:
            device.cu = cu
            device.ordinal = ordinal
            pthread_mutex_init(&device.lock, NULL)
            status[0] = device_fill(device, error)
    if status[0] != UCXM_OK:
        if device != NULL:
            pthread_mutex_destroy(&device.lock)
        free(device)
        device = NULL
    else:
        if device.refs == 0:
            device.next = devices_used
            devices_used = device
        device.refs += 1
    pthread_mutex_unlock(&cu_tables_lock)
    return device


cdef void device_put(device_t *device) noexcept nogil:
    """The last one gives the context back; by then all domains have let go of their mappings, and
    one that resists goes with the context."""
    global devices_used
    cdef device_t **at = &devices_used
    cdef bint last
    pthread_mutex_lock(&cu_tables_lock)
    device.refs -= 1
    last = device.refs == 0
    if last:
        while at[0] != device:
            at = &at[0].next
        at[0] = device.next
        mappings_forget(device)
        device.cu.context_release(device.ordinal)
    pthread_mutex_unlock(&cu_tables_lock)
    if last:
        pthread_mutex_destroy(&device.lock)
        free(device)
