/* SPDX-License-Identifier: BSD-3-Clause */
/* The exported ABI of libibverbs and libmlx5, and the control surface. Nothing but wrappers: no
 * part of the library calls an exported name, so that another library's symbols cannot come
 * between.
 *
 * A context that was inherited through fork is refused here, before anything of the parent's is
 * touched.
 */
#include "internal.h"
#include "names.h"

/* verbs.h turns these into inline functions of its own. */
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#undef ibv_get_device_list

static bool dead(const struct ibv_context *c)
{
    return !sm_ctx_alive(container_of(c, struct sm_ctx, v.context));
}

#define REFUSE_DEAD(c, value) \
    do {                      \
        if (dead(c)) {        \
            errno = EIO;      \
            return value;     \
        }                     \
    } while (0)

/* Functions of both libraries return an errno, too; the value and the variable say the same. */
static int result(int err)
{
    if (err)
        errno = err;
    return err;
}

#define UNUSED __attribute__((unused))

/* ---- devices --------------------------------------------------------------------------------- */

EXPORT struct ibv_device **ibv_get_device_list(int *num)
{
    return sm_device_list(num);
}

EXPORT void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *dev)
{
    return dev->name;
}

EXPORT int ibv_get_device_index(struct ibv_device *dev)
{
    return (int)container_of(dev, struct sm_device, dev)->index;
}

EXPORT __be64 ibv_get_device_guid(struct ibv_device *dev)
{
    return htobe64(container_of(dev, struct sm_device, dev)->guid);
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *dev)
{
    return sm_open(dev, true); /* as the real driver: DEVX where the device allows it */
}

EXPORT int ibv_close_device(struct ibv_context *c)
{
    return result(sm_close(c));
}

EXPORT int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *attr)
{
    REFUSE_DEAD(c, EIO);
    sm_query_device(to_ctx(c), attr);
    return 0;
}

/* Callers from before port_cap_flags2 own four bytes less. */
EXPORT int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    return result(sm_query_port(to_ctx(c), port, (struct ibv_port_attr *)attr,
                                offsetof(struct ibv_port_attr, port_cap_flags2)));
}

EXPORT int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *gid)
{
    REFUSE_DEAD(c, -1);
    if (port != 1 || index) {
        errno = EINVAL;
        return -1;
    }
    *gid = to_ctx(c)->gid;
    return 0;
}

static int gid_entry(struct ibv_context *c, struct ibv_gid_entry *e, size_t size)
{
    struct ibv_gid_entry all = {.gid = to_ctx(c)->gid, .port_num = 1, .gid_type = IBV_GID_TYPE_IB};

    if (size < sizeof(all))
        return EINVAL;
    memset(e, 0, size);
    memcpy(e, &all, sizeof(all));
    return 0;
}

EXPORT int _ibv_query_gid_ex(struct ibv_context *c, uint32_t port, uint32_t index,
                             struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size)
{
    REFUSE_DEAD(c, EIO);
    if (flags || port != 1)
        return result(EINVAL);
    return result(index ? ENODATA : gid_entry(c, entry, entry_size));
}

EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *c, struct ibv_gid_entry *entries,
                                    size_t max, uint32_t flags, size_t entry_size)
{
    REFUSE_DEAD(c, -EIO);
    if (flags || !max)
        return -EINVAL;
    return gid_entry(c, entries, entry_size) ? -EINVAL : 1;
}

EXPORT int ibv_query_gid_type(struct ibv_context *c, uint8_t port, unsigned index, unsigned *type)
{
    REFUSE_DEAD(c, -1);
    if (port != 1 || index) {
        errno = EINVAL;
        return -1;
    }
    *type = IBV_GID_TYPE_IB;
    return 0;
}

EXPORT int ibv_query_pkey(struct ibv_context *c, uint8_t port, int index, __be16 *pkey)
{
    REFUSE_DEAD(c, -1);
    if (port != 1 || index) {
        errno = EINVAL;
        return -1;
    }
    *pkey = htobe16(0xffff);
    return 0;
}

EXPORT int ibv_get_pkey_index(struct ibv_context *c, uint8_t port, __be16 pkey)
{
    REFUSE_DEAD(c, -1);
    return port == 1 && pkey == htobe16(0xffff) ? 0 : -1;
}

