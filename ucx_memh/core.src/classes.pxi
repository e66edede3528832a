# SPDX-License-Identifier: BSD-3-Clause
# The Python classes: thin covers that check arguments, let go of the GIL and raise.

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef extern from "poll.h" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *fds, unsigned long count, int timeout)
    const short POLLIN

cdef uint64_t MEM_FLAGS_HINT = UCXM_MEM_SYMMETRIC_RKEY | UCXM_MEM_GVA
cdef uint64_t MEM_FLAGS_KNOWN = UCXM_MEM_ACCESS_ALL | UCXM_MEM_DERIVED_ONLY

cdef enum:
    SPIN_NS = 1000000       # busy polling before the thread sleeps
    SLICE_NS = 20000000     # without the GIL, before signals are looked at


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec


cdef uint64_t as_u64(object value, str name, str op) except? 0xdeadbeefdeadbeef:
    """An address, offset, length or operand, or InvalidParamError."""
    if type(value) is int:
        if 0 <= value <= UINT64_MAX:
            return value
        raise _errors.InvalidParamError(f"{name} must be in 0 .. 2^64-1, not {value}", op=op)
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise _errors.InvalidParamError(
            f"{name} must be an integer, not {type(value).__name__}", op=op)
    return as_u64(value.__index__(), name, op)


cdef uint64_t as_access(object flags, str op) except? 0xdeadbeefdeadbeef:
    """Flags of mem_reg or derive: known and supported ones, or an error."""
    cdef uint64_t value = as_u64(flags, "flags", op)
    if value & MEM_FLAGS_HINT:
        raise _errors.UnsupportedError(
            f"{_flags.MemFlag(value & MEM_FLAGS_HINT)!r} is not supported", op=op)
    if value & ~MEM_FLAGS_KNOWN:
        raise _errors.InvalidParamError(
            f"unknown flags {value & ~MEM_FLAGS_KNOWN:#x}", op=op)
    return value


cdef object enforcement_table(ucxm_enforcement_t *cells):
    return _resources.EnforcementTable.of(cells.rights, cells.range, cells.revoke)


cdef int get_buffer(object buffer, Py_buffer *view, bint writable, str op) except -1:
    """Export a C-contiguous buffer, or say in our words why not."""
    if not PyObject_CheckBuffer(buffer):
        if hasattr(buffer, "__cuda_array_interface__"):
            raise _errors.UnsupportedError("this is device memory, and this domain takes host "
                                           "memory only", op=op)
        raise _errors.InvalidParamError(
            f"{type(buffer).__name__} does not export a buffer", op=op)
    try:
        PyObject_GetBuffer(buffer, view, PyBUF_SIMPLE)
    except (BufferError, ValueError) as error:
        raise _errors.InvalidParamError(f"no C-contiguous buffer: {error}", op=op) from error
    if writable and view.readonly:
        PyBuffer_Release(view)
        raise _errors.AccessError("the buffer is read-only", op=op)
    return 0


cdef struct waiter_t:
    ucxm_completion_t comp
    PyObject *callback


cdef void waiter_run(ucxm_completion_t *self, ucxm_status_t status) noexcept with gil:
    """Run a Python callback; what it raises goes to sys.unraisablehook."""
    cdef waiter_t *waiter = <waiter_t *>self
    callback = <object>waiter.callback
    Py_DECREF(callback)
    free(waiter)
    try:
        callback(_flags.Status(status))
    except BaseException:
        PyErr_WriteUnraisable(callback)


cdef Md md_bind(const ucxm_md_ops_t *ops, const ucxm_ep_ops_t *ep_ops,
                const ucxm_md_attr_t *attr, void *priv, object keep):
    cdef md_t *md
    cdef Md self
    cdef str component = (<char *>attr.component).decode("utf-8", "replace")
    if ops.abi != UCXM_BACKEND_ABI:
        raise _errors.InvalidParamError(
            f"backend was built for ABI {ops.abi}, this library has {UCXM_BACKEND_ABI}",
            op="bind", component=component)
    if ops.struct_size < sizeof(size_t) + 2 * sizeof(uint32_t) or (
            attr.struct_size < sizeof(ucxm_md_attr_t)) or (
            ep_ops != NULL and ep_ops.struct_size < sizeof(ucxm_ep_ops_t)):
        raise _errors.InvalidParamError("backend's tables are too short", op="bind",
                                        component=component)
    identity_refresh()
    md = <md_t *>alloc_zeroed(sizeof(md_t))
    if md == NULL:
        raise _errors.NoMemoryError(op="bind", component=component)
    memcpy(&md.ops, ops, min(ops.struct_size, sizeof(md.ops)))
    md.ops.struct_size = sizeof(md.ops)
    if ep_ops != NULL:
        memcpy(&md.ep_ops, ep_ops, sizeof(md.ep_ops))
    memcpy(&md.attr, attr, sizeof(md.attr))
    md.attr.component[sizeof(md.attr.component) - 1] = 0
    md.attr.md_name[sizeof(md.attr.md_name) - 1] = 0
    if md.attr.reg_alignment == 0:
        md.attr.reg_alignment = 1
    ops_fill(&md.ops)
    try:
        bind_check(component, &md.ops, &md.ep_ops if ep_ops != NULL else NULL, &md.attr)
    except BaseException:
        mem_free(md)
        raise
    md.epoch = fork_epoch
    md.refs = 1
    md.component_id = fnv1a(md.attr.component)
    md.quarantine.size = md.attr.quarantine
    md.next_key_id = int.from_bytes(_urandom(7), "little") + 1
    pthread_mutex_init(&md.key_lock, NULL)
    md.priv = priv
    self = Md.__new__(Md)
    self.md = <ucxm_md_t *>md
    self.keep = keep
    self.endpoints = {}
    return self


cdef md_t *md_use(Md self, str op) except NULL:
    """The C object, if it can be used here and now."""
    cdef md_t *md = <md_t *>self.md
    if md == NULL or load32(&md.state) == MD_CLOSED:
        raise _errors.ClosedError("the Md is closed", op=op)
    if md.epoch != fork_epoch:
        raise failure(UCXM_ERR_FORKED, op, md, NULL, {})
    return md


