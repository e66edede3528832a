/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * How a C or C++ program gets the calls of memh.h: the one header that needs
 * Python.h, and therefore is included before any standard header:
 *
 *     const ucxm_api_t *ucxm = ucxm_import_api();
 *     if (ucxm == NULL)
 *         ... a Python exception is set ...
 *     status = ucxm->md_open("ib_mlx5", NULL, 0, &md, &error);
 *
 * The table lives as long as the process; it may be called after
 * Py_Finalize(), but for what takes the GIL.
 */
#ifndef UCX_MEMH_PYAPI_H
#define UCX_MEMH_PYAPI_H

#include <Python.h>

#include <ucx_memh/memh.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UCXM_API_CAPSULE "ucx_memh.core._C_API"

/* Import ucx_memh and find its table.  Needs the GIL.  NULL: a Python exception is set; ImportError
 * where the installed ucx_memh is older than this header. */
static inline const ucxm_api_t *ucxm_import_api(void)
{
    const ucxm_api_t *api;
    PyObject *capi = PyImport_ImportModule("ucx_memh.capi");

    if (capi == NULL)
        return NULL;
    api = (const ucxm_api_t *)PyCapsule_Import(UCXM_API_CAPSULE, 0);
    Py_DECREF(capi); /* sys.modules keeps it */
    if (api == NULL)
        return NULL;
    if (api->abi < UCXM_API_ABI || api->struct_size < sizeof(ucxm_api_t)) {
        PyErr_Format(PyExc_ImportError,
                     "ucx_memh has API version %u of %zu bytes, this program wants %u of %zu",
                     (unsigned)api->abi, api->struct_size, (unsigned)UCXM_API_ABI,
                     sizeof(ucxm_api_t));
        return NULL;
    }
    return api;
}

/* The objects of Python, for programs that mix both.  All need the GIL.  Borrowed pointers, good
 * while the Python object lives; NULL: TypeError, or ClosedError for an rkey. */
typedef struct ucxm_python {
    size_t struct_size;
    /* An Md's. */
    ucxm_md_t *(*md)(PyObject *md);
    /* A Memh's. */
    ucxm_memh_t *(*memh)(PyObject *memh);
    /* An Rkey's. */
    ucxm_rkey_t *(*rkey)(PyObject *rkey);
    /* An Endpoint's. */
    ucxm_ep_t *(*ep)(PyObject *endpoint);
    /* A Memh that takes over the caller's pointer; NULL: it stays the caller's. */
    PyObject *(*wrap_memh)(PyObject *md, ucxm_memh_t *memh);
    /* The same, an Rkey. */
    PyObject *(*wrap_rkey)(PyObject *md, ucxm_rkey_t *rkey);
} ucxm_python_t;

#define UCXM_PYTHON_CAPSULE "ucx_memh.core._C_PYTHON"

/* As ucxm_import_api, the table above. */
static inline const ucxm_python_t *ucxm_import_python(void)
{
    if (ucxm_import_api() == NULL)
        return NULL;
    return (const ucxm_python_t *)PyCapsule_Import(UCXM_PYTHON_CAPSULE, 0);
}

#ifdef __cplusplus
}
#endif

#endif
