"""Collect the tiny runs of megatron_scalerl/fit/data/tiny/table.csv, one after another, whatever stops it in between.

    nice -n 19 python tools/collect_curves.py --work runs/collect [--data DIR] [--only NAME,NAME,...]

The same command goes on: a run whose data file exists is finished, an interrupted one resumes, warm starts are kept
in WORK/warm. A run that fails is tried again, then left out with a line in WORK/failures.jsonl. SIGTERM and SIGINT
stop the run in progress and end the collection. WORK/pid holds the process id. DATA/NAME.json is written when a run
has ended (`curve_data`). Times stay in WORK/times.jsonl.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from checkout import explained

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "megatron_scalerl" / "fit" / "data" / "tiny" / "table.csv"


parser = harness.options(
    __doc__,
    work=(Path("runs/collect"), "folder of runs and warm starts"),
    data=(TABLE.parent, "folder for the data files"),
    only=("", "rows of the table to run, NAME,NAME,..."),
)

with explained():
    from curve_data import matmul_parameters, run_data

    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.checkpoints.jsonl import JsonlWriter

TRIES = 3
RUN_LIMIT_S = 3600.0
"""A command that takes longer is ended, and counts as failed."""
STRIDE = 10
"""Rows run in the order 0, 10, 20, 1, 11, 21, ..., so that an early end leaves runs of every regime."""
BASE = "recipes/tiny_cpu.yaml"
WARM = ("kind", "levels", "flaw", "size", "task_seed", "sft_steps")
"""Columns that determine a warm start."""
VALIDATION = (
    "validation.every_steps=4",
    "validation.prompts=200",
    "validation.generations=2",
    "validation.end_generations=4",
)
OF_KIND = {
    "chain": (),
    "search": ("interruption.thinking_tokens=[60,72]",),
    "sort": ("interruption.answer_tokens=10",),
}
"""Overrides: the longest traces and answers of each kind."""
Row = dict[str, str]


class Stopped(Exception):
    """SIGTERM or SIGINT came."""


def read_table(path: Path) -> list[Row]:
    """The rows. Raises ValueError for names that repeat."""
    with path.open(encoding="utf8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [row["name"] for row in rows]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: name: expected each once, found {sorted(repeated)} again")
    return rows


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The order of execution."""
    return [rows[i] for i in sorted(range(len(rows)), key=lambda i: (i % STRIDE, i))]


def overrides(row: Row) -> dict[str, str]:
    """The differences of a row from the recipe, but for its files and name."""
    settings = {
        "seed": row["seed"],
        "steps": row["steps"],
        "optimizer.lr": row["lr"],
        "rollouts.groups_per_batch": row["groups"],
        "rollouts.group_size": row["group_size"],
        "sft.steps": row["sft_steps"],
    }
    return settings | dict(item.split("=", 1) for item in (*VALIDATION, *OF_KIND[row["kind"]]))


