"""Run for an hour while engines, trainer and verifiers are killed, and measure what grows.

    python tools/soak.py --out runs/soak [--minutes 60] [--mean-minutes 4] [--real] [--seed 1]

A tiny recipe at k = 8 with two engines, in real time: kills at exponential intervals, SIGKILL or SIGSTOP, of a random
process other than the controller. Every five seconds a row with the controller's resident memory, open files and
threads, the size of the run's folder and the steps made is appended to OUT/samples.jsonl. A second call continues the
run and the rows. At the end: the slopes after minute 10, and OUT/soak.png. --real: vLLM instead of stand-in engines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("runs/soak"))
    made.add_argument("--minutes", type=float, default=60.0)
    made.add_argument("--mean-minutes", type=float, default=4.0)
    made.add_argument("--real", action="store_true")
    made.add_argument("--seed", type=int, default=1)
    return made


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import numpy as np
    import psutil
    from kill_matrix import ROOT, Try

    from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl

EVERY_S, FROM_S = 5.0, 600.0
VICTIMS = ("engine-0", "engine-1", "trainer-0", "verifier")
UNITS = {"rss_mib": "MiB", "files": "open files", "threads": "threads", "disk_mib": "MiB"}


def sample(tried: Try, begin: float) -> dict[str, Any] | None:
    """One row, None while the controller is being started."""
    controller = tried.find("controller")
    if controller is None:
        return None
    with contextlib.suppress(psutil.Error):
        disk = sum(path.stat().st_size for path in tried.run.rglob("*") if path.is_file())
        return {
            "seconds": round(time.time() - begin, 1),
            "pid": controller.pid,
            "rss_mib": controller.memory_info().rss / 2**20,
            "files": controller.num_fds(),
            "threads": controller.num_threads(),
            "disk_mib": disk / 2**20,
            "steps": tried.steps(),
        }
    return None


def kill(tried: Try, source: random.Random, begin: float) -> dict[str, Any]:
    """Kill or stop one process; the row."""
    victim, number = source.choice(VICTIMS), source.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    process = tried.find(victim)
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        if process is not None:
            os.killpg(process.pid, number) if victim != "verifier" else process.send_signal(signal.SIGKILL)
    return {"seconds": round(time.time() - begin, 1), "kill": victim, "signal": number.name}


def slopes(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Change per hour after minute 10, of the controller that ran longest; memory in percent."""
    samples = [row for row in rows if "rss_mib" in row and row["seconds"] >= FROM_S]
    pids = [row["pid"] for row in samples]
    samples = [row for row in samples if row["pid"] == max(set(pids), key=pids.count)]
    hours = np.array([row["seconds"] / 3600 for row in samples])
    found = {}
    for key in UNITS:
        values = np.array([row[key] for row in samples])
        slope = float(np.polyfit(hours, values, 1)[0])
        found[key] = 100 * slope / float(values.mean()) if key == "rss_mib" else slope
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The measured values over time, with the kills."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = [row for row in rows if "rss_mib" in row]
    minutes = [row["seconds"] / 60 for row in samples]
    figure, axes = pyplot.subplots(5, 1, sharex=True, figsize=(8, 10), layout="constrained")
    labels = {"steps": "steps", "rss_mib": "memory (MiB)", "files": "open files", "threads": "threads"}
    for axis, (key, label) in zip(axes, (labels | {"disk_mib": "run folder (MiB)"}).items()):
        axis.plot(minutes, [row[key] for row in samples], linewidth=1)
        axis.set_ylabel(label)
        for row in rows:
            if "kill" in row:
                axis.axvline(row["seconds"] / 60, color="tab:red", alpha=0.4, linewidth=0.8)
    axes[0].set_title("One run with two engines; red: a process is killed or stopped")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)


def main(arguments: argparse.Namespace) -> int:
    """Run or continue the soak, then report."""
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    tiny = out / "tiny"
    if not (tiny / "tiny.json").exists():
        command = [sys.executable, "-m", "megatron_scalerl.tiny", str(tiny), "--seed", "1"]
        subprocess.run(command, cwd=ROOT, check=True)
    file = out / "samples.jsonl"
    before = read_jsonl(file)
    begin = time.time() - (before[-1]["seconds"] if before else 0.0)
    source = random.Random(f"{arguments.seed}/{len(before)}")
    tried = Try(out, tiny, real=arguments.real, steps=1_000_000)
    tried.command += ["rollouts.max_staleness_steps=8", "checkpoint.every_steps=10", "trainer.world_size=1"]
    tried.command += ["validation.every_steps=20", "engine.max_restarts=1000", "trainer.max_restarts=1000"]
    tried.start()
    next_kill = time.time() + source.expovariate(1 / (60 * arguments.mean_minutes))
    with contextlib.closing(JsonlWriter(file)) as writer:
        while time.time() - begin < 60 * arguments.minutes:
            time.sleep(EVERY_S)
            assert tried.process is not None and tried.process.poll() is None, f"the run ended, see {out / 'output'}"
            if time.time() >= next_kill:
                writer.append(kill(tried, source, begin))
                next_kill = time.time() + source.expovariate(1 / (60 * arguments.mean_minutes))
            if (row := sample(tried, begin)) is not None:
                writer.append(row)
    assert tried.process is not None
    tried.process.send_signal(signal.SIGTERM)
    tried.process.wait()
    rows = read_jsonl(file)
    plot(rows, out / "soak.png")
    made = max(row["steps"] for row in rows if "steps" in row)
    kills = sum("kill" in row for row in rows)
    report = {"steps": made, "kills": kills, "slopes_per_hour": slopes(rows)}
    (out / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
