/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What bench/hotpath/loops.c has no loop for: share a region, get and put, and the two system calls
 * below them.  Nanoseconds for all, or a status.
 */
#define _GNU_SOURCE
#include <sys/uio.h>
#include <time.h>

#include <ucx_memh/memh.h>

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

double share(const ucxm_api_t *api, ucxm_md_t *md, void *memory, size_t length, uint64_t flags,
             size_t count)
{
    ucxm_reg_params_t params = {.struct_size = sizeof(params)};
    char key[UCXM_KEY_MAX];
    params.address = (uintptr_t)memory;
    params.length = length;
    params.flags = flags;
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        ucxm_memh_t *memh;
        size_t size = sizeof(key);
        ucxm_status_t status = api->mem_reg(md, &params, &memh, NULL);
        if (status != UCXM_OK)
            return status;
        status = api->mkey_pack(memh, 0, key, &size, NULL);
        if (status == UCXM_OK)
            status = api->mem_dereg(memh, 0, NULL, NULL);
        api->memh_release(memh);
        if (status != UCXM_OK)
            return status;
    }
    return now_ns() - start;
}

double transfer_ours(const ucxm_api_t *api, ucxm_ep_t *ep, ucxm_rkey_t *rkey, int put,
                     uint64_t remote, void *local, size_t length, size_t count)
{
    ucxm_transfer_t transfer = {.struct_size = sizeof(transfer)};
    transfer.kind = put ? UCXM_OP_PUT : UCXM_OP_GET;
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

double transfer_bare(int pid, int put, void *remote, void *local, size_t length, size_t count)
{
    struct iovec here = {local, length}, there = {remote, length};
    double start = now_ns();
    for (size_t i = 0; i < count; ++i) {
        /* Of more than 2 GiB a call moves only a part; no more than 1 GiB is asked for. */
        ssize_t moved = put ? process_vm_writev(pid, &here, 1, &there, 1, 0)
                            : process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (moved != (ssize_t)length)
            return UCXM_ERR_IO_ERROR;
    }
    return now_ns() - start;
}
