# SPDX-License-Identifier: BSD-3-Clause
"""Runs the benches and writes docs/bench.md, docs/bench.json and two pictures beside them."""
