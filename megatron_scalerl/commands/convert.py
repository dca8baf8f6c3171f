"""The command line of the converter: `megatron-scalerl convert to-megatron | to-hf | verify`."""

import argparse
import time
from pathlib import Path

from rich.console import Console

from megatron_scalerl.checkpoints.assembly import HF_NAMES
from megatron_scalerl.checkpoints.conversion import Options, Summary
from megatron_scalerl.models.adapters import refuse_adapter
from megatron_scalerl.processes.logs import size
from megatron_scalerl.recipe.hub import hint, local_path

EPILOG = """examples:
  megatron-scalerl convert to-megatron models/my_policy models/my_policy.megatron --verify
  megatron-scalerl convert to-hf models/my_policy.megatron models/my_policy.hf
  megatron-scalerl convert to-hf runs/my_run/checkpoints/step_000200 models/trained --like models/my_policy
  megatron-scalerl convert verify models/my_policy models/my_policy.megatron

docs/checkpoints.md describes the formats."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run a conversion and print the summary.

    Raises ValueError for wrong folders or options, OSError if a disk failed.
    """
    started = time.monotonic()
    summary = arguments.convert(arguments, console)
    console.print(_summary_line(arguments, summary, time.monotonic() - started))
    return 0


def _summary_line(arguments: argparse.Namespace, summary: Summary, seconds: float) -> str:
    tensors = f"{summary.tensors} tensors, {size(summary.nbytes)}"
    if arguments.name == "verify":
        return f"{arguments.first} and {arguments.second}: {tensors}, equal bit for bit"
    line = f"{arguments.out}: {tensors} written in {seconds:.1f} s"
    if summary.verified:
        line += ", compared bit for bit"
    return line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the three conversions with options."""
    parser.description = (
        "Convert Hugging Face folders to Megatron torch_dist checkpoints and back, tensor by tensor: this needs "
        "little memory, however large the model."
    )
    parser.epilog = EPILOG
    commands = parser.add_subparsers(required=True, metavar="CONVERSION", dest="name")
    to_megatron = commands.add_parser("to-megatron", help="write a checkpoint that opens under any TP x PP x EP")
    to_megatron.add_argument(
        "source", type=Path, metavar="HF_DIR", help="Hugging Face folder, or its name on the hub"
    )
    to_hf = commands.add_parser("to-hf", help="write a folder that opens in transformers and in vLLM")
    to_hf.add_argument("source", type=Path, metavar="MEGATRON_DIR", help="checkpoint that to-megatron or a run wrote")
    to_hf.add_argument(
        "--like",
        type=Path,
        metavar="HF_DIR",
        help="Hugging Face folder that the policy came from; needed for checkpoints that to-megatron did not write",
    )
    for command, convert in ((to_megatron, _to_megatron), (to_hf, _to_hf)):
        command.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
        command.add_argument("--verify", action="store_true", help="compare every tensor bit for bit at the end")
        command.add_argument("--allow-nonfinite", action="store_true", help="accept NaN and Inf in the weights")
        command.set_defaults(convert=convert)
    verify = commands.add_parser("verify", help="compare two folders, of either kind, bit for bit")
    verify.add_argument("first", type=Path, metavar="A", help="Hugging Face folder or Megatron checkpoint")
    verify.add_argument("second", type=Path, metavar="B", help="the folder or checkpoint to compare with")
    verify.set_defaults(convert=_verify)
    for command in (to_megatron, to_hf, verify):
        command.add_argument(
            "--dtype", choices=list(HF_NAMES), help="type that the policy's weights are cast to (default: no cast)"
        )


def _options(arguments: argparse.Namespace, console: Console) -> Options:
    return Options(
        dtype=HF_NAMES.get(arguments.dtype),
        verify=getattr(arguments, "verify", False),
        allow_nonfinite=getattr(arguments, "allow_nonfinite", False),
        console=console,
    )


def _to_megatron(arguments: argparse.Namespace, console: Console) -> Summary:
    source = Path(local_path(str(arguments.source), "model"))
    refuse_adapter(source)
    # the folder is checked before the import below, which takes seconds
    if not (source / "config.json").is_file():
        advice = hint(str(source), "model")
        raise ValueError(f"{source}: this is not a Hugging Face folder: it has no config.json{advice}")
    from megatron_scalerl.checkpoints.to_megatron import to_megatron

    return to_megatron(source, arguments.out, _options(arguments, console))


def _to_hf(arguments: argparse.Namespace, console: Console) -> Summary:
    if not arguments.source.is_dir():
        raise ValueError(f"{arguments.source}: there is no such folder")
    from megatron_scalerl.checkpoints.to_hf import to_hf

    return to_hf(arguments.source, arguments.out, _options(arguments, console), like=arguments.like)


def _verify(arguments: argparse.Namespace, console: Console) -> Summary:
    from megatron_scalerl.checkpoints.verify import verify

    return verify(arguments.first, arguments.second, _options(arguments, console))
