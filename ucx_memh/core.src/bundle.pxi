# SPDX-License-Identifier: BSD-3-Clause
# Several domains as one: the same memory registered with each, and one block with all their keys.

cdef ucxm_status_t ucxm_bundle_reg(ucxm_md_t *const *mds, size_t count, uint32_t policy,
                                   const ucxm_reg_params_t *params, ucxm_memh_t **memhs,
                                   ucxm_status_t *status, ucxm_error_t *error) noexcept nogil:
    cdef ucxm_status_t one, failed = UCXM_OK
    cdef ucxm_error_t why
    cdef size_t i, good = 0
    error_clear(error)
    for i in range(min(count, <size_t>UCXM_BUNDLE_MAX)):
        memhs[i] = NULL
    if count == 0 or count > UCXM_BUNDLE_MAX or policy > UCXM_BUNDLE_ALL:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "how many domains, or which policy?")
    for i in range(count):
        one = ucxm_mem_reg(mds[i], params, &memhs[i], &why)
        if status != NULL:
            status[i] = one
        if one == UCXM_OK:
            good += 1
        elif failed == UCXM_OK:
            failed = one
            if error != NULL:
                error[0] = why
    if failed == UCXM_OK or (policy == UCXM_BUNDLE_ANY and good != 0):
        error_clear(error)
        return UCXM_OK
    for i in range(count):
        ucxm_memh_release(memhs[i])
        memhs[i] = NULL
    return failed


cdef ucxm_status_t ucxm_bundle_pack(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                    void *buffer, size_t *length,
                                    ucxm_error_t *error) noexcept nogil:
    cdef packed_t *packed[UCXM_BUNDLE_MAX]
    cdef uint8_t *out = <uint8_t *>buffer
    cdef ucxm_status_t status = UCXM_OK
    cdef size_t room = length[0]
    cdef size_t size = UCXM_BUNDLE_HEADER_SIZE
    cdef size_t i, parts = 0
    error_clear(error)
    length[0] = 0
    if count > UCXM_BUNDLE_MAX or flags & UCXM_PACK_RAW:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "too many handles, or RAW keys")
    for i in range(count):
        if memhs[i] == NULL:
            continue
        status = mkey_pack(memhs[i], flags, &packed[parts], error)
        if status != UCXM_OK:
            return status
        size += packed[parts].size
        parts += 1
    if parts == 0:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "no handle")
    length[0] = size
    if out == NULL:
        return UCXM_OK
    if room < size:
        return refuse(error, UCXM_ERR_BUFFER_TOO_SMALL, "the buffer is too short")
    put_le(out, UCXM_BUNDLE_OFF_MAGIC, 2, UCXM_BUNDLE_MAGIC)
    put_le(out, UCXM_BUNDLE_OFF_VERSION, 1, UCXM_BUNDLE_VERSION)
    put_le(out, UCXM_BUNDLE_OFF_COUNT, 1, parts)
    put_le(out, UCXM_BUNDLE_OFF_TOTAL_LEN, 2, size)
    put_le(out, UCXM_BUNDLE_OFF_RESERVED, 2, 0)
    size = UCXM_BUNDLE_HEADER_SIZE
    for i in range(parts):
        memcpy(out + size, packed[i].bytes, packed[i].size)
        size += packed[i].size
    return UCXM_OK


cdef ucxm_status_t bundle_parse(const uint8_t *block, size_t length, size_t *total_p,
                                ucxm_error_t *error) noexcept nogil:
    """Is this a block that we can read?  Looks at no byte beyond `length`."""
    cdef size_t total
    if length < UCXM_BUNDLE_HEADER_SIZE or (
            get_le(block, UCXM_BUNDLE_OFF_MAGIC, 2) != UCXM_BUNDLE_MAGIC):
        return refuse(error, UCXM_ERR_MALFORMED_KEY, "no bundle of keys")
    if get_le(block, UCXM_BUNDLE_OFF_VERSION, 1) != UCXM_BUNDLE_VERSION:
        return refuse(error, UCXM_ERR_KEY_VERSION, "a bundle of another version")
    total = get_le(block, UCXM_BUNDLE_OFF_TOTAL_LEN, 2)
    if total < UCXM_BUNDLE_HEADER_SIZE or total > length:
        return refuse(error, UCXM_ERR_MALFORMED_KEY, "truncated: its lengths do not fit")
    total_p[0] = total
    return UCXM_OK


