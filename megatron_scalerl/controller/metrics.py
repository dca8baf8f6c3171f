"""Step and validation records: JSONL files are authoritative; TensorBoard and, if installed, W&B are sinks.

A step record has the metrics of one batch of groups before filtering (rewards, lengths, staleness, shares of
truncated, interrupted and lost completions) and of the optimizer step on the batch.

The noise of a pass rate comes from sampling completions for fixed prompts: the variance within prompts. Without
validation.fresh_seeds, completion i of a prompt has equal random numbers in all validations, so the noise of two
validations is correlated. The correlation shows only in outcomes of single completions, which
RUN/validation_by_prompt.jsonl records.
"""

import contextlib
import importlib.util
import logging
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Protocol

from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl, rewrite
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.types import PassRate, RolloutGroup, Score, StepReport

logger = logging.getLogger(__name__)

FAILED = ("timeout", "memory", "crash", "error", "unavailable")
"""Values of `Score.reason` for answers that count as wrong because the verifier failed."""
FLUSH_S = 5
"""Most seconds until a record is written to TensorBoard's file."""


Outcomes = tuple[tuple[bool | None, ...], ...]
"""Outcomes of completions, [prompts][generations]: True is correct, False wrong, None lost and in no pass rate."""
_LETTERS = {True: "1", False: "0", None: "-"}


class Sink(Protocol):
    """A receiver of the numbers of every record, such as TensorBoard."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a batch, or of a validation, at `step`. The names of a validation's numbers begin with
        `validation/`."""

    def close(self) -> None:
        """Close the sink at the end of the attempt."""


