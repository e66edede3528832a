/* SPDX-License-Identifier: BSD-3-Clause */
/* The mkey table: allocation, references, the translation rule, windows.
 *
 * A slot's `ref` word holds LIVE, BLOCKED and a count of chunks that are using the key now. A chunk
 * takes a reference on every key of its chain; destroying or re-aiming a key first blocks it, then
 * sleeps until the count is zero. Slots never move and are never freed while the context lives, so
 * a responder may look at any of them at any time.
 */
#include "internal.h"

#include <sys/mman.h>

#define REF_LIVE    (1u << 31)
#define REF_BLOCKED (1u << 30)
#define REF_WAITED  (1u << 29)
#define REF_COUNT   (REF_WAITED - 1)

/* ---- references ------------------------------------------------------------------------------ */

static struct sm_mkey *slot_of(struct sm_mkey_table *t, uint32_t key)
{
    uint32_t i = (key >> 8) - t->base;

    return i < SM_MKEY_MAX ? &t->slot[i] : NULL;
}

static void mkey_put(struct sm_mkey *mk)
{
    uint32_t r = atomic_fetch_sub(&mk->ref, 1);

    if ((r & REF_COUNT) == 1 && (r & REF_WAITED))
        sm_futex_wake(&mk->ref, true);
}

/* A usable key with this exact value, referenced; NULL for anything else. */
static struct sm_mkey *mkey_get(struct sm_mkey_table *t, uint32_t key)
{
    struct sm_mkey *mk = slot_of(t, key);
    uint32_t r;

    if (!mk)
        return NULL;
    r = atomic_load(&mk->ref);
    do {
        if (!(r & REF_LIVE) || (r & REF_BLOCKED))
            return NULL;
    } while (!atomic_compare_exchange_weak(&mk->ref, &r, r + 1));
    if (mk->key != key || mk->d.free) {
        mkey_put(mk);
        return NULL;
    }
    return mk;
}

/* Table lock held: nobody else blocks or unblocks. */
static void mkey_block(struct sm_mkey *mk)
{
    atomic_fetch_or(&mk->ref, REF_BLOCKED);
}

static void mkey_wait_idle(struct sm_mkey *mk)
{
    uint32_t r;

    while ((r = atomic_load(&mk->ref)) & REF_COUNT) {
        r = atomic_fetch_or(&mk->ref, REF_WAITED) | REF_WAITED;
        if (r & REF_COUNT)
            sm_futex_wait(&mk->ref, r, -1, true);
    }
}

static void mkey_unblock(struct sm_mkey *mk)
{
    atomic_fetch_and(&mk->ref, ~(REF_BLOCKED | REF_WAITED));
}

/* ---- indices --------------------------------------------------------------------------------- */

int sm_mkeys_init(struct sm_mkey_table *t, uint32_t base)
{
    size_t size = SM_MKEY_MAX * sizeof(*t->slot);

    pthread_mutex_init(&t->lock, NULL);
    t->base = base;
    t->used = calloc(SM_MKEY_MAX / 64, sizeof(*t->used));
    /* Only the pages of slots that were ever used take memory. */
    t->slot = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (t->slot == MAP_FAILED)
        t->slot = NULL;
    if (!t->used || !t->slot) {
        sm_mkeys_fini(t);
        return ENOMEM;
    }
    return 0;
}

void sm_mkeys_fini(struct sm_mkey_table *t)
{
    if (t->slot)
        munmap(t->slot, SM_MKEY_MAX * sizeof(*t->slot));
    free(t->used);
    t->slot = NULL;
    t->used = NULL;
    pthread_mutex_destroy(&t->lock);
}

static bool index_used(const struct sm_mkey_table *t, uint32_t i)
{
    return t->used[i / 64] >> (i % 64) & 1;
}

/* First free index at or after `from`, round the end once. The caller knows that there is one. */
static uint32_t index_search(const struct sm_mkey_table *t, uint32_t from)
{
    uint32_t word = from / 64;
    uint64_t free_bits = ~t->used[word] & (~0ull << (from % 64));

    while (!free_bits) {
        word = (word + 1) % (SM_MKEY_MAX / 64);
        free_bits = ~t->used[word];
    }
    return word * 64 + (uint32_t)__builtin_ctzll(free_bits);
}

