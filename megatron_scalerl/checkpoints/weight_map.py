"""A family's rules as assemblies: parameters out of Hugging Face tensors, and the other way round.

Nothing here is specific to a family. A rule's pieces for a tensor-parallel group of one describe the whole parameter,
and that is what checkpoints hold, whatever layout they are loaded under.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_scalerl.checkpoints.assembly import TORCH_NAMES, Assembly, Part, check_covered, matrix_shape
from megatron_scalerl.checkpoints.dist_reader import StoredParameter, chunk_name
from megatron_scalerl.checkpoints.hf_folder import HfFolder, HfReader, family_of_folder, open_folder
from megatron_scalerl.models.family import Family, Piece, Rule
from megatron_scalerl.processes.logs import listed


def other_tensors(folder: HfFolder, family: Family) -> tuple[dict[str, str], tuple[str, ...]]:
    """The folder's tensors that are not in the weight map, after checking those that are.

    Returns (copies -> the tensor that each repeats, as in some folders with tied embeddings; tensors outside the
    policy, copied as they are). Raises ValueError for tensors that are missing or unknown (all are listed), and for
    one whose shape or type does not match the config.
    """
    policy = {name: tuple(shape) for rule in family.rules for name, shape in rule.hf_shapes.items()}
    missing = [name for name in policy if name not in folder.tensors]
    if missing:
        raise ValueError(f"{folder.path}: the folder has no tensor {listed(missing)}")
    rest = [name for name in folder.tensors if name not in policy]
    passthrough = tuple(name for name in rest if family.passthrough and name.startswith(family.passthrough))
    copies = {name: tied for name in rest if (tied := _tied_to(name, family)) and name not in passthrough}
    unexpected = [name for name in rest if name not in passthrough and name not in copies]
    if unexpected:
        raise ValueError(f"{folder.path}: a {family.name} does not have the tensors {listed(unexpected)}")
    for name, shape in [*policy.items(), *((copy, policy[of]) for copy, of in copies.items())]:
        found = folder.tensors[name]
        where = f"{folder.path / found.file}: {name}"
        if found.shape != shape:
            raise ValueError(f"{where}: its shape is {list(found.shape)}, and config.json says {list(shape)}")
        if found.dtype not in TORCH_NAMES:
            raise ValueError(f"{where}: expected one of {', '.join(TORCH_NAMES)}, found {found.dtype}")
    return copies, passthrough


def check_weights(path: str | Path) -> None:
    """Check that a Hugging Face folder holds exactly the weights that its config.json describes.

    Raises ValueError for quantized weights, for tensors that are missing or unknown or have another shape, and for a
    head that differs from the embedding though config.json ties them: one of the two would be lost in an export.
    """
    family = family_of_folder(path)
    folder = open_folder(path)
    reader = HfReader(folder)
    for copy, original in other_tensors(folder, family)[0].items():
        if folder.tensors[copy].dtype != folder.tensors[original].dtype or not np.array_equal(
            reader.bits(copy), reader.bits(original)
        ):
            raise ValueError(
                f"{path}: config.json ties the head to the embedding (tie_word_embeddings), but {copy} differs from "
                f"{original}; set tie_word_embeddings to false if the policy has a head of its own"
            )


def _tied_to(name: str, family: Family) -> str | None:
    """The embedding that a head's tensor repeats if embeddings are tied."""
    if name.rsplit(".", 2)[-2:] != ["lm_head", "weight"]:
        return None
    return next((next(iter(rule.hf_shapes)) for rule in family.rules if not rule.exported), None)


def parameter_shape(rule: Rule) -> tuple[int, ...]:
    """Full shape of a rule's parameter, without leading axes and padding."""
    pieces = rule.pieces(0, 1)
    dims = _dims(rule, pieces[0])
    end = max(p.stop for p in pieces)
    if len(dims) == 1:
        return (end,)
    return (end, dims[1]) if pieces[0].axis == 0 else (dims[0], end)


def _dims(rule: Rule, piece: Piece) -> tuple[int, ...]:
    """Shape of a piece in Megatron's orientation."""
    full = rule.hf_shapes[piece.hf_name]
    dims = [len(range(*i.indices(n))) for i, n in zip(piece.hf_index, full) if isinstance(i, slice)]
    return tuple(reversed(dims) if piece.transposed else dims)


