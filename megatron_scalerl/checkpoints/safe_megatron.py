"""Loads a checkpoint by Megatron's own planning and resharding, but with a reader that runs no code from files.

`load` takes the steps of `dist_checkpointing.load` of megatron-core 0.19.2:

1. `read_index` reads the index; if `common` is set, `_common` reads the state that all ranks share.
2. Every rank says which tensors to load; all ranks check these keys against the index (`_check_tensors`).
3. Megatron's strategy plans which chunks this rank reads. `_Reader` replaces torch's FileSystemReader.
4. The ranks exchange failures, so that all ranks raise if one rank fails.

Every byte is read once, so the bytes that are checked are the bytes that are used.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import CheckpointingException, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from megatron_scalerl.checkpoints.plain_files import open_plain, printable
from megatron_scalerl.checkpoints.safe_index import (
    COMMON,
    COMMON_OBJECT,
    ByteRange,
    CheckpointIndex,
    Chunk,
    read_index,
)
from megatron_scalerl.checkpoints.safe_values import read_object, read_tensor, read_value
from megatron_scalerl.distributed.device import device

_ARRAYS = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32))]
"""Names that the pickles in a run's own checkpoints may use: the state of numpy's random number generator is an
array.

Checkpoints of other parties may not use these names: numpy takes the flags of a type, such as "holds objects",
unchanged from a pickle.
"""
_TEXT = 4096
"""Length (bytes) to which a rank's error message is cut before all ranks get the message."""


def load(target: dict[str, Any], path: Path, *, common: bool) -> dict[str, Any]:
    """Load a checkpoint as `dist_checkpointing.load(target, path)` does, without unpickling. Every rank must call
    `load`.

    common: whether the checkpoint is the run's own. If so, the result also has the state that Megatron saves once for
    all ranks, and `target` must name every tensor of the checkpoint. Without `common`, common.pt is not opened.

    Raises ValueError, on every rank, for a folder that is no `torch_dist` checkpoint, a checkpoint that lacks a part
    of `target`, and a part whose pickle uses a name that is not allowed.
    """
    index = read_index(path)
    state = {}
    if common:
        state = _common(index)
    sharded, unsharded, factories = load_preprocess(target)
    merge(state, unsharded)
    sharded, _ = extract_sharded_base(sharded)
    metadata_of_ranks = determine_global_metadata(sharded)[1]
    validate_sharding_integrity(metadata_of_ranks)
    keys = {item.key for items in metadata_of_ranks for item in items if isinstance(item, ShardedTensor)}
    _check_tensors(index, keys, all_tensors=common)
    failure: BaseException | None = None
    try:
        with _read_with(_Reader(index, _ARRAYS if common else [])):
            merge(state, torch_strategies.TorchDistLoadShardedStrategy().load(sharded, path))
    except (CheckpointException, CheckpointingException, ValueError, KeyError, RuntimeError, OSError) as error:
        failure = error
        # Up to Megatron-Core 0.16 any rank's failure raises CheckpointException here; later only this rank's.
        if isinstance(error, CheckpointException):
            failure = _first_failure(index, error)
    text = ""
    if failure is not None:
        text = str(failure) or repr(failure)
    # All ranks exchange failures, so that no rank goes on to the next collective and waits there for a failed rank.
    text = _first_of_all_ranks(text)
    if failure is not None:
        raise failure from None
    if text:
        raise ValueError(text)
    return apply_factory_merges(state, factories)


def _check_tensors(index: CheckpointIndex, keys: set[str], *, all_tensors: bool) -> None:
    """Raises ValueError if the checkpoint lacks a key or, with `all_tensors`, has a tensor outside of the keys."""
    missing_keys = keys - set(index.tensors)
    surplus_keys = set(index.tensors) - keys
    if missing_keys:
        problem = f"the checkpoint lacks {printable(min(missing_keys))}"
    elif all_tensors and surplus_keys:
        problem = f"the trainer lacks {printable(min(surplus_keys))}"
    else:
        return
    raise ValueError(
        f"{index.path}: the checkpoint was saved with another policy or optimizer "
        f"(megatron.ddp.use_distributed_optimizer): {problem}"
    )


