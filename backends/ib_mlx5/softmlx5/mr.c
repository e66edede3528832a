/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory regions, windows and umems: what the kernel driver does before a key exists.
 *
 * Pages are faulted in, not locked: the device reaches them through the owner's page tables, so
 * that nothing here depends on where they are. What the kernel refuses to pin is refused all the
 * same.
 */
#include "internal.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

enum { PAGE = 4096 };

static uint64_t page_floor(uint64_t a)
{
    return a & ~(uint64_t)(PAGE - 1);
}

static uint64_t pages_of(uint64_t addr, uint64_t len)
{
    return (page_floor(addr + len - 1) - page_floor(addr)) / PAGE + 1;
}

/* ---- RLIMIT_MEMLOCK -------------------------------------------------------------------------- */

static _Atomic uint64_t pinned_pages;

static bool may_pin_freely(void)
{
    struct __user_cap_header_struct h = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct d[2] = {{0}};

    if (atomic_load(&sm_config.memlock_enforce))
        return false;
    if (syscall(SYS_capget, &h, d))
        return false;
    return d[CAP_IPC_LOCK / 32].effective >> (CAP_IPC_LOCK % 32) & 1;
}

static int pin_account(uint64_t pages)
{
    uint64_t now = atomic_fetch_add(&pinned_pages, pages) + pages;
    struct rlimit lim;

    if (may_pin_freely() || getrlimit(RLIMIT_MEMLOCK, &lim) || lim.rlim_cur == RLIM_INFINITY ||
        now <= lim.rlim_cur / PAGE)
        return 0;
    atomic_fetch_sub(&pinned_pages, pages);
    return ENOMEM;
}

static void pin_unaccount(uint64_t pages)
{
    atomic_fetch_sub(&pinned_pages, pages);
}

/* ---- shared file mappings --------------------------------------------------------------------
 * A long-term pin for writing is refused where the file system must see pages become dirty. */

/* From linux/fs.h of 6.11; Debian 12's headers are older than the running kernel may be. */
struct procmap_query {
    uint64_t size, query_flags, query_addr;
    uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
    uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
    uint64_t vma_name_addr, build_id_addr;
};
#define PROCMAP_QUERY_IOCTL _IOWR('f', 17, struct procmap_query)
enum { PMQ_SHARED = 0x08, PMQ_COVERING_OR_NEXT = 0x10, PMQ_FILE_BACKED = 0x20 };

static bool is_memory_fs(long type)
{
    return type == TMPFS_MAGIC || type == HUGETLBFS_MAGIC || type == RAMFS_MAGIC;
}

/* The kernel's own shmem and hugetlb mounts (memfd, SYSV, shared anonymous memory) have no path
 * that one could ask; their device number is that of any memfd. */
static bool is_kernel_memory_dev(dev_t dev)
{
    const unsigned kinds[] = {MFD_CLOEXEC, MFD_CLOEXEC | MFD_HUGETLB};
    bool same = false;

    for (size_t i = 0; i < ARRAY_SIZE(kinds) && !same; i++) {
        int fd = memfd_create("softmlx5", kinds[i]);
        struct stat st;

        same = fd >= 0 && !fstat(fd, &st) && st.st_dev == dev;
        if (fd >= 0)
            close(fd);
    }
    return same;
}

static bool is_memory_mapping(dev_t dev, const char *path)
{
    struct statfs sfs;
    struct stat st;

    if (is_kernel_memory_dev(dev))
        return true;
    if (*path == '/' && !stat(path, &st) && st.st_dev == dev && !statfs(path, &sfs))
        return is_memory_fs(sfs.f_type);
    /* A deleted file: its device may still be known by the usual tmpfs. */
    return !stat("/dev/shm", &st) && st.st_dev == dev && !statfs("/dev/shm", &sfs) &&
           is_memory_fs(sfs.f_type);
}

/* 0 = none in range, EFAULT = there is one, ENOTTY = this kernel cannot be asked. */
static int shared_file_by_ioctl(int fd, uint64_t addr, uint64_t end)
{
    char name[1024];

    while (addr < end) {
        struct procmap_query q = {
            .size = sizeof(q),
            .query_flags = PMQ_SHARED | PMQ_COVERING_OR_NEXT | PMQ_FILE_BACKED,
            .query_addr = addr,
            .vma_name_size = sizeof(name),
            .vma_name_addr = (uintptr_t)name,
        };

        if (ioctl(fd, PROCMAP_QUERY_IOCTL, &q))
            return errno == ENOENT ? 0 : ENOTTY;
        if (q.vma_start >= end)
            return 0;
        if (!q.vma_name_size)
            name[0] = 0;
        if (!is_memory_mapping(makedev(q.dev_major, q.dev_minor), name))
            return EFAULT;
        addr = q.vma_end;
    }
    return 0;
}

