# SPDX-License-Identifier: BSD-3-Clause
"""Component `cma`: other processes' memory on one host, by process_vm_readv and process_vm_writev.

At Yama scope 1 opening the domain calls ``prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)``: from then
on every process of the same user may reach this one's memory.  Without it cma would work between
parent and child only.
"""

from __future__ import annotations

from ucx_memh.config import Option
from ucx_memh.errors import NoDeviceError
from ucx_memh.hookspecs import hookimpl
from ucx_memh.resources import Component, MdResource

COMPONENT = "cma"
MD_NAME = "memory"
VERSION = "0.1.0"
API_VERSION = (1, 0)
OPTIONS = (
    Option(
        "peer_check_interval",
        float,
        0.001,
        "seconds; before a transfer the peer process is looked at again if the last look is older: "
        "within that time a pid that went to another process is not noticed; 0 looks before every "
        "system call",
        minimum=0,
        maximum=3600,
    ),
    Option(
        "yama_scope_path",
        str,
        "/proc/sys/kernel/yama/ptrace_scope",
        "where Yama's ptrace scope is read from",
    ),
)

__all__ = ["COMPONENT", "MD_NAME", "OPTIONS"]


@hookimpl
def ucx_memh_components():
    """Say that cma exists; looks at nothing."""
    return [
        Component(
            name=COMPONENT,
            version=VERSION,
            description="memory of other processes on this host (process_vm_readv/writev)",
            options=OPTIONS,
        )
    ]


@hookimpl
def ucx_memh_query_mds(component, config):
    """One domain, where the system allows it; changes nothing."""
    if component != COMPONENT:
        return None
    from ._probe import probe

    result = probe(config["yama_scope_path"])
    if not result.available:
        raise NoDeviceError(result.reason, component=COMPONENT)
    return [MdResource(component=COMPONENT, md_name=MD_NAME, software=False)]


@hookimpl
def ucx_memh_open_md(resource, config):
    """Probe again, this time in earnest, and bind."""
    if resource.component != COMPONENT:
        return None
    if resource.md_name != MD_NAME:
        raise NoDeviceError(f"cma has no domain {resource.md_name!r}", component=COMPONENT)
    from . import _md
    from ._probe import probe

    result = probe(config["yama_scope_path"], opening=True)
    if not result.available:
        raise NoDeviceError(result.reason, component=COMPONENT)
    return _md.open_md(config["peer_check_interval"], result.reason, result.ptracer_calls)
