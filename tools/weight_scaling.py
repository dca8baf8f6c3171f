"""Bytes of a weight update on many GPUs, counted in the trainer's plan, and the seconds that no schedule is below.

    python tools/weight_scaling.py [--bucket-mib 256]
    python tools/weight_scaling.py --count

Nothing is sent: the plan and its buckets are those of `megatron_scalerl.weights`, for a trainer on half of the GPUs
and engines on the other half. Bound: the most bytes that any rank sends or any worker receives, at 50 GB/s of every
GPU in each direction, one 400 Gb/s port.
--count: instead, the bytes of every bucket are added up for each sender and for each worker, on layouts of growing
size, and the most of one is put over an even share: of a sender, the bytes of all over their number; of a worker, the
policy over the engine's tensor parallelism. Whole: bytes of the tensors that every worker gets, norms and routers,
which no number of workers makes smaller. All ranks may send.
Prints a Markdown table.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from checkout import explained

parser = harness.options(
    __doc__,
    bucket_mib=256,
    count=(False, "count the bytes of every sender and worker"),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from random_inputs import llama_settings
    from transformers import Llama4TextConfig, LlamaConfig, Qwen3MoeConfig

    from megatron_scalerl.models import family, read_hf_config
    from megatron_scalerl.plan.sharding import Layout
    from megatron_scalerl.plan.update import EngineShape, UpdateWork, moved, worker_needs
    from megatron_scalerl.weights.owners import manifest
    from megatron_scalerl.weights.plan import volume


GB_S = 50.0
"""Rate of every GPU's link in each direction."""
MOST_SENDERS = 16
"""weights.max_senders."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A policy, the trainer's layout of one copy of it, and an engine's."""

    config: Any
    tp: int
    pp: int = 1
    ep: int = 1
    engine_tp: int
    gpus: tuple[int, ...]


_8B = llama_settings(vocab=128_256, hidden=4096, inner=14_336, layers=32, heads=32, groups=8)
_SCOUT = llama_settings(vocab=202_048, hidden=5120, inner=8192, layers=48, heads=40, groups=8, head_dim=128)
_SCOUT |= dict(intermediate_size_mlp=16_384, num_local_experts=16, interleave_moe_layer_step=1)
_EXPERTS = dict(head_dim=128, num_experts_per_tok=8, mlp_only_layers=[])
_30B = llama_settings(vocab=151_936, hidden=2048, inner=6144, layers=48, heads=32, groups=4, **_EXPERTS)
_30B |= dict(moe_intermediate_size=768, num_experts=128)
DENSE = LlamaConfig(**_8B)
SCOUT = Llama4TextConfig(**_SCOUT)
KIMI = read_hf_config(Path(__file__).parents[1] / "recipes" / "configs" / "Kimi-K2-Instruct")
MODELS = {
    "8B, dense": Model(config=DENSE, tp=2, engine_tp=1, gpus=(16, 64, 256, 1024, 4096)),
    "17B x 16 (Scout), 108B": Model(config=SCOUT, tp=4, ep=8, engine_tp=8, gpus=(64, 256, 1024, 4096)),
    "Kimi-K2, 1,026B": Model(config=KIMI, tp=8, pp=8, ep=32, engine_tp=32, gpus=(1024, 4096)),
}
"""Shapes as published."""
COUNTED = {
    "8B, dense": DENSE,
    "30B, 128 experts (Qwen3)": Qwen3MoeConfig(**_30B),
    "17B x 16 (Scout), 108B": SCOUT,
}
LAYOUTS = ((4, 2, 1, 2, 1), (8, 2, 2, 2, 2), (16, 4, 2, 4, 4), (32, 4, 2, 8, 8), (64, 4, 4, 16, 8))
"""(Ranks of the trainer, TP, PP, EP of experts, TP of an engine); the rest of the ranks is data parallel."""


