"""The tasks of a recipe, each with its prompts and rewards resolved. A recipe with `prompts.path` has one."""

from megatron_scalerl.recipe.recipe import Recipe
from megatron_scalerl.recipe.sections import AUTO, PromptsSection, RewardsSection, TaskSection
from megatron_scalerl.record import record

AUDITS = {"math": "megatron_scalerl.rewards.audit:confirm_math"}
"""Verifier -> its second judge with validation.audit: auto, as `rewards.verifier` names a function."""


@record
class Task:
    """A task with its settings. Produced by `tasks_of`."""

    name: str
    """Empty: the one task of a recipe with `prompts.path`."""
    weight: float
    """Its share of the drawn prompts, relative to the other tasks'."""
    prompts: PromptsSection
    """The recipe's section with this task's settings; `path` is set."""
    rewards: RewardsSection
    """The recipe's section with this task's settings, and with the limits of the length penalty."""
    audit: str | None = None
    """The second judge, `module:function` (validation.audit); None: none."""
    episodes: bool = False
    """Whether an environment answers the policy."""

    @property
    def key(self) -> str:
        """Where the recipe has its prompts."""
        return f"prompts.tasks.{self.name}" if self.name else "prompts"


def tasks_of(recipe: Recipe) -> tuple[Task, ...]:
    """The tasks of a recipe, at least one, by name."""
    sections = recipe.prompts.tasks
    if not sections:
        # constructed without a check: a path may be missing where nothing is trained
        sections = {"": TaskSection.model_construct(path=recipe.prompts.path, weight=1.0)}
    return tuple(_task(recipe, name, sections[name]) for name in sorted(sections))


def _task(recipe: Recipe, name: str, section: TaskSection) -> Task:
    settings = section.model_dump(exclude_none=True)
    prompts = {key: value for key, value in settings.items() if key in PromptsSection.model_fields}
    rewards = {key: value for key, value in settings.items() if key in RewardsSection.model_fields}
    own_rewards = recipe.rewards.model_copy(update={"length_penalty": recipe.length_penalty, **rewards})
    audit = recipe.validation.audit
    if audit == AUTO:
        audit = AUDITS.get(own_rewards.verifier)
    return Task(
        name=name,
        weight=section.weight,
        prompts=recipe.prompts.model_copy(update={"tasks": None, **prompts}),
        rewards=own_rewards,
        audit=audit,
        episodes=recipe.environment.name is not None,
    )
