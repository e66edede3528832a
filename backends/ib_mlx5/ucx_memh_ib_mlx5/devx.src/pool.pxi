# SPDX-License-Identifier: BSD-3-Clause
# Keys without commands: mlx5dv_create_mkey makes one once, a work request on the control queue pair
# aims it (BIND_MW) and another one ends it (LOCAL_INV), again and again.
#
# A free key is used first in, first out, with the next tag each time.  One whose tags are used up
# rests: it stays in the device, free, so that its index is not offered again, until as many keys
# have ended as the quarantine is long.  The device so holds as many keys as were ever live at a
# time and, for the rest, one for each TAGS destructions in the quarantine.  Free ones are given
# back when it has no other left for a key that a command makes, and when the domain is closed.
#
# The wire lock belongs to whoever posts, polls or makes the queue pair anew, and may be held long.
# The lock inside it guards the lists.  None is held while somebody's completion runs.

cdef enum:
    KEY_FREE = 0         # the device lets nobody through
    KEY_AIMED = 1
    KEY_ENDING = 2       # its LOCAL_INV lies, or is under way
    KEY_LOST = 3         # nobody knows: only its destruction is left
    SHRINK = 64          # keys given back at a time


# ---- lists ----

cdef void list_add(key_list_t *keys, key_t *key) noexcept nogil:
    key.next = NULL
    if keys.tail == NULL:
        keys.head = key
    else:
        keys.tail.next = key
    keys.tail = key
    ib_store32(&keys.count, keys.count + 1)


cdef key_t *list_take(key_list_t *keys) noexcept nogil:
    """The oldest one, or NULL."""
    cdef key_t *key = keys.head
    if key != NULL:
        keys.head = key.next
        if keys.head == NULL:
            keys.tail = NULL
        ib_store32(&keys.count, keys.count - 1)
    return key


cdef void pool_add(pool_t *pool, key_list_t *keys, key_t *key) noexcept nogil:
    pthread_mutex_lock(&pool.lock)
    list_add(keys, key)
    pthread_mutex_unlock(&pool.lock)


cdef key_t *pool_take(pool_t *pool, key_list_t *keys) noexcept nogil:
    cdef key_t *key
    pthread_mutex_lock(&pool.lock)
    key = list_take(keys)
    pthread_mutex_unlock(&pool.lock)
    return key


# ---- making and destroying ----

cdef key_t *pool_create(md_t *md, ucxm_error_t *error, ucxm_status_t *status) noexcept nogil:
    """One more, free; NULL: `status` and `error` say why not."""
    cdef key_t *key = create_free_mkey(md, error, status)
    if key != NULL:
        key.tag = next_tag(md)
        key.state = KEY_FREE
    return key


cdef void pool_destroy(md_t *md, key_t *key) noexcept nogil:
    """One that nobody else has; if the device does not let go of it now, then later."""
    key.state = KEY_LOST
    if destroy_mkey(md, key, NULL) == UCXM_OK:
        free(key)
    else:
        pool_add(&md.pool, &md.pool.stuck, key)


cdef void pool_destroy_all(md_t *md, key_list_t *keys) noexcept nogil:
    """Each is tried once."""
    cdef uint32_t left = ib_load32(&keys.count)
    cdef key_t *key
    while left != 0:
        left -= 1
        key = pool_take(&md.pool, keys)
        if key != NULL:
            pool_destroy(md, key)


cdef bint pool_shrink(md_t *md) noexcept nogil:
    """The device is short of keys, or of memory for them: give back some that nobody uses.  False:
    there are none."""
    cdef uint32_t before = ib_load32(&md.pool.free.count)
    cdef uint32_t left = min(before, <uint32_t>SHRINK)
    cdef key_t *key = NULL
    while left != 0:
        left -= 1
        key = pool_take(&md.pool, &md.pool.free)
        if key == NULL:
            break
        pool_destroy(md, key)
    return before != 0


cdef void pool_unstick(md_t *md) noexcept nogil:
    """Try one again: however many there are, a derive costs one command more."""
    cdef key_t *key
    if ib_load32(&md.pool.stuck.count) != 0:
        key = pool_take(&md.pool, &md.pool.stuck)
        if key != NULL:
            pool_destroy(md, key)


cdef key_t *pool_get(md_t *md, ucxm_error_t *error, ucxm_status_t *status) noexcept nogil:
    """A free key: the one that has been so longest, one that has rested, or a new one."""
    cdef pool_t *pool = &md.pool
    cdef key_t *key
    pthread_mutex_lock(&pool.lock)
    key = list_take(&pool.free)
    if key == NULL and pool.resting.head != NULL and (
            pool.told >= pool.resting.head.rest + pool.quarantine):
        key = list_take(&pool.resting)
        key.uses = 0
    pthread_mutex_unlock(&pool.lock)
    return key if key != NULL else pool_create(md, error, status)


cdef void pool_put(pool_t *pool, key_t *key) noexcept nogil:
    """It is free again.  The lock is held."""
    key.state = KEY_FREE
    ib_store32(&pool.used, pool.used - 1)
    if key.uses == TAGS and pool.quarantine >= <uint32_t>TAGS:
        key.rest = pool.ended
        list_add(&pool.resting, key)
    else:
        list_add(&pool.free, key)
