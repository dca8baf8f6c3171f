"""Which trainer rank sends which part of the weights, from the family's weight map and every rank's place.

Every rank makes the same plan from the same table of places:

    _candidates   the rectangles of the weight map, each with the ranks that hold the rectangle: one tensor-parallel
                  rank of one pipeline stage, or one expert-parallel rank, and all data-parallel copies of this rank
    senders       the first copy among each rectangle's ranks, and further copies while `most_senders` allows
    parts         each rectangle is cut by the needs of every shard; then each part, the largest first, is assigned to
                  the holder that has the least to send
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from megatron_scalerl.models.family import Family, Index, Piece, Rule
from megatron_scalerl.record import record
from megatron_scalerl.weights.plan import Manifest, Needs, ParamMeta, Part, Ranges, WeightPlan, check, overlap, volume


class Place(NamedTuple):
    """The coordinates of a rank in the trainer's layout, in the order of the columns of `weights.source`'s table."""

    tp: int
    pp: int
    ep: int
    etp: int
    copy: int
    """Number of this rank among the ranks with the same dense parameters."""
    expert_copy: int
    """Number of this rank among the ranks with the same experts."""


@record
class Holding:
    """A rectangle of a tensor that ranks of the trainer hold in one parameter. The plan cuts parts from holdings."""

    megatron: str
    """Name of the Megatron parameter."""
    piece: Piece
    """Where the rectangle's elements lie in the rank's shard of the parameter."""
    ranges: Ranges
    """The rectangle, in the Hugging Face tensor's indices."""


@record
class SendPlan:
    """The plan of a weight update, with facts for the trainer alone: the senders' ranks and the holdings."""

    plan: WeightPlan
    ranks: tuple[int, ...]
    """Global rank of each sender, by the sender's number."""
    holdings: tuple[Holding, ...]
    """For each part of the plan, the holding that the part is cut from."""


class _Candidates(NamedTuple):
    """A holding of a tensor, and the ranks that could send the holding."""

    tensor: int
    holding: Holding
    ranks: tuple[int, ...]
    """Global ranks that have the holding. The first data-parallel copy comes first."""


def send_plan(
    family: Family,
    places: Sequence[Place],
    stage_of_layer: Mapping[int, int],
    needs: Sequence[Needs],
    *,
    dtype: str,
    most_senders: int,
) -> SendPlan:
    """The plan of an update from a trainer whose global ranks stand at `places`.

    stage_of_layer: layer -> pipeline stage. needs: for each shard, the needs of the shard's workers. dtype: as in
    `manifest`. most_senders: number of ranks that may send. Raises ValueError if the weight map and the layout do not
    make up every needed element exactly once.
    """
    parameters = manifest(family, dtype)
    candidates = list(_candidates(family, parameters, places, stage_of_layer))
    first_copies = {candidate.ranks[0] for candidate in candidates}
    sent_elements = dict.fromkeys(first_copies | _further_copies(candidates, first_copies, most_senders), 0)
    # Parts get -1 as the sender until senders are assigned below.
    cuts = []
    for candidate in candidates:
        for shard, shard_needs in enumerate(needs):
            common = (
                overlap(candidate.holding.ranges, needed_ranges) for needed_ranges in shard_needs[candidate.tensor]
            )
            cuts += [
                (candidate, Part(candidate.tensor, -1, shard, ranges)) for ranges in common if ranges is not None
            ]
    rank_of_cut = [-1] * len(cuts)
    # The largest part is assigned first, so that small parts even out the ranks' shares at the end.
    for index in sorted(range(len(cuts)), key=lambda index: -volume(cuts[index][1].ranges)):
        candidate, part = cuts[index]
        rank = min(
            (rank for rank in candidate.ranks if rank in sent_elements), key=lambda rank: (sent_elements[rank], rank)
        )
        sent_elements[rank] += volume(part.ranges)
        rank_of_cut[index] = rank
    ranks = tuple(sorted(set(rank_of_cut)))
    number = {rank: n for n, rank in enumerate(ranks)}
    parts = tuple(Part(p.tensor, number[rank], p.shard, p.ranges) for rank, (_, p) in zip(rank_of_cut, cuts))
    plan = WeightPlan(parameters=parameters, senders=len(ranks), needs=tuple(needs), parts=parts)
    check(plan)
    return SendPlan(plan=plan, ranks=ranks, holdings=tuple(candidate.holding for candidate, _ in cuts))


