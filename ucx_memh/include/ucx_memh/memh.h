/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Words that everybody shares: statuses, flags, the packed key.
 *
 * Plain C, no Python.h, no storage: an embedder, a backend and the core
 * include the same file.  Status and flag numbers equal UCX's where UCX has
 * the thing (ucs/type/status.h, uct/api/uct.h, uct/api/v2/uct_v2.h); what is
 * ours alone lies below -100 (statuses) or above bit 31 (flags).
 */
#ifndef UCX_MEMH_MEMH_H
#define UCX_MEMH_MEMH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- statuses --------------------------------------------------------- */

typedef int32_t ucxm_status_t;

#define UCXM_OK                   0
#define UCXM_INPROGRESS           1
#define UCXM_ERR_NO_RESOURCE      (-2) /* a queue is full: progress and try again */
#define UCXM_ERR_IO_ERROR         (-3) /* the device or a system call failed      */
#define UCXM_ERR_NO_MEMORY        (-4) /* no memory, or a limit on locked memory */
#define UCXM_ERR_INVALID_PARAM    (-5) /* an argument is wrong */
#define UCXM_ERR_UNREACHABLE      (-6) /* this domain cannot reach the peer */
#define UCXM_ERR_INVALID_ADDR     (-7) /* an address is not mapped                */
#define UCXM_ERR_BUFFER_TOO_SMALL (-10) /* nothing was written but the length */
#define UCXM_ERR_NO_DEVICE        (-14) /* what was named is not there */
#define UCXM_ERR_BUSY             (-15) /* in use, or under way */
#define UCXM_ERR_CANCELED         (-16) /* given up before it was done */
#define UCXM_ERR_TIMED_OUT        (-20) /* not done in time; it goes on */
#define UCXM_ERR_EXCEEDS_LIMIT    (-21) /* more than is taken at once */
#define UCXM_ERR_UNSUPPORTED      (-22) /* this domain cannot do that */
#define UCXM_ERR_REVOKED          (-101) /* the handle or key was invalidated        */
#define UCXM_ERR_CLOSED           (-102) /* the object was closed                    */
#define UCXM_ERR_FORKED           (-103) /* the object belongs to the parent process */
#define UCXM_ERR_ACCESS           (-104) /* a right that the handle does not have    */
#define UCXM_ERR_RANGE            (-105) /* outside the handle's or key's range      */
#define UCXM_ERR_MALFORMED_KEY    (-106) /* no packed key, or a damaged one */
#define UCXM_ERR_KEY_VERSION      (-107) /* a key of an unknown version */
#define UCXM_ERR_STALE_KEY        (-108) /* the key's owner is not that process now  */
#define UCXM_ERR_PEER_GONE        (-109) /* the peer's process has ended */
#define UCXM_ERR_REMOTE_ACCESS    (-110) /* the remote device refused the access     */
#define UCXM_ERR_FLUSHED          (-111) /* the connection failed before this ran    */

/* ---- what an Md can do (UCT_MD_FLAG_*) -------------------------------- */

#define UCXM_MD_FLAG_REG             (1ull << 1) /* registers memory */
#define UCXM_MD_FLAG_NEED_MEMH       (1ull << 2) /* transfers want the local memory registered */
#define UCXM_MD_FLAG_NEED_RKEY       (1ull << 3) /* access wants a packed key */
#define UCXM_MD_FLAG_RKEY_PTR        (1ull << 6) /* rkey_ptr gives a local pointer */
#define UCXM_MD_FLAG_INVALIDATE      (1ull << 8) /* mem_dereg can promise that no key works */
#define UCXM_MD_FLAG_REG_DMABUF      (1ull << 10) /* registers memory by a dmabuf */
#define UCXM_MD_FLAG_INVALIDATE_RMA  (1ull << 11) /* revocable keys of a base, for put and get */
#define UCXM_MD_FLAG_INVALIDATE_AMO  (1ull << 12) /* revocable keys of a base, for atomics */
/* UCX has no such flag (openucx/ucx#10332 was never merged, and its bit 13 is
 * MEMTYPE_COPY today), so it lives in our own half of the word. */
