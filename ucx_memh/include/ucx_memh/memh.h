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

#define UCXM_OK                       0
#define UCXM_INPROGRESS               1
#define UCXM_ERR_NO_RESOURCE        (-2)
#define UCXM_ERR_IO_ERROR           (-3) /* the device or a system call failed      */
#define UCXM_ERR_NO_MEMORY          (-4)
#define UCXM_ERR_INVALID_PARAM      (-5)
#define UCXM_ERR_UNREACHABLE        (-6)
#define UCXM_ERR_INVALID_ADDR       (-7) /* an address is not mapped                */
#define UCXM_ERR_BUFFER_TOO_SMALL  (-10)
#define UCXM_ERR_NO_DEVICE         (-14)
#define UCXM_ERR_BUSY              (-15)
#define UCXM_ERR_CANCELED          (-16)
#define UCXM_ERR_TIMED_OUT         (-20)
#define UCXM_ERR_EXCEEDS_LIMIT     (-21)
#define UCXM_ERR_UNSUPPORTED       (-22)
#define UCXM_ERR_REVOKED          (-101) /* the handle or key was invalidated        */
#define UCXM_ERR_CLOSED           (-102) /* the object was closed                    */
#define UCXM_ERR_FORKED           (-103) /* the object belongs to the parent process */
#define UCXM_ERR_ACCESS           (-104) /* a right that the handle does not have    */
#define UCXM_ERR_RANGE            (-105) /* outside the handle's or key's range      */
#define UCXM_ERR_MALFORMED_KEY    (-106)
#define UCXM_ERR_KEY_VERSION      (-107)
#define UCXM_ERR_STALE_KEY        (-108) /* the key's owner is not that process now  */
#define UCXM_ERR_PEER_GONE        (-109)
#define UCXM_ERR_REMOTE_ACCESS    (-110) /* the remote device refused the access     */
#define UCXM_ERR_FLUSHED          (-111) /* the connection failed before this ran    */

/* ---- what an Md can do (UCT_MD_FLAG_*) -------------------------------- */

#define UCXM_MD_FLAG_REG             (1ull << 1)
#define UCXM_MD_FLAG_NEED_MEMH       (1ull << 2)
#define UCXM_MD_FLAG_NEED_RKEY       (1ull << 3)
#define UCXM_MD_FLAG_RKEY_PTR        (1ull << 6)
#define UCXM_MD_FLAG_INVALIDATE      (1ull << 8)
#define UCXM_MD_FLAG_REG_DMABUF      (1ull << 10)
#define UCXM_MD_FLAG_INVALIDATE_RMA  (1ull << 11)
#define UCXM_MD_FLAG_INVALIDATE_AMO  (1ull << 12)
/* UCX has no such flag (openucx/ucx#10332 was never merged, and its bit 13 is
 * MEMTYPE_COPY today), so it lives in our own half of the word. */
#define UCXM_MD_FLAG_REG_DERIVED     (1ull << 32)
#define UCXM_MD_FLAG_DERIVE_ENDPOINT (1ull << 33) /* a key can be bound to one endpoint */
#define UCXM_MD_FLAG_ENDPOINT        (1ull << 34) /* has a data path                    */
#define UCXM_MD_FLAG_ATOMIC          (1ull << 35) /* 64-bit fetch-add and compare-swap  */
#define UCXM_MD_FLAG_EVENT_FD        (1ull << 36) /* progress can be waited for         */

/* ---- rights of a handle (UCT_MD_MEM_ACCESS_*) and registration flags --- */

#define UCXM_MEM_ACCESS_REMOTE_PUT    (1ull << 5)
#define UCXM_MEM_ACCESS_REMOTE_GET    (1ull << 6)
#define UCXM_MEM_ACCESS_REMOTE_ATOMIC (1ull << 7)
#define UCXM_MEM_ACCESS_LOCAL_READ    (1ull << 8)
#define UCXM_MEM_ACCESS_LOCAL_WRITE   (1ull << 9)
#define UCXM_MEM_SYMMETRIC_RKEY       (1ull << 10)
#define UCXM_MEM_GVA                  (1ull << 11)
#define UCXM_MEM_ACCESS_REMOTE        (7ull << 5)
#define UCXM_MEM_ACCESS_RMA           (UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_GET | \
                                       UCXM_MEM_ACCESS_LOCAL_READ | UCXM_MEM_ACCESS_LOCAL_WRITE)
#define UCXM_MEM_ACCESS_ALL           (31ull << 5)
/* The direct key of the region gets local rights only: whatever a peer may do
 * goes through derived handles, so all of it can be revoked. */
#define UCXM_MEM_DERIVED_ONLY         (1ull << 32)

/* ---- how a key is packed (UCT_MD_MKEY_PACK_FLAG_*) --------------------- */

#define UCXM_PACK_INVALIDATE_RMA (1u << 0)
#define UCXM_PACK_INVALIDATE_AMO (1u << 1)
#define UCXM_PACK_EXPORT         (1u << 2) /* known, and refused: UNSUPPORTED          */
#define UCXM_PACK_RAW            (1u << 16) /* the backend's native payload, no envelope */

/* ---- memory types (ucs_memory_type_t) ---------------------------------- */

#define UCXM_MEM_TYPE_HOST 0
#define UCXM_MEM_TYPE_CUDA 1

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

#ifdef __cplusplus
}
#endif

#endif