@cython.final
cdef class Md:
    """An opened memory domain: one device of one component.

    Made by `open_md`; a context manager that closes it.  Any thread may call any method; what
    takes longer than half a microsecond runs without the GIL.  In a forked child every method
    raises ForkedError.
    """

    def __init__(self):
        raise TypeError("Md objects are made by ucx_memh.open_md()")

    def __dealloc__(self):
        cdef md_t *md = <md_t *>self.md
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        if md == NULL or md.epoch != fork_epoch:
            return
        memset(&error, 0, sizeof(error))
        with nogil:
            # What resists now stays, whole, until the process ends.
            status = md_close(md, True, &error)
            if status == UCXM_OK:
                md_put(md)

    def __repr__(self):
        cdef md_t *md = <md_t *>self.md
        if md == NULL:
            return "<Md>"
        state = "closed" if md.state == MD_CLOSED else "open"
        return f"<Md {md_component(md)}/{md.attr.md_name.decode('utf-8', 'replace')} {state}>"

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    @property
    def attr(self):
        """What it is and can do (MdAttr); uct_md_query_v2's record."""
        cdef md_t *md = <md_t *>self.md
        cdef ucxm_md_attr_t *attr = &md.attr
        return _resources.MdAttr(
            component=md_component(md),
            md_name=attr.md_name.decode("utf-8", "replace"),
            software=bool(attr.software),
            flags=_flags.MdFlag(attr.flags),
            rkey_packed_size=attr.rkey_packed_size,
            key_size_max=UCXM_KEY_HEADER_SIZE + attr.rkey_packed_size,
            max_reg=attr.max_reg if attr.max_reg else UINT64_MAX,
            reg_alignment=attr.reg_alignment,
            mem_types=frozenset(t for t in _flags.MemType if attr.mem_types >> t & 1),
            enforcement=enforcement_table(&attr.enforcement),
        )

    @property
    def closed(self):
        """Whether close() has been done."""
        return self.md == NULL or load32(&(<md_t *>self.md).state) == MD_CLOSED

    def mem_reg(self, buffer=None, flags=None, *, address=None, length=None, owner=None,
                mem_type=0, dmabuf_fd=None, dmabuf_offset=0):
        """Register memory and return its base handle (uct_md_mem_reg_v2).

        `buffer` is any C-contiguous buffer; it stays exported until dereg, so a bytearray cannot
        be resized under the registration.  Instead of it, `address` and `length` in bytes name
        memory, which `owner` (any object, held) keeps alive.  `flags` are the rights: None means
        ACCESS_ALL if the memory is writable, else LOCAL_READ | REMOTE_GET; no access bit at all
        means local rights only.  With DERIVED_ONLY the region's own key gets no remote right and
        `flags` is what derive may give.  Length 0 is legal.

        Raises AccessError (more than the buffer allows), InvalidParamError, UnsupportedError,
        NoMemoryError (also RLIMIT_MEMLOCK), DeviceError.  Releases the GIL where the domain pins
        memory.
        """
        cdef md_t *md = md_use(self, "mem_reg")
        cdef reg_t *reg
        cdef ucxm_memh_t *memh = NULL
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef uint64_t access = 0
        cdef uint64_t asked = 0
        cdef bint writable = True
        cdef Memh self_memh

        if flags is not None:
            asked = as_access(flags, "mem_reg")
        if (buffer is None) == (address is None):
            raise _errors.InvalidParamError("give a buffer, or address and length", op="mem_reg",
                                            component=md_component(md))
        reg = reg_alloc(md)
        if reg == NULL:
            raise _errors.NoMemoryError(op="mem_reg", component=md_component(md))
        try:
            if buffer is not None:
                if length is not None:
                    raise _errors.InvalidParamError("length goes with address", op="mem_reg",
                                                    component=md_component(md))
                get_buffer(buffer, &reg.buffer, False, "mem_reg")
                reg.has_buffer = True
                reg.pub.address = <uint64_t>reg.buffer.buf
                reg.pub.length = <uint64_t>reg.buffer.len
                writable = not reg.buffer.readonly
            else:
                reg.pub.address = as_u64(address, "address", "mem_reg")
                reg.pub.length = as_u64(length, "length", "mem_reg")
            if owner is not None:
                Py_INCREF(owner)
                reg.owner = <PyObject *>owner
            access = asked & UCXM_MEM_ACCESS_ALL
            if flags is None or (access == 0 and asked & UCXM_MEM_DERIVED_ONLY):
                access = (UCXM_MEM_ACCESS_ALL if writable else
                          UCXM_MEM_ACCESS_LOCAL_READ | UCXM_MEM_ACCESS_REMOTE_GET)
                if not md.attr.flags & UCXM_MD_FLAG_ATOMIC:
                    access &= ~UCXM_MEM_ACCESS_REMOTE_ATOMIC
            elif access == 0:
                access = UCXM_MEM_ACCESS_LOCAL_READ
                if writable:
                    access |= UCXM_MEM_ACCESS_LOCAL_WRITE
            reg.pub.flags = access | (asked & UCXM_MEM_DERIVED_ONLY)
            reg.pub.grant = access
            if mem_type != 0:
                reg.pub.mem_type = <uint32_t>as_u64(mem_type, "mem_type", "mem_reg")
            if dmabuf_fd is not None:
                reg.pub.dmabuf_fd = <int32_t>as_u64(dmabuf_fd, "dmabuf_fd", "mem_reg")
                reg.pub.dmabuf_offset = as_u64(dmabuf_offset, "dmabuf_offset", "mem_reg")
            reg_check(md, reg, writable)
        except BaseException:
            reg_put(reg)
            raise
        memset(&error, 0, sizeof(error))
        context = {"address": reg.pub.address, "length": reg.pub.length}
        if md.attr.fast_reg:
            status = mem_reg(md, reg, &memh, &error)
        else:
            with nogil:
                status = mem_reg(md, reg, &memh, &error)
        if status != UCXM_OK:
            raise failure(status, "mem_reg", md, &error, context)
        self_memh = Memh.__new__(Memh)
        self_memh.memh = memh
        self_memh.md = self
        return self_memh

    def rkey_unpack(self, key):
        """Make a packed key usable and return its Rkey (uct_rkey_unpack).

        Equal keys give the same native object; a key that is known already costs a look-up and no
        system call.  `key` may be longer than the packed key in it; not a byte beyond `len(key)`
        is read.  Raises MalformedKeyError, KeyVersionError, InvalidParamError (another
        component's), UnreachableError, PeerGoneError, StaleKeyError, RevokedError (a revoke
        notice).  Nothing is remembered of a failure.
        """
        cdef md_t *md = md_use(self, "rkey_unpack")
        cdef Py_buffer view
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef rkey_t *rkey = NULL
        cdef size_t size = 0
        memset(&error, 0, sizeof(error))
        get_buffer(key, &view, False, "rkey_unpack")
        status = rkey_unpack_hit(md, <const uint8_t *>view.buf, view.len, &size, &rkey, &error)
        if status == UCXM_OK and rkey == NULL:
            with nogil:
                status = rkey_unpack_miss(md, <const uint8_t *>view.buf, size, &rkey, &error)
        if status != UCXM_OK:
            context = {}
            if status != UCXM_ERR_MALFORMED_KEY and view.len >= UCXM_KEY_HEADER_SIZE:
                context["pid"] = get_le(<const uint8_t *>view.buf, UCXM_KEY_OFF_OWNER + 16, 4)
                context["address"] = get_le(<const uint8_t *>view.buf, UCXM_KEY_OFF_ADDRESS, 8)
                context["length"] = get_le(<const uint8_t *>view.buf, UCXM_KEY_OFF_LENGTH, 8)
            PyBuffer_Release(&view)
            raise failure(status, "rkey_unpack", md, &error, context)
        PyBuffer_Release(&view)
        return rkey_wrap(self, rkey)

    def rkey_from_raw(self, raw, address, length):
        """An Rkey from a native payload (PackFlag.RAW), unchecked.

        Nothing says whether the payload belongs to this device, this range or these rights: the
        device refuses what is wrong, at the cost of the connection.
        """
        cdef md_t *md = md_use(self, "rkey_from_raw")
        cdef uint64_t start = as_u64(address, "address", "rkey_from_raw")
        cdef uint64_t size = as_u64(length, "length", "rkey_from_raw")
        cdef Py_buffer view
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef rkey_t *rkey = NULL
        memset(&error, 0, sizeof(error))
        get_buffer(raw, &view, False, "rkey_from_raw")
        with nogil:
            status = rkey_from_raw(md, <const uint8_t *>view.buf, view.len, start, size, &rkey,
                                   &error)
        PyBuffer_Release(&view)
        if status != UCXM_OK:
            raise failure(status, "rkey_from_raw", md, &error,
                          {"address": start, "length": size})
        return rkey_wrap(self, rkey)

    def rkey_revoke(self, notice):
        """Take note of a `Memh.revoke_notice()`; return how many unpacked keys it names.

        Their use raises RevokedError from now on, before any device is asked, so that no
        connection is lost over them.
        """
        cdef md_t *md = md_use(self, "rkey_revoke")
        cdef Py_buffer view
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef uint32_t count = 0
        memset(&error, 0, sizeof(error))
        get_buffer(notice, &view, False, "rkey_revoke")
        status = rkey_revoke(md, <const uint8_t *>view.buf, view.len, &count, &error)
        PyBuffer_Release(&view)
        if status != UCXM_OK:
            raise failure(status, "rkey_revoke", md, &error, {})
        return count

    def endpoint(self):
        """A new Endpoint, not connected yet.  Raises UnsupportedError where there is no data path."""
        cdef md_t *md = md_use(self, "endpoint")
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef ep_t *ep = NULL
        cdef Endpoint endpoint
        memset(&error, 0, sizeof(error))
        with nogil:
            status = ep_open(md, &ep, &error)
        if status != UCXM_OK:
            raise failure(status, "endpoint", md, &error, {})
        endpoint = Endpoint.__new__(Endpoint)
        endpoint.ep = &ep.pub
        endpoint.md = self
        return endpoint

    def progress(self):
        """Poll once; run the callbacks of what has completed.  Returns how much that was."""
        cdef md_t *md = md_use(self, "progress")
        cdef unsigned count
        with nogil:
            count = md_progress(md)
        if self.endpoints:
            for endpoint in list(self.endpoints.values()):
                ep_notice_error(<Endpoint>endpoint)
        return count

    @property
    def event_fd(self):
        """A descriptor that becomes readable after arm() when there is something to progress."""
        cdef md_t *md = md_use(self, "event_fd")
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef int fd = -1
        memset(&error, 0, sizeof(error))
        status = md_enter(md)
        if status == UCXM_OK:
            status = md.ops.event_fd(md.priv, &fd, &error)
            md_leave(md)
        if status != UCXM_OK:
            raise failure(status, "event_fd", md, &error, {})
        return fd

    def arm(self):
        """Ask for event_fd to become readable at the next completion.

        Returns False if there is something to progress already: progress first, then arm again.
        """
        cdef md_t *md = md_use(self, "arm")
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        memset(&error, 0, sizeof(error))
        status = md_enter(md)
        if status == UCXM_OK:
            status = md.ops.event_arm(md.priv, &error)
            md_leave(md)
        if status == UCXM_ERR_BUSY:
            return False
        if status != UCXM_OK:
            raise failure(status, "arm", md, &error, {})
        return True

    def stats(self):
        """Counters by name: live objects, calls, the key cache, and the backend's own.

        The backend's counters keep their names behind "device."; they count what was really sent.
        """
        cdef md_t *md = md_use(self, "stats")
        cdef const char *name
        cdef uint64_t value
        cdef unsigned index = 0
        cdef int i
        cdef uint64_t hits = 0
        for i in range(STRIPES):
            hits += md.stripes[i].hits
        counters = {
            "live_bases": md.live_bases,
            "live_derived": md.live_derived,
            "live_rkeys": md.live_rkeys,
            "live_endpoints": md.live_endpoints,
            "mem_reg": md.counters.mem_reg,
            "mem_dereg": md.counters.mem_dereg,
            "derive": md.counters.derive,
            "revoke": md.counters.revoke,
            "key_create": md.counters.key_create,
            "key_destroy": md.counters.key_destroy,
            "keys_parked": md.counters.parked,
            "keys_parked_now": md.parked_count,
            "keys_quarantined": md.quarantine.count,
            "rkey_hits": hits,
            "rkey_misses": md.counters.rkey_misses,
            "transfers": md.counters.transfers,
        }
        if md_enter(md) == UCXM_OK:
            while True:
                name = NULL
                value = 0
                md.ops.stat(md.priv, index, &name, &value)
                if name == NULL:
                    break
                counters["device." + name.decode()] = value
                index += 1
            md_leave(md)
        return counters

    def explain(self, memh=None):
        """A few lines for a person: the domain, or how this handle's keys are made and kept."""
        cdef md_t *md = md_use(self, "explain")
        cdef char text[2048]
        cdef ucxm_memh_t *handle = NULL
        if memh is not None:
            if (<Memh?>memh).md is not self:
                raise _errors.InvalidParamError("a handle of another Md", op="explain",
                                                component=md_component(md))
            handle = (<Memh>memh).memh
        text[0] = 0
        if md_enter(md) == UCXM_OK:
            md.ops.explain(md.priv, handle, text, sizeof(text))
            md_leave(md)
        return text.decode("utf-8", "replace")

    def peer_evict(self, identity):
        """Forget what is remembered about a peer (`Rkey.owner`): its keys become stale."""
        cdef md_t *md = md_use(self, "peer_evict")
        cdef ucxm_identity_t peer
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef bytes raw = bytes(identity)
        if len(raw) != sizeof(peer):
            raise _errors.InvalidParamError(f"an identity has {sizeof(peer)} bytes",
                                            op="peer_evict", component=md_component(md))
        memcpy(&peer, PyBytes_AS_STRING(raw), sizeof(peer))
        memset(&error, 0, sizeof(error))
        with nogil:
            status = md_enter(md)
            if status == UCXM_OK:
                status = md.ops.peer_evict(md.priv, &peer, &error)
                md_leave(md)
        if status != UCXM_OK:
            raise failure(status, "peer_evict", md, &error, {"pid": peer.pid})

    def close(self, force=False):
        """Close the domain; closing it again does nothing.

        Raises BusyError, and changes nothing, while handles, unpacked keys or endpoints of it are
        in use; with `force` these are revoked, deregistered and closed first.
        """
        cdef md_t *md = <md_t *>self.md
        cdef bint forced = bool(force)
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        memset(&error, 0, sizeof(error))
        with nogil:
            status = md_close(md, forced, &error)
        if status != UCXM_OK:
            raise failure(status, "md_close", md, &error, {
                "bases": md.live_bases, "derived": md.live_derived, "rkeys": md.live_rkeys,
                "endpoints": md.live_endpoints,
            } if status == UCXM_ERR_BUSY else {})


