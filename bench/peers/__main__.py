# SPDX-License-Identifier: BSD-3-Clause
"""make bench-peers

python -m bench.peers                  measures into docs/peers.json, and renders docs/peers.md
python -m bench.peers --only NAME...   prints the page of these alone, and writes nothing
python -m bench.peers --render         renders what is in docs/peers.json
"""

import argparse
import json

from bench.peers import measure, render
from bench.peers.install import ROOT
from bench.peers.roster import OURS, PEERS
from bench.report.page import written


def main() -> None:
    names = [peer.key for peer in PEERS if peer.key not in OURS.values()] + ["perftest"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=measure.ROUNDS, help="%(default)s")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds is at least 1")
    if options.render and options.only:
        parser.error("--only is for measuring")
    if options.only:
        print(render.page(measure.measure(options.only, options.rounds)), end="")
        return
    if not options.render:
        render.JSON.write_text(written(measure.measure(rounds=options.rounds)))
    data = json.loads(render.JSON.read_text())
    (ROOT / "docs/peers.md").write_text(render.page(data))


if __name__ == "__main__":
    main()
