/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a backend gives to the core: two tables of operations.
 *
 * The core keeps all the books (states, references, ranges, rights, parents,
 * quarantine, caches).  A backend gets calls that have been checked already
 * and answers for the device: register, make a native key, destroy it, move
 * bytes.  Plain C, no Python.h.
 *
 * Rules for every operation:
 *  - it runs without the GIL and must not take it, unless the attribute
 *    `python` says that the backend is written in Python;
 *  - it never blocks on the peer's goodwill, prints, aborts or keeps pointers
 *    to its arguments beyond the object that they belong to;
 *  - on failure it has changed nothing and, where `error` is given, may say
 *    more there; on success it leaves `error` alone;
 *  - mem_reg, mem_dereg, rkey_*, ep_post run in any thread, also at the same
 *    time; key_create and key_destroy of one Md are serialised by the core.
 */
#ifndef UCX_MEMH_BACKEND_H
#define UCX_MEMH_BACKEND_H

#include <ucx_memh/memh.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Frozen: of what is in this file no name, place or meaning changes any more.  What is added comes
 * at the end of a structure and under the next number.  The core takes every version from 1 to its
 * own; what an older table is too short for counts as missing (a size of 0, a NULL).  Structures
 * that the core allocates (registration, handle, rkey, operation, endpoint) may have more behind
 * them than this file says: a backend never takes their size.
 */
#define UCXM_BACKEND_ABI 4

typedef struct ucxm_registration ucxm_registration_t;
typedef struct ucxm_op ucxm_op_t;

/* Gives `status` back, and says why where `error` is given and nobody has said anything yet. */
static inline ucxm_status_t ucxm_refuse(ucxm_error_t *error, ucxm_status_t status, const char *why)
{
    size_t n = 0;
    if (error == NULL || error->text[0] != 0)
        return status;
    for (; why[n] != 0 && n + 1 < sizeof(error->text); n++)
        error->text[n] = why[n];
    error->text[n] = 0;
    return status;
}

/* ---- keys --------------------------------------------------------------- */

/* The kinds of native key.  ucx_memh's key-kind table says for each when it
 * is made, which capability it needs, what revokes it and what destroys it. */
typedef enum ucxm_key_kind {
    UCXM_KEY_DIRECT,   /* the registration's own key                             */
    UCXM_KEY_INDIRECT, /* of a base, for put and get, revocable                  */
    UCXM_KEY_ATOMIC,   /* of a base, for atomics, revocable                      */
    UCXM_KEY_DERIVED,  /* of a derived handle: exact range and rights, revocable */
    UCXM_KEY_KINDS
} ucxm_key_kind_t;

/* Of slot->kind alone: a key that allows nothing and stands on no registration.  It keeps an index
 * busy whose values were all revoked lately. */
#define UCXM_KEY_PLACEHOLDER 255

/* A handle's slots: what its packed key may have to name. */
#define UCXM_SLOT_PLAIN    0
#define UCXM_SLOT_INDIRECT 1
#define UCXM_SLOT_ATOMIC   2
#define UCXM_SLOTS         3

typedef struct ucxm_key_slot {
    void *object;   /* the backend's, e.g. a DEVX object or an ibv_mw      */
    uint32_t value; /* the native key                                      */
    uint8_t live;   /* the core's: this slot holds a native key            */
    uint8_t kind;   /* ucxm_key_kind_t                                     */
    uint16_t reserved;
} ucxm_key_slot_t;

/* ---- objects, as far as a backend sees them ------------------------------ */

/* What the device or kernel holds.  Counted, never copied.  The backend's own
 * part (ops.reg_size bytes, zeroed, aligned to 16) follows. */
struct ucxm_registration {
    uint64_t address;
    uint64_t length;
    uint64_t flags;         /* as asked: rights and registration flags          */
    uint64_t grant;         /* what derive may give                             */
    uint64_t direct_rights; /* what the direct key must allow, local ones too   */
    uint64_t dmabuf_offset;
    int32_t dmabuf_fd; /* -1: none */
    uint32_t mem_type; /* UCXM_MEM_TYPE_* */
    void *adopt;       /* a native registration to stand on, not ours to free; or NULL.  With
                        * length 0: the whole of it, and mem_reg fills address and length */
    uint32_t lkey;     /* out: the native local key                             */
    uint32_t rkey;     /* out: the native direct key                            */
    void *priv;        /* points at the backend's part                          */
};