def parameter_assembly(rule: Rule, source_dtype: str, dtype: str) -> Assembly:
    """A rule's parameter, assembled from Hugging Face tensors."""
    parts = []
    for piece in rule.pieces(0, 1):
        dims = _dims(rule, piece)
        row, column = _start(piece)
        parts.append(
            Part(
                row=row,
                column=column,
                height=dims[0],
                width=dims[1] if len(dims) > 1 else 1,
                origin="hugging_face",
                source=piece.hf_name,
                index=piece.hf_index,
                transposed=piece.transposed,
            )
        )
    return _assembly(rule.megatron, dtype, source_dtype, parameter_shape(rule), parts)


def tensor_assemblies(
    family: Family, stored: Mapping[str, StoredParameter], dtype: str | None, path: str
) -> dict[str, Assembly]:
    """Every Hugging Face tensor, assembled from the checkpoint's chunks; in `dtype`, or the type it is stored in."""
    parts: dict[str, list[Part]] = {}
    kinds: dict[str, set[str]] = {}
    shapes = {}
    for rule in family.rules:
        if not rule.exported:
            continue
        parameter = stored[rule.megatron]
        for piece in rule.pieces(0, 1):
            whole = _part_of_tensor(rule, piece)
            parts.setdefault(piece.hf_name, []).extend(_split_by_chunks(rule, piece, whole, parameter))
            kinds.setdefault(piece.hf_name, set()).add(parameter.dtype)
            shapes[piece.hf_name] = tuple(rule.hf_shapes[piece.hf_name])
    assemblies = {}
    for name, shape in shapes.items():
        source = only_dtype(kinds[name], f"{path}: {name}")
        assemblies[name] = _assembly(name, dtype or source, source, shape, parts[name])
    return assemblies


def _assembly(name: str, dtype: str, source: str, shape: tuple[int, ...], parts: Iterable[Part]) -> Assembly:
    ordered = tuple(sorted(parts, key=lambda part: (part.row, part.column)))
    assembly = Assembly(name=name, dtype=dtype, source_dtype=source, shape=shape, parts=ordered)
    check_covered(assembly)
    return assembly


def only_dtype(kinds: set[str], what: str) -> str:
    """The one type of all parts. Raises ValueError for a mixture."""
    if len(kinds) > 1:
        raise ValueError(f"{what}: its parts have different types: {', '.join(sorted(kinds))}")
    return next(iter(kinds))


def folder_assembly(folder: HfFolder, name: str, dtype: str | None = None) -> Assembly:
    """A tensor of a folder in `dtype`, or the type it is stored in."""
    tensor = folder.tensors[name]
    height, width = matrix_shape(tensor.shape)
    part = Part(row=0, column=0, height=height, width=width, origin="hugging_face", source=name, index=())
    target = dtype or tensor.dtype
    return Assembly(name=name, dtype=target, source_dtype=tensor.dtype, shape=tensor.shape, parts=(part,))


def _start(piece: Piece) -> tuple[int, int]:
    """(row, column) of a piece in its parameter."""
    return (piece.start, 0) if piece.axis == 0 else (0, piece.start)


def _part_of_tensor(rule: Rule, piece: Piece) -> Part:
    """The place of a piece in its Hugging Face tensor, seen as a matrix."""
    shape = rule.hf_shapes[piece.hf_name]
    ranges = [(i, i + 1) if isinstance(i, int) else i.indices(n)[:2] for i, n in zip(piece.hf_index, shape)]
    if len(ranges) == 1:
        ranges.append((0, 1))
        shape = (*shape, 1)
    row, height = 0, 1
    for axis, (low, high) in enumerate(ranges[:-1]):
        assert high - low == 1 or height == 1, f"{piece.hf_name}: expected a rectangle"
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


def _split_by_chunks(rule: Rule, piece: Piece, whole: Part, stored: StoredParameter) -> list[Part]:
    """The share of a piece in each chunk of its parameter."""
    lead = len(stored.address.offset)
    height, width = (whole.width, whole.height) if whole.transposed else (whole.height, whole.width)
    row, column = _start(piece)
    found = []
    for number, chunk in enumerate(stored.chunks):
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
