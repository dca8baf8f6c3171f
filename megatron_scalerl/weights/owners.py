"""Which trainer rank sends which part of the weights: from the family's weight map and where every rank stands.

Every rank makes the same plan from the same table of places. A part is held by one tensor-parallel rank of one
pipeline stage, an expert's by one expert-parallel rank, and by all data-parallel copies of it. Senders are one rank
for each of these, and copies of them as far as `most_senders` allows; a part goes to the sender of it that has the
fewest bytes to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_scalerl.models.family import Family, Index, Piece, Rule
from megatron_scalerl.weights.plan import Manifest, ParamMeta, Part, Ranges, WeightPlan, check, volume


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


@dataclass(frozen=True, kw_only=True)
class Held:
    """A part as its sender holds it."""

    megatron: str
    """Name of the Megatron parameter."""
    piece: Piece
    """The rectangle of the sender's shard of it."""


@dataclass(frozen=True, kw_only=True)
class SendPlan:
    """The plan, and what only the trainer knows of it."""

    plan: WeightPlan
    ranks: tuple[int, ...]
    """[senders] global rank of each."""
    held: tuple[Held, ...]
    """[parts]"""


class _Candidates(NamedTuple):
    meta: int
    held: Held
    ranges: Ranges
    nbytes: int
    ranks: tuple[int, ...]
    """Global ranks that hold the part, the first copy first."""


def send_plan(
    family: Family, places: Sequence[Place], stage_of_layer: Mapping[int, int], *, dtype: str, most_senders: int
) -> SendPlan:
    """The plan of a trainer whose global ranks stand at `places`.

    stage_of_layer: layer -> pipeline stage. dtype: of all parameters. Raises ValueError if the weight map and the
    layout do not make up every tensor exactly once.
    """
    manifest = _manifest(family, dtype)
    parts = list(_parts(family, manifest, places, stage_of_layer))
    needed = {part.ranks[0] for part in parts}
    copies = _copies(parts, needed, most_senders)
    sent = dict.fromkeys(needed | copies, 0)
    chosen = []
    for part in parts:
        sender = min((rank for rank in part.ranks if rank in sent), key=lambda rank: (sent[rank], rank))
        sent[sender] += part.nbytes
        chosen.append(sender)
    ranks = tuple(sorted({*chosen}))
    number = {rank: n for n, rank in enumerate(ranks)}
    plan = WeightPlan(
        parameters=manifest,
        senders=len(ranks),
        parts=tuple(Part(part.meta, number[rank], part.ranges) for part, rank in zip(parts, chosen)),
    )
    check(plan)
    return SendPlan(plan=plan, ranks=ranks, held=tuple(part.held for part in parts))


def _manifest(family: Family, dtype: str) -> Manifest:
    shapes = {name: shape for rule in family.rules if rule.exported for name, shape in rule.hf_shapes.items()}
    return tuple(ParamMeta(name=name, dtype=dtype, shape=tuple(shape)) for name, shape in shapes.items())


def _parts(
    family: Family, manifest: Manifest, places: Sequence[Place], stage_of_layer: Mapping[int, int]
) -> Iterator[_Candidates]:
    """Every part of every tensor in the manifest's order of their rules, with the ranks that hold it."""
    number = {meta.name: n for n, meta in enumerate(manifest)}
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
                meta = manifest[number[piece.hf_name]]
                ranges = _ranges(piece.hf_index)
                yield _Candidates(
                    meta=number[piece.hf_name],
                    held=Held(megatron=rule.megatron, piece=piece),
                    ranges=ranges,
                    nbytes=volume(ranges) * meta.item_bytes,
                    ranks=tuple(ranks),
                )


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


def _copies(parts: Sequence[_Candidates], needed: set[int], most: int) -> set[int]:
    """Data-parallel copies that send as well: whole sets of them, the nearest first, while `most` is not exceeded."""
    found: set[int] = set()
    for copy in range(1, max(len(part.ranks) for part in parts)):
        more = found | {part.ranks[copy] for part in parts if copy < len(part.ranks)} - needed
        if len(needed | more) > most:
            break
        found = more
    return found


def _ranges(index: tuple[Index, ...]) -> Ranges:
    return tuple((i, i + 1) if isinstance(i, int) else (i.start, i.stop) for i in index)
