"""Kill every process of a run at random moments and in chosen states, and check what the run made of it.

    python tools/kill_matrix.py --out runs/kills [--tries 20] [--real 5] [--only engine-1:KILL] [--seed 1]

Each try is one whole run of a tiny recipe at k = 0: real controller under `train --supervise`, real trainer ranks,
two engines. With stand-in engines (tests/fakes) a completion depends on its seed alone, so that every try must give
the weights, pass rates and batches of the run without faults, bit for bit. With real engines (--real tries) the run
is deterministic (rollouts.deterministic): a killed controller or trainer gives the same bits, too; a killed engine
the same batches, nothing lost or trained twice. One JSON row per try is appended to OUT/rows.jsonl; a second call
continues where the first stopped. The victim "disk" is the file system of the run's folder, a tmpfs: it is filled up,
the run has to end with a path, and has to finish once there is space. `--table` prints the table of
docs/reliability.md from the rows.
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
from dataclasses import dataclass
from pathlib import Path

import harness
from checkout import explained

parser = harness.options(
    __doc__,
    out=Path("runs/kills"),
    tries=20,
    real=5,
    only=("", "only tries whose name starts so"),
    seed=1,
    table=False,
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import psutil
    from small_disk import SmallDisk

    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.processes.logs import NAME_VARIABLE
    from megatron_scalerl.processes.parent_death import tied_command
    from megatron_scalerl.rollouts.history import read_history

ROOT = Path(__file__).parent.parent
STEPS = 8
LIMIT_S = 420
VICTIMS = ("controller", "trainer-0", "trainer-1", "engine-1", "verifier", "decoder-0")
DISK = "disk"
FAULTS = ("garbage", "half", "wrong version", "nothing", "endless")
AT = ("running", "random")
STATES = ("importing", "update", "validation", "checkpoint")
ENGINES = {False: "stand-in", True: "real"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, its victim and its moment."""

    victim: str
    fault: str
    """KILL, STOP (and CONT for the controller), what the stand-in engine answers, or "full" for the disk."""
    at: str
    """A state; "random": any moment of the run; "running": any moment after its first step."""
    number: int
    real: bool = False

    @property
    def key(self):
        """Name of the try."""
        kind = ENGINES[self.real]
        return f"{self.victim}:{self.fault}:{self.at}:{kind}:{self.number}"


def cases(tries, real):
    """All tries, in an order in which every victim comes early."""
    planned = [Case(victim=v, fault="KILL", at=AT[n % 2], number=n) for n in range(tries) for v in VICTIMS]
    planned += [
        Case(victim=v, fault="KILL", at=s, number=0) for s in STATES for v in ("controller", "trainer-0", "engine-1")
    ]
    planned += [Case(victim="engine-1", fault=f, at="running", number=n) for n in range(3) for f in FAULTS]
    planned += [Case(victim=v, fault="STOP", at="running", number=n) for n in range(2) for v in VICTIMS]
    planned += [Case(victim=DISK, fault="full", at="running", number=n) for n in range(3)]
    kinds = ("controller", "trainer-0", "engine-1")
    planned += [Case(victim=v, fault="KILL", at=AT[n % 2], number=n, real=True) for n in range(real) for v in kinds]
    return planned


