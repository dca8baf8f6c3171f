"""The parallel layout of the trainer: group sizes, layers per pipeline stage, divisibility constraints.

The recipe schema, the preflight checks, the trainer ranks and the planner use this module. So a layout that
Megatron-Core would reject with an assertion is a one-line error everywhere. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_scalerl.record import record

if TYPE_CHECKING:
    from megatron_scalerl.models.family import Family


Stages = tuple[tuple[int, ...], ...]
"""For each pipeline stage, the indices (from 0) of the stage's layers. With a virtual pipeline, a stage lists the
layers of the first model chunk, then the layers of the second, and so on."""

_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_PIPELINE = "megatron.parallel.pipeline_model_parallel_size"
_CHUNKS = "megatron.parallel.virtual_pipeline_model_parallel_size"


@record
class ParallelSizes:
    """Sizes of the trainer's parallel groups (ranks). Produced by `sizes_of`."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    """Expert tensor parallel size; Megatron's default is tp."""
    chunks: int
    """Model chunks per pipeline stage (virtual pipeline size), 1 without a virtual pipeline."""
    optimizer_instances: int
    """Distributed-optimizer instances: each instance holds a complete optimizer state, sharded over ranks."""

    @property
    def unit(self) -> tuple[int, int]:
        """(tp x pp x cp, etp x ep x pp): the trainer's world size must be a multiple of both numbers.

        With n instances of the distributed optimizer, the first number is also a multiple of tp x pp x n, and the
        second number is etp x ep x pp x n.
        """
        # Megatron-Core divides the data x context ranks among the instances, and also the data ranks of the experts
        dense = self.tp * self.pp
        expert = self.etp * self.ep * self.pp
        return math.lcm(dense * self.cp, dense * self.optimizer_instances), expert * self.optimizer_instances


def sizes_of(parallel: Mapping[str, Any]) -> ParallelSizes:
    """The sizes in megatron.parallel. Raises ValueError for a size that is not a positive integer."""
    tp, pp, cp, ep = (_size(parallel, f"{kind}_parallel_size", 1) for kind in _KINDS)
    etp = _size(parallel, "expert_tensor_parallel_size", None)
    chunks = _size(parallel, "virtual_pipeline_model_parallel_size", None)
    if chunks is not None and pp == 1:
        raise ValueError(f"{_CHUNKS} is {chunks}, but there is only one pipeline stage: {_PIPELINE} is 1")
    instances = _size(parallel, "num_distributed_optimizer_instances", 1)
    return ParallelSizes(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp or tp, chunks=chunks or 1, optimizer_instances=instances)


_KINDS = ("tensor_model", "pipeline_model", "context", "expert_model")


def _size(parallel: Mapping[str, Any], key: str, default: int | None) -> Any:
    value = parallel.get(key, default)
    if value is default:
        return value
    return _positive(f"megatron.parallel.{key}", value)


def _positive(key: str, value: Any) -> int:
    # Python counts a bool, which YAML makes of `yes`, as an int
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; it has to be a whole number of at least 1")
    return value


LEFT_KEYS = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of megatron.model that this version refuses. A run of an earlier version that set such a field resumes
without the field."""
MODEL_KEYS = frozenset({*_ENDS, "sequence_parallel"})
"""Fields of megatron.model that are meaningful only with the sizes of megatron.parallel."""


def check_world(sizes: ParallelSizes, world_size: int) -> None:
    """Raises ValueError where `world_size` ranks cannot be divided into groups of these sizes."""
    group_names = ("tensor x pipeline x context", "expert tensor x expert x pipeline")
    also = ""
    if sizes.optimizer_instances > 1:
        also = f" with {sizes.optimizer_instances} optimizer instances"
    for size, group_name in zip(sizes.unit, group_names):
        if world_size % size:
            raise ValueError(
                f"trainer.world_size: {world_size} is not a multiple of {size}, the {group_name} parallel size{also}"
            )


