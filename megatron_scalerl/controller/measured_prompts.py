"""The measurements of a run and their records: validations on held-out prompts, and evaluations on files.

A validation is mean@k on the held-out prompts, with one policy version. Interruption, sampling and verifier are the
same as in training. Every validation has the same prompts, so that the prompts' difficulty is no noise of the curve.
Seeds and interruption points are drawn anew for each validation (validation.fresh_seeds): with equal seeds, the
errors of successive validations would be alike, and a fitted curve could not average the errors out. Fresh seeds
depend on validation.seed and the step alone, so that compared runs have equal seeds. A truncated completion counts as
wrong.
(Khatri et al. 2025, section 2: mean@16 on 1,000 held-out prompts every 100 steps.)

    RUN/validation.jsonl           a row for each validation (`metrics`), to which the forecast is fitted
    RUN/evaluations/step-000100/   every completion of an evaluation, then the summary (`evaluation.results`)
    RUN/evaluation.jsonl           a row for each file of each evaluation; a row with the reason of each loss

In an evaluation, one policy version generates all tokens. The header of the evaluation's result file has the digest
of the version's weights. Finished completions survive a crash: if a restart makes the step again and gets equal
weights, the evaluation continues after the finished completions. If a restart begins after the step, the evaluation
is recorded as lost. A recorded evaluation is never made again.
"""

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl
from megatron_scalerl.controller.meter import Purpose
from megatron_scalerl.controller.metrics import (
    Metrics,
    Outcomes,
    environment_metrics,
    means,
    text,
    within_variance,
)
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import ResumePoint, RunFolder
from megatron_scalerl.evaluation.completing import Completer, Request
from megatron_scalerl.evaluation.inputs import EvaluationInputs
from megatron_scalerl.evaluation.results import SUMMARY, Key, OtherResult, ResultFile, cells
from megatron_scalerl.evaluation.summaries import FileSummary, as_json, summaries_of
from megatron_scalerl.fit.outlook import outlook
from megatron_scalerl.prompts.dataset import first_of_each_task
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.rewards.math import is_number
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion
from megatron_scalerl.types import Completion, CompletionLost, PassRate, Prompt, TaskPassRate

logger = logging.getLogger(__name__)

CONFIRMED_NUMBERS = 0.95
"""Least share of the correct answers that a second judge has to confirm if more than half of the references are
numbers. Below this share a validation warns."""
CONFIRMED_FALL = 0.05
"""Largest fall of the confirmed share since the first validation if at most half of the references are numbers. After
a larger fall a validation warns."""
FOLDER = "evaluations"
RECORD = "evaluation.jsonl"
_STEP = re.compile("step-([0-9]+)")
"""Pattern of the name of an evaluation's folder. A folder that was moved away before the evaluation began anew has a
suffix and does not match."""


@record
class PinnedVersion:
    """The policy version that is measured. Produced by `measure.Measurement.begin`."""

    step: int
    digest: str
    """Digest of the weights that the engines hold."""
    axis: dict[str, Any]
    """`compute` and `compute_total`: device-hours of the run at the step; `unit`: the unit of both (`ledger`)."""
    last: bool = False
    """True for the last measurement of the run."""


