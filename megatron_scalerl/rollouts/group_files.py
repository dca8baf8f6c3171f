"""Every finished group in RUN/rollouts, in each of its formats: segments and Parquet.

A group is listed with what selects it, and read when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_scalerl.batching.rollout_bytes import rollout_of
from megatron_scalerl.rollouts.store import read_arrays, scan, segment_path, segments, stored_header
from megatron_scalerl.types import BlockRef


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedGroup:
    """One finished group of a run."""

    group_id: int
    step: int | None
    """Optimizer step that trained it, if its file says so."""
    interrupted: bool
    """True if the thinking of one of its completions was interrupted."""
    read: Callable[[], dict[str, Any]]
    """The group as `types.RolloutGroup` has it: group_id, epoch, prompt, scores, and rollouts with token ids,
    versions and loss mask. Raises ValueError for a damaged file."""


def listed_groups(run_dir: Path) -> Iterator[ListedGroup]:
    """Every group; of several with the same id the later counts. Raises ValueError, naming the file, for damage.

    What is being written at the end of the newest file does not count.
    """
    folder = run_dir / "rollouts"
    if not folder.is_dir():
        raise ValueError(f"{run_dir}: expected a run folder with rollouts, found none")
    for path in sorted(folder.glob("*.parquet")):
        yield from _of_parquet(path)
    numbers = segments(folder)
    for number in numbers:
        yield from _of_segment(segment_path(folder, number), newest=number == numbers[-1])


def _of_segment(path: Path, *, newest: bool) -> Iterator[ListedGroup]:
    places = scan(path)
    while True:
        try:
            stored, head = next(places)
        except StopIteration:
            return
        except ValueError:
            if newest:
                return
            raise
        yield ListedGroup(
            group_id=head.group_id,
            step=None,
            interrupted=any(c.interrupted for c in stored_header(head).completions),
            read=partial(stored_group, path, stored),
        )


def stored_group(path: Path, stored: BlockRef) -> dict[str, Any]:
    """The group at this place of a segment, as `ListedGroup.read` gives it. Raises as `store.read_block`."""
    group, completions = read_arrays(path, stored)
    header = group.header
    rollouts = map(rollout_of, completions)
    return {
        "group_id": group.group_id,
        "epoch": header.epoch,
        "prompt": asdict(header.prompt),
        "rollouts": [asdict(rollout) for rollout in rollouts],
        "scores": [asdict(score) for score in header.scores],
    }


def kept_group(folder: Path, group_id: int, stored: BlockRef) -> dict[str, Any] | None:
    """The group that was written at this place in RUN/rollouts, from its segment or what retention made of it.

    As `ListedGroup.read` gives it; None if retention has deleted it. Raises ValueError naming the file for damage.
    """
    path = segment_path(folder, stored.segment)
    if path.is_file():
        return stored_group(path, stored)
    path = path.with_suffix(".parquet")
    found = _of_parquet(path) if path.is_file() else iter(())
    return next((each.read() for each in found if each.group_id == group_id), None)


def _of_parquet(path: Path) -> Iterator[ListedGroup]:
    from megatron_scalerl.rollouts import parquet  # pyarrow: only where there are such files

    for group_id, step, interrupted in parquet.list_groups(path):
        read = partial(parquet.read_group, path, group_id)
        yield ListedGroup(group_id=group_id, step=step, interrupted=interrupted, read=read)
