"""Runs grouped by recipe: an arm is one recipe with its runs, which differ in their seed alone.

A run folder's recipe.yaml says what the run trained with; keys that its version did not have count with the value
that was in effect. `APART` are the settings that do not make another recipe: the seed, names and folders, the files
of task and policy, how long and how often is measured, limits of time.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.formatting import shortened
from megatron_scalerl.record import record

START = ("policy.path", "policy.megatron_path", "prompts.path", "prompts.held_out_path", "prompts.tasks")
"""Settings that name the policy and the task that runs start with."""
APART = (
    *("name", "seed", "output_dir", "steps", "validation", "checkpoint", "forecast", "sft", "download", "cost"),
    *("policy.digest", "rewards.workers", "rewards.concurrency", "rollouts.decoders", "trainer.micro_batch_tokens"),
    "trainer.logit_workspace_mb",
    *("engine.host", "engine.port", "engine.min_engines"),
    *("engine.min_relative_rate", *START),
)
"""Settings, or sections, that differ between runs of one recipe; those ending in timeout_s or max_restarts, too."""
SEED_LABEL = "(?:seed|s)?"
"""Before the number of a seed in a run's name."""
MOST_SHOWN = 200
"""Characters of the longest text of `differences`."""


@record
class Arm:
    """A recipe and its runs."""

    name: str
    """The names of its runs without their seeds."""
    curves: tuple[Curve, ...]
    """By seed."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Key path -> value of what its runs trained with, without `APART`; empty if unknown."""
        return _recipe(self.curves[0])


def arms_of(curves: Sequence[Curve]) -> list[Arm]:
    """The arms, in the order of their first runs; the runs of each by seed, those without one in their order.

    A run whose arm is known, as in a study, is of that arm. Where one recipe has two runs with one seed, the files of
    task and policy tell them apart as well, and then names that end with the seed. A run without a recipe is an arm
    of its own, unless its table has a column for the seed.
    """
    groups = _split(_split(_split([curves], _key), _start, _repeats), _stem, _named_by_seed)
    arms = []
    for name, group in zip(numbered([_name(group) for group in groups]), groups):
        by_seed = sorted(group, key=lambda curve: -1 if curve.seed is None else curve.seed)
        arms.append(Arm(name=name, curves=tuple(by_seed)))
    return arms


def numbered(names: Sequence[str]) -> list[str]:
    """The names, with their number behind those that occur several times.

    >>> numbered(["a", "b", "a"])
    ['a (1)', 'b', 'a (2)']
    """
    return [n if names.count(n) == 1 else f"{n} ({names[: i + 1].count(n)})" for i, n in enumerate(names)]


def _split(
    groups: Sequence[Sequence[Curve]],
    key: Callable[[Curve], str],
    divisible: Callable[[Sequence[Curve]], bool] = bool,
) -> list[list[Curve]]:
    """The groups, with the divisible ones split by the key."""
    parts = defaultdict[Any, list[Curve]](list)
    for number, group in enumerate(groups):
        divide = divisible(group)
        for curve in group:
            parts[number, divide and key(curve)].append(curve)
    return list(parts.values())


def _repeats(group: Sequence[Curve]) -> bool:
    return len({curve.seed for curve in group}) < len(group)


def _named_by_seed(group: Sequence[Curve]) -> bool:
    """Whether runs of one seed have names that say so, which makes what is before it an arm."""
    return _repeats(group) and all(_stem(curve) not in ("", curve.name) for curve in group)


def differences(arm: Arm, reference: Arm) -> str:
    """Settings of the recipe that the reference has otherwise: `loss.name: dapo, ...`; empty if unknown."""
    recipe = arm.recipe
    other = reference.recipe
    if not recipe or not other:
        return ""
    changed = [key for key in sorted(recipe.keys() | other.keys()) if recipe.get(key) != other.get(key)]
    return shortened(", ".join(f"{key}: {_text(recipe.get(key))}" for key in changed), MOST_SHOWN)


def is_apart(key: str) -> bool:
    """Whether runs that differ in this key of their recipe (a path, such as `trainer.world_size`) share a recipe."""
    return key.endswith(("timeout_s", "max_restarts")) or _within(key, APART)


def _within(key: str, sections: Sequence[str]) -> bool:
    # the dots match whole words: `name` is no section of `names`
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def _recipe(curve: Curve) -> dict[str, Any]:
    return {key: value for key, value in (curve.recipe or {}).items() if not is_apart(key)}


def _key(curve: Curve) -> str:
    if curve.arm is None and curve.recipe is None:
        return f"run {curve.name}"
    if curve.arm is None:
        return _json(_recipe(curve))
    if curve.recipe is None:
        return f"table {curve.source} {curve.arm}"
    return f"arm {curve.arm}"


def _start(curve: Curve) -> str:
    if curve.recipe is not None:
        return _json({key: value for key, value in curve.recipe.items() if _within(key, START)})
    if curve.arm is None:
        return ""
    return str(curve.source)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _text(value: Any) -> str:
    if isinstance(value, bool | None):
        return str(value).lower()
    return str(value)


def _name(group: Sequence[Curve]) -> str:
    if group[0].arm is not None:
        return group[0].arm
    label = SEED_LABEL
    if len(group) == 1:  # of one run, a number alone may be another one's
        label = "seed"
    stems = {_stem(curve, label) for curve in group}
    if len(stems) > 1:
        return group[0].name
    return stems.pop() or group[0].name


def _stem(curve: Curve, label: str = SEED_LABEL) -> str:
    """The run's name without its seed."""
    return re.sub(rf"[-_/ ]*{label}[-_]?{curve.seed}$", "", curve.name)
