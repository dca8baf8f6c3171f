"""What a checkpoint takes from the distributed optimizer: its state in whole tensors, gathered with few copies.

Megatron-Core's `DistributedOptimizer.get_parameter_state_dp_zero` zeroes and fills a shard, the list of what all
ranks send, its concatenation and the result, each as large as what they hold, while the trainer is stopped. Here each
shard is gathered where it is held, and what was gathered is copied once.

It also drops the padding between buckets, which the places of parameters count: with several buckets (on GPUs, where
gradients are reduced while the backward pass computes) and a bucket whose size is no multiple of 128, Megatron-Core
0.16.1 saves the parameters after it from wrong places. Here each is taken from its own.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_scalerl.trainer.optimizer import parts_of

_UNWRITTEN = torch.zeros(())
KEYS = ("param", "exp_avg", "exp_avg_sq")


@contextlib.contextmanager
def gathered_with_few_copies(optimizer: Any) -> Iterator[None]:
    """Context in which the optimizer's `sharded_state_dict` has the same content and takes less time and memory."""
    parts = [each for each in parts_of(optimizer) if isinstance(each, DistributedOptimizer)]
    for part in parts:
        part.get_parameter_state_dp_zero = partial(_state_dp_zero, part)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


def live_storages(models: Sequence[Any], optimizer: Any) -> set[int]:
    """Addresses of the memory that the next step writes to, of unwrapped models and of the optimizer."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    for part in parts_of(optimizer):
        inner = getattr(part, "optimizer", None)
        if inner is not None:
            tensors += [p for group in inner.param_groups for p in group["params"]]
            tensors += [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class _Parameters:
    """A buffer's tensor of one key, as far as Megatron reads it: the slices of parameters, each in memory of its own.

    A slice of one large tensor would be copied again.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}

    def __getitem__(self, place: slice) -> torch.Tensor:
        return self.tensors[place.start, place.stop]


def _state_dp_zero(
    part: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
) -> Any:
    """In place of `get_parameter_state_dp_zero`: the parameters of each buffer, by key, in host memory; on
    data-parallel ranks that write none, tensors of the same shapes without memory."""
    if use_gloo_comm or empty_data or not return_on_all_ranks:
        original = DistributedOptimizer.get_parameter_state_dp_zero
        return original(part, use_gloo_comm, empty_data, return_on_all_ranks)
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, (buffer, of_types) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        [(dtype, ranges)] = of_types.items()
        whole = {key: _Parameters() for key in KEYS}
        for bucket, of_bucket in zip(buffer.buckets, ranges, strict=True):
            places = {parameter: buffer.param_index_map[parameter][:2] for parameter in bucket.params_list}
            _gather_bucket(part, bucket, of_bucket["param_map"], places, whole)
        state[number] = {dtype: {**whole, "numel_unpadded": buffer.numel_unpadded}}
    return state


def _gather_bucket(part: Any, bucket: Any, held: Any, places: Any, whole: dict[str, _Parameters]) -> None:
    """Add a bucket's parameters to `whole`. Collective.

    held: parameter -> its range of this rank's shard. places: parameter -> its begin and end in the buffer.
    """
    ranks, size, device = part.data_parallel_group.size(), bucket.grad_data.numel(), bucket.grad_data.device
    if ranks == 1:
        for parameter, place in places.items():
            tensors = part._get_main_param_and_optimizer_states(parameter)
            for key, found in whole.items():
                found.tensors[place] = tensors[key].detach().to("cpu", torch.float32, copy=True)
        return
    shards = {key: torch.zeros(size // ranks, dtype=torch.float32, device=device) for key in whole}
    for parameter, ranges in held.items():
        local, tensors = ranges["gbuf_local"], part._get_main_param_and_optimizer_states(parameter)
        for key, shard in shards.items():
            shard[local.start : local.end].copy_(tensors[key].detach())
    writes = part.data_parallel_group.rank() == 0
    everyone = torch.empty(size, dtype=torch.float32, device=device)
    for key, shard in shards.items():
        dist.all_gather(list(everyone.chunk(ranks)), shard, group=part.data_parallel_group)
        for begin, end in places.values():
            own = everyone[begin - bucket.offset : end - bucket.offset]
            # only the first replica is written: the others' memory would be as much again for each rank of a node
            whole[key].tensors[begin, end] = own.to("cpu", copy=True) if writes else _UNWRITTEN.expand(end - begin)
