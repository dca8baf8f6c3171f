"""Reads recipe files with overlays and overrides. Every error is one line.

An overlay is a file with changes to a recipe, and can be applied to many recipes; recipes/ablations has overlays.
Every command that takes a recipe and overrides also takes overlays, as the override `overlay=FILE`. `check_policy`
and `check_prompts` look for the files that a recipe names, and import no heavy package.
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
from megatron_scalerl.recipe.other_names import FORMER_KEYS, innermost, rename_former, setting_of, unknown_key
from megatron_scalerl.recipe.sections import section_of
from megatron_scalerl.recipe.tasks import tasks_of

LISTED = "megatron_scalerl/recipe/sections.py and process_sections.py"
"""The source files that declare all keys of a recipe, as named in error messages."""
OVERLAY = "overlay"
"""Name of the override `overlay=FILE`, which merges FILE into the settings that precede the override."""
_warn = functools.cache(logging.getLogger(__name__).warning)
"""Logs a warning, unless the same text was logged before."""
_APPENDED = {"bool", "int", "float", "constrained-int", "constrained-float", "literal['auto']", "[key]"}


class RecipeError(ValueError):
    """A user's mistake in a recipe: one line with the file, the key and the fault of the value."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a YAML recipe and apply `key.path=value` and `overlay=FILE` overrides, in the order of the arguments.

    A section of an overlay is merged into the recipe's section; any other value replaces the recipe's value. An
    overlay without `name` appends the overlay's file name to the run's name, so that the run has a folder of its own.

    Raises `RecipeError` for a missing or invalid file, an unknown key (naming the nearest key, if there is a near
    key), a wrong type, and settings that contradict each other.
    """
    path = Path(path)
    data = read_yaml(path)
    return _overridden(data, [path], overrides)


def load_recipe_for(
    policy: str | Path, path: str | Path | None = None, overrides: Iterable[str] = (), *, prompts: str = ""
) -> Recipe:
    """The recipe in `path`, such as a run's recipe.yaml, or without `path` the defaults, with policy.path set to
    `policy`.

    The file may lack `steps` and prompts.path; `prompts` is then the value of prompts.path. Raises as `load_recipe`.
    """
    files = []
    data: dict[str, Any] = {"name": "evaluation", "steps": 1}
    if path is not None:
        files.append(Path(path))
        data |= read_yaml(Path(path))
    for key in ("policy", "prompts"):
        if not isinstance(data.get(key, {}), dict):
            raise RecipeError(
                f"{path}: {key} is {_value_text(data[key])}; it has to be a section with keys and values"
            )
    # the folder `policy` has newer weights than a run's megatron_path, with the adapters merged: reset the keys
    reset_keys = {"megatron_path": None, "lora": None, "adapter": None}
    data["policy"] = data.get("policy", {}) | reset_keys | {"path": str(policy)}
    if "tasks" not in data.get("prompts", {}):
        data["prompts"] = {"path": prompts} | data.get("prompts", {})
    # only training reads the section `algorithm`
    return _overridden(data, files, overrides, without=("algorithm",))


def _overridden(
    data: dict[str, Any], files: Iterable[Path], overrides: Iterable[str], *, without: Sequence[str] = ()
) -> Recipe:
    """Apply the overrides to the settings `data`, drop the sections in `without`, and validate the result. files: the
    files from which `data` was read, for error messages."""
    files = list(files)
    for item in overrides:
        for section in ("environment", "algorithm"):
            # `algorithm: scalerl` becomes {name: scalerl}, because later overrides may set other keys of the section
            data[section] = section_of(data.get(section, {}))
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
            _rename(data, f"override {item!r}", replace=True)
    return validated({key: value for key, value in data.items() if key not in without}, files)


def merged(data: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge the sections of `over` into the sections of `data`. Where both have a value, the result has the value of
    `over`."""
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
    """The recipe with the sections in `data`. Raises `RecipeError`, in one line, if the schema refuses `data`.

    files: the files that `data` comes from, in the order of loading, for the error.
    """
    try:
        return local_recipe(Recipe.model_validate(data))
    except ValidationError as error:
        file_names = " with ".join(map(str, files))
        raise RecipeError(": ".join(filter(None, (file_names, _first_line(error))))) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe with all defaults, as YAML that loads to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_run_recipe(run_dir: str | Path) -> dict[str, Any]:
    """RUN/recipe.yaml with the defaults of missing keys; nothing is validated.

    Raises `RecipeError` for a file that is missing or unreadable.
    """
    # model_construct checks nothing, so `defaults` lacks the keys that have no default
    defaults = Recipe.model_construct().model_dump(mode="json", warnings=False)
    return merged(defaults, read_yaml(Path(run_dir) / "recipe.yaml"))


