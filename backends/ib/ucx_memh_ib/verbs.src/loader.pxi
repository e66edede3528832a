# SPDX-License-Identifier: BSD-3-Clause
# Tables of libraries' functions, one for each library path.

cdef struct table_t:
    ucxm_verbs_t verbs
    table_t *next

cdef table_t *tables = NULL  # under ib_tables_lock; never freed, the libraries stay loaded


cdef ucxm_verbs_t *table_find(const char *path) noexcept nogil:
    """The entry for `path`, loaded or not; NULL if memory is out.  The lock is held."""
    global tables
    cdef table_t *table = tables
    while table != NULL:
        if strcmp(table.verbs.library.path, path) == 0:
            break
        table = table.next
    if table == NULL:
        table = <table_t *>calloc(1, sizeof(table_t))
        if table == NULL:
            return NULL
        table.next = tables
        tables = table
    if table.verbs.library.handle == NULL:  # not tried yet, or not there the last time
        ucxm_library_load(&table.verbs.library, path, ucxm_verbs_symbols,
                          UCXM_VERBS_SYMBOL_COUNT)
    return &table.verbs


cdef ucxm_verbs_t *verbs_table(const char *path, ucxm_error_t *error) noexcept nogil:
    cdef ucxm_verbs_t *verbs
    pthread_mutex_lock(&ib_tables_lock)
    verbs = table_find(path)
    if verbs == NULL:
        ib_fail(error, UCXM_ERR_NO_MEMORY, ENOMEM, "out of memory")
    elif verbs.library.reason[0] != 0:
        ib_fail(error, UCXM_ERR_NO_DEVICE, 0, "%s", verbs.library.reason)
        verbs = NULL
    pthread_mutex_unlock(&ib_tables_lock)
    return verbs


def library_status(path="libibverbs.so.1"):
    """Load the library and tell what cannot be used.

    Returns (reason, {symbol: reason}); an empty reason means that it can be used.
    """
    cdef bytes name = path.encode()
    cdef char text[768]
    cdef ucxm_verbs_t *verbs
    cdef size_t i
    pthread_mutex_lock(&ib_tables_lock)
    try:
        verbs = table_find(PyBytes_AS_STRING(name))
        if verbs == NULL:
            raise MemoryError
        symbols = {}
        for i in range(UCXM_VERBS_SYMBOL_COUNT):
            ucxm_symbol_reason(&verbs.library, &ucxm_verbs_symbols[i], text, sizeof(text))
            symbols[ucxm_verbs_symbols[i].name.decode()] = text.decode(errors="replace")
        return verbs.library.reason.decode(errors="replace"), symbols
    finally:
        pthread_mutex_unlock(&ib_tables_lock)


cdef struct one_symbol_t:
    ucxm_library_t library
    void *function


def symbol_reason(path, name, version):
    """Why `name` at exactly `version` cannot be called in the library `path`; "" if it can.

    Loads the library anew, beside the shared tables.
    """
    cdef bytes path_bytes = path.encode()
    cdef bytes name_bytes = name.encode()
    cdef bytes version_bytes = version.encode()
    cdef one_symbol_t table
    cdef ucxm_symbol_t symbol
    cdef char text[768]
    memset(&table, 0, sizeof(table))
    memset(&symbol, 0, sizeof(symbol))
    symbol.name = name_bytes
    symbol.version = version_bytes
    symbol.offset = sizeof(ucxm_library_t)
    symbol.required = 1
    ucxm_library_load(&table.library, path_bytes, &symbol, 1)
    ucxm_symbol_reason(&table.library, &symbol, text, sizeof(text))
    return text.decode(errors="replace")


def is_software(path):
    """A software device has a control surface, whatever name it was found under."""
    return not symbol_reason(path, "softmlx5_stat", "SOFTMLX5_1.0")


def devices(path="libibverbs.so.1"):
    """The names and guids of the library's devices: [(name, guid)].  OSError if it cannot load."""
    cdef bytes name = path.encode()
    cdef ucxm_error_t error
    cdef ucxm_verbs_t *verbs
    cdef ibv_device **found
    cdef int i, count = 0
    memset(&error, 0, sizeof(error))
    verbs = verbs_table(PyBytes_AS_STRING(name), &error)
    if verbs == NULL:
        raise OSError(error.text.decode(errors="replace"))
    found = verbs.get_device_list(&count)
    if found == NULL:
        return []
    names = []
    try:
        for i in range(count):
            names.append((verbs.get_device_name(found[i]).decode(),
                          ib_be64(verbs.get_device_guid(found[i]))))
        return names
    finally:
        verbs.free_device_list(found)
