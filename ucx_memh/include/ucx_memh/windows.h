/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Software-checked windows, for a backend over memory that owner and peers share.
 *
 * Where no device knows of keys, a key can be a number in a table that lies in the shared memory
 * itself: key_create writes it, key_destroy takes it out, and the peer's library looks before it
 * gives access.  That is COOPERATIVE and no more: who maps the memory can read and write it, and
 * the table, whatever is in there.
 *
 * A number comes back after 2^32 others at the soonest, so such a domain needs no quarantine.
 * Any thread may call any of these, in any process, at the same time.
 *
 * A domain whose `md` begins with a pointer to its table takes ucxm_windows_ops() as the start of
 * its own operations.
 */
#ifndef UCX_MEMH_WINDOWS_H
#define UCX_MEMH_WINDOWS_H

#include <ucx_memh/backend.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UCXM_WINDOWS_MAX 16383 /* keys at a time */

/* 64 KiB that are zero before the first use.  `last` may begin anywhere: by chance, and a key of
 * one table is hardly found in another. */
typedef struct ucxm_windows {
    uint32_t last;
    uint32_t key[UCXM_WINDOWS_MAX];
} ucxm_windows_t;

/* A new key; 0: all places are taken. */
static inline uint32_t ucxm_windows_add(ucxm_windows_t *windows)
{
    for (uint32_t tries = 0; tries < UCXM_WINDOWS_MAX; tries++) {
        uint32_t key = __atomic_add_fetch(&windows->last, 1, __ATOMIC_RELAXED);
        uint32_t none = 0;
        if (key != 0 && __atomic_compare_exchange_n(&windows->key[key % UCXM_WINDOWS_MAX], &none,
                                                    key, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return key;
    }
    return 0;
}

/* From now on it is no key.  One that is none already stays none. */
static inline void ucxm_windows_remove(ucxm_windows_t *windows, uint32_t key)
{
    uint32_t mine = key;
    if (key != 0)
        __atomic_compare_exchange_n(&windows->key[key % UCXM_WINDOWS_MAX], &mine, 0, 0,
                                    __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/* Is it a key now? */
static inline int ucxm_windows_has(const ucxm_windows_t *windows, uint32_t key)
{
    return key != 0 &&
           __atomic_load_n(&windows->key[key % UCXM_WINDOWS_MAX], __ATOMIC_ACQUIRE) == key;
}

/* ---- operations -------------------------------------------------------------------------- */

static inline ucxm_windows_t *ucxm_windows_of(void *md)
{
    return *(ucxm_windows_t **)md;
}

/* REVOKED: it is no key any more. */
static inline ucxm_status_t ucxm_windows_check(const ucxm_windows_t *windows, uint32_t key,
                                               ucxm_error_t *error)
{
    if (ucxm_windows_has(windows, key))
        return UCXM_OK;
    return ucxm_refuse(error, UCXM_ERR_REVOKED, "its owner's table of keys does not have it");
}

/* *key_p is a new key; NO_RESOURCE. */
static inline ucxm_status_t ucxm_windows_grant(void *md, uint32_t *key_p, ucxm_error_t *error)
{
    uint32_t key = ucxm_windows_add(ucxm_windows_of(md));
    if (key == 0)
        return ucxm_refuse(error, UCXM_ERR_NO_RESOURCE, "as many keys as there can be are live");
    *key_p = key;
    return UCXM_OK;
}

/* The registration's own key is in the table, too. */
static inline ucxm_status_t ucxm_windows_mem_reg(void *md, ucxm_registration_t *reg,
                                                 ucxm_error_t *error)
{
    return ucxm_windows_grant(md, &reg->rkey, error);
}

static inline ucxm_status_t ucxm_windows_mem_dereg(void *md, ucxm_registration_t *reg,
                                                   ucxm_error_t *error)
{
    (void)error;
    ucxm_windows_remove(ucxm_windows_of(md), reg->rkey);
    return UCXM_OK;
}

/* Any range and rights: those who hold the key keep to them. */
static inline ucxm_status_t ucxm_windows_mem_derive(void *md, const ucxm_memh_t *base,
                                                    const ucxm_memh_t *memh, ucxm_error_t *error)
{
    (void)md, (void)base, (void)memh, (void)error;
    return UCXM_OK;
}

static inline ucxm_status_t ucxm_windows_key_create(void *md, const ucxm_memh_t *memh,
                                                    ucxm_key_slot_t *slot, ucxm_error_t *error)
{
    (void)memh;
    return ucxm_windows_grant(md, &slot->value, error);
}

static inline ucxm_status_t ucxm_windows_key_destroy(void *md, const ucxm_memh_t *memh,
                                                     ucxm_key_slot_t *slot, ucxm_completion_t *comp,
                                                     ucxm_error_t *error)
{
    (void)memh, (void)comp, (void)error;
    ucxm_windows_remove(ucxm_windows_of(md), slot->value);
    return UCXM_OK;
}

/* A table of operations with these five, and nothing else yet. */
static inline ucxm_md_ops_t ucxm_windows_ops(void)
{
    ucxm_md_ops_t ops = {sizeof(ops)};
    ops.abi = UCXM_BACKEND_ABI;
    ops.mem_reg = ucxm_windows_mem_reg;
    ops.mem_dereg = ucxm_windows_mem_dereg;
    ops.mem_derive = ucxm_windows_mem_derive;
    ops.key_create = ucxm_windows_key_create;
    ops.key_destroy = ucxm_windows_key_destroy;
    return ops;
}

/* What this is worth, of put and get; of atomics nothing. */
static inline ucxm_enforcement_t ucxm_windows_enforcement(void)
{
    ucxm_enforcement_t cells = {{0}};
    for (int i = 0; i < 2; i++)
        cells.rights[i] = cells.range[i] = cells.revoke[i] = UCXM_ENFORCE_COOPERATIVE;
    return cells;
}

#ifdef __cplusplus
}
#endif

#endif
