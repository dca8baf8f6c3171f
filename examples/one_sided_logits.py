"""Trains with FP32 logits in the trainer and BF16 logits in the engine, for docs/course/goes_wrong.md.

    python examples/one_sided_logits.py recipes/tiny_cpu.yaml overlay=recipes/ablations/scalerl_bf16.yaml
    python examples/one_sided_logits.py --check ...                   # the same with the check that refuses it

This package refuses such a run: each engine says which type its head has, and `engine.numerics.check_engine`
compares. Here the engine gets another recipe than the trainer and the check is off, as in a stack that has none.
"""

import sys
from unittest import mock

from megatron_scalerl.__main__ import main
from megatron_scalerl.launch import local_server, process

engine_arguments = local_server.engine_arguments


def with_model_logits(recipe, **options):
    """The engine's command line for a head in the policy's own type."""
    policy = recipe.policy.model_copy(update={"logits": "model"})
    return engine_arguments(recipe.model_copy(update={"policy": policy}), **options)


if __name__ == "__main__":
    words = sys.argv[1:]
    check = process.check_engine if words[:1] == ["--check"] else lambda info, recipe: None
    with (
        mock.patch.object(local_server, "engine_arguments", with_model_logits),
        mock.patch.object(process, "check_engine", check),
    ):
        sys.exit(main(["train", *[word for word in words if word != "--check"]]))
