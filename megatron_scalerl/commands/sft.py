"""`megatron-scalerl sft RECIPE --out DIR`: supervised warm start of the recipe's policy."""

import argparse

from rich.console import Console

from megatron_scalerl.commands.train import add_recipe, recipe_of

EPILOG = """example:
  megatron-scalerl sft my_run.yaml sft.path=data/warm_start.jsonl --out models/warm

The recipe's sft section has the settings; the examples have the columns prompt and completion."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Warm-start the recipe's policy by supervised training on examples."
    parser.epilog = EPILOG
    add_recipe(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="Hugging Face folder to write")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train and write the policy; returns 0. Raises ValueError for a wrong recipe or wrong examples."""
    recipe = recipe_of(arguments)
    if recipe.policy.adapter is not None:
        raise ValueError(
            "policy.adapter: a warm start would train policy.path without the adapter; merge the adapter into the "
            "policy with PEFT, or set policy.adapter=null"
        )
    from megatron_scalerl.plan.settings import check_settings  # imports torch, which takes seconds
    from megatron_scalerl.trainer.sft import run_sft

    check_settings(recipe)
    run_sft(recipe, arguments.out)
    return 0
