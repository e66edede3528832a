/* SPDX-License-Identifier: BSD-3-Clause */
/* The control surface: counters, faults, settings, the gate. Process-wide. */
#include "internal.h"

#include <stdio.h>
#include <strings.h>
#include <time.h>

struct sm_stats sm_stats;
struct sm_config sm_config = {.devices = 1};

static const struct {
    const char *name;
    size_t off;
} stat_names[] = {
#define X(field, name) {name, offsetof(struct sm_stats, field)},
    SM_STATS(X)
#undef X
};

uint64_t sm_stat(const char *name)
{
    for (size_t i = 0; name && i < ARRAY_SIZE(stat_names); i++) {
        if (!strcmp(name, stat_names[i].name))
            return atomic_load((_Atomic uint64_t *)((char *)&sm_stats + stat_names[i].off));
    }
    return UINT64_MAX;
}

int sm_stat_names(char *buf, size_t size)
{
    size_t n = 0;

    for (size_t i = 0; i < ARRAY_SIZE(stat_names); i++) {
        const char *s = stat_names[i].name;

        for (size_t k = 0; k <= strlen(s); k++, n++) {
            if (n + 1 < size)
                buf[n] = s[k] ? s[k] : '\n';
        }
    }
    if (size)
        buf[MIN(n, size - 1)] = 0;
    return (int)n + 1;
}

/* ---- numbers in text ------------------------------------------------------------------------- */

static bool parse_u64(const char *s, uint64_t *v)
{
    char *end;

    if (!s || *s < '0' || *s > '9')
        return false;
    errno = 0;
    *v = strtoull(s, &end, 0);
    return !errno && !*end;
}

/* ---- faults ---------------------------------------------------------------------------------- */

struct fault {
    char command[24];
    struct sm_fault what;
    uint64_t after, count, seen;
};

enum { MAX_FAULTS = 16 };

static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[MAX_FAULTS];
static unsigned nfaults;
static _Atomic bool faults_armed; /* keeps the lock off the command path in normal use */

static const char *const fault_commands[] = {
    "create_mkey", "destroy_mkey", "query_mkey", "query_hca_cap", "reg_mr",
    "dereg_mr",    "alloc_pd",     "create_cq",  "create_qp",     "modify_qp",
    "umem_reg",    "bind_mw",      "local_inv",
};

static bool fault_set_key(struct fault *f, const char *key, const char *value)
{
    uint64_t v;

    if (!parse_u64(value, &v))
        return false;
    if (!strcmp(key, "status") && v < 256)
        f->what.status = (uint8_t)v;
    else if (!strcmp(key, "syndrome") && v <= UINT32_MAX)
        f->what.syndrome = (uint32_t)v;
    else if (!strcmp(key, "errno") && v < 4096)
        f->what.err = (int)v;
    else if (!strcmp(key, "after"))
        f->after = v;
    else if (!strcmp(key, "count"))
        f->count = v;
    else
        return false;
    return true;
}

static bool fault_parse_item(char *item, struct fault *f)
{
    char *args = strchr(item, ':'), *save, *kv;
    bool known = false;

    *f = (struct fault){.count = 1};
    if (!args)
        return false;
    *args++ = 0;
    for (size_t i = 0; i < ARRAY_SIZE(fault_commands); i++)
        known |= !strcmp(item, fault_commands[i]);
    if (!known)
        return false;
    strcpy(f->command, item);
    for (kv = strtok_r(args, ",", &save); kv; kv = strtok_r(NULL, ",", &save)) {
        char *value = strchr(kv, '=');

        if (!value)
            return false;
        *value++ = 0;
        if (!fault_set_key(f, kv, value))
            return false;
    }
    return f->what.status || f->what.err;
}

int sm_fault_set(const char *spec)
{
    struct fault parsed[MAX_FAULTS];
    unsigned n = 0;
    char *copy, *save, *item;
    bool ok = true;

    if (!spec || !(copy = strdup(spec)))
        return EINVAL;
    for (item = strtok_r(copy, ";", &save); ok && item; item = strtok_r(NULL, ";", &save))
        ok = n < MAX_FAULTS && fault_parse_item(item, &parsed[n++]);
    free(copy);
    if (!ok)
        return EINVAL;
    pthread_mutex_lock(&fault_lock);
    memcpy(faults, parsed, n * sizeof(parsed[0]));
    nfaults = n;
    atomic_store(&faults_armed, n != 0);
    pthread_mutex_unlock(&fault_lock);
    return 0;
}

bool sm_fault_any(void)
{
    return atomic_load_explicit(&faults_armed, memory_order_relaxed);
}

bool sm_fault_hit(const char *command, struct sm_fault *out)
{
    bool hit = false;

    if (!atomic_load_explicit(&faults_armed, memory_order_relaxed))
        return false;
    pthread_mutex_lock(&fault_lock);
    for (unsigned i = 0; i < nfaults && !hit; i++) {
        struct fault *f = &faults[i];

        if (strcmp(f->command, command))
            continue;
        f->seen++;
        hit = f->seen > f->after && (!f->count || f->seen <= f->after + f->count);
        if (hit)
            *out = f->what;
    }
    pthread_mutex_unlock(&fault_lock);
    return hit;
}

