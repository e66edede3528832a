# SPDX-License-Identifier: BSD-3-Clause
"""What the author of a backend in Python writes, for mypy --strict; it also runs."""

from collections.abc import Mapping
from typing import Any, assert_type

import ucx_memh as um
from ucx_memh.config import Option
from ucx_memh.hookspecs import hookimpl
from ucx_memh.python_backend import Completion, Handle, Key, KeyKind, Registration, RemoteKey, bind
from ucx_memh.resources import Component, MdResource
from ucx_memh.testing import FakeDevice, open_fake

OPTIONS = (Option("room", int, 64, "keys that it can have", minimum=1),)


class Device:
    """Keys that are numbers, and nothing behind them."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.live: dict[int, KeyKind] = {}

    def mem_reg(self, reg: Registration) -> tuple[int, int] | None:
        assert_type(reg.grant, um.MemFlag)
        return (1, 2)

    def mem_dereg(self, reg: Registration) -> None:
        assert_type(reg.mem_type, um.MemType)

    def mem_derive(self, base: Handle, memh: Handle) -> None:
        assert memh.derived

    def key_create(self, memh: Handle, key: Key) -> int:
        if len(self.live) == self.room:
            raise um.NoMemoryError("no room for another key")
        value = max(self.live, default=0) + 1
        self.live[value] = key.kind
        return value

    def key_destroy(self, memh: Handle | None, key: Key, done: Completion) -> um.Status | None:
        del self.live[key.value]
        return None

    def rkey_unpack(self, rkey: RemoteKey, payload: bytes, raw: bool) -> None:
        rkey.data = int.from_bytes(payload, "little")

    def mkey_pack(self, memh: Handle, rma: Key, atomic: Key | None) -> bytes:
        return rma.value.to_bytes(4, "little")


@hookimpl
def ucx_memh_components() -> list[Component]:
    return [Component("typed", options=OPTIONS)]


@hookimpl
def ucx_memh_query_mds(component: str, config: Mapping[str, Any]) -> list[MdResource] | None:
    return [MdResource("typed", "typed0", software=True)] if component == "typed" else None


@hookimpl
def ucx_memh_open_md(resource: MdResource, config: Mapping[str, Any]) -> um.Md | None:
    if resource.component != "typed":
        return None
    return bind(
        Device(config["room"]),
        component="typed",
        md_name=resource.md_name,
        flags=um.MdFlag.REG | um.MdFlag.NEED_RKEY | um.MdFlag.REG_DERIVED,
        rkey_packed_size=4,
        software=True,
    )


def fakes() -> None:
    md, fake = open_fake(destroy="progress")
    assert_type(fake, FakeDevice)
    open_fake(destroy="never")  # type: ignore[arg-type]
    fake.fail("mem_reg", um.Status.NO_MEMORY)
    try:
        md.mem_reg(bytearray(8))
    except um.NoMemoryError:
        print(fake.count("mem_reg"), "call")
    md.close(force=True)


def main() -> None:
    (resource,) = ucx_memh_query_mds("typed", {}) or []
    md = ucx_memh_open_md(resource, {"room": 1})
    assert md is not None
    base = md.mem_reg(bytearray(64), um.MemFlag.DERIVED_ONLY)
    with base.derive(flags=um.MemFlag.REMOTE_GET) as win:
        print(len(win.mkey_pack()), "bytes")
        win.invalidate()
    md.close(force=True)


if __name__ == "__main__":
    main()
