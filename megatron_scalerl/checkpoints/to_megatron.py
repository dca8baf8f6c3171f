"""Converts a Hugging Face folder to a Megatron `torch_dist` checkpoint that opens under any parallel layout."""

import io
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_scalerl.checkpoints.assembly import TORCH_NAMES, Assembly
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import write_commit
from megatron_scalerl.checkpoints.conversion import (
    DEFAULTS,
    Copier,
    Options,
    Summary,
    new_file,
    progress,
    result_folder,
)
from megatron_scalerl.checkpoints.dist_reader import Address, addresses, extra_states
from megatron_scalerl.checkpoints.hf_folder import HfFolder, Shard, open_folder
from megatron_scalerl.checkpoints.hf_writer import copy_side_files, write_shard
from megatron_scalerl.checkpoints.safe_index import COMMON, FORMAT_FILE, METADATA
from megatron_scalerl.checkpoints.torch_archive import append_tensor
from megatron_scalerl.checkpoints.verify import compare
from megatron_scalerl.checkpoints.views import (
    PASSTHROUGH_FILE,
    SIDE_FOLDER,
    ConversionRecord,
    folder_view,
    layout_of,
    megatron_view,
    policy_config,
    sources,
    write_record,
)
from megatron_scalerl.checkpoints.weight_map import folder_assembly, only_dtype, parameter_assembly
from megatron_scalerl.models import family as family_of
from megatron_scalerl.models.family import Family, Rule
from megatron_scalerl.record import record

CHUNK_BYTES = 128 << 20
"""Parameters above this size are stored in chunks of whole rows, since Megatron's own load holds a whole chunk in
memory."""
_MIN_FILE_BYTES = 32 << 20
_MAX_FILE_BYTES = 1 << 30
_MIN_FILES = 16
"""Smallest number of files to write, so that ranks read in parallel; fewer if files would be below
_MIN_FILE_BYTES."""
_FORMAT = dict(
    sharded_backend="torch_dist", sharded_backend_version=1, common_backend="torch", common_backend_version=1
)


@record
class Unit:
    """A group of Hugging Face tensors, and the Megatron parameters that are assembled from these tensors alone."""

    tensors: tuple[Assembly, ...]
    parameters: tuple[tuple[Assembly, Address], ...]
    copies: tuple[tuple[Assembly, str], ...]
    """Pairs of (copy of a tied weight, name of the unit's tensor to which the copy must be equal)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's weights in the written type."""
        return sum(assembly.nbytes for assembly in self.tensors)


def to_megatron(hf_path: Path, out: Path, options: Options = DEFAULTS) -> Summary:
    """Convert a Hugging Face folder to a Megatron checkpoint. At any time a few blocks of rows are in memory.

    Raises ValueError, and leaves nothing at `out`, for an invalid folder, a full disk, an existing `out`, weights
    that are not finite, and tensors that differ when `options.verify` reads the result.
    """
    config = policy_config(hf_path)
    folder = open_folder(hf_path)
    family = family_of(config, folder.tensors)
    layout = layout_of(folder, family)
    dtypes = dict.fromkeys(folder.tensors, options.dtype) | dict.fromkeys((*layout.passthrough, *family.frozen))
    tensors = {name: folder_assembly(folder, name, dtype) for name, dtype in dtypes.items()}
    units = list(_units(folder, family, layout, tensors))
    nbytes = sum(unit.nbytes for unit in units) + sum(tensors[name].nbytes for name in layout.passthrough)
    with result_folder(out, nbytes) as work:
        (work / SIDE_FOLDER).mkdir()
        with progress(options, "to-megatron", nbytes) as advance:
            copier = Copier(sources=sources(folder), options=options, on_bytes=advance)
            checksums = _write_units(work, units, nbytes, copier, extra_states(family))
            if layout.passthrough:
                shard = Shard(
                    file=f"{SIDE_FOLDER}/{PASSTHROUGH_FILE}", metadata={"format": "pt"}, tensors=layout.passthrough
                )
                checksums |= write_shard(work, shard, tensors, copier, layout.passthrough)
        copy_side_files(hf_path, work / SIDE_FOLDER)
        write_record(work, layout, tensors, checksums)
        write_commit(work, {"converted_from": hf_path.name, "family": family.name})
        if options.verify:
            compare(folder_view(folder), megatron_view(work), options)
    return Summary(tensors=len(folder.tensors), nbytes=nbytes, verified=options.verify)


