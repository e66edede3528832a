# SPDX-License-Identifier: BSD-3-Clause
"""Windows that are revoked in the middle of a copy, which only the software device can stop."""

from _gated import *  # noqa: F403
