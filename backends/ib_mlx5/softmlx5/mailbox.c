/* SPDX-License-Identifier: BSD-3-Clause */
/* The command interface: mailboxes as the PRM lays them out, answered as firmware and the kernel's
 * DEVX layer answer them.
 *
 * Refusals have three shapes: the kernel's own checks give a plain errno; firmware's give EREMOTEIO
 * with status and syndrome in the out mailbox; a destroy has no mailbox, so that its status comes
 * back as the errno that the kernel maps it to.
 */
#include "internal.h"

enum {
    OP_QUERY_HCA_CAP = 0x100,
    OP_CREATE_MKEY = 0x200,
    OP_QUERY_MKEY = 0x201,
    OP_DESTROY_MKEY = 0x202,
    OP_QUERY_LAG = 0x842,
};

enum fw_status {
    FW_OK = 0,
    FW_INT_ERR = 0x01,
    FW_BAD_OP = 0x02,
    FW_BAD_PARAM = 0x03,
    FW_BAD_SYS_STATE = 0x04,
    FW_BAD_RES = 0x05,
    FW_RES_BUSY = 0x06,
    FW_LIM_ERR = 0x08,
    FW_BAD_RES_STATE = 0x09,
    FW_BAD_INDEX = 0x0a,
    FW_NO_RESOURCES = 0x0f,
    FW_BAD_QP_STATE = 0x10,
    FW_BAD_PKT = 0x30,
    FW_BAD_SIZE = 0x40,
    FW_BAD_INPUT_LEN = 0x50,
    FW_BAD_OUTPUT_LEN = 0x51,
};

/* One syndrome for each reason, so that a test or a log line says which check it was. Real
 * firmware's numbers are not public; these are ours, all of the form 0x5AF7xxxx. */
enum syndrome {
    SYN_OP_MOD = 0x5af70001,
    SYN_RESERVED,
    SYN_IN_LEN,
    SYN_OUT_LEN,
    SYN_ACCESS_MODE,
    SYN_PD,
    SYN_NO_UMEM,
    SYN_UMEM_RANGE,
    SYN_UMEM_RIGHTS,
    SYN_NO_ENTRIES,
    SYN_LIST_TOO_LONG,
    SYN_LIST_UNALIGNED,
    SYN_LIST_MISMATCH,
    SYN_ENTRY_SIZE,
    SYN_LEN_UNCOVERED,
    SYN_RANGE_WRAP,
    SYN_KSM_OFF,
    SYN_ENTITY_SIZE,
    SYN_ATOMIC_OFF,
    SYN_INDEX,
    SYN_FEATURE,
    SYN_NO_MKEY,
    SYN_POINTED_AT,
    SYN_CAP_TYPE,
    SYN_LAG_OFF,
    SYN_NO_MEMORY,
};

enum { MKEY_IN = 272, HDR_IN = 16, HDR_OUT = 16, KLM = 16, MKC_AT = 16, MKC_SIZE = 64 };

/* ---- answers --------------------------------------------------------------------------------- */

static int fw_errno(uint8_t status)
{
    switch (status) {
    case FW_OK:
        return 0;
    case FW_BAD_OP:
    case FW_BAD_PARAM:
    case FW_BAD_RES:
    case FW_BAD_RES_STATE:
    case FW_BAD_INDEX:
    case FW_BAD_QP_STATE:
    case FW_BAD_PKT:
    case FW_BAD_SIZE:
        return EINVAL;
    case FW_RES_BUSY:
        return EBUSY;
    case FW_LIM_ERR:
        return ENOMEM;
    case FW_NO_RESOURCES:
        return EAGAIN;
    default:
        return EIO;
    }
}

