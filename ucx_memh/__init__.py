# SPDX-License-Identifier: BSD-3-Clause
"""Register memory once; hand out remote keys to it that can each be revoked on their own.

Importing this loads no vendor library and no plugin, starts no thread and reads no /proc: the
first call of `components`, `query_mds` or `open_md` finds the backends.
"""

from typing import TYPE_CHECKING

from ucx_memh import errors, flags
from ucx_memh.config import Option
from ucx_memh.errors import *  # noqa: F403
from ucx_memh.flags import *  # noqa: F403
from ucx_memh.resources import (
    Component,
    ComponentInfo,
    EnforcementRow,
    EnforcementTable,
    KeyInfo,
    MdAttr,
    MdResource,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ucx_memh import mpi as mpi
    from ucx_memh.bundle import Bundle, BundleMemh, BundleRkey
    from ucx_memh.core import Endpoint, Md, Memh, MemhArray, Operation, PackedKeys, Rkey

    __version__: str

_CORE = ("Endpoint", "Md", "Memh", "MemhArray", "Operation", "PackedKeys", "Rkey")
_BUNDLE = ("Bundle", "BundleMemh", "BundleRkey")

__all__ = [
    "Bundle",
    "BundleMemh",
    "BundleRkey",
    "Component",
    "ComponentInfo",
    "Endpoint",
    "EnforcementRow",
    "EnforcementTable",
    "KeyInfo",
    "Md",
    "MdAttr",
    "MdResource",
    "Memh",
    "MemhArray",
    "Operation",
    "Option",
    "PackedKeys",
    "Rkey",
    "components",
    "get_cython_path",
    "get_include",
    "key_query",
    "open_md",
    "query_mds",
]
__all__ += errors.__all__
__all__ += flags.__all__


def components(load: bool = False) -> list[ComponentInfo]:
    """Every component that is installed and what is known of it; asks no device.

    Plugins are not imported, unless `load`; their options are known only then.  Any thread may
    call it.  Never fails because of a plugin: that one is "broken", with a reason.
    """
    from ucx_memh.plugins import components

    return components(load)


def query_mds(component: str | None = None, **config: object) -> list[MdResource]:
    """The devices of one component, or of all; asks the devices anew at each call.

    Imports the plugins that it asks.  For all, a component without devices adds nothing
    (components() keeps the reason).  For one,
    InvalidParamError: there is no such component; NoDeviceError: it has no device, and why.
    `config` goes to the backend, as in open_md().  Any thread may call it.
    """
    from ucx_memh.plugins import query_mds

    return query_mds(component, config)


def open_md(spec: "str | MdResource", **config: object) -> "Md":
    """Open a device: "component" (its first), "component/md_name" or an MdResource.

    `config` has settings of the component, by the names of its options; text is read as their
    type.  `python -m ucx_memh info --config` lists them, with the environment variables that set
    them where `config` does not.  `prefer`, which is no setting, names a distribution, module or
    path: of several components of one name its one is taken, also over one of ours.

    InvalidParamError: there is no such component, or `config` or the environment has what is no
    setting of it; NoDeviceError: there is no such device, and why; DeviceError: its plugin failed.
    Any thread may call it.
    """
    from ucx_memh.plugins import open_md

    return open_md(spec, config)


def key_query(key: "Buffer") -> KeyInfo:
    """What a packed key says: its envelope, checked; nothing is attached and no domain asked.

    MalformedKeyError, KeyVersionError, RevokedError (a revoke notice).  Any thread may call it.
    """
    from ucx_memh.core import key_query

    return key_query(key)


def get_include() -> str:
    """The folder to give to a C compiler for <ucx_memh/memh.h>."""
    from os.path import dirname, join

    return join(dirname(__file__), "include")


def get_cython_path() -> str:
    """The folder to give to Cython's include_path for `cimport ucx_memh.core`.

    Cython looks at sys.path only, where an editable install is not.
    """
    from os.path import dirname

    return dirname(dirname(__file__))


if not TYPE_CHECKING:  # or a misspelt name would be an object

    def __getattr__(name: str) -> object:
        if name in _CORE:
            from ucx_memh import core

            return getattr(core, name)
        if name in _BUNDLE:
            from ucx_memh import bundle

            return getattr(bundle, name)
        if name == "mpi":  # loads mpi4py no sooner than its first window
            from importlib import import_module

            return import_module("ucx_memh.mpi")
        if name == "__version__":  # pyproject.toml is the one place that says it
            from importlib.metadata import version

            return version("ucx_memh")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", "mpi"})
