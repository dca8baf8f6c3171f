"""Predicted seconds of a dense weight update on many GPUs, by simulating the plan that the trainer would make.

    python tools/weight_scaling.py [--gb-s 50] [--bucket-mib 256] [--most-senders 16]

Nothing is sent: the plan and its buckets are those of `megatron_scalerl.weights`, for a trainer on half of the GPUs
and engines on the other half. The link model: every GPU sends and receives at --gb-s (one 400 Gb/s port each), a
broadcast passes a bucket on from worker to worker while it arrives, so that all have it after bytes / rate and
--latency-us for each of log2(members) hops; a sender or a worker has one bucket under way at a time, as over NCCL.
Bound: the most bytes that any rank sends or any worker receives, at the rate. Host time (HTTP, launches), packing and
writing are not part of it. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gb-s", type=float, default=50.0, help="of every GPU's link, in each direction")
    p.add_argument("--latency-us", type=float, default=30.0, help="of a bucket, for each hop")
    p.add_argument("--bucket-mib", type=int, default=256)
    p.add_argument("--most-senders", type=int, default=16, help="weights.max_senders")
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from transformers import Llama4TextConfig, LlamaConfig, Qwen3MoeConfig

    from megatron_scalerl.models import family
    from megatron_scalerl.weights.owners import Place, manifest, send_plan
    from megatron_scalerl.weights.plan import Needs, buckets
    from megatron_scalerl.weights.rectangles import Ranges


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


def places_of(model: Model, ranks: int) -> list[Place]:
    """Where each of the trainer's ranks stands: tensor, data, pipeline parallel, as Megatron orders them."""
    stage = ranks // model.pp
    return [
        Place(
            tp=rank % stage % model.tp,
            pp=rank // stage,
            ep=rank % stage % model.ep,
            etp=0,
            copy=rank % stage // model.tp,
            expert_copy=rank % stage // model.ep,
        )
        for rank in range(ranks)
    ]


def needs_of(parameters: Any, shard: int, shards: int) -> Needs:
    """What one tensor-parallel worker of vLLM needs: rows or columns of dense matrices, whole experts and norms."""

    def ranges_of(name: str, shape: tuple[int, ...]) -> Iterator[Ranges]:
        whole = tuple((0, size) for size in shape)
        axis: int | None = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        if ".experts." in name and len(shape) == 2:  # one expert of its own
            expert, count = int(name.split(".experts.")[1].split(".")[0]), EXPERTS
            if expert * shards // count == shard:
                yield whole
            return
        if len(shape) == 3:
            axis = 0
        elif len(shape) < 2 or "norm" in name or "router" in name or name.endswith("mlp.gate.weight"):
            axis = None
        if axis is None:
            yield whole
            return
        size = shape[axis]
        yield (*whole[:axis], (size * shard // shards, size * (shard + 1) // shards), *whole[axis + 1 :])

    return tuple(tuple(ranges_of(meta.name, meta.shape)) for meta in parameters)


EXPERTS = 384
"""Of the model whose experts are tensors of their own."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One simulated update."""

    bytes: int
    """Of one copy of the policy."""
    senders: int
    groups: int
    """Most broadcast groups that one worker is in: its senders."""
    most_sent: int
    """Bytes of the rank that sends most."""
    most_received: int
    """Bytes of the worker that gets most."""
    bound_s: float
    seconds: float


def simulate(model: Model, gpus: int, options: argparse.Namespace) -> Update:
    """Run the buckets of the plan through the link model."""
    found, ranks = family(model.config), gpus // 2
    parameters = manifest(found, "bfloat16")
    layers = len(found.layers)
    needs = [needs_of(parameters, shard, model.engine_tp) for shard in range(model.engine_tp)]
    sent = send_plan(
        found,
        places_of(model, ranks),
        {layer: layer * model.pp // layers for layer in range(layers)},
        needs,
        dtype="bfloat16",
        most_senders=options.most_senders,
    )
    engines = max(ranks // model.engine_tp, 1)
    hops = math.ceil(math.log2(1 + engines))
    rate, latency = options.gb_s * 1e9, options.latency_us * 1e-6 * hops
    sender_free, shard_free = [0.0] * sent.plan.senders, [0.0] * model.engine_tp
    sender_bytes, shard_bytes = [0] * sent.plan.senders, [0] * model.engine_tp
    for bucket in buckets(sent.plan, options.bucket_mib):
        end = max(sender_free[bucket.sender], shard_free[bucket.shard]) + bucket.nbytes / rate + latency
        sender_free[bucket.sender] = shard_free[bucket.shard] = end
        sender_bytes[bucket.sender] += bucket.nbytes
        shard_bytes[bucket.shard] += bucket.nbytes
    most_sent, most_received = max(sender_bytes), max(shard_bytes)
    return Update(
        bytes=sum(2 * math.prod(meta.shape) for meta in parameters),
        senders=sent.plan.senders,
        groups=max(Counter(shard for _, shard in sent.plan.pairs).values()),
        most_sent=most_sent,
        most_received=most_received,
        bound_s=max(most_sent, most_received) / rate,
        seconds=max(shard_free),
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
)


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    print(f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|")
    for name, model in MODELS.items():
        for gpus in model.gpus:
            u = simulate(model, gpus, options)
            moved = [f"{each / 1e9:.3g} GB" for each in (u.most_sent, u.most_received)]
            cells = [name, f"{gpus:,}", f"{u.bytes / 1e9:,.0f}", f"{u.senders:,}", f"{u.groups:,}", *moved]
            print(f"| {' | '.join([*cells, f'{u.bound_s:.3f} s', f'{u.seconds:.3f} s'])} |", flush=True)


if __name__ == "__main__":
    main(OPTIONS)
