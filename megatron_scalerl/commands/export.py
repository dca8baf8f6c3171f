"""`megatron-scalerl export RUN --out DIR`: the newest checkpoint of a run as a Hugging Face or PEFT folder.

The checkpoint is read tensor by tensor, whatever the layout of the training; no model is built.
"""

import argparse
from pathlib import Path

from rich.console import Console

from megatron_scalerl.checkpoints import commit
from megatron_scalerl.recipe.file import load_run_recipe


def export(run_dir: Path, out: Path, *, merged: bool = False) -> int:
    """Write the policy of the newest checkpoint to `out` and return its step.

    merged: merge a run's adapters into the base weights. Raises ValueError if the run has no complete checkpoint or
    `out` exists.
    """
    newest = commit.latest(run_dir / "checkpoints")
    if newest is None:
        raise ValueError(
            f"{run_dir / 'checkpoints'}: no checkpoint is complete yet; a complete one has a COMMIT file"
        )
    # these modules import torch, so the check for a checkpoint comes before the import
    from megatron_scalerl.checkpoints.to_hf import to_hf
    from megatron_scalerl.checkpoints.to_peft import Adapted, to_merged, to_peft

    step: int = commit.read_commit(newest)["step"]
    policy = load_run_recipe(run_dir).policy
    if policy.lora is None:
        to_hf(newest, out, like=Path(policy.path))
    else:
        fields = policy.model_dump(include={"path", "dtype"}) | policy.lora.model_dump()
        write = to_merged if merged else to_peft
        write(newest, out, Adapted(**fields))
    return step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Write the policy of a run's newest checkpoint as a Hugging Face folder, which transformers and vLLM load. "
        "For a run with policy.lora, write the adapters as a PEFT folder."
    )
    parser.epilog = "example:\n  megatron-scalerl export runs/my_run --out models/trained"
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    parser.add_argument("--merged", action="store_true", help="write adapters merged into the policy's weights")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Export the policy. Raises ValueError if the run has no complete checkpoint or the output folder exists."""
    step = export(arguments.run_dir, arguments.out, merged=arguments.merged)
    console.print(f"{arguments.out}: wrote the policy of step {step}")
    return 0
