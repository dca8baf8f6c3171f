"""Copies host tensors to the device without waiting.

A copy from pageable memory makes the host wait until the stream reaches it. Here each tensor is pinned first, and its
copy is queued on the current stream before the kernels that read it. Pinned memory comes from PyTorch's caching host
allocator, which records an event of the copying stream and reuses the memory only after that event. To read a tensor
on a stream other than the current one, make that stream wait and call `record_stream`; the trainer's schedules
compute on one stream.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def staged(tree: T, device: torch.device) -> T:
    """`tree` with every host tensor in it on `device`; on a CPU `tree` itself.

    A tree is a tensor, or a dataclass or tuple of trees; other values are unchanged. An object that occurs twice is
    sent once and shared again. The call returns before the copies are done.
    """
    if device.type == "cpu":
        return tree
    moved: T = _moved(tree, device, {})
    return moved


def _moved(tree: Any, device: torch.device, moved: dict[int, Any]) -> Any:
    """The tree on the device; `moved` maps the ids of its objects to what replaces them."""
    if id(tree) in moved:
        return moved[id(tree)]
    result = tree
    if isinstance(tree, Tensor):
        assert tree.device.type == "cpu", tree.device
        result = _pinned(tree).to(device, non_blocking=True)
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = {field.name: _moved(getattr(tree, field.name), device, moved) for field in fields(tree)}
        result = replace(tree, **parts)
    elif isinstance(tree, tuple):
        result = tuple(_moved(part, device, moved) for part in tree)
    moved[id(tree)] = result
    return result


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory()