class TensorBoardSink:
    """Event files in RUN/tensorboard, rewritten from the records at every start.

    So a step that a restart repeats occurs once in the files. The first event resets a TensorBoard that is open.
    """

    def __init__(self, run_dir: Path):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run_dir / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._file = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        self._file.add_event(Event(step=0, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record named scalars of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._file.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbSink:
    """A W&B run named like the recipe; used if wandb is installed and WANDB_MODE is not disabled.

    The x axis is the column `step`. W&B's own step would drop records that arrive late, such as a validation that
    ends during later optimizer steps. W&B never deletes a record, so after a restart the first record of a repeated
    step stays, and the second record is not sent.
    """

    def __init__(self, run_dir: Path, name: str, *, last_step: int):
        """last_step: newest step of earlier attempts. Raises wandb's errors, for example without a login."""
        import wandb

        self._last_step = last_step
        self._run = wandb.init(name=name, dir=str(run_dir), resume="allow", id=name)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record named scalars of one step."""
        if step > self._last_step or "batches" not in scalars:
            self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Send all records and end the W&B run."""
        self._run.finish()


class Metrics:
    """Writes step records and validations. When created, deletes step records after the checkpoint.

    Validations after the checkpoint are kept: a restart trains the same batches with the same rollouts again, so that
    the recorded versions come back.
    """

    def __init__(
        self, run_dir: Path, name: str, *, step: int, batches: int, last_step: int, sinks: Iterable[Sink] = ()
    ):
        """step, batches: optimizer steps and batches at the checkpoint to resume from. last_step: newest step in the
        journal. sinks: sinks besides TensorBoard and W&B, which get the records of this attempt."""
        steps = run_dir / "metrics.jsonl"
        validations = run_dir / "validation.jsonl"
        by_prompt = run_dir / "validation_by_prompt.jsonl"
        records = read_jsonl(steps)
        validation_rows = read_jsonl(validations)
        rewrite(steps, [r for r in records if r["step"] <= step and r.get("batches", 0) <= batches])
        rows = sorted((r for r in validation_rows if r["step"] <= last_step), key=itemgetter("step"))
        rewrite(validations, rows)
        self._validated_steps = {row["step"] for row in rows}
        # validation_by_prompt.jsonl is written before validation.jsonl. After a crash in between, the last row has no
        # validation and is dropped.
        rewrite(by_prompt, [r for r in read_jsonl(by_prompt) if r["step"] in self._validated_steps])
        self._steps = JsonlWriter(steps)
        self._validations = JsonlWriter(validations)
        self._by_prompt = JsonlWriter(by_prompt)
        self._sinks: list[Sink] = [*sinks]
        if importlib.util.find_spec("tensorboard"):
            with _guarded("TensorBoardSink", "start"):
                sink = TensorBoardSink(run_dir)
                for row in read_jsonl(steps):
                    sink.write(row["step"], _finite(row))
                for row in rows:
                    sink.write(row["step"], _finite(_validation_scalars(row)))
                self._sinks.append(sink)
        if importlib.util.find_spec("wandb") and os.environ.get("WANDB_MODE") != "disabled":
            with _guarded("WandbSink", "start", "; this attempt has no W&B run (WANDB_MODE=offline needs no login)"):
                self._sinks.append(WandbSink(run_dir, name, last_step=last_step))

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one record; numbers also go to the sinks. `record["batches"]` counts batches up to this one."""
        self._steps.append({"step": step, **record})
        self._to_sinks(step, record)

    def validation(self, result: PassRate, by_prompt: Sequence[float], outcomes: str = "") -> None:
        """Append one validation, and the pass rate of each held-out prompt for paired comparisons.

        outcomes: the outcome of every completion, as `text` returns. Both rows are synced to disk before this
        function returns, because a validation is expensive and a restart does not repeat a recorded validation.
        """
        row = validation_row(result)
        is_last = result.step >= max(self._validated_steps, default=-1)
        self._by_prompt.append({"step": result.step, "by_prompt": list(by_prompt), "outcomes": outcomes})
        self._by_prompt.sync()
        self._validations.append(row)
        self._validations.sync()
        # A run that was resumed from this version may have a later validation on record, from an earlier attempt.
        if not is_last:
            self._validations = _in_order(self._validations)
            self._by_prompt = _in_order(self._by_prompt)
        self._validated_steps.add(result.step)
        self._to_sinks(result.step, _validation_scalars(row))

    def validations(self) -> list[dict[str, Any]]:
        """The rows of validation.jsonl so far."""
        return read_jsonl(self._validations.path)

    def sync(self) -> None:
        """Write every record to disk (fsync) before returning."""
        for file in (self._steps, self._validations, self._by_prompt):
            file.sync()

    def has_validation(self, step: int) -> bool:
        """True if the validation of this step is recorded."""
        return step in self._validated_steps

    def last_validation(self, step: int) -> int:
        """The newest step up to `step` with a recorded validation; -1 if there is no such step."""
        return max((validated for validated in self._validated_steps if validated <= step), default=-1)

    def close(self) -> None:
        """Close every file and sink."""
        for file in (self._steps, self._validations, self._by_prompt):
            file.close()
        for sink in self._sinks:
            with _guarded(type(sink).__name__, "close"):
                sink.close()

    def _to_sinks(self, step: int, record: Mapping[str, Any]) -> None:
        scalars = _finite(record)
        for sink in self._sinks:
            with _guarded(type(sink).__name__, "write"):
                sink.write(step, scalars)


def _in_order(file: JsonlWriter) -> JsonlWriter:
    """Sort the rows of a file by step, and open the file for appending."""
    file.close()
    rewrite(file.path, sorted(read_jsonl(file.path), key=itemgetter("step")))
    return JsonlWriter(file.path)


@contextlib.contextmanager
def _guarded(sink: str, action: str, outcome: str = "") -> Iterator[None]:
    """Log a failure of a sink in the block, and go on: the JSONL files have the records in any case."""
    try:
        yield
    # Libraries of sinks raise classes that derive from Exception alone, for example wandb.errors.UsageError.
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        logger.warning("%s: %s failed: %s%s", sink, action, problem, outcome)


def validation_row(result: PassRate) -> dict[str, Any]:
    """A validation as a row of validation.jsonl. Each number of a task gets a column of its own."""
    row = asdict(result)
    row |= row.pop("metrics")
    for task, part in row.pop("tasks").items():
        row |= {f"{column}/{task}": value for column, value in part.items()}
    return row


def _validation_scalars(row: Mapping[str, Any]) -> dict[str, Any]:
    return {f"validation/{k}": v for k, v in row.items() if k != "step"}


def _finite(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        k: float(v) for k, v in record.items() if k != "step" and isinstance(v, (int, float)) and math.isfinite(v)
    }


def batch_metrics(
    groups: Sequence[RolloutGroup], stats: Mapping[str, float], policy_version: int
) -> dict[str, float]:
    """Scalars of the batch that `policy_version` trains on. stats: see `BatchPlan.stats`.

    `confirmed_share`: share that the second judge confirms, of the correct completions with a verdict of the judge.
    `staleness_*`: optimizer steps since the oldest first token of each group. `train_pass_rate`: pass rate before
    every filter. `train_within_variance` divided by `train_completions` is the pass rate's binomial variance given
    the prompts. Batches with episodes of several turns also have `turns_mean` and `environment_tokens`. Batches with
    lost completions have the number of each reason, `lost/REASON`.
    """
    completions = [c for g in groups for c in g.completions]
    scores = [s for g in groups for s in g.scores]
    staleness = [policy_version - g.first_token_version for g in groups]
    count = len(completions)
    metrics = {f"batch/{name}": value for name, value in stats.items()}
    metrics["reward"] = sum(s.reward for s in scores) / count
    metrics["train_pass_rate"] = sum(s.correct for s in scores) / count
    variance_within = within_variance([[score.correct for score in group.scores] for group in groups])
    if variance_within is not None:
        metrics["train_within_variance"] = variance_within
    verdicts = [score.confirmed for score in scores if score.confirmed is not None]
    if verdicts:
        metrics["confirmed_share"] = sum(verdicts) / len(verdicts)
    if any(c.turns > 1 for c in completions):
        metrics["turns_mean"] = sum(c.turns for c in completions) / count
        metrics["environment_tokens"] = float(sum(c.environment_tokens for c in completions))
    for group in groups:
        for reason, lost in group.lost_reasons.items():
            key = f"lost/{reason}"
            metrics[key] = metrics.get(key, 0.0) + lost
    return metrics | {
        "train_completions": float(count),
        **_pass_rates_by_task(groups),
        **environment_metrics(scores),
        "truncated_share": sum(c.truncated for c in completions) / count,
        "interrupted_share": sum(c.interrupted for c in completions) / count,
        "lost_completions": float(sum(g.lost_completions for g in groups)),
        **_lost_shares(groups),
        "verifier_failed_share": sum(s.reason in FAILED for s in scores) / count,
        "environment_failed_share": sum(s.reason.startswith("environment_") for s in scores) / count,
        "completion_tokens_mean": sum(c.generated_tokens for c in completions) / count,
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": float(max(staleness)),
        "mixed_version_share": sum(c.first_version != c.last_version for c in completions) / count,
        "epoch": float(max(g.epoch for g in groups)),
    }


def environment_metrics(scores: Iterable[Score]) -> dict[str, float]:
    """The mean of each environment metric, `environment/NAME`, over the completions that have the metric."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.metrics.items():
            values.setdefault(f"environment/{name}", []).append(value)
    return {name: fmean(numbers) for name, numbers in values.items()}


def _lost_shares(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Shares of lost completions, in the whole batch and in each half of the groups.

    Groups are halved by pass rate (`hard`, `easy`) and by mean length (`short`, `long`). If the shares of two halves
    differ, the lost completions bias the training data.
    """
    middle = len(groups) // 2
    by_pass_rate = sorted(groups, key=lambda group: group.pass_rate)
    by_length = sorted(groups, key=lambda group: fmean(c.generated_tokens for c in group.completions))
    parts = {
        "lost_share": groups,
        "lost_share_hard": by_pass_rate[:middle],
        "lost_share_easy": by_pass_rate[middle:],
        "lost_share_short": by_length[:middle],
        "lost_share_long": by_length[middle:],
    }
    shares = {}
    for name, part in parts.items():
        lost = sum(group.lost_completions for group in part)
        shares[name] = lost / max(1, lost + sum(len(group.completions) for group in part))
    return shares


def step_metrics(report: StepReport) -> dict[str, float]:
    """The numbers of the trainer's report on an optimizer step, by name in metrics.jsonl."""
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "tokens": report.tokens,
        "train_seconds": report.seconds,
        **report.metrics,
    }


def engine_metrics(engines: Membership) -> dict[str, float]:
    """Number of serving engines at the end of a batch; restarts and lost tokens of all engines so far."""
    return {
        "engines_serving": len(engines.serving),
        "engine_restarts": sum(member.restarts for member in engines.members),
        "lost_tokens": sum(member.lost_tokens for member in engines.members),
    }


def _pass_rates_by_task(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Pass rate and number of groups of each task in the batch; empty without prompts.tasks."""
    scores: dict[str, list[bool]] = {}
    for group in groups:
        if group.prompt.task:
            scores.setdefault(group.prompt.task, []).extend(score.correct for score in group.scores)
    rates = {f"train_pass_rate/{task}": sum(correct) / len(correct) for task, correct in sorted(scores.items())}
    counts = {f"batch/groups/{task}": float(sum(g.prompt.task == task for g in groups)) for task in sorted(scores)}
    return rates | counts


def means(outcomes: Outcomes) -> tuple[float, ...]:
    """Pass rate of each prompt [prompts], over the completions that were not lost."""
    row_outcomes = [[x for x in row if x is not None] for row in outcomes]
    return tuple(sum(row) / len(row) for row in row_outcomes)


def text(outcomes: Outcomes) -> str:
    """The outcomes as one character per completion, prompt after prompt: 1 for correct, 0 for wrong, - for lost."""
    return "".join(_LETTERS[x] for row in outcomes for x in row)


def within_variance(outcomes: Iterable[Sequence[bool | None]]) -> float | None:
    """The unbiased mean over prompts of p (1 - p), the variance of one completion's outcome; None if undefined.

    The binomial variance of a pass rate of N completions, for fixed prompts, is this mean divided by N. With the
    total pass rate as p, p (1 - p) is larger by the variance between prompts. Prompts with fewer than two completions
    are left out.
    """
    variances = []
    for row in outcomes:
        row_outcomes = [outcome for outcome in row if outcome is not None]
        if len(row_outcomes) > 1:
            variances.append(variance(row_outcomes))
    if not variances:
        return None
    return sum(variances) / len(variances)
