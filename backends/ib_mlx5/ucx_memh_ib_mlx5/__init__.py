# SPDX-License-Identifier: BSD-3-Clause
"""Component `ib_mlx5`: mlx5 devices, real ones or the software device that comes with it."""

from __future__ import annotations

from ucx_memh.config import Option
from ucx_memh.errors import NoDeviceError
from ucx_memh.hookspecs import hookimpl
from ucx_memh.resources import Component, MdResource

try:
    from ucx_memh_ib.options import OPTIONS as SHARED
except ImportError:  # without that package there is no device, and query_mds says so
    SHARED = ()

COMPONENT = "ib_mlx5"
VERSION = "0.1.0"
API_VERSION = (1, 0)
OPTIONS = (
    Option(
        "device",
        ("auto", "hardware", "software"),
        "auto",
        "auto: real devices if there are any, else the software device; md.attr.software says "
        "which it became",
    ),
    Option(
        "library",
        str,
        "",
        "one library that is both libibverbs and libmlx5, instead of those of the device",
    ),
    *SHARED,
    Option(
        "umr",
        ("auto", "off"),
        "auto",
        "auto: keys of derived handles are aimed and ended by work requests where the device can "
        "do that; off: every key is made and destroyed by command",
    ),
)

__all__ = ["COMPONENT"]


@hookimpl
def ucx_memh_components():
    """Say that ib_mlx5 exists; loads nothing."""
    return [
        Component(
            name=COMPONENT,
            version=VERSION,
            description="mlx5 RDMA devices, keys by firmware command; has a software device",
            options=OPTIONS,
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """The devices there are; loads the vendor libraries."""
    if component != COMPONENT:
        return None
    device = _finder().device(config["device"], config["library"])
    return [
        MdResource(component=COMPONENT, md_name=name, software=device.software)
        for name in device.names
    ]


@hookimpl
def ucx_memh_open_md(resource, config):
    """Open the device of that name."""
    if resource.component != COMPONENT:
        return None
    device = _finder().device(config.pop("device"), config.pop("library"))
    from . import devx

    return devx.open_md(
        device.verbs, device.mlx5, resource.md_name, software=device.software, **config
    )


def _finder():
    """The part that needs ucx_memh_ib."""
    try:
        from . import _find
    except ImportError as error:
        raise NoDeviceError(f"no package ucx_memh_ib: {error}", component=COMPONENT) from None
    return _find
