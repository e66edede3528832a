# SPDX-License-Identifier: BSD-3-Clause
"""Component `cuda_ipc`: memory of CUDA devices, shared between processes by the driver's own API.

One domain for each device, named by its ordinal ("0"); the current device and context of a thread
matter to nothing and are left as they are.  Opening a domain retains the device's primary context,
and cuInit, which finding the devices takes, makes CUDA unusable in children that are forked later.

What can be shared: memory of cuMemAlloc (so of CuPy and of torch's usual allocator), and
allocations of cuMemCreate that were made exportable by POSIX descriptor or fabric handle.  Memory
of pools (cuMemAllocAsync), managed memory and ranges over several allocations are refused by name.
The first registration by descriptor calls ``prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)``, as peers
fetch it by pidfd_getfd: where Yama's scope is 1, every process of the same user may reach this one
from then on.  Legacy handles take no such call; where a peer may not look into the owner it cannot
see that a registration has ended, and asks the driver alone.
"""

from __future__ import annotations

from ucx_memh.config import Option
from ucx_memh.errors import NoDeviceError
from ucx_memh.hookspecs import hookimpl
from ucx_memh.resources import Component, MdResource

COMPONENT = "cuda_ipc"
VERSION = "0.1.0"
API_VERSION = (1, 0)
OPTIONS = (
    Option("driver", str, "libcuda.so.1", "the CUDA driver's library to use"),
    Option(
        "queue_depth",
        int,
        128,
        "copies that an endpoint may have under way",
        minimum=1,
        maximum=65536,
    ),
)

__all__ = ["COMPONENT", "OPTIONS"]


@hookimpl
def ucx_memh_components():
    """Say that cuda_ipc exists; loads nothing."""
    return [
        Component(
            name=COMPONENT,
            version=VERSION,
            description="memory of CUDA devices of this host (CUDA IPC, cuMemcpyAsync)",
            options=OPTIONS,
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """The devices there are; loads the driver and initialises it."""
    if component != COMPONENT:
        return None
    from . import _md

    path = config["driver"]
    count = _md.devices(path)
    if count == 0:
        raise NoDeviceError(f"{path} has no device", component=COMPONENT)
    software = _md.is_software(path)
    return [MdResource(COMPONENT, str(ordinal), software) for ordinal in range(count)]


@hookimpl
def ucx_memh_open_md(resource, config):
    """Open the device of that ordinal."""
    if resource.component != COMPONENT:
        return None
    from . import _md

    path = config["driver"]
    count = _md.devices(path)
    if resource.md_name not in map(str, range(count)):
        raise NoDeviceError(
            f"{path} has no device {resource.md_name!r}, but {count}", component=COMPONENT
        )
    return _md.open_md(path, int(resource.md_name), config["queue_depth"])
