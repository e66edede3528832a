# SPDX-License-Identifier: BSD-3-Clause
"""An owner and its peers, each a process, on memory windows."""

from _processes import *  # noqa: F403
