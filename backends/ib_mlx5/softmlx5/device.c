/* SPDX-License-Identifier: BSD-3-Clause */
/* Devices, contexts, protection domains, queries, asynchronous events. */
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <unistd.h>

enum { MAX_DEVICES = 32, VENDOR_ID = 0x02c9, PART_ID = 4123, PORT_SPEED_HDR = 64, WIDTH_4X = 2 };

static struct sm_device devices[MAX_DEVICES];
static unsigned ndevices;
static _Atomic uint32_t context_seq;

static int ctx_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);

/* ---- the list -------------------------------------------------------------------------------- */

/* The same for every process of this host, different on another one: a node identity. */
static uint64_t host_guid(void)
{
    uint64_t h = 0xcbf29ce484222325ull;
    char id[64] = "softmlx5";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);

    if (fd >= 0) {
        if (read(fd, id, sizeof(id) - 1) < 0)
            id[0] = 's';
        close(fd);
    }
    for (const char *c = id; *c; c++)
        h = (h ^ (uint8_t)*c) * 0x100000001b3ull;
    return 0x020200ull << 40 | (h & 0xffffffull) << 8; /* locally administered; low byte: device */
}

static void devices_init(void)
{
    uint64_t guid = host_guid();

    for (unsigned i = 0; i < sm_config.devices; i++) {
        struct sm_device *d = &devices[i];

        d->index = i;
        d->guid = guid | (i + 1);
        d->dev.node_type = IBV_NODE_CA;
        d->dev.transport_type = IBV_TRANSPORT_IB;
        snprintf(d->dev.name, sizeof(d->dev.name), "softmlx5_%u", i);
        snprintf(d->dev.dev_name, sizeof(d->dev.dev_name), "softmlx5_uverbs%u", i);
        /* Paths that do not exist: readers of sysfs find nothing rather than somebody else. */
        snprintf(d->dev.dev_path, sizeof(d->dev.dev_path),
                 "/sys/class/infiniband_verbs/softmlx5_uverbs%u", i);
        snprintf(d->dev.ibdev_path, sizeof(d->dev.ibdev_path), "/sys/class/infiniband/softmlx5_%u",
                 i);
    }
    ndevices = sm_config.devices;
}

struct ibv_device **sm_device_list(int *num)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct ibv_device **list;

    sm_config_once();
    pthread_once(&once, devices_init);
    if (num)
        *num = 0;
    list = calloc(ndevices + 1, sizeof(*list));
    if (!list)
        return NULL;
    for (unsigned i = 0; i < ndevices; i++)
        list[i] = &devices[i].dev;
    if (num)
        *num = (int)ndevices;
    return list;
}

/* ---- contexts -------------------------------------------------------------------------------- */

void sm_query_device(struct sm_ctx *ctx, struct ibv_device_attr *a)
{
    *a = (struct ibv_device_attr){
        .fw_ver = "softmlx5 1.0",
        .node_guid = htobe64(ctx->dev->guid),
        .sys_image_guid = htobe64(ctx->dev->guid),
        .max_mr_size = UINT64_MAX,
        .page_size_cap = 0xfffffffffffff000ull,
        .vendor_id = VENDOR_ID,
        .vendor_part_id = PART_ID,
        .max_qp = SM_MAX_FLOWS / 2 - 1,
        .max_qp_wr = SM_MAX_QP_WR,
        .device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_MEM_WINDOW |
                            IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS |
                            IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_CURR_QP_STATE_MOD,
        .max_sge = SM_MAX_SGE,
        .max_sge_rd = SM_MAX_SGE,
        .max_cq = 1 << 16,
        .max_cqe = SM_MAX_CQE,
        .max_mr = SM_MKEY_MAX,
        .max_pd = 1 << 23,
        .max_qp_rd_atom = SM_MAX_RD_ATOMIC,
        .max_res_rd_atom = SM_MAX_RD_ATOMIC * (SM_MAX_FLOWS / 2),
        .max_qp_init_rd_atom = SM_MAX_RD_ATOMIC,
        .atomic_cap = atomic_load(&sm_limits.atomic) ? IBV_ATOMIC_HCA : IBV_ATOMIC_NONE,
        .max_mw = SM_MKEY_MAX,
        .max_pkeys = 1,
        .local_ca_ack_delay = 16,
        .phys_port_cnt = 1,
    };
}

