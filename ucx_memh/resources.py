# SPDX-License-Identifier: BSD-3-Clause
"""Descriptions of components, devices and what they promise: values, nothing behind them."""

from collections.abc import Iterable
from dataclasses import dataclass

from ucx_memh.config import Option
from ucx_memh.flags import Enforcement, MdFlag, MemFlag, MemType

__all__ = [
    "AVAILABLE",
    "BROKEN",
    "HIDDEN",
    "UNAVAILABLE",
    "UNPROBED",
    "Component",
    "ComponentInfo",
    "EnforcementRow",
    "EnforcementTable",
    "KeyInfo",
    "MdAttr",
    "MdResource",
]

# States of a component.
UNPROBED = "unprobed"  # nobody has asked it for devices yet
AVAILABLE = "available"  # it has devices
UNAVAILABLE = "unavailable"  # it works, but there is nothing here for it
BROKEN = "broken"  # its plugin failed
HIDDEN = "hidden"  # another has its name, or UCX_MEMH_BACKENDS leaves it out


@dataclass(frozen=True, slots=True)
class Component:
    """What a plugin says of itself, without looking at any device."""

    name: str
    version: str = ""
    description: str = ""
    options: tuple[Option, ...] = ()
    """The settings that it has; others are refused."""


@dataclass(frozen=True, slots=True)
class ComponentInfo:
    """A component as this process knows it; `reason` says why it is not available."""

    name: str
    state: str
    reason: str
    path: str
    version: str
    options: tuple[Option, ...] = ()
    """Its settings, when it is loaded."""
    origin: str = ""
    """The distribution that it came with."""


@dataclass(frozen=True, slots=True)
class MdResource:
    """A device that open_md() can open; `software` if it is made of software."""

    component: str
    md_name: str
    software: bool = False

    def __str__(self) -> str:
        return f"{self.component}/{self.md_name}"


@dataclass(frozen=True, slots=True)
class EnforcementRow:
    """One promise, for each kind of access."""

    get: Enforcement = Enforcement.NONE
    put: Enforcement = Enforcement.NONE
    atomic: Enforcement = Enforcement.NONE

    @classmethod
    def of(cls, cells: Iterable[int]) -> "EnforcementRow":
        """From the three numbers of a ucxm_enforcement_t row."""
        return cls(*map(Enforcement, cells))


@dataclass(frozen=True, slots=True)
class EnforcementTable:
    """Who sees to it that a key gives its rights only, in its range only, until it is revoked."""

    rights: EnforcementRow = EnforcementRow()
    range: EnforcementRow = EnforcementRow()
    revoke: EnforcementRow = EnforcementRow()

    @classmethod
    def of(
        cls, rights: Iterable[int], range: Iterable[int], revoke: Iterable[int]
    ) -> "EnforcementTable":
        """From the numbers of a ucxm_enforcement_t: in each row get, put, atomic."""
        return cls(*map(EnforcementRow.of, (rights, range, revoke)))


@dataclass(frozen=True, slots=True)
class MdAttr:
    """What an open Md can do; `enforcement` is the least that any derived handle gets."""

    component: str
    md_name: str
    software: bool
    flags: MdFlag
    rkey_packed_size: int
    key_size_max: int
    max_reg: int
    reg_alignment: int
    mem_types: frozenset[MemType]
    enforcement: EnforcementTable
    python: bool = False  # the backend is written in Python: its calls take the GIL


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What stands in a packed key's envelope."""

    component: int
    """The id of its component: the 32-bit FNV-1a hash of the name."""
    key_id: int
    address: int
    length: int
    flags: MemFlag
    """The remote rights that the key gives."""
    owner: bytes
    """The identity of the process that packed it, 32 bytes."""
    size: int
    """Bytes of the packed key, behind which a buffer may hold others."""
    revocable: bool
    endpoint_bound: bool
