# SPDX-License-Identifier: BSD-3-Clause
"""make bench-report

python -m bench.report            measures into docs/bench.json, and renders
python -m bench.report --render   renders what is in docs/bench.json
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.machine import machine
from bench.report import page, sections

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/bench"


def run_benches() -> dict[str, Any]:
    """pytest-benchmark's JSON."""
    BUILD.mkdir(parents=True, exist_ok=True)
    into = BUILD / "benches.json"
    files = sorted(str(path) for path in (ROOT / "bench").glob("bench_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", *files, "--benchmark-only"]
    command += [f"--benchmark-json={into}", "--benchmark-columns=min,median,iqr,rounds"]
    command += ["--benchmark-max-time=0.5", "--benchmark-warmup=on"]
    command += ["--benchmark-warmup-iterations=1000", "--benchmark-disable-gc"]
    subprocess.run(command, cwd=ROOT, check=True)
    return json.loads(into.read_text())


def run_ratios() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.ratios", "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def measure() -> dict[str, Any]:
    """All that the page says, before it is put into words."""
    here = machine()
    ratios = run_ratios()
    benches = page.benches(run_benches())
    guest = page.guest(json.loads((ROOT / "docs/costs.json").read_text()))
    data = {"date": time.strftime("%Y-%m-%d"), "machine": here}
    data["headline"] = page.headline(benches, ratios, guest, here["page"])
    data["guest"] = {name: guest[name] for name in guest if name != "regions"}
    data["ratios"] = ratios
    data["benches"] = benches
    data["sections"] = sections.collect(ROOT)
    return data


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    from bench.report import pictures  # before minutes of measuring: is matplotlib there?

    docs = ROOT / "docs"
    if not options.render:
        (docs / "bench.json").write_text(page.written(measure()))
    data = json.loads((docs / "bench.json").read_text())
    (docs / "bench.md").write_text(page.render(data))
    pictures.revoke(data, docs / "bench-revoke.png")
    pictures.data_path(data, docs / "bench-data.png")


if __name__ == "__main__":
    main()