static int64_t index_alloc(struct sm_mkey_table *t)
{
    uint32_t cap = atomic_load(&sm_limits.log_max_mkey);
    uint32_t max = cap >= SM_MKEY_BITS ? SM_MKEY_MAX : 1u << cap;
    uint32_t fixed = atomic_load(&sm_config.index_fixed) - t->base;
    uint32_t i;

    if (t->live >= max)
        return -1;
    switch (atomic_load(&sm_config.index_policy)) {
    case SM_INDEX_FIFO:
        i = index_search(t, t->next);
        break;
    case SM_INDEX_FIXED:
        i = fixed < SM_MKEY_MAX && !index_used(t, fixed) ? fixed : index_search(t, t->low_hint);
        break;
    default:
        i = index_search(t, t->low_hint);
        t->low_hint = i;
    }
    t->used[i / 64] |= 1ull << (i % 64);
    t->next = (i + 1) % SM_MKEY_MAX;
    t->live++;
    return i;
}

static void index_free(struct sm_mkey_table *t, uint32_t i)
{
    t->used[i / 64] &= ~(1ull << (i % 64));
    t->low_hint = MIN(t->low_hint, i);
    t->live--;
}

/* ---- entries that pin what they point at ----------------------------------------------------- */

static struct sm_mkey *live_target(struct sm_mkey_table *t, uint32_t key)
{
    struct sm_mkey *mk = slot_of(t, key);
    uint32_t r = mk ? atomic_load(&mk->ref) : 0;

    return (r & REF_LIVE) && !(r & REF_BLOCKED) && mk->key == key ? mk : NULL;
}

/* Table lock held. An entry that names no key is legal: the access will fail, not the command. */
static void entries_pin(struct sm_mkey_table *t, struct sm_mkey_desc *d)
{
    for (uint32_t i = 0; i < d->nent; i++) {
        struct sm_mkey *target = live_target(t, d->ent[i].key);

        d->ent[i].pinned = target != NULL;
        if (target)
            atomic_fetch_add(&target->pins, 1);
    }
}

static void entries_unpin(struct sm_mkey_table *t, struct sm_mkey_desc *d)
{
    for (uint32_t i = 0; i < d->nent; i++) {
        if (d->ent[i].pinned)
            atomic_fetch_sub(&slot_of(t, d->ent[i].key)->pins, 1);
        d->ent[i].pinned = false;
    }
}

/* ---- create, destroy ------------------------------------------------------------------------- */

int sm_mkey_create(struct sm_ctx *ctx, const struct sm_mkey_desc *d, uint32_t *key)
{
    struct sm_mkey_table *t = &ctx->mkeys;
    struct sm_mkey *mk;
    int64_t i;

    pthread_mutex_lock(&t->lock);
    i = index_alloc(t);
    if (i < 0) {
        pthread_mutex_unlock(&t->lock);
        return ENOMEM;
    }
    mk = &t->slot[i];
    mk->d = *d;
    mk->key = (t->base + (uint32_t)i) << 8 | d->variant;
    atomic_store(&mk->pins, 0);
    entries_pin(t, &mk->d);
    *key = mk->key;
    atomic_store(&mk->ref, REF_LIVE);
    pthread_mutex_unlock(&t->lock);
    STAT_INC(mkeys_live);
    return 0;
}

