# SPDX-License-Identifier: BSD-3-Clause
"""Component `cma`: other processes' memory on one host, by process_vm_readv and process_vm_writev.

Configuration of ``open_md("cma", ...)``:

``peer_check_interval``
    Seconds, 0.001 by default.  Before a transfer the peer process is looked at again if the last
    look is older than this.  Within that time a pid that went to another process is not noticed.
    0 looks before every system call.
``yama_scope_path``
    Where Yama's ptrace scope is read from.

At Yama scope 1 opening the domain calls ``prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)``: from then
on every process of the same user may reach this one's memory.  Without it cma would work between
parent and child only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucx_memh.config import settings as known_settings
from ucx_memh.errors import InvalidParamError, NoDeviceError
from ucx_memh.hookspecs import hookimpl
from ucx_memh.resources import Component, MdResource

COMPONENT = "cma"
MD_NAME = "memory"
VERSION = "0.1.0"
PEER_CHECK_INTERVAL = 0.001
"""Seconds; the default of the configuration key `peer_check_interval`."""

__all__ = ["COMPONENT", "MD_NAME", "PEER_CHECK_INTERVAL"]


def _settings(config: Mapping[str, Any] | None) -> dict[str, Any]:
    from ._probe import YAMA_SCOPE_PATH

    defaults = {"peer_check_interval": PEER_CHECK_INTERVAL, "yama_scope_path": YAMA_SCOPE_PATH}
    return defaults | known_settings(config, defaults, COMPONENT)


@hookimpl
def ucx_memh_components():
    """Say that cma exists; looks at nothing."""
    return [
        Component(
            name=COMPONENT,
            version=VERSION,
            description="memory of other processes on this host (process_vm_readv/writev)",
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """One domain, where the system allows it; changes nothing."""
    if component != COMPONENT:
        return None
    from ._probe import probe

    result = probe(_settings(config)["yama_scope_path"])
    if not result.available:
        raise NoDeviceError(result.reason, component=COMPONENT)
    return [MdResource(component=COMPONENT, md_name=MD_NAME, software=False)]


@hookimpl
def ucx_memh_open_md(resource, config):
    """Probe again, this time in earnest, and bind."""
    if resource.component != COMPONENT:
        return None
    settings = _settings(config)
    if resource.md_name != MD_NAME:
        raise NoDeviceError(f"cma has no domain {resource.md_name!r}", component=COMPONENT)
    from . import _md
    from ._probe import probe

    result = probe(settings["yama_scope_path"], opening=True)
    if not result.available:
        raise NoDeviceError(result.reason, component=COMPONENT)
    try:
        interval = float(settings["peer_check_interval"])
    except (TypeError, ValueError):
        raise InvalidParamError(
            f"peer_check_interval is {settings['peer_check_interval']!r}, not a number of seconds",
            component=COMPONENT,
        ) from None
    return _md.open_md(interval, result.reason, result.ptracer_calls)
