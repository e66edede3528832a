# SPDX-License-Identifier: BSD-3-Clause
# cython: language_level=3
"""A Cython module that works with the library's objects and calls without the GIL."""
from libc.stdint cimport uint8_t, uint64_t

from ucx_memh.core cimport (
    Md, Memh, ucxm_mem_derive, ucxm_mem_invalidate, ucxm_memh_release, ucxm_mkey_pack,
    ucxm_rkey_query, ucxm_rkey_release, ucxm_rkey_unpack,
)
from ucx_memh.libmemh cimport (
    UCXM_ERR_REVOKED, UCXM_OK, UCXM_RIGHTS_ALL, ucxm_error_t, ucxm_key_info_t, ucxm_md_t,
    ucxm_memh_t, ucxm_rkey_t, ucxm_status_t,
)


cdef ucxm_status_t lease(ucxm_md_t *md, ucxm_memh_t *base, uint64_t offset,
                         ucxm_error_t *error) noexcept nogil:
    """One derived key: made, read by a peer, revoked."""
    cdef ucxm_memh_t *window = NULL
    cdef ucxm_rkey_t *rkey = NULL
    cdef ucxm_key_info_t info
    cdef uint8_t key[256]
    cdef size_t size = sizeof(key)
    cdef ucxm_status_t status = ucxm_mem_derive(base, offset, 64, UCXM_RIGHTS_ALL, NULL, &window,
                                                error)
    if status == UCXM_OK:
        status = ucxm_mkey_pack(window, 0, key, &size, error)
    if status == UCXM_OK:
        status = ucxm_rkey_unpack(md, key, size, &rkey, error)
    if status == UCXM_OK:
        status = ucxm_rkey_query(rkey, &info)
    if status == UCXM_OK:
        status = ucxm_mem_invalidate(window, 0, NULL, error)
    if status == UCXM_OK and ucxm_mkey_pack(window, 0, key, &size, error) != UCXM_ERR_REVOKED:
        status = -1
    ucxm_rkey_release(rkey)
    ucxm_memh_release(window)
    return status


def leases(Md md, Memh base, int times):
    """That many, without the GIL; returns how many went well, and why the next did not."""
    cdef ucxm_error_t error
    cdef ucxm_status_t status = UCXM_OK
    cdef int done = 0
    with nogil:
        while done < times:
            status = lease(md.md, base.memh, <uint64_t>done * 64 % 4096, &error)
            if status != UCXM_OK:
                break
            done += 1
    return done, "" if status == UCXM_OK else error.text.decode()
