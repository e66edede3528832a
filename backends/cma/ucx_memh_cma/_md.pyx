# SPDX-License-Identifier: BSD-3-Clause
# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The cma domain: the memory of other processes on this host, by process_vm_readv and writev.

Nothing is registered or pinned: a key is the envelope alone, which says who its owner is and
what range it names.  Rights and range are checked by the library of whoever uses the key; the
kernel knows neither, and nothing can be revoked.  What this file adds is that a key never
reaches the wrong process: the owner is identified by pidfd and start time when a key is
unpacked, and again, at most `peer_check_interval` old, before each system call that moves data.
"""
from libc.errno cimport (
    EFAULT, EINVAL, EMFILE, ENFILE, ENOENT, ENOMEM, ENOSYS, EPERM, ESRCH,
)
from libc.stdio cimport snprintf
from libc.stdint cimport SIZE_MAX
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from ucx_memh.core cimport identity_self, md_attr_init, md_bind, unsupported_mem_derive
from ucx_memh.libmemh cimport (
    UCXM_BACKEND_ABI, UCXM_ENFORCE_COOPERATIVE, UCXM_ENFORCE_NONE, UCXM_EP_CONNECTED,
    UCXM_ERR_INVALID_ADDR, UCXM_ERR_INVALID_PARAM, UCXM_ERR_IO_ERROR, UCXM_ERR_MALFORMED_KEY,
    UCXM_ERR_NO_MEMORY, UCXM_ERR_NO_RESOURCE, UCXM_ERR_PEER_GONE, UCXM_ERR_STALE_KEY,
    UCXM_ERR_UNREACHABLE, UCXM_ERR_UNSUPPORTED, UCXM_KEY_FLAG_EMPTY, UCXM_MD_FLAG_ENDPOINT,
    UCXM_MD_FLAG_NEED_RKEY, UCXM_MD_FLAG_REG, UCXM_MEM_ACCESS_ALL, UCXM_MEM_TYPE_HOST, UCXM_OK,
    UCXM_OP_GET, UCXM_OP_PUT, ucxm_enforcement_t, ucxm_ep_ops_t, ucxm_ep_t, ucxm_error_t,
    ucxm_identity_t, ucxm_key_slot_t, ucxm_md_attr_t, ucxm_md_ops_t, ucxm_memh_t, ucxm_op_t,
    ucxm_refuse, ucxm_registration_t, ucxm_rkey_t, ucxm_status_t, uint8_t, uint32_t, uint64_t,
)

from ucx_memh.errors import NoDeviceError

cdef extern from "_cma.h" nogil:
    enum:
        ECANCELED
    ctypedef int pid_t
    ctypedef struct cma_vec_t:
        uint64_t address
        uint64_t length
    ctypedef struct cma_move_t:
        pid_t pid
        int write
        const cma_vec_t *local
        const cma_vec_t *remote
        size_t local_count
        size_t remote_count
        uint64_t max_bytes
        int (*before)(void *arg) noexcept nogil
        void *arg
        uint64_t done
        uint64_t calls
        int stopped
    void cma_count(uint64_t *counter, uint64_t n)
    uint64_t cma_load64(const uint64_t *p)
    void cma_store64(uint64_t *p, uint64_t value)
    uint32_t cma_load32(const uint32_t *p)
    void cma_store32(uint32_t *p, uint32_t value)
    uint64_t cma_now_ns()
    int cma_move(cma_move_t *m)
    int cma_peek(pid_t pid, uint64_t address)
    int cma_self_test()
    int cma_has_cap_sys_ptrace()
    int close(int fd)
    pid_t getpid()

cdef extern from "ucx_memh/process.h" nogil:
    ctypedef struct ucxm_process_t:
        uint64_t start_time
        uint64_t program
        char state
    int ucxm_pidfd_open(pid_t pid)
    int ucxm_pidfd_ended(int pidfd)
    int ucxm_pidfd_allowed(int pidfd)
    int ucxm_process_open(pid_t pid)
    int ucxm_process_read(int fd, ucxm_process_t *process)
    int ucxm_process_readable(uint64_t address, uint64_t length)
    int ucxm_allow_ptrace()

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)


# ---- the system calls as Python functions, for the probe and its tests ---------------------

def self_test():
    """Move a few bytes inside this process; 0 or an errno."""
    return cma_self_test()


def set_ptracer_any():
    """Let any process with our credentials reach this one (Yama, scope 1); 0 or an errno."""
    return ucxm_allow_ptrace()


def has_cap_sys_ptrace():
    """True if this thread has CAP_SYS_PTRACE."""
    return bool(cma_has_cap_sys_ptrace())


def move(pid_t pid, bint write, local, remote, uint64_t max_bytes=0):
    """Move bytes between lists of (address, length): returns (errno, bytes done, calls).

    `write` moves from local to remote.  Unchecked: the caller vouches for both lists and for
    the process.  As much is moved as the shorter list holds.
    """
    cdef cma_move_t m
    cdef size_t i, nl = len(local), nr = len(remote)
    cdef cma_vec_t *vec = <cma_vec_t *>calloc(nl + nr + 1, sizeof(cma_vec_t))
    cdef int result
    if vec == NULL:
        raise MemoryError
    try:
        for i, (address, length) in enumerate([*local, *remote]):
            vec[i].address = address
            vec[i].length = length
        memset(&m, 0, sizeof(m))
        m.pid = pid
        m.write = write
        m.local = vec
        m.local_count = nl
        m.remote = vec + nl
        m.remote_count = nr
        m.max_bytes = max_bytes
        with nogil:
            result = cma_move(&m)
        return result, m.done, m.calls
    finally:
        free(vec)


# ---- objects -------------------------------------------------------------------------------

cdef enum:
    PEER_ALIVE
    PEER_ENDED      # the process is gone
    PEER_EXECED     # it runs another program now, in other memory
    PEER_EVICTED    # forgotten on request

    BUCKETS = 64

# A process whose keys we hold.  Counted: one reference for each of its keys.
cdef struct peer_t:
    ucxm_identity_t identity
    uint64_t checked        # when it was last seen alive
    uint64_t program        # fingerprint of what it runs; 0: not known
    uint32_t state          # PEER_*; leaves PEER_ALIVE once and never comes back
    uint32_t refs           # under the domain's lock
    int pidfd               # -1: none (our own process, or a kernel without)
    int statfd
    bint own                # this process
    bint linked
    pthread_mutex_t lock    # of the two descriptors: an eviction may close them any time
    peer_t *next

cdef struct md_t:
    ucxm_identity_t self
    uint64_t interval       # ns
    pthread_mutex_t lock
    peer_t *bucket[BUCKETS]
    uint64_t process_vm_calls
    uint64_t bytes
    uint64_t peer_checks
    uint64_t peers
    uint64_t pidfd_opens
    uint64_t ptracer_calls
    char note[256]          # what the probe found

cdef struct rkey_t:
    peer_t *peer            # NULL: a key to nothing

cdef struct ep_t:
    uint64_t epoch

# What an endpoint hands out.
cdef struct ep_address_t:
    ucxm_identity_t identity
    uint64_t epoch


# ---- peers ---------------------------------------------------------------------------------

cdef inline size_t bucket_of(const ucxm_identity_t *identity) noexcept nogil:
    return <size_t>((identity.pid ^ (identity.start_time >> 3)) % BUCKETS)


cdef bint is_own(const md_t *md, const ucxm_identity_t *identity) noexcept nogil:
    return (identity.pid == md.self.pid and identity.start_time == md.self.start_time and
            identity.host == md.self.host and identity.pid_ns == md.self.pid_ns)


cdef ucxm_status_t refuse(ucxm_error_t *error, ucxm_status_t status, int sys_errno,
                          const ucxm_identity_t *who, const char *why) noexcept nogil:
    if error != NULL:
        error.sys_errno = sys_errno
        snprintf(error.text, sizeof(error.text), "pid %u start %llu: %s", who.pid,
                 <unsigned long long>who.start_time, why)
    return status


cdef ucxm_status_t state_status(uint32_t state) noexcept nogil:
    if state == PEER_ALIVE:
        return UCXM_OK
    return UCXM_ERR_PEER_GONE if state == PEER_ENDED else UCXM_ERR_STALE_KEY


cdef const char *state_text(uint32_t state) noexcept nogil:
    if state == PEER_ENDED:
        return "the process has ended"
    if state == PEER_EXECED:
        return "it runs another program now"
    return "it was evicted"


cdef uint32_t peer_look(md_t *md, peer_t *peer) noexcept nogil:
    """Look at the process itself; the peer's lock is held.  Returns the state."""
    cdef ucxm_process_t st
    cdef int ended = 0, result
    cdef uint32_t state = cma_load32(&peer.state)
    cdef uint64_t now
    if state != PEER_ALIVE:
        return state
    cma_count(&md.peer_checks, 1)
    now = cma_now_ns()
    if peer.pidfd >= 0:
        ended = ucxm_pidfd_ended(peer.pidfd)
    if ended == 0:
        result = ucxm_process_read(peer.statfd, &st)
        if result == ESRCH or (result == 0 and st.start_time != peer.identity.start_time):
            ended = 1
        elif result == 0:
            # Without a pidfd a zombie shows only here.
            if peer.pidfd < 0 and (st.state == c'Z' or st.state == c'X'):
                ended = 1
            elif peer.program == 0:
                peer.program = st.program
            elif st.program != 0 and st.program != peer.program:
                cma_store32(&peer.state, PEER_EXECED)
                return PEER_EXECED
    if ended > 0:
        cma_store32(&peer.state, PEER_ENDED)
        return PEER_ENDED
    cma_store64(&peer.checked, now)
    return PEER_ALIVE


