# SPDX-License-Identifier: BSD-3-Clause
# Rkey.

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


cdef void rkey_forget(void *rkey) noexcept nogil:
    rkey_put(<rkey_t *>rkey)


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
            md_drop((<rkey_t *>self.rkey).md, self.rkey, rkey_forget)

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
        cdef uint64_t at = rkey.pub.info.address
        cdef void *pointer = NULL
        cdef ucxm_error_t error
        cdef ucxm_status_t status
        if address is not None:
            at = as_u64(address, "address", "ptr")
        error_clear(&error)
        rkey_get(rkey)  # the user may close it in another thread meanwhile
        with nogil:
            status = rkey_ptr(rkey, at, &pointer, &error)
            rkey_put(rkey)
        if status != UCXM_OK:
            raise rkey_failure(status, "ptr", rkey_use(self, "ptr"), &error, at, 0)
        return <uintptr_t>pointer

    def compare(self, other):
        """-1, 0 or 1: a total order of keys by owner, key id and contents (uct_rkey_compare)."""
        return rkey_compare(rkey_use(self, "compare"), rkey_use(<Rkey?>other, "compare"))

    def close(self):
        """Give the key back; legal while operations that use it are under way.  Again: nothing."""
        cdef rkey_t *rkey = <rkey_t *>self.rkey
        if rkey != NULL:
            self.rkey = NULL
            if rkey.md.attr.python:
                with nogil:  # which the backend wants
                    rkey_put(rkey)
            else:
                rkey_put(rkey)
