# SPDX-License-Identifier: BSD-3-Clause
"""What runs in a peer's process, by the peer's own Python: it imports nothing else of ours."""
