/* SPDX-License-Identifier: BSD-3-Clause */
/* Small things that Cython cannot say: atomics, byte order, thread-locals. */
#ifndef UCX_MEMH_IB_VERBS_UTIL_H
#define UCX_MEMH_IB_VERBS_UTIL_H

#include <endian.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <ucx_memh/backend.h>

__attribute__((format(printf, 4, 5), unused)) static ucxm_status_t
ib_fail(ucxm_error_t *error, ucxm_status_t status, int sys_errno, const char *format, ...)
{
    va_list args;

    if (error != NULL) {
        error->sys_errno = sys_errno;
        va_start(args, format);
        vsnprintf(error->text, sizeof(error->text), format, args);
        va_end(args);
    }
    return status;
}

static inline void ib_count(uint64_t *counter, uint64_t by)
{
    __atomic_fetch_add(counter, by, __ATOMIC_RELAXED);
}

static inline uint64_t ib_load64(const uint64_t *value)
{
    return __atomic_load_n(value, __ATOMIC_RELAXED);
}

static inline void ib_store64(uint64_t *value, uint64_t to)
{
    __atomic_store_n(value, to, __ATOMIC_RELAXED);
}

static inline uint32_t ib_load32(const uint32_t *value)
{
    return __atomic_load_n(value, __ATOMIC_RELAXED);
}

static inline void ib_store32(uint32_t *value, uint32_t to)
{
    __atomic_store_n(value, to, __ATOMIC_RELAXED);
}

/* Little-endian fields at any alignment. */
static inline void ib_put16(uint8_t *at, uint16_t value)
{
    value = htole16(value);
    memcpy(at, &value, sizeof(value));
}

static inline void ib_put32(uint8_t *at, uint32_t value)
{
    value = htole32(value);
    memcpy(at, &value, sizeof(value));
}

static inline void ib_put64(uint8_t *at, uint64_t value)
{
    value = htole64(value);
    memcpy(at, &value, sizeof(value));
}

static inline uint16_t ib_get16(const uint8_t *at)
{
    uint16_t value;

    memcpy(&value, at, sizeof(value));
    return le16toh(value);
}

static inline uint32_t ib_get32(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return le32toh(value);
}

static inline uint64_t ib_get64(const uint8_t *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    return le64toh(value);
}

static inline uint64_t ib_be64(uint64_t value)
{
    return be64toh(value);
}

static inline uint64_t ib_clock_ns(clockid_t clock)
{
    struct timespec now;

    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* A few milliseconds coarse, and cheap enough for every operation. */
static inline uint64_t ib_coarse_ns(void)
{
    return ib_clock_ns(CLOCK_MONOTONIC_COARSE);
}

static inline uint64_t ib_realtime_ns(void)
{
    return ib_clock_ns(CLOCK_REALTIME);
}

/* A starting packet number nobody can guess from the last one. */
static inline uint32_t ib_random_psn(void)
{
    uint32_t psn;

    if (getrandom(&psn, sizeof(psn), GRND_NONBLOCK) != sizeof(psn)) {
        psn = (uint32_t)(ib_clock_ns(CLOCK_MONOTONIC) * 2654435761u);
    }
    return psn & 0xffffff;
}

#endif