cdef int reg_check(md_t *md, reg_t *reg, bint writable) except -1:
    """What can be told without the device, for a Registration about to be made."""
    cdef uint64_t grant = reg.pub.grant
    cdef uint64_t writes = (UCXM_MEM_ACCESS_LOCAL_WRITE | UCXM_MEM_ACCESS_REMOTE_PUT |
                            UCXM_MEM_ACCESS_REMOTE_ATOMIC)
    cdef ucxm_status_t status = UCXM_OK
    detail = ""
    if grant & writes and not writable:
        status, detail = UCXM_ERR_ACCESS, "the buffer is read-only"
    elif reg.pub.length > UINT64_MAX - reg.pub.address:
        status, detail = UCXM_ERR_INVALID_PARAM, "the range wraps around"
    elif not md.attr.flags & UCXM_MD_FLAG_REG:
        status, detail = UCXM_ERR_UNSUPPORTED, "this domain does not register memory"
    elif reg.pub.mem_type >= 64 or not md.attr.mem_types >> reg.pub.mem_type & 1:
        status, detail = UCXM_ERR_UNSUPPORTED, "not a memory type of this domain"
    elif reg.pub.dmabuf_fd >= 0 and not md.attr.flags & UCXM_MD_FLAG_REG_DMABUF:
        status, detail = UCXM_ERR_UNSUPPORTED, "this domain takes no dmabuf"
    elif reg.pub.flags & UCXM_MEM_DERIVED_ONLY and not md.attr.flags & UCXM_MD_FLAG_REG_DERIVED:
        status, detail = UCXM_ERR_UNSUPPORTED, "DERIVED_ONLY, but this domain does not derive"
    elif grant & UCXM_MEM_ACCESS_REMOTE_ATOMIC and not md.attr.flags & UCXM_MD_FLAG_ATOMIC:
        status, detail = UCXM_ERR_UNSUPPORTED, "this domain has no atomics"
    elif md.attr.max_reg and reg.pub.length > md.attr.max_reg:
        status = UCXM_ERR_EXCEEDS_LIMIT
        detail = f"this domain registers at most {md.attr.max_reg} bytes at once"
    elif reg.pub.address % md.attr.reg_alignment and reg.pub.length:
        status = UCXM_ERR_INVALID_PARAM
        detail = f"the address must be aligned to {md.attr.reg_alignment} bytes"
    if status != UCXM_OK:
        raise _errors.error_from_status(
            status, "mem_reg", md_component(md), detail,
            address=reg.pub.address, length=reg.pub.length)
    reg.pub.direct_rights = grant
    if reg.pub.flags & UCXM_MEM_DERIVED_ONLY:
        reg.pub.direct_rights = grant & ~UCXM_MEM_ACCESS_REMOTE
        # Peers will write through derived keys, and the device must be able to.
        if grant & (UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_ATOMIC):
            reg.pub.direct_rights |= UCXM_MEM_ACCESS_LOCAL_WRITE
    return 0


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Memh:
    """A memory handle: rights, a range and keys of its own on a Registration (uct_mem_h).

    A base comes from `Md.mem_reg`, a derived one from `derive`; both are of this one type.  The
    object deregisters what it still holds when it goes.  Any thread may call any method; whoever
    loses a race with invalidate or dereg gets RevokedError or ClosedError.
    """

    def __init__(self):
        raise TypeError("Memh objects are made by Md.mem_reg() and Memh.derive()")

    def __dealloc__(self):
        cdef ucxm_error_t error
        cdef ucxm_memh_t *memh = self.memh
        if memh == NULL:
            return
        memset(&error, 0, sizeof(error))
        if load32(&memh.id.state) == UCXM_MEMH_CLOSED or md_of(memh).attr.fast_reg:
            memh_drop(memh, &error)
        else:
            with nogil:
                memh_drop(memh, &error)

    def __repr__(self):
        cdef ucxm_memh_own_t *own = ucxm_memh_own(self.memh)
        kind = "base" if self.memh.id.parent == NULL else "derived"
        return (f"<Memh {kind} {md_component(md_of(self.memh))} length={own.length} "
                f"{self.flags!r} {self.state.name}>")

    def __reduce__(self):
        raise TypeError("a Memh cannot be pickled or copied: pack its key")

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.dereg()

    @property
    def address(self):
        """Where its range starts, in the owner's address space."""
        return ucxm_memh_own(self.memh).address

    @property
    def length(self):
        """Bytes of its range, as given."""
        return ucxm_memh_own(self.memh).length

    @property
    def flags(self):
        """A base: the flags it was registered with.  A derived handle: the rights of its keys."""
        if self.memh.id.parent == NULL:
            return _flags.MemFlag(self.memh.inherited.flags)
        return _flags.MemFlag(ucxm_memh_own(self.memh).rights)

    @property
    def grant(self):
        """The rights that derive may give."""
        return _flags.MemFlag(ucxm_memh_own(self.memh).grant)

    @property
    def base(self):
        """The handle that it was derived from; None for a base."""
        return self.base_or_none

    @property
    def md(self):
        """Its domain."""
        return self.md

    @property
    def endpoint(self):
        """The only endpoint that may use its keys, or None."""
        return self.bound

    @property
    def derived_count(self):
        """Live handles derived from this one directly."""
        return load32(&self.memh.id.live_children)

    @property
    def state(self):
        """MemhState: LIVE, REVOKING, REVOKED or CLOSED."""
        return _flags.MemhState(load32(&self.memh.id.state))

    @property
    def key_id(self):
        """What its packed keys are known by; never used again while the Md lives."""
        return self.memh.id.key_id

    @property
    def enforcement(self):
        """Who keeps the promises of its keys (EnforcementTable), as the device really does."""
        cdef md_t *md = md_of(self.memh)
        cdef ucxm_enforcement_t cells
        cdef ucxm_status_t status = md_enter(md)
        if status != UCXM_OK:
            raise memh_failure(status, "enforcement", self.memh, NULL)
        memset(&cells, 0, sizeof(cells))
        md.ops.mem_enforcement(md.priv, self.memh, &cells)
        md_leave(md)
        return enforcement_table(&cells)

    def derive(self, offset=0, length=None, flags=None, endpoint=None):
        """A new handle on the same registration, narrower or equal, with no keys yet.

        `offset` and `length` in bytes (None: to the end), `flags` a subset of `grant` (None: all
        of it), `endpoint` an Endpoint that alone may use the keys.  Sends nothing to the device
        and changes nothing of this handle; one allocation.  Raises InvalidParamError (wider than
        this handle), UnsupportedError, RevokedError, ClosedError.
        Source: openucx/ucx#10332 (closed unmerged), where a registration took a base handle.
        """
        cdef ucxm_memh_own_t *own = ucxm_memh_own(self.memh)
        cdef uint64_t start = as_u64(offset, "offset", "derive")
        cdef uint64_t size, grant
        cdef ucxm_memh_t *memh = NULL
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef Memh derived
        memset(&error, 0, sizeof(error))
        if length is not None:
            size = as_u64(length, "length", "derive")
        else:
            size = own.length - start if start <= own.length else 0
        grant = own.grant if flags is None else as_access(flags, "derive")
        status = mem_derive(self.memh, start, size, grant,
                            (<Endpoint?>endpoint).ep if endpoint is not None else NULL,
                            &memh, &error)
        if status != UCXM_OK:
            raise memh_failure(status, "derive", self.memh, &error)
        derived = Memh.__new__(Memh)
        derived.memh = memh
        derived.md = self.md
        derived.base_or_none = self
        derived.bound = endpoint if endpoint is not None else self.bound
        return derived

    def mkey_pack(self, flags=0):
        """The bytes that a peer needs to reach this memory (uct_md_mkey_pack_v2).

        The first pack makes the native keys that `flags` (PackFlag) name; every later one copies
        the same bytes.  A derived handle always packs its own, revocable key.  A base packs its
        direct key, which lives as long as the registration; with INVALIDATE_RMA or INVALIDATE_AMO
        keys of their own.  RAW: the native payload without the envelope.

        Raises UnsupportedError, AccessError (no remote right), RevokedError, ClosedError,
        BusyError (the device offers only values in quarantine).  A packed key is a capability:
        hand it over a private channel.
        """
        cdef packed_t *packed = memh_pack(self, flags)
        return PyBytes_FromStringAndSize(<const char *>packed.bytes, packed.size)

    def mkey_pack_into(self, buffer, flags=0):
        """Like mkey_pack, into a writable buffer; returns the number of bytes.

        Raises InvalidParamError (status BUFFER_TOO_SMALL), having written nothing, if it is too
        short.
        """
        cdef packed_t *packed = memh_pack(self, flags)
        cdef Py_buffer view
        get_buffer(buffer, &view, True, "mkey_pack_into")
        if <size_t>view.len < packed.size:
            room = view.len
            PyBuffer_Release(&view)
            raise _errors.error_from_status(
                UCXM_ERR_BUFFER_TOO_SMALL, "mkey_pack_into", md_component(md_of(self.memh)),
                f"the key needs {packed.size} bytes, the buffer has {room}")
        memcpy(view.buf, packed.bytes, packed.size)
        PyBuffer_Release(&view)
        return packed.size

    def invalidate(self, callback=None, cascade=False):
        """Destroy this derived handle's own keys, for good (the INVALIDATE of uct_md_mem_dereg_v2).

        When it is complete no byte is read or written through these keys any more, whatever was
        under way.  Without a callback it returns when that is so; `callback(status)` runs exactly
        once instead, in this call or in a later `Md.progress()`, unless this call raises.  The
        base and all other handles are as before.  `cascade` first revokes what was derived from
        this handle, leaves first, and stops at the first failure.

        Raises InvalidParamError (a base), BusyError (live derived handles, or its revocation is
        under way), RevokedError (done already), DeviceError and others (the device did not
        destroy the key: the state is REVOKING and the call may be repeated).
        """
        if cascade:
            revoke_descendants(self, "invalidate")
        revoke_object(self, False, callback, "invalidate")

    def dereg(self, invalidate=False, cascade=False):
        """Close the handle; the last act of a base is to deregister the memory.

        A derived handle's keys are destroyed first.  A second dereg does nothing.  `invalidate`
        asks for the promise that no key of this handle works afterwards and raises
        UnsupportedError, with the handle as before, where the domain cannot keep that.  `cascade`
        first closes what was derived from it, leaves first.  Raises BusyError (live derived
        handles, or transfers that use the memory locally), DeviceError.
        """
        if invalidate and load32(&self.memh.id.state) != UCXM_MEMH_CLOSED:
            check_can_invalidate(self)
        if cascade:
            revoke_descendants(self, "dereg")
        revoke_object(self, True, None, "dereg")

    def revoke_notice(self):
        """Bytes that tell a peer that this handle's key is dead (see `Md.rkey_revoke`).

        The peer's library then refuses by itself and does not lose its connection over a refused
        access.  Raises InvalidParamError while the handle is live.
        """
        cdef md_t *md = md_of(self.memh)
        cdef ucxm_key_info_t info
        cdef uint8_t notice[UCXM_KEY_HEADER_SIZE]
        cdef ucxm_status_t status
        if load32(&self.memh.id.state) == UCXM_MEMH_LIVE:
            raise _errors.InvalidParamError("the handle is live: there is nothing to tell",
                                            op="revoke_notice", component=md_component(md))
        memset(&info, 0, sizeof(info))
        info.key_id = self.memh.id.key_id
        info.address = ucxm_memh_own(self.memh).address
        info.flags = UCXM_KEY_FLAG_REVOKED | UCXM_KEY_FLAG_EMPTY
        status = identity_self(&info.owner)
        if status != UCXM_OK:
            raise memh_failure(status, "revoke_notice", self.memh, NULL)
        key_envelope(md, &info, NULL, 0, notice)
        return PyBytes_FromStringAndSize(<const char *>notice, UCXM_KEY_HEADER_SIZE)

    def explain(self):
        """A few lines for a person on how this handle's keys are made and kept."""
        return self.md.explain(self)

