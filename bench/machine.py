# SPDX-License-Identifier: BSD-3-Clause
"""What a page says of the machine that it was measured on."""

import os
import platform
from typing import Any

import ucx_memh as um


def cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu(),
        "cpus": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "page": os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "ucx_memh": um.__version__,
        "load": os.getloadavg()[0],
    }