static int query_device_ex(struct ibv_context *c, const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *attr, size_t size)
{
    struct ibv_device_attr_ex a = {.phys_port_cnt_ex = 1};
    struct sm_ctx *ctx = to_ctx(c);

    if (!sm_ctx_alive(ctx))
        return EIO;
    if (input && input->comp_mask)
        return EINVAL;
    if (size < sizeof(a.orig_attr))
        return EINVAL;
    sm_query_device(ctx, &a.orig_attr);
    a.device_cap_flags_ex = a.orig_attr.device_cap_flags;
    memset(attr, 0, size);
    memcpy(attr, &a, MIN(size, sizeof(a)));
    return 0;
}

int sm_query_port(struct sm_ctx *ctx, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
    struct ibv_port_attr a = {
        .state = IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .gid_tbl_len = 1,
        .port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_SYS_IMAGE_GUID_SUP,
        .max_msg_sz = 1u << atomic_load(&sm_limits.log_max_msg),
        .pkey_tbl_len = 1,
        .lid = ctx->lid,
        .sm_lid = 1,
        .max_vl_num = 4,
        .subnet_timeout = 18,
        .active_width = WIDTH_4X,
        .active_speed = PORT_SPEED_HDR,
        .phys_state = 5, /* LinkUp */
        .link_layer = IBV_LINK_LAYER_INFINIBAND,
    };

    if (!sm_ctx_alive(ctx))
        return EIO;
    if (port != 1)
        return EINVAL;
    memset(attr, 0, size);
    memcpy(attr, &a, MIN(size, sizeof(a)));
    return 0;
}

static int query_port_ex(struct ibv_context *c, uint8_t port, struct ibv_port_attr *attr,
                         size_t size)
{
    return sm_query_port(to_ctx(c), port, attr, size);
}

static struct ibv_qp *create_qp_ex(struct ibv_context *c, struct ibv_qp_init_attr_ex *x)
{
    struct ibv_qp_init_attr a = {
        .qp_context = x->qp_context,
        .send_cq = x->send_cq,
        .recv_cq = x->recv_cq,
        .srq = x->srq,
        .cap = x->cap,
        .qp_type = x->qp_type,
        .sq_sig_all = x->sq_sig_all,
    };
    struct ibv_qp *qp;

    if (x->comp_mask & ~(uint32_t)IBV_QP_INIT_ATTR_PD || !(x->comp_mask & IBV_QP_INIT_ATTR_PD) ||
        x->pd->context != c) {
        errno = x->comp_mask & IBV_QP_INIT_ATTR_PD ? EOPNOTSUPP : EINVAL;
        return NULL;
    }
    qp = sm_create_qp(x->pd, &a);
    if (qp)
        x->cap = a.cap;
    return qp;
}

static int advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags,
                     struct ibv_sge *sge, uint32_t n)
{
    (void)pd, (void)advice, (void)flags, (void)sge, (void)n;
    return EOPNOTSUPP; /* no on-demand paging */
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)srq;
    *bad = wr;
    return ENOSYS;
}

/* The inline functions of verbs.h call these without asking whether they are there. */
static void fill_ops(struct sm_ctx *ctx)
{
    struct verbs_context *v = &ctx->v;

    v->sz = sizeof(*v);
    v->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    v->query_port = query_port_ex;
    v->query_device_ex = query_device_ex;
    v->create_qp_ex = create_qp_ex;
    v->advise_mr = advise_mr;
    v->context.ops.alloc_mw = sm_alloc_mw;
    v->context.ops.dealloc_mw = sm_dealloc_mw;
    v->context.ops.bind_mw = sm_bind_mw;
    v->context.ops.poll_cq = ctx_poll_cq;
    v->context.ops.req_notify_cq = sm_req_notify_cq;
    v->context.ops.post_send = sm_post_send;
    v->context.ops.post_recv = sm_post_recv;
    v->context.ops.post_srq_recv = post_srq_recv;
}

static int ctx_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
    return sm_poll_cq(cq, n, wc);
}

/* The address says who may be found there: the kernel vouches for the uid at connect time. */
static int make_gid(struct sm_ctx *ctx)
{
    uint32_t uid = htobe32(geteuid());

    memset(&ctx->gid, 0, sizeof(ctx->gid));
    ctx->gid.raw[0] = 0xfe;
    ctx->gid.raw[1] = 0x80;
    ctx->gid.raw[3] = (uint8_t)ctx->dev->index;
    memcpy(ctx->gid.raw + 4, &uid, 4);
    return getrandom(ctx->gid.raw + 8, 8, 0) == 8 ? 0 : EIO;
}

