"""Run for an hour while engines, trainer and verifiers are killed, and measure what grows.

    python tools/soak.py --out runs/soak [--minutes 60] [--mean-minutes 4] [--real] [--seed 1] [--rollouts resume]

A tiny recipe at k = 8 with two engines, in real time: kills at exponential intervals, SIGKILL or SIGSTOP, of a random
process other than the controller. Every five seconds a row with the controller's resident memory, open files and
threads, the size of the run's folder and the steps made is appended to OUT/samples.jsonl. A second call continues the
run and the rows until --minutes in all. At the end OUT/report.json (also printed) and OUT/soak.png: the steps, the
kills, the longest time without a step, what the journal and the records have wrong, and the change per hour after
minute 10, which is the median of the slopes between all pairs of samples (Theil-Sen). --real: vLLM instead of
stand-in engines. --rollouts: checkpoint.rollouts of the recipe. Exit code 1 if the run ended early or something is
wrong.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import harness
from checkout import explained

parser = harness.options(
    __doc__,
    out=Path("runs/soak"),
    minutes=60.0,
    mean_minutes=4.0,
    real=False,
    rollouts=(["resume", "keep"], "what stays on disk"),
    seed=1,
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import numpy as np
    import psutil
    from kill_matrix import Try, outcome_of, ready

    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl

EVERY_S = 5.0
"""Seconds between samples."""
FROM_S = 600.0
"""Seconds that are left out at the start."""
ENOUGH = 60
"""Samples that a slope needs."""
VICTIMS = ("engine-0", "engine-1", "trainer-0", "verifier", "decoder-0")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
MEASURED = {"rss_mib": "percent", "files": "count", "threads": "count", "disk_mib": "MiB"}
"""What is sampled, and the unit of its slope per hour."""


def size_of(folder):
    """MiB of the files in a folder, some of which may be deleted meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total / 2**20


def sample(tried, seconds):
    """A row of samples, None while the controller is being started."""
    controller = tried.find("controller")
    if controller is None:
        return None
    with contextlib.suppress(psutil.Error):
        return {
            "seconds": round(seconds, 1),
            "pid": controller.pid,
            "rss_mib": controller.memory_info().rss / 2**20,
            "files": controller.num_fds(),
            "threads": controller.num_threads(),
            "disk_mib": size_of(tried.run),
            "steps": tried.steps(),
        }
    return None


def kill(tried, source, seconds):
    """Kill or stop one process, with its group; the row, None if the process does not run at the moment."""
    victim = source.choice(VICTIMS)
    number = source.choice(SIGNALS)
    process = tried.find(victim)
    if process is None:
        return None
    try:
        if victim == "verifier":
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
    return {"seconds": round(seconds, 1), "kill": victim, "signal": number.name}


def measured(rows):
    """The samples after minute 10 of one controller, the one with the most samples."""
    samples = [row for row in rows if "rss_mib" in row]
    pids = [row["pid"] for row in samples]
    samples = [row for row in samples if row["pid"] == max(set(pids), key=pids.count)]
    return [row for row in samples if row["seconds"] - samples[0]["seconds"] >= FROM_S]


def slopes(samples):
    """Change per hour of each measured value by Theil-Sen, as text with its unit; memory in percent of its median."""
    if len(samples) < ENOUGH:
        few = f"{len(samples)} samples after minute {FROM_S / 60:g} are too few; a slope needs {ENOUGH}"
        return dict.fromkeys(MEASURED, few)
    hours = np.array([row["seconds"] / 3600 for row in samples])
    first, second = np.triu_indices(len(samples), 1)
    texts = {}
    for key, unit in MEASURED.items():
        values = np.array([row[key] for row in samples])
        slope = float(np.median((values[second] - values[first]) / (hours[second] - hours[first])))
        if unit == "percent":
            slope *= 100 / float(np.median(values))
        texts[key] = f"{slope:+.3f} {unit} per hour"
    return texts


