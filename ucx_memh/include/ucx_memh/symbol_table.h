/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * For backends: vendor libraries are opened at run time, never linked.  A table
 * of function pointers is filled from one library file, each entry by its exact
 * symbol version (NULL where the library has none), and what is missing is
 * remembered by name.
 *
 * A list of symbols is an X-macro; each line is
 *     X(member, "exported_name", "VERSION_1.1", required, return type, arguments)
 * and makes a member of the table and a row of the list.  The exported names
 * are strings because headers like to #define them.
 */
#ifndef UCX_MEMH_SYMBOL_TABLE_H
#define UCX_MEMH_SYMBOL_TABLE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dlvsym */
#endif
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define UCXM_LIBRARY_PATH_MAX   512
#define UCXM_LIBRARY_REASON_MAX 768

/* The first member of every table. */
typedef struct ucxm_library {
    void *handle; /* NULL: not loaded */
    char path[UCXM_LIBRARY_PATH_MAX];
    char reason[UCXM_LIBRARY_REASON_MAX]; /* why it cannot be used; empty: it can */
} ucxm_library_t;

typedef struct ucxm_symbol {
    const char *name;
    const char *version;
    size_t offset; /* of the pointer in the table */
    int required;
} ucxm_symbol_t;

#define UCXM_TABLE_MEMBER(member, name, version, required, type, arguments) type(*member) arguments;
#define UCXM_TABLE_ROW(member, name, version, required, type, arguments) \
    {name, version, offsetof(UCXM_TABLE_TYPE, member), required},

static inline void *ucxm_symbol_get(const void *table, const ucxm_symbol_t *symbol)
{
    void *function;

    memcpy(&function, (const char *)table + symbol->offset, sizeof(function));
    return function;
}

static inline void *ucxm_symbol_find(void *handle, const ucxm_symbol_t *symbol)
{
    if (symbol->version == NULL)
        return dlsym(handle, symbol->name);
    return dlvsym(handle, symbol->name, symbol->version);
}

/* That the library lacks it. */
static inline void ucxm_symbol_lacks(const ucxm_library_t *library, const ucxm_symbol_t *symbol,
                                     char *text, size_t size)
{
    snprintf(text, size, "%s has no %s%s%s", library->path, symbol->name,
             (symbol->version != NULL) ? "@" : "",
             (symbol->version != NULL) ? symbol->version : "");
}

/* Why this one symbol cannot be called, "" if it can. */
static inline void ucxm_symbol_reason(const ucxm_library_t *library, const ucxm_symbol_t *symbol,
                                      char *text, size_t size)
{
    if (library->handle == NULL) {
        snprintf(text, size, "%s", library->reason);
    } else if (ucxm_symbol_get(library, symbol) == NULL) {
        ucxm_symbol_lacks(library, symbol, text, size);
    } else if (size > 0) {
        text[0] = '\0';
    }
}

/* Fills `library`, the head of a zeroed table.  0: usable.  The handle is kept for
 * good, also when a symbol is missing: the library may have started threads. */
static inline int ucxm_library_load(ucxm_library_t *library, const char *path,
                                    const ucxm_symbol_t *symbols, size_t count)
{
    const char *why;
    void *function;
    size_t i;

    library->reason[0] = '\0';
    if (snprintf(library->path, sizeof(library->path), "%s", path) >= (int)sizeof(library->path)) {
        snprintf(library->reason, sizeof(library->reason), "the path is too long");
        return -1;
    }
    library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library->handle == NULL) {
        why = dlerror();
        snprintf(library->reason, sizeof(library->reason), "not loaded: %s",
                 (why != NULL) ? why : path);
        return -1;
    }
    for (i = 0; i < count; ++i) {
        function = ucxm_symbol_find(library->handle, &symbols[i]);
        memcpy((char *)library + symbols[i].offset, &function, sizeof(function));
        if ((function == NULL) && symbols[i].required && (library->reason[0] == '\0')) {
            ucxm_symbol_lacks(library, &symbols[i], library->reason, sizeof(library->reason));
        }
    }
    return (library->reason[0] == '\0') ? 0 : -1;
}

#endif