static void ctx_free(struct sm_ctx *ctx)
{
    struct list *l, *tmp;

    sm_engine_release(ctx);
    sm_mkeys_fini(&ctx->mkeys);
    list_for_each_safe (l, tmp, &ctx->async)
        free(container_of(l, struct sm_async, link));
    sm_fd_close(ctx, ctx->v.context.async_fd);
    sm_fd_close(ctx, ctx->devfd);
    sm_fork_untrack(ctx);
    pthread_mutex_destroy(&ctx->v.context.mutex);
    pthread_mutex_destroy(&ctx->lock);
    pthread_mutex_destroy(&ctx->qp_list_lock);
    pthread_mutex_destroy(&ctx->fd_lock);
    free(ctx->fds);
    free(ctx);
}

static uint32_t first_space;

static void first_space_choose(void)
{
    if (getrandom(&first_space, sizeof(first_space), 0) != sizeof(first_space))
        first_space = (uint32_t)getpid();
}

/* The first mkey index of a context. All processes share a device's indices, so those of one must not
 * be those of its successor. */
static uint32_t mkey_base(const struct sm_ctx *ctx)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const uint32_t spaces = (1u << 24 >> SM_MKEY_BITS) - 1;

    pthread_once(&once, first_space_choose);
    return 1 + (first_space % spaces + ctx->seq % spaces) % spaces * (uint32_t)SM_MKEY_MAX;
}

static int ctx_init(struct sm_ctx *ctx, struct ibv_device *dev, bool devx)
{
    int rc;

    ctx->dev = container_of(dev, struct sm_device, dev);
    ctx->devx = devx;
    ctx->seq = atomic_fetch_add(&context_seq, 1);
    ctx->v.context.device = dev;
    ctx->v.context.num_comp_vectors = 1;
    ctx->v.context.cmd_fd = ctx->devfd = open("/dev/null", O_RDWR | O_CLOEXEC);
    ctx->v.context.async_fd = sm_eventfd(true);
    sm_fd_track(ctx, ctx->devfd);
    sm_fd_track(ctx, ctx->v.context.async_fd);
    fill_ops(ctx);
    if (ctx->devfd < 0 || ctx->v.context.async_fd < 0)
        return EMFILE;
    rc = sm_mkeys_init(&ctx->mkeys, mkey_base(ctx));
    if (!rc)
        rc = make_gid(ctx);
    if (!rc)
        rc = sm_engine_resources(ctx);
    return rc ? rc : sm_engine_start(ctx);
}

struct ibv_context *sm_open(struct ibv_device *dev, bool devx)
{
    struct sm_ctx *ctx;
    int rc = sm_fork_init_once();

    ctx = rc ? NULL : calloc(1, sizeof(*ctx));
    if (!ctx) {
        errno = ENOMEM;
        return NULL;
    }
    pthread_mutex_init(&ctx->v.context.mutex, NULL);
    pthread_mutex_init(&ctx->lock, NULL);
    pthread_mutex_init(&ctx->qp_list_lock, NULL);
    pthread_mutex_init(&ctx->fd_lock, NULL);
    list_init(&ctx->pds);
    list_init(&ctx->async);
    list_init(&ctx->umems);
    list_init(&ctx->qps);
    sm_fork_track(ctx);
    rc = ctx_init(ctx, dev, devx);
    if (rc) {
        ctx_free(ctx);
        errno = rc;
        return NULL;
    }
    STAT_INC(contexts_live);
    return &ctx->v.context;
}

int sm_close(struct ibv_context *c)
{
    struct sm_ctx *ctx = to_ctx(c);
    bool busy;

    if (!sm_ctx_alive(ctx))
        return EIO;
    pthread_mutex_lock(&ctx->lock);
    busy = ctx->npd || ctx->ncq || ctx->nqp || ctx->nobj || ctx->nchan;
    pthread_mutex_unlock(&ctx->lock);
    if (busy)
        return EBUSY;
    sm_engine_stop(ctx);
    ctx_free(ctx);
    STAT_DEC(contexts_live);
    return 0;
}

/* ---- protection domains ---------------------------------------------------------------------- */

struct ibv_pd *sm_alloc_pd(struct ibv_context *c)
{
    struct sm_ctx *ctx = to_ctx(c);
    struct sm_pd *pd;
    int err;

