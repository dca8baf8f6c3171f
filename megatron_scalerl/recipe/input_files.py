"""Checks that the files that a recipe names exist, before heavy packages are imported."""

from __future__ import annotations

from pathlib import Path

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.tasks import tasks_of


def check_policy(recipe: Recipe) -> None:
    """Raises ValueError where policy.path is not a Hugging Face folder or policy.megatron_path is not a folder."""
    section = recipe.policy
    if not Path(section.path, "config.json").is_file():
        raise ValueError(f"policy.path: expected a Hugging Face folder with config.json, found {section.path}")
    if section.megatron_path is not None and not Path(section.megatron_path).is_dir():
        raise ValueError(
            "policy.megatron_path: expected the folder of a converted checkpoint (docs/checkpoints.md), "
            f"found {section.megatron_path}"
        )


def check_prompts(recipe: Recipe) -> None:
    """Raises ValueError where a file or folder with prompts does not exist."""
    for path in (path for task in tasks_of(recipe) for path in (task.prompts.path, task.prompts.held_out_path)):
        if path is not None and not Path(path).exists():
            raise ValueError(f"{path}: expected a prompts file or folder, found nothing")
