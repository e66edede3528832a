# SPDX-License-Identifier: BSD-3-Clause
# What errno and completion statuses mean.

cdef ucxm_status_t ib_errno_status(int sys_errno) noexcept nogil:
    if sys_errno == ENOMEM:
        return UCXM_ERR_NO_MEMORY
    if sys_errno == EAGAIN:
        return UCXM_ERR_NO_RESOURCE
    if sys_errno == EFAULT:
        return UCXM_ERR_INVALID_ADDR
    if sys_errno == EINVAL:
        return UCXM_ERR_INVALID_PARAM
    if sys_errno == EBUSY:
        return UCXM_ERR_BUSY
    if sys_errno in (EOPNOTSUPP, ENOSYS):
        return UCXM_ERR_UNSUPPORTED
    if sys_errno in (EACCES, EPERM):
        return UCXM_ERR_ACCESS
    if sys_errno == ENODEV:
        return UCXM_ERR_NO_DEVICE
    return UCXM_ERR_IO_ERROR


cdef ucxm_status_t call_failed(ucxm_error_t *error, int sys_errno,
                               const char *what) noexcept nogil:
    return ib_fail(error, ib_errno_status(sys_errno), sys_errno, "%s failed (errno %d)", what,
                   sys_errno)


cdef ucxm_status_t reg_failed(ucxm_error_t *error, int sys_errno,
                              const char *what) noexcept nogil:
    """The same for registrations, where two causes are common and not obvious."""
    cdef rlimit limit
    if sys_errno == ENOMEM and getrlimit(RLIMIT_MEMLOCK, &limit) == 0 and (
            limit.rlim_cur != RLIM_INFINITY):
        return ib_fail(error, UCXM_ERR_NO_MEMORY, sys_errno,
                       "%s: too much to pin; RLIMIT_MEMLOCK (ulimit -l) is %lu KiB", what,
                       limit.rlim_cur >> 10)
    if sys_errno == EFAULT:
        return ib_fail(error, UCXM_ERR_INVALID_ADDR, sys_errno,
                       "%s: not mapped, or read-only and to be written", what)
    return call_failed(error, sys_errno, what)


cdef ucxm_status_t wc_status(const ib_ep_t *ep, int status) noexcept nogil:
    """What a completion's status means for an operation."""
    if status == IBV_WC_SUCCESS:
        return UCXM_OK
    if status == IBV_WC_WR_FLUSH_ERR:
        return UCXM_ERR_FLUSHED
    if status in (IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR):
        return UCXM_ERR_REMOTE_ACCESS
    if status in (IBV_WC_RETRY_EXC_ERR, IBV_WC_RESP_TIMEOUT_ERR):
        # The device says the same for both: nobody answers.
        return UCXM_ERR_PEER_GONE if ep.proved else UCXM_ERR_UNREACHABLE
    if status == IBV_WC_RNR_RETRY_EXC_ERR:
        return UCXM_ERR_UNREACHABLE
    return UCXM_ERR_IO_ERROR
