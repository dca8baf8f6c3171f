"""Seconds and memory of `megatron-scalerl watch` on a folder of many runs.

    python tools/bench_runs.py [--runs 40] [--steps 1000]

Writes synthetic runs with metrics, validations every tenth step and ledger, starts `watch` on their folder, and asks
as a browser does: the page at once, then what is new until all forecasts are made.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from checkout import explained

parser = harness.benchmark(__doc__, runs=40, steps=(1000, "of each run"))

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take a second

with explained():
    from bench_page import fill_records, watching


def fill(folder: Path, options: argparse.Namespace) -> None:
    """All runs."""
    for number in range(options.runs):
        run = folder / f"run_{number:02d}"
        run.mkdir(parents=True)
        fill_records(run, options)
        recipe = json.loads((run / "recipe.yaml").read_text())
        changes = {"name": run.name, "seed": number, "optimizer": {"lr": 1e-6 * (1 + number // 3)}}
        (run / "recipe.yaml").write_text(json.dumps(recipe | changes))


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of runs that are written to `folder`."""
    fill(folder, options)
    begin = time.perf_counter()
    with watching(folder) as (asked, found):
        page, found["page_seconds"] = asked()
        found["page_bytes"] = len(page)
        waiting, version, slowest = options.runs, 0, 0.0
        while waiting:
            time.sleep(0.2)
            text, seconds = asked("api/runs", f"since={version}")
            news = json.loads(text)
            waiting, version, slowest = news["waiting"], news["version"], max(slowest, seconds)
        found |= {"all_forecasts_seconds": time.perf_counter() - begin, "slowest_news_seconds": slowest}
        whole, found["whole_seconds"] = asked("api/runs", "since=0")
        found["whole_bytes"] = len(whole)
    return found


def main(options: argparse.Namespace) -> None:
    """Print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), options)
    harness.report(options, {**harness.asked(options), **found, "machine": harness.machine()})


if __name__ == "__main__":
    main(OPTIONS)