static int shared_file_by_text(int fd, uint64_t addr, uint64_t end)
{
    FILE *f = fdopen(dup(fd), "re");
    char *line = NULL;
    size_t cap = 0;
    int rc = 0;

    while (f && !rc && getline(&line, &cap, f) > 0) {
        unsigned long from, to, off, inode;
        unsigned major, minor;
        char perms[5];
        int path_at = 0;

        if (sscanf(line, "%lx-%lx %4s %lx %x:%x %lu %n", &from, &to, perms, &off, &major, &minor,
                   &inode, &path_at) < 7)
            continue;
        if (from >= end)
            break;
        if (to <= addr || perms[3] != 's' || !inode)
            continue;
        line[strcspn(line, "\n")] = 0;
        if (!is_memory_mapping(makedev(major, minor), line + path_at))
            rc = EFAULT;
    }
    free(line);
    if (f)
        fclose(f);
    return rc;
}

static int refuse_shared_file(uint64_t addr, uint64_t len)
{
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), rc;

    if (fd < 0)
        return 0; /* no /proc: nothing that we could tell apart */
    rc = shared_file_by_ioctl(fd, addr, addr + len);
    if (rc == ENOTTY)
        rc = shared_file_by_text(fd, addr, addr + len);
    close(fd);
    return rc;
}

/* ---- faulting in ----------------------------------------------------------------------------- */

/* Before 5.14: read one byte of each page through the kernel, which answers instead of killing. */
static int touch_pages(uint64_t first, uint64_t bytes)
{
    for (uint64_t a = first; a < first + bytes; a += PAGE) {
        char c;
        struct iovec mine = {&c, 1}, page = {(void *)(uintptr_t)a, 1};

        if (process_vm_readv(getpid(), &mine, 1, &page, 1, 0) != 1)
            return EFAULT;
    }
    return 0;
}

static bool populate_known(void)
{
    static _Alignas(PAGE) char page[PAGE];

    return !madvise(page, PAGE, MADV_POPULATE_READ);
}

int sm_pin_pages(uint64_t addr, uint64_t len, bool write)
{
    uint64_t first = page_floor(addr), bytes = pages_of(addr, len) * PAGE;
    int advice = write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;

    if (write && refuse_shared_file(first, bytes))
        return EFAULT;
    while (madvise((void *)(uintptr_t)first, bytes, advice)) {
        if (errno == EINTR || errno == EAGAIN)
            continue;
        return populate_known() ? EFAULT : touch_pages(first, bytes);
    }
    return 0;
}

bool sm_word_writable(uint64_t addr)
{
    uint64_t v;
    struct iovec mine = {&v, sizeof(v)}, word = {(void *)(uintptr_t)addr, sizeof(v)};

    if (!madvise((void *)(uintptr_t)page_floor(addr), PAGE, MADV_POPULATE_WRITE))
        return true;
    return !populate_known() &&
           process_vm_readv(getpid(), &mine, 1, &word, 1, 0) == (ssize_t)sizeof(v);
}

/* ---- memory regions -------------------------------------------------------------------------- */

enum {
    KNOWN_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
        IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_HUGETLB,
    WRITING_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC |
        IBV_ACCESS_MW_BIND,
    /* ibv_reg_dmabuf_mr(3): no other flags are supported, and no window can be bound to it. */
    DMABUF_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
        IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_RELAXED_ORDERING,
};

