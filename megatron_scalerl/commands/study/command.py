"""`megatron-scalerl study RECIPES... --seeds N`: recipes with several seeds each, run one after another, compared."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.commands.study.folder import PlannedRun, StudyFolder
    from megatron_scalerl.commands.study.results import Results
    from megatron_scalerl.commands.study.runner import Runner
    from megatron_scalerl.commands.study.warm_start import WarmStart
    from megatron_scalerl.recipe.collection import Listed

EPILOG = """examples:
  megatron-scalerl study recipes/ablations recipes/baselines --seeds 3      on the tiny task, from its warm start on
  megatron-scalerl study recipes/ablations --base my_run.yaml --seeds 2     on your own task
  megatron-scalerl study a.yaml b.yaml --seeds 3 --out runs/a_or_b          two whole recipes
  megatron-scalerl study recipes/ablations --reference no_fp32_logits=scalerl_bf16

The same command goes on with a study that was stopped; more recipes and more seeds may be added. After every run the
folder has table.md, comparison.json, study.png, curves.png and study.html. docs/ablations.md."""

TINY_BASE = Path(__file__).parents[2] / "recipes" / "tiny_cpu.yaml"
"""What overlays are laid over by default."""
PIPE_WIDTH = 200
"""Columns of a table that is not printed to a terminal."""


_FILES = {"path": True, "held_out_path": True, "megatron_path": True}
_NOT_COMPARED: Any = {
    **dict.fromkeys(("name", "seed", "output_dir", "sft"), True),
    **dict.fromkeys(("policy", "prompts"), _FILES),
}
"""Settings that are the study's, or name files."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What a study runs."""

    runs: Sequence[PlannedRun]
    """In their order."""
    same: Mapping[str, str]
    """Recipe that is left out -> the one that it is the same as."""
    references: Sequence[str]
    """As in `fit.compare.compare_runs`, that of all last."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Run recipes with several seeds each, one run after another, and compare the recipes: which one moves the "
        "ceiling, which one the efficiency, and what cannot be told apart."
    )
    parser.epilog = EPILOG
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="recipe, overlay, or a folder of them")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (default: %(default)s)")
    parser.add_argument("--out", default="runs/study", metavar="DIR", help="folder (default: %(default)s)")
    parser.add_argument("--base", metavar="RECIPE", help="what overlays are laid over (default: the tiny task)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[RECIPE:]key.path=value",
        help="setting of every recipe, or of RECIPE alone; overlay=FILE, too; may be repeated",
    )
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="[RECIPE=]NAME",
        help="recipe that the others, or RECIPE alone, are compared with (default: the one that changes nothing)",
    )
    parser.add_argument(
        "--per-step",
        action="store_true",
        help="compare by optimizer steps in place of device-hours, which other work on the machine changes",
    )
    parser.add_argument("--target", type=float, metavar="X", help="pass rate whose compute is compared")
    parser.add_argument(
        "--warm-start", metavar="DIR", help="Hugging Face folder that the base's section sft trains before all runs"
    )
    parser.add_argument(
        "--cache", default="runs/warm_starts", metavar="DIR", help="what is made once (default: %(default)s)"
    )
    parser.add_argument("--redo", action="store_true", help="run changed recipes again; their runs are moved away")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run the study until it ends. Raises ValueError for user errors, RuntimeError where a run failed."""
    from megatron_scalerl.commands.study.folder import StudyFolder
    from megatron_scalerl.commands.study.runner import Runner
    from megatron_scalerl.processes.signals import run_until_signal
    from megatron_scalerl.recipe.collection import listed

    items = listed(arguments.recipes)
    _check(arguments, [item.name for item in items])
    start = _warm_start(arguments, items)
    plan = _planned(arguments, items, start, Path(arguments.out))  # mistakes, before a file is written
    if start is None:
        _check_files(plan.runs)
    study = StudyFolder(arguments.out)
    try:
        runner = Runner(study, console, verbose=arguments.verbose)
        run_until_signal(_study(arguments, items, start, study, runner, console))
    finally:
        study.close()
    return 0