#define UCXM_MD_FLAG_REG_DERIVED     (1ull << 32)
#define UCXM_MD_FLAG_DERIVE_ENDPOINT (1ull << 33) /* a key can be bound to one endpoint */
#define UCXM_MD_FLAG_ENDPOINT        (1ull << 34) /* has a data path                    */
#define UCXM_MD_FLAG_ATOMIC          (1ull << 35) /* 64-bit fetch-add and compare-swap  */
#define UCXM_MD_FLAG_EVENT_FD        (1ull << 36) /* progress can be waited for         */

/* ---- rights of a handle (UCT_MD_MEM_ACCESS_*) and registration flags --- */

#define UCXM_MEM_ACCESS_REMOTE_PUT    (1ull << 5) /* peers may write */
#define UCXM_MEM_ACCESS_REMOTE_GET    (1ull << 6) /* peers may read */
#define UCXM_MEM_ACCESS_REMOTE_ATOMIC (1ull << 7) /* peers may use atomics */
#define UCXM_MEM_ACCESS_LOCAL_READ    (1ull << 8) /* the local side of a put may be here */
#define UCXM_MEM_ACCESS_LOCAL_WRITE   (1ull << 9) /* the local side of a get may be here */
#define UCXM_MEM_SYMMETRIC_RKEY       (1ull << 10) /* known, and refused: UNSUPPORTED */
#define UCXM_MEM_GVA                  (1ull << 11) /* known, and refused: UNSUPPORTED */
#define UCXM_MEM_ACCESS_REMOTE        (7ull << 5) /* all that a peer can be given */
#define UCXM_MEM_ACCESS_RMA                                                                 \
    (UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_GET | UCXM_MEM_ACCESS_LOCAL_READ | \
     UCXM_MEM_ACCESS_LOCAL_WRITE)
#define UCXM_MEM_ACCESS_ALL   (31ull << 5) /* and atomics */
/* The direct key of the region gets local rights only: whatever a peer may do
 * goes through derived handles, so all of it can be revoked. */
#define UCXM_MEM_DERIVED_ONLY (1ull << 32)

/* ---- how a key is packed (UCT_MD_MKEY_PACK_FLAG_*) --------------------- */

#define UCXM_PACK_INVALIDATE_RMA (1u << 0) /* of a base: a revocable key for put and get */
#define UCXM_PACK_INVALIDATE_AMO (1u << 1) /* of a base: a revocable key for atomics */
#define UCXM_PACK_EXPORT         (1u << 2) /* known, and refused: UNSUPPORTED          */
#define UCXM_PACK_RAW            (1u << 16) /* the backend's native payload, no envelope */

/* ---- memory types (ucs_memory_type_t) ---------------------------------- */

#define UCXM_MEM_TYPE_HOST    0
#define UCXM_MEM_TYPE_CUDA    1
#define UCXM_MEM_TYPE_UNKNOWN 0xffffffffu /* mem_reg finds out, or refuses what it cannot reach */

/* ---- states of a handle ------------------------------------------------ */

#define UCXM_MEMH_LIVE     0
#define UCXM_MEMH_REVOKING 1 /* keys are going; only a retry is legal        */
#define UCXM_MEMH_REVOKED  2 /* its keys are gone for good                   */
#define UCXM_MEMH_CLOSED   3 /* native state is gone, a tombstone is left    */

/* ---- how far a promise is kept, and by whom ----------------------------- */

#define UCXM_ENFORCE_NONE        0
#define UCXM_ENFORCE_COOPERATIVE 1 /* the peer's library checks              */
#define UCXM_ENFORCE_ENFORCED    2 /* the device refuses                     */

/* One cell for each of {get, put, atomic} x {rights, range, revoke}. */
typedef struct ucxm_enforcement {
    uint8_t rights[3];
    uint8_t range[3];
    uint8_t revoke[3];
} ucxm_enforcement_t;

/* ---- objects and how calls report ---------------------------------------- */

