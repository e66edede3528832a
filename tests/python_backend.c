/* SPDX-License-Identifier: BSD-3-Clause */
/* A C user of an Md whose backend is written in Python: threads that Python has never seen, and
 * calls when there is no Python any more.  Compiled and loaded by test_python_backend.py. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ucx_memh/memh.h>

#define MUST(condition)                      \
    do {                                     \
        if (!(condition))                    \
            return (void *)(size_t)__LINE__; \
    } while (0)

static const ucxm_api_t *api;
static ucxm_md_t *md;
static int rounds;

/* The whole life of a key; NULL, or the line that failed. */
static void *life(void *unused)
{
    char memory[64], into[64], key[UCXM_KEY_MAX], address[2][UCXM_ADDRESS_MAX];
    ucxm_error_t error;
    ucxm_ep_t *ep[2];
    size_t length;
    (void)unused;
    for (int i = 0; i < 2; ++i)
        MUST(api->ep_create(md, &ep[i], &error) == UCXM_OK);
    for (int i = 0; i < 2; ++i) {
        length = sizeof(address[i]);
        MUST(api->ep_address(ep[i], address[i], &length, &error) == UCXM_OK);
    }
    for (int i = 0; i < 2; ++i)
        MUST(api->ep_connect(ep[i], address[1 - i], length, &error) == UCXM_OK);

    for (int round = 0; round < rounds; ++round) {
        ucxm_reg_params_t params = {.struct_size = sizeof(params),
                                    .address = (uint64_t)(size_t)memory,
                                    .length = sizeof(memory),
                                    .flags = UCXM_MEM_ACCESS_ALL | UCXM_MEM_DERIVED_ONLY};
        ucxm_transfer_t transfer;
        ucxm_memh_t *base, *win;
        ucxm_rkey_t *rkey;
        uint32_t state;

        memset(memory, 'a' + round % 26, sizeof(memory));
        memset(&transfer, 0, sizeof(transfer));
        MUST(api->mem_reg(md, &params, &base, &error) == UCXM_OK);
        MUST(api->mem_derive(base, 8, 16, UCXM_MEM_ACCESS_REMOTE, NULL, &win, &error) == UCXM_OK);
        length = sizeof(key);
        MUST(api->mkey_pack(win, 0, key, &length, &error) == UCXM_OK);
        MUST(api->rkey_unpack(md, key, length, &rkey, &error) == UCXM_OK);

        transfer.struct_size = sizeof(transfer);
        transfer.kind = UCXM_OP_GET;
        transfer.rkey = rkey;
        transfer.remote_address = (uint64_t)(size_t)memory + 8;
        transfer.local = into;
        transfer.length = 16;
        MUST(api->ep_transfer(ep[0], &transfer, &error) == UCXM_OK);
        MUST(memcmp(into, memory, 16) == 0 && transfer.bytes_done == 16);
        memset(into, 'z', sizeof(into));
        transfer.kind = UCXM_OP_PUT;
        MUST(api->ep_transfer(ep[0], &transfer, &error) == UCXM_OK);
        MUST(memcmp(into, memory + 8, 16) == 0);
        transfer.kind = UCXM_OP_FETCH_ADD;
        transfer.operand = 1;
        MUST(api->ep_transfer(ep[0], &transfer, &error) == UCXM_OK);
        MUST(memcmp(&transfer.result, into, 8) == 0 && memory[8] == 'z' + 1);

        MUST(api->mem_invalidate(win, 0, NULL, &error) == UCXM_OK);
        transfer.kind = UCXM_OP_GET;
        MUST(api->ep_transfer(ep[0], &transfer, &error) == UCXM_ERR_REMOTE_ACCESS);
        MUST(strstr(error.text, "refused"));
        MUST(api->ep_state(ep[0], &state) == UCXM_OK && state == UCXM_EP_ERROR);
        for (int i = 0; i < 2; ++i) {
            MUST(api->ep_reset(ep[i], &error) == UCXM_OK);
            length = sizeof(address[i]);
            MUST(api->ep_address(ep[i], address[i], &length, &error) == UCXM_OK);
        }
        for (int i = 0; i < 2; ++i)
            MUST(api->ep_connect(ep[i], address[1 - i], length, &error) == UCXM_OK);
        api->rkey_release(rkey);
        MUST(api->mem_dereg(win, 0, NULL, &error) == UCXM_OK);
        MUST(api->mem_dereg(base, 0, NULL, &error) == UCXM_OK);
        api->memh_release(win);
        api->memh_release(base);
    }
    for (int i = 0; i < 2; ++i) {
        MUST(api->ep_close(ep[i], &error) == UCXM_OK);
        api->ep_release(ep[i]);
    }
    return NULL;
}

/* 0, or the line that failed. */
int run_threads(const ucxm_api_t *table, ucxm_md_t *opened, int count, int times)
{
    pthread_t threads[16];
    ucxm_md_info_t info = {.struct_size = sizeof(info)};
    void *failed = NULL, *result;
    api = table;
    md = opened;
    rounds = times;
    if (api->md_query(md, &info) != UCXM_OK || !info.python)
        return __LINE__;
    for (int i = 0; i < count; ++i)
        if (pthread_create(&threads[i], NULL, life, NULL) != 0)
            return __LINE__;
    for (int i = 0; i < count; ++i) {
        pthread_join(threads[i], &result);
        failed = failed ? failed : result;
    }
    return (int)(size_t)failed;
}