def _first_of_all_ranks(text: str) -> str:
    """Return the text of the lowest rank whose text is not empty, cut to _TEXT bytes, or "". Every rank must call
    this."""
    padded = bytearray(text.encode()[:_TEXT].ljust(_TEXT, b"\0"))  # all_gather needs the same length on every rank
    text_bytes = torch.frombuffer(padded, dtype=torch.uint8).to(device())
    received = [torch.empty_like(text_bytes) for _ in range(dist.get_world_size())]
    dist.all_gather(received, text_bytes)
    texts = (bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace") for tensor in received)
    return next(filter(None, texts), "")


def _first_failure(index: CheckpointIndex, failed: CheckpointException) -> BaseException:
    failure = failed.failures[min(failed.failures)][0]
    if isinstance(failure, KeyError | CheckpointingException):
        return ValueError(f"{index.path}: the checkpoint does not fit this policy: {printable(str(failure))}")
    if isinstance(failure, ValueError | OSError):
        return failure
    return failed


def _common(index: CheckpointIndex) -> dict[str, Any]:
    """The state that Megatron saves once for all ranks.

    Megatron-Core 0.16 and earlier write the state to the file common.pt, later versions to an object of the index.
    """
    place = index.objects.get(COMMON_OBJECT)
    if place is None:
        with open_plain(index.path, COMMON) as file:
            place = ByteRange(COMMON, 0, file.seek(0, os.SEEK_END))
        states = [read_value(index.path, place, COMMON)]
    else:
        states = read_object(index.path, place, COMMON_OBJECT)
    if type(states) is not list or [type(state) for state in states] != [dict]:
        raise ValueError(f"{index.path}: the checkpoint is damaged: Megatron's common state is not a single dict")
    return dict(states[0])


@contextlib.contextmanager
def _read_with(reader: FileSystemReader) -> Iterator[None]:
    """Context manager in which Megatron's strategy (strategies/torch.py, `load`) uses `reader` in place of a
    FileSystemReader."""
    original_reader = torch_strategies._get_filesystem_reader
    torch_strategies._get_filesystem_reader = lambda *_, **__: reader
    try:
        yield
    finally:
        torch_strategies._get_filesystem_reader = original_reader


class _Reader(FileSystemReader):
    """Reads the items of a load plan from the files of a checkpoint. names: names that pickles may use."""

    def __init__(self, index: CheckpointIndex, names: Sequence[Any]):
        super().__init__(index.path)
        self._folder = index.path
        self._names = names
        self._metadata = Metadata(state_dict_metadata={}, storage_data={})
        # torch's planner looks up a chunk by key and offset, and an object by the key alone.
        for key, tensor in index.tensors.items():
            self._metadata.state_dict_metadata[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in tensor.chunks],
            )
            self._metadata.storage_data |= {MetadataIndex(key, chunk.offset): chunk for chunk in tensor.chunks}
        for key, place in index.objects.items():
            self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
            self._metadata.storage_data[MetadataIndex(key)] = place

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        for item in plan.items:
            stored = self._metadata.storage_data[item.storage_index]
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                _set(planner, item.dest_index.fqn, read_object(self._folder, stored, key, self._names))
            else:
                self._copy(stored, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _copy(self, chunk: Chunk, item: ReadItem, planner: Any) -> None:
        key = item.storage_index.fqn
        tensor = read_tensor(self._folder, chunk.place, f"the tensor {key}")
        if tuple(tensor.shape) != chunk.shape:
            shapes = f"the stored shape is {list(tensor.shape)}, but .metadata says {list(chunk.shape)}"
            raise ValueError(f"{self._folder / chunk.place.file}: {key}: {shapes}")
        for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            tensor = tensor.narrow(axis, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _set(planner: Any, key: str, value: list[Any]) -> None:
    """Store an object in the planner, as the planner's load_bytes does after torch.load."""
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], value)
    else:
        planner.state_dict[key] = value
