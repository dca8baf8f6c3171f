"""Loads prompts: rows of a file become rendered `Prompt`s for training and validation.

    rows (`layouts`) -> questions and references -> each text once -> references checked -> tokens -> split

The tasks of a mixture are loaded one after another, before any process starts. Texts that a task holds out are then
removed from every task's training prompts. A row that fails is skipped, and reported with a reason; a file most of
whose rows fail is an error.

The split depends on the texts alone, not on the order of the rows or on other columns. Skipped rows (duplicates,
prompts that are too long) are counted in a `PromptReport`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from megatron_scalerl.prompts.layouts import Layout, OtherTask, Question, leaves, other_task, read_layout
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.prompts.sources import Row, listing
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.record import record
from megatron_scalerl.types import Prompt

PROMPTS_CHANGED = "a prompt file, the tokenizer or its template has changed"

CheckAnswers = Callable[
    [Task, Sequence[tuple[str, str, Mapping[str, Any]]]], tuple[Sequence[str], Sequence[str | None]]
]
"""Function (task, rows), each row (question, reference, further columns) -> (problems, trials), both with an entry
for each row.

A problem says why the verifier can accept no answer to the row, always with the same text for a row; empty: no
problem. A trial is the result of a test run of the verifier, which may end differently the next time: the reason why
the reference was rejected, empty if the reference was accepted, or None if the test run waits until the prompt is
first used.
"""


@record
class PromptReport:
    """Counts of the rows that were kept and skipped while one task's prompts were loaded."""

    rows: int
    """Number of rows that were read, of both files if held-out prompts have a separate file."""
    training: int
    held_out: int
    duplicates: int
    """Rows that repeat text and answer of an earlier row."""
    leaked: int
    """Training rows skipped because the text is in the file of held-out prompts."""
    too_long: tuple[str, ...]
    """Entries for skipped prompts: file, line, tokens of the prompt and tokens allowed."""
    unusable: tuple[str, ...] = ()
    """Entries for rows that cannot be learned from: file, line, reason."""
    key: str = "prompts"
    """Key of the recipe's section for these prompts."""
    layouts: tuple[str, ...] = ()
    """For each file, the file's name and the columns of questions and references."""

    def lines(self) -> list[str]:
        """The report as text, one line for each reason to skip rows."""
        lines = [f"{self.key}: {layout}" for layout in self.layouts]
        lines.append(f"{self.key}: {self.rows} rows, {self.training} to train on, {self.held_out} held out")
        if self.duplicates:
            lines.append(f"{self.key}: {self.duplicates} duplicates skipped")
        if self.leaked:
            lines.append(f"{self.key}: {self.leaked} training rows skipped, because the text is held out")
        if self.unusable:
            share = f"{len(self.unusable)} of {self.rows} rows cannot be learned from and are skipped"
            lines += [f"{self.key}: {share}:", *listing(self.unusable)]
        if self.too_long:
            lines += [f"{self.key}: {len(self.too_long)} too long and skipped:", *listing(self.too_long)]
        return lines


@record
class PromptSet:
    """The prompts of a run."""

    training: tuple[Prompt, ...]
    """Training prompts in the order of the files, task after task."""
    held_out: tuple[Prompt, ...]
    """Held-out prompts, task after task, in the order of the hashes of the texts: which prompts are the first n does
    not depend on the order of the file."""
    reports: tuple[PromptReport, ...]
    """A report for each task, in the order of the tasks' names."""
    problems: dict[str, str | None] = field(default_factory=dict)
    """Prompt id -> why a test run rejected the prompt's reference (a trial of `CheckAnswers`); None: no test run yet.

    A resumed run may find a different result, so a rejected prompt stays in the set, whose digest and order must not
    change.
    """

    def lines(self) -> list[str]:
        """The reports as text."""
        return [line for report in self.reports for line in report.lines()]

    def digest(self) -> str:
        """16 hexadecimal digits of the SHA-256 of all prompts' ids and tokens, in order."""
        digest = hashlib.sha256()
        for prompt in (*self.training, *self.held_out):
            digest.update(json.dumps([prompt.prompt_id, prompt.token_ids]).encode())
        return digest.hexdigest()[:16]


