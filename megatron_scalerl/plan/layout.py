"""How the trainer's ranks are cut: sizes of the parallel groups and the layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_scalerl.models.family import Family
from megatron_scalerl.recipe import Recipe

_NOT_COUNTED = (
    "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes of the trainer. Produced by `layout_of`."""

    world_size: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    """Tensor parallel inside experts; Megatron's default is tp."""
    chunks: int
    """Model chunks a stage (virtual pipeline), 1 without."""
    sequence_parallel: bool
    distributed_optimizer: bool
    stages: tuple[range, ...]
    """Layers of each pipeline stage."""

    @property
    def dp(self) -> int:
        """Ranks that train different micro-batches."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def dense_shards(self) -> int:
        """Ranks that share the optimiser state of a weight outside the experts (data and context parallel)."""
        return self.dp * self.cp if self.distributed_optimizer else 1

    @property
    def expert_shards(self) -> int:
        """Ranks that share the optimiser state of an expert's weight."""
        return self.world_size // (self.etp * self.ep * self.pp) if self.distributed_optimizer else 1

    @property
    def sp(self) -> int:
        """What sequence parallelism divides norms and residuals by."""
        return self.tp if self.sequence_parallel else 1

    def layers_in_flight(self, stage: int, micro_batches: int) -> int:
        """Layers x micro-batches whose activations a stage holds at once (1F1B; interleaved: Megatron's warm-up)."""
        layers = len(self.stages[stage])
        if self.chunks == 1:
            return layers * min(self.pp - stage, micro_batches)
        held = min((self.pp - stage - 1) * 2 + (self.chunks - 1) * self.pp + 1, micro_batches * self.chunks)
        return -(-layers // self.chunks) * held


def model_parallel_unit(recipe: Recipe) -> tuple[int, int]:
    """(tp x pp x cp, etp x ep x pp): the trainer's world must be a multiple of both."""
    p = recipe.megatron.parallel
    tp, pp, cp, ep, etp = _sizes(p)
    return tp * pp * cp, etp * ep * pp


def layout_of(recipe: Recipe, family: Family, world_size: int) -> Layout:
    """The layout on `world_size` trainer ranks. Raises ValueError where they cannot be cut as the recipe says."""
    tp, pp, cp, ep, etp = _sizes(recipe.megatron.parallel)
    names = ("tensor x pipeline x context", "expert tensor x expert x pipeline")
    for size, what in zip(model_parallel_unit(recipe), names):
        if world_size % size:
            raise ValueError(
                f"trainer.world_size: expected a multiple of {what} parallel size {size}, found {world_size}"
            )
    options = family.transformer
    experts = options.get("num_moe_experts") or 1
    cuts = [
        ("tensor_model", tp, options["num_attention_heads"], "attention heads"),
        ("tensor_model", tp, options["num_query_groups"], "key-value heads"),
        ("expert_model", ep, experts, "experts"),
    ]
    for kind, size, total, what in cuts:
        if total % size:
            key = f"megatron.parallel.{kind}_parallel_size"
            raise ValueError(f"{key}: expected a divisor of {total} {what}, found {size}")
    return Layout(
        world_size=world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp,
        chunks=int(recipe.megatron.parallel.get("virtual_pipeline_model_parallel_size") or 1),
        sequence_parallel=bool(recipe.megatron.model.get("sequence_parallel", False)),
        distributed_optimizer=bool(recipe.megatron.ddp.get("use_distributed_optimizer", True)),
        stages=_stages(recipe.megatron.model, len(family.layers), pp),
    )  # fmt: skip


def _sizes(p: dict[str, Any]) -> tuple[int, int, int, int, int]:
    tp = int(p.get("tensor_model_parallel_size", 1))
    pp = int(p.get("pipeline_model_parallel_size", 1))
    cp = int(p.get("context_parallel_size", 1))
    ep = int(p.get("expert_model_parallel_size", 1))
    return tp, pp, cp, ep, int(p.get("expert_tensor_parallel_size") or tp)


def _stages(model: dict[str, Any], layers: int, pp: int) -> tuple[range, ...]:
    """Megatron's split: even, or with the given numbers of layers at both ends."""
    for key in _NOT_COUNTED:
        if model.get(key):
            raise ValueError(f"megatron.model.{key}: expected none, the planner does not count it")
    sizes = [0] * pp
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    for place, key in zip((0, -1), ends):
        sizes[place] = int(model.get(key) or 0)
    open_stages = [i for i, size in enumerate(sizes) if not size]
    left = layers - sum(sizes)
    if left < 0 or (left % len(open_stages) if open_stages else left):
        raise ValueError(
            f"megatron.parallel.pipeline_model_parallel_size: expected stages of equal size, found {left} layers for "
            f"{len(open_stages)} stages"
        )
    for i in open_stages:
        sizes[i] = left // len(open_stages)
    starts = [sum(sizes[:i]) for i in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes))