static int check_access(unsigned access)
{
    if (access & (IBV_ACCESS_ON_DEMAND | IBV_ACCESS_ZERO_BASED))
        return EOPNOTSUPP;
    /* Optional flags are hints by definition: unknown ones are ignored. */
    if (access & ~(KNOWN_ACCESS | IBV_ACCESS_OPTIONAL_RANGE))
        return EINVAL;
    if ((access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) &&
        !(access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    return 0;
}

static uint8_t rights_of(unsigned access)
{
    uint8_t r = SM_LR;

    if (access & IBV_ACCESS_LOCAL_WRITE)
        r |= SM_LW;
    if (access & IBV_ACCESS_REMOTE_READ)
        r |= SM_RR;
    if (access & IBV_ACCESS_REMOTE_WRITE)
        r |= SM_RW;
    if (access & IBV_ACCESS_REMOTE_ATOMIC)
        r |= SM_A;
    return r;
}

static void mr_free(struct sm_mr *mr)
{
    if (mr->map)
        munmap(mr->map, mr->map_len);
    pin_unaccount(mr->pages);
    free(mr);
}

static int mr_check_and_pin(struct sm_mr *mr, uint64_t addr, uint64_t length, uint64_t iova,
                            unsigned access)
{
    int rc = sm_fault_errno("reg_mr");

    if (!rc)
        rc = check_access(access);
    if (rc)
        return rc;
    if (!length || addr + length < addr || iova + length < iova ||
        addr + length > UINT64_MAX - PAGE || (addr ^ iova) % PAGE)
        return EINVAL;
    rc = pin_account(pages_of(addr, length));
    if (rc)
        return rc;
    mr->pages = pages_of(addr, length);
    return sm_pin_pages(addr, length, access & WRITING_ACCESS);
}

static int mr_make_key(struct sm_mr *mr, struct ibv_pd *pd, uint64_t addr, uint64_t length,
                       uint64_t iova, unsigned access)
{
    struct sm_mkey_desc d = {
        .kind = SM_KIND_MR,
        .mode = SM_MODE_MTT,
        .rights = rights_of(access),
        .mw_bind = access & IBV_ACCESS_MW_BIND,
        .pdn = to_pd(pd)->pdn,
        .qpn = SM_ANY_QPN,
        .start = iova,
        .len = length,
        .base = addr,
    };
    uint32_t key;
    int rc = sm_mkey_create(to_ctx(pd->context), &d, &key);

    if (rc)
        return rc;
    mr->mr = (struct ibv_mr){
        .context = pd->context,
        .pd = pd,
        .addr = (void *)(uintptr_t)addr,
        .length = length,
        .handle = key >> 8,
        .lkey = key,
        .rkey = key,
    };
    atomic_fetch_add(&to_pd(pd)->users, 1);
    STAT_INC(mrs_live);
    return 0;
}

static struct ibv_mr *mr_finish(struct sm_mr *mr, struct ibv_pd *pd, uint64_t addr, uint64_t length,
                                uint64_t iova, unsigned access)
{
    int rc = mr_check_and_pin(mr, addr, length, iova, access);

    if (!rc)
        rc = mr_make_key(mr, pd, addr, length, iova, access);
    if (rc) {
        mr_free(mr);
        errno = rc;
        return NULL;
    }
    return &mr->mr;
}

struct ibv_mr *sm_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                         unsigned access)
{
    struct sm_mr *mr;

    STAT_CMD(cmd_reg_mr);
    sm_command_delay();
    mr = calloc(1, sizeof(*mr));
    if (!mr)
        return NULL;
    return mr_finish(mr, pd, (uintptr_t)addr, length, iova, access);
}

/* Any descriptor that can be mapped stands in for a dmabuf; a memfd, usually. */
struct ibv_mr *sm_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                                int fd, int access)
{
    uint64_t slack = offset % PAGE;
    int prot = PROT_READ | (access & WRITING_ACCESS ? PROT_WRITE : 0);
    struct sm_mr *mr;
    struct stat st;

    STAT_CMD(cmd_reg_mr);
    sm_command_delay();
    if (fstat(fd, &st))
        return NULL; /* EBADF */
    if (access & ~DMABUF_ACCESS) {
        errno = EINVAL;
        return NULL;
    }
    if (!length || offset + length < offset || offset + length > (uint64_t)st.st_size) {
        errno = EINVAL;
        return NULL;
    }
    mr = calloc(1, sizeof(*mr));
    if (!mr)
        return NULL;
    mr->map_len = length + slack;
    mr->map = mmap(NULL, mr->map_len, prot, MAP_SHARED, fd, (off_t)(offset - slack));
    if (mr->map == MAP_FAILED) {
        int err = errno;

        free(mr);
        errno = err == ENODEV ? EINVAL : err;
        return NULL;
    }
    return mr_finish(mr, pd, (uintptr_t)mr->map + slack, length, iova, (unsigned)access);
}

int sm_dereg_mr(struct ibv_mr *ibmr)
{
    struct sm_mr *mr = container_of(ibmr, struct sm_mr, mr);
    struct sm_pd *pd = to_pd(ibmr->pd);
    int rc;

    STAT_CMD(cmd_dereg_mr);
    sm_command_delay();
    rc = sm_fault_errno("dereg_mr");
    if (!rc)
        rc = sm_mkey_destroy(to_ctx(ibmr->context), ibmr->lkey);
    if (rc)
        return rc;
    mr_free(mr);
    atomic_fetch_sub(&pd->users, 1);
    STAT_DEC(mrs_live);
    return 0;
}

/* ---- windows --------------------------------------------------------------------------------- */

/* As the kernel does it: an index that comes back has another key. */
static _Atomic uint8_t next_variant;