EXPORT int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *ev)
{
    REFUSE_DEAD(c, -1);
    return sm_async_get(c, ev);
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *ev)
{
    sm_async_ack(ev);
}

/* Memory is reached through the owner's page tables: a fork's copy-on-write is the kernel's
 * business. */
EXPORT int ibv_fork_init(void)
{
    return 0;
}

EXPORT enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return IBV_FORK_UNNEEDED;
}

EXPORT int ibv_dontfork_range(void *base UNUSED, size_t size UNUSED)
{
    return 0;
}

EXPORT int ibv_dofork_range(void *base UNUSED, size_t size UNUSED)
{
    return 0;
}

EXPORT const char *ibv_get_sysfs_path(void)
{
    return "/sys";
}

/* There is nothing about this device in sysfs. */
EXPORT int ibv_read_sysfs_file(const char *dir UNUSED, const char *file UNUSED, char *buf UNUSED,
                               size_t size UNUSED)
{
    errno = ENOENT;
    return -1;
}

/* ---- memory ---------------------------------------------------------------------------------- */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *c)
{
    REFUSE_DEAD(c, NULL);
    return sm_alloc_pd(c);
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *pd)
{
    REFUSE_DEAD(pd->context, EIO);
    return result(sm_dealloc_pd(pd));
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    REFUSE_DEAD(pd->context, NULL);
    return sm_reg_mr(pd, addr, length, (uintptr_t)addr, (unsigned)access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                      int access)
{
    REFUSE_DEAD(pd->context, NULL);
    return sm_reg_mr(pd, addr, length, iova, (unsigned)access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                       unsigned access)
{
    REFUSE_DEAD(pd->context, NULL);
    return sm_reg_mr(pd, addr, length, iova, access);
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
                                        uint64_t iova, int fd, int access)
{
    REFUSE_DEAD(pd->context, NULL);
    return sm_reg_dmabuf_mr(pd, offset, length, iova, fd, access);
}

EXPORT int ibv_dereg_mr(struct ibv_mr *mr)
{
    REFUSE_DEAD(mr->context, EIO);
    return result(sm_dereg_mr(mr));
}

EXPORT int ibv_rereg_mr(struct ibv_mr *mr UNUSED, int flags UNUSED, struct ibv_pd *pd UNUSED,
                        void *addr UNUSED, size_t length UNUSED, int access UNUSED)
{
    errno = EOPNOTSUPP;
    return IBV_REREG_MR_ERR_INPUT;
}

/* ---- completion queues ----------------------------------------------------------------------- */

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
    REFUSE_DEAD(c, NULL);
    return sm_create_channel(c);
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ch)
{
    REFUSE_DEAD(ch->context, EIO);
    return result(sm_destroy_channel(ch));
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *c, int cqe, void *cq_context,
                                    struct ibv_comp_channel *channel, int comp_vector)
{
    REFUSE_DEAD(c, NULL);
    return sm_create_cq(c, cqe, cq_context, channel, comp_vector);
}

EXPORT int ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
    REFUSE_DEAD(cq->context, EIO);
    return result(sm_resize_cq(cq, cqe));
}

EXPORT int ibv_destroy_cq(struct ibv_cq *cq)
{
    REFUSE_DEAD(cq->context, EIO);
    return result(sm_destroy_cq(cq));
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **cq_context)
{
    REFUSE_DEAD(ch->context, -1);
    return sm_get_cq_event(ch, cq, cq_context);
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
    if (n && !dead(cq->context))
        sm_ack_cq_events(cq, n);
}

/* ---- queue pairs ----------------------------------------------------------------------------- */

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    REFUSE_DEAD(pd->context, NULL);
    return sm_create_qp(pd, attr);
}

EXPORT int ibv_destroy_qp(struct ibv_qp *qp)
{
    REFUSE_DEAD(qp->context, EIO);
    return result(sm_destroy_qp(qp));
}

EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    REFUSE_DEAD(qp->context, EIO);
    return result(sm_modify_qp(qp, attr, mask));
}

EXPORT int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
                        struct ibv_qp_init_attr *init)
{
    REFUSE_DEAD(qp->context, EIO);
    return result(sm_query_qp(qp, attr, mask, init));
}

