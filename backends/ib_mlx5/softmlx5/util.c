/* SPDX-License-Identifier: BSD-3-Clause */
/* Bit fields, futexes, clocks: what every other part needs and nothing else. */
#include "internal.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>

uint64_t sm_bits_get(const void *buf, unsigned off, unsigned width)
{
    const uint8_t *p = buf;
    uint64_t v = 0;

    for (unsigned i = off; i < off + width;) {
        unsigned take = MIN(8 - i % 8, off + width - i);
        unsigned byte = p[i / 8] >> (8 - i % 8 - take);

        v = v << take | (byte & ((1u << take) - 1));
        i += take;
    }
    return v;
}

void sm_bits_set(void *buf, unsigned off, unsigned width, uint64_t value)
{
    uint8_t *p = buf;

    for (unsigned left = width; left;) {
        unsigned end = off + left; /* one past the lowest bit still to be written */
        unsigned take = MIN((end - 1) % 8 + 1, left);
        unsigned shift = 7 - (end - 1) % 8;
        uint8_t mask = (uint8_t)(((1u << take) - 1) << shift);
        uint8_t *b = &p[(end - 1) / 8];

        *b = (uint8_t)((*b & ~mask) | ((value << shift) & mask));
        value >>= take;
        left -= take;
    }
}

void sm_futex_wait(void *word, uint32_t seen, int timeout_ms, bool priv)
{
    struct timespec ts = {timeout_ms / 1000, timeout_ms % 1000 * 1000000l};

    syscall(SYS_futex, word, FUTEX_WAIT | (priv ? FUTEX_PRIVATE_FLAG : 0), seen,
            timeout_ms < 0 ? NULL : &ts, NULL, 0);
}

void sm_futex_wake(void *word, bool priv)
{
    syscall(SYS_futex, word, FUTEX_WAKE | (priv ? FUTEX_PRIVATE_FLAG : 0), INT_MAX, NULL, NULL, 0);
}

uint64_t sm_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

int sm_eventfd(bool semaphore)
{
    return eventfd(0, EFD_CLOEXEC | (semaphore ? EFD_SEMAPHORE : EFD_NONBLOCK));
}
