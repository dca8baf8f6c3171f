"""How a whole run ends when it is stopped, killed, or loses an engine that hangs: nothing of it is left running."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import tiny_logprobs
from launch.stand_ins import gone
from whole_runs import ROOT, overrides

from megatron_scalerl.checkpoints.commit import latest
from megatron_scalerl.controller.metrics import read_jsonl
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.rollouts.store import read_arrays, segment_path

pytestmark = pytest.mark.slow
ANEW = "begins anew, since the run has no checkpoint yet (checkpoint.every_steps; SIGUSR1 saves one and exits)"


class Run:
    """A run that goes on for ever, in a process of its own."""

    def __init__(self, tiny, out, *more):
        settings = [*overrides(tiny, out, "r", *more), "steps=1000000", "validation.every_steps=0"]
        self.folder = out / "r"
        self.groups = set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_scalerl", "train", "recipes/tiny_cpu.yaml", *settings],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a child that has not made its own group yet is in this one, not in the tests'
        )

    def children(self):
        """All processes of the run but the controller; their groups are kept."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        for process in found:
            try:
                self.groups.add(os.getpgid(process.pid))
            except ProcessLookupError:
                continue
        return found

    def wait_for(self, what):
        """Wait until `what()` holds while the run lives."""
        until = time.monotonic() + 600
        while not what():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until, "expected sooner"
            time.sleep(0.1)

    def steps(self):
        """Steps in the metrics of the run, torn lines left out."""
        return len(read_jsonl(self.folder / "metrics.jsonl"))

    def end(self):
        """Wait for the controller; its exit code and its errors from the line that is its own."""
        self.children()
        _, err = self.process.communicate(timeout=400)
        return self.process.returncode, err[err.rindex("megatron-scalerl: ") :].strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def named(processes, word):
    """Those of the processes whose command line holds the word."""
    found = []
    for process in processes:
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def test_a_signal_while_everything_starts(tiny_dense, tmp_path):
    with Run(tiny_dense, tmp_path) as run:
        run.wait_for(lambda: named(run.children(), "engine.server") and named(run.children(), "trainer.worker"))
        run.process.send_signal(signal.SIGINT)
        code, line = run.end()
    assert code == 130
    assert line == "megatron-scalerl: stopped by SIGINT; the same command " + ANEW
    assert gone(run.groups)


def test_a_killed_controller_leaves_no_engine_that_still_imports(tiny_dense, tmp_path):
    with Run(tiny_dense, tmp_path) as run:
        run.wait_for(lambda: named(run.children(), "engine.server"))
        run.process.kill()
        run.process.wait()
        assert run.groups and gone(run.groups)


@pytest.mark.full
def test_a_stopped_run_goes_on_and_a_hung_engine_ends_it(tiny_dense, tmp_path):
    # on-policy, so that nothing is left to train on when the engine hangs; a hang within an update is one too
    more = ("checkpoint.every_steps=1", "rollouts.max_staleness_steps=0")
    more += ("engine.stall_timeout_s=20", "weights.timeout_s=60", "engine.max_restarts=0")
    with Run(tiny_dense, tmp_path, *more) as run:
        run.wait_for(lambda: run.steps() >= 2)
        assert named(run.children(), "EngineCore")
        run.process.send_signal(signal.SIGTERM)
        code, line = run.end()
    assert code == 143
    newest = latest(run.folder / "checkpoints").name
    assert line == f"megatron-scalerl: stopped by SIGTERM; the same command resumes from {newest}"
    assert gone(run.groups)
    with Run(tiny_dense, tmp_path, *more) as again:
        before = again.steps()
        again.wait_for(lambda: again.steps() > before)
        named(again.children(), "EngineCore")[0].suspend()
        code, error = again.end()
    assert code == 1
    assert "engine.min_engines: 0 engines are left, and the run needs 1 (engine-0: " in error
    assert "engine-0 produced no token for" in error or "engine-0: pause: no answer" in error
    assert gone(again.groups)


