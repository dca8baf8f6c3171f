"""The limit on open files: each completion in flight is a connection, in the controller and in its engine."""

from __future__ import annotations

import resource

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.pool import default_workers

PER_COMPLETION = 2
"""Connections per slot: a validation may be in flight on every engine beside the training completions."""
PER_PROCESS = 8
"""Pipes, sockets and log of one child process, and the descriptors by which asyncio watches it."""
TARGET = 65536
"""The soft limit is raised to this if the hard limit allows. Beyond the run's own need, because unauthenticated
connections to the controller's socket count too, until libzmq drops them after 30 s."""
MARGIN = 1024
"""Files of the journal and of checkpoints, libraries, and the event loop."""


def files_needed(recipe: Recipe) -> int:
    """Open files that the controller of a run may need at once. Each engine needs fewer."""
    completions = PER_COMPLETION * recipe.engine.count * recipe.rollouts.max_in_flight
    workers = (recipe.rewards.workers or default_workers()) + (recipe.rollouts.decoders or default_workers())
    processes = recipe.engine.count + recipe.trainer.world_size + workers
    return completions + PER_PROCESS * processes + MARGIN


def allow_open_files(recipe: Recipe) -> None:
    """Raise the soft limit of this process to TARGET, or as far as allowed; its children inherit it.

    Raises ValueError if the hard limit is lower than the run's need.
    """
    needed = files_needed(recipe)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"open files: expected a hard limit of at least {needed} for engine.count {recipe.engine.count} x "
            f"rollouts.max_in_flight {recipe.rollouts.max_in_flight}, found {hard} (ulimit -Hn)"
        )
    target = max(needed, TARGET)
    if hard != resource.RLIM_INFINITY:
        target = min(target, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
