"""Runs grouped by recipe: an arm is one recipe with its runs, which differ in their seed alone.

A run folder's recipe.yaml says what the run trained with; keys that its version did not have count with the value
that was in effect. `APART` are the settings that do not make another recipe: the seed, names and folders, the files
of task and policy, how long and how often is measured, limits of time. Where that would give one recipe two runs with
one seed, the files of task and policy tell them apart as well, and then names that end with the seed. A run whose arm
is known, as in a study, is of that arm. A run without a recipe is an arm of its own, unless its table has a column
for the seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_scalerl.fit.curve import Curve

START = ("policy.path", "policy.megatron_path", "prompts.path", "prompts.held_out_path", "prompts.tasks")
"""Settings that name the policy and the task that runs start with."""
APART = (
    *("name", "seed", "output_dir", "steps", "validation", "checkpoint", "forecast", "sft", "download", "cost"),
    *("policy.digest", "rewards.workers", "rollouts.decoders", "trainer.micro_batch_tokens"),
    "trainer.logit_workspace_mb",
    *("engine.host", "engine.port", "engine.min_engines"),
    *("engine.min_relative_rate", *START),
)
"""Settings, or sections, that differ between runs of one recipe; those ending in timeout_s or max_restarts, too."""
_SHOWN = 4
"""Differences that `differences` names."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One recipe and its runs."""

    name: str
    """The names of its runs without their seeds."""
    curves: tuple[Curve, ...]
    """By seed."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Key path -> value of what its runs trained with, without `APART`; empty if unknown."""
        return {key: value for key, value in (self.curves[0].recipe or {}).items() if not is_apart(key)}

    @property
    def start(self) -> frozenset[str]:
        """The policies and tasks that its runs began with, as text."""
        return frozenset(_start(curve) for curve in self.curves)


def arms_of(curves: Sequence[Curve]) -> list[Arm]:
    """The arms, in the order of their first runs; the runs of each by seed, those without one in their order."""
    groups: dict[str, list[Curve]] = {}
    for number, curve in enumerate(curves):
        groups.setdefault(_key(curve, number), []).append(curve)
    split: list[list[Curve]] = []
    for group in groups.values():
        seeds = [curve.seed for curve in group]
        if len(set(seeds)) == len(seeds):
            split.append(group)
            continue
        for alike in _split(group, _start):
            split += _split(alike, _stem) if _named_by_seed(alike) else [alike]
    order = {id(curve): number for number, curve in enumerate(curves)}
    split.sort(key=lambda group: min(order[id(curve)] for curve in group))
    arms = [
        Arm(name=_name(group), curves=tuple(sorted(group, key=lambda c: -1 if c.seed is None else c.seed)))
        for group in split
    ]
    return _with_unique_names(arms)


def _split(group: Sequence[Curve], key: Callable[[Curve], str]) -> list[list[Curve]]:
    parts: dict[str, list[Curve]] = {}
    for curve in group:
        parts.setdefault(key(curve), []).append(curve)
    return list(parts.values())


def _named_by_seed(group: Sequence[Curve]) -> bool:
    """Whether runs of one seed have names that say so, which makes what is before it an arm."""
    seeds = [curve.seed for curve in group]
    return len(set(seeds)) < len(seeds) and all(_stem(curve) not in ("", curve.name) for curve in group)


def shared_start(arms: Sequence[Arm]) -> bool:
    """Whether all runs began with the same policy and task, as far as their recipes say."""
    return len(frozenset().union(*(arm.start for arm in arms))) == 1


def differences(arm: Arm, reference: Arm) -> str:
    """What the recipe sets that the reference sets otherwise: `loss.name: dapo, ...`; empty if unknown."""
    own, other = arm.recipe, reference.recipe
    if not own or not other:
        return ""
    changed = [key for key in sorted(own.keys() | other.keys()) if own.get(key) != other.get(key)]
    shown = [f"{key}: {_text(own.get(key))}" for key in changed[:_SHOWN]]
    return ", ".join(shown + [f"and {len(changed) - _SHOWN} more"] * (len(changed) > _SHOWN))


def _key(curve: Curve, number: int) -> str:
    if curve.recipe is not None:
        if curve.arm is not None:
            return f"arm {curve.arm}"
        return _json({key: value for key, value in curve.recipe.items() if not is_apart(key)})
    return f"run {number}" if curve.arm is None else f"table {curve.source} {curve.arm}"


def is_apart(key: str) -> bool:
    """Whether runs that differ in this key of their recipe (a path, such as `trainer.world_size`) share a recipe."""
    return key.endswith(("timeout_s", "max_restarts")) or any(key == k or key.startswith(f"{k}.") for k in APART)


def _start(curve: Curve) -> str:
    if curve.recipe is None:
        return str(curve.source) if curve.arm is not None else ""
    return _json({k: v for k, v in curve.recipe.items() if any(k == s or k.startswith(f"{s}.") for s in START)})


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _text(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _name(group: Sequence[Curve]) -> str:
    if group[0].arm is not None:
        return group[0].arm
    said = "seed" if len(group) == 1 else "(?:seed|s)?"  # of one run, a number alone may be another one's
    stems = {_stem(curve, said) for curve in group}
    return stems.pop() if len(stems) == 1 and "" not in stems else group[0].name


def _stem(curve: Curve, said: str = "(?:seed|s)?") -> str:
    """The run's name without its seed."""
    return re.sub(rf"[-_/ ]*{said}[-_]?{curve.seed}$", "", curve.name)


def _with_unique_names(arms: list[Arm]) -> list[Arm]:
    names = [arm.name for arm in arms]
    return [
        arm if names.count(arm.name) == 1 else replace(arm, name=f"{arm.name} ({names[: n + 1].count(arm.name)})")
        for n, arm in enumerate(arms)
    ]
