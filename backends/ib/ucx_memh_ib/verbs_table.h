/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What is called of libibverbs by name, with the versions that hold these
 * prototypes.  post_send, poll_cq and req_notify_cq are not here: they go
 * through the context's own operations.
 */
#ifndef UCX_MEMH_IB_VERBS_TABLE_H
#define UCX_MEMH_IB_VERBS_TABLE_H

#include <ucx_memh/symbol_table.h> /* first: it needs _GNU_SOURCE */
#include <infiniband/verbs.h>

/* clang-format off */
#define UCXM_VERBS_SYMBOLS(X) \
    X(get_device_list,   "ibv_get_device_list",   "IBVERBS_1.1", 1, \
      struct ibv_device **, (int *count)) \
    X(free_device_list,  "ibv_free_device_list",  "IBVERBS_1.1", 1, \
      void, (struct ibv_device **list)) \
    X(get_device_name,   "ibv_get_device_name",   "IBVERBS_1.1", 1, \
      const char *, (struct ibv_device *device)) \
    X(get_device_guid,   "ibv_get_device_guid",   "IBVERBS_1.1", 1, \
      uint64_t, (struct ibv_device *device)) \
    X(open_device,       "ibv_open_device",       "IBVERBS_1.1", 1, \
      struct ibv_context *, (struct ibv_device *device)) \
    X(close_device,      "ibv_close_device",      "IBVERBS_1.1", 1, \
      int, (struct ibv_context *context)) \
    X(query_device,      "ibv_query_device",      "IBVERBS_1.1", 1, \
      int, (struct ibv_context *context, struct ibv_device_attr *attr)) \
    X(query_port,        "ibv_query_port",        "IBVERBS_1.1", 1, \
      int, (struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr)) \
    X(query_gid,         "ibv_query_gid",         "IBVERBS_1.1", 1, \
      int, (struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)) \
    X(query_gid_ex,      "_ibv_query_gid_ex",     "IBVERBS_1.11", 0, \
      int, (struct ibv_context *context, uint32_t port, uint32_t index, \
            struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size)) \
    X(alloc_pd,          "ibv_alloc_pd",          "IBVERBS_1.1", 1, \
      struct ibv_pd *, (struct ibv_context *context)) \
    X(dealloc_pd,        "ibv_dealloc_pd",        "IBVERBS_1.1", 1, \
      int, (struct ibv_pd *pd)) \
    X(reg_mr,            "ibv_reg_mr",            "IBVERBS_1.1", 1, \
      struct ibv_mr *, (struct ibv_pd *pd, void *address, size_t length, int access)) \
    X(reg_dmabuf_mr,     "ibv_reg_dmabuf_mr",     "IBVERBS_1.12", 0, \
      struct ibv_mr *, (struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, \
                        int fd, int access)) \
    X(dereg_mr,          "ibv_dereg_mr",          "IBVERBS_1.1", 1, \
      int, (struct ibv_mr *mr)) \
    X(create_channel,    "ibv_create_comp_channel",  "IBVERBS_1.0", 1, \
      struct ibv_comp_channel *, (struct ibv_context *context)) \
    X(destroy_channel,   "ibv_destroy_comp_channel", "IBVERBS_1.0", 1, \
      int, (struct ibv_comp_channel *channel)) \
    X(create_cq,         "ibv_create_cq",         "IBVERBS_1.1", 1, \
      struct ibv_cq *, (struct ibv_context *context, int cqe, void *cq_context, \
                        struct ibv_comp_channel *channel, int vector)) \
    X(destroy_cq,        "ibv_destroy_cq",        "IBVERBS_1.1", 1, \
      int, (struct ibv_cq *cq)) \
    X(get_cq_event,      "ibv_get_cq_event",      "IBVERBS_1.1", 1, \
      int, (struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)) \
    X(ack_cq_events,     "ibv_ack_cq_events",     "IBVERBS_1.1", 1, \
      void, (struct ibv_cq *cq, unsigned count)) \
    X(create_qp,         "ibv_create_qp",         "IBVERBS_1.1", 1, \
      struct ibv_qp *, (struct ibv_pd *pd, struct ibv_qp_init_attr *attr)) \
    X(modify_qp,         "ibv_modify_qp",         "IBVERBS_1.1", 1, \
      int, (struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)) \
    X(query_qp,          "ibv_query_qp",          "IBVERBS_1.1", 1, \
      int, (struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, \
            struct ibv_qp_init_attr *init)) \
    X(destroy_qp,        "ibv_destroy_qp",        "IBVERBS_1.1", 1, \
      int, (struct ibv_qp *qp)) \
    X(get_async_event,   "ibv_get_async_event",   "IBVERBS_1.1", 1, \
      int, (struct ibv_context *context, struct ibv_async_event *event)) \
    X(ack_async_event,   "ibv_ack_async_event",   "IBVERBS_1.1", 1, \
      void, (struct ibv_async_event *event)) \
    X(wc_status_str,     "ibv_wc_status_str",     "IBVERBS_1.1", 1, \
      const char *, (enum ibv_wc_status status))
/* clang-format on */

typedef struct ucxm_verbs {
    ucxm_library_t library;
    UCXM_VERBS_SYMBOLS(UCXM_TABLE_MEMBER)
} ucxm_verbs_t;

#define UCXM_TABLE_TYPE ucxm_verbs_t
static const ucxm_symbol_t ucxm_verbs_symbols[] = {UCXM_VERBS_SYMBOLS(UCXM_TABLE_ROW)};
#undef UCXM_TABLE_TYPE
#define UCXM_VERBS_SYMBOL_COUNT (sizeof(ucxm_verbs_symbols) / sizeof(ucxm_verbs_symbols[0]))

#endif