cdef int check_can_invalidate(Memh self) except -1:
    cdef md_t *md = md_of(self.memh)
    cdef uint64_t rights = ucxm_memh_own(self.memh).rights
    cdef uint64_t needs = 0
    if self.memh.id.parent == NULL:
        if rights & (UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_GET):
            needs |= UCXM_MD_FLAG_INVALIDATE_RMA
        if rights & UCXM_MEM_ACCESS_REMOTE_ATOMIC:
            needs |= UCXM_MD_FLAG_INVALIDATE_AMO
    if needs & ~md.attr.flags:
        raise _errors.UnsupportedError(
            "this domain cannot promise that no key works afterwards", op="dereg",
            component=md_component(md))
    return 0


cdef packed_t *memh_pack(Memh self, object flags) except NULL:
    cdef uint64_t wanted = as_u64(flags, "flags", "mkey_pack") if type(flags) is not int else (
        flags if 0 <= flags <= UINT64_MAX else UINT64_MAX)
    cdef ucxm_memh_t *memh = self.memh
    cdef packed_t *packed = NULL
    cdef ucxm_error_t error
    cdef ucxm_status_t status = memh_check(memh)
    if status == UCXM_OK and wanted <= 0xffffffff:
        packed = pack_cached(memh, <uint32_t>wanted)
        if packed != NULL:
            return packed
    memset(&error, 0, sizeof(error))
    if wanted > 0xffffffff:
        error_text(&error, "unknown pack flags")
        status = UCXM_ERR_INVALID_PARAM
    if status == UCXM_OK:
        with nogil:
            status = pack_slow(memh, <uint32_t>wanted, &packed, &error)
    if status != UCXM_OK:
        raise memh_failure(status, "mkey_pack", memh, &error)
    return packed


