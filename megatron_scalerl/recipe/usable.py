"""The stored recipe of a run as page and report can use it: what is damaged in it hides nothing else of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_scalerl.recipe import Recipe

READ = (
    *("steps", "forecast.fit_from_steps", "policy.path", "advantages.normalize", "rewards.truncated"),
    *("filters.zero_variance", "loss.reduction"),
)
"""Keys that page and report read."""


def usable_recipe(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the recipe without what is wrong among `READ`, key -> what was expected and found there).

    recipe: as it is stored. A section of another type than a mapping is left out as a whole. What is missing is not
    wrong: an earlier version may have had no such key.
    """
    out, wrong = dict(recipe), {}
    for key in READ:
        section, _, name = key.rpartition(".")
        if section and section not in out:
            continue
        fields = out[section] if section else out
        if not isinstance(fields, Mapping):
            wrong[section] = f"expected a section, found {_shown(out.pop(section))}"
        elif name in fields and (expected := _unlike(key, fields[name])):
            wrong[key] = f"expected {expected}, found {_shown(fields[name])}"
            kept = {other: value for other, value in fields.items() if other != name}
            out = out | {section: kept} if section else kept
    return out, wrong


def damage_of(run_dir: Path, wrong: Mapping[str, str]) -> list[str]:
    """What `usable_recipe` found, one line for each key."""
    return [f"{run_dir / 'recipe.yaml'}: {key}: {text}" for key, text in wrong.items()]


def _unlike(key: str, value: Any) -> str:
    """What the recipe has there, if `value` is none of it."""
    model: Any = Recipe
    for name in key.split("."):
        model = model.model_fields[name].annotation
    try:
        TypeAdapter(model).validate_python(value, strict=True)
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Input should be ")
    return ""


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{type(value).__name__} {str(value)[:40]!a}"