int sm_mkey_destroy(struct sm_ctx *ctx, uint32_t key)
{
    struct sm_mkey_table *t = &ctx->mkeys;
    struct sm_mkey *mk = slot_of(t, key);
    uint32_t r;

    pthread_mutex_lock(&t->lock);
    r = mk ? atomic_load(&mk->ref) : 0;
    if (!(r & REF_LIVE) || (r & REF_BLOCKED)) {
        pthread_mutex_unlock(&t->lock);
        return EINVAL;
    }
    if (atomic_load(&mk->pins)) {
        pthread_mutex_unlock(&t->lock);
        return EBUSY;
    }
    mkey_block(mk);
    pthread_mutex_unlock(&t->lock);

    mkey_wait_idle(mk);
    sm_sq_revalidate(ctx);

    pthread_mutex_lock(&t->lock);
    entries_unpin(t, &mk->d);
    free(mk->d.ent);
    memset(&mk->d, 0, sizeof(mk->d));
    atomic_store(&mk->ref, 0);
    index_free(t, (uint32_t)(mk - t->slot));
    pthread_mutex_unlock(&t->lock);
    STAT_DEC(mkeys_live);
    return 0;
}

bool sm_mkey_peek(struct sm_ctx *ctx, uint32_t index, struct sm_mkey_desc *d, uint32_t *key)
{
    struct sm_mkey_table *t = &ctx->mkeys;
    struct sm_mkey *mk = slot_of(t, index << 8);
    bool live;

    pthread_mutex_lock(&t->lock);
    live = mk && (atomic_load(&mk->ref) & REF_LIVE);
    if (live) {
        *d = mk->d;
        *key = mk->key;
    }
    pthread_mutex_unlock(&t->lock);
    return live;
}

/* ---- translation ----------------------------------------------------------------------------- */

static bool in_range(const struct sm_mkey_desc *d, uint64_t addr, uint64_t len)
{
    return addr >= d->start && len <= d->len && addr - d->start <= d->len - len;
}

/* What the keys below an indirect one must allow: its own remote rights end with it, the device
 * then reads and writes locally. Only the atomic right has to hold all the way down. */
static uint8_t inner_need(uint8_t need)
{
    uint8_t inner = need & (SM_LR | SM_LW | SM_A);

    if (need & SM_RR)
        inner |= SM_LR;
    if (need & SM_RW)
        inner |= SM_LW;
    if (need & SM_A)
        inner |= SM_LR | SM_LW;
    return inner;
}

static bool xlat_append(struct sm_xlat *x, uint64_t va, uint64_t len)
{
    struct iovec *last = x->niov ? &x->iov[x->niov - 1] : NULL;

    if (last && (uint64_t)(uintptr_t)last->iov_base + last->iov_len == va) {
        last->iov_len += len;
    } else if (x->niov < SM_XLAT_IOV) {
        x->iov[x->niov++] = (struct iovec){(void *)(uintptr_t)va, len};
    } else {
        return false;
    }
    x->len += len;
    return true;
}

enum walk { WALK_OK, WALK_FULL, WALK_REFUSED };

static enum walk walk(const struct sm_who *who, uint32_t key, uint64_t addr, uint64_t len,
                      uint8_t need, unsigned depth, struct sm_xlat *x);

