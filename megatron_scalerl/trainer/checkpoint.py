"""Saving and resuming the trainer through Megatron's distributed checkpoints (torch_dist).

A checkpoint holds the policy, or the adapters alone of a policy with adapters, the optimizer in the fully reshardable
form, the RNG states of every rank, the step, and the controller's state as JSON. A checkpoint can be loaded under
another tensor, pipeline, context or data parallel size; the RNG then keeps the seed of a new run, since the states
belong to different ranks. `checkpoints.commit` says which folders are complete.

The life of a checkpoint:

1. All ranks make the state, in which Megatron knows each shard's place; rank 0 empties the folder.
2. A thread of each rank writes the rank's files, after `begin_save` from a copy in host memory.
3. `finish`, a collective call between two of the trainer's commands, commits the checkpoint: rank 0 writes the index,
   the controller's state, and the commit file last.
"""

import contextlib
import errno
import json
import os
import random
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from megatron_scalerl.checkpoints import safe_megatron
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import discard, read_commit, write_commit
from megatron_scalerl.distributed.parallel import Parallel, unwrap
from megatron_scalerl.trainer.model import load_chunks, sharded_models
from megatron_scalerl.trainer.optimizer_state import gathered_with_few_copies, live_storages
from megatron_scalerl.trainer.shard_writer import ShardWriting, writing_in_process
from megatron_scalerl.trainer.step import Trainer

EXTRA = "controller.json"
"""Name of the file with the controller's state."""


def save(path: str | Path, trainer: Trainer, extra: dict[str, Any]) -> None:
    """Write and commit a checkpoint at `path`, and replace an existing one. Collective.

    `extra` is JSON data. Only rank 0's is written.
    """
    begin_save(path, trainer, extra, copied=False).finish(wait=True)


def begin_save(
    path: str | Path, trainer: Trainer, extra: dict[str, Any], *, copied: bool = True
) -> "CheckpointWriting":
    """Copy the state to host memory, and start to write a checkpoint. The copy has the size of this rank's files.

    copied: False if the trainer makes no step before `finish`. State that is already in host memory is then not
    copied.
    """
    state = _sharded_state(trainer, loading=False, generators=True)
    live = live_storages(_inside_ddp(trainer.chunks), trainer.optimizer) if copied else set[int]()
    return CheckpointWriting(path, state, trainer.parallel, {"step": trainer.steps_made}, extra, live)


def save_policy(path: str | Path, chunks: Sequence[Any], parallel: Parallel) -> None:
    """Write and commit a checkpoint of the weights alone, to be exported. Collective."""
    CheckpointWriting(path, sharded_models(_inside_ddp(chunks)), parallel, {}, None, set()).finish(wait=True)


class CheckpointWriting:
    """A checkpoint that is being written while the trainer goes on. All calls are collective."""

    def __init__(
        self,
        path: str | Path,
        state: dict[str, Any],
        parallel: Parallel,
        facts: dict[str, Any],
        extra: dict[str, Any] | None,
        live: Set[int],
    ):
        """Start to write the checkpoint.

        facts: content of the commit file. extra: the controller's state. live: addresses of the memory that the next
        steps change, which is copied first.
        """
        self._path = Path(path)
        self._parallel = parallel
        self._facts = facts
        self._extra = extra
        if parallel.rank == 0:
            discard(self._path)
            self._path.mkdir(parents=True)
        dist.barrier()
        # Inside `writing_in_process` Megatron only prepares the files. `ShardWriting` starts the thread.
        with writing_in_process():
            request = dist_checkpointing.save(state, str(self._path), async_sharded_save=True, async_strategy="mcore")
            self._writing = ShardWriting(request, live)

    def finish(self, *, wait: bool) -> float | None:
        """Commit the checkpoint, and return the seconds for which the slowest rank wrote.

        Without `wait` the call returns None if a rank still writes. Raises on every rank if a rank could not write a
        file: OSError for a full disk, else CheckpointException.
        """
        if wait:
            self._writing.wait()
        # One reduction computes two minima. The minimum of the negative seconds is that of the slowest rank.
        progress = torch.tensor([self._writing.done, -self._writing.seconds], device=self._parallel.device)
        dist.all_reduce(progress, op=dist.ReduceOp.MIN)
        all_done, seconds = progress.tolist()
        if not all_done:
            return None
        with _naming_full_disk(self._path):
            self._writing.complete()
        if self._parallel.rank == 0:
            # The commit file comes last, because a folder without one counts as never written.
            if self._extra is not None:
                write_durably(self._path / EXTRA, json.dumps(self._extra).encode())
            write_commit(self._path, {**self._facts, "layout": _layout(self._parallel)})
        dist.barrier()
        return -seconds


