/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The payload of a packed key, and what else goes over to the other process:
 * descriptors and the word that says whether an export is still one.
 */
#ifndef UCX_MEMH_CUDA_IPC_WIRE_H
#define UCX_MEMH_CUDA_IPC_WIRE_H

#include <endian.h>
#include <fcntl.h>
#include <sys/random.h>
#include <ucx_memh/process.h>

/* ---- atomics ---- */

static inline uint32_t cu_load32(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}

static inline int cu_cas32(uint32_t *p, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(p, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static inline void cu_add32(uint32_t *p, uint32_t value)
{
    __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
}

/* The new value. */
static inline uint32_t cu_sub32(uint32_t *p, uint32_t value)
{
    return __atomic_sub_fetch(p, value, __ATOMIC_SEQ_CST);
}

static inline void cu_or32(uint32_t *p, uint32_t bits)
{
    __atomic_fetch_or(p, bits, __ATOMIC_SEQ_CST);
}

static inline void cu_and32(uint32_t *p, uint32_t bits)
{
    __atomic_fetch_and(p, bits, __ATOMIC_SEQ_CST);
}

static inline uint64_t cu_load64(const uint64_t *p)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

static inline void cu_store64(uint64_t *p, uint64_t value)
{
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);
}

static inline void cu_count(uint64_t *counter, uint64_t n)
{
    __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}

/* ---- the payload ---- */

#define WIRE_VERSION 1
/* How the allocation can be had; the last two may go together. */
#define WIRE_LEGACY  1u
#define WIRE_FD      2u
#define WIRE_FABRIC  4u

#define WIRE_SIZE_SHORT 64 /* with a descriptor only */
#define WIRE_SIZE       128

typedef struct cu_wire {
    uint8_t kinds;
    int32_t fd;         /* in the exporter; -1: none                              */
    uint64_t base;      /* of the allocation, in the exporter                     */
    uint64_t size;      /* of all of it                                           */
    uint64_t buffer_id; /* the exporter's driver gives none twice                 */
    uint64_t record;    /* address, in the exporter, of a word that is `nonce` ...  */
    uint64_t nonce;     /* ... for as long as the export lives                    */
    uint8_t uuid[16];   /* of the device                                          */
    uint8_t handle[64]; /* legacy or fabric                                       */
} cu_wire_t;

static inline void wire_put64(uint8_t *at, uint64_t value)
{
    value = htole64(value);
    memcpy(at, &value, sizeof(value));
}

static inline uint64_t wire_get64(const uint8_t *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    return le64toh(value);
}

/* Returns the length. */
static inline size_t wire_pack(const cu_wire_t *wire, uint8_t *out)
{
    uint32_t fd = htole32((uint32_t)wire->fd);

    memset(out, 0, WIRE_SIZE);
    out[0] = WIRE_VERSION;
    out[1] = wire->kinds;
    memcpy(out + 4, &fd, sizeof(fd));
    wire_put64(out + 8, wire->base);
    wire_put64(out + 16, wire->size);
    wire_put64(out + 24, wire->buffer_id);
    wire_put64(out + 32, wire->record);
    wire_put64(out + 40, wire->nonce);
    memcpy(out + 48, wire->uuid, 16);
    memcpy(out + 64, wire->handle, 64);
    return wire->kinds == WIRE_FD ? WIRE_SIZE_SHORT : WIRE_SIZE;
}

/* NULL: it makes sense.  Looks at no byte beyond `length`. */
static inline const char *wire_parse(const uint8_t *in, size_t length, cu_wire_t *wire)
{
    uint32_t fd;

    memset(wire, 0, sizeof(*wire));
    if (length != WIRE_SIZE && length != WIRE_SIZE_SHORT)
        return "the payload has another length than a cuda_ipc key's";
    if (in[0] != WIRE_VERSION)
        return "the payload is of another version";
    wire->kinds = in[1];
    if (wire->kinds != WIRE_LEGACY && (wire->kinds == 0 || wire->kinds & ~(WIRE_FD | WIRE_FABRIC)))
        return "the payload names no way to share memory";
    if ((length == WIRE_SIZE_SHORT) != (wire->kinds == WIRE_FD))
        return "the payload's length does not fit to its kind";
    memcpy(&fd, in + 4, sizeof(fd));
    wire->fd = (int32_t)le32toh(fd);
    wire->base = wire_get64(in + 8);
    wire->size = wire_get64(in + 16);
    wire->buffer_id = wire_get64(in + 24);
    wire->record = wire_get64(in + 32);
    wire->nonce = wire_get64(in + 40);
    memcpy(wire->uuid, in + 48, 16);
    if (length == WIRE_SIZE)
        memcpy(wire->handle, in + 64, 64);
    if (in[2] != 0 || in[3] != 0 || (wire->kinds & WIRE_FD ? wire->fd < 0 : wire->fd != -1) ||
        wire->size == 0 || wire->size > UINT64_MAX - wire->base || wire->nonce == 0)
        return "the payload makes no sense";
    return NULL;
}

/* ---- the other process ---- */

/* No program that is started may keep the memory; the driver's manual does not say that it won't. */
static inline void cu_close_on_exec(int fd)
{
    fcntl(fd, F_SETFD, FD_CLOEXEC);
}

/* A copy (close-on-exec) of another process's descriptor, or -errno. */
static inline int cu_fetch_fd(int pidfd, int fd)
{
    long mine = syscall(SYS_pidfd_getfd, (long)pidfd, (long)fd, 0l);

    return mine < 0 ? -errno : (int)mine;
}

/* Not 0, and nobody guesses it.  0: there was none to be had. */
static inline uint64_t cu_nonce(void)
{
    uint64_t value = 0;

    if (getrandom(&value, sizeof(value), 0) != (ssize_t)sizeof(value))
        return 0;
    return value != 0 ? value : 1;
}

#endif
