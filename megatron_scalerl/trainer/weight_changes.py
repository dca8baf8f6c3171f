"""How many elements of the weights an optimizer step changes, counted where Megatron writes the new weights.

In bf16 a small step rounds away in most elements: what changed is what an update has to tell the engines. Megatron's
optimizers with fp32 main weights round them into the policy's parameters in one place, and the old values are
compared there with what is about to be written. Optimizers without main weights of their own (an fp32 policy, the
precision-aware optimizer) write in place, and are not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_scalerl.trainer.optimizer import parts_of
from megatron_scalerl.weights.changes import bits_of

CHUNK = 1 << 24
"""Elements compared at once; temporary memory is three bytes for each."""


class WeightChanges:
    """Counts the elements of this rank's parameters, or of its shard of them, that an optimizer's steps change."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        for part in parts_of(optimizer):
            pairs = getattr(part, "_get_model_and_main_params_data_float16", None)
            if pairs is not None and not part.is_stub_optimizer:
                self._watch(part, pairs)

    def begin(self) -> None:
        """Forget what was counted; before a step."""
        self._counts.zero_()

    def counts(self) -> Tensor:
        """[2] fp64 on the device: elements that changed since `begin`, and elements that were written."""
        return self._counts

    def _watch(self, part: Any, pairs: Any) -> None:
        write = part._copy_main_params_to_model_params

        def counted() -> None:
            for held, main in zip(*pairs()):
                if main is not None:
                    self._compare(held.reshape(-1), main.reshape(-1))
            write()

        part._copy_main_params_to_model_params = counted

    @torch.no_grad()
    def _compare(self, held: Tensor, main: Tensor) -> None:
        for old, new in zip(held.split(CHUNK), main.split(CHUNK)):
            self._counts[0] += (bits_of(old) != bits_of(new.to(old.dtype))).sum()
            self._counts[1] += old.numel()
