"""Reads recipe files, lays others over them, applies overrides, and reports errors in one line.

An overlay is a file with differences from a recipe, so that it serves recipes of every size; recipes/ablations has
some. `overlay=FILE` stands among the overrides: every command that takes a recipe takes overlays.

Checks that the files that a recipe names exist, before heavy packages are imported.
"""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_scalerl.models.adapters import CONFIG, refuse_adapter
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.hub import hint, local_recipe
from megatron_scalerl.recipe.other_names import innermost, setting_of, unknown_key
from megatron_scalerl.recipe.sections import section_of
from megatron_scalerl.recipe.tasks import tasks_of

LISTED = "megatron_scalerl/recipe/sections.py and process_sections.py"
"""Where a user finds all keys."""
OVERLAY = "overlay"
"""Not a key of a recipe: the override `overlay=FILE` lays a file over what stands before it."""
_warn = functools.cache(logging.getLogger(__name__).warning)
"""Says each text once."""
LEFT = {"weights.transaction": ("streamed", "engines are paused while an update is sent, and write it as it comes")}
"""A key that has left -> (its former default, which runs have in their recipes; what happens now)."""
_APPENDED = {"bool", "int", "float", "constrained-int", "constrained-float", "literal['auto']", "[key]"}


class RecipeError(ValueError):
    """A user's mistake in a recipe: one line with the file, the key and what is wrong with its value."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a YAML recipe and apply `key.path=value` and `overlay=FILE` overrides, in their order.

    A section of an overlay is merged with the one below it; any other value replaces the one below it. An overlay
    without `name` appends the name of its file, so that the run is another one, in another folder.

    Raises `RecipeError` for a missing or invalid file, an unknown key (naming the one that was meant, if it is
    found), a wrong type, and settings that contradict each other.
    """
    path = Path(path)
    data = read_yaml(path)
    return _overridden(data, [path], overrides)


def load_recipe_for(
    policy: str | Path, path: str | Path | None = None, overrides: Iterable[str] = (), *, prompts: str = ""
) -> Recipe:
    """The recipe in `path`, a run's recipe.yaml for example, or the defaults, with `policy` as the policy's folder.

    Steps and training prompts are not needed; `prompts` stands for theirs. Raises as `load_recipe`.
    """
    files = []
    data: dict[str, Any] = {"name": "evaluation", "steps": 1}
    if path is not None:
        files.append(Path(path))
        data |= read_yaml(Path(path))
    for key in ("policy", "prompts"):
        if not isinstance(data.get(key, {}), dict):
            raise RecipeError(f"{path}: {key} is {_shown(data[key])}; it has to be a section with keys and values")
    # a run's megatron_path holds the weights that it began with, not those of `policy`, which has its adapters merged
    begun = {"megatron_path": None, "lora": None, "adapter": None}
    data["policy"] = data.get("policy", {}) | begun | {"path": str(policy)}
    if "tasks" not in data.get("prompts", {}):
        data["prompts"] = {"path": prompts} | data.get("prompts", {})
    return _overridden(data, files, overrides, without=("algorithm",))  # of the training alone


def _overridden(
    data: dict[str, Any], files: Iterable[Path], overrides: Iterable[str], *, without: Sequence[str] = ()
) -> Recipe:
    """The recipe of `data`, which comes from `files`, after the overrides and without some of its sections."""
    files = list(files)
    for item in overrides:
        for section in ("environment", "algorithm"):
            data[section] = section_of(data.get(section, {}))  # its keys may follow
        key, _, value = item.partition("=")
        if key == OVERLAY:
            over = read_yaml(Path(value))
            files.append(Path(value))
            name = data.get("name")
            data = merged(data, over)
            if name is not None and "name" not in over:
                data["name"] = f"{name}_{Path(value).stem}"
        else:
            override(data, item)
    return validated({key: value for key, value in data.items() if key not in without}, files)


