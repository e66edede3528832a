# SPDX-License-Identifier: BSD-3-Clause
# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""A device in this process's memory that counts, fails on request and checks its caller.

It implements the whole contract of backend.h, so the core can be tested on it with no real
backend.  Every rule of the contract that a call breaks becomes a line in
`FakeDevice.violations`; a test ends with an empty list.

Fakes of one process reach each other: a key of one, unpacked by another, names the first.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset, strcmp

from ucx_memh.core cimport (
    Md, md_bind, unsupported_key_create, unsupported_key_destroy, unsupported_mem_dereg,
    unsupported_mem_derive, unsupported_mem_reg, unsupported_mkey_pack, unsupported_rkey_ptr,
    unsupported_rkey_unpack,
)
from ucx_memh.libmemh cimport (
    UCXM_BACKEND_ABI, UCXM_ENFORCE_ENFORCED, UCXM_ENFORCE_NONE, UCXM_EP_CONNECTED,
    UCXM_EP_ERROR, UCXM_EP_IDLE, UCXM_ERR_BUSY, UCXM_ERR_INVALID_PARAM, UCXM_ERR_IO_ERROR,
    UCXM_ERR_MALFORMED_KEY, UCXM_ERR_NO_MEMORY, UCXM_ERR_PEER_GONE, UCXM_ERR_RANGE,
    UCXM_ERR_REMOTE_ACCESS, UCXM_ERR_UNREACHABLE, UCXM_ERR_FLUSHED, UCXM_INPROGRESS,
    UCXM_KEY_ATOMIC, UCXM_KEY_DERIVED, UCXM_KEY_DIRECT, UCXM_KEY_INDIRECT,
    UCXM_KEY_PLACEHOLDER,
    UCXM_KEY_PAYLOAD_MAX, UCXM_MD_FLAG_ATOMIC, UCXM_MD_FLAG_DERIVE_ENDPOINT,
    UCXM_MD_FLAG_ENDPOINT, UCXM_MD_FLAG_EVENT_FD, UCXM_MD_FLAG_INVALIDATE,
    UCXM_MD_FLAG_INVALIDATE_AMO, UCXM_MD_FLAG_INVALIDATE_RMA, UCXM_MD_FLAG_NEED_MEMH,
    UCXM_MD_FLAG_NEED_RKEY, UCXM_MD_FLAG_REG, UCXM_MD_FLAG_REG_DERIVED,
    UCXM_MD_FLAG_REG_DMABUF, UCXM_MD_FLAG_RKEY_PTR, UCXM_MEM_ACCESS_REMOTE,
    UCXM_MEM_ACCESS_REMOTE_ATOMIC, UCXM_MEM_ACCESS_REMOTE_GET, UCXM_MEM_ACCESS_REMOTE_PUT,
    UCXM_MEMH_REVOKING, UCXM_OK, UCXM_OP_COMPARE_SWAP, UCXM_OP_FETCH_ADD,
    UCXM_OP_GET, UCXM_OP_PUT, ucxm_completion_t, ucxm_enforcement_t, ucxm_ep_ops_t, ucxm_ep_t,
    ucxm_error_t, ucxm_identity_t, ucxm_key_slot_t, ucxm_md_attr_t, ucxm_md_ops_t,
    ucxm_memh_inherited_tail, ucxm_memh_own, ucxm_memh_own_t, ucxm_memh_own_tail, ucxm_memh_t,
    ucxm_op_kind_t, ucxm_op_t, ucxm_registration_t, ucxm_rkey_t, ucxm_status_t, uint8_t,
    uint32_t, uint64_t,
)

cdef extern from *:
    """
    #include <pthread.h>
    #include <sys/eventfd.h>
    #include <time.h>
    #include <unistd.h>

    /* Guards the list of devices, their endpoints and who is connected to whom. */
    static pthread_mutex_t fake_wire = PTHREAD_MUTEX_INITIALIZER;

    static inline uint64_t fake_add64(uint64_t *p, uint64_t n) {
        return __atomic_add_fetch(p, n, __ATOMIC_ACQ_REL);
    }
    static inline uint32_t fake_add32(uint32_t *p, uint32_t n) {
        return __atomic_add_fetch(p, n, __ATOMIC_ACQ_REL);
    }
    static inline uint64_t fake_load64(const uint64_t *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline uint32_t fake_load32(const uint32_t *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline void fake_store32(uint32_t *p, uint32_t value) {
        __atomic_store_n(p, value, __ATOMIC_RELEASE);
    }
    static inline uint64_t fake_fetch_add(void *p, uint64_t n) {
        return __atomic_fetch_add((uint64_t *)p, n, __ATOMIC_SEQ_CST);
    }
    static inline uint64_t fake_compare_swap(void *p, uint64_t expect, uint64_t value) {
        __atomic_compare_exchange_n((uint64_t *)p, &expect, value, 0, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST);
        return expect;
    }
    static void fake_sleep(uint64_t ns) {
        struct timespec ts = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
        while (nanosleep(&ts, &ts) != 0)
            ;
    }
    static int fake_eventfd(void) { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }
    static void fake_event_set(int fd) {
        uint64_t one = 1;
        ssize_t n = fd < 0 ? 0 : write(fd, &one, sizeof(one));
        (void)n;
    }
    static void fake_event_clear(int fd) {
        uint64_t value;
        ssize_t n = fd < 0 ? 0 : read(fd, &value, sizeof(value));
        (void)n;
    }
    """
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr) nogil
    int pthread_mutex_destroy(pthread_mutex_t *mutex) nogil
    int pthread_mutex_lock(pthread_mutex_t *mutex) nogil
    int pthread_mutex_unlock(pthread_mutex_t *mutex) nogil
    pthread_mutex_t WIRE "fake_wire"
    uint64_t add64 "fake_add64"(uint64_t *p, uint64_t n) nogil
    uint64_t load64 "fake_load64"(const uint64_t *p) noexcept nogil
    uint32_t load32 "fake_load32"(const uint32_t *p) noexcept nogil
    void store32 "fake_store32"(uint32_t *p, uint32_t value) noexcept nogil
    uint32_t add32 "fake_add32"(uint32_t *p, uint32_t n) nogil
    uint64_t fetch_add "fake_fetch_add"(void *p, uint64_t n) nogil
    uint64_t compare_swap "fake_compare_swap"(void *p, uint64_t expect, uint64_t value) nogil
    void fake_sleep(uint64_t ns) nogil
    int fake_eventfd() nogil
    void fake_event_set(int fd) nogil
    void fake_event_clear(int fd) nogil
    int close_fd "close"(int fd) nogil

cdef extern from "Python.h":
    ctypedef int PyGILState_STATE
    int PyGILState_Check() nogil
    PyGILState_STATE PyGILState_Ensure() nogil
    void PyGILState_Release(PyGILState_STATE state) nogil


# ---- objects -------------------------------------------------------------------------------

cdef enum:
    OP_TAIL_INIT
    OP_CLOSE
    OP_MEM_REG
    OP_MEM_DEREG
    OP_MEM_DERIVE
    OP_KEY_CREATE
    OP_KEY_DESTROY
    OP_KEY_DESTROY_DONE
    OP_MKEY_PACK
    OP_RKEY_UNPACK
    OP_RKEY_RELEASE
    OP_RKEY_PTR
    OP_PROGRESS
    OP_EVENT_FD
    OP_EVENT_ARM
    OP_MEM_ENFORCEMENT
    OP_PEER_EVICT
    OP_KEY_FLUSH
    OP_MEM_QUERY
    OP_EP_CREATE
    OP_EP_DESTROY
    OP_EP_ADDRESS
    OP_EP_CONNECT
    OP_EP_RESET
    OP_POST
    OP_TRANSFER
    OPS

cdef const char *NAMES[OPS]
NAMES[:] = [
    "tail_init", "close", "mem_reg", "mem_dereg", "mem_derive", "key_create", "key_destroy",
    "key_destroy_done", "mkey_pack", "rkey_unpack", "rkey_release", "rkey_ptr", "progress",
    "event_fd", "event_arm", "mem_enforcement", "peer_evict", "key_flush", "mem_query",
    "ep_create", "ep_destroy", "ep_address", "ep_connect", "ep_reset", "post", "transfer",
]
cdef const char *STAT_NAMES[OPS]
STAT_NAMES[:] = [
    "fake_tail_init", "fake_close", "fake_mem_reg", "fake_mem_dereg", "fake_mem_derive",
    "fake_key_create", "fake_key_destroy", "fake_key_destroy_done", "fake_mkey_pack",
    "fake_rkey_unpack", "fake_rkey_release", "fake_rkey_ptr", "fake_progress", "fake_event_fd",
    "fake_event_arm", "fake_mem_enforcement", "fake_peer_evict", "fake_key_flush",
    "fake_mem_query", "fake_ep_create", "fake_ep_destroy", "fake_ep_address", "fake_ep_connect",
    "fake_ep_reset", "fake_post", "fake_transfer",
]

OPERATIONS = tuple(NAMES[i].decode() for i in range(OPS))
"""What can be counted, slowed down and (most of it) made to fail."""

