# SPDX-License-Identifier: BSD-3-Clause
# cython: freethreading_compatible=True
"""The domain `cuda_ipc`: memory of a CUDA device, shared with other processes by the driver's API.

A base with remote rights exports the whole allocation that its memory lies in, as CUDA does; the
key says which part is meant.  Whoever unpacks it maps the allocation, once for each context, and
copies by cuMemcpyAsync.  Rights and range are checked by the library of whoever uses the key, and
nothing can be revoked: what is mapped stays until it is unmapped.

What belongs to a device is one object of the process (`device_t`), shared by all domains on it.
Calls go into the device's primary context, pushed and popped around each.  Locks, each taken before
those that come after it: cu_tables_lock, device.lock; ep_lock, an endpoint's; md.lock and
cu_exports_lock alone.
"""
from libc.errno cimport EFAULT, EMFILE, ENFILE, ESRCH
from libc.stdint cimport SIZE_MAX, int32_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strcmp

from ucx_memh.core cimport identity_self, md_attr_init, md_bind, unsupported_mem_derive
from ucx_memh.libmemh cimport (
    UCXM_BACKEND_ABI, UCXM_ENFORCE_COOPERATIVE, UCXM_ENFORCE_NONE, UCXM_EP_CONNECTED,
    UCXM_ERR_INVALID_PARAM, UCXM_ERR_IO_ERROR, UCXM_ERR_MALFORMED_KEY,
    UCXM_ERR_NO_DEVICE, UCXM_ERR_NO_MEMORY, UCXM_ERR_NO_RESOURCE, UCXM_ERR_PEER_GONE,
    UCXM_ERR_STALE_KEY, UCXM_ERR_UNREACHABLE, UCXM_ERR_UNSUPPORTED, UCXM_MD_FLAG_ENDPOINT,
    UCXM_MD_FLAG_NEED_RKEY, UCXM_MD_FLAG_REG, UCXM_MD_FLAG_RKEY_PTR, UCXM_MEM_ACCESS_ALL,
    UCXM_MEM_ACCESS_REMOTE, UCXM_MEM_TYPE_CUDA, UCXM_OK, UCXM_OP_GET, UCXM_OP_PUT,
    ucxm_enforcement_t, ucxm_ep_ops_t, ucxm_ep_t, ucxm_error_t, ucxm_identity_t, ucxm_key_slot_t,
    ucxm_md_attr_t, ucxm_md_ops_t, ucxm_memh_t, ucxm_op_t, ucxm_refuse,
    ucxm_registration_t, ucxm_rkey_t, ucxm_status_t,
)

from ucx_memh.errors import NoDeviceError, error_from_status

