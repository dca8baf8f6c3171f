"""Finds the elements of the weights that an optimizer step changes.

A small step changes few bf16 weights, because most steps are lost in rounding. A weight update then sends the engines
only the changed elements. Megatron's optimizers with fp32 main weights round the main weights into the policy's
parameters in one function, and this module compares old and new values there. Optimizers without main weights (an
fp32 policy, the precision-aware optimizer) write in place, and are not counted.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_scalerl.trainer.changes_gather import ChangesGather
from megatron_scalerl.trainer.optimizer import parts_of
from megatron_scalerl.weights.change_record import ChangeRecord
from megatron_scalerl.weights.changes import bits_of, find

CHUNK = 1 << 20
"""Elements compared at once on CPUs, few enough for a CPU's cache."""
GPU_CHUNK = 1 << 24
"""Elements compared at once on GPUs, which takes three bytes of temporary memory for each element."""


class WeightChanges:
    """Counts how many of the weights that this rank's optimizer writes are changed by each step.

    `written` also records the changed elements, if weight updates send changes instead of all values.
    """

    def __init__(self, optimizer: Any, device: torch.device):
        self.written = ChangeRecord()
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._chunk = GPU_CHUNK
        if device.type == "cpu":
            self._chunk = CHUNK
        for part in parts_of(optimizer):
            pairs = getattr(part, "_get_model_and_main_params_data_float16", None)
            if pairs is not None and not part.is_stub_optimizer:
                self._watch(part, pairs)

    def begin(self) -> None:
        """Set the counts to 0. Call before each optimizer step."""
        self._counts.zero_()
        self.written.begin_step()

    def counts(self) -> Tensor:
        """[2] fp64 on the device: elements that changed since `begin`, and elements that were written."""
        return self._counts

    def _watch(self, part: Any, pairs: Any) -> None:
        """Make `part`, one of Megatron's optimizers, compare weights before each write; register the written shards.

        pairs: the optimizer's method that returns (parameters, fp32 main weights).
        """
        write = part._copy_main_params_to_model_params

        def count_and_write() -> None:
            for values, main in zip(*pairs()):
                if main is not None:
                    self._compare(values.reshape(-1), main.reshape(-1))
            write()

        shards = [values for values, main in zip(*pairs()) if main is not None and values.is_contiguous()]
        for shard in shards:
            self.written.watch(shard)
        # Only a distributed optimizer has a group and buffers. A buffer for experts may be empty on a stage.
        group = getattr(part, "data_parallel_group", None)
        parameters = []
        for buffer in getattr(part, "buffers", ()):
            parameters += [parameter.data for parameter in buffer.params]
        if group is not None and group.size() > 1 and parameters:
            self.written.gathers.append(ChangesGather(self.written, parameters, shards, group))
        part._copy_main_params_to_model_params = count_and_write

    @torch.no_grad()
    def _compare(self, values: Tensor, main: Tensor) -> None:
        """Count, and record if needed, the elements of `values` that differ from `main` after rounding."""
        records = self.written.is_recording and self.written.covers(values)
        for number, (old, new) in enumerate(zip(values.split(self._chunk), main.split(self._chunk))):
            self._counts[1] += old.numel()
            if records:
                # `find` writes the new values into `old`. The optimizer later writes the same values once more.
                changes = find(bits_of(old), new.to(old.dtype))
                self._counts[0] += changes.positions.numel()
                self.written.add(values, number * self._chunk, changes)
            else:
                self._counts[0] += (bits_of(old) != bits_of(new.to(old.dtype))).sum()
