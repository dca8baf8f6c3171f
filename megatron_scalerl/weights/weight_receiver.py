"""Receives weight updates in vLLM's workers: vLLM's weight-transfer protocol over this package's groups.

Life of a receiver, by the engine's HTTP paths:

    init_weight_transfer_engine   join the groups of the senders, get the shard's plan
    update_weights                receive, check every bucket, write the payloads into the live parameters

A model whose parameters only vLLM's loader can fill (`live_weights`) goes through vLLM's layerwise reload instead:
`start_weight_update` moves the parameters to the meta device, `finish_weight_update` copies new parameters to the old
addresses. A failed update leaves the parameters partly written or loaded. The next `start` discards this state first,
so that a later update loads the whole model again; until then the model must not run.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

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

from megatron_scalerl.models.llama4 import VISION
from megatron_scalerl.weights.adapter_slot import SERVED, AdapterSlot
from megatron_scalerl.weights.digest import combine
from megatron_scalerl.weights.live_weights import LiveWeights
from megatron_scalerl.weights.plan import (
    Connection,
    Manifest,
    WeightPlan,
    all_of,
    from_json,
    manifest_from_json,
    needs_to_json,
)
from megatron_scalerl.weights.transport import join_sender
from megatron_scalerl.weights.transport.frames import Payload, assembled_tensors, receive
from megatron_scalerl.weights.transport.gloo import Group

logger = logging.getLogger(__name__)


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """Body of a request to /init_weight_transfer_engine, a path that requires the run's secret."""

    connection: dict[str, Any]
    """A `Connection` as JSON data."""
    places: list[tuple[int, int]]
    """For each worker of this engine, by rank: (number of the worker's shard, rank in the shard's groups)."""
    plans: list[str]
    """For each shard, the shard's part of the plan as JSON (`plan.to_json` of `WeightPlan.of_shard`)."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of a request to /update_weights."""

    version: int
    """Policy version of the weights."""


