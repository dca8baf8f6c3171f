"""The trainer's weights as parts of Hugging Face tensors, read from this rank's shards.

The family's weight map (models/family.py) is used in one direction to load a checkpoint and in the other to send
the weights; there is no second table.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_scalerl.checkpoints.hf_folder import EXPERT, FUSED_NORMS, GROUPED_EXPERT, LAYER, HfReader, open_folder
from megatron_scalerl.distributed.parallel import Parallel, unwrap
from megatron_scalerl.models.family import Family, Rule
from megatron_scalerl.weights.owners import Place, SendPlan, manifest, send_plan
from megatron_scalerl.weights.plan import Needs, WeightPlan, all_of, within


def load_hf(chunks: Sequence[Any], family: Family, hf_path: str | Path, parallel: Parallel) -> None:
    """Fills this rank's shards from a Hugging Face folder, reading only the slices that it needs.

    Parameters are converted to the model's dtype; padded rows of the vocabulary become 0. Raises ValueError for a
    missing file or tensor and for a shape that differs from the map.
    """
    parameters = canonical_parameters(chunks, parallel)
    check_held(chunks, family, parallel)
    reader = HfReader(open_folder(hf_path))
    for rule in family.rules:
        parameter = parameters.pop(rule.megatron, None)
        if parameter is None:
            continue
        data = parameter.data.zero_()
        for piece in rule.pieces(*_shard_of(rule, parallel)):
            piece.of_shard(data).copy_(reader.read(piece.hf_name, piece.hf_index, rule.hf_shapes[piece.hf_name]))


def check_held(chunks: Sequence[Any], family: Family, parallel: Parallel) -> None:
    """Check that the family's Hugging Face format holds everything that the model trains or keeps.

    Raises ValueError for a parameter or a persistent buffer without a place in it: an export would lose it.
    """
    rules = {rule.megatron for rule in family.rules}
    names = set(canonical_parameters(chunks, parallel))
    for chunk in chunks:
        model = unwrap(chunk)
        kept = {name for name in model.state_dict() if "_extra_state" not in name}
        names |= kept - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if lost := sorted(names - rules):
        raise ValueError(
            f"megatron.model: the policy has {lost[0]}, for which the Hugging Face format of {family.name} has no "
            "place: an export would lose it"
        )


class MegatronWeightSource:
    """The trained policy's weights in parts of Hugging Face tensors, each read where it is held: nothing is gathered.

    Every rank creates one; the constructor is collective. Until `plan_for`, the plan is that of workers that need
    everything.
    """

    def __init__(self, chunks: Sequence[Any], parallel: Parallel, *, most_senders: int = 1):
        """most_senders: ranks that send, where that is more than one copy of the model needs."""
        self.parallel = parallel
        self.family: Family = unwrap(chunks[0]).family
        self._chunks = chunks
        self._parameters = canonical_parameters(chunks, parallel)
        config = unwrap(chunks[0]).config
        self._dtype = str(config.params_dtype).removeprefix("torch.")
        self.manifest = manifest(self.family, self._dtype)
        self._stages = _stage_of_layer(config.num_layers, self._parameters, parallel)
        self._places, self._most_senders = _places(parallel), max(most_senders, 1)
        self._sends = self._planned([all_of(self.manifest)])

    def plan_for(self, needs: Sequence[Needs]) -> WeightPlan:
        """Plan updates for workers with these needs, [shards]; the plan is equal on all ranks. Collective.

        Raises ValueError for needs that are not parts of the tensors, RuntimeError if the ranks' plans differ.
        """
        self._sends = self._planned(needs)
        _check_same(self.plan.digests, self.parallel)
        return self.plan

    def _planned(self, needs: Sequence[Needs]) -> SendPlan:
        dtype, most = self._dtype, self._most_senders
        return send_plan(self.family, self._places, self._stages, needs, dtype=dtype, most_senders=most)

    @property
    def plan(self) -> WeightPlan:
        """What every update sends."""
        return self._sends.plan

    @property
    def sender(self) -> int | None:
        """This rank's number among the senders; None if it sends nothing."""
        ranks = self._sends.ranks
        return ranks.index(self.parallel.rank) if self.parallel.rank in ranks else None

    def read(self, part: int) -> torch.Tensor:
        """The values of one of this rank's parts, of the shape of its rectangle: a view of the parameter."""
        held, ranges = self._sends.held[part], self.plan.parts[part].ranges
        values = held.piece.of_shard(self._parameters[held.megatron].data)
        for axis, index in enumerate(held.piece.hf_index):
            if isinstance(index, int):  # one expert of a fused tensor
                values = values.unsqueeze(axis)
        return values[within(held.ranges, ranges)]

    def own(self) -> list[torch.Tensor]:
        """The values of all of this rank's parts, views of the parameters."""
        return [self.read(number) for number, part in enumerate(self.plan.parts) if part.sender == self.sender]

    def begin(self) -> None:
        """Wait for parameters that the distributed optimizer is still gathering in the background; before `read`.

        Collective: Megatron gathers them now where it has not begun to.
        """
        for chunk in self._chunks:
            ddp = getattr(chunk, "ddp_config", None)
            if ddp is not None and ddp.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def _places(parallel: Parallel) -> list[Place]:
    """[world] where each rank stands; collective."""
    groups, me = parallel.groups, parallel
    mine = Place(
        tp=me.tp_rank,
        pp=me.pp_rank,
        ep=me.ep_rank,
        etp=me.etp_rank,
        copy=groups.dp_cp.rank(),
        expert_copy=groups.expt_dp.rank(),
    )
    # tensors, not objects, which torch would unpickle
    table = torch.zeros((me.world_size, len(mine)), dtype=torch.int64, device=me.device)
    table[me.rank] = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(table)
    return [Place(*row) for row in table.tolist()]


