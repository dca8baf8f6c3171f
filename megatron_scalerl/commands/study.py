"""`megatron-scalerl study RECIPES... --seeds N`: recipes with several seeds each, run one after another, compared.

DIR/recipes/NAME.yaml is the whole recipe of a run and DIR/runs/NAME its folder; NAME is RECIPE_seedN. `train` makes
each run, and `fit --compare` the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.recipe import Recipe

PROGRAM = (sys.executable, "-m", "megatron_scalerl", "train")
"""The command that makes a run; the recipe's file is appended."""
SHARED = ("policy.path", "policy.megatron_path", "prompts.", "validation.")
"""Keys, or beginnings of keys, of the settings that have to be equal in all recipes of a study."""
EPILOG = """examples:
  megatron-scalerl study recipes/ablations --base my_run.yaml --seeds 2 --reference scalerl
  megatron-scalerl study a.yaml b.yaml --seeds 3 --out runs/a_or_b          two whole recipes

The same command goes on with a study that was stopped; more recipes and more seeds may be added. At the end the
folder has comparison.json, study.html, and the figure curves.png. docs/ablations.md describes them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Run recipes with several seeds each, one run after another, and compare the recipes: which recipes change "
        "the ceiling or the efficiency of the fitted curve, and which differences the runs do not show."
    )
    parser.epilog = EPILOG
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="recipe or overlay (YAML), or a folder of both")
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="runs of each recipe (default: %(default)s)"
    )
    parser.add_argument(
        "--out", default="runs/study", metavar="DIR", help="folder of the study (default: %(default)s)"
    )
    parser.add_argument("--base", metavar="RECIPE", help="recipe that the overlays change")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[RECIPE:]key.path=value",
        help="setting of every recipe, or of RECIPE alone; overlay=FILE takes a file's settings; may be repeated",
    )
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="[RECIPE=]NAME",
        help="NAME: recipe with which all recipes, or RECIPE alone, are compared (default: the first); repeatable",
    )
    parser.add_argument(
        "--per-step",
        action="store_true",
        help="compare by optimizer steps; device-hours also depend on other work on the machine",
    )
    parser.add_argument(
        "--target", type=float, metavar="X", help="compare the compute at which recipes reach this pass rate (0 to 1)"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run the study to the end. Raises ValueError for wrong options or recipes, RuntimeError if a run failed."""
    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.commands.supervise import supervise
    from megatron_scalerl.controller.run_folder import END
    from megatron_scalerl.processes.signals import SAVED_CODE, SIGNALS
    from megatron_scalerl.recipe.file import dump_recipe

    recipes, duplicates = _recipes(arguments)
    for name, earlier_name in duplicates.items():
        console.print(f"{name}: it is the same recipe as {earlier_name} and is left out")
    files = {recipe.name: _file(recipe) for recipe in recipes}
    # All recipes are written before the first run: a stopped study goes on with the recipes of its start.
    for recipe in recipes:
        files[recipe.name].parent.mkdir(parents=True, exist_ok=True)
        write_durably(files[recipe.name], dump_recipe(recipe).encode())
    failed = []
    finished = []
    for recipe in recipes:
        ends = read_jsonl(recipe.run_dir / END)
        code = int(any(end.get("gave_up") for end in ends))
        if not ends:
            console.print(f"{recipe.name}: starts or resumes")
            code = supervise([*PROGRAM, str(files[recipe.name])], recipe.run_dir, restarts=0)
        if code == SAVED_CODE or code - 128 in SIGNALS:
            return code
        if code:
            failed.append(recipe.run_dir)
        else:
            finished.append(recipe.run_dir)
        console.print(f"{len(failed) + len(finished)} of {len(recipes)} runs have ended")
    try:
        if len(finished) > 1:
            _compare(arguments, finished, duplicates, console)
    except ValueError as error:
        if not failed:
            raise
        console.print(f"not compared: {error}")
    if failed:
        raise RuntimeError(
            f"{len(failed)} runs failed: {', '.join(map(str, failed))}; repeat the command to resume the runs that "
            "have not given up"
        )
    return 0


