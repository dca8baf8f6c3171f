"""vLLM's slot for the policy's adapter, as a module whose parameters weight updates write in place.

Life of the slot:

    start      the engine starts with one slot that holds an adapter of zeros; every request names this adapter
               (`engine.vllm_plugin`)
    record     `weights.live_weights` calls `load_weights`, which calls vLLM's `set_lora` of each layer: `set_lora`
               cuts A and B for the worker's tensor-parallel rank and copies both into the slot
    update     between two steps A and B are written at vLLM's addresses; B comes multiplied by alpha / rank

A slot has room for a rank that may be larger than the adapter's rank. The surplus stays 0.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.lora.utils import parse_fine_tuned_lora_name

from megatron_scalerl.weights.plan import Manifest

_INDEX = 0
"""Index of the only adapter slot in vLLM, which is started with one slot."""
SERVED = [1]
"""vLLM's number of the adapter in each slot; vLLM numbers the adapters on the command line from 1."""


class AdapterSlot(torch.nn.Module):
    """A worker's adapter slot as a module whose only parameters are the A and B matrices that a manifest fills."""

    def __init__(self, manager: Any, manifest: Manifest):
        """Empty the slot.

        manager: vLLM's LoRAModelManager. manifest: the adapter's tensors, under PEFT's names.
        """
        super().__init__()
        self._manager = manager
        self._mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        if self._mapper is not None:
            self._mapper = self._mapper.get_rename_mapper()
        self._ranks = {}
        for meta in manifest:
            projection, is_a = self._parsed(meta.name)
            if is_a:
                self._ranks[projection] = meta.shape[0]
        for layer in manager.modules.values():
            layer.reset_lora(_INDEX)

    def _parsed(self, name: str) -> tuple[str, bool]:
        """Returns (vLLM's name of the projection, whether the tensor is A) for a tensor of the adapter."""
        return parse_fine_tuned_lora_name(name, self._mapper)

    def _parts(self) -> Iterator[tuple[Any, list[str]]]:
        """Yield each layer with the names of the projections that vLLM packs into the layer."""
        for name, layer in self._manager.modules.items():
            yield layer, self._manager.packed_modules.get(name, [name])

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Yield (name, slot's matrix) for A and for B of each projection that has an adapter."""
        for layer, projections in self._parts():
            for projection, a, b in zip(projections, layer.lora_a_stacked, layer.lora_b_stacked):
                rank = self._ranks.get(projection, 0)
                if rank:
                    yield f"{projection}.lora_A", a[_INDEX, 0, :rank]
                    yield f"{projection}.lora_B", b[_INDEX, 0, :, :rank]

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return this module for every target. `live_map` looks for padding in the result, and a slot has none."""
        return self

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put an adapter into the slot by vLLM's `set_lora`."""
        factors = {self._parsed(name): tensor for name, tensor in tensors}
        for layer, projections in self._parts():
            a = [factors.get((projection, True)) for projection in projections]
            b = [factors.get((projection, False)) for projection in projections]
            if len(projections) > 1:
                layer.set_lora(_INDEX, a, b)
            elif a[0] is not None:
                layer.set_lora(_INDEX, a[0], b[0])
