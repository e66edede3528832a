/* SPDX-License-Identifier: BSD-3-Clause */
/* Devices, and contexts on them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda.h"

int sc_devices;
int sc_physical[MAX_DEVICES];

static CUcontext contexts; /* ended ones stay: their pointers may still be asked for */
static CUcontext primaries[MAX_DEVICES];
static unsigned long long context_id;
static __thread CUcontext stack[32];
static __thread int depth;

long sc_setting(const char *name, long otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

/* SOFTCUDA_DEVICES are in the machine, CUDA_VISIBLE_DEVICES (numbers) says which we see. */
CUresult sc_devices_init(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    long all = sc_setting("SOFTCUDA_DEVICES", 1);
    char *end;

    sc_devices = 0;
    if (all > MAX_DEVICES)
        all = MAX_DEVICES;
    if (!visible) {
        for (; sc_devices < all; sc_devices++)
            sc_physical[sc_devices] = sc_devices;
    } else {
        for (; *visible && sc_devices < MAX_DEVICES; visible = end + (*end == ',')) {
            long which = strtol(visible, &end, 10);
            if (end == visible || which < 0 || which >= all)
                break;
            sc_physical[sc_devices++] = (int)which;
        }
    }
    return sc_devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

int sc_can_access(int device, int peer)
{
    return device == peer || sc_setting("SOFTCUDA_PEERS", 1);
}

static int is_device(CUdevice device)
{
    return device >= 0 && device < sc_devices;
}

API CUresult cuDeviceGetCount(int *count)
{
    CALL(INIT);
    VALUE(count);
    *count = sc_devices;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CALL(INIT);
    VALUE(device);
    REQUIRE(is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CALL(INIT);
    VALUE(name && length > 0);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "softcuda %d", sc_physical[device]);
    return CUDA_SUCCESS;
}

static CUresult uuid_of(CUuuid *uuid, CUdevice device)
{
    VALUE(uuid);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    memset(uuid, 0, sizeof(*uuid));
    memcpy(uuid->bytes, "softcuda", 8);
    uuid->bytes[15] = (char)(sc_physical[device] + 1);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    CALL(INIT);
    return uuid_of(uuid, device);
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    CALL(INIT);
    return uuid_of(uuid, device);
}

/* CUdevice_attribute; what is not here is 0. */
API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    CALL(INIT);
    VALUE(value && attribute > 0 && attribute < 256);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    switch (attribute) {
    case 16: /* MULTIPROCESSOR_COUNT */
    case 40: /* ASYNC_ENGINE_COUNT */
    case 41: /* UNIFIED_ADDRESSING */
    case 83: /* MANAGED_MEMORY */
    case 89: /* CONCURRENT_MANAGED_ACCESS */
    case 102: /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    case 103: /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    case 110: /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
    case 115: /* MEMORY_POOLS_SUPPORTED */
    case 116: /* GPU_DIRECT_RDMA_SUPPORTED */
    case 119: /* MEMPOOL_SUPPORTED_HANDLE_TYPES */
    case 125: /* IPC_EVENT_SUPPORTED */
        *value = 1;
        break;
    case 33: /* PCI_BUS_ID */
        *value = sc_physical[device] + 1;
        break;
    case 75: /* COMPUTE_CAPABILITY_MAJOR */
        *value = 9;
        break;
    case 124: /* DMA_BUF_SUPPORTED */
        *value = sc_setting("SOFTCUDA_DMABUF", 1) != 0;
        break;
    case 128: /* HANDLE_TYPE_FABRIC_SUPPORTED */
        *value = sc_setting("SOFTCUDA_FABRIC", 1) != 0;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    CALL(INIT);
    VALUE(can);
    REQUIRE(is_device(device) && is_device(peer), CUDA_ERROR_INVALID_DEVICE);
    *can = device != peer && sc_can_access(sc_physical[device], sc_physical[peer]);
    return CUDA_SUCCESS;
}

/* ---- contexts ---- */

CUcontext sc_current(void)
{
    return depth ? stack[depth - 1] : NULL;
}

static int is_context(CUcontext ctx)
{
    for (CUcontext each = contexts; each; each = each->next)
        if (each == ctx)
            return each->alive;
    return 0;
}

static CUcontext make(CUdevice device, int primary)
{
    CUcontext ctx = calloc(1, sizeof(*ctx));

    ctx->device = device;
    ctx->primary = primary;
    ctx->next = contexts;
    contexts = ctx;
    return ctx;
}

static void begin(CUcontext ctx)
{
    ctx->alive = 1;
    ctx->sticky = CUDA_SUCCESS;
    ctx->peers = 0;
    ctx->id = ++context_id;
}

static void end(CUcontext ctx)
{
    sc_streams_drop(ctx);
    sc_memory_drop(ctx);
    ctx->alive = ctx->retains = 0;
}

void sc_contexts_reset(void)
{
    for (CUcontext ctx = contexts; ctx; ctx = ctx->next)
        if (ctx->alive)
            end(ctx);
    memset(primaries, 0, sizeof(primaries));
    depth = 0;
}

long sc_live_contexts(void)
{
    long n = 0;

    for (CUcontext ctx = contexts; ctx; ctx = ctx->next)
        n += ctx->primary ? ctx->retains : ctx->alive;
    return n;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CUcontext ctx;

    CALL(INIT);
    VALUE(out);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    if (!primaries[device])
        primaries[device] = make(device, 1);
    ctx = primaries[device];
    if (!ctx->retains++)
        begin(ctx);
    *out = ctx;
    return CUDA_SUCCESS;
}

static CUresult release(CUdevice device, int all)
{
    CUcontext ctx;

    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    ctx = primaries[device];
    if (all && (!ctx || !ctx->retains))
        return CUDA_SUCCESS;
    REQUIRE(ctx && ctx->retains, CUDA_ERROR_INVALID_CONTEXT);
    if (all || !--ctx->retains)
        end(ctx);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CALL(INIT);
    return release(device, 0);
}

/* As the driver: whoever retained it still has to release, so it begins anew at the next retain. */
API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    CALL(INIT);
    return release(device, 1);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    CALL(INIT);
    VALUE(flags && active);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    *flags = 0;
    *active = primaries[device] && primaries[device]->alive;
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext ctx)
{
    REQUIRE(depth < (int)(sizeof(stack) / sizeof(*stack)), CUDA_ERROR_OUT_OF_MEMORY);
    stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

API CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
    CALL(INIT);
    VALUE(out);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    *out = make(device, 0);
    (*out)->flags = flags;
    begin(*out);
    return push(*out);
}

API CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    CALL(INIT);
    REQUIRE(is_context(ctx) && !ctx->primary, CUDA_ERROR_INVALID_CONTEXT);
    end(ctx);
    if (sc_current() == ctx)
        depth--;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
    CALL(INIT);
    REQUIRE(is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    return push(ctx);
}

API CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    CALL(INIT);
    REQUIRE(depth, CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (out)
        *out = stack[depth];
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext ctx)
{
    CALL(INIT);
    REQUIRE(!ctx || is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    depth -= depth > 0;
    return ctx ? push(ctx) : CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *out)
{
    CALL(INIT);
    VALUE(out);
    *out = sc_current();
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    CALL(CONTEXT);
    VALUE(device);
    *device = sc_current()->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
    CALL(INIT);
    VALUE(id);
    ctx = ctx ? ctx : sc_current();
    REQUIRE(is_context(ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    *id = ctx->id;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
    CALL(CONTEXT);
    sc_streams_drain(sc_current(), 0);
    return sc_current()->sticky;
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    CUcontext ctx;

    CALL(CONTEXT);
    ctx = sc_current();
    VALUE(flags == 0);
    REQUIRE(is_context(peer) && peer != ctx, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(sc_can_access(sc_physical[ctx->device], sc_physical[peer->device]),
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    REQUIRE(!(ctx->peers & 1u << peer->device), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    ctx->peers |= 1u << peer->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    CUcontext ctx;

    CALL(CONTEXT);
    ctx = sc_current();
    REQUIRE(is_context(peer), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(ctx->peers & 1u << peer->device, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    ctx->peers &= ~(1u << peer->device);
    return CUDA_SUCCESS;
}