cdef enum:
    PAYLOAD_SIZE = 16
    VIOLATIONS = 32

cdef enum:
    DESTROY_NOW        # key_destroy is done when it returns
    DESTROY_PROGRESS   # ... at the next progress()
    DESTROY_MANUAL     # ... when the test says so
    DESTROY_FLUSH      # ... at the next progress() after a key_flush()

# What a device says that it enforces, and does not.
cdef enum:
    LIE_RIGHTS = 1
    LIE_RANGE = 2
    LIE_REVOKE = 4
    LIE_IN_FLIGHT = 8  # what was posted before a revocation goes on after it
    LIE_ENDPOINT = 16
    LIE_GUESS = 32     # a value that is no key's passes for one

cdef dict LIES = {"rights": LIE_RIGHTS, "range": LIE_RANGE, "revoke": LIE_REVOKE,
                  "in_flight": LIE_IN_FLIGHT, "endpoint": LIE_ENDPOINT, "guess": LIE_GUESS}

cdef struct fault_t:
    int op
    uint64_t after
    uint64_t count
    ucxm_status_t status
    uint64_t bytes      # transfer: moved before it fails
    ucxm_error_t error
    fault_t *next

cdef struct key_t:
    uint32_t value
    uint32_t kind
    uint64_t address
    uint64_t length
    uint64_t rights
    uint64_t endpoint   # id of the only endpoint that may use it; 0: any
    ucxm_registration_t *reg
    bint dying          # its destruction has been asked for
    bint lying          # ... and waits for a key_flush
    ucxm_completion_t *comp
    key_t *next

cdef struct fep_t:
    uint64_t id
    uint32_t state
    uint32_t epoch
    uint64_t peer       # id of the endpoint at the other side
    uint32_t peer_epoch
    fake_t *dev
    fep_t *next

cdef struct fake_t:
    pthread_mutex_t lock
    uint32_t refs
    uint32_t closed
    uint64_t guid
    fake_t *next        # in the list of devices
    fep_t *endpoints

    # options
    uint64_t max_reg
    uint64_t mem_types
    size_t tail_inherit_size
    size_t tail_own_size
    size_t payload_length
    int destroy_mode
    bint deferred
    bint connectionless
    bint python
    bint placeholders
    uint32_t lies
    int claim

    uint64_t counter[OPS]
    uint64_t gil_held[OPS]
    uint64_t slow[OPS]
    fault_t *faults
    uint32_t *script
    size_t script_size
    size_t script_next
    uint32_t next_value
    uint32_t next_direct
    key_t *keys
    key_t *ghosts           # destroyed ones that a liar still serves
    ucxm_op_t *flight       # oldest first
    uint32_t held
    int event
    uint32_t inside_keys    # threads in key_create or key_destroy
    const char *violation[VIOLATIONS]
    uint64_t violation_count[VIOLATIONS]

cdef struct frkey_t:
    fake_t *target
    uint32_t rma
    uint32_t atomic

cdef struct freg_t:
    key_t *direct
    uint64_t reserved

# What an endpoint hands out; `magic` so that other bytes are refused.
cdef struct address_t:
    uint32_t magic
    uint32_t epoch
    uint64_t id

cdef enum:
    ADDRESS_MAGIC = 0x46414b45

cdef fake_t *devices = NULL
cdef uint64_t last_id = 0


cdef void fake_put(fake_t *dev) noexcept nogil:
    cdef fault_t *fault
    cdef key_t *key
    if add32(&dev.refs, <uint32_t>-1) != 0:
        return
    while dev.faults != NULL:
        fault = dev.faults
        dev.faults = fault.next
        free(fault)
    while dev.keys != NULL:
        key = dev.keys
        dev.keys = key.next
        free(key)
    while dev.ghosts != NULL:
        key = dev.ghosts
        dev.ghosts = key.next
        free(key)
    if dev.event >= 0:
        close_fd(dev.event)
    free(dev.script)
    pthread_mutex_destroy(&dev.lock)
    free(dev)


cdef void fake_unplug(fake_t *dev) noexcept nogil:
    """Peers find it no more."""
    cdef fake_t **at
    pthread_mutex_lock(&WIRE)
    at = &devices
    while at[0] != NULL and at[0] != dev:
        at = &at[0].next
    if at[0] != NULL:
        at[0] = dev.next
    pthread_mutex_unlock(&WIRE)
    pthread_mutex_lock(&dev.lock)
    dev.closed = 1
    pthread_mutex_unlock(&dev.lock)


# ---- the caller is checked, counted and failed ----------------------------------------------

cdef void violate(fake_t *dev, const char *text) noexcept nogil:
    """Note that the contract was broken; `text` is a literal."""
    cdef int i
    pthread_mutex_lock(&dev.lock)
    for i in range(VIOLATIONS):
        if dev.violation[i] == NULL or strcmp(dev.violation[i], text) == 0:
            dev.violation[i] = text
            dev.violation_count[i] += 1
            break
    pthread_mutex_unlock(&dev.lock)


cdef ucxm_status_t due(fake_t *dev, int op, ucxm_error_t *error, uint64_t *bytes) noexcept nogil:
    """The status of a fault whose time has come, or OK."""
    cdef ucxm_status_t status = UCXM_OK
    cdef fault_t *fault
    pthread_mutex_lock(&dev.lock)
    fault = dev.faults
    while fault != NULL:
        if fault.op == op and fault.count != 0:
            if fault.after != 0:
                fault.after -= 1
            else:
                fault.count -= 1
                status = fault.status
                if error != NULL:
                    error[0] = fault.error
                if bytes != NULL:
                    bytes[0] = fault.bytes
                break
        fault = fault.next
    pthread_mutex_unlock(&dev.lock)
    return status


cdef void count(fake_t *dev, int op) noexcept nogil:
    cdef PyGILState_STATE gil
    add64(&dev.counter[op], 1)
    if PyGILState_Check():
        add64(&dev.gil_held[op], 1)
    if dev.python:
        gil = PyGILState_Ensure()
        PyGILState_Release(gil)
    if dev.slow[op] != 0:
        fake_sleep(dev.slow[op])


cdef ucxm_status_t enter(fake_t *dev, int op, ucxm_error_t *error) noexcept nogil:
    count(dev, op)
    if dev.closed:
        violate(dev, "a call after close")
    return due(dev, op, error, NULL)


cdef void say(ucxm_error_t *error, const char *text) noexcept nogil:
    if error != NULL:
        snprintf(error.text, sizeof(error.text), "%s", text)


cdef inline uint8_t inherited_byte(const ucxm_memh_t *memh, size_t i) noexcept nogil:
    """Of a whole family of handles, as they share the Registration."""
    return <uint8_t>(0x5a + i + (<uint64_t>memh.inherited.reg >> 4))


cdef inline uint8_t own_byte(const ucxm_memh_t *memh, size_t i) noexcept nogil:
    return <uint8_t>(0xc3 + i + (<uint64_t>memh >> 4))


cdef void check_tails(fake_t *dev, const ucxm_memh_t *memh) noexcept nogil:
    cdef const uint8_t *tail = <const uint8_t *>ucxm_memh_inherited_tail(memh)
    cdef size_t i
    for i in range(dev.tail_inherit_size):
        if tail[i] != inherited_byte(memh, i):
            violate(dev, "the inherited tail is not what tail_init wrote")
            break
    tail = <const uint8_t *>ucxm_memh_own_tail(memh)
    for i in range(dev.tail_own_size):
        if tail[i] != own_byte(memh, i):
            violate(dev, "the own tail is not what tail_init wrote")
            break


cdef bint all_zero(const void *at, size_t size) noexcept nogil:
    cdef size_t i
    for i in range(size):
        if (<const uint8_t *>at)[i] != 0:
            return False
    return True


cdef void fake_tail_init(void *priv, const ucxm_memh_t *memh, void *inherited,
                         void *own) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef uint8_t *tail
    cdef size_t i
    count(dev, OP_TAIL_INIT)
    if own != ucxm_memh_own_tail(memh) or <uint64_t>own % 8 != 0:
        violate(dev, "tail_init: the own tail is elsewhere")
    if (inherited == NULL) != (memh.id.parent != NULL):
        violate(dev, "tail_init: inherited must be NULL for a derived handle and only then")
    if inherited != NULL:
        if inherited != ucxm_memh_inherited_tail(memh) or <uint64_t>inherited % 8 != 0:
            violate(dev, "tail_init: the inherited tail is elsewhere")
        tail = <uint8_t *>inherited
        for i in range(dev.tail_inherit_size):
            tail[i] = inherited_byte(memh, i)
    tail = <uint8_t *>own
    for i in range(dev.tail_own_size):
        tail[i] = own_byte(memh, i)
    check_tails(dev, memh)


cdef void fake_close(void *priv) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef const key_t *key
    count(dev, OP_CLOSE)
    if dev.endpoints != NULL:
        violate(dev, "close: endpoints are left")
    if dev.flight != NULL:
        violate(dev, "close: operations are in flight")
    key = dev.keys
    while key != NULL:
        violate(dev, "close: keys are left")
        key = key.next
    fake_unplug(dev)
    fake_put(dev)


