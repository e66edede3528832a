/* SPDX-License-Identifier: BSD-3-Clause */
/* How calls come in: counted, made to fail on request; versions, errors, and the control calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda.h"

pthread_mutex_t sc_lock = PTHREAD_MUTEX_INITIALIZER;

static int initialized, forked;
static struct call *calls;

struct rule { /* the nth call from when it was made fails; with 0, each one */
    struct rule *next;
    char name[64];
    CUresult error;
    long nth;
};
static struct rule *rules;
static int environment_read;

static void before_fork(void)
{
    pthread_mutex_lock(&sc_lock);
}
static void in_parent(void)
{
    pthread_mutex_unlock(&sc_lock);
}
static void in_child(void)
{
    forked |= initialized; /* the driver does not survive a fork, nor can it begin anew */
    pthread_mutex_init(&sc_lock, NULL);
}

__attribute__((constructor)) static void loaded(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}

static void *symbol(const char *name)
{
    Dl_info info;
    void *self, *found;

    if (!dladdr((void *)symbol, &info) || !(self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD)))
        return NULL;
    found = dlsym(self, name);
    dlclose(self);
    return found;
}

static int add_rule(const char *name, CUresult error, long nth)
{
    struct rule *rule;

    if (!symbol(name) || strlen(name) >= sizeof(rule->name))
        return -1;
    rule = calloc(1, sizeof(*rule));
    strcpy(rule->name, name);
    rule->error = error;
    rule->nth = nth;
    rule->next = rules;
    rules = rule;
    return 0;
}

