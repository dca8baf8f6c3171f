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
    rewards = recipe.rewards.model_copy(update={"length_penalty": recipe.length_penalty})
    if not sections:
        return (
            Task(
                name="",
                weight=1.0,
                prompts=recipe.prompts,
                rewards=rewards,
                audit=_audit_of(recipe, rewards),
                episodes=recipe.environment.name is not None,
            ),
        )
    return tuple(_task(recipe, rewards, name, sections[name]) for name in sorted(sections))


def _task(recipe: Recipe, shared: RewardsSection, name: str, section: TaskSection) -> Task:
    settings = section.model_dump(exclude_none=True)
    prompts = {key: value for key, value in settings.items() if key in PromptsSection.model_fields}
    rewards = {key: value for key, value in settings.items() if key in RewardsSection.model_fields}
    own_rewards = shared.model_copy(update=rewards)
    return Task(
        name=name,
        weight=section.weight,
        prompts=recipe.prompts.model_copy(update={"tasks": None, **prompts}),
        rewards=own_rewards,
        audit=_audit_of(recipe, own_rewards),
        episodes=recipe.environment.name is not None,
    )


def _audit_of(recipe: Recipe, rewards: RewardsSection) -> str | None:
    audit = recipe.validation.audit
    return AUDITS.get(rewards.verifier) if audit == AUTO else audit
