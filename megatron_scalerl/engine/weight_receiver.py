"""The engine's end of a weight update: vLLM's weight-transfer protocol over our wire.

    init_weight_transfer_engine   join the group, learn the manifest
    start_weight_update           vLLM's layerwise reload takes the parameters off
    update_weights                receive, check every bucket, load
    finish_weight_update          vLLM's layerwise reload puts the new parameters in their old places

An update that breaks leaves the parameters half loaded. The next `start` takes that back first, so that a
whole later update is loaded as if the broken one had never begun; until then the model must not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import msgspec
import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from megatron_scalerl.checkpoints.manifest import Manifest, from_json
from megatron_scalerl.models.llama4 import VISION
from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.digest import combine
from megatron_scalerl.weights.transport.gloo import Group, receive
from megatron_scalerl.weights.transport.nccl import NcclGroup


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine, a path that demands the run's secret."""

    connection: dict[str, Any]
    """A `transport.Connection` as JSON data."""
    rank_offset: int
    """Rank of this engine's first worker in the group."""
    manifest: str
    """What will be sent (`manifest.to_json`)."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of /update_weights."""

    version: int


class GlooReceiver(WeightTransferEngine[ConnectInfo, UpdateInfo]):
    """One worker's end over gloo."""

    init_info_cls = ConnectInfo
    update_info_cls = UpdateInfo
    group_cls: ClassVar[type[Group]] = Group

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.digest = ""
        self._group: Group | None = None
        self._manifest: Manifest = ()
        self._copies: dict[str, list[str]] = {}

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Join the sender's group, leaving an earlier one. Raises ValueError for a broken connection."""
        self.shutdown()
        connection = msgspec.convert(init_info.connection, Connection)
        self._manifest = from_json(init_info.manifest)
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + get_world_group().rank
        self._group = self.group_cls(connection, rank)

    def start_weight_update(self) -> None:
        """Take the parameters off the model; the state of a failed update is discarded first."""
        self._abandon()
        self._copies = self._tied()
        if self.device.type == "cpu":
            self._forget_expert_kernels()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load one whole update.

        The base class then synchronises an accelerator, which a CPU build of torch refuses.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Every name of the manifest once, every parameter of the policy from it. Raises RuntimeError."""
        group, model = self._group, cast(Any, self.model)
        if group is None:
            raise RuntimeError("weight update: expected a connection to the trainer, found none")
        self.digest = ""
        expected = {name for name, _ in self.model.named_parameters() if not name.startswith(VISION)}
        digests: list[int] = []
        taken: list[str] = []

        def counted() -> Any:
            for name, tensor in receive(group, self._manifest, update_info.version, digests):
                taken.append(name)
                yield name, tensor
                for copy in self._copies.get(name, ()):
                    yield copy, tensor

        try:
            loaded = model.load_weights(counted())
            if taken != [meta.name for meta in self._manifest]:
                raise RuntimeError(f"weight update: expected {len(self._manifest)} parameters, took {len(taken)}")
            if loaded is not None and (missing := sorted(expected - loaded)):
                raise RuntimeError(f"weight update: expected every parameter of the model, missing {missing[:3]}")
            self._refuse_gaps()
        except BaseException:
            self.shutdown()
            raise
        self.digest = combine(digests)

    def finish_weight_update(self) -> None:
        """Put the new parameters in place."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _tied(self) -> dict[str, list[str]]:
        """Parameter -> other names of the same one: a head that is tied to the embedding.

        A layerwise reload takes them apart, and on CPUs each packs weights of its own: both are loaded, and then
        put back into the one place that they share.
        """
        first: dict[int, str] = {}
        found: dict[str, list[str]] = {}
        for prefix, layer in self.model.named_modules():  # each layer once, under its first name
            for key, parameter in layer.named_parameters(recurse=False):
                name = f"{prefix}.{key}"
                original = first.setdefault(id(parameter), name)
                if original != name:
                    found.setdefault(original, []).append(name)
        return found

    def _refuse_gaps(self) -> None:
        """A fused layer of which only a part came would keep its old rest without a word."""
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load() and 0 < info.load_numel < self._loadable(layer, info.load_numel_total or 0):
                raise RuntimeError(
                    f"weight update: {name}: expected {info.load_numel_total} values, found {info.load_numel}"
                )

    @staticmethod
    def _loadable(layer: torch.nn.Module, total: int) -> int:
        """Values a checkpoint holds for a layer: vLLM pads vocabularies beyond it."""
        indices = getattr(layer, "shard_indices", None)
        if indices is None:
            return total
        rows = indices.num_org_elements + indices.num_added_elements
        return total * rows // indices.num_elements_padded

    def _forget_expert_kernels(self) -> None:
        """Have vLLM set up its expert kernels anew.

        vLLM 0.32.0 packs expert weights for the CPU only where a layer has no kernel yet
        (UnquantizedFusedMoEMethod._setup_kernel): an update would put unpacked weights in the packed ones' place.
        On GPUs that step does nothing, and captured graphs need the kernels to stay.
        """
        for layer in self.model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _abandon(self) -> None:
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()


class NcclReceiver(GlooReceiver):
    """One worker's end over NCCL."""

    group_cls = NcclGroup
