"""Predicted seconds of a weight update on many GPUs, whole and of changes, by simulating the trainer's plan.

    python tools/weight_scaling.py [--gb-s 50] [--bucket-mib 256] [--most-senders 16]

Nothing is sent: the plan and its buckets are those of `megatron_scalerl.weights`, for a trainer on half of the GPUs
and engines on the other half; `megatron_scalerl.plan.update` states the link model. --gb-s: of every GPU in each
direction; 50 is one 400 Gb/s port. Bound: the most bytes that any rank sends or any worker receives, at this rate.
Changes: of one element in a hundred, in the bytes that `weights.deltas: absolute` takes for each. Finding and writing
them takes no time here, nor does packing.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gb-s", type=float, default=50.0, help="of every GPU's link, in each direction")
    p.add_argument("--bucket-mib", type=int, default=256)
    p.add_argument("--most-senders", type=int, default=16, help="weights.max_senders")
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from transformers import Llama4TextConfig, LlamaConfig, Qwen3MoeConfig

    from megatron_scalerl.models import family
    from megatron_scalerl.plan.sharding import Layout
    from megatron_scalerl.plan.update import EngineShape, UpdateWork, moved, places_of


CHANGES = 0.01 * 3.1 / 2
"""Bytes of changes over those of all values in bf16 (`weights.changes`)."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A policy, the trainer's layout of one copy of it, and an engine's."""

    config: Any
    tp: int
    pp: int = 1
    ep: int = 1
    engine_tp: int
    gpus: tuple[int, ...]


MODELS = {
    "8B, dense": Model(
        config=LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
        tp=2,
        engine_tp=1,
        gpus=(16, 64, 256, 1024),
    ),
    "17B x 16 (Scout), 108B": Model(
        config=Llama4TextConfig(
            vocab_size=202_048,
            hidden_size=5120,
            intermediate_size=8192,
            intermediate_size_mlp=16_384,
            num_hidden_layers=48,
            num_attention_heads=40,
            num_key_value_heads=8,
            head_dim=128,
            num_local_experts=16,
            interleave_moe_layer_step=1,
            tie_word_embeddings=False,
        ),
        tp=4,
        ep=8,
        engine_tp=8,
        gpus=(64, 256, 1024),
    ),
    "1T, 384 experts": Model(
        config=Qwen3MoeConfig(
            vocab_size=163_840,
            hidden_size=7168,
            intermediate_size=18_432,
            moe_intermediate_size=2048,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            num_experts=384,
            num_experts_per_tok=8,
            mlp_only_layers=[],
            tie_word_embeddings=False,
        ),
        tp=8,
        pp=8,
        ep=32,
        engine_tp=32,
        gpus=(1024, 4096),
    ),
}
"""Shapes: Llama 3 8B and Llama 4 Scout as published; the third is made up, near Kimi K2's."""


def simulate(model: Model, gpus: int, options: argparse.Namespace) -> UpdateWork:
    """What one update moves, with the trainer on half of the GPUs."""
    found = family(model.config)
    layers = len(found.layers)
    layout = Layout(
        world_size=gpus // 2,
        tp=model.tp,
        pp=model.pp,
        cp=1,
        ep=model.ep,
        etp=1,
        chunks=1,
        sequence_parallel=True,
        distributed_optimizer=True,
        stages=tuple(tuple(l for l in range(layers) if l * model.pp // layers == stage) for stage in range(model.pp)),
    )
    return moved(
        found,
        "bfloat16",
        places_of(layout),
        {layer: stage for stage, of_stage in enumerate(layout.stages) for layer in of_stage},
        EngineShape(tensor=model.engine_tp, whole_experts=True),
        bucket_mib=options.bucket_mib,
        most_senders=options.most_senders,
    )


HEADER = (
    "policy, bf16",
    "GPUs, half of them engines",
    "GB",
    "senders",
    "groups of a worker",
    "most sent by a rank",
    "most received by a worker",
    "bound",
    "predicted",
    "1 % changed, predicted",
)


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    print(f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|")
    for name, model in MODELS.items():
        for gpus in model.gpus:
            work = simulate(model, gpus, options)
            sizes = [f"{each / 1e9:.3g} GB" for each in (work.most_sent, work.most_received)]
            cells = [name, f"{gpus:,}", f"{work.bytes / 1e9:,.0f}", f"{work.senders:,}", f"{work.groups:,}", *sizes]
            rate, copies = options.gb_s * 1e9, max(gpus // 2 // model.engine_tp, 1)
            changes = replace(work, buckets=tuple((*pair, round(size * CHANGES)) for *pair, size in work.buckets))
            predicted = (work.bound_seconds(rate), work.seconds(rate, copies), changes.seconds(rate, copies))
            seconds = [f"{each:.3f} s" for each in predicted]
            print(f"| {' | '.join([*cells, *seconds])} |", flush=True)


if __name__ == "__main__":
    main(OPTIONS)
