/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Loops around one call or a pair of them, so that what takes some nanoseconds can be timed and its
 * instructions counted.  Each returns nanoseconds for all `count` rounds, or a negative status.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h> /* nothing but a few instructions outside of valgrind */
#endif

#include <ucx_memh/memh.h>

#define LOOP __attribute__((noinline, visibility("default")))

/* Keep the compiler from leaving out what nobody looks at. */
#define SEEN(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

/* ---- the limits ---- */

LOOP double loop_malloc_free(size_t size, size_t count)
{
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        void *made = malloc(size);
        SEEN(made);
        free(made);
    }
    return now_ns() - start;
}

/* What a new handle costs at least: its memory, and its bytes written once. */
LOOP double loop_malloc_memcpy_free(size_t size, size_t count)
{
    /* Where the two lie makes it take up to thrice as long.  The limit is the least: a copy that
     * begins a line of the cache, of what lies half a page from it. */
    enum { TRIES = 64, ODD = 1056 };
    static _Alignas(4096) char room[3 * 4096];
    void *other[TRIES];
    int tries = 0;
    if (size > sizeof(room) / 3)
        return UCXM_ERR_INVALID_PARAM;
    /* What malloc gives is 16 bytes apart, times a number; an even one skips places, and so wants
     * something of an odd one between. */
    int even = (size + 8 + 15) / 16 % 2 == 0;
    void *copy = malloc(size);
    while (((uintptr_t)copy & 63) != 0 && tries < TRIES) {
        other[tries++] = copy;
        if (even)
            other[tries++] = malloc(ODD);
        copy = malloc(size);
    }
    const char *source = room + (((uintptr_t)copy + 2048) & 4032);
    free(copy); /* it is what malloc gives next */
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        void *made = malloc(size);
        SEEN(made);
        memcpy(made, source, size);
        SEEN(made);
        free(made);
    }
    start = now_ns() - start;
    while (tries > 0)
        free(other[--tries]);
    return start;
}

/* Of more than 2 GiB a call moves only a part; no more than 1 GiB is asked for. */
LOOP double loop_readv(int pid, void *remote, void *local, size_t length, size_t count)
{
    struct iovec to = {local, length}, from = {remote, length};
    double start = now_ns();
    for (size_t i = 0; i < count; ++i)
        if (process_vm_readv(pid, &to, 1, &from, 1, 0) != (ssize_t)length)
            return UCXM_ERR_IO_ERROR;
    return now_ns() - start;
}

LOOP double loop_writev(int pid, void *remote, void *local, size_t length, size_t count)
{
    struct iovec from = {local, length}, to = {remote, length};
    double start = now_ns();
    for (size_t i = 0; i < count; ++i)
        if (process_vm_writev(pid, &from, 1, &to, 1, 0) != (ssize_t)length)
            return UCXM_ERR_IO_ERROR;
    return now_ns() - start;
}

/* ---- the library ---- */

#define INLINE static inline __attribute__((always_inline)) /* the flags are constants */

/* The end of a handle, of which a key may be packed first. */
INLINE ucxm_status_t end(const ucxm_api_t *api, ucxm_memh_t *memh, int pack, int closing)
{
    char key[UCXM_KEY_MAX];
    size_t length = sizeof(key);
    ucxm_status_t status = pack ? api->mkey_pack(memh, 0, key, &length, NULL) : UCXM_OK;
    if (status == UCXM_OK)
        status = closing ? api->mem_dereg(memh, 0, NULL, NULL)
                         : api->mem_invalidate(memh, 0, NULL, NULL);
    api->memh_release(memh);
    return status;
}

INLINE double register_and_end(const ucxm_api_t *api, ucxm_md_t *md, void *memory, size_t length,
                               uint64_t flags, size_t count, int pack)
{
    ucxm_reg_params_t params = {.struct_size = sizeof(params)};
    params.address = (uintptr_t)memory;
    params.length = length;
    params.flags = flags;
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        ucxm_memh_t *memh;
        ucxm_status_t status = api->mem_reg(md, &params, &memh, NULL);
        if (status == UCXM_OK)
            status = end(api, memh, pack, 1);
        if (status != UCXM_OK)
            return status;
    }
    return now_ns() - start;
}