cdef extern from "driver_table.h" nogil:
    ctypedef struct ucxm_symbol_t:
        const char *name

    ctypedef struct ucxm_library_t:
        void *handle
        char path[512]
        char reason[768]

    void ucxm_symbol_reason(const ucxm_library_t *library, const ucxm_symbol_t *symbol,
                            char *text, size_t size)
    int ucxm_library_load(ucxm_library_t *library, const char *path,
                          const ucxm_symbol_t *symbols, size_t count)

    ctypedef int cu_result_t
    ctypedef int cu_device_t
    ctypedef uint64_t cu_address_t
    ctypedef uint64_t cu_allocation_t
    ctypedef void *cu_context_t
    ctypedef void *cu_stream_t
    ctypedef void *cu_event_t
    ctypedef struct cu_handle_t:
        uint8_t bytes[64]
    ctypedef struct cu_access_t:
        int location_type
        int location_id
        int flags

    ctypedef struct cu_driver_t:
        ucxm_library_t library
        cu_result_t (*init)(unsigned flags) noexcept nogil
        cu_result_t (*driver_version)(int *version) noexcept nogil
        cu_result_t (*error_name)(cu_result_t error, const char **name) noexcept nogil
        cu_result_t (*device_count)(int *count) noexcept nogil
        cu_result_t (*device_get)(cu_device_t *device, int ordinal) noexcept nogil
        cu_result_t (*device_uuid)(uint8_t *uuid, cu_device_t device) noexcept nogil
        cu_result_t (*device_uuid_v2)(uint8_t *uuid, cu_device_t device) noexcept nogil
        cu_result_t (*context_retain)(cu_context_t *context, cu_device_t device) noexcept nogil
        cu_result_t (*context_release)(cu_device_t device) noexcept nogil
        cu_result_t (*context_push)(cu_context_t context) noexcept nogil
        cu_result_t (*context_pop)(cu_context_t *context) noexcept nogil
        cu_result_t (*attributes)(unsigned count, int *names, void **values,
                                  cu_address_t address) noexcept nogil
        cu_result_t (*address_range)(cu_address_t *base, size_t *size,
                                     cu_address_t address) noexcept nogil
        cu_result_t (*ipc_get)(cu_handle_t *handle, cu_address_t address) noexcept nogil
        cu_result_t (*ipc_open)(cu_address_t *address, cu_handle_t handle,
                                unsigned flags) noexcept nogil
        cu_result_t (*ipc_close)(cu_address_t address) noexcept nogil
        cu_result_t (*retain)(cu_allocation_t *allocation, void *address) noexcept nogil
        cu_result_t (*release)(cu_allocation_t allocation) noexcept nogil
        cu_result_t (*export_handle)(void *handle, cu_allocation_t allocation, int type,
                                     unsigned long long flags) noexcept nogil
        cu_result_t (*import_handle)(cu_allocation_t *allocation, void *handle,
                                     int type) noexcept nogil
        cu_result_t (*reserve)(cu_address_t *address, size_t size, size_t alignment,
                               cu_address_t hint, unsigned long long flags) noexcept nogil
        cu_result_t (*unreserve)(cu_address_t address, size_t size) noexcept nogil
        cu_result_t (*map)(cu_address_t address, size_t size, size_t offset,
                           cu_allocation_t allocation, unsigned long long flags) noexcept nogil
        cu_result_t (*unmap)(cu_address_t address, size_t size) noexcept nogil
        cu_result_t (*set_access)(cu_address_t address, size_t size, const cu_access_t *access,
                                  size_t count) noexcept nogil
        cu_result_t (*copy)(cu_address_t to, cu_address_t source, size_t size,
                            cu_stream_t stream) noexcept nogil
        cu_result_t (*stream_create)(cu_stream_t *stream, unsigned flags) noexcept nogil
        cu_result_t (*stream_destroy)(cu_stream_t stream) noexcept nogil
        cu_result_t (*stream_finish)(cu_stream_t stream) noexcept nogil
        cu_result_t (*stream_wait)(cu_stream_t stream, cu_event_t event,
                                   unsigned flags) noexcept nogil
        cu_result_t (*event_create)(cu_event_t *event, unsigned flags) noexcept nogil
        cu_result_t (*event_destroy)(cu_event_t event) noexcept nogil
        cu_result_t (*event_record)(cu_event_t event, cu_stream_t stream) noexcept nogil
        cu_result_t (*event_query)(cu_event_t event) noexcept nogil
        void *software

    enum:
        CU_SUCCESS
        CU_OUT_OF_MEMORY
        CU_NOT_INITIALIZED
        CU_DEINITIALIZED
        CU_NO_DEVICE
        CU_INVALID_CONTEXT
        CU_NOT_READY
        CU_ATTRIBUTE_MEMORY_TYPE
        CU_ATTRIBUTE_BUFFER_ID
        CU_ATTRIBUTE_IS_MANAGED
        CU_ATTRIBUTE_DEVICE_ORDINAL
        CU_ATTRIBUTE_LEGACY_CAPABLE
        CU_ATTRIBUTE_HANDLE_TYPES
        CU_ATTRIBUTE_MEMPOOL
        CU_MEMORYTYPE_DEVICE
        CU_HANDLE_POSIX_FD
        CU_HANDLE_FABRIC
        CU_LOCATION_DEVICE
        CU_ACCESS_READWRITE
        CU_IPC_LAZY_PEER_ACCESS
        CU_STREAM_NON_BLOCKING
        CU_EVENT_DISABLE_TIMING
        CU_VERSION_NEEDED

    const ucxm_symbol_t *cu_symbols
    const size_t CU_SYMBOL_COUNT
    void cu_too_old(const char *path, int version, char *text, size_t size)

