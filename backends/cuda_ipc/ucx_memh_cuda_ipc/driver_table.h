/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What is called of the CUDA driver by name, as its manual has it (CUDA Driver
 * API, 12.9), with the values and layouts that these calls take.  Names that
 * the vendor's header maps to others are here those that they are mapped to.
 */
#ifndef UCX_MEMH_CUDA_IPC_DRIVER_TABLE_H
#define UCX_MEMH_CUDA_IPC_DRIVER_TABLE_H

#include <ucx_memh/symbol_table.h> /* first: it needs _GNU_SOURCE */

/* ---- types: pointers to what only the driver knows, and numbers ---- */

typedef int cu_result_t; /* CUresult, an enum */
typedef int cu_device_t; /* CUdevice: the ordinal */
typedef uint64_t cu_address_t; /* CUdeviceptr */
typedef uint64_t cu_allocation_t; /* CUmemGenericAllocationHandle */
typedef void *cu_context_t;
typedef void *cu_stream_t;
typedef void *cu_event_t;

#define CU_HANDLE_SIZE 64 /* of a legacy and of a fabric handle */
#define CU_UUID_SIZE   16

typedef struct cu_handle { /* CUipcMemHandle, which goes by value; CUmemFabricHandle */
    uint8_t bytes[CU_HANDLE_SIZE];
} cu_handle_t;

typedef struct cu_access { /* CUmemAccessDesc, with its CUmemLocation */
    int location_type;
    int location_id;
    int flags;
} cu_access_t;

_Static_assert(sizeof(cu_handle_t) == 64, "CUipcMemHandle");
_Static_assert(sizeof(cu_access_t) == 12, "CUmemAccessDesc");

enum { /* CUresult */
       CU_SUCCESS = 0,
       CU_OUT_OF_MEMORY = 2,
       CU_NOT_INITIALIZED = 3,
       CU_DEINITIALIZED = 4,
       CU_NO_DEVICE = 100,
       CU_INVALID_CONTEXT = 201,
       CU_NOT_READY = 600
};

enum { /* CUpointer_attribute */
       CU_ATTRIBUTE_MEMORY_TYPE = 2,
       CU_ATTRIBUTE_BUFFER_ID = 7,
       CU_ATTRIBUTE_IS_MANAGED = 8,
       CU_ATTRIBUTE_DEVICE_ORDINAL = 9,
       CU_ATTRIBUTE_LEGACY_CAPABLE = 10,
       CU_ATTRIBUTE_HANDLE_TYPES = 14,
       CU_ATTRIBUTE_MEMPOOL = 17 /* since 11.3 */
};

enum {
    CU_MEMORYTYPE_DEVICE = 2,
    CU_HANDLE_POSIX_FD = 1, /* CUmemAllocationHandleType, a bit each */
    CU_HANDLE_FABRIC = 8,
    CU_LOCATION_DEVICE = 1,
    CU_ACCESS_READWRITE = 3,
    CU_IPC_LAZY_PEER_ACCESS = 1,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2
};

/* The oldest driver whose attributes tell memory of a pool from other memory (CUDA 11.3,
   says the programming guide on pointer attributes); an older one refuses to be asked. */
#define CU_VERSION_NEEDED 11030

