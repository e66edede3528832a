/* SPDX-License-Identifier: BSD-3-Clause */
/* What is called of libmlx5 by name; made as ucx_memh_ib's table of libibverbs. */
#ifndef UCX_MEMH_IB_MLX5_MLX5_TABLE_H
#define UCX_MEMH_IB_MLX5_MLX5_TABLE_H

#include <ucx_memh/symbol_table.h> /* first: it needs _GNU_SOURCE */
#include <infiniband/mlx5dv.h>
#include <pthread.h>

/* clang-format off */
#define UCXM_MLX5_SYMBOLS(X) \
    X(is_supported, "mlx5dv_is_supported",      "MLX5_1.8", 1, \
      bool, (struct ibv_device *device)) \
    X(open_device,  "mlx5dv_open_device",       "MLX5_1.7", 1, \
      struct ibv_context *, (struct ibv_device *device, struct mlx5dv_context_attr *attr)) \
    X(init_obj,     "mlx5dv_init_obj",          "MLX5_1.2", 1, \
      int, (struct mlx5dv_obj *object, uint64_t type)) \
    X(general_cmd,  "mlx5dv_devx_general_cmd",  "MLX5_1.7", 1, \
      int, (struct ibv_context *context, const void *in, size_t in_size, void *out, \
            size_t out_size)) \
    X(obj_create,   "mlx5dv_devx_obj_create",   "MLX5_1.7", 1, \
      struct mlx5dv_devx_obj *, (struct ibv_context *context, const void *in, size_t in_size, \
                                 void *out, size_t out_size)) \
    X(obj_destroy,  "mlx5dv_devx_obj_destroy",  "MLX5_1.7", 1, \
      int, (struct mlx5dv_devx_obj *object)) \
    X(create_mkey,  "mlx5dv_create_mkey",       "MLX5_1.10", 1, \
      struct mlx5dv_mkey *, (struct mlx5dv_mkey_init_attr *attr)) \
    X(destroy_mkey, "mlx5dv_destroy_mkey",      "MLX5_1.10", 1, \
      int, (struct mlx5dv_mkey *mkey))
/* clang-format on */

typedef struct ucxm_mlx5 {
    ucxm_library_t library;
    UCXM_MLX5_SYMBOLS(UCXM_TABLE_MEMBER)
} ucxm_mlx5_t;

#define UCXM_TABLE_TYPE ucxm_mlx5_t
static const ucxm_symbol_t ucxm_mlx5_symbols[] = {UCXM_MLX5_SYMBOLS(UCXM_TABLE_ROW)};
#undef UCXM_TABLE_TYPE
#define UCXM_MLX5_SYMBOL_COUNT (sizeof(ucxm_mlx5_symbols) / sizeof(ucxm_mlx5_symbols[0]))

#endif
