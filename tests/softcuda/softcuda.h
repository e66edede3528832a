/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A small libcuda.so.1 in software, for tests: the CUDA driver's ABI over shared memory.  Names,
 * layouts and values are those of the CUDA driver API (cuda.h 12.9); semantics are those of its
 * reference manual, and where that is silent those that users report (README.md says which).
 *
 * One lock guards all of it.  What begins with sc_ is ours, and is called with the lock held.
 */
#ifndef SOFTCUDA_H
#define SOFTCUDA_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct pool *CUmemoryPool;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct {
    char bytes[16];
} CUuuid;
typedef struct {
    char reserved[64];
} CUipcMemHandle;
typedef struct {
    int type, id;
} CUmemLocation;
typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;
typedef struct {
    int allocType, handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "CUmemAllocationProp");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "CUmemAccessDesc");
_Static_assert(sizeof(CUmemPoolProps) == 88, "CUmemPoolProps");

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
};

enum { HANDLE_POSIX_FD = 1, HANDLE_FABRIC = 8 };
enum { LOCATION_DEVICE = 1, ALLOCATION_PINNED = 1, ACCESS_READ = 1, ACCESS_READWRITE = 3 };
enum { MEMORYTYPE_HOST = 1, MEMORYTYPE_DEVICE = 2 };
enum { IPC_LAZY_ENABLE_PEER_ACCESS = 1, RANGE_DMA_BUF_FD = 1, STREAM_NON_BLOCKING = 1 };

#define API __attribute__((visibility("default")))
enum { MAX_DEVICES = 8 };
#define BLOCK_SIZE ((size_t)2 << 20) /* what the driver takes from the device at a time */
#define GRANULE    ((size_t)512)        /* cuMemAlloc's alignment within a block */

/* ---- entry.c ---- */

struct call { /* one for each function that has been called */
    const char *name;
    long count;
    struct call *next;
};
enum need { ANYTIME, INIT, CONTEXT }; /* what has to be there before a function works */

extern pthread_mutex_t sc_lock;
CUresult sc_enter(struct call *call, enum need need);
void sc_leave(void *);

/* First line of each function: takes the lock, counts, and returns if it must fail. */
#define CALL(need)                                                                         \
    static struct call call_ = {__func__, 0, NULL};                                        \
    __attribute__((cleanup(sc_leave), unused)) int locked_ = pthread_mutex_lock(&sc_lock); \
    CUresult error_ = sc_enter(&call_, need);                                              \
    if (error_)                                                                            \
    return error_
#define REQUIRE(condition, error) \
    do {                          \
        if (!(condition))         \
            return error;         \
    } while (0)
#define VALUE(condition) REQUIRE(condition, CUDA_ERROR_INVALID_VALUE)

/* ---- device.c ---- */

struct context {
    struct context *next;
    int device, primary, retains; /* retains: of a primary context; alive while it is not zero */
    int alive;
    CUresult sticky;    /* what all calls give since an asynchronous operation went wrong */
    unsigned flags;
    unsigned peers;     /* devices whose memory it may use, a bit each */
    unsigned long long id;
    CUstream defaults[2]; /* the legacy default stream, and the threads' own taken as one */
};

extern int sc_devices;                 /* visible ones */
extern int sc_physical[MAX_DEVICES];   /* ordinal -> which device of the machine */
long sc_setting(const char *name, long otherwise);
CUresult sc_devices_init(void);
CUcontext sc_current(void);
int sc_can_access(int device, int peer); /* physical ones */
void sc_contexts_reset(void);
long sc_live_contexts(void);

/* ---- memory.c ---- */

struct backing { /* memory of a device: a memfd that only the driver has mapped */
    int fd, refs, device, types; /* device: a physical one; types: how it may be exported */
    size_t size;
    unsigned long long inode;
    char *view;
};

enum kind { K_DEVICE, K_MANAGED, K_HOST, K_POOL, K_IPC, K_MAPPED };

struct span { /* addresses taken from the arena */
    struct span *next;
    CUdeviceptr base;
    size_t size;
    enum kind kind;
    int shared;   /* by several small allocations */
    int ranges;
    struct backing *mem; /* NULL: reserved addresses, which have memory once it is mapped there */
    CUcontext ctx;
    unsigned long long exporter; /* K_IPC: whose memory */
};

struct range { /* what one allocation, opened handle or mapping is: a pointer is known by it */
    struct range *next;
    struct span *span;
    CUdeviceptr base;
    size_t size;
    unsigned long long id;
    struct backing *mem;
    size_t offset;
    int sync_memops;
    CUmemoryPool pool;                /* K_POOL */
    unsigned long long foreign;       /* K_IPC: the exporter's id of it */
    long opens;                       /* K_IPC */
    struct vmm *handle;               /* K_MAPPED */
    unsigned char access[MAX_DEVICES]; /* K_MAPPED: by ordinal */
};

struct pool {
    struct pool *next;
    int device, types, is_default;
};

extern struct span *sc_spans;
extern struct range *sc_ranges;
extern int sc_ledger; /* memfd: the byte at an allocation's id is 1 while it lives */
extern unsigned long long sc_ledger_inode;

CUresult sc_memory_init(void);
struct backing *sc_backing_new(size_t size, int device, int types);
struct backing *sc_backing_open(int fd); /* takes over `fd`; NULL if it is not the fake's memory */
void sc_backing_put(struct backing *mem);
struct span *sc_span_new(size_t size, size_t align, enum kind kind, struct backing *mem);
void sc_span_put(struct span *span);
struct range *sc_range_new(struct span *span, CUdeviceptr base, size_t size);
void sc_range_free(struct range *range);
struct range *sc_find(CUdeviceptr ptr);
int sc_covered(CUcontext ctx, CUdeviceptr ptr, size_t size, int access);
int sc_copy(CUcontext ctx, CUdeviceptr dst, CUdeviceptr src, size_t size);
int sc_fill(CUcontext ctx, CUdeviceptr dst, int value, size_t size);
void sc_memory_drop(CUcontext ctx); /* of one context, or all */

/* ---- share.c ---- */

struct vmm { /* a generic allocation handle */
    struct vmm *next;
    struct backing *mem;
    CUmemAllocationProp prop;
    long refs, maps;
};
void sc_vmm_put(struct vmm *handle);
void sc_share_reset(void);
long sc_live_handles(void);

/* ---- stream.c ---- */

void sc_streams_drain(CUcontext ctx, int blocking_only);
void sc_streams_drop(CUcontext ctx);
void sc_streams_reset(void);
long sc_live_streams(void);
long sc_live_events(void);

#endif
