"""Counts operations for which a GPU's host would wait, while a step runs on a CPU."""

import contextlib
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READING = {
    aten._local_scalar_dense.default: "item",
    aten.is_nonzero.default: "item",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten.unique_consecutive.default: "unique",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.bincount.default: "bincount",
}
"""Operators whose result, or the shape of it, the host has to have."""
METHODS = ("tolist", "numpy", "cpu")
"""Ways off the device that no operator shows when the device is a CPU."""
ROOTS = ("megatron_scalerl", "megatron")


class DeviceReads(TorchDispatchMode):
    """Every read by what it is and the function that asked: `item megatron/core/optimizer/clip_grads.py:get_grad...`.

    On a CPU all tensors are the host's. What runs inside `on_host` is not counted: it has host tensors on a GPU, too.
    """

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self._paused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = READING.get(func) or _by_mask(func, args)
        if kind == "repeat_interleave" and (kwargs or {}).get("output_size") is not None:  # the host knows its shape
            kind = None
        if kind:
            self._note(kind)
        return func(*args, **(kwargs or {}))

    def on_host(self, function):
        """`function`, uncounted."""

        def uncounted(*args, **keywords):
            self._paused += 1
            try:
                return function(*args, **keywords)
            finally:
                self._paused -= 1

        return uncounted

    @contextlib.contextmanager
    def counting(self):
        """Counts inside; gives what was found."""
        with contextlib.ExitStack() as stack:
            for name in METHODS:
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._noted(name)))
            stack.enter_context(self)
            yield self.found

    def _noted(self, name):
        original = getattr(torch.Tensor, name)

        def method(tensor, *args, **keywords):
            self._note(name)
            self._paused += 1  # tolist of a tensor asks for its parts
            try:
                return original(tensor, *args, **keywords)
            finally:
                self._paused -= 1

        return method

    def _note(self, kind):
        if not self._paused:
            self.found[f"{kind} {_asker()}"] += 1


def _by_mask(func, args):
    """Indexing by a mask counts it first; only writing one number by a mask does not."""
    if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return None
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    return "index by mask" if masks and not (len(args) > 2 and args[2].numel() == 1) else None


def _asker():
    """The innermost function of the package or of Megatron-Core on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        root = next((i for i, part in enumerate(parts[:-1]) if part in ROOTS), None)
        if root is not None:
            return f"{'/'.join(parts[root:])}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