cdef extern from "wire.h" nogil:
    """
    /* Of tables, devices and exports; what they guard begins anew in a forked child. */
    static pthread_mutex_t cu_tables_lock = PTHREAD_MUTEX_INITIALIZER;
    static pthread_mutex_t cu_exports_lock = PTHREAD_MUTEX_INITIALIZER;
    """
    ctypedef int pid_t
    enum:
        WIRE_LEGACY
        WIRE_FD
        WIRE_FABRIC
        WIRE_SIZE

    ctypedef struct cu_wire_t:
        uint8_t kinds
        int32_t fd
        uint64_t base
        uint64_t size
        uint64_t buffer_id
        uint64_t record
        uint64_t nonce
        uint8_t uuid[16]
        uint8_t handle[64]

    size_t wire_pack(const cu_wire_t *wire, uint8_t *out)
    const char *wire_parse(const uint8_t *data, size_t length, cu_wire_t *wire)

    uint32_t cu_load32(const uint32_t *p)
    bint cu_cas32(uint32_t *p, uint32_t old, uint32_t new)
    void cu_add32(uint32_t *p, uint32_t value)
    uint32_t cu_sub32(uint32_t *p, uint32_t value)
    void cu_or32(uint32_t *p, uint32_t bits)
    void cu_and32(uint32_t *p, uint32_t bits)
    uint64_t cu_load64(const uint64_t *p)
    void cu_store64(uint64_t *p, uint64_t value)
    void cu_count(uint64_t *counter, uint64_t n)

    void cu_close_on_exec(int fd)
    int cu_fetch_fd(int pidfd, int fd)
    uint64_t cu_nonce()

    ctypedef struct ucxm_process_t:
        uint64_t start_time
    int ucxm_pidfd_open(pid_t pid)
    int ucxm_pidfd_ended(int pidfd)
    int ucxm_process_open(pid_t pid)
    int ucxm_process_read(int fd, ucxm_process_t *process)
    int ucxm_process_peek(pid_t pid, uint64_t address, void *into, size_t size)
    int ucxm_allow_ptrace()
    int close(int fd)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    pthread_mutex_t cu_tables_lock
    pthread_mutex_t cu_exports_lock
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_trylock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)

cdef struct mapping_t

# A device, as all domains of the process on it share it.
cdef struct device_t:
    cu_driver_t *cu
    device_t *next
    uint32_t refs             # under cu_tables_lock
    int ordinal
    cu_context_t context      # the primary one, retained
    uint8_t uuid[16]
    pthread_mutex_t lock      # of the mappings
    mapping_t *mappings
    uint64_t opens            # handles opened or imported
    uint64_t closes
    uint64_t close_failures

# A process whose keys a domain holds.
cdef struct peer_t:
    ucxm_identity_t identity
    uint32_t refs             # one for each key; under md.lock
    uint32_t evicted          # under md.lock
    int pidfd                 # -1: ourselves, or on another host
    bint own
    bint linked
    rkey_t *rkeys
    peer_t *next

cdef struct rkey_t:
    peer_t *peer
    mapping_t *mapping        # NULL: our own memory, or evicted
    uint64_t distance         # from an address of the owner's to ours
    rkey_t *next
    rkey_t *prev

cdef struct ep_t

cdef struct md_t:
    device_t *device
    ucxm_identity_t self
    uint32_t queue_depth
    uint32_t flying           # operations of all endpoints
    pthread_mutex_t lock      # of the peers
    peer_t *peers
    pthread_mutex_t ep_lock   # of the list of endpoints
    ep_t *eps
    uint64_t copies
    uint64_t bytes


include "_md.src/driver.pxi"
include "_md.src/device.pxi"
include "_md.src/export.pxi"
include "_md.src/peer.pxi"
include "_md.src/mapping.pxi"
include "_md.src/key.pxi"
include "_md.src/endpoint.pxi"
include "_md.src/md.pxi"
