# SPDX-License-Identifier: BSD-3-Clause
# Md, and how a backend makes one.

cdef str declared(md_t *md, ucxm_enforcement_t *cells):
    """What there is to say where a backend explains nothing."""
    name = md.attr.md_name.decode("utf-8", "replace")
    lines = [f"{md_component(md)}/{name} says no more than what it declares"]
    table = enforcement_table(cells)
    for promise in ("rights", "range", "revoke"):
        row = getattr(table, promise)
        lines.append(f"{promise}: get {row.get.name}, put {row.put.name}, "
                     f"atomic {row.atomic.name}")
    return "\n".join(lines) + "\n"


cdef str explain_handle(md_t *md, ucxm_memh_t *memh):
    """The backend explains a live handle, whose keys stay as they are meanwhile."""
    cdef char text[2048]
    cdef ucxm_enforcement_t cells
    cdef uint32_t values[UCXM_SLOTS]
    cdef uint32_t state = UCXM_MEMH_CLOSED
    cdef uint32_t i
    cdef uint32_t left = 0
    text[0] = 0
    with nogil:
        if md_enter(md) == UCXM_OK:
            pthread_mutex_lock(&md.key_lock)
            state = load32(&memh.id.state)
            if state == UCXM_MEMH_LIVE:
                md.ops.explain(md.priv, memh, text, sizeof(text))
                memh_enforcement(md, memh, &cells)
            for i in range(UCXM_SLOTS):
                if ucxm_memh_own(memh).slot[i].live:
                    values[left] = ucxm_memh_own(memh).slot[i].value
                    left += 1
            pthread_mutex_unlock(&md.key_lock)
            md_leave(md)
    if state == UCXM_MEMH_LIVE:
        return text.decode("utf-8", "replace") or declared(md, &cells)
    if state != UCXM_MEMH_REVOKING:
        return "it has no key any more, and gets none\n"
    lines = ["its keys are being destroyed, or one resisted: then try again"]
    for i in range(left):
        lines.append(f"key {values[i]:#x} is not known to be dead")
    return "\n".join(lines) + "\n"


cdef md_t *md_use(Md self, str op) except NULL:
    """The C object, if it can be used here and now."""
    cdef md_t *md = <md_t *>self.md
    if md == NULL or load32(&md.state) == MD_CLOSED:
        raise _errors.ClosedError("the Md is closed", op=op)
    if md.epoch != fork_epoch:
        raise failure(UCXM_ERR_FORKED, op, md, NULL, {})
    if load_ptr(<void **>&md.dropped) != NULL:
        with nogil:
            md_tidy(md)
    return md


cdef object memh_object(ucxm_memh_t *memh):
    """Its object, made if an array has it; None: C code's."""
    cdef PyObject *holder = books_of(memh).object
    if holder == NULL:
        return None
    if is_dying(holder):  # if it came from an array, that makes another one
        keeper = keeper_of(holder)
        return array_item(<MemhArray>keeper, memh) if keeper is not None else None
    if type(<object>holder) is MemhArray:
        return array_item(<MemhArray>holder, memh)
    return <Memh>holder


cdef object ZERO = 0  # CPython has one of it: a default argument is known by being it


cdef int reg_check_or_raise(md_t *md, reg_t *reg, bint writable, str op) except -1:
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    error_clear(&error)
    status = reg_check(md, reg, writable, &error)
    if status != UCXM_OK:
        raise failure(status, op, md, &error,
                      {"address": reg.pub.address, "length": reg.pub.length})
    return 0


cdef Memh base_wrap(Md self, reg_t *reg, str op):
    """Register what has been prepared, and its base."""
    cdef md_t *md = reg.md
    cdef ucxm_memh_t *memh = NULL
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    cdef uint64_t address = reg.pub.address
    cdef uint64_t length = reg.pub.length
    error_clear(&error)
    if md.attr.fast_reg and reg.pub.mem_type != UCXM_MEM_TYPE_UNKNOWN:  # to look is a system call
        status = mem_reg(md, reg, &memh, &error)
    else:
        with nogil:
            status = mem_reg(md, reg, &memh, &error)
    if status != UCXM_OK:
        raise failure(status, op, md, &error, {"address": address, "length": length})
    return memh_wrap(memh, self, None, None, None)


