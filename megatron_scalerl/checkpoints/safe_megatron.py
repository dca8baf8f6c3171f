"""Megatron's own load of a checkpoint, with a reader that runs none of its content: the same planning and resharding.

`load` takes the steps of `dist_checkpointing.load`. The common state is read as plain values, or not at all. For
everything else Megatron's strategy runs with our reader instead of torch's FileSystemReader. Every byte is read once,
so the bytes that are checked are the bytes that are used.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron_scalerl.checkpoints.plain_files import PlainFile
from megatron_scalerl.checkpoints.safe_index import (
    COMMON,
    COMMON_OBJECT,
    ByteRange,
    CheckpointIndex,
    Chunk,
    StoredTensor,
    read_index,
)
from megatron_scalerl.checkpoints.safe_pickles import printable
from megatron_scalerl.checkpoints.safe_values import read_object, read_tensor, read_value
from megatron_scalerl.distributed.device import device

_TEXT = 4096
"""Bytes of what a rank says of its failure."""


def load(wanted: dict[str, Any], path: Path, *, common: bool) -> dict[str, Any]:
    """`dist_checkpointing.load(wanted, path)` without unpickling. Every rank must call it.

    With `common` the result also has the state that Megatron saves once for all ranks, which must be plain values,
    and `wanted` has to name every tensor; without, common.pt is not opened. Raises ValueError, on every rank, for a
    folder of another format, one that lacks a part of `wanted`, and for a part with content that is not allowed.
    """
    index = read_index(path)
    state = _common(index) if common else {}
    sharded, own, factories = load_preprocess(wanted)
    merge(state, own)
    sharded, _ = extract_sharded_base(sharded)
    of_ranks = determine_global_metadata(sharded)[1]
    validate_sharding_integrity(of_ranks)
    _check_parts(index, {part.key for rank in of_ranks for part in rank if isinstance(part, ShardedTensor)}, common)
    failure: BaseException | None = None
    try:
        with _read_with(_Reader(index)):
            merge(state, torch_strategies.TorchDistLoadShardedStrategy().load(sharded, path))
    except (CheckpointException, CheckpointingException, ValueError, KeyError, RuntimeError, OSError) as error:
        # torch's planner raises the first for a failure of any rank; since Megatron-Core 0.17 it asks only this one
        failure = _first_failure(index, error) if isinstance(error, CheckpointException) else error
    said = _first_of_all_ranks("" if failure is None else str(failure) or repr(failure))
    if failure is None and said:
        failure = ValueError(said)
    if failure is not None:
        raise failure from None
    loaded: dict[str, Any] = apply_factory_merges(state, factories)
    return loaded


def _check_parts(index: CheckpointIndex, wanted: set[str], whole: bool) -> None:
    """Raises ValueError where `wanted` names a tensor that is not there or, with `whole`, not all that are."""
    stored = set(index.tensors)
    if lacks := wanted - stored:
        problem = f"it has no {printable(min(lacks))}"
    elif whole and (more := stored - wanted):
        problem = f"this trainer has no {printable(min(more))}"
    else:
        return
    raise ValueError(
        f"{index.path}: the checkpoint is of another policy or optimizer "
        f"(megatron.ddp.use_distributed_optimizer): {problem}"
    )


def _first_of_all_ranks(text: str) -> str:
    """The text of the first rank that has one, at most _TEXT bytes of it; "" if none has. Collective."""
    own = torch.frombuffer(bytearray(text.encode()[:_TEXT].ljust(_TEXT, b"\0")), dtype=torch.uint8).to(device())
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    texts = (bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in everyone)
    return next(filter(None, texts), "")


def _first_failure(index: CheckpointIndex, failed: CheckpointException) -> BaseException:
    failure = failed.failures[min(failed.failures)][0]
    if isinstance(failure, KeyError | CheckpointingException):
        return ValueError(f"{index.path}: the checkpoint is not one of this policy: {printable(str(failure))}")
    return failure if isinstance(failure, ValueError | OSError) else failed


def _common(index: CheckpointIndex) -> dict[str, Any]:
    """The state that Megatron saves once for all ranks, as plain values.

    Up to Megatron-Core 0.16 it is a file, common.pt, later one object among the others.
    """
    if (item := index.objects.get(COMMON_OBJECT)) is not None:
        with PlainFile(index.path, item.file) as file:
            [found] = read_object(file, COMMON_OBJECT, item)
            where = f"{file.path}: {COMMON_OBJECT}"
    else:
        with PlainFile(index.path, COMMON) as file:
            found, where = read_value(file, 0, file.size), str(file.path)
    if type(found) is not dict:
        raise ValueError(f"{where}: the common state is a {type(found).__name__}, not a dictionary")
    return found


@contextlib.contextmanager
def _read_with(reader: StorageReader) -> Iterator[None]:
    """Inside the block Megatron's strategy (strategies/torch.py, `load`) uses `reader`, not its FileSystemReader."""
    kept = torch_strategies._get_filesystem_reader
    torch_strategies._get_filesystem_reader = lambda *_, **__: reader
    try:
        yield
    finally:
        torch_strategies._get_filesystem_reader = kept


class _Reader(StorageReader):
    """Reads the items of a load plan from the files of a checkpoint."""

    def __init__(self, index: CheckpointIndex):
        self._index = index
        self._ranges: dict[MetadataIndex, ByteRange] = {}
        self._metadata = Metadata(state_dict_metadata={}, storage_data=self._ranges)
        for key, tensor in index.tensors.items():
            self._metadata.state_dict_metadata[key] = _described(tensor)
            self._ranges |= {MetadataIndex(key, torch.Size(c.offset)): c for c in tensor.chunks}
        for key, item in index.objects.items():
            self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
            self._ranges[MetadataIndex(key)] = item

    def read_metadata(self) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self._ranges[item.storage_index].file].append(item)
        for name, items in by_file.items():
            with PlainFile(self._index.path, name) as file:
                for item in sorted(items, key=lambda item: self._ranges[item.storage_index].start):
                    self._read(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: PlainFile, item: ReadItem, planner: Any) -> None:
        stored, key = self._ranges[item.storage_index], item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            _set(planner, item.dest_index.fqn, read_object(file, key, stored))
            return
        tensor = read_tensor(file, stored.start, stored.length, f"the tensor {key}")
        assert isinstance(stored, Chunk)
        if tuple(tensor.shape) != stored.shape:
            raise ValueError(
                f"{file.path}: {key}: its shape is {list(tensor.shape)}, and .metadata says {list(stored.shape)}"
            )
        for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            tensor = tensor.narrow(axis, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Keeps no state between loads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """The index has everything already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
        size=torch.Size(tensor.shape),
        chunks=[ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in tensor.chunks],
    )


def _set(planner: Any, key: str, value: list[Any]) -> None:
    """Stores an object as the planner's load_bytes does after its torch.load."""
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], value)
    else:
        planner.state_dict[key] = value
