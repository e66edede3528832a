# SPDX-License-Identifier: BSD-3-Clause
"""What the shortest calls cost, beside what they cannot cost less than: `make hotpath`."""