cdef uint32_t peer_check(md_t *md, peer_t *peer, bint force) noexcept nogil:
    """The peer's state, at most the check interval old, or as of now."""
    cdef uint32_t state = cma_load32(&peer.state)
    if state != PEER_ALIVE or peer.own:
        return state
    if not force and cma_now_ns() - cma_load64(&peer.checked) < md.interval:
        return PEER_ALIVE
    pthread_mutex_lock(&peer.lock)
    state = peer_look(md, peer)
    pthread_mutex_unlock(&peer.lock)
    return state


cdef void peer_close(peer_t *peer) noexcept nogil:
    if peer.pidfd >= 0:
        close(peer.pidfd)
    if peer.statfd >= 0:
        close(peer.statfd)
    peer.pidfd = -1
    peer.statfd = -1


cdef void peer_free(peer_t *peer) noexcept nogil:
    peer_close(peer)
    pthread_mutex_destroy(&peer.lock)
    free(peer)


cdef void peer_unlink(md_t *md, peer_t *peer) noexcept nogil:
    """Take the peer out of the table; the domain's lock is held."""
    cdef peer_t **at = &md.bucket[bucket_of(&peer.identity)]
    if not peer.linked:
        return
    while at[0] != peer:
        at = &at[0].next
    at[0] = peer.next
    peer.linked = False
    md.peers -= 1