INLINE double derive_and_end(const ucxm_api_t *api, ucxm_memh_t *base, size_t count, int pack,
                             int closing)
{
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        ucxm_memh_t *memh;
        ucxm_status_t status =
            api->mem_derive(base, 0, UCXM_LENGTH_REST, UCXM_RIGHTS_ALL, NULL, &memh, NULL);
        if (status == UCXM_OK)
            status = end(api, memh, pack, closing);
        if (status != UCXM_OK)
            return status;
    }
    return now_ns() - start;
}

LOOP double loop_reg(const ucxm_api_t *api, ucxm_md_t *md, void *memory, size_t length,
                     uint64_t flags, size_t count)
{
    return register_and_end(api, md, memory, length, flags, count, 0);
}

/* Register, pack, deregister: what a region costs that one peer is to reach. */
LOOP double loop_share(const ucxm_api_t *api, ucxm_md_t *md, void *memory, size_t length,
                       uint64_t flags, size_t count)
{
    return register_and_end(api, md, memory, length, flags, count, 1);
}

LOOP double loop_derive(const ucxm_api_t *api, ucxm_memh_t *base, size_t count)
{
    return derive_and_end(api, base, count, 0, 1);
}

/* A new grant and its end: derive, pack, invalidate. */
LOOP double loop_revoke(const ucxm_api_t *api, ucxm_memh_t *base, size_t count)
{
    return derive_and_end(api, base, count, 1, 0);
}

LOOP double loop_pack(const ucxm_api_t *api, ucxm_memh_t *memh, uint32_t flags, size_t count)
{
    char key[UCXM_KEY_MAX];
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        size_t length = sizeof(key);
        ucxm_status_t status = api->mkey_pack(memh, flags, key, &length, NULL);
        if (status != UCXM_OK)
            return status;
        SEEN(key);
    }
    return now_ns() - start;
}

LOOP double loop_unpack(const ucxm_api_t *api, ucxm_md_t *md, const void *key, size_t length,
                        size_t count)
{
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        ucxm_rkey_t *rkey;
        ucxm_status_t status = api->rkey_unpack(md, key, length, &rkey, NULL);
        if (status != UCXM_OK)
            return status;
        api->rkey_release(rkey);
    }
    return now_ns() - start;
}

static double transfer(const ucxm_api_t *api, ucxm_op_kind_t kind, ucxm_ep_t *ep, ucxm_rkey_t *rkey,
                       uint64_t remote, void *local, size_t length, size_t count)
{
    ucxm_transfer_t transfer = {.struct_size = sizeof(transfer)};
    transfer.kind = kind;
    transfer.rkey = rkey;
    transfer.remote_address = remote;
    transfer.local = local;
    transfer.length = length;
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        ucxm_status_t status = api->ep_transfer(ep, &transfer, NULL);
        if (status != UCXM_OK)
            return status;
    }
    return now_ns() - start;
}

LOOP double loop_get(const ucxm_api_t *api, ucxm_ep_t *ep, ucxm_rkey_t *rkey, uint64_t remote,
                     void *local, size_t length, size_t count)
{
    return transfer(api, UCXM_OP_GET, ep, rkey, remote, local, length, count);
}

LOOP double loop_put(const ucxm_api_t *api, ucxm_ep_t *ep, ucxm_rkey_t *rkey, uint64_t remote,
                     void *local, size_t length, size_t count)
{
    return transfer(api, UCXM_OP_PUT, ep, rkey, remote, local, length, count);
}

/* ---- for callgrind: what lies between the two is counted, and dumped under that name ---- */

LOOP void mark_begin(void)
{
#ifdef CALLGRIND_ZERO_STATS
    CALLGRIND_START_INSTRUMENTATION; /* until then the program is some times faster */
    CALLGRIND_ZERO_STATS;
#endif
}

LOOP void mark_end(const char *name)
{
#ifdef CALLGRIND_ZERO_STATS
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
#else
    (void)name;
#endif
}
