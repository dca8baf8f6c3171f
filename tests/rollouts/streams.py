"""Rollout streams of small groups, and their prompts."""

from recipe_files import small_recipe

from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.stream import RolloutStream
from megatron_scalerl.types import Prompt


def prompts(count):
    return [Prompt(prompt_id=f"p{i:03d}", text=str(i), answer="0", token_ids=(1,)) for i in range(count)]


def make_stream(folder, *, k, engines, count=500, max_epochs=None, rollouts=(), **options):
    """A stream over `count` prompts, of three groups in a batch and four completions in a group."""
    sizes = {"groups_per_batch": 3, "group_size": 4, "max_in_flight": 8, "max_staleness_steps": k}
    return RolloutStream(
        small_recipe(seed=1, rollouts=sizes | dict(rollouts)),
        curriculum=Curriculum(prompts(count), 7, None, max_epochs),
        engines=engines if isinstance(engines, Membership) else Membership.of(engines),
        journal=Journal(folder),
        **options,
    )