cdef void peer_put(md_t *md, peer_t *peer) noexcept nogil:
    cdef bint last
    pthread_mutex_lock(&md.lock)
    peer.refs -= 1
    last = peer.refs == 0
    if last:
        peer_unlink(md, peer)
    pthread_mutex_unlock(&md.lock)
    if last:
        peer_free(peer)


cdef peer_t *peer_find(md_t *md, const ucxm_identity_t *identity) noexcept nogil:
    """The peer with one more reference, or NULL; the domain's lock is held."""
    cdef peer_t *peer = md.bucket[bucket_of(identity)]
    while peer != NULL and memcmp(&peer.identity, identity, sizeof(identity[0])) != 0:
        peer = peer.next
    if peer != NULL:
        peer.refs += 1
    return peer


cdef ucxm_status_t peer_identify(md_t *md, peer_t *peer, const uint64_t *inside,
                                 ucxm_error_t *error) noexcept nogil:
    """Open the process and make sure that it is the one that the identity names.

    `inside`: an address that may be read if there is no better way to learn whether we are
    allowed to; NULL: none.
    """
    cdef const ucxm_identity_t *who = &peer.identity
    cdef pid_t pid = <pid_t>who.pid
    cdef ucxm_process_t st
    cdef uint32_t state
    cdef int result

    cma_count(&md.pidfd_opens, 1)
    peer.pidfd = ucxm_pidfd_open(pid)
    if peer.pidfd < 0:
        result = -peer.pidfd
        peer.pidfd = -1
        if result == ESRCH:
            return refuse(error, UCXM_ERR_PEER_GONE, ESRCH, who, "no such process")
        if result == EMFILE or result == ENFILE:
            return refuse(error, UCXM_ERR_NO_RESOURCE, result, who, "pidfd_open: out of files")
        if result == EINVAL or result == ENOENT:  # before and since Linux 6.9
            return refuse(error, UCXM_ERR_STALE_KEY, result, who, "that is a thread, no process")
        # A kernel or a filter without pidfd_open: /proc/PID/stat stays bound to the process too.
    peer.statfd = ucxm_process_open(pid)
    if peer.statfd < 0:
        result = -peer.statfd
        peer.statfd = -1
        if peer.pidfd >= 0 and ucxm_pidfd_ended(peer.pidfd) > 0:
            return refuse(error, UCXM_ERR_PEER_GONE, ESRCH, who, "the process has ended")
        if result == EMFILE or result == ENFILE:
            return refuse(error, UCXM_ERR_NO_RESOURCE, result, who, "/proc: out of files")
        return refuse(error, UCXM_ERR_UNREACHABLE, result, who,
                      "its /proc/PID/stat cannot be opened, so it cannot be identified")
    # The two descriptors may be of different processes only if the first has ended by now;
    # peer_look finds that out, because it asks the pidfd after the start time was compared.
    result = ucxm_process_read(peer.statfd, &st)
    if result == ESRCH:
        return refuse(error, UCXM_ERR_PEER_GONE, ESRCH, who, "the process has ended")
    if result != 0:
        return refuse(error, UCXM_ERR_UNREACHABLE, result, who, "/proc/PID/stat is unreadable")
    if st.start_time != who.start_time:
        if error != NULL:
            snprintf(error.text, sizeof(error.text),
                     "pid %u start %llu: another process has this pid now, start %llu", who.pid,
                     <unsigned long long>who.start_time, <unsigned long long>st.start_time)
        return UCXM_ERR_STALE_KEY
    state = peer_look(md, peer)
    if state != PEER_ALIVE:
        return refuse(error, state_status(state), 0, who, state_text(state))

    result = ucxm_pidfd_allowed(peer.pidfd) if peer.pidfd >= 0 else EPERM
    if result == ESRCH:
        return refuse(error, UCXM_ERR_PEER_GONE, ESRCH, who, "the process has ended")
    if result != 0 and inside != NULL:
        # A filter may refuse pidfd_getfd and allow process_vm_readv: ask that, inside the
        # region that the key names and nowhere else.
        cma_count(&md.process_vm_calls, 1)
        result = cma_peek(pid, inside[0])
        if result == EPERM:
            return refuse(error, UCXM_ERR_UNREACHABLE, EPERM, who,
                          "no ptrace permission (user, namespace, dumpable or Yama)")
        if result == ESRCH:
            return refuse(error, UCXM_ERR_PEER_GONE, ESRCH, who, "the process has ended")
    return UCXM_OK