cdef int revoke_and_wait(ucxm_memh_t *memh, bint closing, ucxm_completion_t *comp,
                         str op) except -1:
    """Revoke; without a completion wait for the device, looking at signals now and then.

    An exception from a signal leaves the revocation under way: the library owns it.
    """
    cdef md_t *md = md_of(memh)
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    cdef uint64_t deadline
    memset(&error, 0, sizeof(error))
    if md.attr.fast_reg:
        status = revoke(memh, closing, comp, &error)
    else:
        with nogil:
            status = revoke(memh, closing, comp, &error)
    if status == UCXM_INPROGRESS and comp == NULL:
        while load32(&own.pending) != 0:
            with nogil:
                deadline = now_ns() + SLICE_NS
                while load32(&own.pending) != 0 and now_ns() < deadline:
                    if md_progress(md) == 0:
                        sched_yield()
            PyErr_CheckSignals()
        status = own.failed
    if status < 0:
        raise memh_failure(status, op, memh, &error)
    return 0


cdef int revoke_descendants(Memh self, str op) except -1:
    cdef md_t *md = md_of(self.memh)
    cdef ucxm_memh_t *leaf
    while True:
        leaf = revoke_leaf(md, self.memh)
        if leaf == NULL:
            return 0
        try:
            revoke_and_wait(leaf, False, NULL, op)
        except _errors.RevokedError:
            pass  # another thread was faster
        finally:
            memh_put(leaf)


