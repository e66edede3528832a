# SPDX-License-Identifier: BSD-3-Clause
"""What was found of one promise."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import ucx_memh as um
from ucx_memh.flags import Enforcement

__all__ = ["Probe", "Row", "untried"]


@dataclass
class Row:
    """What was tried of a promise, and what came of it; the JSON has the same names."""

    promise: str
    access: str
    tried: str = ""
    expected: str = ""
    seen: str = ""
    found: Enforcement | None = None
    claimed: Enforcement | None = None
    holds: bool | None = None  # of what nobody has to refuse
    reason: str = ""  # why it could not be tried
    error: bool = False
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.reason:
            return "error" if self.error else "untried"
        if self.holds is not None:
            return "holds" if self.holds else "broken"
        return {
            Enforcement.ENFORCED: "enforced",
            Enforcement.COOPERATIVE: "cooperative",
            Enforcement.NONE: "not_enforced",
        }[self.found or Enforcement.NONE]

    @property
    def failed(self) -> bool:
        less = self.found is not None and self.claimed is not None and self.found < self.claimed
        return less or self.verdict in ("error", "broken")

    def as_json(self) -> dict[str, Any]:
        names = {name: None if who is None else who.name for name, who in self._levels().items()}
        fields = {k: v for k, v in asdict(self).items() if k not in ("holds", "error")}
        return {**fields, **names, "verdict": self.verdict, "failed": self.failed}

    def _levels(self) -> dict[str, Enforcement | None]:
        return {"found": self.found, "claimed": self.claimed}


@dataclass
class Probe:
    """A promise to be tried for one kind of access."""

    promise: str
    access: str
    action: Callable[[Row], None]

    def __call__(self) -> Row:
        row = Row(self.promise, self.access)
        self.action(row)
        return row

    def failed(self, error: um.MemhError) -> Row:
        return Row(self.promise, self.access, reason=" ".join(str(error).split()), error=True)


def untried(promise: str, access: str, reason: str) -> Probe:
    def action(row: Row) -> None:
        row.reason = reason

    return Probe(promise, access, action)
