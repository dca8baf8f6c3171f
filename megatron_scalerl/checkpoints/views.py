"""A checkpoint of either kind as Hugging Face tensors in files: the view that is exported and compared.

`conversion.json` in both kinds of result records every tensor with its checksum, and the layout of the Hugging Face
folder. Checksums are xxh3_64 of a tensor's bytes in Hugging Face's orientation, so that they are the same on both
sides; the way back compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.assembly import BITS
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.dist_reader import stored_parameters
from megatron_scalerl.checkpoints.hf_folder import HfFolder, HfTensor, Shard, open_folder, read_header
from megatron_scalerl.checkpoints.hf_writer import CONVERSION_FILE, Tensor
from megatron_scalerl.checkpoints.jobs import JobResult, SourceFiles
from megatron_scalerl.checkpoints.plain_files import check_name, refuse_links
from megatron_scalerl.checkpoints.safe_index import FORMAT_FILE
from megatron_scalerl.checkpoints.weight_map import (
    folder_assembly,
    other_tensors,
    parameter_shape,
    raw_assembly,
    tensor_assemblies,
)
from megatron_scalerl.models import family as family_of
from megatron_scalerl.models import read_hf_config
from megatron_scalerl.models.family import Family

SIDE_FOLDER = "hugging_face"
"""Where a Megatron checkpoint keeps config, tokenizer and tensors outside the policy."""
PASSTHROUGH_FILE = "carried.safetensors"
"""Tensors outside the policy, in the side folder."""
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRecord:
    """The content of conversion.json."""

    tensors: Mapping[str, Mapping[str, Any]]
    """Name -> dtype (safetensors' name), shape, checksum."""
    shards: tuple[Shard, ...]
    """Files of the Hugging Face folder."""
    index_metadata: Mapping[str, Any] | None
    """Metadata of its index; None if it has no index."""
    copies: Mapping[str, str]
    """Tensors that repeat another one."""
    passthrough: tuple[str, ...]
    """Tensors outside the policy. The file calls them "carried"."""


def write_record(folder: Path, record: ConversionRecord) -> None:
    """Write conversion.json."""
    data = {
        "format": _FORMAT,
        "checksum": "xxh3_64",
        "tensors": record.tensors,
        "shards": [{"file": s.file, "metadata": s.metadata, "tensors": s.tensors} for s in record.shards],
        "index_metadata": record.index_metadata,
        "copies": record.copies,
        "carried": record.passthrough,
    }
    write_durably(folder / CONVERSION_FILE, (json.dumps(data, indent=1) + "\n").encode())


def read_record(folder: Path) -> ConversionRecord:
    """Read conversion.json. Raises ValueError if there is none, or it cannot be read."""
    file = folder / CONVERSION_FILE
    if not file.is_file():
        origin = "name the Hugging Face folder that it came from (--like)"
        raise ValueError(f"{folder}: expected {CONVERSION_FILE}, found none; {origin}")
    try:
        data = json.loads(file.read_text(encoding="utf8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected JSON, found {error}") from None
    expected = f"{file}: expected a conversion record of format {_FORMAT}"
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{expected}, found another")
    try:
        return _record(file, data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{expected}, found one with {error!r}") from None


def _record(file: Path, data: dict[str, Any]) -> ConversionRecord:
    shards = tuple(Shard(**{**shard, "tensors": tuple(shard["tensors"])}) for shard in data["shards"])
    for shard in shards:
        check_name(file, shard.file)
        if not shard.file.endswith(".safetensors"):
            raise ValueError(f"{file}: expected files *.safetensors, found {shard.file}")
    for name in ("tensors", "copies"):
        if not isinstance(data[name], dict):
            raise TypeError(f"{name} that are a {type(data[name]).__name__}")
    for entry in data["tensors"].values():
        _ = entry["dtype"], entry["shape"], entry["checksum"]
    if not isinstance(data["index_metadata"], dict | None):
        raise TypeError("index_metadata that is not a dictionary")
    return ConversionRecord(
        tensors=data["tensors"],
        shards=shards,
        index_metadata=data["index_metadata"],
        copies=data["copies"],
        passthrough=tuple(data["carried"]),
    )


def layout_of(folder: HfFolder, family: Family) -> ConversionRecord:
    """The record of a Hugging Face folder, without checksums. Raises ValueError like `other_tensors`."""
    copies, passthrough = other_tensors(folder, family)
    return ConversionRecord(
        tensors={},
        shards=folder.shards,
        index_metadata=folder.index_metadata,
        copies=copies,
        passthrough=passthrough,
    )


def with_checksums(
    layout: ConversionRecord, tensors: Mapping[str, Tensor | HfTensor], results: Iterable[JobResult]
) -> ConversionRecord:
    """The record of a conversion, whose jobs computed the checksums of all `tensors`."""
    found = {name: value for result in results for name, value in result["checksums"].items()}
    return replace(
        layout,
        tensors={
            name: dict(dtype=tensor.dtype, shape=list(tensor.shape), checksum=found[name])
            for name, tensor in tensors.items()
        },
    )


@dataclass(frozen=True, kw_only=True)
class View:
    """All tensors of a checkpoint in Hugging Face's coordinates."""

    path: Path
    files: SourceFiles
    tensors: Mapping[str, Tensor]
    raw: Mapping[str, Tensor]
    """Tensors that can be read as plain bytes, to compare those whose type only one side knows."""


@dataclass(frozen=True, kw_only=True)
class MegatronView(View):
    """A Megatron checkpoint, and the Hugging Face folder that it becomes."""

    side: Path
    """Folder with the config, the tokenizer and so on."""
    layout: ConversionRecord
    checksums: Mapping[str, str]
    """Recorded checksums of the tensors that are exported in the type they are stored in."""
    generation: Mapping[str, Any]
    """Keys that generation_config.json must have."""


def open_view(path: str | Path) -> View:
    """Either kind of checkpoint. Raises ValueError for anything else."""
    path = Path(path)
    return megatron_view(path) if (path / FORMAT_FILE).is_file() else folder_view(open_folder(path))


def folder_view(folder: HfFolder) -> View:
    """A Hugging Face folder."""
    raw = {name: raw_tensor(folder, name) for name in folder.tensors}
    tensors = {
        name: Tensor(dtype=t.dtype, shape=t.shape, assembly=folder_assembly(folder, name))
        for name, t in folder.tensors.items()
        if t.dtype in BITS and t.shape
    }
    in_order = {name: tensors.get(name, raw[name]) for name in folder.tensors}
    return View(path=folder.path, files=SourceFiles(hugging_face=folder), tensors=in_order, raw=raw)


def raw_tensor(folder: HfFolder, name: str) -> Tensor:
    """A tensor of a folder as its bytes."""
    tensor = folder.tensors[name]
    return Tensor(dtype=tensor.dtype, shape=tensor.shape, assembly=raw_assembly(folder, name))


def megatron_view(path: str | Path, *, like: str | Path | None = None, dtype: str | None = None) -> MegatronView:
    """A Megatron checkpoint that we wrote, or any other with `like`, a Hugging Face folder that has what it lacks.

    Raises ValueError if the checkpoint is incomplete, does not fit the config, or has neither config nor `like`.
    """
    path = Path(path)
    if like is None:
        side, layout = path / SIDE_FOLDER, read_record(path)
        refuse_links(side)
        outer = _passthrough_folder(side, layout)
        family = family_of(policy_config(side), layout.tensors)
    else:
        side = Path(like)
        config, outer = policy_config(side), open_folder(side)
        family = family_of(config, outer.tensors)
        layout = layout_of(outer, family)
    shapes = {rule.megatron: parameter_shape(rule) for rule in family.rules if rule.exported}
    stored = stored_parameters(path, family, shapes)
    assemblies = tensor_assemblies(family, stored, dtype, str(path))
    for copy, of in layout.copies.items():
        if of not in assemblies:
            raise ValueError(f"{path}: {copy}: expected a copy of one of the checkpoint's tensors, found {of!r}")
        assemblies[copy] = replace(assemblies[of], name=copy)
    tensors = {name: Tensor(dtype=a.dtype, shape=a.shape, assembly=a) for name, a in assemblies.items()}
    raw = {name: raw_tensor(outer, name) for name in layout.passthrough} if outer is not None else {}
    tensors |= raw
    unknown = [name for shard in layout.shards for name in shard.tensors if name not in tensors]
    if unknown:
        raise ValueError(f"{path}: expected tensors of the checkpoint in its files, found {unknown[0]!r}")
    return MegatronView(
        path=path,
        files=SourceFiles(hugging_face=outer, megatron=path, parameters=stored),
        tensors=tensors,
        raw=raw,
        side=side,
        layout=layout,
        checksums={
            name: entry["checksum"]
            for name, entry in layout.tensors.items()
            if name in tensors and entry["dtype"] == tensors[name].dtype
        },
        generation=family.generation_config,
    )


def policy_config(path: Path) -> Any:
    """A folder's config. Raises ValueError for an unknown architecture, listing the known ones."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: expected a Hugging Face folder with config.json, found none")
    return read_hf_config(path)


def _passthrough_folder(side: Path, layout: ConversionRecord) -> HfFolder | None:
    if not layout.passthrough:
        return None
    file = side / PASSTHROUGH_FILE
    if not file.is_file():
        raise ValueError(f"{file}: expected the tensors outside the policy, found no file")
    metadata, found = read_header(file)
    tensors = {tensor.name: tensor for tensor in found}
    lacking = [name for name in layout.passthrough if name not in tensors]
    if lacking:
        raise ValueError(f"{file}: expected tensor {lacking[0]}, found none of that name")
    shard = Shard(file=PASSTHROUGH_FILE, metadata=metadata, tensors=tuple(tensors))
    return HfFolder(path=side, tensors=tensors, shards=(shard,), index_metadata=None)


def source_state(path: Path, files: Iterable[str]) -> list[Any]:
    """A value that changes if one of a source's files does."""
    stats = [(file, (path / file).stat()) for file in files]
    return [str(path.resolve()), [(file, s.st_size, s.st_mtime_ns, s.st_ino) for file, s in stats]]
