"""Which trainer rank sends which part of the weights to which engine worker, for a Megatron layout of your own.

    python examples/weight_plan.py [HUGGING_FACE_FOLDER]

Here the trainer has four ranks, TP 2 and DP 2; the engines have two workers each, TP 2. A rank cuts what it sends out
of its own shard (`Held.piece.of_shard`), nothing is gathered; a worker gets the rectangles it needs. In your loop
`places` comes from Megatron's `parallel_state`, and the needs from the engine's loader.
"""

import sys

from transformers import LlamaConfig

from megatron_scalerl.models import family, read_hf_config
from megatron_scalerl.weights.owners import Place, manifest, send_plan
from megatron_scalerl.weights.plan import buckets, volume

SMALL = LlamaConfig(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, vocab_size=4096
)
ROWS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Tensors that an engine's workers share by rows; `COLUMNS` by columns; all others every worker has."""
COLUMNS = ("o_proj", "down_proj")


def needs_of(worker: int, workers: int, tensors):
    """[tensors] the rectangle of each that this worker of an engine needs, [begin, end) of every dimension."""
    for meta in tensors:
        ranges = [(0, size) for size in meta.shape]
        for axis, names in enumerate((ROWS, COLUMNS)):
            if any(name in meta.name for name in names):
                share = meta.shape[axis] // workers
                ranges[axis] = (worker * share, (worker + 1) * share)
        yield (tuple(ranges),)


def main(folder: str | None) -> None:
    policy = family(read_hf_config(folder) if folder else SMALL)
    places = [Place(tp=r % 2, pp=0, ep=0, etp=0, copy=r // 2, expert_copy=r) for r in range(4)]
    stage_of_layer = dict.fromkeys(range(len(policy.layers)), 0)  # no pipeline
    needs = [tuple(needs_of(worker, 2, manifest(policy, "bfloat16"))) for worker in range(2)]
    made = send_plan(policy, places, stage_of_layer, needs, dtype="bfloat16", most_senders=4)  # checked: all, once
    plan = made.plan
    for sender, rank in enumerate(made.ranks):
        sizes = [sum(2 * volume(p.ranges) for p in plan.parts if (p.sender, p.shard) == (sender, n)) for n in (0, 1)]
        print(f"rank {rank}, TP rank {places[rank].tp}: {sizes[0]:,} bytes to worker 0, {sizes[1]:,} to worker 1")
    for part, holding in zip(plan.parts, made.holdings):
        if (name := plan.parameters[part.tensor].name) == "model.layers.0.self_attn.k_proj.weight":
            source = f"rows {holding.piece.start} to {holding.piece.stop} of {holding.megatron}"
            print(f"{name} {part.ranges}: {source} on rank {made.ranks[part.sender]}, to worker {part.shard}")
    print(f"{len(buckets(plan, 1))} buckets of at most 1 MiB, digests {[f'{d:016x}' for d in plan.digests]}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
