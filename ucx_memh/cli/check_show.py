# SPDX-License-Identifier: BSD-3-Clause
"""What a person, and what a program, sees of check-device."""

import textwrap
from dataclasses import asdict
from typing import Any

import ucx_memh as um
from ucx_memh.cli.check_row import Row
from ucx_memh.flags import Enforcement

__all__ = ["Show", "document"]

FORMAT = 1  # of the JSON; another number when a name changes its meaning
VERDICTS = {
    "enforced": "enforced by the device",
    "cooperative": "NOT enforced (cooperative)",
    "not_enforced": "NOT enforced",
    "holds": "holds",
    "broken": "DOES NOT HOLD",
    "untried": "could not be tried",
    "error": "could not be tried: ERROR",
}


def document(
    attr: um.MdAttr,
    no_derived: str,
    checks: list[Row],
    costs: list[dict[str, Any]],
    ratios: list[dict[str, Any]],
    failed: str,
) -> dict[str, Any]:
    """All of it, of JSON's types; the help of the command says what is what."""
    failures = [_failure(row) for row in checks if row.failed] + ([failed] if failed else [])
    return {
        "format": FORMAT,
        "version": um.__version__,
        "device": {
            "component": attr.component,
            "name": attr.md_name,
            "software": attr.software,
            "flags": [flag.name for flag in attr.flags if flag.name],
            "derived_keys": no_derived or None,
        },
        "claims": {
            promise: {access: Enforcement(who).name for access, who in row.items()}
            for promise, row in asdict(attr.enforcement).items()
        },
        "checks": [row.as_json() for row in checks],
        "costs": costs,
        "ratios": ratios,
        "failures": failures,
        "status": 1 if failures else 0,
    }


def _failure(row: Row) -> str:
    what = f"{row.promise} {row.access}".rstrip()
    if row.verdict == "error":
        return f"{what}: {row.reason}"
    if row.claimed is not None:
        return f"{what}: claimed {row.claimed.name}, but {VERDICTS[row.verdict]}: {row.seen}"
    return f"{what}: {row.seen}"


class Show:
    """Prints rows as they come; a check of a slow device takes its time."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def say(self, text: str = "") -> None:
        if not self.quiet:
            print(text.rstrip(), flush=True)

    def intro(self, attr: um.MdAttr, no_derived: str, others: list[str]) -> None:
        self.say(f"ucx_memh {um.__version__}: {attr.component}/{attr.md_name}")
        if others:
            self.say(f"(not looked at: {', '.join(others)})")
        if attr.software:
            self.say(
                "This device is made of SOFTWARE: it refuses as the vendor's tables say, but its "
                "times are not\na NIC's."
            )
        self.say(f"derived keys: {f'none ({no_derived})' if no_derived else 'yes'}")
        self.say()
        self.say(f"{'promise':<10} {'access':<7} {'tried':<44} verdict")

    def check(self, row: Row) -> None:
        verdict = VERDICTS[row.verdict]
        if row.failed:
            verdict = f"FAILED: {verdict}"
        self.say(f"{row.promise:<10} {row.access:<7} {row.tried:<44} {verdict}")
        # Nothing more to say of what is as it ought to be, but how it was in flight.
        plain = row.verdict in ("enforced", "holds") and row.promise != "in flight"
        notes = [] if plain and not row.failed else [row.reason or row.seen]
        if row.claimed is not None and row.found is not None and row.found != row.claimed:
            modest = "" if row.failed else ", which is modest"
            notes.append(f"claimed is {row.claimed.name}{modest}")
        for line in textwrap.wrap("; ".join(notes), 80):
            self.say(f"{'':<18} {line}")

    def costs(self, rows: list[dict], ratios: list[dict], failed: str) -> None:
        sizes = list(dict.fromkeys(row["size"] for row in rows))
        cells = {(row["step"], row["size"]): row for row in rows}
        self.say()
        self.say(f"{'cost, median (p95)':<28}" + "".join(f"{_size(size):>24}" for size in sizes))
        for step in dict.fromkeys(row["step"] for row in rows):
            line = f"  {step:<26}"
            for size in sizes:
                row = cells[step, size]
                line += f"{_us(row['median_us'])} ({_us(row['p95_us'])})".rjust(24)
            self.say(line)
        if ratios:
            line = f"  {'register anew / invalidate':<26}"
            self.say(line + "".join(_times(ratio["ratio"]).rjust(24) for ratio in ratios))
        if failed:
            self.say(f"FAILED: {failed}")

    def verdict(self, report: dict[str, Any]) -> None:
        self.say()
        checks = report["checks"]
        untried = sum(check["verdict"] == "untried" for check in checks)
        for failure in report["failures"]:
            self.say(f"FAILED: {failure}")
        good = sum(not check["failed"] for check in checks) - untried
        self.say(
            f"{good} of {len(checks)} checks are as claimed, {untried} could not be tried, "
            f"{len(report['failures'])} failed"
        )


def _size(size: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def _us(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.1f} us"


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
