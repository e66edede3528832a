# SPDX-License-Identifier: BSD-3-Clause
# libmlx5's table, and the devices that both libraries know.

cdef struct table_t:
    ucxm_mlx5_t mlx5
    table_t *next

cdef table_t *tables = NULL  # under mlx5_tables_lock; never freed, the libraries stay loaded


cdef ucxm_mlx5_t *mlx5_table(const char *path, ucxm_error_t *error) noexcept nogil:
    """As verbs_table: filled once for each path; NULL: `error` says why."""
    global tables
    cdef table_t *table
    cdef ucxm_mlx5_t *mlx5 = NULL
    pthread_mutex_lock(&mlx5_tables_lock)
    table = tables
    while table != NULL and strcmp(table.mlx5.library.path, path) != 0:
        table = table.next
    if table == NULL:
        table = <table_t *>calloc(1, sizeof(table_t))
        if table != NULL:
            table.next = tables
            tables = table
    if table == NULL:
        ib_fail(error, UCXM_ERR_NO_MEMORY, ENOMEM, "out of memory")
    else:
        mlx5 = &table.mlx5
        if mlx5.library.handle == NULL:
            ucxm_library_load(&mlx5.library, path, ucxm_mlx5_symbols, UCXM_MLX5_SYMBOL_COUNT)
        if mlx5.library.reason[0] != 0:
            ib_fail(error, UCXM_ERR_NO_DEVICE, 0, "%s", mlx5.library.reason)
            mlx5 = NULL
    pthread_mutex_unlock(&mlx5_tables_lock)
    return mlx5


cdef int load(str verbs_path, str mlx5_path, ucxm_verbs_t **verbs,
              ucxm_mlx5_t **mlx5) except -1:
    """Both tables, or NoDeviceError with the reason.  The two must belong together: libmlx5
    lists the devices of the libibverbs that it is linked with."""
    cdef ucxm_error_t error
    cdef bytes verbs_bytes = verbs_path.encode()
    cdef bytes mlx5_bytes = mlx5_path.encode()
    memset(&error, 0, sizeof(error))
    verbs[0] = verbs_table(verbs_bytes, &error)
    if verbs[0] == NULL:  # `error` has room for its beginning only
        raise NoDeviceError(library_status(verbs_path)[0], component="ib_mlx5")
    mlx5[0] = mlx5_table(mlx5_bytes, &error)
    if mlx5[0] == NULL:
        raise NoDeviceError(mlx5_reason(mlx5_bytes), component="ib_mlx5")
    return 0


cdef str mlx5_reason(bytes path):
    """Why mlx5_table failed, in full."""
    cdef const char *c_path = path
    cdef table_t *table
    pthread_mutex_lock(&mlx5_tables_lock)
    try:
        table = tables
        while table != NULL:
            if strcmp(table.mlx5.library.path, c_path) == 0:
                return table.mlx5.library.reason.decode(errors="replace")
            table = table.next
        return "out of memory"
    finally:
        pthread_mutex_unlock(&mlx5_tables_lock)


def devices(verbs_path, mlx5_path):
    """Names of the devices that these libraries can drive.  NoDeviceError: cannot be loaded."""
    cdef ucxm_verbs_t *verbs = NULL
    cdef ucxm_mlx5_t *mlx5 = NULL
    cdef ibv_device **found
    cdef int i, count = 0
    load(verbs_path, mlx5_path, &verbs, &mlx5)
    found = verbs.get_device_list(&count)
    if found == NULL:
        return []
    names = []
    try:
        for i in range(count):
            if mlx5.is_supported(found[i]):
                names.append(verbs.get_device_name(found[i]).decode())
        return names
    finally:
        verbs.free_device_list(found)


cdef ibv_context *open_context(ucxm_verbs_t *verbs, ucxm_mlx5_t *mlx5, const char *name,
                               int *sys_errno) noexcept nogil:
    """The device of that name, opened for DEVX commands; NULL with ENODEV: there is none."""
    cdef mlx5dv_context_attr attr
    cdef ibv_context *context = NULL
    cdef int i, count = 0
    cdef ibv_device **found = verbs.get_device_list(&count)
    sys_errno[0] = ENODEV
    if found == NULL:
        return NULL
    memset(&attr, 0, sizeof(attr))
    attr.flags = MLX5DV_CONTEXT_FLAGS_DEVX
    for i in range(count):
        if strcmp(verbs.get_device_name(found[i]), name) == 0 and mlx5.is_supported(found[i]):
            context = mlx5.open_device(found[i], &attr)
            sys_errno[0] = errno
            break
    verbs.free_device_list(found)
    return context
