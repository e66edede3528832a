# SPDX-License-Identifier: BSD-3-Clause
# Endpoint and Operation.

cdef ep_t *ep_use(Endpoint self, str op) except NULL:
    cdef ep_t *ep = <ep_t *>self.ep
    cdef ucxm_status_t status = ep_check(ep)
    if status != UCXM_OK:
        raise failure(status, op, ep.md, NULL, {})
    return ep


cdef int ep_notice_error(Endpoint self) except -1:
    """Tell on_error, once."""
    if id(self) not in self.md.endpoints:
        return 0
    if ep_check(<ep_t *>self.ep) != UCXM_OK or self.state != UCXM_EP_ERROR:
        return 0
    if self.md.endpoints.pop(id(self), None) is None:
        return 0
    call_unraisable(self.error_callback, self)
    return 0


cdef int transfer_local(transfer_t *transfer, object local, bint writable, str op) except -1:
    """The local side: a handle's whole range, any buffer, or a device's array."""
    cdef ucxm_memh_own_t *own
    cdef ucxm_memh_t *memh
    cdef ucxm_status_t status
    cdef md_t *md = transfer.md
    cdef uint64_t right
    cdef uint32_t mem_type
    if type(local) is Memh:
        memh = (<Memh>local).memh
        own = ucxm_memh_own(memh)
        right = UCXM_MEM_ACCESS_LOCAL_WRITE if writable else UCXM_MEM_ACCESS_LOCAL_READ
        if md_of(memh) != md:
            raise _errors.InvalidParamError("a handle of another Md", op=op)
        if not own.grant & right:
            raise memh_failure(UCXM_ERR_ACCESS, op, memh, NULL)
        status = transfer_use(transfer, memh)
        if status != UCXM_OK:
            raise memh_failure(status, op, memh, NULL)
        transfer.op.local = <void *>own.address
        transfer.op.length = own.length
        return 0
    get_memory(local, &transfer.buffer, &mem_type, &transfer.op.local_stream, writable, op)
    transfer.has_buffer = True
    # A domain that needs handles would bounce it by the processor, and Python would look at it.
    if mem_type != UCXM_MEM_TYPE_HOST and (
            not md.attr.mem_types >> mem_type & 1 or md.attr.python or md.ops.abi < 3 or
            md.attr.flags & UCXM_MD_FLAG_NEED_MEMH):
        raise _errors.UnsupportedError(
            "this is device memory, and here a transfer takes that of a Memh only", op=op,
            component=md_component(md))
    transfer.op.local = transfer.buffer.buf
    transfer.op.length = transfer.buffer.len
    return 0


cdef void transfer_forget(void *thing) noexcept nogil:
    cdef transfer_t *transfer = <transfer_t *>thing
    if load32(&transfer.refs) == 1:
        transfer_unuse(transfer)  # never posted, or completed: nobody else is there
    transfer_put(transfer)


cdef void ep_forget(void *ep) noexcept nogil:
    ep_drop(<ep_t *>ep)


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
        cdef md_t *md = NULL if transfer == NULL else transfer.md
        if md == NULL or md.epoch != fork_epoch:
            return
        md_drop(md, transfer, transfer_forget)
        md_put(md)

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
            if timeout is not None and timeout < 1e9:  # seconds; longer is for ever
                until = now_ns() + <uint64_t>(max(0.0, timeout) * 1e9)
            while True:
                with nogil:
                    transfer_wait(transfer, until)
                if load32(&transfer.done):
                    break
                if now_ns() >= until:
                    raise operation_failure(self, UCXM_ERR_TIMED_OUT)
                PyErr_CheckSignals()
        if transfer.has_buffer:
            transfer_release_buffer(transfer)
        if transfer.status != UCXM_OK:
            if not load32(&(<ep_t *>self.endpoint.ep).closed):
                ep_notice_error(self.endpoint)
            raise operation_failure(self, transfer.status)
        if transfer.op.kind > UCXM_OP_PUT:
            return transfer.op.result
        return None


cdef object operation_failure(Operation self, ucxm_status_t status):
    cdef transfer_t *transfer = self.transfer
    cdef dict context = {"address": self.address, "length": self.length,
                         "bytes_done": transfer.op.bytes_done}
    if self.rkey.rkey != NULL and self.rkey.rkey.info.owner.pid:
        context["pid"] = self.rkey.rkey.info.owner.pid
    return failure(status, self.op, transfer.md, &transfer.op.error, context)


cdef int transfer_fill(transfer_t *transfer, ep_t *ep, rkey_t *rkey, ucxm_op_kind_t kind,
                       uint64_t address, object local, str op) except -1:
    """Local and remote side, checked."""
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    rkey_get(rkey)  # the user may close it in another thread meanwhile
    transfer.op.rkey = &rkey.pub
    transfer.op.kind = kind
    transfer.op.remote_address = address
    if kind <= UCXM_OP_PUT:
        transfer_local(transfer, local, kind == UCXM_OP_GET, op)
    else:
        transfer.op.length = 8
    error_clear(&error)
    status = transfer_check(ep, rkey, kind, address, transfer.op.length, &error)
    if status != UCXM_OK:
        raise rkey_failure(status, op, rkey, &error, address, transfer.op.length)
    return 0


