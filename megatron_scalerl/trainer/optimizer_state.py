"""The distributed optimizer's state for a checkpoint, in whole tensors, gathered with few copies.

The life of a state: `checkpoint` asks the optimizer for its sharded state inside `gathered_with_few_copies`;
Megatron calls `get_parameter_state_dp_zero`, which is replaced here; for each buffer and key it then reads the slices
of all parameters, and makes the checkpoint's shards of them.

Megatron-Core's `DistributedOptimizer.get_parameter_state_dp_zero` zeroes and fills a shard, the list of what all
ranks send, its concatenation and the result, each as large as what they hold, while the trainer is stopped. Here each
shard is gathered where it is, and the result is copied once.

It also drops the padding between buckets, which the places of parameters count: with several buckets (on GPUs, where
gradients are reduced while the backward pass computes) and a bucket whose size is no multiple of 128, Megatron-Core
saves the parameters after it from wrong places. Here each is taken from its own.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_scalerl.trainer.optimizer import parts_of

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Tensors of a parameter in the optimizer's state: the main weight and the two moments of Adam."""
_UNWRITTEN = torch.zeros(())
"""Expanded to the shape of a parameter on ranks that do not write it."""


@contextlib.contextmanager
def gathered_with_few_copies(optimizer: Any) -> Iterator[None]:
    """Context in which the optimizer's `sharded_state_dict` has the same content and takes less time and memory."""
    parts = [part for part in parts_of(optimizer) if isinstance(part, DistributedOptimizer)]
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
    """A buffer's tensor of a key, as far as Megatron reads it: the slice of each parameter, in separate memory.

    Megatron would copy the slices of one large tensor again.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}

    def __getitem__(self, place: slice) -> torch.Tensor:
        return self.tensors[place.start, place.stop]


def _state_dp_zero(
    part: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
) -> Any:
    """Replaces `get_parameter_state_dp_zero`: the parameters of each buffer, by key, in host memory.

    Data-parallel ranks that write none have tensors of the same shapes without memory.
    """
    # Other arguments come with a load, and from forms of the state that no checkpoint of ours has.
    if use_gloo_comm or empty_data or not return_on_all_ranks:
        original = DistributedOptimizer.get_parameter_state_dp_zero
        return original(part, use_gloo_comm, empty_data, return_on_all_ranks)
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, (buffer, ranges_by_type) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        [(dtype, ranges)] = ranges_by_type.items()
        whole = {key: _Parameters() for key in KEYS}
        for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
            places = {parameter: buffer.param_index_map[parameter][:2] for parameter in bucket.params_list}
            _gather_bucket(part, bucket, bucket_ranges["param_map"], places, whole)
        state[number] = {dtype: {**whole, "numel_unpadded": buffer.numel_unpadded}}
    return state


def _gather_bucket(part: Any, bucket: Any, shard_ranges: Any, places: Any, whole: dict[str, _Parameters]) -> None:
    """Add a bucket's parameters to `whole`. Collective.

    shard_ranges: parameter -> its range in this rank's shard. places: parameter -> its begin and end in the buffer.
    """
    ranks = part.data_parallel_group.size()
    if ranks == 1:
        for parameter, place in places.items():
            tensors = part._get_main_param_and_optimizer_states(parameter)
            for key, parameters in whole.items():
                parameters.tensors[place] = tensors[key].detach().to("cpu", torch.float32, copy=True)
        return
    # As large as the bucket, with its padding: the shards of all ranks are equally long.
    everyone = torch.empty(bucket.grad_data.numel(), dtype=torch.float32, device=bucket.grad_data.device)
    shards = {key: torch.zeros_like(everyone[: len(everyone) // ranks]) for key in whole}
    for parameter, ranges in shard_ranges.items():
        local = ranges["gbuf_local"]
        tensors = part._get_main_param_and_optimizer_states(parameter)
        for key, shard in shards.items():
            shard[local.start : local.end].copy_(tensors[key].detach())
    writes = part.data_parallel_group.rank() == 0
    for key, shard in shards.items():
        dist.all_gather(list(everyone.chunk(ranks)), shard, group=part.data_parallel_group)
        for begin, end in places.values():
            # Only the first replica is written: the others' memory would be as much again for each rank of a node.
            values = _UNWRITTEN.expand(end - begin)
            if writes:
                values = everyone[begin - bucket.offset : end - bucket.offset].to("cpu", copy=True)
            whole[key].tensors[begin, end] = values
