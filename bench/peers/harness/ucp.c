/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * UCX by its public C API, told what to do as serving.py tells: lines of "OPERATION BYTES COUNT"
 * come in, a line of JSON goes out for each.  One thread, one worker, and an endpoint to itself.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <ucp/api/ucp.h>

#define LARGEST ((size_t)64 << 20)

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h ep;
static void *memory;
static FILE *answers;

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

/* The reason of an end is the last line of stderr. */
static void must(ucs_status_t status, const char *what)
{
    if (status == UCS_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, ucs_status_string(status));
    exit(1);
}

static void open_all(void)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA};
    ucp_worker_params_t single = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_ep_params_t loopback = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS};
    ucp_request_param_t plain = {0};
    ucp_address_t *self;
    size_t length;

    must(ucp_init(&params, NULL, &context), "ucp_init");
    must(ucp_worker_create(context, &single, &worker), "ucp_worker_create");
    must(ucp_worker_get_address(worker, &self, &length), "ucp_worker_get_address");
    loopback.address = self;
    must(ucp_ep_create(worker, &loopback, &ep), "ucp_ep_create");
    ucp_worker_release_address(worker, self);

    /* A flush waits until the endpoint is wired up, for only then a key chooses its lanes. */
    void *flush = ucp_ep_flush_nbx(ep, &plain);
    if (UCS_PTR_IS_ERR(flush))
        must(UCS_PTR_STATUS(flush), "ucp_ep_flush_nbx");
    if (flush != NULL) {
        while (ucp_request_check_status(flush) == UCS_INPROGRESS)
            ucp_worker_progress(worker);
        must(ucp_request_check_status(flush), "flush");
        ucp_request_free(flush);
    }

    memory = mmap(NULL, LARGEST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        must(UCS_ERR_NO_MEMORY, "mmap");
    memset(memory, 1, LARGEST);
}

static ucs_status_t map(size_t length, ucp_mem_h *memh)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = memory,
        .length = length,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    return ucp_mem_map(context, &params, memh);
}

static ucs_status_t pack(ucp_mem_h memh)
{
    void *key;
    size_t size;
    ucs_status_t status = ucp_rkey_pack(context, memh, &key, &size);
    if (status == UCS_OK)
        ucp_rkey_buffer_release(key);
    return status;
}

/* Each gives nanoseconds for all, and a status. */

static ucs_status_t time_register(size_t length, size_t count, double *ns)
{
    ucp_mem_h memh;
    ucs_status_t status = UCS_OK;
    double start = now_ns();
    for (size_t i = 0; i < count && status == UCS_OK; ++i) {
        status = map(length, &memh);
        if (status == UCS_OK)
            status = ucp_mem_unmap(context, memh);
    }
    *ns = now_ns() - start;
    return status;
}

static ucs_status_t time_share(size_t length, size_t count, double *ns)
{
    ucp_mem_h memh;
    ucs_status_t status = UCS_OK;
    double start = now_ns();
    for (size_t i = 0; i < count && status == UCS_OK; ++i) {
        status = map(length, &memh);
        if (status != UCS_OK)
            break;
        status = pack(memh);
        ucp_mem_unmap(context, memh);
    }
    *ns = now_ns() - start;
    return status;
}

static ucs_status_t time_pack(size_t length, size_t count, double *ns)
{
    ucp_mem_h memh;
    ucs_status_t status = map(length, &memh);
    if (status != UCS_OK)
        return status;
    double start = now_ns();
    for (size_t i = 0; i < count && status == UCS_OK; ++i)
        status = pack(memh);
    *ns = now_ns() - start;
    ucp_mem_unmap(context, memh);
    return status;
}

static ucs_status_t time_unpack(size_t length, size_t count, double *ns)
{
    ucp_mem_h memh;
    ucp_rkey_h rkey;
    void *key;
    size_t size;
    ucs_status_t status = map(length, &memh);
    if (status != UCS_OK)
        return status;
    status = ucp_rkey_pack(context, memh, &key, &size);
    if (status == UCS_OK) {
        double start = now_ns();
        for (size_t i = 0; i < count && status == UCS_OK; ++i) {
            status = ucp_ep_rkey_unpack(ep, key, &rkey);
            if (status == UCS_OK)
                ucp_rkey_destroy(rkey);
        }
        *ns = now_ns() - start;
        ucp_rkey_buffer_release(key);
    }
    ucp_mem_unmap(context, memh);
    return status;
}

static const struct {
    const char *name, *calls;
    ucs_status_t (*time)(size_t length, size_t count, double *ns);
} operations[] = {
    {"register", "`ucp_mem_map` and `ucp_mem_unmap`", time_register},
    {"share", "`ucp_mem_map`, `ucp_rkey_pack`, `ucp_rkey_buffer_release`, `ucp_mem_unmap`",
     time_share},
    {"pack", "`ucp_rkey_pack` and `ucp_rkey_buffer_release`", time_pack},
    {"unpack", "`ucp_ep_rkey_unpack` and `ucp_rkey_destroy`", time_unpack},
    {"again", "the same, for it keeps none", time_unpack},
};
enum { OPERATIONS = sizeof(operations) / sizeof(*operations) };

static size_t key_bytes(void)
{
    ucp_mem_h memh;
    void *key;
    size_t size;
    must(map(4096, &memh), "ucp_mem_map");
    must(ucp_rkey_pack(context, memh, &key, &size), "ucp_rkey_pack");
    ucp_rkey_buffer_release(key);
    must(ucp_mem_unmap(context, memh), "ucp_mem_unmap");
    return size;
}

static void say_who(void)
{
    fprintf(answers, "{\"pid\": %d, \"operations\": {", (int)getpid());
    for (int i = 0; i < OPERATIONS; ++i)
        fprintf(answers, "%s\"%s\": \"%s\"", i ? ", " : "", operations[i].name,
                operations[i].calls);
    fprintf(answers, "}, \"versions\": {\"UCX\": \"%s\"}, \"key_bytes\": %zu}\n",
            ucp_get_version_string(), key_bytes());
}

static void answer(const char *name, size_t length, size_t count)
{
    for (int i = 0; i < OPERATIONS; ++i) {
        if (strcmp(name, operations[i].name) != 0)
            continue;
        double ns = 0;
        ucs_status_t status = operations[i].time(length, count, &ns);
        if (status == UCS_OK)
            fprintf(answers, "{\"ns\": %.3f}\n", ns / count);
        else
            fprintf(answers, "{\"error\": \"%s\"}\n", ucs_status_string(status));
        return;
    }
    fprintf(answers, "{\"error\": \"no such operation\"}\n");
}

int main(void)
{
    char name[32];
    size_t length, count;

    answers = fdopen(dup(1), "w");
    if (answers == NULL || dup2(2, 1) < 0)
        return 1;
    setlinebuf(answers);
    open_all();
    say_who();
    while (scanf("%31s %zu %zu", name, &length, &count) == 3) {
        if (length <= LARGEST)
            answer(name, length, count);
        else
            fprintf(answers, "{\"error\": \"too large\"}\n");
    }
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
    return 0;
}
