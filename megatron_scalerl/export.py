"""`megatron-scalerl export RUN --out DIR`: a run's newest checkpoint as a Hugging Face folder.

The checkpoint is read tensor by tensor, whatever layout it was trained in; no model is built.
"""

from __future__ import annotations

from pathlib import Path

from megatron_scalerl.checkpoints import commit
from megatron_scalerl.recipe.file import load_run_recipe


def export(run_dir: str | Path, out: str | Path) -> int:
    """Write the policy of the newest checkpoint to `out` and return its step.

    Raises ValueError if the run has no complete checkpoint or `out` exists.
    """
    run_dir = Path(run_dir)
    newest = commit.latest(run_dir / "checkpoints")
    if newest is None:
        raise ValueError(f"{run_dir / 'checkpoints'}: expected a checkpoint with its COMMIT file, found none")
    from megatron_scalerl.convert.to_hf import to_hf  # imports torch: only once there is something to export

    step: int = commit.read_commit(newest)["step"]
    to_hf(newest, out, like=load_run_recipe(run_dir).policy.path)
    return step