/* Writes as much of the answer as the caller left room for; 0 or EREMOTEIO. */
static int answer(void *out, size_t outlen, enum fw_status status, uint32_t syndrome)
{
    uint8_t hdr[HDR_OUT] = {0};

    hdr[0] = (uint8_t)status;
    sm_bits_set(hdr, 0x20, 32, syndrome);
    memset(out, 0, outlen);
    memcpy(out, hdr, MIN(outlen, sizeof(hdr)));
    if (status == FW_OK)
        return 0;
    atomic_store(&sm_stats.last_status, status);
    atomic_store(&sm_stats.last_syndrome, syndrome);
    return EREMOTEIO;
}

/* What every command goes through first; 0 = carry on. */
static int command_begin(const char *name, void *out, size_t outlen)
{
    struct sm_fault f;

    sm_command_delay();
    if (!sm_fault_hit(name, &f))
        return 0;
    return f.err ? f.err : answer(out, outlen, f.status, f.syndrome);
}

/* ---- CREATE_MKEY: fields --------------------------------------------------------------------- */

struct field {
    uint16_t off;
    uint8_t width;
};

/* Every field that may be non-zero. All other bits before the list are reserved. */
static const struct field mkey_fields[] = {
    {0x00, 16},  /* opcode */
    {0x10, 16},  /* uid: the kernel's business */
    {0x30, 16},  /* op_mod, checked before */
    {0x48, 24},  /* input_mkey_index */
    {0x60, 1},   /* pg_access */
    {0x61, 1},   /* mkey_umem_valid */
    {0x62, 1},   /* cmd_on_behalf */
    {0x70, 16},  /* function_id */
    {0x81, 1},   /* free */
    {0x83, 3},   /* access_mode_4_2 */
    {0x86, 1},   /* alter_pd_to_vhca_id */
    {0x87, 1},   /* crossed_side_mkey */
    {0x8d, 1},   /* relaxed_ordering_write */
    {0x8f, 1},   /* small_fence_on_rdma_read_response */
    {0x90, 1},   /* umr_en */
    {0x91, 5},   /* a rw rr lw lr */
    {0x96, 2},   /* access_mode_1_0 */
    {0xa0, 24},  /* qpn */
    {0xb8, 8},   /* mkey_7_0 */
    {0xe0, 1},   /* length64 */
    {0xe1, 1},   /* bsf_en */
    {0xe2, 1},   /* sync_umr */
    {0xe5, 1},   /* expected_sigerr_count */
    {0xe7, 1},   /* en_rinval */
    {0xe8, 24},  /* pd */
    {0x100, 64}, /* start_addr */
    {0x140, 64}, /* len */
    {0x180, 32}, /* bsf_octword_size */
    {0x200, 16}, /* crossing_target_gvmi_id */
    {0x220, 32}, /* translations_octword_size */
    {0x259, 1},  /* relaxed_ordering_read */
    {0x25b, 5},  /* log_entity_size */
    {0x300, 32}, /* translations_octword_actual_size */
    {0x320, 32}, /* mkey_umem_id */
    {0x340, 64}, /* mkey_umem_offset */
};

/* Known to the PRM, not to this device: refused by name instead of by "reserved". */
static const struct field mkey_unsupported[] = {
    {0x60, 1}, {0x62, 1}, {0x70, 16},  {0x86, 1},   {0x87, 1},
    {0xe0, 1}, {0xe1, 1}, {0x180, 32}, {0x200, 16},
};

static bool reserved_bits_clear(const uint8_t *in)
{
    static uint8_t known[MKEY_IN];
    static _Atomic bool ready;

    if (!atomic_load(&ready)) {
        uint8_t m[MKEY_IN] = {0};

        for (size_t i = 0; i < ARRAY_SIZE(mkey_fields); i++)
            sm_bits_set(m, mkey_fields[i].off, mkey_fields[i].width, ~0ull);
        memcpy(known, m, sizeof(m)); /* the same bytes whoever writes them */
        atomic_store(&ready, true);
    }
    for (size_t i = 0; i < MKEY_IN; i++) {
        if (in[i] & ~known[i])
            return false;
    }
    return true;
}

