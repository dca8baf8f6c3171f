"""The rules of weight maps: replicated, row, query-key-value, gate-up, vocabulary, fused experts."""

from collections.abc import Callable
from typing import Literal

from megatron_scalerl.models.family import Piece, Rule, divided, padded_vocab_size
from megatron_scalerl.record import record

Pieces = Callable[[int, int], tuple[Piece, ...]]


@record
class At:
    """The pipeline stage, layer and expert of a parameter; see `Rule`."""

    place: Literal["first", "layer", "last"] = "layer"
    layer: int = 0
    expert: int | None = None


def replicated(megatron: str, hf: str, shape: tuple[int, ...], at: At) -> Rule:
    """Replicated on all tensor-parallel ranks: norms and routers."""

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        return (Piece(hf_name=hf, hf_index=_all(shape), axis=0, start=0, stop=shape[0]),)

    return _rule(megatron, {hf: shape}, pieces, at, sharded=False)


def vocabulary(megatron: str, hf: str, vocab: int, hidden: int, at: At, *, exported: bool = True) -> Rule:
    """Rows of an embedding or a head, padded to the tensor-parallel size; no piece contains padding."""

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        rows = padded_vocab_size(vocab, size) // size
        start, stop = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
        if start == stop:
            return ()
        return (
            Piece(hf_name=hf, hf_index=(slice(start, stop), slice(0, hidden)), axis=0, start=0, stop=stop - start),
        )

    return _rule(megatron, {hf: (vocab, hidden)}, pieces, at, exported=exported)


def row(megatron: str, hf: str, out: int, inner: int, at: At, *, what: str) -> Rule:
    """Sharded along the input dimension: attention output and the second projection of an MLP."""

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        width = divided(inner, size, what)
        index = (slice(0, out), slice(rank * width, (rank + 1) * width))
        return (Piece(hf_name=hf, hf_index=index, axis=1, start=0, stop=width),)

    return _rule(megatron, {hf: (out, inner)}, pieces, at)


def column(megatron: str, hf: str, out: int, inner: int, at: At, *, what: str) -> Rule:
    """Sharded along the output dimension, which ranks divide without padding."""

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        rows = divided(out, size, what)
        index = (slice(rank * rows, (rank + 1) * rows), slice(0, inner))
        return (Piece(hf_name=hf, hf_index=index, axis=0, start=0, stop=rows),)

    return _rule(megatron, {hf: (out, inner)}, pieces, at)


def query_key_value(
    megatron: str, hf: tuple[str, str, str], *, heads: int, groups: int, head_dim: int, hidden: int | None, at: At
) -> Rule:
    """Megatron's fused projection: for each group its queries, its key, its value; sharded by groups.

    `hidden` is None for the projection's bias.
    """
    per_group = heads // groups
    height = (per_group + 2) * head_dim
    width = () if hidden is None else (hidden,)

    def of_group(group: int, local: int) -> tuple[Piece, ...]:
        rows = (per_group * head_dim, head_dim, head_dim)
        found, offset = [], local * height
        for name, count in zip(hf, rows):
            index = (slice(group * count, (group + 1) * count), *_all(width))
            found.append(Piece(hf_name=name, hf_index=index, axis=0, start=offset, stop=offset + count))
            offset += count
        return tuple(found)

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        mine = divided(groups, size, "config.json: num_key_value_heads")
        return tuple(piece for local in range(mine) for piece in of_group(rank * mine + local, local))

    shapes = {
        hf[0]: (heads * head_dim, *width),
        hf[1]: (groups * head_dim, *width),
        hf[2]: (groups * head_dim, *width),
    }
    return _rule(megatron, shapes, pieces, at)


def gate_up(megatron: str, gate: str, up: str, *, ffn: int, hidden: int, at: At, what: str) -> Rule:
    """The gated MLP's first projection: this rank's gate rows, then its up rows."""

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        width = divided(ffn, size, what)
        index = (slice(rank * width, (rank + 1) * width), slice(0, hidden))
        return (
            Piece(hf_name=gate, hf_index=index, axis=0, start=0, stop=width),
            Piece(hf_name=up, hf_index=index, axis=0, start=width, stop=2 * width),
        )

    return _rule(megatron, {gate: (ffn, hidden), up: (ffn, hidden)}, pieces, at)


def fused_expert_gate_up(
    megatron: str, hf: str, *, experts: int, ffn: int, hidden: int, at: At, what: str, transposed: bool
) -> Rule:
    """One expert's part of a fused [experts, 2 ffn, hidden] tensor (gate, up); `transposed` swaps the last two."""
    expert = _expert_of(at)

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        width = divided(ffn, size, what)
        found = []
        for half in (0, 1):
            part = (slice(half * ffn + rank * width, half * ffn + (rank + 1) * width), slice(0, hidden))
            index = (expert, *(part[::-1] if transposed else part))
            rows = dict(axis=0, start=half * width, stop=(half + 1) * width)
            found.append(Piece(hf_name=hf, hf_index=index, transposed=transposed, **rows))
        return tuple(found)

    shape = (experts, hidden, 2 * ffn) if transposed else (experts, 2 * ffn, hidden)
    return _rule(megatron, {hf: shape}, pieces, at)


def fused_expert_down(
    megatron: str, hf: str, *, experts: int, ffn: int, hidden: int, at: At, what: str, transposed: bool
) -> Rule:
    """One expert's part of a fused [experts, hidden, ffn] tensor; `transposed` swaps the last two."""
    expert = _expert_of(at)

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        width = divided(ffn, size, what)
        part = (slice(0, hidden), slice(rank * width, (rank + 1) * width))
        index = (expert, *(part[::-1] if transposed else part))
        return (Piece(hf_name=hf, hf_index=index, axis=1, start=0, stop=width, transposed=transposed),)

    shape = (experts, ffn, hidden) if transposed else (experts, hidden, ffn)
    return _rule(megatron, {hf: shape}, pieces, at)


def _expert_of(at: At) -> int:
    assert at.expert is not None
    return at.expert


def _all(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def _rule(
    megatron: str,
    shapes: dict[str, tuple[int, ...]],
    pieces: Pieces,
    at: At,
    *,
    sharded: bool = True,
    exported: bool = True,
) -> Rule:
    return Rule(
        megatron=megatron,
        hf_shapes=shapes,
        pieces=pieces,
        place=at.place,
        layer=at.layer,
        expert=at.expert,
        sharded=sharded,
        exported=exported,
    )