int sm_fault_errno(const char *command)
{
    struct sm_fault f;

    if (!sm_fault_hit(command, &f))
        return 0;
    return f.err ? f.err : EIO;
}

void sm_command_delay(void)
{
    uint32_t us = atomic_load_explicit(&sm_config.cmd_delay_us, memory_order_relaxed);
    struct timespec ts = {us / 1000000, us % 1000000 * 1000l};

    if (us)
        nanosleep(&ts, NULL);
}

/* ---- the gate -------------------------------------------------------------------------------- */

enum { GATE_OFF = -1 };

static _Atomic int64_t gate_left = GATE_OFF; /* chunks still to let through */
static _Atomic uint32_t gate_epoch; /* futex: bumped whenever the gate is opened or set */

void sm_gate_chunk(void)
{
    int64_t left = atomic_load_explicit(&gate_left, memory_order_relaxed);
    uint32_t epoch;

    if (left == GATE_OFF)
        return;
    epoch = atomic_load(&gate_epoch);
    do {
        if (left == GATE_OFF)
            return;
    } while (!atomic_compare_exchange_weak(&gate_left, &left, left - 1));
    if (left > 0)
        return;
    STAT_INC(gate_waiting);
    while (atomic_load(&gate_epoch) == epoch)
        sm_futex_wait(&gate_epoch, epoch, -1, true);
    STAT_DEC(gate_waiting);
}

static int gate_set(const char *value)
{
    uint64_t n;
    bool open = !strcmp(value, "open");

    if (!open && (!parse_u64(value, &n) || n > INT32_MAX))
        return EINVAL;
    atomic_store(&gate_left, open ? GATE_OFF : (int64_t)n);
    atomic_fetch_add(&gate_epoch, 1);
    sm_futex_wake(&gate_epoch, true);
    return 0;
}

/* ---- settings -------------------------------------------------------------------------------- */

static int index_policy_set(const char *value)
{
    uint64_t n;

    if (!strcmp(value, "lowest"))
        atomic_store(&sm_config.index_policy, SM_INDEX_LOWEST);
    else if (!strcmp(value, "fifo"))
        atomic_store(&sm_config.index_policy, SM_INDEX_FIFO);
    else if (!strncmp(value, "fixed:", 6) && parse_u64(value + 6, &n) && n < 1u << 24) {
        atomic_store(&sm_config.index_fixed, (uint32_t)n);
        atomic_store(&sm_config.index_policy, SM_INDEX_FIXED);
    } else
        return EINVAL;
    return 0;
}

static int choice_set(_Atomic bool *flag, const char *value, const char *off, const char *on)
{
    if (strcmp(value, off) && strcmp(value, on))
        return EINVAL;
    atomic_store(flag, !strcmp(value, on));
    return 0;
}

int sm_set(const char *name, const char *value)
{
    uint64_t n;

    if (!name || !value)
        return EINVAL;
    if (!strcmp(name, "gate"))
        return gate_set(value);
    if (!strcmp(name, "index_policy"))
        return index_policy_set(value);
    if (!strcmp(name, "path"))
        return choice_set(&sm_config.force_slow, value, "auto", "socket");
    if (!strcmp(name, "memlock"))
        return choice_set(&sm_config.memlock_enforce, value, "auto", "enforce");
    if (!strcmp(name, "cmd_delay_us")) {
        if (!parse_u64(value, &n) || n > 10000000)
            return EINVAL;
        atomic_store(&sm_config.cmd_delay_us, (uint32_t)n);
        return 0;
    }
    return sm_caps_set(strncmp(name, "caps.", 5) ? name : name + 5, value);
}

/* SOFTMLX5_CONF: 'name=value' items separated by ';'. A fault takes the rest of its item, commas
 * included; several faults are several items. Bad items are ignored: a library that may not write
 * to stderr has nobody to tell. */
static void config_from_text(const char *text)
{
    char *copy = strdup(text), *save, *item, faultspec[1024] = "";

    for (item = copy ? strtok_r(copy, ";", &save) : NULL; item; item = strtok_r(NULL, ";", &save)) {
        char *value = strchr(item, '=');

        if (!value)
            continue;
        *value++ = 0;
        if (strcmp(item, "fault")) {
            sm_set(item, value);
        } else if (strlen(faultspec) + strlen(value) + 2 < sizeof(faultspec)) {
            strcat(strcat(faultspec, value), ";");
        }
    }
    free(copy);
    if (*faultspec)
        sm_fault_set(faultspec);
}

static void config_load(void)
{
    const char *s;
    uint64_t n;

    if ((s = getenv("SOFTMLX5_DEVICES")) && parse_u64(s, &n) && n <= 32)
        sm_config.devices = (unsigned)n;
    if ((s = getenv("SOFTMLX5_SPIN_US")) && parse_u64(s, &n) && n <= 1000000)
        sm_config.spin_us = (unsigned)n;
    if ((s = getenv("SOFTMLX5_PATH")))
        sm_set("path", s);
    if ((s = getenv("SOFTMLX5_CONF")))
        config_from_text(s);
}

void sm_config_once(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, config_load);
}
