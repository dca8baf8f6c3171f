"""The section `prompts.tasks.NAME`: one task of a mixture. Its keys are those of `prompts` and `rewards`.

A key that is not set, or null, has the value of `prompts` or `rewards`: no default of its own stands here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_scalerl.recipe.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

TaskName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
"""Name of a task, in metrics and in the journal."""


class TaskSection(Section):
    """One task of a mixture."""

    path: str
    """Its training prompts, as prompts.path."""
    weight: PositiveFloat
    """Its share of the drawn prompts, relative to the other tasks'."""
    split: str | None = None
    """As prompts.split."""
    prompt_column: str | None = None
    """As prompts.prompt_column."""
    answer_column: str | None = None
    """As prompts.answer_column."""
    prompt_template: str | None = None
    """As prompts.prompt_template."""
    held_out_path: str | None = None
    """As prompts.held_out_path, which cannot be set for all tasks."""
    held_out: NonNegativeInt | Annotated[float, Field(gt=0, lt=1)] | None = None
    """As prompts.held_out, of this task's prompts."""
    verifier: str | None = None
    """As rewards.verifier. Every task has verifier processes of its own."""
    workers: PositiveInt | None = None
    """As rewards.workers, for this task."""
    cpu_s: PositiveFloat | None = None
    """As rewards.cpu_s."""
    timeout_s: PositiveFloat | None = None
    """As rewards.timeout_s."""
    memory_mb: PositiveInt | None = None
    """As rewards.memory_mb."""
    file_mb: NonNegativeInt | None = None
    """As rewards.file_mb."""
