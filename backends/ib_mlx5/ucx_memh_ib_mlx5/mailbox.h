/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Command mailboxes of mlx5 firmware: the few that revocable keys need.
 *
 * A mailbox is a row of big-endian bit fields.  Each field below has the name that
 * the programmer's reference manual gives it and stands for two numbers: offset
 * and width in bits, counted from the most significant bit of the structure's
 * first byte.  Fields that are not named here stay zero.
 */
#ifndef UCX_MEMH_IB_MLX5_MAILBOX_H
#define UCX_MEMH_IB_MLX5_MAILBOX_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- bit fields ---------------------------------------------------------- */

static inline void prm_set(uint8_t *box, unsigned offset, unsigned width, uint64_t value)
{
    unsigned bit, i;

    for (i = 0; i < width; ++i) {
        bit = offset + width - 1 - i;
        if ((value >> i) & 1) {
            box[bit / 8] |= (uint8_t)(0x80u >> (bit % 8));
        } else {
            box[bit / 8] &= (uint8_t)~(0x80u >> (bit % 8));
        }
    }
}

static inline uint64_t prm_get(const uint8_t *box, unsigned offset, unsigned width)
{
    uint64_t value = 0;
    unsigned bit;

    for (bit = offset; bit < offset + width; ++bit) {
        value = (value << 1) | ((box[bit / 8] >> (7 - bit % 8)) & 1);
    }
    return value;
}

/* ---- any command --------------------------------------------------------- */

#define PRM_OPCODE       0x00, 16
#define PRM_OP_MOD       0x30, 16
#define PRM_OUT_STATUS   0x00, 8
#define PRM_OUT_SYNDROME 0x20, 32

enum {
    PRM_OP_QUERY_HCA_CAP = 0x100,
    PRM_OP_CREATE_MKEY = 0x200,
};

/* ---- CREATE_MKEY --------------------------------------------------------- */

enum {
    PRM_CREATE_MKEY_IN_SIZE = 272, /* and the translation entries */
    PRM_CREATE_MKEY_OUT_SIZE = 16,
    PRM_KLM_SIZE = 16,
    PRM_MKC_OFFSET = 16, /* bytes, in create_mkey_in */
    PRM_ACCESS_MODE_KLM = 2,
    PRM_ACCESS_MODE_KSM = 3,
    PRM_QPN_ANY = 0xffffff,
};

/* create_mkey_in */
#define PRM_TRANSLATIONS_OCTWORD_ACTUAL_SIZE 0x300, 32

/* mkc, the memory key context */
#define PRM_MKC_A                         0x11, 1
#define PRM_MKC_RW                        0x12, 1
#define PRM_MKC_RR                        0x13, 1
#define PRM_MKC_LW                        0x14, 1
#define PRM_MKC_LR                        0x15, 1
#define PRM_MKC_ACCESS_MODE_1_0           0x16, 2
#define PRM_MKC_QPN                       0x20, 24
#define PRM_MKC_MKEY_7_0                  0x38, 8
#define PRM_MKC_PD                        0x68, 24
#define PRM_MKC_START_ADDR                0x80, 64
#define PRM_MKC_LEN                       0xc0, 64
#define PRM_MKC_TRANSLATIONS_OCTWORD_SIZE 0x1a0, 32
#define PRM_MKC_LOG_ENTITY_SIZE           0x1db, 5

/* klm, also used for ksm entries */
#define PRM_KLM_BYTE_COUNT 0x00, 32
#define PRM_KLM_MKEY       0x20, 32
#define PRM_KLM_ADDRESS    0x40, 64

/* create_mkey_out */
#define PRM_OUT_MKEY_INDEX 0x48, 24

#define MLX5_LOG_ENTITY 31
#define MLX5_ENTITY     (1ull << MLX5_LOG_ENTITY) /* the most that one entry covers */

/* An indirect key: a list of entries, all on one registration's local key. */
typedef struct mlx5_mkey {
    uint64_t start;     /* the first address that a peer may present */
    uint64_t length;
    uint64_t entries;   /* that cover something                      */
    uint64_t list_size; /* with the zero entries behind them         */
    uint64_t exact;     /* KLM: bytes that the entries cover         */
    uint32_t lkey;
    uint32_t pdn;
    uint32_t qpn;
    uint8_t mode;
    uint8_t tag;
    uint8_t a, rw, rr, lw;
} mlx5_mkey_t;

/* KLM entries have a byte count each, so range and rights are exactly the handle's.  Their
 * list is a multiple of 64 bytes. */
