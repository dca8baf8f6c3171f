"""Checks of the space that a run needs on a node's disks and in shared memory."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.cluster.check import GIB, MIB, Check, failed, guarded, ok, size, skipped, warning
from megatron_scalerl.recipe import Recipe

SHM = Path("/dev/shm")
SHM_BYTES = GIB
"""Free shared memory that an engine of several processes and NCCL need on a node. An assumption."""
SHM_LEAST = 64 * MIB
"""What Docker gives a container: too little for both."""
TEMPORARY_BYTES = GIB
"""Free space for rendezvous files and compilers in the temporary folder. An assumption."""
STATE_BYTES = {"float32": 12, "bfloat16": 14}
"""Bytes of a checkpoint per parameter by policy.dtype: weights, fp32 main weights if they are others, two moments."""
_TOKEN_BYTES = 8
"""Of a stored completion, per token (docs/runs.md)."""


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """The space that a run's folder takes. Produced by `disk_need`."""

    checkpoints: int
    """Bytes of the checkpoints that are kept and of the one that is written before the oldest is deleted."""
    rollouts: int
    """Bytes of all completions at their longest; 0 if the recipe deletes or rewrites them."""
    assumed: str
    """How both were computed."""


def disk_need(recipe: Recipe, parameters: int) -> DiskNeed:
    """The space for a run of a policy with `parameters` parameters."""
    count, each = recipe.checkpoint.keep + 1, parameters * STATE_BYTES[recipe.policy.dtype]
    per_batch = recipe.rollouts.groups_per_batch * recipe.rollouts.group_size
    tokens = recipe.steps * per_batch * recipe.max_completion_tokens
    rollouts = tokens * _TOKEN_BYTES if recipe.checkpoint.rollouts == "keep" else 0
    text = f"{count} checkpoints of {parameters / 1e6:,.1f}M parameters x {STATE_BYTES[recipe.policy.dtype]} bytes"
    if rollouts:
        text += f", rollouts of {recipe.steps:,} steps at most {size(rollouts)}"
    return DiskNeed(checkpoints=count * each, rollouts=rollouts, assumed=text)


def output_space(place: Path, run_dir: Path, need: DiskNeed | str) -> Check:
    """Free space of the output folder. need: or why it is unknown. Raises OSError."""
    name, free = "output folder: space", _free(place)
    if isinstance(need, str):
        return skipped(name, f"{size(free)} free; what the run needs is unknown: {need}")
    held = {part: _bytes_in(run_dir / part) for part in ("checkpoints", "rollouts")}
    checkpoints = max(0, need.checkpoints - held["checkpoints"])
    rollouts = max(0, need.rollouts - held["rollouts"])
    found = f"{size(free)} free ({need.assumed})"
    if free < checkpoints:
        remedy = "choose an output_dir with more space, or a smaller checkpoint.keep"
        return failed(name, expected=f"{size(checkpoints)} for checkpoints", found=found, remedy=remedy)
    if free < checkpoints + rollouts:
        remedy = "set checkpoint.rollouts to resume or parquet, or watch the disk: a full one stops the run"
        expected = f"{size(checkpoints + rollouts)} if all completions have their full length"
        return warning(name, expected=expected, found=found, remedy=remedy)
    return ok(name, found)


def node_space() -> list[Check]:
    """Temporary folder and shared memory."""
    return [
        guarded("temporary folder", lambda: temporary_space(Path(tempfile.gettempdir()))),
        guarded("shared memory", lambda: shared_memory(SHM)),
    ]


def temporary_space(folder: Path) -> Check:
    """Free space and permission to write. Raises OSError."""
    name, free, remedy = "temporary folder", _free(folder), "set TMPDIR to a folder of this node with space"
    found = f"{folder}: {size(free)} free"
    if not os.access(folder, os.W_OK | os.X_OK):
        return failed(name, expected="a folder that can be written", found=f"{folder}", remedy=remedy)
    if free < TEMPORARY_BYTES:
        make = failed if free < TEMPORARY_BYTES // 16 else warning
        return make(name, expected=f"{size(TEMPORARY_BYTES)} (assumed)", found=found, remedy=remedy)
    return ok(name, found)


def shared_memory(folder: Path) -> Check:
    """Size of /dev/shm and what is free of it. Raises OSError."""
    name, status = "shared memory", os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    found = f"{folder}: {size(free)} free of {size(status.f_blocks * status.f_frsize)}"
    if free < SHM_BYTES:
        make = failed if free <= SHM_LEAST else warning
        remedy = "in a container --ipc=host or --shm-size; elsewhere see what fills it"
        return make(name, expected=f"{size(SHM_BYTES)} free (assumed)", found=found, remedy=remedy)
    return ok(name, found)


def _free(folder: Path) -> int:
    """Bytes that this user may write; quotas are not seen."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
