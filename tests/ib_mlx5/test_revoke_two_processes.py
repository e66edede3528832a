# SPDX-License-Identifier: BSD-3-Clause
"""An owner and its peers, each a process, on mlx5's keys."""

from _processes import *  # noqa: F403