def read_yaml(path: Path, kind: str = "a recipe file") -> dict[str, Any]:
    """The mapping in a YAML file. Raises `RecipeError` for a file that is missing, unreadable or not a mapping."""
    if not path.is_file():
        state = "there is no such file; it should be"
        if path.is_dir():
            state = "this is a folder, not"
        raise RecipeError(f"{path}: {state} {kind}")
    try:
        text = path.read_text(encoding="utf8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: the file is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise RecipeError(f"{path}: the file cannot be read: {error.strerror}") from None
    data = _parsed(text, str(path))
    if not isinstance(data, dict):
        state = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise RecipeError(f"{path}: the file {state}; a file of keys and values is expected")
    _rename(data, str(path), replace=False)
    return data


def _rename(data: dict[str, Any], place: str, *, replace: bool) -> None:
    """Replace the settings of version 0.2 in `data`, and log all changes in one line that starts with `place`."""
    changes = ", ".join(rename_former(data, replace=replace))
    if changes:
        _warn(f"{place}: settings of version 0.2: {changes}")


def _parsed(text: str, place: str) -> Any:
    try:
        # PyYAML follows YAML 1.1, where 1e-6 is a text; pydantic turns such a text into a number
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{place}: {_yaml_problem(error)}") from None
    except ValueError as error:  # PyYAML's error for a date in month 13
        raise RecipeError(f"{place}: a value cannot be read: {error}") from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}: " if mark else ""
    return f"{place}not valid YAML: {' '.join(str(getattr(error, 'problem', None) or error).split())}"


def override(data: dict[str, Any], item: str) -> None:
    """Set the `key.path=value` of `item` in nested settings. Raises `RecipeError` if `item` is not of this form, the
    value is not YAML, or the path leads through a single value."""
    key, separator, text = item.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {item!r}: write it as key.path=value")
    value = _parsed(text, f"override {item[:100]!r}")
    if re.fullmatch(r"algorithm|(prompts\.tasks\.\w+\.)?environment", key) and isinstance(value, str):
        key += ".name"
    *parents, last = key.split(".")
    # a section that is not in `data` is created; the schema refuses unknown sections later, naming the nearest key
    node = data
    for name in parents:
        node[name] = section_of(node.get(name) or {}) if name == "environment" else node.get(name, {})
        node = node[name]
        if not isinstance(node, dict):
            raise RecipeError(f"override {item!r}: {name} is a single value, not a section with keys")
    node[last] = value


def _first_line(error: ValidationError) -> str:
    # unknown keys come first because an unknown key often causes other mistakes
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place = _place(first)
    problems = [detail for detail in error.errors() if _place(detail) == place]
    line = _line(".".join(map(str, place)), first, problems)
    further_mistakes = error.error_count() - len(problems)
    return f"{line} (the first of {further_mistakes + 1} mistakes)" if further_mistakes else line


def _place(detail: ErrorDetails) -> tuple[int | str, ...]:
    """Path (section, key ...) of the faulty value in the recipe, without the type or [key] that pydantic appends."""
    return detail["loc"] if _APPENDED.isdisjoint(detail["loc"][-1:]) else detail["loc"][:-1]


def _line(key: str, first: ErrorDetails, problems: Sequence[ErrorDetails]) -> str:
    """The error line about `key`. first: the problem to report; problems: pydantic's problems, one for each union
    member."""
    kind = first["type"]
    value = first["input"]
    last = key.rpartition(".")[2]
    if key in FORMER_KEYS:
        return f"{key} left with version 0.2: {FORMER_KEYS[key][1]}; delete the key"
    if kind == "extra_forbidden":
        valid = _keys_for(key)
        key = innermost(key, value, valid)
        return unknown_key(key, valid, expected="a recipe key", setting=setting_of(key), listed=LISTED)
    if kind == "missing":
        return f"{key} is missing; set a value, since the key has no default"
    if kind == "value_error":
        # the error of a section's validator starts with a key of the section, a value's error does not
        separator = "." if isinstance(value, dict) else ": "
        # `key` is empty for a validator of the whole recipe, so the line would begin with the separator
        return f"{key}{separator}{first['ctx']['error']}".removeprefix(".")
    if kind == "string_type" and value is None:
        return f"{key} is empty; for an empty text write {last}: '' in a file, \"{key}=''\" in a shell"
    # pydantic has one message for each member of a union, such as "Input should be a valid integer"
    demands = [detail["msg"].partition("should ")[2] for detail in problems]
    return f"{key} is {_value_text(value)}; it should {' or '.join(demands)}"


def _value_text(value: Any) -> str:
    """A value as written in a recipe file, cut to 60 characters, for error messages."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)[:60]


def valid_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all keys of the schema, sections included. NAME stands for a name that the user chooses,
    such as a task's."""
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
    """The valid keys of a recipe. If `key` belongs to a task or a teacher, the name replaces NAME in the keys."""
    section, _, name = key.rpartition(".")[0].rpartition(".")
    return [k.replace(f"{section}.NAME.", f"{section}.{name}.") for k in valid_keys()]


def check_policy(recipe: Recipe) -> None:
    """Raises ValueError if policy.path or policy.adapter has no configuration file, or policy.megatron_path is no
    folder."""
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