cdef int transfer_hand_over(transfer_t *transfer, ep_t *ep, str op) except -1:
    """Post it; while the device has no room, progress, and look at signals."""
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    cdef uint64_t deadline
    error_clear(&error)
    with nogil:
        status = transfer_post(transfer, ep, &error)
    while status == UCXM_ERR_NO_RESOURCE:
        with nogil:
            deadline = now_ns() + SLICE_NS
            while status == UCXM_ERR_NO_RESOURCE and now_ns() < deadline:
                if md_progress(ep.md) == 0:
                    sched_yield()
                error_clear(&error)
                status = transfer_post(transfer, ep, &error)
        PyErr_CheckSignals()
    if status != UCXM_OK:
        raise rkey_failure(status, op, <rkey_t *>transfer.op.rkey, &error,
                           transfer.op.remote_address, transfer.op.length)
    return 0


cdef transfer_t *transfer_start(Endpoint self, ucxm_op_kind_t kind, Rkey rkey,
                                object remote_address, object local, uint64_t operand,
                                uint64_t compare, str op) except NULL:
    """Check, fill and post one operation."""
    cdef ep_t *ep = ep_use(self, op)
    cdef uint64_t address = as_u64(remote_address, "remote_address", op)
    cdef transfer_t *transfer
    if rkey is None:
        raise _errors.InvalidParamError("rkey must be an Rkey, not None", op=op)
    transfer = transfer_alloc(ep.md)
    if transfer == NULL:
        raise _errors.NoMemoryError(op=op)
    transfer.op.operand = operand
    transfer.op.compare = compare
    try:
        transfer_fill(transfer, ep, rkey_use(rkey, op), kind, address, local, op)
        transfer_hand_over(transfer, ep, op)
    except BaseException:
        md_drop(ep.md, transfer, transfer_forget)
        raise
    return transfer


cdef Operation operation_wrap(Endpoint self, Rkey rkey, transfer_t *transfer, str op):
    """The object for what may still be under way; it takes the user's reference."""
    cdef Operation operation
    operation = Operation.__new__(Operation)
    operation.transfer = transfer
    md_get(transfer.md)  # the garbage collection may take the endpoint away first
    operation.endpoint = self
    operation.rkey = rkey
    operation.op = op
    operation.address = transfer.op.remote_address
    operation.length = transfer.op.length
    return operation