def _units(
    folder: HfFolder, family: Family, layout: ConversionRecord, tensors: Mapping[str, Assembly]
) -> Iterator[Unit]:
    rules: dict[tuple[str, ...], list[Rule]] = {}
    for rule in family.rules:
        if rule.exported:
            rules.setdefault(tuple(rule.hf_shapes), []).append(rule)
    owned = [name for group in rules for name in group]
    assert len(owned) == len(set(owned)), "the weight map gives a Hugging Face tensor to two groups of rules"
    for group, members in rules.items():
        yield Unit(
            tensors=tuple(tensors[name] for name in group),
            parameters=tuple((_parameter(rule, folder, tensors), addresses(rule, family)[0]) for rule in members),
            copies=tuple((tensors[copy], name) for copy, name in layout.copies.items() if name in group),
        )


def _parameter(rule: Rule, folder: HfFolder, tensors: Mapping[str, Assembly]) -> Assembly:
    dtypes = {folder.tensors[name].dtype for name in rule.hf_shapes}
    source = only_dtype(dtypes, f"{folder.path}: {', '.join(rule.hf_shapes)}")
    return parameter_assembly(rule, source, tensors[next(iter(rule.hf_shapes))].dtype)


def _write_units(
    work: Path, units: Sequence[Unit], nbytes: int, copier: Copier, extra_states: Iterable[str]
) -> dict[str, str]:
    """Write the units' parameters to files, and all metadata. Returns the checksums of the Hugging Face tensors."""
    metadata = Metadata(state_dict_metadata={}, storage_data={}, storage_meta=StorageMeta(), planner_data=None)
    metadata.version = CURRENT_DCP_VERSION
    checksums: dict[str, str] = {}
    limit = max(_MIN_FILE_BYTES, min(_MAX_FILE_BYTES, nbytes // _MIN_FILES))
    files = list(_grouped(units, limit))
    for number, group in enumerate(files):
        name = f"__0_{number}.distcp"
        with new_file(work / name) as file:
            for unit in group:
                checksums |= _checksums(unit, copier)
                for parameter, address in unit.parameters:
                    _write_parameter(file, name, parameter, address, copier, metadata)
    _write_metadata(work, f"__0_{len(files)}.distcp", metadata, extra_states)
    return checksums


def _grouped(units: Iterable[Unit], limit: int) -> Iterator[list[Unit]]:
    """Yield the units in order, in groups of at most `limit` bytes. A unit above `limit` is a group of its own."""
    group: list[Unit] = []
    for unit in units:
        if group and sum(member.nbytes for member in group) + unit.nbytes > limit:
            yield group
            group = []
        group.append(unit)
    yield group


def _checksums(unit: Unit, copier: Copier) -> dict[str, str]:
    checksums = {tensor.name: copier.checksum(tensor) for tensor in unit.tensors}
    for copy, original in unit.copies:
        checksums[copy.name] = copier.checksum(copy)
        if checksums[copy.name] != checksums[original]:
            raise ValueError(
                f"{copy.name}: differs from {original}, though config.json ties both; set tie_word_embeddings false"
            )
    return checksums


def _write_parameter(
    file: IO[bytes], name: str, parameter: Assembly, address: Address, copier: Copier, metadata: Metadata
) -> None:
    """Append a parameter to the file `name` in chunks of whole rows, and describe the chunks in the metadata."""
    key = address.key
    inner_shape = parameter.shape[1:]
    if key not in metadata.state_dict_metadata:
        properties = TensorProperties(dtype=getattr(torch, TORCH_NAMES[parameter.dtype]))
        size = torch.Size((*address.sizes, *parameter.shape))
        metadata.state_dict_metadata[key] = TensorStorageMetadata(properties=properties, size=size, chunks=[])
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    step = max(1, CHUNK_BYTES // parameter.row_bytes)
    for start in range(0, parameter.shape[0], step):
        stop = min(start + step, parameter.shape[0])
        # A chunk belongs to one layer and one expert, so the leading axes have length 1.
        shape = (*(1 for _ in address.offset), stop - start, *inner_shape)
        offset = torch.Size((*address.offset, start, *(0 for _ in inner_shape)))
        first_byte = file.tell()
        length = append_tensor(file, parameter.dtype, shape, copier.rows(parameter, start, stop))
        entry.chunks.append(ChunkStorageMetadata(offsets=offset, sizes=torch.Size(shape)))
        metadata.storage_data[MetadataIndex(key, offset)] = _StorageInfo(name, first_byte, length)


def _write_metadata(folder: Path, file: str, metadata: Metadata, extra_states: Iterable[str]) -> None:
    """Write .metadata, metadata.json, common.pt and `file`, to which the index entries of all extra states point."""
    content = _saved([None])
    write_durably(folder / file, content)
    for key in extra_states:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file, 0, len(content))
    # metadata.json is written last, because readers take a folder without metadata.json for no checkpoint.
    write_durably(folder / COMMON, _saved({}))
    write_durably(folder / METADATA, pickle.dumps(metadata))
    write_durably(folder / FORMAT_FILE, json.dumps(_FORMAT).encode())


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
