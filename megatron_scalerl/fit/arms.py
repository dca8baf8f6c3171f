"""Runs grouped by recipe: an arm is a recipe with its runs, which differ in the seed alone.

A run folder's recipe.yaml holds the settings of the run. A setting that an older version of the package did not have
yet, and so did not write, counts with the default of the present version. Runs of one recipe may differ in
`IGNORED_SETTINGS`: the seed, names and folders, the files of task and policy, the length of a run, the schedule of
validations, limits of time.
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
"""Settings with the paths of the policy that a run starts from, and of the prompts."""
IGNORED_SETTINGS = (
    *("name", "seed", "output_dir", "steps", "validation", "checkpoint", "forecast", "sft", "download", "cost"),
    *("policy.digest", "rewards.workers", "rewards.concurrency", "rollouts.decoders", "trainer.micro_batch_tokens"),
    "trainer.logit_workspace_mb",
    *("engine.host", "engine.port", "engine.min_engines"),
    *("engine.min_relative_rate", *START),
)
"""Settings and sections in which runs of one recipe may differ, besides keys ending in timeout_s or max_restarts."""
SEED_LABEL = "(?:seed|s)?"
"""Pattern of the word before the seed's number at the end of a run's name: `seed` in `dapo_seed1`, `s` in
`dapo_s1`."""
MAX_DIFFERENCES_LENGTH = 200
"""Largest number of characters of the text that `differences` returns."""


@record
class Arm:
    """A recipe with its runs."""

    name: str
    """The common name of the runs, without the seed."""
    curves: tuple[Curve, ...]
    """The runs, sorted by seed."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Key path -> value of the runs' settings, without `IGNORED_SETTINGS`; empty for runs without a
        recipe.yaml."""
        return _recipe(self.curves[0])


def arms_of(curves: Sequence[Curve]) -> list[Arm]:
    """Group runs into arms, in the order of the first run of each arm; an arm's runs are sorted by seed.

    A run with an arm's name (`Curve.arm`), such as a run of a study, belongs to the arm of this name. If two runs of
    one recipe share a seed, the recipe's runs are divided by the paths of policy and prompts (`START`). If two runs
    of a part still share a seed, this part is divided by the runs' names without the seed. A run without a recipe is
    a separate arm, unless the run's table has a column for the seed.
    """
    groups = _split(_split(_split([curves], _key), _start, _has_repeated_seed), _stem, _names_end_with_seed)
    arms = []
    for name, group in zip(numbered_names([_name(group) for group in groups]), groups):
        by_seed = sorted(group, key=lambda curve: -1 if curve.seed is None else curve.seed)
        arms.append(Arm(name=name, curves=tuple(by_seed)))
    return arms


def numbered_names(names: Sequence[str]) -> list[str]:
    """The names; a name that occurs several times gets a number.

    >>> numbered_names(["a", "b", "a"])
    ['a (1)', 'b', 'a (2)']
    """
    return [n if names.count(n) == 1 else f"{n} ({names[: i + 1].count(n)})" for i, n in enumerate(names)]


def _split(
    groups: Sequence[Sequence[Curve]],
    key: Callable[[Curve], str],
    divisible: Callable[[Sequence[Curve]], bool] = bool,
) -> list[list[Curve]]:
    """Split each group for which `divisible(group)` is true into groups of runs with equal `key(run)`, and keep all
    further groups as given."""
    parts = defaultdict[Any, list[Curve]](list)
    for number, group in enumerate(groups):
        divide = divisible(group)
        for curve in group:
            parts[number, divide and key(curve)].append(curve)
    return list(parts.values())


def _has_repeated_seed(group: Sequence[Curve]) -> bool:
    return len({curve.seed for curve in group}) < len(group)


def _names_end_with_seed(group: Sequence[Curve]) -> bool:
    """Whether two runs share a seed, and every name is a text and then the seed, so that the text can name an arm."""
    return _has_repeated_seed(group) and all(_stem(curve) not in ("", curve.name) for curve in group)


def differences(arm: Arm, reference: Arm) -> str:
    """The arm's settings that differ from the reference's, such as `loss.name: dapo`; empty if either arm has no
    recipe.yaml."""
    recipe = arm.recipe
    reference_recipe = reference.recipe
    if not recipe or not reference_recipe:
        return ""
    keys = sorted(recipe.keys() | reference_recipe.keys())
    changed_keys = [key for key in keys if recipe.get(key) != reference_recipe.get(key)]
    return shortened(", ".join(f"{key}: {_text(recipe.get(key))}" for key in changed_keys), MAX_DIFFERENCES_LENGTH)


def is_ignored_setting(key: str) -> bool:
    """Whether runs may differ in the setting `key` and still belong to one recipe, as with
    `trainer.micro_batch_tokens`."""
    return key.endswith(("timeout_s", "max_restarts")) or _within(key, IGNORED_SETTINGS)


def _within(key: str, sections: Sequence[str]) -> bool:
    # the dots are appended so that the section `name` contains the key `name.x`, and not the key `names`
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def _recipe(curve: Curve) -> dict[str, Any]:
    return {key: value for key, value in (curve.recipe or {}).items() if not is_ignored_setting(key)}


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
    if len(group) == 1:
        # a number that ends a single run's name may be something else than the seed, so the word seed is required
        label = "seed"
    stems = {_stem(curve, label) for curve in group}
    if len(stems) > 1:
        return group[0].name
    return stems.pop() or group[0].name


def _stem(curve: Curve, label: str = SEED_LABEL) -> str:
    """The run's name without the seed at the end: `dapo` for `dapo_seed1`. label: pattern of the word before the
    seed."""
    return re.sub(rf"[-_/ ]*{label}[-_]?{curve.seed}$", "", curve.name)
