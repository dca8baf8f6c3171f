"""The evaluations of a run: evaluation files at chosen steps, on an engine that is held at the version of the step.

Consumes: the held engine's slots, at the priority of validations.
Waits for: completions and their scores. Nothing waits for an evaluation but the end of the run.
Unblocked by: the held engine and the verifier. If the engine is evicted, or all completions of a problem are lost,
the evaluation is lost: a row says so, and one of a later version is due at once.

    RUN/evaluations/step-000100/   every completion, then the summary (`evaluation.results`)
    RUN/evaluation.jsonl           a row for each file of each evaluation; for one that was lost, a row with `lost`

Every completion in a result has tokens of the step's version alone (`evaluation.completing.check_version`), and the
header names the digest of the weights. A crash leaves the completions that were there. Where the restart comes to the
same step again, with the same digest, the evaluation goes on with them; where it begins after that step, a row says
that the evaluation is lost. One that is recorded is never made again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl
from megatron_scalerl.controller.held_engine import HeldEngine, HeldEngineLost, OneAtATime, losses_as_one
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.run_folder import RunState
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.evaluation.completing import Holders, Request, complete_all
from megatron_scalerl.evaluation.contamination import Contamination, Text, contamination
from megatron_scalerl.evaluation.inputs import recipe_of_task, render, settings
from megatron_scalerl.evaluation.problems import ProblemFile, read_problems, split_schema
from megatron_scalerl.evaluation.results import SUMMARY, Header, Key, OtherResult, ProblemLost, ResultFile, Row, cells
from megatron_scalerl.evaluation.summaries import FileSummary, as_json, summarize
from megatron_scalerl.evaluation.training_texts import problem_texts
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.plans import VALIDATION_PRIORITY
from megatron_scalerl.rollouts.run_text import RunTokenizer
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.types import Prompt

logger = logging.getLogger(__name__)

FOLDER, RECORD = "evaluations", "evaluation.jsonl"
_STEP = re.compile("step-([0-9]+)")
"""Name of the folder of an evaluation; one that began anew left another name."""


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs:
    """The evaluation files of a run. Produced by `evaluation_inputs`."""

    tokenizer: RunTokenizer | None = None
    files: tuple[ProblemFile, ...] = ()
    prompts: tuple[tuple[Prompt, ...], ...] = ()
    """[files][P] the problems as the recipe renders prompts."""
    contaminations: tuple[Contamination, ...] = ()
    """[files] by the training prompts."""

    def lines(self) -> list[str]:
        """What of the files is in the training prompts, one line for each file."""
        return [f"{printable(f.path)}: {c.line()}" for f, c in zip(self.files, self.contaminations)]


def evaluation_inputs(recipe: Recipe, tokenizer: Any, training: Sequence[Prompt]) -> EvaluationInputs:
    """Read and render the files of the recipe's `evaluation`, and compare them with the training prompts.

    Raises ValueError as `read_problems` and `render` do, and for two files of one name.
    """
    section = recipe.evaluation
    if not section.every_steps:
        return EvaluationInputs()
    recipe = recipe_of_task(recipe)
    files = tuple(read_problems(*split_schema(text)) for text in section.files)
    names = [file.name for file in files]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"evaluation.files: expected files of different names, found two called {double!r}")
    texts = [Text(where=prompt.prompt_id, text=prompt.text) for prompt in training]
    return EvaluationInputs(
        tokenizer=tokenizer,
        files=files,
        prompts=tuple(
            tuple(replace(prompt, task=section.task or "") for prompt in render(file, tokenizer, recipe))
            for file in files
        ),
        contaminations=tuple(contamination(texts, problem_texts(file)) for file in files),
    )


class Evaluations(OneAtATime):
    """At most one evaluation at a time."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: EvaluationInputs,
        folder: Path,
        *,
        run_id: str,
        start_step: int,
        engines: Membership,
        held: HeldEngine,
        sampler: Sampler,
        meter: Meter,
    ) -> None:
        """folder: RUN. start_step: of the checkpoint from which this attempt goes on."""
        super().__init__()
        self._recipe, self._inputs, self._folder, self._run_id = recipe, inputs, folder, run_id
        self._engines, self._held, self._sampler, self._meter = engines, held, sampler, meter
        self._unfinished: set[int] = set()
        """Steps of evaluations that an earlier attempt began and this one may come to."""
        self._every = recipe.evaluation.every_steps
        if self._every:
            self._record = JsonlWriter(folder / RECORD)
            rows = read_jsonl(folder / RECORD)
            self._last = max((row["step"] for row in rows if "lost" not in row), default=-1)
            self._note_unfinished(start_step, {(row["step"], row.get("file")) for row in rows})

    def _note_unfinished(self, start_step: int, recorded: set[tuple[int, str | None]]) -> None:
        """Record evaluations that an earlier attempt finished or began and this one cannot go on with.

        recorded: step and file of each row, None for a loss. A power loss may leave a part of an evaluation's rows.
        """
        for path in sorted((self._folder / FOLDER).glob("step-*")):
            if (found := _STEP.fullmatch(path.name)) is None:
                continue
            step = int(found[1])
            if (path / SUMMARY).exists():
                rows = msgspec.json.decode((path / SUMMARY).read_bytes())["rows"]
                if left := [row for row in rows if (step, row["file"]) not in recorded]:
                    self._append(step, left)
            elif any(step == known for known, _ in recorded):
                continue
            elif step < start_step:
                self._lose(step, f"the run was stopped, and went on from step {start_step}")
            else:
                self._unfinished.add(step)

    def due(self, step: int) -> bool:
        """True if `step` is a multiple of evaluation.every_steps, or the first step asked for from one on.

        Not if the evaluation is recorded or in progress.
        """
        if not self._every or self.in_progress:
            return False
        return step // self._every > self._last // self._every

    def begin(self, state: RunState, *, alone: bool = False) -> None:
        """Start the evaluation of the served version if it is due and an engine can be held, else leave it due.

        alone: no other engine needs to serve. Raises the failure of the evaluation before.
        """
        self.collect()
        step = state.step
        if not self.due(step) or (engine := self._held.hold(step, "evaluation", alone=alone)) is None:
            return
        logger.info("evaluation of version %d on %s", step, engine.name)
        ledger = self._meter.ledger
        axis = {"compute": ledger.axis_at(state.batches), "compute_total": ledger.hours(), "unit": ledger.unit}
        self._task = asyncio.create_task(
            self._run(step, engine, axis, state.digest), name=f"evaluation of version {step}"
        )

    async def end(self) -> None:
        """Wait for the evaluation in progress, if any. Raises its failure."""
        if self._task is not None:
            await asyncio.wait({self._task})
        self.collect()

    async def close(self) -> None:
        """Cancel the evaluation in progress, if any; its completions stay."""
        await super().close()
        if self._every:
            self._record.close()

    async def _run(self, step: int, engine: EngineClient, axis: dict[str, Any], digest: str) -> None:
        try:
            with self._result(step, digest) as result:
                await self._complete(step, engine, result)
                rows = await asyncio.to_thread(self._finish, step, axis, digest, result)
        except (HeldEngineLost, ProblemLost) as lost:
            self._lose(step, str(lost))
        else:
            self._append(step, rows)
        finally:
            self._held.release(engine)

    def _result(self, step: int, digest: str) -> ResultFile:
        """The result of a step; one of other weights or settings, or damaged, is kept under another name."""
        path = self._folder / FOLDER / f"step-{step:06d}"
        header = Header(
            policy=self._run_id,
            digest=digest,
            version=step,
            files=tuple((file.name, file.digest) for file in self._inputs.files),
            seed=self._recipe.evaluation.seed,
            settings=settings(recipe_of_task(self._recipe), k=self._recipe.evaluation.generations, budgets=(None,)),
        )
        try:
            return ResultFile(path, header)
        except OtherResult as error:
            number = 1 + len(list(path.parent.glob(f"{path.name}.*")))
            logger.warning("evaluation of version %d begins anew: %s", step, error)
            path.rename(path.with_name(f"{path.name}.{number}"))
            return ResultFile(path, header)

    async def _complete(self, step: int, engine: EngineClient, result: ResultFile) -> None:
        async def held_engine(number: int) -> EngineClient:
            self._held.check(engine)
            return engine

        def finished(row: Row) -> None:
            self._meter.count_held(engine, "evaluation", row.tokens)
            result.append(row)

        assert self._inputs.tokenizer is not None
        with losses_as_one():
            await complete_all(
                self._requests(result.missing(self._keys())),
                Holders(next=held_engine, evict=self._engines.evict),
                version=step,
                at_once=self._recipe.rollouts.max_in_flight,
                priority=VALIDATION_PRIORITY,
                tokenizer=self._inputs.tokenizer,
                finished=finished,
            )

    def _keys(self) -> list[Key]:
        return [
            Key(file=file.name, number=problem.number, index=index)
            for file in self._inputs.files
            for index in range(self._recipe.evaluation.generations)
            for problem in file.problems
        ]

    def _requests(self, keys: list[Key]) -> list[Request]:
        prompts = {file.name: prompts for file, prompts in zip(self._inputs.files, self._inputs.prompts)}
        return [
            Request(
                key=key,
                problem_id=(prompt := prompts[key.file][key.number - 1]).prompt_id,
                prompt=prompt,
                draw=self._sampler.draw(self._recipe.evaluation.seed, key.number, key.index),
                sampler=self._sampler,
            )
            for key in keys
        ]

    def _finish(self, step: int, axis: dict[str, Any], digest: str, result: ResultFile) -> list[dict[str, Any]]:
        """Write the summary; the rows of RECORD."""
        k, inputs = self._recipe.evaluation.generations, self._inputs
        found = [
            summarize(cell, file, k=k, hit=compared.problems_hit)
            for cell, file, compared in zip(
                cells(result.rows.values(), self._keys()), inputs.files, inputs.contaminations
            )
        ]
        rows = [_row(step, summary, axis, digest) for summary in found]
        compared = {file.name: c for file, c in zip(inputs.files, inputs.contaminations)}
        versions = sorted({version for row in result.rows.values() if not row.lost for version in row.versions})
        header = {"policy": self._run_id, "version": step, "digest": digest, "versions_found": versions}
        result.finish(as_json(found, {}, compared, header=header) | {"rows": rows})
        return rows

    def _append(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        self._record.append(*rows)
        self._record.sync()
        self._last = max(self._last, step)
        self._unfinished.discard(step)
        for other in sorted(o for o in self._unfinished if o // self._every <= self._last // self._every):
            self._unfinished.discard(other)
            self._lose(other, f"the run was stopped, and version {step} was evaluated instead")

    def _lose(self, step: int, why: str) -> None:
        logger.warning("evaluation of version %d is lost: %s", step, why)
        self._record.append({"step": step, "lost": why})
        self._record.sync()


def _row(step: int, summary: FileSummary, axis: dict[str, Any], digest: str) -> dict[str, Any]:
    return {
        "step": step,
        "policy_version": step,
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
        "weight_digest": digest,
        **axis,
    }


def write_contamination(folder: Path, inputs: EvaluationInputs) -> None:
    """RUN/contamination.json: which training prompts hit which problems. Nothing without evaluation files."""
    if inputs.files:
        found = {f.path: asdict(c) for f, c in zip(inputs.files, inputs.contaminations)}
        write_durably(folder / "contamination.json", msgspec.json.encode(found), private=True)