/* ---- after the interpreter ---- */

static ucxm_memh_t *late_base, *late_win;
static ucxm_rkey_t *late_rkey;
static ucxm_ep_t *late_ep;
static char late_memory[64];

static void *late(void *unused)
{
    ucxm_reg_params_t params = {.struct_size = sizeof(params),
                                .address = (uint64_t)(size_t)late_memory,
                                .length = sizeof(late_memory),
                                .flags = UCXM_MEM_ACCESS_ALL};
    ucxm_transfer_t transfer = {.struct_size = sizeof(transfer),
                                .kind = UCXM_OP_GET,
                                .rkey = late_rkey,
                                .remote_address = (uint64_t)(size_t)late_memory,
                                .local = late_memory,
                                .length = 8};
    ucxm_memh_t *memh;
    ucxm_ep_t *ep;
    uint32_t state;
    char key[UCXM_KEY_MAX];
    size_t length = sizeof(key);
    (void)unused;
    MUST(api->mem_reg(md, &params, &memh, NULL) == UCXM_ERR_CLOSED);
    MUST(api->mem_derive(late_base, 0, 8, UCXM_RIGHTS_ALL, NULL, &memh, NULL) == UCXM_ERR_CLOSED);
    MUST(api->mkey_pack(late_base, UCXM_PACK_INVALIDATE_RMA, key, &length, NULL) ==
         UCXM_ERR_CLOSED);
    MUST(api->ep_create(md, &ep, NULL) == UCXM_ERR_CLOSED);
    MUST(api->ep_state(late_ep, &state) == UCXM_OK && state == UCXM_EP_ERROR);
    MUST(api->ep_transfer(late_ep, &transfer, NULL) == UCXM_ERR_FLUSHED);
    MUST(api->md_progress(md) == 0);
    MUST(api->mem_invalidate(late_win, 0, NULL, NULL) == UCXM_ERR_CLOSED);
    MUST(api->mem_dereg(late_base, UCXM_CASCADE, NULL, NULL) == UCXM_ERR_CLOSED);
    api->rkey_release(late_rkey);
    api->ep_release(late_ep);
    api->memh_release(late_win);
    api->memh_release(late_base);
    MUST(api->md_close(md, UCXM_CLOSE_FORCE, NULL) == UCXM_ERR_CLOSED);
    return NULL;
}

/* Of a backend in C: it works on, but for what only Python can do. */
static void *late_c(void *unused)
{
    ucxm_md_t *other;
    ucxm_reg_params_t params = {.struct_size = sizeof(params),
                                .address = (uint64_t)(size_t)late_memory,
                                .length = sizeof(late_memory),
                                .flags = UCXM_MEM_ACCESS_ALL};
    ucxm_memh_t *base, *win;
    ucxm_error_t error;
    char key[UCXM_KEY_MAX];
    size_t length = sizeof(key);
    (void)unused;
    MUST(api->mem_reg(md, &params, &base, &error) == UCXM_OK);
    MUST(api->mem_derive(base, 0, 8, UCXM_RIGHTS_ALL, NULL, &win, &error) == UCXM_OK);
    MUST(api->mkey_pack(win, 0, key, &length, &error) == UCXM_OK);
    MUST(api->mem_invalidate(win, 0, NULL, &error) == UCXM_OK);
    api->memh_release(win);
    api->memh_release(base);
    MUST(api->md_open("cma", NULL, 0, &other, &error) == UCXM_ERR_CLOSED);
    MUST(strstr(error.text, "interpreter has ended") && other == NULL);
    MUST(api->md_close(md, 0, &error) == UCXM_ERR_BUSY);
    MUST(api->md_close(md, UCXM_CLOSE_FORCE, &error) == UCXM_OK);
    api->md_release(md);
    return NULL;
}

static void *(*late_calls)(void *) = late;

static void at_exit(void)
{
    pthread_t thread;
    void *result = NULL;
    if (pthread_create(&thread, NULL, late_calls, NULL) != 0)
        return;
    pthread_join(thread, &result);
    if (result)
        printf("failed at line %d\n", (int)(size_t)result);
    else
        puts("every call as it should be");
    fflush(stdout);
}

/* What the C library calls when the interpreter has been taken down. */
int call_late(const ucxm_api_t *table, ucxm_md_t *opened)
{
    ucxm_reg_params_t params = {.struct_size = sizeof(params),
                                .address = (uint64_t)(size_t)late_memory,
                                .length = sizeof(late_memory),
                                .flags = UCXM_MEM_ACCESS_ALL};
    char key[UCXM_KEY_MAX];
    size_t length = sizeof(key);
    api = table;
    md = opened;
    if (api->mem_reg(md, &params, &late_base, NULL) ||
        api->mem_derive(late_base, 0, 64, UCXM_RIGHTS_ALL, NULL, &late_win, NULL) ||
        api->mkey_pack(late_win, 0, key, &length, NULL) ||
        api->rkey_unpack(md, key, length, &late_rkey, NULL) || api->ep_create(md, &late_ep, NULL))
        return __LINE__;
    return atexit(at_exit);
}

int call_late_c(const ucxm_api_t *table, ucxm_md_t *opened)
{
    api = table;
    md = opened;
    late_calls = late_c;
    return atexit(at_exit);
}