# ---- memory and keys ------------------------------------------------------------------------

cdef key_t *key_new(fake_t *dev, uint32_t kind) noexcept nogil:
    """A key with its value, in no table yet."""
    cdef key_t *key = <key_t *>calloc(1, sizeof(key_t))
    if key == NULL:
        return NULL
    key.kind = kind
    pthread_mutex_lock(&dev.lock)
    if kind == UCXM_KEY_DIRECT:
        key.value = dev.next_direct
        dev.next_direct += 1
    elif dev.script_next < dev.script_size:
        key.value = dev.script[dev.script_next]
        dev.script_next += 1
    else:
        key.value = dev.next_value
        dev.next_value += 1
    pthread_mutex_unlock(&dev.lock)
    return key


cdef void key_add(fake_t *dev, key_t *key) noexcept nogil:
    pthread_mutex_lock(&dev.lock)
    key.next = dev.keys
    dev.keys = key
    pthread_mutex_unlock(&dev.lock)


cdef bint key_remove(fake_t *dev, key_t *key) noexcept nogil:
    """Destroy it: after this nothing goes through it.  False: it was not there."""
    cdef key_t **at
    cdef key_t *ghost
    cdef bint found
    pthread_mutex_lock(&dev.lock)
    at = &dev.keys
    while at[0] != NULL and at[0] != key:
        at = &at[0].next
    found = at[0] != NULL
    if found:
        at[0] = key.next
        # A direct key goes with its memory, which nobody must touch then.
        if dev.lies & (LIE_REVOKE | LIE_IN_FLIGHT) and key.kind != UCXM_KEY_DIRECT:
            ghost = <key_t *>malloc(sizeof(key_t))
            if ghost != NULL:
                ghost[0] = key[0]
                ghost.next = dev.ghosts
                dev.ghosts = ghost
    pthread_mutex_unlock(&dev.lock)
    return found


