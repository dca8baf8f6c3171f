"""`python -m megatron_scalerl.tiny OUT_DIR --seed N`: write the tiny task's folder."""

import argparse
import sys
from dataclasses import fields

from megatron_scalerl.tiny.build import TinyArguments, build


def main(argv: list[str] | None = None) -> int:
    """Write the folder; returns the exit code: 2, with one line on standard error, if the arguments are refused."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_scalerl.tiny", description=__doc__, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", help="folder to write; kept if written with equal arguments")
    parser.add_argument("--seed", type=int, required=True, help="seed of policy, prompts and examples")
    parser.add_argument("--moe", action="store_true", help="write a Llama-4-style mixture of experts, no dense Llama")
    counts = {"train_prompts": "training prompts", "held_out": "held-out prompts", "sft_examples": "warm-start rows"}
    for field in fields(TinyArguments):
        if field.name in counts:
            option = f"--{field.name.replace('_', '-')}"
            parser.add_argument(option, type=int, help=f"number of {counts[field.name]} (default: {field.default})")
    options = vars(parser.parse_args(argv))
    out_dir = options.pop("out_dir")
    try:
        is_new = build(out_dir, TinyArguments(**options))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if is_new:
        print(f"{out_dir}: written")
    else:
        print(f"{out_dir}: already exists")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
