"""What makes a folder of chunks a `torch_dist` checkpoint: metadata, the empty objects, and the format's name."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable
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

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.convert.arrays import TORCH_NAMES
from megatron_scalerl.convert.jobs import Record
from megatron_scalerl.safe_load.index import FORMAT_FILE, METADATA
from megatron_scalerl.safe_load.values import COMMON

_FORMAT = dict(
    sharded_backend="torch_dist", sharded_backend_version=1, common_backend="torch", common_backend_version=1
)


def finish_checkpoint(folder: Path, records: Iterable[Record], extra_states: Iterable[str]) -> None:
    """Write .metadata, metadata.json, common.pt and one file that all the empty objects share.

    `records` are those of the checkpoint's jobs.
    """
    records = list(records)
    metadata = Metadata(state_dict_metadata={}, storage_data={}, storage_meta=StorageMeta(), planner_data=None)
    metadata.version = CURRENT_DCP_VERSION
    for record in records:
        for chunk in record["chunks"]:
            _add_chunk(metadata, record["file"], chunk)
    file, content = f"__0_{len(records)}.distcp", _saved([None])
    write_durably(folder / file, content)
    for key in extra_states:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file, 0, len(content))
    write_durably(folder / COMMON, _saved({}))
    write_durably(folder / METADATA, pickle.dumps(metadata))
    write_durably(folder / FORMAT_FILE, json.dumps(_FORMAT).encode())


def _add_chunk(metadata: Metadata, file: str, chunk: Record) -> None:
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