cdef ucxm_status_t fake_mem_reg(void *priv, ucxm_registration_t *reg,
                                ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef freg_t *mine = <freg_t *>reg.priv
    cdef ucxm_status_t status = enter(dev, OP_MEM_REG, error)
    if reg.length == 0 or reg.address + reg.length < reg.address:
        violate(dev, "mem_reg: an empty range, or one that wraps around")
    if dev.max_reg != 0 and reg.length > dev.max_reg:
        violate(dev, "mem_reg: longer than max_reg")
    if reg.mem_type >= 64 or not (dev.mem_types >> reg.mem_type) & 1:
        violate(dev, "mem_reg: a memory type that was not declared")
    if <uint64_t>mine % 16 != 0 or not all_zero(mine, sizeof(mine[0])):
        violate(dev, "mem_reg: the private part is not zeroed and aligned")
    if status != UCXM_OK:
        return status
    mine.direct = key_new(dev, UCXM_KEY_DIRECT)
    if mine.direct == NULL:
        return UCXM_ERR_NO_MEMORY
    mine.direct.address = reg.address
    mine.direct.length = reg.length
    mine.direct.rights = reg.direct_rights & UCXM_MEM_ACCESS_REMOTE
    mine.direct.reg = reg
    reg.rkey = mine.direct.value
    reg.lkey = mine.direct.value ^ 0x40000000
    key_add(dev, mine.direct)
    return UCXM_OK


cdef ucxm_status_t fake_mem_query(void *priv, uint64_t address, uint64_t length,
                                  uint32_t *mem_type, ucxm_error_t *error) noexcept nogil:
    """Any memory is of the first type that it takes."""
    cdef fake_t *dev = <fake_t *>priv
    cdef ucxm_status_t status = enter(dev, OP_MEM_QUERY, error)
    cdef uint32_t kind = 0
    if length == 0 or address + length < address:
        violate(dev, "mem_query: an empty range, or one that wraps around")
    if status != UCXM_OK:
        return status
    while kind < 64 and not dev.mem_types >> kind & 1:
        kind += 1
    mem_type[0] = kind
    return UCXM_OK


cdef ucxm_status_t fake_mem_dereg(void *priv, ucxm_registration_t *reg,
                                  ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef freg_t *mine = <freg_t *>reg.priv
    cdef ucxm_status_t status = enter(dev, OP_MEM_DEREG, error)
    cdef const key_t *key
    cdef bint left = False
    pthread_mutex_lock(&dev.lock)
    key = dev.keys
    while key != NULL:
        left = left or (key.reg == reg and key.kind != UCXM_KEY_DIRECT)
        key = key.next
    pthread_mutex_unlock(&dev.lock)
    if left:
        violate(dev, "mem_dereg: keys on the registration are left")
    if status != UCXM_OK:
        return status
    if not key_remove(dev, mine.direct):
        violate(dev, "mem_dereg: twice")
        return UCXM_ERR_IO_ERROR
    free(mine.direct)
    mine.direct = NULL
    return UCXM_OK


cdef ucxm_status_t fake_mem_derive(void *priv, const ucxm_memh_t *base, const ucxm_memh_t *memh,
                                   ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef const ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef const ucxm_memh_own_t *from_ = ucxm_memh_own(base)
    cdef int i
    check_tails(dev, base)
    check_tails(dev, memh)
    if memh.id.parent != base or memh.inherited.reg != base.inherited.reg:
        violate(dev, "mem_derive: another parent or registration")
    if (own.grant | own.rights) & ~from_.grant or own.address < from_.address or (
            own.address + own.length > from_.address + from_.length):
        violate(dev, "mem_derive: not narrower")
    for i in range(3):
        if own.slot[i].live or own.slot[i].object != NULL:
            violate(dev, "mem_derive: a key slot was copied")
    return enter(dev, OP_MEM_DERIVE, error)


cdef ucxm_status_t fake_key_create(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                   ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef const ucxm_memh_own_t *own = NULL
    cdef uint64_t may = UCXM_MEM_ACCESS_REMOTE
    cdef key_t *key
    cdef ucxm_status_t status
    if add32(&dev.inside_keys, 1) != 1:
        violate(dev, "key_create, key_destroy: not one after the other")
    status = enter(dev, OP_KEY_CREATE, error)
    if slot.live or slot.object != NULL:
        violate(dev, "key_create: the slot is in use")
    if (memh == NULL) != (slot.kind == UCXM_KEY_PLACEHOLDER) or (
            memh == NULL and not dev.placeholders):
        violate(dev, "key_create: a placeholder, and nothing else, has no handle")
    if memh != NULL:
        own = ucxm_memh_own(memh)
        check_tails(dev, memh)
        # A revocation may begin at any moment; it waits for us before it destroys the key.
        if load32(&memh.id.state) > UCXM_MEMH_REVOKING:
            violate(dev, "key_create: the handle is not live")
        if own.length == 0:
            violate(dev, "key_create: for an empty range")
        if slot.kind == UCXM_KEY_DIRECT or (slot.kind == UCXM_KEY_DERIVED) != (
                memh.id.parent != NULL):
            violate(dev, "key_create: a kind of key that such a handle does not have")
    key = key_new(dev, slot.kind) if status == UCXM_OK else NULL
    if key != NULL:
        if slot.kind == UCXM_KEY_INDIRECT:
            may = UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_GET
        elif slot.kind == UCXM_KEY_ATOMIC:
            may = UCXM_MEM_ACCESS_REMOTE_ATOMIC
        if own != NULL:
            key.address = own.address
            key.length = own.length
            key.rights = own.rights & may
            key.reg = memh.inherited.reg
            if own.ep != NULL:
                key.endpoint = (<fep_t **>own.ep.priv)[0].id
        slot.object = key
        slot.value = key.value
        key_add(dev, key)
    elif status == UCXM_OK:
        status = UCXM_ERR_NO_MEMORY
    add32(&dev.inside_keys, <uint32_t>-1)
    return status


cdef ucxm_status_t fake_key_destroy(void *priv, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                    ucxm_completion_t *comp, ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef key_t *key
    cdef bint known = False, dying = False
    cdef ucxm_status_t status
    if add32(&dev.inside_keys, 1) != 1:
        violate(dev, "key_create, key_destroy: not one after the other")
    status = enter(dev, OP_KEY_DESTROY, error)
    if memh != NULL:  # NULL: a key that never came to a handle
        check_tails(dev, memh)
        if memh.id.parent != NULL and load32(&memh.id.state) != UCXM_MEMH_REVOKING:
            violate(dev, "key_destroy: the handle is not being revoked")
    pthread_mutex_lock(&dev.lock)
    key = dev.keys
    while key != NULL and <void *>key != slot.object:
        key = key.next
    if key != NULL:
        known = True
        dying = key.dying
        if not dying and status == UCXM_OK and comp != NULL and dev.destroy_mode != DESTROY_NOW:
            key.dying = True
            key.lying = dev.destroy_mode == DESTROY_FLUSH
            key.comp = comp
            status = UCXM_INPROGRESS
    pthread_mutex_unlock(&dev.lock)
    if not known or dying:
        violate(dev, "key_destroy: twice, or never created")
        say(error, "fake: no such key")
        status = UCXM_ERR_IO_ERROR
    elif status == UCXM_INPROGRESS:
        fake_event_set(dev.event)
    elif status == UCXM_OK:
        key_remove(dev, key)
        free(key)
    add32(&dev.inside_keys, <uint32_t>-1)
    return status


cdef bint destroys_send(fake_t *dev) noexcept nogil:
    """What lies goes to the device.  Was there anything?"""
    cdef key_t *key
    cdef bint some = False
    if dev.destroy_mode != DESTROY_FLUSH:
        return False
    pthread_mutex_lock(&dev.lock)
    key = dev.keys
    while key != NULL:
        some = some or key.lying
        key.lying = False
        key = key.next
    pthread_mutex_unlock(&dev.lock)
    return some


cdef void fake_key_flush(void *priv) noexcept nogil:
    if destroys_send(<fake_t *>priv):
        count(<fake_t *>priv, OP_KEY_FLUSH)


cdef unsigned destroys_complete(fake_t *dev, uint64_t at_most,
                                ucxm_status_t status) noexcept nogil:
    """Finish that many destructions, the oldest first; with an error the keys stay."""
    cdef unsigned done = 0
    cdef key_t *key
    cdef key_t *oldest
    cdef ucxm_completion_t *comp
    cdef ucxm_status_t result
    while done < at_most:
        oldest = NULL
        pthread_mutex_lock(&dev.lock)
        key = dev.keys
        while key != NULL:
            if key.dying and not key.lying:
                oldest = key  # new ones are put in front
            key = key.next
        if oldest != NULL:
            oldest.dying = False
        pthread_mutex_unlock(&dev.lock)
        if oldest == NULL:
            break
        add64(&dev.counter[OP_KEY_DESTROY_DONE], 1)
        result = due(dev, OP_KEY_DESTROY_DONE, NULL, NULL)
        if result == UCXM_OK:
            result = status
        comp = oldest.comp
        if result == UCXM_OK:
            key_remove(dev, oldest)
            free(oldest)
        done += 1
        comp.func(comp, result)
    return done


cdef ucxm_status_t fake_mkey_pack(void *priv, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
                                  const ucxm_key_slot_t *atomic, uint8_t *payload,
                                  size_t *length, ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef uint32_t value = 0
    cdef ucxm_status_t status = enter(dev, OP_MKEY_PACK, error)
    check_tails(dev, memh)
    if rma == NULL:
        violate(dev, "mkey_pack: no key")
        return UCXM_ERR_IO_ERROR
    if status != UCXM_OK:
        return status
    if rma.value == 0:
        violate(dev, "mkey_pack: the key has no value")
    memset(payload, 0xee, dev.payload_length)
    memcpy(payload, &dev.guid, 8)
    memcpy(payload + 8, &rma.value, 4)
    if atomic != NULL:
        value = atomic.value
    memcpy(payload + 12, &value, 4)
    length[0] = dev.payload_length
    return UCXM_OK


cdef ucxm_status_t fake_rkey_unpack(void *priv, ucxm_rkey_t *rkey, const uint8_t *payload,
                                    size_t length, int raw, ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef frkey_t *mine = <frkey_t *>rkey.priv
    cdef fake_t *target
    cdef uint64_t guid
    cdef ucxm_status_t status = enter(dev, OP_RKEY_UNPACK, error)
    if not all_zero(mine, sizeof(mine[0])):
        violate(dev, "rkey_unpack: the private part is not zeroed")
    if status != UCXM_OK:
        return status
    if length != dev.payload_length:
        say(error, "fake: the payload has another size")
        return UCXM_ERR_MALFORMED_KEY
    memcpy(&guid, payload, 8)
    pthread_mutex_lock(&WIRE)
    target = devices
    while target != NULL and target.guid != guid:
        target = target.next
    if target != NULL:
        add32(&target.refs, 1)
    pthread_mutex_unlock(&WIRE)
    if target == NULL:
        say(error, "fake: the key is of no fake in this process")
        return UCXM_ERR_UNREACHABLE
    mine.target = target
    memcpy(&mine.rma, payload + 8, 4)
    memcpy(&mine.atomic, payload + 12, 4)
    return UCXM_OK


cdef void fake_rkey_release(void *priv, ucxm_rkey_t *rkey) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef frkey_t *mine = <frkey_t *>rkey.priv
    count(dev, OP_RKEY_RELEASE)
    if mine.target == NULL:
        violate(dev, "rkey_release: twice, or never unpacked")
        return
    fake_put(mine.target)
    mine.target = NULL


cdef ucxm_status_t fake_rkey_ptr(void *priv, const ucxm_rkey_t *rkey, uint64_t address,
                                 void **ptr, ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef ucxm_status_t status = enter(dev, OP_RKEY_PTR, error)
    if address < rkey.info.address or address - rkey.info.address > rkey.info.length:
        violate(dev, "rkey_ptr: outside the key's range")
        return UCXM_ERR_RANGE
    if status == UCXM_OK:
        ptr[0] = <void *>address
    return status


# ---- the device's side of an access ---------------------------------------------------------

cdef const key_t *key_find(const key_t *key, uint32_t value) noexcept nogil:
    """The target is locked."""
    while key != NULL and key.value != value:
        key = key.next
    return key


cdef const key_t *liars_key(const fake_t *target, uint32_t value, uint64_t right,
                            bint begun) noexcept nogil:
    """What a liar serves an access with whose key is not in its table."""
    cdef const key_t *key = NULL
    if target.lies & LIE_REVOKE or begun and target.lies & LIE_IN_FLIGHT:
        key = key_find(target.ghosts, value)
    if key == NULL and target.lies & LIE_GUESS:
        key = target.keys
        while key != NULL and not key.rights & right:
            key = key.next
    return key


cdef bint key_live(fake_t *target, uint32_t value) noexcept nogil:
    cdef bint live
    pthread_mutex_lock(&target.lock)
    live = key_find(target.keys, value) != NULL
    pthread_mutex_unlock(&target.lock)
    return live


cdef ucxm_status_t device_access(fake_t *target, uint32_t value, bint begun, uint64_t endpoint,
                                 ucxm_op_kind_t kind, uint64_t address, void *local,
                                 uint64_t offset, uint64_t length, uint64_t limit,
                                 uint64_t operand, uint64_t compare, uint64_t *result,
                                 uint64_t *moved) noexcept nogil:
    """Check the native key and move at most `limit` bytes from `offset` on: what hardware does.

    The key table is locked meanwhile, so a key whose destruction has returned lets no byte pass.
    """
    cdef uint64_t right
    cdef uint32_t lies = target.lies
    cdef const key_t *key
    cdef ucxm_status_t status = UCXM_ERR_REMOTE_ACCESS
    cdef uint64_t n = length - offset
    moved[0] = 0
    if kind == UCXM_OP_GET:
        right = UCXM_MEM_ACCESS_REMOTE_GET
    elif kind == UCXM_OP_PUT:
        right = UCXM_MEM_ACCESS_REMOTE_PUT
    else:
        right = UCXM_MEM_ACCESS_REMOTE_ATOMIC
    pthread_mutex_lock(&target.lock)
    key = key_find(target.keys, value)
    if key == NULL:
        key = liars_key(target, value, right, begun)
    if target.closed:
        status = UCXM_ERR_PEER_GONE
    elif (key != NULL and (lies & LIE_RIGHTS or key.rights & right) and
            (lies & LIE_RANGE or address >= key.address and length <= key.length and
             address - key.address <= key.length - length) and
            (lies & LIE_ENDPOINT or key.endpoint == 0 or key.endpoint == endpoint)):
        status = UCXM_OK
        if n > limit:
            n = limit
        if kind == UCXM_OP_GET:
            memmove(<char *>local + offset, <void *>(address + offset), n)
        elif kind == UCXM_OP_PUT:
            memmove(<void *>(address + offset), <char *>local + offset, n)
        elif address % 8 != 0 or length != 8:
            status = UCXM_ERR_REMOTE_ACCESS
        elif kind == UCXM_OP_FETCH_ADD:
            result[0] = fetch_add(<void *>address, operand)
        else:
            result[0] = compare_swap(<void *>address, compare, operand)
        if status == UCXM_OK:
            moved[0] = n
    pthread_mutex_unlock(&target.lock)
    return status


# ---- data path ------------------------------------------------------------------------------
# Of an operation's scratch: [0] bytes moved, [1] the next in flight, [2] its key was live when it
# was posted.

cdef fep_t *fep_find(uint64_t id) noexcept nogil:
    """WIRE is held."""
    cdef fake_t *dev = devices
    cdef fep_t *ep
    while dev != NULL:
        ep = dev.endpoints
        while ep != NULL:
            if ep.id == id:
                return ep
            ep = ep.next
        dev = dev.next
    return NULL


cdef inline fep_t *fep_of(const ucxm_ep_t *ep) noexcept nogil:
    return (<fep_t **>ep.priv)[0]


cdef uint32_t fep_state(fep_t *ep) noexcept nogil:
    cdef uint32_t state
    pthread_mutex_lock(&WIRE)
    state = ep.state
    pthread_mutex_unlock(&WIRE)
    return state


cdef void fep_break(fep_t *ep) noexcept nogil:
    """The connection fails, on both sides."""
    cdef fep_t *peer
    pthread_mutex_lock(&WIRE)
    if ep.state == UCXM_EP_CONNECTED:
        ep.state = UCXM_EP_ERROR
    peer = fep_find(ep.peer)
    if peer != NULL and peer.epoch == ep.peer_epoch and peer.peer == ep.id:
        if peer.state == UCXM_EP_CONNECTED:
            peer.state = UCXM_EP_ERROR
            fake_event_set(peer.dev.event)
    pthread_mutex_unlock(&WIRE)


cdef ucxm_status_t fake_ep_create(void *priv, ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef fep_t *mine
    cdef ucxm_status_t status = enter(dev, OP_EP_CREATE, error)
    if not all_zero(ep.priv, sizeof(fep_t *)):
        violate(dev, "ep_create: the private part is not zeroed")
    if status != UCXM_OK:
        return status
    mine = <fep_t *>calloc(1, sizeof(fep_t))
    if mine == NULL:
        return UCXM_ERR_NO_MEMORY
    mine.id = add64(&last_id, 1)
    mine.dev = dev
    mine.state = UCXM_EP_IDLE
    if dev.connectionless:
        mine.state = UCXM_EP_CONNECTED
        mine.peer = mine.id
    (<fep_t **>ep.priv)[0] = mine
    pthread_mutex_lock(&WIRE)
    mine.next = dev.endpoints
    dev.endpoints = mine
    pthread_mutex_unlock(&WIRE)
    return UCXM_OK


cdef void fake_ep_destroy(void *priv, ucxm_ep_t *ep) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef fep_t *mine = fep_of(ep)
    cdef fep_t **at
    cdef const key_t *key
    cdef bint bound = False
    count(dev, OP_EP_DESTROY)
    pthread_mutex_lock(&dev.lock)
    key = dev.keys
    while key != NULL:
        bound = bound or key.endpoint == mine.id
        key = key.next
    pthread_mutex_unlock(&dev.lock)
    if bound:
        violate(dev, "ep_destroy: keys are bound to it")
    fep_break(mine)
    flush_endpoint(dev, ep)
    pthread_mutex_lock(&WIRE)
    at = &dev.endpoints
    while at[0] != mine:
        at = &at[0].next
    at[0] = mine.next
    pthread_mutex_unlock(&WIRE)
    free(mine)
    (<fep_t **>ep.priv)[0] = NULL


cdef ucxm_status_t fake_ep_address(void *priv, ucxm_ep_t *ep, uint8_t *address, size_t *length,
                                   ucxm_error_t *error) noexcept nogil:
    cdef fep_t *mine = fep_of(ep)
    cdef address_t out
    cdef ucxm_status_t status = enter(<fake_t *>priv, OP_EP_ADDRESS, error)
    if status != UCXM_OK:
        return status
    out.magic = ADDRESS_MAGIC
    out.epoch = mine.epoch
    out.id = mine.id
    memcpy(address, &out, sizeof(out))
    length[0] = sizeof(out)
    return UCXM_OK


cdef ucxm_status_t fake_ep_connect(void *priv, ucxm_ep_t *ep, const uint8_t *address,
                                   size_t length, ucxm_error_t *error) noexcept nogil:
    cdef fep_t *mine = fep_of(ep)
    cdef fep_t *peer
    cdef address_t to
    cdef ucxm_status_t status = enter(<fake_t *>priv, OP_EP_CONNECT, error)
    if status != UCXM_OK:
        return status
    if length != sizeof(to):
        say(error, "fake: that is no endpoint's address")
        return UCXM_ERR_INVALID_PARAM
    memcpy(&to, address, sizeof(to))
    if to.magic != ADDRESS_MAGIC:
        say(error, "fake: that is no endpoint's address")
        return UCXM_ERR_INVALID_PARAM
    pthread_mutex_lock(&WIRE)
    peer = fep_find(to.id)
    if peer == NULL:
        say(error, "fake: the endpoint is gone")
        status = UCXM_ERR_UNREACHABLE
    elif peer.epoch != to.epoch:
        say(error, "fake: the address is from before a reset")
        status = UCXM_ERR_INVALID_PARAM
    elif mine.state != UCXM_EP_IDLE and not mine.dev.connectionless:
        say(error, "fake: connected already, or in error: reset first")
        status = UCXM_ERR_INVALID_PARAM
    else:
        mine.peer = to.id
        mine.peer_epoch = to.epoch
        mine.state = UCXM_EP_CONNECTED
    pthread_mutex_unlock(&WIRE)
    return status


cdef ucxm_status_t fake_ep_reset(void *priv, ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef fep_t *mine = fep_of(ep)
    cdef ucxm_status_t status = enter(dev, OP_EP_RESET, error)
    if status != UCXM_OK:
        return status
    fep_break(mine)
    flush_endpoint(dev, ep)
    pthread_mutex_lock(&WIRE)
    mine.epoch += 1
    mine.peer = mine.id if dev.connectionless else 0
    mine.peer_epoch = mine.epoch
    mine.state = UCXM_EP_CONNECTED if dev.connectionless else UCXM_EP_IDLE
    pthread_mutex_unlock(&WIRE)
    return UCXM_OK


cdef uint32_t fake_ep_state(void *priv, ucxm_ep_t *ep) noexcept nogil:
    return fep_state(fep_of(ep))


cdef void complete(fake_t *dev, ucxm_op_t *op, ucxm_status_t status) noexcept nogil:
    op.bytes_done = op.scratch[0]
    op.complete(op, status)


cdef bint run(fake_t *dev, ucxm_op_t *op, uint64_t limit) noexcept nogil:
    """Let the device work on it for at most `limit` bytes; True if it is complete then."""
    cdef frkey_t *rkey = <frkey_t *>op.rkey.priv
    cdef fep_t *ep = fep_of(op.ep)
    cdef bint atomic = op.kind != UCXM_OP_GET and op.kind != UCXM_OP_PUT
    cdef uint32_t value = rkey.atomic if atomic and rkey.atomic != 0 else rkey.rma
    cdef uint64_t moved = 0, left = 0, endpoint
    cdef ucxm_status_t status, fault
    if fep_state(ep) != UCXM_EP_CONNECTED:
        say(&op.error, "fake: flushed")
        complete(dev, op, UCXM_ERR_FLUSHED)
        return True
    fault = due(dev, OP_TRANSFER, &op.error, &left)
    if fault != UCXM_OK:
        limit = left
    pthread_mutex_lock(&WIRE)
    endpoint = ep.peer
    pthread_mutex_unlock(&WIRE)
    add64(&dev.counter[OP_TRANSFER], 1)
    status = device_access(
        rkey.target, value, op.scratch[2] != 0, endpoint, op.kind, op.remote_address, op.local,
        op.scratch[0], op.length, limit, op.operand, op.compare, &op.result, &moved)
    op.scratch[0] += moved
    if fault != UCXM_OK:
        status = fault
    if status == UCXM_OK and op.scratch[0] < op.length:
        return False
    if status == UCXM_ERR_REMOTE_ACCESS:
        if op.error.text[0] == 0:
            snprintf(op.error.text, sizeof(op.error.text),
                     "fake: key 0x%x refused 0x%llx+%zu", rkey.rma,
                     <unsigned long long>op.remote_address, op.length)
        fep_break(ep)
    complete(dev, op, status)
    return True


cdef ucxm_op_t *flight_take(fake_t *dev, const ucxm_ep_t *ep) noexcept nogil:
    """The oldest operation in flight (of that endpoint, if one is given)."""
    cdef ucxm_op_t *op
    cdef ucxm_op_t *before = NULL
    pthread_mutex_lock(&dev.lock)
    op = dev.flight
    while op != NULL and ep != NULL and op.ep != ep:
        before = op
        op = <ucxm_op_t *>op.scratch[1]
    if op != NULL:
        if before == NULL:
            dev.flight = <ucxm_op_t *>op.scratch[1]
        else:
            before.scratch[1] = op.scratch[1]
    pthread_mutex_unlock(&dev.lock)
    return op


cdef void flight_put(fake_t *dev, ucxm_op_t *op, bint in_front) noexcept nogil:
    cdef ucxm_op_t *last
    pthread_mutex_lock(&dev.lock)
    if in_front or dev.flight == NULL:
        op.scratch[1] = <uint64_t>dev.flight
        dev.flight = op
    else:
        last = dev.flight
        while last.scratch[1] != 0:
            last = <ucxm_op_t *>last.scratch[1]
        last.scratch[1] = <uint64_t>op
        op.scratch[1] = 0
    pthread_mutex_unlock(&dev.lock)


cdef void flush_endpoint(fake_t *dev, ucxm_ep_t *ep) noexcept nogil:
    cdef ucxm_op_t *op = flight_take(dev, ep)
    while op != NULL:
        say(&op.error, "fake: flushed")
        complete(dev, op, UCXM_ERR_FLUSHED)
        op = flight_take(dev, ep)


cdef unsigned flight_run(fake_t *dev, uint64_t at_most, uint64_t limit) noexcept nogil:
    """Let the device work on the oldest operations; returns how many it completed."""
    cdef unsigned done = 0
    cdef uint64_t i = 0
    cdef ucxm_op_t *op
    while i < at_most:
        op = flight_take(dev, NULL)
        if op == NULL:
            break
        if run(dev, op, limit):
            done += 1
        else:
            flight_put(dev, op, True)
        i += 1
    return done


cdef ucxm_status_t fake_ep_post(void *priv, ucxm_ep_t *ep, ucxm_op_t *op,
                                ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef uint32_t state = fep_state(fep_of(ep))
    cdef ucxm_status_t status = enter(dev, OP_POST, error)
    if op.ep != ep or op.rkey == NULL or op.complete == NULL:
        violate(dev, "ep_post: the operation is not filled")
        return UCXM_ERR_INVALID_PARAM
    if op.kind != UCXM_OP_GET and op.kind != UCXM_OP_PUT and op.length != 8:
        violate(dev, "ep_post: an atomic that is not of 8 bytes")
    if status != UCXM_OK:
        return status
    if state == UCXM_EP_IDLE:
        say(error, "fake: not connected")
        return UCXM_ERR_INVALID_PARAM
    op.scratch[0] = 0
    op.scratch[2] = key_live(
        (<frkey_t *>op.rkey.priv).target, (<frkey_t *>op.rkey.priv).rma)
    if dev.deferred or load32(&dev.held):
        flight_put(dev, op, False)
        fake_event_set(dev.event)
    elif not run(dev, op, <uint64_t>-1):
        violate(dev, "fake: a whole operation was not complete")
    return UCXM_OK


# ---- the rest of the domain -----------------------------------------------------------------

cdef unsigned fake_progress(void *priv) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef unsigned done = 0
    count(dev, OP_PROGRESS)
    fake_event_clear(dev.event)
    if dev.destroy_mode == DESTROY_PROGRESS or dev.destroy_mode == DESTROY_FLUSH:
        done = destroys_complete(dev, <uint64_t>-1, UCXM_OK)
        destroys_send(dev)
    if not load32(&dev.held):
        done += flight_run(dev, <uint64_t>-1, <uint64_t>-1)
    return done


cdef ucxm_status_t fake_event_fd(void *priv, int *fd, ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef ucxm_status_t status = enter(dev, OP_EVENT_FD, error)
    if status == UCXM_OK:
        fd[0] = dev.event
    return status


cdef ucxm_status_t fake_event_arm(void *priv, ucxm_error_t *error) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    cdef const key_t *key
    cdef bint work
    cdef ucxm_status_t status = enter(dev, OP_EVENT_ARM, error)
    if status != UCXM_OK:
        return status
    pthread_mutex_lock(&dev.lock)
    work = dev.flight != NULL and not load32(&dev.held)
    key = dev.keys
    while key != NULL and (
            dev.destroy_mode == DESTROY_PROGRESS or dev.destroy_mode == DESTROY_FLUSH):
        work = work or key.dying
        key = key.next
    pthread_mutex_unlock(&dev.lock)
    if work:
        return UCXM_ERR_BUSY
    fake_event_clear(dev.event)
    return UCXM_OK


cdef void fake_mem_enforcement(void *priv, const ucxm_memh_t *memh,
                               ucxm_enforcement_t *enforcement) noexcept nogil:
    """Everything; but a base's own key cannot be revoked alone."""
    cdef fake_t *dev = <fake_t *>priv
    count(dev, OP_MEM_ENFORCEMENT)
    check_tails(dev, memh)
    memset(enforcement, dev.claim, sizeof(enforcement[0]))
    if memh.id.parent == NULL:
        memset(enforcement.revoke, UCXM_ENFORCE_NONE, sizeof(enforcement.revoke))


cdef void fake_stat(void *priv, unsigned index, const char **name,
                    uint64_t *value) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    if index < OPS:
        name[0] = STAT_NAMES[index]
        value[0] = load64(&dev.counter[index])
    else:
        name[0] = NULL


cdef void fake_explain(void *priv, const ucxm_memh_t *memh, char *text,
                       size_t size) noexcept nogil:
    cdef fake_t *dev = <fake_t *>priv
    snprintf(text, size, "fake: a device in this process's memory, number %llu, for tests\n",
             <unsigned long long>dev.guid)


cdef ucxm_status_t fake_peer_evict(void *priv, const ucxm_identity_t *peer,
                                   ucxm_error_t *error) noexcept nogil:
    return enter(<fake_t *>priv, OP_PEER_EVICT, error)


cdef void fill_ops(ucxm_md_ops_t *ops) noexcept nogil:
    memset(ops, 0, sizeof(ops[0]))
    ops.struct_size = sizeof(ops[0])
    ops.abi = UCXM_BACKEND_ABI
    ops.reg_size = sizeof(freg_t)
    ops.rkey_size = sizeof(frkey_t)
    ops.tail_init = fake_tail_init
    ops.close = fake_close
    ops.mem_reg = fake_mem_reg
    ops.mem_dereg = fake_mem_dereg
    ops.mem_derive = fake_mem_derive
    ops.key_create = fake_key_create
    ops.key_destroy = fake_key_destroy
    ops.mkey_pack = fake_mkey_pack
    ops.rkey_unpack = fake_rkey_unpack
    ops.rkey_release = fake_rkey_release
    ops.rkey_ptr = fake_rkey_ptr
    ops.progress = fake_progress
    ops.event_fd = fake_event_fd
    ops.event_arm = fake_event_arm
    ops.mem_enforcement = fake_mem_enforcement
    ops.stat = fake_stat
    ops.explain = fake_explain
    ops.peer_evict = fake_peer_evict
    ops.key_flush = fake_key_flush
    ops.mem_query = fake_mem_query


cdef void fill_ep_ops(ucxm_ep_ops_t *ops) noexcept nogil:
    memset(ops, 0, sizeof(ops[0]))
    ops.struct_size = sizeof(ops[0])
    ops.ep_size = sizeof(fep_t *)
    ops.ep_create = fake_ep_create
    ops.ep_destroy = fake_ep_destroy
    ops.ep_address = fake_ep_address
    ops.ep_connect = fake_ep_connect
    ops.ep_reset = fake_ep_reset
    ops.ep_state = fake_ep_state
    ops.ep_post = fake_ep_post


cdef void **op_field(ucxm_md_ops_t *ops, ucxm_ep_ops_t *ep_ops, str name) except NULL:
    """The place of an operation in its table."""
    if name == "tail_init":
        return <void **>&ops.tail_init
    elif name == "close":
        return <void **>&ops.close
    elif name == "mem_reg":
        return <void **>&ops.mem_reg
    elif name == "mem_dereg":
        return <void **>&ops.mem_dereg
    elif name == "mem_derive":
        return <void **>&ops.mem_derive
    elif name == "key_create":
        return <void **>&ops.key_create
    elif name == "key_destroy":
        return <void **>&ops.key_destroy
    elif name == "mkey_pack":
        return <void **>&ops.mkey_pack
    elif name == "rkey_unpack":
        return <void **>&ops.rkey_unpack
    elif name == "rkey_release":
        return <void **>&ops.rkey_release
    elif name == "rkey_ptr":
        return <void **>&ops.rkey_ptr
    elif name == "progress":
        return <void **>&ops.progress
    elif name == "event_fd":
        return <void **>&ops.event_fd
    elif name == "event_arm":
        return <void **>&ops.event_arm
    elif name == "mem_enforcement":
        return <void **>&ops.mem_enforcement
    elif name == "stat":
        return <void **>&ops.stat
    elif name == "explain":
        return <void **>&ops.explain
    elif name == "peer_evict":
        return <void **>&ops.peer_evict
    elif name == "key_flush":
        return <void **>&ops.key_flush
    elif name == "mem_query":
        return <void **>&ops.mem_query
    elif name == "ep_create":
        return <void **>&ep_ops.ep_create
    elif name == "ep_destroy":
        return <void **>&ep_ops.ep_destroy
    elif name == "ep_address":
        return <void **>&ep_ops.ep_address
    elif name == "ep_connect":
        return <void **>&ep_ops.ep_connect
    elif name == "ep_reset":
        return <void **>&ep_ops.ep_reset
    elif name == "ep_state":
        return <void **>&ep_ops.ep_state
    elif name == "ep_post":
        return <void **>&ep_ops.ep_post
    raise ValueError(f"no operation {name!r}")


cdef dict STUBS = {
    "mem_reg": <size_t><void *>unsupported_mem_reg,
    "mem_dereg": <size_t><void *>unsupported_mem_dereg,
    "mem_derive": <size_t><void *>unsupported_mem_derive,
    "key_create": <size_t><void *>unsupported_key_create,
    "key_destroy": <size_t><void *>unsupported_key_destroy,
    "mkey_pack": <size_t><void *>unsupported_mkey_pack,
    "rkey_unpack": <size_t><void *>unsupported_rkey_unpack,
    "rkey_ptr": <size_t><void *>unsupported_rkey_ptr,
}


cdef int op_index(str name) except -1:
    cdef int i
    cdef bytes text = name.encode()
    for i in range(OPS):
        if strcmp(NAMES[i], text) == 0:
            return i
    raise ValueError(f"no operation {name!r}; there are {', '.join(OPERATIONS)}")


cdef void *resized(const void *table, size_t real, size_t wanted) except NULL:
    """A copy of a table that says it has another size, with garbage after it.

    Whoever reads beyond the stated size, or uses what he does not know, finds the garbage.
    """
    cdef uint8_t *copy = <uint8_t *>malloc((wanted if wanted > real else real) + 256)
    if copy == NULL:
        raise MemoryError
    memset(copy, 0xdb, (wanted if wanted > real else real) + 256)
    memcpy(copy, table, wanted if wanted < real else real)
    (<size_t *>copy)[0] = wanted
    return copy


_KINDS = {"get": UCXM_OP_GET, "put": UCXM_OP_PUT, "fetch_add": UCXM_OP_FETCH_ADD,
          "compare_swap": UCXM_OP_COMPARE_SWAP}
_KEY_KINDS = {UCXM_KEY_DIRECT: "direct", UCXM_KEY_INDIRECT: "indirect",
              UCXM_KEY_ATOMIC: "atomic", UCXM_KEY_DERIVED: "derived",
              UCXM_KEY_PLACEHOLDER: "placeholder"}


cdef class FakeDevice:
    """The test's hand on a fake device; `open_fake` makes it, and the Md keeps it alive.

    It also works after the Md was closed.
    """
    cdef fake_t *dev
    cdef object __weakref__

    def __cinit__(self):
        self.dev = <fake_t *>calloc(1, sizeof(fake_t))
        if self.dev == NULL:
            raise MemoryError
        self.dev.refs = 1
        self.dev.event = fake_eventfd()
        self.dev.next_value = 0x100
        self.dev.next_direct = 0x80000001
        self.dev.payload_length = PAYLOAD_SIZE
        pthread_mutex_init(&self.dev.lock, NULL)
        self.dev.guid = add64(&last_id, 1)

    def __dealloc__(self):
        if self.dev != NULL:
            if not self.dev.closed:
                fake_unplug(self.dev)
            fake_put(self.dev)

    def __repr__(self):
        return f"<FakeDevice {self.dev.guid}{' closed' if self.dev.closed else ''}>"

    @property
    def guid(self):
        """The device's number; its keys carry it."""
        return self.dev.guid

    @property
    def closed(self):
        """True once the Md has closed the device."""
        return bool(self.dev.closed)

    # ---- counting

    @property
    def counts(self):
        """How often each operation was called, by name; `transfer` counts accesses to memory."""
        return {NAMES[i].decode(): load64(&self.dev.counter[i]) for i in range(OPS)}

    def count(self, str op):
        """How often one operation was called."""
        return load64(&self.dev.counter[<int>op_index(op)])

    def gil_held(self, str op):
        """How often it was called by a thread that held the GIL."""
        return self.dev.gil_held[op_index(op)]

    def reset_counts(self):
        """Count from zero."""
        memset(self.dev.counter, 0, sizeof(self.dev.counter))
        memset(self.dev.gil_held, 0, sizeof(self.dev.gil_held))

    @property
    def violations(self):
        """The rules of the contract that callers have broken: {rule: how often}."""
        return {self.dev.violation[i].decode(): self.dev.violation_count[i]
                for i in range(VIOLATIONS) if self.dev.violation[i] != NULL}

    # ---- failing

    def fail(self, str op, int status, *, uint64_t after=0, uint64_t count=1, str text="",
             int errno=0, uint32_t syndrome=0, uint64_t bytes_done=0):
        """Make `count` calls of `op` fail with `status`, beginning after `after` more.

        `key_destroy_done` fails a destruction that answered INPROGRESS; `transfer` completes an
        accepted operation with an error after `bytes_done` bytes; `post` does not take it.
        """
        cdef fault_t *fault
        cdef fault_t **at
        cdef bytes encoded = text.encode()[:111]
        cdef int index = op_index(op)
        fault = <fault_t *>calloc(1, sizeof(fault_t))
        if fault == NULL:
            raise MemoryError
        fault.op = index
        fault.status = status
        fault.after = after
        fault.count = count
        fault.bytes = bytes_done
        fault.error.sys_errno = errno
        fault.error.syndrome = syndrome
        memcpy(fault.error.text, <const char *>encoded, len(encoded))
        pthread_mutex_lock(&self.dev.lock)
        at = &self.dev.faults
        while at[0] != NULL:
            at = &at[0].next
        at[0] = fault
        pthread_mutex_unlock(&self.dev.lock)

    def clear_faults(self):
        """Forget all faults that have not come yet."""
        cdef fault_t *faults
        cdef fault_t *fault
        pthread_mutex_lock(&self.dev.lock)
        faults = self.dev.faults
        self.dev.faults = NULL
        pthread_mutex_unlock(&self.dev.lock)
        while faults != NULL:
            fault = faults
            faults = fault.next
            free(fault)

    def slow(self, str op, double seconds):
        """Let every call of `op` sleep first; 0 ends that."""
        if seconds < 0:
            raise ValueError("a negative time")
        self.dev.slow[op_index(op)] = <uint64_t>(seconds * 1e9)

    # ---- native values and destructions

    def next_values(self, values):
        """Give the next keys these native values; then the usual ones go on."""
        cdef list wanted = [<uint32_t>value for value in values]
        cdef size_t i, n = len(wanted)
        cdef uint32_t *script
        pthread_mutex_lock(&self.dev.lock)
        script = <uint32_t *>realloc(self.dev.script, (self.dev.script_size + n + 1) * 4)
        if script != NULL:
            for i in range(n):
                script[self.dev.script_size + i] = wanted[i]
            self.dev.script = script
            self.dev.script_size += n
        pthread_mutex_unlock(&self.dev.lock)
        if script == NULL:
            raise MemoryError

    @property
    def live_keys(self):
        """The device's key table: {native value: (kind, address, length, rights)}."""
        cdef list rows = []
        cdef const key_t *key
        cdef size_t n = 0, i
        cdef key_t *copy
        pthread_mutex_lock(&self.dev.lock)
        key = self.dev.keys
        while key != NULL:
            n += 1
            key = key.next
        copy = <key_t *>malloc((n + 1) * sizeof(key_t))
        if copy != NULL:
            key = self.dev.keys
            for i in range(n):
                copy[i] = key[0]
                key = key.next
        pthread_mutex_unlock(&self.dev.lock)
        if copy == NULL:
            raise MemoryError
        for i in range(n):
            rows.append((copy[i].value, (_KEY_KINDS[copy[i].kind], copy[i].address,
                                         copy[i].length, copy[i].rights)))
        free(copy)
        return dict(reversed(rows))

    @property
    def destroying(self):
        """How many destructions have been asked for and are not done."""
        cdef const key_t *key
        cdef uint64_t n = 0
        pthread_mutex_lock(&self.dev.lock)
        key = self.dev.keys
        while key != NULL:
            n += 1 if key.dying else 0
            key = key.next
        pthread_mutex_unlock(&self.dev.lock)
        return n

    def complete(self, n=None, int status=UCXM_OK):
        """Finish destructions (the `n` oldest); with an error status the keys stay.

        Returns how many; their callbacks have run.
        """
        cdef uint64_t at_most = <uint64_t>-1 if n is None else n
        cdef unsigned done
        with nogil:
            done = destroys_complete(self.dev, at_most, status)
        return done

    # ---- operations in flight

    @property
    def in_flight(self):
        """How many operations have been posted and are not complete."""
        cdef const ucxm_op_t *op
        cdef uint64_t n = 0
        pthread_mutex_lock(&self.dev.lock)
        op = self.dev.flight
        while op != NULL:
            n += 1
            op = <const ucxm_op_t *>op.scratch[1]
        pthread_mutex_unlock(&self.dev.lock)
        return n

    def hold(self):
        """Keep what is posted from now on in flight; progress() does not move it."""
        store32(&self.dev.held, 1)

    def release(self):
        """Stop holding and let all that is in flight happen; returns how many completed."""
        cdef unsigned done
        store32(&self.dev.held, 0)
        with nogil:
            done = flight_run(self.dev, <uint64_t>-1, <uint64_t>-1)
        return done

    def step(self, uint64_t n=1, uint64_t chunk=0):
        """Work `n` times on the oldest operation in flight, for at most `chunk` bytes each
        (0: to its end); the key is looked at each time.  Returns how many completed."""
        cdef unsigned done
        with nogil:
            done = flight_run(self.dev, n, chunk if chunk != 0 else <uint64_t>-1)
        return done

    # ---- below the library

    def raw_access(self, uint32_t value, str op, uint64_t address, *, data=None,
                   uint64_t length=0, uint64_t operand=0, uint64_t compare=0,
                   uint64_t endpoint=0):
        """Access this device's memory by a bare native key, as an attacker would.

        No library checks anything and no connection is needed; only the device looks at the key.
        Returns (status, result): the bytes for `get`, the old value for atomics, else None.
        """
        cdef ucxm_op_kind_t kind = _KINDS[op]
        cdef bytes buffer = b""
        cdef uint64_t moved = 0, old = 0
        cdef void *local = NULL
        cdef ucxm_status_t status
        if kind == UCXM_OP_PUT:
            buffer = bytes(data)
            length = len(buffer)
        elif kind == UCXM_OP_GET:
            if length > 1 << 40:
                raise ValueError("no memory for so many bytes")
            buffer = PyBytes_FromStringAndSize(NULL, length)
            memset(PyBytes_AS_STRING(buffer), 0, length)
        else:
            length = 8
        local = PyBytes_AS_STRING(buffer)
        with nogil:
            status = device_access(self.dev, value, False, endpoint, kind, address, local, 0,
                                   length, length, operand, compare, &old, &moved)
        if status != UCXM_OK or kind == UCXM_OP_PUT:
            return status, None
        return status, buffer if kind == UCXM_OP_GET else old


def open_fake(
    *, str component="fake", str md_name="fake0", bint reg=True, bint rkey=True,
    bint derive=True, bint derive_endpoint=True, bint invalidate=True, bint endpoint=True,
    bint atomic=True, bint rkey_ptr=True, bint event=True, bint need_memh=False,
    bint dmabuf=False, flags=None, uint64_t max_reg=0, uint64_t mem_types=1,
    size_t reg_alignment=1, rkey_packed_size=None, rkey_raw_size=None, payload_length=None,
    size_t bounce_size=0, uint32_t quarantine=64, bint software=True, bint python=False,
    bint fast_reg=False, bint placeholders=False, size_t tail_inherit_size=0,
    size_t tail_own_size=0, destroy="now", bint deferred=False, bint connectionless=False,
    lies=(), int claim=UCXM_ENFORCE_ENFORCED, without_ops=(), stub_ops=(), abi=None,
    ops_size=0, ep_ops_size=0, attr_size=0,
):
    """Open a fake device: returns (Md, FakeDevice).

    What it can do: `reg`, `rkey`, `derive`, `derive_endpoint`, `invalidate`, `endpoint`,
    `atomic`, `rkey_ptr`, `event`, `need_memh`, `dmabuf` set flags and keep or drop the
    operations that go with them.  `flags` states other flags than that, `without_ops` leaves
    operations out and `stub_ops` names the core's stub for them, whatever the flags say: so a
    fake can lie, and binding must refuse it.

    What it is like: `destroy` is "now", "progress" (key_destroy answers INPROGRESS and is done by
    the next progress), "manual" (by FakeDevice.complete) or "flush" (by the next progress after a
    key_flush; the count of "key_flush" is of those that found something); `deferred` moves data in
    progress() only; `connectionless` needs no ep.connect().  `payload_length` is what a key's
    payload really has, should that differ from `rkey_packed_size`.

    `lies` names what it does not enforce ("rights", "range", "revoke", "in_flight", "endpoint",
    "guess"), whatever it claims; `claim` is the Enforcement that it claims for everything.

    What it was compiled with: `abi`, and `ops_size`, `ep_ops_size`, `attr_size`, bytes to add to
    the sizes that the tables state (a newer header) or, below zero, to take away (an older one).
    """
    cdef FakeDevice fake = FakeDevice.__new__(FakeDevice)
    cdef fake_t *dev = fake.dev
    cdef ucxm_md_ops_t ops
    cdef ucxm_ep_ops_t ep_ops
    cdef ucxm_md_attr_t attr
    cdef void *ops_copy = NULL
    cdef void *ep_ops_copy = NULL
    cdef void *attr_copy = NULL
    cdef Md md
    cdef bytes name

    if dev.event < 0:
        raise MemoryError("eventfd")
    dev.destroy_mode = {"now": DESTROY_NOW, "progress": DESTROY_PROGRESS,
                        "manual": DESTROY_MANUAL, "flush": DESTROY_FLUSH}[destroy]
    dev.deferred = deferred
    dev.connectionless = connectionless
    for lie in lies:
        dev.lies |= <uint32_t>LIES[lie]
    dev.claim = claim
    dev.python = python
    dev.max_reg = max_reg
    dev.mem_types = mem_types
    dev.tail_inherit_size = tail_inherit_size
    dev.tail_own_size = tail_own_size

    fill_ops(&ops)
    fill_ep_ops(&ep_ops)
    ops.tail_inherit_size = tail_inherit_size
    ops.tail_own_size = tail_own_size
    if abi is not None:
        ops.abi = abi

    memset(&attr, 0, sizeof(attr))
    attr.struct_size = sizeof(attr)
    attr.max_reg = max_reg
    attr.mem_types = mem_types
    attr.reg_alignment = reg_alignment
    attr.rkey_packed_size = PAYLOAD_SIZE if rkey_packed_size is None else rkey_packed_size
    attr.rkey_raw_size = PAYLOAD_SIZE if rkey_raw_size is None else rkey_raw_size
    if not rkey:
        attr.rkey_packed_size = 0 if rkey_packed_size is None else rkey_packed_size
        attr.rkey_raw_size = 0 if rkey_raw_size is None else rkey_raw_size
    dev.payload_length = attr.rkey_packed_size if payload_length is None else payload_length
    if not PAYLOAD_SIZE <= dev.payload_length <= UCXM_KEY_PAYLOAD_MAX:
        dev.payload_length = PAYLOAD_SIZE  # the rest of such a device is for bind to refuse
    attr.bounce_size = bounce_size
    attr.quarantine = quarantine
    attr.software = software
    attr.python = python
    attr.fast_reg = fast_reg
    attr.placeholders = dev.placeholders = placeholders
    memset(&attr.enforcement, claim, sizeof(attr.enforcement))
    name = component.encode()[:sizeof(attr.component) - 1]
    memcpy(attr.component, <const char *>name, len(name))
    name = md_name.encode()[:sizeof(attr.md_name) - 1]
    memcpy(attr.md_name, <const char *>name, len(name))

    if reg:
        attr.flags |= UCXM_MD_FLAG_REG
    else:
        ops.mem_reg = NULL
        ops.mem_dereg = NULL
    if rkey:
        attr.flags |= UCXM_MD_FLAG_NEED_RKEY
    else:
        ops.mkey_pack = NULL
        ops.rkey_unpack = NULL
    if derive:
        attr.flags |= UCXM_MD_FLAG_REG_DERIVED
        if derive_endpoint and endpoint:
            attr.flags |= UCXM_MD_FLAG_DERIVE_ENDPOINT
    else:
        ops.mem_derive = NULL
    if invalidate:
        attr.flags |= (UCXM_MD_FLAG_INVALIDATE | UCXM_MD_FLAG_INVALIDATE_RMA |
                       UCXM_MD_FLAG_INVALIDATE_AMO)
    if not derive and not invalidate:
        ops.key_create = NULL
        ops.key_destroy = NULL
    if endpoint:
        attr.flags |= UCXM_MD_FLAG_ENDPOINT
        if atomic:
            attr.flags |= UCXM_MD_FLAG_ATOMIC
    if rkey_ptr:
        attr.flags |= UCXM_MD_FLAG_RKEY_PTR
    else:
        ops.rkey_ptr = NULL
    if event:
        attr.flags |= UCXM_MD_FLAG_EVENT_FD
    else:
        ops.event_fd = NULL
        ops.event_arm = NULL
    if need_memh:
        attr.flags |= UCXM_MD_FLAG_NEED_MEMH
    if dmabuf:
        attr.flags |= UCXM_MD_FLAG_REG_DMABUF
    if flags is not None:
        attr.flags = flags
    for op in without_ops:
        op_field(&ops, &ep_ops, op)[0] = NULL
    for op in stub_ops:
        op_field(&ops, &ep_ops, op)[0] = <void *><size_t>STUBS[op]

    try:
        ops_copy = resized(&ops, sizeof(ops), max(8, <ssize_t>sizeof(ops) + ops_size))
        ep_ops_copy = resized(&ep_ops, sizeof(ep_ops),
                              max(8, <ssize_t>sizeof(ep_ops) + ep_ops_size))
        attr_copy = resized(&attr, sizeof(attr), max(8, <ssize_t>sizeof(attr) + attr_size))
        dev.refs += 1  # the Md's
        pthread_mutex_lock(&WIRE)
        global devices
        dev.next = devices
        devices = dev
        pthread_mutex_unlock(&WIRE)
        try:
            md = md_bind(<ucxm_md_ops_t *>ops_copy,
                         <ucxm_ep_ops_t *>ep_ops_copy if endpoint else NULL,
                         <ucxm_md_attr_t *>attr_copy, dev, fake)
        except BaseException:
            fake_unplug(dev)
            fake_put(dev)
            raise
    finally:
        free(ops_copy)
        free(ep_ops_copy)
        free(attr_copy)
    return md, fake
