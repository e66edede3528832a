/* SPDX-License-Identifier: BSD-3-Clause */
/* Threads that Python has never seen, all on one handle. */
#include <ucx_memh/pyapi.h> /* first, as Python.h wants it */

#include <pthread.h>
#include <string.h>

enum { THREADS = 8, PACKERS = 32 };

static const ucxm_api_t *ucxm;
static const ucxm_python_t *objects;

struct shared {
    ucxm_md_t *md;
    ucxm_memh_t *memh;
    ucxm_ep_t *ep;
    pthread_barrier_t start;
    int ending; /* how many have ended the handle: exactly one invalidates it */
    int odd;    /* statuses that nobody may get */
    int good;
    unsigned char keys[PACKERS][UCXM_KEY_MAX];
    size_t sizes[PACKERS];
    int next;
};

int race_init(void)
{
    ucxm = ucxm_import_api();
    objects = ucxm_import_python();
    return ucxm != NULL && objects != NULL ? 0 : -1;
}

void *race_pointer(PyObject *object, int kind)
{
    return kind == 0   ? (void *)objects->md(object)
           : kind == 1 ? (void *)objects->memh(object)
                       : (void *)objects->ep(object);
}

static void note(struct shared *all, ucxm_status_t status)
{
    int legal = status == UCXM_OK || status == UCXM_ERR_REVOKED || status == UCXM_ERR_CLOSED ||
                status == UCXM_ERR_BUSY || status == UCXM_ERR_REMOTE_ACCESS ||
                status == UCXM_ERR_FLUSHED;

    __atomic_fetch_add(legal ? &all->good : &all->odd, 1, __ATOMIC_RELAXED);
}

static void use(struct shared *all)
{
    unsigned char key[UCXM_KEY_MAX], byte = 0;
    size_t length = sizeof(key);
    ucxm_transfer_t transfer;
    ucxm_memh_t *window;
    ucxm_rkey_t *rkey;
    ucxm_key_info_t info;
    ucxm_status_t status = ucxm->mkey_pack(all->memh, 0, key, &length, NULL);

    note(all, status);
    if (status == UCXM_OK && ucxm->rkey_unpack(all->md, key, length, &rkey, NULL) == UCXM_OK) {
        ucxm->rkey_query(rkey, &info);
        memset(&transfer, 0, sizeof(transfer));
        transfer.struct_size = sizeof(transfer);
        transfer.kind = length % 2 ? UCXM_OP_GET : UCXM_OP_PUT;
        transfer.rkey = rkey;
        transfer.remote_address = info.address;
        transfer.local = &byte;
        transfer.length = 1;
        note(all, ucxm->ep_transfer(all->ep, &transfer, NULL));
        ucxm->rkey_release(rkey);
    }
    status = ucxm->mem_derive(all->memh, 0, 1, UCXM_RIGHTS_ALL, NULL, &window, NULL);
    note(all, status);
    if (status == UCXM_OK)
        ucxm->memh_release(window);
}

static void *user(void *arg)
{
    struct shared *all = arg;

    pthread_barrier_wait(&all->start);
    for (int i = 0; i < 20; i++)
        use(all);
    return NULL;
}

static void *ender(void *arg)
{
    struct shared *all = arg;
    ucxm_status_t status;

    pthread_barrier_wait(&all->start);
    use(all);
    do /* BUSY while another thread's window below it lives */
        status = ucxm->mem_invalidate(all->memh, 0, NULL, NULL);
    while (status == UCXM_ERR_BUSY);
    note(all, status);
    __atomic_fetch_add(&all->ending, status == UCXM_OK, __ATOMIC_RELAXED);
    do
        status = ucxm->mem_dereg(all->memh, 0, NULL, NULL);
    while (status == UCXM_ERR_BUSY);
    note(all, status);
    return NULL;
}

/* Users and two enders on a new handle below `base`.  Returns how many enders invalidated it, or
 * a negative number: of statuses that were none of those a loser may get. */
int race_run(ucxm_md_t *md, ucxm_memh_t *base, ucxm_ep_t *ep)
{
    struct shared all;
    pthread_t threads[THREADS];

    memset(&all, 0, sizeof(all));
    all.md = md;
    all.ep = ep;
    if (ucxm->mem_derive(base, 0, 64, UCXM_RIGHTS_ALL, NULL, &all.memh, NULL) != UCXM_OK)
        return -1000;
    pthread_barrier_init(&all.start, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, i < 2 ? ender : user, &all);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&all.start);
    ucxm->memh_release(all.memh);
    return all.odd ? -all.odd : all.ending;
}

static void *packer(void *arg)
{
    struct shared *all = arg;
    int mine = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);

    all->sizes[mine] = UCXM_KEY_MAX;
    pthread_barrier_wait(&all->start);
    note(all, ucxm->mkey_pack(all->memh, 0, all->keys[mine], &all->sizes[mine], NULL));
    return NULL;
}

/* The first pack of a handle, by 32 threads at once: 0 if all got the same bytes. */
int race_first_pack(ucxm_memh_t *base)
{
    static struct shared all;
    pthread_t threads[PACKERS];
    int different = 0;

    memset(&all, 0, sizeof(all));
    if (ucxm->mem_derive(base, 0, 64, UCXM_RIGHTS_ALL, NULL, &all.memh, NULL) != UCXM_OK)
        return -1;
    pthread_barrier_init(&all.start, NULL, PACKERS);
    for (int i = 0; i < PACKERS; i++)
        pthread_create(&threads[i], NULL, packer, &all);
    for (int i = 0; i < PACKERS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&all.start);
    for (int i = 1; i < PACKERS; i++)
        different +=
            all.sizes[i] != all.sizes[0] || memcmp(all.keys[i], all.keys[0], all.sizes[0]) != 0;
    ucxm->memh_release(all.memh);
    return all.odd ? -all.odd : different;
}
