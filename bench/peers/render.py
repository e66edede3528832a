# SPDX-License-Identifier: BSD-3-Clause
"""From docs/peers.json to tables and words.  Nothing here measures."""

import json
from pathlib import Path
from typing import Any

from bench.peers.install import ROOT
from bench.report.page import close, duration, table
from bench.sizes import text

Data = dict[str, Any]

JSON = ROOT / "docs/peers.json"

STEPS = {
    "register": "register, deregister",
    "share": "register, pack, deregister",
    "pack": "pack, not for the first time",
    "unpack": "unpack, close",
    "again": "unpack what is open already, close",
}

HEADINGS = {"C": "In C", "Python": "From Python"}
REFERENCE = {"C": "ours-c", "Python": "ours"}
WAYS = {"bare": "bare, in C", "c": "ucx_memh in C", "python": "ucx_memh from Python"}


def render(file: Path = JSON) -> str | None:
    """A section for the report; None if nothing was measured."""
    return section(json.loads(file.read_text())) if file.exists() else None


def page(data: Data) -> str:
    """docs/peers.md."""
    parts = [opening(data), section(data), closing()]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def section(data: Data) -> str:
    """What is in both: the page and the report."""
    parts = [heading(data), who(data)]
    parts += [steps(data, name) for name in HEADINGS if of_table(data, name)]
    if data["transfers"]:
        parts.append(transfers(data))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def opening(data: Data) -> str:
    return """\
<!-- `make bench-peers` writes this file, from docs/peers.json: change bench/peers/render.py -->

# Peers

The same steps with other libraries: what one gets from each today, on one machine, in one run.
"""


def heading(data: Data) -> str:
    here, rounds = data["machine"], data["rounds"]
    return f"""\
## Beside the peers

Measured on {data["date"]}: {here["cpus"]} x {here["cpu"]}, {here["memory"] / (1 << 30):.0f} GiB,
Linux {here["kernel"]}, Python {here["python"]}, ucx_memh {here["ucx_memh"]}; load before
it began {here["load"]:.1f}.

Every library is in a venv and a process of its own, and they take turns: in each of
{rounds["steps"]} rounds each works for about {rounds["seconds"] * 1e3:.0f} ms, in an order that
changes from round to round. Times are the median of the rounds, with the least in brackets. **The
ratio is this library's time to ucx_memh's in the same round**, the median of all, with its
quartiles: above 1 ucx_memh is faster, below 1 the other one is. Trust it more than the times, for
the machine is a virtual one and others load it; and from 64 MiB on, where a round has a few
operations alone, trust neither much.

**What this is about, and what not.** There is no adapter here, so nobody pins memory, and
component `cma` asks no device either: this is the libraries' own work, to which an adapter would
add its own. Nor do they give the same for their time. ucx_memh checks its arguments, lets any
thread call, and knows what it has granted, so as to revoke it; its keys say who the owner is and
have a checksum, which is made with the first pack and read with an unpack of new bytes. UCX from
the registry is built without argument checks and runs for one thread here; its key of such memory
names no owner and has nothing to check. MPI has no keys, connex-rs none that its user sees; its
calls go to a thread of its own, and where that one has to wait for a CPU they take far longer: in
other runs here 160 us.
"""


def of_table(data: Data, name: str) -> list[Data]:
    return [peer for peer in data["peers"] if peer["table"] == name]


def named(peer: Data) -> str:
    return f"{peer['name']} ({peer['table']})" if peer["name"] == "ucx_memh" else peer["name"]


def who(data: Data) -> str:
    rows = []
    for peer in data["peers"]:
        if "reason" in peer:
            rows.append([named(peer), "**not measured**", peer["reason"], ""])
        else:
            versions = ", ".join(
                value if name == "library" else f"{name} {value}"
                for name, value in peer["versions"].items()
            )
            rows.append([named(peer), versions, "<br>".join(peer["loaded"]), key(peer)])
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head = ["library", "versions, as it says them", "loaded, by /proc/PID/maps", "its key"]
    return "### Who took part\n\n" + table(head, rows, left=3)


