"""A family's rules in the converter's words: parameters out of Hugging Face tensors, and the other way round.

Nothing here knows a family. A rule's pieces for a tensor-parallel group of one describe the whole parameter, and
that is what checkpoints hold, whatever layout they are loaded under.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_scalerl.convert.arrays import RAW, TORCH_NAMES
from megatron_scalerl.convert.dist_reader import Held, chunk_name
from megatron_scalerl.convert.hf_folder import HfFolder
from megatron_scalerl.convert.pieces import Part, Recipe, check_covered
from megatron_scalerl.models.family import Family, Piece, Rule

_LISTED = 20
"""Names in one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What the tensors of a folder are to the family. Produced by `checked_names`."""

    policy: Mapping[str, tuple[int, ...]]
    """Tensors of the weight map -> shape."""
    copies: Mapping[str, str]
    """Tensors that repeat another one, as some folders do with tied embeddings -> that other one."""
    carried: tuple[str, ...]
    """Tensors outside the policy."""


def checked_names(folder: HfFolder, family: Family) -> Names:
    """Sorts the folder's tensors.

    Raises ValueError for tensors that are missing, that nobody knows (all are listed), or whose shape or type is
    not what the config says.
    """
    policy = {name: tuple(shape) for rule in family.rules for name, shape in rule.hf_shapes.items()}
    missing = [name for name in policy if name not in folder.tensors]
    if missing:
        raise ValueError(f"{folder.path}: expected tensor {_listed(missing)}, found none of that name")
    rest = [name for name in folder.tensors if name not in policy]
    carried = tuple(name for name in rest if family.passthrough and name.startswith(family.passthrough))
    copies = {name: tied for name in rest if (tied := _tied_to(name, family)) and name not in carried}
    unexpected = [name for name in rest if name not in carried and name not in copies]
    if unexpected:
        raise ValueError(f"{folder.path}: expected only tensors of a {family.name}, found {_listed(unexpected)}")
    for name, shape in [*policy.items(), *((copy, policy[of]) for copy, of in copies.items())]:
        found = folder.tensors[name]
        where = f"{folder.path / found.file}: {name}"
        if found.shape != shape:
            raise ValueError(f"{where}: expected shape {list(shape)} as config.json says, found {list(found.shape)}")
        if found.dtype not in TORCH_NAMES:
            raise ValueError(f"{where}: expected one of {', '.join(TORCH_NAMES)}, found {found.dtype}")
    return Names(policy=policy, copies=copies, carried=carried)


def _tied_to(name: str, family: Family) -> str | None:
    """The embedding that a head's tensor repeats, where embeddings are tied."""
    if name.rsplit(".", 2)[-2:] != ["lm_head", "weight"]:
        return None
    return next((next(iter(rule.hf_shapes)) for rule in family.rules if not rule.exported), None)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def parameter_shape(rule: Rule) -> tuple[int, ...]:
    """Full shape of a rule's parameter, without leading axes and padding."""
    pieces = rule.pieces(0, 1)
    dims = _dims(rule, pieces[0])
    if len(dims) == 1:
        return (max(p.stop for p in pieces),)
    end = max(p.stop for p in pieces)
    return (end, dims[1]) if pieces[0].axis == 0 else (dims[0], end)


def _dims(rule: Rule, piece: Piece) -> tuple[int, ...]:
    """Shape of a piece in Megatron's orientation."""
    full = rule.hf_shapes[piece.hf_name]
    dims = [len(range(*i.indices(n))) for i, n in zip(piece.hf_index, full) if isinstance(i, slice)]
    return tuple(reversed(dims) if piece.transposed else dims)


def parameter_recipe(rule: Rule, source_dtype: str, dtype: str) -> Recipe:
    """How a rule's parameter is made of Hugging Face tensors."""
    shape = parameter_shape(rule)
    parts = []
    for piece in rule.pieces(0, 1):
        dims = _dims(rule, piece)
        parts.append(
            Part(
                row=piece.start if piece.axis == 0 else 0,
                column=piece.start if piece.axis == 1 else 0,
                height=dims[0],
                width=dims[1] if len(dims) > 1 else 1,
                origin="hugging_face",
                source=piece.hf_name,
                index=piece.hf_index,
                transposed=piece.transposed,
            )
        )
    recipe = Recipe(
        name=rule.megatron, dtype=dtype, source_dtype=source_dtype, shape=shape, parts=_in_row_order(parts)
    )
    check_covered(recipe)
    return recipe