cdef int revoke_object(Memh self, bint closing, object callback, str op) except -1:
    cdef waiter_t *waiter = NULL
    if callback is not None:
        if not callable(callback):
            raise _errors.InvalidParamError("callback must be callable", op=op)
        waiter = <waiter_t *>malloc(sizeof(waiter_t))
        if waiter == NULL:
            raise _errors.NoMemoryError(op=op)
        waiter.comp.func = waiter_run
        waiter.callback = <PyObject *>callback
        Py_INCREF(callback)
    try:
        revoke_and_wait(self.memh, closing, &waiter.comp if waiter != NULL else NULL, op)
    except BaseException:
        if waiter != NULL:
            Py_DECREF(callback)
            free(waiter)
        raise
    return 0


cdef rkey_t *rkey_use(Rkey self, str op) except NULL:
    cdef rkey_t *rkey = <rkey_t *>self.rkey
    if rkey == NULL:
        raise _errors.ClosedError("the rkey is closed", op=op)
    return rkey


cdef Rkey rkey_wrap(Md md, rkey_t *rkey):
    cdef Rkey self = Rkey.__new__(Rkey)
    self.rkey = &rkey.pub
    self.md = md
    return self


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Rkey:
    """What a peer made of a packed key (uct_rkey_bundle_t).

    Equal keys share one native object, freed with its last user.  Any thread may use it.
    """

    def __init__(self):
        raise TypeError("Rkey objects are made by Md.rkey_unpack()")

    def __dealloc__(self):
        if self.rkey != NULL:
            rkey_put(<rkey_t *>self.rkey)

    def __repr__(self):
        if self.rkey == NULL:
            return "<Rkey closed>"
        return f"<Rkey length={self.length} {self.flags!r}>"

    def __reduce__(self):
        raise TypeError("an Rkey cannot be pickled or copied: hand over the packed key")

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    @property
    def address(self):
        """Where the range starts, in the owner's address space."""
        return rkey_use(self, "address").pub.info.address

    @property
    def length(self):
        """Bytes of the range."""
        return rkey_use(self, "length").pub.info.length

    @property
    def flags(self):
        """The remote rights that the key gives (MemFlag)."""
        return _flags.MemFlag(rkey_use(self, "flags").pub.info.rights)

    @property
    def key_id(self):
        """The owner's `Memh.key_id`; 0 for a RAW key."""
        return rkey_use(self, "key_id").pub.info.key_id

    @property
    def owner(self):
        """Identity of the process that packed the key: 32 bytes."""
        cdef rkey_t *rkey = rkey_use(self, "owner")
        return PyBytes_FromStringAndSize(<const char *>&rkey.pub.info.owner,
                                         sizeof(ucxm_identity_t))

    def ptr(self, address=None):
        """A local pointer (int) to the remote byte at `address`, default the first (uct_rkey_ptr).

        Raises UnsupportedError where remote memory cannot be mapped, RangeError.
        """
        cdef rkey_t *rkey = rkey_use(self, "ptr")
        cdef md_t *md = rkey.md
        cdef uint64_t at = rkey.pub.info.address
        cdef void *pointer = NULL
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        if address is not None:
            at = as_u64(address, "address", "ptr")
        memset(&error, 0, sizeof(error))
        status = rkey_check(rkey)
        if status == UCXM_OK and at - rkey.pub.info.address > rkey.pub.info.length:
            status = UCXM_ERR_RANGE
        if status == UCXM_OK:
            with nogil:
                status = md_enter(md)
                if status == UCXM_OK:
                    status = md.ops.rkey_ptr(md.priv, &rkey.pub, at, &pointer, &error)
                    md_leave(md)
        if status != UCXM_OK:
            raise rkey_failure(status, "ptr", rkey, &error, at, 0)
        return <uintptr_t>pointer

    def compare(self, other):
        """-1, 0 or 1: a total order of keys by owner, key id and contents (uct_rkey_compare)."""
        cdef rkey_t *one = rkey_use(self, "compare")
        cdef rkey_t *two = rkey_use(<Rkey?>other, "compare")
        cdef int order
        if one == two:
            return 0
        order = memcmp(&one.pub.info.owner, &two.pub.info.owner, sizeof(ucxm_identity_t))
        if order == 0:
            order = memcmp(&one.pub.info.key_id, &two.pub.info.key_id, sizeof(uint64_t))
        if order == 0:
            order = (one.size > two.size) - (one.size < two.size)
        if order == 0:
            order = memcmp(one.key, two.key, one.size)
        if order == 0:  # RAW keys have neither: tell the objects apart
            order = 1 if <uintptr_t>one > <uintptr_t>two else -1
        return (order > 0) - (order < 0)

    def close(self):
        """Give the key back; legal while operations that use it are under way.  Again: nothing."""
        cdef rkey_t *rkey = <rkey_t *>self.rkey
        if rkey != NULL:
            self.rkey = NULL
            rkey_put(rkey)


cdef ep_t *ep_use(Endpoint self, str op) except NULL:
    cdef ep_t *ep = <ep_t *>self.ep
    cdef ucxm_status_t status = ep_check(ep)
    if status != UCXM_OK:
        raise failure(status, op, ep.md, NULL, {})
    return ep