/* A handle is one allocation:
 *
 *     the core's books | identity | inherited + the backend's inherited tail | own + the backend's own tail
 *
 * Cloning copies the inherited span with one memcpy and initialises the others.  Nobody but the
 * core writes to it, the tails excepted. */
typedef struct ucxm_memh_identity {
    ucxm_md_t *md;
    ucxm_memh_t *parent; /* NULL: a base */
    uint64_t key_id;     /* never used again in the Md's life */
    uint32_t state;      /* UCXM_MEMH_* */
    uint32_t inherited_tail_offset; /* from the handle, as those below */
    uint32_t own_offset;
    uint32_t own_tail_offset;
} ucxm_memh_identity_t;

typedef struct ucxm_memh_inherited {
    ucxm_registration_t *reg;
    uint64_t flags; /* registration flags */
    uint32_t lkey;
    uint32_t mem_type;
} ucxm_memh_inherited_t;

typedef struct ucxm_memh_own {
    uint64_t address;
    uint64_t length;
    uint64_t rights; /* what the handle's own keys allow        */
    uint64_t grant;  /* what handles derived from it may get    */
    ucxm_ep_t *ep;   /* the only endpoint that may use the keys, or NULL */
    ucxm_key_slot_t slot[UCXM_SLOTS];
} ucxm_memh_own_t;

struct ucxm_memh {
    ucxm_memh_identity_t id;
    ucxm_memh_inherited_t inherited;
    /* the backend's inherited tail, then ucxm_memh_own_t, then its own tail */
};

/* The own span of a handle, at its offset; and the backend's tails. */
static inline ucxm_memh_own_t *ucxm_memh_own(const ucxm_memh_t *memh)
{
    return (ucxm_memh_own_t *)((char *)memh + memh->id.own_offset);
}

static inline void *ucxm_memh_inherited_tail(const ucxm_memh_t *memh)
{
    return (char *)memh + memh->id.inherited_tail_offset;
}

static inline void *ucxm_memh_own_tail(const ucxm_memh_t *memh)
{
    return (char *)memh + memh->id.own_tail_offset;
}

/* What a peer made of a packed key.  The backend's part (ops.rkey_size bytes,
 * zeroed) is at `priv`. */
struct ucxm_rkey {
    ucxm_key_info_t info;
    void *priv;
};

/* ---- the MD's operations ------------------------------------------------- */

typedef struct ucxm_md_attr {
    size_t struct_size;
    uint64_t flags;          /* UCXM_MD_FLAG_* */
    uint64_t max_reg;        /* bytes; 0: no limit */
    uint64_t mem_types;      /* bit per UCXM_MEM_TYPE_* */
    size_t reg_alignment;    /* bytes, at least 1 */
    size_t rkey_packed_size; /* bytes of payload, at most UCXM_KEY_PAYLOAD_MAX */
    size_t rkey_raw_size;    /* first bytes of the payload that are the native key; 0: no RAW */
    size_t bounce_size;      /* transfers up to here need no local key */
    uint32_t quarantine;     /* destructions before a native value may return */
    uint8_t software;        /* a device made of software */
    uint8_t python;          /* operations take the GIL */
    uint8_t fast_reg;        /* mem_reg and mem_dereg take well under half a microsecond */
    uint8_t placeholders;    /* key_create makes UCXM_KEY_PLACEHOLDER, with `memh` NULL */
    ucxm_enforcement_t enforcement; /* the least that any derived handle gets */
    char component[32];
    char md_name[64];
} ucxm_md_attr_t;

/* A missing operation (NULL) and the core's unsupported_* stub mean the same.
 * `md` is the backend's own object, as given to bind(). */
