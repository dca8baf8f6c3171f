"""Views a Megatron checkpoint or a Hugging Face folder as Hugging Face tensors. Exports and comparisons use views.

Conversions in both directions write `conversion.json` into the result: every tensor with a checksum, and the files of
the Hugging Face folder. A checksum is the xxh3_64 of a tensor's bytes in Hugging Face's orientation, so a tensor has
the same checksum in both formats. `to_hf` compares checksums with conversion.json.
"""

import json
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatron_scalerl.checkpoints.assembly import Assembly, Origin, Sources
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.dist_reader import DistReader, stored_parameters
from megatron_scalerl.checkpoints.hf_folder import HfFolder, HfReader, Shard, open_folder, read_header
from megatron_scalerl.checkpoints.hf_writer import CONVERSION_FILE
from megatron_scalerl.checkpoints.plain_files import check_name, refuse_links
from megatron_scalerl.checkpoints.safe_index import FORMAT_FILE
from megatron_scalerl.checkpoints.weight_map import folder_assembly, other_tensors, parameter_shape, tensor_assemblies
from megatron_scalerl.models import family as family_of
from megatron_scalerl.models import read_hf_config
from megatron_scalerl.models.adapters import refuse_adapter
from megatron_scalerl.models.family import Family
from megatron_scalerl.record import record

SIDE_FOLDER = "hugging_face"
"""Folder that `to_megatron` puts into a checkpoint, with config, tokenizer and tensors outside the policy."""
PASSTHROUGH_FILE = "carried.safetensors"
"""File in the side folder with the tensors outside the policy."""


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one tensor in conversion.json."""

    dtype: str
    """Type of the elements by safetensors' name: BF16, F32 ..."""
    shape: tuple[int, ...]
    checksum: str


class ConversionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of conversion.json."""

    format: Literal[1] = 1
    checksum: Literal["xxh3_64"] = "xxh3_64"
    tensors: Mapping[str, TensorRecord]
    shards: tuple[Shard, ...]
    """Safetensors files of the Hugging Face folder."""
    index_metadata: Mapping[str, Any] | None
    """Metadata of the folder's index; None for a folder without an index."""
    copies: Mapping[str, str]
    """Name of a tensor that repeats a tied weight -> name of the policy's tensor."""
    passthrough: tuple[str, ...] = msgspec.field(name="carried")
    """Names of the tensors outside the policy."""


def write_record(
    folder: Path, layout: ConversionRecord, tensors: Mapping[str, Assembly], checksums: Mapping[str, str]
) -> None:
    """Write conversion.json: `layout`, and type, shape and checksum of each tensor."""
    records = {n: TensorRecord(dtype=t.dtype, shape=t.shape, checksum=checksums[n]) for n, t in tensors.items()}
    content = msgspec.to_builtins(msgspec.structs.replace(layout, tensors=records))
    write_durably(folder / CONVERSION_FILE, (json.dumps(content, indent=1) + "\n").encode())


def read_record(folder: Path) -> ConversionRecord:
    """Read conversion.json. Raises ValueError for a missing file, and for a file whose content is not valid."""
    file = folder / CONVERSION_FILE
    if not file.is_file():
        raise ValueError(
            f"{folder}: {CONVERSION_FILE} is missing; name the policy's original Hugging Face folder with --like"
        )
    try:
        record = msgspec.json.decode(file.read_bytes(), type=ConversionRecord)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the file is not a valid record of a conversion: {error}") from None
    for shard in record.shards:
        check_name(file, shard.file)
        if not shard.file.endswith(".safetensors"):
            raise ValueError(f"{file}: {shard.file} is not the name of a *.safetensors file")
    return record


def layout_of(folder: HfFolder, family: Family) -> ConversionRecord:
    """The record of a Hugging Face folder, still without `tensors`, which need checksums. Raises ValueError as
    `other_tensors` does."""
    copies, passthrough = other_tensors(folder, family)
    return _layout(folder, copies, passthrough)


def _layout(folder: HfFolder, copies: Mapping[str, str], passthrough: tuple[str, ...]) -> ConversionRecord:
    return ConversionRecord(
        tensors={},
        shards=folder.shards,
        index_metadata=folder.index_metadata,
        copies=copies,
        passthrough=passthrough,
    )


def sources(folder: HfFolder | None, checkpoint: DistReader | None = None) -> Sources:
    """The function with which an assembly reads tensors of a Hugging Face folder, or chunks of a Megatron checkpoint,
    from mapped files."""
    readers: dict[Origin, Any] = {"hugging_face": folder and HfReader(folder), "megatron": checkpoint}
    return lambda origin, name: readers[origin].bits(name)


