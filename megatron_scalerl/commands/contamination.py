"""`megatron-scalerl contamination TRAINING --data FILE`: training prompts that contain evaluation problems."""

import argparse
from pathlib import Path

from rich.console import Console

SHOWN = 5
"""Hits that are printed for each file."""
WIDTH = 200
"""Characters of a text that are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "List the training prompts that have a sequence of words in common with evaluation problems."
    parser.epilog = "example:\n  megatron-scalerl contamination data/math.jsonl --data math500.jsonl"
    parser.add_argument(
        "training",
        nargs="+",
        metavar="TRAINING",
        help="training prompts: a recipe (.yaml), FILE with a column prompt, or FILE:COLUMN",
    )
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        metavar="FILE[:SCHEMA]",
        help="evaluation file; may be given several times (schemas: `megatron-scalerl evaluate --help`)",
    )
    parser.add_argument("--words", type=int, default=13, metavar="N", help="words in a row (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the hits to this file, at most 100 of a problem"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Compare and print. Raises ValueError for bad files."""
    import msgspec

    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.evaluation.contamination import contamination, training_texts
    from megatron_scalerl.evaluation.problems import read_problems, split_schema
    from megatron_scalerl.processes.logs import printable

    if arguments.words < 1:
        raise ValueError(f"--words: {arguments.words} is too few; take at least 1")
    files = [read_problems(*split_schema(text)) for text in arguments.data]
    training = list(training_texts(arguments.training))
    written = {}
    for file in files:
        found = contamination(training, file.problems, n=arguments.words)
        console.print(f"{printable(file.path)}: {found.line()}")
        for hit in found.hits[:SHOWN]:
            console.print(
                f"  {hit.share:.0%} of {printable(hit.problem.where)} in {printable(hit.training.where)}",
            )
            console.print(f"    {shortened(hit.problem.text)}")
            console.print(f"    {shortened(hit.training.text)}")
        if found.all_hits > SHOWN:
            console.print(f"  and {found.all_hits - SHOWN} more")
        written[file.path] = {"line": found.line(), "hits": found.rows()}
    if arguments.json is not None:
        write_durably(arguments.json, msgspec.json.format(msgspec.json.encode(written), indent=2) + b"\n")
    return 0


def shortened(text: str) -> str:
    """At most WIDTH characters of a text in one line, control characters escaped."""
    from megatron_scalerl.processes.logs import printable

    line = printable(" ".join(text.split()))
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "\N{HORIZONTAL ELLIPSIS}"