def manifest(family: Family, dtype: str) -> Manifest:
    """The tensors of a policy of this family, layer by layer.

    dtype: type of trained tensors. Frozen tensors are fp32.
    """
    entries: dict[str, ParamMeta] = {}
    for rule in family.rules:
        if rule.exported:
            kind = "float32" if rule.frozen else dtype
            entries |= {n: ParamMeta(name=n, dtype=kind, shape=tuple(s)) for n, s in rule.hf_shapes.items()}
    return tuple(entries.values())


def _candidates(
    family: Family, parameters: Manifest, places: Sequence[Place], stage_of_layer: Mapping[int, int]
) -> Iterator[_Candidates]:
    """Yield every holding with the ranks that hold it, in the order of the weight map."""
    number = {meta.name: n for n, meta in enumerate(parameters)}
    sizes = Place(*(1 + max(ranks) for ranks in zip(*places)))
    experts_per_rank = (family.transformer.get("num_moe_experts") or 0) // sizes.ep
    # Keys are (pp, tp) for dense parameters and (pp, ep, etp) for experts. Each list begins with the first
    # data-parallel copies.
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, place in sorted(enumerate(places), key=lambda item: (item[1].copy, item[0])):
        holders.setdefault((place.pp, place.tp), []).append(rank)
    for rank, place in sorted(enumerate(places), key=lambda item: (item[1].expert_copy, item[0])):
        holders.setdefault((place.pp, place.ep, place.etp), []).append(rank)
    for rule in family.rules:
        if not rule.exported:
            continue
        stage = {"first": 0, "last": sizes.pp - 1}.get(rule.place, stage_of_layer.get(rule.layer, -1))
        for tp_shard, ranks in _holders_of(rule, stage, holders, sizes, experts_per_rank):
            for piece in rule.pieces(*tp_shard):
                holding = Holding(megatron=rule.megatron, piece=piece, ranges=_ranges(piece.hf_index))
                yield _Candidates(tensor=number[piece.hf_name], holding=holding, ranks=tuple(ranks))


def _holders_of(
    rule: Rule, stage: int, holders: Mapping[tuple[int, ...], list[int]], sizes: Place, experts_per_rank: int
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yield ((shard, number of shards), ranks that hold the shard) for each tensor-parallel shard of a parameter."""
    if rule.expert is not None:
        expert_rank = rule.expert // experts_per_rank
        by_shard = [holders[(stage, expert_rank, shard)] for shard in range(sizes.etp)]
    else:
        by_shard = [holders[(stage, shard)] for shard in range(sizes.tp)]
    if rule.sharded:
        for shard, ranks in enumerate(by_shard):
            yield (shard, len(by_shard)), ranks
    else:
        # Every tensor-parallel rank has the whole parameter. The first data-parallel copies begin the list.
        yield (0, len(by_shard)), list(chain.from_iterable(zip(*by_shard)))


def _further_copies(candidates: Sequence[_Candidates], first_copies: set[int], most_ranks: int) -> set[int]:
    """Ranks that send besides `first_copies`: all second copies, then all third copies, while `most_ranks` allows."""
    copies: set[int] = set()
    for copy in range(1, max(len(candidate.ranks) for candidate in candidates)):
        more_copies = copies | {candidate.ranks[copy] for candidate in candidates if copy < len(candidate.ranks)}
        if len(first_copies | more_copies) > most_ranks:
            break
        copies = more_copies
    return copies


def _ranges(index: tuple[Index, ...]) -> Ranges:
    slices = (slice(i, i + 1) if isinstance(i, int) else i for i in index)
    return tuple((along.start, along.stop) for along in slices)
