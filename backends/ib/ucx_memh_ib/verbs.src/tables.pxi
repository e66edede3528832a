# SPDX-License-Identifier: BSD-3-Clause
# The operations tables, as far as they are this layer's.

cdef void ib_md_ops(ucxm_md_ops_t *ops) noexcept nogil:
    ops.reg_size = sizeof(ib_reg_t)
    ops.rkey_size = sizeof(ib_rkey_t)
    ops.mem_reg = ib_mem_reg
    ops.mem_dereg = ib_mem_dereg
    ops.rkey_unpack = ib_rkey_unpack
    ops.progress = ib_progress
    ops.event_fd = ib_event_fd
    ops.event_arm = ib_event_arm


cdef void ib_ep_ops(ucxm_ep_ops_t *ops) noexcept nogil:
    ops.struct_size = sizeof(ops[0])
    ops.ep_size = sizeof(ib_ep_t)
    ops.ep_create = ib_ep_create
    ops.ep_destroy = ib_ep_destroy
    ops.ep_address = ib_ep_address
    ops.ep_connect = ib_ep_connect
    ops.ep_reset = ib_ep_reset
    ops.ep_state = ib_ep_state
    ops.ep_post = ib_ep_post
