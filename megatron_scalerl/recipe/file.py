"""Reads recipe files with overlays and overrides. Every error is one line.

An overlay is a file with differences from a recipe, and so serves recipes of every size; recipes/ablations has some
overlays. `overlay=FILE` stands among the overrides: every command that takes a recipe takes overlays. The files that
a recipe names are looked for before heavy packages are imported.
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
"""The recipe files that list all keys, for error messages."""
OVERLAY = "overlay"
"""The override `overlay=FILE`, which is no key of a recipe, merges a file into the settings so far."""
_warn = functools.cache(logging.getLogger(__name__).warning)
"""Logs each text only once."""
_APPENDED = {"bool", "int", "float", "constrained-int", "constrained-float", "literal['auto']", "[key]"}


class RecipeError(ValueError):
    """A user's mistake in a recipe: one line with the file, the key and the fault of the value."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a YAML recipe and apply `key.path=value` and `overlay=FILE` overrides, in the order of the arguments.

    A section of an overlay is merged with the same section below; any other value replaces the value below. An
    overlay without `name` appends the name of the file, so that the run is another run, in another folder.

    Raises `RecipeError` for a missing or invalid file, an unknown key (naming the nearest key, if there is a near
    key), a wrong type, and settings that contradict each other.
    """
    path = Path(path)
    data = read_yaml(path)
    return _overridden(data, [path], overrides)


def load_recipe_for(
    policy: str | Path, path: str | Path | None = None, overrides: Iterable[str] = (), *, prompts: str = ""
) -> Recipe:
    """The recipe in `path`, a run's recipe.yaml for example, or the defaults, with `policy` as the policy's folder.

    Steps and training prompts are not needed; `prompts` replaces the training prompts. Raises as `load_recipe`.
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
    # a run's megatron_path holds the run's first weights, not those of `policy`, which contain the adapters
    reset_keys = {"megatron_path": None, "lora": None, "adapter": None}
    data["policy"] = data.get("policy", {}) | reset_keys | {"path": str(policy)}
    if "tasks" not in data.get("prompts", {}):
        data["prompts"] = {"path": prompts} | data.get("prompts", {})
    # the section algorithm belongs to the training alone
    return _overridden(data, files, overrides, without=("algorithm",))


def _overridden(
    data: dict[str, Any], files: Iterable[Path], overrides: Iterable[str], *, without: Sequence[str] = ()
) -> Recipe:
    """Build the recipe from `data`, read from `files`, after the overrides and without some of the sections."""
    files = list(files)
    for item in overrides:
        for section in ("environment", "algorithm"):
            # later overrides may set keys of the section
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
            _rename(data, f"override {item!r}")
    return validated({key: value for key, value in data.items() if key not in without}, files)


def merged(data: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested settings, section by section. A setting of `over` replaces that of `data`."""
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

    files: the files that `data` comes from, in the order of loading.
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
    # model_construct checks nothing, so keys without a default are missing here
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
    _rename(data, str(path))
    return data


def _rename(data: dict[str, Any], place: str) -> None:
    """Give settings of version 0.2 their present names, and log the changes in one line."""
    changes = ", ".join(rename_former(data))
    if changes:
        _warn(f"{place}: settings of version 0.2: {changes}")


def _parsed(text: str, place: str) -> Any:
    try:
        # PyYAML follows YAML 1.1, where 1e-6 is a text; pydantic turns such a text into a number
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{place}: {_yaml_problem(error)}") from None
    except ValueError as error:  # a date in month 13
        raise RecipeError(f"{place}: a value cannot be read: {error}") from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}: " if mark else ""
    return f"{place}not valid YAML: {' '.join(str(getattr(error, 'problem', None) or error).split())}"


def override(data: dict[str, Any], item: str) -> None:
    """Set the `key.path=value` of `item` in nested settings. Raises `RecipeError` for a text of another form."""
    key, separator, text = item.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {item!r}: write it as key.path=value")
    value = _parsed(text, f"override {item[:100]!r}")
    if re.fullmatch(r"algorithm|(prompts\.tasks\.\w+\.)?environment", key) and isinstance(value, str):
        key += ".name"
    *parents, last = key.split(".")
    # sections that no file states begin here; the schema refuses unknown sections later, naming the nearest key
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
    """Path of the value in the recipe, without the type or [key] that pydantic appends for unions and mappings."""
    return detail["loc"] if _APPENDED.isdisjoint(detail["loc"][-1:]) else detail["loc"][:-1]


def _line(key: str, first: ErrorDetails, problems: Sequence[ErrorDetails]) -> str:
    """The mistake in the value of a key. problems: pydantic's problems, for each member of a union."""
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
        # the check of a section names a key of the section, the check of a value does not
        separator = "." if isinstance(value, dict) else ": "
        # a check of the whole recipe has an empty key, so the line would begin with the separator
        return f"{key}{separator}{first['ctx']['error']}".removeprefix(".")
    if kind == "string_type" and value is None:
        return f"{key} is empty; for an empty text write {last}: '' in a file, \"{key}=''\" in a shell"
    # pydantic's demands, for each member of a union: "Input should be a valid integer"
    demands = [detail["msg"].partition("should ")[2] for detail in problems]
    return f"{key} is {_value_text(value)}; it should {' or '.join(demands)}"


def _value_text(value: Any) -> str:
    """A value in a recipe's notation, at most 60 characters."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)[:60]


def valid_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all keys of the schema, sections included. NAME stands for a key that the user chooses."""
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
    """Raises ValueError where a folder of the policy is missing, or is not of the expected kind."""
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