@pytest.mark.full
def test_a_run_outlives_an_engine_and_its_trainer(tiny_dense, tmp_path):
    """One of two engines is killed, then the trainer: both start again, and nothing is trained twice or lost."""
    more = ("engine.count=2", "checkpoint.every_steps=2", "optimizer.lr=1e-5", "filters.zero_variance=false")
    more += ("checkpoint.async_save=true",)
    with Run(tiny_dense, tmp_path, *more) as run:
        run.wait_for(lambda: run.steps() >= 2)
        [victim] = [p for p in named(run.children(), "engine.server") if "--port" in p.cmdline()][1:2]
        os.killpg(victim.pid, signal.SIGKILL)
        run.wait_for(lambda: run.steps() >= 4)
        [rank] = named(run.children(), "megatron_scalerl.trainer.worker")
        rank.kill()
        attempts = run.folder / "attempts.jsonl"
        run.wait_for(lambda: len(read_jsonl(attempts)) == 2)
        engines = run.folder / "engines.jsonl"
        run.wait_for(lambda: [r["state"] for r in read_jsonl(engines) if r["name"] == "engine-1"][-1] == "serving")
        resumed = run.steps()
        run.wait_for(lambda: run.steps() >= resumed + 3)
        run.process.send_signal(signal.SIGTERM)
        code, _ = run.end()
    assert code == 143 and gone(run.groups)
    states = [(r["name"], r["state"]) for r in read_jsonl(engines) if r["restarts"] or r["reason"]]
    back = ["draining", "lost", "starting", "stale", "serving"]
    assert states == [("engine-1", state) for state in back], "the engines outlive the trainer"
    steps = [row["step"] for row in read_jsonl(run.folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    groups = [g for batch in read_history(run.folder).batches for g in batch.group_ids]
    assert len(set(groups)) == len(groups)


def test_a_run_outlives_its_teacher_and_has_its_log_probabilities(tiny_dense, tmp_path):
    """The teacher is killed: completions wait for the next one, none is lost; values are those of transformers."""
    teacher = tiny_dense / "base_policy"
    small_chunks = "{max_num_batched_tokens: 32, max_num_seqs: 16}"  # which split most texts
    taught = f"algorithm={{name: distilled, teachers: {{t: {{path: {teacher}, vllm: {small_chunks}}}}}}}"
    with Run(tiny_dense, tmp_path, taught, "rollouts.max_staleness_steps=1") as run:
        run.wait_for(lambda: run.steps() >= 2)
        [victim] = [p for p in named(run.children(), str(teacher)) if "--port" in p.cmdline()][:1]
        os.killpg(victim.pid, signal.SIGKILL)
        states = run.folder / "engines.jsonl"
        run.wait_for(lambda: any(row["name"] == "teacher-t" and row["restarts"] for row in read_jsonl(states)))
        killed = run.steps()
        run.wait_for(lambda: run.steps() >= killed + 3)
        run.process.send_signal(signal.SIGTERM)
        code, _ = run.end()
    assert code == 143 and gone(run.groups)
    assert {row["state"] for row in read_jsonl(states) if row["name"] == "engine-0"} == {"stale", "serving"}
    assert {row["state"] for row in read_jsonl(states) if row["name"] == "teacher-t"} >= {"stale", "lost"}
    assert {"teacher", "engine"} <= {row.get("role") for row in read_jsonl(run.folder / "ledger.jsonl")}
    history = read_history(run.folder)
    texts, columns = [], []
    for event in history.finished.values():
        group, samples = read_arrays(segment_path(run.folder / "rollouts", event.segment), event.stored)
        assert group.header.lost_completions == 0
        for sample in samples:
            texts.append([*group.header.prompt.token_ids, *sample.token_ids.tolist()])
            columns.append((sample.columns["teacher_logprobs"], sample.loss_mask))
    for (found, mask), expected in zip(columns, tiny_logprobs.of(teacher, texts), strict=True):
        difference = found - expected[-len(found) :].numpy()
        assert abs(difference[mask]).max() < 1e-4 and not found[~mask].any()