EXPORT int ibv_query_qp_data_in_order(struct ibv_qp *qp UNUSED, enum ibv_wr_opcode op UNUSED,
                                      uint32_t flags UNUSED)
{
    return 0;
}

/* ---- what this device has not: told, never pretended ----------------------------------------- */

#define NOT_HERE_PTR(type, name, ...) \
    EXPORT type *name(__VA_ARGS__)    \
    {                                 \
        errno = EOPNOTSUPP;           \
        return NULL;                  \
    }
#define NOT_HERE_INT(name, ...)    \
    EXPORT int name(__VA_ARGS__)   \
    {                              \
        return result(EOPNOTSUPP); \
    }

NOT_HERE_PTR(struct ibv_qp_ex, ibv_qp_to_qp_ex, struct ibv_qp *qp UNUSED)
NOT_HERE_PTR(struct ibv_srq, ibv_create_srq, struct ibv_pd *pd UNUSED,
             struct ibv_srq_init_attr *a UNUSED)
NOT_HERE_PTR(struct ibv_ah, ibv_create_ah, struct ibv_pd *pd UNUSED, struct ibv_ah_attr *a UNUSED)
NOT_HERE_PTR(struct ibv_ah, ibv_create_ah_from_wc, struct ibv_pd *pd UNUSED,
             struct ibv_wc *wc UNUSED, struct ibv_grh *grh UNUSED, uint8_t port UNUSED)
NOT_HERE_INT(ibv_modify_srq, struct ibv_srq *srq UNUSED, struct ibv_srq_attr *a UNUSED,
             int mask UNUSED)
NOT_HERE_INT(ibv_query_srq, struct ibv_srq *srq UNUSED, struct ibv_srq_attr *a UNUSED)
NOT_HERE_INT(ibv_destroy_srq, struct ibv_srq *srq UNUSED)
NOT_HERE_INT(ibv_destroy_ah, struct ibv_ah *ah UNUSED)
NOT_HERE_INT(ibv_init_ah_from_wc, struct ibv_context *c UNUSED, uint8_t port UNUSED,
             struct ibv_wc *wc UNUSED, struct ibv_grh *grh UNUSED, struct ibv_ah_attr *a UNUSED)
NOT_HERE_INT(ibv_attach_mcast, struct ibv_qp *qp UNUSED, const union ibv_gid *gid UNUSED,
             uint16_t lid UNUSED)
NOT_HERE_INT(ibv_detach_mcast, struct ibv_qp *qp UNUSED, const union ibv_gid *gid UNUSED,
             uint16_t lid UNUSED)
NOT_HERE_INT(ibv_query_ece, struct ibv_qp *qp UNUSED, struct ibv_ece *ece UNUSED)
NOT_HERE_INT(ibv_set_ece, struct ibv_qp *qp UNUSED, struct ibv_ece *ece UNUSED)
NOT_HERE_INT(ibv_resolve_eth_l2_from_gid, struct ibv_context *c UNUSED,
             struct ibv_ah_attr *a UNUSED, uint8_t mac[6] UNUSED, uint16_t *vid UNUSED)

NOT_HERE_PTR(struct ibv_cq_ex, mlx5dv_create_cq, struct ibv_context *c UNUSED,
             struct ibv_cq_init_attr_ex *a UNUSED, struct mlx5dv_cq_init_attr *m UNUSED)
NOT_HERE_PTR(struct ibv_qp, mlx5dv_create_qp, struct ibv_context *c UNUSED,
             struct ibv_qp_init_attr_ex *a UNUSED, struct mlx5dv_qp_init_attr *m UNUSED)
NOT_HERE_PTR(struct mlx5dv_qp_ex, mlx5dv_qp_ex_from_ibv_qp_ex, struct ibv_qp_ex *qp UNUSED)
NOT_HERE_PTR(struct mlx5dv_devx_uar, mlx5dv_devx_alloc_uar, struct ibv_context *c UNUSED,
             uint32_t flags UNUSED)
NOT_HERE_PTR(struct mlx5dv_devx_event_channel, mlx5dv_devx_create_event_channel,
             struct ibv_context *c UNUSED, enum mlx5dv_devx_create_event_channel_flags flags UNUSED)