static bool unsupported_clear(const uint8_t *in)
{
    for (size_t i = 0; i < ARRAY_SIZE(mkey_unsupported); i++) {
        if (sm_bits_get(in, mkey_unsupported[i].off, mkey_unsupported[i].width))
            return false;
    }
    return true;
}

/* ---- CREATE_MKEY ----------------------------------------------------------------------------- */

/* A command under way: where its answer stands until it is written. */
struct verdict {
    enum fw_status status;
    uint32_t syndrome;
};

static bool refuse(struct verdict *v, enum fw_status status, uint32_t syndrome)
{
    *v = (struct verdict){status, syndrome};
    return false;
}

struct mkey_request {
    const uint8_t *in;
    size_t inlen;
    struct sm_mkey_desc d;
    uint32_t actual; /* translations_octword_actual_size */
    struct sm_umem *umem;
    struct sm_pd *pd;
};

static uint8_t mailbox_rights(const uint8_t *in)
{
    static const struct {
        uint16_t off;
        uint8_t right;
    } map[] = {{0x91, SM_A}, {0x92, SM_RW}, {0x93, SM_RR}, {0x94, SM_LW}, {0x95, SM_LR}};
    uint8_t r = 0;

    for (size_t i = 0; i < ARRAY_SIZE(map); i++) {
        if (sm_bits_get(in, map[i].off, 1))
            r |= map[i].right;
    }
    return r;
}

static void parse_context(struct mkey_request *r)
{
    const uint8_t *in = r->in;

    r->d = (struct sm_mkey_desc){
        .kind = SM_KIND_DEVX,
        .mode = sm_bits_get(in, 0x83, 3) << 2 | sm_bits_get(in, 0x96, 2),
        .rights = mailbox_rights(in),
        .log_entity = (uint8_t)sm_bits_get(in, 0x25b, 5),
        .variant = (uint8_t)sm_bits_get(in, 0xb8, 8),
        .free = sm_bits_get(in, 0x81, 1),
        .umr_en = sm_bits_get(in, 0x90, 1),
        .rinval = sm_bits_get(in, 0xe7, 1),
        .pdn = (uint32_t)sm_bits_get(in, 0xe8, 24),
        .qpn = (uint32_t)sm_bits_get(in, 0xa0, 24),
        .start = sm_bits_get(in, 0x100, 64),
        .len = sm_bits_get(in, 0x140, 64),
        .cap = (uint32_t)sm_bits_get(in, 0x220, 32),
    };
    r->actual = (uint32_t)sm_bits_get(in, 0x300, 32);
}

static bool check_header(struct mkey_request *r, struct verdict *v)
{
    const uint8_t *in = r->in;

    if (sm_bits_get(in, 0x30, 16))
        return refuse(v, FW_BAD_OP, SYN_OP_MOD);
    if (!reserved_bits_clear(in))
        return refuse(v, FW_BAD_PARAM, SYN_RESERVED);
    if (!unsupported_clear(in))
        return refuse(v, FW_BAD_PARAM, SYN_FEATURE);
    if (sm_bits_get(in, 0x48, 24)) /* no index range is reserved for names */
        return refuse(v, FW_BAD_INDEX, SYN_INDEX);
    return true;
}

static bool check_common(struct sm_ctx *ctx, struct mkey_request *r, struct verdict *v)
{
    if (r->d.mode != SM_MODE_MTT && r->d.mode != SM_MODE_KLM && r->d.mode != SM_MODE_KSM)
        return refuse(v, FW_BAD_PARAM, SYN_ACCESS_MODE);
    if (r->d.mode == SM_MODE_KSM && !atomic_load(&sm_limits.ksm))
        return refuse(v, FW_BAD_PARAM, SYN_KSM_OFF);
    if ((r->d.rights & SM_A) && !atomic_load(&sm_limits.atomic))
        return refuse(v, FW_BAD_PARAM, SYN_ATOMIC_OFF);
    if (r->d.start + r->d.len < r->d.start)
        return refuse(v, FW_BAD_PARAM, SYN_RANGE_WRAP);
    r->pd = sm_pd_get(ctx, r->d.pdn);
    return r->pd ? true : refuse(v, FW_BAD_RES, SYN_PD);
}