def prompt_id(text: str, answer: str, task: str = "") -> str:
    """Stable id of a prompt: 16 hexadecimal digits of the SHA-256 of problem, reference answer and task, if any."""
    parts = [text, answer, *filter(None, [task])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def load_prompts(
    tokenizer: Any,
    tasks: Sequence[Task],
    check_answers: CheckAnswers = lambda task, answers: ([""] * len(answers),) * 2,
) -> PromptSet:
    """Read, render and split the prompts of the recipe's tasks.

    `tokenizer` is a Hugging Face tokenizer. A task holds out the prompts of `held_out_path`, or else the `held_out`
    prompts of `path` whose texts have the smallest hashes; a `held_out` below 1 takes every text whose hash is in the
    lowest `held_out` of the range of hashes. No task trains on a text that any task holds out. Rows that cannot be
    learned from are skipped and reported: rows without a text or an answer, and rows that `check_answers` refuses.
    Raises ValueError, in one line, for an invalid file, a file most of whose rows cannot be learned from, and a task
    without training prompts.
    """
    problems: dict[str, str | None] = {}
    loaders = [_Loader(tokenizer, task, check_answers, problems) for task in tasks]
    splits = [loader.load_split() for loader in loaders]
    # compared once all files are read, because a text that one task holds out may be in the file of any task
    texts = {prompt.text for _, held_out in splits for prompt in held_out}
    training = []
    reports = []
    for loader, (prompts, held_out) in zip(loaders, splits):
        kept_prompts = [prompt for prompt in prompts if prompt.text not in texts]
        if not kept_prompts:
            rows = len(prompts) + loader.split_off
            default = PromptsSection.model_fields["held_out"].default
            raise ValueError(
                f"{loader.task.key}.held_out holds out {len(held_out)} of the {rows} prompts of "
                f"{loader.task.prompts.path}, and none is left to train on; set fewer, such as {max(1, rows // 10)} "
                f"(the default is {default})"
            )
        training += kept_prompts
        reports.append(loader.report(kept_prompts, held_out, leaked=len(prompts) - len(kept_prompts)))
    ordered: list[Prompt] = []
    for _, held_out in splits:
        ordered += sorted(held_out, key=lambda prompt: (_text_hash(prompt.text), prompt.prompt_id))
    return PromptSet(training=tuple(training), held_out=tuple(ordered), reports=tuple(reports), problems=problems)


def first_of_each_task(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """The first `count` prompts of every task, in the given order; None: all prompts."""
    counts: Counter[str] = Counter()
    kept_prompts = []
    for prompt in prompts:
        counts[prompt.task] += 1
        if count is None or counts[prompt.task] <= count:
            kept_prompts.append(prompt)
    return kept_prompts


def split_held_out(prompts: Sequence[Prompt], held_out: int | float) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held out): held out are the `held_out` texts with the smallest hashes or, for a `held_out` below 1,
    the texts whose hashes are in the lowest `held_out` of the range of hashes.

    Prompts with the same text stay together. With a `held_out` below 1, prompts that are added later move no earlier
    prompt between the two lists.
    """
    if 0 < held_out < 1:
        chosen = {prompt.text for prompt in prompts if _text_hash(prompt.text) < held_out * 2**256}
    else:
        chosen = set(sorted({prompt.text for prompt in prompts}, key=_text_hash)[: int(held_out)])
    training = [prompt for prompt in prompts if prompt.text not in chosen]
    return training, [prompt for prompt in prompts if prompt.text in chosen]


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


_Usable = tuple[str, Question, Prompt]
"""(file and line of a row, question of the row, prompt before the text is encoded)."""


class _Loader:
    """Reads the files of a task into prompts and counts skipped rows."""

    def __init__(self, tokenizer: Any, task: Task, check_answers: CheckAnswers, problems: dict[str, str | None]):
        """problems: `PromptSet.problems`, to which the loader adds the rows whose test run failed or was not made."""
        self._renderer = PromptRenderer(tokenizer, task.prompts)
        self._prompts = task.prompts
        self._check_answers = check_answers
        self._problems = problems
        self.task = task
        self.split_off = 0
        """Number of prompts of `path` that are held out."""
        self._rows = 0
        self._duplicates = 0
        self._too_long: list[str] = []
        self._unusable: list[str] = []
        self._layouts: list[str] = []

    def load_split(self) -> tuple[list[Prompt], list[Prompt]]:
        """Read the task's files and return (prompts to train on, held-out prompts)."""
        assert self._prompts.path is not None
        prompts = self._load(self._prompts.path)
        if self._prompts.held_out_path is not None:
            return prompts, self._load(self._prompts.held_out_path)
        training, held_out = split_held_out(prompts, self._prompts.held_out)
        self.split_off = len(held_out)
        return training, held_out

    def report(self, training: Sequence[Prompt], held_out: Sequence[Prompt], *, leaked: int) -> PromptReport:
        refused_ids = {identity for identity, problem in self._problems.items() if problem}
        return PromptReport(
            rows=self._rows,
            training=sum(prompt.prompt_id not in refused_ids for prompt in training),
            held_out=sum(prompt.prompt_id not in refused_ids for prompt in held_out),
            duplicates=self._duplicates,
            leaked=leaked,
            too_long=tuple(self._too_long),
            unusable=tuple(self._unusable),
            key=self.task.key,
            layouts=tuple(self._layouts),
        )

    def _load(self, path: str) -> list[Prompt]:
        layout, rows = read_layout(path, self._prompts, self.task.rewards.verifier)
        self._layouts.append(f"{path}: {layout.line()}")
        unique: dict[str, _Usable] = {}
        rows_before = self._rows
        unusable_before = len(self._unusable)
        elsewhere = 0
        for row in rows:
            self._rows += 1
            try:
                question, prompt = self._read(layout, row)
            except ValueError as error:
                self._unusable.append(str(error))
                if isinstance(error, OtherTask):
                    elsewhere += 1
                continue
            if prompt.prompt_id in unique:
                self._duplicates += 1
                continue
            unique[prompt.prompt_id] = (row.where, question, prompt)
        if not self.task.episodes:
            self._notice(path, [prompt for _, _, prompt in unique.values()])
        answers = [(prompt.text, prompt.answer, prompt.extra) for _, _, prompt in unique.values()]
        # all answers of the file are checked in one call, so that the tests of code problems run on all CPUs
        problems, trials = self._check_answers(self.task, answers)
        for identity, problem, trial in zip(list(unique), problems, trials):
            if problem or trial:
                self._unusable.append(f"{unique[identity][0]}: {layout.reference[-1]!r}: {problem or trial}")
            if problem:
                del unique[identity]
            # a trial may end differently on another machine, so the prompt stays, and the reason is recorded
            elif trial != "":
                self._problems[identity] = trial
        checked = len(trials) - trials.count(None)
        if checked < len(trials) and not self.task.episodes:
            self._layouts.append(
                f"{path}: {checked} of {len(trials)} references were checked; the rest are checked during the run"
            )
        # rows for other verifiers do not count as read or skipped, since a mixed file may have few rows of this task
        read = self._rows - rows_before - elsewhere
        skipped = len(self._unusable) - unusable_before - elsewhere
        if not read:
            reason = "all rows need another verifier" if elsewhere else "the file is empty"
            raise ValueError(f"{path}: no prompts found: {reason}")
        if 2 * skipped > read or not unique or 2 * (checked - trials.count("")) > checked:
            raise ValueError(f"{path}: {skipped} of {read} rows cannot be learned from, such as {self._unusable[-1]}")
        kept_prompts = self._render(unique)
        if not kept_prompts:
            raise ValueError(
                f"{path}: all {len(unique)} prompts are longer than prompts.max_prompt_tokens "
                f"{self._prompts.max_prompt_tokens}"
            )
        return kept_prompts

    def _notice(self, path: str, prompts: Sequence[Prompt]) -> None:
        """Add lines to the report about columns or references of a file that look like mistakes."""
        columns = {
            name
            for prompt in prompts
            for name, value in prompt.extra.items()
            if any(str(leaf) not in prompt.text for leaf in leaves(value))
        }
        if columns:
            self._layouts.append(f"{path}: these columns are not in the prompt: {', '.join(sorted(columns))}")
        questions = Counter(prompt.text for prompt in prompts)
        if repeats := len(prompts) - list(questions.values()).count(1):
            self._layouts.append(
                f"{path}: {repeats} rows repeat the question of another row with a different reference"
            )
        if len(prompts) > len({prompt.answer for prompt in prompts}) == 1:
            self._layouts.append(f"{path}: all references are {prompts[0].answer[:60]!r}")

    def _read(self, layout: Layout, row: Row) -> tuple[Question, Prompt]:
        """Return (question, prompt before the text is encoded) of a row. Raises ValueError for a row that cannot be
        used."""
        verifier = self.task.rewards.verifier
        if other_task(row.readable(), layout):
            raise OtherTask(f"{row.where}: the row cannot be scored by rewards.verifier {verifier}")
        question = layout.question_of(row)
        answer = layout.reference_of(row, verifier)
        extra = layout.others(row)
        layout.check_seen(row, question, self.task.rewards.verifier, episodes=self.task.episodes)
        self._renderer.check(question, row.where, layout.question[0])
        prompt = Prompt(
            prompt_id=prompt_id(question.text, answer, self.task.name),
            text=question.text,
            answer=answer,
            token_ids=(),
            extra=extra,
            task=self.task.name,
        )
        return question, prompt

    def _render(self, unique: dict[str, _Usable]) -> list[Prompt]:
        limit = self._prompts.max_prompt_tokens
        all_token_ids = self._renderer.token_ids([question for _, question, _ in unique.values()])
        kept_prompts = []
        for (place, _, prompt), token_ids in zip(unique.values(), all_token_ids):
            if not token_ids:
                raise ValueError(f"{place}: the prompt has 0 tokens; correct the tokenizer or its chat template")
            if len(token_ids) > limit:
                self._too_long.append(f"{place}: {len(token_ids)} tokens, at most {limit} allowed")
            else:
                kept_prompts.append(replace(prompt, token_ids=token_ids))
        return kept_prompts