def tensor_recipes(family: Family, held: Mapping[str, Held], dtype: str | None, path: str) -> dict[str, Recipe]:
    """How each Hugging Face tensor is made of the checkpoint's chunks; in `dtype`, or the one it is held in."""
    parts: dict[str, list[Part]] = {}
    kinds: dict[str, set[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in family.rules:
        if not rule.exported:
            continue
        for piece in rule.pieces(0, 1):
            whole = _part_of_tensor(rule, piece)
            parts.setdefault(piece.hf_name, []).extend(_cut_by_chunks(rule, piece, whole, held[rule.megatron]))
            kinds.setdefault(piece.hf_name, set()).add(held[rule.megatron].dtype)
            shapes[piece.hf_name] = tuple(rule.hf_shapes[piece.hf_name])
    recipes = {}
    for name, shape in shapes.items():
        source = only_dtype(kinds[name], f"{path}: {name}")
        ordered = _in_row_order(parts[name])
        recipes[name] = Recipe(name=name, dtype=dtype or source, source_dtype=source, shape=shape, parts=ordered)
        check_covered(recipes[name])
    return recipes


def only_dtype(kinds: set[str], what: str) -> str:
    """The one type of what is put together. Raises ValueError for a mixture."""
    if len(kinds) > 1:
        raise ValueError(f"{what}: expected parts of one type, found {', '.join(sorted(kinds))}")
    return next(iter(kinds))


def bytes_recipe(folder: HfFolder, name: str) -> Recipe:
    """A tensor of a folder as bytes, whatever its type."""
    nbytes = folder.tensors[name].nbytes
    part = Part(row=0, column=0, height=nbytes, width=1, origin="bytes", source=name, index=())
    return Recipe(name=name, dtype=RAW, source_dtype=RAW, shape=(nbytes,), parts=(part,))


def folder_recipe(folder: HfFolder, name: str, dtype: str | None = None) -> Recipe:
    """A policy's tensor of a folder in `dtype`, or the one it is held in."""
    stored = folder.tensors[name]
    height = 1
    for n in stored.shape[:-1] or stored.shape:
        height *= n
    width = stored.shape[-1] if len(stored.shape) > 1 else 1
    part = Part(row=0, column=0, height=height, width=width, origin="hugging_face", source=name, index=())
    target = dtype or stored.dtype
    return Recipe(name=name, dtype=target, source_dtype=stored.dtype, shape=stored.shape, parts=(part,))


def _part_of_tensor(rule: Rule, piece: Piece) -> Part:
    """Where a piece lies in its Hugging Face tensor, seen as a matrix."""
    shape = rule.hf_shapes[piece.hf_name]
    ranges = [(i, i + 1) if isinstance(i, int) else i.indices(n)[:2] for i, n in zip(piece.hf_index, shape)]
    if len(ranges) == 1:
        ranges.append((0, 1))
        shape = (*shape, 1)
    row, height = 0, 1
    for axis, (low, high) in enumerate(ranges[:-1]):
        assert high - low == 1 or height == 1, f"{piece.hf_name}: a piece that is no rectangle"
        row, height = row * shape[axis] + low, height * (high - low)
    low, high = ranges[-1]
    return Part(
        row=row,
        column=low,
        height=height,
        width=high - low,
        origin="megatron",
        source=rule.megatron,
        index=(),
        transposed=piece.transposed,
    )


def _cut_by_chunks(rule: Rule, piece: Piece, whole: Part, held: Held) -> list[Part]:
    """The part of a piece in each chunk of its parameter."""
    lead = len(held.address.offset)
    height, width = (whole.width, whole.height) if whole.transposed else (whole.height, whole.width)
    row, column = (piece.start, 0) if piece.axis == 0 else (0, piece.start)
    found = []
    for number, chunk in enumerate(held.chunks):
        top, *left = chunk.offset[lead:]
        tall, *wide = chunk.shape[lead:]
        rows = range(max(row, top), min(row + height, top + tall))
        first, count = (left[0], wide[0]) if left else (0, 1)
        columns = range(max(column, first), min(column + width, first + count))
        if not rows or not columns:
            continue
        index = [slice(r.start - base, r.stop - base) for r, base in ((rows, top), (columns, first))]
        moved, across = (rows, row), (columns, column)
        down, right = (across, moved) if whole.transposed else (moved, across)
        found.append(
            replace(
                whole,
                row=whole.row + down[0].start - down[1],
                column=whole.column + right[0].start - right[1],
                height=len(down[0]),
                width=len(right[0]),
                source=chunk_name(rule.megatron, number),
                index=tuple(index if left else index[:1]),
            )
        )
    return found


def _in_row_order(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: (part.row, part.column)))
