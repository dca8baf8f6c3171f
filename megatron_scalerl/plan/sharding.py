"""The trainer's parallel layout and the sizes of its shards."""

from dataclasses import asdict

from megatron_scalerl.models.family import Family
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.parallel_layout import (
    ParallelSizes,
    check_sharding,
    check_world,
    counts_of,
    sizes_of,
    stages_of,
)
from megatron_scalerl.record import record


@record
class Layout(ParallelSizes):
    """Parallel sizes of the trainer, and derived sizes. Produced by `layout_of`."""

    world_size: int
    sequence_parallel: bool
    distributed_optimizer: bool
    stages: tuple[tuple[int, ...], ...]
    """Numbers of the layers of each pipeline stage."""
    places: tuple[int, ...]
    """For each layer, the layer's index in the model chunk. Megatron-Core's recompute settings count layers per
    chunk."""

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def dense_shards(self) -> int:
        """Number of data- and context-parallel ranks that shard the optimizer state of a weight outside the
        experts."""
        if not self.distributed_optimizer:
            return 1
        return self.dp * self.cp // self.optimizer_instances

    @property
    def expert_shards(self) -> int:
        """Number of ranks that shard the optimizer state of an expert's weight."""
        if not self.distributed_optimizer:
            return 1
        return self.world_size // (self.etp * self.ep * self.pp) // self.optimizer_instances

    @property
    def sp(self) -> int:
        """Sequence-parallel size, by which the activations of norms and residuals are divided."""
        if self.sequence_parallel:
            return self.tp
        return 1

    def layers_in_flight(self, stage: int, micro_batches: int) -> int:
        """Largest number of (layer, micro-batch) pairs whose activations a pipeline stage holds at the same time."""
        layers = len(self.stages[stage])
        # In the schedule 1F1B, a stage starts a backward pass once a micro-batch has come back from the last stage.
        if self.chunks == 1:
            return layers * min(self.pp - stage, micro_batches)
        # Length of the interleaved schedule's warm-up, in chunks of layers (schedules.get_pp_rank_microbatches).
        warm_up = (self.pp - stage - 1) * 2 + (self.chunks - 1) * self.pp + 1
        return -(-layers // self.chunks) * min(warm_up, micro_batches * self.chunks)


def layout_of(recipe: Recipe, family: Family, world_size: int) -> Layout:
    """The layout on `world_size` trainer ranks. Raises ValueError if a parallel size does not divide the ranks or
    weights."""
    sizes = sizes_of(recipe.megatron.parallel)
    check_world(sizes, world_size)
    check_sharding(family, recipe.megatron.parallel, recipe.megatron.model)
    by_chunk = counts_of(recipe.megatron.model, len(family.layers), sizes) * sizes.chunks
    return Layout(
        **asdict(sizes),
        world_size=world_size,
        sequence_parallel=bool(recipe.megatron.model.get("sequence_parallel", False)),
        distributed_optimizer=bool(recipe.megatron.ddp.get("use_distributed_optimizer", True)),
        stages=stages_of(recipe.megatron.model, len(family.layers), sizes),
        places=tuple(place for layers in by_chunk for place in range(layers)),
    )
