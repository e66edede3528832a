/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A program of its own that embeds Python only to find the library, gives up
 * the GIL, and works from four threads that Python has never seen; the last
 * calls come after the interpreter has ended.
 *
 *     program PYTHON NAME KEY VALUE     the Python to be, the domain, a setting
 */
#include <ucx_memh/pyapi.h> /* first, as Python.h wants it */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, PART = 4096, ROUNDS = 50, MANY = 16 };

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)
#define GOOD(status)                                                                           \
    do {                                                                                       \
        ucxm_status_t status_ = (status);                                                      \
        if (status_ != UCXM_OK) {                                                              \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, ucxm->status_name(status_), \
                    error.text);                                                               \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

static const ucxm_api_t *ucxm;
static ucxm_md_t *md;
static ucxm_memh_t *base;
static _Alignas(4096) unsigned char memory[THREADS * PART];
static int completions[THREADS];

struct counted {
    ucxm_completion_t comp; /* first */
    int *count;
};

static void count_it(ucxm_completion_t *self, ucxm_status_t status)
{
    CHECK(status == UCXM_OK);
    __atomic_fetch_add(((struct counted *)self)->count, 1, __ATOMIC_RELAXED);
}

static void connect_them(ucxm_ep_t *one, ucxm_ep_t *two)
{
    unsigned char address[UCXM_ADDRESS_MAX];
    size_t length = sizeof(address);
    ucxm_error_t error;

    GOOD(ucxm->ep_address(one, address, &length, &error));
    GOOD(ucxm->ep_connect(two, address, length, &error));
    length = sizeof(address);
    GOOD(ucxm->ep_address(two, address, &length, &error));
    GOOD(ucxm->ep_connect(one, address, length, &error));
}

/* A key for part `n` of the region: used, cut off, and refused by the device. */
static void one_round(int n, ucxm_ep_t *mine, ucxm_ep_t *peers, unsigned char fill)
{
    unsigned char local[64], key[UCXM_KEY_MAX];
    struct counted done = {{count_it}, &completions[n]};
    ucxm_transfer_t transfer;
    ucxm_memh_t *window;
    ucxm_rkey_t *rkey;
    ucxm_error_t error;
    ucxm_status_t status;
    size_t length = 0;
    const int before = completions[n];

    GOOD(ucxm->mem_derive(base, (uint64_t)n * PART, PART, UCXM_RIGHTS_ALL, NULL, &window, &error));
    GOOD(ucxm->mkey_pack(window, 0, NULL, &length, &error));
    CHECK(length <= sizeof(key));
    GOOD(ucxm->mkey_pack(window, 0, key, &length, &error));
    GOOD(ucxm->rkey_unpack(md, key, length, &rkey, &error));

    memset(local, fill, sizeof(local));
    memset(&transfer, 0, sizeof(transfer));
    transfer.struct_size = sizeof(transfer);
    transfer.kind = UCXM_OP_PUT;
    transfer.rkey = rkey;
    transfer.remote_address = (uintptr_t)memory + n * PART;
    transfer.local = local;
    transfer.length = sizeof(local);
    GOOD(ucxm->ep_transfer(peers, &transfer, &error));
    CHECK(memory[n * PART + 63] == fill);
    transfer.kind = UCXM_OP_FETCH_ADD;
    transfer.operand = 1;
    GOOD(ucxm->ep_transfer(peers, &transfer, &error));
    CHECK((unsigned char)transfer.result == fill);

    status = ucxm->mem_invalidate(window, 0, &done.comp, &error);
    while (status == UCXM_INPROGRESS && __atomic_load_n(done.count, __ATOMIC_RELAXED) == before)
        ucxm->md_progress(md);
    CHECK(status >= 0);
    transfer.kind = UCXM_OP_GET;
    CHECK(ucxm->ep_transfer(peers, &transfer, &error) == UCXM_ERR_REMOTE_ACCESS);
    ucxm->rkey_release(rkey);
    ucxm->memh_release(window);
    ucxm->memh_release(NULL);
    GOOD(ucxm->ep_reset(mine, &error));
    GOOD(ucxm->ep_reset(peers, &error));
    connect_them(mine, peers);
}

static void many(int n)
{
    ucxm_memh_t *windows[MANY];
    ucxm_status_t each[MANY];
    uint64_t offsets[MANY], lengths[MANY];
    unsigned char keys[MANY][UCXM_KEY_MAX];
    size_t sizes[MANY];
    ucxm_key_info_t info;
    ucxm_error_t error;

    for (int i = 0; i < MANY; i++) {
        offsets[i] = (uint64_t)n * PART + i * 64;
        lengths[i] = 64;
    }
    CHECK(ucxm->mem_derive_many(base, offsets, lengths, MANY, UCXM_RIGHTS_ALL, NULL, windows,
                                each) == UCXM_OK);
    CHECK(ucxm->mkey_pack_many(windows, MANY, 0, keys, sizeof(keys[0]), sizes, each) == UCXM_OK);
    for (int i = 0; i < MANY; i++) {
        GOOD(ucxm->key_query(keys[i], sizes[i], &info, NULL, NULL, &error));
        CHECK(info.address == (uintptr_t)memory + offsets[i] && info.length == 64);
    }
    CHECK(ucxm->mem_invalidate_many(windows, MANY, 0, each) == UCXM_OK);
    for (int i = 0; i < MANY; i++)
        ucxm->memh_release(windows[i]);
}

static void *work(void *arg)
{
    int n = (int)(intptr_t)arg;
    ucxm_ep_t *mine, *peers;
    ucxm_error_t error;

    GOOD(ucxm->ep_create(md, &mine, &error));
    GOOD(ucxm->ep_create(md, &peers, &error));
    connect_them(mine, peers);
    for (int i = 1; i <= ROUNDS; i++)
        one_round(n, mine, peers, (unsigned char)i);
    many(n);
    GOOD(ucxm->ep_close(mine, &error));
    ucxm->ep_release(mine);
    ucxm->ep_release(peers);
    return NULL;
}

/* The same memory for peers near and far: one block of bytes with both keys. */
static void bundle(void)
{
    ucxm_reg_params_t params = {.struct_size = sizeof(params),
                                .address = (uintptr_t)memory,
                                .length = sizeof(memory),
                                .flags = UCXM_MEM_ACCESS_RMA};
    ucxm_md_t *mds[2] = {md, NULL};
    ucxm_memh_t *memhs[2];
    ucxm_rkey_t *rkeys[2];
    unsigned char block[1024];
    size_t length = sizeof(block);
    ucxm_error_t error;

    GOOD(ucxm->md_open("cma", NULL, 0, &mds[1], &error));
    GOOD(ucxm->bundle_reg(mds, 2, UCXM_BUNDLE_ALL, &params, memhs, NULL, &error));
    GOOD(ucxm->bundle_pack(memhs, 2, 0, block, &length, &error));
    GOOD(ucxm->bundle_unpack(mds, 2, block, length, rkeys, NULL, &error));
    for (int i = 0; i < 2; i++) {
        CHECK(rkeys[i] != NULL);
        ucxm->rkey_release(rkeys[i]);
        GOOD(ucxm->mem_dereg(memhs[i], 0, NULL, &error));
        ucxm->memh_release(memhs[i]);
    }
    GOOD(ucxm->md_close(mds[1], 0, &error));
    ucxm->md_release(mds[1]);
}

static void start_python(char *program)
{
    PyConfig config;
    PyStatus status;

    PyConfig_InitPythonConfig(&config);
    status = PyConfig_SetBytesString(&config, &config.program_name, program);
    CHECK(!PyStatus_Exception(status));
    status = Py_InitializeFromConfig(&config);
    CHECK(!PyStatus_Exception(status));
    PyConfig_Clear(&config);
}

int main(int argc, char **argv)
{
    ucxm_md_stats_t stats = {.struct_size = sizeof(stats)};
    ucxm_md_info_t info = {.struct_size = sizeof(info)};
    ucxm_reg_params_t params = {.struct_size = sizeof(params),
                                .address = (uintptr_t)memory,
                                .length = sizeof(memory),
                                .flags = UCXM_MEM_ACCESS_ALL | UCXM_MEM_DERIVED_ONLY};
    ucxm_setting_t setting;
    pthread_t threads[THREADS];
    PyThreadState *python;
    ucxm_error_t error;
    ucxm_md_t *late;

    CHECK(argc == 5);
    start_python(argv[1]);
    ucxm = ucxm_import_api();
    if (ucxm == NULL) {
        PyErr_Print();
        return 1;
    }
    python = PyEval_SaveThread(); /* from here on nobody has the GIL */
    setting.name = argv[3];
    setting.value = argv[4];
    GOOD(ucxm->md_open(argv[2], &setting, 1, &md, &error));
    GOOD(ucxm->md_query(md, &info));
    CHECK(info.flags & UCXM_MD_FLAG_REG_DERIVED && !info.python);
    GOOD(ucxm->mem_reg(md, &params, &base, &error));

    for (int n = 0; n < THREADS; n++)
        CHECK(pthread_create(&threads[n], NULL, work, (void *)(intptr_t)n) == 0);
    for (int n = 0; n < THREADS; n++)
        CHECK(pthread_join(threads[n], NULL) == 0);
    for (int n = 0; n < THREADS; n++)
        CHECK(completions[n] == ROUNDS);
    bundle();

    CHECK(ucxm->md_close(md, 0, &error) == UCXM_ERR_BUSY);
    GOOD(ucxm->mem_dereg(base, 0, NULL, &error));
    ucxm->memh_release(base);
    GOOD(ucxm->md_stats(md, &stats));
    CHECK(stats.live_bases + stats.live_derived + stats.live_rkeys + stats.live_endpoints == 0);
    CHECK(stats.revoke == THREADS * (ROUNDS + MANY) && stats.mem_reg == 2);
    GOOD(ucxm->md_close(md, 0, &error));
    ucxm->md_release(md);

    PyEval_RestoreThread(python);
    CHECK(Py_FinalizeEx() == 0);
    CHECK(strcmp(ucxm->status_name(UCXM_ERR_REVOKED), "REVOKED") == 0);
    CHECK(ucxm->md_open("cma", NULL, 0, &late, &error) == UCXM_ERR_CLOSED && late == NULL);
    printf("%d threads, %d keys\n", THREADS, (int)stats.revoke);
    return 0;
}