def longest_pause_s(rows):
    """Longest time without a new step, after the first one; to the resolution of the samples."""
    samples = [row for row in rows if row.get("steps")]
    last = next(iter(samples), {})
    longest = 0.0
    for row in samples:
        longest = max(longest, row["seconds"] - last["seconds"])
        if row["steps"] > last["steps"]:
            last = row
    return round(longest, 1)


def wrong_in(run):
    """The faults in the journal and the records of a run, whatever its length."""
    outcome = outcome_of(run)
    groups = [g for batch in outcome["batches"] for g in batch]
    steps = outcome["steps"]
    wrong = []
    if len(groups) != len(set(groups)):
        wrong.append(f"batches: {len(groups) - len(set(groups))} groups were trained twice")
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"metrics: the rows are not steps 1 to {len(steps)}, each once, in order")
    hours = [row["device_hours"] for row in read_jsonl(run / "metrics.jsonl")]
    if hours != sorted(hours):
        wrong.append("compute axis: it does not ascend")
    return wrong


def plot(rows, path):
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
                color = "tab:red" if row["signal"] == "SIGKILL" else "tab:orange"
                axis.axvline(row["seconds"] / 60, color=color, alpha=0.5, linewidth=0.8)
    axes[0].set_title("One run with two engines. Red: a process is killed, orange: stopped")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def soak(tried, file, arguments):
    """Run until --minutes are reached, appending rows to `file`; the exit code if the run ended before, else None."""
    before = read_jsonl(file)
    begin = time.monotonic() - sum(row["seconds"] for row in before[-1:])
    source = random.Random(f"{arguments.seed}/{len(before)}")
    mean_s = 60 * arguments.mean_minutes
    with contextlib.closing(JsonlWriter(file)) as writer:
        tried.start()
        assert tried.process is not None
        try:
            next_kill = time.monotonic() - begin + source.expovariate(1 / mean_s)
            while (seconds := time.monotonic() - begin) < 60 * arguments.minutes:
                if tried.process.poll() is not None:
                    return tried.process.returncode
                if seconds >= next_kill and (row := kill(tried, source, seconds)) is not None:
                    writer.append(row)
                    next_kill = seconds + source.expovariate(1 / mean_s)
                if (row := sample(tried, seconds)) is not None:
                    writer.append(row)
                time.sleep(EVERY_S)
        finally:
            tried.process.send_signal(signal.SIGTERM)
            tried.process.wait()
    return None


def main(arguments):
    """Run or continue the soak, then report."""
    out = arguments.out.resolve()
    tiny, _ = ready(out)
    file = out / "samples.jsonl"
    tried = Try(out, tiny, real=arguments.real, steps=1_000_000)
    tried.command += ["rollouts.max_staleness_steps=8", "checkpoint.every_steps=10", "trainer.world_size=1"]
    tried.command += [f"checkpoint.rollouts={arguments.rollouts}"]
    tried.command += ["validation.every_steps=20", "engine.max_restarts=1000", "trainer.max_restarts=1000"]
    code = soak(tried, file, arguments)
    rows = read_jsonl(file)
    wrong = wrong_in(tried.run)
    if code is not None:
        wrong.append(f"the run ended with exit code {code}, see {out / 'output'}")
    plot(rows, out / "soak.png")
    report = {
        "minutes": round(sum(row["seconds"] for row in rows[-1:]) / 60, 1),
        "steps": tried.steps(),
        "kills": dict(Counter(f"{row['kill']} {row['signal']}" for row in rows if "kill" in row)),
        "controllers": len({row["pid"] for row in rows if "pid" in row}),
        "longest_pause_s": longest_pause_s(rows),
        "samples_of_slopes": len(measured(rows)),
        "slopes": slopes(measured(rows)),
        "wrong": wrong,
    }
    write_durably(out / "report.json", json.dumps(report, indent=1).encode())
    print(json.dumps(report, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
