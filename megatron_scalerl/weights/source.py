"""The trainer's weights as parts of Hugging Face tensors, read from this rank's shards.

Life of a source:

    create      all ranks share places in the layout; the first plan is for workers that need everything
    plan_for    when engines connect, all ranks plan updates for the shards' needs, and compare the plans' digests
    begin       before each update, all ranks wait for parameters that Megatron still gathers
    as_sent     a sender reads a part: a view of a parameter, or of weights with merged adapters

The family's weight map (models/family.py) serves in one direction to load a checkpoint and in the reverse direction
to send the weights; there is no second table.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.checkpoints.hf_folder import EXPERT, FUSED_NORMS, GROUPED_EXPERT, LAYER, HfReader, open_folder
from megatron_scalerl.distributed.parallel import Parallel, unwrap
from megatron_scalerl.models.adapters import is_adapter
from megatron_scalerl.models.family import Family, Rule
from megatron_scalerl.weights.owners import Place, SendPlan, manifest, send_plan
from megatron_scalerl.weights.plan import Needs, WeightPlan, all_of, within


def load_hf(chunks: Sequence[Any], family: Family, hf_path: str | Path, parallel: Parallel) -> None:
    """Fill this rank's shards from a Hugging Face folder, reading only the slices that the rank needs.

    Parameters are converted to the model's dtype; padded rows of the vocabulary become 0. Raises ValueError for a
    missing file or tensor and for a shape that differs from the map.
    """
    check_held(chunks, family, parallel)
    fill(chunks, family, HfReader(open_folder(hf_path)).read, parallel)


def fill(chunks: Sequence[Any], family: Family, read: Callable[..., Tensor], parallel: Parallel) -> None:
    """Fill this rank's shards of all tensors in the weight map.

    `read(name, index, shape)` returns the part at `index` of the tensor `name`, whose whole shape is `shape`.
    """
    parameters = canonical_parameters(chunks, parallel)
    for rule in family.rules:
        parameter = parameters.pop(rule.megatron, None)
        if parameter is None:
            continue
        data = parameter.data.zero_()
        for piece in rule.pieces(*_shard_of(rule, parallel)):
            piece.of_shard(data).copy_(read(piece.hf_name, piece.hf_index, rule.hf_shapes[piece.hf_name]))


def check_held(chunks: Sequence[Any], family: Family, parallel: Parallel) -> None:
    """Check that the family's Hugging Face format holds everything that the model trains or keeps.

    Raises ValueError for a parameter or a persistent buffer that an export to this format would lose.
    """
    rules = {rule.megatron for rule in family.rules}
    names = set(canonical_parameters(chunks, parallel)) - rules
    if extras := sorted(name for name in names if not is_adapter(name)):
        raise ValueError(
            f"megatron.model: an export as {family.name} would lose {extras[0]}; leave out the option that adds it"
        )


class MegatronWeightSource:
    """The trained policy's weights as parts of Hugging Face tensors. Each rank reads the rank's own shards.

    Every rank creates a source; the constructor is collective. Until `plan_for`, the plan is for workers that need
    everything.
    """

    def __init__(
        self, chunks: Sequence[Any], parallel: Parallel, *, most_senders: int = 1, family: Family | None = None
    ):
        """most_senders: largest number of ranks that send; the ranks of one copy of the model send in any case.

        family: the weight map that names the tensors, such as the adapters' map to send adapters alone; None: the
        policy's.
        """
        self.parallel = parallel
        self.family: Family = family or unwrap(chunks[0]).family
        self._chunks = chunks
        self._parameters = canonical_parameters(chunks, parallel)
        self._adapter_functions = _adapter_functions(chunks)
        self._last_call: tuple[str, Tensor] | None = None
        """The last call of a function of `_adapter_functions` in this update: the parameter's name and the result."""
        config = unwrap(chunks[0]).config
        self._dtype = str(config.params_dtype).removeprefix("torch.")
        self.manifest = manifest(self.family, self._dtype)
        self._stages = _stage_of_layer(config.num_layers, self._parameters, parallel)
        self._places = _places(parallel)
        self._most_senders = max(most_senders, 1)
        self._sends = self._planned_sends([all_of(self.manifest)])

    def plan_for(self, needs: Sequence[Needs]) -> WeightPlan:
        """Plan updates for the needs of each shard's workers. The plan is the same on all ranks. Collective.

        Raises ValueError for needs that are outside of the tensors, RuntimeError if the ranks' plans differ.
        """
        self._sends = self._planned_sends(needs)
        _check_same(self.plan.digests, self.parallel)
        return self.plan

    def _planned_sends(self, needs: Sequence[Needs]) -> SendPlan:
        return send_plan(
            self.family, self._places, self._stages, needs, dtype=self._dtype, most_senders=self._most_senders
        )

    @property
    def plan(self) -> WeightPlan:
        """The plan of every update until the next `plan_for`."""
        return self._sends.plan

    @property
    def sender(self) -> int | None:
        """This rank's number among the senders; None for a rank that sends no part."""
        if self.parallel.rank not in self._sends.ranks:
            return None
        return self._sends.ranks.index(self.parallel.rank)

    def read(self, part: int) -> Tensor:
        """The values of one of this rank's parts, in the rectangle's shape: a view of the parameter."""
        return self._part(part, self._parameters[self._sends.holdings[part].megatron].data)

    @torch.no_grad()
    def as_sent(self, part: int) -> Tensor:
        """The values of one of this rank's parts, in the form that engines get.

        The values are those of `read`, with two exceptions: weights with adapters are merged, and an adapter's B is
        multiplied by the scale.
        """
        name = self._sends.holdings[part].megatron
        parameter = self._parameters[name]
        if id(parameter) not in self._adapter_functions:
            return self._part(part, parameter.data)
        # Parts of one parameter are read one after another, so the last merged parameter is kept for the next part.
        if self._last_call is None or self._last_call[0] != name:
            self._last_call = (name, self._adapter_functions[id(parameter)](parameter.data))
        return self._part(part, self._last_call[1])

    def _part(self, part: int, shard: Tensor) -> Tensor:
        holding = self._sends.holdings[part]
        values = holding.piece.of_shard(shard)
        for axis, index in enumerate(holding.piece.hf_index):
            # An int selects one expert of a fused tensor. `of_shard` has dropped the axis, which is added again.
            if isinstance(index, int):
                values = values.unsqueeze(axis)
        return values[within(holding.ranges, self.plan.parts[part].ranges)]

    def parts(self) -> list[Tensor]:
        """The values of all of this rank's parts, as views of the parameters."""
        return [self.read(number) for number, part in enumerate(self.plan.parts) if part.sender == self.sender]

    def begin(self) -> None:
        """Wait for parameters that the distributed optimizer still gathers in the background. Call before `read`.

        Collective: Megatron now starts each gather that has not started.
        """
        self._last_call = None
        for chunk in self._chunks:
            ddp = getattr(chunk, "ddp_config", None)
            if ddp is not None and ddp.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def _adapter_functions(chunks: Sequence[Any]) -> dict[int, Callable[[Tensor], Tensor]]:
    """id of a parameter -> function from the parameter's values to the values that are sent.

    The parameters are the weights with adapters, which are merged, and the adapters' B, which are scaled.
    """
    functions = {}
    for chunk in chunks:
        for linear in unwrap(chunk).modules():
            if not hasattr(linear, "lora"):
                continue
            functions[id(linear.weight)] = linear.lora.merged
            # vLLM's layers add B A x without a scale, so B is sent with the scale.
            for name, parameter in linear.lora.named_parameters():
                if name.endswith("_B"):
                    functions[id(parameter)] = partial(torch.mul, torch.tensor(linear.lora.scale))
    return functions