class WeightReceiver(WeightTransferEngine[ConnectInfo, UpdateInfo]):
    """Receives weight updates in one worker of an engine, and writes the weights into the model."""

    init_info_cls = ConnectInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.digest = ""
        """Digest of the last update's buckets (hex), empty while no update is complete."""
        self._groups: dict[int, Group] = {}
        """Number of a sender -> the broadcast group of this sender."""
        self._plan: WeightPlan | None = None
        """The plan of this worker's shard."""
        self._held_version: int | None = None
        """Policy version of the model's parameters. None unless all values came over the present groups."""
        self._copies: dict[str, list[str]] = {}
        """Name of a tied parameter -> the further names under which vLLM's loader also needs the parameter."""

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Leave earlier groups and join the senders' groups. Raises ValueError for an invalid connection or plan."""
        self.shutdown()
        self._held_version = None
        connection = msgspec.convert(init_info.connection, Connection)
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + get_world_group().rank
        shard, rank = init_info.places[worker]
        self._plan = from_json(init_info.plans[shard])
        for sender, _ in sorted(self._plan.pairs):
            self._groups[sender] = join_sender(connection, rank, sender, shard)

    def start_weight_update(self) -> None:
        """Discard the state of a failed update, and prepare the model for new parameters."""
        self._discard_failed_update()
        if self._live_weights() is not None:
            return
        self._copies = self._tied_names()
        if self.device.type == "cpu":
            self._reset_expert_kernels()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load one whole update.

        Overridden because the base class synchronizes an accelerator, which a CPU build of torch refuses.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive an update into the model.

        Raises RuntimeError unless each tensor is loaded once and every parameter is set.
        """
        plan = self._plan
        if not self._groups or plan is None:
            raise RuntimeError("weight update: the worker has no connection to the trainer")
        version = update_info.version
        self.digest = ""
        live = self._live_weights()
        digests: list[int] = []
        # Live weights write each payload before the next is requested, so memory for two buckets is enough.
        reuse = live is not None
        payloads = receive(self._groups, plan, version, digests, held_version=self._held_version, reuse=reuse)
        # During the update the parameters are a mixture of versions.
        self._held_version = None
        try:
            if live is None:
                self._load(plan, payloads)
            else:
                for payload in payloads:
                    live.write(payload)
                live.finish()
        except BaseException:
            self.shutdown()
            raise
        # vLLM's loader takes whole tensors, not changes: without a held version only whole updates are accepted.
        self._held_version = None if live is None else version
        self.digest = combine(digests)

    def _live_weights(self) -> LiveWeights | None:
        """The live parameters that updates write, None if updates go through vLLM's loader."""
        if self._plan is None:
            return None
        return _live_weights_of(self.model, self._plan.parameters)

    def _load(self, plan: WeightPlan, payloads: Iterator[Payload]) -> None:
        """Pass whole tensors to vLLM's loader."""
        model = cast(Any, self.model)
        expected_names = {name for name, _ in self.model.named_parameters() if not name.startswith(VISION)}
        arrivals = []

        def tensors() -> Any:
            for name, tensor in assembled_tensors(payloads, plan):
                arrivals.append(name)
                yield name, tensor
                for copy in self._copies.get(name, ()):
                    yield copy, tensor

        loaded_names = model.load_weights(tensors())
        needed_names = [meta.name for meta, rectangles in zip(plan.parameters, plan.needs[0]) if rectangles]
        if sorted(arrivals) != sorted(needed_names):
            raise RuntimeError(
                f"weight update: {len(arrivals)} tensors arrived, not the {len(needed_names)} that this worker needs"
            )
        if loaded_names is not None and (missing_names := sorted(expected_names - loaded_names)):
            raise RuntimeError(f"weight update: the model's loader did not set the parameters {missing_names[:3]}")
        self._refuse_partial_layers()

    def finish_weight_update(self) -> None:
        """End vLLM's layerwise reload, if updates use one: copy the new parameters to the old addresses."""
        if self._live_weights() is None:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the groups."""
        groups = self._groups
        # The groups are forgotten first, since a group that fails to close would make every later shutdown fail.
        self._groups = {}
        for group in groups.values():
            group.close()

    def _tied_names(self) -> dict[str, list[str]]:
        """Parameter -> the parameter's further names, such as the name of a head that is tied to the embedding.

        A layerwise reload makes two parameters of a tied weight, and on CPUs each layer packs its copy. So both
        parameters are loaded, and then copied to the shared address.
        """
        first_names: dict[int, str] = {}
        copies: dict[str, list[str]] = {}
        # named_modules yields a layer with several names only once, under the first name.
        for prefix, layer in self.model.named_modules():
            for key, parameter in layer.named_parameters(recurse=False):
                name = f"{prefix}.{key}"
                first_name = first_names.setdefault(id(parameter), name)
                if first_name != name:
                    copies.setdefault(first_name, []).append(name)
        return copies

    def _refuse_partial_layers(self) -> None:
        """Raise RuntimeError for a layer that was loaded in part: missing values would silently stay old."""
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load() and 0 < info.load_numel < self._loadable(layer, info.load_numel_total or 0):
                raise RuntimeError(
                    f"weight update: {name}: only {info.load_numel} of {info.load_numel_total} values have arrived"
                )

    @staticmethod
    def _loadable(layer: torch.nn.Module, total: int) -> int:
        """Number of a layer's values that a checkpoint has: all values but the padding of a vocabulary."""
        indices = getattr(layer, "shard_indices", None)
        if indices is None:
            return total
        rows = indices.num_org_elements + indices.num_added_elements
        return total * rows // indices.num_elements_padded

    def _reset_expert_kernels(self) -> None:
        """Make vLLM set up the expert kernels again.

        vLLM 0.32.0 packs expert weights for the CPU only where a layer has no kernel yet
        (UnquantizedFusedMoEMethod._setup_kernel). With the old kernels, an update would replace packed weights by
        unpacked weights. On GPUs nothing is packed, and captured graphs require the kernels to stay.
        """
        for layer in self.model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _discard_failed_update(self) -> None:
        # Without this reset vLLM would go on with the failed reload: vLLM keeps a layer's old parameters until the
        # whole layer is loaded.
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()


def needs_of(model: Any, manifest: str) -> str:
    """The rectangles of a manifest's tensors that a worker's model needs, as JSON.

    A model that vLLM's loader fills needs all tensors as a whole.

    Raises ValueError, with a name, for tensors that the model does not have.
    """
    tensors = manifest_from_json(manifest)
    live = _live_weights_of(model, tensors)
    if live is None:
        return needs_to_json(all_of(tensors))
    return needs_to_json(live.needs)


def live_digest(model: Any) -> str:
    """Digest of the present values of the model's parameters (hex); empty if updates go through vLLM's loader."""
    _, live = getattr(model, "_msrl_live", ((), None))
    if live is None:
        return ""
    manager = getattr(model, "lora_manager", None)
    if manager is not None and manager.lora_index_to_id != SERVED:
        return "of an adapter that is not served"
    return f"{live.digest():016x}"


def _live_weights_of(model: Any, manifest: Manifest) -> LiveWeights | None:
    """The model's live parameters, recorded once for a manifest; None for a model that only vLLM's loader can fill.

    Raises ValueError, with a name, for tensors that the model does not have.
    """
    recorded_manifest, live = getattr(model, "_msrl_live", ((), None))
    if recorded_manifest != manifest:
        manager = getattr(model, "lora_manager", None)
        try:
            live = LiveWeights(model if manager is None else AdapterSlot(manager, manifest), manifest)
        except NotImplementedError as error:
            if manager is not None:
                # vLLM's loader takes no adapters, so the error is final here.
                raise ValueError(str(error)) from error
            logger.warning("updates go through vLLM's loader, since parameters cannot be written in place: %s", error)
            live = None
        model._msrl_live = (manifest, live)
    return cast(LiveWeights | None, live)
