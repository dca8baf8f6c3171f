"""`python -m megatron_scalerl export RUN --out DIR`: a run's newest checkpoint as a Hugging Face folder.

The checkpoint is resharded into one process on the CPU or GPU at hand, whatever layout it was trained in.
"""

from __future__ import annotations

from pathlib import Path

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe_file import load_recipe
from megatron_scalerl.trainer import checkpoint, commit
from megatron_scalerl.trainer.parallel import init_parallel, shutdown_parallel
from megatron_scalerl.trainer.step import make_trainer
from megatron_scalerl.weights.source import MegatronWeightSource, save_hf


def export(run_dir: str | Path, out: str | Path) -> int:
    """Write the policy of the newest checkpoint to `out` and return its step.

    Raises ValueError where the run has no whole checkpoint or `out` is something else already.
    """
    run_dir = Path(run_dir)
    newest = commit.latest(run_dir / "checkpoints")
    if newest is None:
        raise ValueError(f"{run_dir / 'checkpoints'}: expected a checkpoint with its COMMIT file, found none")
    recipe = _in_one_process(load_recipe(run_dir / "recipe.yaml"))
    parallel = init_parallel(recipe)
    try:
        trainer = make_trainer(recipe, parallel)
        checkpoint.load_policy(newest, trainer)
        save_hf(MegatronWeightSource(trainer.chunks, parallel), recipe.policy.path, out)
    finally:
        shutdown_parallel()
    return trainer.steps_made


def _in_one_process(recipe: Recipe) -> Recipe:
    trainer = recipe.trainer.model_copy(update={"world_size": 1})
    model = {k: v for k, v in recipe.megatron.model.items() if k != "sequence_parallel"}
    megatron = recipe.megatron.model_copy(update={"parallel": {}, "model": model})
    return recipe.model_copy(update={"trainer": trainer, "megatron": megatron})
