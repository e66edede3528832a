# SPDX-License-Identifier: BSD-3-Clause
"""Finds backends and talks to them.  With hookspecs.py the only file that imports pluggy.

A plugin that fails does so alone: it is kept as "broken", with its reason, and the others work.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from ucx_memh import hookspecs
from ucx_memh.config import Option, settings, strangers
from ucx_memh.errors import BusyError, DeviceError, InvalidParamError, NoDeviceError
from ucx_memh.resources import (
    AVAILABLE,
    BROKEN,
    UNAVAILABLE,
    UNPROBED,
    Component,
    ComponentInfo,
    MdResource,
)

if TYPE_CHECKING:
    from ucx_memh.core import Md

__all__ = ["Plugins", "components", "open_md", "query_mds"]

log = logging.getLogger("ucx_memh")
log.addHandler(logging.NullHandler())


@dataclass(slots=True)
class _Record:
    """What is known of one component; replaced values only, so a reader needs no lock."""

    name: str
    version: str
    path: str
    options: tuple[Option, ...] = ()
    plugin: object = None
    state: str = UNPROBED
    reason: str = ""
    error: BaseException | None = None

    def became(self, state: str, reason: str = "", error: BaseException | None = None) -> None:
        if (state, reason) != (self.state, self.reason):
            level = logging.WARNING if state == BROKEN else logging.INFO
            log.log(level, "component %s is %s%s", self.name, state, reason and f": {reason}")
        self.state, self.reason, self.error = state, reason, error

    def info(self) -> ComponentInfo:
        return ComponentInfo(
            self.name, self.state, self.reason, self.path, self.version, self.options
        )


class _BadPluginError(Exception):
    """What a plugin did against the rules of hookspecs.py."""


class Plugins:
    """The components of some entry points.

    Discovery runs at the first use, once, in one thread while others wait; each entry point is
    tried once.  Hooks run without a lock.
    """

    def __init__(self, entry_points: Callable[[], Iterable[EntryPoint]]) -> None:
        self._entry_points = entry_points
        self._lock = threading.RLock()
        self._discovering = False
        self._manager: pluggy.PluginManager | None = None
        self._records: list[_Record] = []

    def forget_lock(self) -> None:
        """In a forked child: the thread that held the lock is not there to release it."""
        self._lock = threading.RLock()
        self._discovering = False

    # ---- the three questions ----

    def components(self) -> list[ComponentInfo]:
        """All that is known, the usable ones first, without asking a device."""
        return [record.info() for record in self._discovered()]

    def query_mds(self, component: str | None, config: dict[str, Any]) -> list[MdResource]:
        """As ucx_memh.query_mds."""
        if component is not None:
            return self._query(self._record(component), config)
        found: list[MdResource] = []
        for record in self._discovered():
            if record.plugin is None:
                continue
            try:
                with suppress(NoDeviceError):  # the record has the reason
                    found += self._query(record, config)
            except InvalidParamError as error:
                if config:
                    raise
                record.became(UNAVAILABLE, error.detail, error)  # the environment's fault
        return found

    def open_md(self, spec: str | MdResource, config: dict[str, Any]) -> "Md":
        """As ucx_memh.open_md."""
        if isinstance(spec, MdResource):
            resource, record = spec, self._record(spec.component)
            if record.plugin is None:
                raise _no_device(record)
        elif isinstance(spec, str):
            name, _, md_name = spec.partition("/")
            record = self._record(name)
            resource = _choose(self._query(record, config), name, md_name)
        else:
            raise InvalidParamError(
                f"want a name or an MdResource, not {type(spec).__name__}", op="open_md"
            )
        values = {s.option.name: s.value for s in settings(record.name, record.options, config)}
        opened = self._hook(record, "ucx_memh_open_md")(resource=resource, config=values)
        from ucx_memh.core import Md

        if not isinstance(opened, Md):
            raise DeviceError(
                f"its plugin answered {opened!r}, which is no Md",
                op="open_md",
                component=record.name,
            )
        return opened

    # ---- asking one component ----

    def _record(self, name: str) -> _Record:
        records = self._discovered()
        for record in records:
            if record.name == name:
                return record
        known = ", ".join(f"{record.name} ({record.state})" for record in records) or "none"
        raise InvalidParamError(f"no component {name!r}; known: {known}")

    def _query(self, record: _Record, config: dict[str, Any]) -> list[MdResource]:
        """Its devices, at least one; else NoDeviceError, and the record says why.

        InvalidParamError: of a setting that is not a default one.
        """
        if record.plugin is None:
            raise _no_device(record)
        found = settings(record.name, record.options, config)
        try:
            answers = self._hook(record, "ucx_memh_query_mds")(
                component=record.name, config={s.option.name: s.value for s in found}
            )
            devices = [_checked_md(record, md) for answer in answers for md in answer]
            if not devices:
                raise NoDeviceError("it has no device")
        except NoDeviceError as error:
            record.became(UNAVAILABLE, error.detail)
            raise _no_device(record) from error
        except (Exception, SystemExit) as error:
            if isinstance(error, InvalidParamError) and any(s.source != "default" for s in found):
                raise  # it speaks of a setting, not of the component
            record.became(BROKEN, _reason(error), error)
            raise _no_device(record) from error
        record.became(AVAILABLE)
        return devices

    def _hook(self, record: _Record, name: str) -> pluggy.HookCaller:
        """The hook, without the plugins of other components, so that a failure is its own.

        A plugin without components, say one that wraps every call, sees all of them.
        """
        others = {id(r.plugin): r.plugin for r in self._records if r.plugin is not None}
        others.pop(id(record.plugin))
        assert self._manager is not None
        return self._manager.subset_hook_caller(name, others.values())

    # ---- discovery ----

    def _discovered(self) -> list[_Record]:
        if self._manager is None:
            with self._lock:
                if self._discovering:
                    raise BusyError("a plugin asked for components while it was being loaded")
                if self._manager is None:
                    self._discovering = True
                    try:
                        self._discover()
                    finally:
                        self._discovering = False
        return self._records

    def _discover(self) -> None:
        """Fill the manager and the records, then publish both; all or, interrupted, nothing."""
        manager = _new_manager()
        records: list[_Record] = []
        for point in sorted(self._entry_points(), key=_rank):
            records += _load(point, manager, {r.name: r for r in records if r.plugin is not None})
        records.sort(key=lambda record: record.plugin is None)  # a name finds its usable owner
        for name in strangers({record.name: record.options for record in records}):
            log.warning("%s is set, and no component has such a setting", name)
        self._records = records
        self._manager = manager


def _load(
    point: EntryPoint, manager: pluggy.PluginManager, taken: dict[str, _Record]
) -> list[_Record]:
    """Register one entry point's plugin; the records of its components, or one that says why not.

    A plugin that exits or breaks while it is imported must not take the others along, so all but
    KeyboardInterrupt is caught.
    """
    version = point.dist.version if point.dist else ""
    failed = _Record(point.name, version, point.value)
    try:
        plugin = point.load()
        failed.path = getattr(plugin, "__file__", None) or point.value
        described = _try_alone(plugin)
        # One whose names are all taken must not answer in the place of their owners.
        if not described or any(component.name not in taken for component in described):
            manager.register(plugin, point.name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        absent = error.name is not None and f"{point.module}.".startswith(f"{error.name}.")
        if absent:
            failed.became(UNAVAILABLE, f"{point.module} is not part of this installation", error)
        else:
            failed.became(BROKEN, _reason(error), error)
        return [failed]
    except BaseException as error:
        failed.became(BROKEN, _reason(error), error)
        return [failed]

    records = []
    for component in described:
        record = _Record(
            component.name, component.version or version, failed.path, component.options
        )
        if owner := taken.get(component.name):
            record.became(BROKEN, f"the name is taken by {owner.path}")
        else:
            record.plugin = plugin
        records.append(record)
    return records


def _try_alone(plugin: object) -> list[Component]:
    """What the plugin offers, if it keeps the rules; in a manager of its own, so that a plugin
    that does not is never among the others."""
    manager = _new_manager()
    manager.register(plugin)
    manager.check_pending()  # a hook that we do not have, most often a misspelt one
    seen = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    for name in dir(plugin):
        value = getattr(plugin, name, None)
        if (
            name.startswith("ucx_memh_")
            and name not in seen
            and callable(value)
            and not isinstance(value, type | ModuleType)
        ):
            raise _BadPluginError(
                f"{name} is not seen as a hook: it must be a plain Python function with @hookimpl "
                "in a .py file, not one compiled by Cython"
            )
    if not seen:
        raise _BadPluginError("it has no hooks")
    described = [c for answer in manager.hook.ucx_memh_components() for c in answer]
    for component in described:
        if not isinstance(component, Component):
            raise _BadPluginError(f"ucx_memh_components gave {component!r}, which is no Component")
        if not all(isinstance(option, Option) for option in component.options):
            raise _BadPluginError(f"the options of {component.name} are not all an Option")
        names = [option.name for option in component.options]
        if twice := {name for name in names if names.count(name) > 1}:
            raise _BadPluginError(f"{component.name} has two options {min(twice)!r}")
    return described


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _rank(point: EntryPoint) -> tuple[bool, str, str]:
    """Our own first: they win a clash of names."""
    owner = point.dist.name.replace("-", "_") if point.dist else ""
    return owner != "ucx_memh", owner, point.name


def _checked_md(record: _Record, md: object) -> MdResource:
    if not isinstance(md, MdResource) or md.component != record.name:
        raise _BadPluginError(f"ucx_memh_query_mds gave {md!r}, which is no device of its own")
    return md


def _choose(devices: list[MdResource], component: str, md_name: str) -> MdResource:
    for device in devices:
        if md_name in ("", device.md_name):
            return device
    names = ", ".join(device.md_name for device in devices)
    raise NoDeviceError(f"no device {md_name!r}; it has: {names}", component=component)


def _no_device(record: _Record) -> NoDeviceError:
    error = NoDeviceError(f"{record.state}: {record.reason}", component=record.name)
    error.__cause__ = record.error
    return error


def _reason(error: BaseException) -> str:
    """One line for a person."""
    if isinstance(error, _BadPluginError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_plugins = Plugins(lambda: entry_points(group=hookspecs.PROJECT))
os.register_at_fork(after_in_child=_plugins.forget_lock)
components = _plugins.components
query_mds = _plugins.query_mds
open_md = _plugins.open_md
