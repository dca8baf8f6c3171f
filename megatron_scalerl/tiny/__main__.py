"""`python -m megatron_scalerl.tiny OUT_DIR --seed N`: write the tiny task's folder."""

import argparse
import sys

from megatron_scalerl.tiny.build import TinyArguments, build


def main(argv: list[str] | None = None) -> int:
    """Write the folder; returns the exit code: 2, with one line on standard error, if the arguments are refused."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_scalerl.tiny", description=__doc__, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("out_dir", metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--moe", action="store_true", help="a Llama-4-style mixture of experts")
    parser.add_argument("--train-prompts", type=int)
    parser.add_argument("--held-out", type=int)
    parser.add_argument("--sft-examples", type=int)
    options = vars(parser.parse_args(argv))
    out_dir = options.pop("out_dir")
    try:
        written = build(out_dir, TinyArguments(**options))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{out_dir}: {'written' if written else 'already exists'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