typedef struct ucxm_md ucxm_md_t;     /* a memory domain: one opened device          */
typedef struct ucxm_memh ucxm_memh_t; /* a memory handle: a base, or derived         */
typedef struct ucxm_rkey ucxm_rkey_t; /* what a peer made of a packed key            */
typedef struct ucxm_ep ucxm_ep_t;     /* an endpoint: a connection that moves data   */

/* More about a failure than its status. */
typedef struct ucxm_error {
    int32_t sys_errno; /* 0 if no system call failed       */
    uint32_t syndrome; /* the device's own word, 0 if none */
    char text[112];    /* NUL-terminated, no line breaks   */
} ucxm_error_t;

/* Runs `func` exactly once, after the work is done, in whichever thread finds out, with no lock of
 * the library's held. */
typedef struct ucxm_completion ucxm_completion_t;
struct ucxm_completion {
    void (*func)(ucxm_completion_t *self, ucxm_status_t status);
};

/* ---- endpoints and what they carry --------------------------------------- */

#define UCXM_EP_IDLE      0 /* not connected */
#define UCXM_EP_CONNECTED 1
#define UCXM_EP_ERROR     2 /* operations give FLUSHED until reset() */

typedef enum ucxm_op_kind {
    UCXM_OP_GET,
    UCXM_OP_PUT,
    UCXM_OP_FETCH_ADD,
    UCXM_OP_COMPARE_SWAP
} ucxm_op_kind_t;

/* ---- the packed key ----------------------------------------------------
 * All fields little-endian; the payload, the backend's part, follows the
 * header.  The checksum is CRC-32C (RFC 3720, B.4) over the whole key with the
 * checksum's own four bytes as zero: it detects accidents, not forgery.
 */

#define UCXM_KEY_MAGIC       0x4b4d /* "MK" */
#define UCXM_KEY_VERSION     1
#define UCXM_KEY_HEADER_SIZE 80
#define UCXM_KEY_MAX         256
#define UCXM_KEY_PAYLOAD_MAX (UCXM_KEY_MAX - UCXM_KEY_HEADER_SIZE)

#define UCXM_KEY_OFF_MAGIC       0  /* u16 */
#define UCXM_KEY_OFF_VERSION     2  /* u8  */
#define UCXM_KEY_OFF_HEADER_LEN  3  /* u8  */
#define UCXM_KEY_OFF_TOTAL_LEN   4  /* u16 */
#define UCXM_KEY_OFF_FLAGS       6  /* u16 */
#define UCXM_KEY_OFF_COMPONENT   8  /* u32 */
#define UCXM_KEY_OFF_CRC         12 /* u32 */
#define UCXM_KEY_OFF_KEY_ID      16 /* u64 */
#define UCXM_KEY_OFF_ADDRESS     24 /* u64 */
#define UCXM_KEY_OFF_LENGTH      32 /* u64 */
#define UCXM_KEY_OFF_RIGHTS      40 /* u32 */
#define UCXM_KEY_OFF_PAYLOAD_LEN 44 /* u16 */
#define UCXM_KEY_OFF_RESERVED    46 /* u16, zero */
#define UCXM_KEY_OFF_OWNER       48 /* 32 bytes  */

#define UCXM_KEY_FLAG_EMPTY     (1u << 0) /* length 0: no native key behind it  */
#define UCXM_KEY_FLAG_REVOCABLE (1u << 1) /* the owner can revoke this key alone */
#define UCXM_KEY_FLAG_ENDPOINT  (1u << 2) /* works over one endpoint only        */
#define UCXM_KEY_FLAG_REVOKED   (1u << 3) /* a notice, not a key: key_id is dead */

/* Who packed a key; 32 bytes of the envelope. */
typedef struct ucxm_identity {
    uint64_t host;       /* digest of the host and of its boot                       */
    uint64_t start_time; /* of the process, clock ticks after boot (/proc/pid/stat)  */
    uint32_t pid;        /* in the owner's own pid namespace                         */
    uint32_t pid_ns;     /* inode numbers of the namespaces                          */
    uint32_t user_ns;
    uint32_t reserved;   /* zero */
} ucxm_identity_t;