class Try:
    """A run with a fault."""

    def __init__(self, folder, tiny, *, real, steps=STEPS, disk=False, settings=()):
        """disk: the run's folder is on a separate disk, and the run is not started again by its supervisor.

        settings: more of them.
        """
        self.folder = folder
        self.disk = None
        self.restarts = 5
        output_dir = folder
        if disk:
            self.disk = SmallDisk(folder / "disk")
            self.restarts = 0
            output_dir = self.disk.folder
        self.run = output_dir / "r"
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True, exist_ok=True)
        own = [
            "name=r", f"output_dir={output_dir}", f"steps={steps}", f"policy.path={tiny / 'base_policy'}",
            f"prompts.path={tiny / 'prompts.jsonl'}", f"prompts.held_out_path={tiny / 'held_out.jsonl'}",
            "rollouts.groups_per_batch=4", "rollouts.group_size=4", "rollouts.max_in_flight=16",
            "rollouts.max_staleness_steps=0", "validation.every_steps=4", "validation.prompts=10",
            "validation.generations=2", "checkpoint.every_steps=2", "optimizer.warmup_steps=1", "optimizer.lr=1e-5",
            "weights.probe_tolerance=1e9", "weights.probe_every=0", "trainer.micro_batch_tokens=512",
            "trainer.world_size=2", "engine.count=2", "filters.zero_variance=false", "engine.stall_timeout_s=4",
            "engine.first_token_timeout_s=4", "engine.max_restarts=20", "weights.timeout_s=30",
            "trainer.step_timeout_s=20", "weights.connect_timeout_s=20",
        ]  # fmt: skip
        # the supervisor starts `python -m megatron_scalerl train`; with stand-ins this program supervises instead
        if real:
            program = ["-m", "megatron_scalerl"]
            own += ["rollouts.deterministic=true", "rewards.verifier=coin:toss"]
        else:
            program = [str(ROOT / "tests/fakes/run_with_stand_ins.py")]
            own.append("interruption.enabled=false")
        self.command = [sys.executable, *program, "train", "recipes/tiny_cpu.yaml", *own, *settings]
        path = f"{ROOT}:{ROOT / 'tests/e2e'}:{ROOT / 'examples/taskset'}"
        self.env = os.environ | {"STAND_IN_FAULTS": str(self.faults), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.begin = time.monotonic()
        self.first_step = None
        self.process = None

    def start(self):
        """Start the controller under the supervisor."""
        code = "import sys, json; from pathlib import Path; "
        code += "from megatron_scalerl.commands.supervise import supervise; "
        code += "sys.exit(supervise(json.loads(sys.argv[1]), Path(sys.argv[2]), restarts=int(sys.argv[3])))"
        argv = [sys.executable, "-c", code, json.dumps(self.command), str(self.run), str(self.restarts)]
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(tied_command(argv), cwd=ROOT, env=self.env, stdout=output, stderr=output)

    def steps(self):
        """Steps recorded so far."""
        rows = _rows(self.run / "metrics.jsonl")
        return max((int(row["step"]) for row in rows[-1:]), default=0)

    def since_first_step(self):
        """Seconds since the first step was recorded, as far as somebody asked; negative before."""
        if self.first_step is None and self.steps():
            self.first_step = time.monotonic()
        if self.first_step is None:
            return -1.0
        return time.monotonic() - self.first_step

    def find(self, victim):
        """The process of the victim, None if it does not run."""
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    line = process.cmdline()
                    if victim == "controller" and "train" in line and process.ppid() == self.process.pid:
                        return process
                    if victim == "verifier" and "megatron_scalerl.rewards.worker" in line:
                        return process
                    if victim == "environment-server" and line[3:4] == ["serve"]:
                        return process
                    if process.environ().get(NAME_VARIABLE) == victim and os.getpgid(process.pid) == process.pid:
                        return process
        return None

    def wait_for(self, case, moment_s):
        """Wait for the moment of the case; False if the run ends before."""
        assert self.process is not None
        logs = self.run / "logs"
        marks = {
            "importing": lambda: self.find(case.victim) is not None,
            "update": lambda: "PAUSED" in _tail(logs / "engine-0.log") if case.real else self.steps() >= 3,
            "validation": lambda: "validation of version 4" in _tail(logs / "controller.log"),
            "checkpoint": lambda: (self.run / "checkpoints" / "step_000004").exists(),
            "random": lambda: time.monotonic() - self.begin >= moment_s,
            "running": lambda: self.since_first_step() >= moment_s,
        }
        while self.process.poll() is None:
            if marks[case.at]() and (case.victim == DISK or self.find(case.victim) is not None):
                return True
            time.sleep(0.005)
        return False

    def inject(self, case):
        """Do it, to the whole process group of engines and trainer ranks."""
        if self.disk is not None:
            self.disk.fill()
            return
        process = self.find(case.victim)
        if case.fault in FAULTS:
            (self.faults / case.victim).write_text(case.fault)
            return
        if process is None:
            return
        number = signal.Signals[f"SIG{case.fault}"]
        with contextlib.suppress(ProcessLookupError):
            if case.victim.startswith(("engine", "trainer")):
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)
            if case.fault == "STOP" and case.victim in ("controller", "verifier"):
                time.sleep(6)
                os.kill(process.pid, signal.SIGCONT)

    def start_with_space(self):
        """Wait for the end of a run whose disk is full, make space and start it again; what is wrong with the end."""
        assert self.disk is not None
        output = self.folder / "output"
        code = self.end()
        text = output.read_text(errors="replace")
        self.disk.free()
        self.start()
        wrong = []
        if code != 1:
            wrong.append(f"the exit code with a full disk is {code} instead of 1")
        if f"No space left on device: '{self.run}" not in text:
            wrong.append(f"{output} names no path that has no space")
        return wrong

    def end(self):
        """Wait for the end; -1 if it takes too long."""
        assert self.process is not None
        try:
            return self.process.wait(max(1.0, LIMIT_S - (time.monotonic() - self.begin)))
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()
            return -1