typedef struct ucxm_md_ops {
    size_t struct_size;
    uint32_t abi; /* UCXM_BACKEND_ABI */
    uint32_t reserved;

    size_t reg_size;          /* the backend's part of a Registration      */
    size_t rkey_size;         /* ... of an Rkey                            */
    size_t tail_inherit_size; /* ... of a handle, copied on derive         */
    size_t tail_own_size;     /* ... of a handle, its own                  */

    /* Fills the tails.  `inherited` is NULL for a derived handle: copied already.
     * Never fails; every byte of the own tail must be written. */
    void (*tail_init)(void *md, const ucxm_memh_t *memh, void *inherited, void *own);

    /* All handles and endpoints are gone.  Frees `md`. */
    void (*close)(void *md);

    /* Registers reg->address .. +length; sets lkey, rkey and the private part. */
    ucxm_status_t (*mem_reg)(void *md, ucxm_registration_t *reg, ucxm_error_t *error);
    /* After all keys on it are gone.  On failure the registration stays whole. */
    ucxm_status_t (*mem_dereg)(void *md, ucxm_registration_t *reg, ucxm_error_t *error);

    /* May `memh`, cloned from `base` and narrowed already, exist?  Sends nothing to
     * the device: keys are made by the first pack. */
    ucxm_status_t (*mem_derive)(void *md, const ucxm_memh_t *base, const ucxm_memh_t *memh,
                                ucxm_error_t *error);

    /* Makes a native key of slot->kind for the handle's own range and rights; or, if
     * attr.placeholders, one of UCXM_KEY_PLACEHOLDER with `memh` NULL. */
    ucxm_status_t (*key_create)(void *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                ucxm_error_t *error);
    /* OK: gone, no byte is read or written through it any more.  INPROGRESS: `comp` runs
     * when that is so, from `progress` and never from inside this call.  An error: nothing is
     * known to be gone, and the same call may be made again.  `memh` is NULL for a key that was
     * made but never handed out. */
    ucxm_status_t (*key_destroy)(void *md, const ucxm_memh_t *memh, ucxm_key_slot_t *slot,
                                 ucxm_completion_t *comp, ucxm_error_t *error);

    /* Writes at most attr.rkey_packed_size bytes.  `atomic` is NULL where one key serves both. */
    ucxm_status_t (*mkey_pack)(void *md, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
                               const ucxm_key_slot_t *atomic, uint8_t *payload, size_t *length,
                               ucxm_error_t *error);

    /* rkey->info is filled, unless `raw` (then it is what the caller claims).  Fills rkey->priv. */
    ucxm_status_t (*rkey_unpack)(void *md, ucxm_rkey_t *rkey, const uint8_t *payload, size_t length,
                                 int raw, ucxm_error_t *error);
    /* Frees what rkey_unpack made.  Never fails. */
    void (*rkey_release)(void *md, ucxm_rkey_t *rkey);
    /* A local pointer to the remote byte at `address`, which lies in the key's range. */
    ucxm_status_t (*rkey_ptr)(void *md, const ucxm_rkey_t *rkey, uint64_t address, void **ptr,
                              ucxm_error_t *error);

    /* Polls; returns how many operations it completed. */
    unsigned (*progress)(void *md);
    /* A descriptor that becomes readable when there is something to progress, once armed. */
    ucxm_status_t (*event_fd)(void *md, int *fd, ucxm_error_t *error);
    /* OK: the fd will become readable.  BUSY: call progress first. */
    ucxm_status_t (*event_arm)(void *md, ucxm_error_t *error);

    /* What the device does for this handle's keys.  Missing: attr.enforcement, of all alike. */
    void (*mem_enforcement)(void *md, const ucxm_memh_t *memh, ucxm_enforcement_t *enforcement);

    /* The i-th counter, *name NULL at the end. */
    void (*stat)(void *md, unsigned index, const char **name, uint64_t *value);
    /* A few lines for a person, about the Md or (memh given) about one handle.  Nothing: the core
     * says what the attributes declare. */
    void (*explain)(void *md, const ucxm_memh_t *memh, char *text, size_t size);
    /* Forgets what is remembered about a peer; its keys become stale. */
    ucxm_status_t (*peer_evict)(void *md, const ucxm_identity_t *peer, ucxm_error_t *error);

    /* Version 2.  key_destroy may answer INPROGRESS and leave its work lying, so that the device
     * gets that of many keys at once: this hands over all that lies.  Called with no lock held
     * after a revocation, or after those of a batch, also from inside a completion; `progress`
     * hands it over, too. */
    void (*key_flush)(void *md);

    /* Version 4.  Called before mem_reg where the caller did not say of which type the memory is:
     * *mem_type becomes what it is.  INVALID_ADDR: no memory that this domain could reach, as far
     * as a look at both ends tells.  Missing: it is host memory, and mem_reg refuses what it
     * cannot reach.  `length` is not 0. */
    ucxm_status_t (*mem_query)(void *md, uint64_t address, uint64_t length, uint32_t *mem_type,
                               ucxm_error_t *error);
} ucxm_md_ops_t;