/* The decoded envelope of a packed key; of a RAW one what its user claims. */
typedef struct ucxm_key_info {
    uint64_t key_id;
    uint64_t address;
    uint64_t length;
    uint32_t rights; /* UCXM_MEM_ACCESS_REMOTE_* */
    uint16_t flags;  /* UCXM_KEY_FLAG_*          */
    uint16_t reserved;
    ucxm_identity_t owner;
} ucxm_key_info_t;

/* ---- the endpoint's address --------------------------------------------
 * All fields little-endian; the backend's part follows.  The owner is that of
 * the keys it packs: a key of another process is refused by the endpoint that
 * was connected to this address, before it reaches a device that might know
 * the same native value.
 */

#define UCXM_ADDRESS_MAGIC       0x4145 /* "EA" */
#define UCXM_ADDRESS_VERSION     1
#define UCXM_ADDRESS_HEADER_SIZE 48
#define UCXM_ADDRESS_MAX         304

#define UCXM_ADDRESS_OFF_MAGIC      0  /* u16 */
#define UCXM_ADDRESS_OFF_VERSION    2  /* u8  */
#define UCXM_ADDRESS_OFF_HEADER_LEN 3  /* u8  */
#define UCXM_ADDRESS_OFF_TOTAL_LEN  4  /* u16 */
#define UCXM_ADDRESS_OFF_RESERVED   6  /* u16, zero */
#define UCXM_ADDRESS_OFF_COMPONENT  8  /* u32; 0: not told, not compared */
#define UCXM_ADDRESS_OFF_RESERVED2  12 /* u32, zero */
#define UCXM_ADDRESS_OFF_OWNER      16 /* 32 bytes; all zero: not told, not compared */

/* ---- the packed keys of a bundle ---------------------------------------
 * Little-endian; packed keys follow, each with its own length in its header.
 */

#define UCXM_BUNDLE_MAGIC       0x424d /* "MB" */
#define UCXM_BUNDLE_VERSION     1
#define UCXM_BUNDLE_HEADER_SIZE 8

#define UCXM_BUNDLE_OFF_MAGIC     0 /* u16 */
#define UCXM_BUNDLE_OFF_VERSION   2 /* u8  */
#define UCXM_BUNDLE_OFF_COUNT     3 /* u8, of keys */
#define UCXM_BUNDLE_OFF_TOTAL_LEN 4 /* u16 */
#define UCXM_BUNDLE_OFF_RESERVED  6 /* u16, zero */

/* ---- the embedder's calls ----------------------------------------------
 *
 * ucx_memh/pyapi.h gives the table below; a Cython module can cimport the same
 * calls, named ucxm_..., from ucx_memh.core.  Rules for all of them:
 *
 *  - Threads: any call, in any thread, with or without a Python thread state,
 *    needs no GIL and takes none, but for md_open, md_release and whatever an
 *    Md does whose `python` is set (nobody who has the GIL may call that: it
 *    can wait for a thread that wants the GIL).  Calls on one object may run at the same
 *    time; invalidate and dereg may race with all of them, and who loses gets
 *    REVOKED or CLOSED.  A pointer must not be used after its own release.
 *  - Errors: nothing has changed, and what would be returned through a pointer
 *    is NULL or 0.  `error` may be NULL.  No call raises, prints, aborts or
 *    jumps.
 *  - Pointers are never NULL unless it says so; releasing NULL does nothing.
 *  - Structures that the caller fills begin with their size.
 *  - When the interpreter has ended, md_open and an Md whose `python` is set
 *    give CLOSED.  Others work on, but what Python registered is not given
 *    back to it any more, and callbacks of Python's do not run.
 *  - None is async-signal-safe.  In a forked child all objects of the parent
 *    give FORKED, and releasing them does nothing.
 */

#define UCXM_API_ABI 1

#define UCXM_LENGTH_REST UINT64_MAX /* mem_derive: to the end of the parent's range   */
#define UCXM_RIGHTS_ALL  UINT64_MAX /* mem_derive: all that the parent may grant      */

