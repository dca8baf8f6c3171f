"""Kill the processes of a tiny run, and check what the run made of it.

    python tools/kills.py --out runs/kills [--tries 20] [--real 5] [--only engine-1:KILL] [--seed 1]
    python tools/kills.py --kind series --out runs/kills [--tries 20] [--kills 24] [--environment coin:Total]
                          [--victims environment-0,engine-1]
    python tools/kills.py --kind soak --out runs/soak [--minutes 60] [--mean-minutes 4] [--real 1] [--rollouts keep]

The run is real: controller under `train --supervise`, trainer ranks, two engines. With stand-in engines
(tests/fakes) a completion depends on its seed alone.

matrix  each try is a run of eight steps at k = 0 with one fault, at a random moment or in a chosen state. It must
        give the weights, pass rates and batches of the run without faults, bit for bit. With real engines (--real
        tries) the run is deterministic: a killed controller or trainer gives the same bits, too; a killed engine
        the same batches, nothing lost or trained twice. The victim "disk" is the file system of the run's folder,
        a tmpfs: it is filled up, the run has to end with a path, and has to finish once there is space.
series  longer runs, in which SIGKILL of a random process follows up to four seconds after the run went on from the
        last one, --kills times, until each kind of process, or each of --victims, has had --tries kills. With
        --environment, in a folder of OUT, completions are episodes of several turns and the environment's
        processes are killed, too: coin:Total and coin:Agent are in tests/e2e, and verifiers:guess wants
        tools/install.sh environments. A run that is wrong in the end counts against all of its kills.
soak    one run at k = 8 until --minutes in all: SIGKILL or SIGSTOP of a random process other than the controller
        at exponential intervals. Every five seconds OUT/samples.jsonl gets the controller's resident memory, open
        files and threads, the size of the run's folder and the steps made. At the end OUT/report.json (also
        printed): the steps, the kills, the longest time without a step, what is wrong in journal and records, and
        the change per hour after minute 10, the median of the slopes between all pairs of samples (Theil-Sen).

A second call continues where the first stopped; matrix and series append a row for each kill to OUT/rows.jsonl,
once its run has ended, and print all rows as a table for Markdown. Exit code 1: it went wrong.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import harness
from checkout import explained

parser = harness.options(
    __doc__,
    kind=["matrix", "series", "soak"],
    out=Path("runs/kills"),
    tries=20,
    kills=24,
    real=(0, "matrix: tries with vLLM; soak: vLLM unless 0"),
    only=("", "only tries of the matrix whose name starts so"),
    environment="",
    victims="",
    minutes=60.0,
    mean_minutes=4.0,
    rollouts=(["resume", "keep"], "what stays on disk in a soak"),
    seed=1,
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import psutil
    from scipy.stats import theilslopes
    from small_disk import SmallDisk

    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl
    from megatron_scalerl.processes.logs import NAME_VARIABLE
    from megatron_scalerl.processes.parent_death import tied_command
    from megatron_scalerl.rollouts.history import read_history

ROOT = Path(__file__).parent.parent
STEPS = 8
STEPS_PER_KILL = 4
VALIDATED = 4
"""Steps between validations."""
LIMIT_S = 420
"""Of eight steps."""
VICTIMS = ("controller", "trainer-0", "trainer-1", "engine-1", "verifier", "decoder-0")
SOAKED = ("engine-0", "engine-1", "trainer-0", "verifier", "decoder-0")
OFTEN = ("controller", "trainer-0", "engine-1")
DISK = "disk"
ANSWERS = ("garbage", "half", "wrong version", "nothing")
STATES = ("importing", "update", "validation", "checkpoint")
AT = ("running", "random")
PAUSE_S = 4.0
EVERY_S = 5.0
"""Seconds between samples."""
FROM_S = 600.0
"""Seconds that slopes leave out at the start."""
ENOUGH = 60
"""Samples that a slope needs."""
MEASURED = {"rss_mib": "percent", "files": "count", "threads": "count", "disk_mib": "MiB"}
"""What is sampled, and the unit of its slope per hour."""


class Case(NamedTuple):
    """A fault, its victim and its moment."""

    victim: str
    fault: str
    """KILL, STOP (and CONT for the controller), what the stand-in engine answers, or "full" for the disk."""
    at: str
    """A state; "random": any moment of the run; "running": any moment after its first step; "series"."""
    number: int
    real: bool = False

    @property
    def key(self):
        """Its name."""
        return f"{self.victim}:{self.fault}:{self.at}:{'real' if self.real else 'stand-in'}:{self.number}"


def matrix(tries, real):
    """All tries, in an order in which every victim comes early."""
    yield from (Case(victim, "KILL", AT[n % 2], n) for n in range(tries) for victim in VICTIMS)
    yield from (Case(victim, "KILL", state, 0) for state in STATES for victim in OFTEN)
    yield from (Case("engine-1", answer, "running", n) for n in range(3) for answer in ANSWERS)
    yield from (Case(victim, "STOP", "running", n) for n in range(2) for victim in VICTIMS)
    yield from (Case(DISK, "full", "running", n) for n in range(3))
    yield from (Case(victim, "KILL", AT[n % 2], n, real=True) for n in range(real) for victim in OFTEN)


def planned(options, rows):
    """The faults of each run that is to be made; `rows` gets a row for each of them before the next run."""
    if options.kind == "matrix":
        done = {row["case"] for row in rows}
        for case in matrix(options.tries, options.real):
            if case.key not in done and case.key.startswith(options.only):
                yield [case]
        return
    victims = [*VICTIMS]
    if options.environment:
        victims.append("environment-0")
    if options.environment.startswith("verifiers:"):
        victims.append("environment-server")
    victims = options.victims.split(",") if options.victims else victims
    while True:
        done = [row["victim"] for row in rows if row["at"] == "series" and row["happened"]]
        had = Counter(done)
        wanted = [victim for victim in victims for _ in range(options.tries - had[victim])]
        if not wanted:
            return
        random.Random(f"{options.seed}/{len(done)}").shuffle(wanted)
        yield [Case(v, "KILL", "series", len(done) + n) for n, v in enumerate(wanted[: options.kills])]


class Run:
    """A run, and what is done to it."""

    def __init__(self, folder, tiny, *settings, real=False, steps=STEPS, disk=False):
        """disk: the run's folder is on a separate disk, and the run is not started again by its supervisor."""
        self.folder = folder
        self.limit_s = LIMIT_S / STEPS * steps
        self.disk = None
        restarts = 5
        output_dir = folder
        if disk:
            self.disk = SmallDisk(folder / "disk")
            restarts = 0
            output_dir = self.disk.folder
        self.run = output_dir / "r"
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True, exist_ok=True)
        own = [
            "name=r", f"output_dir={output_dir}", f"steps={steps}", f"policy.path={tiny / 'base_policy'}",
            f"prompts.path={tiny / 'prompts.jsonl'}", f"prompts.held_out_path={tiny / 'held_out.jsonl'}",
            "rollouts.groups_per_batch=4", "rollouts.group_size=4", "rollouts.max_in_flight=16",
            "rollouts.max_staleness_steps=0", f"validation.every_steps={VALIDATED}", "validation.prompts=10",
            "validation.generations=2", "checkpoint.every_steps=2", "optimizer.warmup_steps=1", "optimizer.lr=1e-5",
            "weights.probe_tolerance=1e9", "weights.probe_every=0", "trainer.micro_batch_tokens=512",
            "trainer.world_size=2", "engine.count=2", "filters.zero_variance=false", "engine.stall_timeout_s=4",
            "engine.first_token_timeout_s=4", "engine.max_restarts=20", "weights.timeout_s=30",
            "trainer.step_timeout_s=20", "weights.connect_timeout_s=20",
        ]  # fmt: skip
        program = [str(ROOT / "tests/fakes/run_with_stand_ins.py")]
        own.append("interruption.enabled=false")
        if real:
            program = ["-m", "megatron_scalerl"]
            own[-1:] = ["rollouts.deterministic=true", "rewards.verifier=coin:toss"]
        supervised = ["train", "--supervise", f"--max-failures={restarts}", "recipes/tiny_cpu.yaml"]
        self.command = tied_command([sys.executable, *program, *supervised, *own, *settings])
        path = f"{ROOT}:{ROOT / 'tests/e2e'}:{ROOT / 'examples/taskset'}"
        self.env = os.environ | {"STAND_IN_FAULTS": str(self.faults), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.begin = time.monotonic()
        self.start()

    def start(self):
        """Start the controller under the supervisor."""
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=self.env, stdout=output, stderr=output)

    def steps(self):
        """Steps recorded so far."""
        return max((int(row["step"]) for row in read_jsonl(self.run / "metrics.jsonl")[-1:]), default=0)

    def find(self, victim):
        """The process of the victim, None if it does not run."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    line = process.cmdline()
                    found = {
                        "controller": "train" in line and process.ppid() == self.process.pid,
                        "verifier": "megatron_scalerl.rewards.worker" in line,
                        "environment-server": line[3:4] == ["serve"],
                    }
                    leads = victim not in found and os.getpgid(process.pid) == process.pid
                    if found.get(victim) or (leads and process.environ().get(NAME_VARIABLE) == victim):
                        return process
        return None

    def wait(self, condition):
        """Whether the condition is met before the run ends, or its limit of time."""
        while self.process.poll() is None and time.monotonic() - self.begin < self.limit_s:
            if condition():
                return True
            time.sleep(0.01)
        return False

    def strike(self, case, moment_s):
        """Wait for the moment of the case, do it and wait until the run goes on; the row."""
        if case.at in ("running", "series"):
            self.wait(self.steps)
        begin = time.monotonic()
        logs = self.run / "logs"
        update = (lambda: "PAUSED" in _tail(logs / "engine-0.log")) if case.real else (lambda: self.steps() >= 3)
        states = {
            "importing": lambda: True,
            "update": update,
            "validation": lambda: "validation of version 4" in _tail(logs / "controller.log"),
            "checkpoint": lambda: (self.run / "checkpoints" / "step_000004").exists(),
        }
        reached = states.get(case.at, lambda: time.monotonic() - begin >= moment_s)
        happened = self.wait(lambda: reached() and (case.victim == DISK or self.find(case.victim) is not None))
        row = case._asdict() | {"case": case.key, "happened": happened, "wrong": [], "went_on_s": None}
        begin = time.monotonic()
        step = self.steps()
        if happened and self.disk is not None:
            row["wrong"] = self.fill(self.disk)
        elif happened:
            self.inject(case.victim, case.fault)
        if happened and self.wait(lambda: self.steps() > step):
            row["went_on_s"] = round(time.monotonic() - begin, 2)
        (self.faults / case.victim).unlink(missing_ok=True)
        print(f"{case.key}: at step {step}, on after {row['went_on_s']} s", flush=True)
        return row | {"at_s": round(begin - self.begin, 2), "at_step": step}

    def inject(self, victim, fault, *, for_good=False):
        """Do it, to the whole process group of engines and trainer ranks; whether the victim runs.

        Without `for_good`, a controller or verifier that is stopped goes on after six seconds.
        """
        process = self.find(victim)
        if fault in ANSWERS:
            (self.faults / victim).write_text(fault)
        elif process is not None:
            with contextlib.suppress(ProcessLookupError):
                send = os.killpg if victim.startswith(("engine", "trainer")) else os.kill
                send(process.pid, signal.Signals[f"SIG{fault}"])
                if fault == "STOP" and victim in ("controller", "verifier") and not for_good:
                    time.sleep(6)
                    os.kill(process.pid, signal.SIGCONT)
        return process is not None

    def fill(self, disk):
        """Fill the disk, wait for the end of the run, make space and start it again; what is wrong with the end."""
        disk.fill()
        output = self.folder / "output"
        code = self.end()
        text = output.read_text(errors="replace")
        disk.free()
        self.start()
        wrong = []
        if code != 1:
            wrong.append(f"the exit code with a full disk is {code} instead of 1")
        if f"No space left on device: '{self.run}" not in text:
            wrong.append(f"{output} names no path that has no space")
        return wrong

    def end(self):
        """Wait for the end; -1 if it takes too long."""
        try:
            return self.process.wait(max(1.0, self.limit_s - (time.monotonic() - self.begin)))
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()
            return -1


def _tail(path):
    return path.read_text(errors="replace")[-2000:] if path.exists() else ""


def outcome_of(run):
    """The results of a run that must be the same with every fault."""
    metrics = [row for row in read_jsonl(run / "metrics.jsonl") if "skipped" not in row]
    return {
        "batches": [sorted(batch.group_ids) for batch in read_history(run).batches],
        "digests": [row["weight_digest"] for row in metrics],
        "losses": [[row["loss"], row["grad_norm"]] for row in metrics],
        "steps": [row["step"] for row in metrics],
        "pass_rates": [row["train_pass_rate"] for row in metrics],
        "validation": [[row["step"], row["pass_rate"]] for row in read_jsonl(run / "validation.jsonl")],
    }


def faults_of(run, steps=None, expected=()):
    """The faults of a run, one text each. steps: that it had to make. expected: outcomes by name."""
    outcome = outcome_of(run)
    wrong = []
    groups = [group for batch in outcome["batches"] for group in batch]
    made = steps or len(outcome["steps"])
    if len(groups) != len(set(groups)) or (steps and len(outcome["batches"]) != steps):
        wrong.append(f"batches: {outcome['batches']} are not those of {made} steps with every group once")
    if outcome["steps"] != list(range(1, made + 1)):
        wrong.append(f"metrics: {outcome['steps']} are not steps 1 to {made}, each once")
    if steps and [row[0] for row in outcome["validation"]] != list(range(0, steps + 1, VALIDATED)):
        wrong.append(f"validations: {outcome['validation']} are not those of every fourth step")
    axis = [row["device_hours"] for row in read_jsonl(run / "metrics.jsonl")]
    if axis != sorted(axis):
        wrong.append(f"compute axis: {axis} does not ascend")
    return wrong + [f"{k}: {outcome[k]}, without a fault {v}" for k, v in dict(expected).items() if v != outcome[k]]


def table(rows):
    """The rows as Markdown: fault, tries, what happened, seconds until the run went on."""
    lines = ["| process | fault | engines | tries | as without the fault | until the run went on |"]
    lines.append("|---|---|---|---|---|---|")
    kinds = defaultdict(list)
    for row in rows:
        if row["happened"]:
            kinds[row["victim"], row["fault"], row["real"]].append(row)
    for (victim, fault, real), same in sorted(kinds.items()):
        seconds = [row["went_on_s"] for row in same if row["went_on_s"] is not None]
        spread = f"{statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})" if seconds else "-"
        name = f"SIG{fault}" if fault in ("KILL", "STOP") else fault
        good = sum(not row["wrong"] for row in same)
        engines = "vLLM" if real else "stand-in"
        lines.append(f"| {victim} | {name} | {engines} | {len(same)} | {good} | {spread} |")
    return "\n".join(lines)


def tiny_in(out):
    """Folder of the tiny policy and prompts in `out`, which are made once."""
    tiny = out / "tiny"
    if not (tiny / "tiny.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megatron_scalerl.tiny", str(tiny), "--seed", "1"]
        subprocess.check_call(command, cwd=ROOT)
    return tiny


def settings_of(environment, tiny):
    """Settings of a run with the environment."""
    if not environment:
        return []
    common = [f"environment.name={environment}", "environment.max_turns=4", "environment.episode_tokens=200"]
    if not environment.startswith("verifiers:"):
        return common
    games = tiny / "games.jsonl"
    with open(games, "w", encoding="utf8") as file:
        command = [sys.executable, "-m", "megatron_scalerl.environments.verifiers", environment.partition(":")[2]]
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples/taskset'}"}
        subprocess.check_call(command, stdout=file, env=os.environ | paths)
    rows = [f"prompts.path={games}", "prompts.held_out_path=null", "prompts.held_out=4"]
    # a busy machine takes a minute to import the library
    return [*common, *rows, "environment.workers=1", "environment.timeout_s=300"]


def reference_of(folder, tiny, *settings, real, steps):
    """The run without faults, made once: (what it leaves, seconds in which a moment is drawn)."""
    file = folder / "seconds"
    if not file.exists():
        unharmed = Run(folder, tiny, *settings, real=real, steps=steps)
        unharmed.wait(unharmed.steps)
        first = time.monotonic()
        code = unharmed.end()
        end = time.monotonic()
        assert code == 0, f"the run without faults: exit code {code}, see {folder / 'output'}"
        file.write_text(json.dumps({"random": end - unharmed.begin, "running": end - first, "series": PAUSE_S}))
    assert faults_of(folder / "r", steps) == [], faults_of(folder / "r", steps)
    return outcome_of(folder / "r"), json.loads(file.read_text())


def struck(tried, cases, moments, expected, seed, steps):
    """Rows of a run that all of the cases are done to. One on a separate disk is copied from there if it is wrong."""
    try:
        rows = []
        for case in cases:
            moment_s = random.Random(f"{seed}/{case.key}").uniform(0.0, moments.get(case.at, 0.0))
            rows.append(tried.strike(case, moment_s))
        code = tried.end()
        if cases[0].real and not cases[0].victim.startswith(("controller", "trainer")):
            expected = {key: expected[key] for key in ("batches", "steps")}  # the bits of engines may differ
        wrong = [f"the exit code is {code}"] * bool(code) + faults_of(tried.run, steps, expected)
        rows = [row | {"code": code, "wrong": row["wrong"] + wrong} for row in rows]
        if tried.disk is not None and any(row["wrong"] for row in rows):
            shutil.copytree(tried.run, tried.folder / "r")
        return rows
    finally:
        if tried.disk is not None:
            tried.disk.close()


def kill(options, out):
    """Make the runs of the matrix or the series that have no rows yet."""
    tiny = tiny_in(out)
    describe = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(describe, cwd=ROOT, text=True).strip()
    settings = settings_of(options.environment, tiny)
    steps = STEPS if options.kind == "matrix" else STEPS_PER_KILL * options.kills
    rows = read_jsonl(out / "rows.jsonl")
    with contextlib.closing(JsonlWriter(out / "rows.jsonl")) as file:
        for cases in planned(options, rows):
            first = cases[0]
            disk = first.victim == DISK
            if disk and os.geteuid() != 0:
                print(f"{first.key}: left out, it needs the right to mount", flush=True)
                continue
            folder = out / f"reference_{'real' * first.real}_{steps}_{commit}"
            expected, moments = reference_of(folder, tiny, *settings, real=first.real, steps=steps)
            folder = out / first.key.replace(":", "_").replace(" ", "_")
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
            tried = Run(folder, tiny, *settings, real=first.real, steps=steps, disk=disk)
            made = struck(tried, cases, moments, expected, options.seed, steps)
            for row in made:
                rows.append(row | {"commit": commit})
                file.append(rows[-1])
            wrong = "; ".join(dict.fromkeys(text for row in made for text in row["wrong"]))
            print(f"{folder.name}: {len(made)} kills: {wrong or 'as without the faults'}", flush=True)
            if options.kind == "series" and not any(row["happened"] for row in made):
                raise SystemExit(f"{folder}: the run ended before the first kill")
            if not wrong:
                shutil.rmtree(folder)
    print(table(rows))
    return int(any(row["wrong"] for row in rows))


def sample(tried, seconds):
    """A row of samples, None while the controller is being started."""
    controller = tried.find("controller")
    # files may be deleted meanwhile, of which du complains
    command = ["du", "-sb", str(tried.run)]
    size = subprocess.run(command, capture_output=True, text=True).stdout.split()
    with contextlib.suppress(psutil.Error):
        return controller and {
            "seconds": round(seconds, 1),
            "pid": controller.pid,
            "rss_mib": controller.memory_info().rss / 2**20,
            "files": controller.num_fds(),
            "threads": controller.num_threads(),
            "disk_mib": int(size[0]) / 2**20,
            "steps": tried.steps(),
        }
    return None


def slopes(samples):
    """Change per hour of each measured value by Theil-Sen, as text with its unit; memory in percent of its median."""
    if len(samples) < ENOUGH:
        few = f"{len(samples)} samples after minute {FROM_S / 60:g} are too few; a slope needs {ENOUGH}"
        return dict.fromkeys(MEASURED, few)
    hours = [row["seconds"] / 3600 for row in samples]
    texts = {}
    for key, unit in MEASURED.items():
        values = [row[key] for row in samples]
        slope = theilslopes(values, hours).slope
        if unit == "percent":
            slope *= 100 / statistics.median(values)
        texts[key] = f"{slope:+.3f} {unit} per hour"
    return texts


def longest_pause_s(samples):
    """Longest time without a new step, after the first one; to the resolution of the samples."""
    grown = [row["seconds"] for last, row in pairwise([{"steps": 0}, *samples]) if row["steps"] > last["steps"]]
    return round(max(later - earlier for earlier, later in pairwise([*grown, samples[-1]["seconds"]])), 1)


def endure(tried, options, file):
    """Run until --minutes are reached, appending rows to `file`; the exit code if the run ended before, else None."""
    before = read_jsonl(file)
    begin = time.monotonic() - sum(row["seconds"] for row in before[-1:])
    source = random.Random(f"{options.seed}/{len(before)}")
    rate = 1 / (60 * options.mean_minutes)
    next_kill = time.monotonic() - begin + source.expovariate(rate)
    try:
        with contextlib.closing(JsonlWriter(file)) as writer:
            while (seconds := time.monotonic() - begin) < 60 * options.minutes:
                if tried.process.poll() is not None:
                    return tried.process.returncode
                if seconds >= next_kill:
                    victim = source.choice(SOAKED)
                    fault = source.choice(("KILL", "KILL", "STOP"))
                    if tried.inject(victim, fault, for_good=True):
                        writer.append({"seconds": round(seconds, 1), "kill": victim, "signal": f"SIG{fault}"})
                        next_kill = seconds + source.expovariate(rate)
                if (row := sample(tried, seconds)) is not None:
                    writer.append(row)
                time.sleep(EVERY_S)
    finally:
        tried.process.send_signal(signal.SIGTERM)
        tried.process.wait()
    return None


def soak(options, out):
    """Run or continue the soak, then report."""
    settings = ["rollouts.max_staleness_steps=8", "checkpoint.every_steps=10", "trainer.world_size=1"]
    settings += [f"checkpoint.rollouts={options.rollouts}", "validation.every_steps=20"]
    settings += ["engine.max_restarts=1000", "trainer.max_restarts=1000"]
    tried = Run(out, tiny_in(out), *settings, real=bool(options.real), steps=1_000_000)
    code = endure(tried, options, out / "samples.jsonl")
    wrong = faults_of(tried.run)
    if code is not None:
        wrong.append(f"the run ended with exit code {code}, see {out / 'output'}")
    rows = read_jsonl(out / "samples.jsonl")
    kills = [row for row in rows if "kill" in row]
    samples = [row for row in rows if "pid" in row]
    controllers = Counter(row["pid"] for row in samples)
    [(longest, _)] = controllers.most_common(1)  # slopes are those of one process
    steady = [row for row in samples if row["pid"] == longest]
    steady = [row for row in steady if row["seconds"] - steady[0]["seconds"] >= FROM_S]
    report = {
        "minutes": round(rows[-1]["seconds"] / 60, 1),
        "steps": tried.steps(),
        "kills": Counter(f"{row['kill']} {row['signal']}" for row in kills),
        "controllers": len(controllers),
        "longest_pause_s": longest_pause_s(samples),
        "samples_of_slopes": len(steady),
        "slopes": slopes(steady),
        "wrong": wrong,
    }
    write_durably(out / "report.json", json.dumps(report, indent=1).encode())
    print(json.dumps(report, indent=1))
    return int(bool(wrong))


def main(options):
    """Do what --kind says."""
    out = options.out.resolve()
    if options.kind == "soak":
        return soak(options, out)
    return kill(options, out / options.environment.replace(":", "_"))


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
