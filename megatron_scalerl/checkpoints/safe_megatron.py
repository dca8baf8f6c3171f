"""Megatron's own load of a checkpoint, with a reader that runs none of its content: the same planning and resharding.

`load` takes the steps of `dist_checkpointing.load` of megatron-core 0.19.2:

1. `read_index` reads the index; `_common` reads the common state, if it is asked for.
2. Every rank says which tensors it wants; all ranks check them against the index (`_check_tensors`).
3. Megatron's strategy plans which chunks this rank reads. `_Reader` reads them in place of torch's FileSystemReader.
4. The ranks tell one another whether they failed, so that all of them raise.

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
"""Names of a run's own checkpoints: numpy's random number generator keeps its state in an array.

No other party's may use them: numpy takes the flags of a type, such as "holds objects", from a pickle as they are.
"""
_TEXT = 4096
"""Bytes of a rank's failure that the other ranks get."""


def load(wanted: dict[str, Any], path: Path, *, common: bool) -> dict[str, Any]:
    """`dist_checkpointing.load(wanted, path)` without unpickling. Every rank must call it.

    With `common`, for a run's own checkpoint, the result also has the state that Megatron saves once for all ranks,
    and `wanted` has to name every tensor; without, common.pt is not opened. Raises ValueError, on every rank, for a
    folder of another format, one that lacks a part of `wanted`, and for a part with content that is not allowed.
    """
    index = read_index(path)
    state = {}
    if common:
        state = _common(index)
    sharded, unsharded, factories = load_preprocess(wanted)
    merge(state, unsharded)
    sharded, _ = extract_sharded_base(sharded)
    metadata_of_ranks = determine_global_metadata(sharded)[1]
    validate_sharding_integrity(metadata_of_ranks)
    keys = {item.key for items in metadata_of_ranks for item in items if isinstance(item, ShardedTensor)}
    _check_tensors(index, keys, whole=common)
    failure: BaseException | None = None
    try:
        with _read_with(_Reader(index, _ARRAYS if common else [])):
            merge(state, torch_strategies.TorchDistLoadShardedStrategy().load(sharded, path))
    except (CheckpointException, CheckpointingException, ValueError, KeyError, RuntimeError, OSError) as error:
        failure = error
        # torch's planner raises it for a failure of any rank; since Megatron-Core 0.17 it asks only this one
        if isinstance(error, CheckpointException):
            failure = _first_failure(index, error)
    text = ""
    if failure is not None:
        text = str(failure) or repr(failure)
    # A rank without a failure learns of it here; otherwise it would wait for the others in the next collective.
    text = _first_of_all_ranks(text)
    if failure is not None:
        raise failure from None
    if text:
        raise ValueError(text)
    return apply_factory_merges(state, factories)


def _check_tensors(index: CheckpointIndex, wanted: set[str], *, whole: bool) -> None:
    """Raises ValueError if the checkpoint lacks a wanted tensor or, with `whole`, has a tensor that nobody wants."""
    missing = wanted - set(index.tensors)
    unwanted = set(index.tensors) - wanted
    if missing:
        problem = f"it has no {printable(min(missing))}"
    elif whole and unwanted:
        problem = f"this trainer has no {printable(min(unwanted))}"
    else:
        return
    raise ValueError(
        f"{index.path}: the checkpoint is of another policy or optimizer "
        f"(megatron.ddp.use_distributed_optimizer): {problem}"
    )


def _first_of_all_ranks(text: str) -> str:
    """The text of the first rank that has one, at most _TEXT bytes of it; "" if none has. Collective."""
    padded = bytearray(text.encode()[:_TEXT].ljust(_TEXT, b"\0"))  # a gather needs equal lengths
    sent = torch.frombuffer(padded, dtype=torch.uint8).to(device())
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    texts = (bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace") for tensor in received)
    return next(filter(None, texts), "")


def _first_failure(index: CheckpointIndex, failed: CheckpointException) -> BaseException:
    failure = failed.failures[min(failed.failures)][0]
    if isinstance(failure, KeyError | CheckpointingException):
        return ValueError(f"{index.path}: the checkpoint is not one of this policy: {printable(str(failure))}")
    if isinstance(failure, ValueError | OSError):
        return failure
    return failed


def _common(index: CheckpointIndex) -> dict[str, Any]:
    """The state that Megatron saves once for all ranks.

    Up to Megatron-Core 0.16 it is a file, common.pt, later one object among the others.
    """
    place = index.objects.get(COMMON_OBJECT)
    if place is None:
        with open_plain(index.path, COMMON) as file:
            place = ByteRange(COMMON, 0, file.seek(0, os.SEEK_END))
        states = [read_value(index.path, place, COMMON)]
    else:
        states = read_object(index.path, place, COMMON_OBJECT)
    if type(states) is not list or [type(state) for state in states] != [dict]:
        raise ValueError(f"{index.path}: its common state is not one mapping")
    return dict(states[0])


@contextlib.contextmanager
def _read_with(reader: FileSystemReader) -> Iterator[None]:
    """Context in which Megatron's strategy (strategies/torch.py, `load`) uses `reader`, not its FileSystemReader."""
    kept = torch_strategies._get_filesystem_reader
    torch_strategies._get_filesystem_reader = lambda *_, **__: reader
    try:
        yield
    finally:
        torch_strategies._get_filesystem_reader = kept


class _Reader(FileSystemReader):
    """Reads the items of a load plan from the files of a checkpoint, whose objects may use `names`."""

    def __init__(self, index: CheckpointIndex, names: Sequence[Any]):
        super().__init__(index.path)
        self._folder = index.path
        self._names = names
        self._metadata = Metadata(state_dict_metadata={}, storage_data={})
        # torch looks a chunk up by key and offset, an object by its key alone.
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
            shapes = f"its shape is {list(tensor.shape)}, and .metadata says {list(chunk.shape)}"
            raise ValueError(f"{self._folder / chunk.place.file}: {key}: {shapes}")
        for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            tensor = tensor.narrow(axis, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _set(planner: Any, key: str, value: list[Any]) -> None:
    """Stores an object as the planner's load_bytes does after its torch.load."""
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], value)
    else:
        planner.state_dict[key] = value
