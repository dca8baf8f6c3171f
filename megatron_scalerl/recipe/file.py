"""Reads recipe files, lays others over them, applies overrides, and reports errors in one line.

An overlay is a file with differences from a recipe, such as those in recipes/ablations, so that it serves recipes of
every size. `overlay=FILE` stands among the overrides: every command that takes a recipe takes overlays.

Checks that the files that a recipe names exist, before heavy packages are imported.
"""

import os
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.hub import hint, local_recipe
from megatron_scalerl.recipe.other_names import setting_of, unknown_key
from megatron_scalerl.recipe.sections import PromptsSection, TaskSection
from megatron_scalerl.recipe.tasks import tasks_of

LISTED = "megatron_scalerl/recipe/sections.py and process_sections.py"
"""Where a user finds all keys."""

OVERLAY = "overlay"
"""Not a key of a recipe: the override `overlay=FILE` lays a file over what stands before it."""


class RecipeError(ValueError):
    """A user error in a recipe: one line with file, key, what was expected and what was found."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a YAML recipe and apply `key.path=value` and `overlay=FILE` overrides, in their order.

    A section of an overlay is merged with the one below it; any other value replaces the one below it. An overlay
    without `name` appends its file's: what it makes of a recipe is a run of its own, in a folder of its own.

    Raises `RecipeError` for a missing or invalid file, an unknown key (naming the one that was meant, if it is
    found), a wrong type, and settings that contradict each other.
    """
    path = Path(path)
    data = read_yaml(path)
    return _overridden(data, {path: data}, overrides)


def load_recipe_for(
    policy: str | Path, path: str | Path | None = None, overrides: Iterable[str] = (), *, prompts: str = ""
) -> Recipe:
    """The recipe in `path`, a run's recipe.yaml for example, or the defaults, with `policy` as the policy's folder.

    Steps and training prompts are not needed; `prompts` stands for theirs. Raises as `load_recipe`.
    """
    own = {} if path is None else read_yaml(Path(path))
    files = {} if path is None else {Path(path): own}
    data = {"name": "evaluation", "steps": 1, **own}
    for key in ("policy", "prompts"):
        if not isinstance(data.get(key, {}), dict):
            raise RecipeError(f"{path}: {key} is a section, but a value is given for it")
    data["policy"] = data.get("policy", {}) | {"path": str(policy), "megatron_path": None}
    if "tasks" not in data.get("prompts", {}):
        data["prompts"] = {"path": prompts} | data.get("prompts", {})
    return _overridden(data, files, overrides)


def _overridden(data: dict[str, Any], files: dict[Path, dict[str, Any]], overrides: Iterable[str]) -> Recipe:
    """files: those that `data` comes from."""
    files, data = dict(files), deepcopy(data)
    for item in overrides:
        key, _, value = item.partition("=")
        if key == OVERLAY:
            over = files[Path(value)] = read_yaml(Path(value))
            named = {} if "name" in over or "name" not in data else {"name": f"{data['name']}_{Path(value).stem}"}
            data = _merged(data, deepcopy(over) | named)
        else:
            _override(data, item)
    return validated(data, files)


