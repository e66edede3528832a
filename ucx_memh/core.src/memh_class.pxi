# SPDX-License-Identifier: BSD-3-Clause
# Memh.

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
    error_clear(&error)
    if wanted > 0xffffffff:
        error_text(&error, "unknown pack flags")
        status = UCXM_ERR_INVALID_PARAM
    if status == UCXM_OK:
        with nogil:
            status = pack_slow(memh, <uint32_t>wanted, &packed, &error)
    if status != UCXM_OK:
        raise memh_failure(status, "mkey_pack", memh, &error)
    return packed


cdef int revoke_descendants(Memh self, str op) except -1:
    cdef md_t *md = md_of(self.memh)
    cdef ucxm_memh_t *leaf
    # Before any lock, which may have been forked locked.
    if books_of(self.memh).epoch != fork_epoch:
        raise memh_failure(UCXM_ERR_FORKED, op, self.memh, NULL)
    while True:
        leaf = revoke_leaf(md, self.memh)
        if leaf == NULL:
            return 0
        try:
            wait_ended(leaf)  # somebody may have begun
            revoke_and_wait(leaf, False, NULL, op)
        except (_errors.RevokedError, _errors.ClosedError) as reason:
            if not revoke_overtaken(leaf, reason.status):
                raise
        finally:
            with nogil:
                memh_put(leaf)


cdef int revoke_object(Memh self, bint closing, object callback, str op) except -1:
    cdef waiter_t *waiter = NULL
    if callback is not None:
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
        cdef ucxm_memh_t *memh = self.memh
        if memh == NULL:
            return
        if self.keeper is not None:  # the array has it, and may be asked for it again
            if books_of(memh).object == <PyObject *>self:
                books_of(memh).object = <PyObject *>self.keeper
            return
        books_of(memh).object = NULL
        if load32(&memh.id.state) == UCXM_MEMH_CLOSED or md_of(memh).attr.fast_reg:
            md_drop(md_of(memh), memh, memh_drop)
        else:
            with nogil:
                md_drop(md_of(memh), memh, memh_drop)

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
        return load32(&books_of(self.memh).live_children)

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
        cdef ucxm_status_t status
        memset(&cells, 0, sizeof(cells))
        with nogil:
            status = md_enter(md)
            if status == UCXM_OK:
                memh_enforcement(md, self.memh, &cells)
                md_leave(md)
        if status != UCXM_OK:
            raise memh_failure(status, "enforcement", self.memh, NULL)
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
        cdef ucxm_ep_t *ep = NULL
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        error_clear(&error)
        if length is not None:
            size = as_u64(length, "length", "derive")
        else:
            size = own.length - start if start <= own.length else 0
        grant = own.grant if flags is None else as_access(flags, "derive")
        if endpoint is not None:
            ep = (<Endpoint?>endpoint).ep
        if md_of(self.memh).attr.python:
            with nogil:
                status = mem_derive(self.memh, start, size, grant, ep, &memh, &error)
        else:
            status = mem_derive(self.memh, start, size, grant, ep, &memh, &error)
        if status != UCXM_OK:
            raise memh_failure(status, "derive", self.memh, &error)
        return memh_wrap(memh, self.md, self, endpoint if endpoint is not None else self.bound,
                         None)

    def derive_many(self, offsets, lengths=None, flags=None, endpoint=None, *, partial=False):
        """Many new handles, as derive makes one; returns a MemhArray.

        `offsets` and `lengths` in bytes: arrays of 64-bit integers (NumPy's, or of any buffer),
        sequences, or one number for all; lengths None: to the end.  All are made or none: the
        error of the first that cannot be is raised, with `context["item"]` and `.statuses` of all.
        With `partial` those that can be made are, and `MemhArray.status` tells.  Runs without the
        GIL; several times cheaper for each handle than derive.
        """
        cdef uint64_t grant = ucxm_memh_own(self.memh).grant
        if flags is not None:
            grant = as_access(flags, "derive_many")
        return derive_many(
            self, numbers_of(offsets, "offsets", "derive_many"),
            None if lengths is None else numbers_of(lengths, "lengths", "derive_many"), grant,
            <Endpoint?>endpoint if endpoint is not None else None, partial)

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
        if callback is not None and not callable(callback):
            raise _errors.InvalidParamError("callback must be callable", op="invalidate")
        if cascade and self.memh.id.parent != NULL:  # a base is refused, with nothing changed
            revoke_descendants(self, "invalidate")
        revoke_object(self, False, callback, "invalidate")

    def dereg(self, invalidate=False, cascade=False):
        """Close the handle; the last act of a base is to deregister the memory.

        A derived handle's keys are destroyed first.  A second dereg does nothing.  `invalidate`
        asks for the promise that no key of this handle works afterwards and raises
        UnsupportedError, with the handle as before, where the domain cannot keep that.  `cascade`
        first closes what was derived from it, leaves first.  Raises BusyError (live derived
        handles, or transfers that use the memory locally), DeviceError.  What was derived and let
        go of is waited for, with `cascade` whatever is being revoked.
        """
        cdef ucxm_error_t error
        cdef ucxm_status_t status = UCXM_OK
        error_clear(&error)
        if invalidate:
            status = dereg_check(self.memh, &error)
        if status != UCXM_OK:
            raise memh_failure(status, "dereg", self.memh, &error)
        if cascade:
            revoke_descendants(self, "dereg")
        revoke_object(self, True, None, "dereg")

    def revoke_notice(self):
        """Bytes that tell a peer that this handle's key is dead (see `Md.rkey_revoke`).

        The peer's library then refuses by itself and does not lose its connection over a refused
        access.  Raises InvalidParamError while the handle is live.
        """
        cdef uint8_t notice[UCXM_KEY_HEADER_SIZE]
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        error_clear(&error)
        status = revoke_notice(self.memh, notice, &error)
        if status != UCXM_OK:
            raise memh_failure(status, "revoke_notice", self.memh, &error)
        return PyBytes_FromStringAndSize(<const char *>notice, UCXM_KEY_HEADER_SIZE)

    def explain(self):
        """A few lines for a person on how this handle's keys are made and kept."""
        return self.md.explain(self)
