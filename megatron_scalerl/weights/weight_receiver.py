"""Receives weight updates in vLLM's workers: vLLM's weight-transfer protocol over our broadcast groups.

    init_weight_transfer_engine   join the groups, get the plan
    update_weights                receive, check every bucket, write what it has into the live parameters

With weights.transaction staged the buckets have arrived before, while the model went on generating:

    msrl_stage_weights            receive in a thread (`weights.staging`); msrl_staged_weights says how far it is
    update_weights                write what has arrived

A model whose parameters only its own loader can fill (`live_weights`) goes through vLLM's layerwise reload instead:
`start_weight_update` moves the parameters to the meta device, `finish_weight_update` copies the new ones to their old
addresses. A failed update leaves the parameters partly written or loaded. The next `start` discards that state first,
so that a later one loads the whole model again; until then the model must not run.
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
from megatron_scalerl.weights.changes import Changes
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
from megatron_scalerl.weights.staging import StagedUpdate
from megatron_scalerl.weights.transport import join_sender
from megatron_scalerl.weights.transport.frames import Values, assembled, receive
from megatron_scalerl.weights.transport.gloo import Group

logger = logging.getLogger(__name__)


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine, a path that requires the run's secret."""

    connection: dict[str, Any]
    """A `Connection` as JSON data."""
    places: list[tuple[int, int]]
    """[shard, rank in the groups of it] of each of this engine's workers."""
    plans: list[str]
    """[shards] what will be sent to each (`plan.to_json` of `WeightPlan.of_shard`)."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of /update_weights."""

    version: int
    """Policy version of the weights."""
    staged: bool = False
    """They were staged."""


