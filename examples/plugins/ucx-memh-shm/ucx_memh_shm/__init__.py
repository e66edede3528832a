# SPDX-License-Identifier: BSD-3-Clause
"""Component `shm`: a segment of POSIX shared memory, that peers on the same host map.

Peers get pointers (`rkey.ptr()`) into what was registered, and may be given windows of it.  Rights,
range and revocation are COOPERATIVE: the peer's library looks each time that it is asked for a
pointer, and whoever has one keeps it until the key is closed.

The segment has no name.  Peers find it through its owner (/proc/PID/fd), so they must be allowed to
look there; and nothing is left of it when its owner has ended, in whatever way.
"""

import mmap
import tempfile
from weakref import WeakKeyDictionary

from ucx_memh import Component, Md, MdResource, NoDeviceError, Option
from ucx_memh.hookspecs import hookimpl

__all__ = ["memory"]

API_VERSION = (1, 0)  # of the hooks
COMPONENT = "shm"
FOLDER = "/dev/shm"  # where shm_open() of Linux makes its files
OPTIONS = (
    Option("size", int, 64 << 20, "bytes that can be registered", minimum=1, maximum=1 << 40),
)

_memory: WeakKeyDictionary[Md, memoryview] = WeakKeyDictionary()


def memory(md: Md) -> memoryview:
    """All that can be registered with this domain: `config["size"]` bytes, zero at first.

    Its users share it out among themselves.  KeyError: no open domain of this component.
    """
    return _memory[md]


@hookimpl
def ucx_memh_components():
    """Say that the component exists; looks at nothing."""
    return [
        Component(
            name=COMPONENT,
            version="0.1.0",
            description="POSIX shared memory of this host",
            options=OPTIONS,
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """One domain, where there is shared memory; changes nothing."""
    if component != COMPONENT:
        return None
    try:
        tempfile.TemporaryFile(dir=FOLDER).close()
    except OSError as error:
        raise NoDeviceError(f"no shared memory: {error}", component=COMPONENT) from error
    return [MdResource(component=COMPONENT, md_name="memory")]


@hookimpl
def ucx_memh_open_md(resource, config):
    """Make a segment and open its domain; pages take memory when they are touched."""
    if resource.component != COMPONENT:
        return None
    from . import _md

    try:
        file = tempfile.TemporaryFile(dir=FOLDER)  # noqa: SIM115 - the domain closes it
        file.truncate(_md.HEADER + config["size"])
        pages = mmap.mmap(file.fileno(), _md.HEADER + config["size"])
    except OSError as error:
        raise NoDeviceError(f"no shared memory: {error}", component=COMPONENT) from error
    md = _md.open_md(file, pages)
    _memory[md] = memoryview(pages)[_md.HEADER :]
    return md