def planned(model, ranks, bucket_mib, most_senders=MOST_SENDERS):
    """Figures of an update for a number of trainer ranks."""
    found = family(model.config)
    layers = len(found.layers)
    stages = tuple(tuple(l for l in range(layers) if l * model.pp // layers == stage) for stage in range(model.pp))
    layout = Layout(
        world_size=ranks,
        tp=model.tp,
        pp=model.pp,
        cp=1,
        ep=model.ep,
        etp=1,
        chunks=1,
        sequence_parallel=True,
        distributed_optimizer=True,
        stages=stages,
        places=tuple(place for stage in stages for place in range(len(stage))),
    )
    return moved(
        found,
        "bfloat16",
        layout,
        EngineShape(tensor=model.engine_tp, whole_experts=True),
        bucket_mib=bucket_mib,
        most_senders=most_senders,
    )


HEADER = (
    *("policy, bf16", "GPUs, half of them engines", "GB", "senders", "groups of a worker", "most sent by a rank"),
    *("most received by a worker", "bound"),
)


COUNTED_HEADER = (
    *("policy, bf16", "ranks: TP, PP, EP, DP", "engine TP", "GB", "senders", "even share", "most sent by a rank"),
    *("over", "policy / engine TP", "most received by a worker", "over", "whole in every worker"),
)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The bytes of one rank over an even share of them."""

    total: int
    """Of one copy of the policy."""
    work: UpdateWork
    engine_tp: int
    replicated: int
    """Bytes of the tensors that every worker gets as a whole."""

    @property
    def sent_over(self):
        """Most sent by a rank over what all send, divided by their number."""
        return self.work.most_sent * self.work.senders / sum(self.work.sent.values())

    @property
    def received_over(self):
        """Most received by a worker over the policy, divided by the engine's tensor parallelism."""
        return self.work.most_received * self.engine_tp / self.total


def count(config, layout, bucket_mib):
    """The bytes of every sender and worker, from the plan's buckets. layout: one of LAYOUTS."""
    ranks, tp, pp, ep, engine_tp = layout
    found = family(config)
    model = Model(config=config, tp=tp, pp=pp, ep=ep if _experts(config) else 1, engine_tp=engine_tp, gpus=())
    work = planned(model, ranks, bucket_mib, most_senders=ranks)
    needs = worker_needs(found, EngineShape(tensor=engine_tp, whole_experts=True))
    replicated = 0
    for number, meta in enumerate(manifest(found, "bfloat16")):
        size = volume(tuple((0, size) for size in meta.shape))
        if engine_tp > 1 and all(sum(map(volume, of_worker[number])) == size for of_worker in needs):
            replicated += size * meta.item_bytes
    return Counted(total=work.bytes, work=work, engine_tp=engine_tp, replicated=replicated)


def _experts(config):
    return getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)


def print_counts(options):
    """Print the table of --count."""
    print(f"| {' | '.join(COUNTED_HEADER)} |\n{'|---' * len(COUNTED_HEADER)}|")
    for name, config in COUNTED.items():
        for layout in LAYOUTS:
            ranks, tp, pp, ep, engine_tp = layout
            found = count(config, layout, options.bucket_mib)
            work = found.work
            sizes = f"{tp}, {pp}, {ep if _experts(config) else 1}, {ranks // (tp * pp)}"
            cells = [name, f"{ranks}: {sizes}", f"{engine_tp}", f"{work.bytes / 1e9:.1f}", f"{work.senders}"]
            cells += [f"{sum(work.sent.values()) / work.senders / 1e9:.3f} GB", f"{work.most_sent / 1e9:.3f} GB"]
            cells += [f"{found.sent_over:.2f}", f"{work.bytes / engine_tp / 1e9:.3f} GB"]
            cells += [f"{work.most_received / 1e9:.3f} GB", f"{found.received_over:.3f}"]
            print(f"| {' | '.join([*cells, f'{found.replicated / 1e6:.1f} MB'])} |", flush=True)


def main(options):
    """Print the table."""
    if options.count:
        print_counts(options)
        return
    print(f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|")
    for name, model in MODELS.items():
        for gpus in model.gpus:
            work = planned(model, gpus // 2, options.bucket_mib)
            sizes = [f"{size / 1e9:.3g} GB" for size in (work.most_sent, work.most_received)]
            cells = [name, f"{gpus:,}", f"{work.bytes / 1e9:,.0f}", f"{work.senders:,}", f"{work.groups:,}", *sizes]
            print(f"| {' | '.join([*cells, f'{work.bound_seconds(GB_S * 1e9):.3f} s'])} |", flush=True)


if __name__ == "__main__":
    main(OPTIONS)
