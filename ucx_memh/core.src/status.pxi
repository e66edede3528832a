# SPDX-License-Identifier: BSD-3-Clause
# From a status to an exception: cold, and the only place that raises for the C layer.

cdef object md_component(md_t *md):
    return "" if md == NULL else md.attr.component.decode("utf-8", "replace")


cdef object failure(ucxm_status_t status, str op, md_t *md, ucxm_error_t *error, dict context):
    """The exception for a status; the caller raises it.  `md` NULL: of no domain, or of several."""
    detail = ""
    if error != NULL:
        detail = error.text.decode("utf-8", "replace")
        if error.sys_errno:
            context["errno"] = error.sys_errno
        if error.syndrome:
            context["syndrome"] = error.syndrome
    return _errors.error_from_status(status, op, md_component(md), detail, **context)


cdef object memh_failure(ucxm_status_t status, str op, ucxm_memh_t *memh, ucxm_error_t *error):
    cdef ucxm_memh_own_t *own = ucxm_memh_own(memh)
    return failure(status, op, md_of(memh), error,
                   {"address": own.address, "length": own.length})


cdef object rkey_failure(ucxm_status_t status, str op, rkey_t *rkey, ucxm_error_t *error,
                         uint64_t address, uint64_t length, object done=None):
    cdef dict context = {"address": address, "length": length}
    if rkey.pub.info.owner.pid:
        context["pid"] = rkey.pub.info.owner.pid
    if done is not None:
        context["bytes_done"] = done
    return failure(status, op, rkey.md, error, context)