class Collection:
    """One pass over the table."""

    def __init__(self, work: Path, data: Path) -> None:
        self.work, self.data = work.resolve(), data.resolve()
        for folder in (self.work, self.data, self.work / "warm"):
            folder.mkdir(parents=True, exist_ok=True)
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._times = JsonlWriter(self.work / "times.jsonl")
        self._failures = JsonlWriter(self.work / "failures.jsonl")

    def stop(self, *_: object) -> None:
        """Handler of SIGTERM and SIGINT: end the command in progress, then the collection."""
        self._stopping = True
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()

    def run(self, rows: Sequence[Row]) -> int:
        """All rows that have no data yet; returns how many have none at the end."""
        for row in rows:
            if self._file(row).exists():
                continue
            if self._stopping:
                raise Stopped
            self._one(row)
        return sum(not self._file(row).exists() for row in rows)

    def _file(self, row: Row) -> Path:
        return self.data / f"{row['name']}.json"

    def _one(self, row: Row) -> None:
        for attempt in range(1, TRIES + 1):
            try:
                warm = self._warm_start(row)
                self._rl(row, warm)
                self._write(row, warm)
                return
            except (RuntimeError, ValueError, OSError) as error:
                self._failures.append({"run": row["name"], "attempt": attempt, "error": str(error)})
                print(f"{row['name']}: attempt {attempt} of {TRIES}: {error}", flush=True)

    def _task(self, row: Row) -> Path:
        return self.work / "warm" / "_".join(row[column] for column in WARM)

    def _settings(self, row: Row) -> list[str]:
        task = self._task(row)
        files = [
            f"prompts.path={task / 'prompts.jsonl'}",
            f"prompts.held_out_path={task / 'held_out.jsonl'}",
            f"sft.path={task / 'sft.jsonl'}",
        ]
        return [*(f"{key}={value}" for key, value in overrides(row).items()), *files]

    def _warm_start(self, row: Row) -> Path:
        """The policy that RL begins with; made once for all rows with the same WARM columns."""
        task = self._task(row)
        policy = task / "policy"
        if (policy / "config.json").exists():
            return policy
        shutil.rmtree(policy, ignore_errors=True)
        options = ["--kind", row["kind"], "--levels", row["levels"], "--flaw", row["flaw"], "--size", row["size"]]
        examples = str(32 * int(row["sft_steps"]))
        sizes = ["--train-prompts", "1000", "--sft-examples", examples, "--seed", row["task_seed"]]
        self._command(row, "task", ["-m", "megatron_scalerl.tiny", str(task), *options, *sizes])
        # the warm start has the task's seed, so that it does not depend on the row that happens to come first
        settings = [*self._settings(row), f"seed={row['task_seed']}", f"policy.path={task / 'base_policy'}"]
        self._command(row, "warm start", ["-m", "megatron_scalerl", "sft", BASE, *settings, "--out", str(policy)])
        return policy

    def _rl(self, row: Row, warm: Path) -> None:
        own = [f"name={row['name']}", f"output_dir={self.work}", f"policy.path={warm}", "checkpoint.rollouts=resume"]
        self._command(row, "rl", ["-m", "megatron_scalerl", "train", BASE, *self._settings(row), *own])

    def _write(self, row: Row, warm: Path) -> None:
        run = self.work / row["name"]
        found = run_data(run, matmul_parameters(warm))
        ended = json.loads((run / "end.json").read_text(encoding="utf8"))
        found = {"name": row["name"], "base": BASE, "overrides": overrides(row), "ended": ended["reason"], **found}
        write_durably(self._file(row), _json(found).encode())
        shutil.rmtree(run / "checkpoints", ignore_errors=True)

    def _command(self, row: Row, what: str, arguments: list[str]) -> None:
        """Run one of the package's commands to its end. Raises RuntimeError if it fails, Stopped after a signal."""
        begin, before = time.monotonic(), os.times()
        log = self.work / f"{row['name']}.log"
        with log.open("ab") as output:
            self._child = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=output, stderr=output)
            try:
                code = self._child.wait(RUN_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._child.terminate()
                code = self._child.wait()
        if self._stopping:
            raise Stopped
        seconds, after = time.monotonic() - begin, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        self._times.append({"run": row["name"], "what": what, "seconds": round(seconds, 1), "cpu": round(cpu, 1)})
        print(f"{row['name']}: {what}: {seconds:.0f} s, {cpu:.0f} s of processor time, exit code {code}", flush=True)
        if code != 0:
            last = "".join(log.read_text(encoding="utf8", errors="replace").strip().splitlines()[-1:])
            raise RuntimeError(f"{log}: {what}: expected exit code 0, found {code}: {last}")


def _json(found: dict[str, Any]) -> str:
    """One line per column, so that a change of one column shows as one line."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(column)}" for name, column in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Exit code 0 if every row has data, 1 if some have none, 3 after a signal."""
    options = parser().parse_args()
    rows = in_order(read_table(TABLE))
    if options.only:
        only = set(options.only.split(","))
        rows = [row for row in rows if row["name"] in only]
        if unknown := only - {row["name"] for row in rows}:
            raise SystemExit(f"--only: expected names of {TABLE}, found {', '.join(sorted(unknown))}")
    collection = Collection(options.work, options.data)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, collection.stop)
    with (collection.work / "pid").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SystemExit(f"{collection.work}: another collection has it: process {lock.read().strip()}") from None
        lock.truncate(0)
        print(os.getpid(), file=lock, flush=True)
        try:
            missing = collection.run(rows)
        except Stopped:
            print("stopped; the same command goes on", flush=True)
            return 3
    print(f"{len(rows) - missing} of {len(rows)} runs have data in {collection.data}", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
