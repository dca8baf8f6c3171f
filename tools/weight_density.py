"""Which share of a policy's bf16 elements an optimizer step changes: what an update of changes alone would send.

    python tools/weight_density.py [--policy FOLDER] [--lr 5e-7] [--steps 8] [--samples 16] [--threads 1]

Trains on samples of random tokens, new ones in every step, with the recipe's optimizer (AdamW, no warm-up) and CISPO;
without --policy a Llama of 134M parameters with random weights, as Hugging Face initializes them. A real run has
`weights_changed` in each line of its metrics.jsonl. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--policy", help="Hugging Face folder")
    p.add_argument("--lr", type=float, default=5e-7)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--samples", type=int, default=16)
    p.add_argument("--threads", type=int, default=1)
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import torch
    from bench_step import draw_samples
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron_scalerl.batching.packing import pack
    from megatron_scalerl.models import family, read_hf_config
    from megatron_scalerl.processes.child_process import end_with
    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer


def random_llama(folder: str) -> str:
    """A policy of 134M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def measure(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """The share of each step."""
    vocab_size = family(read_hf_config(policy)).vocab_size
    recipe = Recipe.model_validate(
        {
            "name": "weight_density",
            "steps": options.steps,
            "policy": {"path": policy, "dtype": "bfloat16"},
            "prompts": {"path": "none.jsonl"},
            "optimizer": {"lr": options.lr, "warmup_steps": 0},
            "trainer": {"threads": options.threads, "micro_batch_tokens": 1024},
        }
    )
    trainer = make_trainer(recipe, init_parallel(recipe))
    samples = draw_samples(options.samples * options.steps, vocab_size)
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
        policy = options.policy or random_llama(str(Path(folder) / "policy"))
        print(json.dumps(measure(options, policy)))


if __name__ == "__main__":
    end_with(partial(main, OPTIONS))
