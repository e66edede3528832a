# SPDX-License-Identifier: BSD-3-Clause
"""Holds libsoftmlx5.so, the software device: a C library, not a Python module."""