static uint32_t klm_find(const struct sm_mkey_desc *d, uint64_t off)
{
    uint32_t lo = 0, hi = d->nent;

    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;

        if (d->ent[mid].off <= off)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static enum walk walk_indirect(const struct sm_who *who, const struct sm_mkey_desc *d,
                               uint64_t addr, uint64_t len, uint8_t need, unsigned depth,
                               struct sm_xlat *x)
{
    uint64_t off = addr - d->start, entity = 1ull << d->log_entity;
    uint32_t i =
        d->mode == SM_MODE_KSM ? (uint32_t)MIN(off >> d->log_entity, UINT32_MAX) : klm_find(d, off);

    for (; len; i++) {
        const struct sm_mkey_ent *e;
        uint64_t into, room, take;
        enum walk w;

        if (i >= d->nent)
            return WALK_REFUSED;
        e = &d->ent[i];
        into = d->mode == SM_MODE_KSM ? off & (entity - 1) : off - e->off;
        room = d->mode == SM_MODE_KSM ? entity - into : e->len - into;
        take = MIN(room, len);
        if (!take)
            continue;
        w = walk(who, e->key, e->addr + into, take, need, depth + 1, x);
        if (w != WALK_OK)
            return w;
        off += take;
        len -= take;
    }
    return WALK_OK;
}

/* One key of a chain. It stays referenced, also when what is below it refuses: the caller drops the
 * whole object. */
static enum walk walk(const struct sm_who *who, uint32_t key, uint64_t addr, uint64_t len,
                      uint8_t need, unsigned depth, struct sm_xlat *x)
{
    const struct sm_mkey_desc *d;
    struct sm_mkey *mk;

    if (x->nheld == SM_XLAT_HOLDS)
        return WALK_FULL;
    mk = mkey_get(&who->ctx->mkeys, key);
    if (!mk)
        return WALK_REFUSED;
    x->held[x->nheld++] = mk;
    d = &mk->d;
    if (d->pdn != who->pdn || (d->qpn != SM_ANY_QPN && d->qpn != who->qpn))
        return WALK_REFUSED;
    if ((d->rights & need) != need || !in_range(d, addr, len))
        return WALK_REFUSED;
    if (d->mode == SM_MODE_MTT)
        return xlat_append(x, d->base + (addr - d->start), len) ? WALK_OK : WALK_FULL;
    if (depth >= atomic_load_explicit(&sm_limits.max_indirection, memory_order_relaxed))
        return WALK_REFUSED;
    return walk_indirect(who, d, addr, len, inner_need(need), depth, x);
}

bool sm_xlat(const struct sm_who *who, uint32_t key, uint64_t addr, uint64_t len, uint8_t need,
             struct sm_xlat *x)
{
    return walk(who, key, addr, len, need, 0, x) != WALK_REFUSED;
}

bool sm_xlat_sges(const struct sm_who *who, const struct ibv_sge *sge, uint32_t n, uint64_t off,
                  uint64_t len, uint8_t need, struct sm_xlat *x)
{
    for (uint32_t i = 0; i < n && len; i++) {
        uint64_t skip = MIN(off, sge[i].length), take = MIN(sge[i].length - skip, len);
        size_t before = x->len;

        off -= skip;
        if (!take)
            continue;
        if (!sm_xlat(who, sge[i].lkey, sge[i].addr + skip, take, need, x))
            return false;
        if (x->len - before < take)
            return true;
        len -= take;
    }
    return true;
}

void sm_xlat_put(struct sm_xlat *x)
{
    while (x->nheld)
        mkey_put(x->held[--x->nheld]);
    x->niov = 0;
    x->len = 0;
}

bool sm_xlat_check(const struct sm_who *who, uint32_t key, uint64_t addr, uint64_t len,
                   uint8_t need)
{
    while (len) {
        struct sm_xlat x = {.niov = 0};
        bool ok = sm_xlat(who, key, addr, len, need, &x);
        size_t done = x.len;

        sm_xlat_put(&x);
        if (!ok || !done)
            return false;
        addr += done;
        len -= done;
    }
    return true;
}

/* ---- windows: UMR at verbs level ------------------------------------------------------------- */

static bool is_window(const struct sm_mkey_desc *d)
{
    return d->kind == SM_KIND_MW1 || d->kind == SM_KIND_MW2;
}

/* A verbs window obeys IBTA at bind time. A key that was made for UMR is the device's business: its
 * firmware looks at the MR only when the window is used. */
static bool window_bind_allowed(const struct sm_mkey *mr, const struct sm_bind *b)
{
    if (!mr || !mr->d.mw_bind || mr->d.kind != SM_KIND_MR || mr->d.pdn != b->pdn)
        return false;
    if ((b->rights & (SM_RW | SM_A)) && !(mr->d.rights & SM_LW))
        return false;
    return in_range(&mr->d, b->addr, b->len);
}

static bool bind_allowed(struct sm_mkey_table *t, const struct sm_mkey *mk, const struct sm_bind *b)
{
    const struct sm_mkey_desc *d = &mk->d;

    if (!d->umr_en || d->mode != SM_MODE_KLM || d->pdn != b->pdn || !d->cap)
        return false;
    if (b->old_key >> 8 != b->new_key >> 8 || b->len > 1ull << 31)
        return false;
    if (d->kind == SM_KIND_MW1 ? b->type2 : d->kind == SM_KIND_MW2 ? !b->type2 : false)
        return false;
    if (b->type2 && !d->free) /* CHECK_FREE */
        return false;
    if (!is_window(d) && atomic_load(&sm_limits.umr_indirect_off))
        return false;
    if ((b->rights & SM_A) && atomic_load(&sm_limits.umr_atomic_off))
        return false;
    return !is_window(d) || !b->len || window_bind_allowed(live_target(t, b->mr_key), b);
}

static void bind_apply(struct sm_mkey_table *t, struct sm_mkey *mk, const struct sm_bind *b)
{
    struct sm_mkey_desc *d = &mk->d;

    entries_unpin(t, d);
    d->nent = b->len ? 1 : 0;
    d->free = !b->len;
    d->variant = (uint8_t)b->new_key;
    d->qpn = b->type2 ? b->qpn : SM_ANY_QPN;
    d->start = b->addr;
    d->len = b->len;
    d->rights = b->rights | SM_LR;
    if (b->len)
        d->ent[0] =
            (struct sm_mkey_ent){.addr = b->addr, .len = (uint32_t)b->len, .key = b->mr_key};
    entries_pin(t, d);
    mk->key = b->new_key;
}

/* Table lock held on entry and exit, dropped while the last users of the old meaning finish. False
 * when somebody else is changing or destroying the key. */
static bool reaim_begin(struct sm_ctx *ctx, struct sm_mkey *mk)
{
    if (atomic_load(&mk->ref) & REF_BLOCKED)
        return false;
    mkey_block(mk);
    pthread_mutex_unlock(&ctx->mkeys.lock);
    mkey_wait_idle(mk);
    sm_sq_revalidate(ctx);
    pthread_mutex_lock(&ctx->mkeys.lock);
    return true;
}

/* An entry was allocated for `cap` pieces when the key was made, so that a bind cannot fail later.
 */
enum ibv_wc_status sm_mkey_bind(struct sm_ctx *ctx, const struct sm_bind *b)
{
    struct sm_mkey_table *t = &ctx->mkeys;
    enum ibv_wc_status s = IBV_WC_MW_BIND_ERR;
    struct sm_mkey *mk;

    pthread_mutex_lock(&t->lock);
    mk = slot_of(t, b->old_key);
    if (mk && (atomic_load(&mk->ref) & REF_LIVE) && mk->key == b->old_key && reaim_begin(ctx, mk)) {
        if (bind_allowed(t, mk, b)) {
            bind_apply(t, mk, b);
            s = IBV_WC_SUCCESS;
        }
        mkey_unblock(mk);
    }
    pthread_mutex_unlock(&t->lock);
    return s;
}

static bool invalidate_allowed(const struct sm_mkey_desc *d, uint32_t pdn, uint32_t qpn,
                               bool remote)
{
    if (!d->umr_en || d->free || d->pdn != pdn || d->kind == SM_KIND_MW1)
        return false;
    if (remote && !d->rinval)
        return false;
    return d->qpn == SM_ANY_QPN || d->qpn == qpn; /* CHECK_QPN */
}

enum ibv_wc_status sm_mkey_invalidate(struct sm_ctx *ctx, uint32_t key, uint32_t pdn, uint32_t qpn,
                                      bool remote)
{
    struct sm_mkey_table *t = &ctx->mkeys;
    enum ibv_wc_status s = IBV_WC_MW_BIND_ERR;
    struct sm_mkey *mk;

    pthread_mutex_lock(&t->lock);
    mk = slot_of(t, key);
    if (mk && (atomic_load(&mk->ref) & REF_LIVE) && mk->key == key &&
        invalidate_allowed(&mk->d, pdn, qpn, remote) && reaim_begin(ctx, mk)) {
        entries_unpin(t, &mk->d);
        mk->d.nent = 0;
        mk->d.free = true;
        mk->d.qpn = SM_ANY_QPN;
        mkey_unblock(mk);
        s = IBV_WC_SUCCESS;
    }
    pthread_mutex_unlock(&t->lock);
    return s;
}