cdef ucxm_status_t peer_get(md_t *md, const ucxm_identity_t *identity, const uint64_t *inside,
                            peer_t **peer_p, ucxm_error_t *error) noexcept nogil:
    """A reference to the identified, living peer."""
    cdef peer_t *peer
    cdef peer_t *other
    cdef uint32_t state
    cdef ucxm_status_t status

    peer_p[0] = NULL
    if identity.host != md.self.host:
        return refuse(error, UCXM_ERR_UNREACHABLE, 0, identity, "on another host, or before a boot")
    if identity.pid_ns != md.self.pid_ns:
        return refuse(error, UCXM_ERR_UNREACHABLE, 0, identity, "in another pid namespace")
    if identity.start_time == 0 or identity.pid == 0 or identity.pid > 0x7fffffff:
        return refuse(error, UCXM_ERR_UNREACHABLE, 0, identity, "the key does not say whose it is")

    pthread_mutex_lock(&md.lock)
    peer = peer_find(md, identity)
    pthread_mutex_unlock(&md.lock)
    if peer != NULL:
        # Look now, however fresh the last look: should it have executed another program since,
        # this key may be of the new one.
        state = peer_check(md, peer, True)
        if state == PEER_ALIVE:
            peer_p[0] = peer
            return UCXM_OK
        if state == PEER_EXECED:
            pthread_mutex_lock(&md.lock)
            peer_unlink(md, peer)
            pthread_mutex_unlock(&md.lock)
        peer_put(md, peer)
        if state == PEER_ENDED:
            return refuse(error, UCXM_ERR_PEER_GONE, 0, identity, state_text(state))

    peer = <peer_t *>calloc(1, sizeof(peer_t))
    if peer == NULL:
        return UCXM_ERR_NO_MEMORY
    if pthread_mutex_init(&peer.lock, NULL) != 0:
        free(peer)
        return UCXM_ERR_NO_MEMORY
    peer.identity = identity[0]
    peer.refs = 1
    peer.pidfd = -1
    peer.statfd = -1
    peer.own = is_own(md, identity)
    if not peer.own:
        status = peer_identify(md, peer, inside, error)
        if status != UCXM_OK:
            peer_free(peer)
            return status

    pthread_mutex_lock(&md.lock)
    other = peer_find(md, identity)  # another thread may have been faster
    if other == NULL:
        peer.next = md.bucket[bucket_of(identity)]
        md.bucket[bucket_of(identity)] = peer
        peer.linked = True
        md.peers += 1
    pthread_mutex_unlock(&md.lock)
    if other != NULL:
        peer_free(peer)
        peer = other
    peer_p[0] = peer
    return UCXM_OK