class HeldOut:
    """A run's validations, on the held-out prompts."""

    purpose: ClassVar[Purpose] = "validation"
    on_all: ClassVar[bool] = True
    """True: a validation runs on all engines if no engine can be held."""

    def __init__(
        self, recipe: Recipe, prompts: Sequence[Prompt], sampler: Sampler, metrics: Metrics, progress: Progress
    ):
        self._recipe = recipe
        self._section = recipe.validation
        self._prompts = first_of_each_task(prompts, self._section.prompts)
        self._sampler = sampler
        self._metrics = metrics
        self._progress = progress
        self._forecast: asyncio.Task[None] | None = None
        """The forecast after the last validation, computed in a thread."""
        self.every_steps = self._section.every_steps

    def newest(self, step: int) -> int:
        """The newest step up to `step` with a recorded validation; -1 without a record."""
        return self._metrics.last_validation(step)

    async def measure(self, version: PinnedVersion, completer: Completer) -> None:
        """Validate a version, record the pass rate, and start a forecast from all pass rates so far."""
        pass_rate, outcomes = await self.validate(version, completer)
        self._metrics.validation(pass_rate, by_prompt=means(outcomes), outcomes=text(outcomes))
        self._progress.validation(pass_rate)
        await self.close()
        self._forecast = asyncio.create_task(self._look_ahead(), name=f"forecast at version {version.step}")

    async def validate(self, version: PinnedVersion, completer: Completer) -> tuple[PassRate, Outcomes]:
        """Returns (the pass rate of a policy version, the outcomes of the completions [prompts][generations]).

        A larger number of generations only adds seeds: the seeds of a prompt's first completions do not change.
        Raises RuntimeError if all completions of a prompt are lost.
        """
        section = self._section
        step = version.step
        generations = section.generations
        if version.last or step in (0, self._recipe.steps):
            generations = section.end_generations or generations
        seed = section.seed
        if section.fresh_seeds:  # equal seeds would make the errors of two validations alike
            seed += step
        rows: list[list[ScoredCompletion | None]] = [[None] * generations for _ in self._prompts]

        def finished(request: Request, completion: ScoredCompletion | CompletionLost) -> None:
            if not isinstance(completion, CompletionLost):
                rows[request.key.number][request.key.index] = completion

        requests = [
            Request(
                key=Key(file="validation", number=number, index=index),
                prompt=prompt,
                draw=self._sampler.draw(prompt, seed, number, index),
                sampler=self._sampler,
            )
            for number, prompt in enumerate(self._prompts)
            for index in range(generations)
        ]
        await completer.complete_all(requests, finished)
        # Without this prompt, the pass rate would be of another set of prompts than earlier pass rates of the curve.
        for prompt, row in zip(self._prompts, rows):
            if not any(row):
                raise RuntimeError(
                    f"validation of version {step}: prompt {prompt.prompt_id}: all {generations} completions are lost"
                )
        outcomes = tuple(tuple(None if x is None else x.score.correct for x in row) for row in rows)
        by_prompt = means(outcomes)
        scored_completions = [scored for row in rows for scored in row if scored is not None]
        completions = [scored.completion for scored in scored_completions]
        share, least_share = self._audited(scored_completions)
        pass_rate = PassRate(
            step=step,
            policy_version=step,
            pass_rate=sum(by_prompt) / len(by_prompt),
            prompts=len(by_prompt),
            generations=generations,
            **version.axis,
            truncated_share=sum(c.truncated for c in completions) / len(completions),
            interrupted_share=sum(c.interrupted for c in completions) / len(completions),
            mean_completion_tokens=sum(c.generated_tokens for c in completions) / len(completions),
            entropy=_entropy(completions),
            lost_completions=len(requests) - len(completions),
            within_variance=within_variance(outcomes),
            metrics=environment_metrics(scored.score for scored in scored_completions),
            tasks=_by_task(self._prompts, by_prompt),
            confirmed_share=share,
            confirmed_least=least_share,
        )
        return pass_rate, outcomes

    def _audited(self, completions: Sequence[ScoredCompletion]) -> tuple[float | None, float | None]:
        """Returns the share of correct answers that the second judge confirms, and the least share without a warning.

        Returns (None, None) if the second judge gave no verdict. The warning quotes two unconfirmed answers.
        """
        verdicts = [scored.score.confirmed for scored in completions if scored.score.confirmed is not None]
        if not verdicts:
            return None, None
        share = sum(verdicts) / len(verdicts)
        numbers = sum(is_number(prompt.answer) for prompt in self._prompts)
        least_share = CONFIRMED_NUMBERS
        if 2 * numbers <= len(self._prompts):
            earlier = [row["confirmed_share"] for row in self._metrics.validations() if row.get("confirmed_share")]
            least_share = (earlier or [share])[0] - CONFIRMED_FALL
        if share < least_share:
            texts = [scored for scored in completions if scored.unconfirmed_text][:2]
            text_lines = "\n".join(f"  reference {s.prompt.answer!r}: {s.unconfirmed_text[-300:]!r}" for s in texts)
            logger.warning(
                "the second judge confirms %.1f %% of the answers judged correct, below %.1f %%: read some with show "
                "--unconfirmed, and correct the verifier before you trust this pass rate:\n%s",
                100 * share,
                100 * least_share,
                text_lines,
            )
        return share, least_share

    def lose(self, step: int, reason: str) -> None:
        """Log that a validation is lost. reason: why no engine can complete the validation."""
        logger.warning(
            "the validation of version %d is lost, and a later version is validated instead: %s", step, reason
        )

    async def close(self) -> None:
        """Wait for the forecast, which takes less than a second."""
        if self._forecast is not None:
            await asyncio.gather(self._forecast, return_exceptions=True)

    async def _look_ahead(self) -> None:
        """Forecast the pass rate at the run's end. A failed fit is logged and does not end the run."""
        try:
            forecast = await asyncio.to_thread(
                outlook,
                self._metrics.validations(),
                steps=self._recipe.steps,
                fit_from_steps=self._recipe.forecast.fit_from_steps,
            )
        except (ValueError, ArithmeticError, RuntimeError, OSError, MemoryError) as error:
            logger.warning("the run goes on without a forecast, which failed: %s: %s", type(error).__name__, error)
            return
        if forecast is not None:
            self._progress.outlook(forecast)


