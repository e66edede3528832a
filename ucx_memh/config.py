# SPDX-License-Identifier: BSD-3-Clause
"""The settings of components: declared by a plugin, given in a call or in the environment.

A plugin lists an Option for each setting in its Component.  What a call of open_md() or query_mds()
gives wins over the environment variable UCX_MEMH_<COMPONENT>_<OPTION>, which wins over the default.
The plugin's hooks get a value of the declared type for every option, and never a key besides.
"""

import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ucx_memh.errors import InvalidParamError

__all__ = ["Option", "Setting", "setting_of", "settings", "strangers", "variable"]

PREFIX = "UCX_MEMH_"
_TRUTH = {
    **dict.fromkeys(["y", "yes", "on", "true", "1"], True),
    **dict.fromkeys(["n", "no", "off", "false", "0"], False),
}
_KINDS = {int: "a whole number", float: "a number", bool: "yes or no", str: "text"}


@dataclass(frozen=True, slots=True)
class Option:
    """A setting that a component has.

    `type` is int, float, bool, str, or a tuple of words, of which it must be one.  Numbers are from
    `minimum` to `maximum`, where these are given.  With `environment` False no variable sets it:
    for what means something in one process only.  InvalidParamError: it contradicts itself.
    """

    name: str
    type: type | tuple[str, ...]
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    environment: bool = True

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z][a-z0-9_]*", self.name):
            raise InvalidParamError(f"an option cannot be named {self.name!r}")
        words = isinstance(self.type, tuple) and all(isinstance(word, str) for word in self.type)
        if not (words and self.type) and self.type not in _KINDS:
            raise InvalidParamError(f"an option cannot be of type {self.type!r}")
        value = self.read(self.default)
        if value != self.default or isinstance(self.default, str) != isinstance(value, str):
            raise InvalidParamError(f"the default of {self.name} is {self.default!r}")

    @property
    def wanted(self) -> str:
        """What its value must be, in words."""
        if isinstance(self.type, tuple):
            return f"one of {', '.join(self.type)}"
        text = _KINDS[self.type]
        if self.minimum is not None and self.maximum is not None:
            return f"{text} from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f"{text} of {self.minimum} at least"
        return text if self.maximum is None else f"{text} of {self.maximum} at most"

    def read(self, value: Any) -> Any:
        """`value` as this option's type; a text, say of the environment, is read.

        InvalidParamError: it cannot be, and what is wanted.
        """
        try:
            found = self._convert(value)
        except (TypeError, ValueError, OverflowError):
            found = None
        if found is None:
            raise InvalidParamError(f"{self.name} is {value!r}, not {self.wanted}", op="open_md")
        return found

    def _convert(self, value: Any) -> Any:
        if isinstance(self.type, tuple):
            return value if value in self.type else None
        if self.type is str:
            value = os.fspath(value)
            return value if isinstance(value, str) else None
        if self.type is bool:
            return value if isinstance(value, bool) else _TRUTH.get(str.strip(value).lower())
        if isinstance(value, bool):
            return None
        number: float
        if self.type is int:
            number = int(value, 0) if isinstance(value, str) else operator.index(value)
        else:
            number = float(value)
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        return number if low <= number <= high and math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an option, and its source: "call", "default", or a variable's name."""

    option: Option
    value: Any
    source: str


def variable(component: str, option: str) -> str:
    """The environment variable of a component's option."""
    return PREFIX + re.sub(r"\W", "_", f"{component}_{option}", flags=re.ASCII).upper()


def setting_of(component: str, option: Option, given: Mapping[str, Any]) -> Setting:
    """What an option is set to; an empty variable counts as none.

    InvalidParamError: a value is not what the option wants.
    """
    if option.name in given:
        source, value = "call", given[option.name]
    else:
        source = variable(component, option.name)
        value = os.environ.get(source) if option.environment else None
    if not value and source != "call":
        return Setting(option, option.default, "default")
    try:
        return Setting(option, option.read(value), source)
    except InvalidParamError as error:
        detail = error.detail if source == "call" else f"{source}: {error.detail}"
        raise InvalidParamError(detail, op="open_md", component=component) from None


def settings(
    component: str, options: Iterable[Option], given: Mapping[str, Any]
) -> list[Setting]:
    """All settings of a component, those of a call being `given`.

    InvalidParamError names a key that is no option: if a misspelt one were ignored, its user would
    have a setting that he did not ask for.
    """
    options = tuple(options)
    names = [option.name for option in options]
    if unknown := [name for name in given if name not in names]:
        raise InvalidParamError(
            f"unknown configuration key {unknown[0]!r}; "
            + (f"known are {', '.join(names)}" if names else "it has none"),
            op="open_md",
            component=component,
        )
    return [setting_of(component, option, given) for option in options]


def strangers(
    components: Mapping[str, Iterable[Option] | None], component: str | None = None
) -> list[str]:
    """The variables that are named like a setting of one of these components, and are none.

    Of all, or those that are like a setting of that `component`.  None as options: they are not
    known, and any variable may be one.
    """
    by_prefix = {variable(name, ""): name for name in components}
    found = []
    for name in os.environ:
        # UCX_MEMH_IB_MLX5_UMR is for ib_mlx5, and not for ib.
        owner = by_prefix.get(max(filter(name.startswith, by_prefix), key=len, default=""), "")
        options = components.get(owner)
        if options is not None and component in (None, owner):
            known = {variable(owner, option.name) for option in options if option.environment}
            found += [name] if name not in known else []
    return sorted(found)
