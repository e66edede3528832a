/* SPDX-License-Identifier: BSD-3-Clause */
/* Control surface of softmlx5, the software mlx5 device. For tests and tools only: a program that
 * drives the device through the verbs ABI needs nothing from here. Version node: SOFTMLX5_1.0.
 */
#ifndef SOFTMLX5_H
#define SOFTMLX5_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Value of a counter of this process, UINT64_MAX when the name is unknown.
 *
 *   cmd.<name>      commands executed, refused ones included; cmd.total is their sum
 *   wr.<name>       work requests that the send queues accepted
 *   chunks          chunks of at most 256 KiB (128 KiB on the slow path) that a responder of this
 *                   process has begun
 *   naks            remote errors that a responder of this process reported
 *   path.vm / path.socket / path.loop
 *                   connections to this process's responders that move data by process_vm_*, by the
 *                   bounce buffers of the shared memory, or that stay inside one process
 *   mkeys.live mrs.live qps.live cqs.live pds.live contexts.live flows.live
 *   gate.waiting    1 while a responder is stopped in a gated chunk
 *   last.status / last.syndrome
 *                   firmware answer to the last refused command (DESTROY_MKEY has no mailbox)
 */
uint64_t softmlx5_stat(const char *name);

/* Writes the counter names, newline-separated and NUL-terminated, into buf and returns the size
 * that this takes, the NUL included. Truncated when size is smaller. */
int softmlx5_stat_names(char *buf, size_t size);

/* Injects faults; "" clears all. Returns 0, or EINVAL when the text makes no sense (nothing
 * changes).
 *
 *   spec    := item { ';' item }
 *   item    := command ':' key '=' value { ',' key '=' value }
 *   command := create_mkey | destroy_mkey | query_mkey | query_hca_cap | reg_mr | dereg_mr |
 *              alloc_pd | create_cq | create_qp | modify_qp | umem_reg | bind_mw | local_inv
 *   key     := status, syndrome (firmware answer) | errno (kernel answer) |
 *              after (calls let through first, default 0) | count (calls refused, default 1, 0 =
 * all)
 *
 * Of the two work requests errno is post_send's, and status the completion's, with nothing done;
 * 255: it waits, and what is posted behind it, until the faults are cleared.
 */
int softmlx5_fault(const char *spec);

/* Changes a setting. Returns 0, ENOENT for an unknown name or EINVAL for a bad value.
 *
 *   index_policy    lowest (default: a freed mkey index comes back at once) | fifo | fixed:N
 *   gate            N: a responder stops inside the (N+1)-th chunk from now, its keys held, until
 *                   "open"
 *   path            auto | socket: for connections accepted from now on
 *   memlock         auto | enforce: count RLIMIT_MEMLOCK for root, too
 *   cmd_delay_us    N: every firmware command takes at least this long
 *   <capability>    a PRM name (fixed_buffer_size, umr_modify_atomic_disabled, atomic,
 *                   max_indirection, log_max_klm_list_size ...), "caps." before it is allowed;
 *                   "default" restores it. Reported by later QUERY_HCA_CAPs and enforced.
 */
int softmlx5_set(const char *name, const char *value);

#ifdef __cplusplus
}
#endif

#endif
