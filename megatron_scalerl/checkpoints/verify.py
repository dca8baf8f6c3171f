"""Compares two checkpoints of either kind, tensor by tensor and bit by bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_scalerl.checkpoints.assembly import TORCH_NAMES, Assembly, band, band_rows
from megatron_scalerl.checkpoints.conversion import DEFAULTS, Options, Summary, progress
from megatron_scalerl.checkpoints.views import View, open_view
from megatron_scalerl.processes.logs import listed


def verify(first: Path, second: Path, options: Options = DEFAULTS) -> Summary:
    """Compare the tensors of two checkpoints, each Megatron's or Hugging Face's, after conversion to `options.dtype`
    if set.

    Raises ValueError listing the tensors that are missing, have another type or shape, or differ in a bit.
    """
    view = open_view(first)
    nbytes = compare(view, open_view(second), options)
    return Summary(tensors=len(view.tensors), nbytes=nbytes, verified=True)


def compare(first: View, second: View, options: Options) -> int:
    """Compare two opened checkpoints as `verify` does, and return the number of compared bytes."""
    for view, peer in ((first, second), (second, first)):
        missing_names = [name for name in view.tensors if name not in peer.tensors]
        if missing_names:
            raise ValueError(f"{peer.path}: the checkpoint lacks tensors of {view.path}: {listed(missing_names)}")
    outside = {*first.layout.passthrough, *second.layout.passthrough, *first.frozen, *second.frozen}
    pairs = [_pair(first, second, name, None if name in outside else options.dtype) for name in first.tensors]
    total = sum(first_tensor.nbytes for first_tensor, _ in pairs)
    different_names = []
    with progress(options, "comparing", total) as advance:
        for first_tensor, second_tensor in pairs:
            if not _equal(first_tensor, second_tensor, first, second):
                different_names.append(first_tensor.name)
            advance(first_tensor.nbytes)
    if different_names:
        raise ValueError(f"{second.path}: these tensors differ from {first.path}: {listed(different_names)}")
    return total


def _pair(first: View, second: View, name: str, dtype: str | None) -> tuple[Assembly, Assembly]:
    first_tensor = first.tensors[name]
    second_tensor = second.tensors[name]
    if dtype is not None and {first_tensor.dtype, second_tensor.dtype} <= TORCH_NAMES.keys():
        first_tensor = replace(first_tensor, dtype=dtype)
        second_tensor = replace(second_tensor, dtype=dtype)
    if (first_tensor.dtype, first_tensor.shape) != (second_tensor.dtype, second_tensor.shape):
        in_first, in_second = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (first_tensor, second_tensor))
        raise ValueError(f"{second.path}: the tensor {name} is {in_second}, but {in_first} in {first.path}")
    return first_tensor, second_tensor


def _equal(first_tensor: Assembly, second_tensor: Assembly, first: View, second: View) -> bool:
    step = band_rows(first_tensor)
    for start in range(0, first_tensor.rows, step):
        stop = min(first_tensor.rows, start + step)
        # Bits are compared, not values: a NaN equals a NaN with the same bits, and 0.0 differs from -0.0.
        if not np.array_equal(
            band(first_tensor, first.sources, start, stop), band(second_tensor, second.sources, start, stop)
        ):
            return False
    return True
