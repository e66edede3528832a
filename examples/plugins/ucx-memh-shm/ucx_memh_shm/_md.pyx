# SPDX-License-Identifier: BSD-3-Clause
# cython: language_level=3, embedsignature=True
"""The operations: what is registered, what a key is, and what a peer makes of it.

A segment begins with the table of the keys that are good (ucx_memh/windows.h).  The operations
that need nothing but that table are the library's.
"""
from libc.stdio cimport snprintf
from libc.string cimport memcpy
from posix.fcntl cimport O_CLOEXEC, O_NONBLOCK, O_RDONLY, O_RDWR, open
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport SEEK_END, close, lseek

from ucx_memh.core cimport md_attr_init, md_bind
from ucx_memh.libmemh cimport *
from ucx_memh.windows cimport *

HEADER = sizeof(ucxm_windows_t)

cdef struct segment_t:     # a domain's own; in a key as its owner has it; an rkey's
    ucxm_windows_t *table  # where it is mapped: first this, then the memory
    uint64_t base          # ... by its owner
    uint64_t size
    int fd                 # ... of its owner
    uint32_t key


cdef ucxm_status_t mem_reg(void *md, ucxm_registration_t *reg, ucxm_error_t *error) noexcept nogil:
    """Other memory than our own cannot be mapped by peers."""
    cdef segment_t *own = <segment_t *>md
    cdef uint64_t start = reg.address - own.base
    if start < sizeof(ucxm_windows_t) or start > own.size or reg.length > own.size - start:
        return ucxm_refuse(error, UCXM_ERR_INVALID_ADDR, "not in the memory of this domain")
    return ucxm_windows_mem_reg(md, reg, error)


cdef ucxm_status_t mkey_pack(void *md, const ucxm_memh_t *memh, const ucxm_key_slot_t *rma,
                             const ucxm_key_slot_t *atomic, uint8_t *payload, size_t *length,
                             ucxm_error_t *error) noexcept nogil:
    cdef segment_t seg = (<segment_t *>md)[0]
    seg.key = rma.value
    length[0] = sizeof(seg)
    memcpy(payload, &seg, sizeof(seg))
    return UCXM_OK


cdef ucxm_status_t rkey_unpack(void *md, ucxm_rkey_t *rkey, const uint8_t *payload, size_t length,
                               int raw, ucxm_error_t *error) noexcept nogil:
    """Map the owner's segment; to be read only, if the key gives no more."""
    cdef segment_t *seg = <segment_t *>rkey.priv
    cdef bint put = rkey.info.rights & UCXM_MEM_ACCESS_REMOTE_PUT != 0
    cdef char path[40]
    if length == sizeof(segment_t):  # else it stays empty, and has no such range
        memcpy(seg, payload, length)
    cdef uint64_t start = rkey.info.address - seg.base
    if start > seg.size or rkey.info.length > seg.size - start:
        return ucxm_refuse(error, UCXM_ERR_MALFORMED_KEY, "its range is not in its segment")
    snprintf(path, sizeof(path), "/proc/%u/fd/%d", rkey.info.owner.pid, seg.fd)
    cdef int fd = open(path, O_CLOEXEC | O_NONBLOCK | (O_RDWR if put else O_RDONLY))
    if fd < 0 or <uint64_t>lseek(fd, 0, SEEK_END) != seg.size:  # the pid may be another's now
        close(fd)
        return ucxm_refuse(error, UCXM_ERR_PEER_GONE, "its owner has ended, or is not here")
    seg.table = <ucxm_windows_t *>mmap(
        NULL, seg.size, PROT_READ | (PROT_WRITE if put else 0), MAP_SHARED, fd, 0)
    close(fd)
    return UCXM_OK if seg.table != MAP_FAILED else UCXM_ERR_NO_MEMORY


cdef void rkey_release(void *md, ucxm_rkey_t *rkey) noexcept nogil:
    munmap((<segment_t *>rkey.priv).table, (<segment_t *>rkey.priv).size)


cdef ucxm_status_t rkey_ptr(void *md, const ucxm_rkey_t *rkey, uint64_t address, void **ptr,
                            ucxm_error_t *error) noexcept nogil:
    cdef segment_t *seg = <segment_t *>rkey.priv
    cdef ucxm_status_t status = ucxm_windows_check(seg.table, seg.key, error)
    if status == UCXM_OK and not rkey.info.rights & UCXM_MEM_ACCESS_REMOTE_GET:
        return ucxm_refuse(error, UCXM_ERR_ACCESS, "who can write there can read, too")
    if status == UCXM_OK:
        ptr[0] = <char *>seg.table + (address - seg.base)
    return status


cdef ucxm_md_ops_t OPS = ucxm_windows_ops()
OPS.rkey_size = sizeof(segment_t)
OPS.mem_reg = mem_reg
OPS.mkey_pack = mkey_pack
OPS.rkey_unpack = rkey_unpack
OPS.rkey_release = rkey_release
OPS.rkey_ptr = rkey_ptr


cdef class Domain:
    cdef segment_t own


def open_md(file, unsigned char[::1] pages not None):
    """The domain of a file of shared memory that is mapped as `pages`; it keeps both."""
    cdef Domain domain = Domain()
    cdef ucxm_windows_t *table = <ucxm_windows_t *>&pages[0]
    cdef ucxm_md_attr_t attr
    domain.own = segment_t(table, <uint64_t>table, len(pages), file.fileno(), 0)
    md_attr_init(&attr, "shm", "memory", UCXM_MD_FLAG_REG | UCXM_MD_FLAG_NEED_RKEY |
                 UCXM_MD_FLAG_RKEY_PTR | UCXM_MD_FLAG_REG_DERIVED)
    attr.rkey_packed_size = sizeof(segment_t)
    attr.enforcement = ucxm_windows_enforcement()
    return md_bind(&OPS, NULL, &attr, &domain.own, (domain, file, pages))
