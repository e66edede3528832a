# SPDX-License-Identifier: BSD-3-Clause
"""Finds backends and talks to them.  With hookspecs.py the only file that imports pluggy.

A component is an entry point of the group "ucx_memh"; its name is the component's.  Which there are
is known from the metadata of what is installed; a plugin is imported when it is first asked for,
once, while all others can be used.  One that fails does so alone: it is kept as "broken", with its
reason.

Of equal names ours wins, and of two plugins neither: both are "hidden", and `prefer` in a call or
UCX_MEMH_BACKENDS chooses.  UCX_MEMH_BACKENDS is a list, with commas, of

    name            only the components that are named so
    ^name           all but those
    name@origin     of those with this name the one of this distribution or module
    +path           and a plugin that is not installed, a file or a module; it wins a clash;
    +name=path      its name is the last part of its path if it has no other

What it asks for and nobody has is "unavailable", and an item that names nothing is "broken".
"""

import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from ucx_memh import hookspecs
from ucx_memh.config import Option, Setting, settings, strangers
from ucx_memh.elf import trouble
from ucx_memh.errors import BusyError, DeviceError, InvalidParamError, MemhError, NoDeviceError
from ucx_memh.resources import (
    AVAILABLE,
    BROKEN,
    HIDDEN,
    UNAVAILABLE,
    UNPROBED,
    Component,
    ComponentInfo,
    MdResource,
)

if TYPE_CHECKING:
    from ucx_memh.core import Md

__all__ = ["Plugins", "components", "open_md", "query_mds"]

CHOICE = "UCX_MEMH_BACKENDS"

log = logging.getLogger("ucx_memh")
log.addHandler(logging.NullHandler())


@dataclass(slots=True, eq=False)
class _Record:
    """What is known of one entry point.  State, reason and error are replaced, never changed, so
    that a reader needs no lock; the lock is for loading it."""

    name: str
    version: str
    path: str
    origin: str  # whose it is: a distribution, or UCX_MEMH_BACKENDS
    load: Callable[[], object]
    module: str = ""
    rank: int = 2  # 0: named by UCX_MEMH_BACKENDS, 1: ours
    hidden: str = ""  # why its name does not lead to it
    left_out: bool = False  # and `prefer` does not, either
    state: str = UNPROBED
    reason: str = ""
    error: BaseException | None = None
    options: tuple[Option, ...] = ()
    manager: pluggy.PluginManager | None = None  # once it is loaded: its plugin and the wrappers
    lock: Any = field(default_factory=threading.RLock)
    loading: bool = False
    tried: bool = False

    def became(self, state: str, reason: str = "", error: BaseException | None = None) -> None:
        if (state, reason) != (self.state, self.reason):
            level = logging.WARNING if state == BROKEN else logging.INFO
            log.log(level, "component %s is %s%s", self.name, state, reason and f": {reason}")
        self.state, self.reason, self.error = state, reason, error

    def info(self) -> ComponentInfo:
        state, reason = (HIDDEN, self.hidden) if self.hidden else (self.state, self.reason)
        return ComponentInfo(
            self.name, state, reason, self.path, self.version, self.options, self.origin
        )

    def is_of(self, whose: object) -> bool:
        """Is it the one that `prefer` or name@origin means?"""
        if not isinstance(whose, str) or not whose:
            return False
        return whose in (self.module, self.path) or _plain(whose) == _plain(self.origin)

    def __str__(self) -> str:
        return f"{self.path} ({' '.join(filter(None, [self.origin, self.version]))})"


class _BadPluginError(Exception):
    """What a plugin did against the rules of hookspecs.py."""


