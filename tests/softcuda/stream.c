/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Copies, streams and events.  What is queued is done when somebody asks: each query of a stream or
 * of an event that is not ready yet does one operation of it and says "not ready", and a
 * synchronisation does all.  So whoever does not wait sees old bytes, always.
 */
#include <stdlib.h>

#include "softcuda.h"

enum what { COPY, FILL, RECORD, WAIT };

struct op {
    struct op *next;
    enum what what;
    CUdeviceptr dst, src;
    size_t size;
    int value;
    CUevent event;
    unsigned long long ticket;
    CUstream recorded; /* WAIT: where that record is; the event may be recorded anew elsewhere */
};

struct stream {
    struct stream *next;
    CUcontext ctx;
    unsigned flags;
    int is_default;
    struct op *first, **last;
};

struct event {
    struct event *next;
    CUcontext ctx;
    CUstream stream;
    unsigned long long ticket, done; /* of its last record, and of the last one that was reached */
};

static struct stream *streams;
static struct event *events;
static unsigned long long last_ticket; /* of all events: an address may come again, a ticket not */
static int held;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static CUstream stream_new(CUcontext ctx, unsigned flags, int is_default)
{
    struct stream *stream = calloc(1, sizeof(*stream));

    *stream = (struct stream){streams, ctx, flags, is_default, NULL, NULL};
    stream->last = &stream->first;
    return streams = stream;
}

/* NULL, 1 and 2 name the default streams of the current context.  NULL: there is no such stream. */
static CUstream stream_of(CUstream stream)
{
    CUcontext ctx = sc_current();
    int thread = stream == (CUstream)2;

    if ((uintptr_t)stream <= 2) {
        if (!ctx->defaults[thread])
            ctx->defaults[thread] = stream_new(ctx, 0, 1);
        return ctx->defaults[thread];
    }
    for (struct stream *each = streams; each; each = each->next)
        if (each == stream)
            return each;
    return NULL;
}

static CUevent event_of(CUevent event)
{
    for (struct event *each = events; each; each = each->next)
        if (each == event)
            return each;
    return NULL;
}

static struct op *queue(CUstream stream, enum what what)
{
    struct op *op = calloc(1, sizeof(*op));

    op->what = what;
    *stream->last = op;
    stream->last = &op->next;
    return op;
}

static int is_stream(CUstream stream)
{
    for (CUstream each = streams; each; each = each->next)
        if (each == stream)
            return 1;
    return 0;
}

/* Does the oldest operation; 0: there is none, or it waits for an event of another stream. */
static int step(CUstream stream)
{
    struct op *op = stream->first;
    CUcontext ctx = stream->ctx;
    CUevent event;

    if (!op)
        return 0;
    event = op->event ? event_of(op->event) : NULL;
    if (op->what == WAIT && event && event->done < op->ticket)
        return op->recorded != stream && is_stream(op->recorded) && step(op->recorded);
    /* Memory that went away meanwhile: the device faults, and the context is of no use any more. */
    if (op->what == COPY && !ctx->sticky && !sc_copy(ctx, op->dst, op->src, op->size))
        ctx->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (op->what == FILL && !ctx->sticky && !sc_fill(ctx, op->dst, op->value, op->size))
        ctx->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (op->what == RECORD && event && event->done < op->ticket)
        event->done = op->ticket;
    if (!(stream->first = op->next))
        stream->last = &stream->first;
    free(op);
    return 1;
}

static void drain(CUstream stream)
{
    while (stream->first) {
        while (held) {
            pthread_cond_wait(&changed, &sc_lock);
            if (!(stream = stream_of(stream))) /* it was destroyed meanwhile */
                return;
        }
        if (!step(stream))
            return;
    }
}

void sc_streams_drain(CUcontext ctx, int blocking_only)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (ctx && stream->ctx == ctx && !(blocking_only && stream->flags & STREAM_NON_BLOCKING))
            drain(stream);
}

static void stream_free(CUstream stream)
{
    struct stream **at = &streams;

    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    for (struct op *op = stream->first, *next; op; op = next) {
        next = op->next;
        free(op);
    }
    free(stream);
}