async def _study(
    arguments: argparse.Namespace,
    items: Sequence[Listed],
    start: WarmStart | None,
    study: StudyFolder,
    runner: Runner,
    console: Console,
) -> None:
    from megatron_scalerl.commands.study.folder import lock
    from megatron_scalerl.commands.study.results import PAGE, Results
    from megatron_scalerl.commands.study.warm_start import begin

    async with runner.handling_save_signal():
        plan = _planned(arguments, items, start, study.path)
        runs = plan.runs
        for name, other in plan.same.items():
            console.print(f"{name}: the same recipe as {other} here; left out", highlight=False)
        if start is not None and start.missing:
            begin(start)
            cache = lock(start.folder / "lock")
            try:
                await runner.warm_start(start)
            finally:
                os.close(cache)
        _check_files(runs)
        for name in study.begin(runs, redo=arguments.redo):
            console.print(
                f"{name}: changed, runs again; the earlier run is in {study.path / 'replaced'}", highlight=False
            )
        results = Results(
            study, plan.references, pass_rate=arguments.target, per_step=arguments.per_step, same=plan.same
        )
        failed = await runner.runs(runs, lambda: _write_so_far(results, console, len(runs)))
        problem = _write(results, console, len(runs), final=True)
    if problem is None:
        console.print(f"results: {study.path / PAGE}", highlight=False)
    problems = [] if problem is None else [f"the results are not written: {problem}"]
    if failed:
        named = ", ".join(f"{run.name} (log: {run.log})" for run in failed)
        problems.append(f"{len(failed)} of {len(runs)} runs failed: {named}; the same command goes on with them")
    if problems:
        raise RuntimeError("; ".join(problems))


def _write_so_far(results: Results, console: Console, planned: int) -> None:
    """Write what is known. What cannot be written yet does not end the study."""
    if (problem := _write(results, console, planned)) is not None:
        console.print(f"the results are not written: {problem}", highlight=False)


def _write(results: Results, console: Console, planned: int, *, final: bool = False) -> str | None:
    """Write what is known, and print it at the end; returns what prevents it, in one line."""
    from megatron_scalerl.fit.compare import conclusions, summary
    from megatron_scalerl.fit.tables import comparison_table

    try:
        comparison = results.write(planned=planned)
    except (ValueError, ArithmeticError, RuntimeError, OSError) as error:
        return " ".join(str(error).split())
    if final and comparison is not None:
        console.print(comparison_table(comparison).rich(), width=None if console.is_terminal else PIPE_WIDTH)
        for line in (*conclusions(comparison), *(summary(comparison, arm) for arm in comparison.arms)):
            console.print(line, highlight=False)
    return None


def _check_files(runs: Sequence[PlannedRun]) -> None:
    """Raises ValueError where the policy or the prompts that all runs share do not exist."""
    from megatron_scalerl.recipe.file import check_policy, check_prompts

    check_policy(runs[0].recipe)
    check_prompts(runs[0].recipe)


def _settings(arguments: argparse.Namespace, recipe: str | None = None) -> list[str]:
    """--set: what is for all, then what is for `recipe` alone."""
    parts = [(*text.partition("=")[0].rpartition(":")[::2], text) for text in arguments.set]
    own = [text.removeprefix(f"{name}:") for name, _, text in parts if name and name == recipe]
    return [*(text for name, _, text in parts if not name), *own]