def _file(recipe: Recipe) -> Path:
    return Path(recipe.output_dir).parent / "recipes" / f"{recipe.name}.yaml"


def _compare(
    arguments: argparse.Namespace, folders: Sequence[Path], duplicates: Mapping[str, str], console: Console
) -> None:
    """Print and write the comparison of the runs by `fit --compare`. duplicates: name of a left-out recipe -> name of
    the equal recipe."""
    from megatron_scalerl.fit import command

    out = Path(arguments.out)
    words = [*map(str, folders), "--compare", "--json", str(out / "comparison.json")]
    words += ["--plot", str(out / "curves.png"), "--html", str(out / "study.html")]
    for text in arguments.reference:
        words += ["--reference", "=".join(duplicates.get(name, name) for name in text.split("="))]
    if arguments.per_step:
        words += ["--compute", "step"]
    if arguments.target is not None:
        words += ["--target", str(arguments.target)]
    # The words are parsed by `fit`, because the parser fills in the defaults of `fit`.
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args(words), console)


def _recipes(arguments: argparse.Namespace) -> tuple[list[Recipe], dict[str, str]]:
    """(recipes of all runs, seed by seed; name of a left-out recipe -> name of the equal recipe).

    Raises ValueError for recipes that cannot be run or compared.
    """
    from megatron_scalerl.recipe.collection import listed, resolve, same_recipes
    from megatron_scalerl.recipe.file import check_policy, check_prompts

    items = listed(arguments.recipes)
    names = [item.name for item in items]
    if arguments.seeds < 1:
        raise ValueError(f"--seeds: {arguments.seeds} is too few; take at least 1")
    settings = [text.partition("=")[0].rpartition(":")[0] for text in arguments.set]
    references = [name for text in arguments.reference for name in text.split("=")]
    for option, option_names in (("--set", settings), ("--reference", references)):
        unknown_names = sorted({name for name in option_names if name and name not in names})
        if unknown_names:
            raise ValueError(f"{option}: {unknown_names[0]} is none of the recipes {', '.join(names)}")
    arms = {}
    for item in items:
        overrides = [
            text.removeprefix(f"{name}:") for name, text in zip(settings, arguments.set) if name in ("", item.name)
        ]
        arms[item.name] = resolve(item, arguments.base, overrides).model_copy(update={"seed": 1})
    duplicates = same_recipes(arms)
    output_dir = str(Path(arguments.out) / "runs")
    recipes = [
        recipe.model_copy(update={"seed": seed, "name": f"{name}_seed{seed}", "output_dir": output_dir})
        # seeds are the outer loop: a study that is stopped early can still compare recipes within the finished seeds
        for seed in range(1, arguments.seeds + 1)
        for name, recipe in arms.items()
        if name not in duplicates
    ]
    check_policy(recipes[0])
    check_prompts(recipes[0])
    _check(recipes)
    return recipes, duplicates


def _check(recipes: Sequence[Recipe]) -> None:
    """Raise ValueError if runs cannot be compared, or if a run began with another recipe."""
    from megatron_scalerl.fit.inputs import differing
    from megatron_scalerl.recipe.file import read_yaml

    if recipes[0].validation.every_steps == 0:
        raise ValueError("validation.every_steps: 0 leaves nothing to compare; take at least 1")
    first = recipes[0].model_dump(mode="json")
    for recipe in recipes:
        settings = recipe.model_dump(mode="json")
        for key, was, now in differing(first, settings):
            if key.startswith(SHARED):
                raise ValueError(
                    f"{recipe.name}: {key} is {now!r}, but {was!r} in {recipes[0].name}; the recipes of a "
                    "study share policy, prompts and validation"
                )
        old_settings = settings
        if _file(recipe).exists():
            old_settings = read_yaml(_file(recipe))
        for key, was, now in differing(old_settings, settings):
            if key != "output_dir":
                raise ValueError(
                    f"{_file(recipe)}: {key} is {now!r}, but the run began with {was!r}; take another --out, or move "
                    "the run and this file away"
                )