@contextlib.contextmanager
def _naming_full_disk(path: Path) -> Iterator[None]:
    """Context that turns Megatron's report of a full disk into an OSError with the path.

    Megatron's report would contain every rank's traceback.
    """
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            for code in (errno.ENOSPC, errno.EDQUOT):
                if f"[Errno {code}]" in str(cause):
                    raise OSError(code, os.strerror(code), str(path)) from None
        raise


def load(path: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Resume from the checkpoint at `path`, and return the `extra` of the save. Collective.

    Raises ValueError, which names the file, for a folder that is not committed, that lacks a file, or that belongs to
    another policy, optimizer or expert-parallel size. Nothing is then loaded. Raises ValueError also for a part that
    `safe_megatron` refuses; the trainer may then have loaded other parts.
    """
    path = Path(path)
    facts = read_commit(path)
    saved = facts["layout"]
    layout = _layout(trainer.parallel)
    if saved["ep_size"] != layout["ep_size"]:
        raise ValueError(
            f"{path}: the checkpoint was saved with megatron.parallel.expert_model_parallel_size {saved['ep_size']}, "
            f"but this run has {layout['ep_size']}; set the size of the checkpoint (only tensor, pipeline, "
            "context and data-parallel sizes may change)"
        )
    same_layout = saved == layout
    # The engines' weights may differ from the loaded weights anywhere: the recorded changes do not say where.
    trainer.changes.written.lose()
    state = safe_megatron.load(_sharded_state(trainer, loading=True, generators=same_layout), path, common=True)
    load_chunks(_inside_ddp(trainer.chunks), state)
    trainer.optimizer.load_state_dict(state["optimizer"])
    if same_layout:
        _set_generators(state["generators"])
    trainer.steps_made = int(facts["step"])
    return json.loads((path / EXTRA).read_text(encoding="utf8"))


def _sharded_state(trainer: Trainer, *, loading: bool, generators: bool) -> dict[str, Any]:
    """The sharded state that Megatron saves or, with `loading`, the template that Megatron fills."""
    adapters = unwrap(trainer.chunks[0]).adapters is not None
    state = sharded_models(_inside_ddp(trainer.chunks), adapters=adapters)
    groups = trainer.parallel.groups
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": groups.dp_cp,
    }
    # Megatron's optimizers take the state of a single chunk without a key, and the states of several chunks by key.
    models = state.get("model", state)
    with gathered_with_few_copies(trainer.optimizer):
        state["optimizer"] = trainer.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)
    if generators:
        generator_states = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "tensor_parallel": {name: s.clone() for name, s in get_cuda_rng_tracker().get_states().items()},
        }
        shape = (trainer.parallel.world_size,)
        state["generators"] = ShardedObject("generators", generator_states, shape, (trainer.parallel.rank,))
    return state


def _inside_ddp(chunks: Sequence[Any]) -> list[Any]:
    return [chunk.module for chunk in chunks]


def _layout(parallel: Parallel) -> dict[str, int]:
    names = ("world_size", "tp_size", "pp_size", "ep_size", "etp_size", "dp_size", "cp_size")
    return {name: getattr(parallel, name) for name in names}


def _set_generators(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tensor_parallel"])
