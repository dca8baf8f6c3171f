"""The other process of the part `wire`, which reads a tensor that it was handed; imports little, to be quick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from megatron_scalerl.processes.isolated import SendEvent

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""How another process gets at a tensor: a function of PyTorch's and what it is called with."""


def handed(tensor: torch.Tensor) -> Handle:
    """A handle of the tensor for one other process, while this one keeps it. Raises what the driver refuses with."""
    found: Handle = reduce_tensor(tensor)
    return found


def read_sum(handle: Handle, send: SendEvent) -> None:
    """Sends the sum of the tensor of `handed`; `isolated.events` reports what is raised here."""
    rebuild, arguments = handle
    send({"sum": float(rebuild(*arguments).double().sum())})