NOT_HERE_INT(mlx5dv_devx_query_eqn, struct ibv_context *c UNUSED, uint32_t vector UNUSED,
             uint32_t *eqn UNUSED)
NOT_HERE_INT(mlx5dv_devx_qp_query, struct ibv_qp *qp UNUSED, const void *in UNUSED,
             size_t inlen UNUSED, void *out UNUSED, size_t outlen UNUSED)
NOT_HERE_INT(mlx5dv_devx_qp_modify, struct ibv_qp *qp UNUSED, const void *in UNUSED,
             size_t inlen UNUSED, void *out UNUSED, size_t outlen UNUSED)
NOT_HERE_INT(mlx5dv_devx_subscribe_devx_event, struct mlx5dv_devx_event_channel *ch UNUSED,
             struct mlx5dv_devx_obj *obj UNUSED, uint16_t size UNUSED, uint16_t nums[] UNUSED,
             uint64_t cookie UNUSED)

EXPORT void mlx5dv_devx_free_uar(struct mlx5dv_devx_uar *uar UNUSED) {}

EXPORT void mlx5dv_devx_destroy_event_channel(struct mlx5dv_devx_event_channel *ch UNUSED) {}

EXPORT ssize_t mlx5dv_devx_get_event(struct mlx5dv_devx_event_channel *ch UNUSED,
                                     struct mlx5dv_devx_async_event_hdr *ev UNUSED,
                                     size_t size UNUSED)
{
    errno = EOPNOTSUPP;
    return -1;
}

/* Newer than Debian 12's headers. No data-direct device is attached. */
EXPORT int mlx5dv_get_data_direct_sysfs_path(struct ibv_context *c, char *buf, size_t size);
EXPORT struct ibv_mr *mlx5dv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
                                           uint64_t iova, int fd, int access, int mlx5_access);

int mlx5dv_get_data_direct_sysfs_path(struct ibv_context *c UNUSED, char *buf UNUSED,
                                      size_t size UNUSED)
{
    return result(ENODEV);
}

struct ibv_mr *mlx5dv_reg_dmabuf_mr(struct ibv_pd *pd UNUSED, uint64_t offset UNUSED,
                                    size_t length UNUSED, uint64_t iova UNUSED, int fd UNUSED,
                                    int access UNUSED, int mlx5_access UNUSED)
{
    errno = EOPNOTSUPP;
    return NULL;
}

/* ---- mlx5dv ---------------------------------------------------------------------------------- */

EXPORT bool mlx5dv_is_supported(struct ibv_device *dev UNUSED)
{
    return true; /* every device that we list is ours */
}

