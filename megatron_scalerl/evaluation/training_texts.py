"""The texts of training prompts, to compare with evaluation problems: of files, or of all tasks of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_scalerl.evaluation.contamination import Text
from megatron_scalerl.evaluation.problems import ProblemFile
from megatron_scalerl.prompts.sources import Row, read_rows
from megatron_scalerl.recipe.file import check_prompts, load_recipe
from megatron_scalerl.recipe.tasks import tasks_of

DEFAULT_COLUMN = "prompt"


def training_texts(source: str) -> Iterator[Text]:
    """The texts of `RECIPE.yaml` (the rows of every task's prompts.path), `FILE`, or `FILE:COLUMN`.

    The held-out rows of a recipe's file are among them. Raises ValueError for a missing file or column, and for a
    value that is no text.
    """
    if source.endswith((".yaml", ".yml")):
        recipe = load_recipe(source)
        check_prompts(recipe)
        for task in tasks_of(recipe):
            assert task.prompts.path is not None
            yield from _texts(task.prompts.path, task.prompts.prompt_column, task.prompts.split)
        return
    path, colon, column = source.rpartition(":")
    if not colon or Path(source).exists():
        path, column = source, DEFAULT_COLUMN
    yield from _texts(path, column, None)


def _texts(path: str, column: str, split: str | None) -> Iterator[Text]:
    for row in map(Row.readable, read_rows(path, (column,), split)):
        value = row.values[column]
        if not isinstance(value, str):
            raise ValueError(f"{row.where}: expected a text in {column!r}, found a {type(value).__name__}")
        yield Text(where=row.where, text=value)


def problem_texts(file: ProblemFile) -> list[Text]:
    """The texts of an evaluation file's problems."""
    return [Text(where=problem.where, text=problem.text) for problem in file.problems]
