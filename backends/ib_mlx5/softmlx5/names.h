/* SPDX-License-Identifier: BSD-3-Clause */
/* Tables behind the *_str and rate functions. */
#ifndef SOFTMLX5_NAMES_H
#define SOFTMLX5_NAMES_H

#include <infiniband/verbs.h>

const char *sm_wc_status_str(enum ibv_wc_status s);
const char *sm_node_type_str(enum ibv_node_type t);
const char *sm_port_state_str(enum ibv_port_state s);
const char *sm_event_type_str(enum ibv_event_type e);
int sm_rate_to_mult(enum ibv_rate r);
enum ibv_rate sm_mult_to_rate(int mult);
int sm_rate_to_mbps(enum ibv_rate r);
enum ibv_rate sm_mbps_to_rate(int mbps);

#endif