    STAT_CMD(cmd_alloc_pd);
    err = sm_fault_errno("alloc_pd");
    pd = err ? NULL : calloc(1, sizeof(*pd));
    if (!pd) {
        errno = err ? err : ENOMEM;
        return NULL;
    }
    pd->pd.context = c;
    pthread_mutex_lock(&ctx->lock);
    /* Domain 0 stays unused, so that a forgotten field is refused; never the same number twice. */
    pd->pdn = (ctx->seq << 16 | ++ctx->next_pdn) & 0xffffff;
    pd->pd.handle = pd->pdn;
    list_add(&ctx->pds, &pd->link);
    ctx->npd++;
    pthread_mutex_unlock(&ctx->lock);
    STAT_INC(pds_live);
    return &pd->pd;
}

int sm_dealloc_pd(struct ibv_pd *ibpd)
{
    struct sm_pd *pd = to_pd(ibpd);
    struct sm_ctx *ctx = to_ctx(ibpd->context);

    pthread_mutex_lock(&ctx->lock);
    if (atomic_load(&pd->users)) {
        pthread_mutex_unlock(&ctx->lock);
        return EBUSY;
    }
    list_del(&pd->link);
    ctx->npd--;
    pthread_mutex_unlock(&ctx->lock);
    free(pd);
    STAT_DEC(pds_live);
    return 0;
}

struct sm_pd *sm_pd_get(struct sm_ctx *ctx, uint32_t pdn)
{
    struct sm_pd *found = NULL;
    struct list *l;

    pthread_mutex_lock(&ctx->lock);
    list_for_each (l, &ctx->pds) {
        if (container_of(l, struct sm_pd, link)->pdn == pdn)
            found = container_of(l, struct sm_pd, link);
    }
    if (found)
        atomic_fetch_add(&found->users, 1);
    pthread_mutex_unlock(&ctx->lock);
    return found;
}

void sm_pd_put(struct sm_pd *pd)
{
    atomic_fetch_sub(&pd->users, 1);
}

/* ---- asynchronous events --------------------------------------------------------------------- */

static _Atomic uint32_t *delivered_counter(const struct ibv_async_event *ev)
{
    switch (ev->event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
        return &to_qp(ev->element.qp)->events_delivered;
    default:
        return NULL;
    }
}

void sm_async_post(struct sm_ctx *ctx, enum ibv_event_type type, void *element)
{
    struct sm_async *a = calloc(1, sizeof(*a));
    uint64_t one = 1;

    if (!a)
        return;
    a->ev.event_type = type;
    a->ev.element.qp = element;
    pthread_mutex_lock(&ctx->lock);
    list_add(&ctx->async, &a->link);
    pthread_mutex_unlock(&ctx->lock);
    if (write(ctx->v.context.async_fd, &one, sizeof(one)) < 0)
        return; /* counter full: there are events to read anyway */
}

/* Undelivered events about an object that goes away. Their wake-ups stay; sm_async_get() skips. */
void sm_async_forget(struct sm_ctx *ctx, const void *element)
{
    struct list *l, *tmp;

    pthread_mutex_lock(&ctx->lock);
    list_for_each_safe (l, tmp, &ctx->async) {
        struct sm_async *a = container_of(l, struct sm_async, link);

        if (a->ev.element.qp == element) {
            list_del(l);
            free(a);
        }
    }
    pthread_mutex_unlock(&ctx->lock);
}

int sm_async_get(struct ibv_context *c, struct ibv_async_event *ev)
{
    struct sm_ctx *ctx = to_ctx(c);
    struct sm_async *a;
    uint64_t one;

    for (;;) {
        _Atomic uint32_t *n;

        if (read(c->async_fd, &one, sizeof(one)) != sizeof(one))
            return -1;
        pthread_mutex_lock(&ctx->lock);
        a = list_empty(&ctx->async) ? NULL : container_of(ctx->async.next, struct sm_async, link);
        if (a) {
            list_del(&a->link);
            *ev = a->ev;
            n = delivered_counter(ev);
            if (n)
                atomic_fetch_add(n, 1);
        }
        pthread_mutex_unlock(&ctx->lock);
        if (a)
            break;
    }
    free(a);
    return 0;
}

void sm_async_ack(struct ibv_async_event *ev)
{
    struct ibv_qp *qp = ev->element.qp;

    if (!delivered_counter(ev))
        return;
    pthread_mutex_lock(&qp->mutex);
    qp->events_completed++;
    pthread_cond_broadcast(&qp->cond);
    pthread_mutex_unlock(&qp->mutex);
}
