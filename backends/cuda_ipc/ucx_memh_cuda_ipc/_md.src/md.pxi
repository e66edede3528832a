# SPDX-License-Identifier: BSD-3-Clause
# Opening and closing the domain, and what it tells of itself.

cdef void cuda_mem_enforcement(void *priv, const ucxm_memh_t *memh,
                               ucxm_enforcement_t *enforcement) noexcept nogil:
    """Put and get: the library of whoever uses the key looks at rights and range, and that is
    all; he has mapped the whole allocation, to read and to write.  There are no atomics."""
    memset(enforcement, UCXM_ENFORCE_NONE, sizeof(enforcement[0]))
    enforcement.rights[0] = enforcement.rights[1] = UCXM_ENFORCE_COOPERATIVE
    enforcement.range[0] = enforcement.range[1] = UCXM_ENFORCE_COOPERATIVE


cdef void cuda_stat(void *priv, unsigned index, const char **name,
                    uint64_t *value) noexcept nogil:
    """Of the device, for all domains of the process on it, but for copies and bytes."""
    cdef md_t *md = <md_t *>priv
    cdef const char *names[7]
    names = [b"opens", b"closes", b"close_failures", b"mappings", b"exports", b"copies", b"bytes"]
    if index >= sizeof(names) // sizeof(names[0]):
        name[0] = NULL
        return
    name[0] = names[index]
    if index == 0:
        value[0] = cu_load64(&md.device.opens)
    elif index == 1:
        value[0] = cu_load64(&md.device.closes)
    elif index == 2:
        value[0] = cu_load64(&md.device.close_failures)
    elif index == 3:
        value[0] = mappings_count(md.device)
    elif index == 4:
        value[0] = exports_count()
    elif index == 5:
        value[0] = cu_load64(&md.copies)
    else:
        value[0] = cu_load64(&md.bytes)


cdef const char *kind_text(const export_t *export) noexcept nogil:
    if export == NULL:
        return b"not exported: no remote rights"
    if export.wire.kinds == WIRE_LEGACY:
        return b"exported by a legacy IPC handle"
    if export.wire.kinds == WIRE_FD:
        return b"exported by a descriptor, which stays open until the last dereg"
    if export.wire.kinds == WIRE_FABRIC:
        return b"exported by a fabric handle"
    return b"exported by a descriptor, which stays open until the last dereg, and a fabric handle"


cdef void cuda_explain(void *priv, const ucxm_memh_t *memh, char *text,
                       size_t size) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef const uint8_t *u = md.device.uuid
    cdef export_t *export
    if memh != NULL and memh.inherited.reg != NULL:
        export = (<reg_t *>memh.inherited.reg.priv).export
        snprintf(text, size, "%s\n", kind_text(export))
        return
    snprintf(
        text, size,
        "cuda_ipc: %s, device %d, GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-"
        "%02x%02x%02x%02x%02x%02x\n"
        "a key opens the whole allocation to its holder, once for each context\n"
        "rights, range: COOPERATIVE for get and put (the library of whoever uses the key checks)\n"
        "revoke: NONE; a peer that has mapped the memory reaches it until it unmaps it\n"
        "atomics: none\n",
        md.device.cu.library.path, md.device.ordinal, u[0], u[1], u[2], u[3], u[4], u[5], u[6],
        u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15])


cdef void cuda_close(void *priv) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    device_put(md.device)
    pthread_mutex_destroy(&md.lock)
    pthread_mutex_destroy(&md.ep_lock)
    free(md)


cdef ucxm_md_ops_t OPS
memset(&OPS, 0, sizeof(OPS))
OPS.struct_size = sizeof(OPS)
OPS.abi = UCXM_BACKEND_ABI
OPS.reg_size = sizeof(reg_t)
OPS.rkey_size = sizeof(rkey_t)
OPS.close = cuda_close
OPS.mem_reg = cuda_mem_reg
OPS.mem_dereg = cuda_mem_dereg
OPS.mem_derive = unsupported_mem_derive
OPS.mkey_pack = cuda_mkey_pack
OPS.rkey_unpack = cuda_rkey_unpack
OPS.rkey_release = cuda_rkey_release
OPS.rkey_ptr = cuda_rkey_ptr
OPS.progress = cuda_progress
OPS.mem_enforcement = cuda_mem_enforcement
OPS.stat = cuda_stat
OPS.explain = cuda_explain
OPS.peer_evict = cuda_peer_evict

cdef ucxm_ep_ops_t EP_OPS
memset(&EP_OPS, 0, sizeof(EP_OPS))
EP_OPS.struct_size = sizeof(EP_OPS)
EP_OPS.ep_size = sizeof(ep_t)
EP_OPS.ep_create = cuda_ep_create
EP_OPS.ep_destroy = cuda_ep_destroy
EP_OPS.ep_address = cuda_ep_address
EP_OPS.ep_connect = cuda_ep_connect
EP_OPS.ep_reset = cuda_ep_reset
EP_OPS.ep_state = cuda_ep_state
EP_OPS.ep_post = cuda_ep_post


cdef object bind(md_t *md):
    cdef ucxm_md_attr_t attr
    md_attr_init(&attr, "cuda_ipc", str(md.device.ordinal),
                 UCXM_MD_FLAG_REG | UCXM_MD_FLAG_NEED_RKEY | UCXM_MD_FLAG_RKEY_PTR |
                 UCXM_MD_FLAG_ENDPOINT)
    attr.mem_types = 1 << UCXM_MEM_TYPE_CUDA
    attr.rkey_packed_size = WIRE_SIZE
    attr.bounce_size = SIZE_MAX  # a transfer of any size needs no local key
    attr.software = md.device.cu.software != NULL
    cuda_mem_enforcement(md, NULL, &attr.enforcement)
    return md_bind(&OPS, &EP_OPS, &attr, md, None)


def open_md(str path, int ordinal, uint32_t queue_depth):
    """Open the device of that ordinal under the driver at `path`, and retain its primary context.

    Raises NoDeviceError (with the driver's reason), NoMemoryError, DeviceError.
    """
    cdef cu_driver_t *cu = driver_use(path)
    cdef ucxm_error_t error
    cdef ucxm_identity_t identity
    cdef ucxm_status_t status
    cdef device_t *device
    cdef md_t *md
    memset(&error, 0, sizeof(error))
    status = identity_self(&identity)
    if status != UCXM_OK or identity.start_time == 0 or identity.pid_ns == 0:
        raise NoDeviceError(
            "this process cannot be told from others: /proc/self/stat or /proc/self/ns/pid is "
            "not readable", op="open_md", component="cuda_ipc")
    with nogil:
        device = device_get(cu, ordinal, &status, &error)
    if device == NULL:
        raise error_from_status(
            status, op="open_md", component="cuda_ipc",
            detail=error.text.decode(errors="replace"), syndrome=error.syndrome or None)
    md = <md_t *>calloc(1, sizeof(md_t))
    if md == NULL:
        device_put(device)
        raise MemoryError
    md.device = device
    md.self = identity
    md.queue_depth = queue_depth
    pthread_mutex_init(&md.lock, NULL)
    pthread_mutex_init(&md.ep_lock, NULL)
    try:
        return bind(md)
    except BaseException:
        cuda_close(md)
        raise
