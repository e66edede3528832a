# SPDX-License-Identifier: BSD-3-Clause
"""Externs of windows.h; no bodies.  The header is the manual."""
from libc.stdint cimport uint32_t

from ucx_memh.libmemh cimport (
    ucxm_enforcement_t, ucxm_error_t, ucxm_md_ops_t, ucxm_registration_t, ucxm_status_t,
)

cdef extern from "ucx_memh/windows.h" nogil:
    enum:
        UCXM_WINDOWS_MAX

    ctypedef struct ucxm_windows_t:
        uint32_t last
        uint32_t key[UCXM_WINDOWS_MAX]

    uint32_t ucxm_windows_add(ucxm_windows_t *windows)
    void ucxm_windows_remove(ucxm_windows_t *windows, uint32_t key)
    bint ucxm_windows_has(const ucxm_windows_t *windows, uint32_t key)
    ucxm_status_t ucxm_windows_check(const ucxm_windows_t *windows, uint32_t key,
                                     ucxm_error_t *error)
    ucxm_status_t ucxm_windows_mem_reg(void *md, ucxm_registration_t *reg, ucxm_error_t *error)
    ucxm_md_ops_t ucxm_windows_ops()
    ucxm_enforcement_t ucxm_windows_enforcement()