cdef ucxm_status_t cma_peer_evict(void *priv, const ucxm_identity_t *identity,
                                  ucxm_error_t *error) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef peer_t *peer
    pthread_mutex_lock(&md.lock)
    peer = peer_find(md, identity)
    if peer != NULL:
        peer_unlink(md, peer)
    pthread_mutex_unlock(&md.lock)
    if peer == NULL:
        return UCXM_OK
    pthread_mutex_lock(&peer.lock)
    if cma_load32(&peer.state) == PEER_ALIVE:
        cma_store32(&peer.state, PEER_EVICTED)
    peer_close(peer)
    pthread_mutex_unlock(&peer.lock)
    peer_put(md, peer)
    return UCXM_OK


# ---- memory --------------------------------------------------------------------------------

cdef ucxm_status_t cma_mem_reg(void *priv, ucxm_registration_t *reg,
                               ucxm_error_t *error) noexcept nogil:
    """Nothing to do, and no system call: an address is as good as its next use."""
    if reg.mem_type != UCXM_MEM_TYPE_HOST or reg.dmabuf_fd >= 0:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED, "cma reaches host memory only")
    if reg.adopt != NULL:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED,
                           "cma has no native registration to stand on")
    if reg.flags & ~UCXM_MEM_ACCESS_ALL:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED,
                           "cma cannot derive, nor register in any special way")
    return UCXM_OK


cdef ucxm_status_t cma_mem_query(void *priv, uint64_t address, uint64_t length,
                                 uint32_t *mem_type, ucxm_error_t *error) noexcept nogil:
    """What process_vm calls can read is host memory; a GPU's, which they cannot, looks no other
    than memory that nobody may touch."""
    cdef int result = ucxm_process_readable(address, length)
    cma_count(&(<md_t *>priv).process_vm_calls, 1)
    if result == 0:
        mem_type[0] = UCXM_MEM_TYPE_HOST
        return UCXM_OK
    if error != NULL:
        error.sys_errno = result
    if result == EFAULT:
        return ucxm_refuse(error, UCXM_ERR_INVALID_ADDR,
                           "its ends cannot be read: unmapped, PROT_NONE or a device's; say "
                           "mem_type if it is host memory")
    if result == ENOMEM:
        return ucxm_refuse(error, UCXM_ERR_NO_MEMORY, "no memory to look at it")
    return ucxm_refuse(error, UCXM_ERR_IO_ERROR, "process_vm_readv of this process failed")


cdef ucxm_status_t cma_mem_dereg(void *priv, ucxm_registration_t *reg,
                                 ucxm_error_t *error) noexcept nogil:
    return UCXM_OK


cdef ucxm_status_t cma_mkey_pack(void *priv, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
                                 const ucxm_key_slot_t *atomic, uint8_t *payload, size_t *length,
                                 ucxm_error_t *error) noexcept nogil:
    """The envelope says it all."""
    length[0] = 0
    return UCXM_OK


