"""A Hugging Face folder as a Megatron `torch_dist` checkpoint that opens under any parallel layout."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

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

from megatron_scalerl.checkpoints.assembly import TORCH_NAMES
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import write_commit
from megatron_scalerl.checkpoints.conversion import Options, Summary, convert
from megatron_scalerl.checkpoints.dist_reader import addresses, extra_states
from megatron_scalerl.checkpoints.hf_folder import HfFolder, HfTensor, open_folder
from megatron_scalerl.checkpoints.hf_writer import SafetensorsFile, copy_side_files, fill_jobs, plan_file
from megatron_scalerl.checkpoints.jobs import CheckpointJob, JobResult, OutputChunk, SourceFiles, Unit, grouped
from megatron_scalerl.checkpoints.safe_index import FORMAT_FILE, METADATA
from megatron_scalerl.checkpoints.safe_values import COMMON
from megatron_scalerl.checkpoints.verify import compare
from megatron_scalerl.checkpoints.views import (
    PASSTHROUGH_FILE,
    SIDE_FOLDER,
    folder_view,
    layout_of,
    megatron_view,
    policy_config,
    raw_tensor,
    source_state,
    with_checksums,
    write_record,
)
from megatron_scalerl.checkpoints.weight_map import folder_assembly, only_dtype, parameter_assembly
from megatron_scalerl.models import family as family_of
from megatron_scalerl.models.family import Family, Rule

CHUNK_BYTES = 128 << 20
"""Larger parameters are split into chunks of whole rows: the stock load holds a chunk at a time."""
_FORMAT = dict(
    sharded_backend="torch_dist", sharded_backend_version=1, common_backend="torch", common_backend_version=1
)


def to_megatron(hf_path: str | Path, out: str | Path, options: Options | None = None) -> Summary:
    """Convert a Hugging Face folder. A process needs memory for a few bands of a tensor, however large the model.

    Raises ValueError, and leaves nothing at `out`, for an invalid folder, a full disk, an existing `out`, weights
    that are not finite, and a comparison that fails.
    """
    options = options or Options()
    hf_path = Path(hf_path)
    config = policy_config(hf_path)
    folder = open_folder(hf_path)
    family = family_of(config, folder.tensors)
    layout = layout_of(folder, family)
    units = list(_units(folder, family, layout.copies, options.dtype))
    passthrough = _passthrough(folder, layout.passthrough)
    nbytes = sum(unit.nbytes for unit in units) + sum(a.nbytes for file in passthrough for a, _ in file.tensors)
    groups = grouped(units, lambda unit: unit.nbytes, options.bytes_of_a_job(nbytes))
    files = [CheckpointJob(name=f"__0_{number}.distcp", units=group) for number, group in enumerate(groups)]

    def finish(work: Path, results: dict[str, JobResult]) -> None:
        write_metadata(work, [results[job.name] for job in files], extra_states(family))
        copy_side_files(hf_path, work / SIDE_FOLDER)
        tensors = {
            name: t if name in layout.passthrough else _as(t, options.dtype) for name, t in folder.tensors.items()
        }
        write_record(work, with_checksums(layout, tensors, results.values()))
        write_commit(work, {"converted_from": hf_path.name, "family": family.name})
        if options.verify:
            compare(folder_view(folder), megatron_view(work), options)

    resumed = convert(
        out,
        [*files, *fill_jobs(passthrough, options.bytes_of_a_job(nbytes), {})],
        SourceFiles(hugging_face=folder),
        options,
        direction="to-megatron",
        inputs={"source": source_state(hf_path, ["config.json", *(shard.file for shard in folder.shards)])},
        files=passthrough,
        finish=finish,
    )
    return Summary(tensors=len(folder.tensors), nbytes=nbytes, resumed_bytes=resumed, verified=options.verify)


def _as(tensor: HfTensor, dtype: str | None) -> HfTensor:
    return replace(tensor, dtype=dtype or tensor.dtype)


def _passthrough(folder: HfFolder, names: Iterable[str]) -> list[SafetensorsFile]:
    """The file of tensors outside the policy, if there are any."""
    tensors = {name: raw_tensor(folder, name) for name in names}
    return [plan_file(f"{SIDE_FOLDER}/{PASSTHROUGH_FILE}", {"format": "pt"}, tensors)] if tensors else []


def _units(folder: HfFolder, family: Family, copies: Mapping[str, str], dtype: str | None) -> Iterable[Unit]:
    rules: dict[tuple[str, ...], list[Rule]] = {}
    for rule in family.rules:
        if rule.exported:
            rules.setdefault(tuple(rule.hf_shapes), []).append(rule)
    owned = [name for group in rules for name in group]
    assert len(owned) == len(set(owned)), "a Hugging Face tensor in two groups of rules"
    for group, members in rules.items():
        yield Unit(
            tensors=tuple(folder_assembly(folder, name, dtype) for name in group),
            chunks=tuple(chunk for rule in members for chunk in _chunks(rule, folder, family, dtype)),
            copies=tuple((folder_assembly(folder, copy, dtype), of) for copy, of in copies.items() if of in group),
        )


def _chunks(rule: Rule, folder: HfFolder, family: Family, dtype: str | None) -> Iterable[OutputChunk]:
    kinds = {folder.tensors[name].dtype for name in rule.hf_shapes}
    source = only_dtype(kinds, f"{folder.path}: {', '.join(rule.hf_shapes)}")
    assembly = parameter_assembly(rule, source, dtype or source)
    address = addresses(rule, family)[0]
    rows = max(1, CHUNK_BYTES // assembly.row_bytes)
    for start in range(0, assembly.shape[0], rows):
        yield OutputChunk(assembly=assembly, address=address, start=start, stop=min(start + rows, assembly.shape[0]))


def write_metadata(folder: Path, results: Sequence[JobResult], extra_states: Iterable[str]) -> None:
    """Write .metadata, metadata.json, common.pt and one file that all the empty objects share.

    `results` are those of the checkpoint's jobs.
    """
    metadata = Metadata(state_dict_metadata={}, storage_data={}, storage_meta=StorageMeta(), planner_data=None)
    metadata.version = CURRENT_DCP_VERSION
    for result in results:
        for chunk in result["chunks"]:
            _add_chunk(metadata, result["file"], chunk)
    file, content = f"__0_{len(results)}.distcp", _saved([None])
    write_durably(folder / file, content)
    for key in extra_states:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file, 0, len(content))
    write_durably(folder / COMMON, _saved({}))
    write_durably(folder / METADATA, pickle.dumps(metadata))
    write_durably(folder / FORMAT_FILE, json.dumps(_FORMAT).encode())


def _add_chunk(metadata: Metadata, file: str, chunk: JobResult) -> None:
    key, offset = chunk["key"], torch.Size(chunk["offset"])
    if key not in metadata.state_dict_metadata:
        properties = TensorProperties(dtype=getattr(torch, TORCH_NAMES[chunk["dtype"]]))
        empty = TensorStorageMetadata(properties=properties, size=torch.Size(chunk["size"]), chunks=[])
        metadata.state_dict_metadata[key] = empty
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.append(ChunkStorageMetadata(offsets=offset, sizes=torch.Size(chunk["shape"])))
    metadata.storage_data[MetadataIndex(key, offset)] = _StorageInfo(file, chunk["start"], chunk["length"])


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
