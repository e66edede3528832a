# SPDX-License-Identifier: BSD-3-Clause
"""Component `ib`: any RDMA device, by its libibverbs; derived keys are memory windows."""

from __future__ import annotations

from ucx_memh.config import Option
from ucx_memh.errors import NoDeviceError
from ucx_memh.hookspecs import hookimpl
from ucx_memh.resources import Component, MdResource

from .options import OPTIONS as SHARED

COMPONENT = "ib"
VERSION = "0.1.0"
API_VERSION = (1, 0)
OPTIONS = (
    Option("library", str, "libibverbs.so.1", "the libibverbs to use"),
    *SHARED,
    Option(
        "self_check",
        bool,
        True,
        "try at open, on a page of our own, whether the device keeps a window to its range (about "
        "forty verbs); no: take it that it does not",
    ),
)

__all__ = ["COMPONENT"]


@hookimpl
def ucx_memh_components():
    """Say that ib exists; loads nothing."""
    return [
        Component(
            name=COMPONENT,
            version=VERSION,
            description="RDMA devices, keys by memory windows",
            options=OPTIONS,
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """The devices there are; loads libibverbs."""
    if component != COMPONENT:
        return None
    from . import verbs

    path = config["library"]
    try:
        names = [name for name, _ in verbs.devices(path)]
    except OSError:  # which has room for the beginning of the reason only
        raise NoDeviceError(verbs.library_status(path)[0], component=COMPONENT) from None
    if not names:
        raise NoDeviceError(f"{path} lists no RDMA device", component=COMPONENT)
    software = verbs.is_software(path)
    return [MdResource(component=COMPONENT, md_name=name, software=software) for name in names]


@hookimpl
def ucx_memh_open_md(resource, config):
    """Open the device of that name."""
    if resource.component != COMPONENT:
        return None
    from . import verbs, window

    path = config.pop("library")
    return window.open_md(path, resource.md_name, software=verbs.is_software(path), **config)