@cython.final
cdef class Endpoint:
    """A connection that moves data: get, put, atomics.

    Hand `address` to the peer, `connect` to the peer's.  An access that the remote device refuses
    moves both ends to ERROR; operations then give FlushedError until both ends have been reset
    and connected again.  Any thread may call any method.
    """

    def __init__(self):
        raise TypeError("Endpoint objects are made by Md.endpoint()")

    def __dealloc__(self):
        cdef ep_t *ep = <ep_t *>self.ep
        cdef ucxm_error_t error
        if ep == NULL or ep.md.epoch != fork_epoch:
            return
        memset(&error, 0, sizeof(error))
        with nogil:
            if ep_shut(ep, &error) == UCXM_OK:
                ep_put(ep)

    def __repr__(self):
        if load32(&(<ep_t *>self.ep).closed):
            return "<Endpoint closed>"
        return f"<Endpoint {md_component((<ep_t *>self.ep).md)} {self.state.name}>"

    def __reduce__(self):
        raise TypeError("an Endpoint cannot be pickled or copied: hand over its address")

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    @property
    def address(self):
        """The bytes for the peer's connect(); new ones after each reset()."""
        cdef ep_t *ep = ep_use(self, "address")
        cdef md_t *md = ep.md
        cdef uint8_t address[UCXM_EP_ADDRESS_MAX]
        cdef size_t length = sizeof(address)
        cdef ucxm_error_t error
        cdef ucxm_status_t status = md_enter(md)
        memset(&error, 0, sizeof(error))
        if status == UCXM_OK:
            status = md.ep_ops.ep_address(md.priv, &ep.pub, address, &length, &error)
            md_leave(md)
        if status != UCXM_OK:
            raise failure(status, "address", md, &error, {})
        return PyBytes_FromStringAndSize(<const char *>address, length)

    def connect(self, peer_address):
        """Connect to the endpoint whose `address` this is.

        Returns at once: what is posted before the peer has connected too waits for it.  Raises
        InvalidParamError (bytes that are no address, connected already), StaleKeyError (an
        address from before the peer's reset), UnreachableError.
        """
        cdef ep_t *ep = ep_use(self, "connect")
        cdef md_t *md = ep.md
        cdef Py_buffer view
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        memset(&error, 0, sizeof(error))
        get_buffer(peer_address, &view, False, "connect")
        with nogil:
            status = md_enter(md)
            if status == UCXM_OK:
                status = md.ep_ops.ep_connect(md.priv, &ep.pub, <const uint8_t *>view.buf,
                                              view.len, &error)
                md_leave(md)
        PyBuffer_Release(&view)
        if status != UCXM_OK:
            raise failure(status, "connect", md, &error, {})

    @property
    def state(self):
        """EpState: IDLE, CONNECTED or ERROR."""
        cdef ep_t *ep = ep_use(self, "state")
        cdef md_t *md = ep.md
        cdef uint32_t state
        cdef ucxm_status_t status = md_enter(md)
        if status != UCXM_OK:
            raise failure(status, "state", md, NULL, {})
        state = md.ep_ops.ep_state(md.priv, &ep.pub)
        md_leave(md)
        return _flags.EpState(state)

    @property
    def on_error(self):
        """Called once, with the endpoint, when the connection has failed; by progress or by the
        call that finds out, in that thread."""
        return self.error_callback

    @on_error.setter
    def on_error(self, callback):
        if callback is not None and not callable(callback):
            raise _errors.InvalidParamError("on_error must be callable or None", op="on_error")
        self.error_callback = callback
        if callback is None:
            self.md.endpoints.pop(id(self), None)
        else:
            self.md.endpoints[id(self)] = self

    def reset(self):
        """Back to IDLE, with a new address; the peer must reset and both must connect again.

        What was under way completes with FlushedError.  Keys stay valid.
        """
        cdef ep_t *ep = ep_use(self, "reset")
        cdef md_t *md = ep.md
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        memset(&error, 0, sizeof(error))
        with nogil:
            status = md_enter(md)
            if status == UCXM_OK:
                status = md.ep_ops.ep_reset(md.priv, &ep.pub, &error)
                md_leave(md)
        if status != UCXM_OK:
            raise failure(status, "reset", md, &error, {})
        if self.error_callback is not None:
            self.md.endpoints[id(self)] = self

    def close(self):
        """Revoke the handles bound to it, flush what is under way, close.  Again: nothing."""
        cdef ep_t *ep = <ep_t *>self.ep
        cdef ucxm_memh_t *memh
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        memset(&error, 0, sizeof(error))
        while ep_check(ep) == UCXM_OK:
            memh = ep_bound_leaf(ep)
            if memh == NULL:
                break
            try:
                revoke_and_wait(memh, False, NULL, "close")
            except _errors.RevokedError:
                pass  # another thread was faster
            finally:
                memh_put(memh)
        with nogil:
            status = ep_shut(ep, &error)
        if status != UCXM_OK:
            raise failure(status, "close", ep.md, &error, {})
        self.md.endpoints.pop(id(self), None)

    def get(self, Rkey rkey, remote_address, into):
        """Read remote memory at `remote_address` into a writable buffer or a Memh.

        Returns when the bytes are there.  Raises RangeError, AccessError, RevokedError before any
        device is asked; RemoteAccessError (the device refused), FlushedError, UnreachableError,
        PeerGoneError, DeviceError, whose context says how many bytes were done.  Releases the
        GIL; a signal's exception leaves the operation under way, with its buffer held.
        """
        transfer_start(self, UCXM_OP_GET, rkey, remote_address, into, 0, 0, "get")._finish(None)

    def put(self, Rkey rkey, remote_address, data):
        """Write a buffer or a Memh to remote memory; returns when it has been placed.

        Errors as for get.  A refused or interrupted put may have written a prefix.
        """
        transfer_start(self, UCXM_OP_PUT, rkey, remote_address, data, 0, 0, "put")._finish(None)

    def fetch_add(self, Rkey rkey, remote_address, value):
        """Add to a 64-bit word, aligned to 8 bytes; returns the word as it was."""
        return self.fetch_add_nb(rkey, remote_address, value)._finish(None)

    def compare_swap(self, Rkey rkey, remote_address, expect, value):
        """Store `value` in a 64-bit word if it holds `expect`; returns the word as it was."""
        return self.compare_swap_nb(rkey, remote_address, expect, value)._finish(None)

    def get_nb(self, Rkey rkey, remote_address, into):
        """Like get, but returns an Operation."""
        return transfer_start(self, UCXM_OP_GET, rkey, remote_address, into, 0, 0, "get")

    def put_nb(self, Rkey rkey, remote_address, data):
        """Like put, but returns an Operation; `data` must not change until it is done."""
        return transfer_start(self, UCXM_OP_PUT, rkey, remote_address, data, 0, 0, "put")

    def fetch_add_nb(self, Rkey rkey, remote_address, value):
        """Like fetch_add, but returns an Operation."""
        return transfer_start(self, UCXM_OP_FETCH_ADD, rkey, remote_address, None,
                              as_u64(value, "value", "fetch_add"), 0, "fetch_add")

    def compare_swap_nb(self, Rkey rkey, remote_address, expect, value):
        """Like compare_swap, but returns an Operation."""
        return transfer_start(self, UCXM_OP_COMPARE_SWAP, rkey, remote_address, None,
                              as_u64(value, "value", "compare_swap"),
                              as_u64(expect, "expect", "compare_swap"), "compare_swap")

cdef int ep_notice_error(Endpoint self) except -1:
    """Tell on_error, once."""
    if id(self) not in self.md.endpoints:
        return 0
    if ep_check(<ep_t *>self.ep) != UCXM_OK or self.state != UCXM_EP_ERROR:
        return 0
    if self.md.endpoints.pop(id(self), None) is None:
        return 0
    try:
        self.error_callback(self)
    except BaseException:
        PyErr_WriteUnraisable(self.error_callback)
    return 0


