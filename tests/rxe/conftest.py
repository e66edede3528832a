# SPDX-License-Identifier: BSD-3-Clause
"""Tests that need rxe0; tools/guest/run.py tells them that they are where it is."""

import os

collect_ignore_glob = [] if "UCX_MEMH_GUEST" in os.environ else ["test_*.py"]