static inline void mlx5_mkey_klm(mlx5_mkey_t *mkey, uint64_t address, uint64_t length)
{
    mkey->mode = PRM_ACCESS_MODE_KLM;
    mkey->start = address;
    mkey->length = length;
    mkey->exact = length;
    mkey->entries = length / MLX5_ENTITY + (length % MLX5_ENTITY != 0);
    mkey->list_size = (mkey->entries + 3) & ~3ull;
}

/* KSM entries are all of one size.  As UCX does: the address is rounded down to it, and
 * there is room for one page more, because firmware's range check refuses some offsets
 * without.  The registration below refuses what lies outside of it. */
static inline void mlx5_mkey_ksm(mlx5_mkey_t *mkey, uint64_t address, uint64_t length,
                                 uint64_t page, uint64_t atomic_align)
{
    uint64_t before = address % MLX5_ENTITY;

    length += before;
    mkey->mode = PRM_ACCESS_MODE_KSM;
    mkey->start = address - before;
    mkey->length = (length + atomic_align - 1) & ~(atomic_align - 1);
    mkey->exact = 0;
    mkey->entries = (length + page + MLX5_ENTITY - 1) / MLX5_ENTITY;
    mkey->list_size = mkey->entries;
}

static inline size_t mlx5_create_mkey_size(const mlx5_mkey_t *mkey)
{
    return PRM_CREATE_MKEY_IN_SIZE + mkey->list_size * PRM_KLM_SIZE;
}

/* Fills `box`, mlx5_create_mkey_size() zeroed bytes. */
static inline void mlx5_create_mkey_fill(uint8_t *box, const mlx5_mkey_t *mkey)
{
    uint8_t *mkc = box + PRM_MKC_OFFSET;
    uint8_t *entry = box + PRM_CREATE_MKEY_IN_SIZE;
    uint64_t count, offset, i;

    prm_set(box, PRM_OPCODE, PRM_OP_CREATE_MKEY);
    prm_set(box, PRM_TRANSLATIONS_OCTWORD_ACTUAL_SIZE, mkey->list_size);
    prm_set(mkc, PRM_MKC_A, mkey->a);
    prm_set(mkc, PRM_MKC_RW, mkey->rw);
    prm_set(mkc, PRM_MKC_RR, mkey->rr);
    prm_set(mkc, PRM_MKC_LW, mkey->lw);
    prm_set(mkc, PRM_MKC_LR, 1);
    prm_set(mkc, PRM_MKC_ACCESS_MODE_1_0, mkey->mode);
    prm_set(mkc, PRM_MKC_QPN, mkey->qpn);
    prm_set(mkc, PRM_MKC_MKEY_7_0, mkey->tag);
    prm_set(mkc, PRM_MKC_PD, mkey->pdn);
    prm_set(mkc, PRM_MKC_START_ADDR, mkey->start);
    prm_set(mkc, PRM_MKC_LEN, mkey->length);
    prm_set(mkc, PRM_MKC_TRANSLATIONS_OCTWORD_SIZE, mkey->list_size);
    if (mkey->mode == PRM_ACCESS_MODE_KSM) {
        prm_set(mkc, PRM_MKC_LOG_ENTITY_SIZE, MLX5_LOG_ENTITY);
    }
    for (i = 0; i < mkey->entries; ++i, entry += PRM_KLM_SIZE) {
        offset = i * MLX5_ENTITY;
        count = MLX5_ENTITY;
        if ((mkey->mode == PRM_ACCESS_MODE_KLM) && (mkey->exact - offset < count)) {
            count = mkey->exact - offset;
        }
        prm_set(entry, PRM_KLM_BYTE_COUNT, count);
        prm_set(entry, PRM_KLM_MKEY, mkey->lkey);
        prm_set(entry, PRM_KLM_ADDRESS, mkey->start + offset);
    }
}

/* ---- QUERY_HCA_CAP ------------------------------------------------------- */

enum {
    PRM_QUERY_HCA_CAP_IN_SIZE = 16,
    PRM_QUERY_HCA_CAP_OUT_SIZE = 4112,
    PRM_CAP_OFFSET = 16, /* bytes, in query_hca_cap_out */
    PRM_CAP_GENERAL = 0,
    PRM_CAP_ATOMIC = 3,
    PRM_CAP_CURRENT = 1,
};

