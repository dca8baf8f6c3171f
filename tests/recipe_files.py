"""The recipe files of the project, and in what two recipes differ."""

from pathlib import Path

from megatron_scalerl.recipe import Recipe

ROOT = Path(__file__).parent.parent
OVERLAYS = ("ablations", "baselines", "course")
"""Folders of overlays, which are no whole recipes."""
SETTLED = {"chat_template": False, "think_start": "<think>", "think_end": "</think>"}
"""Settings of prompts that follow from the tokenizer, where no tokenizer is asked."""


def small_recipe(**sections):
    """A recipe with these sections; its policy and prompts are not there."""
    return Recipe.model_validate(
        {"name": "r", "steps": 1, "policy": {"path": "p"}, "prompts": {"path": "q", **SETTLED}} | sections
    )


def differences(one, other):
    """Key -> its value in `other`, where it is not that of `one`."""
    before, after = (dict(_flat(recipe.model_dump(mode="json"))) for recipe in (one, other))
    return {key: value for key, value in after.items() if key not in before or before[key] != value}


def _flat(data, prefix=""):
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
