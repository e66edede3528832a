# SPDX-License-Identifier: BSD-3-Clause
"""Try out what a device really enforces, and what each step costs on it.

Each promise (rights, range, revocation, also of what is in flight) is attacked with keys that our
library does not check, so that only the device can refuse, and compared with what the domain
claims.  Without --md or --backend it takes the first adapter that hands out derived keys, else a
software device.  Only memory and connections of its own are touched.

Exit status 0: every claim holds (a claim may be modest: "the device does not keep the range").
1: a claim is broken, a check ended in an error, or there is no device.  2: the command line is
wrong.

--json prints one object: `format` (1), `version`, `device` (component, name, software, flags,
derived_keys: null or why there are none), `claims` (promise -> access -> NONE, COOPERATIVE or
ENFORCED), `checks`, `costs` (size, step, median_us, p95_us, rounds), `ratios` (size,
invalidate_us, reregister_us, ratio), `failures` (lines) and `status`.  Each of `checks` has
`promise`, `access` ("" for all), `tried`, `expected`, `seen`, `verdict` (enforced, cooperative,
not_enforced, holds, broken, untried or error), `found` and `claimed` (null where there is no such
thing), `reason` (of untried and error), `failed` and `seconds`.
"""

import argparse
import json
import time
from typing import Any

import ucx_memh as um
from ucx_memh.cli import add_config, config_of
from ucx_memh.cli.check_cost import costs, ratios
from ucx_memh.cli.check_probes import probes
from ucx_memh.cli.check_rig import Rig
from ucx_memh.cli.check_row import Probe, Row
from ucx_memh.cli.check_show import Show, document

__all__ = ["add_arguments", "run"]

SIZES = {False: [4 << 10, 1 << 20, 64 << 20], True: [4 << 10, 1 << 20]}  # by --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--md", metavar="COMPONENT/NAME", help="the device")
    which.add_argument("--backend", metavar="COMPONENT", help="its first device")
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.add_argument("--quick", action="store_true", help="fewer cycles, two sizes")
    parser.add_argument(
        "--sizes", type=_sizes, metavar="N[K|M|G],...", help="for the costs (default 4K,1M,64M)"
    )
    parser.add_argument(
        "--cycles", type=int, metavar="N", help="derive, pack, invalidate that often (default 200)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=10,
        metavar="SECONDS",
        help="for one operation (default 10); then it counts as never ending",
    )


def _sizes(text: str) -> list[int]:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        sizes = [
            int(part.rstrip("KMGkmg")) * units.get(part[-1:].upper(), 1) for part in text.split(",")
        ]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"no sizes: {text!r}")
    return sizes


def run(args: argparse.Namespace) -> int:
    if args.wait <= 0 or (args.cycles is not None and args.cycles < 1):
        raise um.InvalidParamError("--wait and --cycles must be above 0", op="check-device")
    resource, config, others = _choose(args)
    show = Show(quiet=args.json)
    with Rig(lambda: um.open_md(resource, **config), args.wait) as rig:
        attr = rig.owner.attr
        show.intro(attr, rig.no_derived, others)
        checks: list[Row] = []
        rows: list[dict[str, Any]] = []
        failed = ""
        try:
            for probe in probes(rig, args.cycles or (50 if args.quick else 200)):
                _try(probe, rig, checks, show)
            failed = _costs(rig, args.sizes or SIZES[args.quick], 0.2 if args.quick else 1.0, rows)
        except um.MemhError as error:
            failed = f"given up: {error}"  # what was found until then is told all the same
        show.costs(rows, ratios(rows), failed)
        report = document(attr, rig.no_derived, checks, rows, ratios(rows), failed)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show.verdict(report)
    return report["status"]


def _try(probe: Probe, rig: Rig, checks: list[Row], show: Show) -> None:
    """Its row; after a device's failure one that says so, and the device is opened anew."""
    start = time.perf_counter()
    failed = None
    try:
        row = probe()
    except um.MemhError as error:
        row = failed = probe.failed(error)
    row.seconds = round(time.perf_counter() - start, 3)
    checks.append(row)
    show.check(row)
    if failed:
        rig.reopen()


def _costs(rig: Rig, sizes: list[int], seconds: float, rows: list[dict[str, Any]]) -> str:
    """Size by size: one that is too large for this device leaves the others.  Why it failed."""
    failed = ""
    for size in sizes:
        try:
            rows += costs(rig.owner, rig.peer, [size], seconds)
        except (um.MemhError, MemoryError) as error:
            failed = f"costs at {size} bytes: {error}"
            rig.reopen()
    return failed


# ---- which device ----


def _choose(args: argparse.Namespace) -> tuple[um.MdResource, dict[str, Any], list[str]]:
    """The device, its configuration, and what else there is (or is not, and why)."""
    named = args.md or args.backend
    config = config_of(args.config)
    if named:
        component, _, name = named.partition("/")
        found = um.query_mds(component, **config)
        for resource in found:
            if not name or resource.md_name == name:
                return resource, config, []
        names = ", ".join(map(str, found))
        raise um.NoDeviceError(f"no device {named!r}; there is {names}", op="check-device")
    if config:
        raise um.InvalidParamError("--config needs --md or --backend", op="check-device")
    found = sorted(um.query_mds(), key=lambda resource: resource.software)
    reasons = [f"{info.name} ({info.reason})" for info in um.components() if info.reason]
    if not found:
        raise um.NoDeviceError("; ".join(reasons) or "no components are installed")
    chosen = next(filter(_derives, found), found[0])
    return chosen, config, [str(md) for md in found if md != chosen] + reasons


def _derives(resource: um.MdResource) -> bool:
    try:
        with um.open_md(resource) as md:
            return um.MdFlag.REG_DERIVED in md.attr.flags
    except um.MemhError:
        return False