def _rows(path):
    if not path.exists():
        return []
    return read_jsonl(path)


def _tail(path):
    if not path.exists():
        return ""
    return path.read_text(errors="replace")[-2000:]


def outcome_of(run):
    """The results of a run that must be the same with every fault."""
    metrics = [row for row in _rows(run / "metrics.jsonl") if "skipped" not in row]
    validation = _rows(run / "validation.jsonl")
    return {
        "batches": [sorted(b.group_ids) for b in read_history(run).batches],
        "digests": [row["weight_digest"] for row in metrics],
        "losses": [[row["loss"], row["grad_norm"]] for row in metrics],
        "steps": [row["step"] for row in metrics],
        "pass_rates": [row["train_pass_rate"] for row in metrics],
        "validation": [[row["step"], row["pass_rate"]] for row in validation],
    }


def faults_of(run, expected, steps=STEPS):
    """The faults of a run that ended, one text each."""
    outcome = outcome_of(run)
    wrong = []
    groups = [g for batch in outcome["batches"] for g in batch]
    if len(groups) != len(set(groups)) or len(outcome["batches"]) != steps:
        wrong.append(f"batches: {outcome['batches']} are not {steps} with every group once")
    if outcome["steps"] != list(range(1, steps + 1)):
        wrong.append(f"metrics: {outcome['steps']} are not steps 1 to {steps}, each once")
    if [row[0] for row in outcome["validation"]] != list(range(0, steps + 1, 4)):
        wrong.append(f"validations: {outcome['validation']} are not those of every fourth step")
    axis = [row["device_hours"] for row in _rows(run / "metrics.jsonl")]
    if axis != sorted(axis):
        wrong.append(f"compute axis: {axis} does not ascend")
    for key, value in (expected or {}).items():
        if value != outcome[key]:
            wrong.append(f"{key}: {outcome[key]}, without a fault {value}")
    return wrong


def attempt(case, folder, tiny, expected, seconds, seed):
    """Make a try; returns its row. A run on a separate disk that went wrong is copied before the disk is detached."""
    tried = Try(folder, tiny, real=case.real, disk=case.victim == DISK)
    try:
        row = _attempt(tried, case, expected, seconds, seed)
        if tried.disk is not None and row["wrong"]:
            shutil.copytree(tried.run, folder / "r")
        return row
    finally:
        if tried.disk is not None:
            tried.disk.close()


def _attempt(tried, case, expected, seconds, seed):
    moment_s = random.Random(f"{seed}/{case.key}").uniform(0.0, seconds.get(case.at, 0.0))
    tried.start()
    happened = tried.wait_for(case, moment_s)
    step = tried.steps()
    at_s = time.monotonic() - tried.begin
    wrong = []
    if happened:
        tried.inject(case)
        if tried.disk is not None:
            wrong = tried.start_with_space()
    went_on_s = None
    while happened and tried.process is not None and tried.process.poll() is None:
        if tried.steps() > step:
            went_on_s = round(time.monotonic() - tried.begin - at_s, 2)
            break
        if time.monotonic() - tried.begin > LIMIT_S:
            break
        time.sleep(0.05)
    with contextlib.suppress(FileNotFoundError):
        (tried.faults / case.victim).unlink()
    code = tried.end()
    if case.real and not case.victim.startswith(("controller", "trainer")):  # the bits of engines may differ
        expected = {key: expected[key] for key in ("batches", "steps")}
    if code:
        wrong.append(f"the exit code is {code}")
    wrong += faults_of(tried.run, expected)
    return {
        "case": case.key, "victim": case.victim, "fault": case.fault, "at": case.at, "real": case.real,
        "happened": happened, "at_s": round(at_s, 2), "at_step": step, "code": code, "wrong": wrong,
        "went_on_s": went_on_s,
        "seconds": round(time.monotonic() - tried.begin, 1),
    }  # fmt: skip


