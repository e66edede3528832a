# SPDX-License-Identifier: BSD-3-Clause
"""What each step costs on a device, by the size of the region."""

import time
from collections.abc import Callable
from typing import Any

import ucx_memh as um
from ucx_memh.flags import MemFlag

__all__ = ["costs", "ratios"]

ROUNDS = 50  # at each size, fewer where they take long
FEWEST = 3


def costs(owner: um.Md, peer: um.Md, sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """A row for each size and step, in about that many seconds a size."""
    derives = um.MdFlag.REG_DERIVED in owner.attr.flags
    rows = []
    for size in sizes:
        memory = bytearray(b"\1") * size  # touched: no page is new to the first registration
        taken: dict[str, list[float]] = {}
        end = time.perf_counter() + seconds
        for turn in range(ROUNDS + 1):
            _round(owner, peer, memory, derives, taken)
            if turn == 0:
                taken.clear()  # it had to load and to warm up
            elif turn >= FEWEST and time.perf_counter() > end:
                break
        rows += [{"size": size, "step": step, **_summary(times)} for step, times in taken.items()]
    return rows


def _round(
    owner: um.Md, peer: um.Md, memory: bytearray, derives: bool, taken: dict[str, list[float]]
) -> None:
    def timed(step: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = action()
        taken.setdefault(step, []).append(time.perf_counter() - start)
        return result

    flags = MemFlag.DERIVED_ONLY if derives else None
    base = timed("register", lambda: owner.mem_reg(memory, flags))
    memh = timed("derive", base.derive) if derives else base
    key = timed("first pack", memh.mkey_pack)
    timed("cached pack", memh.mkey_pack)
    rkey = timed("unpack", lambda: peer.rkey_unpack(key))
    rkey.close()
    if derives:
        timed("invalidate", memh.invalidate)
    timed("deregister", base.dereg)


def _summary(times: list[float]) -> dict[str, Any]:
    times = sorted(times)
    return {
        "median_us": round(times[len(times) // 2] * 1e6, 3),
        "p95_us": round(times[min(len(times) - 1, int(len(times) * 0.95))] * 1e6, 3),
        "rounds": len(times),
    }


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each size: taking one key away, by its own end and by a new registration of all."""
    found = []
    for size in dict.fromkeys(row["size"] for row in rows):
        median = {row["step"]: row["median_us"] for row in rows if row["size"] == size}
        if "invalidate" in median:
            anew = round(median["deregister"] + median["register"], 3)
            one = median["invalidate"]
            ratio = round(anew / max(one, 1e-3), 2)
            found.append(
                {"size": size, "invalidate_us": one, "reregister_us": anew, "ratio": ratio}
            )
    return found
