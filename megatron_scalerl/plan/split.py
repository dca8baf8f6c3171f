"""Which GPUs train and which generate: every split that fits is estimated, the best are simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron_scalerl.plan.hardware import Gpu
from megatron_scalerl.plan.simulate import Setting, Timing, simulate
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.parallel_layout import sizes_of

SIMULATED = 5
"""Splits that are simulated, the best by estimate."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """GPUs by role."""

    trainer: int
    engines: int
    """Number of engines; each has the recipe's devices_per_engine."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A split and its timing."""

    split: Split
    train_seconds: float
    timing: Timing


def recipe_split(recipe: Recipe) -> Split:
    """The split that the recipe itself states."""
    return Split(trainer=recipe.trainer.world_size, engines=recipe.engine.count)


def gpus_of(recipe: Recipe, split: Split) -> int:
    """GPUs of both roles together."""
    return split.trainer + split.engines * recipe.engine.devices_per_engine


def splits(recipe: Recipe, gpus: int, gpu: Gpu) -> Iterator[Split]:
    """Every split of `gpus`: the trainer a multiple of its model-parallel sizes and, where possible, whole nodes."""
    unit = math.lcm(*sizes_of(recipe.megatron.parallel).unit)
    if gpus >= 2 * gpu.per_node:
        unit = math.lcm(unit, gpu.per_node)
    each = recipe.engine.devices_per_engine
    for trainer in range(unit, gpus, unit):
        if (gpus - trainer) % each == 0:
            yield Split(trainer=trainer, engines=(gpus - trainer) // each)


def setting_of(recipe: Recipe, split: Split, base: Setting, train_seconds: float) -> Setting:
    """`base` for another split."""
    return replace(base, engines=split.engines, train_seconds=train_seconds)


def best_splits(recipe: Recipe, candidates: list[tuple[Split, float]], base: Setting) -> list[Simulated]:
    """The best of the candidates (split, train seconds), best first, simulated.

    Equal within a percent, the one with more engines wins: a trainer that waits is fresher than one that lags.
    """
    estimate = estimator(base)
    chosen = sorted(candidates, key=lambda c: estimate(c[0], c[1]))[:SIMULATED]
    found = [Simulated(split=s, train_seconds=t, timing=simulate(setting_of(recipe, s, base, t))) for s, t in chosen]
    return sorted(found, key=lambda x: (round(math.log(x.timing.step_seconds) * 100), -x.split.engines))


def estimator(base: Setting) -> Callable[[Split, float], float]:
    """(split, train seconds) -> seconds a step if the slower side never waits."""
    tokens = base.groups_per_batch * base.group_size * base.lengths.mean
    outstanding = (base.max_staleness_steps + 1) * base.groups_per_batch * base.group_size

    def seconds(split: Split, train_seconds: float) -> float:
        running = min(base.decoding.running, base.max_in_flight, max(1, outstanding // split.engines))
        generate = tokens / (split.engines * base.decoding.tokens_per_second(running))
        return max(train_seconds, generate) + base.publish_seconds

    return seconds
