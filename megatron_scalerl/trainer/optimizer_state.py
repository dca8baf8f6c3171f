"""Gathers the state of Megatron's distributed optimizer for a checkpoint, as whole tensors and with few copies.

The life of a state:

1. `checkpoint` asks the optimizer for the sharded state inside `gathered_with_few_copies`.
2. Megatron calls `get_parameter_state_dp_zero`, replaced here by `_state_dp_zero`.
3. For each buffer and key Megatron reads the slices of all parameters, and turns the slices into the checkpoint's
   shards.

Megatron-Core's `DistributedOptimizer.get_parameter_state_dp_zero` zeroes and fills a shard, the list of all ranks'
shards, the concatenation and the result, each a full copy, while the trainer is stopped. Here each shard is gathered
in place, and the result is copied once.

Megatron-Core also drops the padding between buckets, although each parameter's position in the buffer counts the
padding. With several buckets (on GPUs, where gradients are reduced while the backward pass computes), a bucket whose
size is no multiple of 128 makes Megatron-Core save all later parameters from wrong positions. Here each parameter is
taken from the right position.
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
_NO_VALUES = torch.zeros(())
"""Scalar that is expanded to a parameter's shape, without memory, on ranks that do not write the parameter."""


@contextlib.contextmanager
def gathered_with_few_copies(optimizer: Any) -> Iterator[None]:
    """Context in which the optimizer's `sharded_state_dict` takes less time and memory; the result is unchanged."""
    parts = [part for part in parts_of(optimizer) if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part.get_parameter_state_dp_zero = partial(_state_dp_zero, part)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


def live_storages(models: Sequence[Any], optimizer: Any) -> set[int]:
    """Addresses of the storages that the next step overwrites: the weights of `models` and the optimizer's state.

    models: model chunks without Megatron's wrappers.
    """
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    for part in parts_of(optimizer):
        inner = getattr(part, "optimizer", None)
        if inner is not None:
            tensors += [p for group in inner.param_groups for p in group["params"]]
            tensors += [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class _Parameters:
    """The values of all parameters of a buffer for one of KEYS. Megatron takes slices, as of one large tensor.

    Each parameter has separate memory, since Megatron would copy slices of a large tensor once more.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}

    def __getitem__(self, place: slice) -> torch.Tensor:
        return self.tensors[place.start, place.stop]


def _state_dp_zero(
    part: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
) -> Any:
    """Replacement of Megatron's `get_parameter_state_dp_zero`: the values of each buffer, by key, in host memory.

    On data-parallel ranks that write no parameters, the tensors have the right shapes and take no memory.
    """
    # The replacement serves one combination of arguments. With any other, Megatron loads or saves another form.
    if use_gloo_comm or empty_data or not return_on_all_ranks:
        original = DistributedOptimizer.get_parameter_state_dp_zero
        return original(part, use_gloo_comm, empty_data, return_on_all_ranks)
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, (buffer, ranges_by_type) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        [(dtype, ranges)] = ranges_by_type.items()
        buffer_state = {key: _Parameters() for key in KEYS}
        for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
            places = {parameter: buffer.param_index_map[parameter][:2] for parameter in bucket.params_list}
            _gather_bucket(part, bucket, bucket_ranges["param_map"], places, buffer_state)
        state[number] = {dtype: {**buffer_state, "numel_unpadded": buffer.numel_unpadded}}
    return state


def _gather_bucket(
    part: Any, bucket: Any, shard_ranges: Any, places: Any, buffer_state: dict[str, _Parameters]
) -> None:
    """Add a bucket's parameters to `buffer_state`, by key. Collective.

    shard_ranges: parameter -> range in this rank's shard. places: parameter -> (begin, end) in the buffer.
    """
    ranks = part.data_parallel_group.size()
    if ranks == 1:
        for parameter, place in places.items():
            tensors = part._get_main_param_and_optimizer_states(parameter)
            for key, parameters in buffer_state.items():
                parameters.tensors[place] = tensors[key].detach().to("cpu", torch.float32, copy=True)
        return
    # The size includes the bucket's padding, since the shards of all ranks are equally long.
    gathered_bucket = torch.empty(bucket.grad_data.numel(), dtype=torch.float32, device=bucket.grad_data.device)
    shards = {key: torch.zeros_like(gathered_bucket[: len(gathered_bucket) // ranks]) for key in buffer_state}
    for parameter, ranges in shard_ranges.items():
        local = ranges["gbuf_local"]
        tensors = part._get_main_param_and_optimizer_states(parameter)
        for key, shard in shards.items():
            shard[local.start : local.end].copy_(tensors[key].detach())
    writes = part.data_parallel_group.rank() == 0
    for key, shard in shards.items():
        dist.all_gather(list(gathered_bucket.chunk(ranks)), shard, group=part.data_parallel_group)
        for begin, end in places.values():
            # Only data-parallel rank 0 writes to the checkpoint, so only this rank copies the values to host memory.
            values = _NO_VALUES.expand(end - begin)
            if writes:
                values = gathered_bucket[begin - bucket.offset : end - bucket.offset].to("cpu", copy=True)
            buffer_state[key].tensors[begin, end] = values
