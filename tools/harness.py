"""Shared parts of the benchmarks: options, arms that take turns, statistics, the machine, child processes, output."""

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

from checkout import explained

with explained():
    import yaml

    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.plan.assumptions import checked, described

_LARGEST = ("runtime_gib", "fragmentation", "engine_overhead_gib")
"""Memory reserves of a plan: the largest measurement counts, of others the median."""
T = TypeVar("T")
Figures = dict[str, Any]


def options(text, **wanted):
    """The parser of a program, as a function. text: its description.

    Each keyword is an option: its default, its type if it has none, or a list of choices, the first the default; with
    a help text a pair.
    """

    def parser():
        built = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, given in wanted.items():
            kind = given
            help_text = None
            if isinstance(given, tuple):
                kind, help_text = given
            how = {"type": type(kind), "default": kind}
            if kind is False:
                how = {"action": "store_true"}
            elif isinstance(kind, type):
                how = {"type": kind}
            elif isinstance(kind, list):
                how = {"choices": kind, "default": kind[0]}
            built.add_argument(f"--{name.replace('_', '-')}", help=help_text, **how)
        return built

    return parser


def benchmark(text, **wanted):
    """`options` with --json FILE, which `report` needs."""
    return options(text, **wanted, json=(Path, "append the figures to this file, too"))


def asked(o, *names):
    """These options, or all that have a value but --json."""
    wanted = names or {name for name, value in vars(o).items() if name != "json" and value is not None}
    return {name: value for name, value in vars(o).items() if name in wanted}


def turns(arms, rounds):
    """(round, arm) of all measurements: each round begins with the next arm."""
    for number in range(rounds):
        turn = number % len(arms)
        yield from ((number, arm) for arm in (*arms[turn:], *arms[:turn]))


def in_rounds(arms, rounds, *, warm_up=1):
    """Results of each arm in each round, without the first `warm_up` ones, which allocate."""
    found = {arm: [] for arm in arms}
    for number, arm in turns(list(arms), warm_up + rounds):
        value = arms[arm]()
        if number >= warm_up:
            found[arm].append(value)
    return found


def timed(work):
    """Seconds of wall and of this process's processor; the latter tell more on a machine that others load."""
    wall = time.perf_counter()
    busy = time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - busy


def seconds_of(work):
    """Wall seconds of a call."""
    return timed(work)[0]


def columns(rows):
    """Rows with the same names -> the values of each name."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def medians(found):
    """Median of each arm's values."""
    return {arm: statistics.median(values) for arm, values in found.items()}


def extremes(found):
    """Smallest and largest of each arm's values."""
    return {arm: [round(min(values), 4), round(max(values), 4)] for arm, values in found.items()}


def paired(over, under):
    """The ratio of two arms in each round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(values, digits=3):
    """Median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return rounded({"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}, digits)


def rounded(found, digits=4, *, suffix=""):
    """The figures with `digits` decimals, and `suffix` behind their names."""
    return {f"{name}{suffix}": round(value, digits) for name, value in found.items()}


def processor():
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = []
    if info.is_file():
        lines = info.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line[:10] == "model name"), platform.machine())


def machine():
    """The machine of this process, and how busy it is."""
    found = {"cpu": processor(), "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}
    found["python"] = platform.python_version()
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].__version__
    return found


def gpu_names():
    """Names of the GPUs that this process sees."""
    import torch

    if not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return [module.get_device_name(index) for index in range(torch.accelerator.device_count())]


def nvidia_smi(field):
    """A field of nvidia-smi's --query-gpu for this process's GPU; None if the driver cannot be queried.

    The GPU is number LOCAL_RANK of the visible ones, the first by default.
    """
    rank = os.environ.get("LOCAL_RANK", "0")
    visible = dict(enumerate(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))
    argv = ["nvidia-smi", "-i", visible.get(int(rank), rank), f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def memory_of(field, pid="self"):
    """VmRSS, its peak VmHWM, or RssAnon of a process (bytes); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


def reset_peak():
    """Let VmHWM of this process begin anew: proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def child(script, *words, **variables):
    """The JSON object that another process prints last. Raises RuntimeError with its last error."""
    done = subprocess.run(
        [sys.executable, script, *words], env=os.environ | variables, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def report(o, line, *, shown=True):
    """Print one line of figures as JSON, where they are `shown` otherwise not; --json gets it in any case."""
    if shown:
        print(json.dumps(line), flush=True)
    if o.json:
        with o.json.open("a", encoding="utf8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def table(heads, rows, title=None):
    """Print figures for people: all columns but the first to the right."""
    with explained():
        from rich.console import Console
        from rich.table import Table
    built = Table(title=title)
    for number, head in enumerate(heads):
        built.add_column(head, justify="right" if number else "left")
    for row in rows:
        built.add_row(*row)
    Console().print(built)


def write_constants(path, measured, *, gpu, source):
    """Write the planner's constants of several checks, as the file that `plan --assumptions` reads; returns them.

    Without any, nothing is written. measured: (layers, figures by name) of each check; layers: te, plain, or None for
    no trainer's. Figures count that are constants within their range; of trainers those of one kind of layers,
    Transformer Engine's if both were measured. gpu: its name in CUDA.
    """
    usable = []
    for layers, figures in measured:
        for name in figures.keys() & {field.name for field in described()}:
            with contextlib.suppress(ValueError):
                value = getattr(checked({name: figures[name]}), name)
                usable.append((layers, name, value))
    kinds = {layers for layers, *_ in usable}
    kept = next((kind for kind in ("te", "plain") if kind in kinds), None)
    found = {}
    for layers, name, value in usable:
        if layers in (None, kept):
            found.setdefault(name, []).append(value)
    values = {name: max(v) if name in _LARGEST else statistics.median(v) for name, v in found.items()}
    if values:
        content = {
            "gpu": gpu,
            **({"layers": kept} if kept else {}),
            "written": datetime.datetime.now(datetime.UTC).date(),
            "assumptions": {name: {"value": value, "source": source} for name, value in values.items()},
        }
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
        write_durably(path, f"# Measured constants: megatron-scalerl plan --assumptions FILE\n{text}".encode())
    return values
