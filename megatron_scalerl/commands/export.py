"""`megatron-scalerl export RUN --out DIR`: the newest checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Write the policy of a run's newest checkpoint as a Hugging Face folder, which transformers and vLLM load."
    )
    parser.add_argument("run_dir", metavar="RUN", help="folder of the run")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Export. Raises ValueError where the run has no complete checkpoint or the output folder exists."""
    from megatron_scalerl.export import export

    step = export(arguments.run_dir, arguments.out)
    console.print(f"{arguments.out}: the policy of step {step}", highlight=False)
    return 0