def merged(data: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Settings of which `over` replaces those that both have, section by section."""
    sections = {
        key: merged(data[key], value)
        for key, value in over.items()
        if isinstance(value, dict) and isinstance(data.get(key), dict)
    }
    return data | over | sections


def load_run_recipe(run_dir: str | Path) -> Recipe:
    """The recipe of an existing run; raises as `load_recipe`."""
    return load_recipe(Path(run_dir) / "recipe.yaml")


def validated(data: dict[str, Any], files: Iterable[Path]) -> Recipe:
    """The recipe of the sections in `data`. Raises `RecipeError`.

    files: the files that `data` comes from, in their order.
    """
    try:
        return local_recipe(Recipe.model_validate(data))
    except ValidationError as error:
        where = " with ".join(map(str, files))
        raise RecipeError(": ".join(filter(None, (where, _first_line(error))))) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe with all defaults, as YAML that loads to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_run_recipe(run_dir: str | Path) -> dict[str, Any]:
    """RUN/recipe.yaml with the defaults of keys that it lacks; nothing is validated.

    Raises `RecipeError` for a file that is missing or unreadable.
    """
    # constructed without a check: keys that have no default are missing here
    defaults = Recipe.model_construct().model_dump(mode="json", warnings=False)
    return merged(defaults, read_yaml(Path(run_dir) / "recipe.yaml"))


def read_yaml(path: Path, kind: str = "a recipe file") -> dict[str, Any]:
    """The mapping in a YAML file. Raises `RecipeError` for a file that is missing, unreadable or not a mapping."""
    if not path.is_file():
        what = "there is no such file; it should be"
        if path.is_dir():
            what = "this is a folder, not"
        raise RecipeError(f"{path}: {what} {kind}")
    try:
        text = path.read_text(encoding="utf8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: the file is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise RecipeError(f"{path}: the file cannot be read: {error.strerror}") from None
    data = _parsed(text, str(path))
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise RecipeError(f"{path}: the file {what}; it has to have keys with their values")
    rewards = data.get("rewards")
    # its name in 0.2, which runs have in their recipes
    if isinstance(rewards, dict) and "environment" in rewards and "variables" not in rewards:
        rewards["variables"] = rewards.pop("environment")
    for key, (default, now) in LEFT.items():
        section, name = key.split(".")
        settings = data.get(section)
        if isinstance(settings, dict) and settings.get(name) == default:
            _warn(f"{path}: {key} has left, and is ignored, since {default} was its default: {now}")
            del settings[name]
    return data


def _parsed(text: str, where: str) -> Any:
    try:
        # PyYAML follows YAML 1.1, where 1e-6 is a text; pydantic turns such a text into a number
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: {_yaml_problem(error)}") from None
    except ValueError as error:  # a date in month 13
        raise RecipeError(f"{where}: a value cannot be read: {error}") from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return f"{where}not valid YAML: {' '.join(str(getattr(error, 'problem', None) or error).split())}"


def override(data: dict[str, Any], item: str) -> None:
    """Set the `key.path=value` of `item` in nested settings. Raises `RecipeError` for a text that cannot be one."""
    key, separator, text = item.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {item!r}: write it as key.path=value")
    value = _parsed(text, f"override {item[:100]!r}")
    if re.fullmatch(r"algorithm|(prompts\.tasks\.\w+\.)?environment", key) and isinstance(value, str):
        key += ".name"
    *parents, last = key.split(".")
    # sections that no file states begin here; the schema refuses unknown ones later, by their nearest key
    node = data
    for name in parents:
        node[name] = section_of(node.get(name) or {}) if name == "environment" else node.get(name, {})
        node = node[name]
        if not isinstance(node, dict):
            raise RecipeError(f"override {item!r}: {name} is a value, not a section")
    node[last] = value


def _first_line(error: ValidationError) -> str:
    # unknown keys come first because they often cause the others
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place = _place(first)
    same = [problem for problem in error.errors() if _place(problem) == place]
    line = _line(".".join(map(str, place)), first, same)
    others = error.error_count() - len(same)
    return f"{line} (the first of {others + 1} mistakes)" if others else line


def _place(problem: ErrorDetails) -> tuple[int | str, ...]:
    """Where the value stands. pydantic appends the type for each member of a union, and [key] for a key."""
    return problem["loc"] if _APPENDED.isdisjoint(problem["loc"][-1:]) else problem["loc"][:-1]


def _line(key: str, first: ErrorDetails, same: Sequence[ErrorDetails]) -> str:
    """The mistake in the value of a key. same: its problems, one for each member of a union."""
    kind = first["type"]
    value = first["input"]
    last = key.rpartition(".")[2]
    if key in LEFT:
        return f"{key} has left: {LEFT[key][1]}; delete it"
    if kind == "extra_forbidden":
        valid = _keys_for(key)
        key = innermost(key, value, valid)
        return unknown_key(key, valid, expected="a recipe key", setting=setting_of(key), listed=LISTED)
    if kind == "missing":
        return f"{key} is missing; it has no default"
    if kind == "value_error":
        # the check of a section names a key of it, the check of a value does not
        separator = "." if isinstance(value, dict) else ": "
        # a check of the whole recipe has an empty key, so its line would begin with the separator
        return f"{key}{separator}{first['ctx']['error']}".removeprefix(".")
    if kind == "string_type" and value is None:
        return f"{key} is empty; for an empty text write {last}: '' in a file, \"{key}=''\" in a shell"
    # pydantic's demands, one for each member of a union: "Input should be a valid integer"
    demands = [problem["msg"].partition("should ")[2] for problem in same]
    return f"{key} is {_shown(value)}; it should {' or '.join(demands)}"


def _shown(value: Any) -> str:
    """A value as a recipe has it, at most 60 characters of it."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)[:60]


def valid_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """The paths of all keys of the schema, sections included; NAME stands for a name that the recipe chooses."""
    for name, info in model.model_fields.items():
        yield prefix + name
        kinds: tuple[Any, ...] = (info.annotation,)
        if get_origin(info.annotation) is not dict:
            kinds += get_args(info.annotation)
        for annotation in kinds:
            part = f"{prefix}{name}."
            if get_origin(annotation) is dict:
                annotation = get_args(annotation)[1]
                part += "NAME."
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from valid_keys(annotation, part)


def _keys_for(key: str) -> list[str]:
    """The valid keys, with the name of the task or teacher that `key` belongs to, if any."""
    section, _, name = key.rpartition(".")[0].rpartition(".")
    return [k.replace(f"{section}.NAME.", f"{section}.{name}.") for k in valid_keys()]


def check_policy(recipe: Recipe) -> None:
    """Raises ValueError where a folder of the policy is missing, or holds something else."""
    section = recipe.policy
    refuse_adapter(section.path)
    if not Path(section.path, "config.json").is_file():
        raise ValueError(
            f"policy.path: {section.path} is not a Hugging Face folder: it has no config.json"
            + hint(section.path, "model")
        )
    if section.megatron_path is not None and not Path(section.megatron_path).is_dir():
        raise ValueError(
            f"policy.megatron_path: the folder {section.megatron_path} does not exist; `megatron-scalerl convert "
            "to-megatron` makes one (docs/checkpoints.md)"
        )
    if section.adapter is not None and not Path(section.adapter, CONFIG).is_file():
        raise ValueError(f"policy.adapter: {section.adapter} is not a PEFT folder: it has no {CONFIG}")


def check_prompts(recipe: Recipe) -> None:
    """Raises ValueError where a file or folder with prompts does not exist."""
    for path in (path for task in tasks_of(recipe) for path in (task.prompts.path, task.prompts.held_out_path)):
        if path is not None and not Path(path).exists():
            raise ValueError(f"{path}: there is no such file or folder of prompts" + hint(path, "dataset"))
