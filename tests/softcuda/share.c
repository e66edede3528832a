/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory of other processes: legacy IPC handles, and allocations that are created and mapped. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softcuda.h"

/* What is in the 64 bytes of a legacy and of a fabric handle.  Nothing of it is secret here. */
struct wire {
    char magic[8];
    int pid, fd, ledger, device;
    unsigned long long ledger_inode, id, offset, size;
};
_Static_assert(sizeof(struct wire) <= sizeof(CUipcMemHandle), "does not fit");

#define LEGACY "scudaipc"
#define FABRIC "scudafab"

static void seal(void *out, const char *magic, const struct backing *mem, unsigned long long id,
                 size_t offset, size_t size)
{
    struct wire wire = {"", getpid(), mem->fd, sc_ledger, mem->device, sc_ledger_inode,
                        id, offset,   size};

    memcpy(wire.magic, magic, 8);
    memset(out, 0, 64);
    memcpy(out, &wire, sizeof(wire));
}

static int open_of(int pid, int fd, int flags)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
    return open(path, flags | O_CLOEXEC);
}

/* Whether the exporter is there and is the one that made the handle, and its allocation lives. */
static int lives(const struct wire *wire)
{
    int fd = open_of(wire->pid, wire->ledger, O_RDONLY);
    struct stat st;
    char mark = 0;

    if (fd < 0)
        return 0;
    if (fstat(fd, &st) || st.st_ino != wire->ledger_inode ||
        (wire->id && pread(fd, &mark, 1, (off_t)wire->id) != 1))
        mark = 0;
    else if (!wire->id)
        mark = 1;
    close(fd);
    return mark;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr ptr)
{
    struct range *range;

    CALL(CONTEXT);
    range = sc_find(ptr);
    VALUE(out && range && range->span->kind == K_DEVICE);
    seal(out, LEGACY, range->mem, range->id, range->offset, range->size);
    return CUDA_SUCCESS;
}

/* `again`: whether a context may open a handle that it has open; it may since CUDA 11. */
static CUresult open_handle(CUdeviceptr *out, const CUipcMemHandle *handle, unsigned flags,
                            int again)
{
    CUcontext ctx = sc_current();
    struct backing *mem;
    struct range *range;
    struct span *span;
    struct wire wire;
    int fd;

    memcpy(&wire, handle, sizeof(wire));
    VALUE(out && flags == IPC_LAZY_ENABLE_PEER_ACCESS && !memcmp(wire.magic, LEGACY, 8));
    REQUIRE(wire.ledger_inode != sc_ledger_inode, CUDA_ERROR_INVALID_CONTEXT);
    VALUE(lives(&wire));
    REQUIRE(sc_can_access(sc_physical[ctx->device], wire.device),
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    /* One context of each device for all that one process has on one device. */
    for (span = sc_spans; span; span = span->next)
        REQUIRE(span->kind != K_IPC || span->exporter != wire.ledger_inode ||
                    span->mem->device != wire.device || span->ctx == ctx ||
                    span->ctx->device != ctx->device,
                CUDA_ERROR_INVALID_HANDLE);
    for (range = sc_ranges; range; range = range->next)
        if (range->foreign == wire.id && range->span->exporter == wire.ledger_inode &&
            range->span->ctx == ctx) {
            REQUIRE(again, CUDA_ERROR_ALREADY_MAPPED);
            range->opens++;
            *out = range->base;
            return CUDA_SUCCESS;
        }
    fd = open_of(wire.pid, wire.fd, O_RDWR);
    mem = fd < 0 ? NULL : sc_backing_open(fd);
    VALUE(mem && wire.offset + wire.size <= mem->size);
    for (span = sc_spans; span; span = span->next)
        if (span->kind == K_IPC && span->ctx == ctx && span->mem->inode == mem->inode)
            break;
    if (span) { /* another allocation of the same block */
        sc_backing_put(mem);
        REQUIRE(again, CUDA_ERROR_ALREADY_MAPPED);
    } else {
        span = sc_span_new(mem->size, BLOCK_SIZE, K_IPC, mem);
        REQUIRE(span, CUDA_ERROR_MAP_FAILED);
        span->ctx = ctx;
        span->exporter = wire.ledger_inode;
    }
    range = sc_range_new(span, span->base + wire.offset, (size_t)wire.size);
    range->foreign = wire.id;
    range->opens = 1;
    *out = range->base;
    return CUDA_SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    CALL(CONTEXT);
    return open_handle(out, &handle, flags, 1);
}

API CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    CALL(CONTEXT);
    return open_handle(out, &handle, flags, 0);
}

/* Does not wait for what is queued. */
API CUresult cuIpcCloseMemHandle(CUdeviceptr ptr)
{
    struct range *range;

    CALL(CONTEXT);
    range = sc_find(ptr);
    VALUE(range && range->base == ptr && range->span->kind == K_IPC);
    VALUE(range->span->ctx == sc_current());
    if (!--range->opens)
        sc_range_free(range);
    return CUDA_SUCCESS;
}