def _check(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises ValueError for options that contradict each other. names: of the recipes."""
    if arguments.seeds < 1:
        raise ValueError(f"--seeds: expected at least 1, found {arguments.seeds}")
    if arguments.target is not None and not 0.0 < arguments.target < 1.0:
        raise ValueError(f"--target: expected a pass rate in (0, 1), found {arguments.target:g}")
    for text in arguments.set:
        name, colon, _ = text.partition("=")[0].partition(":")
        if colon and name not in names:
            raise ValueError(f"--set: expected one of {', '.join(names)} before the colon, found {name!r}")
    if arguments.warm_start and not arguments.base:
        raise ValueError("--warm-start requires --base: the warm start uses its section sft")


def _base(arguments: argparse.Namespace, items: Sequence[Listed]) -> Path | None:
    """What overlays are laid over; None where there is no overlay and no --base. Raises ValueError."""
    if arguments.base:
        return Path(arguments.base)
    if not any(item.overlay for item in items):
        return None
    if not TINY_BASE.is_file():
        raise ValueError(f"--base: expected the recipe that overlays are laid over, found none, nor {TINY_BASE}")
    return TINY_BASE


def _warm_start(arguments: argparse.Namespace, items: Sequence[Listed]) -> WarmStart | None:
    """What has to be made for all runs; None if every recipe's policy is there."""
    from megatron_scalerl.commands.study.warm_start import tiny_warm_start, warm_start

    base, cache, settings = _base(arguments, items), Path(arguments.cache), _settings(arguments)
    if base is not None and not arguments.base:
        return tiny_warm_start(base, cache, settings)
    if base is not None and arguments.warm_start:
        return warm_start(base, Path(arguments.warm_start), cache, settings)
    return None


def _planned(arguments: argparse.Namespace, items: Sequence[Listed], start: WarmStart | None, folder: Path) -> _Plan:
    """All runs: seed by seed, so that recipes are compared within seeds at any time, the reference first."""
    from megatron_scalerl.commands.study.folder import check_shared, check_validated, planned
    from megatron_scalerl.recipe.collection import resolve, same_recipes

    made = start.overrides if start is not None else ()
    base = _base(arguments, items)
    recipes = {item.name: resolve(item, base, [*_settings(arguments, item.name), *made]) for item in items}
    first = {name: planned(folder, name, recipe.model_copy(update={"seed": 1})) for name, recipe in recipes.items()}
    begun = sorted(first, key=lambda name: not first[name].file.exists())  # what has runs is what stays
    same = same_recipes({name: first[name].recipe for name in begun})
    runs = [
        planned(folder, name, recipe.model_copy(update={"seed": seed}))
        for seed in range(1, arguments.seeds + 1)
        for name, recipe in recipes.items()
        if name not in same
    ]
    check_shared(runs)
    check_validated(runs)
    references = _references(arguments, items, runs, same)
    runs.sort(key=lambda run: (run.seed, run.arm != references[-1]))
    return _Plan(runs=runs, same=same, references=references)


def _references(
    arguments: argparse.Namespace, items: Sequence[Listed], runs: Sequence[PlannedRun], same: Mapping[str, str]
) -> list[str]:
    """--reference, with the reference of all as its last one. Raises ValueError for the name of no recipe.

    same: recipe that is left out -> the one that stands for it.
    """
    from megatron_scalerl.recipe.file import load_recipe

    names = [item.name for item in items]
    for text in arguments.reference:
        for name in text.split("="):
            if name not in names:
                raise ValueError(f"--reference: expected one of {', '.join(names)}, found {name!r}")
    of_all = [same.get(text, text) for text in arguments.reference if "=" not in text]
    if not of_all:
        base, own = _base(arguments, items), {run.arm: run.recipe for run in reversed(runs)}
        plain = None if base is None else load_recipe(base, _settings(arguments)).model_dump(exclude=_NOT_COMPARED)
        of_all = [name for name, recipe in own.items() if recipe.model_dump(exclude=_NOT_COMPARED) == plain]
        of_all = [name for name in names if name in of_all][:1] or [name for name in names if name in own][:1]
    pairs = [text.split("=", 1) for text in arguments.reference if "=" in text]
    others = [(name, same.get(other, other)) for name, other in pairs if name not in same]
    return [*(f"{name}={other}" for name, other in others if name != other), of_all[-1]]
