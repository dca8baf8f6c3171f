"""Which trainer rank sends which part of the weights: from the family's weight map and where every rank stands.

Every rank makes the same plan from the same table of places. A part is held by one tensor-parallel rank of one
pipeline stage, an expert's by one expert-parallel rank, and by all data-parallel copies of it. Senders are one rank
for each of these, and copies of them as far as `most_senders` allows; what a shard needs of a part is sent by the
rank that holds it and has the least to send.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_scalerl.models.family import Family, Index, Piece, Rule
from megatron_scalerl.record import record
from megatron_scalerl.weights.plan import Manifest, Needs, ParamMeta, Part, Ranges, WeightPlan, check, overlap, volume


class Place(NamedTuple):
    """Where one rank stands in the trainer's layout; the order of the fields is that of `weights.source`'s table."""

    tp: int
    pp: int
    ep: int
    etp: int
    copy: int
    """Rank among those with the same dense parameters."""
    expert_copy: int
    """Rank among those with the same experts."""


@record
class Held:
    """A rectangle of a tensor as ranks of the trainer hold it; parts are cut from it."""

    megatron: str
    """Name of the Megatron parameter."""
    piece: Piece
    """The rectangle of the rank's shard of it."""
    ranges: Ranges
    """The rectangle of the tensor."""


@record
class SendPlan:
    """The plan, and what only the trainer knows of it."""

    plan: WeightPlan
    ranks: tuple[int, ...]
    """[senders] global rank of each."""
    held: tuple[Held, ...]
    """[parts] what each is cut from."""


class _Candidates(NamedTuple):
    tensor: int
    held: Held
    ranks: tuple[int, ...]
    """Global ranks that hold it, the first copy first."""


def send_plan(
    family: Family,
    places: Sequence[Place],
    stage_of_layer: Mapping[int, int],
    needs: Sequence[Needs],
    *,
    dtype: str,
    most_senders: int,
) -> SendPlan:
    """The plan of a trainer whose global ranks stand at `places`.

    stage_of_layer: layer -> pipeline stage. needs: [shards]. dtype: of all parameters. Raises ValueError if the
    weight map and the layout do not make up every needed element exactly once.
    """
    parameters = manifest(family, dtype)
    candidates = list(_candidates(family, parameters, places, stage_of_layer))
    needed = {each.ranks[0] for each in candidates}
    sent = dict.fromkeys(needed | _copies(candidates, needed, most_senders), 0)
    cut = [
        (each, Part(each.tensor, -1, shard, ranges))
        for each in candidates
        for shard, of_shard in enumerate(needs)
        for ranges in filter(None, (overlap(each.held.ranges, need) for need in of_shard[each.tensor]))
    ]
    chosen = [-1] * len(cut)
    # the largest first: the small ones even out what each has to send
    for index in sorted(range(len(cut)), key=lambda index: -volume(cut[index][1].ranges)):
        candidate, part = cut[index]
        rank = min((rank for rank in candidate.ranks if rank in sent), key=lambda rank: (sent[rank], rank))
        sent[rank] += volume(part.ranges)
        chosen[index] = rank
    senders = tuple(sorted(set(chosen)))
    number = {rank: n for n, rank in enumerate(senders)}
    parts = tuple(Part(p.tensor, number[rank], p.shard, p.ranges) for rank, (_, p) in zip(chosen, cut))
    plan = WeightPlan(parameters=parameters, senders=len(senders), needs=tuple(needs), parts=parts)
    check(plan)
    return SendPlan(plan=plan, ranks=senders, held=tuple(each.held for each, _ in cut))


def manifest(family: Family, dtype: str) -> Manifest:
    """The tensors of a policy of this family, layer by layer."""
    shapes = {name: shape for rule in family.rules if rule.exported for name, shape in rule.hf_shapes.items()}
    return tuple(ParamMeta(name=name, dtype=dtype, shape=tuple(shape)) for name, shape in shapes.items())


def _candidates(
    family: Family, parameters: Manifest, places: Sequence[Place], stage_of_layer: Mapping[int, int]
) -> Iterator[_Candidates]:
    """Every rectangle that is held as one, in the order of the weight map, with the ranks that hold it."""
    number = {meta.name: n for n, meta in enumerate(parameters)}
    stages = 1 + max(place.pp for place in places)
    experts_each = (family.transformer.get("num_moe_experts") or 0) // (1 + max(place.ep for place in places))
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, place in sorted(enumerate(places), key=lambda item: (item[1].copy, item[0])):
        holders.setdefault((place.pp, place.tp), []).append(rank)
    for rank, place in sorted(enumerate(places), key=lambda item: (item[1].expert_copy, item[0])):
        holders.setdefault((place.pp, place.ep, place.etp), []).append(rank)
    tp, etp = 1 + max(place.tp for place in places), 1 + max(place.etp for place in places)
    for rule in family.rules:
        if not rule.exported:
            continue
        stage = {"first": 0, "last": stages - 1}.get(rule.place, stage_of_layer.get(rule.layer, -1))
        for shard, ranks in _shards(rule, stage, holders, tp=tp, etp=etp, experts_each=experts_each):
            for piece in rule.pieces(*shard):
                held = Held(megatron=rule.megatron, piece=piece, ranges=_ranges(piece.hf_index))
                yield _Candidates(tensor=number[piece.hf_name], held=held, ranks=tuple(ranks))


def _shards(
    rule: Rule, stage: int, holders: Mapping[tuple[int, ...], list[int]], *, tp: int, etp: int, experts_each: int
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """((shard, number of shards) of a parameter, the ranks that hold it)."""
    if rule.expert is not None:
        for shard in range(etp):
            yield (shard, etp), holders[(stage, rule.expert // experts_each, shard)]
    elif rule.sharded:
        for shard in range(tp):
            yield (shard, tp), holders[(stage, shard)]
    else:  # every tensor-parallel rank has the whole: the first copies of all of them first
        by_copy = zip(*(holders[(stage, shard)] for shard in range(tp)))
        yield (0, tp), [rank for ranks in by_copy for rank in ranks]


def _copies(candidates: Sequence[_Candidates], needed: set[int], most: int) -> set[int]:
    """Data-parallel copies that send as well: whole sets of them, the nearest first, while `most` is not exceeded."""
    found: set[int] = set()
    for copy in range(1, max(len(each.ranks) for each in candidates)):
        more = found | {each.ranks[copy] for each in candidates if copy < len(each.ranks)} - needed
        if len(needed | more) > most:
            break
        found = more
    return found


def _ranges(index: tuple[Index, ...]) -> Ranges:
    return tuple((i, i + 1) if isinstance(i, int) else (i.start, i.stop) for i in index)
