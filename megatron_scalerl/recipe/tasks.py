"""The tasks of a recipe, each with a copy of the recipe that has the task's settings.

A recipe with `prompts.path` has one task.
"""

from megatron_scalerl.recipe.recipe import Recipe
from megatron_scalerl.recipe.sections import AUTO, PromptsSection, RewardsSection
from megatron_scalerl.record import record

AUDITS = {"math": "megatron_scalerl.rewards.audit:confirm_math"}
"""Verifier -> second judge of accepted answers that validation.audit auto chooses, as `module:function`."""


@record
class Task:
    """A task of a recipe, with the settings that hold for the task. Produced by `tasks_of`."""

    name: str
    """Name of the task; empty: the only task of a recipe with `prompts.path`."""
    weight: float
    """The task's share of the drawn prompts, relative to other tasks' shares."""
    recipe: Recipe
    """The recipe with this task's settings, in which the defaults of the length penalty are filled in."""
    audit: str | None = None
    """The second judge, `module:function` (validation.audit); None: no second judge."""

    @property
    def prompts(self) -> PromptsSection:
        """The recipe's section `prompts` with this task's settings; `path` is set."""
        return self.recipe.prompts

    @property
    def rewards(self) -> RewardsSection:
        """The recipe's section `rewards` with this task's settings."""
        return self.recipe.rewards

    @property
    def episodes(self) -> bool:
        """Whether an environment answers the policy."""
        return self.recipe.environment.name is not None

    @property
    def key(self) -> str:
        """Key of the recipe's section that holds the task's prompts, for messages."""
        return f"prompts.tasks.{self.name}" if self.name else "prompts"


def tasks_of(recipe: Recipe) -> tuple[Task, ...]:
    """The tasks of a recipe in the order of the names. A recipe without prompts.tasks has one task, without a
    name."""
    sections = recipe.prompts.tasks
    if not sections:
        return (_task(recipe, "", 1.0),)
    return tuple(_task(recipe.of_task(name), name, sections[name].weight) for name in sorted(sections))


def _task(recipe: Recipe, name: str, weight: float) -> Task:
    audit = recipe.validation.audit
    if audit == AUTO:
        audit = AUDITS.get(recipe.rewards.verifier)
    recipe = recipe.with_settings(rewards={"length_penalty": recipe.length_penalty})
    return Task(name=name, weight=weight, recipe=recipe, audit=audit)
