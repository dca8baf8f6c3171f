"""Turns a family's rules into assemblies: of Megatron parameters from Hugging Face tensors, and the reverse.

Nothing in this module is specific to a family. All functions take a rule's pieces for a tensor-parallel group of 1,
since checkpoints hold whole parameters under any layout.
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
    """Check a folder's tensors against the weight map, and return the tensors outside the map.

    Returns (copies, passthrough). copies: name of a tensor that repeats a tied weight, as some folders hold -> name
    of the policy's tensor.
    passthrough: tensors outside the policy, which are copied unchanged. Raises ValueError listing all tensors that
    are missing, or all that are unknown, and for a tensor with a type that is not in TORCH_NAMES or a shape that does
    not match the config.
    """
    policy = {name: tuple(shape) for rule in family.rules for name, shape in rule.hf_shapes.items()}
    missing_names = [name for name in policy if name not in folder.tensors]
    if missing_names:
        raise ValueError(f"{folder.path}: the folder lacks tensors of the policy: {listed(missing_names)}")
    outside_names = [name for name in folder.tensors if name not in policy]
    passthrough = tuple(name for name in outside_names if family.passthrough and name.startswith(family.passthrough))
    copies = {}
    tied = next((name for rule in family.rules if not rule.exported for name in rule.hf_shapes), None)
    for name in outside_names:
        if tied and name not in passthrough and name.rsplit(".", 2)[-2:] == ["lm_head", "weight"]:
            copies[name] = tied
    unexpected_names = [name for name in outside_names if name not in passthrough and name not in copies]
    if unexpected_names:
        raise ValueError(
            f"{folder.path}: a {family.name} policy does not have the tensors {listed(unexpected_names)}"
        )
    shapes = policy | {copy: policy[original] for copy, original in copies.items()}
    for name, shape in shapes.items():
        tensor = folder.tensors[name]
        head = f"{folder.path / tensor.file}: {name}"
        if tensor.shape != shape:
            raise ValueError(f"{head}: the tensor has shape {list(tensor.shape)}, but config.json says {list(shape)}")
        if tensor.dtype not in TORCH_NAMES:
            raise ValueError(f"{head}: the type {tensor.dtype} is not supported, only {', '.join(TORCH_NAMES)}")
    return copies, passthrough


def check_weights(path: str | Path) -> None:
    """Check that a Hugging Face folder holds exactly the weights that config.json describes.

    Raises ValueError for quantized weights, for tensors that are missing or unknown or have another shape, and for a
    head that differs from the embedding though config.json ties both: an export would write one tensor for both.
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


def parameter_shape(rule: Rule) -> tuple[int, ...]:
    """Full shape of a rule's parameter, without the axes for layer and expert and without a vocabulary's padding."""
    pieces = rule.pieces(0, 1)
    shape = list(_dims(rule, pieces[0]))
    shape[pieces[0].axis] = max(piece.stop for piece in pieces)
    return tuple(shape)


def _dims(rule: Rule, piece: Piece) -> tuple[int, ...]:
    """Shape of a piece in the orientation that Megatron stores."""
    full = rule.hf_shapes[piece.hf_name]
    dims = tuple(len(range(n)[i]) for i, n in zip(piece.hf_index, full) if isinstance(i, slice))
    if piece.transposed:
        return dims[::-1]
    return dims