/* cmd_hca_cap */
#define PRM_CAP_MAX_INDIRECTION            0x100, 8
#define PRM_CAP_FIXED_BUFFER_SIZE          0x108, 1
#define PRM_CAP_LOG_MAX_KLM_LIST_SIZE      0x11a, 6
#define PRM_CAP_UMR_MODIFY_ATOMIC_DISABLED 0x208, 1
#define PRM_CAP_UMR_INDIRECT_MKEY_DISABLED 0x209, 1
#define PRM_CAP_ATOMIC_FLAG                0x21e, 1

/* atomic_caps */
#define PRM_ATOMIC_OPERATIONS 0x90, 16
#define PRM_ATOMIC_SIZE_QP    0xb0, 16

enum {
    PRM_ATOMIC_COMPARE_SWAP = 1,
    PRM_ATOMIC_FETCH_ADD = 2,
};

typedef struct mlx5_caps {
    uint64_t max_klm_list; /* entries */
    uint32_t atomic_align; /* the largest operand; 0: no atomics */
    uint8_t max_indirection;
    uint8_t fixed_buffer_size; /* KSM */
    uint8_t umr_modify_atomic_disabled;
    uint8_t umr_indirect_mkey_disabled;
    uint8_t atomic;
} mlx5_caps_t;

static inline void mlx5_query_cap_fill(uint8_t *box, unsigned type)
{
    prm_set(box, PRM_OPCODE, PRM_OP_QUERY_HCA_CAP);
    prm_set(box, PRM_OP_MOD, (type << 1) | PRM_CAP_CURRENT);
}

static inline void mlx5_caps_general(mlx5_caps_t *caps, const uint8_t *out)
{
    const uint8_t *cap = out + PRM_CAP_OFFSET;

    caps->max_klm_list = 1ull << prm_get(cap, PRM_CAP_LOG_MAX_KLM_LIST_SIZE);
    caps->max_indirection = (uint8_t)prm_get(cap, PRM_CAP_MAX_INDIRECTION);
    caps->fixed_buffer_size = (uint8_t)prm_get(cap, PRM_CAP_FIXED_BUFFER_SIZE);
    caps->umr_modify_atomic_disabled = (uint8_t)prm_get(cap, PRM_CAP_UMR_MODIFY_ATOMIC_DISABLED);
    caps->umr_indirect_mkey_disabled = (uint8_t)prm_get(cap, PRM_CAP_UMR_INDIRECT_MKEY_DISABLED);
    caps->atomic = (uint8_t)prm_get(cap, PRM_CAP_ATOMIC_FLAG);
}

/* 64-bit compare-swap and fetch-add, or none. */
static inline void mlx5_caps_atomic(mlx5_caps_t *caps, const uint8_t *out)
{
    const uint8_t *cap = out + PRM_CAP_OFFSET;
    unsigned operations = (unsigned)prm_get(cap, PRM_ATOMIC_OPERATIONS);
    unsigned sizes = (unsigned)prm_get(cap, PRM_ATOMIC_SIZE_QP);
    unsigned both = PRM_ATOMIC_COMPARE_SWAP | PRM_ATOMIC_FETCH_ADD;

    caps->atomic_align = 0;
    if (((operations & both) == both) && (sizes & 8)) {
        for (caps->atomic_align = 8; caps->atomic_align * 2 <= sizes;) {
            caps->atomic_align *= 2;
        }
    }
}

/* ---- what firmware answers ------------------------------------------------ */

static inline uint64_t prm_out_status(const uint8_t *out)
{
    return prm_get(out, PRM_OUT_STATUS);
}

static inline uint64_t prm_out_syndrome(const uint8_t *out)
{
    return prm_get(out, PRM_OUT_SYNDROME);
}

static inline uint64_t prm_out_mkey_index(const uint8_t *out)
{
    return prm_get(out, PRM_OUT_MKEY_INDEX);
}

static inline const char *prm_status_name(uint8_t status)
{
    switch (status) {
        /* clang-format off */
    case 0x00: return "OK";
    case 0x01: return "INT_ERR";
    case 0x02: return "BAD_OP";
    case 0x03: return "BAD_PARAM";
    case 0x04: return "BAD_SYS_STATE";
    case 0x05: return "BAD_RES";
    case 0x06: return "RES_BUSY";
    case 0x08: return "LIM_ERR";
    case 0x09: return "BAD_RES_STATE";
    case 0x0a: return "BAD_INDEX";
    case 0x0f: return "NO_RESOURCES";
    case 0x10: return "BAD_QP_STATE";
    case 0x30: return "BAD_PKT";
    case 0x40: return "BAD_SIZE";
    case 0x50: return "BAD_INPUT_LEN";
    case 0x51: return "BAD_OUTPUT_LEN";
    default: return "unknown status";
        /* clang-format on */
    }
}

#endif