class WeightReceiver(WeightTransferEngine[ConnectInfo, UpdateInfo]):
    """One worker's receiver."""

    init_info_cls = ConnectInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.digest = ""
        self._groups: dict[int, Group] = {}
        self._plan: WeightPlan | None = None  # of this worker's shard
        self._holds: int | None = None  # the version, if the live parameters have it from these groups
        self._copies: dict[str, list[str]] = {}
        self._staged: StagedUpdate | None = None

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Join the senders' groups, leaving earlier ones. Raises ValueError for an invalid connection or plan."""
        self.shutdown()
        self._holds = None
        connection = msgspec.convert(init_info.connection, Connection)
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + get_world_group().rank
        shard, rank = init_info.places[worker]
        self._plan = from_json(init_info.plans[shard])
        for sender, _ in sorted(self._plan.pairs):
            self._groups[sender] = join_sender(connection, rank, sender, shard)

    def start_weight_update(self) -> None:
        """Prepare the model for new parameters; discards the state of a failed update first."""
        self._discard_failed_update()
        if self._written() is not None:
            return
        self._copies = self._tied()
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

    def stage(self, version: int) -> None:
        """Begin to receive an update while the model goes on. Raises RuntimeError for one beside another."""
        plan = self._connected()
        if self._staged is not None:
            raise RuntimeError(f"weight update: version {version} beside {self._staged.version}, which is staged")
        holds = self._holds if self._written() else None
        self._staged = StagedUpdate(self._groups, plan, version, holds=holds)

    def staged(self) -> str | None:
        """None while a staged update is arriving, "" once all of it has, else why it will not."""
        return "no weight update is staged" if self._staged is None else self._staged.state()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the plan's tensors. Raises RuntimeError unless each is loaded once and every parameter is set."""
        plan, version = self._connected(), update_info.version
        self.digest = ""
        live = self._written()
        if update_info.staged:
            staged, self._staged = self._staged, None
            if staged is None or staged.version != version:
                found = "none" if staged is None else f"version {staged.version}"
                raise RuntimeError(f"weight update: expected version {version} to be staged, found {found}")
            digests, parts = staged.digests, staged.take()
        else:
            digests = []
            written = live is not None  # at once, so that two buckets of memory are enough
            holds = self._holds if written else None
            parts = receive(self._groups, plan, version, digests, holds=holds, reuse=written)
        self._holds = None
        try:
            if live is None:
                self._load(plan, parts)
            else:
                for part in parts:
                    live.write(part)
                live.finish()
        except BaseException:
            self.shutdown()
            raise
        self._holds = version
        self.digest = combine(digests)

    def _connected(self) -> WeightPlan:
        """The plan. Raises RuntimeError without a connection."""
        if not self._groups or self._plan is None:
            raise RuntimeError("weight update: expected a connection to the trainer, found none")
        return self._plan

    def _written(self) -> LiveWeights | None:
        """The live parameters, if updates are written into them; None if vLLM's loader takes them."""
        return None if self._plan is None else _live(self.model, self._plan.parameters)

    def _load(self, plan: WeightPlan, parts: Iterator[Values | list[Changes]]) -> None:
        """Give whole tensors to vLLM's loader."""
        model = cast(Any, self.model)
        expected = {name for name, _ in self.model.named_parameters() if not name.startswith(VISION)}
        taken = []

        def counted() -> Any:
            for name, tensor in assembled(parts, plan):
                taken.append(name)
                yield name, tensor
                for copy in self._copies.get(name, ()):
                    yield copy, tensor

        loaded = model.load_weights(counted())
        wanted = [meta.name for meta, needs in zip(plan.parameters, plan.needs[0]) if needs]
        if sorted(taken) != sorted(wanted):
            raise RuntimeError(f"weight update: expected {len(wanted)} parameters, took {len(taken)}")
        if loaded is not None and (missing := sorted(expected - loaded)):
            raise RuntimeError(f"weight update: expected every parameter of the model, missing {missing[:3]}")
        self._refuse_partial_layers()

    def finish_weight_update(self) -> None:
        """Copy the new parameters to their final addresses."""
        if self._written() is None:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the groups; a staged update is lost."""
        staged, self._staged = self._staged, None
        groups, self._groups = self._groups, {}
        if staged is not None:
            staged.discard()
            return
        for group in groups.values():
            group.close()

    def _tied(self) -> dict[str, list[str]]:
        """Parameter -> its other names, as of a head that is tied to the embedding.

        A layerwise reload separates them, and on CPUs each packs weights of its own: both are loaded, and then
        copied to the address that they share.
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

    def _refuse_partial_layers(self) -> None:
        """A fused layer that was received in part would silently keep its old values elsewhere."""
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load() and 0 < info.load_numel < self._loadable(layer, info.load_numel_total or 0):
                raise RuntimeError(
                    f"weight update: {name}: expected {info.load_numel_total} values, found {info.load_numel}"
                )

    @staticmethod
    def _loadable(layer: torch.nn.Module, total: int) -> int:
        """Values that a checkpoint has for a layer: without the padding of vocabularies."""
        indices = getattr(layer, "shard_indices", None)
        if indices is None:
            return total
        rows = indices.num_org_elements + indices.num_added_elements
        return total * rows // indices.num_elements_padded

    def _reset_expert_kernels(self) -> None:
        """Make vLLM set up its expert kernels again.

        vLLM 0.32.0 packs expert weights for the CPU only where a layer has no kernel yet
        (UnquantizedFusedMoEMethod._setup_kernel): an update would replace packed weights by unpacked ones. On GPUs
        nothing is packed, and captured graphs require the kernels to stay.
        """
        for layer in self.model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _discard_failed_update(self) -> None:
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()


def needs_of(model: Any, manifest: str) -> str:
    """What a worker's model needs of a manifest's tensors, as JSON: what its loader reads, or everything.

    Raises ValueError for tensors that are not the model's, by name.
    """
    tensors = manifest_from_json(manifest)
    live = _live(model, tensors)
    return needs_to_json(all_of(tensors) if live is None else live.needs)


def live_digest(model: Any) -> str:
    """Digest of what the model's parameters hold now (hex), empty if they are not known one by one."""
    _, live = getattr(model, "_msrl_live", ((), None))
    return "" if live is None else f"{live.digest():016x}"


def _live(model: Any, manifest: Manifest) -> LiveWeights | None:
    """The model's live parameters, None where only its loader can fill them; recorded once for a manifest.

    Raises ValueError for tensors that are not the model's, by name.
    """
    known = getattr(model, "_msrl_live", None)
    if known is None or known[0] != manifest:
        try:
            live = LiveWeights(model, manifest)
        except NotImplementedError as error:
            logger.warning("updates go through vLLM's own loader: %s", error)
            live = None
        known = model._msrl_live = (manifest, live)
    return known[1]
