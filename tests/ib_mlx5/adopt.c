/* SPDX-License-Identifier: BSD-3-Clause */
/* A C runtime that has opened the software device and registered memory itself, and gets revocable
 * keys on top.  Compiled and loaded by test_adopt_c.py. */
#define PY_SSIZE_T_CLEAN
#include <ucx_memh/pyapi.h>

#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MUST(condition)                                                     \
    do {                                                                    \
        if (!(condition)) {                                                 \
            printf("line %d: %s [%s]\n", __LINE__, #condition, error.text); \
            return __LINE__;                                                \
        }                                                                   \
    } while (0)

enum { SIZE = 8192, EVERY = 0x1f };

/* verbs.h has macros of some of these names. */
static struct {
    struct ibv_device **(*get_device_list)(int *);
    void (*free_device_list)(struct ibv_device **);
    struct ibv_context *(*open_device)(struct ibv_device *);
    int (*close_device)(struct ibv_context *);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *);
    int (*dealloc_pd)(struct ibv_pd *);
    struct ibv_mr *(*register_mr)(struct ibv_pd *, void *, size_t, int);
    int (*dereg_mr)(struct ibv_mr *);
    uint64_t (*stat)(const char *);
} verbs;

static const ucxm_api_t *ucxm;
static ucxm_error_t error;

static char memory[SIZE];
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;

/* With the GIL.  0, or -1 and an exception. */
int adopt_import(void)
{
    ucxm = ucxm_import_api();
    return ucxm == NULL ? -1 : 0;
}

static int load(const char *path)
{
    const struct {
        const char *name;
        void *at;
    } symbols[] = {
        {"ibv_get_device_list", &verbs.get_device_list},
        {"ibv_free_device_list", &verbs.free_device_list},
        {"ibv_open_device", &verbs.open_device},
        {"ibv_close_device", &verbs.close_device},
        {"ibv_alloc_pd", &verbs.alloc_pd},
        {"ibv_dealloc_pd", &verbs.dealloc_pd},
        {"ibv_reg_mr", &verbs.register_mr},
        {"ibv_dereg_mr", &verbs.dereg_mr},
        {"softmlx5_stat", &verbs.stat},
    };
    void *library = dlopen(path, RTLD_NOW);

    MUST(library != NULL);
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); ++i) {
        void *symbol = dlsym(library, symbols[i].name);
        MUST(symbol != NULL);
        memcpy(symbols[i].at, &symbol, sizeof(symbol));
    }
    return 0;
}

static int begin(void)
{
    struct ibv_device **devices = verbs.get_device_list(NULL);

    MUST(devices != NULL && devices[0] != NULL);
    context = verbs.open_device(devices[0]);
    verbs.free_device_list(devices);
    MUST(context != NULL);
    pd = verbs.alloc_pd(context);
    MUST(pd != NULL);
    mr = verbs.register_mr(pd, memory, SIZE, EVERY);
    MUST(mr != NULL);
    return 0;
}

/* All of it is still there, and the runtime's to free. */
static int end(void)
{
    MUST(verbs.dereg_mr(mr) == 0);
    MUST(verbs.dealloc_pd(pd) == 0);
    MUST(verbs.close_device(context) == 0);
    return 0;
}

static int open_md(const char *component, const char *name, const char *value, ucxm_md_t **md)
{
    char numbers[2][24];
    const ucxm_setting_t settings[] = {
        {name, value},
        {"context", numbers[0]},
        {"pd", numbers[1]},
    };

    snprintf(numbers[0], sizeof(numbers[0]), "%" PRIuPTR, (uintptr_t)context);
    snprintf(numbers[1], sizeof(numbers[1]), "%" PRIuPTR, (uintptr_t)pd);
    MUST(ucxm->md_open(component, settings, 3, md, &error) == UCXM_OK);
    return 0;
}

static int connect_ends(ucxm_md_t *md, ucxm_ep_t *ep[2])
{
    char address[2][UCXM_ADDRESS_MAX];
    size_t length[2] = {UCXM_ADDRESS_MAX, UCXM_ADDRESS_MAX};

    for (int i = 0; i < 2; ++i) {
        MUST(ucxm->ep_create(md, &ep[i], &error) == UCXM_OK);
        MUST(ucxm->ep_address(ep[i], address[i], &length[i], &error) == UCXM_OK);
    }
    for (int i = 0; i < 2; ++i)
        MUST(ucxm->ep_connect(ep[i], address[1 - i], length[1 - i], &error) == UCXM_OK);
    return 0;
}

static ucxm_status_t get(ucxm_ep_t *ep, ucxm_rkey_t *rkey, uint64_t from, void *into, size_t length)
{
    ucxm_transfer_t transfer = {
        .struct_size = sizeof(transfer),
        .kind = UCXM_OP_GET,
        .rkey = rkey,
        .remote_address = from,
        .local = into,
        .length = length,
    };

    return ucxm->ep_transfer(ep, &transfer, &error);
}