/* The kernel marks every key of a non-indirect mode as one over a umem, whether it is or not. */
static bool check_mtt(struct sm_ctx *ctx, struct mkey_request *r, struct verdict *v)
{
    uint64_t off = sm_bits_get(r->in, 0x340, 64);
    uint8_t writes = SM_LW | SM_RW | SM_A;

    r->umem = sm_umem_get(ctx, (uint32_t)sm_bits_get(r->in, 0x320, 32));
    if (!r->umem)
        return refuse(v, FW_BAD_RES, SYN_NO_UMEM);
    if (off > r->umem->len || r->d.len > r->umem->len - off)
        return refuse(v, FW_BAD_PARAM, SYN_UMEM_RANGE);
    if ((r->d.rights & writes) && !r->umem->writable)
        return refuse(v, FW_BAD_PARAM, SYN_UMEM_RIGHTS);
    r->d.base = r->umem->addr + off;
    return true;
}

static bool check_list_size(struct mkey_request *r, struct verdict *v)
{
    uint64_t cap = 1ull << atomic_load(&sm_limits.log_max_klm);

    if (!r->d.cap || (!r->actual && !r->d.free))
        return refuse(v, FW_BAD_PARAM, SYN_NO_ENTRIES);
    if (r->d.cap > cap || r->actual > cap)
        return refuse(v, FW_LIM_ERR, SYN_LIST_TOO_LONG);
    if (r->d.mode == SM_MODE_KLM && r->d.cap % 4)
        return refuse(v, FW_BAD_PARAM, SYN_LIST_UNALIGNED);
    /* What is reserved holds what is sent, padding excepted; a free key is filled by UMR later. */
    if (r->actual > r->d.cap || (!r->d.free && r->d.cap - r->actual >= 4))
        return refuse(v, FW_BAD_PARAM, SYN_LIST_MISMATCH);
    if (r->inlen < MKEY_IN + (uint64_t)KLM * r->actual)
        return refuse(v, FW_BAD_INPUT_LEN, SYN_IN_LEN);
    return true;
}

static bool load_entries(struct mkey_request *r, struct verdict *v, uint64_t *covered)
{
    uint64_t entity = r->d.mode == SM_MODE_KSM ? 1ull << r->d.log_entity : 0;

    *covered = 0;
    for (uint32_t i = 0; i < r->actual; i++) {
        const uint8_t *klm = r->in + MKEY_IN + (size_t)KLM * i;
        struct sm_mkey_ent *e = &r->d.ent[i];

        e->len = (uint32_t)sm_bits_get(klm, 0x00, 32);
        e->key = (uint32_t)sm_bits_get(klm, 0x20, 32);
        e->addr = sm_bits_get(klm, 0x40, 64);
        e->off = *covered;
        if (!entity && e->len > 1u << 31)
            return refuse(v, FW_BAD_PARAM, SYN_ENTRY_SIZE);
        *covered += entity ? entity : e->len;
    }
    r->d.nent = r->actual;
    /* Padding entries at the end cover nothing; dropping them keeps the search by offset exact. */
    while (!entity && r->d.nent && !r->d.ent[r->d.nent - 1].len)
        r->d.nent--;
    return true;
}

static bool check_list(struct mkey_request *r, struct verdict *v)
{
    uint64_t covered;

    if (!check_list_size(r, v))
        return false;
    if (r->d.mode == SM_MODE_KSM && !r->d.log_entity)
        return refuse(v, FW_BAD_PARAM, SYN_ENTITY_SIZE);
    r->d.ent = calloc(r->d.cap, sizeof(*r->d.ent));
    if (!r->d.ent)
        return refuse(v, FW_NO_RESOURCES, SYN_NO_MEMORY);
    if (!load_entries(r, v, &covered))
        return false;
    if (!r->d.free && r->d.len > covered)
        return refuse(v, FW_BAD_PARAM, SYN_LEN_UNCOVERED);
    return true;
}

