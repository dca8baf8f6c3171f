"""Functions that make the rules of a weight map: for each kind of parameter, how tensor-parallel ranks divide the
parameter."""

from collections.abc import Callable
from typing import Literal, TypeVar

from megatron_scalerl.models.family import Piece, Rule, divided, padded_vocab_size
from megatron_scalerl.record import record

T = TypeVar("T")
Pieces = Callable[[int, int], tuple[Piece, ...]]
"""Function from (rank, size) in the tensor-parallel group to the pieces of the rank's shard, as in `Rule`."""


@record
class Location:
    """The pipeline stage, layer and expert of a parameter: the fields of `Rule` with the same names."""

    place: Literal["first", "layer", "last"] = "layer"
    layer: int = 0
    expert: int | None = None


def replicated(megatron: str, hf: str, shape: tuple[int, ...], at: Location, *, frozen: bool = False) -> Rule:
    """The rule of a parameter that every tensor-parallel rank holds whole, for example a norm or a router.

    frozen: as in `Rule`.
    """

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        return (Piece(hf_name=hf, hf_index=_all(shape), axis=0, start=0, stop=shape[0]),)

    return _rule(megatron, {hf: shape}, pieces, at, sharded=False, frozen=frozen)


def vocabulary(megatron: str, hf: str, vocab: int, hidden: int, at: Location, *, exported: bool = True) -> Rule:
    """The rule of an embedding or a head.

    The rows are padded to a multiple of the tensor-parallel size. Pieces leave out the padding.
    """

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        rows = padded_vocab_size(vocab, size) // size
        start = min(rank * rows, vocab)
        stop = min(start + rows, vocab)
        # The last ranks may have only padding, and so no piece.
        if start == stop:
            return ()
        index = (slice(start, stop), slice(0, hidden))
        return (Piece(hf_name=hf, hf_index=index, axis=0, start=0, stop=stop - start),)

    return _rule(megatron, {hf: (vocab, hidden)}, pieces, at, exported=exported)


def row(megatron: str, hf: str, out: int, inner: int, at: Location, *, what: str) -> Rule:
    """The rule of a projection that is sharded along its input, such as attention's output projection.

    An MLP's second projection is sharded in the same way.
    """

    return _sharded(megatron, hf, (out, inner), 1, at, what)


def column(megatron: str, hf: str, out: int, inner: int, at: Location, *, what: str) -> Rule:
    """The rule of a projection that is sharded along its output. The ranks divide the output without padding."""

    return _sharded(megatron, hf, (out, inner), 0, at, what)


def query_key_value(
    megatron: str,
    hf: str,
    kind: Literal["weight", "bias"],
    *,
    heads: int,
    groups: int,
    head_dim: int,
    columns: tuple[int, ...],
    at: Location,
) -> Rule:
    """The rule of Megatron's fused projection to queries, keys and values.

    The rows are, for each group, the group's queries, the group's key, and the group's value. Tensor-parallel ranks
    hold whole groups. hf: prefix of {q,k,v}_proj. columns: (hidden size,) for the weight, () for the bias.
    """
    # The dict's order is the order of queries, key and value within a group.
    heads_of = {f"{hf}q_proj.{kind}": heads, f"{hf}k_proj.{kind}": groups, f"{hf}v_proj.{kind}": groups}

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        count = divided(groups, size, "config.json: num_key_value_heads")
        group_pieces = []
        offset = 0
        for group in range(rank * count, (rank + 1) * count):
            for name, total in heads_of.items():
                rows = total // groups * head_dim
                index = (slice(group * rows, (group + 1) * rows), *_all(columns))
                group_pieces.append(Piece(hf_name=name, hf_index=index, axis=0, start=offset, stop=offset + rows))
                offset += rows
        return tuple(group_pieces)

    shapes = {name: (total * head_dim, *columns) for name, total in heads_of.items()}
    return _rule(f"{megatron}.{kind}", shapes, pieces, at)


def gate_up(megatron: str, gate: str, up: str, *, ffn: int, hidden: int, at: Location, what: str) -> Rule:
    """The rule of a gated MLP's first projection. A shard has the rank's gate rows, then the rank's up rows."""

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        width = divided(ffn, size, what)
        # A rank has the same rows of gate and up, because the outputs are multiplied element by element.
        index = (slice(rank * width, (rank + 1) * width), slice(0, hidden))
        return (
            Piece(hf_name=gate, hf_index=index, axis=0, start=0, stop=width),
            Piece(hf_name=up, hf_index=index, axis=0, start=width, stop=2 * width),
        )

    return _rule(megatron, {gate: (ffn, hidden), up: (ffn, hidden)}, pieces, at)


def fused_expert_gate_up(
    megatron: str, hf: str, *, experts: int, ffn: int, hidden: int, at: Location, what: str, transposed: bool
) -> Rule:
    """The rule of an expert's first projection in a fused tensor [experts, 2 ffn, hidden].

    The gate rows come before the up rows. transposed: whether the fused tensor has the last two dimensions swapped.
    """
    expert = _expert_of(at)

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        width = divided(ffn, size, what)
        halves = []
        # Half 0 is the gate projection, half 1 the up projection.
        for half in (0, 1):
            first = half * ffn + rank * width
            index = (expert, *_oriented(slice(first, first + width), slice(0, hidden), transposed))
            rows = dict(axis=0, start=half * width, stop=(half + 1) * width)
            halves.append(Piece(hf_name=hf, hf_index=index, transposed=transposed, **rows))
        return tuple(halves)

    return _rule(megatron, {hf: (experts, *_oriented(2 * ffn, hidden, transposed))}, pieces, at)


def fused_expert_down(
    megatron: str, hf: str, *, experts: int, ffn: int, hidden: int, at: Location, what: str, transposed: bool
) -> Rule:
    """The rule of an expert's second projection in a fused tensor [experts, hidden, ffn].

    transposed: whether the fused tensor has the last two dimensions swapped.
    """
    expert = _expert_of(at)

    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        width = divided(ffn, size, what)
        columns = slice(rank * width, (rank + 1) * width)
        index = (expert, *_oriented(slice(0, hidden), columns, transposed))
        return (Piece(hf_name=hf, hf_index=index, axis=1, start=0, stop=width, transposed=transposed),)

    return _rule(megatron, {hf: (experts, *_oriented(hidden, ffn, transposed))}, pieces, at)


def _oriented(rows: T, columns: T, transposed: bool) -> tuple[T, T]:
    if transposed:
        return columns, rows
    return rows, columns


def _expert_of(at: Location) -> int:
    assert at.expert is not None
    return at.expert


def _sharded(megatron: str, hf: str, shape: tuple[int, int], axis: Literal[0, 1], at: Location, what: str) -> Rule:
    def pieces(rank: int, size: int) -> tuple[Piece, ...]:
        width = divided(shape[axis], size, what)
        index = list(_all(shape))
        index[axis] = slice(rank * width, (rank + 1) * width)
        return (Piece(hf_name=hf, hf_index=tuple(index), axis=axis, start=0, stop=width),)

    return _rule(megatron, {hf: shape}, pieces, at)


def _all(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def _rule(
    megatron: str,
    shapes: dict[str, tuple[int, ...]],
    pieces: Pieces,
    at: Location,
    **flags: bool,
) -> Rule:
    return Rule(
        megatron=megatron,
        hf_shapes=shapes,
        pieces=pieces,
        place=at.place,
        layer=at.layer,
        expert=at.expert,
        **flags,
    )
