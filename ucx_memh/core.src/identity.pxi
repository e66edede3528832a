# SPDX-License-Identifier: BSD-3-Clause
# Who this process is (in its packed keys), and whether it is a forked child.

cdef uint32_t fork_epoch = 1        # one more in each forked child
cdef bint fork_watched = False
cdef ucxm_identity_t own_identity
cdef uint32_t own_identity_epoch = 0


cdef void fork_child() noexcept nogil:
    global fork_epoch
    fork_epoch += 1


cdef uint64_t fnv1a_64(bytes data):
    """The 64-bit FNV-1a hash: what it is fed here is random enough already."""
    cdef uint64_t digest = <uint64_t>0xcbf29ce484222325
    cdef uint8_t byte
    for byte in data:
        digest = (digest ^ byte) * <uint64_t>0x100000001b3
    return digest


def _read_identity():
    """(host, start_time, pid, pid_ns, user_ns) of this process, from /proc.

    The host is a digest of the host's and the boot's ids, so that a key from before a reboot is
    foreign.  What cannot be read is 0; cma refuses to work on such an identity.  Imports nothing:
    by now the process may have become a user who cannot read Python's own files.
    """
    def read(path, parse, default):
        try:
            return parse(path)
        except (OSError, ValueError, IndexError):
            return default

    def text(path):
        with open(path, "rb") as file:
            return file.read().strip()

    def start_time(path):
        # The command's name may hold blanks and brackets: count from the last bracket.
        return int(text(path).rpartition(b")")[2].split()[19])

    def namespace(path):
        return _os.stat(path).st_ino & 0xffffffff

    boot = read("/proc/sys/kernel/random/boot_id", text, b"")
    machine = read("/etc/machine-id", text, b"")
    return (
        fnv1a_64(boot + b"\0" + machine),
        read("/proc/self/stat", start_time, 0),
        _os.getpid(),
        read("/proc/self/ns/pid", namespace, 0),
        read("/proc/self/ns/user", namespace, 0),
    )


cdef int identity_refresh() except -1:
    """Read the identity if this process (or this side of a fork) has not yet."""
    global own_identity, own_identity_epoch, fork_watched
    if not fork_watched:
        if pthread_atfork(NULL, NULL, fork_child) != 0:
            raise MemoryError("pthread_atfork")
        fork_watched = True
    if own_identity_epoch == fork_epoch:
        return 0
    host, start_time, pid, pid_ns, user_ns = _read_identity()
    memset(&own_identity, 0, sizeof(own_identity))
    own_identity.host = host
    own_identity.start_time = start_time
    own_identity.pid = pid
    own_identity.pid_ns = pid_ns
    own_identity.user_ns = user_ns
    own_identity_epoch = fork_epoch
    return 0


cdef ucxm_status_t identity_read() noexcept with gil:
    try:
        identity_refresh()
    except BaseException:
        return UCXM_ERR_NO_MEMORY
    return UCXM_OK


cdef ucxm_status_t identity_self(ucxm_identity_t *identity) noexcept nogil:
    cdef ucxm_status_t status = UCXM_OK
    if own_identity_epoch != fork_epoch:
        status = identity_read() if python_lives() else UCXM_ERR_CLOSED
    identity[0] = own_identity
    return status
