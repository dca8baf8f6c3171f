"""Recipes in the files of earlier versions, with the keys of this one, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import renamed
from megatron_scalerl.recipe.sections import PromptsSection, TaskSection

MISSING = {
    "interruption.after_natural_end": "answer_tokens",
    "sft.add_eos": False,
    "validation.fresh_seeds": False,
}
"""Key path -> the value that runs had in effect before the key existed, where it is not the default."""


def completed(data: Mapping[str, Any]) -> dict[str, Any]:
    """A stored recipe with all keys of this version: `OLD_KEYS` renamed, missing ones as they were in effect.

    Nothing is validated; an unknown key stays.
    """
    return _filled(renamed(data), Recipe, "")


def _filled(data: Mapping[str, Any], model: type[BaseModel], prefix: str) -> dict[str, Any]:
    out, defaults = dict(data), model.model_construct().model_dump(mode="json", warnings=False)
    for name, info in model.model_fields.items():
        key = prefix + name
        types = (info.annotation, *get_args(info.annotation))
        section = next((t for t in types if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if section is info.annotation is not None:
            out.setdefault(name, {})
        elif name in defaults:
            out.setdefault(name, MISSING.get(key, defaults[name]))
        value = out.get(name)
        if isinstance(value, Mapping) and section is not None:
            out[name] = _filled(value, section, f"{key}.")
        elif isinstance(value, Mapping) and info is PromptsSection.model_fields.get("tasks"):
            out[name] = {task: _filled(own, TaskSection, "") for task, own in value.items()}
    return out
