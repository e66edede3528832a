# SPDX-License-Identifier: BSD-3-Clause
"""Component `ib`: any RDMA device, by its libibverbs; derived keys are memory windows.

Configuration of ``open_md("ib", ...)``:

``library``
    Path of the libibverbs to use, instead of the system's.
``port``, ``gid_index``
    Of the device; the first port and a GID chosen for it by default.
``queue_depth``
    Work requests that an endpoint may have under way (128).
``max_msg``
    Bytes that one work request moves at most, if less than the device allows.
``quarantine``
    Destructions of keys before a native key value may be used again (65536).
``self_check``
    True (default): try at open, on a page of our own, whether the device keeps a window to its
    range; about forty verbs.  False: take it that it does not.
``context``, ``pd``
    Addresses of an open ibv_context and its ibv_pd, to work on what a runtime has opened.  They
    are never closed here, and the context's asynchronous events are left to the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucx_memh.config import settings
from ucx_memh.errors import InvalidParamError, NoDeviceError
from ucx_memh.hookspecs import hookimpl
from ucx_memh.resources import Component, MdResource

COMPONENT = "ib"
VERSION = "0.1.0"
LIBRARY = "libibverbs.so.1"
OPTIONS = (
    "library",
    "port",
    "gid_index",
    "queue_depth",
    "max_msg",
    "quarantine",
    "context",
    "pd",
    "self_check",
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
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """The devices there are; loads libibverbs."""
    if component != COMPONENT:
        return None
    from . import verbs

    path = _library(settings(config, OPTIONS, COMPONENT))
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

    options = settings(config, OPTIONS, COMPONENT)
    path = _library(options)
    options.pop("library", None)
    try:
        return window.open_md(path, resource.md_name, software=verbs.is_software(path), **options)
    except (TypeError, OverflowError) as error:
        raise InvalidParamError(
            f"bad configuration: {error}", op="open_md", component=COMPONENT
        ) from None


def _library(options: Mapping[str, Any]) -> str:
    return str(options.get("library") or LIBRARY)
