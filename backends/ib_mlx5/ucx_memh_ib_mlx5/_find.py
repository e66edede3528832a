# SPDX-License-Identifier: BSD-3-Clause
"""Which libraries to open, and which devices they have."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from ucx_memh.errors import NoDeviceError
from ucx_memh_ib import verbs

from . import devx

COMPONENT = "ib_mlx5"
HARDWARE = ("libibverbs.so.1", "libmlx5.so.1")


@dataclass(frozen=True)
class Device:
    """Two libraries that belong together, and the names of their devices."""

    verbs: str
    mlx5: str
    names: tuple[str, ...]
    software: bool


def software_library() -> str:
    """Path of the software device that was built with this package."""
    return str(files("ucx_memh_ib_mlx5._soft") / "libsoftmlx5.so")


def look(verbs_path: str, mlx5_path: str) -> Device:
    """What these libraries have; NoDeviceError: the reason why nothing."""
    names = tuple(devx.devices(verbs_path, mlx5_path))
    if not names:
        raise NoDeviceError(f"{verbs_path} lists no mlx5 device", component=COMPONENT)
    return Device(verbs_path, mlx5_path, names, verbs.is_software(verbs_path))


def device(kind: str, library: str) -> Device:
    """The devices that the options `device` and `library` ask for."""
    if library:
        found = look(library, library)
        if kind != "auto" and found.software != (kind == "software"):
            raise NoDeviceError(f"{library} is not {kind}", component=COMPONENT)
        return found
    if kind == "software":
        return look(software_library(), software_library())
    try:
        found = look(*HARDWARE)
    except NoDeviceError as hardware:
        if kind == "hardware":
            raise
        try:
            return look(software_library(), software_library())
        except NoDeviceError as software:
            raise NoDeviceError(
                f"hardware: {hardware.detail}; software: {software.detail}", component=COMPONENT
            ) from None
    if kind == "hardware" and found.software:  # it was put in the real libraries' place
        raise NoDeviceError(
            "the libibverbs that is found is a software device", component=COMPONENT
        )
    return found