cdef int name_fill(char *place, size_t room, str name, str what) except -1:
    cdef bytes data = name.encode()
    if not 0 < len(data) < room or 0 in data:
        raise _errors.InvalidParamError(f"{what} has 1 to {room - 1} bytes, not {name!r}",
                                        op="bind")
    memcpy(place, <const char *>data, len(data))
    return 0


cdef int md_attr_init(ucxm_md_attr_t *attr, str component, str md_name,
                      uint64_t flags) except -1:
    memset(attr, 0, sizeof(attr[0]))
    attr.struct_size = sizeof(attr[0])
    name_fill(attr.component, sizeof(attr.component), component, "component")
    name_fill(attr.md_name, sizeof(attr.md_name), md_name, "md_name")
    attr.flags = flags
    attr.mem_types = 1 << UCXM_MEM_TYPE_HOST
    attr.reg_alignment = 1
    return 0


cdef Md md_bind(const ucxm_md_ops_t *ops, const ucxm_ep_ops_t *ep_ops,
                const ucxm_md_attr_t *attr, void *priv, object keep):
    cdef md_t *md
    cdef Md self
    cdef str component = (<char *>attr.component).decode("utf-8", "replace")
    if ops.abi < 1 or ops.abi > UCXM_BACKEND_ABI:
        raise _errors.InvalidParamError(
            f"backend was built for ABI {ops.abi}, this library takes 1 to {UCXM_BACKEND_ABI}",
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
        memcpy(&md.ep_ops, ep_ops, min(ep_ops.struct_size, sizeof(md.ep_ops)))
    memcpy(&md.attr, attr, min(attr.struct_size, sizeof(md.attr)))
    md.attr.component[sizeof(md.attr.component) - 1] = 0
    md.attr.md_name[sizeof(md.attr.md_name) - 1] = 0
    if md.attr.reg_alignment == 0:
        md.attr.reg_alignment = 1
    # Behind the end of its table.
    if ops.abi < 2:
        md.ops.key_flush = NULL
    if ops.abi < 4:
        md.ops.mem_query = NULL
    ops_fill(&md.ops)
    try:
        bind_check(component, &md.ops, &md.ep_ops if ep_ops != NULL else NULL, &md.attr)
    except BaseException:
        mem_free(md)
        raise
    md.epoch = fork_epoch
    md.refs = 1
    md.component_id = fnv1a(md.attr.component)
    md.layout = memh_size(md.ops.tail_inherit_size, md.ops.tail_own_size)
    md.quarantine.size = md.attr.quarantine
    md.next_key_id = int.from_bytes(_os.urandom(7), "little") + 1
    pthread_mutex_init(&md.key_lock, NULL)
    md.priv = priv
    self = Md.__new__(Md)
    self.md = <ucxm_md_t *>md
    self.keep = keep
    self.endpoints = {}
    return self


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
        error_clear(&error)
        with nogil:
            # What resists now, or takes too long, stays, whole, until the process ends.
            status = md_close(md, True, now_ns() + DEALLOC_NS, &error)
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
            python=bool(attr.python),
        )

    @property
    def closed(self):
        """Whether close() has been done."""
        return self.md == NULL or load32(&(<md_t *>self.md).state) == MD_CLOSED

    def mem_reg(self, buffer=None, flags=None, *, address=None, length=None, owner=None,
                mem_type=None, dmabuf_fd=None, dmabuf_offset=0):
        """Register memory and return its base handle (uct_md_mem_reg_v2).

        `buffer` is any C-contiguous buffer; it stays exported until dereg, so a bytearray cannot
        be resized under the registration.  Or it is an array of a device's, by
        `__cuda_array_interface__` or DLPack, which is held until then; work on it that is under
        way is not waited for, as registering reads nothing.  Instead of it, `address` and
        `length` in bytes name memory, which `owner` (any object, held) keeps alive.  Its
        `mem_type` is believed.  Without it a domain that would not notice otherwise (cma) looks
        at one byte at both ends, which is a system call: what cannot be read there, as a GPU's
        memory or a PROT_NONE map, is refused.
        With `dmabuf_fd` and `dmabuf_offset` the domain gets the memory by that descriptor.

        `flags` are the rights: None means ACCESS_ALL if the memory is writable, else LOCAL_READ |
        REMOTE_GET; no access bit at all means local rights only.  With DERIVED_ONLY the region's
        own key gets no remote right and `flags` is what derive may give.  Length 0 is legal.

        Raises AccessError (more than the buffer allows), InvalidParamError, UnsupportedError,
        NoMemoryError (also RLIMIT_MEMLOCK), DeviceError (INVALID_ADDR: nothing that could be read
        is there).  Releases the GIL where the domain pins or looks at memory.
        """
        cdef md_t *md = md_use(self, "mem_reg")
        cdef reg_t *reg
        cdef uint64_t number
        cdef uint64_t asked = 0
        cdef bint writable = True

        if flags is not None:
            asked = as_access(flags, "mem_reg")
        if (buffer is None) == (address is None):
            raise _errors.InvalidParamError("give a buffer, or address and length", op="mem_reg",
                                            component=md_component(md))
        reg = reg_alloc(md, NULL)
        if reg == NULL:
            raise _errors.NoMemoryError(op="mem_reg", component=md_component(md))
        try:
            if buffer is not None:
                if length is not None:
                    raise _errors.InvalidParamError("length goes with address", op="mem_reg",
                                                    component=md_component(md))
                get_memory(buffer, &reg.buffer, &reg.pub.mem_type, NULL, False, "mem_reg")
                reg.lent |= LENT_BUFFER
                reg.pub.address = <uint64_t>reg.buffer.buf
                reg.pub.length = <uint64_t>reg.buffer.len
                writable = not reg.buffer.readonly
            else:
                reg.pub.address = as_u64(address, "address", "mem_reg")
                reg.pub.length = as_u64(length, "length", "mem_reg")
                reg.pub.mem_type = UCXM_MEM_TYPE_UNKNOWN
            reg_lend_owner(reg, owner)
            reg_rights(reg, asked, flags is None, writable)
            if mem_type is not None:
                number = as_mem_type(mem_type, "mem_reg")
                if buffer is not None and reg.pub.mem_type not in (UCXM_MEM_TYPE_HOST, number):
                    raise _errors.InvalidParamError(
                        f"mem_type is {number}, and the memory's own {reg.pub.mem_type}",
                        op="mem_reg", component=md_component(md))
                reg.pub.mem_type = <uint32_t>number
            if dmabuf_offset is not ZERO:
                reg.pub.dmabuf_offset = as_u64(dmabuf_offset, "dmabuf_offset", "mem_reg")
            if dmabuf_fd is not None:
                number = as_u64(dmabuf_fd, "dmabuf_fd", "mem_reg")
                if number > 0x7fffffff:
                    raise _errors.InvalidParamError("dmabuf_fd is no descriptor", op="mem_reg",
                                                    component=md_component(md))
                reg.pub.dmabuf_fd = <int32_t>number
            elif reg.pub.dmabuf_offset != 0:
                raise _errors.InvalidParamError("dmabuf_offset goes with dmabuf_fd", op="mem_reg",
                                                component=md_component(md))
            reg_check_or_raise(md, reg, writable, "mem_reg")
        except BaseException:
            reg_free(reg)
            raise
        return base_wrap(self, reg, "mem_reg")

    def mem_adopt(self, mr, owner=None, flags=None):
        """A base on a native registration that somebody else made (the backend says which kind).

        `mr` is its address; `owner` (any object) keeps it alive and is held.  It must be of the
        domain's own protection domain (see the backend's `context` and `pd`) and is never freed
        here.  `flags` say what it was registered with, which nobody can ask it: None, and
        DERIVED_ONLY alone, mean ACCESS_RMA.  What the backend can try at once it tries; a right
        that is missing all the same is refused by the device, at the first use.

        Raises AccessError (it was registered with less than `flags`), UnsupportedError (the domain
        adopts nothing, or nothing can be derived from it and `flags` has DERIVED_ONLY),
        InvalidParamError (another domain's), DeviceError.  Releases the GIL.
        """
        cdef md_t *md = md_use(self, "mem_adopt")
        cdef uint64_t native = as_u64(mr, "mr", "mem_adopt")
        cdef uint64_t asked = 0
        cdef reg_t *reg
        if flags is not None:
            asked = as_access(flags, "mem_adopt")
        if native == 0:
            raise _errors.InvalidParamError("mr is NULL", op="mem_adopt",
                                            component=md_component(md))
        if not md.attr.flags & UCXM_MD_FLAG_REG or not md.attr.flags & UCXM_MD_FLAG_NEED_MEMH:
            raise _errors.UnsupportedError("this domain has no native registrations to adopt",
                                           op="mem_adopt", component=md_component(md))
        reg = reg_alloc(md, NULL)
        if reg == NULL:
            raise _errors.NoMemoryError(op="mem_adopt", component=md_component(md))
        reg.pub.adopt = <void *>native
        reg_rights(reg, asked, flags is None, True)
        try:
            reg_check_or_raise(md, reg, True, "mem_adopt")
        except BaseException:
            reg_free(reg)
            raise
        reg_lend_owner(reg, owner)
        return base_wrap(self, reg, "mem_adopt")

    def mem_reg_many(self, buffers=None, flags=None, *, addresses=None, lengths=None, owner=None,
                     mem_type=None, partial=False):
        """Register many regions; returns a MemhArray of their bases.

        `buffers` is any iterable of what mem_reg takes as one; or `addresses` and `lengths` in
        bytes are arrays of 64-bit integers (NumPy's, or of any buffer), sequences, or one number
        for all, of memory of `mem_type` that `owner` keeps alive.  `flags` and `mem_type` as for
        mem_reg, for all of them.  All are registered or none: the error of the first that cannot
        be is raised, with `context["item"]` and `.statuses` of all.  With `partial` those that can
        be are, and `MemhArray.status` tells.  Registers without the GIL.
        """
        cdef md_t *md = md_use(self, "mem_reg_many")
        cdef Numbers starts = None
        cdef Numbers sizes = None
        cdef uint64_t asked = 0
        cdef uint32_t kind = UCXM_MEM_TYPE_UNKNOWN
        if flags is not None:
            asked = as_access(flags, "mem_reg_many")
        if mem_type is not None:
            if addresses is None:
                raise _errors.InvalidParamError("mem_type goes with addresses", op="mem_reg_many",
                                                component=md_component(md))
            kind = <uint32_t>as_mem_type(mem_type, "mem_reg_many")
        if (buffers is None) == (addresses is None) or (addresses is None) != (lengths is None):
            raise _errors.InvalidParamError("give buffers, or addresses and lengths",
                                            op="mem_reg_many", component=md_component(md))
        if buffers is None:
            starts = numbers_of(addresses, "addresses", "mem_reg_many")
            sizes = numbers_of(lengths, "lengths", "mem_reg_many")
            if starts.items == NULL or sizes.items != NULL and starts.count != sizes.count:
                raise _errors.InvalidParamError(
                    "addresses must be an array, and lengths as long or one number",
                    op="mem_reg_many", component=md_component(md))
        return reg_many(self, md, None if buffers is None else list(buffers), starts, sizes, kind,
                        owner, asked, flags is None, partial)

    def mkey_pack_many(self, memhs, buffer=None, flags=0, stride=None, partial=False):
        """Pack the keys of many handles into one buffer; returns PackedKeys.

        `memhs` is a MemhArray, or an iterable of Memh objects, of this Md.  Key i goes to
        `i * stride` bytes behind the start of `buffer` (a new bytearray by default); `stride`
        defaults to the longest key there is (`attr.key_size_max`).  `flags` as for
        Memh.mkey_pack.  Every item is tried; then the error of the first that failed is raised,
        with `context["item"]` and `.statuses`, unless `partial`.  Runs without the GIL.
        """
        cdef md_t *md = md_use(self, "mkey_pack_many")
        cdef uint64_t wanted = as_u64(flags, "flags", "mkey_pack_many")
        cdef uint64_t step
        if wanted > 0xffffffff:
            raise _errors.InvalidParamError("unknown pack flags", op="mkey_pack_many",
                                            component=md_component(md))
        if stride is not None:
            step = as_u64(stride, "stride", "mkey_pack_many")
        elif wanted & UCXM_PACK_RAW:
            step = max(md.attr.rkey_raw_size, <size_t>1)
        else:
            step = UCXM_KEY_HEADER_SIZE + md.attr.rkey_packed_size
        return pack_many(self, handles_of(self, memhs, "mkey_pack_many"), buffer, wanted, step,
                         partial)

    def invalidate_many(self, memhs, partial=False):
        """Memh.invalidate of many; returns when the keys of all are gone, with their statuses.

        `memhs` is a MemhArray, or an iterable of Memh objects, of this Md.  Every item is tried,
        in order, and the device gets the revocations together where it can take them so.  Then
        the error of the first that failed is raised, with `context["item"]` and `.statuses`;
        with `partial` the statuses (a memoryview of int32) are only returned.  Runs without the
        GIL.
        """
        cdef md_t *md = md_use(self, "invalidate_many")
        cdef Handles handles = handles_of(self, memhs, "invalidate_many")
        many_revoke(md, handles.memhs, handles.count, False, handles.each)
        return many_result(handles.each, handles.count, partial, "invalidate_many", md)

    def dereg_many(self, memhs, partial=False):
        """Memh.dereg of many, as invalidate_many; what is closed already is OK."""
        cdef md_t *md = md_use(self, "dereg_many")
        cdef Handles handles = handles_of(self, memhs, "dereg_many")
        many_revoke(md, handles.memhs, handles.count, True, handles.each)
        return many_result(handles.each, handles.count, partial, "dereg_many", md)

    def find(self, address, length=1, derived=None):
        """The live handles that cover `length` bytes at `address`: a list of Memh objects.

        Bases first, then derived handles, each kind by address; ranges may overlap.  `derived`
        False: bases only; True: derived handles only.  Takes time with the logarithm of the
        number of handles, and with the number found; the first call also looks at every handle
        once.  Handles that C code holds alone are not found.
        """
        cdef md_t *md = md_use(self, "find")
        cdef uint64_t start = as_u64(address, "address", "find")
        cdef uint64_t size = as_u64(length, "length", "find")
        cdef uint32_t kinds = 3 if derived is None else 2 if derived else 1
        cdef ucxm_memh_t *few[16]
        cdef ucxm_memh_t **found = few
        cdef size_t room = 16
        cdef size_t count, i
        # With the GIL: objects come and go under it.
        count = md_find(md, start, size, kinds, found, room, True)
        while count > room:
            for i in range(room):
                memh_put(found[i])
            if found != few:
                free(found)
            room = count + count // 8
            found = <ucxm_memh_t **>malloc(room * sizeof(ucxm_memh_t *))
            if found == NULL:
                raise _errors.NoMemoryError(op="find", component=md_component(md))
            count = md_find(md, start, size, kinds, found, room, True)
        try:
            return [memh for memh in [memh_object(found[i]) for i in range(count)]
                    if memh is not None]
        finally:
            for i in range(count):
                memh_put(found[i])
            if found != few:
                free(found)

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
        error_clear(&error)
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
        error_clear(&error)
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
        error_clear(&error)
        get_buffer(notice, &view, False, "rkey_revoke")
        status = rkey_revoke(md, <const uint8_t *>view.buf, view.len, &count, &error)
        PyBuffer_Release(&view)
        if status != UCXM_OK:
            raise failure(status, "rkey_revoke", md, &error, {})
        return count

    def endpoint(self):
        """A new Endpoint, not connected yet.  UnsupportedError: there is no data path."""
        cdef md_t *md = md_use(self, "endpoint")
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef ep_t *ep = NULL
        cdef Endpoint endpoint
        error_clear(&error)
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
        error_clear(&error)
        with nogil:  # here and below: a backend may be written in Python, and want the GIL
            status = md_event_fd(md, &fd, &error)
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
        error_clear(&error)
        with nogil:
            status = md_arm(md, &error)
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
        cdef ucxm_status_t status
        cdef ucxm_md_stats_t stats
        md_count(md, &stats)
        counters = {
            "live_bases": stats.live_bases,
            "live_derived": stats.live_derived,
            "live_rkeys": stats.live_rkeys,
            "live_endpoints": stats.live_endpoints,
            "mem_reg": stats.mem_reg,
            "mem_dereg": stats.mem_dereg,
            "derive": stats.derive,
            "revoke": stats.revoke,
            "key_create": stats.key_create,
            "key_destroy": stats.key_destroy,
            "keys_parked": stats.keys_parked,
            "keys_parked_now": load32(&md.parked_count),
            "key_placeholders": load32(&md.placeholders.count),
            "keys_quarantined": stats.keys_quarantined,
            "rkey_hits": stats.rkey_hits,
            "rkey_misses": stats.rkey_misses,
            "transfers": stats.transfers,
        }
        with nogil:
            status = md_enter(md)
        if status == UCXM_OK:
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
        text[0] = 0
        if memh is not None:
            if (<Memh?>memh).md is not self:
                raise _errors.InvalidParamError("a handle of another Md", op="explain",
                                                component=md_component(md))
            return explain_handle(md, (<Memh>memh).memh)
        with nogil:
            if md_enter(md) == UCXM_OK:
                md.ops.explain(md.priv, NULL, text, sizeof(text))
                md_leave(md)
        return text.decode("utf-8", "replace") or declared(md, &md.attr.enforcement)

    def peer_probe(self, key):
        """Could this packed key be used now?  Returns if so, and keeps nothing.

        Looks at the key's owner anew, whatever is known of it.  Raises PeerGoneError,
        UnreachableError, StaleKeyError: no, and why; and what rkey_unpack raises.
        """
        cdef md_t *md = md_use(self, "peer_probe")
        cdef Py_buffer view
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        error_clear(&error)
        get_buffer(key, &view, False, "peer_probe")
        with nogil:
            status = peer_probe(md, <const uint8_t *>view.buf, view.len, &error)
        PyBuffer_Release(&view)
        if status != UCXM_OK:
            raise failure(status, "peer_probe", md, &error, {})

    def peer_evict(self, identity):
        """Forget what is remembered about a peer (`Rkey.owner`): its keys become stale."""
        cdef md_t *md = md_use(self, "peer_evict")
        cdef ucxm_identity_t peer
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        cdef Py_buffer view
        cdef bint fits
        get_buffer(identity, &view, False, "peer_evict")
        fits = view.len == sizeof(peer)
        if fits:
            memcpy(&peer, view.buf, sizeof(peer))
        PyBuffer_Release(&view)
        if not fits:
            raise _errors.InvalidParamError(f"an identity has {sizeof(peer)} bytes",
                                            op="peer_evict", component=md_component(md))
        error_clear(&error)
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
        error_clear(&error)
        while True:
            with nogil:
                status = md_close(md, forced, now_ns() + SLICE_NS, &error)
            if status != UCXM_INPROGRESS:
                break
            PyErr_CheckSignals()
        if status != UCXM_OK:
            raise failure(status, "md_close", md, &error, {
                "bases": load32(&md.live_bases), "derived": load32(&md.live_derived),
                "rkeys": load32(&md.live_rkeys), "endpoints": load32(&md.live_endpoints),
            } if status == UCXM_ERR_BUSY else {})