@record
class View:
    """A checkpoint, Megatron's or Hugging Face's, as Hugging Face tensors. layout: files and tensors of the Hugging
    Face folder."""

    path: Path
    sources: Sources
    tensors: Mapping[str, Assembly]
    layout: ConversionRecord
    side: Path
    """Folder with the config, the tokenizer and so on."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values that generation_config.json must have."""
    frozen: frozenset[str] = frozenset()
    """Names of tensors that keep the type whatever `Options.dtype` is (`Family.frozen`)."""


def open_view(path: Path) -> View:
    """Open a folder, Megatron's or Hugging Face's, as a view. Raises ValueError if the folder is neither."""
    if (path / FORMAT_FILE).is_file():
        return megatron_view(path)
    return folder_view(open_folder(path))


def folder_view(folder: HfFolder) -> View:
    """The view of a Hugging Face folder. Raises ValueError for an unknown architecture."""
    tensors = {name: folder_assembly(folder, name) for name in folder.tensors}
    family = family_of(policy_config(folder.path), tensors)
    passthrough = tuple(name for name in tensors if name.startswith(family.passthrough))
    return View(
        path=folder.path,
        sources=sources(folder),
        tensors=tensors,
        layout=_layout(folder, {}, passthrough),
        side=folder.path,
        frozen=family.frozen,
    )


def megatron_view(path: Path, *, like: Path | None = None, dtype: str | None = None) -> View:
    """The view of a Megatron checkpoint: one that `to_megatron` wrote or, with `like`, any Megatron checkpoint.

    like: a Hugging Face folder with the config, the tokenizer and the tensors that the checkpoint lacks. Raises
    ValueError if the checkpoint is incomplete or does not fit the config, and, without `like`, if the checkpoint has
    no config.
    """
    if like is None:
        side = path / SIDE_FOLDER
        layout = read_record(path)
        refuse_links(side)
        outer = _passthrough_folder(side, layout)
        family = family_of(policy_config(side), layout.tensors)
    else:
        side = like
        # The config is read before open_folder, whose message for a wrong folder would be less plain.
        config = policy_config(side)
        outer = open_folder(side)
        family = family_of(config, outer.tensors)
        layout = layout_of(outer, family)
    shapes = {rule.megatron: parameter_shape(rule) for rule in family.rules if rule.exported}
    stored = stored_parameters(path, family, shapes)
    tensors = tensor_assemblies(family, stored, dtype, str(path))
    for copy, original in layout.copies.items():
        if original not in tensors:
            raise ValueError(f"{path}: {copy} was recorded as a copy of {original!r}, which the checkpoint lacks")
        tensors[copy] = replace(tensors[original], name=copy)
    if outer is not None:
        tensors |= {name: folder_assembly(outer, name) for name in layout.passthrough}
    unknown = [name for shard in layout.shards for name in shard.tensors if name not in tensors]
    if unknown:
        raise ValueError(f"{path}: the checkpoint lacks {unknown[0]!r}, which the original Hugging Face folder has")
    return View(
        path=path,
        sources=sources(outer, DistReader(path, stored)),
        tensors=tensors,
        layout=layout,
        side=side,
        generation=family.generation_config,
        frozen=family.frozen,
    )


def policy_config(path: Path) -> Any:
    """The config of a Hugging Face folder. Raises ValueError for an unknown architecture, listing the known names."""
    refuse_adapter(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: this is not a Hugging Face folder: it has no config.json")
    return read_hf_config(path)


def _passthrough_folder(side: Path, layout: ConversionRecord) -> HfFolder | None:
    if not layout.passthrough:
        return None
    file = side / PASSTHROUGH_FILE
    if not file.is_file():
        raise ValueError(
            f"{file}: the checkpoint lacks this file of tensors outside the policy, such as a vision tower's"
        )
    metadata, tensors = read_header(file)
    shard = Shard(file=PASSTHROUGH_FILE, metadata=metadata, tensors=tuple(tensor.name for tensor in tensors))
    lacking = [name for name in layout.passthrough if name not in shard.tensors]
    if lacking:
        raise ValueError(f"{file}: the file lacks a tensor that conversion.json lists, {lacking[0]}")
    by_name = {tensor.name: tensor for tensor in tensors}
    return HfFolder(path=side, tensors=by_name, shards=(shard,), index_metadata=None)
