"""Copies a micro-batch's host tensors to the device in one asynchronous copy, from one pinned buffer.

A copy from pageable memory makes the host wait until the stream reaches the copy, once for every array of every
micro-batch. Here a micro-batch is one copy, queued on the current stream before the kernels that read the copy.

The pinned buffer comes from PyTorch's caching host allocator, which records an event of the copying stream and reuses
the buffer only after that event. So nothing here waits, and nothing may write into the buffer after the copy. The
device tensors are views of one allocation. To read the tensors on a stream other than the current stream, make that
stream wait and call `record_stream`; the trainer's schedules compute on one stream.
"""

from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

ALIGNMENT = 256
"""Alignment (bytes) of each tensor in the buffer; attention kernels require 16."""


def staged(tree: T, device: torch.device) -> T:
    """`tree` with every host tensor copied to `device`; `tree` itself if the device is a CPU.

    A tree is a tensor, or a dataclass or tuple of trees; other values are unchanged. An object that occurs twice is
    copied once and shared again. The call returns before the copy is done.
    """
    if device.type == "cpu":
        return tree
    tensors: dict[int, Tensor] = {}
    _collect(tree, tensors)
    device_objects: dict[int, Any] = dict(zip(tensors, _device_copies(list(tensors.values()), device)))
    return _rebuilt_tree(tree, device_objects)


def _collect(tree: Any, tensors: dict[int, Tensor]) -> None:
    """Add every tensor in `tree` to `tensors`, which maps id(tensor) to the tensor."""
    if isinstance(tree, Tensor):
        assert tree.device.type == "cpu", tree.device
        tensors[id(tree)] = tree
    for part in _parts(tree):
        _collect(part, tensors)


def _parts(tree: Any) -> list[Any]:
    if is_dataclass(tree):
        return [getattr(tree, field.name) for field in fields(tree)]
    if isinstance(tree, tuple):
        return list(tree)
    return []


def _device_copies(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The copies of host tensors on `device`, made by one asynchronous copy of a pinned buffer."""
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
    *starts, total = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    host = _pinned(total)
    for tensor, start, size in zip(tensors, starts, sizes):
        host[start : start + size].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    block = torch.empty(total, dtype=torch.uint8, device=device)
    block.copy_(host, non_blocking=True)
    return [
        block[start : start + size].view(tensor.dtype).view(tensor.shape)
        for tensor, start, size in zip(tensors, starts, sizes)
    ]


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _rebuilt_tree(tree: Any, device_objects: dict[int, Any]) -> Any:
    """`tree` with every host object replaced by `device_objects[id(object)]`.

    Rebuilt dataclasses are added to `device_objects`, so that an object that occurs twice is rebuilt once.
    """
    if id(tree) in device_objects:
        return device_objects[id(tree)]
    if is_dataclass(tree) and not isinstance(tree, type):
        parts = {field.name: _rebuilt_tree(getattr(tree, field.name), device_objects) for field in fields(tree)}
        device_objects[id(tree)] = replace(tree, **parts)
        return device_objects[id(tree)]
    if isinstance(tree, tuple):
        return tuple(_rebuilt_tree(part, device_objects) for part in tree)
    return tree
