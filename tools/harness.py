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

from checkout import explained

with explained():
    import yaml

    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.plan.assumptions import checked, described

_LARGEST = ("runtime_gib", "fragmentation", "engine_overhead_gib")
"""Memory reserves of a plan: the largest measurement counts, of others the median."""
OFFLINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment of a `Partner`."""


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


def asked(o):
    """All options that have a value but --json."""
    return {name: value for name, value in vars(o).items() if name != "json" and value is not None}


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
    return {arm: [min(values), max(values)] for arm, values in found.items()}


def paired(over, under):
    """The ratio of two arms in each round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(values):
    """Median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}


def rounded(value):
    """`value` with every float in it rounded to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def machine():
    """The machine of this process, and how busy it is."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count()}
    found |= {"load_average": os.getloadavg()[0], "python": platform.python_version()}
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
        return subprocess.check_output(argv, text=True, timeout=20).strip()
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
    return json.loads(done.stdout.strip().splitlines()[-1])


class Partner:
    """Another process that answers commands, a line of JSON each, as the measuring one sees it."""

    def __init__(self, script, *words, **variables):
        """Start it. Its vLLM takes no further processes, binds no threads and compiles nothing."""
        environment = os.environ | OFFLINE | variables
        pipe = subprocess.PIPE
        argv = [sys.executable, script, *words]
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, *command):
        """Send a command; `answer` waits for its value."""
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def answer(self):
        """The value of the oldest command without one; the first is of the start."""
        line = self._process.stdout.readline()
        assert line, "the other process ended"
        return json.loads(line)

    def end(self):
        """Let it exit."""
        self._process.communicate()


def partner(worker_type, o):
    """In such a process: answer commands, which are methods of a worker."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    worker = worker_type(o)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, command)(*arguments)), file=answers, flush=True)


def report(o, line):
    """Print figures as one line of JSON, to six digits, with options and machine, and append it to --json."""
    context = {"program": Path(sys.argv[0]).stem, "options": asked(o), "machine": machine()}
    text = json.dumps(rounded({**line, **context}), default=str)
    print(text, flush=True)
    if o.json:
        with o.json.open("a", encoding="utf8") as file:
            file.write(f"{text}\n")


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
