# SPDX-License-Identifier: BSD-3-Clause
"""Can this process reach others, and others this one?  Cheap, and never fatal."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Calls:
    """The system calls that a probe makes; a test puts others in their place."""

    self_test: Callable[[], int]
    set_ptracer_any: Callable[[], int]
    has_cap_sys_ptrace: Callable[[], bool]


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found."""

    available: bool
    reason: str
    """One line: why not, or what the finding rests on."""
    scope: int | None
    """Yama's scope; None where it could not be read."""
    ptracer_calls: int = 0
    """How often PR_SET_PTRACER was asked for."""


def read_scope(path: str) -> tuple[int | None, str]:
    """Yama's scope and, where there is none, why."""
    try:
        with open(path, "rb") as file:
            text = file.read(64)
    except FileNotFoundError:
        return None, "no Yama"
    except OSError as error:
        return None, f"Yama scope unreadable ({error.strerror})"
    try:
        scope = int(text)
    except ValueError:
        return None, f"Yama scope not understood ({text[:16]!r})"
    if not 0 <= scope <= 3:
        return None, f"Yama scope not known ({scope})"
    return scope, f"Yama scope {scope}"


def native_calls() -> Calls:
    """The real system calls."""
    from . import _md

    return Calls(_md.self_test, _md.set_ptracer_any, _md.has_cap_sys_ptrace)


def probe(
    yama_scope_path: str,
    *,
    opening: bool = False,
    calls: Calls | None = None,
) -> ProbeResult:
    """Find out whether cma can work here.

    A scope that is absent, unreadable or unknown counts as allowed: what the kernel really
    permits shows when a key is unpacked.  Only when `opening` is anything changed: at scope 1
    this process lets others with its credentials reach it (PR_SET_PTRACER_ANY).
    """
    if calls is None:
        calls = native_calls()
    failed = calls.self_test()
    if failed:
        why = f"process_vm_readv and process_vm_writev do not work here: {os.strerror(failed)}"
        return ProbeResult(False, why, None)
    scope, found = read_scope(yama_scope_path)
    if scope == 3:
        return ProbeResult(False, f"{found}: nobody may reach another process's memory", scope)
    if scope == 2 and not calls.has_cap_sys_ptrace():
        return ProbeResult(False, f"{found}: needs CAP_SYS_PTRACE", scope)
    if scope == 1:
        if not opening:
            return ProbeResult(True, f"{found}: opening will ask for PR_SET_PTRACER_ANY", scope)
        failed = calls.set_ptracer_any()
        # EINVAL: the kernel has no Yama, whatever the file says; then nothing stands in the way.
        if failed not in (0, errno.EINVAL):
            why = f"{found}, and PR_SET_PTRACER was refused: {os.strerror(failed)}"
            return ProbeResult(False, why, scope, 1)
        how = "PR_SET_PTRACER_ANY is set" if failed == 0 else "the kernel knows no PR_SET_PTRACER"
        return ProbeResult(True, f"{found}: {how}", scope, 1)
    return ProbeResult(True, found, scope)