/* What mem_reg and mem_adopt want. */
typedef struct ucxm_reg_params {
    size_t struct_size;
    uint64_t address; /* of the first byte; the memory is the caller's to keep      */
    uint64_t length;  /* bytes; 0 is legal                                          */
    uint64_t flags;   /* UCXM_MEM_*; no access bit at all means local rights only   */
    uint32_t mem_type; /* UCXM_MEM_TYPE_*, which is believed; UNKNOWN: it is looked at */
    uint32_t has_dmabuf; /* dmabuf_fd and dmabuf_offset count                       */
    uint64_t dmabuf_offset;
    int32_t dmabuf_fd;
    uint32_t reserved; /* 0 */
    void *adopt;       /* a native registration (ib: an ibv_mr) to stand on, never freed here;
                        * address and length are then its own, and 0 here, and flags
                        * say what it was made with (DERIVED_ONLY alone: ACCESS_RMA)  */
} ucxm_reg_params_t;

typedef struct ucxm_md_info {
    size_t struct_size;
    uint64_t flags;       /* UCXM_MD_FLAG_*                                         */
    uint64_t max_reg;     /* bytes at once                                          */
    uint64_t mem_types;   /* bit per UCXM_MEM_TYPE_*                                */
    size_t reg_alignment; /* bytes                                                  */
    size_t key_size_max;  /* of a packed key                                        */
    size_t key_size_raw;  /* of one packed with UCXM_PACK_RAW; 0: there is none     */
    uint8_t software;     /* a device made of software                              */
    uint8_t python;       /* its calls take the GIL                                 */
    uint8_t reserved[6];
    ucxm_enforcement_t enforcement; /* the least that any derived handle gets       */
    char component[32];
    char md_name[64];
} ucxm_md_info_t;

typedef struct ucxm_memh_info {
    size_t struct_size;
    uint64_t address; /* as given */
    uint64_t length;
    uint64_t flags;  /* as registered                                      */
    uint64_t rights; /* of its own keys, UCXM_MEM_ACCESS_*                 */
    uint64_t grant;  /* what mem_derive may give                           */
    uint64_t key_id;
    uint32_t state; /* UCXM_MEMH_*                                         */
    uint32_t live_children;
    uint32_t mem_type;
    uint32_t lkey; /* the native local key                                 */
    uint8_t derived;
    uint8_t reserved[7];
} ucxm_memh_info_t;

typedef struct ucxm_md_stats {
    size_t struct_size;
    uint64_t live_bases, live_derived, live_rkeys, live_endpoints;
    uint64_t mem_reg, mem_dereg, derive, revoke; /* calls that the backend got, and finished
                                                  * derivations and revocations */
    uint64_t key_create, key_destroy, keys_parked, keys_quarantined;
    uint64_t rkey_hits, rkey_misses, transfers;
} ucxm_md_stats_t;

/* One operation of an endpoint.  The caller keeps it, and the memory at `local`, until `comp` has
 * run; it may then be used again. */
typedef struct ucxm_transfer {
    size_t struct_size;
    ucxm_op_kind_t kind;
    uint32_t reserved;
    ucxm_rkey_t *rkey; /* may be released once the operation is posted       */
    uint64_t remote_address;
    void *local;       /* get: to; put: from; atomics: not used              */
    size_t length;     /* bytes; atomics always move 8                       */
    ucxm_memh_t *memh; /* a handle that `local` lies in, or NULL: unregistered memory */
    uint64_t operand;  /* fetch_add: addend; compare_swap: new value         */
    uint64_t compare;  /* compare_swap: old value                            */
    ucxm_completion_t comp; /* comp.func NULL: nobody is told; look at status */
    /* Out; INPROGRESS until it is done. */
    ucxm_status_t status;
    uint32_t reserved2;
    uint64_t result;   /* atomics: the old value                             */
    size_t bytes_done; /* also of one that failed                            */
    ucxm_error_t error;
} ucxm_transfer_t;

/* A setting for md_open.  The value is text, which is read as the type that the component declares
 * for it: "128", "0.5", "yes", "/a/path". */
typedef struct ucxm_setting {
    const char *name;
    const char *value;
} ucxm_setting_t;

