# SPDX-License-Identifier: BSD-3-Clause
"""List components and devices, what they can do, and why something is not there."""

import argparse
import json
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from enum import Flag
from tempfile import TemporaryFile
from typing import IO

import ucx_memh as um
from ucx_memh.config import setting_of, strangers, variable

__all__ = ["add_arguments", "run"]

MONTH = 30 * 24 * 3600.0  # in seconds; longer than anybody waits
NOT_LOADED = ("broken", "hidden", "unavailable")  # of these the options may not be known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.add_argument("--component", metavar="NAME", help="this one alone")
    parser.add_argument(
        "--isolate",
        action="store_true",
        help="ask each component in a process of its own, which it may end or keep",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=10,
        metavar="SECONDS",
        help="for each with --isolate (default 10)",
    )
    parser.add_argument(
        "--config",
        action="store_true",
        help="instead: the settings of all components, and what sets them; asks no device",
    )


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < MONTH:
            return seconds
    raise argparse.ArgumentTypeError(f"want a number of seconds above 0, not {text!r}")


def run(args: argparse.Namespace) -> int:
    if args.component is not None:
        _known(args.component)
    if args.config:
        report, text = settings(args.component), settings_text
    elif args.isolate:
        report, text = isolated(args.component, args.timeout), as_text
    else:
        report, text = collect(args.component), as_text
    print(json.dumps(report, indent=2) if args.json else text(report))
    return 0


def _known(component: str) -> None:
    names = sorted({info.name for info in um.components()})
    if component not in names:
        raise um.InvalidParamError(f"no component {component!r}; known: {', '.join(names)}")


def _of(component: str | None, load: bool = False) -> list[um.ComponentInfo]:
    return [info for info in um.components(load) if component in (None, info.name)]


def collect(component: str | None = None) -> dict:
    """All that there is to know, of JSON's types; asks and opens every device."""
    devices: dict[str, list[dict]] = {}
    with suppress(um.NoDeviceError):  # its state says so
        for resource in um.query_mds(component) if component else um.query_mds():
            devices.setdefault(resource.component, []).append(_device(resource))
    # After the query: now the states are known.
    components = [
        {**_about(info), "devices": devices.get(info.name, []) if info.state == "available" else []}
        for info in _of(component)
    ]
    return {"version": um.__version__, "components": components}


def isolated(component: str | None, timeout: float) -> dict:
    """The same, each component asked in a process of its own; all of them at a time.

    One that ends its process, or does not answer in that many seconds, is "broken".
    """
    known = [{**_about(info), "devices": []} for info in _of(component)]
    asked = [about for about in known if about["state"] != "hidden"]
    with ThreadPoolExecutor(max_workers=8) as threads:
        for about, found in zip(
            asked, threads.map(lambda about: _ask(about["name"], timeout), asked), strict=True
        ):
            about.update(found)
    return {"version": um.__version__, "components": known}


def _ask(component: str, timeout: float) -> dict:
    command = [sys.executable, "-m", "ucx_memh", "info", "--json", "--component", component]
    # Files: a pipe has no end while a process that the plugin has started keeps it.
    with TemporaryFile() as out, TemporaryFile() as err:
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            return {"state": "broken", "reason": f"no answer within {timeout:g} s"}
        said, errors = _text_of(out), _text_of(err)
    try:
        text = said[said.rfind('{\n  "version"') :]  # a plugin may print, too
        found = json.loads(text)["components"]
        return next(about for about in found if about["state"] != "hidden")
    except (ValueError, KeyError, StopIteration):
        how = f"status {status}"
        if status < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = names.get(-status, f"signal {-status}")  # those for real time have none
        last = " ".join(errors.split("\n")[-2:]).strip()
        return {"state": "broken", "reason": f"it ended its process: {how} {last}".strip()}


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _about(info: um.ComponentInfo) -> dict:
    return {
        "name": info.name,
        "state": info.state,
        "reason": info.reason,
        "path": info.path,
        "version": info.version,
        "origin": info.origin,
    }


