"""The trainer's weights as Hugging Face tensors: gathered over tensor, expert and pipeline ranks, one at a time.

The family's weight map (models/family.py) is used in one direction to load a checkpoint and in the other to export
the weights; there is no second table. Memory on top of the model is one Hugging Face tensor and its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_scalerl.checkpoints.hf_folder import HfReader, open_folder
from megatron_scalerl.checkpoints.manifest import Manifest, ParamMeta
from megatron_scalerl.checkpoints.megatron_names import EXPERT, FUSED_NORMS, GROUPED_EXPERT, LAYER
from megatron_scalerl.distributed.parallel import Parallel, unwrap
from megatron_scalerl.models.family import Family, Rule


def load_hf(chunks: Sequence[Any], family: Family, hf_path: str | Path, parallel: Parallel) -> None:
    """Fills this rank's shards from a Hugging Face folder, reading only the slices that it needs.

    Parameters are converted to the model's dtype; padded rows of the vocabulary become 0. Raises ValueError for a
    missing file or tensor and for a shape that differs from the map.
    """
    parameters = canonical_parameters(chunks, parallel)
    reader = HfReader(open_folder(hf_path))
    for rule in family.rules:
        parameter = parameters.pop(rule.megatron, None)
        if parameter is None:
            continue
        data = parameter.data.zero_()
        for piece in rule.pieces(*_shard_of(rule, parallel)):
            piece.of_shard(data).copy_(reader.read(piece.hf_name, piece.hf_index, rule.hf_shapes[piece.hf_name]))
    assert not parameters, f"parameters without a rule: {sorted(parameters)}"


class MegatronWeightSource:
    """The trained policy's weights as Hugging Face tensors. Every rank creates one; the constructor is collective."""

    def __init__(self, chunks: Sequence[Any], parallel: Parallel):
        self.parallel = parallel
        self.family: Family = unwrap(chunks[0]).family
        self._chunks = chunks
        self._parameters = canonical_parameters(chunks, parallel)
        self._dtype: torch.dtype = unwrap(chunks[0]).config.params_dtype
        self._units = _units(self.family.rules)
        self._stage_of_layer = _stage_of_layer(unwrap(chunks[0]).config.num_layers, self._parameters, parallel)
        self._num_experts: int = self.family.transformer.get("num_moe_experts") or 0

    def manifest(self) -> Manifest:
        """Name, dtype and full shape of every tensor that `tensors` yields, in its order; not collective."""
        dtype = str(self._dtype).removeprefix("torch.")
        return tuple(
            ParamMeta(name=name, dtype=dtype, shape=tuple(shape))
            for unit in self._units
            for name, shape in unit.hf_shapes.items()
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors on global rank 0, in the manifest's order; nothing on other ranks, which must iterate too.

        A tensor is valid until the next one is requested.
        """
        self._finish_param_gather()
        for unit in self._units:
            yield from self._unit_tensors(unit)

    @torch.no_grad()
    def _unit_tensors(self, unit: "_Unit") -> Iterator[tuple[str, torch.Tensor]]:
        stage, me = self._stage(unit), self.parallel
        full: dict[str, torch.Tensor] = {}
        if me.pp_rank == stage:
            full = self._assemble(unit)
        leader = me.tp_rank == 0 and me.groups.dp_cp.rank() == 0
        for name, shape in unit.hf_shapes.items():
            tensor = full.pop(name, None)
            if stage != 0 and leader and me.pp_rank == stage:
                assert tensor is not None
                dist.send(tensor, group=me.groups.pp, group_dst=0)
            if me.rank == 0:
                if tensor is None:
                    tensor = torch.empty(shape, dtype=self._dtype, device=me.device)
                    dist.recv(tensor, group=me.groups.pp, group_src=stage)
                yield name, tensor

    def _assemble(self, unit: "_Unit") -> dict[str, torch.Tensor]:
        """Gathers a unit's shards inside its pipeline stage; the stage's leader gets the Hugging Face tensors."""
        full: dict[str, torch.Tensor] = {}
        for rules, shards in self._dense(unit) if unit.rules[0].expert is None else self._experts(unit):
            for rule, by_rank in zip(rules, shards):
                for rank, shard in enumerate(by_rank):
                    for piece in rule.pieces(rank, len(by_rank)):
                        if piece.hf_name not in full:
                            full[piece.hf_name] = torch.empty(
                                unit.hf_shapes[piece.hf_name], dtype=self._dtype, device=self.parallel.device
                            )
                        full[piece.hf_name][piece.hf_index] = piece.of_shard(shard)
        return full

    def _dense(self, unit: "_Unit") -> Iterator[tuple[list[Rule], list[list[torch.Tensor]]]]:
        """(rules, shards of each by tensor-parallel rank) on the leader."""
        groups = self.parallel.groups
        if groups.dp_cp.rank() != 0:
            return
        for rule in unit.rules:
            shard = self._parameters[rule.megatron].data
            if rule.sharded:
                gathered = _gather(shard, groups.tp)
            else:
                gathered = [shard] if self.parallel.tp_rank == 0 else None
            if gathered is not None:
                yield [rule], [gathered]

    def _experts(self, unit: "_Unit") -> Iterator[tuple[list[Rule], list[list[torch.Tensor]]]]:
        """Like `_dense`, for one expert of every expert-parallel rank at a time."""
        groups, size = self.parallel.groups, self.parallel.ep_size
        if groups.expt_dp.rank() != 0:
            return
        local = self._num_experts // size
        by_local_index: dict[int, list[Rule]] = {}
        for rule in unit.rules:
            assert rule.expert is not None
            by_local_index.setdefault(rule.expert % local, []).append(rule)
        for rules in by_local_index.values():
            owners = [rule.expert // local for rule in rules if rule.expert is not None]
            of_owners = self._from_owners(rules, owners)
            if of_owners is None:
                continue
            of_tp_ranks = [_gather(shard, groups.expt_tp) for shard in of_owners]
            if of_tp_ranks[0] is not None:
                yield rules, [shards for shards in of_tp_ranks if shards is not None]

    def _from_owners(self, rules: list[Rule], owners: list[int]) -> list[torch.Tensor] | None:
        """Shards of the experts of `rules` on the group's rank 0, each from the rank that owns it."""
        group, me = self.parallel.groups.ep, self.parallel.ep_rank
        mine = [self._parameters[rule.megatron].data for rule, owner in zip(rules, owners) if owner == me]
        if len(owners) == group.size():
            return _gather(mine[0], group)
        assert len(owners) == 1, "a tensor holds one expert or all of them"
        if me == 0:
            if owners[0] == 0:
                return mine
            shard = torch.empty(self._expert_shape(rules[0]), dtype=self._dtype, device=self.parallel.device)
            dist.recv(shard, group=group, group_src=owners[0])
            return [shard]
        if owners[0] == me:
            dist.send(mine[0].contiguous(), group=group, group_dst=0)
        return None

    def _expert_shape(self, rule: Rule) -> torch.Size:
        """Shape of an expert's shard: that of the same projection of this rank's first expert."""
        first = self.parallel.ep_rank * self._num_experts // self.parallel.ep_size
        name = rule.megatron.replace(f".local_experts.{rule.expert}.", f".local_experts.{first}.")
        return self._parameters[name].shape

    def _stage(self, unit: "_Unit") -> int:
        rule = unit.rules[0]
        if rule.place == "layer":
            return self._stage_of_layer[rule.layer]
        return 0 if rule.place == "first" else self.parallel.pp_size - 1

    def _finish_param_gather(self) -> None:
        """Waits for parameters that the distributed optimizer is still gathering in the background."""
        for chunk in self._chunks:
            ddp = getattr(chunk, "ddp_config", None)
            if ddp is not None and ddp.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Adjacent rules of the weight map that make up the same Hugging Face tensors."""

    rules: tuple[Rule, ...]
    hf_shapes: Mapping[str, tuple[int, ...]]


def _units(rules: Sequence[Rule]) -> tuple[_Unit, ...]:
    exported = [rule for rule in rules if rule.exported]
    grouped = (tuple(group) for _, group in groupby(exported, key=lambda rule: tuple(rule.hf_shapes)))
    return tuple(_Unit(rules=group, hf_shapes=group[0].hf_shapes) for group in grouped)


def canonical_parameters(chunks: Sequence[Any], parallel: Parallel) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by the weight map's names: global layer and expert numbers, names of plain layers."""
    found: dict[str, torch.nn.Parameter] = {}
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


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor] | None:
    """The group's shards on its rank 0, None elsewhere."""
    if group.size() == 1:
        return [shard]
    first = group.rank() == 0
    shards = [torch.empty_like(shard) for _ in range(group.size())] if first else None
    dist.gather(shard.contiguous(), shards, group=group, group_dst=0)
    return shards