def _check_same(digests: Sequence[int], parallel: Parallel) -> None:
    found = torch.tensor([digests, [-each for each in digests]], dtype=torch.int64, device=parallel.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if not torch.equal(found[0], -found[1]):
        raise RuntimeError("weights: expected the same plan on all ranks of the trainer, found different ones")


def canonical_parameters(chunks: Sequence[Any], parallel: Parallel) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by the weight map's names: global layer and expert numbers, names of plain layers."""
    found = {}
    for chunk in chunks:
        model = unwrap(chunk)
        experts = (model.config.num_moe_experts or 0) // parallel.ep_size
        for name, parameter in model.named_parameters():
            found[_canonical(name, model, first_expert=parallel.ep_rank * experts)] = parameter
    return found


def _canonical(name: str, model: Any, *, first_expert: int) -> str:
    layer = LAYER.match(name)
    if layer is None:
        return name
    number = model.decoder.layers[int(layer[1])].layer_number - 1
    name = f"decoder.layers.{number}.{name[layer.end() :]}"
    for plain, fused in FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    name = GROUPED_EXPERT.sub(r".experts.local_experts.\2.linear_fc\1.weight", name)
    return EXPERT.sub(lambda found: f".experts.local_experts.{int(found[1]) + first_expert}.", name)


def _stage_of_layer(layers: int, parameters: Mapping[str, Any], parallel: Parallel) -> dict[int, int]:
    """Pipeline stage of each of the policy's `layers`, from the parameters of every stage."""
    mine = sorted({int(found[1]) for name in parameters if (found := LAYER.match(name))})
    stages = torch.full((layers,), -1, dtype=torch.int64, device=parallel.device)
    stages[mine] = parallel.pp_rank
    # a tensor, not objects, which torch would unpickle
    dist.all_reduce(stages, op=dist.ReduceOp.MAX, group=parallel.groups.pp)
    assert -1 not in stages, f"layers that no pipeline stage holds: {stages.tolist()}"
    return dict(enumerate(stages.tolist()))


def _shard_of(rule: Rule, parallel: Parallel) -> tuple[int, int]:
    if rule.expert is not None:
        return parallel.etp_rank, parallel.etp_size
    return parallel.tp_rank, parallel.tp_size