def key(peer: Data) -> str:
    """How long it is.  ucx_perftest moves data, and says nothing of keys."""
    if "key_bytes" not in peer:
        return ""
    return "none" if peer["key_bytes"] is None else text(peer["key_bytes"])


def ratio(row: Data) -> str:
    low, high = row["quartiles"]
    return f"**{close(row['ratio'])}** ({close(low)} .. {close(high)})"


def times(row: Data) -> str:
    return f"{duration(row['ns'])} ({duration(row['least_ns'])})"


def steps(data: Data, name: str) -> str:
    peers = {peer["key"]: peer for peer in of_table(data, name)}
    rows = []
    for row in data["steps"]:
        if row["table"] != name:
            continue
        peer = peers[row["peer"]]
        words = peer["calls"][row["operation"]]
        line = [STEPS[row["operation"]], text(row["bytes"]), peer["name"], words]
        if "reason" in row:
            line += ["**not measured**", row["reason"].replace("|", "\\|")]
        else:
            line += [times(row), "" if row["peer"] == REFERENCE[name] else ratio(row)]
        rows.append(line)
    lost = [
        f"- {peer['name']} was not measured: {peer['reason']}"
        for peer in peers.values()
        if "reason" in peer
    ]
    missing = [
        peer["name"] for peer in peers.values() if set(STEPS) - set(peer.get("calls", STEPS))
    ]
    if missing:
        lost.append(f"- Who is not in a step has no such thing: {'; '.join(missing)}.")
    head = ["step", "region", "library", "by", "time", "library : ucx_memh"]
    return f"""\
### {HEADINGS[name]}

{table(head, rows, left=4)}
{chr(10).join(lost)}
"""


def transfers(data: Data) -> str:
    tables = []
    for way in ("get", "put"):
        found = {(row["bytes"], row["peer"]): row for row in data["transfers"] if row["way"] == way}
        rows = []
        for size in sorted({length for length, _ in found}):
            line = [text(size)]
            for key in [*WAYS, "perftest"]:
                row = found.get((size, key), {"reason": "not measured"})
                line.append(row["reason"] if "reason" in row else times(row))
            theirs = found.get((size, "perftest"), {"reason": ""})
            line.append("" if "reason" in theirs else ratio(theirs))
            rows.append(line)
        head = [way, *WAYS.values(), "ucx_perftest", "ucx_perftest : ucx_memh in C"]
        tables.append(table(head, rows))
    peer = of_table(data, "cma")[0]
    lost = f"\nucx_perftest was not measured: {peer['reason']}\n" if "reason" in peer else ""
    return f"""\
### cma: get and put of another process's memory

One operation at a time, each waited for; {data["rounds"]["data"]} rounds, all with the same number
of operations. *bare* is `process_vm_readv` or `process_vm_writev` in a loop in C. *ucx_perftest* is
UCX's own tool on its transport `cma` (`-d memory -x cma -D zcopy -O 1`): its time is `overall_lat`,
the whole run by the number of operations, without start and warm-up, which the others have as well.
For get that is its test
`get`, which waits for each. For put it is `put_bw` with a window of one, which waits for each as
well; `put_lat` is a ping-pong, in which each side waits for the other's put, and has no counterpart
here. ucx_perftest's server turns in a loop on the first CPU while its client works on the last one;
beside ucx_memh and the bare calls a loop turns there too. All memory is in pages of 4 KiB
(`UCX_ALLOC=mmap`; UCX would take huge pages).
{lost}
{tables[0]}
{tables[1]}"""


def closing() -> str:
    return """\
## Again

`make bench-peers` does all of this and writes [peers.json](peers.json) and this page: it installs
what is missing, with pip, into venvs in `build/peers`. A peer that cannot be installed, ends or
hangs is named above, with the reason. `.venv/bin/python -m bench.peers --only ucx nixl` prints the
same for some of them, `--rounds` for more or fewer rounds.
"""