static ucxm_status_t adopt(ucxm_md_t *md, struct ibv_mr *which, uint64_t flags, ucxm_memh_t **base)
{
    const ucxm_reg_params_t params = {
        .struct_size = sizeof(params),
        .flags = flags,
        .adopt = which,
    };

    return ucxm->mem_reg(md, &params, base, &error);
}

/* Adopt, derive, pack, use, invalidate. */
static int life(ucxm_md_t *md)
{
    ucxm_memh_info_t info = {.struct_size = sizeof(info)};
    const uint64_t at = (uintptr_t)memory + 64;
    size_t length = UCXM_KEY_MAX;
    char key[UCXM_KEY_MAX], into[8];
    ucxm_memh_t *base, *win;
    ucxm_rkey_t *rkey;
    ucxm_ep_t *ep[2];
    uint64_t regions;
    int failed = connect_ends(md, ep);

    if (failed)
        return failed;
    regions = verbs.stat("mrs.live");
    memcpy(memory + 64, "adopted", 8);
    MUST(adopt(md, mr, UCXM_MEM_DERIVED_ONLY, &base) == UCXM_OK);
    MUST(ucxm->mem_query(base, &info) == UCXM_OK);
    MUST(info.address == (uintptr_t)memory && info.length == SIZE);
    MUST(info.grant == UCXM_MEM_ACCESS_RMA && info.lkey == mr->lkey);
    MUST(ucxm->mem_derive(base, 64, 8, UCXM_MEM_ACCESS_REMOTE_GET, NULL, &win, &error) == UCXM_OK);
    MUST(ucxm->mkey_pack(win, 0, key, &length, &error) == UCXM_OK);
    MUST(ucxm->rkey_unpack(md, key, length, &rkey, &error) == UCXM_OK);
    MUST(get(ep[0], rkey, at, into, 8) == UCXM_OK);
    MUST(memcmp(into, "adopted", 8) == 0);
    MUST(ucxm->mem_dereg(base, 0, NULL, &error) == UCXM_ERR_BUSY);
    MUST(ucxm->mem_invalidate(win, 0, NULL, &error) == UCXM_OK);
    MUST(get(ep[0], rkey, at, into, 8) == UCXM_ERR_REMOTE_ACCESS);
    ucxm->rkey_release(rkey);
    ucxm->memh_release(win);
    MUST(ucxm->mem_dereg(base, 0, NULL, &error) == UCXM_OK);
    ucxm->memh_release(base);
    MUST(verbs.stat("mrs.live") == regions);
    for (int i = 0; i < 2; ++i)
        ucxm->ep_release(ep[i]);
    return 0;
}

/* What is refused, and leaves nothing. */
static int refusals(ucxm_md_t *md, int windows)
{
    ucxm_reg_params_t params = {.struct_size = sizeof(params), .address = 1, .adopt = mr};
    ucxm_md_stats_t stats = {.struct_size = sizeof(stats)};
    struct ibv_mr *plain = verbs.register_mr(pd, memory, SIZE, EVERY & ~IBV_ACCESS_MW_BIND);
    struct ibv_pd *other = verbs.alloc_pd(context);
    struct ibv_mr *foreign = verbs.register_mr(other, memory, SIZE, EVERY);
    ucxm_memh_t *base, *win;

    MUST(plain != NULL && foreign != NULL);
    MUST(ucxm->mem_reg(md, &params, &base, &error) == UCXM_ERR_INVALID_PARAM && base == NULL);
    MUST(adopt(md, foreign, UCXM_MEM_ACCESS_RMA, &base) == UCXM_ERR_INVALID_PARAM && base == NULL);
    MUST(strstr(error.text, "protection domain") != NULL);
    MUST(adopt(md, plain, UCXM_MEM_ACCESS_RMA, &base) == UCXM_OK);
    if (windows) {
        MUST(ucxm->mem_derive(base, 0, 8, UCXM_RIGHTS_ALL, NULL, &win, &error) ==
             UCXM_ERR_UNSUPPORTED);
        MUST(win == NULL && strstr(error.text, "IBV_ACCESS_MW_BIND") != NULL);
    }
    MUST(ucxm->mem_dereg(base, 0, NULL, &error) == UCXM_OK);
    ucxm->memh_release(base);
    MUST(ucxm->md_stats(md, &stats) == UCXM_OK && stats.live_bases == 0);
    MUST(verbs.dereg_mr(plain) == 0 && verbs.dereg_mr(foreign) == 0);
    MUST(verbs.dealloc_pd(other) == 0);
    return 0;
}

/* Without the GIL.  0, or the line that failed. */
int adopt_run(const char *library, const char *component, const char *name, const char *value)
{
    ucxm_md_t *md = NULL;
    int failed = load(library);

    if (!failed)
        failed = begin();
    if (!failed)
        failed = open_md(component, name, value, &md);
    if (!failed)
        failed = life(md);
    if (!failed)
        failed = refusals(md, strcmp(component, "ib") == 0);
    if (failed)
        return failed;
    MUST(ucxm->md_close(md, 0, &error) == UCXM_OK);
    ucxm->md_release(md);
    return end();
}
