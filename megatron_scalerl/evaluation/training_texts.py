"""The texts of training prompts, to compare with evaluation problems: of files, or of all tasks of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_scalerl.evaluation.contamination import Text
from megatron_scalerl.evaluation.problems import ProblemFile
from megatron_scalerl.prompts.layouts import Layout, read_layout
from megatron_scalerl.prompts.sources import Row, read_rows
from megatron_scalerl.recipe.file import check_prompts, load_recipe
from megatron_scalerl.recipe.tasks import tasks_of

DEFAULT_COLUMN = "prompt"


def training_texts(source: str) -> Iterator[Text]:
    """The texts of `RECIPE.yaml` (the rows of every task's prompts.path), `FILE`, or `FILE:COLUMN`.

    The layout of a recipe's file is detected, as in training; its held-out rows are among them. Raises ValueError for
    a missing file or column, and for a question that cannot be read.
    """
    if source.endswith((".yaml", ".yml")):
        recipe = load_recipe(source)
        check_prompts(recipe)
        for task in tasks_of(recipe):
            assert task.prompts.path is not None
            yield from _texts(*read_layout(task.prompts.path, task.prompts, task.rewards.verifier))
        return
    path, colon, column = source.rpartition(":")
    if not colon or Path(source).exists():
        path, column = source, DEFAULT_COLUMN
    layout = Layout(name=column, question=(column,), reference=())
    yield from _texts(layout, read_rows(path))


def _texts(layout: Layout, rows: Iterator[Row]) -> Iterator[Text]:
    for row in rows:
        yield Text(where=row.where, text=layout.question_of(row.readable()).text)


def problem_texts(file: ProblemFile) -> list[Text]:
    """The texts of an evaluation file's problems."""
    return [Text(where=problem.where, text=problem.text) for problem in file.problems]
