# SPDX-License-Identifier: BSD-3-Clause
"""`python -m ucx_memh`."""

import sys

from ucx_memh.cli import main

if __name__ == "__main__":  # peers that are started with spawn import this again
    sys.exit(main())