cdef ucxm_status_t cma_rkey_unpack(void *priv, ucxm_rkey_t *rkey, const uint8_t *payload,
                                   size_t length, int raw, ucxm_error_t *error) noexcept nogil:
    cdef rkey_t *mine = <rkey_t *>rkey.priv
    if raw:
        return ucxm_refuse(
            error, UCXM_ERR_UNSUPPORTED,
            "a cma key is its envelope: without one nobody knows whose memory is meant")
    if length != 0:
        return ucxm_refuse(error, UCXM_ERR_MALFORMED_KEY,
                           "a cma key has no payload, this one does")
    mine.peer = NULL
    if rkey.info.length == 0 or rkey.info.flags & UCXM_KEY_FLAG_EMPTY:
        return UCXM_OK
    return peer_get(<md_t *>priv, &rkey.info.owner, &rkey.info.address, &mine.peer, error)


cdef void cma_rkey_release(void *priv, ucxm_rkey_t *rkey) noexcept nogil:
    cdef rkey_t *mine = <rkey_t *>rkey.priv
    if mine.peer != NULL:
        peer_put(<md_t *>priv, mine.peer)
        mine.peer = NULL


cdef void cma_mem_enforcement(void *priv, const ucxm_memh_t *memh,
                              ucxm_enforcement_t *enforcement) noexcept nogil:
    """Put and get: the library of whoever uses the key looks at rights and range, and that is
    all.  Atomics cannot happen, which is nothing that anybody enforces."""
    memset(enforcement, UCXM_ENFORCE_NONE, sizeof(enforcement[0]))
    enforcement.rights[0] = enforcement.rights[1] = UCXM_ENFORCE_COOPERATIVE
    enforcement.range[0] = enforcement.range[1] = UCXM_ENFORCE_COOPERATIVE


cdef void cma_stat(void *priv, unsigned index, const char **name,
                   uint64_t *value) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    if index == 0:
        name[0] = "process_vm_calls"
        value[0] = cma_load64(&md.process_vm_calls)
    elif index == 1:
        name[0] = "bytes"
        value[0] = cma_load64(&md.bytes)
    elif index == 2:
        name[0] = "peer_checks"
        value[0] = cma_load64(&md.peer_checks)
    elif index == 3:
        name[0] = "peers"
        value[0] = cma_load64(&md.peers)
    elif index == 4:
        name[0] = "pidfd_opens"
        value[0] = cma_load64(&md.pidfd_opens)
    elif index == 5:
        name[0] = "ptracer_calls"
        value[0] = cma_load64(&md.ptracer_calls)
    else:
        name[0] = NULL


