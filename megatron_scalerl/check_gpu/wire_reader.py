"""The other process of the part `wire`, which reads a tensor that it was handed; imports little, to be quick."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing  # noqa: F401  (teaches that pickler to share tensors)

from megatron_scalerl.apart import Say


def handed(tensor: Any) -> bytes:
    """A handle of the tensor for one other process, while this one keeps it. Raises what the driver refuses with."""
    return bytes(ForkingPickler.dumps(tensor))


def read_sum(handle: bytes, say: Say) -> None:
    """Says the sum of the tensor of `handed`; `apart.events` tells what is raised here."""
    say({"sum": float(pickle.loads(handle).double().sum())})
