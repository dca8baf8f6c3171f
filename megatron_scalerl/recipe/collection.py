"""Several recipes at once: files and folders of whole recipes, and of overlays that are laid over one base."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import OVERLAY, RecipeError, load_recipe, read_yaml
from megatron_scalerl.record import record

_WHOLE = ("name", "steps", "policy", "prompts")
"""Keys that every whole recipe has."""


@record
class RecipeFile:
    """A recipe file among several."""

    name: str
    """Its file's stem."""
    file: Path
    overlay: bool
    """Whether it is laid over the base."""


def listed(sources: Sequence[str | Path]) -> list[RecipeFile]:
    """The files among `sources`, and the files (*.yaml) of its folders, by name.

    Raises RecipeError for a folder without recipes, and for two files of one name.
    """
    files: list[Path] = []
    for source in map(Path, sources):
        recipes = [source]
        if source.is_dir():
            recipes = sorted(source.glob("*.yaml"))
        if not recipes:
            raise RecipeError(f"{source}: the folder has no recipes (*.yaml)")
        # a file that is named and also lies in a named folder counts once
        files += [file for file in recipes if file.absolute() not in {other.absolute() for other in files}]
    named: dict[str, Path] = {}
    for file in files:
        if (other := named.setdefault(file.stem, file)) != file:
            raise RecipeError(f"{file}: its name is that of {other} too; rename one of the files")
    return [
        RecipeFile(name=name, file=file, overlay=not set(_WHOLE) <= read_yaml(file).keys())
        for name, file in named.items()
    ]


def resolve(item: RecipeFile, base: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The whole recipe of a file: over `base` if it is an overlay. Raises RecipeError."""
    if not item.overlay:
        return load_recipe(item.file, overrides)
    if base is None:
        missing = [key for key in _WHOLE if key not in read_yaml(item.file)]
        raise RecipeError(
            f"{item.file}: this is an overlay, without {', '.join(missing)}; name the recipe that it is laid over "
            "with --base RECIPE"
        )
    return load_recipe(base, [f"{OVERLAY}={item.file}", *overrides])


def same_recipes(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Name -> an earlier name whose recipe is the same but for its name and folder."""
    first: dict[str, str] = {}
    named = {name: first.setdefault(_text(recipe), name) for name, recipe in recipes.items()}
    return {name: other for name, other in named.items() if name != other}


def _text(recipe: Recipe) -> str:
    return recipe.model_dump_json(exclude={"name", "output_dir"})


def resolve_seeds(
    item: RecipeFile, base: str | Path | None, overrides: Sequence[str], seeds: Sequence[int]
) -> list[Recipe]:
    """The recipe once for each seed, with the seed behind its name. Raises RecipeError."""
    name = resolve(item, base, overrides).name
    return [resolve(item, base, [*overrides, f"seed={seed}", f"name={name}_seed{seed}"]) for seed in seeds]