static bool check_request(struct sm_ctx *ctx, struct mkey_request *r, struct verdict *v)
{
    if (!check_header(r, v))
        return false;
    parse_context(r);
    if (!check_common(ctx, r, v))
        return false;
    return r->d.mode == SM_MODE_MTT ? check_mtt(ctx, r, v) : check_list(r, v);
}

struct mlx5dv_devx_obj {
    struct sm_ctx *ctx;
    uint32_t key;
    struct sm_umem *umem;
    struct sm_pd *pd;
};

static struct mlx5dv_devx_obj *obj_new(struct sm_ctx *ctx, uint32_t key,
                                       const struct mkey_request *r)
{
    struct mlx5dv_devx_obj *obj = malloc(sizeof(*obj));

    if (!obj)
        return NULL;
    *obj = (struct mlx5dv_devx_obj){ctx, key, r->umem, r->pd};
    pthread_mutex_lock(&ctx->lock);
    ctx->nobj++;
    pthread_mutex_unlock(&ctx->lock);
    return obj;
}

static struct mlx5dv_devx_obj *create_mkey(struct sm_ctx *ctx, const void *in, size_t inlen,
                                           void *out, size_t outlen)
{
    struct mkey_request r = {.in = in, .inlen = inlen};
    struct verdict v = {FW_OK, 0};
    struct mlx5dv_devx_obj *obj = NULL;
    uint32_t key;
    int err = command_begin("create_mkey", out, outlen);

    if (err)
        goto fail;
    if (inlen < MKEY_IN)
        refuse(&v, FW_BAD_INPUT_LEN, SYN_IN_LEN);
    else if (outlen < HDR_OUT)
        refuse(&v, FW_BAD_OUTPUT_LEN, SYN_OUT_LEN);
    else if (check_request(ctx, &r, &v) && sm_mkey_create(ctx, &r.d, &key))
        refuse(&v, FW_NO_RESOURCES, SYN_NO_MEMORY);
    if (v.status == FW_OK) {
        r.d.ent = NULL; /* the table's now */
        obj = obj_new(ctx, key, &r);
        if (obj) {
            answer(out, outlen, FW_OK, 0);
            sm_bits_set(out, 0x48, 24, key >> 8);
            return obj;
        }
        sm_mkey_destroy(ctx, key);
        refuse(&v, FW_NO_RESOURCES, SYN_NO_MEMORY);
    }
    err = answer(out, outlen, v.status, v.syndrome);
fail:
    free(r.d.ent);
    if (r.umem)
        sm_umem_put(r.umem);
    if (r.pd)
        sm_pd_put(r.pd);
    errno = err;
    return NULL;
}

/* ---- DEVX objects ---------------------------------------------------------------------------- */

struct mlx5dv_devx_obj *sm_devx_create(struct ibv_context *c, const void *in, size_t inlen,
                                       void *out, size_t outlen)
{
    struct sm_ctx *ctx = to_ctx(c);

    /* The kernel opens the door for DEVX contexts and for object creation only. */
    if (!ctx->devx || inlen < HDR_IN || outlen < 8 || sm_bits_get(in, 0, 16) != OP_CREATE_MKEY) {
        errno = ctx->devx ? EINVAL : EPERM;
        return NULL;
    }
    STAT_CMD(cmd_create_mkey);
    return create_mkey(ctx, in, inlen, out, outlen);
}