EXPORT struct ibv_context *mlx5dv_open_device(struct ibv_device *dev,
                                              struct mlx5dv_context_attr *attr)
{
    if (attr->comp_mask || (attr->flags & ~(uint32_t)MLX5DV_CONTEXT_FLAGS_DEVX)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return sm_open(dev, attr->flags & MLX5DV_CONTEXT_FLAGS_DEVX);
}

EXPORT int mlx5dv_query_device(struct ibv_context *c, struct mlx5dv_context *out)
{
    REFUSE_DEAD(c, EIO);
    out->version = 0;
    out->flags = MLX5DV_CONTEXT_FLAGS_CQE_V1;
    out->comp_mask = 0; /* none of the optional parts is filled in */
    return 0;
}

/* Queue and completion memory would be written without our seeing it: only the domain number is
 * given. */
static int init_obj(struct mlx5dv_obj *obj, uint64_t type)
{
    if (type != MLX5DV_OBJ_PD)
        return result(EOPNOTSUPP);
    REFUSE_DEAD(obj->pd.in->context, EIO);
    obj->pd.out->pdn = to_pd(obj->pd.in)->pdn;
    obj->pd.out->comp_mask = 0;
    return 0;
}

EXPORT __attribute__((symver("mlx5dv_init_obj@@MLX5_1.2"))) int
sm_init_obj_1_2(struct mlx5dv_obj *obj, uint64_t type)
{
    return init_obj(obj, type);
}

EXPORT __attribute__((symver("mlx5dv_init_obj@MLX5_1.0"))) int
sm_init_obj_1_0(struct mlx5dv_obj *obj, uint64_t type)
{
    return init_obj(obj, type);
}

EXPORT struct mlx5dv_devx_obj *mlx5dv_devx_obj_create(struct ibv_context *c, const void *in,
                                                      size_t inlen, void *out, size_t outlen)
{
    REFUSE_DEAD(c, NULL);
    return sm_devx_create(c, in, inlen, out, outlen);
}

EXPORT int mlx5dv_devx_obj_query(struct mlx5dv_devx_obj *obj, const void *in, size_t inlen,
                                 void *out, size_t outlen)
{
    return result(sm_devx_query(obj, in, inlen, out, outlen));
}

EXPORT int mlx5dv_devx_obj_modify(struct mlx5dv_devx_obj *obj, const void *in, size_t inlen,
                                  void *out, size_t outlen)
{
    return result(sm_devx_modify(obj, in, inlen, out, outlen));
}

EXPORT int mlx5dv_devx_obj_destroy(struct mlx5dv_devx_obj *obj)
{
    return result(sm_devx_destroy(obj));
}

EXPORT int mlx5dv_devx_general_cmd(struct ibv_context *c, const void *in, size_t inlen, void *out,
                                   size_t outlen)
{
    REFUSE_DEAD(c, EIO);
    return result(sm_devx_general(c, in, inlen, out, outlen));
}

EXPORT struct mlx5dv_devx_umem *mlx5dv_devx_umem_reg(struct ibv_context *c, void *addr, size_t size,
                                                     uint32_t access)
{
    REFUSE_DEAD(c, NULL);
    return sm_umem_reg(c, addr, size, access);
}

EXPORT struct mlx5dv_devx_umem *mlx5dv_devx_umem_reg_ex(struct ibv_context *c,
                                                        struct mlx5dv_devx_umem_in *in)
{
    REFUSE_DEAD(c, NULL);
    if (in->comp_mask) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return sm_umem_reg(c, in->addr, in->size, in->access);
}

EXPORT int mlx5dv_devx_umem_dereg(struct mlx5dv_devx_umem *umem)
{
    return result(sm_umem_dereg(umem));
}

EXPORT struct mlx5dv_mkey *mlx5dv_create_mkey(struct mlx5dv_mkey_init_attr *attr)
{
    REFUSE_DEAD(attr->pd->context, NULL);
    return sm_dv_create_mkey(attr);
}

EXPORT int mlx5dv_destroy_mkey(struct mlx5dv_mkey *mkey)
{
    return result(sm_dv_destroy_mkey(mkey));
}

/* ---- names ----------------------------------------------------------------------------------- */

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status s)
{
    return sm_wc_status_str(s);
}

EXPORT const char *ibv_node_type_str(enum ibv_node_type t)
{
    return sm_node_type_str(t);
}

EXPORT const char *ibv_port_state_str(enum ibv_port_state s)
{
    return sm_port_state_str(s);
}

EXPORT const char *ibv_event_type_str(enum ibv_event_type e)
{
    return sm_event_type_str(e);
}

EXPORT int ibv_rate_to_mult(enum ibv_rate r)
{
    return sm_rate_to_mult(r);
}

EXPORT enum ibv_rate mult_to_ibv_rate(int mult)
{
    return sm_mult_to_rate(mult);
}

EXPORT int ibv_rate_to_mbps(enum ibv_rate r)
{
    return sm_rate_to_mbps(r);
}

EXPORT enum ibv_rate mbps_to_ibv_rate(int mbps)
{
    return sm_mbps_to_rate(mbps);
}

/* ---- control --------------------------------------------------------------------------------- */

EXPORT uint64_t softmlx5_stat(const char *name)
{
    return sm_stat(name);
}

EXPORT int softmlx5_stat_names(char *buf, size_t size)
{
    return sm_stat_names(buf, size);
}

EXPORT int softmlx5_fault(const char *spec)
{
    return sm_fault_set(spec);
}

EXPORT int softmlx5_set(const char *name, const char *value)
{
    sm_config_once(); /* the environment first: a later call is to win */
    return sm_set(name, value);
}