def _merged(data: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    sections = {
        key: _merged(data[key], value)
        for key, value in over.items()
        if isinstance(value, dict) and isinstance(data.get(key), dict)
    }
    return data | over | sections


def load_run_recipe(run_dir: str | Path) -> Recipe:
    """The recipe of an existing run; raises as `load_recipe`."""
    data = read_yaml(Path(run_dir) / "recipe.yaml")
    return validated(data, {Path(run_dir) / "recipe.yaml": data})


def validated(data: dict[str, Any], files: dict[Path, dict[str, Any]]) -> Recipe:
    """The recipe of the sections in `data`. Raises `RecipeError`.

    files: those that `data` comes from, in their order; an error names the one or the ones that state its key.
    """
    try:
        return local_recipe(Recipe.model_validate(data))
    except ValidationError as error:
        stating = [path for path, own in files.items() if _states(own, _first(error)["loc"])] or list(files)[:1]
        if not isinstance(_first(error)["input"], dict):
            stating = stating[-1:]  # its value replaced the others
        where = " with ".join(map(str, stating))
        raise RecipeError(f"{where}: {_first_line(error)}" if where else _first_line(error)) from None


def _states(data: Any, loc: tuple[int | str, ...]) -> bool:
    for part in loc:
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe with all defaults, as YAML that loads to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_run_recipe(run_dir: str | Path) -> dict[str, Any]:
    """RUN/recipe.yaml with the defaults of keys that it lacks; nothing is validated.

    Raises `RecipeError` for a file that is missing or unreadable.
    """
    defaults = Recipe.model_construct().model_dump(mode="json", warnings=False)
    return _merged(defaults, read_yaml(Path(run_dir) / "recipe.yaml"))


def read_yaml(path: Path, kind: str = "a recipe file") -> dict[str, Any]:
    """The mapping in a YAML file. Raises `RecipeError` for a file that is missing, unreadable or not a mapping."""
    if not path.is_file():
        raise RecipeError(
            f"{path}: {'is a folder, not' if path.is_dir() else 'there is no such file; it should be'} {kind}"
        )
    try:
        text = path.read_text(encoding="utf8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    data = _parsed(text, str(path))
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise RecipeError(f"{path}: {what}; a recipe is a mapping of keys to values")
    return data


def _parsed(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: {_yaml_problem(error)}") from None
    except ValueError as error:  # a date in month 13
        raise RecipeError(f"{where}: invalid YAML value: {error}") from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return f"{where}not valid YAML: {' '.join(str(getattr(error, 'problem', None) or error).split())}"


def parsed_override(item: str) -> tuple[str, Any]:
    """(key, value) of `key.path=value`. Raises `RecipeError` for another text."""
    key, separator, text = item.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {item!r}: write it as key.path=value")
    return key, _parsed(text, f"override {item if len(item) <= 100 else item[:97] + '...'!r}") if text else None


def _override(data: dict[str, Any], item: str) -> None:
    key, value = parsed_override(item)
    *parents, last = key.split(".")
    node = data
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise RecipeError(f"override {item!r}: {name} is a value, not a section")
    node[last] = value


def _first(error: ValidationError) -> ErrorDetails:
    """The first problem; unknown keys come first because they often cause the others."""
    return min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")


def _first_line(error: ValidationError) -> str:
    first = _first(error)
    key = ".".join(str(part) for part in first["loc"])
    others = error.error_count() - 1
    more = f" (and {others} more error{'s' if others > 1 else ''})" if others else ""
    if first["type"] == "extra_forbidden":
        known, setting = _keys_beside(key), setting_of(key)
        return unknown_key(key, known, expected="a recipe key", setting=setting, listed=LISTED) + more
    if first["type"] == "missing":
        return f"{key}: is missing, and has no default{more}"
    if first["type"] == "string_type" and first["input"] is None:
        return f"{key}: has no value; an empty text is '' in a file, and \"{key}=''\" in a shell{more}"
    if first["type"] == "string_type" and isinstance(first["input"], list):
        return f"{key}: is a list, and takes one text; files of one kind belong into one folder{more}"
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


def node_copy(path: str) -> str:
    """The node's own copy of a folder, which the job made (`stage` of the site file), else the folder itself."""
    copy = Path(os.environ.get("MSRL_STAGED", ""), Path(path).name)
    source = Path(f"{copy}.from")
    found = source.is_absolute() and source.is_file() and source.read_text().startswith(f"{Path(path).absolute()}\n")
    return str(copy) if found else path


def check_policy(recipe: Recipe) -> None:
    """Raises ValueError where policy.path is not a Hugging Face folder or policy.megatron_path is not a folder."""
    section = recipe.policy
    if not Path(section.path, "config.json").is_file():
        raise ValueError(
            f"policy.path: {section.path} is not a Hugging Face folder: it has no config.json"
            + hint(section.path, "model")
        )
    if section.megatron_path is not None and not Path(section.megatron_path).is_dir():
        raise ValueError(
            f"policy.megatron_path: there is no folder {section.megatron_path}; `megatron-scalerl convert "
            "to-megatron` makes one (docs/checkpoints.md)"
        )


def check_prompts(recipe: Recipe) -> None:
    """Raises ValueError where a file or folder with prompts does not exist."""
    for path in (path for task in tasks_of(recipe) for path in (task.prompts.path, task.prompts.held_out_path)):
        if path is not None and not Path(path).exists():
            raise ValueError(f"{path}: there is no such file or folder of prompts" + hint(path, "dataset"))
