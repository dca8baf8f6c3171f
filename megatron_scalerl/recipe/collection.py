"""Reads several recipes at once: files and folders of whole recipes, and overlays that are merged into one base
recipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import OVERLAY, RecipeError, load_recipe, read_yaml
from megatron_scalerl.record import record

_REQUIRED_KEYS = ("name", "steps", "policy", "prompts")
"""Keys that every whole recipe has."""


@record
class RecipeFile:
    """A file with a whole recipe or with an overlay. Produced by `listed`."""

    name: str
    """Name of the file without folder and ending."""
    file: Path
    overlay: bool
    """Whether the file lacks keys of a whole recipe, and so is an overlay to merge into a base recipe."""


def listed(sources: Sequence[str | Path]) -> list[RecipeFile]:
    """A RecipeFile for each file in `sources`, and for each *.yaml file of a folder in `sources`.

    Raises RecipeError for a folder without recipes, and for two different files with the same name.
    """
    files: list[Path] = []
    for source in map(Path, sources):
        recipes = [source]
        if source.is_dir():
            recipes = sorted(source.glob("*.yaml"))
        if not recipes:
            raise RecipeError(f"{source}: the folder has no recipes (*.yaml)")
        # a file counts once, even if `sources` has both the file and the file's folder
        files += [
            file for file in recipes if file.absolute() not in {earlier_file.absolute() for earlier_file in files}
        ]
    files_by_name: dict[str, Path] = {}
    for file in files:
        if (earlier_file := files_by_name.setdefault(file.stem, file)) != file:
            raise RecipeError(f"{file}: {earlier_file} has the same name; rename one of the files")
    return [
        RecipeFile(name=name, file=file, overlay=not set(_REQUIRED_KEYS) <= read_yaml(file).keys())
        for name, file in files_by_name.items()
    ]


def resolve(item: RecipeFile, base: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The whole recipe of a file; an overlay is merged into `base`. Raises RecipeError, also for an overlay if `base`
    is None."""
    if not item.overlay:
        return load_recipe(item.file, overrides)
    if base is None:
        keys = [key for key in _REQUIRED_KEYS if key not in read_yaml(item.file)]
        raise RecipeError(
            f"{item.file}: this is an overlay (it lacks {', '.join(keys)}); name the recipe to which the "
            "overlay is applied with --base RECIPE"
        )
    return load_recipe(base, [f"{OVERLAY}={item.file}", *overrides])


def same_recipes(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Duplicate's name -> name of the first recipe whose settings are equal, except for name and output folder."""
    first: dict[str, str] = {}
    first_names = {name: first.setdefault(_text(recipe), name) for name, recipe in recipes.items()}
    return {name: first_name for name, first_name in first_names.items() if name != first_name}


def _text(recipe: Recipe) -> str:
    return recipe.model_dump_json(exclude={"name", "output_dir"})


def resolve_seeds(
    item: RecipeFile, base: str | Path | None, overrides: Sequence[str], seeds: Sequence[int]
) -> list[Recipe]:
    """Copies of the recipe, one for each seed, with the seed appended to the recipe's name. Raises as `resolve`."""
    name = resolve(item, base, overrides).name
    return [resolve(item, base, [*overrides, f"seed={seed}", f"name={name}_seed{seed}"]) for seed in seeds]
