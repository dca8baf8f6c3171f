"""Compares two checkpoints, of either kind, tensor by tensor and bit by bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_scalerl.checkpoints.assembly import TORCH_NAMES, Assembly, band, band_rows
from megatron_scalerl.checkpoints.conversion import Options, Summary, progress
from megatron_scalerl.checkpoints.views import View, open_view
from megatron_scalerl.processes.logs import listed


def verify(first: Path, second: Path, options: Options | None = None) -> Summary:
    """Compare two folders. With `options.dtype` both are compared in that type.

    Raises ValueError listing the tensors that are missing, have another type or shape, or differ in a bit.
    """
    options = options or Options()
    view = open_view(first)
    nbytes = compare(view, open_view(second), options)
    return Summary(tensors=len(view.tensors), nbytes=nbytes, verified=True)


def compare(first: View, second: View, options: Options) -> int:
    """Compare two opened checkpoints, as `verify` does; returns the number of bytes that were compared."""
    for view, other in ((first, second), (second, first)):
        missing = [name for name in view.tensors if name not in other.tensors]
        if missing:
            raise ValueError(f"{other.path}: it lacks tensors of {view.path}: {listed(missing)}")
    outside = {*first.layout.passthrough, *second.layout.passthrough, *first.frozen, *second.frozen}
    pairs = [_pair(first, second, name, None if name in outside else options.dtype) for name in first.tensors]
    total = sum(ours.nbytes for ours, _ in pairs)
    different = []
    with progress(options, "comparing", total) as advance:
        for ours, theirs in pairs:
            if not _equal(ours, theirs, first, second):
                different.append(ours.name)
            advance(ours.nbytes)
    if different:
        raise ValueError(f"{second.path}: these tensors differ from {first.path}: {listed(different)}")
    return total


def _pair(first: View, second: View, name: str, dtype: str | None) -> tuple[Assembly, Assembly]:
    ours = first.tensors[name]
    theirs = second.tensors[name]
    if dtype is not None and {ours.dtype, theirs.dtype} <= TORCH_NAMES.keys():
        ours = replace(ours, dtype=dtype)
        theirs = replace(theirs, dtype=dtype)
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        in_first, in_second = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (ours, theirs))
        raise ValueError(f"{second.path}: {name} is {in_second}, and {in_first} in {first.path}")
    return ours, theirs


def _equal(ours: Assembly, theirs: Assembly, first: View, second: View) -> bool:
    step = band_rows(ours)
    for start in range(0, ours.rows, step):
        stop = min(ours.rows, start + step)
        # Of bits, not values: a NaN equals itself, and 0.0 is not -0.0.
        if not np.array_equal(band(ours, first.sources, start, stop), band(theirs, second.sources, start, stop)):
            return False
    return True