cdef void bundle_part(ucxm_md_t *const *mds, size_t count, const uint8_t *key, size_t length,
                      ucxm_rkey_t **rkeys, ucxm_status_t *status,
                      ucxm_error_t *why) noexcept nogil:
    """Give one part to the first domain of its component that takes it and has none yet."""
    cdef uint64_t component = get_le(key, UCXM_KEY_OFF_COMPONENT, 4)
    cdef size_t i
    for i in range(count):
        if rkeys[i] != NULL or (<md_t *>mds[i]).component_id != component:
            continue
        status[i] = ucxm_rkey_unpack(mds[i], key, length, &rkeys[i],
                                     &why[i] if why != NULL else NULL)
        if status[i] == UCXM_OK:
            return


cdef ucxm_status_t bundle_unpack_each(ucxm_md_t *const *mds, size_t count, const void *block,
                                      size_t length, ucxm_rkey_t **rkeys, ucxm_status_t *status,
                                      ucxm_error_t *why, ucxm_error_t *error) noexcept nogil:
    """ucxm_bundle_unpack; `why` (may be NULL) has room for each domain's own reason."""
    cdef const uint8_t *bytes = <const uint8_t *>block
    cdef ucxm_status_t each[UCXM_BUNDLE_MAX]
    cdef ucxm_status_t result
    cdef size_t at = UCXM_BUNDLE_HEADER_SIZE
    cdef size_t total = 0, size = 0
    cdef size_t i, parts
    error_clear(error)
    for i in range(min(count, <size_t>UCXM_BUNDLE_MAX)):
        rkeys[i] = NULL
        each[i] = UCXM_ERR_UNREACHABLE  # the block has no part for it
    if count == 0 or count > UCXM_BUNDLE_MAX:
        return refuse(error, UCXM_ERR_INVALID_PARAM, "how many domains?")
    result = bundle_parse(bytes, length, &total, error)
    parts = get_le(bytes, UCXM_BUNDLE_OFF_COUNT, 1) if result == UCXM_OK else 0
    for i in range(parts):
        result = key_parse(bytes + at, total - at, &size, error)
        if result == UCXM_ERR_KEY_VERSION and total - at >= UCXM_KEY_HEADER_SIZE:
            # Of a newer library's component, say; its length stands where it always stood.
            size = get_le(bytes + at, UCXM_KEY_OFF_TOTAL_LEN, 2)
            result = UCXM_OK if UCXM_KEY_HEADER_SIZE <= size <= total - at else result
        elif result == UCXM_OK:
            bundle_part(mds, count, bytes + at, size, rkeys, each, why)
        if result != UCXM_OK:
            break
        at += size
    if result == UCXM_OK and at != total:
        result = refuse(error, UCXM_ERR_MALFORMED_KEY, "it has more bytes than parts")
    if result == UCXM_OK:
        result = bundle_result(rkeys, count, each, error)
    for i in range(count):
        if result != UCXM_OK:
            ucxm_rkey_release(rkeys[i])
            rkeys[i] = NULL
        if status != NULL:
            status[i] = each[i]
    return result


cdef ucxm_status_t bundle_result(ucxm_rkey_t *const *rkeys, size_t count,
                                 const ucxm_status_t *each,
                                 ucxm_error_t *error) noexcept nogil:
    """One is enough; else the reason of one that was tried, before that nothing was."""
    cdef ucxm_status_t result = UCXM_ERR_UNREACHABLE
    cdef size_t i
    for i in range(count):
        if rkeys[i] != NULL:
            error_clear(error)
            return UCXM_OK
        if result == UCXM_ERR_UNREACHABLE:
            result = each[i]
    error_text(error, "none of its parts is for one of these domains, or can be unpacked here")
    return result


cdef ucxm_status_t ucxm_bundle_unpack(ucxm_md_t *const *mds, size_t count, const void *block,
                                      size_t length, ucxm_rkey_t **rkeys, ucxm_status_t *status,
                                      ucxm_error_t *error) noexcept nogil:
    return bundle_unpack_each(mds, count, block, length, rkeys, status, NULL, error)


# ---- the same block from Python (ucx_memh/bundle.py) ----

BUNDLE_MAX = UCXM_BUNDLE_MAX

