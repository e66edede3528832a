# SPDX-License-Identifier: BSD-3-Clause
# How C finds all this: two tables in two capsules (pyapi.h).

from cpython.pycapsule cimport PyCapsule_New

cdef extern from *:
    """
    /* As in pyapi.h, which defines a function that this module has no use for. */
    typedef struct {
        size_t struct_size;
        void *(*md)(PyObject *);
        void *(*memh)(PyObject *);
        void *(*rkey)(PyObject *);
        void *(*ep)(PyObject *);
        PyObject *(*wrap_memh)(PyObject *, ucxm_memh_t *);
        PyObject *(*wrap_rkey)(PyObject *, ucxm_rkey_t *);
    } ucxm_python_table_t;
    """
    ctypedef struct ucxm_python_table_t:
        size_t struct_size
        void *(*md)(object) except NULL
        void *(*memh)(object) except NULL
        void *(*rkey)(object) except NULL
        void *(*ep)(object) except NULL
        object (*wrap_memh)(object, ucxm_memh_t *)
        object (*wrap_rkey)(object, ucxm_rkey_t *)


cdef void *pointer_of_md(object md) except NULL:
    return md_use(<Md?>md, "C API")


cdef void *pointer_of_memh(object memh) except NULL:
    return (<Memh?>memh).memh


cdef void *pointer_of_rkey(object rkey) except NULL:
    return rkey_use(<Rkey?>rkey, "C API")


cdef void *pointer_of_ep(object endpoint) except NULL:
    return (<Endpoint?>endpoint).ep


cdef object wrap_memh(object md, ucxm_memh_t *memh):
    if <void *>md_of(memh) != <void *>(<Md?>md).md:
        raise _errors.InvalidParamError("a handle of another Md", op="wrap_memh")
    return memh_wrap(memh, md, None, None, None)


cdef object wrap_rkey(object md, ucxm_rkey_t *rkey):
    if <void *>(<rkey_t *>rkey).md != <void *>(<Md?>md).md:
        raise _errors.InvalidParamError("an rkey of another Md", op="wrap_rkey")
    return rkey_wrap(md, <rkey_t *>rkey)


cdef ucxm_api_t API
memset(&API, 0, sizeof(API))
API.struct_size = sizeof(API)
API.abi = UCXM_API_ABI
API.status_name = ucxm_status_name
API.md_open = ucxm_md_open
API.md_query = ucxm_md_query
API.md_close = ucxm_md_close
API.md_release = ucxm_md_release
API.md_progress = ucxm_md_progress
API.md_event_fd = ucxm_md_event_fd
API.md_arm = ucxm_md_arm
API.md_stats = ucxm_md_stats
API.mem_reg = ucxm_mem_reg
API.mem_derive = ucxm_mem_derive
API.mem_query = ucxm_mem_query
API.mem_enforcement = ucxm_mem_enforcement
API.mem_invalidate = ucxm_mem_invalidate
API.mem_dereg = ucxm_mem_dereg
API.memh_release = ucxm_memh_release
API.mkey_pack = ucxm_mkey_pack
API.revoke_notice = ucxm_revoke_notice
API.key_query = ucxm_key_query
API.rkey_unpack = ucxm_rkey_unpack
API.rkey_from_raw = ucxm_rkey_from_raw
API.rkey_query = ucxm_rkey_query
API.rkey_compare = ucxm_rkey_compare
API.rkey_ptr = ucxm_rkey_ptr
API.rkey_release = ucxm_rkey_release
API.rkey_revoke = ucxm_rkey_revoke
API.peer_probe = ucxm_peer_probe
API.peer_evict = ucxm_peer_evict
API.ep_create = ucxm_ep_create
API.ep_address = ucxm_ep_address
API.ep_connect = ucxm_ep_connect
API.ep_reset = ucxm_ep_reset
API.ep_state = ucxm_ep_state
API.ep_close = ucxm_ep_close
API.ep_release = ucxm_ep_release
API.ep_post = ucxm_ep_post
API.ep_transfer = ucxm_ep_transfer
API.mem_reg_many = ucxm_mem_reg_many
API.mem_derive_many = ucxm_mem_derive_many
API.mkey_pack_many = ucxm_mkey_pack_many
API.mem_invalidate_many = ucxm_mem_invalidate_many
API.mem_dereg_many = ucxm_mem_dereg_many
API.bundle_reg = ucxm_bundle_reg
API.bundle_pack = ucxm_bundle_pack
API.bundle_unpack = ucxm_bundle_unpack

cdef ucxm_python_table_t PYTHON
PYTHON.struct_size = sizeof(PYTHON)
PYTHON.md = pointer_of_md
PYTHON.memh = pointer_of_memh
PYTHON.rkey = pointer_of_rkey
PYTHON.ep = pointer_of_ep
PYTHON.wrap_memh = wrap_memh
PYTHON.wrap_rkey = wrap_rkey

_C_API = PyCapsule_New(&API, "ucx_memh.core._C_API", NULL)
_C_PYTHON = PyCapsule_New(&PYTHON, "ucx_memh.core._C_PYTHON", NULL)