cdef void cma_explain(void *priv, const ucxm_memh_t *memh, char *text,
                      size_t size) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    snprintf(
        text, size,
        "cma: real system calls (process_vm_readv, process_vm_writev); nothing is pinned\n"
        "probe: %s\n"
        "rights, range: COOPERATIVE for get and put (the library of whoever uses the key "
        "checks; the kernel checks ptrace permission only)\n"
        "revoke: NONE; a peer that has a key reaches the memory until it is unmapped\n"
        "atomics: none\n"
        "peer: by pidfd and start time, looked at again before a transfer if the last look is "
        "%llu us old; within that time the reuse of a pid goes unnoticed\n",
        md.note, <unsigned long long>(md.interval // 1000))


cdef void cma_close(void *priv) noexcept nogil:
    cdef md_t *md = <md_t *>priv
    cdef peer_t *peer
    cdef int i
    for i in range(BUCKETS):  # all keys are gone, so this finds nothing
        while md.bucket[i] != NULL:
            peer = md.bucket[i]
            md.bucket[i] = peer.next
            peer_free(peer)
    pthread_mutex_destroy(&md.lock)
    free(md)


# ---- data path -----------------------------------------------------------------------------

cdef ucxm_status_t cma_ep_create(void *priv, ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil:
    """There is no connection: an endpoint reaches every key's owner, from the start."""
    return UCXM_OK


cdef void cma_ep_destroy(void *priv, ucxm_ep_t *ep) noexcept nogil:
    pass


cdef ucxm_status_t cma_ep_address(void *priv, ucxm_ep_t *ep, uint8_t *address, size_t *length,
                                  ucxm_error_t *error) noexcept nogil:
    cdef ep_address_t out
    out.identity = (<md_t *>priv).self
    out.epoch = cma_load64(&(<ep_t *>ep.priv).epoch)
    memcpy(address, &out, sizeof(out))
    length[0] = sizeof(out)
    return UCXM_OK


cdef ucxm_status_t cma_ep_connect(void *priv, ucxm_ep_t *ep, const uint8_t *address,
                                  size_t length, ucxm_error_t *error) noexcept nogil:
    """Not needed; says early whether the process can be reached."""
    cdef md_t *md = <md_t *>priv
    cdef ep_address_t peer_address
    cdef peer_t *peer
    cdef ucxm_status_t status
    if length != sizeof(peer_address):
        return ucxm_refuse(error, UCXM_ERR_INVALID_PARAM, "that is no cma endpoint's address")
    memcpy(&peer_address, address, sizeof(peer_address))
    status = peer_get(md, &peer_address.identity, NULL, &peer, error)
    if status == UCXM_OK:
        peer_put(md, peer)
    return status


cdef ucxm_status_t cma_ep_reset(void *priv, ucxm_ep_t *ep, ucxm_error_t *error) noexcept nogil:
    cma_count(&(<ep_t *>ep.priv).epoch, 1)
    return UCXM_OK


cdef uint32_t cma_ep_state(void *priv, ucxm_ep_t *ep) noexcept nogil:
    """A failed transfer spoils nothing, so there is no error state."""
    return UCXM_EP_CONNECTED


cdef struct check_t:
    md_t *md
    peer_t *peer


cdef int before_call(void *arg) noexcept nogil:
    cdef check_t *check = <check_t *>arg
    return <int>peer_check(check.md, check.peer, False)


cdef bint local_is_bad(md_t *md, const ucxm_op_t *op, const peer_t *peer) noexcept nogil:
    """After EFAULT: is it our side's memory?  Asks without changing any."""
    cma_count(&md.process_vm_calls, 1)
    if op.kind == UCXM_OP_GET:
        return cma_peek(<pid_t>peer.identity.pid, op.remote_address + op.bytes_done) == 0
    return cma_peek(getpid(), <uint64_t>op.local + op.bytes_done) != 0


cdef ucxm_status_t move_failed(md_t *md, ucxm_op_t *op, peer_t *peer, int result,
                               uint32_t state) noexcept nogil:
    """What an errno of the mover means, given what the peer is now."""
    cdef ucxm_status_t status
    cdef const char *why
    if result == ECANCELED and state != PEER_ALIVE:
        result = 0
    elif result == ESRCH or result == EFAULT or result == EPERM:
        # The peer may have ended or changed during the call: then that is the truth.
        state = peer_check(md, peer, True)
    if state != PEER_ALIVE:
        status = state_status(state)
        why = state_text(state)
    elif result == ESRCH:
        status = UCXM_ERR_PEER_GONE
        why = "it has no memory"  # its main thread has ended, others run
    elif result == EPERM:
        status = UCXM_ERR_UNREACHABLE
        why = "no ptrace permission"
    elif result == EFAULT:
        status = UCXM_ERR_INVALID_ADDR
        why = "bad local address" if local_is_bad(md, op, peer) else "bad remote address"
    elif result == ENOMEM:
        status = UCXM_ERR_NO_MEMORY
        why = "out of memory"
    else:
        status = UCXM_ERR_UNSUPPORTED if result == ENOSYS else UCXM_ERR_IO_ERROR
        why = "process_vm call failed"
    op.error.sys_errno = result
    snprintf(op.error.text, sizeof(op.error.text), "pid %u start %llu: %s 0x%llx+%zu done %zu: %s",
             peer.identity.pid, <unsigned long long>peer.identity.start_time,
             <const char *>("get" if op.kind == UCXM_OP_GET else "put"),
             <unsigned long long>op.remote_address, op.length, op.bytes_done, why)
    return status


cdef ucxm_status_t cma_ep_post(void *priv, ucxm_ep_t *ep, ucxm_op_t *op,
                               ucxm_error_t *error) noexcept nogil:
    """Move the bytes now; the operation is complete when this returns."""
    cdef md_t *md = <md_t *>priv
    cdef peer_t *peer
    cdef cma_vec_t local, remote
    cdef cma_move_t m
    cdef check_t check
    cdef ucxm_status_t status = UCXM_OK
    cdef int result

    if op.kind != UCXM_OP_GET and op.kind != UCXM_OP_PUT:
        return ucxm_refuse(error, UCXM_ERR_UNSUPPORTED, "cma has no atomics")
    op.bytes_done = 0
    peer = (<rkey_t *>op.rkey.priv).peer
    if op.length != 0 and peer != NULL:
        check.md = md
        check.peer = peer
        local.address = <uint64_t>op.local
        remote.address = op.remote_address
        local.length = remote.length = op.length
        m.pid = <pid_t>peer.identity.pid
        m.write = op.kind == UCXM_OP_PUT
        m.local = &local
        m.remote = &remote
        m.local_count = m.remote_count = 1
        m.max_bytes = 0
        m.before = before_call
        m.arg = &check
        result = cma_move(&m)
        op.bytes_done = m.done
        cma_count(&md.process_vm_calls, m.calls)
        cma_count(&md.bytes, m.done)
        if result != 0:
            status = move_failed(md, op, peer, result, <uint32_t>m.stopped)
    elif op.length != 0:
        status = UCXM_ERR_INVALID_ADDR  # a key to nothing; the core has refused this already
    op.complete(op, status)
    return UCXM_OK


# ---- binding -------------------------------------------------------------------------------

cdef ucxm_md_ops_t OPS
memset(&OPS, 0, sizeof(OPS))
OPS.struct_size = sizeof(OPS)
OPS.abi = UCXM_BACKEND_ABI
OPS.rkey_size = sizeof(rkey_t)
OPS.close = cma_close
OPS.mem_query = cma_mem_query
OPS.mem_reg = cma_mem_reg
OPS.mem_dereg = cma_mem_dereg
OPS.mem_derive = unsupported_mem_derive
OPS.mkey_pack = cma_mkey_pack
OPS.rkey_unpack = cma_rkey_unpack
OPS.rkey_release = cma_rkey_release
OPS.mem_enforcement = cma_mem_enforcement
OPS.stat = cma_stat
OPS.explain = cma_explain
OPS.peer_evict = cma_peer_evict

cdef ucxm_ep_ops_t EP_OPS
memset(&EP_OPS, 0, sizeof(EP_OPS))
EP_OPS.struct_size = sizeof(EP_OPS)
EP_OPS.ep_size = sizeof(ep_t)
EP_OPS.ep_create = cma_ep_create
EP_OPS.ep_destroy = cma_ep_destroy
EP_OPS.ep_address = cma_ep_address
EP_OPS.ep_connect = cma_ep_connect
EP_OPS.ep_reset = cma_ep_reset
EP_OPS.ep_state = cma_ep_state
EP_OPS.ep_post = cma_ep_post


def open_md(double peer_check_interval, str note, unsigned ptracer_calls):
    """Open the domain; the probe has been made (its finding is `note`)."""
    cdef ucxm_md_attr_t attr
    cdef md_t *md
    cdef ucxm_status_t status
    cdef bytes text = note.encode(errors="replace")[:255]

    md = <md_t *>calloc(1, sizeof(md_t))
    if md == NULL:
        raise MemoryError
    status = identity_self(&md.self)
    if status != UCXM_OK:
        free(md)
        raise NoDeviceError(f"this process's identity could not be read (status {status})",
                            op="open_md", component="cma")
    if md.self.start_time == 0 or md.self.pid_ns == 0:
        free(md)
        raise NoDeviceError(
            "this process cannot be told from others: /proc/self/stat or /proc/self/ns/pid "
            "is not readable", op="open_md", component="cma")
    if pthread_mutex_init(&md.lock, NULL) != 0:
        free(md)
        raise MemoryError
    md.interval = <uint64_t>(peer_check_interval * 1e9)
    md.ptracer_calls = ptracer_calls
    memcpy(md.note, <const char *>text, len(text))

    md_attr_init(&attr, "cma", "memory",
                 UCXM_MD_FLAG_REG | UCXM_MD_FLAG_NEED_RKEY | UCXM_MD_FLAG_ENDPOINT)
    attr.fast_reg = True
    attr.bounce_size = SIZE_MAX  # a transfer of any size needs no local key
    cma_mem_enforcement(md, NULL, &attr.enforcement)
    try:
        return md_bind(&OPS, &EP_OPS, &attr, md, None)
    except BaseException:
        cma_close(md)
        raise