def parameter_assembly(rule: Rule, source_dtype: str, dtype: str) -> Assembly:
    """How a rule's parameter, to be written in `dtype`, is assembled from Hugging Face tensors of the type
    `source_dtype`."""
    parts = []
    for piece in rule.pieces(0, 1):
        height, width = matrix_shape(_dims(rule, piece))
        row, column = _start(piece)
        parts.append(
            Part(
                row=row,
                column=column,
                height=height,
                width=width,
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
    """Name of a Hugging Face tensor -> how the tensor is assembled from the checkpoint's chunks. dtype: type of the
    assembled tensors; None: the stored type."""
    parts: dict[str, list[Part]] = {}
    dtypes: dict[str, set[str]] = {}
    shapes = {}
    for rule in family.rules:
        if not rule.exported:
            continue
        parameter = stored[rule.megatron]
        for piece in rule.pieces(0, 1):
            piece_part = _part_of_tensor(rule, piece)
            parts.setdefault(piece.hf_name, []).extend(_split_by_chunks(rule, piece, piece_part, parameter))
            dtypes.setdefault(piece.hf_name, set()).add(parameter.dtype)
            shapes[piece.hf_name] = tuple(rule.hf_shapes[piece.hf_name])
    assemblies = {}
    frozen = family.frozen
    for name, shape in shapes.items():
        source = only_dtype(dtypes[name], f"{path}: {name}")
        target = dtype or source
        if name in frozen:
            target = source
        assemblies[name] = _assembly(name, target, source, shape, parts[name])
    return assemblies


def _assembly(name: str, dtype: str, source: str, shape: tuple[int, ...], parts: Iterable[Part]) -> Assembly:
    ordered = tuple(sorted(parts, key=lambda part: (part.row, part.column)))
    assembly = Assembly(name=name, dtype=dtype, source_dtype=source, shape=shape, parts=ordered)
    check_covered(assembly)
    return assembly


def only_dtype(dtypes: set[str], head: str) -> str:
    """The type of all parts of a tensor. Raises ValueError, with `head` before the message, if the types differ."""
    if len(dtypes) > 1:
        raise ValueError(f"{head}: the parts of this tensor have different types: {', '.join(sorted(dtypes))}")
    return next(iter(dtypes))


def folder_assembly(folder: HfFolder, name: str, dtype: str | None = None) -> Assembly:
    """The assembly that copies a folder's tensor, converted to `dtype`; None: in the stored type."""
    tensor = folder.tensors[name]
    height, width = matrix_shape(tensor.shape)
    part = Part(row=0, column=0, height=height, width=width, origin="hugging_face", source=name, index=())
    target = dtype or tensor.dtype
    return Assembly(name=name, dtype=target, source_dtype=tensor.dtype, shape=tensor.shape, parts=(part,))


def _start(piece: Piece) -> tuple[int, int]:
    """(row, column) at which a piece starts in the parameter."""
    if piece.axis == 0:
        return piece.start, 0
    return 0, piece.start


def _part_of_tensor(rule: Rule, piece: Piece) -> Part:
    """The rectangle of a piece in the Hugging Face tensor, when the tensor is seen as a matrix."""
    shape = rule.hf_shapes[piece.hf_name]
    ranges = []
    for index, size in zip(piece.hf_index, shape):
        if isinstance(index, int):
            index = slice(index, index + 1)
        ranges.append(range(size)[index])
    if len(ranges) == 1:
        ranges.append(range(1))
    *outer, columns = ranges
    row = 0
    height = 1
    # All axes but the last form the rows of the matrix. The selected rows are contiguous if only the last of the row
    # axes has more than one selected element.
    for rows, size in zip(outer, shape):
        assert len(rows) == 1 or height == 1, f"{piece.hf_name}: the piece is not a rectangle of the tensor's matrix"
        row = row * size + rows.start
        height *= len(rows)
    return Part(
        row=row,
        column=columns.start,
        height=height,
        width=len(columns),
        origin="megatron",
        source=rule.megatron,
        index=(),
        transposed=piece.transposed,
    )


def _split_by_chunks(rule: Rule, piece: Piece, piece_part: Part, stored: StoredParameter) -> list[Part]:
    """The overlaps of a piece with the stored parameter's chunks, as parts of the Hugging Face tensor.

    piece_part: the whole piece, as a part of the Hugging Face tensor.
    """
    lead = len(stored.address.offset)
    height = piece_part.height
    width = piece_part.width
    if piece_part.transposed:
        height, width = width, height
    row, column = _start(piece)
    parts = []
    for number, chunk in enumerate(stored.chunks):
        # A vector counts as a matrix with one column.
        chunk_row, chunk_column = (*chunk.offset[lead:], 0)[:2]
        chunk_height, chunk_width = (*chunk.shape[lead:], 1)[:2]
        rows = range(max(row, chunk_row), min(row + height, chunk_row + chunk_height))
        columns = range(max(column, chunk_column), min(column + width, chunk_column + chunk_width))
        if not rows or not columns:
            continue
        index = (
            slice(rows.start - chunk_row, rows.stop - chunk_row),
            slice(columns.start - chunk_column, columns.stop - chunk_column),
        )
        down = rows.start - row
        right = columns.start - column
        size = (len(rows), len(columns))
        # The rows of a transposed parameter are the columns of the Hugging Face tensor.
        if piece_part.transposed:
            down, right = right, down
            size = size[::-1]
        parts.append(
            replace(
                piece_part,
                row=piece_part.row + down,
                column=piece_part.column + right,
                height=size[0],
                width=size[1],
                source=chunk_name(rule.megatron, number),
                index=index[: len(chunk.shape) - lead],
            )
        )
    return parts
