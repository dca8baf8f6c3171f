"""Which share of a policy's bf16 elements an optimizer step changes: what an update of changes alone would send.

    python tools/weight_density.py [--lr 5e-7] [--steps 8] [--samples 16] [--threads 1]

Trains on samples of random tokens, new ones in every step, with the recipe's optimizer (AdamW, no warm-up) and CISPO,
a Llama of 134M parameters with random weights, as Hugging Face initializes them. A real run has
`weights_changed` in each line of its metrics.jsonl. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from typing import Any

import harness
from checkout import explained

parser = harness.benchmark(__doc__, lr=5e-7, steps=8, samples=16, threads=1)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from random_inputs import LLAMA_134M, random_llama, random_samples, recipe_of

    from megatron_scalerl.batching.packing import pack
    from megatron_scalerl.processes.child_process import end_with
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer


def measure(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """The share of each step."""
    recipe = recipe_of(
        policy,
        dtype="bfloat16",
        steps=options.steps,
        optimizer={"lr": options.lr, "warmup_steps": 0},
        trainer={"threads": options.threads, "micro_batch_tokens": 1024},
    )
    trainer = make_trainer(recipe, init_parallel(recipe))
    samples = random_samples(options.samples * options.steps, (24, 88), LLAMA_134M["vocab"])
    shares = []
    for step in range(1, options.steps + 1):
        own = samples[(step - 1) * options.samples : step * options.samples]
        [batch] = pack(own, step=step, dp_size=1, micro_batch_tokens=1024, pad_multiple=1, policy_version=step - 1)
        shares.append(round(trainer.step(batch).metrics["weights_changed"], 5))
    parameters = sum(p.numel() for chunk in trainer.chunks for p in chunk.parameters())
    return {"parameters": parameters, "lr": options.lr, "weights_changed": shares}


def main(options: argparse.Namespace) -> None:
    """Print the shares."""
    with tempfile.TemporaryDirectory() as folder:
        harness.report(options, measure(options, random_llama(folder, **LLAMA_134M)))


if __name__ == "__main__":
    end_with(partial(main, OPTIONS))