#define UCXM_DEREG_INVALIDATE (1u << 0) /* promise that no key of it works afterwards  */
#define UCXM_CASCADE          (1u << 1) /* what was derived from it first, leaves first */
#define UCXM_CLOSE_FORCE      (1u << 2) /* md_close: revoke and close all of it first   */

/* What a set of registrations must achieve.  ALL: every domain, or nothing stays registered;
 * ANY: at least one. */
#define UCXM_BUNDLE_ANY 0
#define UCXM_BUNDLE_ALL 1
#define UCXM_BUNDLE_MAX 16 /* domains */

typedef struct ucxm_api {
    size_t struct_size;
    uint32_t abi; /* UCXM_API_ABI; higher ones only add at the end */
    uint32_t reserved;

    /* "REVOKED" for UCXM_ERR_REVOKED, and so on; never NULL. */
    const char *(*status_name)(ucxm_status_t status);

    /* ---- memory domains ---- */

    /* Open "component" (its first device) or "component/md_name", as ucx_memh.open_md() does.
     * Takes the GIL. */
    ucxm_status_t (*md_open)(const char *name, const ucxm_setting_t *settings, size_t count,
                             ucxm_md_t **md, ucxm_error_t *error);
    /* What it can do; fill in info->struct_size first. */
    ucxm_status_t (*md_query)(ucxm_md_t *md, ucxm_md_info_t *info);
    /* BUSY, and nothing changed, while anything of it is in use, unless UCXM_CLOSE_FORCE.  Waits
     * for the device.  Again: OK. */
    ucxm_status_t (*md_close)(ucxm_md_t *md, uint32_t flags, ucxm_error_t *error);
    /* Give back what md_open gave, after md_close; if that was not done or failed it is forced now.
     * Takes the GIL. */
    void (*md_release)(ucxm_md_t *md);
    /* Poll once; completions run in here.  Returns how many operations were completed. */
    unsigned (*md_progress)(ucxm_md_t *md);
    /* A descriptor that becomes readable after md_arm when there is something to progress. */
    ucxm_status_t (*md_event_fd)(ucxm_md_t *md, int *fd, ucxm_error_t *error);
    /* BUSY: there is something already; progress, then arm again. */
    ucxm_status_t (*md_arm)(ucxm_md_t *md, ucxm_error_t *error);
    /* Counters since it was opened, and what is live; fill in stats->struct_size first. */
    ucxm_status_t (*md_stats)(ucxm_md_t *md, ucxm_md_stats_t *stats);

    /* ---- memory handles ---- */

    /* Register memory: a base handle.  With UCXM_MEM_DERIVED_ONLY its own key gives no remote
     * right. */
    ucxm_status_t (*mem_reg)(ucxm_md_t *md, const ucxm_reg_params_t *params, ucxm_memh_t **memh,
                             ucxm_error_t *error);
    /* A narrower handle with keys of its own; no command is sent.  `rights` may hold
     * UCXM_MEM_ACCESS_* that the parent may grant; `ep`, or NULL: it alone may use the keys. */
    ucxm_status_t (*mem_derive)(ucxm_memh_t *parent, uint64_t offset, uint64_t length,
                                uint64_t rights, ucxm_ep_t *ep, ucxm_memh_t **memh,
                                ucxm_error_t *error);
    /* What it is, and its state; fill in info->struct_size first. */
    ucxm_status_t (*mem_query)(ucxm_memh_t *memh, ucxm_memh_info_t *info);
    /* Who keeps the promises of this handle's keys. */
    ucxm_status_t (*mem_enforcement)(ucxm_memh_t *memh, ucxm_enforcement_t *enforcement);
    /* Destroy a derived handle's keys.  When it is done no byte is read or written through them
     * any more.  `comp` NULL: returns when that is so.  Else OK: `comp` has run; INPROGRESS: it
     * runs from md_progress.  An error: it never runs, and the call may be made again.  `flags`:
     * UCXM_CASCADE. */
    ucxm_status_t (*mem_invalidate)(ucxm_memh_t *memh, uint32_t flags, ucxm_completion_t *comp,
                                    ucxm_error_t *error);
    /* Close the handle (`comp` as above); of a base the registration goes too.  BUSY under live
     * derived handles.  Again: OK.  `flags`: UCXM_DEREG_INVALIDATE, UCXM_CASCADE. */
    ucxm_status_t (*mem_dereg)(ucxm_memh_t *memh, uint32_t flags, ucxm_completion_t *comp,
                               ucxm_error_t *error);
    /* Give the handle back, deregistered or not.  It ends when the device is done with its keys and
     * after all that was derived from it; what resists is torn down by md_close. */
    void (*memh_release)(ucxm_memh_t *memh);

    /* ---- keys ---- */

    /* Write the key.  `buffer` NULL: OK, and *length is what it needs (this makes the native key).
     * Else *length is the room; BUFFER_TOO_SMALL writes nothing but *length. */
    ucxm_status_t (*mkey_pack)(ucxm_memh_t *memh, uint32_t flags, void *buffer, size_t *length,
                               ucxm_error_t *error);
    /* The notice that a dead handle's key is dead; `buffer` and `length` as above. */
    ucxm_status_t (*revoke_notice)(ucxm_memh_t *memh, void *buffer, size_t *length,
                                   ucxm_error_t *error);
    /* Read and check a packed key's envelope; no domain is asked, nothing is attached.  The
     * component's id goes to `component` and its length in bytes to `size`; both may be NULL. */
    ucxm_status_t (*key_query)(const void *key, size_t length, ucxm_key_info_t *info,
                               uint32_t *component, size_t *size, ucxm_error_t *error);
    /* Make a packed key usable here.  MALFORMED_KEY, KEY_VERSION, STALE_KEY, REVOKED (a notice was
     * taken), UNREACHABLE.  Bytes that are open already are found in a cache. */
    ucxm_status_t (*rkey_unpack)(ucxm_md_t *md, const void *key, size_t length, ucxm_rkey_t **rkey,
                                 ucxm_error_t *error);
    /* The same of a key packed with UCXM_PACK_RAW; unchecked, `address` and `size` are the caller's
     * word. */
    ucxm_status_t (*rkey_from_raw)(ucxm_md_t *md, const void *raw, size_t length, uint64_t address,
                                   uint64_t size, ucxm_rkey_t **rkey, ucxm_error_t *error);
    /* What its envelope said. */
    ucxm_status_t (*rkey_query)(const ucxm_rkey_t *rkey, ucxm_key_info_t *info);
    /* Below, equal to or above 0: a total order by owner, key id and contents. */
    int (*rkey_compare)(const ucxm_rkey_t *one, const ucxm_rkey_t *other);
    /* A local pointer to the remote byte at `address`. */
    ucxm_status_t (*rkey_ptr)(ucxm_rkey_t *rkey, uint64_t address, void **ptr, ucxm_error_t *error);
    /* Legal while operations that use it are under way, and after the Md was closed. */
    void (*rkey_release)(ucxm_rkey_t *rkey);
    /* Take note of a revoke notice; *count (may be NULL) is how many rkeys refuse from now on. */
    ucxm_status_t (*rkey_revoke)(ucxm_md_t *md, const void *notice, size_t length, uint32_t *count,
                                 ucxm_error_t *error);
    /* Could this key be used now?  Looks at its owner anew and keeps nothing.  PEER_GONE,
     * UNREACHABLE, STALE_KEY: no, and why. */
    ucxm_status_t (*peer_probe)(ucxm_md_t *md, const void *key, size_t length, ucxm_error_t *error);
    /* Forget what is remembered of a peer; its keys become stale. */
    ucxm_status_t (*peer_evict)(ucxm_md_t *md, const ucxm_identity_t *peer, ucxm_error_t *error);

    /* ---- endpoints ---- */

    /* An endpoint, not connected yet. */
    ucxm_status_t (*ep_create)(ucxm_md_t *md, ucxm_ep_t **ep, ucxm_error_t *error);
    /* The bytes for the peer's ep_connect, at most UCXM_ADDRESS_MAX; as with mkey_pack. */
    ucxm_status_t (*ep_address)(ucxm_ep_t *ep, void *buffer, size_t *length, ucxm_error_t *error);
    /* To the bytes that the peer's ep_address gave; both sides do that. */
    ucxm_status_t (*ep_connect)(ucxm_ep_t *ep, const void *address, size_t length,
                                ucxm_error_t *error);
    /* Back to IDLE with a new address; what is under way completes FLUSHED. */
    ucxm_status_t (*ep_reset)(ucxm_ep_t *ep, ucxm_error_t *error);
    /* UCXM_EP_*. */
    ucxm_status_t (*ep_state)(ucxm_ep_t *ep, uint32_t *state);
    /* Revoke the handles bound to it, flush, close.  Again: OK. */
    ucxm_status_t (*ep_close)(ucxm_ep_t *ep, ucxm_error_t *error);
    /* Give it back, closed or not. */
    void (*ep_release)(ucxm_ep_t *ep);
    /* Check range and rights, and hand the operation to the device.  OK: it was taken, and may
     * have completed.  An error: it was not, and `comp` never runs; NO_RESOURCE: the queue is
     * full, progress and try again. */
    ucxm_status_t (*ep_post)(ucxm_ep_t *ep, ucxm_transfer_t *transfer, ucxm_error_t *error);
    /* Post and progress until it is done; returns transfer->status. */
    ucxm_status_t (*ep_transfer)(ucxm_ep_t *ep, ucxm_transfer_t *transfer, ucxm_error_t *error);

    /* ---- many at once ---- *
     * Every item is tried.  OK: all went well; else the first status that was not OK, and
     * `status` (may be NULL) has one for each item.  An item that failed has NULL and length 0; a
     * handle that is NULL is an item with INVALID_PARAM.  Revocations go to the device together. */

    /* mem_reg of each; params[0].struct_size is how far they lie apart. */
    ucxm_status_t (*mem_reg_many)(ucxm_md_t *md, const ucxm_reg_params_t *params, size_t count,
                                  ucxm_memh_t **memhs, ucxm_status_t *status);
    /* mem_derive of each range, from one parent. */
    ucxm_status_t (*mem_derive_many)(ucxm_memh_t *parent, const uint64_t *offsets,
                                     const uint64_t *lengths, size_t count, uint64_t rights,
                                     ucxm_ep_t *ep, ucxm_memh_t **memhs, ucxm_status_t *status);
    /* Keys go to buffer + i * stride; `stride` is at least md_query's key_size_max. */
    ucxm_status_t (*mkey_pack_many)(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                    void *buffer, size_t stride, size_t *lengths,
                                    ucxm_status_t *status);
    /* mem_invalidate of each, without a completion. */
    ucxm_status_t (*mem_invalidate_many)(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                         ucxm_status_t *status);
    /* mem_dereg of each, without a completion. */
    ucxm_status_t (*mem_dereg_many)(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                    ucxm_status_t *status);

    /* ---- several domains as one ---- */

    /* Register the same memory with each of up to UCXM_BUNDLE_MAX domains.  memhs[i] is NULL and
     * status[i] (may be NULL) says why where it failed.  Policy ALL: one failure releases the
     * others and is returned. */
    ucxm_status_t (*bundle_reg)(ucxm_md_t *const *mds, size_t count, uint32_t policy,
                                const ucxm_reg_params_t *params, ucxm_memh_t **memhs,
                                ucxm_status_t *status, ucxm_error_t *error);
    /* One block of bytes with the packed key of each handle that is not NULL; `buffer` and
     * `length` as with mkey_pack. */
    ucxm_status_t (*bundle_pack)(ucxm_memh_t *const *memhs, size_t count, uint32_t flags,
                                 void *buffer, size_t *length, ucxm_error_t *error);
    /* rkeys[i] for mds[i], NULL where the block has no part for it or the part could not be
     * unpacked (status[i]).  Parts that no domain knows are skipped.  UNREACHABLE: none fits. */
    ucxm_status_t (*bundle_unpack)(ucxm_md_t *const *mds, size_t count, const void *block,
                                   size_t length, ucxm_rkey_t **rkeys, ucxm_status_t *status,
                                   ucxm_error_t *error);
} ucxm_api_t;

#ifdef __cplusplus
}
#endif

#endif
