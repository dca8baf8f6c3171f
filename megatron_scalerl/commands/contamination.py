"""`megatron-scalerl contamination TRAINING --data FILE`: training prompts that contain evaluation problems."""

import argparse
from pathlib import Path

from rich.console import Console

SHOWN = 5
"""Most hits that are printed for a file."""
WIDTH = 200
"""Most characters of a text that are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "List the training prompts that have a sequence of words in common with evaluation problems."
    parser.epilog = "example:\n  megatron-scalerl contamination data/math.jsonl --data math500.jsonl"
    parser.add_argument(
        "training",
        nargs="+",
        metavar="TRAINING",
        help="training prompts: a recipe (.yaml), a FILE with a column called prompt, or FILE:COLUMN",
    )
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        metavar="FILE[:SCHEMA]",
        help="evaluation file; may be repeated (`megatron-scalerl evaluate --help` describes the schemas)",
    )
    parser.add_argument(
        "--words",
        type=int,
        default=13,
        metavar="N",
        help="words in a row that a prompt and a problem have to share (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the hits to FILE as JSON, at most 100 of a problem"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Compare the files with the training prompts and print the hits. Raises ValueError for bad files."""
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
        result = contamination(training, file.problems, n=arguments.words)
        console.print(f"{printable(file.path)}: {result.line()}")
        for hit in result.hits[:SHOWN]:
            console.print(f"  {hit.share:.0%} of {printable(hit.problem.where)} in {printable(hit.training.where)}")
            console.print(f"    {shortened(hit.problem.text)}")
            console.print(f"    {shortened(hit.training.text)}")
        if result.all_hits > SHOWN:
            console.print(f"  and {result.all_hits - SHOWN} more")
        written[file.path] = {"line": result.line(), "hits": result.rows()}
    if arguments.json is not None:
        write_durably(arguments.json, msgspec.json.format(msgspec.json.encode(written), indent=2) + b"\n")
    return 0


def shortened(text: str) -> str:
    """The first WIDTH characters of a text in one line, control characters escaped."""
    from megatron_scalerl.processes.logs import printable

    line = printable(" ".join(text.split()))
    if len(line) > WIDTH:
        line = line[: WIDTH - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return line