cdef size_t bundle_memhs(list memhs, ucxm_memh_t **pointers) except? 0xffff:
    cdef size_t i
    if len(memhs) > UCXM_BUNDLE_MAX:
        raise _errors.InvalidParamError(f"more than {UCXM_BUNDLE_MAX} handles", op="bundle_pack")
    for i in range(<size_t>len(memhs)):
        pointers[i] = (<Memh?>memhs[i]).memh
    return len(memhs)


cdef uint32_t bundle_flags(object flags) except? 0xffff:
    cdef uint64_t wanted = as_u64(flags, "flags", "bundle_pack")
    if wanted > 0xffffffff:
        raise _errors.InvalidParamError("unknown pack flags", op="bundle_pack")
    return <uint32_t>wanted


def bundle_pack(list memhs, flags=0):
    """One block with the packed key of each handle, at most 16 of them; ucxm_bundle_pack's bytes.

    Raises what Memh.mkey_pack raises, for the first that cannot be packed.
    """
    cdef ucxm_memh_t *pointers[UCXM_BUNDLE_MAX]
    cdef uint32_t wanted = bundle_flags(flags)
    cdef size_t count = bundle_memhs(memhs, pointers)
    cdef size_t length = 0
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    cdef bytes block
    with nogil:
        status = ucxm_bundle_pack(pointers, count, wanted, NULL, &length, &error)
    if status == UCXM_OK:
        block = PyBytes_FromStringAndSize(NULL, length)
        status = ucxm_bundle_pack(pointers, count, wanted, <char *>block, &length, &error)
    if status != UCXM_OK:
        raise failure(status, "bundle_pack", NULL, &error, {})
    return block


def bundle_pack_into(list memhs, buffer, flags=0):
    """Like bundle_pack, into a writable buffer; returns the number of bytes.

    Raises InvalidParamError (status BUFFER_TOO_SMALL), having written nothing, if it is too short.
    """
    cdef ucxm_memh_t *pointers[UCXM_BUNDLE_MAX]
    cdef uint32_t wanted = bundle_flags(flags)
    cdef size_t count = bundle_memhs(memhs, pointers)
    cdef Py_buffer view
    cdef size_t length
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    get_buffer(buffer, &view, True, "bundle_pack_into")
    length = view.len
    with nogil:
        status = ucxm_bundle_pack(pointers, count, wanted, view.buf, &length, &error)
    PyBuffer_Release(&view)
    if status == UCXM_ERR_BUFFER_TOO_SMALL:
        raise _errors.error_from_status(status, "bundle_pack_into", "",
                                        f"the block needs {length} bytes")
    if status != UCXM_OK:
        raise failure(status, "bundle_pack_into", NULL, &error, {})
    return length


def bundle_unpack(list mds, block):
    """For each domain its Rkey, or the exception that says why it has none.

    Parts that no domain knows are skipped.  Raises UnreachableError or the reason of one if none
    could be unpacked, MalformedKeyError, KeyVersionError.  Not a byte beyond `len(block)` is read.
    """
    cdef ucxm_md_t *pointers[UCXM_BUNDLE_MAX]
    cdef ucxm_rkey_t *rkeys[UCXM_BUNDLE_MAX]
    cdef ucxm_status_t each[UCXM_BUNDLE_MAX]
    cdef ucxm_error_t why[UCXM_BUNDLE_MAX]
    cdef Py_buffer view
    cdef size_t i, count = len(mds)
    cdef ucxm_error_t error
    cdef ucxm_status_t status
    cdef list found = []
    if count == 0 or count > UCXM_BUNDLE_MAX:
        raise _errors.InvalidParamError(f"1 to {UCXM_BUNDLE_MAX} domains, not {count}",
                                        op="bundle_unpack")
    for i in range(count):
        pointers[i] = <ucxm_md_t *>md_use(<Md?>mds[i], "bundle_unpack")
    memset(why, 0, sizeof(why))
    get_buffer(block, &view, False, "bundle_unpack")
    with nogil:
        status = bundle_unpack_each(pointers, count, view.buf, view.len, rkeys, each, why, &error)
    PyBuffer_Release(&view)
    if status != UCXM_OK:
        raise failure(status, "bundle_unpack", NULL, &error, {})
    for i in range(count):
        if rkeys[i] != NULL:
            found.append(rkey_wrap(mds[i], <rkey_t *>rkeys[i]))
            continue
        if each[i] == UCXM_ERR_UNREACHABLE:
            error_text(&why[i], "the block has no part for this domain")
        found.append(failure(each[i], "bundle_unpack", <md_t *>pointers[i], &why[i], {}))
    return found