def _by_task(prompts: Sequence[Prompt], by_prompt: Sequence[float]) -> dict[str, TaskPassRate]:
    """The pass rate of each task; empty without prompts.tasks in the recipe."""
    rates: dict[str, list[float]] = {}
    for prompt, pass_rate in zip(prompts, by_prompt):
        if prompt.task:
            rates.setdefault(prompt.task, []).append(pass_rate)
    return {task: TaskPassRate(pass_rate=sum(p) / len(p), prompts=len(p)) for task, p in rates.items()}


def _entropy(completions: Sequence[Completion]) -> float:
    """Estimated entropy: minus the mean log-probability (nats) of all sampled tokens; NaN without a sampled token."""
    sampled = sum(c.sampled_tokens for c in completions)
    if not sampled:
        return math.nan
    return -sum(c.logprob_sum for c in completions) / sampled


class EvaluationFiles:
    """A run's evaluations, on the files of evaluation.files."""

    purpose: ClassVar[Purpose] = "evaluation"
    on_all: ClassVar[bool] = False
    """False: an evaluation never runs on all engines, and stays due until an engine can be held."""

    def __init__(
        self, recipe: Recipe, files: EvaluationInputs, folder: RunFolder, start: ResumePoint, sampler: Sampler
    ):
        """start: the checkpoint from which this attempt resumes."""
        self._section = recipe.evaluation
        self._files = files
        self._sampler = sampler
        self._folder = folder.path
        self._run_id = folder.attempt.run_id
        self._unfinished: set[int] = set()
        """Steps at which an earlier attempt left an evaluation unfinished, and which this attempt may reach again."""
        self.every_steps = self._section.every_steps
        self._record = JsonlWriter(self._folder / RECORD)
        rows = read_jsonl(self._folder / RECORD)
        self._last_step = max((row["step"] for row in rows if "lost" not in row), default=-1)
        self._note_unfinished(start.step, {(row["step"], row.get("file")) for row in rows})

    def _note_unfinished(self, start_step: int, recorded: set[tuple[int, str | None]]) -> None:
        """Complete the record of earlier attempts' evaluations.

        Missing rows of finished evaluations are added. Unfinished evaluations before `start_step` are recorded as
        lost. recorded: (step, file) of each row; the file is None in the row of a lost evaluation.
        """
        recorded_steps = {step for step, _ in recorded}
        for path in sorted((self._folder / FOLDER).glob("step-*")):
            match = _STEP.fullmatch(path.name)
            if match is None:
                continue
            step = int(match[1])
            if (path / SUMMARY).exists():
                rows = msgspec.json.decode((path / SUMMARY).read_bytes())["rows"]
                # A power loss may have removed some of the evaluation's rows.
                missing_rows = [row for row in rows if (step, row["file"]) not in recorded]
                if missing_rows:
                    self._append(step, missing_rows)
            elif step in recorded_steps:
                continue
            elif step < start_step:
                self.lose(step, f"the run was stopped, and went on from step {start_step}")
            else:
                self._unfinished.add(step)

    def newest(self, step: int) -> int:
        """The newest recorded step; -1 without a record."""
        return self._last_step

    async def measure(self, version: PinnedVersion, completer: Completer) -> None:
        """Complete every problem of the files that has no result yet, and record the results.

        Raises ProblemLost if all completions of a problem are lost.
        """
        section = self._section
        with self._result(version) as result:
            await self._files.complete(
                result, completer, {None: self._sampler}, k=section.generations, seed=section.seed
            )
            rows = await asyncio.to_thread(self._finish, version, result)
        self._append(version.step, rows)

    def _result(self, version: PinnedVersion) -> ResultFile:
        """Open the result file of a step. A file that is damaged or has another header is moved away first."""
        section = self._section
        step = version.step
        path = self._folder / FOLDER / f"step-{step:06d}"
        header = self._files.header(
            policy=self._run_id, digest=version.digest, version=step, seed=section.seed, k=section.generations
        )
        try:
            return ResultFile(path, header)
        except OtherResult as error:
            number = 1 + len(list(path.parent.glob(f"{path.name}.*")))
            logger.warning("the evaluation of version %d begins anew: %s", step, error)
            path.rename(path.with_name(f"{path.name}.{number}"))
            return ResultFile(path, header)

    def _finish(self, version: PinnedVersion, result: ResultFile) -> list[dict[str, Any]]:
        """Write the evaluation's summary; returns the rows for RUN/evaluation.jsonl, one for each file."""
        files = self._files
        completed = cells(result.rows.values(), files.keys(self._section.generations))
        summaries = summaries_of(completed, files.files, files.contaminations, k=self._section.generations)
        rows = [_row(summary, version) for summary in summaries]
        versions = sorted({version for row in result.rows.values() if not row.lost for version in row.versions})
        header = {
            "policy": self._run_id,
            "version": version.step,
            "digest": version.digest,
            "versions_found": versions,
        }
        result.finish(as_json(summaries, {}, files.contaminations, header=header) | {"rows": rows})
        return rows

    def _append(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        self._record.append(*rows)
        self._record.sync()
        self._last_step = max(self._last_step, step)
        self._unfinished.discard(step)
        # Unfinished evaluations at earlier multiples of every_steps are never due again, and so are lost.
        passed_steps = sorted(
            s for s in self._unfinished if s // self.every_steps <= self._last_step // self.every_steps
        )
        for passed_step in passed_steps:
            self._unfinished.discard(passed_step)
            self.lose(passed_step, f"the run was stopped, and version {step} was evaluated instead")

    def lose(self, step: int, reason: str) -> None:
        """Record that the evaluation of a step is lost. An evaluation of the next version is then due."""
        logger.warning("the evaluation of version %d is lost: %s", step, reason)
        self._record.append({"step": step, "lost": reason})
        self._record.sync()

    async def close(self) -> None:
        """Close the file."""
        self._record.close()


def _row(summary: FileSummary, version: PinnedVersion) -> dict[str, Any]:
    return {
        "step": version.step,
        "policy_version": version.step,
        "file": summary.file,
        "problems": summary.problems,
        "k": summary.k,
        "mean_at_k": summary.mean_at_k.value,
        "low": summary.mean_at_k.low,
        "high": summary.mean_at_k.high,
        "pass_at_k": {str(k): estimate.value for k, estimate in summary.pass_at_k.items()},
        "clean_mean_at_k": None if summary.clean is None else summary.clean.value,
        "mean_tokens": summary.mean_tokens,
        "truncated_share": summary.truncated_share,
        "interrupted_share": summary.interrupted_share,
        "lost_completions": summary.lost,
        "weight_digest": version.digest,
        **version.axis,
    }


def write_contamination(folder: Path, files: EvaluationInputs | None) -> None:
    """Write RUN/contamination.json: the problems that occur in training prompts. Without files nothing is written."""
    if files is not None:
        compared = {file.path: asdict(files.contaminations[file.name]) for file in files.files}
        write_durably(folder / "contamination.json", msgspec.json.encode(compared), private=True)