static void context_encode(const struct sm_mkey_desc *d, uint32_t key, uint8_t *mkc)
{
    sm_bits_set(mkc, 0x01, 1, d->free);
    sm_bits_set(mkc, 0x03, 3, (uint64_t)d->mode >> 2);
    sm_bits_set(mkc, 0x10, 1, d->umr_en);
    sm_bits_set(mkc, 0x11, 1, !!(d->rights & SM_A));
    sm_bits_set(mkc, 0x12, 1, !!(d->rights & SM_RW));
    sm_bits_set(mkc, 0x13, 1, !!(d->rights & SM_RR));
    sm_bits_set(mkc, 0x14, 1, !!(d->rights & SM_LW));
    sm_bits_set(mkc, 0x15, 1, !!(d->rights & SM_LR));
    sm_bits_set(mkc, 0x16, 2, d->mode);
    sm_bits_set(mkc, 0x20, 24, d->qpn);
    sm_bits_set(mkc, 0x38, 8, key & 0xff);
    sm_bits_set(mkc, 0x67, 1, d->rinval);
    sm_bits_set(mkc, 0x68, 24, d->pdn);
    sm_bits_set(mkc, 0x80, 64, d->start);
    sm_bits_set(mkc, 0xc0, 64, d->len);
    sm_bits_set(mkc, 0x1a0, 32, d->cap);
    sm_bits_set(mkc, 0x1db, 5, d->log_entity);
}

int sm_devx_query(struct mlx5dv_devx_obj *obj, const void *in, size_t inlen, void *out,
                  size_t outlen)
{
    struct sm_mkey_desc d;
    uint32_t key;
    int err;

    if (!sm_ctx_alive(obj->ctx))
        return EIO;
    if (inlen < HDR_IN || outlen < 8 || sm_bits_get(in, 0, 16) != OP_QUERY_MKEY ||
        sm_bits_get(in, 0x48, 24) != obj->key >> 8)
        return EINVAL; /* the kernel: not a query of this object */
    STAT_CMD(cmd_query_mkey);
    err = command_begin("query_mkey", out, outlen);
    if (err)
        return err;
    if (sm_bits_get(in, 0x30, 16))
        return answer(out, outlen, FW_BAD_OP, SYN_OP_MOD);
    if (outlen < HDR_OUT + MKC_SIZE)
        return answer(out, outlen, FW_BAD_OUTPUT_LEN, SYN_OUT_LEN);
    if (!sm_mkey_peek(obj->ctx, obj->key >> 8, &d, &key))
        return answer(out, outlen, FW_BAD_INDEX, SYN_NO_MKEY);
    answer(out, outlen, FW_OK, 0);
    context_encode(&d, key, (uint8_t *)out + MKC_AT);
    return 0;
}

/* No object that can be created here has a modify command. */
int sm_devx_modify(struct mlx5dv_devx_obj *obj, const void *in, size_t inlen, void *out,
                   size_t outlen)
{
    (void)obj, (void)in, (void)inlen, (void)out, (void)outlen;
    return EINVAL;
}

static int destroy_mkey(struct sm_ctx *ctx, uint32_t key)
{
    uint8_t out[HDR_OUT];
    int err = command_begin("destroy_mkey", out, sizeof(out));

    if (err)
        return err == EREMOTEIO ? fw_errno(out[0]) : err;
    switch (sm_mkey_destroy(ctx, key)) {
    case 0:
        return 0;
    case EBUSY:
        answer(out, sizeof(out), FW_RES_BUSY, SYN_POINTED_AT);
        break;
    default:
        answer(out, sizeof(out), FW_BAD_RES_STATE, SYN_NO_MKEY);
    }
    return fw_errno(out[0]);
}

int sm_devx_destroy(struct mlx5dv_devx_obj *obj)
{
    struct sm_ctx *ctx = obj->ctx;
    int err;

    if (!sm_ctx_alive(ctx))
        return EIO;
    STAT_CMD(cmd_destroy_mkey);
    err = destroy_mkey(ctx, obj->key);
    if (err)
        return err;
    if (obj->umem)
        sm_umem_put(obj->umem);
    sm_pd_put(obj->pd);
    pthread_mutex_lock(&ctx->lock);
    ctx->nobj--;
    pthread_mutex_unlock(&ctx->lock);
    free(obj);
    return 0;
}

/* ---- general commands ------------------------------------------------------------------------ */

