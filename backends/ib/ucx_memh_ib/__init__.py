# SPDX-License-Identifier: BSD-3-Clause
"""RDMA verbs without linking: see the module `verbs`."""
