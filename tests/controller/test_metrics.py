"""Step records and validations: JSONL is authoritative; a restart drops the records that it will repeat."""

import io
import json
import os
import re
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from json_lines import write as write_lines
from rich.console import Console
from rollout_groups import group, group_of, rollout
from stored_episodes import EPISODE, FORKED
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller.metrics import Metrics, batch_metrics, environment_metrics
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.types import PassRate, TaskPassRate


def open_metrics(folder, *, step=0, batches=0, last_step=0):
    return Metrics(folder, "run", step=step, batches=batches, last_step=last_step)


def pass_rate(step):
    return PassRate(
        step=step,
        policy_version=step,
        pass_rate=0.25,
        prompts=4,
        generations=2,
        compute=0.1,
        compute_total=0.2,
        unit="device_hours",
        truncated_share=0.0,
        interrupted_share=0.5,
        mean_completion_tokens=7.0,
    )


def write(folder):
    """Steps 1 to 3, a batch that made no step, and the validations of steps 0 and 2."""
    metrics = open_metrics(folder)
    for step in (1, 2, 3):
        metrics.step(step, {"batches": step, "loss": 0.5 * step, "note": "x"})
    metrics.step(3, {"batches": 4, "loss": 8.0, "skipped": 1})
    for step in (0, 2):
        metrics.validation(pass_rate(step), by_prompt=[0.0, 0.5, 0.5, 0.0])
    metrics.close()


def reopen(folder, **at):
    open_metrics(folder, **at).close()


def column(folder, file, name="step"):
    return [row[name] for row in read_jsonl(folder / f"{file}.jsonl")]


def events(folder):
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_the_tasks_of_a_mixture_are_columns_of_validation_and_tensorboard(tmp_path):
    metrics = open_metrics(tmp_path)
    parts = {"code": TaskPassRate(pass_rate=0.0, prompts=1), "math": TaskPassRate(pass_rate=0.5, prompts=3)}
    metrics.validation(replace(pass_rate(0), tasks=parts), by_prompt=[0.0, 0.5, 0.5, 0.5])
    metrics.validation(pass_rate(2), by_prompt=[0.0] * 4)
    metrics.close()
    first, second = read_jsonl(tmp_path / "validation.jsonl")
    own = {"pass_rate/code": 0.0, "prompts/code": 1, "pass_rate/math": 0.5, "prompts/math": 3}
    assert first | {"step": 2, "policy_version": 2} == second | own
    assert second.keys() == asdict(pass_rate(2)).keys() - {"tasks", "metrics"}, "as before there were tasks"
    assert events(tmp_path).Scalars("validation/pass_rate/math")[0].value == 0.5


def groups(**correct):
    """A group for each entry: task -> [completions] correct."""
    for number, (task, scores) in enumerate(correct.items()):
        made = group([1.0 if right else -1.0 for right in scores], group_id=number)
        yield replace(made, prompt=replace(made.prompt, task=task))


def test_train_pass_rates_are_recorded_by_task():
    mixed = batch_metrics(list(groups(math=[True, True], code=[True, False])), {}, 0)
    assert mixed["train_pass_rate"] == 0.75
    found = {k: v for k, v in mixed.items() if "/" in k}
    assert found == {
        "train_pass_rate/math": 1.0,
        "train_pass_rate/code": 0.5,
        "batch/groups/math": 1.0,
        "batch/groups/code": 1.0,
    }
    assert not [k for k in batch_metrics(list(groups(**{"": [True]})), {}, 0) if "/" in k]


@pytest.mark.parametrize(
    "step, batches, last_step, records, validations",
    [
        (2, 2, 3, [1, 2], [0, 2]),
        (3, 3, 3, [1, 2, 3], [0, 2]),  # a batch that was skipped after the checkpoint of its step
        (1, 1, 2, [1], [0, 2]),  # the journal has the step of a validation, although the checkpoint is older
        (1, 1, 1, [1], [0]),
    ],
)
def test_records_that_a_restart_repeats_are_dropped_and_the_others_stay(
    tmp_path, step, batches, last_step, records, validations
):
    write(tmp_path)
    reopen(tmp_path, step=step, batches=batches, last_step=last_step)
    assert column(tmp_path, "metrics", "batches") == records
    assert column(tmp_path, "validation") == column(tmp_path, "validation_by_prompt") == validations


