# SPDX-License-Identifier: BSD-3-Clause
"""What a user writes, for mypy --strict; it also runs.  Each ignore is a wrong use."""

from typing import assert_type

import ucx_memh as um
from ucx_memh.mpi import Window


class Owner:
    """A pool, a window for each peer, and what has been told of revocations."""

    def __init__(self, md: um.Md, pool: bytearray) -> None:
        self.md = md
        self.base = md.mem_reg(pool, um.MemFlag.DERIVED_ONLY)
        self.wins: dict[str, um.Memh] = {}
        self.told: list[um.Status] = []

    def grant(self, peer: str, offset: int, length: int | None = None) -> bytes:
        win = self.base.derive(offset, length, um.MemFlag.REMOTE_GET | um.MemFlag.REMOTE_PUT)
        self.wins[peer] = win
        return win.mkey_pack()

    def revoke(self, peer: str) -> bytes:
        win = self.wins.pop(peer)
        win.invalidate(self.told.append)
        while not self.told:
            self.md.progress()
        return win.revoke_notice()


def values(md: um.Md, base: um.Memh) -> None:
    assert_type(md.attr, um.MdAttr)
    assert_type(md.attr.flags, um.MdFlag)
    assert_type(md.attr.mem_types, frozenset[um.MemType])
    assert_type(base.grant, um.MemFlag)
    assert_type(base.state, um.MemhState)
    assert_type(base.base, um.Memh | None)
    assert_type(base.enforcement.rights.get, um.Enforcement)
    assert_type(um.query_mds(), list[um.MdResource])
    assert_type([info.options for info in um.components()], list[tuple[um.Option, ...]])
    assert_type(um.key_query(base.derive().mkey_pack()).flags, um.MemFlag)
    assert_type(md.stats(), dict[str, int])
    assert_type(um.__version__, str)


def many(base: um.Memh) -> None:
    wins = base.derive_many([0, 64, 128], 64)
    keys = base.md.mkey_pack_many(wins)
    assert_type(wins[0], um.Memh)
    assert_type(wins[1:], list[um.Memh])
    assert_type([win.length for win in wins], list[int])
    assert_type(keys[0], bytes)
    assert sorted(keys) == sorted(keys[i] for i in range(len(keys)))
    assert_type(base.md.find(base.address), list[um.Memh])
    assert list(base.md.invalidate_many(wins)) == [0, 0, 0]


def move(md: um.Md, key: bytes) -> None:
    one, other = md.endpoint(), md.endpoint()
    one.connect(other.address)
    other.connect(one.address)
    with md.rkey_unpack(key) as rkey:
        one.put(rkey, rkey.address, b"12345678")
        operation = one.get_nb(rkey, rkey.address, into := bytearray(8))
        assert_type(operation, um.Operation)
        assert_type(operation.wait(timeout=10), int | None)
        assert into == b"12345678"
        assert_type(operation.status, um.Status)


def errors(base: um.Memh) -> None:
    try:
        base.derive(flags=um.MemFlag.LOCAL_WRITE).derive(length=1 << 40)
    except um.InvalidParamError as error:
        assert_type(error.status, um.Status | int)
        assert_type(error.errno, int | None)
        assert isinstance(error, ValueError)
    else:
        raise AssertionError


def bundle(md: um.Md) -> None:
    both = um.Bundle([md])
    with both.mem_reg(bytearray(64)) as memhs:
        assert_type(memhs, um.BundleMemh)
        assert_type(both.rkey_unpack(memhs.mkey_pack()), um.BundleRkey)


def window(window: Window) -> None:
    window.put(0, b"bytes", offset=8)
    window.revoke(1)


def wrong(md: um.Md, base: um.Memh, rkey: um.Rkey) -> None:
    md.mem_reg("text")  # type: ignore[arg-type]
    base.derive("0")  # type: ignore[arg-type]
    base.grant = um.MemFlag(0)  # type: ignore[misc]
    md.endpoint().get(rkey, rkey.address)  # type: ignore[call-arg]
    md.endpoint().get(base, 0, bytearray(1))  # type: ignore[arg-type]
    base.derived()  # type: ignore[attr-defined]
    um.open_md(1)  # type: ignore[arg-type]
    um.revoke(base)  # type: ignore[attr-defined]
    base.invalidate(lambda: None)  # type: ignore[arg-type, misc]


def main() -> None:
    with um.open_md("ib_mlx5", device="software") as md:
        owner = Owner(md, bytearray(4096))
        key = owner.grant("alice", 64, 64)
        move(md, key)
        values(md, owner.base)
        many(owner.base)
        errors(owner.base)
        bundle(md)
        assert_type(md.rkey_revoke(owner.revoke("alice")), int)
        assert owner.told == [um.Status.OK]
        md.close(force=True)
    print("done")


if __name__ == "__main__":
    main()