def settings(component: str | None = None) -> dict:
    """All settings there are, and the variables that nothing reads; of JSON's types."""
    known = _of(component, load=True)
    return {
        "version": um.__version__,
        "components": [
            {**_about(info), "settings": [_setting(info.name, option) for option in info.options]}
            for info in known
        ],
        "ignored": strangers(
            {info.name: info.options for info in known if info.state not in NOT_LOADED}
        ),
    }


def _setting(component: str, option: um.Option) -> dict:
    described = {
        "name": option.name,
        "wanted": option.wanted,
        "default": option.default,
        "help": option.help,
        "variable": variable(component, option.name) if option.environment else None,
    }
    try:
        found = setting_of(component, option, {})
    except um.InvalidParamError as error:
        return {**described, "error": error.detail}
    return {**described, "value": found.value, "source": found.source}


def _device(resource: um.MdResource) -> dict:
    device: dict = {"name": resource.md_name, "software": resource.software}
    try:
        with um.open_md(resource) as md:
            attr = md.attr
    except um.MemhError as error:
        return {**device, "error": str(error)}
    rows = asdict(attr.enforcement)
    return {
        **device,
        "flags": _names(attr.flags),
        "mem_types": sorted(kind.name for kind in attr.mem_types),
        "rkey_packed_size": attr.rkey_packed_size,
        "key_size_max": attr.key_size_max,
        "max_reg": attr.max_reg,
        "reg_alignment": attr.reg_alignment,
        "enforcement": {
            promise: {access: who.name for access, who in row.items()}
            for promise, row in rows.items()
        },
    }


def settings_text(report: dict) -> str:
    """The same for a person."""
    lines = [f"ucx_memh {report['version']}"]
    for component in report["components"]:
        unknown = component["state"] in NOT_LOADED and not component["settings"]
        lines += ["", _headline(component) if unknown else _title(component)]
        for setting in component["settings"]:
            if "error" in setting:
                found = f"wrong: {setting['error']}"
            else:
                found = f"{_word(setting['value'])} ({setting['source']})"
            lines += [f"  {setting['name']} = {found}"]
            text = f"{setting['wanted']}: {setting['help']}"
            lines += textwrap.wrap(text, 94, initial_indent=" " * 6, subsequent_indent=" " * 6)
            if setting["variable"]:
                lines += [f"      {setting['variable']}"]
        if not (component["settings"] or unknown):
            lines += ["  no settings"]
    if report["ignored"]:
        lines += ["", "set, but no setting of a component:"]
        lines += [f"  {name}" for name in report["ignored"]]
    return "\n".join(lines)


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value) or '""'


def _names(flags: Flag) -> list[str]:
    return [flag.name for flag in flags if flag.name]


def as_text(report: dict) -> str:
    """The same for a person."""
    lines = [f"ucx_memh {report['version']}"]
    for component in report["components"]:
        lines += ["", _headline(component)]
        if component["path"]:
            lines += [f"  {component['path']}"]
        for device in component["devices"]:
            lines += _device_lines(device)
    if not report["components"]:
        lines += ["", "no components are installed"]
    return "\n".join(lines)


def _title(component: dict) -> str:
    return f"{component['name']} {component['version']}".rstrip()


def _headline(component: dict) -> str:
    reason = component["reason"]
    return f"{_title(component)}: {component['state']}" + (f" ({reason})" if reason else "")


def _device_lines(device: dict) -> list[str]:
    made = "made of software" if device["software"] else "hardware or kernel"
    lines = [f"  device {device['name']}: {made}"]
    if "error" in device:
        return [*lines, f"    cannot be opened: {device['error']}"]
    unlimited = device["max_reg"] in (0, 2**64 - 1)
    limit = "no limit" if unlimited else f"{device['max_reg']} bytes"
    lines += [
        f"    can           {' '.join(device['flags']).lower()}",
        f"    memory        {' '.join(device['mem_types']).lower()}",
        f"    key           {device['rkey_packed_size']} bytes of {device['key_size_max']} at most",
        f"    registration  {limit}, aligned to {device['reg_alignment']}",
        f"    enforcement   {'get':<13}{'put':<13}atomic",
    ]
    for promise, row in device["enforcement"].items():
        cells = "".join(f"{who.lower():<13}" for who in row.values())
        lines.append(f"      {promise:<12}{cells}")
    return [line.rstrip() for line in lines]
