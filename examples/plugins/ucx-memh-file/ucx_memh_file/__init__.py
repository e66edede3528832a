# SPDX-License-Identifier: BSD-3-Clause
"""Component `file`: memory that lies in a file, for peers who share a folder.

The owner maps the file, peers read and write it by system calls: it takes no permission over the
owner's process, only over the folder, which may be one that containers share.  Rights, range and
revocation are COOPERATIVE: the peer's library looks before each transfer, and `invalidate` is
complete when those under way have ended.  Who is killed leaves his folder behind.
"""

from weakref import WeakKeyDictionary

from ucx_memh import Component, Md, MdResource, NoDeviceError, Option
from ucx_memh.hookspecs import hookimpl

__all__ = ["memory"]

API_VERSION = (1, 0)  # of the hooks
COMPONENT = "file"
OPTIONS = (
    Option("size", int, 64 << 20, "bytes that can be registered", minimum=1, maximum=1 << 40),
    Option(
        "folder", str, "", "where its folder is made; empty: where the system has temporary files"
    ),
)

_memory: WeakKeyDictionary[Md, memoryview] = WeakKeyDictionary()


def memory(md: Md) -> memoryview:
    """All that can be registered with this domain: `size` bytes, zero at first.

    Its users share it out among themselves.  KeyError: no domain of this component.
    """
    return _memory[md]


@hookimpl
def ucx_memh_components():
    """Say that the component exists; looks at nothing."""
    return [
        Component(
            name=COMPONENT,
            version="0.1.0",
            description="memory in a file that peers share",
            options=OPTIONS,
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """One domain; whether its folder can be made is seen when it is opened."""
    if component != COMPONENT:
        return None
    return [MdResource(component=COMPONENT, md_name="memory")]


@hookimpl
def ucx_memh_open_md(resource, config):
    """Make the file and open its domain; a file system gives room when bytes are written."""
    if resource.component != COMPONENT:
        return None
    from . import _device

    try:
        device = _device.Device(config["folder"], config["size"])
    except OSError as error:
        raise NoDeviceError(f"no file to map: {error}", component=COMPONENT) from error
    md = _device.open_md(device)
    _memory[md] = memoryview(device.memory)
    return md
