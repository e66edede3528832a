/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The ends of DLPack capsules.  An exception may be set when one comes, and then no Python code can
 * run; so they are C, and clear a flag that their maker looks at.
 */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "softcuda.h"

struct tensor {
    void *data;
    int device[2], ndim;
    uint8_t type[4];
    void *shape, *strides;
    uint64_t offset;
};
struct managed {
    struct tensor tensor;
    int64_t *lent;
    void (*deleter)(void *);
};
struct versioned {
    uint32_t version[2];
    int64_t *lent;
    void (*deleter)(void *);
};

API void softcuda_give_back(struct managed *managed)
{
    *managed->lent = 0;
}

API void softcuda_give_back_versioned(struct versioned *managed)
{
    *managed->lent = 0;
}

/* Of a capsule that nobody consumed: who does gives it another name. */
API void softcuda_drop_capsule(void *capsule)
{
    int (*is)(void *, const char *) = dlsym(RTLD_DEFAULT, "PyCapsule_IsValid");
    void *(*pointer)(void *, const char *) = dlsym(RTLD_DEFAULT, "PyCapsule_GetPointer");

    if (is(capsule, "dltensor"))
        softcuda_give_back(pointer(capsule, "dltensor"));
    if (is(capsule, "dltensor_versioned"))
        softcuda_give_back_versioned(pointer(capsule, "dltensor_versioned"));
}