/* SOFTCUDA_FAIL: name:error[:nth],... */
static void read_environment(void)
{
    char *copy, *item, *rest, name[64];
    const char *text = getenv("SOFTCUDA_FAIL");
    int error;
    long nth;

    environment_read = 1;
    if (!text)
        return;
    copy = strdup(text);
    for (item = strtok_r(copy, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        nth = 0;
        if (sscanf(item, "%63[^:]:%d:%ld", name, &error, &nth) < 2 || add_rule(name, error, nth)) {
            fprintf(stderr, "softcuda: SOFTCUDA_FAIL has %s, which is no rule\n", item);
            abort();
        }
    }
    free(copy);
}

static CUresult failure(const char *name)
{
    struct rule **at = &rules, *rule;
    CUresult error = CUDA_SUCCESS;

    while ((rule = *at)) {
        if (!strcmp(rule->name, name)) {
            if (!rule->nth) {
                error = error ? error : rule->error;
            } else if (!--rule->nth) {
                error = error ? error : rule->error;
                *at = rule->next;
                free(rule);
                continue;
            }
        }
        at = &rule->next;
    }
    return error;
}

CUresult sc_enter(struct call *call, enum need need)
{
    CUcontext ctx;
    CUresult error;

    if (!environment_read)
        read_environment();
    if (!call->count++) {
        call->next = calls;
        calls = call;
    }
    if ((error = failure(call->name)))
        return error;
    if (need == ANYTIME)
        return CUDA_SUCCESS;
    if (forked || !initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (need == INIT)
        return CUDA_SUCCESS;
    if (!(ctx = sc_current()))
        return CUDA_ERROR_INVALID_CONTEXT;
    return ctx->alive ? ctx->sticky : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

void sc_leave(void *locked)
{
    (void)locked;
    pthread_mutex_unlock(&sc_lock);
}

API CUresult cuInit(unsigned flags)
{
    CUresult error;

    CALL(ANYTIME);
    REQUIRE(!forked, CUDA_ERROR_NOT_INITIALIZED);
    VALUE(flags == 0);
    if (initialized)
        return CUDA_SUCCESS;
    if ((error = sc_devices_init()) || (error = sc_memory_init()))
        return error;
    initialized = 1;
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version)
{
    CALL(ANYTIME);
    VALUE(version);
    *version = (int)sc_setting("SOFTCUDA_DRIVER_VERSION", 12090);
    return CUDA_SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define E(name, text) {CUDA_##name, "CUDA_" #name, text}
    E(SUCCESS, "no error"),
    E(ERROR_INVALID_VALUE, "invalid argument"),
    E(ERROR_OUT_OF_MEMORY, "out of memory"),
    E(ERROR_NOT_INITIALIZED, "initialization error"),
    E(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    E(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    E(ERROR_INVALID_CONTEXT, "invalid device context"),
    E(ERROR_MAP_FAILED, "mapping of buffer object failed"),
    E(ERROR_ALREADY_MAPPED, "resource already mapped"),
    E(ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    E(ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    E(ERROR_INVALID_HANDLE, "invalid resource handle"),
    E(ERROR_NOT_FOUND, "named symbol not found"),
    E(ERROR_NOT_READY, "device not ready"),
    E(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    E(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    E(ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    E(ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    E(ERROR_NOT_PERMITTED, "operation not permitted"),
    E(ERROR_NOT_SUPPORTED, "operation not supported"),
#undef E
};

static CUresult describe(CUresult code, int name, const char **out)
{
    VALUE(out);
    *out = NULL;
    for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
        if (errors[i].code == code)
            *out = name ? errors[i].name : errors[i].text;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult code, const char **out)
{
    CALL(ANYTIME);
    return describe(code, 1, out);
}

API CUresult cuGetErrorString(CUresult code, const char **out)
{
    CALL(ANYTIME);
    return describe(code, 0, out);
}

/* Since which version the newer functions are there, as far as somebody may ask for them. */
static const struct {
    const char *name;
    int since;
} news[] = {
    {"cuGetProcAddress_v2", 12000},
    {"cuCtxGetId", 12000},
    {"cuDeviceGetUuid_v2", 11040},
    {"cuMemGetHandleForAddressRange", 11070},
    {"cuIpcOpenMemHandle_v2", 11000},
    {"cuMemRetainAllocationHandle", 11000},
    {"cuMemCreate", 10020},
    {"cuMemMap", 10020},
    {"cuMemExportToShareableHandle", 10020},
    {"cuMemImportFromShareableHandle", 10020},
    {"cuMemAllocAsync", 11020},
    {"cuMemPoolCreate", 11020},
};

/* As the driver: the newest of the name and its _v2 that the version asked for knew. */
API CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                                 int *status)
{
    char suffixed[80];
    void *found = NULL;
    int late = 0;

    CALL(ANYTIME);
    VALUE(name && out && flags <= 2 && strlen(name) < 64);
    for (int v2 = 1; v2 >= 0 && !found; v2--) {
        snprintf(suffixed, sizeof(suffixed), "%s%s", name, v2 ? "_v2" : "");
        if (strncmp(name, "cu", 2) || !(found = symbol(suffixed)))
            continue;
        for (size_t i = 0; i < sizeof(news) / sizeof(*news); i++)
            if (!strcmp(news[i].name, suffixed) && news[i].since > version) {
                found = NULL;
                late = 1;
            }
    }
    *out = found;
    if (status)
        *status = found ? 0 : late ? 2 : 1;
    return found || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- what tests call ---- */

/* How often a function was called since the start or the last reset; -1: there is none. */
API long softcuda_count(const char *name)
{
    long count = symbol(name) ? 0 : -1;

    pthread_mutex_lock(&sc_lock);
    for (struct call *call = calls; call; call = call->next)
        if (!strcmp(call->name, name))
            count = call->count;
    pthread_mutex_unlock(&sc_lock);
    return count;
}

/* The nth call from now of a function returns `error`; each one if nth is 0.  -1: no function. */
API int softcuda_fail(const char *name, CUresult error, long nth)
{
    int result;

    pthread_mutex_lock(&sc_lock);
    result = nth < 0 ? -1 : add_rule(name, error, nth);
    pthread_mutex_unlock(&sc_lock);
    return result;
}

static void forget_rules(void)
{
    for (struct rule *rule; (rule = rules); free(rule))
        rules = rule->next;
}

API void softcuda_mend(void)
{
    pthread_mutex_lock(&sc_lock);
    forget_rules();
    pthread_mutex_unlock(&sc_lock);
}

/* What lives in this process: allocations, opens, maps, spans, contexts, ...; -1: no such thing. */
API long softcuda_live(const char *what)
{
    long n = 0;

    pthread_mutex_lock(&sc_lock);
    if (!strcmp(what, "contexts"))
        n = sc_live_contexts();
    else if (!strcmp(what, "handles"))
        n = sc_live_handles();
    else if (!strcmp(what, "streams"))
        n = sc_live_streams();
    else if (!strcmp(what, "events"))
        n = sc_live_events();
    else if (!strcmp(what, "spans"))
        for (struct span *span = sc_spans; span; span = span->next)
            n++;
    else if (!strcmp(what, "opens"))
        for (struct range *range = sc_ranges; range; range = range->next)
            n += range->opens;
    else if (!strcmp(what, "maps") || !strcmp(what, "allocations"))
        for (struct range *range = sc_ranges; range; range = range->next)
            n += what[0] == 'm' ? range->span->kind == K_MAPPED : range->span->kind < K_IPC;
    else
        n = -1;
    pthread_mutex_unlock(&sc_lock);
    return n;
}

/* As if the process had just begun: the environment is read anew, and cuInit has to be called. */
API void softcuda_reset(void)
{
    struct call *next;

    pthread_mutex_lock(&sc_lock);
    if (initialized) {
        sc_contexts_reset();
        sc_memory_drop(NULL);
        sc_share_reset();
        sc_streams_reset();
    }
    for (struct call *call = calls; call; call = next) {
        next = call->next;
        call->count = 0;
    }
    calls = NULL;
    forget_rules();
    initialized = forked = environment_read = 0;
    pthread_mutex_unlock(&sc_lock);
}