class Plugins:
    """The components of some entry points, given by group.

    Discovery reads metadata, once, in one thread while others wait; each entry point is loaded
    once, when it is asked for, while only those wait who ask for the same.  Hooks run without a
    lock.
    """

    def __init__(self, entry_points: Callable[[str], Iterable[EntryPoint]]) -> None:
        self._entry_points = entry_points
        self._lock = threading.RLock()
        self._records: list[_Record] | None = None
        self._wrappers: list[tuple[object, str]] | None = None
        self._wrapping = False

    def forget_locks(self) -> None:
        """In a forked child: the thread that held a lock is not there to release it."""
        self._lock, self._wrapping = threading.RLock(), False
        for record in self._records or ():
            record.lock, record.loading = threading.RLock(), False

    # ---- the three questions ----

    def components(self, load: bool = False) -> list[ComponentInfo]:
        """As ucx_memh.components."""
        records = self._discovered()
        for record in records if load else ():
            if not record.hidden:
                with suppress(NoDeviceError):
                    self._loaded(record)
        return [record.info() for record in sorted(records, key=_usable_first)]

    def query_mds(self, component: str | None, config: Mapping[str, Any]) -> list[MdResource]:
        """As ucx_memh.query_mds."""
        config = dict(config)
        if component is not None:
            return self._query(self._record(component, config.pop("prefer", None)), config)
        found: list[MdResource] = []
        for record in self._discovered():
            if record.hidden:
                continue
            try:
                with suppress(NoDeviceError):  # the record has the reason
                    found += self._query(record, config)
            except InvalidParamError as error:
                if config:
                    raise
                record.became(UNAVAILABLE, error.detail, error)  # the environment's fault
        return found

    def open_md(self, spec: str | MdResource, config: Mapping[str, Any]) -> "Md":
        """As ucx_memh.open_md."""
        config = dict(config)
        prefer = config.pop("prefer", None)
        if isinstance(spec, MdResource):
            resource, record = spec, self._record(spec.component, prefer)
            self._loaded(record)
        elif isinstance(spec, str):
            name, _, md_name = spec.partition("/")
            record = self._record(name, prefer)
            resource = _choose(self._query(record, config), name, md_name)
        else:
            raise InvalidParamError(
                f"want a name or an MdResource, not {type(spec).__name__}", op="open_md"
            )
        found = settings(record.name, record.options, config)
        try:
            opened = _hooks(record).ucx_memh_open_md(resource=resource, config=_values(found))
        except (MemhError, KeyboardInterrupt):
            raise
        except BaseException as error:  # not even one that exits may take its caller along
            raise DeviceError(
                f"its plugin failed: {_reason(error)}", op="open_md", component=record.name
            ) from error
        from ucx_memh.core import Md

        if not isinstance(opened, Md):
            raise DeviceError(
                f"its plugin answered {opened!r}, which is no Md",
                op="open_md",
                component=record.name,
            )
        return opened

    # ---- asking one component ----

    def _record(self, name: str, prefer: str | None) -> _Record:
        """The one of that name, of several the preferred one; NoDeviceError: it is hidden."""
        records = self._discovered()
        named = [record for record in records if record.name == name]
        if prefer is not None:
            for record in named:
                if not record.left_out and record.is_of(prefer):
                    return record
            there = "; ".join(map(str, named)) or "none"
            raise InvalidParamError(f"no component {name!r} of {prefer!r}; there is: {there}")
        for record in named:
            if not record.hidden:
                return record
        if named:
            raise NoDeviceError(f"{HIDDEN}: {named[0].hidden}", component=name)
        known = ", ".join(f"{record.name} ({record.state})" for record in records) or "none"
        raise InvalidParamError(f"no component {name!r}; known: {known}")

    def _query(self, record: _Record, config: dict[str, Any]) -> list[MdResource]:
        """Its devices, at least one; else NoDeviceError, and the record says why.

        InvalidParamError: of a setting that is not a default one.
        """
        self._loaded(record)
        found = settings(record.name, record.options, config)
        try:
            answers = _hooks(record).ucx_memh_query_mds(
                component=record.name, config=_values(found)
            )
            devices = [_checked_md(record, md) for answer in answers for md in answer]
            if not devices:
                raise NoDeviceError("it has no device")
        except NoDeviceError as error:
            record.became(UNAVAILABLE, error.detail)
            raise _no_device(record) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, InvalidParamError) and any(s.source != "default" for s in found):
                raise  # it speaks of a setting, not of the component
            record.became(BROKEN, _reason(error), error)
            raise _no_device(record) from error
        record.became(AVAILABLE)
        return devices

    # ---- loading ----

    def _loaded(self, record: _Record) -> None:
        """Load its plugin, unless that was tried; NoDeviceError: why there is none."""
        if not record.tried:
            wrappers = self._all_wrappers()
            with record.lock:
                if record.loading:
                    raise BusyError(f"{record.name} was asked for while it was being loaded")
                if not record.tried:
                    record.loading = True
                    try:
                        self._load(record, wrappers)
                        record.tried = True
                    finally:
                        record.loading = False
        if record.manager is None:
            raise _no_device(record)

    def _load(self, record: _Record, wrappers: list[tuple[object, str]]) -> None:
        """Import the plugin, look whether it keeps the rules, and only then keep it.

        A plugin that exits or breaks while it is imported must not take the others along, so all
        but KeyboardInterrupt is caught.  BusyError: its own import, which is under way, asks.
        """
        try:
            _look_at_files(record.module)
            plugin = record.load()
            if _being_imported(record.module):
                raise _BadPluginError("its hooks are not all there yet")
            record.path = getattr(plugin, "__file__", None) or record.path
            component = _own(_try_alone(plugin), record.name)
            manager = _new_manager()
            for wrapper, name in wrappers:
                manager.register(wrapper, name)
            manager.register(plugin, record.module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if _being_imported(record.module):
                raise BusyError(
                    f"{record.name} was asked for while it was being imported"
                ) from error
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and f"{record.module}.".startswith(f"{missing}."):
                record.became(UNAVAILABLE, _absent(record), error)
            else:
                record.became(BROKEN, _reason(error), error)
            return
        record.options = component.options
        record.version = component.version or record.version
        record.manager = manager
        records = self._records or ()
        known = {r.name: r.options if r.manager else None for r in records if not r.hidden}
        for name in strangers(known, record.name):
            log.warning("%s is set, and %s has no such setting", name, record.name)

    def _all_wrappers(self) -> list[tuple[object, str]]:
        """The plugins of the group for those that see the calls of all; each fails alone."""
        with self._lock:
            if self._wrapping:
                raise BusyError("a wrapper asked for components while it was being loaded")
            if self._wrappers is None:
                self._wrapping = True
                try:
                    self._wrappers = self._load_wrappers()
                finally:
                    self._wrapping = False
            return self._wrappers

    def _load_wrappers(self) -> list[tuple[object, str]]:
        wrappers = []
        for point in sorted(self._entry_points(hookspecs.WRAPPERS), key=str):
            try:
                plugin = point.load()
                if _try_alone(plugin):
                    raise _BadPluginError("it has components: they need entry points")
                wrappers.append((plugin, point.value))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                log.warning("wrapper %s is broken: %s", point.name, _reason(error))
        return wrappers

    # ---- discovery ----

    def _discovered(self) -> list[_Record]:
        if self._records is None:
            with self._lock:
                if self._records is None:
                    self._records = self._discover()
        return self._records

    def _discover(self) -> list[_Record]:
        """Who there is, by the metadata alone."""
        only, without, preferred, added = _choices(os.environ.get(CHOICE, ""))
        records = [*added, *map(_pointed_at, self._entry_points(hookspecs.PROJECT))]
        for record in records:
            if record.rank == 1 and not _there(record.module.partition(".")[0]):
                record.rank, record.tried = 3, True  # it takes its name from nobody
                record.became(UNAVAILABLE, _absent(record))
        records.sort(key=lambda record: (record.rank, record.origin, record.name))
        nobody = (only | without | set(preferred)) - {record.name for record in records}
        for name in sorted(nobody):
            log.warning("%s names %s, and nothing of that name is installed", CHOICE, name)
        why = f"{CHOICE} leaves it out"
        if misspelt := ", ".join(sorted(nobody & only)):
            why += f", and names {misspelt}, of which nothing is installed"
        for record in records:
            if record.rank and (record.name in without or (only and record.name not in only)):
                record.left_out, record.hidden = True, why
        # Who leaves out what is not there has what he wants; who asks for it does not.
        records += map(_nobody, sorted(nobody - without))
        there = [record for record in records if record.rank < 3 and not record.left_out]
        for name in {record.name for record in there}:
            _settle([record for record in there if record.name == name], preferred.get(name))
        return records


def _pointed_at(point: EntryPoint) -> _Record:
    """What an entry point says, and its distribution, as far as its metadata can be read."""
    owner, version = _said_of(point.dist) if point.dist else ("", "")
    try:
        module, load = point.module, point.load
    except (AttributeError, ValueError):  # so importlib.metadata says that it cannot be read
        module, load = "", partial(_no_module, point.value)
    ours = _plain(owner) == "ucx-memh"
    return _Record(
        *(point.name, version, point.value, owner, load), module=module, rank=1 if ours else 2
    )


def _said_of(dist: Distribution) -> tuple[str, str]:
    """Name and version of a distribution, or ""."""
    try:
        return dist.name or "", dist.version or ""
    except Exception:  # there are no metadata, or they are no text
        return "", ""


def _no_module(value: str) -> object:
    raise _BadPluginError(f"its entry point is {value!r}, which is no module's name")


def _installed(group: str) -> Iterable[EntryPoint]:
    """The entry points of what is installed.

    importlib.metadata gives none at all when one distribution, of whomever, is damaged; then each
    is asked alone.
    """
    try:
        return entry_points(group=group)
    except Exception:
        found: dict[str, list[EntryPoint]] = {}  # the first of a name is the one that is imported
        for dist in distributions():
            name = _said_of(dist)[0]
            try:
                points = [point for point in dist.entry_points if point.group == group]
            except Exception as error:
                where = name or getattr(dist, "_path", "a distribution")
                log.warning("the entry points of %s cannot be read: %s", where, _reason(error))
                points = []
            found.setdefault(_plain(name) or f" {len(found)}", points)
        return [point for points in found.values() for point in points]


def _plain(name: str) -> str:
    """A distribution's name as names are compared: a-b, A_B and a.b are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _settle(rivals: list[_Record], preferred: str | None) -> None:
    """Who of those with one name has it; the others are hidden, and say by whom."""
    if preferred is not None:
        named = [r for r in rivals if r.is_of(preferred)]
        why = f"{CHOICE} takes {{}}"
    else:
        named = [r for r in rivals if r.rank == min(rival.rank for rival in rivals)]
        why = "the name is taken by {}"
    if len(named) != 1 and len(rivals) > 1:
        both = " and ".join(map(str, named or rivals))
        for record in rivals:
            record.hidden = f"plugins have the same name: {both}; prefer= chooses"
        return
    for record in rivals:
        if record not in named:
            record.hidden = why.format(named[0]) if named else f"{CHOICE} wants it of {preferred}"


def _choices(text: str) -> tuple[set[str], set[str], dict[str, str], list[_Record]]:
    """UCX_MEMH_BACKENDS, read: only these, without these, preferred origins, added plugins."""
    only: set[str] = set()
    without: set[str] = set()
    preferred: dict[str, str] = {}
    added: list[_Record] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, chosen, origin = item.partition("@")
        if item[0] == "+":
            name, given, path = item[1:].rpartition("=")
            added.append(_added(item, name if given else "", path))
        elif item in ("^", "@") or not name or (chosen and not origin):
            added.append(_nothing(item))
        elif item[0] == "^":
            without.add(item[1:].strip())
        elif chosen:
            preferred[name] = origin
        else:
            only.add(name)
    if only:
        only |= set(preferred)
    return only, without, preferred, added


def _added(item: str, name: str, path: str) -> _Record:
    """A plugin that is not installed: a file, or a module that can be imported."""
    is_file = os.sep in path or path.endswith(".py")
    name = name or (Path(path).name.partition(".")[0] if is_file else path.rpartition(".")[2])
    if not (name and path):
        return _nothing(item)
    load = (lambda: _from_file(name, path)) if is_file else (lambda: importlib.import_module(path))
    module = "" if is_file else path
    return _Record(name, "", path, origin=CHOICE, load=load, module=module, rank=0)


def _nothing(item: str) -> _Record:
    """In the place of a plugin: an item of UCX_MEMH_BACKENDS that names none."""
    return _refused(item, BROKEN, f"{CHOICE} has {item!r}, which names nothing")


def _nobody(name: str) -> _Record:
    return _refused(name, UNAVAILABLE, f"{CHOICE} names it, and nothing of that name is installed")


def _refused(name: str, state: str, reason: str) -> _Record:
    """One that cannot be loaded, to be listed with its reason; it takes its name from nobody."""
    return _Record(
        *(name, "", "", CHOICE, lambda: None), rank=3, state=state, reason=reason, tried=True
    )


def _from_file(name: str, path: str) -> ModuleType:
    full = f"_{CHOICE.lower()}_{name}"
    spec = spec_from_file_location(full, path)
    if spec is None or spec.loader is None:
        raise _BadPluginError(f"{path} is no Python file")
    if path.endswith(".so") and (why := trouble(path)):
        raise _BadPluginError(f"{path}: {why}")
    module = module_from_spec(spec)
    sys.modules[full] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full]
        raise
    return module


def _there(package: str) -> bool:
    """Can it be imported, or has it been?"""
    return sys.modules.get(package) is not None or find_spec(package) is not None


def _being_imported(module: str) -> bool:
    """Is its import under way, in this thread?  Others wait for it, in importlib."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))  # by which importlib knows


def _look_at_files(module: str) -> None:
    """Of the shared objects of its package: one that was cut off would end the process."""
    try:
        spec = find_spec(module.partition(".")[0]) if module else None
    except ValueError:
        return  # it is imported, and has put something else in its place
    if spec is None:
        return  # importing it will say so
    folders = spec.submodule_search_locations or ()
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.so"))]
    if spec.origin and spec.origin.endswith(".so"):
        files.append(Path(spec.origin))
    for path in files:
        if why := trouble(str(path)):
            raise _BadPluginError(f"{path}: {why}")


def _try_alone(plugin: object) -> list[Component]:
    """What the plugin offers, if it keeps the rules; in a manager of its own, so that a plugin
    that does not is never among the others."""
    _check_version(getattr(plugin, "API_VERSION", (1, 0)))
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
    return [_checked(c) for answer in manager.hook.ucx_memh_components() for c in answer]


def _checked(component: object) -> Component:
    """The component, whose options may be given by any iterable."""
    if not isinstance(component, Component):
        raise _BadPluginError(f"ucx_memh_components gave {component!r}, which is no Component")
    if not all(isinstance(text or "", str) for text in (component.name, component.version)):
        raise _BadPluginError(f"ucx_memh_components gave {component!r}, which is not named by text")
    component = replace(component, options=tuple(component.options))
    if not all(isinstance(option, Option) for option in component.options):
        raise _BadPluginError(f"the options of {component.name} are not all an Option")
    names = [option.name for option in component.options]
    if twice := {name for name in names if names.count(name) > 1}:
        raise _BadPluginError(f"{component.name} has two options {min(twice)!r}")
    if "prefer" in names:
        raise _BadPluginError(f"{component.name} has an option 'prefer', which open_md() needs")
    return component


def _check_version(wanted: object) -> None:
    """A plugin for another major version does not fit, nor one for a newer minor one."""
    if not (isinstance(wanted, tuple) and len(wanted) == 2 and all(type(n) is int for n in wanted)):
        raise _BadPluginError(f"its API_VERSION is {wanted!r}, not (major, minor)")
    major, minor = hookspecs.API_VERSION
    if wanted[0] != major or wanted[1] > minor:
        raise _BadPluginError(
            f"it is for version {wanted[0]}.{wanted[1]} of the hooks, and this is {major}.{minor}"
        )


def _own(described: list[Component], name: str) -> Component:
    """The component that the entry point is for."""
    for component in described:
        if component.name == name:
            return component
    offers = ", ".join(component.name for component in described) or "none"
    raise _BadPluginError(f"its entry point is named {name}, and its components are: {offers}")


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _hooks(record: _Record) -> Any:
    assert record.manager is not None
    return record.manager.hook


def _values(found: Iterable[Setting]) -> dict[str, Any]:
    """What the hooks get of settings."""
    return {setting.option.name: setting.value for setting in found}


def _usable_first(record: _Record) -> bool:
    return bool(record.hidden) or (record.tried and record.manager is None)


def _absent(record: _Record) -> str:
    return f"{record.module} is not part of this installation"


def _checked_md(record: _Record, md: object) -> MdResource:
    if not isinstance(md, MdResource) or md.component != record.name:
        raise _BadPluginError(f"ucx_memh_query_mds gave {md!r}, which is no device of its own")
    if not isinstance(md.md_name, str):
        raise _BadPluginError(f"ucx_memh_query_mds gave {md!r}, which is not named by text")
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


_plugins = Plugins(_installed)
os.register_at_fork(after_in_child=_plugins.forget_locks)
components = _plugins.components
query_mds = _plugins.query_mds
open_md = _plugins.open_md
