# SPDX-License-Identifier: BSD-3-Clause
"""Configuration: as text becomes values, and what a backend does with those."""

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from ucx_memh.errors import InvalidParamError

__all__ = ["literal", "settings"]


def settings(
    config: Mapping[str, Any] | None, known: Iterable[str], component: str
) -> dict[str, Any]:
    """The configuration as a dict of its own; InvalidParamError names a key that is not `known`.

    A misspelt key that is ignored would leave its user with a setting that he did not ask for.
    """
    config = dict(config or {})
    known = tuple(known)
    if unknown := [name for name in config if name not in known]:
        raise InvalidParamError(
            f"unknown configuration key {unknown[0]!r}; known are {', '.join(known)}",
            op="open_md",
            component=component,
        )
    return config


def literal(text: str) -> Any:
    """The value that a setting's text stands for: a Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
