"""Seconds and memory of `megatron-scalerl watch` on a folder of many runs.

    python tools/bench_runs.py [--runs 40] [--steps 1000] [--keep FOLDER]

Writes synthetic runs with metrics, validations every tenth step and ledger, starts `watch` on their folder, and asks
as a browser does: the page at once, then what is new until all forecasts are made.
Prints one JSON line. --keep leaves the runs in a new folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runs", type=int, default=40)
    p.add_argument("--steps", type=int, default=1000, help="of each run")
    p.add_argument("--keep", type=Path, metavar="FOLDER", help="write the runs here and keep them")
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take a second

with explained():
    from bench_page import fill_records


def fill(folder: Path, options: argparse.Namespace) -> None:
    """All runs."""
    for number in range(options.runs):
        run = folder / f"run_{number:02d}"
        run.mkdir(parents=True)
        fill_records(run, options)
        recipe = json.loads((run / "recipe.yaml").read_text())
        changes = {"name": run.name, "seed": number, "optimizer": {"lr": 1e-6 * (1 + number // 3)}}
        (run / "recipe.yaml").write_text(json.dumps(recipe | changes))


def asked(base: str, path: str, query: str) -> tuple[bytes, float]:
    """A response and the seconds that it took."""
    begin = time.perf_counter()
    with urllib.request.urlopen(f"{base}{path}?{query}") as answer:
        return answer.read(), time.perf_counter() - begin


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of runs that are written to `folder`."""
    fill(folder, options)
    begin = time.perf_counter()
    command = [sys.executable, "-m", "megatron_scalerl", "watch", str(folder)]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    try:
        assert watch.stdout is not None
        base, token = watch.stdout.readline().strip().split("?")
        found: dict[str, Any] = {"start_seconds": time.perf_counter() - begin}
        page, found["page_seconds"] = asked(base, "", token)
        found["page_bytes"] = len(page)
        waiting, version = options.runs, 0
        slowest = 0.0
        while waiting:
            time.sleep(0.2)
            text, seconds = asked(base, "api/runs", f"since={version}&{token}")
            news = json.loads(text)
            waiting, version, slowest = news["waiting"], news["version"], max(slowest, seconds)
        found |= {"all_forecasts_seconds": time.perf_counter() - begin, "slowest_news_seconds": slowest}
        whole, found["whole_seconds"] = asked(base, "api/runs", f"since=0&{token}")
        status = Path(f"/proc/{watch.pid}/status").read_text()
        peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024
        return found | {"whole_bytes": len(whole), "peak_mib": peak}
    finally:
        watch.terminate()
        watch.wait()


def main(options: argparse.Namespace) -> None:
    """Print one JSON line."""
    if options.keep is not None:
        found = measured(options.keep, options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(Path(folder), options)
    sizes = {name: getattr(options, name) for name in ("runs", "steps")}
    print(json.dumps({**sizes, **found, "machine": {"cores": os.cpu_count(), "python": platform.python_version()}}))


if __name__ == "__main__":
    main(OPTIONS)
