"""The limit on open files: each completion in flight is a connection, in the controller and in its engine."""

from __future__ import annotations

import resource

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.pool import default_workers

PER_COMPLETION = 2
"""A validation may be in flight on every engine beside the training completions."""
PER_PROCESS = 8
"""Pipes, sockets and log of one child process, and what asyncio keeps to watch it."""
PLENTY = 65536
"""What the soft limit is raised to where the hard limit allows it: connections that strangers leave open on the
controller's socket count too, until libzmq drops them after 30 s."""
MARGIN = 1024
"""The journal's and the checkpoints' files, libraries, and the event loop itself."""


def files_needed(recipe: Recipe) -> int:
    """Open files that the controller of a run may need at a time. Each of its engines needs fewer."""
    completions = PER_COMPLETION * recipe.engine.count * recipe.rollouts.max_in_flight
    processes = recipe.engine.count + recipe.trainer.world_size + (recipe.rewards.workers or default_workers())
    return completions + PER_PROCESS * processes + MARGIN


def allow_open_files(recipe: Recipe) -> None:
    """Raise this process's soft limit to PLENTY, or as far as allowed; its children inherit it.

    Raises ValueError where the hard limit is lower than what the run needs.
    """
    needed = files_needed(recipe)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"open files: expected a hard limit of at least {needed} for engine.count {recipe.engine.count} x "
            f"rollouts.max_in_flight {recipe.rollouts.max_in_flight}, found {hard} (ulimit -Hn)"
        )
    wanted = max(needed, PLENTY)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
