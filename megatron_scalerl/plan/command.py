"""The command line of the planner: `megatron-scalerl plan RECIPE --gpus N [options]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron_scalerl.models.adapters import refuse_adapter
from megatron_scalerl.plan.assumptions import Assumptions, checked, default_sources, described
from megatron_scalerl.plan.hardware import GPUS, Layers
from megatron_scalerl.recipe.hub import hint

if TYPE_CHECKING:
    from rich.console import Console

GPU = "h100-80g"
"""Default of the option --gpu."""


EPILOG = """example:
  megatron-scalerl plan recipes/scalerl_llama4_scout_17bx16.yaml --gpus 256 --check"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of the command. The flags of assumptions are generated from the fields of `Assumptions`."""
    p.description = "Predict whether a recipe fits its GPUs and what it costs, before any GPU is allocated."
    p.epilog = EPILOG
    p.add_argument("recipe", metavar="RECIPE", help="recipe file")
    p.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="settings that override the recipe's; overlay=FILE takes the settings of a file",
    )
    p.add_argument(
        "--gpus",
        type=_number,
        required=True,
        metavar="N",
        help="number of GPUs of trainer and engines together; 0 plans for the CPUs of this machine",
    )
    p.add_argument("--gpu", choices=sorted(GPUS), help=f"GPU model; default: the model in --assumptions, else {GPU}")
    p.add_argument(
        "--layers",
        choices=get_args(Layers),
        help="the trainer's layers: te (Transformer Engine) or plain (without); default: as in --assumptions, or te",
    )
    p.add_argument(
        "--assumptions",
        type=Path,
        metavar="FILE",
        help="YAML file of measured constants that replace the defaults below (docs/gpu.md); flags override the file",
    )
    p.add_argument(
        "--config",
        metavar="DIR",
        help="folder with the policy's config.json; default: policy.path, else configs/<its name> next to the recipe",
    )
    p.add_argument(
        "--no-build",
        action="store_true",
        help="with --check, skip building the ranks on the meta device, which verifies the parameter counts (5 s)",
    )
    p.add_argument("--check", action="store_true", help="print one line only; exit code 2 if the recipe does not fit")
    p.add_argument("--json", metavar="OUT|-", help="write the plan's numbers as JSON; - prints only the JSON")
    group = p.add_argument_group("assumptions and their defaults")
    for f in described():
        default = "computed"
        if f.default is not None:
            default = f"{f.default:g} {f.metadata['unit']}".strip()
        text = f"{f.metadata['what']} ({default})".replace("%", "%%")
        group.add_argument("--" + f.name.replace("_", "-"), type=float, metavar="X", help=text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Make the plan and print it. The exit code is 2 if --check is given and the plan does not fit, else 0.

    Raises ValueError for invalid input, and OSError for a path that cannot be read or written.
    """
    from megatron_scalerl.processes.garbage import no_collections
    from megatron_scalerl.recipe.file import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    gpu, layers, assumed, sources = _inputs(options)
    folder = config_folder(recipe.policy.path, options.recipe, options.config)

    with no_collections():
        # These imports take seconds, so they are made only when a plan is made.
        from megatron_scalerl.plan.meta_build import compare_with_build
        from megatron_scalerl.plan.planner import as_numbers, make_plan
        from megatron_scalerl.plan.settings import check_settings
        from megatron_scalerl.plan.text import show, verdict

        is_policy = options.config is None and folder == Path(recipe.policy.path)
        check_settings(recipe, None if is_policy else folder, planned=True)
        if not options.gpus:
            from megatron_scalerl.plan.cpus import plan_on_cpus

            on_cpus = plan_on_cpus(recipe, folder)
            _write(options, asdict(on_cpus))
            return _tell(options, f"{recipe.name} on CPUs", on_cpus.verdict(), on_cpus.problem)
        plan = make_plan(recipe, folder, options.gpus, GPUS[gpu], assumed, layers=layers, sources=sources)
        built = "skipped"
        if options.check and not options.no_build:
            built = compare_with_build(plan, folder)
    _write(options, as_numbers(plan) | {"meta_build": built})
    if options.check:
        problems = [*plan.problems(), ""]
        return _tell(options, f"{recipe.name} on {options.gpus} x {plan.gpu.name}", verdict(plan), problems[0])
    if options.json != "-":
        show(plan, console)
    return 0


def _write(options: argparse.Namespace, numbers: Mapping[str, Any]) -> None:
    """Write the plan's numbers to the file of --json."""
    text = json.dumps(numbers, indent=2)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n")


def _tell(options: argparse.Namespace, head: str, verdict: str, problem: str) -> int:
    """Print the plan in one line, `head: verdict`, and return 0. With --check and a `problem`, print the problem
    instead, to stderr, and return 2."""
    if options.check and problem:
        print(f"megatron-scalerl: {head.partition(' ')[0]}: {problem}", file=sys.stderr)
        return 2
    if options.json != "-":
        print(f"{head}: {verdict}")
    return 0


def _inputs(options: argparse.Namespace) -> tuple[str, Layers, Assumptions, dict[str, str]]:
    """(the GPU's key in `GPUS`, kind of the trainer's layers, assumptions, name of each assumption -> source).

    Flags take precedence over the file of --assumptions, and the file over the defaults. Raises ValueError for an
    invalid file. Raises ValueError if --gpu or --layers differ from the file's, because constants measured on one GPU
    do not apply to another.
    """
    from megatron_scalerl.plan.assumptions_file import read_assumptions

    file = None
    if options.assumptions:
        file = read_assumptions(options.assumptions)
    for key in ("gpu", "layers"):
        option = getattr(options, key)
        measured = getattr(file, key, None)
        if option and measured and option != measured:
            raise ValueError(
                f"--{key}: leave this out: {options.assumptions} was measured for {measured}, and not for {option}"
            )
    values = {}
    sources = default_sources()
    for f in described():
        option = getattr(options, f.name)
        if option is not None:
            values[f.name] = option
            sources[f.name] = "given on the command line"
        elif file and f.name in file.assumptions:
            values[f.name] = file.assumptions[f.name].value
            sources[f.name] = file.source(options.assumptions, f.name)
    gpu = options.gpu or getattr(file, "gpu", GPU)
    layers: Layers = options.layers or getattr(file, "layers", None) or "te"
    return gpu, layers, checked(values), sources


def config_folder(policy: str, recipe: str | Path, config: str | Path | None = None) -> Path:
    """The folder with the policy's config.json.

    It is `config` if given, else the policy's folder, else configs/<name of the policy> next to the recipe. Raises
    ValueError if there is no such folder, or if it holds an adapter instead of a policy.
    """
    candidates = [Path(policy), Path(recipe).parent / "configs" / Path(policy).name]
    if config:
        candidates = [Path(config)]
    for folder in candidates:
        refuse_adapter(folder)
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(
        f"policy.path: there is no config.json in {' or '.join(map(str, candidates))}" + hint(policy, "model")
    )


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; give a number of GPUs, or 0 for CPUs")
    return number