static int query_hca_cap(const void *in, void *out, size_t outlen)
{
    uint8_t area[SM_CAP_BYTES];
    int err = command_begin("query_hca_cap", out, outlen);

    if (err)
        return err;
    if (outlen < HDR_OUT + SM_CAP_BYTES)
        return answer(out, outlen, FW_BAD_OUTPUT_LEN, SYN_OUT_LEN);
    /* Current and maximum are the same here: nothing of this device is configurable by its user. */
    if (!sm_caps_fill((unsigned)sm_bits_get(in, 0x30, 16) >> 1, area))
        return answer(out, outlen, FW_BAD_PARAM, SYN_CAP_TYPE);
    answer(out, outlen, FW_OK, 0);
    memcpy((uint8_t *)out + HDR_OUT, area, sizeof(area));
    return 0;
}

int sm_devx_general(struct ibv_context *c, const void *in, size_t inlen, void *out, size_t outlen)
{
    if (!to_ctx(c)->devx)
        return EPERM;
    if (inlen < HDR_IN || outlen < 8)
        return EINVAL;
    switch (sm_bits_get(in, 0, 16)) {
    case OP_QUERY_HCA_CAP:
        STAT_CMD(cmd_query_hca_cap);
        return query_hca_cap(in, out, outlen);
    case OP_QUERY_LAG:
        STAT_INC(cmd_total);
        return answer(out, outlen, FW_BAD_SYS_STATE, SYN_LAG_OFF);
    default:
        return EINVAL; /* not on the kernel's list */
    }
}

/* ---- keys for UMR ---------------------------------------------------------------------------- */

struct dv_mkey {
    struct mlx5dv_mkey mkey;
    struct sm_pd *pd;
};

struct mlx5dv_mkey *sm_dv_create_mkey(struct mlx5dv_mkey_init_attr *attr)
{
    struct sm_pd *pd = to_pd(attr->pd);
    uint32_t flags = attr->create_flags & ~(uint32_t)MLX5DV_MKEY_INIT_ATTR_FLAGS_REMOTE_INVALIDATE;
    struct sm_mkey_desc d = {
        .kind = SM_KIND_DV,
        .mode = SM_MODE_KLM,
        .rights = SM_LR,
        .free = true,
        .umr_en = true,
        .rinval = attr->create_flags & MLX5DV_MKEY_INIT_ATTR_FLAGS_REMOTE_INVALIDATE,
        .pdn = pd->pdn,
        .qpn = SM_ANY_QPN,
        .cap = (attr->max_entries + 3u) & ~3u,
    };
    struct dv_mkey *m;
    struct sm_fault f;
    int err = 0;

    if (flags != MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT || !d.cap) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    STAT_CMD(cmd_create_mkey);
    sm_command_delay();
    if (sm_fault_hit("create_mkey", &f)) {
        errno = f.err ? f.err : EREMOTEIO;
        return NULL;
    }
    m = calloc(1, sizeof(*m));
    d.ent = calloc(d.cap, sizeof(*d.ent));
    err = m && d.ent ? sm_mkey_create(to_ctx(attr->pd->context), &d, &m->mkey.lkey) : ENOMEM;
    if (err) {
        free(m);
        free(d.ent);
        errno = err;
        return NULL;
    }
    m->mkey.rkey = m->mkey.lkey;
    m->pd = pd;
    atomic_fetch_add(&pd->users, 1);
    return &m->mkey;
}

int sm_dv_destroy_mkey(struct mlx5dv_mkey *mkey)
{
    struct dv_mkey *m = container_of(mkey, struct dv_mkey, mkey);
    int err;

    if (!sm_ctx_alive(to_ctx(m->pd->pd.context)))
        return EIO;
    STAT_CMD(cmd_destroy_mkey);
    err = destroy_mkey(to_ctx(m->pd->pd.context), mkey->lkey);
    if (err)
        return err;
    atomic_fetch_sub(&m->pd->users, 1);
    free(m);
    return 0;
}
