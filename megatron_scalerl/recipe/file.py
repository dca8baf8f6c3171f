"""Reads recipe files, applies overrides, and reports errors in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.nearest import unknown_key
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.recipe.task_section import TaskSection

OLD_KEYS = {"advantages.normalise": "advantages.normalize"}
"""Old key path -> new key path. A recipe that uses an old one is rejected; the recipe.yaml of an old run is read."""


class RecipeError(ValueError):
    """A user error in a recipe: one line with file, key, what was expected and what was found."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a YAML recipe and apply `key.path=value` overrides.

    Raises `RecipeError` for a missing or invalid file, an unknown key (naming the nearest valid one), a wrong type,
    and settings that contradict each other.
    """
    path = Path(path)
    data = read_yaml(path)
    for item in overrides:
        _override(data, item)
    return _validated(data, path)


def load_run_recipe(run_dir: str | Path) -> Recipe:
    """The recipe of an existing run; raises as `load_recipe`, but accepts the keys of `OLD_KEYS`."""
    return _validated(read_run_recipe(run_dir), Path(run_dir) / "recipe.yaml")


def _validated(data: dict[str, Any], path: Path) -> Recipe:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_first_line(error)}") from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe with all defaults, as YAML that loads to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_run_recipe(run_dir: str | Path) -> dict[str, Any]:
    """The mapping in RUN/recipe.yaml, which an older version may have written: keys of `OLD_KEYS` are renamed.

    Raises `RecipeError` for a file that is missing or unreadable.
    """
    data = read_yaml(Path(run_dir) / "recipe.yaml")
    for old, new in OLD_KEYS.items():
        section, _, old_name = old.rpartition(".")
        new_name = new.removeprefix(f"{section}.")
        fields = data.get(section)
        if isinstance(fields, dict) and old_name in fields:
            data[section] = {new_name if key == old_name else key: value for key, value in fields.items()}
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `RecipeError` for a file that is missing, unreadable or not a mapping."""
    if not path.is_file():
        raise RecipeError(f"{path}: expected a recipe file, found {'a folder' if path.is_dir() else 'nothing'}")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: expected UTF-8, found {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise RecipeError(f"{path}: expected a readable file, found {error.strerror}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: {_yaml_problem(error)}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: expected a mapping of keys, found {type(data).__name__}")
    return data


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return f"{where}expected YAML, found {' '.join(str(getattr(error, 'problem', None) or error).split())}"


def _override(data: dict[str, Any], item: str) -> None:
    key, separator, text = item.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {item!r}: expected key.path=value")
    *parents, last = key.split(".")
    node = data
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise RecipeError(f"override {item!r}: expected a section, found a value at {name}")
    try:
        node[last] = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise RecipeError(f"override {item!r}: {_yaml_problem(error)}") from None


def _first_line(error: ValidationError) -> str:
    """Describe the first problem; unknown keys come first because they often cause the others."""
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        if key in OLD_KEYS:
            return f"expected a recipe key, found {key}; it was renamed to {OLD_KEYS[key]}{more}"
        return unknown_key(key, _keys_beside(key), expected="a recipe key") + more
    if first["type"] == "missing":
        return f"{key}: expected a value, found none{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return (f"{key}: " if key and not message.startswith(str(first["loc"][-1])) else "") + message + more
    return f"{key}: {message[0].lower() + message[1:]}, found {first['input']!r}{more}"


def valid_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every key path of the schema, sections included; NAME stands for a name that the recipe chooses."""
    for name, info in model.model_fields.items():
        yield prefix + name
        if info.annotation == PromptsSection.model_fields["tasks"].annotation:
            yield from valid_keys(TaskSection, f"{prefix}{name}.NAME.")
        for annotation in (info.annotation, *get_args(info.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from valid_keys(annotation, f"{prefix}{name}.")


def _keys_beside(key: str) -> list[str]:
    """The valid keys, with the name of the task that `key` belongs to, if any."""
    parts = key.split(".")
    name = parts[2] if parts[:2] == ["prompts", "tasks"] and len(parts) > 3 else None
    return [k if name is None else k.replace(".NAME.", f".{name}.") for k in valid_keys()]
