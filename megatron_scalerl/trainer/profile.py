"""Traces of a rank's computation in single steps, for telemetry.profile_steps."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from megatron_scalerl.distributed.device import recorded_memory
from megatron_scalerl.recipe import Recipe

logger = logging.getLogger(__name__)


def profile_of(step: int, recipe: Recipe, run_dir: Path, rank: int) -> AbstractContextManager[None]:
    """A context around a step, which writes a trace if the recipe asks for a trace of that step."""
    if step not in recipe.telemetry.profile_steps:
        return nullcontext()
    return profiled(run_dir / "profile" / f"step_{step:06d}", f"rank_{rank}")


@contextmanager
def profiled(folder: Path, name: str) -> Iterator[None]:
    """Context that writes torch's trace to FOLDER/NAME.json.gz, and on GPUs the memory to FOLDER/NAME.memory.pickle.

    After an exception there is no trace, only the memory. A file that cannot be written is a line in the log.
    """
    with recorded_memory(folder / f"{name}.memory.pickle"), torch.profiler.profile(record_shapes=True) as trace:
        yield
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"{name}.json.gz"))
    except OSError as error:
        logger.warning("the profile of this step was not written: %s", error)