/* ---- the data path ------------------------------------------------------- */

/* One operation.  Lives from ep_post until `complete` has run. */
struct ucxm_op {
    ucxm_op_kind_t kind;
    uint32_t lkey; /* valid if has_lkey */
    uint8_t has_lkey;
    uint8_t reserved[3];
    uint64_t remote_address;
    void *local;      /* get: to; put: from; atomics: the old value goes to `result` */
    size_t length;    /* bytes; 8 for atomics                   */
    uint64_t operand; /* fetch_add: addend; compare_swap: new value */
    uint64_t compare;
    uint64_t result;
    size_t bytes_done;  /* set before complete, also on failure  */
    ucxm_rkey_t *rkey;
    ucxm_ep_t *ep;
    ucxm_error_t error; /* for an operation that fails later     */
    void (*complete)(ucxm_op_t *op, ucxm_status_t status); /* runs exactly once */
    uint64_t scratch[6]; /* the backend's */

    /* Version 3.  `local` is memory of a device, and work on it may be under way on this stream of
     * that device: it comes before the operation.  0: there is none. */
    uint64_t local_stream;
};

/* An endpoint; the backend's part (ops.ep_size bytes, zeroed) is at `priv`. */
struct ucxm_ep {
    void *priv;
};

#define UCXM_EP_ADDRESS_MAX 256 /* the backend's part */

typedef struct ucxm_ep_ops {
    size_t struct_size;
    size_t ep_size;
    /* Fills ep->priv.  The endpoint is IDLE then. */
    ucxm_status_t (*ep_create)(void *md, ucxm_ep_t *ep, ucxm_error_t *error);
    /* Completes what is under way (FLUSHED), then frees.  Never fails. */
    void (*ep_destroy)(void *md, ucxm_ep_t *ep);
    /* The bytes for the peer's connect(); they change with each reset(). */
    ucxm_status_t (*ep_address)(void *md, ucxm_ep_t *ep, uint8_t *address, size_t *length,
                                ucxm_error_t *error);
    /* To the bytes that the peer's ep_address gave.  INVALID_PARAM: they are no such address. */
    ucxm_status_t (*ep_connect)(void *md, ucxm_ep_t *ep, const uint8_t *address, size_t length,
                                ucxm_error_t *error);
    /* Back to IDLE; what is under way completes FLUSHED first. */
    ucxm_status_t (*ep_reset)(void *md, ucxm_ep_t *ep, ucxm_error_t *error);
    /* UCXM_EP_*; asks nobody. */
    uint32_t (*ep_state)(void *md, ucxm_ep_t *ep);
    /* Takes the operation: `complete` runs later, or inside this call, and OK is returned.
     * An error (NO_RESOURCE: queue full, progress and try again): not taken, `complete`
     * never runs. */
    ucxm_status_t (*ep_post)(void *md, ucxm_ep_t *ep, ucxm_op_t *op, ucxm_error_t *error);
} ucxm_ep_ops_t;

#ifdef __cplusplus
}
#endif

#endif
