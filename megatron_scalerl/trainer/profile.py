"""Profiles a rank's computation in the steps that telemetry.profile_steps names."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from megatron_scalerl.distributed.device import recorded_memory
from megatron_scalerl.recipe import Recipe

logger = logging.getLogger(__name__)


def profile_of(step: int, recipe: Recipe, run_dir: Path, rank: int) -> AbstractContextManager[None]:
    """Context for a step that writes the step's profile if telemetry.profile_steps contains `step`."""
    if step not in recipe.telemetry.profile_steps:
        return nullcontext()
    return profiled(run_dir / "profile" / f"step_{step:06d}", f"rank_{rank}")


@contextmanager
def profiled(folder: Path, name: str) -> Iterator[None]:
    """Context that writes torch's trace to FOLDER/NAME.json.gz.

    On GPUs the context also writes a record of memory allocations to FOLDER/NAME.memory.pickle, which is the only
    file after an exception. If a file cannot be written, the log gets a warning.
    """
    with recorded_memory(folder / f"{name}.memory.pickle"), torch.profiler.profile(record_shapes=True) as trace:
        yield
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"{name}.json.gz"))
    except OSError as error:
        logger.warning("the profile of this step was not written: %s", error)
