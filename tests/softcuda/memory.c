/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory, and what is known of a pointer.  Device memory is a memfd which the driver has mapped for
 * itself; at the address that the application gets nothing may be read or written, as on most real
 * devices.  Addresses come from an arena that begins at the same place in each process, so equal
 * addresses in two processes are the rule.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "softcuda.h"

#define ARENA ((size_t)64 << 30)

struct span *sc_spans;   /* by address, as the ranges are */
struct range *sc_ranges;
int sc_ledger = -1;
unsigned long long sc_ledger_inode;

static CUdeviceptr arena;
static unsigned long long last_id;

CUresult sc_memory_init(void)
{
    struct stat st;
    void *at;

    if (!arena) {
        at = mmap((void *)sc_setting("SOFTCUDA_ARENA", 0x7e9000000000), ARENA, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        REQUIRE(at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
        arena = (CUdeviceptr)at + (-(CUdeviceptr)at & (BLOCK_SIZE - 1));
    }
    sc_ledger = memfd_create("softcuda-ledger", MFD_CLOEXEC);
    REQUIRE(sc_ledger >= 0 && !fstat(sc_ledger, &st), CUDA_ERROR_OPERATING_SYSTEM);
    sc_ledger_inode = st.st_ino;
    return CUDA_SUCCESS;
}

static void mark(unsigned long long id, char lives)
{
    if (pwrite(sc_ledger, &lives, 1, (off_t)id) != 1)
        abort();
}

/* ---- memfds; what one is stands in its name, for who imports it ---- */

static struct backing *backing(int fd, size_t size, int device, int types)
{
    struct backing *mem = calloc(1, sizeof(*mem));
    struct stat st;
    void *view = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (view == MAP_FAILED || fstat(fd, &st)) {
        close(fd);
        free(mem);
        return NULL;
    }
    *mem = (struct backing){fd, 1, device, types, size, st.st_ino, view};
    return mem;
}

struct backing *sc_backing_new(size_t size, int device, int types)
{
    char name[64];
    int fd;

    snprintf(name, sizeof(name), "softcuda:%d:%d", device, types);
    fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0)
        return NULL;
    if (size > ARENA || ftruncate(fd, (off_t)size)) {
        close(fd);
        return NULL;
    }
    return backing(fd, size, device, types);
}

struct backing *sc_backing_open(int fd)
{
    char path[64], name[128];
    struct stat st;
    int device, types;
    ssize_t length;

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    length = readlink(path, name, sizeof(name) - 1);
    name[length < 0 ? 0 : length] = 0;
    if (sscanf(name, "/memfd:softcuda:%d:%d", &device, &types) != 2 || fstat(fd, &st)) {
        close(fd);
        return NULL;
    }
    return backing(fd, (size_t)st.st_size, device, types);
}

void sc_backing_put(struct backing *mem)
{
    if (--mem->refs)
        return;
    munmap(mem->view, mem->size);
    close(mem->fd);
    free(mem);
}

/* ---- addresses ---- */

/* Takes over a reference to `mem`, also where it fails. */
struct span *sc_span_new(size_t size, size_t align, enum kind kind, struct backing *mem)
{
    struct span **at = &sc_spans, *span;
    CUdeviceptr base = arena + (-arena & (align - 1));

    for (; *at && (*at)->base < base + size; at = &(*at)->next)
        if ((*at)->base + (*at)->size > base) {
            base = (*at)->base + (*at)->size;
            base += -base & (align - 1);
        }
    if (base + size > arena + ARENA - BLOCK_SIZE ||
        ((kind == K_MANAGED || kind == K_HOST) &&
         mmap((void *)base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, mem->fd, 0) ==
             MAP_FAILED)) {
        if (mem)
            sc_backing_put(mem);
        return NULL;
    }
    span = calloc(1, sizeof(*span));
    span->base = base;
    span->size = size;
    span->kind = kind;
    span->mem = mem;
    span->next = *at;
    *at = span;
    return span;
}

void sc_span_put(struct span *span)
{
    struct span **at = &sc_spans;

    while (*at != span)
        at = &(*at)->next;
    *at = span->next;
    if (span->kind == K_MANAGED || span->kind == K_HOST)
        mmap((void *)span->base, span->size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (span->mem)
        sc_backing_put(span->mem);
    free(span);
}

struct range *sc_range_new(struct span *span, CUdeviceptr base, size_t size)
{
    struct range **at = &sc_ranges, *range = calloc(1, sizeof(*range));

    while (*at && (*at)->base < base)
        at = &(*at)->next;
    range->span = span;
    range->base = base;
    range->size = size;
    range->id = ++last_id;
    range->mem = span->mem;
    range->offset = (size_t)(base - span->base);
    range->next = *at;
    *at = range;
    span->ranges++;
    mark(range->id, 1);
    return range;
}

void sc_range_free(struct range *range)
{
    struct range **at = &sc_ranges;
    struct span *span = range->span;

    while (*at != range)
        at = &(*at)->next;
    *at = range->next;
    mark(range->id, 0);
    if (range->handle) {
        range->handle->maps--;
        sc_vmm_put(range->handle);
    }
    free(range);
    if (!--span->ranges && span->mem)
        sc_span_put(span);
}

void sc_memory_drop(CUcontext ctx)
{
    struct range *range, *next;
    struct span *span, *after;

    for (range = sc_ranges; range; range = next) {
        next = range->next;
        if (!ctx || range->span->ctx == ctx)
            sc_range_free(range);
    }
    if (ctx)
        return;
    for (span = sc_spans; span; span = after) { /* reservations */
        after = span->next;
        sc_span_put(span);
    }
    close(sc_ledger);
}

struct range *sc_find(CUdeviceptr ptr)
{
    for (struct range *range = sc_ranges; range; range = range->next)
        if (ptr - range->base < range->size)
            return range;
    return NULL;
}

static int in_arena(CUdeviceptr ptr)
{
    return ptr - arena < ARENA;
}

/* All of one allocation, or mappings side by side that `ctx` has access to; or host memory. */
int sc_covered(CUcontext ctx, CUdeviceptr ptr, size_t size, int access)
{
    struct range *range;

    if (!in_arena(ptr))
        return ptr != 0;
    for (;;) {
        if (!(range = sc_find(ptr)))
            return 0;
        if (range->handle && !(range->access[ctx->device] & access))
            return 0;
        if (size <= range->base + range->size - ptr)
            return 1;
        if (!range->handle)
            return 0;
        size -= range->base + range->size - ptr;
        ptr = range->base + range->size;
    }
}

/* Where the driver has it, and how much of it lies together. */
static char *view(CUdeviceptr ptr, size_t *size)
{
    struct range *range = in_arena(ptr) ? sc_find(ptr) : NULL;
    size_t left;

    if (!range)
        return (char *)ptr;
    left = (size_t)(range->base + range->size - ptr);
    if (*size > left)
        *size = left;
    return range->mem->view + range->offset + (ptr - range->base);
}

/* By the kernel, because it tells of host memory that is not there.  Whether all was copied. */
static int move(char *dst, char *src, size_t size)
{
    struct iovec to = {dst, size}, from = {src, size};
    ssize_t done = process_vm_readv(getpid(), &to, 1, &from, 1, 0);

    if (done < 0 && (errno == ENOSYS || errno == EPERM)) {
        memmove(dst, src, size);
        return 1;
    }
    return done == (ssize_t)size;
}

int sc_copy(CUcontext ctx, CUdeviceptr dst, CUdeviceptr src, size_t size)
{
    size_t part;

    if (!sc_covered(ctx, dst, size, 2) || !sc_covered(ctx, src, size, 1))
        return 0;
    for (; size; size -= part, dst += part, src += part) {
        char *to, *from;
        part = size < (64 << 20) ? size : 64 << 20;
        to = view(dst, &part);
        from = view(src, &part);
        if (!move(to, from, part))
            return 0;
    }
    return 1;
}

int sc_fill(CUcontext ctx, CUdeviceptr dst, int value, size_t size)
{
    size_t part;

    if (!in_arena(dst) || !sc_covered(ctx, dst, size, 2))
        return 0;
    for (; size; size -= part, dst += part) {
        char *to;
        part = size;
        to = view(dst, &part);
        memset(to, value, part);
    }
    return 1;
}

/* What is there now, whatever is queued and whoever may see it: for tests.  -1: not memory. */
static int peep(CUdeviceptr ptr, char *host, size_t size, int write)
{
    int good = 1;
    size_t part;

    pthread_mutex_lock(&sc_lock);
    for (; size && good; size -= part, ptr += part, host += part) {
        char *at;
        if (!(good = in_arena(ptr) && sc_find(ptr)))
            break;
        part = size;
        at = view(ptr, &part);
        memcpy(write ? at : host, write ? host : at, part);
    }
    pthread_mutex_unlock(&sc_lock);
    return good ? 0 : -1;
}

API int softcuda_peek(CUdeviceptr ptr, void *into, size_t size)
{
    return peep(ptr, into, size, 0);
}

API int softcuda_poke(CUdeviceptr ptr, const void *from, size_t size)
{
    return peep(ptr, (char *)from, size, 1);
}

/* ---- allocation ---- */

static struct range *allocate(size_t size, enum kind kind, CUcontext ctx, int device, int types)
{
    size_t whole = (size + BLOCK_SIZE - 1) & ~(BLOCK_SIZE - 1);
    struct backing *mem = sc_backing_new(whole, sc_physical[device], types);
    struct span *span = mem ? sc_span_new(whole, BLOCK_SIZE, kind, mem) : NULL;

    if (!span)
        return NULL;
    span->ctx = ctx;
    return sc_range_new(span, span->base, size);
}

/* A place in a block that other small allocations of the context share. */
static struct range *suballocate(size_t size, CUcontext ctx)
{
    for (struct span *span = sc_spans; span; span = span->next) {
        CUdeviceptr base = span->base;
        if (!span->shared || span->ctx != ctx)
            continue;
        for (struct range *range = sc_ranges; range; range = range->next)
            if (range->span == span && range->base < base + size)
                base = range->base + ((range->size + GRANULE - 1) & ~(GRANULE - 1));
        if (base + size <= span->base + span->size)
            return sc_range_new(span, base, size);
    }
    return NULL;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size)
{
    struct range *range = NULL;
    int small = size <= BLOCK_SIZE / 2;
    CUcontext ctx;

    CALL(CONTEXT);
    VALUE(out && size);
    ctx = sc_current();
    if (small)
        range = suballocate(size, ctx);
    if (!range) {
        range = allocate(size, K_DEVICE, ctx, ctx->device, 0);
        REQUIRE(range, CUDA_ERROR_OUT_OF_MEMORY);
        range->span->shared = small;
    }
    *out = range->base;
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t size, unsigned flags)
{
    struct range *range;

    CALL(CONTEXT);
    VALUE(out && size && (flags == 1 || flags == 2));
    range = allocate(size, K_MANAGED, sc_current(), sc_current()->device, 0);
    REQUIRE(range, CUDA_ERROR_OUT_OF_MEMORY);
    *out = range->base;
    return CUDA_SUCCESS;
}

static CUresult host(void **out, size_t size)
{
    struct range *range;

    VALUE(out && size);
    range = allocate(size, K_HOST, sc_current(), sc_current()->device, 0);
    REQUIRE(range, CUDA_ERROR_OUT_OF_MEMORY);
    *out = (void *)range->base;
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocHost_v2(void **out, size_t size)
{
    CALL(CONTEXT);
    return host(out, size);
}

API CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags)
{
    CALL(CONTEXT);
    VALUE(flags < 8);
    return host(out, size);
}

API CUresult cuMemFreeHost(void *ptr)
{
    struct range *range;

    CALL(INIT);
    range = sc_find((CUdeviceptr)ptr);
    VALUE(range && range->base == (CUdeviceptr)ptr && range->span->kind == K_HOST);
    sc_range_free(range);
    return CUDA_SUCCESS;
}

static CUresult release(CUdeviceptr ptr)
{
    struct range *range = sc_find(ptr);

    if (!ptr)
        return CUDA_SUCCESS;
    VALUE(range && range->base == ptr && range->span->kind < K_IPC && range->span->kind != K_HOST);
    sc_streams_drain(range->span->ctx, 0); /* it waits for all that may use the memory */
    sc_range_free(range);
    return CUDA_SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr ptr)
{
    CALL(CONTEXT);
    return release(ptr);
}

/* ---- pools, of which the fake has what they refuse ---- */

static struct pool *pools;

static struct pool *pool_new(int device, int types, int is_default)
{
    struct pool *pool = calloc(1, sizeof(*pool));

    *pool = (struct pool){pools, device, types, is_default};
    return pools = pool;
}

static struct pool *default_pool(int device)
{
    for (struct pool *pool = pools; pool; pool = pool->next)
        if (pool->is_default && pool->device == device)
            return pool;
    return pool_new(device, 0, 1);
}

static int is_pool(CUmemoryPool pool)
{
    for (struct pool *each = pools; each; each = each->next)
        if (each == pool)
            return 1;
    return 0;
}

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device)
{
    CALL(INIT);
    VALUE(out);
    REQUIRE(device >= 0 && device < sc_devices, CUDA_ERROR_INVALID_DEVICE);
    *out = default_pool(device);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props)
{
    CALL(INIT);
    VALUE(out && props && props->allocType == ALLOCATION_PINNED);
    VALUE(props->location.type == LOCATION_DEVICE && !(props->handleTypes & ~9));
    VALUE(props->location.id >= 0 && props->location.id < sc_devices);
    *out = pool_new(props->location.id, props->handleTypes, 0);
    return CUDA_SUCCESS;
}

/* The memory of it that is still there stays usable. */
API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    struct pool **at = &pools;

    CALL(INIT);
    VALUE(is_pool(pool) && !pool->is_default);
    while (*at != pool)
        at = &(*at)->next;
    *at = pool->next;
    for (struct range *range = sc_ranges; range; range = range->next)
        if (range->pool == pool)
            range->pool = NULL;
    free(pool);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, int type,
                                              unsigned long long flags)
{
    CALL(INIT);
    VALUE(out && flags == 0 && is_pool(pool) && pool->types & type);
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemPoolExportPointer(void *out, CUdeviceptr ptr)
{
    struct range *range;

    CALL(INIT);
    range = sc_find(ptr);
    VALUE(out && range && range->pool && range->pool->types);
    return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult from_pool(CUdeviceptr *out, size_t size, struct pool *pool)
{
    struct range *range;

    VALUE(out && size && is_pool(pool));
    range = allocate(size, K_POOL, NULL, pool->device, pool->types);
    REQUIRE(range, CUDA_ERROR_OUT_OF_MEMORY);
    range->pool = pool;
    *out = range->base;
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream stream)
{
    (void)stream;
    CALL(CONTEXT);
    return from_pool(out, size, default_pool(sc_current()->device));
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t size, CUmemoryPool pool,
                                     CUstream stream)
{
    (void)stream;
    CALL(CONTEXT);
    return from_pool(out, size, pool);
}

/* At once: the streams are drained first. */
API CUresult cuMemFreeAsync(CUdeviceptr ptr, CUstream stream)
{
    (void)stream;
    CALL(CONTEXT);
    return release(ptr);
}

/* ---- what is known of a pointer ---- */

static int legacy_capable(const struct range *range)
{
    return range->span->kind == K_DEVICE;
}

/* Pages of managed memory are where they were used last; here every second one is on the host. */
static int on_host(const struct range *range, CUdeviceptr ptr)
{
    return (ptr - range->base) / 4096 % 2 == 0;
}

static int ordinal_of(const struct range *range)
{
    if (range->span->ctx)
        return range->span->ctx->device;
    for (int i = 0; i < sc_devices; i++)
        if (sc_physical[i] == range->mem->device)
            return i;
    return 0; /* imported, of a device that this process does not see */
}

static size_t size_of(int attribute)
{
    switch (attribute) {
    case 1:
    case 3:
    case 4:
    case 7:
    case 11:
    case 12:
    case 14:
        return 8;
    case 17: /* MEMPOOL_HANDLE: older drivers do not know it */
        return sc_setting("SOFTCUDA_DRIVER_VERSION", 12090) < 11030 ? 0 : 8;
    case 2:
    case 6:
    case 8:
    case 9:
    case 10:
    case 13:
    case 15:
        return 4;
    default:
        return 0;
    }
}

static CUresult attribute_of(CUdeviceptr ptr, int attribute, void *data)
{
    struct range *range = sc_find(ptr);
    enum kind kind = range ? range->span->kind : K_DEVICE;
    uint64_t value = 0;

    VALUE(data && size_of(attribute));
    if (!range) { /* addresses may be reserved and have no memory */
        struct span *span = sc_spans;
        while (span && ptr - span->base >= span->size)
            span = span->next;
        VALUE(span && !span->mem && (attribute >= 11 && attribute <= 13));
        value = attribute == 11 ? span->base : attribute == 12 ? span->size : 0;
        memcpy(data, &value, size_of(attribute));
        return CUDA_SUCCESS;
    }
    switch (attribute) {
    case 1: /* CONTEXT */
        value = (uint64_t)range->span->ctx;
        break;
    case 2: /* MEMORY_TYPE */
        value = kind == K_HOST || (kind == K_MANAGED && on_host(range, ptr)) ? MEMORYTYPE_HOST
                                                                             : MEMORYTYPE_DEVICE;
        break;
    case 3: /* DEVICE_POINTER */
        REQUIRE(sc_current(), CUDA_ERROR_INVALID_CONTEXT);
        value = ptr;
        break;
    case 4: /* HOST_POINTER */
        VALUE(kind == K_HOST || kind == K_MANAGED);
        value = ptr;
        break;
    case 6: /* SYNC_MEMOPS */
        value = (uint64_t)range->sync_memops;
        break;
    case 7: /* BUFFER_ID */
        value = range->id;
        break;
    case 8: /* IS_MANAGED */
        value = kind == K_MANAGED;
        break;
    case 9: /* DEVICE_ORDINAL */
        value = (uint64_t)ordinal_of(range);
        break;
    case 10: /* IS_LEGACY_CUDA_IPC_CAPABLE */
        value = (uint64_t)legacy_capable(range);
        break;
    case 11: /* RANGE_START_ADDR */
        value = range->handle ? range->span->base : range->base;
        break;
    case 12: /* RANGE_SIZE */
        value = range->handle ? range->span->size : range->size;
        break;
    case 13: /* MAPPED */
        value = 1;
        break;
    case 14: /* ALLOWED_HANDLE_TYPES */
        value = (uint64_t)range->mem->types;
        break;
    case 15: /* IS_GPU_DIRECT_RDMA_CAPABLE */
        value = kind == K_DEVICE ||
                (range->handle && range->handle->prop.allocFlags.gpuDirectRDMACapable);
        break;
    case 17: /* MEMPOOL_HANDLE */
        value = (uint64_t)range->pool;
        break;
    }
    memcpy(data, &value, size_of(attribute));
    return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr ptr)
{
    CALL(INIT);
    return attribute_of(ptr, attribute, data);
}

/* What is not known of the pointer is 0, and no error. */
API CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **data, CUdeviceptr ptr)
{
    CALL(INIT);
    VALUE(n && attributes && data);
    for (unsigned i = 0; i < n; i++) {
        VALUE(data[i] && size_of(attributes[i]));
        if (attribute_of(ptr, attributes[i], data[i]))
            memset(data[i], 0, size_of(attributes[i]));
    }
    return CUDA_SUCCESS;
}

API CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr ptr)
{
    struct range *range;

    CALL(INIT);
    range = sc_find(ptr);
    VALUE(value && range && attribute == 6); /* SYNC_MEMOPS */
    range->sync_memops = *(const unsigned *)value != 0;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr ptr)
{
    struct range *range;

    CALL(CONTEXT);
    REQUIRE((range = sc_find(ptr)), CUDA_ERROR_NOT_FOUND);
    if (base)
        *base = range->base;
    if (size)
        *size = range->size;
    return CUDA_SUCCESS;
}

/*
 * The memfd stands in for the dmabuf.  It begins where its memory begins, so the fake cannot make
 * one of a range that begins further on, or goes over several mappings; nor can each real driver.
 */
API CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr ptr, size_t size, int type,
                                           unsigned long long flags)
{
    struct range *range;
    int fd;

    CALL(INIT);
    REQUIRE(sc_setting("SOFTCUDA_DMABUF", 1), CUDA_ERROR_NOT_SUPPORTED);
    VALUE(out && size && type == RANGE_DMA_BUF_FD && flags <= 1 && !((ptr | size) & 4095));
    range = sc_find(ptr);
    VALUE(range && (range->span->kind == K_DEVICE || range->handle));
    VALUE(size <= ((range->base + range->size - ptr + 4095) & ~4095ull));
    REQUIRE(range->base == ptr && !range->offset, CUDA_ERROR_NOT_SUPPORTED);
    fd = fcntl(range->mem->fd, F_DUPFD_CLOEXEC, 0);
    REQUIRE(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return CUDA_SUCCESS;
}
