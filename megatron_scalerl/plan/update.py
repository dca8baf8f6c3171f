"""The bytes that every sender sends and every worker receives in a weight update.

The bytes follow from the plan of `weights.owners.send_plan` for the trainer's layout. In a run the engine's loader
decides what each worker needs. The loader cannot be asked here, so the needs are computed from how vLLM shards a
model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_scalerl.models.family import Family, Rule
from megatron_scalerl.plan.counting import trained_family
from megatron_scalerl.plan.sharding import Layout
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.weights.owners import Place, manifest, send_plan
from megatron_scalerl.weights.plan import MOST_CHANNELS, Needs, Ranges, buckets

GROUP_BYTES = 2 * MOST_CHANNELS * 10_000_000
"""Bytes of the buffers of one NCCL broadcast group on a member's device.

A ring has two directions, and a channel takes about 10 MB in each: 4 MiB for the simple protocol, the rest for LL128
and LL. This is an estimate, not measured on any GPU."""


@record
class EngineShape:
    """The parallel sizes by which the workers of one engine share a model."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Number of copies of the model in one engine."""
    whole_experts: bool = False
    """True: each worker has some experts as a whole. False: each worker has a part of every expert."""

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> EngineShape:
        """The shape that the options of `engine.vllm` set."""
        tensor, pipeline, data = (int(options.get(f"{k}_parallel_size", 1)) for k in ("tensor", "pipeline", "data"))
        whole_experts = bool(options.get("enable_expert_parallel", False))
        return cls(tensor=tensor, pipeline=pipeline, data=data, whole_experts=whole_experts)


@record
class UpdateWork:
    """The bytes that move in a weight update."""

    bytes: int
    """Bytes of one copy of the policy."""
    senders: int
    """Number of trainer ranks that send."""
    groups: int
    """Largest number of broadcast groups of one worker, which has a group for each of its senders."""
    sender_groups: int
    """Largest number of broadcast groups of one sender, which has a group for each shard that receives. Workers that
    need the same ranges are a shard."""
    sent: Mapping[int, int]
    """Sender -> bytes that the sender sends."""
    received: Mapping[int, int]
    """Shard -> bytes that each worker of the shard receives."""

    @property
    def most_sent(self) -> int:
        """Bytes that the busiest sender sends."""
        return max(self.sent.values())

    @property
    def most_received(self) -> int:
        """Bytes that the busiest worker receives."""
        return max(self.received.values())

    def bound_seconds(self, bytes_per_second: float) -> float:
        """Lower bound of the time of a weight update (seconds), by the bytes of the busiest sender or worker."""
        return max(self.most_sent, self.most_received) / bytes_per_second


def update_work(recipe: Recipe, family: Family, layout: Layout) -> UpdateWork:
    """The bytes that move in a weight update of this recipe, with the trainer in `layout`."""
    if recipe.adapters_alone:
        family = trained_family(recipe, family)
    return _shape_work(
        family,
        recipe.policy.dtype,
        layout,
        EngineShape.of_options(recipe.engine.vllm),
        bucket_mib=recipe.weights.bucket_mib,
        most_senders=recipe.weights.max_senders,
    )


def _shape_work(
    family: Family, dtype: str, layout: Layout, engine: EngineShape, *, bucket_mib: int, most_senders: int
) -> UpdateWork:
    """The bytes that move in a weight update from a trainer in `layout` to engines of the shape `engine`. bucket_mib,
    most_senders: the recipe's weights.bucket_mib and weights.max_senders."""
    parameters = manifest(family, dtype)
    needs = worker_needs(family, engine)
    stages = {layer: stage for stage, layers in enumerate(layout.stages) for layer in layers}
    plan = send_plan(family, places_of(layout), stages, needs, dtype=dtype, most_senders=most_senders).plan
    sent_bytes = Counter[int]()
    received = Counter[int]()
    for bucket in buckets(plan, bucket_mib):
        sent_bytes[bucket.sender] += bucket.nbytes
        received[bucket.shard] += bucket.nbytes
    return UpdateWork(
        bytes=sum(meta.item_bytes * math.prod(meta.shape) for meta in parameters),
        senders=plan.senders,
        groups=max(Counter(shard for _, shard in plan.pairs).values()),
        sender_groups=max(Counter(sender for sender, _ in plan.pairs).values()),
        sent=sent_bytes,
        received=received,
    )


def places_of(layout: Layout) -> list[Place]:
    """The `Place` of each trainer rank, rank after rank. Megatron numbers ranks by tensor, context, expert, data,
    then pipeline."""
    in_stage = layout.world_size // layout.pp
    # Context-parallel ranks have the same weights, so they count as copies.
    return [
        Place(
            tp=rank % layout.tp,
            pp=stage,
            ep=rank // layout.etp % layout.ep,
            etp=rank % layout.etp,
            copy=rank // layout.tp,
            expert_copy=rank // (layout.etp * layout.ep),
        )
        for stage in range(layout.pp)
        for rank in range(in_stage)
    ]


def worker_needs(family: Family, engine: EngineShape) -> list[Needs]:
    """The parts of the exported tensors that each worker of an engine needs, worker after worker.

    For each tensor, a worker's entry holds the index ranges of the needed part, and no range if no part is needed.
    If there are fewer key-value heads than workers, the heads are counted as if split between workers.
    """
    layers = len(family.layers)
    experts = family.transformer.get("num_moe_experts") or 0

    def ranges_of(rule: Rule, name: str, shape: tuple[int, ...], stage: int, rank: int) -> Iterator[Ranges]:
        stages = {"first": 0, "last": engine.pipeline - 1}
        if stage != stages.get(rule.place, rule.layer * engine.pipeline // layers):
            return
        full_ranges = tuple((0, size) for size in shape)
        # A tensor of three dimensions holds all experts of a layer. With `whole_experts` the last branch splits by
        # expert.
        if rule.expert is not None and engine.whole_experts and len(shape) == 2:
            if rule.expert * engine.tensor // experts == rank:
                yield full_ranges
        elif rule.expert is None and not rule.sharded:
            yield full_ranges
        else:
            axis = _split_axis(name, len(shape), whole_experts=engine.whole_experts)
            size = shape[axis]
            share = (size * rank // engine.tensor, size * (rank + 1) // engine.tensor)
            yield (*full_ranges[:axis], share, *full_ranges[axis + 1 :])

    exported = [rule for rule in family.rules if rule.exported]
    shapes = {name: (rule, tuple(shape)) for rule in exported for name, shape in rule.hf_shapes.items()}
    return [
        tuple(tuple(ranges_of(rule, name, shape, stage, rank)) for name, (rule, shape) in shapes.items())
        for stage in range(engine.pipeline)
        for rank in range(engine.tensor)
    ]


def _split_axis(name: str, dimensions: int, *, whole_experts: bool) -> int:
    """The dimension along which tensor parallelism splits a Hugging Face tensor.

    A tensor of fused experts has three dimensions.
    """
    # Output projections and their adapters' A are split along the inputs, all other tensors along the outputs. Fused
    # experts are transposed.
    output = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "lora_A.weight"))
    if dimensions == 3 and whole_experts:
        return 0
    if output and dimensions > 1:
        return 1
    if dimensions == 3:
        return 2
    return 0