static void event_free(CUevent event)
{
    struct event **at = &events;

    while (*at != event)
        at = &(*at)->next;
    *at = event->next;
    free(event);
}

void sc_streams_drop(CUcontext ctx)
{
    struct stream *stream, *after;
    struct event *event, *next;

    for (event = events; event; event = next) {
        next = event->next;
        if (event->ctx == ctx)
            event_free(event);
    }
    for (stream = streams; stream; stream = after) {
        after = stream->next;
        if (stream->ctx == ctx)
            stream_free(stream);
    }
    ctx->defaults[0] = ctx->defaults[1] = NULL;
}

void sc_streams_reset(void)
{
    held = 0;
    pthread_cond_broadcast(&changed);
}

long sc_live_streams(void)
{
    long n = 0;

    for (struct stream *stream = streams; stream; stream = stream->next)
        n += !stream->is_default;
    return n;
}

long sc_live_events(void)
{
    long n = 0;

    for (struct event *event = events; event; event = event->next)
        n++;
    return n;
}

/* Until softcuda_release() nothing that is queued is done; who synchronises waits. */
API void softcuda_hold(void)
{
    pthread_mutex_lock(&sc_lock);
    held = 1;
    pthread_mutex_unlock(&sc_lock);
}

/* Does all that is queued, in all streams. */
API void softcuda_release(void)
{
    int more = 1;

    pthread_mutex_lock(&sc_lock);
    held = 0;
    while (more) {
        more = 0;
        for (struct stream *stream = streams; stream; stream = stream->next)
            more |= step(stream);
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&sc_lock);
}

/* ---- copies ---- */

/* Waits first for all blocking streams of the context, as the legacy default stream does. */
static CUresult copy(CUdeviceptr dst, CUdeviceptr src, size_t size)
{
    CUcontext ctx = sc_current();

    VALUE(sc_covered(ctx, dst, size, 2) && sc_covered(ctx, src, size, 1));
    sc_streams_drain(ctx, 1);
    if (ctx->sticky)
        return ctx->sticky;
    VALUE(!size || sc_copy(ctx, dst, src, size));
    return CUDA_SUCCESS;
}

static CUresult copy_async(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream)
{
    CUcontext ctx = sc_current();
    struct op *op;

    REQUIRE((stream = stream_of(stream)), CUDA_ERROR_INVALID_HANDLE);
    if (!size)
        return CUDA_SUCCESS;
    VALUE(sc_covered(ctx, dst, size, 2) && sc_covered(ctx, src, size, 1));
    op = queue(stream, COPY);
    op->dst = dst;
    op->src = src;
    op->size = size;
    return CUDA_SUCCESS;
}

static int is_device(CUdeviceptr ptr)
{
    struct range *range = sc_find(ptr);

    return range && range->span->kind != K_HOST;
}

API CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t size)
{
    CALL(CONTEXT);
    return copy(dst, src, size);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t size)
{
    CALL(CONTEXT);
    VALUE(!size || (is_device(dst) && is_device(src)));
    return copy(dst, src, size);
}

API CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t size)
{
    CALL(CONTEXT);
    VALUE(!size || is_device(src));
    return copy((CUdeviceptr)dst, src, size);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t size)
{
    CALL(CONTEXT);
    VALUE(!size || is_device(dst));
    return copy(dst, (CUdeviceptr)src, size);
}

API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream)
{
    CALL(CONTEXT);
    return copy_async(dst, src, size, stream);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream)
{
    CALL(CONTEXT);
    VALUE(!size || (is_device(dst) && is_device(src)));
    return copy_async(dst, src, size, stream);
}

API CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t size, CUstream stream)
{
    CALL(CONTEXT);
    VALUE(!size || is_device(src));
    return copy_async((CUdeviceptr)dst, src, size, stream);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t size, CUstream stream)
{
    CALL(CONTEXT);
    VALUE(!size || is_device(dst));
    return copy_async(dst, (CUdeviceptr)src, size, stream);
}

API CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t size)
{
    CALL(CONTEXT);
    sc_streams_drain(sc_current(), 1);
    VALUE(!size || sc_fill(sc_current(), dst, value, size));
    return CUDA_SUCCESS;
}

API CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t size, CUstream stream)
{
    struct op *op;

    CALL(CONTEXT);
    REQUIRE((stream = stream_of(stream)), CUDA_ERROR_INVALID_HANDLE);
    VALUE(!size || (is_device(dst) && sc_covered(sc_current(), dst, size, 2)));
    op = queue(stream, FILL);
    op->dst = dst;
    op->value = value;
    op->size = size;
    return CUDA_SUCCESS;
}

/* ---- streams and events ---- */

API CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    CALL(CONTEXT);
    VALUE(out && flags <= STREAM_NON_BLOCKING);
    *out = stream_new(sc_current(), flags, 0);
    return CUDA_SUCCESS;
}

/* As the driver it does not wait; what is queued is done nevertheless. */
API CUresult cuStreamDestroy_v2(CUstream stream)
{
    CALL(CONTEXT);
    REQUIRE((uintptr_t)stream > 2 && stream_of(stream), CUDA_ERROR_INVALID_HANDLE);
    while (step(stream))
        ;
    stream_free(stream);
    return CUDA_SUCCESS;
}

API CUresult cuStreamQuery(CUstream stream)
{
    CALL(CONTEXT);
    REQUIRE((stream = stream_of(stream)), CUDA_ERROR_INVALID_HANDLE);
    if (!stream->first)
        return stream->ctx->sticky;
    if (!held)
        step(stream);
    return stream->ctx->sticky ? stream->ctx->sticky : CUDA_ERROR_NOT_READY;
}

API CUresult cuStreamSynchronize(CUstream stream)
{
    CUcontext ctx;

    CALL(CONTEXT);
    REQUIRE((stream = stream_of(stream)), CUDA_ERROR_INVALID_HANDLE);
    ctx = stream->ctx;
    drain(stream);
    return ctx->sticky;
}

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *out)
{
    CALL(CONTEXT);
    VALUE(out);
    REQUIRE((stream = stream_of(stream)), CUDA_ERROR_INVALID_HANDLE);
    *out = stream->ctx;
    return CUDA_SUCCESS;
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    struct op *op;

    CALL(CONTEXT);
    VALUE(flags == 0);
    REQUIRE((stream = stream_of(stream)) && event_of(event), CUDA_ERROR_INVALID_HANDLE);
    op = queue(stream, WAIT);
    op->event = event;
    op->ticket = event->ticket;
    op->recorded = event->stream;
    return CUDA_SUCCESS;
}

API CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CALL(CONTEXT);
    VALUE(out && flags < 8);
    *out = calloc(1, sizeof(**out));
    (*out)->ctx = sc_current();
    (*out)->next = events;
    events = *out;
    return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event)
{
    CALL(INIT);
    REQUIRE(event_of(event), CUDA_ERROR_INVALID_HANDLE);
    event_free(event);
    return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream)
{
    struct op *op;

    CALL(CONTEXT);
    REQUIRE((stream = stream_of(stream)) && event_of(event) && event->ctx == stream->ctx,
            CUDA_ERROR_INVALID_HANDLE);
    event->stream = stream;
    op = queue(stream, RECORD);
    op->event = event;
    op->ticket = event->ticket = ++last_ticket;
    return CUDA_SUCCESS;
}

static int reached(CUevent event)
{
    return event->done >= event->ticket;
}

API CUresult cuEventQuery(CUevent event)
{
    CALL(INIT);
    REQUIRE(event_of(event), CUDA_ERROR_INVALID_HANDLE);
    if (!reached(event) && !held && step(event->stream))
        return event->ctx->sticky ? event->ctx->sticky : CUDA_ERROR_NOT_READY;
    if (event->ctx->sticky)
        return event->ctx->sticky;
    return reached(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event)
{
    CUcontext ctx;

    CALL(INIT);
    REQUIRE(event_of(event), CUDA_ERROR_INVALID_HANDLE);
    ctx = event->ctx;
    while (event_of(event) && !reached(event)) {
        if (held)
            pthread_cond_wait(&changed, &sc_lock);
        else if (!step(event->stream))
            break;
    }
    return ctx->sticky;
}