/* ---- allocations that are created, exported, imported and mapped ---- */

static struct vmm *handles;

static struct vmm *vmm_new(struct backing *mem, const CUmemAllocationProp *prop)
{
    struct vmm *handle = calloc(1, sizeof(*handle));

    *handle = (struct vmm){handles, mem, *prop, 1, 0};
    return handles = handle;
}

static struct vmm *vmm_of(CUmemGenericAllocationHandle value)
{
    struct vmm *handle = handles;

    while (handle && (CUmemGenericAllocationHandle)handle != value)
        handle = handle->next;
    return handle && handle->refs ? handle : NULL;
}

/* Frees it where neither a reference nor a mapping is left. */
void sc_vmm_put(struct vmm *handle)
{
    struct vmm **at = &handles;

    if (handle->refs || handle->maps)
        return;
    while (*at != handle)
        at = &(*at)->next;
    *at = handle->next;
    sc_backing_put(handle->mem);
    free(handle);
}

void sc_share_reset(void)
{
    while (handles) {
        handles->refs = 0;
        sc_vmm_put(handles);
    }
}

long sc_live_handles(void)
{
    long n = 0;

    for (struct vmm *handle = handles; handle; handle = handle->next)
        n += handle->refs;
    return n;
}

static CUresult check(const CUmemAllocationProp *prop)
{
    int fabric;

    VALUE(prop && prop->type == ALLOCATION_PINNED && prop->location.type == LOCATION_DEVICE);
    VALUE(prop->location.id >= 0 && prop->location.id < sc_devices);
    VALUE(!(prop->requestedHandleTypes & ~(HANDLE_POSIX_FD | HANDLE_FABRIC)));
    if (prop->requestedHandleTypes & HANDLE_FABRIC) { /* 0: none; 2: the service is not running */
        fabric = (int)sc_setting("SOFTCUDA_FABRIC", 1);
        REQUIRE(fabric, CUDA_ERROR_NOT_SUPPORTED);
        REQUIRE(fabric != 2, CUDA_ERROR_NOT_PERMITTED);
    }
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, int which)
{
    CUresult error;

    CALL(INIT);
    VALUE(out && (which == 0 || which == 1));
    error = check(prop);
    *out = BLOCK_SIZE;
    return error;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size,
                         const CUmemAllocationProp *prop, unsigned long long flags)
{
    struct backing *mem;
    CUresult error;

    CALL(INIT);
    VALUE(out && size && !(size & (BLOCK_SIZE - 1)) && flags == 0);
    if ((error = check(prop)))
        return error;
    mem = sc_backing_new(size, sc_physical[prop->location.id], prop->requestedHandleTypes);
    REQUIRE(mem, CUDA_ERROR_OUT_OF_MEMORY);
    *out = (CUmemGenericAllocationHandle)vmm_new(mem, prop);
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle value)
{
    struct vmm *handle;

    CALL(INIT);
    VALUE((handle = vmm_of(value)));
    handle->refs--;
    sc_vmm_put(handle);
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out,
                                                    CUmemGenericAllocationHandle value)
{
    struct vmm *handle;

    CALL(INIT);
    VALUE(out && (handle = vmm_of(value)));
    *out = handle->prop;
    return CUDA_SUCCESS;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *ptr)
{
    struct range *range;

    CALL(INIT);
    range = sc_find((CUdeviceptr)ptr);
    VALUE(out && range && range->handle);
    range->handle->refs++;
    *out = (CUmemGenericAllocationHandle)range->handle;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t align, CUdeviceptr hint,
                                 unsigned long long flags)
{
    struct span *span;

    (void)hint;
    CALL(INIT);
    VALUE(out && size && !(size & (BLOCK_SIZE - 1)) && !(align & (align - 1)) && flags == 0);
    span = sc_span_new(size, align > BLOCK_SIZE ? align : BLOCK_SIZE, K_MAPPED, NULL);
    REQUIRE(span, CUDA_ERROR_OUT_OF_MEMORY);
    *out = span->base;
    return CUDA_SUCCESS;
}

static struct span *reservation(CUdeviceptr ptr, size_t size)
{
    for (struct span *span = sc_spans; span; span = span->next)
        if (span->kind == K_MAPPED && ptr - span->base < span->size)
            return size <= span->base + span->size - ptr ? span : NULL;
    return NULL;
}

API CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    struct span *span;

    CALL(INIT);
    span = reservation(ptr, size);
    VALUE(span && span->base == ptr && span->size == size && !span->ranges);
    sc_span_put(span);
    return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                      CUmemGenericAllocationHandle value, unsigned long long flags)
{
    struct vmm *handle;
    struct range *range;
    struct span *span;

    CALL(INIT);
    handle = vmm_of(value);
    span = reservation(ptr, size);
    VALUE(handle && span && size && offset == 0 && flags == 0 && size <= handle->mem->size);
    VALUE(!((ptr | size) & (BLOCK_SIZE - 1)));
    for (range = sc_ranges; range; range = range->next)
        VALUE(range->base >= ptr + size || range->base + range->size <= ptr);
    range = sc_range_new(span, ptr, size);
    range->mem = handle->mem;
    range->offset = 0;
    range->handle = handle;
    handle->maps++;
    return CUDA_SUCCESS;
}

/* Calls `each` for the mappings of a range, which they must fill. */
static CUresult mappings(CUdeviceptr ptr, size_t size, void (*each)(struct range *, const void *),
                         const void *data)
{
    CUdeviceptr end = ptr + size, at = ptr;
    struct range *range, *next;

    VALUE(size && end > ptr);
    for (range = sc_find(ptr); range && at < end; range = range->next) {
        VALUE(range->handle && range->base == at && at + range->size <= end);
        at += range->size;
    }
    VALUE(at == end);
    for (range = sc_find(ptr); range && range->base < end; range = next) {
        next = range->next;
        each(range, data);
    }
    return CUDA_SUCCESS;
}

static void unmap(struct range *range, const void *data)
{
    (void)data;
    sc_range_free(range);
}

static void allow(struct range *range, const void *data)
{
    const CUmemAccessDesc *desc = data;

    range->access[desc->location.id] = (unsigned char)desc->flags;
}

API CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    CALL(INIT);
    return mappings(ptr, size, unmap, NULL);
}

API CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    CUresult error = CUDA_SUCCESS;
    struct range *range;

    CALL(INIT);
    range = sc_find(ptr);
    VALUE(desc && count && range && range->handle);
    for (size_t i = 0; i < count; i++) {
        int id = desc[i].location.id;
        VALUE(desc[i].location.type == LOCATION_DEVICE && id >= 0 && id < sc_devices);
        VALUE(desc[i].flags == 0 || desc[i].flags == 1 || desc[i].flags == 3);
        REQUIRE(sc_can_access(sc_physical[id], range->mem->device),
                CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    for (size_t i = 0; i < count && !error; i++)
        error = mappings(ptr, size, allow, &desc[i]);
    return error;
}

API CUresult cuMemGetAccess(unsigned long long *out, const CUmemLocation *location, CUdeviceptr ptr)
{
    struct range *range;

    CALL(INIT);
    range = sc_find(ptr);
    VALUE(out && location && range && range->handle && location->type == LOCATION_DEVICE);
    VALUE(location->id >= 0 && location->id < sc_devices);
    *out = range->access[location->id];
    return CUDA_SUCCESS;
}

API CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle value, int type,
                                          unsigned long long flags)
{
    struct vmm *handle;
    int fd;

    CALL(INIT);
    handle = vmm_of(value);
    VALUE(out && handle && flags == 0 && (type == HANDLE_POSIX_FD || type == HANDLE_FABRIC));
    VALUE(handle->prop.requestedHandleTypes & type);
    if (type == HANDLE_FABRIC) {
        seal(out, FABRIC, handle->mem, 0, 0, handle->mem->size);
        return CUDA_SUCCESS;
    }
    fd = fcntl(handle->mem->fd, F_DUPFD, 0); /* inherited: no manual says otherwise */
    REQUIRE(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

/* A descriptor stays the caller's. */
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *os, int type)
{
    CUmemAllocationProp prop = {ALLOCATION_PINNED, 0, {LOCATION_DEVICE, 0}, NULL, {0}};
    struct backing *mem;
    struct wire wire;
    int fd = -1;

    CALL(INIT);
    VALUE(out && (type == HANDLE_POSIX_FD || type == HANDLE_FABRIC));
    if (type == HANDLE_POSIX_FD) {
        fd = fcntl((int)(intptr_t)os, F_DUPFD_CLOEXEC, 0);
    } else {
        VALUE(os);
        memcpy(&wire, os, sizeof(wire));
        VALUE(!memcmp(wire.magic, FABRIC, 8));
        REQUIRE(sc_setting("SOFTCUDA_FABRIC", 1) == 1, CUDA_ERROR_NOT_PERMITTED);
        if (lives(&wire))
            fd = open_of(wire.pid, wire.fd, O_RDWR);
    }
    mem = fd < 0 ? NULL : sc_backing_open(fd);
    VALUE(mem);
    if (!(mem->types & type)) {
        sc_backing_put(mem);
        return CUDA_ERROR_INVALID_VALUE;
    }
    prop.requestedHandleTypes = mem->types;
    for (int i = 0; i < sc_devices; i++)
        if (sc_physical[i] == mem->device)
            prop.location.id = i;
    *out = (CUmemGenericAllocationHandle)vmm_new(mem, &prop);
    return CUDA_SUCCESS;
}