def table(rows):
    """The rows as Markdown: fault, tries, what happened, seconds until the run went on."""
    lines = ["| process | fault | engines | tries | as without the fault | until the run went on |"]
    lines.append("|---|---|---|---|---|---|")
    kinds = sorted({(r["victim"], r["fault"], r["real"]) for r in rows if r["happened"]})
    for victim, fault, real in kinds:
        same = [r for r in rows if (r["victim"], r["fault"], r["real"]) == (victim, fault, real)]
        same = [r for r in same if r["happened"]]
        seconds = sorted(r["went_on_s"] for r in same if r["went_on_s"] is not None)
        good = sum(not r["wrong"] for r in same)
        spread = "-"
        if seconds:
            spread = f"{statistics.median(seconds):.1f} s ({seconds[0]:.1f} to {seconds[-1]:.1f})"
        engines = "vLLM" if real else "stand-in"
        name = f"SIG{fault}" if fault in ("KILL", "STOP") else fault
        lines.append(f"| {victim} | {name} | {engines} | {len(same)} | {good} | {spread} |")
    return "\n".join(lines)


def ready(out):
    """(folder of the tiny policy and prompts in `out`, which are made once; commit of this checkout)."""
    out.mkdir(parents=True, exist_ok=True)
    tiny = out / "tiny"
    if not (tiny / "tiny.json").exists():
        command = [sys.executable, "-m", "megatron_scalerl.tiny", str(tiny), "--seed", "1"]
        subprocess.run(command, cwd=ROOT, check=True)
    describe = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return tiny, commit


def reference_of(out, tiny, commit, *, real):
    """The run without faults, made once for a commit: (what it leaves, seconds in which a moment is drawn)."""
    folder = out / f"reference{'_real' if real else ''}_{commit}"
    if not (folder / "seconds").exists():
        unharmed = Try(folder, tiny, real=real)
        unharmed.start()
        while unharmed.since_first_step() < 0 and unharmed.process is not None and unharmed.process.poll() is None:
            time.sleep(0.05)
        code = unharmed.end()
        assert code == 0, f"the run without faults: exit code {code}, see {folder / 'output'}"
        durations = {"random": time.monotonic() - unharmed.begin, "running": unharmed.since_first_step()}
        assert faults_of(folder / "r", None) == [], faults_of(folder / "r", None)
        (folder / "seconds").write_text(json.dumps(durations))
    return outcome_of(folder / "r"), json.loads((folder / "seconds").read_text())


def main(arguments):
    """Run the tries that have no row yet."""
    out = arguments.out.resolve()
    rows_file = out / "rows.jsonl"
    rows = _rows(rows_file)
    if arguments.table:
        print(table(rows))
        return 0
    tiny, commit = ready(out)
    done = {row["case"] for row in rows}
    references = {}
    for case in cases(arguments.tries, arguments.real):
        if case.key in done or not case.key.startswith(arguments.only):
            continue
        if case.victim == DISK and os.geteuid() != 0:
            print(f"{case.key}: left out, it needs the right to mount", flush=True)
            continue
        folder = out / case.key.replace(":", "_").replace(" ", "_")
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # of a try that was cut off
        if case.real not in references:
            references[case.real] = reference_of(out, tiny, commit, real=case.real)
        row = attempt(case, folder, tiny, *references[case.real], arguments.seed)
        row["commit"] = commit
        with open(rows_file, "a", encoding="utf8") as file:
            file.write(json.dumps(row) + "\n")
        verdict = "; ".join(row["wrong"]) or "as without the fault"
        print(
            f"{case.key}: at {row['at_s']} s, step {row['at_step']}, on after {row['went_on_s']} s: {verdict}",
            flush=True,
        )
        if not row["wrong"]:
            subprocess.run(["rm", "-rf", str(folder)], check=True)
    return int(any(row["wrong"] for row in _rows(rows_file)))


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
