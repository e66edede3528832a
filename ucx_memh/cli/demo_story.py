# SPDX-License-Identifier: BSD-3-Clause
"""What the owner and its three peers do in the demo, and what is expected of it."""

from collections.abc import Callable

import ucx_memh as um
from ucx_memh.cli.demo_crew import Peer
from ucx_memh.cli.demo_region import Region
from ucx_memh.cli.demo_show import Show

__all__ = ["tell"]

BUMPS = 100


def tell(md: um.Md, region: Region, peers: list[Peer], show: Show) -> None:
    """Do it all, with derived keys where there are any."""
    derives = um.MdFlag.REG_DERIVED in md.attr.flags
    (_with_derived_keys if derives else _without)(md, region, peers, show)


def _with_derived_keys(md: um.Md, region: "Region", peers: list["Peer"], show: Show) -> None:
    reader, writer, worker = peers
    flag = um.MemFlag
    read, write, atomic = flag.REMOTE_GET, flag.REMOTE_PUT, flag.REMOTE_ATOMIC

    base = show.step("register, once", md, region.register(md), grows=True)
    quarter = region.data // 4 & ~7
    grants = {
        reader: (0, region.data, read),
        writer: (quarter, quarter, read | write),
        worker: (2 * quarter, quarter, read | write | atomic),
    }
    wins = show.step(
        "derive 3 handles and one for the counter",
        md,
        lambda: (
            {p: base.derive(*grants[p]) for p in peers}
            | {None: base.derive(region.data, 8, atomic)}
        ),
    )
    keys = show.step(
        "pack their keys (first time)", md, lambda: {p: win.mkey_pack() for p, win in wins.items()}
    )
    again = show.step("pack them again", md, lambda: {p: w.mkey_pack() for p, w in wins.items()})
    show.expect("a key packs to the same bytes every time", again == keys)
    for peer in peers:
        peer.connect()
        peer.call(
            "keys",
            data=keys[peer].hex(),
            counter=keys[None].hex(),
            raw=wins[peer].mkey_pack(um.PackFlag.RAW).hex(),
        )

    # Everybody moves data and checks it.
    result = reader.bulk("read", "reader reads everything", show)
    show.moved("reader reads everything", result)
    show.expect("the reader's bytes are the file's", result["sha256"] == region.digest)
    for peer in (writer, worker):
        result = peer.bulk("write", f"{peer.role} writes its part, reads it back", show)
        show.moved(f"{peer.role} writes its part, reads it back", result)
        same = result["sha256"] == region.hash(*grants[peer][:2])
        show.expect(f"the {peer.role}'s bytes are in the owner's memory", same)
    for peer in peers:
        peer.call("bump", times=BUMPS)
    show.expect("the counter counted all three", region.counter == 3 * BUMPS)
    swapped = worker.call("swap")
    show.expect("the worker's compare-and-swap swapped", swapped["swapped"])

    # What a key does not give is refused, by the library and, around it, by the device.
    before = region.hash(0, region.data)
    show.refusal("reader tries to write", reader.call("try", op="put"), "ACCESS")
    show.around(
        "reader writes around its library",
        reader.call("try", op="put", raw=True),
        wins[reader].enforcement.rights.put,
    )
    show.refusal("writer reads outside its part", writer.call("try", op="get", skip=-64), "RANGE")
    show.around(
        "writer reads outside, around its library",
        writer.call("try", op="get", raw=True, skip=-64),
        wins[writer].enforcement.range.get,
    )
    show.expect("no refused write changed a byte", region.hash(0, region.data) == before)
    for peer in (reader, writer):
        peer.reconnect()

    # Cut the writer off in the middle of its stream.
    writer.start("stream")
    writer.wait_event("streaming")
    win = wins[writer]
    show.step("revoke the writer, while it streams writes", md, win.invalidate)
    frozen = region.hash(*grants[writer][:2])
    stopped = writer.wait_event("stopped")
    show.refusal(f"writer's write number {stopped['writes'] + 1}", stopped, "REMOTE_ACCESS")
    show.expect("its late writes changed nothing", region.hash(*grants[writer][:2]) == frozen)
    writer.call("notice", notice=win.revoke_notice().hex())
    writer.reconnect()
    show.refusal(
        "writer tries again, told of the revocation", writer.call("try", op="put"), "REVOKED"
    )

    # Only that key has gone.
    result = reader.bulk("read", "reader reads everything again", show)
    show.moved("reader reads everything again", result)
    show.expect("the reader goes on", result["sha256"] == region.hash(0, region.data))
    result = worker.bulk("write", "worker writes its part again", show)
    show.moved("worker writes its part again", result)
    show.expect("the worker goes on", result["sha256"] == region.hash(*grants[worker][:2]))
    for peer in peers:
        peer.call("bump", times=BUMPS)
    show.expect(
        "the shared counter key still works, for the writer too", region.counter == 6 * BUMPS
    )

    regrant = base.derive(*grants[writer])
    writer.call(
        "keys",
        data=regrant.mkey_pack().hex(),
        counter=keys[None].hex(),
        raw=regrant.mkey_pack(um.PackFlag.RAW).hex(),
    )
    result = writer.bulk("write", "writer, with a new key", show)
    show.moved("writer, with a new key", result)
    show.expect("the base can grant again", result["sha256"] == region.hash(*grants[writer][:2]))
    show.refusal("deregister under live keys", _refused(base.dereg), "BUSY")
    for peer in peers:
        peer.call("close")
    show.step("revoke all keys and deregister", md, lambda: base.dereg(cascade=True))
    show.costs(md, region.memory, region.data)


def _without(md: um.Md, region: "Region", peers: list["Peer"], show: Show) -> None:
    """What a domain without derived handles can do, and what it refuses."""
    base = show.step("register, once", md, region.register(md))
    key = show.step("pack the region's key", md, base.mkey_pack)
    flag = um.MemFlag
    show.refusal("derive a key for each peer", _refused(base.derive), "UNSUPPORTED")
    show.refusal(
        "register with derived keys only",
        _refused(lambda: region.register(md, flag.DERIVED_ONLY)()),
        "UNSUPPORTED",
    )
    show.refusal(
        "pack a revocable key",
        _refused(lambda: base.mkey_pack(um.PackFlag.INVALIDATE_RMA)),
        "UNSUPPORTED",
    )
    for peer in peers:
        peer.connect()
        peer.call("keys", data=key.hex(), counter=key.hex(), raw="")
        result = peer.bulk("read", f"{peer.role} reads everything", show)
        show.moved(f"{peer.role} reads everything", result)
        show.expect(
            f"the {peer.role}'s bytes are the file's",
            result["sha256"] == region.hash(0, base.length),
        )
    result = peers[1].bulk("write", "writer writes everything, reads it back", show)
    show.moved("writer writes everything, reads it back", result)
    show.expect(
        "the writer's bytes are in the owner's memory",
        result["sha256"] == region.hash(0, base.length),
    )
    show.refusal("worker bumps a counter", peers[2].call("try", op="bump"), "UNSUPPORTED")
    show.refusal(
        "deregister, promising that no key works",
        _refused(lambda: base.dereg(invalidate=True)),
        "UNSUPPORTED",
    )
    for peer in peers:
        peer.call("close")
    show.step("deregister", md, base.dereg)


def _refused(call: Callable[[], object]) -> dict:
    try:
        call()
    except um.MemhError as error:
        return {"status": um.errors.status_name(error.status), "by": "the owner's library"}
    return {"status": "OK", "by": ""}
