/* SPDX-License-Identifier: BSD-3-Clause */
/* A plain shared library, no extension module: loaded by ctypes, it imports the table by itself and
 * is then called without the GIL. */
#include <ucx_memh/pyapi.h> /* first, as Python.h wants it */

#include <string.h>

static const ucxm_api_t *ucxm;
static const ucxm_python_t *objects;

/* With the GIL (ctypes.PyDLL); -1: a Python exception is set. */
int lib_init(void)
{
    ucxm = ucxm_import_api();
    objects = ucxm_import_python();
    return ucxm != NULL && objects != NULL ? 0 : -1;
}

/* With the GIL: the domain behind a Python object. */
ucxm_md_t *lib_md(PyObject *md)
{
    return objects->md(md);
}

/* With the GIL: a Python object that takes the handle over. */
PyObject *lib_wrap(PyObject *md, ucxm_memh_t *memh)
{
    return objects->wrap_memh(md, memh);
}

/* Without the GIL from here on (ctypes.CDLL). */

int32_t lib_register(ucxm_md_t *md, void *memory, size_t length, ucxm_memh_t **memh)
{
    ucxm_reg_params_t params = {.struct_size = sizeof(params),
                                .address = (uintptr_t)memory,
                                .length = length,
                                .flags = UCXM_MEM_ACCESS_ALL};

    return ucxm->mem_reg(md, &params, memh, NULL);
}

int32_t lib_grant(ucxm_memh_t *base, uint64_t offset, uint64_t length, void *key, size_t *size,
                  ucxm_memh_t **window)
{
    ucxm_status_t status =
        ucxm->mem_derive(base, offset, length, UCXM_MEM_ACCESS_REMOTE_GET, NULL, window, NULL);

    return status == UCXM_OK ? ucxm->mkey_pack(*window, 0, key, size, NULL) : status;
}

int32_t lib_revoke(ucxm_memh_t *window)
{
    ucxm_status_t status = ucxm->mem_invalidate(window, 0, NULL, NULL);

    if (status == UCXM_OK)
        ucxm->memh_release(window);
    return status;
}