def test_records_without_a_count_of_batches_are_dropped_by_their_step(tmp_path):
    """Those of runs before a step could have skipped batches."""
    rows = [{"step": step, "loss": 0.5} for step in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    reopen(tmp_path, step=2, batches=2, last_step=3)
    assert column(tmp_path, "metrics") == [1, 2]


def test_pass_rates_by_prompt_without_their_validation_are_dropped(tmp_path):
    """A crash fell between the two writes: the validation is made again, and must not be paired twice."""
    write(tmp_path)
    with open(tmp_path / "validation_by_prompt.jsonl", "a") as file:
        file.write('{"step": 3, "by_prompt": [1.0]}\n')
    reopen(tmp_path, step=3, batches=4, last_step=3)
    assert column(tmp_path, "validation_by_prompt") == [0, 2]


def test_a_validation_that_was_missing_at_a_restart_comes_before_the_later_ones(tmp_path):
    """As after a kill while one was made on a held engine, and a later one was recorded."""
    write(tmp_path)
    metrics = open_metrics(tmp_path, step=1, batches=1, last_step=3)
    assert [metrics.has_validation(step) for step in (0, 1, 2, 3)] == [True, False, True, False]
    for step in (1, 3):
        metrics.validation(pass_rate(step), by_prompt=[0.0])
        assert metrics.has_validation(step)
    metrics.close()
    assert [column(tmp_path, file) for file in ("validation", "validation_by_prompt")] == [[0, 1, 2, 3]] * 2
    assert metrics.last_validation(3) == 3


def test_a_validation_is_on_the_disk_after_its_pass_rates_by_prompt(tmp_path, monkeypatch):
    metrics = open_metrics(tmp_path)
    synced, fsync = [], os.fsync

    def recorded(descriptor):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, path.read_text().count("\n")))

    monkeypatch.setattr(os, "fsync", recorded)
    metrics.validation(replace(pass_rate(3), within_variance=0.25), by_prompt=[0.25], outcomes="1000")
    assert synced == [("validation_by_prompt.jsonl", 1), ("validation.jsonl", 1)]
    metrics.close()
    assert column(tmp_path, "validation_by_prompt", "outcomes") == ["1000"]
    assert column(tmp_path, "validation", "within_variance") == [0.25]


def test_tensorboard_has_what_the_records_have_after_a_restart(tmp_path):
    write(tmp_path)
    metrics = open_metrics(tmp_path, step=1, batches=1, last_step=3)
    metrics.step(2, {"batches": 2, "loss": 9.0})
    metrics.validation(pass_rate(3), by_prompt=[0.25])
    metrics.close()
    found = events(tmp_path)
    assert column(tmp_path, "metrics", "loss") == [0.5, 9.0]
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 0.5), (2, 9.0)]
    assert [(e.step, e.value) for e in found.Scalars("validation/pass_rate")] == [(0, 0.25), (2, 0.25), (3, 0.25)]
    assert not {"step", "validation/step"} & set(found.Tags()["scalars"]), "the axis is no curve"
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "some readers show every file"


def test_only_finite_numbers_reach_tensorboard_and_others_are_null_in_the_record(tmp_path):
    metrics = open_metrics(tmp_path)
    metrics.step(1, {"batches": 1, "loss": 0.5, "note": "x", "bad": float("nan"), "large": float("inf")})
    metrics.close()
    assert sorted(events(tmp_path).Tags()["scalars"]) == ["batches", "loss"]
    assert column(tmp_path, "metrics", "bad") == column(tmp_path, "metrics", "large") == [None]


STAND_IN_WANDB = """
import json, pathlib
def init(**options):
    return Run(pathlib.Path(options["dir"]) / f"wandb_{options['name']}_{options['id']}_{options['resume']}.jsonl")
class Run:
    def __init__(self, path):
        self.path, self.rows = path, []
    def define_metric(self, name, step_metric):
        self.rows.append([name, step_metric])
    def log(self, scalars):
        self.rows.append(scalars)
    def finish(self):
        before = json.loads(self.path.read_text()) if self.path.exists() else []
        self.path.write_text(json.dumps(before + self.rows))
"""