def _places(parallel: Parallel) -> list[Place]:
    """The `Place` of each rank of the trainer, by rank. Collective."""
    place = Place(
        tp=parallel.tp_rank,
        pp=parallel.pp_rank,
        ep=parallel.ep_rank,
        etp=parallel.etp_rank,
        copy=parallel.groups.dp_cp.rank(),
        expert_copy=parallel.groups.expt_dp.rank(),
    )
    # Ranks exchange a tensor, not objects: torch would unpickle objects, which can run code.
    table = torch.zeros((parallel.world_size, len(place)), dtype=torch.int64, device=parallel.device)
    table[parallel.rank] = torch.tensor(place, dtype=torch.int64)
    dist.all_reduce(table)
    return [Place(*row) for row in table.tolist()]


def _check_same(digests: Sequence[int], parallel: Parallel) -> None:
    # The maximum of a number over the ranks equals minus the maximum of the negative number only if all ranks agree.
    extremes = torch.tensor(digests, dtype=torch.int64, device=parallel.device)
    extremes = torch.stack([extremes, -extremes])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if not torch.equal(extremes[0], -extremes[1]):
        raise RuntimeError("weights: the ranks of the trainer have made different plans of a weight update")


def canonical_parameters(chunks: Sequence[Any], parallel: Parallel) -> dict[str, Tensor]:
    """This rank's parameters and persistent buffers by the weight map's names.

    The names have global layer and expert numbers, and the spelling of Megatron's plain layers, not of fused layers.
    """
    parameters = {}
    for chunk in chunks:
        model = unwrap(chunk)
        experts = (model.config.num_moe_experts or 0) // parallel.ep_size
        for name, parameter in model.state_dict(keep_vars=True).items():
            if "_extra_state" not in name:
                parameters[_canonical_name(name, model, first_expert=parallel.ep_rank * experts)] = parameter
    return parameters


def _canonical_name(name: str, model: Any, *, first_expert: int) -> str:
    layer = LAYER.match(name)
    if layer is None:
        return name
    number = model.decoder.layers[int(layer[1])].layer_number - 1
    name = f"decoder.layers.{number}.{name[layer.end() :]}"
    for plain_name, fused_name in FUSED_NORMS.items():
        if name.endswith(fused_name):
            return name.removesuffix(fused_name) + plain_name
    name = GROUPED_EXPERT.sub(r".experts.local_experts.\2.linear_fc\1.weight", name)
    return EXPERT.sub(lambda match: f".experts.local_experts.{int(match[1]) + first_expert}.", name)


def _stage_of_layer(layers: int, parameters: Mapping[str, Any], parallel: Parallel) -> dict[int, int]:
    """Pipeline stage of each of the policy's `layers`, from the parameters of every stage."""
    matches = filter(None, map(LAYER.match, parameters))
    stages = torch.full((layers,), -1, dtype=torch.int64, device=parallel.device)
    stages[sorted({int(match[1]) for match in matches})] = parallel.pp_rank
    # Ranks exchange a tensor, not objects: torch would unpickle objects, which can run code.
    dist.all_reduce(stages, op=dist.ReduceOp.MAX, group=parallel.groups.pp)
    assert -1 not in stages, f"stage of each layer, where -1 means that no stage has the layer: {stages.tolist()}"
    return dict(enumerate(stages.tolist()))


def _shard_of(rule: Rule, parallel: Parallel) -> tuple[int, int]:
    if rule.expert is not None:
        return parallel.etp_rank, parallel.etp_size
    return parallel.tp_rank, parallel.tp_size