/* clang-format off */
#define CU_SYMBOLS(X) \
    X(init,             "cuInit",                        NULL, 1, cu_result_t, (unsigned flags)) \
    X(driver_version,   "cuDriverGetVersion",            NULL, 1, cu_result_t, (int *version)) \
    X(error_name,       "cuGetErrorName",                NULL, 1, \
      cu_result_t, (cu_result_t error, const char **name)) \
    X(device_count,     "cuDeviceGetCount",              NULL, 1, cu_result_t, (int *count)) \
    X(device_get,       "cuDeviceGet",                   NULL, 1, \
      cu_result_t, (cu_device_t *device, int ordinal)) \
    X(device_uuid,      "cuDeviceGetUuid",               NULL, 1, \
      cu_result_t, (uint8_t *uuid, cu_device_t device)) \
    /* Since 11.4; of a part of a device its own. */ \
    X(device_uuid_v2,   "cuDeviceGetUuid_v2",            NULL, 0, \
      cu_result_t, (uint8_t *uuid, cu_device_t device)) \
    X(context_retain,   "cuDevicePrimaryCtxRetain",      NULL, 1, \
      cu_result_t, (cu_context_t *context, cu_device_t device)) \
    X(context_release,  "cuDevicePrimaryCtxRelease_v2",  NULL, 1, \
      cu_result_t, (cu_device_t device)) \
    X(context_push,     "cuCtxPushCurrent_v2",           NULL, 1, \
      cu_result_t, (cu_context_t context)) \
    X(context_pop,      "cuCtxPopCurrent_v2",            NULL, 1, \
      cu_result_t, (cu_context_t *context)) \
    X(attributes,       "cuPointerGetAttributes",        NULL, 1, \
      cu_result_t, (unsigned count, int *names, void **values, cu_address_t address)) \
    X(address_range,    "cuMemGetAddressRange_v2",       NULL, 1, \
      cu_result_t, (cu_address_t *base, size_t *size, cu_address_t address)) \
    X(ipc_get,          "cuIpcGetMemHandle",             NULL, 1, \
      cu_result_t, (cu_handle_t *handle, cu_address_t address)) \
    X(ipc_open,         "cuIpcOpenMemHandle_v2",         NULL, 1, \
      cu_result_t, (cu_address_t *address, cu_handle_t handle, unsigned flags)) \
    X(ipc_close,        "cuIpcCloseMemHandle",           NULL, 1, \
      cu_result_t, (cu_address_t address)) \
    X(retain,           "cuMemRetainAllocationHandle",   NULL, 1, \
      cu_result_t, (cu_allocation_t *allocation, void *address)) \
    X(release,          "cuMemRelease",                  NULL, 1, \
      cu_result_t, (cu_allocation_t allocation)) \
    X(export_handle,    "cuMemExportToShareableHandle",  NULL, 1, \
      cu_result_t, (void *handle, cu_allocation_t allocation, int type, \
                    unsigned long long flags)) \
    X(import_handle,    "cuMemImportFromShareableHandle", NULL, 1, \
      cu_result_t, (cu_allocation_t *allocation, void *handle, int type)) \
    X(reserve,          "cuMemAddressReserve",           NULL, 1, \
      cu_result_t, (cu_address_t *address, size_t size, size_t alignment, cu_address_t hint, \
                    unsigned long long flags)) \
    X(unreserve,        "cuMemAddressFree",              NULL, 1, \
      cu_result_t, (cu_address_t address, size_t size)) \
    X(map,              "cuMemMap",                      NULL, 1, \
      cu_result_t, (cu_address_t address, size_t size, size_t offset, \
                    cu_allocation_t allocation, unsigned long long flags)) \
    X(unmap,            "cuMemUnmap",                    NULL, 1, \
      cu_result_t, (cu_address_t address, size_t size)) \
    X(set_access,       "cuMemSetAccess",                NULL, 1, \
      cu_result_t, (cu_address_t address, size_t size, const cu_access_t *access, \
                    size_t count)) \
    X(copy,             "cuMemcpyAsync",                 NULL, 1, \
      cu_result_t, (cu_address_t to, cu_address_t from, size_t size, cu_stream_t stream)) \
    X(stream_create,    "cuStreamCreate",                NULL, 1, \
      cu_result_t, (cu_stream_t *stream, unsigned flags)) \
    X(stream_destroy,   "cuStreamDestroy_v2",            NULL, 1, \
      cu_result_t, (cu_stream_t stream)) \
    X(stream_finish,    "cuStreamSynchronize",           NULL, 1, \
      cu_result_t, (cu_stream_t stream)) \
    X(stream_wait,      "cuStreamWaitEvent",             NULL, 1, \
      cu_result_t, (cu_stream_t stream, cu_event_t event, unsigned flags)) \
    X(event_create,     "cuEventCreate",                 NULL, 1, \
      cu_result_t, (cu_event_t *event, unsigned flags)) \
    X(event_destroy,    "cuEventDestroy_v2",             NULL, 1, cu_result_t, (cu_event_t event)) \
    X(event_record,     "cuEventRecord",                 NULL, 1, \
      cu_result_t, (cu_event_t event, cu_stream_t stream)) \
    X(event_query,      "cuEventQuery",                  NULL, 1, cu_result_t, (cu_event_t event)) \
    /* No driver has it: the software one of the tests does. */ \
    X(software,         "softcuda_count",                NULL, 0, long, (const char *name))
/* clang-format on */

typedef struct cu_driver {
    ucxm_library_t library;
    CU_SYMBOLS(UCXM_TABLE_MEMBER)
} cu_driver_t;

#define UCXM_TABLE_TYPE cu_driver_t
static const ucxm_symbol_t cu_symbols[] = {CU_SYMBOLS(UCXM_TABLE_ROW)};
#undef UCXM_TABLE_TYPE
#define CU_SYMBOL_COUNT (sizeof(cu_symbols) / sizeof(cu_symbols[0]))

/* Versions are 1000 * major + 10 * minor. */
static inline void cu_too_old(const char *path, int version, char *text, size_t size)
{
    snprintf(text, size, "%s is of CUDA %d.%d, too old: %d.%d or later is needed", path,
             version / 1000, version % 1000 / 10, CU_VERSION_NEEDED / 1000,
             CU_VERSION_NEEDED % 1000 / 10);
}

#endif
