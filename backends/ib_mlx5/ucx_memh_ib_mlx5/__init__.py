# SPDX-License-Identifier: BSD-3-Clause
"""Component `ib_mlx5`: mlx5 devices, real ones or the software device that comes with it.

Configuration of ``open_md("ib_mlx5", ...)``:

``device``
    "auto" (default): real devices if there are any, else the software device; or "hardware", or
    "software".  ``md.attr.software`` says which it became.
``library``
    Path of one library that is both libibverbs and libmlx5, instead of all the above.
``port``, ``gid_index``
    Of the device; the first port and a GID chosen for it by default.
``queue_depth``
    Work requests that an endpoint may have under way (128).
``max_msg``
    Bytes that one work request moves at most, if less than the device allows.
``quarantine``
    Destructions of keys before a native key value may be used again (65536).
``umr``
    "auto" (default): keys of derived handles are aimed and ended by work requests where the device
    can do that; or "off": every key is made and destroyed by command.
``context``, ``pd``
    Addresses of an open ibv_context and its ibv_pd, to work on what a runtime has opened.  They
    are never closed here, and the context's asynchronous events are left to the runtime.
"""

from __future__ import annotations

from ucx_memh.errors import InvalidParamError, NoDeviceError
from ucx_memh.hookspecs import hookimpl
from ucx_memh.resources import Component, MdResource

COMPONENT = "ib_mlx5"
VERSION = "0.1.0"

__all__ = ["COMPONENT"]


@hookimpl
def ucx_memh_components():
    """Say that ib_mlx5 exists; loads nothing."""
    return [
        Component(
            name=COMPONENT,
            version=VERSION,
            description="mlx5 RDMA devices, keys by firmware command; has a software device",
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """The devices there are; loads the vendor libraries."""
    if component != COMPONENT:
        return None
    found = _finder()
    return [
        MdResource(component=COMPONENT, md_name=name, software=device.software)
        for device in [found.device(found.settings(config))]
        for name in device.names
    ]


@hookimpl
def ucx_memh_open_md(resource, config):
    """Open the device of that name."""
    if resource.component != COMPONENT:
        return None
    found = _finder()
    settings = found.settings(config)
    device = found.device(settings)
    from . import devx

    options = {name: settings[name] for name in found.OPTIONS if name in settings}
    try:
        return devx.open_md(
            device.verbs, device.mlx5, resource.md_name, software=device.software, **options
        )
    except (TypeError, OverflowError) as error:
        raise InvalidParamError(
            f"bad configuration: {error}", op="open_md", component=COMPONENT
        ) from None


def _finder():
    """The part that needs ucx_memh_ib."""
    try:
        from . import _find
    except ImportError as error:
        raise NoDeviceError(f"no package ucx_memh_ib: {error}", component=COMPONENT) from None
    return _find