struct ibv_mw *sm_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
    struct sm_mkey_desc d = {
        .kind = type == IBV_MW_TYPE_1 ? SM_KIND_MW1 : SM_KIND_MW2,
        .mode = SM_MODE_KLM,
        .rights = SM_LR,
        .free = true,
        .umr_en = true,
        .rinval = type == IBV_MW_TYPE_2,
        .variant = atomic_fetch_add(&next_variant, 1),
        .pdn = to_pd(pd)->pdn,
        .qpn = SM_ANY_QPN,
        .cap = 4,
    };
    struct ibv_mw *mw;
    uint32_t key;
    int rc;

    rc = !sm_ctx_alive(to_ctx(pd->context))               ? EIO
         : type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2 ? EINVAL
                                                          : 0;
    if (rc) {
        errno = rc;
        return NULL;
    }
    mw = calloc(1, sizeof(*mw));
    d.ent = calloc(d.cap, sizeof(*d.ent));
    rc = mw && d.ent ? sm_mkey_create(to_ctx(pd->context), &d, &key) : ENOMEM;
    if (rc) {
        free(mw);
        free(d.ent);
        errno = rc;
        return NULL;
    }
    *mw = (struct ibv_mw){pd->context, pd, key, key >> 8, type};
    atomic_fetch_add(&to_pd(pd)->users, 1);
    return mw;
}

int sm_dealloc_mw(struct ibv_mw *mw)
{
    int rc;

    if (!sm_ctx_alive(to_ctx(mw->context)))
        return EIO;
    /* By the handle: a type-2 window that was rebound has a key that only its last binder knows. */
    rc = sm_mkey_destroy(to_ctx(mw->context), mw->handle << 8);
    if (rc)
        return rc;
    atomic_fetch_sub(&to_pd(mw->pd)->users, 1);
    free(mw);
    return 0;
}

/* ---- umems ----------------------------------------------------------------------------------- */

struct mlx5dv_devx_umem *sm_umem_reg(struct ibv_context *c, void *addr, size_t size,
                                     uint32_t access)
{
    struct sm_ctx *ctx = to_ctx(c);
    uint64_t a = (uintptr_t)addr, pages;
    struct sm_umem *u;
    int rc = 0;

    STAT_CMD(cmd_umem_reg);
    rc = sm_fault_errno("umem_reg");
    if (!rc && (!size || a + size < a || (access & ~(uint32_t)KNOWN_ACCESS)))
        rc = EINVAL;
    if (!rc) {
        pages = pages_of(a, size);
        rc = pin_account(pages);
    }
    if (rc) {
        errno = rc;
        return NULL;
    }
    rc = sm_pin_pages(a, size, access & WRITING_ACCESS);
    u = rc ? NULL : calloc(1, sizeof(*u));
    if (!u) {
        pin_unaccount(pages);
        errno = rc ? rc : ENOMEM;
        return NULL;
    }
    u->ctx = ctx;
    u->addr = a;
    u->len = size;
    u->pages = pages;
    u->writable = access & WRITING_ACCESS;
    pthread_mutex_lock(&ctx->lock);
    u->umem.umem_id = ++ctx->next_umem;
    list_add(&ctx->umems, &u->link);
    ctx->nobj++;
    pthread_mutex_unlock(&ctx->lock);
    return &u->umem;
}

int sm_umem_dereg(struct mlx5dv_devx_umem *umem)
{
    struct sm_umem *u = container_of(umem, struct sm_umem, umem);
    struct sm_ctx *ctx = u->ctx;

    if (!sm_ctx_alive(ctx))
        return EIO;
    pthread_mutex_lock(&ctx->lock);
    if (atomic_load(&u->users)) {
        pthread_mutex_unlock(&ctx->lock);
        return EBUSY;
    }
    list_del(&u->link);
    ctx->nobj--;
    pthread_mutex_unlock(&ctx->lock);
    pin_unaccount(u->pages);
    free(u);
    return 0;
}

struct sm_umem *sm_umem_get(struct sm_ctx *ctx, uint32_t id)
{
    struct sm_umem *found = NULL;
    struct list *l;

    pthread_mutex_lock(&ctx->lock);
    list_for_each (l, &ctx->umems) {
        struct sm_umem *u = container_of(l, struct sm_umem, link);

        if (u->umem.umem_id == id)
            found = u;
    }
    if (found)
        atomic_fetch_add(&found->users, 1);
    pthread_mutex_unlock(&ctx->lock);
    return found;
}

void sm_umem_put(struct sm_umem *u)
{
    atomic_fetch_sub(&u->users, 1);
}
