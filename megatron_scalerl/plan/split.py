"""Splits of the GPUs into trainer and engines. Every split that fits is estimated, and the best are simulated."""

import math
from dataclasses import replace

from megatron_scalerl.plan.hardware import Gpu
from megatron_scalerl.plan.simulate import QueueSettings, Timing, simulate
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.parallel_layout import sizes_of
from megatron_scalerl.record import record

SIMULATED = 5
"""Number of splits that are simulated: the fastest by estimate."""


@record
class Split:
    """The numbers of trainer GPUs and of engines."""

    trainer: int
    engines: int
    """Number of engines; each has the recipe's devices_per_engine."""


@record
class Simulated:
    """A split and its timing."""

    split: Split
    train_seconds: float
    timing: Timing


def gpus_of(recipe: Recipe, split: Split) -> int:
    """GPUs of trainer and engines together."""
    if recipe.engine.colocate:
        return split.trainer
    return split.trainer + split.engines * recipe.engine.devices_per_engine + recipe.teacher_devices


def splits(recipe: Recipe, gpus: int, gpu: Gpu) -> list[Split]:
    """Every possible split of `gpus` GPUs.

    The trainer's GPUs are a multiple of the model-parallel sizes and, if possible, whole nodes. Raises ValueError if
    there is no split.
    """
    unit = math.lcm(*sizes_of(recipe.megatron.parallel).unit)
    # With several nodes, the trainer gets whole nodes.
    if gpus >= 2 * gpu.per_node:
        unit = math.lcm(unit, gpu.per_node)
    devices = recipe.engine.devices_per_engine
    sizes: list[tuple[int, int]] = []
    if not recipe.engine.colocate:
        free_gpus = gpus - recipe.teacher_devices
        sizes = [(trainer, free_gpus - trainer) for trainer in range(unit, free_gpus, unit)]
    elif gpus % unit == 0:
        sizes = [(gpus, gpus)]
    possible = [Split(trainer=ranks, engines=number // devices) for ranks, number in sizes if number % devices == 0]
    if not possible:
        raise ValueError(
            f"--gpus: {gpus} GPUs cannot be split into trainer ranks, in multiples of {unit}, and engines of "
            f"{devices} GPUs"
        )
    return possible


def queue_of(base: QueueSettings, split: Split, train_seconds: float) -> QueueSettings:
    """The settings with which `split` is simulated: `base` with the split's engines and seconds of training.

    If `base.takes_turns`, trainer and engine share a GPU, whose time the driver slices without MPS. So both slow
    down, and a step takes as long as training and generation together.
    """
    queue = replace(base, engines=split.engines, train_seconds=train_seconds)
    if not base.takes_turns:
        return queue
    generate = generate_seconds(base, split)
    turn_seconds = train_seconds + generate
    names = ("fixed_seconds", "per_completion_seconds", "prefill_seconds")
    slower = replace(
        base.decoding, **{name: getattr(base.decoding, name) * turn_seconds / generate for name in names}
    )
    return replace(queue, train_seconds=turn_seconds, decoding=slower)


def generate_seconds(base: QueueSettings, split: Split) -> float:
    """Seconds in which the engines generate a batch, if no engine ever waits for the trainer."""
    r = base.rollouts
    # The gate admits at most the completions of one batch and of `staleness_bound` further batches.
    outstanding = (r.staleness_bound + 1) * r.groups_per_batch * r.group_size
    running = min(base.decoding.running, r.max_in_flight, max(1, outstanding // split.engines))
    seconds = base.decoding.step_seconds(running) + base.lengths.waiting / base.lengths.mean
    return base.batch_tokens / (split.engines * (running / seconds))


def best_splits(candidates: list[tuple[Split, float]], base: QueueSettings) -> list[Simulated]:
    """Simulate the SIMULATED candidates that are fastest by estimate, and return the results, fastest first.

    candidates: (split, seconds of training in a step).

    Of splits equal within a percent, the split with more engines comes first, because a trainer that waits has
    fresher data.
    """
    chosen = sorted(candidates, key=lambda candidate: estimated_seconds(base, *candidate))[:SIMULATED]
    # A simulation takes much longer than an estimate, so only the best by estimate are simulated.
    simulated = [Simulated(split=s, train_seconds=t, timing=simulate(queue_of(base, s, t))) for s, t in chosen]
    return sorted(simulated, key=lambda x: (round(math.log(x.timing.step_seconds) * 100), -x.split.engines))


def estimated_seconds(base: QueueSettings, split: Split, train_seconds: float) -> float:
    """Estimated seconds of a step with its weight update.

    The slower of trainer and engines determines the time; if trainer and engines take turns, both times add up.
    """
    generate = generate_seconds(base, split)
    if base.rollouts.schedule == "ppo_off_policy" or base.takes_turns:
        return train_seconds + generate + base.publish_seconds / base.rollouts.batches_per_update
    return max(train_seconds, generate) + base.publish_seconds