def check_sharding(family: Family, parallel: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raises ValueError if a parallel size does not divide the sharded dimension, or contradicts megatron.model.

    parallel, model: the sections megatron.parallel and megatron.model. Checks heads, key-value heads, MLPs, experts,
    pipeline layers and sequence parallelism. The vocabulary and the length of a micro-batch need no check: both are
    padded.
    """
    from megatron_scalerl.models.family import check_layout

    sizes = sizes_of(parallel)
    check_layout(family, tp_size=sizes.tp, ep_size=sizes.ep, etp_size=sizes.etp)
    _check_uniform(model, counts_of(model, len(family.layers), sizes))
    sequence = bool(model.get("sequence_parallel", False))
    if sequence and sizes.tp == 1:
        raise ValueError(
            "megatron.model.sequence_parallel is true, but needs a tensor_model_parallel_size of at least 2"
        )
    # without sequence parallelism, MoELayer.forward of Megatron-Core raises in training
    if family.transformer.get("num_moe_experts") and sizes.tp > 1 and not sequence:
        raise ValueError(
            "megatron.model.sequence_parallel is false, but a policy with experts needs true with "
            f"tensor_model_parallel_size {sizes.tp}"
        )


def stages_of(model: Mapping[str, Any], layers: int, sizes: ParallelSizes) -> Stages:
    """Divide the layers among the pipeline stages by Megatron's options in megatron.model.

    megatron.model may set the number of layers of the first and of the last stage; all further layers are split
    evenly. Raises ValueError, with the key and the numbers, if `layers` layers cannot be split in this way.
    """
    counts = counts_of(model, layers, sizes)
    stages: list[list[int]] = [[] for _ in range(sizes.pp)]
    first = 0
    # layers are numbered as the forward pass meets the layers: all stages once for each chunk of a virtual pipeline
    for _ in range(sizes.chunks):
        for stage, count in zip(stages, counts):
            stage += range(first, first + count)
            first += count
    return tuple(map(tuple, stages))


def counts_of(model: Mapping[str, Any], layers: int, sizes: ParallelSizes) -> list[int]:
    """[pp] for each pipeline stage, the number of layers in a model chunk. Raises ValueError as `stages_of` does."""
    stage_layers = [0] * sizes.pp
    end_keys = {place: key for place, key in zip((0, -1), _ENDS) if model.get(key) is not None}
    if len(end_keys) > sizes.pp:
        raise ValueError(f"megatron.model.{_ENDS[0]} and {_ENDS[1]} are both set, but the pipeline has one stage")
    for place, key in end_keys.items():
        stage_layers[place] = _positive(f"megatron.model.{key}", model[key])
    remaining_layers = layers - sum(stage_layers)
    middle_stages = sizes.pp - len(end_keys)
    fits = remaining_layers == 0
    if middle_stages:
        fits = remaining_layers > 0 and remaining_layers % middle_stages == 0
    if not fits:
        raise ValueError(
            f"{_PIPELINE}: {remaining_layers} of {layers} layers are left for {middle_stages} of {sizes.pp} stages, "
            f"which need equal numbers of layers, at least 1 each; set megatron.model.{_ENDS[0]} or {_ENDS[1]}"
        )
    return [_in_chunks(size or remaining_layers // middle_stages, sizes) for size in stage_layers]


def _check_uniform(model: Mapping[str, Any], counts: list[int]) -> None:
    """Raises ValueError if, with recompute_method uniform, groups of recompute_num_layers layers do not fill a model
    chunk."""
    # for a last group that is not full, TransformerBlock._checkpointed_forward reads past the chunk's last layer
    if (model.get("recompute_granularity"), model.get("recompute_method")) != ("full", "uniform"):
        return
    group = _positive("megatron.model.recompute_num_layers", model.get("recompute_num_layers") or 1)
    for layers in counts:
        if layers % group:
            raise ValueError(
                f"megatron.model.recompute_num_layers: {group} does not divide the {layers} layers of a model chunk; "
                "recompute_method uniform needs equal groups"
            )


def _in_chunks(layers: int, sizes: ParallelSizes) -> int:
    if layers % sizes.chunks:
        raise ValueError(f"{_CHUNKS}: {sizes.chunks} does not divide the {layers} layers of a stage")
    return layers // sizes.chunks
