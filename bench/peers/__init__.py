# SPDX-License-Identifier: BSD-3-Clause
"""The same steps with other libraries, in turns with ours; `python -m bench.peers`.

Each peer is installed into a venv of its own and runs in a process of its own, for two copies of
UCX in one process get in each other's way.
"""