cdef int transfer_local(transfer_t *transfer, object local, bint writable, str op) except -1:
    """The local side: a handle's whole range, or any buffer."""
    cdef ucxm_memh_own_t *own
    cdef ucxm_memh_t *memh
    cdef ucxm_status_t status
    cdef uint64_t right
    if type(local) is Memh:
        memh = (<Memh>local).memh
        own = ucxm_memh_own(memh)
        right = UCXM_MEM_ACCESS_LOCAL_WRITE if writable else UCXM_MEM_ACCESS_LOCAL_READ
        if md_of(memh) != transfer.md:
            raise _errors.InvalidParamError("a handle of another Md", op=op)
        if not own.grant & right:
            raise memh_failure(UCXM_ERR_ACCESS, op, memh, NULL)
        status = transfer_use(transfer, memh)
        if status != UCXM_OK:
            raise memh_failure(status, op, memh, NULL)
        transfer.op.local = <void *>own.address
        transfer.op.length = own.length
        return 0
    get_buffer(local, &transfer.buffer, writable, op)
    transfer.has_buffer = True
    transfer.op.local = transfer.buffer.buf
    transfer.op.length = transfer.buffer.len
    return 0


@cython.final
cdef class Operation:
    """An operation under way.  Its buffer is held until it is done, also if this object goes."""

    cdef transfer_t *transfer
    cdef Endpoint endpoint
    cdef Rkey rkey
    cdef str op
    cdef uint64_t address
    cdef uint64_t length

    def __init__(self):
        raise TypeError("Operation objects are made by Endpoint.*_nb()")

    def __dealloc__(self):
        cdef transfer_t *transfer = self.transfer
        if transfer == NULL or transfer.md.epoch != fork_epoch:
            return
        if transfer.refs == 1:
            transfer_unuse(transfer)  # never posted, or completed: nobody else is there
        transfer_put(transfer)

    def __repr__(self):
        return f"<Operation {self.op} {self.status.name}>"

    @property
    def done(self):
        """Whether it has completed; makes no progress by itself."""
        return load32(&self.transfer.done) != 0

    @property
    def status(self):
        """Status: INPROGRESS, OK or the error."""
        if not load32(&self.transfer.done):
            return _flags.Status(UCXM_INPROGRESS)
        return _flags.Status(self.transfer.status)

    @property
    def bytes_done(self):
        """Bytes that were moved; final when it is done."""
        return self.transfer.op.bytes_done

    def wait(self, timeout=None):
        """Progress until it is done; returns what the blocking call returns, or raises the same.

        `timeout` in seconds: TimedOutError after it, with the operation still under way.
        """
        return self._finish(None if timeout is None else float(timeout))

    cdef object _finish(self, object timeout=None):
        cdef transfer_t *transfer = self.transfer
        cdef uint64_t until = UINT64_MAX
        if transfer.md.epoch != fork_epoch:
            raise failure(UCXM_ERR_FORKED, self.op, transfer.md, NULL, {})
        if not load32(&transfer.done):
            if timeout is not None:
                until = now_ns() + <uint64_t>(max(0.0, timeout) * 1e9)
            while True:
                with nogil:
                    transfer_wait(transfer, until)
                if load32(&transfer.done):
                    break
                if now_ns() >= until:
                    raise rkey_failure(UCXM_ERR_TIMED_OUT, self.op, rkey_use(self.rkey, self.op), NULL,
                                       self.address, self.length, transfer.op.bytes_done)
                PyErr_CheckSignals()
        if transfer.has_buffer:
            transfer_release_buffer(transfer)
        if transfer.status != UCXM_OK:
            if not load32(&(<ep_t *>self.endpoint.ep).closed):
                ep_notice_error(self.endpoint)
            raise self._failure()
        if transfer.op.kind > UCXM_OP_PUT:
            return transfer.op.result
        return None

    cdef object _failure(self):
        cdef transfer_t *transfer = self.transfer
        context = {"address": self.address, "length": self.length,
                   "bytes_done": transfer.op.bytes_done}
        if self.rkey.rkey != NULL and self.rkey.rkey.info.owner.pid:
            context["pid"] = self.rkey.rkey.info.owner.pid
        return failure(transfer.status, self.op, transfer.md, &transfer.op.error, context)


cdef Operation transfer_start(Endpoint self, ucxm_op_kind_t kind, Rkey rkey_object, object remote_address,
                         object local, uint64_t operand, uint64_t compare, str op):
    """Check, fill and post one operation."""
    cdef ep_t *ep = ep_use(self, op)
    cdef rkey_t *rkey
    cdef uint64_t address = as_u64(remote_address, "remote_address", op)
    cdef transfer_t *transfer
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    cdef uint64_t deadline
    cdef Operation operation
    if rkey_object is None:
        raise _errors.InvalidParamError("rkey must be an Rkey, not None", op=op)
    rkey = rkey_use(rkey_object, op)
    memset(&error, 0, sizeof(error))
    transfer = transfer_alloc(ep.md)
    if transfer == NULL:
        raise _errors.NoMemoryError(op=op)
    operation = Operation.__new__(Operation)
    operation.transfer = transfer
    operation.endpoint = self
    operation.rkey = rkey_object
    operation.op = op
    transfer.op.kind = kind
    transfer.op.remote_address = address
    transfer.op.operand = operand
    transfer.op.compare = compare
    if kind <= UCXM_OP_PUT:
        transfer_local(transfer, local, kind == UCXM_OP_GET, op)
    else:
        transfer.op.length = 8
    operation.length = transfer.op.length
    operation.address = address
    status = transfer_check(ep, rkey, kind, address, transfer.op.length, &error)
    if status == UCXM_OK:
        with nogil:
            status = transfer_post(transfer, ep, rkey, &error)
    while status == UCXM_ERR_NO_RESOURCE:
        with nogil:
            deadline = now_ns() + SLICE_NS
            while status == UCXM_ERR_NO_RESOURCE and now_ns() < deadline:
                if md_progress(ep.md) == 0:
                    sched_yield()
                memset(&error, 0, sizeof(error))
                status = transfer_post(transfer, ep, rkey, &error)
        PyErr_CheckSignals()
    if status != UCXM_OK:
        raise rkey_failure(status, op, rkey, &error, address, transfer.op.length)
    return operation


cdef void transfer_wait(transfer_t *transfer, uint64_t until) noexcept nogil:
    """Progress for a slice of time, or until it is done: first busily, then asleep if possible."""
    cdef md_t *md = transfer.md
    cdef uint64_t start = now_ns()
    cdef uint64_t now = start
    cdef pollfd event
    cdef ucxm_error_t error
    while not load32(&transfer.done):
        if md_progress(md) != 0:
            continue
        now = now_ns()
        if now >= until or now - start > SLICE_NS:
            return
        if now - start < SPIN_NS or not md.attr.flags & UCXM_MD_FLAG_EVENT_FD:
            sched_yield()
            continue
        if md_enter(md) != UCXM_OK:
            return
        memset(&error, 0, sizeof(error))
        event.fd = -1
        event.events = POLLIN
        event.revents = 0
        if md.ops.event_fd(md.priv, &event.fd, &error) == UCXM_OK and (
                md.ops.event_arm(md.priv, &error) == UCXM_OK):
            md_leave(md)
            if not load32(&transfer.done):
                poll(&event, 1, 5)
        else:
            md_leave(md)
