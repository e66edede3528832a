# SPDX-License-Identifier: BSD-3-Clause
"""The hooks of a backend plugin.

A plugin is a module named by an entry point of the group "ucx_memh"; the entry point's name is
the component's, and a module with several components has an entry point for each.  Its hookimpls
must be plain Python functions: pluggy does not see those that Cython compiled.  They run in any
thread, on cold paths only, and are called with keyword arguments::

    from ucx_memh.hookspecs import hookimpl

    API_VERSION = (1, 0)  # of the hooks, that it was written for; this is also the default

    @hookimpl
    def ucx_memh_components():
        return [Component("mine", version="1.0")]

Importing it must ask for no other component.  A plugin without components, say one that wraps every
call, is an entry point of the group "ucx_memh.wrappers".
"""

from typing import TYPE_CHECKING, Any

import pluggy

from ucx_memh.resources import Component, MdResource

if TYPE_CHECKING:
    from ucx_memh.core import Md

__all__ = [
    "API_VERSION",
    "PROJECT",
    "WRAPPERS",
    "hookimpl",
    "ucx_memh_components",
    "ucx_memh_open_md",
    "ucx_memh_query_mds",
]

PROJECT = "ucx_memh"  # pluggy's project name, and the entry points' group
WRAPPERS = "ucx_memh.wrappers"  # the group of those that only look on
API_VERSION = (1, 0)  # of these hooks: a plugin's major must be the same, its minor not newer

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def ucx_memh_components() -> list[Component]:
    """What the plugin offers, with the settings it has.  Looks at no device, loads no library."""
    raise NotImplementedError


@hookspec
def ucx_memh_query_mds(component: str, config: dict[str, Any]) -> list[MdResource] | None:
    """The devices of `component` now; None: not a component of this plugin.

    `config` has a value of the declared type for each option of the component, and no other key.
    Raises NoDeviceError(reason) when there is none, InvalidParamError when values of `config`
    contradict each other.  Changes nothing in the process.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def ucx_memh_open_md(resource: MdResource, config: dict[str, Any]) -> "Md | None":
    """The opened device; None: not one of this plugin's.  The first answer wins.

    `config` is as for ucx_memh_query_mds.  An exception that is none of ours, and SystemExit, are a
    DeviceError to the caller.
    """
    raise NotImplementedError