@pytest.fixture
def install_wandb(tmp_path, monkeypatch):
    """Puts a stand-in for the package on the path."""

    def install(text):
        (tmp_path / "site").mkdir()
        (tmp_path / "site/wandb.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.delitem(sys.modules, "wandb", raising=False)

    yield install
    sys.modules.pop("wandb", None)


def test_wandb_gets_no_batch_and_no_validation_twice_after_two_crashes(tmp_path, monkeypatch, install_wandb):
    """The second attempt dies before it is where the first one was: the journal says what W&B has."""
    install_wandb(STAND_IN_WANDB)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for begin, journaled, end in ((0, 0, 6), (2, 6, 4), (2, 6, 8)):  # the last two from the checkpoint of step 2
        metrics = open_metrics(tmp_path, step=begin, batches=begin, last_step=journaled)
        for step in range(begin + 1, end + 1):
            metrics.step(step, {"batches": step, "loss": 0.5})
            if not metrics.has_validation(step):
                metrics.validation(pass_rate(step), by_prompt=[0.25])
        metrics.close()
    [path] = tmp_path.glob("wandb_run_run_allow.jsonl")
    sent = [row for row in json.loads(path.read_text()) if isinstance(row, dict)]
    assert [row["step"] for row in sent if "loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["step"] for row in sent if "loss" not in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert column(tmp_path, "metrics") == column(tmp_path, "validation") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_batch_has_the_variance_within_its_prompts():
    found = batch_metrics([group([1, 1, 1, 1]), group([1, 1, -1, -1], group_id=1)], {}, 0)
    assert found["train_pass_rate"] == 0.75 and found["train_completions"] == 8.0
    assert found["train_within_variance"] == pytest.approx((0 + 4 * 0.25 / 3) / 2)


def test_lost_completions_are_compared_by_pass_rate_and_by_length():
    """Lost: one of 4 of the easy, short group and two of 4 of the hard, long one."""
    hard = replace(group([-1, -1], lengths=[9, 5]), lost_completions=2)
    easy = replace(group([1, 1, -1], lengths=[4, 4, 4], group_id=1), lost_completions=1)
    found = batch_metrics([hard, easy], {}, 0)
    shares = {name.removeprefix("lost_share"): value for name, value in found.items() if "lost_share" in name}
    assert shares == {"": 3 / 8, "_hard": 0.5, "_easy": 0.25, "_short": 0.25, "_long": 0.5}


def test_lost_completions_are_counted_by_reason():
    one = replace(group([1, -1]), lost_completions=3, lost_reasons={"no_logprobs": 1, "environment_hung": 2})
    other = replace(group([1, -1], group_id=1), lost_completions=1, lost_reasons={"environment_hung": 1})
    found = batch_metrics([one, other], {}, 0)
    reasons = {key: value for key, value in found.items() if key.startswith("lost/")}
    assert reasons == {"lost/no_logprobs": 1.0, "lost/environment_hung": 3.0}
    # the completions that are left are what all means are over
    assert found["train_completions"] == 4.0 and found["completion_tokens_mean"] == 3.0
    assert not any(key.startswith("lost/") for key in batch_metrics([group([1, -1])], {}, 0))


def test_a_batch_with_episodes_has_their_turns_and_counts_what_the_policy_wrote():
    single = rollout(tokens=(9, 2))
    plain = group([1, -1])
    made = group_of((EPISODE, FORKED, single), (*plain.scores, plain.scores[1]), prompt=plain.prompt)
    found = batch_metrics([made, plain], {}, 4)
    assert (found["turns_mean"], found["environment_tokens"]) == ((3 + 3 + 1 + 1 + 1) / 5, 3.0 + 8.0)
    assert found["completion_tokens_mean"] == (8 + 8 + 2 + 3 + 3) / 5
    assert (found["train_completions"], found["staleness_max"]) == (5.0, 4.0)
    assert not {"turns_mean", "environment_tokens"} & batch_metrics([plain], {}, 0).keys()


def test_what_environments_measured_is_in_metrics_and_validations(tmp_path):
    """Each mean is over the completions that have the value."""
    plain = group([1, -1, -1])
    first, second, third = plain.scores
    scores = (replace(first, metrics={"right": 1.0, "short": 0.25}), replace(second, metrics={"right": 0.5}), third)
    measured = {"environment/right": 0.75, "environment/short": 0.25}
    assert batch_metrics([replace(plain, scores=scores)], {}, 0).items() >= measured.items()
    assert not any(key.startswith("environment/") for key in batch_metrics([plain], {}, 0))
    metrics = open_metrics(tmp_path)
    metrics.validation(replace(pass_rate(0), metrics=environment_metrics(scores)), by_prompt=[0.0])
    metrics.close()
    assert read_jsonl(tmp_path / "validation.jsonl")[0].items() >= measured.items()


def test_the_length_of_a_group_is_what_the_policy_wrote():
    """An episode whose environment wrote 8 of 11 tokens is shorter than a completion of 4."""
    made = rollout(tokens=range(11), mask=[i > 7 for i in range(11)], environment=((0, 8),))
    plain = replace(group([1, -1], lengths=[4, 4], group_id=1), lost_completions=2)
    other = group_of((made, made), plain.scores, prompt=plain.prompt)
    found = batch_metrics([plain, other], {}, 0)
    assert (found["lost_share_short"], found["lost_share_long"]) == (0.0, 0.5)


def test_a_sink_that_fails_ends_neither_the_run_nor_the_other_sinks(tmp_path, caplog):
    """Whatever its library raises."""

    class CommError(Exception):
        pass

    class BrokenSink:
        def write(self, step, scalars):
            raise CommError("no server")

        def close(self):
            raise OSError("no space left")

    class KeptSink(BrokenSink):
        steps, closed = [], False

        def write(self, step, scalars):
            self.steps.append(step)

        def close(self):
            self.closed = True

    kept = KeptSink()
    metrics = Metrics(tmp_path, "run", step=0, batches=0, last_step=0, sinks=[BrokenSink(), kept])
    metrics.step(1, {"batches": 1})
    metrics.close()
    assert kept.steps == [1] and kept.closed and column(tmp_path, "metrics") == [1]
    assert "BrokenSink: write failed: CommError: no server" in caplog.text and "close failed" in caplog.text


NOT_LOGGED_IN = """
class UsageError(Exception):
    pass
def init(**options):
    raise UsageError("No API key configured. Use `wandb login` to log in.\\nCall wandb.login()")
"""


@pytest.mark.parametrize("stand_in", [NOT_LOGGED_IN, "raise ImportError('damaged installation')"])
def test_a_wandb_that_cannot_start_costs_one_warning_at_each_start(
    tmp_path, monkeypatch, caplog, install_wandb, stand_in
):
    install_wandb(stand_in)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for end in (2, 4):  # a start and a resume
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        caplog.clear()
        metrics = open_metrics(tmp_path, step=end - 2, batches=end - 2, last_step=end - 2)
        for step in (end - 1, end):
            metrics.step(step, {"batches": step, "loss": 0.5})
        metrics.close()
        [warning] = [record.getMessage() for record in caplog.records]
        assert warning.startswith("WandbSink: start failed: ") and "\n" not in warning
        assert warning.endswith("; this attempt has no W&B run (WANDB_MODE=offline needs no login)")
    assert column(tmp_path, "metrics") == [1, 2, 3, 4]
    assert [event.step for event in events(tmp_path).Scalars("loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize("terminal, steps", [(True, range(1, 11)), (False, (5, 10))])
def test_a_terminal_shows_each_step_and_a_log_file_every_fifth(terminal, steps):
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=200)
    progress = Progress(console, steps=10)
    for step in range(1, 11):
        last = float(step == 10)
        failed = {"environment_failed_share": 0.125 * last, "verifier_failed_share": 0.031 * last}
        progress.step(step, defaultdict(float, failed))
    shown = console.file.getvalue()
    assert re.findall(r"^ +(\d+)  \+0", shown, re.M) == [str(step) for step in steps]
    assert re.findall("  verifier failed .*", shown) == ["  verifier failed 0.031  environment failed 0.125"]