cdef object transfer_run(Endpoint self, ucxm_op_kind_t kind, Rkey rkey, object remote_address,
                         object local, uint64_t operand, uint64_t compare, str op):
    """Until it is done; most are when they have been posted, and need no object."""
    cdef transfer_t *transfer = transfer_start(self, kind, rkey, remote_address, local, operand,
                                               compare, op)
    if not load32(&transfer.done) or transfer.status != UCXM_OK or transfer.md.attr.python:
        return operation_wrap(self, rkey, transfer, op)._finish(None)
    old = transfer.op.result if kind > UCXM_OP_PUT else None
    if transfer.has_buffer:
        transfer.has_buffer = False
        PyBuffer_Release(&transfer.buffer)
    transfer_forget(transfer)
    return old


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
        if ep == NULL or ep.md.epoch != fork_epoch:
            return
        with nogil:
            md_drop(ep.md, ep, ep_forget)

    def __repr__(self):
        cdef ep_t *ep = <ep_t *>self.ep
        cdef uint32_t state = 0
        cdef ucxm_status_t status
        with nogil:
            status = ep_query(ep, &state)
        if status != UCXM_OK:
            return f"<Endpoint {'closed' if status == UCXM_ERR_CLOSED else 'forked'}>"
        return f"<Endpoint {md_component(ep.md)} {_flags.EpState(state).name}>"

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
        cdef uint8_t address[UCXM_ADDRESS_MAX]
        cdef size_t length = 0
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        error_clear(&error)
        with nogil:
            status = ep_address(ep, address, &length, &error)
        if status != UCXM_OK:
            raise failure(status, "address", ep.md, &error, {})
        return PyBytes_FromStringAndSize(<const char *>address, length)

    def connect(self, peer_address):
        """Connect to the endpoint whose `address` this is.

        Returns at once: what is posted before the peer has connected too waits for it.  Raises
        InvalidParamError (bytes that are no address, another component's, connected already),
        StaleKeyError (an address from before the peer's reset), UnreachableError.  From then on
        keys of another process than the address's owner are refused with StaleKeyError.
        """
        cdef ep_t *ep = ep_use(self, "connect")
        cdef Py_buffer view
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        error_clear(&error)
        get_buffer(peer_address, &view, False, "connect")
        with nogil:
            status = ep_connect(ep, <const uint8_t *>view.buf, view.len, &error)
        PyBuffer_Release(&view)
        if status != UCXM_OK:
            raise failure(status, "connect", ep.md, &error, {})

    @property
    def state(self):
        """EpState: IDLE, CONNECTED or ERROR."""
        cdef ep_t *ep = ep_use(self, "state")
        cdef md_t *md = ep.md
        cdef uint32_t state = 0
        cdef ucxm_status_t status
        with nogil:
            status = ep_query(ep, &state)
        if status != UCXM_OK:
            raise failure(status, "state", md, NULL, {})
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
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        error_clear(&error)
        with nogil:
            status = ep_reset(ep, &error)
        if status != UCXM_OK:
            raise failure(status, "reset", ep.md, &error, {})
        if self.error_callback is not None:
            self.md.endpoints[id(self)] = self

    def close(self):
        """Revoke the handles bound to it, flush what is under way, close.  Again: nothing."""
        cdef ep_t *ep = <ep_t *>self.ep
        cdef ucxm_memh_t *memh
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        error_clear(&error)
        while ep_check(ep) == UCXM_OK:
            memh = ep_bound_leaf(ep)
            if memh == NULL:
                break
            try:
                revoke_and_wait(memh, False, NULL, "close")
            except (_errors.RevokedError, _errors.ClosedError) as reason:
                if not revoke_overtaken(memh, reason.status):
                    raise
            finally:
                with nogil:
                    memh_put(memh)
        with nogil:
            status = ep_shut(ep, &error)
        if status != UCXM_OK:
            raise failure(status, "close", ep.md, &error, {})
        self.md.endpoints.pop(id(self), None)

    def get(self, Rkey rkey, remote_address, into):
        """Read remote memory at `remote_address` into a writable buffer or a Memh.

        Where the domain can, also into an array of a device's (see Md.mem_reg); work on it that is
        under way is done first.

        Returns when the bytes are there.  Raises RangeError, AccessError, RevokedError before any
        device is asked; RemoteAccessError (the device refused), FlushedError, UnreachableError,
        PeerGoneError, DeviceError, whose context says how many bytes were done.  Releases the
        GIL; a signal's exception leaves the operation under way, with its buffer held.
        """
        transfer_run(self, UCXM_OP_GET, rkey, remote_address, into, 0, 0, "get")

    def put(self, Rkey rkey, remote_address, data):
        """Write a buffer or a Memh to remote memory; returns when it has been placed.

        Errors as for get.  A refused or interrupted put may have written a prefix.
        """
        transfer_run(self, UCXM_OP_PUT, rkey, remote_address, data, 0, 0, "put")

    def fetch_add(self, Rkey rkey, remote_address, value):
        """Add to a 64-bit word, aligned to 8 bytes; returns the word as it was."""
        return transfer_run(self, UCXM_OP_FETCH_ADD, rkey, remote_address, None,
                            as_u64(value, "value", "fetch_add"), 0, "fetch_add")

    def compare_swap(self, Rkey rkey, remote_address, expect, value):
        """Store `value` in a 64-bit word if it holds `expect`; returns the word as it was."""
        return transfer_run(self, UCXM_OP_COMPARE_SWAP, rkey, remote_address, None,
                            as_u64(value, "value", "compare_swap"),
                            as_u64(expect, "expect", "compare_swap"), "compare_swap")

    def get_nb(self, Rkey rkey, remote_address, into):
        """Like get, but returns an Operation."""
        return operation_wrap(self, rkey, transfer_start(
            self, UCXM_OP_GET, rkey, remote_address, into, 0, 0, "get"), "get")

    def put_nb(self, Rkey rkey, remote_address, data):
        """Like put, but returns an Operation; `data` must not change until it is done."""
        return operation_wrap(self, rkey, transfer_start(
            self, UCXM_OP_PUT, rkey, remote_address, data, 0, 0, "put"), "put")

    def fetch_add_nb(self, Rkey rkey, remote_address, value):
        """Like fetch_add, but returns an Operation."""
        return operation_wrap(self, rkey, transfer_start(
            self, UCXM_OP_FETCH_ADD, rkey, remote_address, None,
            as_u64(value, "value", "fetch_add"), 0, "fetch_add"), "fetch_add")

    def compare_swap_nb(self, Rkey rkey, remote_address, expect, value):
        """Like compare_swap, but returns an Operation."""
        return operation_wrap(self, rkey, transfer_start(
            self, UCXM_OP_COMPARE_SWAP, rkey, remote_address, None,
            as_u64(value, "value", "compare_swap"), as_u64(expect, "expect", "compare_swap"),
            "compare_swap"), "compare_swap")
