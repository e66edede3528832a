# SPDX-License-Identifier: BSD-3-Clause
# The driver: tables of its functions, one for each library path, and what its errors mean.

cdef struct table_t:
    cu_driver_t cu
    char reason[768]   # why it cannot be used; empty: it can, and has been initialised
    table_t *next

cdef table_t *tables = NULL  # under cu_tables_lock; never freed, the libraries stay loaded


cdef ucxm_status_t driver_status(cu_result_t result) noexcept nogil:
    if result == CU_OUT_OF_MEMORY:
        return UCXM_ERR_NO_MEMORY
    if result == CU_NOT_INITIALIZED or result == CU_DEINITIALIZED or result == CU_NO_DEVICE:
        return UCXM_ERR_NO_DEVICE
    return UCXM_ERR_IO_ERROR


cdef ucxm_status_t driver_failed(cu_driver_t *cu, ucxm_error_t *error, cu_result_t result,
                                 const char *call) noexcept nogil:
    """Say which call failed and how; the driver's number is the syndrome."""
    cdef const char *name = NULL
    if error != NULL:
        error.syndrome = <uint32_t>result
        if cu.error_name(result, &name) != CU_SUCCESS or name == NULL:
            name = b"an error that the driver has no name for"
        snprintf(error.text, sizeof(error.text), "%s: %s (%d)", call, name, result)
    return driver_status(result)


cdef void driver_begin(table_t *table) noexcept nogil:
    """Look at the version before anything that an older driver might do otherwise."""
    cdef cu_driver_t *cu = &table.cu
    cdef ucxm_error_t error
    cdef int version = 0
    cdef cu_result_t result = cu.driver_version(&version)
    table.reason[0] = 0
    error.text[0] = 0
    if result != CU_SUCCESS:
        driver_failed(cu, &error, result, "cuDriverGetVersion")
    elif version < CU_VERSION_NEEDED:
        cu_too_old(cu.library.path, version, table.reason, sizeof(table.reason))
        return
    else:
        result = cu.init(0)
        if result != CU_SUCCESS:
            driver_failed(cu, &error, result, "cuInit")
    if error.text[0] != 0:
        snprintf(table.reason, sizeof(table.reason), "%s: %s", cu.library.path, error.text)


cdef table_t *table_of(const char *path) noexcept nogil:
    """The table for `path`, which says itself whether it can be used; NULL: memory is out.
    cu_tables_lock is held.  What failed the last time is tried anew."""
    global tables
    cdef table_t *table = tables
    while table != NULL and strcmp(table.cu.library.path, path) != 0:
        table = table.next
    if table == NULL:
        table = <table_t *>calloc(1, sizeof(table_t))
        if table == NULL:
            return NULL
        table.next = tables
        tables = table
    if table.cu.library.handle == NULL:
        ucxm_library_load(&table.cu.library, path, cu_symbols, CU_SYMBOL_COUNT)
    if table.cu.library.reason[0] != 0:
        memcpy(table.reason, table.cu.library.reason, sizeof(table.reason))
    else:
        driver_begin(table)
    return table


cdef cu_driver_t *driver_use(str path) except NULL:
    """The driver, initialised; NoDeviceError says why not."""
    cdef bytes name = path.encode()
    cdef const char *c_name = name
    cdef table_t *table
    cdef bytes reason = b""
    with nogil:
        pthread_mutex_lock(&cu_tables_lock)
        table = table_of(c_name)
    if table != NULL:
        reason = table.reason
    pthread_mutex_unlock(&cu_tables_lock)
    if table == NULL:
        raise MemoryError
    if reason:
        raise NoDeviceError(reason.decode(errors="replace"), component="cuda_ipc")
    return &table.cu


def devices(path):
    """How many devices the driver at `path` has.  NoDeviceError: the reason why it has none."""
    cdef cu_driver_t *cu = driver_use(path)
    cdef int count = 0
    cdef ucxm_error_t error
    cdef cu_result_t result
    with nogil:
        result = cu.device_count(&count)
    if result != CU_SUCCESS:
        driver_failed(cu, &error, result, "cuDeviceGetCount")
        raise NoDeviceError(f"{path}: {error.text.decode(errors='replace')}",
                            component="cuda_ipc")
    return count


def is_software(path):
    """Whether the driver, which has been loaded, is one made of software."""
    return driver_use(path).software != NULL


def symbols(path):
    """{symbol: why it cannot be called, or ""}; loads the library."""
    cdef bytes name = path.encode()
    cdef const char *c_name = name
    cdef char text[768]
    cdef table_t *table
    cdef dict found = {}
    cdef size_t i
    with nogil:
        pthread_mutex_lock(&cu_tables_lock)
        table = table_of(c_name)
    try:
        if table == NULL:
            raise MemoryError
        for i in range(CU_SYMBOL_COUNT):
            ucxm_symbol_reason(&table.cu.library, &cu_symbols[i], text, sizeof(text))
            found[cu_symbols[i].name.decode()] = text.decode(errors="replace")
    finally:
        pthread_mutex_unlock(&cu_tables_lock)
    return found
